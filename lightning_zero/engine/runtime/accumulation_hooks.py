"""The hooks of one parameter that autograd calls when it has put a gradient down: the program's, and the engine's.

Note [Hooks of the program]
    Hooks of ``param.register_post_accumulate_grad_hook``, from before ``shard`` or after it, run before the engine
    takes the gradient away. Autograd calls the hooks of a dictionary in the order in which they were inserted: the
    engine's entry is put behind each new one. Where the program has a hook, another entry comes first and shows the sum
    over the micro-batches, as plain PyTorch does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_zero.config import STEP_USE
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.parameter import (
    HookedParameter,
    begin_writes,
    end_writes,
    has_class,
    is_plain,
    num_writes,
    raw_grad,
    restore_class,
    set_raw_grad,
    swap_class,
    user_class,
)

__all__ = ["ShownSums", "has_hooks_of_program", "on_accumulated"]

Hook = Callable[[nn.Parameter], Any]

_FIRST, _EARLIER = "the engine's first", "the program's before"


def on_accumulated(param: nn.Parameter, show: Hook, take: Hook) -> RemovableHandle:
    """Call ``take`` when a gradient of a parameter is there, behind all hooks of the program; ``show`` before them.

    Returns:
        A function that removes both.
    """
    with torch._C.DisableTorchFunctionSubclass():
        hooks = param._post_accumulate_grad_hooks
        if not isinstance(hooks, _Hooks):
            hooks = _Hooks(hooks)
            requires_grad = param.requires_grad
            param.requires_grad = True
            param._post_accumulate_grad_hooks = hooks
            param.requires_grad = requires_grad
    return hooks.add_own(show, take)


class _Hooks(OrderedDict[Any, Hook]):
    """Hooks by key; the engine's last one stays the last.

    Args:
        earlier: The program's, by id. Handles of the program take them out of that dictionary, so it stays.
    """

    def __init__(self, earlier: Mapping[Any, Hook] | None) -> None:
        super().__init__()
        self._own: dict[Any, Hook] = {}  # the engine's
        self.earlier: Any = {} if earlier is None else earlier  # the program's, by id
        if earlier is not None:
            super().__setitem__(_EARLIER, lambda param: _call_all(earlier, param))

    def add_own(self, show: Hook, take: Hook) -> RemovableHandle:
        """Take the engine's hooks in."""
        handle = RemovableHandle(self)
        self._own = {_FIRST: show, handle.id: take}
        self._arrange()
        return handle

    @property
    def num_of_program(self) -> int:
        """Entries that are not the engine's."""
        return len(self.keys() - self._own.keys() - {_EARLIER}) + len(self.earlier)

    def __setitem__(self, key: Any, hook: Hook) -> None:
        """Take a hook of the program in."""
        super().__setitem__(key, hook)
        self._arrange()

    def __delitem__(self, key: Any) -> None:
        """Take a hook out; both of the engine's go together."""
        super().__delitem__(key)
        if key in self._own:
            self._own = {}
            self.pop(_FIRST, None)

    def _arrange(self) -> None:
        if not self._own:
            return
        (first, show), (last, take) = self._own.items()
        of_program = {key: hook for key, hook in self.items() if key not in self._own}
        self.clear()
        for key, hook in [*([(first, show)] if of_program else []), *of_program.items(), (last, take)]:
            super().__setitem__(key, hook)


def _call_all(hooks: Mapping[Any, Hook], param: nn.Parameter) -> Any:
    """Call hooks until one returns something, which autograd refuses."""
    return next((found for hook in tuple(hooks.values()) if (found := hook(param)) is not None), None)


def has_hooks_of_program(param: nn.Parameter) -> bool:
    """Say whether the program has hooks on a parameter's gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        hooks = param._post_accumulate_grad_hooks
        after = hooks.num_of_program if isinstance(hooks, _Hooks) else len(hooks or ())
        return bool(param._backward_hooks) or after > 0


class _Before(NamedTuple):
    """The writes into a parameter, and its gradient, before hooks of the program had the gradient."""

    num_writes: int
    is_plain: bool  # the parameter is watched for the time of the hooks only
    grad: torch.Tensor | None  # the gradient, if the sum is shown in its place
    shown: torch.Tensor | None
    shown_version: int


class ShownSums(dict[nn.Parameter, _Before]):
    """The gradients that hooks of the program see, by parameter, while these hooks run."""

    def show(self, buffer: FlatBuffer, index: int, param: nn.Parameter) -> None:
        """Show hooks of the program the sum over micro-batches; see Note [Hooks of the program]."""
        grad = raw_grad(param)
        total = None
        if grad is not None and not torch.is_grad_enabled():
            total = buffer.gradients.with_sum(index, grad)
        is_watched_here = is_plain(param) and user_class(param) is nn.Parameter
        if is_watched_here:
            swap_class(param, HookedParameter)
            begin_writes(param)
        writes = num_writes(param, 0)
        if total is None:
            self[param] = _Before(writes, is_watched_here, None, None, 0)
            return
        set_raw_grad(param, total)
        self[param] = _Before(writes, is_watched_here, grad, total, total._version)

    def taken(
        self, buffer: FlatBuffer, index: int, param: nn.Parameter, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the gradient to add to the local sum, after hooks of the program may have changed it.

        Raises:
            RuntimeError: One of them wrote the parameter, as an optimizer in the backward does.
        """
        before = self.get(param)
        if before is None:
            return grad
        is_written = num_writes(param, 0) != before.num_writes
        self._end_watch(param, before)
        if is_written:
            set_raw_grad(param, None)
            raise RuntimeError(
                f"A hook of `register_post_accumulate_grad_hook` has written `{buffer.layout.slots[index].name}` in the"
                " backward (an optimizer in the backward?), where its gradient is that of this rank alone."
                f" {STEP_USE}"
            )
        if before.shown is None:
            return grad
        if grad is before.shown and grad._version == before.shown_version:
            return before.grad
        buffer.gradients.drop_sum(index)
        return grad

    def leave(self, param: nn.Parameter) -> None:
        """Leave the gradient as hooks of the program have left it."""
        before = self.pop(param, None)
        if before is not None:
            self._end_watch(param, before)

    def _end_watch(self, param: nn.Parameter, before: _Before) -> None:
        if before.is_plain:
            end_writes(param)
            if has_class(param, HookedParameter):
                restore_class(param)

    def abandon(self) -> None:
        """Drop gradients that nobody took, because a hook of the program has failed."""
        for param, before in self.items():
            self._end_watch(param, before)
            set_raw_grad(param, None)
        self.clear()
