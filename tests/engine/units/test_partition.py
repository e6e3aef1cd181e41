"""Which parameters become a unit, and how meta parameters become real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import MixedPrecision
from lightning_zero.engine.buffers.parameter import ReleasedParameter
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.units.partition import ROOT, choose_territories
from lightning_zero.storage.store import DeviceStore
from tests import worlds
from tests.references import Block, TinyGPT


def _units(module: nn.Module, units: Any = None) -> dict[str, list[str]]:
    """Return the units and the parameters that each of them holds."""
    territories = choose_territories(module, units)
    return {territory.name: [names[0] for names in territory.names] for territory in territories}


class _Mlp(nn.Module):
    """Layers of one class in a ``Sequential``, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        self.scale = nn.Parameter(torch.ones(1))


class _EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2)
        self.norm = nn.LayerNorm(8)


# -- Automatic units ---------------------------------------------------------------------------------------------------


def test_blocks_embedding_and_head_are_units_and_the_root_takes_what_is_left() -> None:
    units = _units(TinyGPT())
    assert list(units) == [ROOT, "blocks.0", "blocks.1", "blocks.2", "embedding", "head"]
    assert units[ROOT] == ["norm.weight", "norm.bias"]
    assert units["head"] == ["head.weight"]
    assert len(units["blocks.1"]) == 6


def test_layers_of_one_class_are_units_of_their_own() -> None:
    assert list(_units(_Mlp())) == [ROOT, "layers.0", "layers.2", "layers.4"]
    assert _units(_Mlp())[ROOT] == ["scale"]


def test_both_stacks_of_an_encoder_decoder_are_cut() -> None:
    units = _units(_EncoderDecoder())
    assert {"encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1", "embedding"} <= set(units)
    assert units[ROOT] == ["norm.weight", "norm.bias"]


def test_stacks_inside_blocks_are_not_cut_again() -> None:
    outer = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)])
    assert list(_units(nn.ModuleDict({"stack": outer}))) == [ROOT, "stack.0", "stack.1"]


def test_a_single_layer_is_its_own_root() -> None:
    assert _units(nn.Linear(3, 2)) == {ROOT: ["weight", "bias"]}


def test_a_module_without_parameters_has_an_empty_root() -> None:
    assert _units(nn.Sequential(nn.ReLU(), nn.ReLU())) == {ROOT: []}


def test_large_leaves_are_units_where_nothing_is_repeated() -> None:
    module = nn.Module()
    module.large, module.small = nn.Linear(40, 40), nn.Linear(2, 2)
    assert _units(module) == {ROOT: ["small.weight", "small.bias"], "large": ["large.weight", "large.bias"]}


def test_compiled_blocks_are_units_with_the_names_of_the_module() -> None:
    module = TinyGPT(blocks=[torch.compile(Block(), backend="eager") for _ in range(2)])  # type: ignore[misc]
    units = _units(module)
    assert list(units) == [ROOT, "blocks.0", "blocks.1", "embedding", "head"]
    assert units["blocks.0"][0] == "blocks.0._orig_mod.norm.weight"
    assert list(_units(module, ["Block"])) == [ROOT, "blocks.0", "blocks.1"]


def test_every_parameter_is_in_exactly_one_unit() -> None:
    for module in (TinyGPT(), TinyGPT(tied=True), _Mlp(), _EncoderDecoder()):
        params = [param for territory in choose_territories(module, None) for param in territory.params]
        assert {id(param) for param in params} == {id(param) for param in module.parameters()}
        assert len(params) == len(list(module.parameters()))


# -- Shared parameters -------------------------------------------------------------------------------------------------


def test_a_tied_weight_belongs_to_the_root_and_keeps_all_its_names() -> None:
    territories = choose_territories(TinyGPT(tied=True), None)
    assert territories[0].names[0] == ["embedding.weight", "head.weight"]
    assert [territory.name for territory in territories] == [ROOT, "blocks.0", "blocks.1", "blocks.2"]


def test_a_weight_shared_inside_a_unit_belongs_to_that_unit() -> None:
    blocks = [Block() for _ in range(2)]
    blocks[0].up.bias = blocks[0].extra = nn.Parameter(torch.zeros(12))  # type: ignore[assignment]
    units = _units(TinyGPT(blocks=blocks))
    assert "blocks.0.extra" in units["blocks.0"]
    assert "blocks.0.extra" not in units[ROOT]


