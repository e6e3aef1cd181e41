"""Functions of five or more arguments take all but the first two by keyword (CONVENTIONS.md, Functions)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MANY, FREE = 5, 2

# A caller outside decides how they are called.
CALLED_BY_OTHERS = {
    "lightning_zero/engine/units/lowering.py": {"forward"},  # of `torch.autograd.Function`
    "lightning_zero/lightning/callbacks.py": {"on_train_batch_end"},  # Lightning's hook
    "lightning_zero/lightning/strategy.py": {"__init__"},  # options of a Trainer's strategy: named in every example
}
STILL_TO_DO = {
    "lightning_zero/parallel/pipeline/explicit_steps.py",
    "lightning_zero/parallel/pipeline/pipeline.py",
    "lightning_zero/parallel/pipeline/traced_steps.py",
    "lightning_zero/parallel/pipeline/schedule/costs.py",
    "lightning_zero/parallel/pipeline/schedule/picture.py",
    "lightning_zero/parallel/pipeline/schedule/weight_gradients.py",
    "lightning_zero/parallel/pipeline/tracing/fake_mode.py",
    "lightning_zero/parallel/pipeline/tracing/module_interception.py",
    "lightning_zero/parallel/pipeline/tracing/own_gradients.py",
    "lightning_zero/parallel/pipeline/tracing/recomputation.py",
}


def _positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def _functions() -> Iterator[tuple[str, str]]:
    """Yield the file and name of each function with many positional arguments."""
    for path in sorted((ROOT / "lightning_zero").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and len(_positional(node)) >= MANY:
                yield str(path.relative_to(ROOT)), node.name


def test_functions_of_many_arguments_take_them_by_keyword() -> None:
    found = [
        (file, name)
        for file, name in _functions()
        if file not in STILL_TO_DO and name not in CALLED_BY_OTHERS.get(file, set())
    ]
    assert not found, f"more than {FREE} arguments by position"


def test_files_still_to_do_have_such_functions() -> None:
    files = {file for file, _ in _functions()}
    assert files >= STILL_TO_DO
    assert files >= CALLED_BY_OTHERS.keys()
