"""State that one stage alone changes: attributes of its own modules, and values that hooks in its backward collect.

Note [One stage alone]
    Blocks count, keep statistics, and fill module buffers on the stage that runs them; the other stages have the values
    from before the fit. Hooks on gradients run on that stage as well, and may collect numbers in the LightningModule,
    where every stage has a part of them. Hooks between two steps run on all stages and would read an old value, or a
    part. So stages compare what the first batch of a kind has changed, and such reads are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_zero.parallel.pipeline.stages.attribute_reads import Key
from lightning_zero.parallel.pipeline.stages.split import Split
from lightning_zero.parallel.pipeline.stages.state_marks import Mark, differ, fingerprint, mark

__all__ = ["OwnChanges", "StageChanges", "own_modules"]

Items = Callable[[Mapping[str, nn.Module]], Iterable[tuple[Key, bool, Any]]]


@dataclass(frozen=True)
class StageChanges:
    """Changes of a batch on one stage, with fingerprints of the new values.

    Attributes:
        modules: Attributes and module buffers of its own modules.
        backward: State around the blocks that has changed since the stage's last forward.
    """

    modules: Mapping[Key, Any]
    backward: Mapping[Key, Any]


def own_modules(module: nn.Module, split: Split, stage: int) -> dict[str, nn.Module]:
    """Return the modules of places that a stage runs, with their submodules, by name."""
    return {
        name: child
        for place in split.places
        if place.chunk % split.stages == stage
        for name, child in module.get_submodule(place.name).named_modules(prefix=place.name)
    }


@dataclass
class OwnChanges:
    """Finds state that one stage alone changes.

    Attributes:
        modules: Those that this stage runs, by name.
        items: Yields keys and values of modules.
        elsewhere: Keys of values in modules that another stage changes, in any method.
        in_backward: Keys of state around the blocks that several stages change in their backwards.
        late: Likewise, that the last stage changes, whose forwards of later micro-batches run before.
    """

    modules: Mapping[str, nn.Module]
    items: Items
    elsewhere: set[Key] = field(default_factory=set)
    in_backward: set[Key] = field(default_factory=set)
    late: set[Key] = field(default_factory=set)
    _before: dict[Key, tuple[Any, Any]] = field(default_factory=dict)

    def begin(self, *, is_new: bool) -> None:
        """Mark the values of this stage's modules before the first batch of a kind."""
        items = self.items(self.modules) if is_new else ()
        self._before = {key: (value, mark(value, is_kept=True)) for key, _, value in items}

    def changed(self) -> dict[Key, Any]:
        """Return the fingerprints of the values in this stage's modules that the batch has changed."""
        found = {}
        for key, _, value in self.items(self.modules):
            before = self._before.get(key)
            if before is None or before[0] is not value or before[1] != mark(value):
                found[key] = fingerprint(value)
        self._before.clear()
        return found

    def compare(
        self, everyone: Sequence[StageChanges], stage: int, value_of: Callable[[Key], Any], *, is_in_order: bool
    ) -> None:
        """Note the state that this stage has otherwise than another one which has changed it.

        Args:
            everyone: The changes of all stages.
            stage: Of this rank.
            value_of: Returns the value that this stage has.
            is_in_order: On the last stage every backward runs before the next forward.
        """
        if not is_in_order:
            self.late |= everyone[-1].backward.keys()
        for number, changes in enumerate(everyone):
            if number != stage:
                self.elsewhere |= {
                    key for key, value in changes.modules.items() if differ(fingerprint(value_of(key)), value)
                }
        for key in {key for changes in everyone[:-1] for key in changes.backward}:
            values = [changes.backward.get(key, Mark.MISSING) for changes in everyone]
            if any(differ(one, values[0]) for one in values):
                self.in_backward.add(key)

    def watched(self) -> Collection[Key]:
        """Return the keys that must not be read between two steps."""
        return self.elsewhere | self.in_backward
