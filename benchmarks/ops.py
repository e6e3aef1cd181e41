"""Time ops beside their peers in one process: ``python -m benchmarks.ops``.

Each op first has to agree with PyTorch; then both take turns, so that a change of the machine's mood meets both. Rows
go to ``benchmarks/results/ops.csv``. Bandwidth counts every byte that must be read or written once. The exit status is
1 when a bound is missed.

``adamw``     on a CPU: bf16 gradient in, bf16 parameter out, beside ``torch.add`` and cast, fused step, cast.
``stall``     how long Python in another thread stands still while the step runs: ``benchmarks/stall.py``. Means
              something on an idle machine only.
``step``      the kernel that steps units in 16 bits, and the norm, beside the passes of PyTorch's kernels that they
              replace; needs a GPU.
``flat``      kernels of optimizers and gradients beside a copy of the same bytes; needs a GPU.
``contests``  quantization, and ops for models, beside their peers: ``benchmarks/contests.py``. On a CPU the ops are
              plain PyTorch, so their rows have no bounds there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks import stall
from benchmarks.contests import contests
from benchmarks.sides import measure
from benchmarks.table import Row, append, heading
from benchmarks.turns import device, row, time_in_turns
from lightning_zero.engine.buffers import sharded_gradient
from lightning_zero_ops import accumulate_, adamw, adamw_step_, lion_step_, sq_norm_and_finite
from lightning_zero_ops.flat import sq_norm
from lightning_zero_ops.selfcheck import kernels_agree

__all__ = ["GROUPS", "measure_adamw", "measure_contests", "measure_flat", "measure_stall", "measure_step"]

# A GPU moves hundreds of MB in the time of a launch.
NUMEL = {"cpu": 16_000_000, "cuda": 128_000_000}
ADD_BOUND = 0.85
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

    def cast_step_cast(self, factor: Tensor | None = None) -> None:
        grad = self.grad.float() if factor is None else self.grad.float().mul_(factor)
        torch._fused_adamw_(
            [self.param], [grad], self.moments[:1], self.moments[1:], [],
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


def measure_adamw(numel: int, repeats: int) -> Iterator[Row]:
    """Yield the rows of ``adamw``; their ratios are to ``torch.add``."""
    _check(numel, "cpu")
    state = _Adamw(numel, "cpu")
    left, right, total = torch.randn(numel), torch.randn(numel), torch.empty(numel)
    cases: dict[str, tuple[Callable[[], object], int]] = {
        "torch.add": (lambda: torch.add(left, right, out=total), 12 * numel),
        "adamw_step_": (state.step, BYTES_ADAMW * numel),
        "cast-step-cast": (state.cast_step_cast, BYTES_ADAMW * numel),
    }
    found = time_in_turns(cases, repeats)
    for name, bound in (("adamw_step_", ADD_BOUND), ("cast-step-cast", None)):
        yield row("adamw", f"{name}/add", _millions(numel), "bf16", found[name], found["torch.add"], bound)


def measure_stall(numel: int, repeats: int) -> Iterator[Row]:
    """Yield the rows of ``stall``."""
    yield from stall.measure(_Adamw(numel, "cpu").step, _millions(numel), "bf16", repeats)


def measure_flat(numel: int, repeats: int) -> Iterator[Row]:
    """Yield the rows of ``flat``; their ratios are to a copy, that of the last one to PyTorch's passes."""
    _check(numel, device())
    state = _Adamw(numel, device())
    total, half = torch.empty(numel, device=device()), state.grad

    def norm_clip_step_cast() -> None:
        norm = torch.linalg.vector_norm(half, dtype=torch.float32)
        state.cast_step_cast((1.0 / norm).clamp(max=1.0))

    def norm_and_step() -> None:
        norm = sq_norm_and_finite(half)[0].sqrt()
        factor = (1.0 / norm).clamp(max=1.0)
        adamw_step_(
            state.param, *state.moments, half, step=2, lr=1e-3, weight_decay=0.1, factor=factor, out=state.out
        )  # fmt: skip

    cases: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: total.copy_(state.param), 8 * numel),
        "adamw_step_": (state.step, BYTES_ADAMW * numel),
        "lion_step_": (lambda: lion_step_(state.param, state.moments[0], half, lr=1e-4, out=state.out), 20 * numel),
        "accumulate_": (lambda: accumulate_(total, half), 10 * numel),
        "sq_norm": (lambda: sq_norm_and_finite(half), 2 * numel),
        "norm+adamw": (norm_and_step, (BYTES_ADAMW + 2) * numel),
        "torch": (norm_clip_step_cast, (BYTES_ADAMW + 2) * numel),
    }
    found = time_in_turns(cases, repeats)
    bounds = {"adamw_step_": 0.92, "lion_step_": None, "accumulate_": None, "sq_norm": 0.85}
    for name, bound in bounds.items():
        yield row("flat", f"{name}/copy", _millions(numel), "bf16", found[name], found["copy"], bound)
    yield row("flat", "norm+adamw/torch", _millions(numel), "bf16", found["norm+adamw"], found["torch"], 1.6)


