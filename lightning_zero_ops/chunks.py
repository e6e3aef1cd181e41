"""Optimizer steps on flat tensors on a CPU: PyTorch's fused kernels over pieces that stay in the cache.

Note [Whose bits]
    PyTorch's fused kernels compute whole vectors, and the rest at the end of a tensor in a loop of its own. The two
    differ in the last bit: the compiler contracts products and sums in one and not in the other. So that no bit depends
    on how a tensor is cut, every element is computed in a vector; an incomplete one is padded in scratch memory. The
    exception is *tails*: elements that PyTorch, stepping each parameter by itself, would leave to that loop. With them
    a step of many parameters, or of a part of one, has the bits of PyTorch's own fused step (ADR 0018). The loop is
    itself compiled to vectors of up to 8 elements, so a tail may be cut at multiples of 8 only; shards are.

Note [Threads]
    A piece is small, so PyTorch's own threads would cost more than they bring. With more than one thread, each works on
    a slice of its own; all arithmetic runs without the interpreter's lock.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from threading import Barrier

import torch
from torch import Tensor

__all__ = ["Kernel", "Range", "step_in_chunks", "vector_numel"]

Range = tuple[int, int]
Kernel = Callable[[list[Tensor], list[list[Tensor]]], None]
"""Steps tensors in place: gradients, then for each state (the first are the parameters) as many tensors."""

# Long enough to hide 10 µs of calls per chunk, short enough for the cast gradient to stay in a cache of 1 MB. On a core
# of an EPYC chunks of 64, 128 and 256 Ki reach 0.82, 0.92 and 1.05 of the bandwidth of `torch.add`; cores share caches.
CHUNK = 131072


def step_in_chunks(
    kernel: Kernel, grad: Tensor, states: Sequence[Tensor], *, out: Tensor | None, factor: Tensor | None,
    tails: Sequence[int],
) -> None:  # fmt: skip
    """Cast and scale the gradient, run ``kernel`` and round the parameters, piece by piece.

    Args:
        kernel: Of fp32 tensors.
        grad: (n,) fp32, bf16 or fp16; not written.
        states: (n,) each, parameters first; those that are not fp32 are cast, and rounded back.
        out: (n,) takes the rounded parameters.
        factor: () fp32; multiplies the gradient.
        tails: Start and stop of the ranges of Note [Whose bits], one after the other.
    """
    if not grad.is_cpu:
        _step_at_once(kernel, grad, states, out, factor)
        return
    is_fp32 = all(tensor.dtype == torch.float32 for tensor in (grad, *states))
    pairs = tuple(zip(tails[::2], tails[1::2], strict=True))
    if is_fp32 and factor is None and out is None:
        for window in _windows(grad.numel(), pairs, vector_numel(), grad.numel()):
            _step(kernel, window, 0, grad, states)
        return
    windows = _windows(grad.numel(), pairs, vector_numel(), CHUNK)

    def run(mine: Sequence[_Window]) -> None:
        scratch = [torch.empty(CHUNK, dtype=torch.float32) for _ in range(1 + len(states))]
        for window in mine:
            _step_window(kernel, window, grad, states, scratch, out, factor)

    num_threads = min(torch.get_num_threads(), len(windows))
    if num_threads < 2:
        run(windows)
        return
    slices = [windows[rank * len(windows) // num_threads : (rank + 1) * len(windows) // num_threads]
              for rank in range(num_threads)]  # fmt: skip
    for done in [_workers(num_threads).submit(torch.no_grad()(run), mine) for mine in slices]:
        done.result()


@cache
def vector_numel() -> int:
    """Return how many fp32 elements PyTorch's CPU kernels compute at once."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512":
        return 16
    is_neon = platform.machine() in ("aarch64", "arm64") and "256" not in capability
    return 4 if is_neon else 8


# -- Pieces ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Window:
    """A range of at most ``CHUNK`` elements, and how its elements are computed."""

    start: int
    stop: int
    vectors: tuple[Range, ...]  # whole vectors
    singles: tuple[Range, ...]  # tails: shorter than a vector
    padded: tuple[Range, ...]  # shorter than a vector, computed in one


