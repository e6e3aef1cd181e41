"""Steps that change their batch see every micro-batch once, as it came, though a pipeline runs them several times."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.config import Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import Block, Net, data, seeded, trainer
from tests.sampling import sample
from tests.worlds import run


class Changes(Net):
    """Gives ``change`` the batch of every step in front of the model.

    Args:
        change: Returns the input and the target.
        late: Writes into the batch behind the model.
    """

    def __init__(self, change: Callable[[Any], tuple[Tensor, Tensor]], late: Callable[[Any], None]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(6) for _ in range(4)])
        self.change = change
        self.late = late

    def loss(self, batch: Any) -> Tensor:
        x, y = self.change(batch)
        prediction = self(x)
        self.late(batch)
        return F.mse_loss(prediction, y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = self.change(batch)
        prediction = self(x)
        self.late(batch)
        return prediction + y


@dataclass
class Sample:
    x: Tensor
    y: Tensor


class Box:
    """An object of the program."""

    def __init__(self, y: Tensor) -> None:
        self.y = y
        self.inner = {"y": [y.clone()]}


def _assigned(batch: Any) -> tuple[Tensor, Tensor]:
    batch["x"] = batch["x"] * 2
    batch["y"] = batch["y"] / 4
    return batch["x"], batch["y"]


def _written(batch: Any) -> tuple[Tensor, Tensor]:
    batch["x"].mul_(2)
    batch["y"] += 1
    return batch["x"], batch["y"]


def _popped(batch: Any) -> tuple[Tensor, Tensor]:
    y = batch.pop("y")
    return batch.pop("x"), y


def _nested(batch: Any) -> tuple[Tensor, Tensor]:
    batch["parts"][0]["x"] *= 2
    batch["parts"].append(batch["y"])
    batch["sample"].y = batch["sample"].y + len(batch["parts"])
    return batch["parts"][0]["x"], batch["sample"].y


def _in_objects(batch: Any) -> tuple[Tensor, Tensor]:
    batch["box"].y = batch["box"].y * 2
    batch["box"].inner["y"][0].add_(1)
    return batch["x"], batch["box"].y + batch["box"].inner["y"].pop()


def _aliased(batch: Any) -> tuple[Tensor, Tensor]:
    batch["same"].mul_(2)  # shares memory with `x`
    return batch["x"], batch["y"]


def _array(batch: Any) -> tuple[Tensor, Tensor]:
    batch["array"] *= 2
    return batch["x"], batch["y"] + torch.from_numpy(batch["array"])


def _unchanged(batch: Any) -> tuple[Tensor, Tensor]:
    return batch["x"], batch["y"]


def _nothing(batch: Any) -> None:
    pass


def _doubled_behind(batch: Any) -> None:
    batch["y"].mul_(2)  # read by the loss behind it
    batch["x"] = batch["y"]


CHANGES = {one.__name__: one for one in (_assigned, _written, _popped, _nested, _aliased, _array, _unchanged)}


def _collate(samples: Any) -> dict[str, Any]:
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    parts = [{"x": x.clone()}]
    array = y.numpy().copy()
    return {"x": x, "y": y, "same": x[:], "parts": parts, "sample": Sample(x, y.clone()), "array": array}


def _collate_objects(samples: Any) -> dict[str, Any]:
    batch = _collate(samples)
    return {"x": batch["x"], "y": batch["y"], "box": Box(batch["y"].clone())}


def _fit(rank: int, world: int, options: dict[str, Any], cases: list[tuple[Any, Any]], collate: Any) -> list[Any]:
    found = []
    for change, late in cases:
        strategy = ZeroStrategy(stage=1, **options)
        lightning = trainer(rank, world, strategy, max_epochs=1)
        module = seeded(partial(Changes, change, late))
        loaders = [DataLoader(data(16), 8, collate_fn=collate, shuffle=False) for _ in range(3)]
        lightning.fit(module, loaders[0], loaders[1])
        logged = {name: value.item() for name, value in lightning.callback_metrics.items()}
        weights = {name: strategy.full_param(param) for name, param in module.named_parameters()}
        tested = lightning.test(module, loaders[1], verbose=False)
        found.append((weights, logged, tested, lightning.predict(module, loaders[2])))
    return found


def _require_alike(pipeline: Pipeline, cases: list[tuple[Any, Any]], collate: Any = _collate) -> None:
    expected = run(_fit, 1, {}, cases, collate)[0]
    for found in run(_fit, pipeline.stages, {"pipeline": pipeline}, cases, collate):
        for (change, late), mine, theirs in zip(cases, found, expected, strict=True):
            name = f"{change.__name__} {late.__name__}"
            assert mine[1] == pytest.approx(theirs[1], rel=1e-5), name
            assert mine[2][0] == pytest.approx(theirs[2][0], rel=1e-5), name
            for key, value in theirs[0].items():
                torch.testing.assert_close(mine[0][key], value, rtol=0, atol=1e-5, msg=f"{name} {key}")
            for one, other in zip(mine[3], theirs[3], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("schedule", sample(("1f1b", "interleaved_1f1b"), "1f1b", "interleaved_1f1b"))
def test_a_step_that_changes_its_batch_trains_as_without_a_pipeline(schedule: str) -> None:
    cases = [(change, _nothing) for change in CHANGES.values()] + [(_unchanged, _doubled_behind)]
    _require_alike(Pipeline(stages=2, microbatches=4, partition="uniform", schedule=schedule), cases)  # type: ignore[arg-type]


def test_a_step_that_changes_objects_in_its_batch_trains_as_without_a_pipeline() -> None:
    cases: list[tuple[Any, Any]] = [(_in_objects, _nothing), (_written, _doubled_behind)]
    _require_alike(Pipeline(stages=2, microbatches=1, schedule="gpipe"), cases, _collate_objects)


def _number(samples: Any) -> dict[str, Any]:
    batch = _collate(samples)
    return {"x": batch["x"], "y": batch["y"], "index": [int(one * 1000) for one in batch["x"][:, 0]]}


def _many_kinds(rank: int, world: int) -> tuple[list[str], int]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setattr("lightning_zero.parallel.pipeline.traced_steps.MOST_KINDS", 6)
        warnings.simplefilter("always")
        strategy = ZeroStrategy(stage=1, pipeline=Pipeline(stages=2, microbatches=2))
        lightning = trainer(rank, world, strategy, max_epochs=1)
        lightning.fit(seeded(partial(Changes, _unchanged, _nothing)), DataLoader(data(48), 4, collate_fn=_number))
        route: Any = strategy._steps.runner._route  # type: ignore[union-attr]
    return [str(one.message) for one in caught if "Python number" in str(one.message)], len(route._messages)


def test_python_numbers_that_differ_in_every_batch_are_warned_of_and_forgotten() -> None:
    (first, num_kinds), (second, _) = run(_many_kinds, 2)
    (message,) = first
    assert "`batch['index'][0]` is a Python number that differs from one batch to the next" in message
    assert second == []
    assert num_kinds <= 6 + 2
