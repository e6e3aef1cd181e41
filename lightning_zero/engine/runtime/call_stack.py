"""The calls of modules, functions and backwards that are running, as the interpreter's stack and PyTorch know them."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = [
    "ModuleCall",
    "apart_from_program",
    "enclosing_function",
    "frame_of_forward",
    "handled_error",
    "in_backward",
    "in_compiled_code",
    "in_function",
    "is_raising",
    "may_keep_handles",
    "runs_whole_graph",
]

_NOTHING: AbstractContextManager[Any] = nullcontext()
_SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
_APPLY = getattr(torch.autograd.Function.apply, "__func__", None)  # since PyTorch 2.14 it is not written in Python
_COMPILED = "compile_wrapper"  # in `torch._dynamo.eval_frame`
_FORWARD_CODES = () if _APPLY is None else (_APPLY.__code__,)
_BACKWARD_CODES = tuple(  # newer versions of PyTorch have the second
    getattr(BackwardCFunction, name).__code__ for name in ("apply", "apply_boxed") if hasattr(BackwardCFunction, name)
)


class ModuleCall(NamedTuple):
    """The call of a module."""

    frame: FrameType
    thread: int
    handled: BaseException | None  # the error that was being handled when it began

    @classmethod
    def of_now(cls) -> ModuleCall | None:
        """Return the innermost one that is running, which has called a hook."""
        frame = frame_of_forward()
        return None if frame is None else cls(frame, threading.get_ident(), handled_error())

    @property
    def is_running(self) -> bool:
        """Whether it is still going on; of other threads it is not known."""
        caller: FrameType | None = sys._getframe(1)
        while caller is not None and caller is not self.frame:
            caller = caller.f_back
        return caller is not None or self.thread != threading.get_ident()


def handled_error() -> BaseException | None:
    """Return the error that is being handled, or raised."""
    return sys.exc_info()[1]


def is_raising(handled: BaseException | None) -> bool:
    """Say whether an error is being raised, by a call that began while ``handled`` was being handled."""
    error = sys.exc_info()[1]
    return error is not None and error is not handled


def frame_of_forward() -> FrameType | None:
    """Return the call of a module that has called a hook."""
    return _calling((nn.Module._call_impl.__code__,))


def in_function() -> bool:
    """Say whether the forward of a Python function of autograd is running."""
    return _calling(_FORWARD_CODES or _forwards(torch.autograd.Function)) is not None


def in_backward() -> bool:
    """Say whether a backward is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def in_compiled_code() -> bool:
    """Say whether a call of something that ``torch.compile`` has made is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _COMPILED:
        frame = frame.f_back
    return frame is not None


def runs_whole_graph() -> bool:
    """Say whether the backward that is running is one of all tensors, not of some."""
    return bool(torch.autograd._is_checkpoint_valid())  # type: ignore[no-untyped-call]


def enclosing_function() -> Any:
    """Return the node of the innermost Python function whose backward has begun the one that is running, if any."""
    frame = _calling(_BACKWARD_CODES)
    return None if frame is None else frame.f_locals["self"]


def may_keep_handles() -> bool:
    """Say whether saved tensors may have hooks; a graph without them keeps the memory of the weights in it."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None


def apart_from_program() -> AbstractContextManager[Any]:
    """Keep the engine's own operations out of transforms and selective checkpointing, which follow the program's."""
    is_transformed = peek_interpreter_stack() is not None
    is_recorded = bool(_len_torch_dispatch_stack()) and any(
        isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack()
    )
    return _apart(is_transformed, is_recorded) if is_transformed or is_recorded else _NOTHING


@contextmanager
def _apart(is_transformed: bool, is_recorded: bool) -> Iterator[None]:
    with ExitStack() as stack:
        if is_transformed:
            stack.enter_context(temporarily_clear_interpreter_stack())
        if is_recorded:
            # A recomputation looks for the operations of the forward, and the engine makes others.
            for mode in reversed(stack.enter_context(_disable_current_modes())):
                if not isinstance(mode, _SELECTIVE):
                    stack.enter_context(mode)
        yield


def _forwards(function: type[torch.autograd.Function]) -> set[CodeType]:
    """Return the code of the forwards of the classes that are made of one."""
    found: set[CodeType] = set()
    classes = [function]
    while classes:
        one = classes.pop()
        classes += one.__subclasses__()
        forward = inspect.unwrap(one.forward)
        if hasattr(forward, "__code__"):
            found.add(forward.__code__)
    return found


def _calling(codes: Collection[CodeType]) -> FrameType | None:
    """Return the innermost call that is running of some functions, given by their code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame
