from __future__ import annotations

import copy
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import SumMetric

from lightning_zero.comm.tensor_groups import TensorGroups
from lightning_zero.lightning import tensor_training
from lightning_zero.lightning.tensor_training import TensorTraining, _digest_of_batch
from lightning_zero.parallel.tensor.plan import TensorParallel
from tests.worlds import run


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch["x"].add_(1e-3),
        lambda batch: batch["x"][-1:, -1:].add_(1.0),
        lambda batch: batch.update(x=batch["x"].double()),
        lambda batch: batch.update(x=batch["x"].view(2, 50)),
        lambda batch: batch["more"].append(3),
        lambda batch: batch.update(text="b"),
    ],
)
def test_a_digest_tells_batches_apart(change: Any) -> None:
    def batch() -> dict[str, Any]:
        return {"x": torch.arange(100.0).view(10, 10), "more": [1, 2.0], "text": "a", "mask": torch.ones(3, dtype=bool)}

    other = batch()
    assert _digest_of_batch(other) == _digest_of_batch(batch())
    change(other)
    assert _digest_of_batch(other) != _digest_of_batch(batch())


def test_a_digest_reads_every_dtype_and_layout() -> None:
    dtypes = [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint8, torch.int64, torch.bool]
    tensors = [torch.ones(5000).to(dtype) for dtype in dtypes]
    strided = torch.arange(10.0).view(2, 5).t()
    sparse = torch.eye(3).to_sparse()
    assert isinstance(_digest_of_batch([*tensors, strided, sparse, torch.tensor(3.0), torch.empty(0)]), int)


class Counting(SumMetric):
    """Gathers objects by itself, as the masks of `MeanAveragePrecision` are."""

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        super()._sync_dist(dist_sync_fn, process_group)
        found: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(found, 10.0, group=process_group)
        self.sum_value += sum(found)


def _metrics(rank: int, world: int) -> list[float]:
    training = TensorTraining(TensorParallel(size=2), TensorGroups(2, 60.0), torch.device("cpu"))
    before, own = SumMetric(), SumMetric(dist_sync_fn=lambda tensor, group: [tensor])
    training.bind_metrics()
    values = []
    for one in (before, copy.deepcopy(before), SumMetric(), own, Counting()):  # wherever a program keeps them
        one.update(1.0 + rank // 2)
        values.append(float(one.compute()))
    training.unbind_metrics()
    after = SumMetric()
    after.update(1.0)
    return [*values, float(after.compute())]


def test_metrics_gather_over_the_data_ranks() -> None:
    for rank, values in enumerate(run(_metrics, 4)):
        assert values == [3.0, 3.0, 3.0, 1.0 + rank // 2, 23.0, 4.0]


@dataclass
class Fields:
    ids: Any
    names: list[str]


class Holder:
    def __init__(self, ids: Any) -> None:
        self.ids = ids


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: {"ids": ids.numpy()},
        lambda ids: UserDict({"ids": ids}),
        lambda ids: Fields(ids, ["a"]),
        lambda ids: [Holder({"ids": ids})],
        lambda ids: [np.float32(ids[0].item())],
    ],
)
def test_batches_of_any_type_are_told_apart(make: Any) -> None:
    assert _digest_of_batch(make(torch.arange(4.0))) == _digest_of_batch(make(torch.arange(4.0)))
    assert _digest_of_batch(make(torch.arange(4.0))) != _digest_of_batch(make(torch.arange(1.0, 5.0)))


def _plan_without_a_batch(rank: int, world: int) -> str:
    training: Any = TensorTraining(TensorParallel(size=2), TensorGroups(2, 60.0), torch.device("cpu"))
    training._plan = lambda module, call, whole: ("the plan", [], [])

    def call_for_plan(module: Any) -> Any:
        if rank == 1:
            raise OSError("no file on rank 1")

    before, tensor_training.call_for_plan = tensor_training.call_for_plan, call_for_plan
    try:
        with pytest.raises(ValueError, match="no file on rank 1") as caught:
            training._agreed_plan(None, ())
    finally:
        tensor_training.call_for_plan = before
    return str(caught.value)


def test_an_error_of_another_rank_than_the_first_while_planning_is_told_on_all() -> None:
    """The plan of rank 0 took its place."""
    for told in run(_plan_without_a_batch, 2):
        assert "OSError while planning `tensor_parallel`: no file on rank 1" in told


def test_random_numbers_in_stages_of_a_divided_sequence_are_refused() -> None:
    training: Any = object.__new__(TensorTraining)
    training.options = TensorParallel(size=2, sequence=True)
    training.refuse_random_stages(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
    with pytest.raises(
        ValueError, match=r"`TensorParallel\(sequence=True\)` with `pipeline` does not work with dropout"
    ):
        training.refuse_random_stages(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    training.options = TensorParallel(size=2)
    training.refuse_random_stages(nn.Sequential(nn.Dropout(0.1)))
