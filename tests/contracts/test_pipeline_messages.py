"""What stages send each other: gradients that do not exist, and layouts of memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_pipeline_programs import Program, _fit, _loader, _pipeline
from tests.lightning_programs import seeded, trainer
from tests.references import VOCAB
from tests.sampling import sample
from tests.worlds import run

# -- Gradients that do not exist ---------------------------------------------------------------------------------------


class Gated(nn.Module):
    """Hands on an auxiliary loss, of which alone its gate is a part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gate = nn.Linear(width, 1)

    def forward(self, x: Tensor, auxiliary: Tensor) -> tuple[Tensor, Tensor]:
        self.loss = self.gate(x).square().mean()
        return x + self.linear(x), auxiliary + self.loss


class Auxiliary(Program):
    """Uses its auxiliary loss in no batch, in some, or to log it."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.net.blocks = nn.ModuleList(Gated(self.net.embedding.embedding_dim) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden, auxiliary = self.net.embedding(batch[0]), torch.zeros(())
        for block in self.net.blocks:
            hidden, auxiliary = block(hidden, auxiliary)
        loss = F.cross_entropy(self.net.head(hidden).flatten(0, 1), batch[1].flatten())
        if self.use == "logged":
            self.log("auxiliary", auxiliary)
            self.log("of_first", self.net.blocks[0].loss)
        if self.use == "early" and batch_idx < 2:
            loss = loss + auxiliary
        if self.use == "attribute":
            loss = loss + self.net.blocks[0].loss
        return loss


@pytest.mark.parametrize("use", ["unused", *sample(["logged", "early", "attribute"], "early")])
@pytest.mark.parametrize("zero", sample((0, 1, 2, 3), 1))
@pytest.mark.parametrize("cut", sample([(2, "1f1b"), (2, "zb_h1"), (2, "interleaved_1f1b"), (4, "gpipe")], (2, "1f1b")))
def test_what_no_loss_uses_is_neither_decayed_nor_moved(use: str, zero: int, cut: Any) -> None:
    """A stage got a gradient of zeros for what it had sent: AdamW let its gates decay."""
    stages, schedule = cut
    make = partial(Auxiliary, use)
    expected = run(_fit, 1, make, {"stage": 0}, {}, True)[0]
    options = {**_pipeline(stages, schedule=schedule, partition="uniform", microbatches=4), "stage": zero}
    for weights in run(_fit, stages, make, options, {}, True):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


# -- Layouts -----------------------------------------------------------------------------------------------------------


class Turned(nn.Embedding):
    """Returns what it computes with two dimensions exchanged in memory, as convolutions of patches do."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).transpose(1, 2).contiguous().transpose(1, 2)


class Keeps(nn.Module):
    """Returns what it was given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.0 * self.weight


class Noisy(Program):
    """Draws noise in the layout of an early value, adds it, and takes it away behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        width = self.net.embedding.embedding_dim
        self.net.embedding = Turned(VOCAB, width)
        self.net.blocks = nn.ModuleList(Keeps(width) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        start = self.net.embedding(batch[0])
        noise = torch.randn_like(start)
        hidden = start + noise
        for block in self.net.blocks:
            hidden = block(hidden)
        gap = (hidden - start - noise).abs().max() + float(start.stride() != noise.stride())
        self.log("gap", gap, reduce_fx="max", on_step=False, on_epoch=True)
        return self.net.head(hidden).square().mean()


def _gap(rank: int, world: int, schedule: str) -> float:
    strategy = ZeroStrategy(**_pipeline(schedule=schedule, microbatches=4))
    lightning = trainer(rank, world, strategy, max_epochs=1, log_every_n_steps=1)
    lightning.fit(seeded(Noisy), _loader(1, 0))
    return lightning.callback_metrics["gap"].item()


@pytest.mark.parametrize("schedule", sample(("1f1b", "interleaved_1f1b"), "1f1b"))
def test_noise_like_an_early_value_is_the_same_on_all_stages(schedule: str) -> None:
    """The value arrived contiguous, and `randn_like` draws in the order of memory."""
    assert max(run(_gap, 2, schedule)) < 1e-5


class Merges(nn.Module):
    """Takes its input for one whose exchanged dimensions lie in a row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        turned = x.transpose(1, 2)
        y = self.linear(turned.view(-1, turned.shape[-1])).view(turned.shape)
        return y.transpose(1, 2)


class Merged(Program):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(Merges(6) for _ in range(4))

    def logits(self, ids: Tensor) -> Tensor:
        hidden = self.net.embedding(ids).transpose(1, 2).contiguous().transpose(1, 2)
        for block in self.net.blocks:
            hidden = block(hidden)
        return self.net.head(hidden)


def test_blocks_find_the_layout_that_the_block_before_has_made() -> None:
    expected = run(_fit, 1, Merged, {"stage": 0}, {}, True)[0]
    for weights in run(_fit, 2, Merged, _pipeline(), {}, True):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)
