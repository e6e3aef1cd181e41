"""On a device that runs everything as late as it may, training has the bits of one that runs everything at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.config import MixedPrecision, Offload
from lightning_zero.engine.buffer import FlatBuffer
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.storage.copies import Copies, Landing
from tests import worlds
from tests.references import TinyGPT
from tests.sampling import sample
from tests.simulated_device import SimulatedDevice

BF16 = MixedPrecision(compute_dtype=torch.bfloat16)
PLACEMENTS: dict[str, dict[str, Any]] = {
    **{f"stage{stage}": {"stage": stage} for stage in range(4)},
    **{f"stage{stage}-deferred": {"stage": stage, "step": "deferred"} for stage in range(4)},
    "stage2-early": {"stage": 2, "step": "backward"},
    "stage2-cpu": {"stage": 2, "offload": Offload(optimizer="cpu", step_device="cpu")},
    "stage3-cpu": {"stage": 3, "offload": Offload(optimizer="cpu", step_device="cpu")},
    "stage3-cpu-now": {"stage": 3, "offload": Offload(optimizer="cpu", step_device="cpu"), "step": "now"},
    "stage3-streamed": {"stage": 3, "offload": Offload(optimizer="cpu", step_device="cuda")},
    "stage3-params": {"stage": 3, "offload": Offload(optimizer=None, params="cpu")},
    "stage3-cpu-params": {"stage": 3, "offload": Offload(optimizer="cpu", params="cpu", step_device="cpu")},
}
PRECISIONS = {"fp32": None, "bf16": BF16}
SCHEDULES: dict[str, tuple[str, ...]] = {"late": (), "late-copies": ("compute",), "late-compute": ("others",)}
AT_ONCE = ("compute", "others")


class _Training:
    """An engine, its optimizer, and what was seen of them."""

    def __init__(self, device: str, precision: MixedPrecision | None, **options: Any) -> None:
        torch.manual_seed(0)
        self.device = device
        self.precision = precision
        module = TinyGPT(depth=2).to(device)
        self.engine = ZeroEngine(units=["Block"], device=torch.device(device), precision=precision, **options)
        self.module: nn.Module = self.engine.shard(module)
        self.optimizer: Optimizer = self.engine.attach(torch.optim.AdamW(module.parameters(), lr=0.01))
        self.seen: list[Tensor] = []

    def batch(self, number: int) -> Tensor:
        return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(number)).to(self.device)

    def loss(self, number: int, name: str = "training_step") -> Tensor:
        batch = self.batch(number)
        with self.engine.scope(name), torch.autocast(self.device, torch.bfloat16, enabled=self.precision is not None):
            out: Tensor = self.module(batch)
        return out.float().square().mean()

    def backward(self, number: int) -> None:
        loss = self.loss(number)
        loss.backward()
        self.seen.append(loss.detach())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain(one: _Training, step: int) -> None:
    one.backward(step)
    one.step()


def clipped(one: _Training, step: int) -> None:
    one.backward(step)
    one.seen.append(one.engine.clip_grad_norm(one.optimizer, 0.1))
    one.step()


def accumulated(one: _Training, step: int) -> None:
    for last in (False, True):
        with one.engine.microbatch(last):
            one.backward(2 * step + last)
    one.step()


def validated(one: _Training, step: int) -> None:
    """Forwards between the backward and the step, and behind the step."""
    one.backward(step)
    with torch.no_grad():
        one.seen.append(one.loss(step + 1, "validation_step"))
    one.step()
    with torch.no_grad():
        one.seen.append(one.loss(step, "validation_step"))


def gathered(one: _Training, step: int) -> None:
    one.backward(step)
    one.step()
    with one.engine.gathered(one.module, write="all"), torch.no_grad():
        for param in one.module.parameters():
            one.seen.append(param.detach().clone())
            param.mul_(0.99)


PROGRAMS: dict[str, Callable[[_Training, int], None]] = {
    program.__name__: program for program in (plain, clipped, accumulated, validated, gathered)
}


def _trained(
    program: str, placement: str, precision: str, eager: tuple[str, ...]
) -> tuple[list[Tensor], dict[str, int]]:
    """Return what was seen, with the weights at the end, and the waits of the host in the last step."""
    with SimulatedDevice(eager) as device:
        one = _Training("cuda", PRECISIONS[precision], **PLACEMENTS[placement])
        for step in range(4):
            device.waits.clear()
            PROGRAMS[program](one, step)
        waits = {place: number for place, number in device.waits.items() if not place.endswith("program")}
        one.engine.flush()
        one.seen += [one.engine.full_param(param) for param in one.module.parameters()]
        seen = [value.cpu() for value in one.seen]
        one.engine.close()
    return seen, waits


def _differs(program: str, placement: str, precision: str, schedule: str, expected: list[Tensor] | None = None) -> bool:
    if expected is None:
        expected, _ = _trained(program, placement, precision, AT_ONCE)
    found, _ = _trained(program, placement, precision, SCHEDULES[schedule])
    return not all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def _runs(program: str, placement: str, precision: str) -> bool:
    """Say whether the combination is one that the engine takes."""
    return not (placement == "stage2-early" and program not in ("plain", "gathered"))


CASES = [
    f"{program}-{placement}-{precision}"
    for program in PROGRAMS
    for placement in PLACEMENTS
    for precision in PRECISIONS
    if _runs(program, placement, precision)
]
_FAST = (
    "clipped-stage3-bf16",
    "validated-stage3-cpu-params-bf16",
    "accumulated-stage2-cpu-fp32",
    "plain-stage3-params-fp32",
)


def _split(case: str) -> tuple[str, str, str]:
    program, _, rest = case.partition("-")
    placement, _, precision = rest.rpartition("-")
    return program, placement, precision


def _late_differences(rank: int, world: int, case: str) -> list[str]:
    expected, _ = _trained(*_split(case), AT_ONCE)
    return [name for name in SCHEDULES if _differs(*_split(case), name, expected)]


@pytest.mark.parametrize("case", sample(CASES, *_FAST))
def test_a_device_that_runs_late_trains_with_the_same_bits(case: str) -> None:
    assert worlds.run(_late_differences, 1, case) == [[]]


# -- Waits of the host -------------------------------------------------------------------------------------------------


def _waits(rank: int, world: int, case: str) -> dict[str, int]:
    return _trained(*_split(case), SCHEDULES["late"])[1]


@pytest.mark.parametrize("case", [f"clipped-stage{stage}-fp32" for stage in range(4)])
def test_the_host_never_waits_for_a_step_on_the_device(case: str) -> None:
    assert worlds.run(_waits, 1, case) == [{}]


# -- Mutants: each wait, removed ---------------------------------------------------------------------------------------


def _nothing(*args: Any) -> None:
    return None


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "the device does not wait for a landing": (Landing, "wait", _nothing),
    "the host does not wait for a landing": (Landing, "finish", _nothing),
    "a copy does not wait for what was asked before": (Landing, "hold_back", _nothing),
    "a mark is not there": (Copies, "mark", lambda self: Landing()),
    "the host does not wait for uploads of what it writes": (FlatBuffer, "await_uploads", _nothing),
}


@contextmanager
def _mutated(name: str) -> Iterator[None]:
    with mock.patch.object(*MUTANTS[name]):
        yield


def _caught(rank: int, world: int, name: str) -> str | None:
    """Return a case in which the mutant trains otherwise."""
    for case in reversed(CASES):
        if "cpu" not in case and "streamed" not in case:
            continue
        expected, _ = _trained(*_split(case), AT_ONCE)
        for schedule in SCHEDULES:
            with _mutated(name):
                if _differs(*_split(case), schedule, expected):
                    return f"{case}-{schedule}"
    return None


@pytest.mark.parametrize("name", sample(MUTANTS, "a mark is not there", "the host does not wait for a landing"))
def test_a_wait_that_is_removed_is_missed(name: str) -> None:
    assert worlds.run(_caught, 1, name, timeout_s=600) != [None]
