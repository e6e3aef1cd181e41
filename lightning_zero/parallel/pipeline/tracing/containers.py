"""Lists and dictionaries among the arguments of a module, which it may fill."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

from lightning_zero.trees import is_size, tree_leaves, tree_map

__all__ = ["Contents", "refill"]

_KINDS = (list, dict, OrderedDict, defaultdict, deque)


class Contents:
    """The contents of the lists and dictionaries among arguments, as they are now."""

    def __init__(self, arguments: Any) -> None:
        self._containers = _containers_in(arguments)
        self._before = [_content(one) for one in self._containers]

    def changed(self) -> dict[int, Any]:
        """Return the contents that have changed, by number of the container."""
        now = [_content(one) for one in self._containers]
        return {
            number: mine
            for number, (mine, was) in enumerate(zip(now, self._before, strict=True))
            if not _are_same(mine, was)
        }

    def put_back(self) -> None:
        """Undo the changes."""
        for one, content in zip(self._containers, self._before, strict=True):
            _refill(one, content)

    def pass_on(self, given: Any, leaves: Mapping[int, Any]) -> None:
        """Make the changes in the arguments that these ones are a copy of.

        Args:
            given: The original arguments.
            leaves: The original leaves of those that differ, by ``id`` of the copy.
        """
        originals = _containers_in(given)
        back = {**leaves, **{id(copy): one for copy, one in zip(self._containers, originals, strict=True)}}
        for number, content in self.changed().items():
            found = tree_map(
                lambda leaf: back.get(id(leaf), leaf), content, is_leaf=lambda one: is_size(one) or id(one) in back
            )
            _refill(originals[number], found)


def refill(arguments: Any, contents: Mapping[int, Any]) -> None:
    """Give containers among arguments other contents, by number of the container."""
    containers = _containers_in(arguments) if contents else []
    for number, content in contents.items():
        _refill(containers[number], content)


def _containers_in(arguments: Any) -> list[Any]:
    found: list[Any] = []

    def note(value: Any) -> bool:
        if type(value) in _KINDS:
            found.append(value)
        return is_size(value)

    tree_leaves(arguments, is_leaf=note)
    return found


def _content(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.update if isinstance(container, dict) else container.extend)(content)


def _are_same(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(value is other[key] for key, value in one.items())
    return all(mine is theirs for mine, theirs in zip(one, other, strict=True))
