"""Code around blocks that the program checkpoints trains in pipeline stages as without them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as _contexts

from lightning_zero.errors import PipelineError
from tests.contracts.test_pipeline_programs import Program, _fit, _pipeline
from tests.sampling import sample
from tests.worlds import run


class Recomputed(Program):
    """Checkpoints its blocks, all of them together or in halves, one by one or both, and its head.

    Args:
        how: Which of these.
        reentrant: The variant of PyTorch's.
        dropout: Probability, in blocks, in the head, and between them.
        checkpoint: The function that checkpoints.
    """

    def __init__(
        self, how: str, reentrant: bool = False, dropout: float = 0.0, checkpoint: Callable[..., Any] = checkpoint
    ) -> None:
        super().__init__()
        self.how, self.dropout = how, dropout
        self.checkpoint = partial(checkpoint, use_reentrant=reentrant)
        if dropout:
            self.net.blocks = nn.ModuleList(nn.Sequential(block, nn.Dropout(dropout)) for block in self.net.blocks)
            self.net.norm = nn.Sequential(self.net.norm, nn.Dropout(dropout))

    def _walk(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        for block in self.net.blocks[start:stop]:
            call: Any = partial(self.checkpoint, block) if self.how in ("each", "nested") else block
            hidden = F.dropout(call(hidden), self.dropout) * 0.9
        return hidden

    def _head(self, hidden: Tensor) -> Tensor:
        return self.net.head(self.net.norm(hidden))

    def _logits(self, ids: Tensor) -> Tensor:
        hidden = self.net.embedding(ids)
        if self.how in ("each", "whole"):
            return self._head(self._walk(hidden, 0, 4))
        for start, stop in ((0, 1), (1, 4)) if self.how == "parts" else ((0, 4),):
            hidden = self.checkpoint(self._walk, hidden, start, stop)
        return self.checkpoint(self._head, hidden)

    def logits(self, ids: Tensor) -> Tensor:
        return self.checkpoint(self._logits, ids) if self.how == "whole" else self._logits(ids)


def _plain(function: Any, *args: Any, use_reentrant: bool) -> Any:
    return function(*args)


HOWS = [("list", False), ("list", True), ("each", False), ("each", True), ("parts", False), ("nested", False)]
HOWS += [("nested", True), ("parts", True), ("whole", False)]
CUTS = ("2-stages", "4-stages", "interleaved")


@pytest.mark.parametrize("case", sample(HOWS, ("list", True)), ids=lambda case: "{}-{}".format(*case))
@pytest.mark.parametrize("cut", sample(CUTS, "2-stages"))
@pytest.mark.parametrize("zero", sample((1, 3), 3))
def test_checkpointed_code_around_blocks_trains_as_without_a_pipeline(case: Any, cut: str, zero: int) -> None:
    make = partial(Recomputed, *case)
    stages = 4 if cut == "4-stages" else 2
    schedule: Any = "interleaved_1f1b" if cut == "interleaved" else "1f1b"
    options = {**_pipeline(stages, schedule=schedule, partition="uniform", microbatches=4), "stage": zero}
    expected = run(_fit, 1, make, {"stage": 0}, {}, True)[0]
    for weights in run(_fit, stages, make, options, {}, True):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", sample(HOWS, ("nested", False)), ids=lambda case: "{}-{}".format(*case))
def test_a_recomputation_draws_the_numbers_of_its_forward(case: Any) -> None:
    """Modules have random numbers of their chunk, which PyTorch's checkpointing does not put back."""
    without = run(_fit, 2, partial(Recomputed, *case, 0.3, _plain), _pipeline(), {}, True)[0]
    for weights in run(_fit, 2, partial(Recomputed, *case, 0.3), _pipeline(), {}, True):
        for name, value in without.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


class Keeps(nn.Module):
    """Leaves a tensor in an attribute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        self.loss = hidden.square().mean()
        return self.layer(hidden)


class KeepsAttributes(Recomputed):
    def __init__(self) -> None:
        super().__init__("list")
        self.net.blocks = nn.ModuleList(Keeps(self.net.embedding.embedding_dim) for _ in range(4))


class WritesArgument(Recomputed):
    """A block writes into what it is given."""

    def __init__(self) -> None:
        super().__init__("list")
        self.net.blocks = nn.ModuleList(Writes(self.net.embedding.embedding_dim) for _ in range(4))


class Writes(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.layer(hidden.mul_(0.9)))


class Selective(Recomputed):
    """Saves the results of matrix products, and computes all else again."""

    def __init__(self) -> None:
        super().__init__("list", checkpoint=partial(checkpoint, context_fn=partial(_contexts, _save_products)))


def _save_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "mm" in str(operation) else CheckpointPolicy.PREFER_RECOMPUTE


REFUSED = [
    (Selective, "is called inside of `torch.utils.checkpoint.*context_fn"),
    (WritesArgument, "writes into an argument that"),
]
REFUSED += [(KeepsAttributes, "leaves tensors in its attributes")]


@pytest.mark.parametrize("case", sample(REFUSED, REFUSED[0], REFUSED[1]), ids=lambda case: case[0].__name__)
def test_a_recomputation_that_would_find_other_values_is_refused(case: Any) -> None:
    make, message = case
    with pytest.raises(PipelineError, match=message):
        run(_fit, 2, make, _pipeline(), {}, True)


class WithLoss(Recomputed):
    """Adds up auxiliary losses of its blocks inside of the checkpointed function; a case says how."""

    def __init__(self, reentrant: bool = False, checkpoint: Callable[..., Any] = checkpoint) -> None:
        super().__init__("list", reentrant, checkpoint=checkpoint)
        self.net.blocks = nn.ModuleList(self.make_block() for _ in range(4))

    def make_block(self) -> nn.Module:
        return Returns(self.net.embedding.embedding_dim)

    def walk(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def logits(self, ids: Tensor) -> Tensor:
        hidden, self.aux = self.checkpoint(self.walk, self.net.embedding(ids))
        return self._head(hidden)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        aux, self.aux = self.aux, None
        return loss + 0.1 * aux.mean()


class Returns(nn.Module):
    """Returns hidden states and a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Any:
        hidden = hidden + torch.tanh(self.layer(hidden))
        return hidden, hidden.square().mean((1, 2))  # of each sample, as micro-batches have them


