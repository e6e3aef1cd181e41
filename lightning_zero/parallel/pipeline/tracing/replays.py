"""Forwards on fakes of modules with hooks of the program: recorded once, after which the hooks run alone.

A hook may do anything with its arguments, so it is called in every step, also where its module is passed over. The
forward around it returns the same shapes again, and is not run again: hooks get new fakes, or tensors that have come
from their stage, in the places of those of the recorded forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.parallel.pipeline.stages.sources import Shape, describe_tensor
from lightning_zero.trees import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["Recording"]

_KNOWN_BY_VALUE = (int, float, complex, str, bool, bytes, type(None), torch.Size)


@dataclass(frozen=True)
class _Argument:
    """A leaf of the arguments of the recorded call."""

    leaf: int


@dataclass(frozen=True)
class _Value:
    """A tensor inside the call."""

    number: int


@dataclass(frozen=True)
class _Outputs:
    """Outputs of a module inside: the values of some leaves."""

    name: str
    is_inner: bool
    values: tuple[tuple[int, int], ...]  # leaf and number of the value


@dataclass(frozen=True)
class _HookCall:
    number: int  # of the hook
    leaves: tuple[Any, ...]
    spec: TreeSpec


@dataclass
class Recording:
    """A forward on fakes.

    Attributes:
        is_exact: Whether it can be replayed: hooks returned nothing, and were given tensors, modules and constants.
    """

    inputs: Sequence[Any]
    is_exact: bool = True
    _shapes: list[Shape] = field(default_factory=list)  # of values
    _events: list[_Outputs | _HookCall] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)  # of values, by `id` of their tensors
    _kept: list[Any] = field(default_factory=list)  # these tensors

    def note_outputs(self, name: str, leaves: Mapping[int, tuple[Tensor, Tensor]], *, is_inner: bool) -> None:
        """Note a module's outputs: by leaf, the fake and the tensor that hooks were given in its place."""
        values = []
        for leaf, (fake, shown) in leaves.items():
            number = self._number_of(fake)
            self._numbers[id(shown)] = number
            self._kept.append(shown)
            values.append((leaf, number))
        self._events.append(_Outputs(name, is_inner, tuple(values)))

    @contextmanager
    def hook(self, number: int, arguments: Any) -> Iterator[list[Any]]:
        """Note the call of a hook with ``(args, kwargs)``; yield a list that gets its result."""
        leaves, spec = tree_flatten(arguments)
        self._events.append(_HookCall(number, tuple(map(self._place, leaves)), spec))
        results: list[Any] = []
        try:
            yield results
        finally:
            self.is_exact = self.is_exact and results == [None]

    def _place(self, leaf: Any) -> Any:
        for number, given in enumerate(self.inputs):
            if leaf is given and isinstance(leaf, Tensor):
                return _Argument(number)
        if isinstance(leaf, Tensor):
            return _Value(self._number_of(leaf))
        self.is_exact = self.is_exact and isinstance(leaf, (nn.Module, *_KNOWN_BY_VALUE))
        return leaf

    def _number_of(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._shapes)
            self._shapes.append(describe_tensor(tensor))
            self._kept.append(tensor)
        return self._numbers[id(tensor)]

    def end(self) -> None:
        """Let go of the tensors of the recorded forward."""
        self.inputs = ()
        self._numbers.clear()
        self._kept.clear()

    def replay(
        self,
        inputs: Sequence[Any],
        returned: Callable[[str, bool, Collection[int]], Mapping[int, Tensor]],
        make: Callable[[Shape], Tensor],
        call: Callable[[int, Any, Any], Any],
    ) -> None:
        """Call the hooks again, up to one that returns a value.

        Args:
            inputs: The leaves of the arguments.
            returned: Given the name of a module, whether it is an inner one, and leaves of its output; returns those
                that hooks are to be given in the place of fakes.
            make: Makes a fake.
            call: Calls a hook, given its number and arguments.
        """
        values: dict[int, Tensor] = {}

        def tensor_of(place: Any) -> Any:
            if isinstance(place, _Argument):
                return inputs[place.leaf]
            if not isinstance(place, _Value):
                return place
            if place.number not in values:
                values[place.number] = make(self._shapes[place.number])
            return values[place.number]

        for event in self._events:
            if isinstance(event, _Outputs):
                found = returned(event.name, event.is_inner, [leaf for leaf, _ in event.values])
                values.update({number: found[leaf] for leaf, number in event.values if leaf in found})
                continue
            args, kwargs = tree_unflatten([tensor_of(place) for place in event.leaves], event.spec)
            if call(event.number, args, kwargs) is not None:
                return
