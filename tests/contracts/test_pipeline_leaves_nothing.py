"""A fit in stages leaves nothing in memory: neither the engine nor its groups, of which each has threads that wake."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_zero.config import Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.pipeline.stages.sources import is_fake
from tests.contracts.test_pipeline_programs import Functional, Program, _loader
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run

PROGRAMS = {"functional": Functional, "module": Program}


def _is_gone(rank: int, world: int, schedule: Any, zero: Any, name: str, options: Any) -> list[bool]:
    shared = ["net.embedding.weight"] if name == "functional" else None
    pipeline = Pipeline(stages=2, microbatches=4, schedule=schedule, shared=shared)
    strategy = ZeroStrategy(zero, pipeline=pipeline, **options)
    fitted = trainer(rank, world, strategy, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.1)
    fitted.fit(seeded(PROGRAMS[name]), _loader(world // 2, rank % (world // 2), 8, 24 * world))
    left = [weakref.ref(strategy), weakref.ref(strategy.engine), weakref.ref(fitted.lightning_module)]
    del strategy, fitted
    for _ in range(3):  # tensors of C++ keep their objects until they are collected themselves
        gc.collect()
    return [one() is None for one in left]


@pytest.mark.parametrize("name", sample(PROGRAMS, "functional"))
@pytest.mark.parametrize("zero", sample((1, 3), 3))
@pytest.mark.parametrize("schedule", sample(("1f1b", "interleaved_1f1b", "zb_h1", "gpipe"), "1f1b", "interleaved_1f1b"))
def test_a_fit_in_stages_is_collected(schedule: str, zero: int, name: str) -> None:
    for found in run(_is_gone, 2, schedule, zero, name, {}):
        assert all(found)


def test_a_fit_with_deferred_steps_is_collected() -> None:
    """The exception that ends a run of the step had the frames of the first one, and they all of the rest."""
    for found in run(_is_gone, 4, "interleaved_1f1b", 3, "functional", {"step": "deferred"}):
        assert all(found)


class _Noting(Program):
    """Notes the tensors that its blocks are given and return, and which of them are left behind a step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []
        self.left: list[int] = []
        for block in self.net.blocks:
            block.register_forward_hook(self._note)

    def _note(self, block: nn.Module, args: Any, result: Tensor) -> None:
        self.seen += [weakref.ref(one) for one in (args[0], result) if not is_fake(one)]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        gc.collect()
        gc.disable()
        self.seen.clear()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.seen
        self.left.append(sum(one() is not None for one in self.seen))
        gc.enable()


def _left_behind_steps(rank: int, world: int, schedule: Any) -> list[int]:
    strategy = ZeroStrategy(1, pipeline=Pipeline(stages=2, microbatches=2, schedule=schedule))
    module = seeded(_Noting)
    trainer(rank, world, strategy, max_epochs=1).fit(module, _loader(1, 0, 8, 24))
    return module.left[1:]  # the first step describes the stages


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_tensors_of_a_micro_batch_are_given_back_with_its_step(schedule: str) -> None:
    """A class that was made in each run of the step held them until Python's collector found it."""
    for left in run(_left_behind_steps, 2, schedule):
        assert left == [0, 0]
