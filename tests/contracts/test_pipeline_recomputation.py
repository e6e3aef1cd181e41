"""Code around blocks that the program checkpoints trains in pipeline stages as without them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


REFUSED = [(WritesArgument, "writes into an argument that"), (KeepsAttributes, "leaves tensors in its attributes")]


@pytest.mark.parametrize("case", sample(REFUSED, REFUSED[0]), ids=lambda case: case[0].__name__)
def test_a_recomputation_that_would_find_other_values_is_refused(case: Any) -> None:
    make, message = case
    with pytest.raises(PipelineError, match=message):
        run(_fit, 2, make, _pipeline(), {}, True)
