"""Code around modules of pipeline stages that the program checkpoints (``torch.utils.checkpoint``).

Note [Calls of a recomputation]
    The backward runs the checkpointed function again, long after the step: modules of other stages must be passed over
    again, received tensors take the places of fakes again, and modules of this chunk draw the same random numbers from
    the stream of their chunk. So the first run notes every call of a module with a place, and the recomputation repeats
    these calls in order. Where the first run was broken off, the recomputation is over. PyTorch's reentrant variant
    cannot be broken off: the other one runs in its place.

Note [Tensors that count]
    PyTorch matches the tensors that the first run and the recomputation save, by their order. A module of another stage
    is passed over in both, but not in the same way: the first run may imagine its forward on fakes, and the
    recomputation returns the noted output. So tensors that are saved while it is passed over are hidden from PyTorch's
    checkpoint (``uncounted``). The program may write into the output: every recomputation gets a copy of the received
    tensors, as the first run did, and its own arguments where the module has returned arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.utils.checkpoint
from torch import Tensor
from torch.utils.checkpoint import _StopRecomputationError, checkpoint, noop_context_fn

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.module_state import version_of
from lightning_zero.parallel.pipeline.schedule.streams import RandomState
from lightning_zero.trees import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

__all__ = ["Again", "Checkpoints", "NotedCall", "NotedOutput", "uncounted"]

_Function = Callable[..., Any]


def uncounted() -> AbstractContextManager[None]:
    """Hide saved tensors from a checkpointed function around this code."""
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda packed: packed)


@dataclass(frozen=True)
class _Argument:
    """An output that is an argument."""

    leaf: int


@dataclass(frozen=True)
class _Received:
    """An output that is a copy of a received tensor."""

    tensor: Tensor


@dataclass(frozen=True)
class NotedOutput:
    """The output of a module that was passed over, as it was before the program could write into it."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @staticmethod
    def of(output: Any, arguments: Any, received: Mapping[int, Tensor]) -> NotedOutput:
        """Note an output.

        Args:
            output: Of the module.
            arguments: Of the call.
            received: The received tensors, by ``id`` of their copies.
        """
        given = {id(leaf): number for number, leaf in enumerate(tree_leaves(arguments)) if isinstance(leaf, Tensor)}

        def noted(leaf: Any) -> Any:
            if id(leaf) in received:
                return _Received(received[id(leaf)])
            return _Argument(given[id(leaf)]) if id(leaf) in given else leaf

        leaves, spec = tree_flatten(output)
        return NotedOutput(tuple(map(noted, leaves)), spec)

    def again(self, arguments: Any) -> Any:
        """Return the output of a repeated call."""
        given = tree_leaves(arguments)

        def leaf_of(noted: Any) -> Any:
            if isinstance(noted, _Received):
                return noted.tensor.clone()
            return given[noted.leaf] if isinstance(noted, _Argument) else noted

        return tree_unflatten(list(map(leaf_of, self.leaves)), self.spec)


@dataclass(frozen=True)
class NotedCall:
    """A call of a module with a place, as the first run made it.

    Attributes:
        name: Of the module.
        behind: Where code behind it began to draw.
        output: Of a module that was passed over; None for one that computed.
        random: Where a module that computed began to draw.
        received: Tensors in the places of fakes, and their versions, by leaf of its arguments.
    """

    name: str
    behind: RandomState
    output: NotedOutput | None = None
    random: RandomState | None = None
    received: dict[int, tuple[Tensor, int]] = field(default_factory=dict)

    @staticmethod
    def computed(name: str, given: Any, *, arguments: Any, random: RandomState, behind: RandomState) -> NotedCall:
        """Return the call of a module that computes with ``arguments``, where the program gave it ``given``."""
        pairs = zip(tree_leaves(given), tree_leaves(arguments), strict=True)
        received = {leaf: (one, version_of(one)) for leaf, (was, one) in enumerate(pairs) if one is not was}
        return NotedCall(name, behind, random=random, received=received)

    def with_received(self, arguments: Any) -> Any:
        """Return the arguments of a repeated call with the received tensors in their places.

        Raises:
            PipelineError: One has been changed since.
        """
        leaves, spec = tree_flatten(arguments)
        for leaf, (tensor, version) in self.received.items():
            if version_of(tensor) != version:
                raise PipelineError(
                    f"`{self.name}`, or code after it, writes into an argument that another pipeline stage has"
                    " computed, and is called inside of `torch.utils.checkpoint`, which runs it again in the backward."
                    " Compute a new tensor (`x = x + y`)."
                )
            leaves[leaf] = tensor
        return tree_unflatten(leaves, spec)