def measure_step(numel: int, repeats: int) -> Iterator[Row]:
    """Yield the rows of ``step``: the engine's step on a GPU with kernels, beside the one without."""
    if not kernels_agree(torch.device(device())):
        reason = "no GPU" if device() == "cpu" else "Triton's kernels do not agree with PyTorch's"
        yield Row(
            what="step", variant="kernel/passes", shape=_millions(numel), dtype="bf16", world=1, metric="bandwidth",
            unit="GB/s", verdict=f"skipped: {reason}",
        )  # fmt: skip
        return
    mine, theirs = _Adamw(numel, device()), _Adamw(numel, device())
    factor = torch.full((), 0.5, device=device())
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "l2": 0.0, "tails": ()}

    def kernel() -> None:
        adamw.kernel_step_(mine.param, *mine.moments, mine.out, mine.grad, factor, 2, **options)

    def passes() -> None:
        adamw.pytorch_step_(theirs.param, *theirs.moments, theirs.out, theirs.grad, factor, 2, **options)  # type: ignore[arg-type]

    def norm_of_pieces() -> Tensor:
        pieces = torch.split(mine.grad, sharded_gradient._NORM_NUMEL)
        return torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]).norm()

    kernel()
    passes()
    torch.testing.assert_close(mine.param, theirs.param, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(mine.out, theirs.out, rtol=2**-7, atol=1e-7)
    torch.testing.assert_close(sq_norm(mine.grad).sqrt(), norm_of_pieces(), rtol=1e-12, atol=0.0)
    found = time_in_turns(
        {
            "kernel": (kernel, BYTES_ADAMW * numel),
            "passes": (passes, BYTES_ADAMW * numel),
            "sq_norm": (lambda: sq_norm(mine.grad), 2 * numel),
            "pieces": (norm_of_pieces, 2 * numel),
        },
        repeats,
    )
    yield row("step", "kernel/passes", _millions(numel), "bf16", found["kernel"], found["passes"], 1.3)
    yield row("step", "sq_norm/pieces", _millions(numel), "bf16", found["sq_norm"], found["pieces"], 1.0)


def measure_contests(numel: int, repeats: int) -> Iterator[Row]:
    """Yield the rows of ``contests``."""
    for contest in contests(numel):
        yield from measure(contest, repeats)


def _millions(numel: int) -> str:
    return f"{numel / 1e6:g}M"


GROUPS = {
    "cpu": {"adamw": measure_adamw, "stall": measure_stall, "step": measure_step, "contests": measure_contests},
    "cuda": {"step": measure_step, "flat": measure_flat, "contests": measure_contests},
}


def main() -> None:
    """Measure the groups of this machine's device, print and append the rows."""
    groups = GROUPS[device()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=groups, action="append", help="may be given more than once")
    parser.add_argument("--numel", type=int, default=NUMEL[device()])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-csv", action="store_true", help="print only")
    options = parser.parse_args()
    print(heading(), flush=True)
    verdicts = []
    for name in options.only or groups:
        rows = []
        for one in groups[name](options.numel, options.repeats):
            print(one, flush=True)
            rows.append(one)
            verdicts.append(one.verdict)
        if not options.no_csv:
            append(rows, "ops")
    raise SystemExit("MISSED" in verdicts)


if __name__ == "__main__":
    main()
