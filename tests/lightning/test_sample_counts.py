from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import BasePredictionWriter, ThroughputMonitor

from lightning_zero.lightning.sample_counts import count_samples_once


class Writer(BasePredictionWriter):
    pass


def _trainer(ranks: int, *callbacks: Any, size: int | None = None, fn: str = "predict") -> Any:
    tensor_parallel = None if size is None else SimpleNamespace(size=size)
    strategy = SimpleNamespace(
        distributed_sampler_kwargs={"num_replicas": ranks, "rank": 0}, tensor_parallel=tensor_parallel
    )
    return SimpleNamespace(world_size=8, strategy=strategy, callbacks=callbacks, state=SimpleNamespace(fn=fn))


@pytest.mark.parametrize("flops", [None, 100])
def test_throughputs_are_those_of_the_data_ranks(flops: int | None) -> None:
    monitor = ThroughputMonitor(batch_size_fn=len)
    monitor.available_flops = flops
    monitor._throughputs = {stage: Throughput(flops, world_size=8) for stage in ("train", "validate")}  # type: ignore[misc]
    for ranks in (8, 4):
        count_samples_once(_trainer(ranks, monitor))
        for one in monitor._throughputs.values():
            assert (one.world_size, one.available_flops) == (ranks, flops and flops * 8 // ranks)


def test_predictions_that_several_ranks_write_are_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"`Writer` writes .* 4 of them .*trainer.global_rank == 4 \* trainer"):
        count_samples_once(_trainer(2, Writer(), size=4))
    with pytest.warns(UserWarning, match=r"`Writer` writes .*trainer.global_rank == 1 \* trainer"):
        count_samples_once(_trainer(2, Writer()))  # a pipeline
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        count_samples_once(_trainer(8, Writer()))
        count_samples_once(_trainer(2, Writer(), size=4, fn="fit"))
