from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_zero.lightning.metrics import metric_states, with_own_metric_states
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.contracts.test_resume_anywhere import Loader
from tests.lightning_programs import Net, seeded, trainer
from tests.sampling import sample


class Many(Metric):
    """Keeps what was seen in every way that there is."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("sum", "max", "mean"):
            self.add_state(name, torch.zeros(3), dist_reduce_fx=name, persistent=True)
        self.add_state("values", [], dist_reduce_fx="cat", persistent=True)
        self.add_state("own", torch.zeros(()), dist_reduce_fx=None, persistent=True)
        self.add_state("unsaved", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        self.sum += value
        self.max = torch.maximum(self.max, value)
        self.mean = (self.mean + value) / 2
        self.values.append(value)
        self.own += value.sum()

    def compute(self) -> Tensor:
        values = self.values if isinstance(self.values, list) else [self.values]
        return torch.stack([self.sum.sum(), self.max.sum(), self.mean.sum(), torch.cat(values).sum()])


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.metric = Many()
        self.computed: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.metric.update(batch[1].detach().sum(0))
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.computed.append(self.metric.compute())
        self.metric.reset()


def _fit(rank: int, world: int, kind: str, folder: str, resume: str | None = None) -> tuple[list[Tensor], list[str]]:
    callback = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=4)
    strategy = ZeroStrategy(stage=3, state_dict_type=kind)  # type: ignore[arg-type]
    fitted = trainer(rank, world, strategy, callbacks=[callback], enable_checkpointing=True)
    module = seeded(Counting)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted.fit(module, Loader(rank, world), ckpt_path=resume)  # type: ignore[arg-type]
    said = [str(warning.message) for warning in caught if "All take rank 0's" in str(warning.message)]
    return module.computed, said  # type: ignore[return-value]


def _go_on(rank: int, world: int, kind: str, folder: str) -> None:
    expected, _ = _fit(rank, world, kind, f"{folder}/whole")
    actual, said = _fit(rank, world, kind, f"{folder}/resumed", f"{folder}/whole/step=4.ckpt")
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    assert said == []


@pytest.mark.parametrize("kind", sample(["sharded", "full"], "full"))
def test_a_metric_goes_on_in_the_middle_of_an_epoch_on_every_rank(kind: str, tmp_path: Path) -> None:
    worlds.run(_go_on, 2, kind, str(tmp_path))


def test_a_state_that_cannot_be_merged_is_said_once(tmp_path: Path) -> None:
    worlds.run(_fit, 2, "sharded", str(tmp_path))
    _, said = worlds.run(_fit, 1, "sharded", str(tmp_path / "other"), str(tmp_path / "step=4.ckpt"))[0]
    assert len(said) == 1
    assert "`metric.own`: the metric does not say" in said[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_on_another_number_of_ranks_everything_is_counted_once(ranks: int) -> None:
    generator = torch.Generator().manual_seed(3)
    modules = [nn.ModuleDict({"many": Many()}) for _ in range(2)]
    for module in modules:
        for _ in range(4):
            module["many"].update(torch.rand(3, generator=generator))
    saved = [metric_states(module) for module in modules]
    assert list(saved[0]) == [f"many.{name}" for name in ("sum", "max", "mean", "values", "own")]
    loaded = [nn.ModuleDict({"many": Many()}) for _ in range(ranks)]
    for rank, module in enumerate(loaded):
        values, undivided = with_own_metric_states(
            module, modules[0].state_dict(), saved=saved, rank=rank, world_size=ranks
        )
        module.load_state_dict(values)
        assert undivided == ["many.own"]
    old, new = [[module["many"] for module in group] for group in (modules, loaded)]
    assert torch.equal(sum(one.sum for one in new), old[0].sum + old[1].sum)
    assert all(torch.equal(one.max, torch.maximum(old[0].max, old[1].max)) for one in new)
    assert all(torch.equal(one.mean, (old[0].mean + old[1].mean) / 2) for one in new)
    kept, seen = [torch.stack([value for one in group for value in one.values]) for group in (new, old)]
    assert torch.equal(kept, seen)
    new[0].update(torch.ones(3))  # not into a tensor of the checkpoint
    assert torch.equal(saved[0]["many.sum"], old[0].sum)
