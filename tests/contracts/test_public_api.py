"""The public names and their signatures change on purpose only.

``python -m tests.contracts.test_public_api`` writes the present ones into ``public_api.txt``.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SNAPSHOT = Path(__file__).with_name("public_api.txt")
MODULES = ("lightning_zero", "lightning_zero.moe", "lightning_zero_ops")


def _signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""


def _members(name: str, value: Any) -> Iterator[str]:
    yield f"{name}{_signature(value)}"
    if not inspect.isclass(value):
        return
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    ours = [one for one in value.__mro__ if one.__module__.split(".")[0] in MODULES]
    foreign = [one for one in value.__mro__ if one not in ours]
    members = {key: member for one in reversed(ours) for key, member in vars(one).items()}
    for key, member in sorted(members.items()):
        if key.startswith("_") or key in fields or any(hasattr(base, key) for base in foreign):
            continue
        if isinstance(member, property):
            yield f"{name}.{key}: property"
        elif callable(member) or isinstance(member, (classmethod, staticmethod)):
            yield f"{name}.{key}{_signature(getattr(value, key))}"


def _present() -> list[str]:
    lines = []
    for module in map(importlib.import_module, MODULES):
        for name in sorted(getattr(module, "__all__", [])):
            lines.extend(_members(f"{module.__name__}.{name}", getattr(module, name)))
    return lines


def test_public_names_and_signatures_are_those_of_the_snapshot() -> None:
    assert _present() == SNAPSHOT.read_text().splitlines()


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(_present()) + "\n")
