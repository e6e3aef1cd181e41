"""Models on grids of ranks: cut, packed, replicated and partial parameters, and experts, train as on one rank.

Programs are random: parameters of every kind, gradients that only some ranks have, frozen ones, accumulation, clipping
by the engine or by PyTorch; scopes of nodes that cut groups in every way; then they are saved on one grid and go on on
another.
"""

from __future__ import annotations

import math
import random
import time
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_zero import ZeroEngine, load_pretrained
from lightning_zero.boxes import Part
from lightning_zero.checkpoint import directory, state
from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.checkpoint.export import export_safetensors
from lightning_zero.checkpoint.ranks import CheckpointError
from lightning_zero.config import Communication
from lightning_zero.engine.buffers.group import BufferGroup, NodeLevels
from lightning_zero.engine.units import grid_groups
from lightning_zero.grid import Grid, ParamAxes
from lightning_zero.sharding import NodeRanks, Sharding
from tests.sampling import sample
from tests.worlds import run

BATCHES = 4  # of a step; data ranks share them
CLIP = 3.0
MUTATED = 7  # a seed with whole and packed parameters on two tensor ranks
SCOPES = [("none", "node", "world"), ("node", "node", "node"), ("node", "node", "world"), ("node", "world", "world")]
KINDS = ("cut0", "cut1", "packed0", "packed1", "whole", "partial", "expert")


@dataclass(frozen=True)
class Param:
    """A parameter of a random model."""

    name: str
    kind: str
    shape: tuple[int, ...]
    trained: bool
    sections: tuple[int, ...] = ()  # of a packed one, each of which is cut


@dataclass(frozen=True)
class Shape:
    """A grid: tensor ranks are neighbours, then expert ranks, then the others.

    Attributes:
        node: Ranks per node, for scopes of a node.
        is_apart: Tensor ranks are the farthest ones instead.
    """

    tensor: int
    experts: int
    stage: int | Sharding
    accumulates: bool = False
    clips: str = "engine"
    node: int = 2
    is_apart: bool = False

    def microbatches(self, position: Position) -> int:
        """Return the number of a rank's micro-batches."""
        return BATCHES // position.data_ranks if self.accumulates else 1


@dataclass(frozen=True)
class Position:
    """This rank on a grid."""

    data_ranks: int
    data: int
    tensor: int
    expert: int
    expert_shard: int

    @staticmethod
    def of(rank: int, world: int, shape: Shape) -> Position:
        data, tensor = divmod(rank, shape.tensor)
        if shape.is_apart:
            tensor, data = divmod(rank, world // shape.tensor)
        shard, expert = divmod(data, shape.experts)
        return Position(world // shape.tensor, data, tensor, expert, shard)


def params_of(seed: int) -> list[Param]:
    source = random.Random(seed)
    found = []
    for unit in range(3):
        for number in range(source.randint(1, 5)):
            kind = source.choice(KINDS)
            shapes = {
                "cut0": (4 * source.randint(1, 3), source.randint(1, 5)),
                "cut1": (source.randint(1, 5), 4 * source.randint(1, 3)),
                "expert": (4, source.randint(1, 7), source.randint(1, 3)),
            }
            sections = tuple(4 * source.randint(1, 2) for _ in range(source.randint(2, 3)))
            shapes["packed0"] = (sum(sections), *[source.randint(1, 3)] * source.randint(0, 2))
            shapes["packed1"] = (source.randint(1, 4), sum(sections), *[source.randint(1, 3)] * source.randint(0, 1))
            shape = shapes.get(kind, (source.randint(1, 9),))
            trained = source.random() > 0.15
            name = f"unit{unit}.param{number}"
            found.append(Param(name, kind, shape, trained, sections if "packed" in kind else ()))
    return found


def values(seed: int, name: str, step: int, batch: int, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name} {step} {batch}".encode()))
    return torch.randn(*shape, generator=generator)


def is_used(seed: int, name: str, step: int, batch: int) -> bool:
    of_step = random.Random(zlib.crc32(f"{seed}{name}{step}".encode())).random() > 0.2
    return of_step and random.Random(zlib.crc32(f"{seed}{name}{step}/{batch}".encode())).random() > 0.25


def gradient(seed: int, param: Param, step: int, batches: Sequence[int]) -> Tensor | None:
    """Return the sum of a whole parameter's gradients for some batches, divided by the number of all batches."""
    found = [
        values(seed, param.name, step, batch, param.shape)
        for batch in batches
        if is_used(seed, param.name, step, batch)
    ]
    return torch.stack(found).sum(0) / BATCHES if found else None


class Holder(nn.Module):
    """The parameters of a unit."""


def part_of(param: Param, position: Position, shape: Shape, *, wrong: str = "") -> Part | None:
    """Return the part of a parameter that this rank has; None: all of it."""
    if param.kind == "expert":
        dim, index, parts, sections = 0, position.expert, shape.experts, param.shape[:1]
    elif param.kind[-1].isdigit():
        dim, index, parts = int(param.kind[-1]), position.tensor, shape.tensor
        sections = param.sections or param.shape[dim : dim + 1]
    else:
        return None
    if wrong == "sections":
        sections = (sum(sections),)
    starts = [0, *accumulate(sections)]
    ranges = [(start + index * size // parts, size // parts) for start, size in zip(starts, sections, strict=False)]
    return Part.along(param.shape, dim, *(reversed(ranges) if wrong == "order" else ranges)) if parts > 1 else None


def build(seed: int, rank: int, world: int, shape: Shape, *, wrong: str = "") -> tuple[nn.Module, Grid]:
    """Return the model of a rank, and the grid. Collective: all ranks."""
    position = Position.of(rank, world, shape)
    groups = {"all": None, "data": _group(world, lambda one: one.tensor, shape), "experts": None}
    groups["experts"] = _group(world, lambda one: one.expert, shape)
    module, axes = nn.Module(), {}
    for param in params_of(seed):
        whole = values(seed, param.name, -1, 0, param.shape)
        part = part_of(param, position, shape)
        unit, name = param.name.split(".")
        if not hasattr(module, unit):
            setattr(module, unit, Holder())
        local = whole if part is None else part.read(whole).clone(memory_format=torch.contiguous_format)
        getattr(module, unit).register_parameter(name, nn.Parameter(local, requires_grad=param.trained))
        is_whole = param.kind in ("whole", "expert") and wrong != "factor"
        group = {"whole": "all", "partial": "all", "expert": "experts"}.get(param.kind, "data")
        told = part_of(param, position, shape, wrong=wrong)
        axes[param.name] = ParamAxes(group, 1.0 / shape.tensor if is_whole else 1.0, told)
    data_ranks = position.data_ranks * (2 if wrong == "divisor" else 1)
    return module, Grid(groups, data_ranks, axes)


def _group(world: int, key: Any, shape: Shape) -> Any:
    """Return this rank's group of the ranks with the same key; all ranks make all groups in one order."""
    keys = [key(Position.of(rank, world, shape)) for rank in range(world)]
    mine = None
    for one in sorted(set(keys)):
        ranks = [rank for rank in range(world) if keys[rank] == one]
        group = dist.new_group(ranks)
        mine = group if dist.get_rank() in ranks else mine
    return mine


def loss_of(seed: int, module: nn.Module, step: int, part: int, position: Position, shape: Shape) -> Tensor:
    """Return the loss of one of this rank's micro-batches, whose gradients are those of its batches."""
    per_rank = BATCHES // position.data_ranks
    loss = torch.zeros(())
    for param in params_of(seed):
        mine = [position.data]
        if param.kind == "expert":  # tokens of all ranks with other experts come to this one
            mine = [position.expert_shard * shape.experts + other for other in range(shape.experts)]
        batches = [rank * per_rank + number for rank in mine for number in range(per_rank)]
        found = gradient(seed, param, step, batches[part :: shape.microbatches(position)])
        if found is None or not param.trained:
            continue
        part_here = part_of(param, position, shape)
        found = found * position.data_ranks
        found = found if part_here is None else part_here.read(found)
        if param.kind == "partial":
            summands = torch.linspace(1, 2, shape.tensor)
            found = found * (summands / summands.sum())[position.tensor]
        loss = loss + (found * module.get_parameter(param.name)).sum()
    return loss


def train(
    rank: int, world: int, seed: int, shape: Shape, path: str, *, start: int, stop: int, wrong: str = ""
) -> tuple[dict[str, Tensor], list[float], int]:
    """Train some steps, from a checkpoint unless it is the first, and save one behind them."""
    module, grid = build(seed, rank, world, shape, wrong=wrong)
    position = Position.of(rank, world, shape)
    engine = ZeroEngine(stage=shape.stage, units=["Holder"])
    engine.shard(module, grid=grid, node=NodeRanks(shape.node, rank % shape.node))
    trained = [param for param in module.parameters() if param.requires_grad]
    optimizer = engine.attach(torch.optim.AdamW(trained, lr=0.05, eps=1e-3)) if trained else None
    if start:
        checkpoint = directory.load(engine, path)
        state.load_model_state(engine, module, checkpoint["state_dict"])
        if optimizer is not None:
            state.load_optimizer_state(engine, [optimizer], states=checkpoint["optimizer_states"])
    norms = []
    for step in range(start, stop):
        parts = shape.microbatches(position)
        for part in range(parts):
            with engine.microbatch(last=part == parts - 1):
                with engine.scope("training_step"):
                    loss = loss_of(seed, module, step, part, position, shape)
                with engine.backward_scope():
                    if loss.requires_grad:
                        loss.backward()
        if optimizer is not None:
            if shape.clips == "engine":
                norms.append(engine.clip_grad_norm(optimizer, CLIP).item())
            else:
                norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
            optimizer.step()
            optimizer.zero_grad()
    whole = {name: engine.full_param(param) for name, param in module.named_parameters()}
    counted = sum(record.save_range[1] - record.save_range[0] for record in engine.records())
    if not start:
        optimizers = [state.optimizer_state(engine, optimizer)] if optimizer is not None else []
        saved = {"state_dict": state.model_state(engine, module), "optimizer_states": optimizers}
        directory.save(engine, saved, path, full=False)
    engine.close()
    return whole, norms, counted


def reference(seed: int, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """Train whole parameters on all batches in one process."""
    known = {param.name: param for param in params_of(seed)}
    params = {name: nn.Parameter(values(seed, name, -1, 0, one.shape)) for name, one in known.items()}
    trained = {name: param for name, param in params.items() if known[name].trained}
    optimizer = torch.optim.AdamW(list(trained.values()), lr=0.05, eps=1e-3) if trained else None
    norms = []
    for step in range(steps):
        for name, param in trained.items():
            param.grad = gradient(seed, known[name], step, range(BATCHES))
        if optimizer is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)))
            optimizer.step()
    return {name: param.detach() for name, param in params.items()}, norms


def grid_of(source: random.Random, world: int) -> Shape:
    tensor = source.choice([one for one in (1, 2, 4) if world % one == 0])
    experts = source.choice([one for one in (1, 2, 4) if (world // tensor) % one == 0])
    accumulates, clips = source.random() < 0.4, source.choice(["engine", "torch"])
    return Shape(tensor, experts, source.choice([0, 1, 2, 3]), accumulates, clips)


def scoped(source: random.Random, world: int, shape: Shape) -> Shape:
    """Return a grid with scopes of nodes in the place of its stage, or half the time as it is."""
    data_ranks, node = world // shape.tensor, world // 2
    number = source.choice([one for one in (1, 2, 4) if data_ranks % one == 0])
    params, grads, optim = source.choice(SCOPES)
    scope: Any = source.choice(["node", "node", number])
    found = [scope if one == "node" else one for one in (params, grads, optim)]
    stage = Sharding(params=found[0], grads=found[1], optim=found[2])
    is_apart, is_scoped = source.random() < 0.4, source.random() < 0.5
    return replace(shape, stage=stage, node=node, is_apart=is_apart) if is_scoped else shape


def difference(seed: int, path: Path, world: int = 4, wrong: str = "", shape: Shape | None = None) -> float:
    """Return the largest difference from one rank: of values, of norms, and of the number of counted elements."""
    source = random.Random(seed * 7 + 1)
    after = min(world, BATCHES)  # ranks that go on: each data rank has a batch
    first, second = grid_of(source, world), grid_of(source, after)
    source = random.Random(seed * 7 + 2)
    first, second = scoped(source, world, first), scoped(source, after, second)
    if shape is not None:
        first = shape
    expected, norms = reference(seed, 5)
    numel = sum(one.numel() for one in expected.values())
    folder = str(path / f"checkpoint-{seed}")
    run(_first, world, seed, first, folder, wrong)
    found = run(_second, after, seed, second, folder)
    worst = abs(sum(counted for _, _, counted in found) - numel)
    for whole, own_norms, _ in found:
        worst = max(worst, *(float((whole[name] - value).abs().max()) for name, value in expected.items()))
        worst = max(worst, *(abs(one - other) for one, other in zip(own_norms, norms[3:], strict=True)), 0.0)
    return worst


def _first(rank: int, world: int, seed: int, shape: Shape, folder: str, wrong: str) -> None:
    with BREAKS[wrong]() if wrong in BREAKS else nullcontext():
        train(rank, world, seed, shape, folder, start=0, stop=3, wrong=wrong)


def _second(rank: int, world: int, seed: int, shape: Shape, folder: str) -> Any:
    return train(rank, world, seed, shape, folder, start=3, stop=5)


@pytest.mark.parametrize("seed", sample(range(200), *range(8)))
def test_random_models_on_random_grids_train_as_on_one_rank(seed: int, tmp_path: Path) -> None:
    assert difference(seed, tmp_path) < 1e-6


HYBRID = Sharding(params="node", grads="node")
TWO_LEVELS = [
    Shape(1, 2, HYBRID, accumulates=True),  # experts have one rank per node
    Shape(2, 1, HYBRID, is_apart=True),  # data ranks of a part share a node; whole parameters have two levels
    Shape(1, 1, Sharding(params="node", grads="world"), clips="torch"),
    Shape(2, 1, Sharding(grads=2)),  # two data ranks are all of them
    Shape(2, 1, HYBRID, clips="torch"),  # one data rank per node
]


@pytest.mark.parametrize("shape", TWO_LEVELS, ids=str)
def test_scopes_on_a_grid_train_as_on_one_rank(shape: Shape, tmp_path: Path) -> None:
    assert difference(MUTATED, tmp_path, shape=shape) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_scopes_of_tensor_groups_inside_of_nodes_train_as_on_one_rank(seed: int, tmp_path: Path) -> None:
    """Eight ranks: a node has two data ranks of two tensor ranks."""
    source = random.Random(seed)
    scope: Any = source.choice(["node", 2])
    stage = Sharding(params=source.choice(["none", scope]), grads=scope)
    shape = Shape(2, source.choice([1, 2]), stage, source.random() < 0.5, node=4)
    assert difference(seed, tmp_path, world=8, shape=shape) < 1e-6


def _lost_sum_over_nodes() -> Any:
    def lost(self: BufferGroup, shard: Tensor, node_sum: Tensor, what: str) -> Any:
        assert self.nodes is not None
        shard.copy_(node_sum.chunk(self.nodes.outer.world_size)[self.nodes.outer.rank])
        return self.nodes.outer.reduce_scatter(torch.empty_like(shard), node_sum, what)

    return mock.patch.object(BufferGroup, "reduce_scatter_over_nodes", lost)


def _neighbours_as_nodes() -> Any:
    """The neighbours of a rank share a range with it whether or not they are in its group."""

    def levels(group: Any, by_node: Any, everyone: Any) -> NodeLevels:
        rank, size = everyone.ranks[everyone.rank], len(by_node[0])
        inner = everyone.ranks[rank // size * size :][:size]
        outer = everyone.ranks[rank % 4 :: 4]
        return NodeLevels(everyone.among(inner, is_across=False), everyone.among(outer, is_across=True))

    return mock.patch.object(grid_groups, "_levels", levels)


BREAKS = {"sum over nodes": _lost_sum_over_nodes, "neighbours": _neighbours_as_nodes}


@pytest.mark.parametrize("shape", TWO_LEVELS[:2], ids=str)
def test_a_lost_sum_over_nodes_on_a_grid_is_found(shape: Shape, tmp_path: Path) -> None:
    assert difference(MUTATED, tmp_path, wrong="sum over nodes", shape=shape) > 1e-3


@pytest.mark.slow
def test_neighbours_of_another_group_in_the_place_of_a_node_are_found(tmp_path: Path) -> None:
    """Among four ranks such nodes do not tile a buffer; see ``tests/engine/units/test_grid_groups.py`` for eight."""
    shape = Shape(2, 1, HYBRID, node=4)
    with pytest.raises(CheckpointError, match="Failed to validate global plan"):  # ranks count elements twice
        difference(MUTATED, tmp_path, world=8, wrong="neighbours", shape=shape)


@pytest.mark.parametrize("wrong", ["factor", "divisor", "sections", "order"])
def test_a_wrong_grid_is_found(wrong: str, tmp_path: Path) -> None:
    """A mutant: whole gradients counted per tensor rank, another divisor, packed sections as one, in another order."""
    assert difference(MUTATED, tmp_path, wrong=wrong) > 1e-3


def _whole_file(rank: int, world: int, seed: int, shape: Shape, folder: str) -> Any:
    module, grid = build(seed, rank, world, shape)
    engine = ZeroEngine(stage=shape.stage, units=["Holder"])
    engine.shard(module, grid=grid)
    numel = sum(math.prod(param.shape) for param in params_of(seed))
    assert f": {numel:,} parameters" in engine.plan()[0]
    directory.save(engine, {"state_dict": state.model_state(engine, module)}, f"{folder}/file.ckpt", full=True)
    directory.save(engine, {"state_dict": state.model_state(engine, module)}, f"{folder}/directory", full=False)
    export_safetensors(engine, f"{folder}/weights")
    engine.close()


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("seed", sample(range(6), 0, 3))
def test_files_of_a_grid_have_whole_parameters(seed: int, tensor: int, tmp_path: Path) -> None:
    """Single files, consolidated and stock ones, and safetensors are those of one rank, whatever a rank has."""
    run(_whole_file, 4, seed, Shape(tensor, 4 // tensor, 3), str(tmp_path))
    saved = torch.load(tmp_path / "file.ckpt", weights_only=True)["state_dict"]
    exported = load_file(next((tmp_path / "weights").glob("*.safetensors")))
    consolidate(str(tmp_path / "directory"), str(tmp_path / "consolidated.safetensors"))
    dcp_to_torch_save(tmp_path / "directory", tmp_path / "stock.pt")
    consolidated = load_file(tmp_path / "consolidated.safetensors")
    stock = torch.load(tmp_path / "stock.pt", weights_only=True)["model"]
    for param in params_of(seed):
        expected = values(seed, param.name, -1, 0, param.shape)
        for found in (saved, exported, consolidated, stock):
            assert torch.equal(found[param.name], expected), param


# -- Found by an attack ------------------------------------------------------------------------------------------------


def _two_by_two(rank: int, params: dict[str, ParamAxes], **shapes: int) -> tuple[nn.Module, Grid]:
    """Return a module with flat parameters on a grid of two data and two tensor ranks. Collective: four ranks."""
    pairs = [dist.new_group([tensor, tensor + 2]) for tensor in range(2)]
    module = Holder()
    for name, numel in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.arange(float(numel))))
    return module, Grid({"all": None, "data": pairs[rank % 2]}, 2, params)


def _sums(rank: int, world: int, stage: int) -> None:
    module, grid = _two_by_two(rank, {"p": ParamAxes("all", 0.5)}, p=2)
    engine = ZeroEngine(stage=stage)
    engine.shard(module, grid=grid)
    engine.attach(torch.optim.SGD(module.parameters(), lr=1.0))
    gradient = torch.tensor([1.0, 2.0])
    for last in (False, True):
        with engine.microbatch(last=last):
            (module.p * gradient).sum().backward()
        if not last:
            assert module.p.grad.tolist() == [1.0, 2.0]
            module.p.grad = module.p.grad * 1.0
    assert engine.full_grad(module.p).tolist() == [2.0, 4.0]
    engine.close()


@pytest.mark.parametrize("stage", [0, 1])
def test_local_sums_are_those_of_the_program(stage: int) -> None:
    """They were multiplied by the factor, twice where the program had assigned one, in silence."""
    run(_sums, 4, stage)


def _rounds(rank: int, world: int) -> float:
    module = Holder()
    module.register_parameter("p", nn.Parameter(torch.zeros(64, dtype=torch.bfloat16)))
    engine = ZeroEngine(stage=2, communication=Communication(reduce_dtype="fp32"))
    engine.shard(module, grid=Grid({"all": None}, 1, {"p": ParamAxes("all", 1.0 / 3.0)}))
    engine.attach(torch.optim.SGD(module.parameters(), lr=1.0))
    gradient = torch.linspace(0.1, 1.0, 64, dtype=torch.bfloat16)
    (module.p * gradient).sum().backward()
    found = engine.full_grad(module.p)
    engine.close()
    return float((found.float() / gradient.float() - 1.0).abs().max())


def test_the_factor_is_not_rounded_in_16_bits() -> None:
    """It multiplied gradients in their own dtype: an error of 0.3 % that is the same on all ranks."""
    assert max(run(_rounds, 3)) < 1e-6


def _whole_twice(rank: int, world: int) -> None:
    module, grid = _two_by_two(rank, {"p": ParamAxes("data")}, p=4)
    ZeroEngine(stage=1).shard(module, grid=grid)


def test_a_parameter_that_two_groups_have_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="The parts of `p` on the ranks of `grid` are no division"):
        run(_whole_twice, 4)


def _other_buffers(rank: int, world: int) -> None:
    module, grid = _two_by_two(rank, {"p": ParamAxes("all", 0.5)}, p=4)
    module.register_buffer("start", torch.tensor(4 * (rank % 2)))
    ZeroEngine(stage=1).shard(module, grid=grid)


def test_module_buffers_that_differ_on_a_grid_are_refused() -> None:
    """Rank 0's took the place of all others, in silence."""
    with pytest.raises(ValueError, match="different values of module buffers: module buffer `start`"):
        run(_other_buffers, 4)


def _apart(rank: int, world: int) -> tuple[tuple[int, ...], float]:
    module, grid = _two_by_two(rank, {"p": ParamAxes("data", part=Part.along((8,), 0, (4 * (rank % 2), 4)))}, p=4)
    engine = ZeroEngine(stage=3)
    engine.shard(module, grid=grid)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=1.0))
    with engine.scope("training_step"):
        loss = module.p.sum()
    loss.backward()
    module.p.grad = torch.full((4,), float(1 + rank % 2))  # this group's part of the average
    optimizer.step()
    engine.unshard()
    return tuple(module.p.shape), float(module.p.sum())


def test_parts_are_parts_again_behind_unshard_and_take_assigned_gradients() -> None:
    """They became whole parameters; and gradients of other parts were taken for a mistake."""
    assert run(_apart, 4) == [((4,), 2.0), ((4,), -2.0)] * 2


def _of_another_stage(rank: int, world: int) -> list[list[float]]:
    """Every rank is a pipeline stage, whose part of a parameter has the rows of the whole in another order."""
    groups = [dist.new_group([one]) for one in range(world)]
    part, module = Part.along((4,), 0, (2, 2), (0, 2)), nn.Module()
    for index, name in enumerate(("first", "second")):
        device = "cpu" if index == rank else "meta"  # a stage builds its own layers
        module.register_parameter(name, nn.Parameter(torch.tensor([2.0, 3.0, 0.0, 1.0], device=device)))
    grid = Grid({"own": None}, 1, {name: ParamAxes("own", part=part) for name in ("first", "second")})
    engine = ZeroEngine(stage=1, process_group=groups[rank], parts_group=dist.group.WORLD)
    engine.shard(module, {"first": (0,), "second": (1,)}, grid=grid)
    engine.unshard()
    return [param.tolist() for param in module.parameters()]


def test_parameters_of_other_stages_need_no_values_and_are_parts_behind_unshard() -> None:
    """They were refused as parts on the meta device, and whole behind ``unshard``, which the next engine refused."""
    assert run(_of_another_stage, 2) == [[[2.0, 3.0, 0.0, 1.0]] * 2] * 2


def _waits(rank: int, world: int) -> float:
    module, grid = _two_by_two(rank, {"p": ParamAxes("data", part=Part.along((8,), 0, (4 * (rank % 2), 4)))}, p=4)
    engine = ZeroEngine(stage=1)
    engine.shard(module, grid=grid)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=1.0))
    for _ in range(3):
        engine.internals.fits.reset_stats()
        loss = module.p.sum()
        time.sleep(0.3 if rank == 0 else 0.0)
        loss.backward()
        optimizer.step()
    found = engine.stats().wait_s
    engine.close()
    return found


def test_waits_of_groups_are_counted() -> None:
    assert run(_waits, 4)[2] > 0.2


def _other_parts(rank: int, world: int) -> None:
    engines = []
    for place in (rank % 2, 1 - rank % 2):
        module, grid = _two_by_two(rank, {"p": ParamAxes("data", part=Part.along((8,), 0, (4 * place, 4)))}, p=4)
        engine = ZeroEngine(stage=1)
        engine.shard(module, grid=grid)
        engines.append((engine, module))
    (one, first), (other, second) = engines
    state.load_model_state(other, second, state.model_state(one, first))


def test_segments_of_other_parts_are_not_taken_for_these() -> None:
    """Equal ranges of other parts were copied, in silence."""
    with pytest.raises(ValueError, match="is of an engine with another stage or number of ranks"):
        run(_other_parts, 4)


# -- Pretrained weights ------------------------------------------------------------------------------------------------


def _reads(rank: int, world: int, seed: int, shape: Shape, path: str) -> dict[str, Tensor]:
    module, grid = build(seed, rank, world, shape)
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    engine = ZeroEngine(stage=shape.stage, units=["Holder"])
    engine.shard(module, grid=grid)
    load_pretrained(module, path)
    found = {name: engine.full_param(param) for name, param in module.named_parameters()}
    engine.close()
    return found


@pytest.mark.parametrize("file", ["model.safetensors", "model.bin"])
@pytest.mark.parametrize(("seed", "stage"), [(4, 0), (7, 3)])
def test_every_rank_reads_its_parts_of_pretrained_files(seed: int, stage: int, file: str, tmp_path: Path) -> None:
    weights = {param.name: values(seed, param.name, -1, 0, param.shape) for param in params_of(seed)}
    (save_file if file.endswith("safetensors") else torch.save)(weights, tmp_path / file)
    for found in run(_reads, 4, seed, Shape(2, 2, stage), str(tmp_path / file)):
        for name, value in weights.items():
            assert torch.equal(found[name], value), name


def _reads_part(rank: int, world: int, path: str) -> None:
    module, grid = _two_by_two(rank, {"p": ParamAxes("data", part=Part.along((8,), 0, (4 * (rank % 2), 4)))}, p=4)
    engine = ZeroEngine(stage=1)
    engine.shard(module, grid=grid)
    load_pretrained(module, path)


def test_a_file_of_the_shape_of_a_part_is_refused(tmp_path: Path) -> None:
    """It was read into every part, in silence."""
    save_file({"p": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"(?s)does not fit. .*size mismatch for p: .*\[4\].*\[8\]"):
        run(_reads_part, 4, str(tmp_path / "model.safetensors"))


def _without_values(rank: int, world: int) -> None:
    with torch.device("meta"):
        linear = nn.Linear(6, 4, bias=False)
    part = Part.along((8, 6), 0, (4 * (rank % 2), 4))
    _, grid = _two_by_two(rank, {"weight": ParamAxes("data", part=part)})
    ZeroEngine(stage=1).shard(linear, grid=grid)


def test_parts_on_the_meta_device_need_values() -> None:
    """They were initialised as layers of the part's size, the same on all ranks of one seed, in silence."""
    with pytest.raises(ValueError, match=r"`weight` is a part of a parameter of shape \(8, 6\) and has no values"):
        run(_without_values, 4)


# -- Gathered parameters -----------------------------------------------------------------------------------------------


def _writes_on_rank0(rank: int, world: int, stage: int) -> tuple[list[float], list[float]]:
    part = Part.along((8,), 0, (4 * (rank % 2), 4))
    module, grid = _two_by_two(rank, {"whole": ParamAxes("all", 0.5), "p": ParamAxes("data", part=part)}, whole=4, p=4)
    engine = ZeroEngine(stage=stage)
    engine.shard(module, grid=grid)
    with pytest.raises(ValueError, match="on rank 0, which has a part of `p`"), engine.gathered(module, write="rank0"):
        pass
    with torch.no_grad(), engine.gathered(module.p, write="all"):
        module.p.fill_(1.0 + rank % 2)
    with torch.no_grad(), engine.gathered(module.whole, write="rank0"):
        module.whole.fill_(3.0 + rank)
    found = engine.full_param(module.whole).tolist(), engine.full_param(module.p).tolist()
    expected = "a part was changed inside `gathered" if rank == 0 else r"Rank\(s\) \[0\] left `gathered"
    with pytest.raises(RuntimeError, match=expected):
        _change_part(engine, module, is_first=rank == 0)
    engine.close()
    return found


def _change_part(engine: ZeroEngine, module: nn.Module, is_first: bool) -> None:
    with torch.no_grad(), engine.gathered(module.whole, write="rank0"):
        if is_first:
            module.p.fill_(5.0)


@pytest.mark.parametrize("stage", [1, 3])
def test_rank_0_writes_parameters_that_are_whole(stage: int) -> None:
    assert run(_writes_on_rank0, 4, stage) == [([3.0] * 4, [1.0] * 4 + [2.0] * 4)] * 4


# -- Process groups ----------------------------------------------------------------------------------------------------


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.first(x)
        raise KeyError


def _interrupted(rank: int, world: int) -> list[int]:
    part = Part.along((8, 6), 0, (4 * (rank % 2), 4))
    _, grid = _two_by_two(rank, {"first.weight": ParamAxes("data", part=part)})
    held = []
    for _ in range(4):
        module = _Fails()
        engine = ZeroEngine(stage=3, units=["Linear"])
        engine.shard(module, grid=grid)
        with pytest.raises(KeyError), engine.scope("training_step"):
            module(torch.ones(6))
        engine.close()
        held.append(len(dist.distributed_c10d._world.pg_map))
    return held


def test_interrupted_engines_leave_no_process_groups_behind() -> None:
    """Those of a part of the ranks stayed, ten for each engine."""
    for held in run(_interrupted, 4):
        assert held[1:] == held[:1] * 3
