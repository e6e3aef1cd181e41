"""Calls between files are counted by phase."""

from __future__ import annotations

import pytest

from benchmarks import hops


def test_every_phase_of_a_parameter_is_traced(capsys: pytest.CaptureFixture[str]) -> None:
    found = hops.main(["--stage", "2"])
    assert {"construct", "shard", "forward", "backward, reduce", "step, publish", "save", "load"} <= set(found.calls)
    assert found.files("step, publish")["engine/optim/optimizer.py"] > 0
    assert all(file for file, *_ in set().union(*found.calls.values()))
    assert capsys.readouterr().out.splitlines()[-1].startswith("| all | ")
