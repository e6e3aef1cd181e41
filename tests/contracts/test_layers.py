"""Who imports whom: only downwards (docs/architecture.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.always

ROOT = Path(__file__).parents[2]
PACKAGES = ("lightning_zero", "lightning_zero_ops")

# The first matching prefix decides.
LEVELS: dict[str, int] = {
    "lightning_zero_ops": 0,
    "lightning_zero.blocks": 1,
    "lightning_zero.boxes": 1,
    "lightning_zero.config": 1,
    "lightning_zero.dtensors": 1,
    "lightning_zero.errors": 1,
    "lightning_zero.flop_formulas": 1,
    "lightning_zero.foreign_options": 1,
    "lightning_zero.grid": 1,
    "lightning_zero.layout": 1,
    "lightning_zero.microbatch": 1,
    "lightning_zero.option_checks": 1,
    "lightning_zero.schedules": 1,
    "lightning_zero.sharding": 1,
    "lightning_zero.trees": 1,
    "lightning_zero.comm": 2,
    "lightning_zero.compat": 2,
    "lightning_zero.storage": 2,
    "lightning_zero.moe": 3,
    "lightning_zero.parallel.activation": 4,
    "lightning_zero.parallel.tensor": 4,
    "lightning_zero.parallel.pipeline.schedule": 4,
    "lightning_zero.parallel.pipeline.stages": 5,
    "lightning_zero.parallel.pipeline.tracing": 6,
    "lightning_zero.parallel.pipeline": 7,
    "lightning_zero.parallel": 3,
    "lightning_zero.engine.buffers": 3,
    "lightning_zero.engine.units": 4,
    "lightning_zero.engine.optim": 5,
    "lightning_zero.engine.runtime": 6,
    "lightning_zero.engine.access": 7,
    "lightning_zero.engine": 8,
    "lightning_zero.checkpoint": 9,
    "lightning_zero.diagnostics": 9,
    "lightning_zero.forecast": 9,
    "lightning_zero.lightning": 10,
    "lightning_zero.__main__": 11,
    "lightning_zero": 12,
}


def _files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def _module(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> Iterator[str]:
    """Yield every imported module, those inside functions too."""
    package = _module(path).split(".") if path.name == "__init__.py" else _module(path).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1] if node.level else [])
            source = ".".join(part for part in (base, node.module) if part)
            yield from (_resolve(source, alias.name) for alias in node.names)


def _resolve(source: str, name: str) -> str:
    """Return the module that ``from source import name`` reads."""
    deeper = ROOT.joinpath(*source.split("."), name)
    is_module = deeper.with_suffix(".py").exists() or (deeper / "__init__.py").exists()
    return f"{source}.{name}" if is_module else source


def _level(module: str) -> int:
    return next(level for prefix, level in LEVELS.items() if f"{module}.".startswith(f"{prefix}."))


def _graph() -> dict[str, set[str]]:
    names = {_module(path) for path in _files()}
    return {_module(path): {name for name in _imports(path) if name in names} for path in _files()}


def test_every_file_has_a_level_of_its_own() -> None:
    rooms = {_module(path) for path in _files()} - {"lightning_zero"}
    assert not [room for room in rooms if _level(room) == LEVELS["lightning_zero"]]


def test_the_table_of_the_architecture_has_the_same_levels() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text()
    for level, file in re.findall(r"^\| (\d+) \| `(lightning_zero[^`]*)\.py` \|", table, re.MULTILINE):
        assert _level(file.removesuffix("/__init__").replace("/", ".")) == int(level), file


def test_imports_point_downwards() -> None:
    upward = [(a, b) for a, names in _graph().items() for b in names if _level(b) > _level(a)]
    assert not upward


def test_imports_have_no_cycle() -> None:
    graph = {module: set(names) - {module} for module, names in _graph().items()}
    while free := [module for module, names in graph.items() if not names]:
        graph = {module: names - set(free) for module, names in graph.items() if module not in free}
    assert not graph


@pytest.mark.parametrize("path", _files(), ids=_module)
def test_lightning_is_imported_by_its_adapters_only(path: Path) -> None:
    foreign = {name.split(".")[0] for name in _imports(path)} & {"lightning", "pytorch_lightning", "lightning_fabric"}
    assert not foreign or _module(path).startswith("lightning_zero.lightning.")


def test_engine_and_parallel_do_not_know_each_other() -> None:
    rooms = {"lightning_zero.engine": "lightning_zero.parallel", "lightning_zero.parallel": "lightning_zero.engine"}
    for module, names in _graph().items():
        for room, other in rooms.items():
            assert not (module.startswith(room) and any(name.startswith(other) for name in names)), module


def test_ops_stand_alone() -> None:
    for module, names in _graph().items():
        if module.startswith("lightning_zero_ops"):
            assert all(name.startswith("lightning_zero_ops") for name in names), module


def test_cuda_is_asked_in_two_files_only() -> None:
    """Whatever a training runs on a device can be run on a simulated one; see ``tests/simulated_device.py``."""
    named = re.compile(r"torch\.(cuda|accelerator)\b|from torch import .*\b(cuda|accelerator)\b")
    files = [path for path in (ROOT / "lightning_zero").rglob("*.py") if path.parent.name != "diagnostics"]
    found = {str(path.relative_to(ROOT / "lightning_zero")) for path in files if named.search(_code(path))}
    assert found == {"storage/copies.py", "comm/waits.py"}


def _code(path: Path) -> str:
    """Return the code of a file without docstrings and comments."""
    return ast.unparse(_WithoutDocstrings().visit(ast.parse(path.read_text())))


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node
