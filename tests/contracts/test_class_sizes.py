"""No class has more state than a reader can hold: at most 20 attributes, at most 10 that decide something.

An attribute decides something where a condition (of ``if``, ``while``, a conditional expression, or an operand of
``and``, ``or``, ``not``) asks for its value: ``if self.is_open``, ``self._parts is None``. A condition that asks an
object which an attribute holds (``self._window.is_open``) is that object's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.always

ROOT = Path(__file__).parents[2]
MOST, MOST_ASKED = 20, 10

EXCEPTIONS = {
    "ZeroStrategy": "23 are its options, which users pass as arguments",
    "PipelineRunner": "its parts are those of a pipelined step, each an object; few decide",
    "Trace": "a record of one run of a step, which others read",
}


def _classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for package in ("lightning_zero", "lightning_zero_ops"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    yield node.name, node


def _is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _attributes(cls: ast.ClassDef) -> set[str]:
    """Return the names of the attributes set on ``self``, and of the fields of a dataclass."""
    stored = {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and _is_own(node) and isinstance(node.ctx, ast.Store)
    }
    if not any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list):
        return stored
    fields = {
        node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return stored | fields


def _conditions(cls: ast.ClassDef) -> Iterator[ast.expr]:
    for node in ast.walk(cls):
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield node.test
        elif isinstance(node, ast.BoolOp):
            yield from node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node.operand


def _asked(condition: ast.expr) -> Iterator[str]:
    """Yield the attributes whose own values a condition asks for."""
    if isinstance(condition, ast.Attribute):
        if _is_own(condition):
            yield condition.attr
    elif isinstance(condition, ast.Compare):
        for operand in (condition.left, *condition.comparators):
            yield from _asked(operand)


def _sizes(cls: ast.ClassDef) -> tuple[int, int]:
    attributes = _attributes(cls)
    asked = {name for condition in _conditions(cls) for name in _asked(condition)}
    return len(attributes), len(attributes & asked)


def test_no_class_has_more_attributes_than_a_reader_can_hold() -> None:
    sizes = {name: _sizes(cls) for name, cls in _classes()}
    wide = {name: size for name, size in sizes.items() if size[0] > MOST or size[1] > MOST_ASKED}
    assert wide.keys() <= EXCEPTIONS.keys(), wide
    assert EXCEPTIONS.keys() <= wide.keys()  # an exception that is none any more


@pytest.mark.parametrize(
    ("code", "size"),
    [
        ("self.a = 1", (1, 0)),
        ("self.a: int = 1\n  self.b = self.a if self.a else 2", (2, 1)),
        ("self.a = self.b = 1\n  if self.a.c and not self.b: pass", (2, 1)),
        ("self.a, self.b = 1, 2\n  while self.a is None or 2 < self.b: pass", (2, 2)),
    ],
)
def test_attributes_are_counted(code: str, size: tuple[int, int]) -> None:
    (cls,) = ast.parse(f"class A:\n def f(self):\n  {code}").body
    assert isinstance(cls, ast.ClassDef)
    assert _sizes(cls) == size
