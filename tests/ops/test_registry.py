from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_zero_ops
import tests.ops
from lightning_zero_ops import (
    accumulate_,
    adamw_step_,
    apply_rotary,
    dequantize_blockwise,
    dequantize_reduce,
    geglu,
    layer_norm,
    linear_cross_entropy,
    lion_step_,
    rms_norm,
    sgd_step_,
    swiglu,
)
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


META = torch.empty(8, device="meta")
X = torch.randn(4, 8)
ON_TWO_DEVICES: dict[str, Callable[[], Any]] = {
    "rms_norm` takes .* `weight` is on meta and `x` on cpu": lambda: rms_norm(X, META),
    "layer_norm` takes .* `bias` is on meta": lambda: layer_norm(X, X[0], META),
    "swiglu` takes .* `up` is on meta": lambda: swiglu(X[0], META),
    "geglu` takes .* `up` is on cpu and `gate` on meta": lambda: geglu(META, X[0]),
    "apply_rotary` takes .* `cos` is on meta": lambda: apply_rotary(X.view(1, 1, 4, 8), META.expand(1, 4, 8), X[None]),
    "linear_cross_entropy` takes .* `weight` is on meta": lambda: linear_cross_entropy(
        X, META.expand(5, 8), torch.zeros(4, dtype=torch.int64)
    ),
    "linear_cross_entropy` takes .* `target` is on meta": lambda: linear_cross_entropy(
        X, X, torch.zeros(4, dtype=torch.int64, device="meta")
    ),
    "dequantize_blockwise` takes .* `scales` is on meta": lambda: dequantize_blockwise(
        torch.zeros(8, dtype=torch.int8), META[:1], numel=8
    ),
    "dequantize_reduce` takes .* `scales` is on meta": lambda: dequantize_reduce(
        torch.zeros(1, 8, dtype=torch.int8), META[None, :1], numel=8
    ),
    "accumulate_` takes .* on meta": lambda: accumulate_(X[0], META),
}


@pytest.mark.parametrize("message", ON_TWO_DEVICES)
def test_tensors_on_two_devices_are_refused(message: str) -> None:
    """On a GPU a weight of another device was read at its address there."""
    with pytest.raises(ValueError, match=message):
        ON_TWO_DEVICES[message]()


STEPS: dict[str, Callable[[Tensor], None]] = {
    "adamw_step_": lambda factor: adamw_step_(*torch.zeros(4, 8), step=1, lr=0.1, factor=factor),
    "lion_step_": lambda factor: lion_step_(*torch.zeros(3, 8), lr=0.1, factor=factor),
    "sgd_step_": lambda factor: sgd_step_(torch.zeros(8), None, torch.zeros(8), step=1, lr=0.1, factor=factor),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("factor", "found"),
    [
        (torch.ones(1), r"torch.float32 of shape \(1,\) on cpu"),
        (torch.ones((), dtype=torch.float64), r"torch.float64 of shape \(\) on cpu"),
        (META[0], r"torch.float32 of shape \(\) on meta"),
    ],
)
def test_a_factor_that_is_not_one_fp32_number_is_refused(step: str, factor: Tensor, found: str) -> None:
    with pytest.raises(ValueError, match=rf"`factor` of `{step}` must be 0-dim torch.float32 on cpu, got {found}"):
        STEPS[step](factor)
    STEPS[step](torch.ones(()))


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
