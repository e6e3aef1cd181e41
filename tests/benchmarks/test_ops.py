from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks import ops, stall
from benchmarks.contests import Contest, contests
from benchmarks.sides import measure
from tests.sampling import sample

INTERPRETED_COMPILER = partial(torch.compile, backend="eager")
PEERS = ("copy", "eager", "compile", "liger")


def _contests() -> dict[str, Contest]:
    return {contest.op: contest for contest in contests(4096)}


@pytest.mark.parametrize(
    "op",
    sample(("quantize", "dequantize", "rms_norm", "layer_norm", "swiglu", "geglu", "rotary"), "rms_norm", "rotary"),
)
def test_every_op_has_a_row_beside_each_peer(op: str) -> None:
    contest = _contests()[op]
    rows = measure(contest, 2, compiler=INTERPRETED_COMPILER)
    ways = [op] if contest.nbytes[1] == 0 else [op, f"{op}+backward"]
    assert [row.what for row in rows] == [way for way in ways for _ in PEERS]
    assert [row.variant.split("-")[0] for row in rows] == [f"ours/{peer}" for _ in ways for peer in PEERS]
    assert all(bool(row.ratio) != bool(row.verdict) for row in rows)  # a figure, or why there is none


def test_an_op_that_disagrees_with_pytorch_is_not_timed() -> None:
    wrong = replace(_contests()["swiglu"], ours=lambda gate, up: gate * up)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        measure(wrong, 2, compiler=INTERPRETED_COMPILER)


def test_a_peer_that_does_not_run_has_a_row_that_says_so() -> None:
    def broken(function: object) -> None:
        raise RuntimeError("no C++ compiler")

    rows = measure(_contests()["dequantize"], 2, compiler=broken)
    assert {row.variant: row.verdict for row in rows}["ours/compile"] == "failed: RuntimeError"


def test_the_bytes_of_an_op_are_those_of_its_inputs_and_results() -> None:
    for contest in _contests().values():
        results = contest.plain(*contest.inputs)
        tensors: list[Tensor] = [*contest.inputs, *([results] if isinstance(results, Tensor) else results)]
        small = 4096 * 2 * 3  # weights of norms
        assert contest.nbytes[0] == pytest.approx(sum(tensor.nbytes for tensor in tensors), abs=small)


@pytest.mark.parametrize("group", ["adamw", "flat"])
def test_optimizers_and_gradients_have_rows(group: str) -> None:
    rows = list({"adamw": ops.measure_adamw, "flat": ops.measure_flat}[group](5000, 2))
    assert all(float(row.ratio) > 0 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU measures them")
def test_rows_of_steps_on_a_gpu_say_why_they_are_missing() -> None:
    (row,) = ops.measure_step(5000, 2)
    assert (row.ratio, row.verdict) == ("", "skipped: no GPU")


@pytest.mark.gpu
def test_steps_on_a_gpu_have_rows() -> None:
    rows = list(ops.measure_step(1_000_000, 2))
    assert all(float(row.ratio) > 0 for row in rows)


# -- Stalls ------------------------------------------------------------------------------------------------------------


def _hold_the_lock(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@pytest.mark.alone
def test_a_step_that_holds_the_lock_shows() -> None:
    """Threads take turns every 5 ms, so nobody waits longer for one that only computes in Python."""
    waits = [stall._beside(lambda: _hold_the_lock(0.05)).lock for _ in range(3)]
    assert max(waits) > stall.BOUND_MS


@pytest.mark.alone
def test_a_step_without_the_lock_shows_no_wait_for_it() -> None:
    waits = [stall._beside(lambda: time.sleep(0.02)).lock for _ in range(5)]
    assert min(waits) < stall.BOUND_MS
