from __future__ import annotations

import copy
import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from lightning_zero import load_pretrained
from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.directory import CheckpointError
from lightning_zero.config import MixedPrecision
from lightning_zero.engine.engine import ZeroEngine, gathered
from tests import worlds
from tests.checkpoint import programs
from tests.sampling import sample

MiB = 1 << 20


class Norm(nn.Module):
    """Has no ``reset_parameters``, like many norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Language(nn.Module):
    """A tied head that files leave out, a frozen part, a buffer."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(2)])
        self.batch_norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.frozen(x))


def _values(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(7)
    values = {name: torch.randn(value.shape) for name, value in Language().state_dict().items()}
    del values["head.weight"]
    return {name: torch.tensor(5) if name.endswith("tracked") else value.to(dtype) for name, value in values.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files and an index."""
    path = tmp_path_factory.mktemp("pretrained")
    values = _values()
    names = list(values)
    weight_map = {name: f"model-0000{1 + (names.index(name) > 4)}-of-00002.safetensors" for name in names}
    for file in set(weight_map.values()):
        part = {name: values[name] for name in names if weight_map[name] == file}
        safetensors.torch.save_file(part, path / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


# -- At any time, at any stage -----------------------------------------------------------------------------------------


def _meta() -> Language:
    with torch.device("meta"):
        return Language()


def _before_real(path: str, engine: ZeroEngine) -> nn.Module:
    model = Language()
    load_pretrained(model, path)
    assert torch.equal(model.frozen.weight, _values()["frozen.weight"])
    return engine.shard(model)


def _before_meta(path: str, engine: ZeroEngine) -> nn.Module:
    model = _meta()
    load_pretrained(model, path)
    return engine.shard(model)


def _inside_the_meta_context(path: str, engine: ZeroEngine) -> nn.Module:
    with torch.device("meta"):
        model = nn.ModuleDict({"inner": Language()})
        load_pretrained(model["inner"], path)
    return engine.shard(model)["inner"]


def _copied_and_pickled(path: str, engine: ZeroEngine) -> nn.Module:
    model = _meta()
    load_pretrained(model, path)
    return engine.shard(pickle.loads(pickle.dumps(copy.deepcopy(model))))


def _after(path: str, engine: ZeroEngine) -> nn.Module:
    model = engine.shard(Language())
    load_pretrained(model, path)
    return model


def _after_attach(path: str, engine: ZeroEngine) -> nn.Module:
    model = engine.shard(Language())
    optimizer = engine.attach(torch.optim.AdamW(model.parameters()))
    with torch.autocast("cpu", torch.bfloat16, enabled=model.frozen.weight.dtype == torch.bfloat16):
        loss = model(torch.arange(4)).square().mean()
    loss.backward()
    optimizer.step()
    load_pretrained(engine, path)
    return model


WAYS = {
    way.__name__.strip("_"): way
    for way in (
        _before_real, _before_meta, _inside_the_meta_context, _copied_and_pickled, _after, _after_attach,
    )
}  # fmt: skip
PRECISIONS = {
    "fp32": (torch.float32, None),
    "bf16-mixed": (torch.float32, MixedPrecision(compute_dtype=torch.bfloat16)),
}


def _load(rank: int, world: int, way: str, stage: int, path: str, precision: str) -> dict[str, Tensor]:
    engine = ZeroEngine(stage, precision=PRECISIONS[precision][1])
    model = WAYS[way](path, engine)
    assert model.head.weight is model.embed.weight
    values = {name: engine.full_param(param) for name, param in model.named_parameters()}
    with gathered(model):
        for name, param in model.named_parameters():
            assert torch.equal(param, values[name].to(param.dtype)), name
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
            model(torch.arange(3))
    for record in engine.records():
        assert torch.equal(record.master(), values_of(values, record.name)[slice(*record.own_range)])
    return {**values, **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def values_of(values: dict[str, Tensor], name: str) -> Tensor:
    return values[name.removeprefix("inner.")].view(-1)


CASES = [(way, stage, world) for way in WAYS for stage in (0, 1, 2, 3) for world in (1, 2, 3)]
EVERY_TIME = [
    ("before_real", 3, 2), ("before_meta", 0, 2), ("before_meta", 1, 3), ("before_meta", 3, 3), ("after", 0, 3),
    ("after", 2, 2), ("after", 3, 2), ("after_attach", 3, 2), ("inside_the_meta_context", 3, 2),
    ("copied_and_pickled", 3, 2), ("before_meta", 3, 1),
]  # fmt: skip


@pytest.mark.world(3)
@pytest.mark.parametrize("case", sample(CASES, *EVERY_TIME), ids=lambda case: f"{case[0]}-stage{case[1]}-w{case[2]}")
def test_the_values_are_those_of_the_file(case: tuple[str, int, int], folder: Path) -> None:
    way, stage, world = case
    for loaded in worlds.run(_load, world, way, stage, str(folder), "bf16-mixed" if stage == 2 else "fp32"):
        expected = _values()
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def _load_16(rank: int, world: int, path: str, way: str) -> dict[str, Tensor]:
    engine = ZeroEngine(3)
    torch.set_default_dtype(torch.bfloat16)
    model = WAYS[way](path, engine) if way != "before_real" else None
    if model is None:
        model = Language()
        load_pretrained(model, path)
        engine.shard(model)
    return {name: engine.full_param(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("way", ["before_real", "before_meta", "after"])
def test_values_are_rounded_to_the_dtype_of_the_module_whenever_they_arrive(way: str, folder: Path) -> None:
    loaded = worlds.run(_load_16, 2, str(folder), way)[1]
    assert loaded["embed.weight"].dtype == torch.float32  # a master
    expected = _values()
    assert all(torch.equal(value.float(), expected[name].bfloat16().float()) for name, value in loaded.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_files_of_any_dtype_load(dtype: torch.dtype, tmp_path: Path) -> None:
    values = _values(dtype)
    safetensors.torch.save_file(values, tmp_path / "model.safetensors")
    model = Language()
    load_pretrained(model, tmp_path)
    assert all(torch.equal(param, values[name].float()) for name, param in model.named_parameters())


# -- Sources -----------------------------------------------------------------------------------------------------------


def _save_directory(rank: int, world: int, path: str) -> None:
    model = Language()
    load_pretrained(model, path)
    engine = ZeroEngine(3)
    engine.shard(model)
    directory.save(engine, programs.snapshot(engine, model), f"{path}/saved", full=False)


def _write(kind: str, path: Path) -> Path:
    values = _values()
    if kind == "file":
        safetensors.torch.save_file(values, path / "x.safetensors")
        return path / "x.safetensors"
    if kind == "single in folder":
        safetensors.torch.save_file(values, path / "other.safetensors")
    elif kind == "bin":
        torch.save(values, path / "pytorch_model.bin")
    elif kind == "indexed bin":
        torch.save(values, path / "pytorch_model-1.bin")
        index = {"weight_map": dict.fromkeys(values, "pytorch_model-1.bin")}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    elif kind == "ckpt":
        torch.save({"state_dict": values, "epoch": 3}, path / "x.ckpt")
        return path / "x.ckpt"
    else:
        safetensors.torch.save_file(values, path / "model.safetensors")
        worlds.run(_save_directory, 2, str(path))
        return path / "saved"
    return path


@pytest.mark.parametrize("kind", ["file", "single in folder", "bin", "indexed bin", "ckpt", "directory"])
def test_every_kind_of_source_loads(kind: str, tmp_path: Path) -> None:
    path = _write(kind, tmp_path)
    loaded = worlds.run(_load, 2, "before_meta", 3, str(path), "fp32")[1]
    assert all(torch.equal(loaded[name], value) for name, value in _values().items())


def test_two_sets_of_weights_in_a_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    safetensors.torch.save_file(_values(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has `model.safetensors` and `model.safetensors.index.json`, which tells of"):
        load_pretrained(Language(), tmp_path)
    load_pretrained(Language(), tmp_path / "model.safetensors")


# -- Names -------------------------------------------------------------------------------------------------------------


def _save(path: Path, values: dict[str, Tensor]) -> Path:
    safetensors.torch.save_file(values, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("to_file", "rename"),
    [
        (lambda name: f"model.{name}", {"model.": ""}),
        (lambda name: name.replace("layers.", "h."), {"h.": "layers."}),
        (lambda name: name.replace(".", "/"), lambda name: name.replace("/", ".")),
    ],
)
def test_names_are_mapped(to_file: Callable[[str], str], rename: Any, tmp_path: Path) -> None:
    _save(tmp_path, {to_file(name): value for name, value in _values().items()})
    model = Language()
    load_pretrained(model, tmp_path, rename=rename)
    assert torch.equal(model.layers[1].down.weight, _values()["layers.1.down.weight"])


def test_a_part_of_the_module_is_loaded_and_the_rest_is_left(tmp_path: Path) -> None:
    model = Language()
    before = model.frozen.weight.clone()
    _save(tmp_path, {name: value for name, value in _values().items() if name.startswith("layers.")})
    load_pretrained(model.layers, tmp_path, rename={"layers.": ""})
    assert torch.equal(model.layers[0].norm.weight, _values()["layers.0.norm.weight"])
    assert torch.equal(model.frozen.weight, before)


def test_what_does_not_fit_is_left_if_not_strict(tmp_path: Path) -> None:
    values = _values()
    del values["frozen.bias"]
    _save(tmp_path, {**values, "extra": torch.zeros(2)})
    model = Language()
    bias = model.frozen.bias.clone()
    keys = load_pretrained(model, tmp_path, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["frozen.bias"], ["extra"])
    assert torch.equal(model.frozen.bias, bias)
    assert torch.equal(model.frozen.weight, values["frozen.weight"])


def _meta_partly(rank: int, world: int, path: str) -> tuple[Tensor, Tensor, Tensor]:
    with torch.device("meta"):
        model = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)])
    load_pretrained(model, path, strict=False)
    engine = ZeroEngine(3)
    engine.shard(model)
    return tuple(engine.full_param(param) for param in (model[0].weight, model[0].bias, model[1].weight))  # type: ignore[return-value]


def test_what_is_not_in_the_file_is_initialised(tmp_path: Path) -> None:
    _save(tmp_path, {"0.weight": torch.full((4, 4), 3.0)})
    for weight, bias, norm in worlds.run(_meta_partly, 2, str(tmp_path)):
        assert torch.equal(weight, torch.full((4, 4), 3.0))
        assert bias.abs().max() <= 0.5
        assert torch.equal(norm, torch.ones(4))


def test_two_names_of_a_tied_parameter_must_agree(tmp_path: Path) -> None:
    values = _values()
    _save(tmp_path, {**values, "head.weight": values["embed.weight"].clone()})
    model = Language()
    load_pretrained(model, tmp_path)
    assert torch.equal(model.head.weight, values["embed.weight"])
    _save(tmp_path, {**values, "head.weight": values["embed.weight"] + 1})
    with pytest.raises(ValueError, match="`embed.weight` has several names in the module, and different values"):
        load_pretrained(model, tmp_path)


# -- What goes wrong ---------------------------------------------------------------------------------------------------


def _bad_names(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("embed.", "embedding."): value for name, value in values.items()}


@pytest.mark.parametrize(
    ("change", "rename", "message"),
    [
        (
            _bad_names,
            None,
            r"does not fit `Language`. Not in the file: `embed.weight` \(there is `embedding.weight`\)."
            r" Not in the module: `embedding.weight` \(there is `embed.weight`\). Map names with"
            " `rename=`",
        ),
        (
            lambda values: {**values, "embed.weight": torch.ones(17, 11)},
            None,
            r"does not fit. .*size mismatch for embed.weight: .*torch.Size\(\[17, 11\]\).*torch.Size\(\[17, 10\]\)",
        ),
        (lambda values: values, {"model.": ""}, "`rename` has the prefix `model.`, and no name in the file starts so"),
        (lambda values: values, lambda name: "embed.weight", "`rename` makes `embed.weight` of both"),
    ],
    ids=["names", "shape", "prefix", "twice"],
)
def test_what_does_not_fit_is_refused_by_name(change: Any, rename: Any, message: str, tmp_path: Path) -> None:
    _save(tmp_path, change(_values()))
    model = Language()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        load_pretrained(model, tmp_path, rename=rename)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_value_that_the_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, {"weight": torch.full((1, 2), 1e5), "bias": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"`weight` has values up to 1e\+05, which do not fit into float16"):
        load_pretrained(nn.Linear(2, 1).half(), tmp_path)


def test_sources_that_are_not_there_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="meta-llama/x` does not exist. Give a file or a folder; nothing is"):
        load_pretrained(Language(), "meta-llama/x")
    with pytest.raises(FileNotFoundError, match="has no weights that are known.*There is none of these"):
        load_pretrained(Language(), tmp_path)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002.safetensors` does not exist"):
        load_pretrained(Language(), tmp_path)
    torch.save({"epoch": 3}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="x.ckpt` holds no state dictionary"):
        load_pretrained(Language(), tmp_path / "x.ckpt")


def test_a_part_that_was_replaced_while_it_waited_is_named(folder: Path) -> None:
    model = _meta()
    load_pretrained(model, folder)
    model.frozen = nn.Linear(10, 10)
    with pytest.raises(ValueError, match="`frozen.weight` waits for its pretrained values, and was taken out"):
        ZeroEngine(3).shard(model)
    model = _meta()
    load_pretrained(model, folder)
    model.embed.weight = model.head.weight = nn.Parameter(torch.ones(20, 10))
    with pytest.raises(ValueError, match=r"`embed.weight` has the shape \(20, 10\) now, and \(17, 10\) in"):
        ZeroEngine(3).shard(model)


class Computing(nn.Linear):
    def _load_from_state_dict(self, values: dict[str, Any], prefix: str, *args: Any) -> None:
        values[f"{prefix}weight"] = values[f"{prefix}weight"] * 2
        super()._load_from_state_dict(values, prefix, *args)


class Assigning(nn.Linear):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = True) -> Any:
        return super().load_state_dict(state_dict, strict, assign=True)


@pytest.mark.parametrize("kind", [Computing, Assigning])
def test_a_module_that_computes_while_it_loads_is_refused(kind: Any, tmp_path: Path) -> None:
    _save(tmp_path, {"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    with pytest.raises(ValueError, match="`load_state_dict` of the module computes `weight` from values of the file"):
        load_pretrained(kind(3, 2), tmp_path)


def _fail(rank: int, world: int, path: str) -> None:
    engine = ZeroEngine(3)
    model = Language()
    engine.shard(model)
    with gathered(model), pytest.raises((RuntimeError, CheckpointError), match="while unit `.*` is in use"):
        load_pretrained(model, path)
    with pytest.raises((ValueError, CheckpointError), match="Not in the file: `embed.weight`"):
        load_pretrained(model, path, rename=lambda name: None if name.startswith("embed") else name)
    before = engine.full_param(model.frozen.weight)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("lightning_zero.checkpoint.pretrained.open_weights", _refuse)
        with pytest.raises((OSError, CheckpointError), match="no such disk") as error:
            load_pretrained(model, path)
        assert rank == 1 or re.search("failed on rank 1: OSError: no such disk", str(error.value))
    assert torch.equal(engine.full_param(model.frozen.weight), before)
    load_pretrained(model, path if rank == 0 else "elsewhere")
    assert torch.equal(engine.full_param(model.frozen.weight), _values()["frozen.weight"])


def _refuse(*args: Any) -> None:
    raise OSError("no such disk")


def test_errors_are_errors_on_all_ranks(folder: Path) -> None:
    worlds.run(_fail, 2, str(folder))


# -- Bytes -------------------------------------------------------------------------------------------------------------


def _measure(rank: int, world: int, stage: int, way: str, path: str) -> int:
    engine = ZeroEngine(stage)
    with torch.device("meta" if way == "before" else "cpu"):
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    model[7].weight = model[0].weight
    if way == "after":
        engine.shard(model)
    read = _bytes_read()
    load_pretrained(model, path)
    engine.shard(model)
    return _bytes_read() - read


def _bytes_read() -> int:
    match = re.search(r"^rchar: (\d+)$", Path("/proc/self/io").read_text(), flags=re.MULTILINE)
    assert match is not None
    return int(match.group(1))


READS = [(stage, way, world) for stage in (0, 1, 2, 3) for way in ("before", "after") for world in (2, 4)]


@pytest.mark.world(4)
@pytest.mark.parametrize(
    "case",
    sample(READS, (0, "before", 2), (3, "before", 4), (2, "after", 2)),
    ids=lambda case: f"stage{case[0]}-{case[1]}-w{case[2]}",
)
def test_a_rank_reads_its_part_of_the_file(case: tuple[int, str, int], tmp_path: Path) -> None:
    stage, way, world = case
    torch.manual_seed(0)
    values = {f"{index}.weight": torch.randn(512, 512) for index in range(7)}
    values.update({f"{index}.bias": torch.randn(512) for index in range(8)})
    _save(tmp_path, values)
    size = (tmp_path / "model.safetensors").stat().st_size
    header = 8 + int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    for nbytes in worlds.run(_measure, world, stage, way, str(tmp_path)):
        # The header is read twice, and gloo reads what the ranks tell one another; no tensor is read beyond its range.
        assert nbytes <= size / world + 2 * header + 64 * 1024
