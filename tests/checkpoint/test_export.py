from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from lightning_zero import export_safetensors
from lightning_zero.checkpoint.directory import CheckpointError
from lightning_zero.config import MixedPrecision
from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.checkpoint import programs
from tests.checkpoint.peak import peak_bytes
from tests.sampling import sample

MiB = 1 << 20


def _export(
    rank: int, world: int, stage: int, path: str, options: dict[str, Any], lowered: bool = False
) -> dict[str, torch.Tensor]:
    precision = MixedPrecision(compute_dtype=torch.bfloat16) if lowered else None
    engine, model, optimizer = programs.make(stage, 0, precision)
    programs.step(engine, model, optimizer, 0)
    with pytest.warns(UserWarning, match="`_extra_state`: no tensor, and not exported") if rank == 0 else _nothing():
        export_safetensors(engine, f"{path}" if rank == 0 else "elsewhere", **options)
    values = {alias: engine.full_param(rec.parameter) for rec in engine.records() for alias in rec.aliases}
    return {**values, **{name: value.clone() for name, value in model.named_buffers()}}


class _nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        pass


def _load(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return safetensors.torch.load_file(folder / "model.safetensors")
    files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return {name: value for file in files for name, value in safetensors.torch.load_file(folder / file).items()}


def _equal(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return loaded.keys() == expected.keys() and all(
        loaded[name].dtype == value.dtype and torch.equal(loaded[name], value) for name, value in expected.items()
    )


# -- What is written ---------------------------------------------------------------------------------------------------

CASES = [(stage, world) for stage in (0, 1, 2, 3) for world in (1, 2, 3)]


@pytest.mark.world(3)
@pytest.mark.parametrize(
    "case", sample(CASES, (0, 2), (2, 2), (3, 1), (3, 3)), ids=lambda case: f"stage{case[0]}-w{case[1]}"
)
def test_ranks_write_files_that_hold_all_names_and_values(case: tuple[int, int], tmp_path: Path) -> None:
    stage, world = case
    values = worlds.run(_export, world, stage, str(tmp_path / "runs" / "out"), {"max_shard_size": 400})[0]
    assert "head.weight" in values
    assert _equal(_load(tmp_path / "runs" / "out"), values)
    assert os.listdir(tmp_path / "runs") == ["out"]


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_masters_are_what_is_exported(dtype: str | None, tmp_path: Path) -> None:
    values = worlds.run(_export, 2, 3, str(tmp_path / "all.safetensors"), {"dtype": dtype}, True)[0]
    if dtype is not None:
        values = {name: value.bfloat16() if value.is_floating_point() else value for name, value in values.items()}
    assert _equal(safetensors.torch.load_file(tmp_path / "all.safetensors"), values)


def _export_parts(rank: int, world: int, path: str) -> dict[str, torch.Tensor]:
    engine, model, _ = programs.make(3, 0)
    export_safetensors(model, f"{path}/trained", include="trained")
    export_safetensors(model.blocks[1], f"{path}/part")
    export_safetensors(model, f"{path}/norms", include=lambda name: ".norm." in name, prefix="blocks.0.")
    export_safetensors(model, f"{path}/frozen", include=["frozen.*"])
    return {rec.name: engine.full_param(rec.parameter) for rec in engine.records()}


def test_a_part_of_the_module_or_of_the_names_is_exported(tmp_path: Path) -> None:
    values = worlds.run(_export_parts, 2, str(tmp_path))[0]
    trained = {name: value for name, value in values.items() if not name.startswith("frozen.")}
    assert _equal(_load(tmp_path / "trained"), {**trained, "head.weight": values["embedding.weight"]})
    prefix = "blocks.1."
    part = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    assert _equal(_load(tmp_path / "part"), part)
    assert _equal(
        _load(tmp_path / "norms"), {f"norm.{kind}": values[f"blocks.0.norm.{kind}"] for kind in ("weight", "bias")}
    )
    assert _equal(_load(tmp_path / "frozen"), {name: values[name] for name in ("frozen.weight", "frozen.bias")})


def test_a_module_that_no_engine_holds_is_exported_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    export_safetensors(model, tmp_path / "out")
    assert _equal(_load(tmp_path / "out"), dict(model.state_dict()))


# -- What goes wrong ---------------------------------------------------------------------------------------------------


def _fail(rank: int, world: int, path: str) -> None:
    engine, model, _ = programs.make(3, 0)
    export_safetensors(model.blocks, f"{path}/out")
    with pytest.raises(FileExistsError if rank == 0 else CheckpointError, match="pass `overwrite=True`"):
        export_safetensors(model, f"{path}/out")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "pwrite", _full)
        expected = CheckpointError if rank == 0 else OSError
        with pytest.raises(expected, match="No space left on device") as error:
            export_safetensors(model.blocks, f"{path}/out", overwrite=True)
        assert rank == 1 or re.search(r"Exporting `.*/out` failed on rank 1: OSError", str(error.value))
    with pytest.raises(ValueError, match="`include='train'` is not known"):
        export_safetensors(model.blocks, f"{path}/other", include="train")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`dtype='float32'` is not known. Use 'fp64', 'fp32', 'bf16', 'fp16' or None"):
        export_safetensors(model.blocks, f"{path}/other", dtype="float32")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Rank 1 has other weights than rank 0"):
        export_safetensors(model.conv if rank == 0 else model.frozen, f"{path}/other")
    export_safetensors(model.conv, f"{path}/out", overwrite=True)


def _full(*args: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_errors_are_the_same_on_all_ranks_and_nothing_is_left_behind(tmp_path: Path) -> None:
    worlds.run(_fail, 2, str(tmp_path))
    assert os.listdir(tmp_path) == ["out"]
    assert _load(tmp_path / "out").keys() == {"weight", "bias"}


# -- Bytes and memory --------------------------------------------------------------------------------------------------


def _measure(rank: int, world: int, stage: int, path: str) -> tuple[int, int]:
    """Return what this rank wrote, and by how much its memory rose."""
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)])
    engine = ZeroEngine(stage)
    engine.shard(model)
    before = _written()
    peak = peak_bytes(lambda: export_safetensors(engine, path, dtype="bf16"))
    return _written() - before, peak


def _written() -> int:
    match = re.search(r"^wchar: (\d+)$", Path("/proc/self/io").read_text(), flags=re.MULTILINE)
    assert match is not None
    return int(match.group(1))


@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 3))
def test_every_rank_writes_its_part_through_little_memory(stage: int, tmp_path: Path) -> None:
    measured = worlds.run(_measure, 2, stage, str(tmp_path / "out"))
    total = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert total > 8 * 2048 * 2048 * 2
    for written, peak in measured:
        assert written <= total / 2 + 64 * 1024  # headers, and what ranks tell one another
        assert peak <= 64 * MiB
