"""One op beside a copy of the same bytes, plain PyTorch, the output of ``torch.compile``, and Liger-Kernel.

Every side first has to agree with plain PyTorch in fp32 on the same values. Sides have inputs of their own, because
some of Liger's kernels write into theirs. A side that cannot run here has a row that says why.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.contests import Contest
from benchmarks.table import Row
from benchmarks.turns import device, named_device, row, time_in_turns

__all__ = ["measure"]

COPY_BOUND = 0.85
PEER_BOUND = 0.97
_ULPS = 8  # of the largest value, by which sides may differ: they round in other places

_Function = Callable[..., Any]
_Run = Callable[[], list[Tensor]]
_Way = Callable[[Contest, _Function], _Run]


def measure(contest: Contest, repeats: int, *, compiler: _Function = torch.compile) -> list[Row]:
    """Return the rows of a contest; their ratios are the op's bandwidth over that of a side.

    Raises:
        AssertionError: The op does not agree with plain PyTorch.
    """
    ways = {"": _forward, "+backward": _forward_and_backward}
    return [
        one
        for (suffix, way), nbytes in zip(ways.items(), contest.nbytes, strict=True)
        if nbytes
        for one in _measure(contest, contest.op + suffix, way, nbytes, repeats, compiler)
    ]


def _measure(
    contest: Contest,
    what: str,
    way: Callable[[Contest, _Function], _Run],
    nbytes: int,
    repeats: int,
    compiler: _Function,
) -> list[Row]:
    plain = way(contest, contest.plain)
    expected = _Expected(way(contest.in_fp32(), contest.plain)(), plain())
    sides = {"ours": expected.checked(way(contest, contest.ours)), "eager": plain}
    absent = {}
    makers = {"compile": lambda: compiler(contest.plain), _liger_name(): partial(_liger, contest)}
    for name, make in makers.items():
        try:
            sides[name] = expected.checked(way(contest, make()))
        except _Absent as reason:
            absent[name] = str(reason)
        except Exception as error:  # any error of a compiler or a foreign kernel is the answer
            absent[name] = f"failed: {type(error).__name__}"
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    cases: dict[str, tuple[Callable[[], object], int]] = {"copy": (lambda: target.copy_(source), 2 * source.nbytes)}
    cases |= {name: (side, nbytes) for name, side in sides.items()}
    found = time_in_turns(cases, repeats)
    mine = found.pop("ours")
    place = (contest.shape, contest.dtype)
    rows = [row(what, f"ours/{name}", *place, mine, peer, _bound(name)) for name, peer in found.items()]
    return rows + [_absent_row(what, f"ours/{name}", *place, reason) for name, reason in absent.items()]


def _bound(side: str) -> float | None:
    """Return the promised bound; None on CPUs, where the op is a reference."""
    if device() == "cpu" or side == "eager":
        return None
    return COPY_BOUND if side == "copy" else PEER_BOUND


def _absent_row(what: str, variant: str, shape: str, dtype: str, reason: str) -> Row:
    return Row(
        what=what, variant=variant, shape=shape, dtype=dtype, world=1, metric="bandwidth", unit="GB/s", verdict=reason,
        **named_device(),
    )  # fmt: skip


# -- Ways to run -------------------------------------------------------------------------------------------------------


def _forward(contest: Contest, function: _Function) -> _Run:
    inputs = [tensor.detach().clone() for tensor in contest.inputs]

    def run() -> list[Tensor]:
        with torch.no_grad():
            return _as_list(function(*inputs))

    return run


def _forward_and_backward(contest: Contest, function: _Function) -> _Run:
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in contest.inputs]
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    generator = torch.Generator(device()).manual_seed(1)
    grads: list[Tensor] = []

    def run() -> list[Tensor]:
        results = _as_list(function(*inputs))
        if not grads:
            drawn = [torch.randn(y.shape, generator=generator, device=y.device) for y in results]
            grads.extend(grad.bfloat16().to(y.dtype) for grad, y in zip(drawn, results, strict=True))
        return [*(y.detach() for y in results), *torch.autograd.grad(results, leaves, grads)]

    return run


def _as_list(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


class _Expected:
    """The expected results of every side.

    Args:
        exact: Of plain PyTorch in fp32.
        plain: Of plain PyTorch: its own error, twice, is allowed to all. Its sums over rows are in 16 bits on CPUs.
    """

    def __init__(self, exact: list[Tensor], plain: list[Tensor]) -> None:
        self._exact = exact
        self._bounds = [_bound_of(*pair) for pair in zip(exact, plain, strict=True)]

    def checked(self, run: _Run) -> _Run:
        """Return ``run`` if it gives the expected results.

        Raises:
            AssertionError: It does not.
        """
        for mine, exact, bound in zip(run(), self._exact, self._bounds, strict=True):
            torch.testing.assert_close(mine.float(), exact.float(), rtol=0.0, atol=bound)
        return run


def _bound_of(exact: Tensor, plain: Tensor) -> float:
    """Return how far an element may be off: integers by 1."""
    if not plain.is_floating_point():
        return 1.0
    rounding = _ULPS * torch.finfo(plain.dtype).eps * exact.abs().max().item()
    return max(rounding, 2.0 * (plain.float() - exact.float()).abs().max().item())


# -- Liger-Kernel ------------------------------------------------------------------------------------------------------


class _Absent(Exception):
    """A side that is not here; says why."""


def _liger_name() -> str:
    try:
        return f"liger-{importlib.metadata.version('liger-kernel')}"
    except importlib.metadata.PackageNotFoundError:
        return "liger"


def _liger(contest: Contest) -> _Function:
    """Return Liger-Kernel's side.

    Raises:
        _Absent: There is none, it is not installed, or there is no GPU.
    """
    if contest.liger is None:
        raise _Absent("no such op")
    if _liger_name() == "liger":
        raise _Absent("not installed")
    if device() == "cpu":
        raise _Absent("needs a GPU")
    name, adapt = contest.liger
    adapted: _Function = adapt(getattr(importlib.import_module("liger_kernel.transformers.functional"), name))
    return adapted
