from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_zero.comm.traffic import CollectiveCall
from lightning_zero.forecast.clock import MachineRates, SimulatedCall
from lightning_zero.forecast.simulation import (
    Sample,
    Simulation,
    draw_simulation,
    simulation_json,
    simulation_text,
)

GATHER = CollectiveCall("all_gather", "all-gather of unit `a`", 2**20, tuple(range(8)))
NORM = CollectiveCall("control", "all-reduce of a norm", 4, (3, 11, 19))


def _simulation(**options: Any) -> Simulation:
    given = {
        "rank": 3,
        "world_size": 24,
        "ranks_per_node": 8,
        "precision": "32-true",
        "rates": MachineRates(tflops=20.0, tflops_fp32=2.0),
        "calls": [
            SimulatedCall(GATHER, "forward", 0.0, 0.0, 0.5, 0.25),
            SimulatedCall(NORM, "step", 1.0, 1.0, 1.5, 0.5),
        ],
        "memory": [Sample(0.0, 10, "forward"), Sample(0.5, 30, "backward"), Sample(1.0, 20, "step")],
        "peak_bytes": 30,
        "at_peak": {"parameters": 20, "activations": 10, "buffers": 0},
        "phase": "backward",
        "module": "net.0",
        "seconds": 2.0,
        "phases": {"forward": 0.25, "backward": 0.75, "step": 0.25},
        "flops": 10**12,
    }
    return Simulation(**{**given, **options})


def test_sums_are_those_of_the_calls() -> None:
    one = _simulation()
    assert one.sent_bytes == {"all_gather": 2**20, "control": 4}
    assert one.exposed_s == 0.75
    assert one.utilisation == pytest.approx(0.25)
    assert _simulation(seconds=0.0).utilisation == 0
    assert [_simulation(precision=one).tflops for one in ("32-true", "64-true", "bf16-true")] == [2.0, 2.0, 20.0]


def test_the_text_lists_calls_in_their_order() -> None:
    text = simulation_text(_simulation())
    assert text.startswith("rank 3 of 24, 8 per node, precision 32-true\n")
    assert "modelled step 2000.000 ms: forward 250.000, backward 750.000, step 250.000" in text
    assert "exposed communication 750.000" in text
    assert "25.0% of 2 TFLOP/s" in text
    head, first, second = text.splitlines()[-3:]
    assert head.split() == ["#", "phase", "call", "sent", "MiB", "ranks", "made", "ms", "begins", "ends", "exposed"]
    assert first.split()[-6:] == ["1.000", "0-7", "0.000", "0.000", "500.000", "250.000"]
    assert "3-19 by 8" in second
    assert "all-gather" not in simulation_text(_simulation(), lists_calls=False)
    assert simulation_text(_simulation(calls=[])).endswith("0 calls; MiB sent: none")


def test_the_text_says_the_bytes_in_host_memory_and_on_disks() -> None:
    shown = simulation_text(_simulation(host={"optimizer": 2**30, "windows": 2**29}, disk={"optimizer": 2**31}))
    assert "\nhost 1.500 GiB, disk 2.000 GiB\nmodelled step" in shown
    assert "\ndisk 2.000 GiB\nmodelled step" in simulation_text(_simulation(host={"optimizer": 0}, disk={"p": 2**31}))
    assert "GiB\nmodelled" not in simulation_text(_simulation(host={"optimizer": 0}))


@pytest.mark.parametrize(
    ("ranks", "text"), [((0,), "  0  "), ((1, 9), "  1,9  "), ((0, 1, 3), "  0,1,3  "), ((2, 3, 4), "  2-4  ")]
)
def test_ranks_are_short(ranks: tuple[int, ...], text: str) -> None:
    call = SimulatedCall(CollectiveCall("all_gather", "a", 0, ranks), "", 0.0, 0.0, 0.0)
    assert text in simulation_text(_simulation(calls=[call]))


def test_json_has_bytes_and_seconds() -> None:
    found = json.loads(simulation_json(_simulation()))
    assert found["calls"][0] == {
        "kind": "all_gather",
        "what": GATHER.what,
        "sent_bytes": 2**20,
        "ranks": list(range(8)),
        "phase": "forward",
        "made_s": 0.0,
        "started_s": 0.0,
        "ended_s": 0.5,
        "exposed_s": 0.25,
    }
    assert found["memory"][1] == {"at_s": 0.5, "nbytes": 30, "phase": "backward"}
    assert found["sent_bytes"] == {"all_gather": 2**20, "control": 4}
    assert (found["rates"]["tflops"], found["rates"]["tflops_fp32"]) == (20.0, 2.0)


def test_a_picture_is_written(tmp_path: Path) -> None:
    many = [Sample(place / 1e4, place, "forward" if place % 2 else "") for place in range(9000)]
    for number, one in enumerate((_simulation(), _simulation(memory=many), _simulation(calls=[], memory=[]))):
        draw_simulation(one, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 0
    with pytest.raises(ValueError, match="does not exist"):
        draw_simulation(_simulation(), tmp_path / "missing" / "a.png")
