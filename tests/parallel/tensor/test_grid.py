"""Cut modules on grids of data and tensor ranks: as on one rank that trains on the joined batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_zero.boxes import Part
from lightning_zero.checkpoint import directory, state
from lightning_zero.checkpoint.export import export_safetensors
from lightning_zero.checkpoint.pretrained import load_pretrained
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.grid import Grid, ParamAxes
from lightning_zero.parallel.tensor.collectives import ProcessGroupRanks
from lightning_zero.parallel.tensor.cuts import ParamRecord, Sections
from lightning_zero.parallel.tensor.grid import ALL_RANKS, DATA_RANKS, grid_of
from lightning_zero.parallel.tensor.plan import Packed, TensorPlan
from lightning_zero.parallel.tensor.transform import cut_module
from tests.parallel.tensor.families import VOCAB, make
from tests.sampling import sample
from tests.worlds import run

STEPS, SAMPLES, LENGTH = 3, 4, 12
PLAN = TensorPlan(
    {
        "transformer.h.*.attn.c_attn": Packed(3),
        "transformer.h.*.attn.c_proj": "row",
        "transformer.h.*.mlp.c_fc": "column",
        "transformer.h.*.mlp.c_proj": "row",
        "transformer.wte": "vocab",
        "lm_head": "column_gather",
    },
    divided={"transformer.h.*.attn": ["split_size"]},
)
GRIDS = [(1, 2), (2, 1), (2, 2)]  # data and tensor ranks


def _model() -> nn.Module:
    return make("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)[0]


def _batch(step: int) -> Tensor:
    return torch.randint(3, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))


def _loss(module: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(module(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1)


def _groups(world: int, tensor: int) -> tuple[Any, Any]:
    """Return this rank's tensor group and data group. Collective: all ranks."""
    tensor_groups = [dist.new_group(list(range(first, first + tensor))) for first in range(0, world, tensor)]
    data_groups = [dist.new_group(list(range(place, world, tensor))) for place in range(tensor)]
    return tensor_groups[dist.get_rank() // tensor], data_groups[dist.get_rank() % tensor]


def _train(
    rank: int, world: int, tensor: int, stage: int, folder: str, start: int, stop: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Train some steps, save what was loaded or trained, and return the losses and the whole parameters."""
    tensor_group, data_group = _groups(world, tensor)
    module = _model()
    cut = cut_module(module, PLAN, ProcessGroupRanks(tensor_group))
    data_ranks = world // tensor
    engine = ZeroEngine(stage=stage, units=["GPT2Block"])
    engine.shard(module, grid=grid_of(cut, tensor_group=tensor_group, data_group=data_group, data_ranks=data_ranks))
    optimizer = engine.attach(_optimizer(module))
    if start:
        checkpoint = directory.load(engine, f"{folder}/{start}")
        state.load_model_state(engine, module, checkpoint["state_dict"])
        state.load_optimizer_state(engine, [optimizer], states=checkpoint["optimizer_states"])
        _save(engine, module, optimizer, f"{folder}/again.ckpt", full=True)
    mine = slice(rank // tensor * SAMPLES // data_ranks, (rank // tensor + 1) * SAMPLES // data_ranks)
    losses = []
    for step in range(start, stop):
        with engine.scope("training_step"):
            loss = _loss(module, _batch(step)[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=data_group)
        losses.append(mean.item() / data_ranks)
    if not start:
        _save(engine, module, optimizer, f"{folder}/{stop}", full=False)
        _save(engine, module, optimizer, f"{folder}/{stop}.ckpt", full=True)
    found = {name: engine.full_param(param) for name, param in module.named_parameters()}
    engine.close()
    return losses, found


def _save(engine: ZeroEngine, module: nn.Module, optimizer: Any, path: str, full: bool) -> None:
    saved = {
        "state_dict": state.model_state(engine, module),
        "optimizer_states": [state.optimizer_state(engine, optimizer)],
    }
    directory.save(engine, saved, path, full=full)


def _reference() -> tuple[list[float], dict[str, Tensor]]:
    module = _model()
    optimizer, losses = _optimizer(module), []
    for step in range(STEPS):
        loss = _loss(module, _batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: param.detach() for name, param in module.named_parameters()}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


CASES = [(grid, GRIDS[(number + stage) % 3], stage) for number, grid in enumerate(GRIDS) for stage in range(4)]


def _name(case: Any) -> str:
    (first, second, stage) = case
    return "{}x{}-then-{}x{}-stage{}".format(*first, *second, stage)


@pytest.mark.parametrize("case", sample(CASES, CASES[1], CASES[6], CASES[8], CASES[11]), ids=_name)
def test_a_cut_model_trains_as_on_one_rank_and_goes_on_on_another_grid(case: Any, tmp_path: Path) -> None:
    first, second, stage = case
    losses, expected = _reference()
    before = run(_train, first[0] * first[1], first[1], stage, str(tmp_path), 0, STEPS - 1, timeout_s=180.0)
    after = run(_train, second[0] * second[1], second[1], 3 - stage, str(tmp_path), STEPS - 1, STEPS, timeout_s=180.0)
    for own, _ in before:
        assert own == pytest.approx(losses[:-1], rel=0, abs=1e-6)
    for own, found in after:
        assert own == pytest.approx(losses[-1:], rel=0, abs=1e-6)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)
    saved, again = (torch.load(tmp_path / name, weights_only=True) for name in (f"{STEPS - 1}.ckpt", "again.ckpt"))
    assert _same(saved, again)


# -- Files of whole weights --------------------------------------------------------------------------------------------


def _reads_and_exports(rank: int, world: int, when: str, path: str) -> None:
    tensor_group, data_group = _groups(world, 2)
    with torch.device("meta" if when == "before" else "cpu"):
        module = _model()
    if when == "before":
        load_pretrained(module, f"{path}/model.safetensors")
    cut = cut_module(module, PLAN, ProcessGroupRanks(tensor_group))
    engine = ZeroEngine(stage=3, units=["GPT2Block"])
    engine.shard(module, grid=grid_of(cut, tensor_group=tensor_group, data_group=data_group, data_ranks=world // 2))
    if when == "after":
        load_pretrained(module, f"{path}/model.safetensors")
    export_safetensors(engine, f"{path}/exported.safetensors")
    engine.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cut_model_reads_and_exports_the_files_of_the_whole_one(when: str, tmp_path: Path) -> None:
    """Before it is cut, on the meta device, and after it was sharded."""
    weights = {name: torch.randn(param.shape) for name, param in _model().named_parameters()}
    save_file(weights, tmp_path / "model.safetensors")
    run(_reads_and_exports, 4, when, str(tmp_path))
    exported = load_file(tmp_path / "exported.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in weights.items())
    assert torch.equal(exported["lm_head.weight"], weights["transformer.wte.weight"])


# -- Records -----------------------------------------------------------------------------------------------------------


def _record(kind: Any, sections: Sections | None = None, size: int = 1) -> ParamRecord:
    return ParamRecord(names=("p",), shape=(12, 5), kind=kind, sections=sections, rank=0, size=size)


def _grids(rank: int, world: int) -> Grid:
    records = {"cut": _record("cut", Sections(0, (8, 4))), "whole": _record("whole"), "partial": _record("partial")}
    with pytest.raises(ValueError, match="`p` was cut for 2 tensor ranks, and `tensor_group` has 1"):
        grid_of({"p": _record("whole", size=2)}, tensor_group=None, data_group=None, data_ranks=1)
    with pytest.raises(ValueError, match="`data_group` has 1 ranks, and `data_ranks` is 2"):
        grid_of(records, tensor_group=None, data_group=None, data_ranks=2)
    return grid_of(records, tensor_group=None, data_group=None, data_ranks=1)


def test_records_become_axes() -> None:
    (grid,) = run(_grids, 1)
    assert list(grid.groups) == [ALL_RANKS, DATA_RANKS]
    assert grid.params == {
        "cut": ParamAxes(DATA_RANKS, part=Part.along((12, 5), 0, (0, 8), (8, 4))),
        "whole": ParamAxes(ALL_RANKS),
        "partial": ParamAxes(ALL_RANKS),
    }