@lru_cache(maxsize=4096)
def _windows(numel: int, tails: tuple[Range, ...], vector: int, chunk: int) -> tuple[_Window, ...]:
    """Cut ``[0, numel)`` into pieces and gather neighbours into windows."""
    chunk = max(chunk // vector * vector, vector)
    pieces: list[tuple[int, int, str]] = []
    position = 0
    for start, stop in [*tails, (numel, numel)]:
        whole = position + (start - position) // vector * vector
        pieces += [(at, min(at + chunk, whole), "vectors") for at in range(position, whole, chunk)]
        pieces += [(whole, start, "padded")] if start > whole else []
        pieces += [(start, stop, "singles")] if stop > start else []
        position = stop
    windows: list[_Window] = []
    while pieces:
        start, kinds = pieces[0][0], {"vectors": [], "singles": [], "padded": []}  # type: ignore[var-annotated]
        stop = start
        while pieces and (stop == start or pieces[0][1] - start <= chunk):
            first, stop, kind = pieces.pop(0)
            kinds[kind].append((first, stop))
        windows.append(_Window(start, stop, **{kind: tuple(found) for kind, found in kinds.items()}))
    return tuple(windows)


def _step_at_once(
    kernel: Kernel, grad: Tensor, states: Sequence[Tensor], out: Tensor | None, factor: Tensor | None
) -> None:
    """Do the same on a device whose kernels do not depend on how a tensor is cut."""
    value = grad.float() if factor is None else grad.float() * factor
    local = [state.float() for state in states]
    kernel([value], [[state] for state in local])
    for state, values in zip(states, local, strict=True):
        if state is not values:
            state.copy_(values)
    if out is not None:
        out.copy_(local[0])


def _step_window(
    kernel: Kernel, window: _Window, grad: Tensor, states: Sequence[Tensor], scratch: Sequence[Tensor],
    out: Tensor | None, factor: Tensor | None,
) -> None:  # fmt: skip
    start, stop = window.start, window.stop
    value = scratch[0][: stop - start].copy_(grad[start:stop])
    if factor is not None:
        value.mul_(factor)
    local = [
        state[start:stop] if state.dtype == torch.float32 else place[: stop - start].copy_(state[start:stop])
        for state, place in zip(states, scratch[1:], strict=True)
    ]
    if window.vectors == ((start, stop),):
        kernel([value], [[state] for state in local])
    else:
        _step(kernel, window, start, value, local)
    for state, values in zip(states, local, strict=True):
        if state.dtype != torch.float32:
            state[start:stop].copy_(values)
    if out is not None:
        out[start:stop].copy_(local[0])


def _step(kernel: Kernel, window: _Window, origin: int, grad: Tensor, states: Sequence[Tensor]) -> None:
    """Run the kernel on the pieces of a window of tensors that begin at ``origin``."""
    ranges = [(start - origin, stop - origin) for start, stop in (*window.vectors, *window.singles)]
    if ranges:
        kernel([grad[a:b] for a, b in ranges], [[state[a:b] for a, b in ranges] for state in states])
    for start, stop in window.padded:
        _step_padded(kernel, grad[start - origin : stop - origin], [s[start - origin : stop - origin] for s in states])


def _step_padded(kernel: Kernel, grad: Tensor, states: Sequence[Tensor]) -> None:
    numel = grad.numel()
    columns = [torch.zeros(vector_numel(), dtype=torch.float32) for _ in range(1 + len(states))]
    for column, values in zip(columns, (grad, *states), strict=True):
        column[:numel].copy_(values)
    kernel(columns[:1], [[column] for column in columns[1:]])
    for state, column in zip(states, columns[1:], strict=True):
        state.copy_(column[:numel])


# -- Threads -----------------------------------------------------------------------------------------------------------


@cache
def _workers(num_threads: int) -> ThreadPoolExecutor:
    """Return threads in which PyTorch computes with one thread each."""
    here = torch.get_num_threads()
    everybody = Barrier(num_threads)  # the pool starts a thread only when none is idle

    def begin() -> None:
        torch.set_num_threads(1)
        everybody.wait()

    pool = ThreadPoolExecutor(num_threads, "chunks")
    for started in [pool.submit(begin) for _ in range(num_threads)]:
        started.result()
    torch.set_num_threads(here)  # a call in any thread sets the number that others begin with
    return pool


os.register_at_fork(after_in_child=_workers.cache_clear)
