"""Refusals of programs that are common name the cause and a remedy that helps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.config import Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_pipeline_late_values import Program, batches
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run

PLAIN = {"stages": 2, "microbatches": 1, "schedule": "gpipe"}


class GrowingLength(Program):
    """Cuts its batch to a length that grows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[:, : 3 + self.current_epoch], batch_idx)


class DeepSupervision(Program):
    """Has heads between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(6, 11) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, losses = self.embedding(batch), []
        for block, head in zip(self.blocks, self.heads, strict=True):
            hidden = block(hidden)
            losses.append(F.cross_entropy(head(hidden).flatten(0, 1), batch.flatten()))
        return torch.stack(losses).sum()


class Alternates(Program):
    """Regularises another hidden state in every batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = [self.embedding(batch)]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        return self.loss(hidden[-1], batch) + hidden[1 + self.global_step % 4].pow(2).mean()


class ChecksFinite(Program):
    def body(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
            assert torch.isfinite(hidden).all()
        return hidden


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(logits.flatten(0, 1) * self.temperature, labels.flatten(), ignore_index=0)


class CriterionWithBuffers(Criterion):
    """Follows the hidden states in its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("smallest", torch.full((), torch.inf))
        self.register_buffer("number", torch.zeros((), dtype=torch.long))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.get_buffer("number").add_(1)
        self.get_buffer("smallest").clamp_(max=logits.detach().abs().max())
        return super().forward(logits, labels)


class OwnCriterion(Program):
    """Has a loss with a parameter, a mean over labels whose number differs between micro-batches."""

    def __init__(self, make: type[Criterion] = Criterion) -> None:
        super().__init__()
        self.criterion = make()

    def loss(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self.criterion(self.head(hidden), ids * (ids > 6))


def _fit(rank: int, world: int, make: Any, options: dict[str, Any]) -> Any:
    strategy = ZeroStrategy(stage=1, pipeline=Pipeline(partition="uniform", **options) if options else None)
    module = seeded(make)
    trainer(rank, world, strategy, max_epochs=2, precision="64-true").fit(
        module, DataLoader(batches(), batch_size=None)
    )
    return {name: strategy.full_param(param).clone() for name, param in module.named_parameters()}


REFUSED = (
    (GrowingLength, "a curriculum\\), cut it in `collate_fn`"),
    (DeepSupervision, "`heads.0` is called between `blocks.[01]` and `blocks.2`, the first block .* after the last"),
    (Alternates, "use all of them in every batch, multiplied by zero"),
    (ChecksFinite, "it reads a number .* leave a check out"),
)


@pytest.mark.parametrize("case", sample(REFUSED, *REFUSED), ids=lambda case: case[0].__name__)
def test_refusals_say_what_to_do(case: tuple[Any, str]) -> None:
    with pytest.raises(BaseException, match=case[1]):
        run(_fit, 2, case[0], PLAIN)


def _fit_with_buffers(rank: int, world: int) -> Any:
    module = seeded(partial(OwnCriterion, CriterionWithBuffers))
    pipeline = Pipeline(stages=2, microbatches=2, schedule="1f1b")
    fitted = trainer(rank, world, ZeroStrategy(stage=1, pipeline=pipeline), max_epochs=2)
    fitted.fit(module, DataLoader(batches(), batch_size=None))
    number, smallest = (module.criterion.get_buffer(name).item() for name in ("number", "smallest"))
    return number / fitted.global_step, 0 < smallest < torch.inf


def test_buffers_of_a_loss_in_a_module_with_parameters_do_not_see_a_survey() -> None:
    """It was refused, and zeros went into running statistics before."""
    assert run(_fit_with_buffers, 2)[1] == (2, True)


def test_the_elements_of_a_loss_in_a_module_with_parameters_are_counted() -> None:
    """It was refused with two micro-batches, because a survey does not compute such a module."""
    expected = run(_fit, 1, OwnCriterion, {})[0]
    for found in run(_fit, 2, OwnCriterion, {"stages": 2, "microbatches": 2, "schedule": "1f1b"}):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
