"""Hooks of the program on modules, and code that stands in for their forwards."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

__all__ = ["has_hooks_only", "hooks_of_users", "is_own", "kind_of_hook", "runs_code_of_users", "without_hooks"]


def runs_code_of_users(module: nn.Module) -> bool:
    """Say whether forwards of a module run hooks that are not the engine's."""
    return not has_hooks_only(module) or any(True for _ in hooks_of_users(module))


def has_hooks_only(module: nn.Module) -> bool:
    """Say whether code of the program runs in forwards of a module in hooks of modules alone, or not at all."""
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return False
    # Code that collects a module's outputs may stand in for its forward.
    return all(is_own(_stand_in(child)) for child in module.modules())


def hooks_of_users(module: nn.Module) -> Iterator[tuple[tuple[int, bool, bool], Any]]:
    """Yield hooks and where they are: number of the submodule, whether behind it, whether with keywords."""
    for number, child in enumerate(module.modules()):
        for is_behind, (hooks, with_kwargs) in enumerate(
            (
                (child._forward_pre_hooks, child._forward_pre_hooks_with_kwargs),
                (child._forward_hooks, child._forward_hooks_with_kwargs),
            )
        ):
            yield from (
                ((number, bool(is_behind), key in with_kwargs), hook) for key, hook in hooks.items() if not is_own(hook)
            )


def kind_of_hook(placed: tuple[Any, Any]) -> Hashable:
    """Return a key that is equal for hooks of the same code; a program may register new ones in each step."""
    place, hook = placed
    hook = _innermost(hook)
    return place, getattr(hook, "__code__", type(hook))


def _stand_in(module: nn.Module) -> Any:
    """Return somebody's replacement of a module's forward, behind our own; ours if there is none."""
    forward = vars(module).get("forward", is_own)
    while is_own(forward) and getattr(forward, "stands_in_for", None) is not None:
        forward = forward.stands_in_for
    return forward


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Leave the hooks of the program out."""
    hooks = [one for child in module.modules() for one in (child._forward_pre_hooks, child._forward_hooks)]
    before = [dict(one) for one in hooks]
    for one in hooks:
        for key in [key for key, hook in one.items() if not is_own(hook)]:
            del one[key]
    try:
        yield
    finally:
        for one, old in zip(hooks, before, strict=True):
            one.clear()
            one.update(old)


def _innermost(hook: Any) -> Any:
    while isinstance(hook, (partial, MethodType)):
        hook = hook.func if isinstance(hook, partial) else hook.__func__
    return hook


def is_own(hook: Any) -> bool:
    """Say whether a hook, or an object in the place of a forward, is this package's."""
    hook = _innermost(hook)
    name = getattr(hook, "__module__", None) or type(hook).__module__
    return name.partition(".")[0] == __name__.partition(".")[0]
