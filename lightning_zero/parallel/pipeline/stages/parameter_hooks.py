"""Hooks of the program on gradients of parameters that several chunks use, each with a part of the gradient.

Note [Parts of a gradient]
    Every chunk has a backward of its own, so a hook on a parameter of several chunks (tied embeddings) would run once
    per chunk, on the part of the gradient that the chunk computes. That is refused. Parameters of modules of several
    chunks are known before the first step. Which chunks use a parameter around the blocks is not: if only one of them
    does, its hooks see the whole gradient and run as ever; if there are more, that is found in their backwards, before
    the step of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.stages.split import Split

__all__ = ["ParameterHooks"]


class ParameterHooks:
    """Refuses hooks on gradients of which a chunk has a part.

    Call protocol:
        1. ``require_none`` before anything is computed, and before every backward.
        2. ``watched`` around every backward.
        3. ``add_joined`` when the gradients of several stages are summed.

    Args:
        module: The root.
        split: The cut of the module.
        shared: Parameters that the options name as used by several stages.
        has_hooks: Says whether the program has hooks on a parameter's gradient.
    """

    def __init__(
        self, module: nn.Module, split: Split, shared: Iterable[str], has_hooks: Callable[[nn.Parameter], bool]
    ) -> None:
        self._has_hooks = has_hooks
        self._params = dict(module.named_parameters())
        first = {id(param): name for name, param in self._params.items()}
        users: dict[str, set[int | None]] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            users.setdefault(first[id(param)], set()).add(_chunk_of(name, split))
        self._joined = {name for name, chunks in users.items() if len(chunks - {None}) > 1}  # that several chunks use
        self._joined |= {first[id(module.get_parameter(name))] for name in shared}
        self._around = [name for name, chunks in users.items() if None in chunks]  # that any chunk may use
        self._seen: dict[str, set[int]] = {name: set() for name in self._around}  # chunks that had a gradient for hooks

    def require_none(self) -> None:
        """Raise where the program has a hook on a gradient of which this rank has a part.

        Raises:
            PipelineError: It has.
        """
        for name in sorted(self._joined):
            if self._is_hooked(name):
                raise PipelineError(
                    f"The program has a hook on the gradient of `{name}` (`{_method(self._params[name])}`), which"
                    " several pipeline chunks use. Each chunk computes a part of that gradient, and the hook would see"
                    " the parts. Do it in `on_after_backward` or `on_before_optimizer_step`, where `.grad` is their"
                    " sum, give each of the modules a parameter of its own, or leave `pipeline` out."
                )

    @contextmanager
    def watched(self, chunk: int) -> Iterator[None]:
        """Run a backward of a chunk, and find out which parameters around the blocks it uses.

        Raises:
            PipelineError: The program has a hook on one that other chunks of this rank use as well.
        """
        self.require_none()
        hooked = list(filter(self._is_hooked, self._around))
        with torch._C.DisableTorchFunctionSubclass():
            handles = [self._params[name].register_hook(partial(self._note, name, chunk)) for name in hooked]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.add_joined(name for name in hooked if len(self._seen[name]) > 1)

    def add_joined(self, names: Iterable[str]) -> None:
        """Note parameters that several chunks use.

        Raises:
            PipelineError: The program has a hook on the gradient of one of them.
        """
        found = set(names)
        if not found <= self._joined:
            self._joined |= found
            self.require_none()

    def _is_hooked(self, name: str) -> bool:
        return self._params[name].requires_grad and self._has_hooks(self._params[name])

    def _note(self, name: str, chunk: int, _: Tensor) -> None:
        self._seen[name].add(chunk)


def _chunk_of(name: str, split: Split) -> int | None:
    """Return the chunk whose modules have a parameter of this name; None for one around the blocks."""
    return next((place.chunk for place in split.places if name.startswith(f"{place.name}.")), None)


def _method(param: nn.Parameter) -> str:
    """Return by which method the program has registered a hook."""
    with torch._C.DisableTorchFunctionSubclass():
        return "register_hook" if param._backward_hooks else "register_post_accumulate_grad_hook"
