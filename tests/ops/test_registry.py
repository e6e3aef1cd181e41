from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lightning_zero_ops
import tests.ops
from lightning_zero_ops.registry import check_flat


def _kernels() -> set[str]:
    """Return the names of all functions of the package that start with ``_`` and end with ``_kernel``."""
    found = set()
    for path in Path(lightning_zero_ops.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(node.name)
    return found


def _test_files() -> Iterator[ModuleType]:
    for info in pkgutil.iter_modules(tests.ops.__path__):
        if info.name.startswith("test_") and info.name != "test_registry":
            yield importlib.import_module(f"tests.ops.{info.name}")


def test_every_kernel_is_compiled_ahead_of_time() -> None:
    seen = {case.kernel.__name__ for file in _test_files() for case in getattr(file, "COMPILED", {}).values()}
    assert _kernels() <= seen


def test_every_launcher_runs_in_the_interpreter() -> None:
    for path in Path(lightning_zero_ops.__file__).parent.glob("*.py"):
        test = Path(tests.ops.__file__).parent / f"test_{path.name}"
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_launch"):
                assert f"{path.stem}.{node.name}" in test.read_text(), f"{path.name}: {node.name}"


def test_ops_work_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch, lightning_zero_ops
total = torch.ones(5)
assert lightning_zero_ops.accumulate_(total, torch.ones(5)).tolist() == [2.0] * 5
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": torch.ones(2, 3)}, r"`op` takes flat contiguous tensors, but `x` has shape \(2, 3\)"),
        ({"x": torch.ones(2), "y": torch.ones(3)}, "`y` has 3 elements on cpu and `x` has 2 on cpu"),
        ({"x": torch.ones(2, dtype=torch.int32)}, "`op` takes torch.float32, but `x` is torch.int32"),
    ],
)
def test_tensors_that_are_not_flat_and_alike_are_refused(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        check_flat("op", (torch.float32,), **tensors)


def test_missing_tensors_pass() -> None:
    check_flat("op", (torch.float32,), x=torch.ones(2), y=None)
