from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_zero.comm.traffic import CollectiveCall
from lightning_zero.forecast.clock import Clock, MachineRates

RATES = MachineRates(
    tflops=1.0, tflops_fp32=0.1, memory=1.0, link=2.0, network=1.0, host=0.5, latency_us=0.0, launch_us=0.0
)
_aten = torch.ops.aten


def _clock(rates: MachineRates = RATES) -> Clock:
    return Clock(rates, 2, lambda: "forward")


def _move(clock: Clock, gigabytes: float, *, on_host: bool = False) -> None:
    """Read and write a number of bytes."""
    tensor = torch.empty(int(gigabytes * 1e9 / 8), dtype=torch.float32)  # is read, and its copy written
    clock.compute(_aten.clone.default, (tensor,), {}, torch.empty_like(tensor), on_host=on_host)


def _call(what: str, gigabytes: float, *ranks: int) -> CollectiveCall:
    return CollectiveCall("all_gather", what, int(gigabytes * 1e9), ranks)


def test_an_operation_takes_its_arithmetic_or_its_bytes() -> None:
    clock = _clock()
    _move(clock, 0.25)
    assert clock.now_s == pytest.approx(0.25)
    _move(clock, 0.25, on_host=True)
    assert clock.now_s == pytest.approx(0.75)
    left = torch.empty(1000, 1000)
    clock.compute(_aten.mm.default, (left, left), {}, left, on_host=False)
    assert clock.flops == 2 * 10**9
    assert clock.now_s == pytest.approx(0.75 + max(2e9 / 0.1e12, 12e6 / 1e9))
    half = left.bfloat16()
    clock.compute(_aten.mm.default, (half, half), {}, half, on_host=False)
    assert clock.now_s == pytest.approx(0.75 + 0.02 + max(2e9 / 1e12, 6e6 / 1e9))
    clock.compute(_aten.view.default, (left, [10**6]), {}, left.view(-1), on_host=False)
    assert clock.now_s == pytest.approx(0.776)
    assert clock.phases_s == {"forward": pytest.approx(0.776)}


def test_parts_of_an_operation_take_their_bytes_alone() -> None:
    clock = _clock(MachineRates(memory=1.0, host=0.5, launch_us=5.0))
    clock.move(10**6, on_host=False)
    clock.move(10**6, on_host=True)
    assert clock.now_s == pytest.approx(3e-3)


def test_disks_transfer_one_after_the_other_beside_operations() -> None:
    clock = _clock(MachineRates(memory=1.0, disk=2.0))
    clock.transfer(10**9)
    wait = clock.transfer(10**9)
    _move(clock, 0.25)
    assert clock.now_s == pytest.approx(0.25)
    wait()
    wait()
    assert clock.now_s == clock.phases_s["forward"] == pytest.approx(1.0)
    clock.restart()
    clock.transfer(10**9)()
    assert clock.now_s == pytest.approx(0.5)


def test_an_operation_takes_a_launch_at_least() -> None:
    clock = _clock(MachineRates(launch_us=5.0))
    clock.compute(_aten.neg.default, (torch.ones(1),), {}, torch.ones(1), on_host=False)
    assert clock.now_s == pytest.approx(5e-6)


def test_calls_run_beside_operations_one_after_the_other() -> None:
    clock = _clock()
    clock.add(_call("a", 1.0, 0, 1))  # in the node: half a second
    clock.add(_call("b", 1.0, 1, 2))  # to another one: a second
    _move(clock, 0.75)
    clock.end("a")
    assert clock.now_s == pytest.approx(0.75)
    clock.end("b")
    assert clock.now_s == pytest.approx(1.5)
    assert [(one.made_s, one.started_s, one.ended_s) for one in clock.calls] == [(0, 0, 0.5), (0, 0.5, 1.5)]
    assert [one.exposed_s for one in clock.calls] == [0, pytest.approx(0.75)]


def test_waits_find_the_first_call_of_a_name() -> None:
    clock = _clock()
    clock.add(_call("a", 1.0, 0, 1))
    clock.add(_call("a", 1.0, 0, 1))
    clock.end("a")
    assert clock.now_s == pytest.approx(0.5)
    clock.end("a")
    clock.end("a")  # was made before the clock began
    assert clock.now_s == pytest.approx(1.0)
    clock.restart()
    assert (clock.now_s, clock.calls, clock.phases_s) == (0.0, [], {})


@pytest.mark.parametrize("name", ["tflops", "tflops_fp32", "memory", "link", "network", "host"])
@pytest.mark.parametrize("value", [0, -1.0, "fast", True, float("nan"), float("inf")])
def test_rates_are_numbers_above_zero(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"`{name}={value!r}` must be a number above 0"):
        MachineRates(**{name: value})


def test_times_may_be_zero_and_not_less() -> None:
    assert MachineRates(latency_us=0).latency_us == 0
    with pytest.raises(ValueError, match="`launch_us=-1` must be a number of at least 0"):
        MachineRates(launch_us=-1)


def test_allocations_take_no_time_and_lookups_what_they_look_up() -> None:
    clock = _clock()
    weight, ids = torch.empty(10**6, 25), torch.zeros(10**4, dtype=torch.long)
    clock.compute(_aten.empty.memory_format, ([10**6],), {}, weight, on_host=False)
    assert clock.now_s == 0
    clock.compute(_aten.embedding.default, (weight, ids), {}, torch.empty(10**4, 25), on_host=False)
    assert clock.now_s == pytest.approx(2 * 10**6 / 1e9)


def test_written_arguments_are_read_and_written_and_expanded_ones_read_once() -> None:
    clock = _clock()
    target = torch.empty(10**6)
    clock.compute(_aten.add_.Tensor, (target, torch.empty(1).expand(10**6)), {}, target, on_host=False)
    assert clock.now_s == pytest.approx((8e6 + 4) / 1e9)