def test_a_module_that_is_used_twice_is_one_unit() -> None:
    shared = Block()
    units = _units(TinyGPT(blocks=[shared, Block(), shared]))
    assert list(units) == [ROOT, "blocks.0", "blocks.1", "embedding", "head"]
    assert len(units["blocks.0"]) == 6


# -- Units by name -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "units",
    [
        Block,
        "Block",
        f"{Block.__module__}.Block",
        [Block],
        ["Block"],
        ("Block", Block),
    ],
    ids=["class", "name", "dotted", "classes", "names", "both"],
)
def test_units_are_named_by_class_name_or_dotted_name(units: Any) -> None:
    assert list(_units(TinyGPT(), units)) == [ROOT, "blocks.0", "blocks.1", "blocks.2"]


def test_a_base_class_names_all_that_derive_from_it() -> None:
    class Special(Block):
        pass

    module = TinyGPT(blocks=[Block(), Special()])
    for units in (Block, "Block"):
        assert list(_units(module, units)) == [ROOT, "blocks.0", "blocks.1"]
    assert list(_units(module, Special)) == [ROOT, "blocks.1"]


def test_units_may_lie_in_units_and_come_after_them() -> None:
    units = _units(TinyGPT(depth=1), ["Block", nn.Linear])
    assert list(units) == [ROOT, "blocks.0", "head", "blocks.0.up", "blocks.0.down"]
    assert units["blocks.0"] == ["blocks.0.norm.weight", "blocks.0.norm.bias"]


def test_without_names_everything_is_the_root() -> None:
    assert list(_units(TinyGPT(), [])) == [ROOT]


@pytest.mark.parametrize("units", ["Blok", ["Block", "Blok"], [nn.Conv2d], "TinyGPT"])
def test_a_name_that_matches_nothing_inside_the_module_is_refused(units: Any) -> None:
    match = r"`units` names `(Blok|Conv2d|TinyGPT)`, but no module inside `TinyGPT` has that class"
    with pytest.raises(ValueError, match=match) as caught:
        choose_territories(TinyGPT(), units)
    assert str(caught.value).endswith("The classes are: Block, Embedding, LayerNorm, Linear, ModuleList.")
    assert "Did you mean `TinyGPT`" not in str(caught.value)


# -- Meta modules ------------------------------------------------------------------------------------------------------

WIDTH = 64


class _Witness(nn.Module):
    """A block that looks, when it is initialised, at how much of the model is in memory."""

    def __init__(self, seen: list[int], root: list[nn.Module]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.register_buffer("table", torch.empty(WIDTH))
        self._look = lambda: seen.append(_bytes_of_parameters(root[0]))

    def reset_parameters(self) -> None:
        self._look()
        nn.init.normal_(self.weight)
        self.table.fill_(3.0)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight / WIDTH + self.table


def _bytes_of_parameters(module: nn.Module) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        storages = {
            param.untyped_storage()._cdata: param.untyped_storage().nbytes()
            for param in module.parameters()
            if not param.is_meta
        }
    return sum(storages.values())


def _on_meta(rank: int, world: int) -> tuple[int, list[int], bool]:
    seen: list[int] = []
    root: list[nn.Module] = []
    with torch.device("meta"):
        module = nn.Sequential(*[_Witness(seen, root) for _ in range(6)])
    root.append(module)
    peaks: list[int] = []
    reset = DeviceStore.reset_peak

    def note(store: DeviceStore) -> None:
        peaks.append(store.peak("gathered"))
        reset(store)

    identities = [id(param) for param in module.parameters()]
    with patch.object(DeviceStore, "reset_peak", note):
        engine = ZeroEngine(3)
        engine.shard(module)
    same = identities == [id(param) for param in module.parameters()]
    assert all(type(param) is ReleasedParameter for param in module.parameters())
    assert all(float(buffer[0]) == 3.0 for buffer in module.buffers())
    values = engine.full_param(module[0].weight)
    assert 0.5 < values.std().item() < 1.5
    module(torch.ones(2, WIDTH)).sum().backward()
    assert engine.full_grad(module[5].weight) is not None
    engine.close()
    return peaks[0], seen, same


def test_a_meta_module_becomes_real_unit_by_unit() -> None:
    unit = WIDTH * WIDTH * 4
    for peak, seen, same in worlds.run(_on_meta, 2):
        assert unit <= peak <= 1.01 * unit
        assert len(seen) == 6
        assert max(seen) <= 1.01 * unit
        assert same


def _all_equal(rank: int, world: int, stage: int) -> dict[str, Tensor]:
    """Return what a meta module starts with; every rank draws other numbers."""
    torch.manual_seed(rank)
    with torch.device("meta"):
        module = TinyGPT()
    engine = ZeroEngine(stage)
    engine.shard(module)
    values = {name: engine.full_param(param) for name, param in module.named_parameters()}
    engine.close()
    return values


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_meta_module_starts_from_the_values_of_rank_zero(stage: int) -> None:
    first, second = worlds.run(_all_equal, 2, stage)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(value.isfinite().all() for value in first.values())
    assert torch.equal(first["norm.weight"], torch.ones(6))


class _Unready(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))


