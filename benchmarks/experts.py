"""Time a mixture of experts beside a loop over its experts: ``python -m benchmarks.experts``.

Both compute forward and backward of SwiGLU experts on the same tokens, with the same weights. The loop is the usual
one: for every expert it finds its tokens, reads them by index, computes them, and adds the weighted results by index.
Before anything is timed, outputs and gradients have to agree. Rows go to ``benchmarks/results/experts.csv``. The exit
status is 1 when the bound is missed: at 16 experts the layer takes at most 0.7 of the loop's time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.step import percentiles_ms, ratio_interval
from benchmarks.table import Row, append, heading
from benchmarks.turns import device, named_device, time_in_turns
from lightning_zero.moe import MoE

__all__ = ["BOUND", "measure"]

BOUND = 0.7
BOUNDED_EXPERTS = 16
K = 2


class _Expert(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class _Loop(nn.Module):
    """The layer as it is written by hand."""

    def __init__(self, hidden: int, experts: list[nn.Module]) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, len(experts), bias=False)
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x.float(), self.router.weight.float()).softmax(-1)
        weights, chosen = scores.topk(K)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            tokens, places = torch.where(chosen == index)
            result = expert(x[tokens]) * weights[tokens, places].unsqueeze(1)
            out.index_add_(0, tokens, result.to(out.dtype))
        return out


def measure(num_experts: int, tokens: int, hidden: int, width: int, *, repeats: int, dtype: torch.dtype) -> Row:
    """Return the row of one shape; its ratio is the layer's time over the loop's.

    Raises:
        AssertionError: The two do not agree.
    """
    torch.manual_seed(0)
    experts: list[nn.Module] = [_Expert(hidden, width) for _ in range(num_experts)]
    layer, loop = MoE(hidden, experts, num_experts, k=K), _Loop(hidden, experts)
    with torch.no_grad():
        loop.router.weight.copy_(layer.router.weight)
    layer, loop = layer.to(device(), dtype), loop.to(device(), dtype)
    x, grad = torch.randn(2, tokens, hidden, device=device()).to(dtype)
    sides = {"layer": _step(layer, lambda x: layer(x)[0], x, grad), "loop": _step(loop, loop, x, grad)}
    _compare(sides["layer"](), sides["loop"](), dtype)
    found = time_in_turns({name: (side, 1) for name, side in sides.items()}, repeats)
    mine, theirs = found["layer"].seconds, found["loop"].seconds
    ratio, lo, hi = ratio_interval(mine, theirs)
    bound = BOUND if num_experts == BOUNDED_EXPERTS else None
    return Row(
        what="experts", variant="layer/loop", shape=f"{num_experts}x{tokens}x{hidden}x{width}",
        dtype="fp32" if dtype == torch.float32 else "bf16", world=1, metric="time", unit="ms", **percentiles_ms(mine),
        ratio=f"{ratio:.3f}", lo=f"{lo:.3f}", hi=f"{hi:.3f}", bound="" if bound is None else f"{bound}",
        verdict="" if bound is None else "ok" if ratio <= bound else "MISSED", **named_device(),
    )  # fmt: skip


def _step(
    module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor
) -> Callable[[], list[Tensor]]:
    """Return forward and backward as one call; it returns output and gradients, those of experts by name, stacked."""
    leaf = x.detach().requires_grad_()

    def run() -> list[Tensor]:
        for one in (leaf, *module.parameters()):
            one.grad = None
        out = forward(leaf)
        out.backward(grad)
        return [out.detach(), *(one.grad for one in (leaf, *module.parameters()) if one.grad is not None)]

    return run


def _compare(mine: list[Tensor], theirs: list[Tensor], dtype: torch.dtype) -> None:
    """Compare output, input and router, and the experts' gradients in the order of names."""
    num = (len(theirs) - 3) // (len(mine) - 3)
    stacked = [torch.stack(theirs[3 + kind :: len(mine) - 3]) for kind in range(len(mine) - 3)]
    assert all(len(one) == num for one in stacked)
    for one, other in zip(mine, [*theirs[:3], *stacked], strict=True):
        tolerance = (1e-5 if dtype == torch.float32 else 0.05) * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance)


# Tokens and sizes: fine-grained experts as in DeepSeek's models, of a width below that of a token.
SHAPES = {"cpu": [(16, 2048, 256, 64), (16, 1024, 512, 128), (64, 2048, 256, 64)], "cuda": [(16, 8192, 2048, 1024)]}


def main() -> None:
    """Measure the shapes of this machine's device, print and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--shape", help="experts x tokens x hidden x width, such as 16x2048x256x64")
    parser.add_argument("--no-csv", action="store_true", help="print only")
    options = parser.parse_args()
    dtype = torch.float32 if device() == "cpu" else torch.bfloat16
    shapes = [tuple(map(int, options.shape.split("x")))] if options.shape else SHAPES[device()]
    print(heading(), flush=True)
    rows = []
    for shape in shapes:
        rows.append(measure(*shape, repeats=options.repeats, dtype=dtype))  # type: ignore[misc]
        print(rows[-1], flush=True)
    if not options.no_csv:
        append(rows, "experts")
    raise SystemExit(any(row.verdict == "MISSED" for row in rows))


if __name__ == "__main__":
    main()
