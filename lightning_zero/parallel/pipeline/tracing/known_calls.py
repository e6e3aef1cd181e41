"""Descriptions of calls of modules: their results and the attributes that they set, without values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.parallel.pipeline.stages.attributes import Key
from lightning_zero.parallel.pipeline.stages.sources import Shape, describe_tensor, is_fake
from lightning_zero.parallel.pipeline.tracing.sent_numbers import is_sent
from lightning_zero.trees import TreeSpec

__all__ = [
    "KNOWN_BY_VALUE",
    "NUMBERS",
    "Call",
    "Input",
    "Object",
    "Position",
    "Same",
    "SetAttribute",
    "Sharing",
    "again",
    "describe",
    "is_known",
    "may_be_another",
    "sharing",
    "strides",
    "zeros",
]

Position = tuple[Key | None, int]  # see `Source`
SetAttribute = tuple[Key, dict[str, Any], Any]  # key, the dictionary that has it, value

NUMBERS = (int, float, complex, str, torch.Size)
_KNOWN_BY_IDENTITY = (nn.Module, type, Enum, FunctionType, BuiltinFunctionType, torch.Generator)  # and nothing else
KNOWN_BY_VALUE = (int, float, complex, str, bool, bytes, type(None), torch.Size, torch.dtype, torch.device)


@dataclass
class Call:
    """The description of a module's call: its outputs and the attributes that it sets.

    Attributes:
        spec: Of its outputs, and of the attributes it sets.
        leaves: Of these, described.
        positions: Of these, as sources have them.
        sharing: Leaves, and inputs, that share memory on the stage that computes.
        is_guess: Shapes were guessed.
        has_hooks: Hooks of the program, if there are any, have run.
        has_logged: Its forward calls ``self.log``.
        has_escapes: Its forward has left tensors outside of the module.
        opaque: Attributes that it sets to objects in which fakes are.
        numbers: Attributes that it sets to other numbers.
        made: Fakes that stand for them, by leaf.
    """

    spec: TreeSpec
    leaves: list[Any]
    positions: list[Position]
    sharing: list[Sharing]
    is_guess: bool = False
    has_hooks: bool = True
    has_logged: bool = False
    has_escapes: bool = False
    opaque: list[SetAttribute] = field(default_factory=list)
    numbers: Mapping[Key, Any] = field(default_factory=dict)
    made: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def left(self) -> dict[Key, tuple[bool, ...]]:
        """Of each attribute that it sets, which leaves are tensors."""
        found: dict[Key, tuple[bool, ...]] = {}
        for (key, _), leaf in zip(self.positions, self.leaves, strict=True):
            if key is not None:
                found[key] = (*found.get(key, ()), isinstance(leaf, (Shape, Input, Same)))
        return found


@dataclass
class Sharing:
    """Positions of tensors that share memory."""

    leaves: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)


def sharing(leaves: Sequence[Any], inputs: Sequence[Any]) -> list[Sharing]:
    """Return which leaves and inputs share memory with others."""
    found: dict[int, Sharing] = {}
    for number, leaf in enumerate(leaves):
        if is_fake(leaf):
            found.setdefault(leaf.untyped_storage()._cdata, Sharing()).leaves.append(number)
    for number, leaf in enumerate(inputs):
        if is_fake(leaf) and leaf.untyped_storage()._cdata in found:
            found[leaf.untyped_storage()._cdata].inputs.append(number)
    return [one for one in found.values() if len(one.leaves) + len(one.inputs) > 1]


@dataclass(frozen=True)
class Input:
    """An output that is an input."""

    leaf: int


@dataclass(frozen=True)
class Same:
    """An output or attribute that is the same tensor as an earlier one."""

    leaf: int


def describe(leaf: Any) -> Any:
    """Return a description of an argument or an output, which is equal for those that are known alike."""
    if isinstance(leaf, Tensor):
        return describe_tensor(leaf)
    return leaf if isinstance(leaf, KNOWN_BY_VALUE) else Object(leaf)


def may_be_another(leaf: Any) -> bool:
    """Say whether an output of a call that is known may be another one in the next call."""
    return isinstance(leaf, NUMBERS) or (isinstance(leaf, Object) and is_sent(leaf.value))


def is_known(leaf: Any) -> bool:
    """Say whether the next call with this argument is a call with the same argument."""
    return isinstance(leaf, (Tensor, *KNOWN_BY_VALUE, *_KNOWN_BY_IDENTITY))


class Object:
    """A value of which nothing is known but which one it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Object) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of a shape."""
    return torch.empty(tensor.shape, device="meta").stride()


def zeros(known: Shape) -> Tensor:
    """Return zeros of a shape that take no memory."""
    return torch.zeros((), dtype=known.dtype, device=known.device).expand(known.shape)


def again(output: Any, inputs: Sequence[Any], make: Callable[[Shape], Tensor], keep: Callable[[Any], Any]) -> Any:
    """Return an output of a call that is known."""
    if isinstance(output, Input):
        return inputs[output.leaf]
    if isinstance(output, Object):
        return keep(output.value)
    if not isinstance(output, Shape):
        return keep(output)
    return make(output)
