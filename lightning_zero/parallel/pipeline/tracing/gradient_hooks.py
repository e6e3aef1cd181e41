"""Hooks that a step registers on gradients of values between modules, of which a stage may have a part alone.

Note [Whole gradients]
    A source (see ``sources.py``) that a module of an earlier chunk has computed is on several stages, and the gradients
    of its copies are added up where it was computed. Only there a hook sees the whole gradient, so on the other stages
    it does nothing. A value that the code between the modules computes from a source is nowhere whole: refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.stages.sources import Source, is_fake
from lightning_zero.trees import tree_leaves

__all__ = ["GradientHooks"]


class GradientHooks:
    """Tells in a run of a step which values between the modules have whole gradients."""

    def __init__(self) -> None:
        self._sources: dict[Any, tuple[Source, Tensor]] = {}  # that were sent, by node of the graph
        self._own: set[Any] = set()  # nodes of outputs of this chunk's modules

    def mark(self, tensor: Tensor, source: Source) -> None:
        """Take note of a source that was sent."""
        if tensor.grad_fn is not None:
            self._sources[tensor.grad_fn] = source, tensor

    def mark_own(self, output: Any) -> None:
        """Note the outputs of a module of this chunk."""
        self._own.update(leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn)

    @contextmanager
    def watched(self, is_between: Callable[[], bool]) -> Iterator[None]:
        """Watch for hooks and retained gradients where ``is_between`` modules says so."""
        register, retain = Tensor.register_hook, Tensor.retain_grad

        def register_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
            if is_between() and self._is_whole_elsewhere(tensor, may_be_sent=True):
                hook = _do_nothing
            return register(tensor, hook)  # type: ignore[no-untyped-call]

        def retain_grad(tensor: Any) -> None:
            if is_between():
                self._is_whole_elsewhere(tensor, may_be_sent=False)
            retain(tensor)

        try:
            Tensor.register_hook, Tensor.retain_grad = register_hook, retain_grad  # type: ignore[method-assign,assignment]
            yield
        finally:
            Tensor.register_hook, Tensor.retain_grad = register, retain  # type: ignore[method-assign]

    def _is_whole_elsewhere(self, tensor: Tensor, *, may_be_sent: bool) -> bool:
        """Say whether a tensor is a source as it was sent; raise where no stage has its whole gradient."""
        found = None if is_fake(tensor) else self._source_of(tensor)
        if found is None:
            return False
        source, sent = found
        if may_be_sent and sent is tensor and tensor._version == 0:
            return True
        raise PipelineError(
            "The step asks for the gradient of a value between the modules that is, or is computed from, the output of"
            f" `{source.module}` of an earlier pipeline stage. Several stages have it, each with a part of its"
            " gradient. Register a hook (`tensor.register_hook`) on the module's output, before anything is done"
            " to it, or ask for the gradient in a block."
        )

    def _source_of(self, tensor: Tensor) -> tuple[Source, Tensor] | None:
        """Return a source that a tensor is computed from, between the modules."""
        return next((self._sources[node] for node in self._between(tensor) if node in self._sources), None)

    def _between(self, tensor: Tensor) -> Iterable[Any]:
        """Yield the nodes that a tensor is computed by, without those of modules of this chunk."""
        seen: set[Any] = set()
        waiting: list[Any] = [tensor.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen or node in self._own:
                continue
            seen.add(node)
            yield node
            waiting += [further for further, _ in node.next_functions]


def _do_nothing(grad: Tensor) -> None:
    """Leave a gradient as it is."""
