"""Docstrings name their subject (CONVENTIONS.md, Language)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.always

ROOT = Path(__file__).parents[2]
FILES = sorted(
    file for room in ("lightning_zero", "lightning_zero_ops", "benchmarks") for file in (ROOT / room).rglob("*.py")
)
FOLDERS = sorted({file.parent.relative_to(ROOT) for file in FILES})
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def first_lines(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, name and first line of every docstring."""
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, WITH_DOCSTRING) else None
        if text:
            assert isinstance(node, WITH_DOCSTRING)
            yield node.body[0].lineno, getattr(node, "name", "the module"), text.splitlines()[0]


def is_vague(line: str) -> bool:
    """Say whether a line says "what" in the place of a noun."""
    return re.search(r"\bwhat\b", line, flags=re.IGNORECASE) is not None


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_first_lines_of_docstrings_name_their_subject(folder: Path) -> None:
    vague = [
        f"{file.relative_to(ROOT)}:{number} {name}: {line}"
        for file in FILES
        if file.parent == ROOT / folder
        for number, name, line in first_lines(file.read_text())
        if is_vague(line)
    ]
    print(*vague, sep="\n")
    assert vague == [], (
        f"{len(vague)} first line(s) say 'what' in the place of a noun: name the thing (docs/architecture.md, Glossary)"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""What is stepped."""', [(1, "the module")]),
        ('def f():\n    """Return WHAT there is.\n\n    Long."""', [(2, "f")]),
        ('class A:\n    """Somewhat."""\n    async def g(self):\n        """Drop\n        what waits."""', []),
    ],
)
def test_the_count_sees_first_lines_alone(source: str, expected: list[tuple[int, str]]) -> None:
    assert [(number, name) for number, name, line in first_lines(source) if is_vague(line)] == expected
