"""One op beside a copy of the same bytes, plain PyTorch, what ``torch.compile`` makes of it, and Liger-Kernel.

Every side first has to agree with plain PyTorch on the same values. Sides have inputs of their own, because some of
Liger's kernels write into theirs. A side that cannot run here has a row that says why.
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
        for one in _measure(contest, contest.op + suffix, partial(way, contest), nbytes, repeats, compiler)
    ]


def _measure(
    contest: Contest, what: str, way: Callable[[_Function], _Run], nbytes: int, repeats: int, compiler: _Function
) -> list[Row]:
    plain = way(contest.plain)
    expected = plain()
    sides = {"ours": _agreeing(way(contest.ours), expected), "eager": plain}
    absent = {}
    makers = {"compile": lambda: compiler(contest.plain), _liger_name(): partial(_liger, contest)}
    for name, make in makers.items():
        try:
            sides[name] = _agreeing(way(make()), expected)
        except _Absent as reason:
            absent[name] = str(reason)
        except Exception as error:  # whatever a compiler or somebody else's kernel raises is the answer
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
    """Return what is promised; on CPUs the op is a reference, of which nothing is."""
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
            grads.extend(torch.randn(y.shape, generator=generator, device=y.device, dtype=y.dtype) for y in results)
        return [*(y.detach() for y in results), *torch.autograd.grad(results, leaves, grads)]

    return run


def _as_list(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _agreeing(run: _Run, expected: list[Tensor]) -> _Run:
    """Return ``run`` if it gives what plain PyTorch gives: integers up to 1.

    Raises:
        AssertionError: It does not.
    """
    for mine, theirs in zip(run(), expected, strict=True):
        bound = _ULPS * torch.finfo(theirs.dtype).eps * theirs.abs().max().item() if theirs.is_floating_point() else 1.0
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.0, atol=bound)
    return run


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