class Again:
    """The calls of a first run, one after the other."""

    def __init__(self, calls: list[NotedCall]) -> None:
        self._calls = iter(calls)

    def next(self) -> NotedCall:
        """Return the next call; end the recomputation where the first run has ended."""
        call = next(self._calls, None)
        if call is None:
            raise _StopRecomputationError
        return call


class Checkpoints:
    """The checkpointed functions of a run that call modules with a place.

    Args:
        run_again: Runs a function in a recomputation, given the calls that it makes.
        showing: Returns a function that makes a context, in which modules show the attributes that they show now.
    """

    def __init__(
        self,
        run_again: Callable[[Again, Callable[[], Any]], Any],
        showing: Callable[[], Callable[[], AbstractContextManager[None]]] = lambda: nullcontext,
    ) -> None:
        self._run_again = run_again
        self._showing = showing
        self._open: list[list[NotedCall]] = []  # those that are running
        self._num_with_contexts = 0  # of these
        self._started: list[Generator[None]] = []

    @property
    def is_open(self) -> bool:
        """Whether a checkpointed function is running."""
        return bool(self._open)

    def require_plain(self, name: str) -> None:
        """Refuse a call of the module ``name`` where PyTorch stores results of operations for the recomputation.

        Raises:
            PipelineError: One of the functions that are running has a ``context_fn``.
        """
        if self._num_with_contexts:
            raise PipelineError(
                f"`{name}` is called inside of `torch.utils.checkpoint(..., context_fn=...)`, as for selective"
                " checkpointing, which matches the operations of a forward with those of its recomputation. A pipeline"
                " stage passes over the modules of other stages, so the two differ. Leave `context_fn` out, checkpoint"
                " inside of the blocks, or use `ZeroStrategy(activation_checkpointing=...)`."
            )

    def note(self, call: NotedCall) -> None:
        """Note a call in the functions that are running."""
        for calls in self._open:
            calls.append(call)

    @contextmanager
    def watched(self, is_between: Callable[[], bool]) -> Iterator[None]:
        """Watch for checkpointed functions where ``is_between`` modules says so."""
        module: Any = torch.utils.checkpoint
        generator, reentrant = module._checkpoint_without_reentrant_generator, module.CheckpointFunction

        def watched_generator(function: _Function, *args: Any, **kwargs: Any) -> Generator[None]:
            if not is_between():
                started: Generator[None] = generator(function, *args, **kwargs)
                return started
            self._started.append(self._noting(generator, function, args, kwargs))
            return self._started[-1]

        def apply(function: _Function, preserve: bool, *args: Any) -> Any:
            if not is_between() or not any(isinstance(one, Tensor) and one.requires_grad for one in args):
                return reentrant.apply(function, preserve, *args)
            return checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=preserve, determinism_check="none"
            )

        try:
            module._checkpoint_without_reentrant_generator = watched_generator
            module.CheckpointFunction = SimpleNamespace(apply=apply)  # a class would be a cycle that holds the run
            yield
        finally:
            module._checkpoint_without_reentrant_generator, module.CheckpointFunction = generator, reentrant
            for started in reversed(self._started):  # one that was broken off may be open still
                started.close()
            self._started.clear()

    def _noting(self, generator: _Function, function: _Function, args: Any, kwargs: Any) -> Generator[None]:
        calls: list[NotedCall] = []
        has_contexts = args[1] is not noop_context_fn  # behind `preserve_rng_state`
        self._open.append(calls)
        self._num_with_contexts += has_contexts
        try:
            yield from generator(partial(self._again, calls, function, self._showing()), *args, **kwargs)
        finally:
            self._open[:] = [one for one in self._open if one is not calls]
            self._num_with_contexts -= has_contexts

    def _again(
        self,
        calls: list[NotedCall],
        function: _Function,
        showing: Callable[[], AbstractContextManager[None]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with showing():
            return self._run_again(Again(calls), partial(function, *args, **kwargs))
