"""Time ops beside their peers in one process: ``python -m benchmarks.ops``.

Each op first has to agree with PyTorch; then both take turns, so that a change of the machine's mood meets both. Rows
go to ``benchmarks/results/ops.csv``. Bandwidth counts every byte that must be read or written once.

``adamw``  on a CPU: bf16 gradient in, bf16 parameter out, beside ``torch.add`` and cast, fused step, cast.
``stall``  the longest time that Python in another thread stands still while the step runs, less the time in which the
           system gave its core to others (``schedstat``). Means something on an idle machine only.
``gpu``    kernels on flat tensors beside a copy of the same bytes; needs a GPU.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import quantiles

import torch
from torch import Tensor

from benchmarks.table import Row, append, heading
from lightning_zero_ops import accumulate_, adamw_step_, lion_step_, sq_norm_and_finite

__all__ = ["measure_cpu", "measure_gpu", "measure_stall"]

NUMEL = 16_000_000
ADD_BOUND = 0.85
STALL_BOUND_MS = 2.0
BYTES_ADAMW = 24 + 2 + 2  # parameter and two moments read and written, gradient, 16-bit parameter


class _Adamw:
    """A parameter with its states, a gradient and a 16-bit copy."""

    def __init__(self, numel: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.param = torch.randn(numel, generator=generator, device=device)
        self.moments = [torch.zeros(numel, device=device) for _ in range(2)]
        self.grad = torch.randn(numel, generator=generator, device=device).bfloat16()
        self.out = torch.empty(numel, dtype=torch.bfloat16, device=device)

    def step(self) -> None:
        adamw_step_(self.param, *self.moments, self.grad, step=2, lr=1e-3, weight_decay=0.1, out=self.out)

    def cast_step_cast(self) -> None:
        torch._fused_adamw_(
            [self.param], [self.grad.float()], self.moments[:1], self.moments[1:], [],
            [torch.full((), 2.0, device=self.param.device)], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.1,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        self.out.copy_(self.param)


def _check(numel: int, device: str) -> None:
    """Raise if the op and PyTorch do not agree."""
    mine, theirs = _Adamw(numel, device), _Adamw(numel, device)
    mine.step()
    theirs.cast_step_cast()
    torch.testing.assert_close(mine.param, theirs.param, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(mine.out, theirs.out, rtol=2**-7, atol=1e-7)


def _bandwidths(cases: Mapping[str, tuple[Callable[[], object], int]], repeats: int) -> dict[str, list[float]]:
    """Return the bandwidths, in GB/s, of functions that take turns, given the bytes that each moves."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 1):
        for name, (function, nbytes) in cases.items():
            duration = _duration(function)
            if turn:  # the first is a warm-up
                found[name].append(nbytes / duration / 1e9)
    return found


