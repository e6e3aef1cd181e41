"""Lists and dictionaries that modules fill."""

from __future__ import annotations

from collections import deque
from typing import Any

from lightning_zero.parallel.pipeline.tracing.containers import Contents, refill
from lightning_zero.trees import tree_map


def test_changes_in_copies_are_made_in_the_originals() -> None:
    arrived, fake, new = object(), object(), object()
    inner: list[Any] = []
    given = ([fake, inner], {"store": {"old": 1}, "last": deque([2])})
    copies: Any = tree_map(lambda leaf: arrived if leaf is fake else leaf, given)
    contents = Contents(copies)
    copies[0][1].append(new)
    copies[1]["store"]["first"] = arrived
    del copies[1]["store"]["old"]
    copies[1]["store"]["list"] = copies[0][1]
    assert len(contents.changed()) == 2
    contents.pass_on(given, {id(arrived): fake})
    assert given == ([fake, [new]], {"store": {"first": fake, "list": [new]}, "last": deque([2])})
    assert given[0][1] is inner
    assert given[1]["store"]["list"] is inner


def test_contents_are_put_back_and_filled_again() -> None:
    given: Any = ([1], {"a": 2})
    contents = Contents(given)
    given[0].append(3)
    given[1]["b"] = 4
    changed = contents.changed()
    contents.put_back()
    assert given == ([1], {"a": 2})
    refill(given, changed)
    assert given == ([1, 3], {"a": 2, "b": 4})
    assert not Contents(given).changed()