def test_a_meta_module_without_reset_parameters_is_refused_by_name() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), _Unready())
    with pytest.raises(
        ValueError, match=r"`1` \(_Unready\) was built on the meta device and has no `reset_parameters`"
    ):
        ZeroEngine(3).shard(module)


def test_a_module_on_the_meta_device_in_part_becomes_real() -> None:
    with torch.device("meta"):
        head = nn.Linear(3, 2)
    module = nn.Sequential(nn.Linear(4, 3), head)
    first = module[0].weight.detach().clone()
    ZeroEngine(3).shard(module)
    assert torch.equal(module[0].weight, first)
    assert module(torch.ones(1, 4)).isfinite().all()


class _Tied(nn.Module):
    """The head shares its weight, has a bias of its own, and lies in a unit with a table and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.block = nn.Sequential(nn.Linear(6, 11), nn.BatchNorm1d(11, affine=False))
        self.block[0].weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.block(self.embedding(ids).flatten(0, 1))
        return out


def _tied(rank: int, world: int, stage: int) -> list[dict[str, Tensor]]:
    found = []
    torch.manual_seed(rank)
    for units in (None, [], [nn.Linear], [nn.Linear, nn.Sequential], [nn.Sequential], [nn.Embedding, nn.BatchNorm1d]):
        with torch.device("meta"):
            module = _Tied()
        engine = ZeroEngine(stage, units=units)
        engine.shard(module)
        assert module.block[0].weight is module.embedding.weight
        values = {name: engine.full_param(param) for name, param in module.named_parameters()}
        found.append(values | dict(module.named_buffers()))
        engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_tied_weight_on_the_meta_device_is_initialised_with_all_that_its_modules_have(stage: int) -> None:
    first, second = worlds.run(_tied, 2, stage)
    for mine, theirs in zip(first, second, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert all(value.isfinite().all() for value in mine.values())
        assert 0.0 < mine["block.0.bias"].std() < 1.0
        assert torch.equal(mine["block.1.running_var"], torch.ones(11))


class _Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(4, 6, num_layers=2)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0])
        return out


def _recurrent(rank: int, world: int, kind: Callable[..., nn.Module], stage: int) -> list[bool]:
    with torch.device("meta"):
        module = _Recurrent(kind)
    engine = ZeroEngine(stage, units=[nn.RNNBase])
    engine.shard(module)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    before = [engine.full_param(param) for param in module.parameters()]
    for _ in range(2):
        module(torch.ones(3, 2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = [not torch.equal(engine.full_param(p), value) for p, value in zip(module.parameters(), before, strict=True)]
    engine.close()
    return moved


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_network_on_the_meta_device_trains(kind: Callable[..., nn.Module], stage: int) -> None:
    for moved in worlds.run(_recurrent, 2, kind, stage):
        assert all(moved)


@pytest.mark.parametrize("units", [None, [], ["Block"], [nn.Linear]])
def test_a_tied_weight_has_the_same_compute_dtype_whatever_the_units(units: Any) -> None:
    dtypes = _dtypes(TinyGPT(tied=True), units, compute_dtype=torch.bfloat16)
    assert dtypes["embedding.weight"] == torch.bfloat16
    assert dtypes["norm.weight"] == torch.float32


def _dtypes(module: nn.Module, units: Any = None, **options: Any) -> dict[str, torch.dtype]:
    engine = ZeroEngine(0, units=units, precision=MixedPrecision(**options))
    engine.shard(module)
    with engine.scope("step"):
        return {name: param.dtype for name, param in module.named_parameters()}


def test_a_meta_module_gets_its_compute_dtype() -> None:
    with torch.device("meta"):
        module = TinyGPT(depth=1)
    dtypes = _dtypes(module, compute_dtype=torch.bfloat16)
    assert {name for name, dtype in dtypes.items() if dtype == torch.bfloat16} == {
        "embedding.weight", "blocks.0.up.weight", "blocks.0.down.weight", "head.weight",
    }  # fmt: skip
