"""Long signatures are called by name (CONVENTIONS.md, Functions)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "lightning_zero"
ROOMS = ("checkpoint", "comm", "lightning", "parallel", "storage")
MOST = 4  # positional parameters without `self`
EXCEPTIONS = {
    ("lightning/strategy.py", "ZeroStrategy.__init__"): "public",
    ("lightning/callbacks.py", "ZeroMonitor.on_train_batch_end"): "Lightning's signature",
    ("parallel/pipeline/schedule/weight_gradients.py", "_Split.forward"): "PyTorch's signature",
}


def long_signatures(source: str) -> Iterator[str]:
    """Yield the names of functions that take five or more arguments by position."""

    def walk(node: ast.AST, owner: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            name = ""
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                name = f"{owner}{child.name}"
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names = [one.arg for one in (*child.args.posonlyargs, *child.args.args)]
                if len(names) - (names[:1] in (["self"], ["cls"])) > MOST:
                    yield name
            yield from walk(child, f"{name}." if name else owner)

    yield from walk(ast.parse(source), "")


@pytest.mark.parametrize("room", ROOMS)
def test_five_or_more_arguments_are_not_positional(room: str) -> None:
    found = {
        (str(file.relative_to(ROOT)), name)
        for file in sorted((ROOT / room).rglob("*.py"))
        if file.parent.name != "tracing"
        for name in long_signatures(file.read_text())
    }
    assert found == {case for case in EXCEPTIONS if case[0].startswith(f"{room}/")}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(a, b, c, d): ...", []),
        ("def f(a, b, /, c, d, e): ...", ["f"]),
        ("def f(a, b, *, c, d, e): ...", []),
        ("class A:\n    def f(self, a, b, c, d): ...\n    def g(self, a, b, c, d, e): ...", ["A.g"]),
        ("def f():\n    if f:\n        async def g(a, b, c, d, e): ...", ["f.g"]),
    ],
)
def test_the_count_leaves_out_self_and_keywords(source: str, expected: list[str]) -> None:
    assert list(long_signatures(source)) == expected