class OfHidden(WithLoss):
    """Computes the losses between the blocks."""

    def walk(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        aux = hidden.new_zeros(len(hidden))
        for block in self.net.blocks:
            hidden, _ = block(hidden)
            aux = aux + hidden.pow(2).mean((1, 2))
        return hidden, aux


class OfPairs(WithLoss):
    """Adds in place what blocks return."""

    def walk(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        aux = hidden.new_zeros(len(hidden))
        for block in self.net.blocks:
            hidden, one = block(hidden)
            aux += one.exp()
        return hidden, aux


class Written(WithLoss):
    """Writes into what blocks return."""

    def walk(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        aux = hidden.new_zeros(len(hidden))
        for block in self.net.blocks:
            hidden, one = block(hidden)
            one.add_(1.0).mul_(2.0)
            aux = aux + one.square()
        return hidden, aux


class WrittenLater(WithLoss):
    """Writes into what blocks have returned, when it has been used."""

    def walk(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        ones = []
        for block in self.net.blocks:
            hidden, one = block(hidden)
            ones.append(one)
        aux = torch.stack(ones).square().sum(0)
        for one in ones:
            one.mul_(3.0)
        return hidden, aux + torch.stack(ones).pow(3).sum(0)


class OfSkips(WithLoss):
    """Uses what goes in at the end, and what the first block returns."""

    def walk(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        start = hidden
        found = []
        for block in self.net.blocks:
            hidden, one = block(hidden)
            found.append((hidden, one))
        return hidden * start.sigmoid(), (found[0][0] * start * found[-1][0]).mean((1, 2)) + found[1][1] * found[0][1]


class Named(Returns):
    """Returns a dictionary with what it was given."""

    def forward(self, hidden: Tensor, scale: Tensor) -> Any:
        hidden, loss = super().forward(hidden * scale)
        return {"hidden": hidden, "loss": loss, "scale": scale}


class OfDictionaries(WithLoss):
    """Changes the dictionaries that blocks return, and writes into arguments that they return."""

    def make_block(self) -> nn.Module:
        return Named(self.net.embedding.embedding_dim)

    def walk(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.full((), 0.9)
        aux = hidden.new_zeros(len(hidden))
        for block in self.net.blocks:
            found = block(hidden, scale)
            found["loss"] = found["loss"] * found.pop("scale").add(1.0)
            hidden = found["hidden"]
            aux = aux + found["loss"].square()
        return hidden, aux


class InTwo(WithLoss):
    """Checkpoints the first blocks in the checkpointed function, and the others behind it."""

    def part(self, hidden: Tensor, aux: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        for block in self.net.blocks[start:stop]:
            hidden, one = block(hidden)
            aux = aux + one.exp() * hidden.tanh().mean((1, 2))
        return hidden, aux

    def walk(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden, aux = self.checkpoint(self.part, hidden, hidden.new_zeros(len(hidden)), 0, 3)
        return self.part(hidden, aux * 2.0, 3, 4)


LOSSES = [OfHidden, OfPairs, Written, WrittenLater, OfSkips, OfDictionaries, InTwo]


@pytest.mark.parametrize("make", sample(LOSSES, OfHidden, Written), ids=lambda make: make.__name__)
@pytest.mark.parametrize("reentrant", sample((False, True), False), ids=("", "reentrant"))
@pytest.mark.parametrize("cut", sample(CUTS, "2-stages"))
@pytest.mark.parametrize("zero", sample((1, 3), 3))
def test_losses_of_blocks_inside_of_checkpointed_code_are_recomputed(
    make: Any, reentrant: bool, cut: str, zero: int
) -> None:
    """Ended in PyTorch's ``CheckpointError``, because modules of other stages were imagined inside of the function."""
    stages = 4 if cut == "4-stages" else 2
    schedule: Any = "interleaved_1f1b" if cut == "interleaved" else "1f1b"
    options = {**_pipeline(stages, schedule=schedule, partition="uniform", microbatches=4), "stage": zero}
    expected = run(_fit, 1, partial(make, reentrant), {"stage": 0}, {}, True)[0]
    for weights in run(_fit, stages, partial(make, reentrant), options, {}, True):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)
