"""Values that a step leaves in the module, and hooks between steps read, on all pipeline stages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.config import Pipeline
from lightning_zero.errors import PipelineError
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import Net, loader, trainer
from tests.sampling import sample
from tests.worlds import run


class Evaluates(Net):
    """Keeps something of every batch, and logs it at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = []

    def keep(self, output: Tensor, loss: Tensor) -> None:
        raise NotImplementedError

    def total(self) -> Any:
        return sum(self.kept)

    def drop(self) -> None:
        self.kept.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self(batch[0])
        self.keep(output, torch.nn.functional.mse_loss(output, batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.log("total", self.total())
        self.drop()


class ManyNumbers(Evaluates):
    def keep(self, output: Tensor, loss: Tensor) -> None:
        self.kept.extend(output.repeat(1, 100).flatten().tolist())


class Tensors(Evaluates):
    def keep(self, output: Tensor, loss: Tensor) -> None:
        self.kept.append(loss.detach())


class LargeTensors(Evaluates):
    def keep(self, output: Tensor, loss: Tensor) -> None:
        self.kept.append(output.repeat(1, 3000))

    def total(self) -> Any:
        return sum((one.sum() for one in self.kept), torch.zeros(()))


class DropsLargeTensors(LargeTensors):
    """The end of the epoch reads nothing."""

    def total(self) -> Any:
        return 1.0


class AssignsLargeTensors(DropsLargeTensors):
    def drop(self) -> None:
        self.kept = []


class Sums:
    def __init__(self) -> None:
        self.values: list[float] = []
        self.sum, self.n = 0.0, 0

    def add(self, value: float) -> None:
        self.values.append(value)
        self.sum += value
        self.n += 1


class AnObject(Evaluates):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Sums()

    def keep(self, output: Tensor, loss: Tensor) -> None:
        self.kept.add(float(loss))

    def total(self) -> Any:
        return self.kept.sum / self.kept.n + len(self.kept.values) + sum(self.kept.values)

    def drop(self) -> None:
        self.kept = Sums()


class ObjectsInAList(Evaluates):
    def keep(self, output: Tensor, loss: Tensor) -> None:
        self.kept.append(Sums())

    def total(self) -> Any:
        return float(len(self.kept))


class OfAnEarlierStage(Evaluates):
    """Logs a value of the first stage, which rank 0 has and the last stage has not."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.hidden = self.first(batch[0])
        x = self.hidden
        for block in self.blocks:
            x = block(x)
        self.last(x)

    def total(self) -> Any:
        return self.hidden.mean()


class Copies(LargeTensors):
    def total(self) -> Any:
        return float(len(copy.copy(self).kept))


class Graphs(Net):
    """As programs for Lightning 1 were moved to Lightning 2."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.outputs.append(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.outputs).mean())
        self.outputs.clear()


def _fit(rank: int, world: int, make: Any, pipeline: bool) -> float:
    torch.manual_seed(0)
    module = make()
    strategy: Any = ZeroStrategy(stage=1, pipeline=Pipeline(stages=2, microbatches=2)) if pipeline else "auto"
    lightning = trainer(rank, world if pipeline else 1, strategy, max_epochs=2)
    lightning.fit(module, loader(0, 1), loader(0, 1))
    assert type(module).__name__ == make.__name__
    return float(lightning.callback_metrics["total"])


def _plain(make: Any) -> float:
    return run(_fit, 1, make, False)[0]


ALIKE = [ManyNumbers, Tensors, AnObject, DropsLargeTensors, AssignsLargeTensors]


@pytest.mark.parametrize("make", sample(ALIKE, ManyNumbers, AnObject, DropsLargeTensors))
def test_hooks_read_on_all_stages_what_a_step_has_left(make: Any) -> None:
    """Rank 0, which has the loggers, is not the last stage."""
    found, expected = run(_fit, 2, make, True), _plain(make)
    assert found == [pytest.approx(expected, rel=1e-4)] * 2


@pytest.mark.parametrize("make", [LargeTensors, ObjectsInAList, Copies])
def test_hooks_that_read_what_the_last_stage_cannot_send_are_refused(make: Any) -> None:
    with pytest.raises(
        PipelineError, match="`kept` of .* is changed by a step after the blocks of .*, and read between"
    ):
        run(_fit, 2, make, True)


def test_hooks_that_read_a_value_that_the_last_stage_does_not_have_are_refused() -> None:
    with pytest.raises(PipelineError, match="`hidden` of `OfAnEarlierStage` is read between two steps on the last"):
        run(_fit, 2, OfAnEarlierStage, True)


def test_losses_with_graphs_that_a_hook_reads_are_refused() -> None:
    with pytest.raises(PipelineError, match=r"`outputs` of `Graphs` is changed by a step .* \(`.detach\(\)`\)"):
        run(_fit, 2, Graphs, True)
