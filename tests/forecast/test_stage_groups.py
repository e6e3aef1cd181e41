"""Messages between the processes of simulated stages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _object_to_tensor, _tensor_to_object

from lightning_zero.comm.traffic import CollectiveCall
from lightning_zero.forecast.clock import SimulatedCall
from lightning_zero.forecast.dry_run import DryRun
from lightning_zero.forecast.stage_groups import PostBox, StageGroup


class _Stage:
    """A stage, and the call that it has made last."""

    def __init__(self, store: dist.Store, stage: int, size: int, counter: DryRun) -> None:
        self.call: SimulatedCall | None = None
        self.group = StageGroup(PostBox(store, lambda: self.call, counter.is_blank), stage, size)

    def at(self, seconds: float) -> _Stage:
        """Make a call that would end then."""
        self.call = SimulatedCall(CollectiveCall("messages", "it", 0, (0, 1)), "", 0.0, 0.0, seconds)
        return self

    @property
    def ended_s(self) -> float:
        assert self.call is not None
        return self.call.ended_s


def _stages(size: int = 2, counter: DryRun | None = None) -> list[_Stage]:
    store, counter = dist.HashStore(), counter or DryRun()
    return [_Stage(store, stage, size, counter) for stage in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_small_tensors_arrive_with_their_values_and_when_they_were_sent(dtype: torch.dtype) -> None:
    first, second = _stages()
    sent = (torch.arange(6) % 3).to(dtype).view(2, 3)
    first.at(5.0).group.send([sent], 1)
    found = torch.zeros(2, 3, dtype=dtype)
    second.at(1.0).group.recv([found], 0).wait()
    assert torch.equal(found, sent)
    assert second.ended_s == 5.0


def test_a_message_that_waits_for_its_receiver_does_not_delay_it() -> None:
    first, second = _stages()
    first.at(1.0).group.send([torch.ones(1)], 1)
    second.at(3.0).group.recv([torch.zeros(1)], 0).wait()
    assert second.ended_s == 3.0


def test_messages_of_a_pair_arrive_in_their_order() -> None:
    first, second = _stages()
    for number in range(3):
        first.group.send([torch.tensor([number])], 1)
    works = [(found := torch.zeros(1, dtype=torch.int64), second.group.recv([found], 0)) for _ in range(3)]
    for _, work in reversed(works):
        work.wait()
    assert [int(found) for found, _ in works] == [0, 1, 2]


def test_tensors_that_a_dry_run_does_not_compute_are_not_sent() -> None:
    counter = DryRun()
    first, second = _stages(counter=counter)
    found = torch.zeros(100_000)
    with counter:
        first.at(2.0).group.send([torch.ones(100_000)], 1)
        second.at(0.0).group.recv([found], 0).wait()
    assert second.ended_s == 2.0
    assert not found.any()


def test_large_objects_arrive() -> None:
    counter, words = DryRun(), list(range(500_000))
    first, second = _stages(counter=counter)
    with counter:
        packed, size = _object_to_tensor(words, torch.device("cpu"), first.group)
        assert packed.numel() > 2**20
        first.group.send([packed], 1)
        found = torch.empty(packed.numel(), dtype=torch.uint8)
        second.group.recv([found], 0).wait()
        assert _tensor_to_object(found, size, second.group) == words


@pytest.mark.parametrize(
    ("op", "expected"),
    [(dist.ReduceOp.SUM, [6, 3]), (dist.ReduceOp.MAX, [3, 2]), (dist.ReduceOp.MIN, [1, 0])],
    ids=str,
)
def test_reductions_end_when_the_last_stage_has_come(op: dist.ReduceOp, expected: list[int]) -> None:
    stages, options = _stages(3), dist.AllreduceOptions()
    options.reduceOp = op
    values = [torch.tensor(one) for one in ([1, 2], [2, 0], [3, 1])]
    works = [
        stage.at(float(number)).group.allreduce([value], options)
        for number, (stage, value) in enumerate(zip(stages, values, strict=True))
    ]
    for work in works:
        work.wait()
    assert [value.tolist() for value in values] == [expected] * 3
    assert [stage.ended_s for stage in stages] == [2.0] * 3


def test_gathers_and_broadcasts_have_the_values_of_all_stages() -> None:
    stages = _stages()
    found: list[list[Tensor]] = [[torch.zeros(1), torch.zeros(1)] for _ in stages]
    works = [stage.group.allgather([found[k]], [torch.tensor([float(k)])]) for k, stage in enumerate(stages)]
    for work in works:
        work.wait()
    assert [[float(one) for one in mine] for mine in found] == [[0.0, 1.0]] * 2
    options = dist.BroadcastOptions()
    options.rootRank = 1
    values = [torch.zeros(1), torch.ones(1)]
    stages[0].at(1.0)
    stages[1].at(4.0)
    for work in [stage.group.broadcast([one], options) for stage, one in zip(stages, values, strict=True)]:
        work.wait()
    assert float(values[0]) == 1.0
    assert stages[0].ended_s == 4.0
