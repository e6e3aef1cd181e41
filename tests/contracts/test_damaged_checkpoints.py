"""What is wrong with a checkpoint is said on every rank, by name; never wrong weights in silence, never a hang."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_zero.checkpoint import directory, state
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.lightning.checkpoint_io import load_from_checkpoint
from tests import worlds
from tests.checkpoint import programs

FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "checksums", "format.json", "meta.pt")
FLIPS = 100


def _save(rank: int, world: int, path: str, full: bool = False) -> None:
    engine, model, optimizer = programs.make(3, 0)
    programs.step(engine, model, optimizer, 0)
    directory.save(engine, programs.snapshot(engine, model, optimizer), path, full=full)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    worlds.run(_save, 2, str(tmp_path / "saved.ckpt"))
    return tmp_path / "saved.ckpt"


def _flip(path: Path, position: int, mask: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ mask]))


def _restore(path: str, model: nn.Module, engine: ZeroEngine, optimizer: Any) -> Any:
    checkpoint = programs.restore(engine, model, optimizer, path)
    held = programs.held(engine, optimizer)
    return checkpoint["epoch"], checkpoint["callbacks"], [(name, span, slots) for name, _, span, slots in held]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _flip_and_load(rank: int, world: int, path: str) -> list[tuple[str, str]]:
    """Return what happened after each flip: the file, and the error or what became of the values."""
    engine, model, optimizer = programs.make(3, 1)
    expected = _restore(path, model, engine, optimizer)
    chosen = random.Random(5)
    outcomes: list[tuple[str, str]] = []
    for number in range(FLIPS):
        name = "" if os.path.isfile(path) else FILES[number % len(FILES)]
        flip = Path(path, name), chosen.randrange(os.path.getsize(Path(path, name))), 1 << chosen.randrange(8)
        dist.barrier()
        if rank == 0:
            _flip(*flip)
        dist.barrier()
        try:
            values = _restore(path, model, engine, optimizer)
            outcomes.append((name, "harmless" if _equal(values, expected) else f"wrong in silence: {flip}"))
        except Exception as error:
            outcomes.append((name, str(error)))
        dist.barrier()
        if rank == 0:
            _flip(*flip)
    dist.barrier()
    assert _equal(_restore(path, model, engine, optimizer), expected)
    return outcomes


def test_a_flipped_bit_is_named_on_every_rank_or_harmless(saved: Path) -> None:
    outcomes = worlds.run(_flip_and_load, 2, str(saved))
    for flips in outcomes:
        assert len(flips) == FLIPS
        for name, outcome in flips:
            assert (f"{saved / name}` is damaged" in outcome) or (outcome == "harmless" and name == "checksums")
    assert sum(outcome == "harmless" for _, outcome in outcomes[0]) <= 5


def test_a_flipped_bit_of_a_single_file_is_an_error_on_every_rank_or_harmless(tmp_path: Path) -> None:
    worlds.run(_save, 2, str(tmp_path / "saved.ckpt"), True)
    outcomes = [
        [outcome for _, outcome in flips] for flips in worlds.run(_flip_and_load, 2, str(tmp_path / "saved.ckpt"))
    ]
    assert not any(outcome.startswith("wrong in silence") for flips in outcomes for outcome in flips)
    noticed = [[outcome != "harmless" for outcome in flips] for flips in outcomes]
    assert noticed[0] == noticed[1]
    assert sum(noticed[0]) >= 10  # most of this small file is padding


def _remove(name: str) -> Callable[[Path], None]:
    def remove(path: Path) -> None:
        (path / name).unlink()

    return remove


def _cut(name: str) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        os.truncate(path / name, (path / name).stat().st_size - 1)

    return cut


def _exchange_shards(path: Path) -> None:
    (path / "__0_0.distcp").rename(path / "other")
    (path / "__1_0.distcp").rename(path / "__0_0.distcp")
    (path / "other").rename(path / "__1_0.distcp")


class Payload:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def _put_code(name: str) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        for sums in ("checksums", "format.json"):
            (path / sums).unlink()
        content = pickle.dumps(Payload())
        (path / name).write_bytes(content)
        if name == "meta.pt":
            torch.save({"mine": Payload()}, path / name)

    return put


def _refused(rank: int, world: int, path: str) -> str:
    engine, model, optimizer = programs.make(3, 1)
    try:
        programs.restore(engine, model, optimizer, path)
    except Exception as error:
        return f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', []))}"
    return "loaded"


@pytest.mark.parametrize(
    ("harm", "file", "reason"),
    [
        *((_remove(name), name, "is missing, so") for name in FILES if name not in (".metadata", "format.json")),
        (_remove(".metadata"), "", "has no `.metadata`"),
        (_remove("format.json"), "format.json", "is missing, so"),
        *((_cut(name), name, "is damaged") for name in FILES),
        (_exchange_shards, "__0_0.distcp", "is damaged"),
        (_put_code(".metadata"), ".metadata", "could run code"),
        (_put_code("meta.pt"), "", "Weights only load failed"),
    ],
    ids=[
        *(f"no-{name}" for name in FILES if name not in (".metadata", "format.json")), "no-.metadata", "no-format.json",
        *(f"cut-{name}" for name in FILES), "exchanged", "code-in-index", "code-in-meta",
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_on_every_rank(
    harm: Callable[[Path], None], file: str, reason: str, saved: Path, tmp_path: Path
) -> None:
    harm(saved)
    for said in worlds.run(_refused, 2, str(saved)):
        assert reason in said
        assert file in said
        assert str(saved) in said
    assert not Path("executed").exists()


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(13, 6)


def _load_other(rank: int, world: int, path: str) -> None:
    engine, model = ZeroEngine(3), Other()
    engine.shard(model)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "embeddings.weight"') as caught:
        state.load_model_state(engine, model, directory.load(engine, path)["state_dict"])
    assert path in caught.value.__notes__[0]
    assert "strict_loading" in caught.value.__notes__[0]


def test_a_checkpoint_of_another_model_is_refused_by_name_on_every_rank(saved: Path) -> None:
    worlds.run(_load_other, 2, str(saved))


def test_a_shard_that_the_sums_do_not_list_is_not_read(saved: Path) -> None:
    shutil.copy(saved / "__1_0.distcp", saved / "__2_0.distcp")
    with pytest.raises(ValueError, match=r"`.*__2_0.distcp` is of another checkpoint"):
        directory.BlockReader(saved).read("__2_0.distcp")


# -- Without sums, as other tools write directories --------------------------------------------------------------------


class _Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)


def _without_sums(path: Path) -> Path:
    model = _Module()
    optimizer = {"state": {"linear.bias": {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": ["linear.bias"]}]}
    content = {"state_dict": model.state_dict(), "optimizer_states": [optimizer], "pytorch-lightning_version": "2.6.0"}
    directory.save(None, content, path, full=False)
    (path / "checksums").unlink()
    (path / "format.json").unlink()
    return path


def _read_all(path: Path) -> None:
    checkpoint = directory.load(None, path)
    for value in tree_leaves(checkpoint):
        if isinstance(value, torch.Tensor):
            value.clone()
    load_from_checkpoint(_Module, path)


def _damage(path: Path, trial: int) -> str:
    chosen = random.Random(trial)
    file = chosen.choice([path / ".metadata", path / ".metadata", *sorted(path.glob("*"))])
    content = bytearray(file.read_bytes())
    place = chosen.randrange(len(content))
    how = chosen.choice(["flip", "flip", "byte", "cut", "zero", "grow", "remove"])
    if how == "flip":
        content[place] ^= 1 << chosen.randrange(8)
    elif how == "byte":
        content[place] = chosen.randrange(256)
    elif how == "cut":
        del content[place:]
    elif how == "zero":
        content[place : place + 512] = bytes(len(content[place : place + 512]))
    elif how == "grow":
        content += bytes(64)
    if how in ("flip", "byte") and content[place] == pickle.LONG_BINPUT[0]:
        content[place] = 0  # an unpickler makes room for as many objects as follow: gigabytes
    file.write_bytes(content)
    if how == "remove":
        file.unlink()
    return f"trial {trial}: {how} of {file.name} at {place}"


def _damage_without_sums(tmp_path: Path, trials: range) -> None:
    whole, path = _without_sums(tmp_path / "whole"), tmp_path / "damaged.ckpt"
    _read_all(whole)
    unnamed = []
    for trial in trials:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        what = _damage(path, trial)
        try:
            _read_all(path)
        except (ValueError, FileNotFoundError, pickle.UnpicklingError, RuntimeError) as error:
            said = "\n".join([str(error), *getattr(error, "__notes__", [])])
            is_named = type(error) is not RuntimeError and str(path) in said
            # names and shapes that are those of no parameter here
            is_of_another_model = "loading state_dict for _Module" in said
            if not (is_named or is_of_another_model):
                unnamed.append(f"{what}: {type(error).__name__}: {said}")
        except Exception as error:
            unnamed.append(f"{what}: {type(error).__name__}: {error}")
    assert not unnamed, "\n".join(unnamed)


def test_damage_without_sums_is_named_or_not_noticed(tmp_path: Path) -> None:
    _damage_without_sums(tmp_path, range(150))


@pytest.mark.slow
def test_much_damage_without_sums_is_named_or_not_noticed(tmp_path: Path) -> None:
    _damage_without_sums(tmp_path, range(150, 750))


def test_a_directory_that_no_trainer_saved_is_named(tmp_path: Path) -> None:
    path = _without_sums(tmp_path / "saved")
    (path / "meta.pt").unlink()
    for weights in (path, tmp_path / "file.pt"):
        torch.save({"state_dict": _Module().state_dict()}, tmp_path / "file.pt")
        with pytest.raises(ValueError, match=f"`{weights}` is no checkpoint of a Trainer.*load_pretrained"):
            load_from_checkpoint(_Module, weights)
