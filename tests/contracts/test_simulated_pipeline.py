"""In pipeline stages on devices that run everything as late as they may, training has the bits of the same at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.config import Offload, Pipeline
from tests import worlds
from tests.contracts.test_simulated_device import (
    AT_ONCE,
    BF16,
    IN_PLACE,
    OF_NCCL,
    ORDERS,
    PRECISIONS,
    REDUNDANT,
    SCHEDULES,
)
from tests.sampling import sample
from tests.simulated_device import SimulatedDevice
from tests.simulated_pipeline import MODELS, PipelinedTraining

PIPELINES: dict[str, Pipeline] = {
    "gpipe": Pipeline(stages=2, microbatches=4, schedule="gpipe"),
    "1f1b": Pipeline(stages=2, microbatches=4, schedule="1f1b"),
    "halves": Pipeline(stages=2, microbatches=4, schedule="zb_h1"),
    "interleaved": Pipeline(stages=2, microbatches=4, schedule="interleaved_1f1b"),
    "often": Pipeline(stages=2, microbatches=4, schedule="1f1b", reduce="microbatch"),
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "stage1": {"stage": 1},
    "stage3": {"stage": 3},
    "stage3-cpu": {"stage": 3, "offload": Offload(optimizer="cpu", step_device="cpu")},
    "stage1-tied": {"stage": 1, "tied": True},
    "stage3-tied": {"stage": 3, "tied": True},
    "stage1-recomputed": {"stage": 1, "activations": "offload"},
}


def plain(one: PipelinedTraining, step: int) -> None:
    one.backward(step)
    one.step()


def clipped(one: PipelinedTraining, step: int) -> None:
    one.backward(step)
    one.seen.append(one.engine.clip_grad_norm(one.optimizer, 0.1))
    one.step()


def validated(one: PipelinedTraining, step: int) -> None:
    """Forwards between the backward and the step, and behind the step."""
    one.backward(step)
    one.evaluate(step + 1)
    one.step()
    one.evaluate(step)


PROGRAMS: dict[str, Callable[[PipelinedTraining, int], None]] = {
    program.__name__: program for program in (plain, clipped, validated)
}
SHORT = "plain-counting-1f1b-fp32-stage1"


def _train(case: str, device: str) -> PipelinedTraining:
    program, model, schedule, precision, placement = case.split("-", 4)
    one = PipelinedTraining(
        device, PRECISIONS[precision], pipeline=PIPELINES[schedule], model=model, **PLACEMENTS[placement]
    )
    for step in range(3):
        PROGRAMS[program](one, step)
    one.engine.flush()
    one.seen += one.weights()
    return one


def _trained(case: str, eager: tuple[str, ...], deaf_to: str | None = None) -> tuple[list[Tensor], set[str]]:
    """Return what was seen, and the orders that were asked for."""
    with SimulatedDevice(eager, deaf_to) as device:
        one = _train(case, "cuda")
        seen = [value.cpu() for value in one.seen]
        one.engine.close()
    return seen, set(device.orders)


def _late_differences(rank: int, world: int, case: str, deaf_to: str | None = None) -> list[str]:
    """Return the schedules in which a rank sees something else than on a device that runs everything at once."""
    expected, _ = _trained(case, AT_ONCE)
    found = []
    for name, eager in SCHEDULES.items():
        seen, _ = _trained(case, eager, deaf_to)
        if not all(torch.equal(mine, theirs) for mine, theirs in zip(seen, expected, strict=True)):
            found.append(name)
    return found


def _cases() -> list[str]:
    """Return every schedule with every placement, each with a program, a model and a precision in turn."""
    pairs = [(schedule, placement) for schedule in PIPELINES for placement in PLACEMENTS]
    runs = [(schedule, placement) for schedule, placement in pairs if schedule != "often" or "stage3" in placement]
    turns = zip(runs, cycle(product(PROGRAMS, MODELS)), cycle([*PRECISIONS, *reversed(PRECISIONS)]), strict=False)
    return [f"{'-'.join(program)}-{schedule}-{one}-{place}" for (schedule, place), program, one in turns]


CASES = _cases()
FOUR_RANKS = ["clipped-traced-1f1b-bf16-stage3", "validated-explicit-often-fp32-stage3-tied"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == SHORT else pytest.mark.slow) for case in (SHORT, *CASES)]
)
def test_stages_on_devices_that_run_late_train_with_the_same_bits(case: str) -> None:
    assert worlds.run(_late_differences, 2, case, timeout_s=250) == [[]] * 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", FOUR_RANKS)
def test_copies_of_stages_on_devices_that_run_late_train_with_the_same_bits(case: str) -> None:
    assert worlds.run(_late_differences, 4, case, timeout_s=550) == [[]] * 4


def _distance_from_host(rank: int, world: int, case: str) -> float:
    on_host = _train(case, "cpu")
    seen, _ = _trained(case, AT_ONCE)
    pairs = zip(seen, on_host.seen, strict=True)
    return max(float(((mine - theirs) / theirs.abs().clamp(min=1.0)).abs().max()) for mine, theirs in pairs)


@pytest.mark.parametrize(
    "case",
    sample(
        [f"validated-{model}-{schedule}-fp32-stage1-tied" for model in MODELS for schedule in ("gpipe", "interleaved")],
        "validated-counting-interleaved-fp32-stage1-tied",
    ),
)
def test_stages_on_simulated_devices_train_as_on_the_host(case: str) -> None:
    """Not to the bit: on the host a step goes in chunks, whose ends are not vectorised. Losses are large numbers."""
    assert max(worlds.run(_distance_from_host, 2, case)) < 1e-6


# -- Waits of the host -------------------------------------------------------------------------------------------------

EVERY_STAGE = {"tolist: parallel/pipeline/schedule/microbatches.py batch_digest": 1}
LAST_STAGE = {
    **EVERY_STAGE,
    "tolist: lightning/pipelined_steps.py _survey": 1,
    "copy: parallel/pipeline/tracing/loss_normalization.py check": 1,
    "copy: lightning/pipelined_steps.py _returned": 1,
}


def _waits(rank: int, world: int, model: str, stage: int, microbatches: int) -> dict[str, int]:
    """Return how often the host waits in a step, by kind and place."""
    with SimulatedDevice() as device:
        pipeline = Pipeline(stages=2, microbatches=microbatches)
        one = PipelinedTraining("cuda", BF16, pipeline=pipeline, model=model, stage=stage)
        for step in range(3):
            device.waits.clear()
            clipped(one, step)
        waits = {place: number for place, number in device.waits.items() if not place.endswith("program")}
        one.engine.close()
    return waits


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", sample((2, 8), 8))
@pytest.mark.parametrize("stage", sample((1, 3), 3))
@pytest.mark.parametrize("model", sample(("traced", "explicit"), "traced"))
def test_the_host_waits_a_few_times_a_batch_and_never_for_a_microbatch(
    model: str, stage: int, microbatches: int
) -> None:
    assert worlds.run(_waits, 2, model, stage, microbatches) == [EVERY_STAGE, LAST_STAGE]


# -- Mutants: each order, not heard ------------------------------------------------------------------------------------

OF_PIPELINES: dict[str, str] = {  # and a case that shows it
    "wait of a collective: comm/p2p.py flush": "plain-explicit-1f1b-fp32-stage1",
    "wait of a collective: comm/p2p.py wait": "plain-explicit-1f1b-fp32-stage1",
    "wait of a collective: engine/units/pipeline_peers.py _sum": "clipped-explicit-gpipe-fp32-stage1-tied",
    "wait of a collective: engine/units/pipeline_peers.py combine_norms": "clipped-explicit-gpipe-fp32-stage1-tied",
    "wait of a collective: engine/units/pipeline_peers.py start_equal": "clipped-explicit-gpipe-fp32-stage1-tied",
    "wait of a collective: engine/access/gathered.py values_of_part": "plain-explicit-1f1b-fp32-stage1",
}


def _orders(rank: int, world: int) -> set[str]:
    return {order for case in CASES for order in _trained(case, AT_ONCE)[1]}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_order_that_pipelines_ask_for_is_without_a_mutant() -> None:
    found = set[str]().union(*worlds.run(_orders, 2, timeout_s=1100))
    assert found - set(ORDERS) - REDUNDANT - OF_NCCL - IN_PLACE == set(OF_PIPELINES)


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("order", OF_PIPELINES)
def test_an_order_of_a_pipeline_that_is_not_heard_is_missed(order: str) -> None:
    try:
        found = worlds.run(_late_differences, 2, OF_PIPELINES[order], order, timeout_s=250)
    except Exception:  # what is not a number trips somebody on the way
        return
    assert any(found)
