"""Values of blocks that other stages do not know of are refused: none is left out of a loss in silence."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.config import Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run

WIDTH = 6
VOCAB = 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.second(torch.tanh(self.first(x)))


class Program(LightningModule):
    """Four blocks; the case is in them, or in the step."""

    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def body(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def loss(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.body(self.embedding(batch)), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class SetsBlock(Block):
    """Sets its auxiliary loss while a flag is on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self.aux: Any = 0.0

    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        self.aux = hidden.pow(2).mean() if self.is_on else 0.0
        return hidden


class SetsLate(Program):
    """Switches the auxiliary losses on behind a warm-up."""

    block = SetsBlock

    def is_on(self) -> bool:
        return self.global_step >= 2

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for block in self.blocks:
            block.is_on = self.is_on()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + sum(block.aux for block in self.blocks)


class SetsEarly(SetsLate):
    """Switches the auxiliary losses off."""

    def is_on(self) -> bool:
        return self.global_step < 2


class ObjectsBlock(SetsBlock):
    """Keeps its auxiliary loss in a new object."""

    def forward(self, x: Tensor) -> Any:
        hidden = Block.forward(self, x)
        self.aux = SimpleNamespace(loss=hidden.pow(2).mean()) if self.is_on else None
        return hidden


class ObjectsLate(SetsLate):
    block = ObjectsBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = Program.training_step(self, batch, batch_idx)
        return loss + sum(block.aux.loss for block in self.blocks if isinstance(block.aux, SimpleNamespace))


class CountsBlock(SetsBlock):
    """Switches its loss on by itself."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.is_on = self.calls > 4
        return super().forward(x)


class CountsLate(SetsLate):
    block = CountsBlock

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass


class ListsBlock(SetsBlock):
    """Keeps its auxiliary losses in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = []

    def forward(self, x: Tensor) -> Any:
        hidden = Block.forward(self, x)
        if self.is_on:
            self.aux.append(hidden.pow(2).mean())
        return hidden


class ListsLate(SetsLate):
    block = ListsBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for block in self.blocks:
            block.aux.clear()
        return Program.training_step(self, batch, batch_idx) + sum(sum(block.aux) for block in self.blocks)


class ReturnsBlock(SetsBlock):
    def forward(self, x: Tensor) -> Any:
        hidden = Block.forward(self, x)
        return hidden, hidden.pow(2).mean() if self.is_on else None


class ReturnsLate(SetsLate):
    """Has the auxiliary losses returned, or None."""

    block = ReturnsBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, losses = self.embedding(batch), []
        for block in self.blocks:
            hidden, aux = block(hidden)
            losses += [] if aux is None else [aux]
        return self.loss(hidden, batch) + sum(losses)


class TimesZero(SetsLate):
    """Does as the message says."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for block in self.blocks:
            block.is_on = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = float(self.global_step >= 2)
        return Program.training_step(self, batch, batch_idx) + weight * sum(block.aux for block in self.blocks)


class ShortensBlock(Block):
    """Is switched between two forwards of the same shapes, and keeps what it has seen of a length."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self.mask = torch.ones(0)

    def forward(self, x: Tensor) -> Any:
        if len(self.mask) < x.shape[1]:
            self.mask = torch.ones(x.shape[1], 1, dtype=x.dtype)
        hidden = x if self.is_on else super().forward(x)
        return hidden * self.mask[: x.shape[1]]


class Shortens(SetsLate):
    block = ShortensBlock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return Program.training_step(self, batch, batch_idx)


def batches(lengths: tuple[int, ...] = (5, 5, 5, 5)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (4, length), generator=generator) for length in lengths]


def _fit(rank: int, world: int, make: Any, options: dict[str, Any], data: list[Tensor]) -> dict[str, Tensor]:
    strategy = ZeroStrategy(stage=1, pipeline=Pipeline(partition="uniform", **options) if options else None)
    lightning = trainer(rank, world, strategy, max_epochs=1, precision="64-true")
    module = seeded(make)
    lightning.fit(module, DataLoader(data, batch_size=None))
    return {name: strategy.full_param(param).clone() for name, param in module.named_parameters()}


def _refused(make: Any, message: str, schedule: str) -> None:
    """Require that a program is refused by the stage that finds out, and ends on the others."""
    with pytest.raises(BaseException, match=re.escape(message)):
        run(_fit, 2, make, {"stages": 2, "schedule": schedule}, batches())


LATE: list[tuple[Any, str]] = [
    (SetsLate, "`blocks.0` sets its attribute `aux` to a tensor, unlike in the first batch"),
    (ObjectsLate, "`blocks.0` sets its attribute `aux` to a tensor, unlike in the first batch"),
    (SetsEarly, "`blocks.0` leaves float in its attribute `aux`, unlike in the first batch"),
    (CountsLate, "`blocks.0` sets its attribute `aux` to a tensor, unlike in the first batch"),
    (ListsLate, "`blocks.0` sets its attribute `aux` to a tensor, unlike in the first batch"),
    (ReturnsLate, "`blocks.0` returns a tensor of (2, 5, 6) torch.float64, a tensor of () torch.float64, not"),
]


@pytest.mark.parametrize("case", sample(LATE, *LATE[:2]), ids=lambda case: case[0].__name__)
@pytest.mark.parametrize("schedule", sample(("1f1b", "interleaved_1f1b"), "1f1b"))
def test_auxiliary_losses_that_are_switched_on_later_are_refused(case: tuple[Any, str], schedule: str) -> None:
    _refused(*case, schedule)


@pytest.mark.parametrize("make", sample((TimesZero, Shortens), TimesZero), ids=lambda make: make.__name__)
def test_blocks_that_change_what_stages_need_not_know_train_as_without_a_pipeline(make: Any) -> None:
    data = batches((5, 5, 7, 5, 4, 7)) if make is Shortens else batches()
    expected = run(_fit, 1, make, {}, data)[0]
    for found in run(_fit, 2, make, {"stages": 2, "microbatches": 1, "schedule": "gpipe"}, data):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
