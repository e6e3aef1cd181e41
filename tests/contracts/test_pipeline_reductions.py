"""How often the copies of a pipeline stage reduce gradients."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_zero.config import Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_pipeline_programs import Program, _loader
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run


def _count(rank: int, world: int, zero: int, schedule: Any, reduce: Any) -> tuple[int, int, int]:
    strategy = ZeroStrategy(stage=zero, pipeline=Pipeline(stages=2, microbatches=4, schedule=schedule, reduce=reduce))  # type: ignore[arg-type]
    calls: list[int] = []

    class Counts(Program):
        def on_train_batch_end(self, *args: Any) -> None:
            calls.append(strategy.engine.stats().calls["reduce_scatter"])

    lightning = trainer(rank, world, strategy, max_epochs=1)
    lightning.fit(seeded(Counts), _loader(2, rank % 2, size=48))
    buffers = sum(len(unit.buffers) for unit in strategy.engine.internals.fits.units)
    return calls[-1] - calls[-2], calls[-2] - calls[-3], buffers


REDUCED = [
    (1, "auto", 1),
    (2, "auto", 1),
    (3, "auto", 1),  # the gradients of a tiny model fit
    (3, "step", 1),
    (3, "microbatch", 4),
]


@pytest.mark.parametrize("schedule", sample(("gpipe", "1f1b", "interleaved_1f1b", "zb_h1"), "gpipe"))
@pytest.mark.parametrize("case", sample(REDUCED, *REDUCED[2::2]), ids=lambda case: f"zero{case[0]}-{case[1]}")
def test_gradients_are_reduced_once_a_step_or_once_a_microbatch(case: Any, schedule: str) -> None:
    zero, reduce, times = case
    if schedule in ("interleaved_1f1b", "zb_h1") and reduce == "microbatch":
        return  # refused
    for last, before, buffers in run(_count, 4, zero, schedule, reduce):
        assert last == before == times * buffers


def test_a_time_to_reduce_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("`Pipeline(reduce='never')` is not known")):
        Pipeline(reduce="never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape("`reduce='microbatch'` does not work with")):
        Pipeline(reduce="microbatch", schedule="interleaved_1f1b")
    with pytest.raises(ValueError, match=re.escape("`Pipeline(reduce='microbatch')` needs `stage=3` (got `stage=2`)")):
        ZeroStrategy(stage=2, pipeline=Pipeline(reduce="microbatch"))
