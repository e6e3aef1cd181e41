"""Functions of five or more arguments take all but the first two by keyword (CONVENTIONS.md, Functions)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.always

ROOT = Path(__file__).parents[2]
MANY, FREE = 5, 2

# A caller outside decides how they are called.
CALLED_BY_OTHERS = {
    "lightning_zero/engine/units/lowering.py": {"forward"},  # of `torch.autograd.Function`
    "lightning_zero/lightning/callbacks.py": {"on_train_batch_end"},  # Lightning's hook
    "lightning_zero/lightning/strategy.py": {"__init__"},  # options of a Trainer's strategy: named in every example
    "lightning_zero/moe/layer.py": {"__init__"},  # positions are those of DeepSpeed's layer
    "lightning_zero/schedules.py": {"__init__"},  # positions are those of DeepSpeed's schedules
    "lightning_zero/parallel/pipeline/schedule/weight_gradients.py": {"forward"},  # of `torch.autograd.Function`
    "lightning_zero/parallel/tensor/attention.py": {"__call__"},  # of `nn.MultiheadAttention`
    "lightning_zero/parallel/tensor/collectives.py": {"forward"},  # of `torch.autograd.Function`
    "lightning_zero/parallel/tensor/loss.py": {"forward"},  # likewise
    "lightning_zero/parallel/pipeline/tracing/own_gradients.py": {"run_watched"},  # PyTorch's engine
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
    found = [(file, name) for file, name in _functions() if name not in CALLED_BY_OTHERS.get(file, set())]
    assert not found, f"more than {FREE} arguments by position"


def test_exceptions_have_such_functions() -> None:
    assert {file for file, _ in _functions()} >= CALLED_BY_OTHERS.keys()