def _duration(function: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _row(
    op: str, name: str, shape: str, dtype: str, values: list[float], peer: list[float], bound: float | None
) -> Row:
    ratios = quantiles([a / b for a, b in zip(values, peer, strict=True)], n=20)
    p20, p50, p80 = (quantiles(values, n=10)[place] for place in (1, 4, 7))
    ratio = ratios[9]
    return Row(
        what=op, variant=name, shape=shape, dtype=dtype, world=1, metric="bandwidth", unit="GB/s",
        p20=f"{p20:.2f}", p50=f"{p50:.2f}", p80=f"{p80:.2f}", ratio=f"{ratio:.3f}", lo=f"{ratios[0]:.3f}",
        hi=f"{ratios[-1]:.3f}", bound="" if bound is None else f"{bound}",
        verdict="" if bound is None else "ok" if ratio >= bound else "MISSED",
        **({"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    )  # fmt: skip


def measure_cpu(numel: int, repeats: int) -> list[Row]:
    """Return the rows of ``adamw`` on a CPU; their ratios are to ``torch.add``."""
    _check(numel, "cpu")
    state = _Adamw(numel, "cpu")
    left, right, total = torch.randn(numel), torch.randn(numel), torch.empty(numel)
    cases: dict[str, tuple[Callable[[], object], int]] = {
        "torch.add": (lambda: torch.add(left, right, out=total), 12 * numel),
        "adamw_step_": (state.step, BYTES_ADAMW * numel),
        "cast-step-cast": (state.cast_step_cast, BYTES_ADAMW * numel),
    }
    found = _bandwidths(cases, repeats)
    shape = f"{numel / 1e6:g}M"
    return [
        _row("adamw", f"{name}/add", shape, "bf16", found[name], found["torch.add"], bound)
        for name, bound in (("adamw_step_", ADD_BOUND), ("cast-step-cast", None))
    ]


def measure_stall(numel: int, repeats: int) -> Row:
    """Return the row of ``stall``: the longest gap in a thread of Python while another steps, in ms."""
    state = _Adamw(numel, "cpu")
    gaps = []
    for _ in range(repeats):
        worker = threading.Thread(target=state.step)
        worker.start()
        longest, last = 0.0, time.perf_counter() - _displaced_s()
        while worker.is_alive():
            now = time.perf_counter() - _displaced_s()
            longest, last = max(longest, now - last), now
        worker.join()
        gaps.append(longest * 1e3)
    p20, p50, p80 = (quantiles(gaps, n=10)[place] for place in (1, 4, 7))
    return Row(
        what="stall", variant="adamw_step_", shape=f"{numel / 1e6:g}M", dtype="bf16", world=1, metric="time", unit="ms",
        p20=f"{p20:.2f}", p50=f"{p50:.2f}", p80=f"{p80:.2f}", bound=f"{STALL_BOUND_MS}",
        verdict="ok" if p50 <= STALL_BOUND_MS else "MISSED",
    )  # fmt: skip


def _displaced_s() -> float:
    """Return how long this thread has waited for a core so far; 0 where the system does not say."""
    path = Path("/proc/thread-self/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


def measure_gpu(numel: int, repeats: int) -> list[Row]:
    """Return the rows of kernels on a GPU; their ratios are to a copy, and of the last one to PyTorch's passes."""
    _check(numel, "cuda")
    state = _Adamw(numel, "cuda")
    total, half = torch.empty(numel, device="cuda"), state.grad

    def norm_clip_step_cast(state: _Adamw = state) -> None:
        state.grad.float().norm().clamp_(min=1.0)
        state.cast_step_cast()

    def norm_and_step() -> Tensor:
        norm = sq_norm_and_finite(state.grad)[0].sqrt()
        adamw_step_(
            state.param, *state.moments, state.grad, step=2, lr=1e-3, factor=(1.0 / norm).clamp(max=1.0), out=state.out
        )
        return norm

    cases: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: total.copy_(state.param), 8 * numel),
        "adamw_step_": (state.step, BYTES_ADAMW * numel),
        "lion_step_": (lambda: lion_step_(state.param, state.moments[0], half, lr=1e-4, out=state.out), 20 * numel),
        "accumulate_": (lambda: accumulate_(total, half), 10 * numel),
        "sq_norm": (lambda: sq_norm_and_finite(half), 2 * numel),
        "norm+adamw": (norm_and_step, (BYTES_ADAMW + 2) * numel),
        "torch": (norm_clip_step_cast, (BYTES_ADAMW + 2) * numel),
    }
    found = _bandwidths(cases, repeats)
    shape = f"{numel / 1e6:g}M"
    bounds = {"adamw_step_": 0.92, "lion_step_": None, "accumulate_": None, "sq_norm": 0.85}
    rows = [_row("gpu", f"{n}/copy", shape, "bf16", found[n], found["copy"], bound) for n, bound in bounds.items()]
    return [*rows, _row("gpu", "norm+adamw/torch", shape, "bf16", found["norm+adamw"], found["torch"], 1.6)]


def main() -> None:
    """Measure what this machine can, print and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=NUMEL)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    rows = measure_gpu(options.numel, options.repeats) if torch.cuda.is_available() else []
    if not rows:
        rows = [*measure_cpu(options.numel, options.repeats), measure_stall(options.numel, options.repeats)]
    print(heading())
    for row in rows:
        print(row)
    append(rows, "ops")


if __name__ == "__main__":
    main()
