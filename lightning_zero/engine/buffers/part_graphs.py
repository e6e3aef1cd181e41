"""Operations in a backward: those of modules that compute with parts of parameters, and those of the program.

A backward calls Python code of both: custom functions and recomputed forwards of modules, which compute with the part
of a weight that a rank has, and hooks of the program, to which the weight is whole (``part_parameter.py``).

Note [Nodes of modules]
    Nodes of a graph are numbered in the order in which a thread makes them, so those of a module's forward are a range.
    An operation is a module's if the engine of autograd has called a custom function, or a recomputation, for a node in
    such a range; hooks are functions that the engine calls by themselves, whatever node they are registered at.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Container, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.utils import checkpoint

__all__ = ["is_of_module", "recorded_as_module"]

_RUN: Any = _engine_run_backward
_APPLY: Any = BackwardCFunction.apply
_PACKAGE = __name__.partition(".")[0] + "."
_MOST_RANGES = 2**14  # forwards whose backward is to come; nodes of older ones are taken for the program's

_ranges: dict[int, list[tuple[int, int]]] = {}  # of node numbers, ascending, by the thread that has made the nodes


@contextmanager
def recorded_as_module() -> Iterator[None]:
    """Record the nodes that are made in the context as those of a module that computes with parts."""
    start: int = torch._C._autograd._get_sequence_nr()
    try:
        yield
    finally:
        stop: int = torch._C._autograd._get_sequence_nr()
        if stop > start:
            _record(start, stop)


def _record(start: int, stop: int) -> None:
    ranges = _ranges.setdefault(threading.get_ident(), [])
    while ranges and ranges[-1][0] >= start:  # of a module inside, or of a thread that has ended
        ranges.pop()
    if len(ranges) >= _MOST_RANGES:
        del ranges[: _MOST_RANGES // 2]
    ranges.append((start, stop))


def is_of_module(frame: FrameType | None, skipped: Container[str]) -> bool:
    """Say whether an operation in a backward is one of a module that computes with parts, or of this package.

    Args:
        frame: The function that calls the operation.
        skipped: Names of modules of this package whose functions call operations for others.
    """
    caller = frame
    while caller is not None and (_is_of_torch(name := _module_of(caller)) or name in skipped):
        caller = caller.f_back
    if caller is not None and _module_of(caller).startswith(_PACKAGE):
        return True
    for depth, (called, is_run_here) in enumerate(_called_by_engines(frame)):
        if called.f_code is _APPLY.__code__:
            node = called.f_locals["self"]
        elif depth == 0 and called.f_code.co_filename == checkpoint.__file__:
            node = torch._C._current_autograd_node()
        elif depth == 0:
            return False
        else:
            continue
        if _is_recorded(node, is_run_here):
            return True  # an outer one: a recomputation with a backward of its own
    return False


def _module_of(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def _is_of_torch(name: str) -> bool:
    return name == "torch" or name.startswith("torch.")


def _called_by_engines(frame: FrameType | None) -> Iterator[tuple[FrameType, bool]]:
    """Yield the functions that engines of autograd have called, the innermost first.

    Yields:
        The function, and whether this thread has started the engine. The last one is the thread's outermost function.
    """
    called = None
    while frame is not None:
        if frame.f_code is _RUN.__code__ and called is not None:
            yield called, True
        called, frame = frame, frame.f_back
    if called is not None:
        yield called, False


def _is_recorded(node: Any, is_run_here: bool) -> bool:
    number, thread = node._sequence_nr(), threading.get_ident()
    own = _ranges.get(thread, ())
    return any(
        (place := bisect_right(ranges, number, key=lambda one: one[0])) and number < ranges[place - 1][1]
        for ranges in ((own,) if is_run_here and own else [one for key, one in _ranges.items() if key != thread])
    )
