"""Outputs and attributes that calls of modules set, compared with their description on other pipeline stages.

Note [Late values]
    Other stages know from the first batch of a kind the outputs of a module, and the attributes in which it leaves
    tensors. An auxiliary loss that a flag switches on later is in neither: they would continue without it, with smaller
    gradients and no error. So the stage that computes compares every call with its description.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.stages.attributes import Key, attribute_spaces
from lightning_zero.parallel.pipeline.tracing.object_state import held_leaves
from lightning_zero.trees import TreeSpec, tree_flatten, tree_leaves

__all__ = ["Attributes", "Outcome"]

_Leaf = tuple[tuple[int, ...], Any] | str  # shape and dtype of a tensor, else a kind


@dataclass(frozen=True)
class Outcome:
    """The structure of the output of a call, and of the attributes that it sets.

    Attributes:
        spec: Of the output.
        leaves: Of the output.
        left: For each attribute with tensors that it sets, which leaves are tensors.
        objects: Attributes that it sets to objects with tensors in them.
        has_shapes: Whether the shapes are known, and not guessed.
    """

    spec: TreeSpec
    leaves: tuple[_Leaf, ...]
    left: Mapping[Key, tuple[bool, ...]]
    objects: Collection[Key]
    has_shapes: bool

    @staticmethod
    def of(
        output: Any,
        left: Mapping[Key, tuple[bool, ...]],
        *,
        objects: Collection[Key] = (),
        has_shapes: bool = True,
    ) -> Outcome:
        """Return the outcome of a call that returned ``output``."""
        leaves, spec = tree_flatten(output)
        return Outcome(spec, tuple(map(_describe, leaves)), left, objects, has_shapes)

    def require_same(self, name: str, output: Any, attributes: Attributes) -> None:
        """Raise where a call differs from this description of it.

        Args:
            name: Of the module.
            output: Of the call.
            attributes: Of the module, as they were before the call.
        """
        now = Outcome.of(output, {})
        if not self._is_alike(now):
            difference = f"returns {_words(now)}, not {_words(self)} as"
            raise _error_of_lengths(name, difference) if self._differs_in_lengths(now) else _error(name, difference)
        for key in attributes.changed():
            if key not in self.left and key not in self.objects:
                raise _error(name, f"sets its attribute {_attribute(key)} to a tensor, unlike")
        for key, are_tensors in self.left.items():
            value = attributes.value(key)
            if tuple(isinstance(leaf, Tensor) for leaf in tree_leaves(value)) != are_tensors:
                raise _error(name, f"leaves {type(value).__name__} in its attribute {_attribute(key)}, unlike")

    def _differs_in_lengths(self, now: Outcome) -> bool:
        """Say whether tensors have other sizes alone."""
        if self.spec != now.spec:
            return False
        return all(
            was == one or (type(was) is type(one) is tuple and (len(was[0]), was[1]) == (len(one[0]), one[1]))
            for was, one in zip(self.leaves, now.leaves, strict=True)
        )

    def _is_alike(self, now: Outcome) -> bool:
        if self.spec != now.spec:
            return False
        pairs = zip(self.leaves, now.leaves, strict=True)
        return all(was == one if self.has_shapes else type(was) is type(one) for was, one in pairs)


class Attributes:
    """The attributes and module buffers of a module and its submodules, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._spaces = attribute_spaces(module)
        self._before = {key: dict(space) for key, space in self._spaces.items()}
        values = [value for space in self._before.values() for value in space.values()]
        self._versions = {id(value): value._version for value in values if _has_version(value)}
        self._lists = {id(value): list(value) for value in values if type(value) is list}

    def value(self, key: Key) -> Any:
        """Return an attribute as it is now."""
        child, kept, name = key
        return self._spaces.get((child, kept), {}).get(name)

    def changed(self) -> list[Key]:
        """Return the attributes with tensors that have been set or written since."""
        return [
            (*space_key, name)
            for space_key, space in self._spaces.items()
            for name, value in space.items()
            if self._is_changed(self._before[space_key].get(name), value)
            and any(isinstance(leaf, Tensor) for leaf in held_leaves(value))
        ]

    def _is_changed(self, was: Any, value: Any) -> bool:
        if value is not was:
            return True
        if type(value) is list:
            old = self._lists[id(value)]
            return len(old) != len(value) or any(one is not other for one, other in zip(old, value, strict=True))
        return _has_version(value) and value._version != self._versions[id(value)]


def _has_version(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()


def _describe(leaf: Any) -> _Leaf:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return "None" if leaf is None else "a value that is no tensor"


def _words(outcome: Outcome) -> str:
    leaves = [leaf if isinstance(leaf, str) else f"a tensor of {leaf[0]} {leaf[1]}" for leaf in outcome.leaves]
    return ", ".join(leaves) or "nothing"


def _attribute(key: Key) -> str:
    return "`" + ".".join(part for part in key if part and part != "_buffers") + "`"


def _error_of_lengths(name: str, difference: str) -> PipelineError:
    return PipelineError(
        f"`{name}` {difference} in the first batch of this kind. Other pipeline stages know the sizes from the shapes"
        " of the batch and from the first batch of these shapes. If the step cuts the batch to a length of its own"
        " (`ids[:, : self.length]`, a curriculum), cut it in `collate_fn` or the dataset, so that batches of another"
        " length have other shapes. If the size depends on values, pad to one size."
    )


def _error(name: str, difference: str) -> PipelineError:
    return PipelineError(
        f"`{name}` {difference} in the first batch of this kind. Other pipeline stages know from that batch the"
        " tensors that it returns and sets, so they would compute without later ones, such as an auxiliary loss after a"
        " warm-up. Let it return and set the same in every batch: switch the value on from the first batch, and"
        " multiply it by zero until it is to count."
    )
