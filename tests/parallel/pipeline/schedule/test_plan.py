"""Plans of pipelines."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from lightning_zero.parallel.pipeline.schedule.plan import (
    Action,
    bubble_share,
    compute_order,
    evaluation_order,
    most_microbatches,
    simulate,
)

SIZES = [(2, 2), (2, 6), (4, 4), (4, 12), (3, 9)]


def torch_order(cls: Any, stages: int, per_rank: int, microbatches: int) -> list[list[tuple[str, int, int]]]:
    """Return the order of one of PyTorch's schedules."""
    own = [
        SimpleNamespace(
            group_size=stages, group_rank=0, num_stages=stages * per_rank, stage_index=index * stages,
            is_first=index == 0, is_last=False, submod=None, has_backward=False, stage_index_to_group_rank={},
        )
        for index in range(per_rank)
    ]  # fmt: skip
    takes_lists = issubclass(cls, schedules.PipelineScheduleMulti)
    schedule = cls(own if takes_lists else own[0], microbatches, loss_fn=lambda *_: 0)
    kinds = {
        "FORWARD": "forward", "FULL_BACKWARD": "backward",
        "BACKWARD_INPUT": "backward_input", "BACKWARD_WEIGHT": "backward_weight",
    }  # fmt: skip
    return [
        [
            (kinds[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in schedule.pipeline_order[rank]
            if action is not None and action.computation_type.name in kinds
        ]
        for rank in range(stages)
    ]


def words(order: list[list[Action]]) -> list[list[tuple[str, int, int]]]:
    return [[(action.kind, action.chunk, action.microbatch) for action in actions] for actions in order]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_gpipe_is_the_order_of_pytorch(stages: int, microbatches: int) -> None:
    expected = torch_order(schedules.ScheduleGPipe, stages, 1, microbatches)
    assert words(compute_order("gpipe", stages, stages, microbatches)) == expected


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_interleaved_is_the_order_of_pytorch(stages: int, microbatches: int) -> None:
    expected = torch_order(schedules.ScheduleInterleaved1F1B, stages, 2, microbatches)
    assert words(compute_order("interleaved_1f1b", stages, 2 * stages, microbatches)) == expected


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_1f1b_is_the_order_of_pytorch(stages: int, microbatches: int) -> None:
    expected = torch_order(schedules.Schedule1F1B, stages, 1, microbatches)
    expected[-1] = [  # PyTorch's table names the micro-batches of the last stage's forwards one too high
        (kind, stage, index - (kind == "forward" and stage == stages - 1 and expected[-1][0][2] == 1))
        for kind, stage, index in expected[-1]
    ]
    assert words(compute_order("1f1b", stages, stages, microbatches)) == expected


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_zero_bubble_is_the_order_of_pytorch(stages: int, microbatches: int) -> None:
    expected = torch_order(schedules.ScheduleInterleavedZeroBubble, stages, 1, microbatches)
    assert words(compute_order("zb_h1", stages, stages, microbatches)) == expected


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_zero_bubble_keeps_as_many_micro_batches_as_there_are_stages(stages: int, microbatches: int) -> None:
    for actions in compute_order("zb_h1", stages, stages, microbatches):
        waiting = most = 0
        for action in actions:
            waiting += (action.kind == "forward") - (action.kind == "backward_weight")
            most = max(most, waiting)
        assert most == stages
        assert waiting == 0


TIMES = [(1.0, 1.0, 1.0), (1.0, 1.5, 1.0), (2.0, 3.0, 2.0), (1.0, 2.0, 1.0)]  # of F, B and W


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("stages", "microbatches"), [*SIZES, (4, 16), (8, 32)])
def test_the_bubble_of_zero_bubble_is_that_of_the_paper(stages: int, microbatches: int, times: Any) -> None:
    forward, backward, weight = times
    spans = {
        schedule: simulate(
            compute_order(schedule, stages, stages, microbatches),
            stages,
            forward=forward,
            backward=backward + weight,
            weight=weight,
        )[1]
        for schedule in ("1f1b", "zb_h1")
    }
    work = microbatches * sum(times)
    ends = {schedule: max(span.stop for span in found) for schedule, found in spans.items()}
    assert ends["1f1b"] - work == pytest.approx((stages - 1) * (forward + backward + weight))
    assert ends["zb_h1"] - work == pytest.approx((stages - 1) * (forward + backward - weight))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_messages_of_two_ranks_are_in_one_order(schedule: Any, stages: int, microbatches: int) -> None:
    chunks = stages * (2 if schedule == "interleaved_1f1b" else 1)
    lists, _ = simulate(compute_order(schedule, stages, chunks, microbatches), chunks)
    ends: dict[tuple[int, int], dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for rank, actions in enumerate(lists):
        for action in actions:
            into = {"recv_input": action.chunk, "send_gradient": action.chunk}.get(action.kind, action.chunk + 1)
            if action.kind == "forward" or action.is_backward:
                continue
            low, high = sorted(((into - 1) % stages, into % stages))
            direction = "output" if action.kind in ("send_output", "recv_input") else "gradient"
            ends[low, high][rank].append((direction, into, action.microbatch))
    assert ends
    for sides in ends.values():
        first, second = sides.values()
        assert first == second


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_bubble_is_that_of_the_formula(schedule: Any, stages: int, microbatches: int) -> None:
    _, spans = simulate(compute_order(schedule, stages, stages, microbatches), stages)
    assert bubble_share(spans) == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_interleaving_makes_the_bubble_smaller(stages: int, microbatches: int) -> None:
    _, spans = simulate(compute_order("interleaved_1f1b", stages, 2 * stages, microbatches), 2 * stages)
    assert bubble_share(spans) < (stages - 1) / (microbatches + stages - 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"])
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_a_small_batch_goes_through_every_chunk(schedule: Any, stages: int) -> None:
    per_rank = 3 if schedule == "interleaved_1f1b" else 1
    for samples in range(1, 4 * stages):
        number = most_microbatches(schedule, stages, samples)
        assert 0 < number <= samples < number + stages
        lists, _ = simulate(compute_order(schedule, stages, per_rank * stages, number), per_rank * stages)
        for actions in lists:
            for kind in {"backward_input", "backward_weight"} if schedule == "zb_h1" else {"backward"}:
                done = [action for action in actions if action.kind == kind]
                assert len(set(done)) == len(done) == per_rank * number


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 1), (4, 3), (3, 2)])
def test_few_interleaved_micro_batches_are_in_the_order_of_pytorch(stages: int, microbatches: int) -> None:
    expected = torch_order(schedules.ScheduleInterleaved1F1B, stages, 2, microbatches)
    assert words(compute_order("interleaved_1f1b", stages, 2 * stages, microbatches)) == expected


def test_evaluation_visits_every_chunk_once() -> None:
    lists, _ = simulate(evaluation_order(2, 4), 4)
    assert [action for action in lists[0] if action.kind == "forward"] == [
        Action("forward", 0, 0),
        Action("forward", 2, 0),
    ]
