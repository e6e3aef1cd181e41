"""Parameters, gradients and optimizer states that are kept sharded over the ranks of a node, or over all.

Four ranks are two nodes of two. The reference averages gradients over each node and then over the nodes, so that every
bit is compared; the data of all ranks differ, and plain SGD with a large step makes a lost sum loud.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from lightning.pytorch.plugins import MixedPrecision as MixedPrecisionPlugin
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.boxes import Part
from lightning_zero.checkpoint import directory
from lightning_zero.config import Communication, MixedPrecision, Offload
from lightning_zero.engine.buffers.gradients import BufferGradients
from lightning_zero.engine.buffers.group import BufferGroup
from lightning_zero.engine.buffers.stepped import SteppedValues
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.grid import Grid, ParamAxes
from lightning_zero.lightning.precision import LossScale
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.sharding import NodeRanks, Sharding
from tests import worlds
from tests.checkpoint import programs
from tests.contracts import test_averaging, test_recovery
from tests.contracts.test_lightning_optimization import Overflows
from tests.lightning_programs import Net, assert_equal, loader, nodes, seeded, trainer, weights
from tests.references import (
    Outcome,
    Replica,
    Sharded,
    TinyGPT,
    adamw,
    difference,
    token_loss,
    train,
    train_reference,
    train_zero,
)

NODE = 2
PATIENCE_S = 300.0
ROWS = [
    (params, grads, optim)
    for optim in ("none", "node", "world")
    for grads in ("none", "node", "world")
    for params in ("none", "node", "world")
    if [("none", "node", "world").index(one) for one in (params, grads, optim)]
    == sorted(("none", "node", "world").index(one) for one in (params, grads, optim))
]
TWO_LEVELS = [row for row in ROWS if "node" in row[:2]]
HYBRID, SECONDARY, GRADIENTS = ("node", "node", "world"), ("node", "world", "world"), ("none", "node", "world")


def _sharding(row: tuple[str, str, str], node: int | None = None) -> Sharding:
    """Return the scopes of a row, with a number of ranks in the place of the node's."""
    params, grads, optim = (node if node is not None and scope == "node" else scope for scope in row)
    return Sharding(params=params, grads=grads, optim=optim)  # type: ignore[arg-type]


@contextlib.contextmanager
def _launched(rank: int, node: int = NODE) -> Iterator[None]:
    """Set the environment as a launcher of nodes does."""
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(node), "LOCAL_RANK": str(rank % node)}):
        yield


class _NodeReplica(Replica):
    """Averages gradients over the node, adds up micro-batches there if they wait, and averages over nodes.

    Args:
        waits: Gradients wait in the node for the last micro-batch.
    """

    def __init__(self, module: nn.Module, rank: int, world: int, *, waits: bool) -> None:
        super().__init__(module, rank, world, average="each")
        self._sums: dict[nn.Parameter, list[Tensor]] = {}  # of each node
        self._waits_in_node = waits

    def _mean_over_ranks(self, parameter: nn.Parameter) -> Tensor | None:
        nodes = self._means_over_nodes(parameter)
        if nodes is not None and parameter in self._sums:
            nodes = [one + other for one, other in zip(self._sums[parameter], nodes, strict=True)]
        if self._waits_in_node and not self._is_last:
            if nodes is not None:
                self._sums[parameter] = nodes
            return None
        nodes = nodes or self._sums.get(parameter)
        self._sums.pop(parameter, None)
        return None if nodes is None else _in_order(nodes).div_(len(nodes))

    def _means_over_nodes(self, parameter: nn.Parameter) -> list[Tensor] | None:
        used = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(used, dist.ReduceOp.MAX)
        if not used:
            return None
        local = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        ranks = [torch.empty_like(local) for _ in range(self.world)]
        dist.all_gather(ranks, local.detach().contiguous())
        return [_in_order(ranks[first : first + NODE]).div_(NODE) for first in range(0, self.world, NODE)]


def _in_order(values: list[Tensor]) -> Tensor:
    total = values[0].clone()
    for other in values[1:]:
        total += other
    return total


def _train_in_nodes(program: Callable[[Any], None], rank: int, world: int, row: tuple[str, str, str]) -> Outcome:
    """Run a program on whole copies that sum in two levels. Collective."""
    worlds.seed()
    trainer = _NodeReplica(TinyGPT(), rank, world, waits=row[1] == "node")
    program(trainer)
    weights = {name: trainer.full_param(param) for name, param in trainer.module.named_parameters()}
    return Outcome(trainer.losses, weights, {name: one.clone() for name, one in trainer.module.named_buffers()})


def _sgd(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1.0)


def _program(
    optimizer: Callable[[nn.Module], Optimizer], micro_batches: int = 1, max_norm: float | None = None
) -> Callable[[Any], None]:
    return partial(train, loss=token_loss, optimizer=optimizer, micro_batches=micro_batches, max_norm=max_norm)


def _check(
    rank: int,
    world: int,
    row: tuple[str, str, str],
    *,
    program: Callable[[Any], None],
    tolerance: float = 0.0,
    **options: Any,
) -> str:
    """Return what differs from the sums in two levels, or in one where no scope is a node's. Collective."""
    with _launched(rank):
        actual = train_zero(TinyGPT, program, rank, world, stage=_sharding(row), units=("Block",), **options)  # type: ignore[arg-type]
    if row in TWO_LEVELS:
        expected = _train_in_nodes(program, rank, world, row)
    else:
        expected = train_reference(TinyGPT, program, rank, world)
    found = difference(actual, expected, tolerance)
    return f"{row}: {found}" if found else ""


# -- Values ------------------------------------------------------------------------------------------------------------


def _every_row(rank: int, world: int) -> list[str]:
    program = _program(_sgd)
    outcomes = [_check(rank, world, row, program=program) for row in ROWS]
    stage3 = train_reference(TinyGPT, program, rank, world)
    with _launched(rank):
        hybrid = train_zero(TinyGPT, program, rank, world, stage=_sharding(HYBRID), units=("Block",))  # type: ignore[arg-type]
    return [*outcomes, difference(hybrid, stage3, 1e-6)]


def test_every_nested_row_trains_with_the_bits_of_its_sums() -> None:
    assert len(ROWS) == 10
    for found in worlds.run(_every_row, 4, timeout_s=PATIENCE_S):
        assert not any(found), found


def _accumulated(rank: int, world: int) -> list[str]:
    found = []
    for row in (GRADIENTS, HYBRID, SECONDARY):
        found.append(_check(rank, world, row, program=_program(_sgd, 3)))
        found.append(_check(rank, world, row, program=_program(adamw, 2)))
        # The norm is summed in another order.
        found.append(_check(rank, world, row, program=_program(adamw, 2, 0.05), tolerance=1e-6))
    return found


def test_micro_batches_wait_in_the_node_and_are_clipped_over_all() -> None:
    for found in worlds.run(_accumulated, 4, timeout_s=PATIENCE_S):
        assert not any(found), found


def _with_options(rank: int, world: int, path: str) -> list[str]:
    found = []
    for row in (HYBRID, SECONDARY):
        for options in (
            {"offload": Offload(optimizer="cpu", params="cpu")},
            {"offload": Offload(optimizer="nvme", path=path)},
            {"offload": Offload(optimizer="nvme", params="nvme", path=path)},
            {"offload": Offload(optimizer="cpu", params="nvme", path=path), "step": "now"},
            {"step": "deferred", "communication": Communication(prefetch=0)},
        ):
            found.append(_check(rank, world, row, program=_program(adamw, 2), **options))
        found.append(_check(rank, world, row, program=_program(adamw), step="backward"))
    found.append(_check(rank, world, GRADIENTS, program=_program(adamw, 2), offload=Offload(optimizer="cpu")))
    return found


@pytest.mark.slow
def test_offloaded_deferred_and_early_steps_have_the_same_bits(tmp_path: Path) -> None:
    for found in worlds.run(_with_options, 4, str(tmp_path), timeout_s=PATIENCE_S):
        assert not any(found), found


# -- Mutants -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _no_sum_over_nodes() -> Iterator[None]:
    reduce = BufferGroup.reduce_scatter_over_nodes

    def lost(self: BufferGroup, shard: Tensor, node_sum: Tensor, what: str) -> Any:
        pending = reduce(self, torch.empty_like(shard), node_sum.clone(), what)
        shard.copy_(node_sum.chunk(node_sum.numel() // shard.numel())[self.nodes.outer.rank])  # type: ignore[union-attr]
        return pending

    with mock.patch.object(BufferGroup, "reduce_scatter_over_nodes", lost):
        yield


@contextlib.contextmanager
def _not_divided_by_nodes() -> Iterator[None]:
    reduce = BufferGroup.reduce_scatter_over_nodes

    def undivided(self: BufferGroup, shard: Tensor, node_sum: Tensor, what: str) -> Any:
        return reduce(self, shard, node_sum.mul_(2), what)

    with mock.patch.object(BufferGroup, "reduce_scatter_over_nodes", undivided):
        yield


@contextlib.contextmanager
def _stale_copies() -> Iterator[None]:
    with mock.patch.object(SteppedValues, "mark_node_stale", return_value=None):
        yield


@contextlib.contextmanager
def _forgotten_micro_batches() -> Iterator[None]:
    end = BufferGradients.end_node_reduce

    def last_only(self: BufferGradients) -> None:
        self.nodes.drop()
        end(self)

    with mock.patch.object(BufferGradients, "end_node_reduce", last_only):
        yield


MUTANTS = (_no_sum_over_nodes, _not_divided_by_nodes, _stale_copies, _forgotten_micro_batches)


def _mutated(rank: int, world: int) -> list[str]:
    found = []
    for mutant in MUTANTS:
        with mutant():
            found.append(_check(rank, world, HYBRID, program=_program(_sgd, 2), tolerance=1e-6))
    return found


def test_lost_sums_wrong_divisors_and_stale_copies_are_found() -> None:
    for found in zip(*worlds.run(_mutated, 4, timeout_s=PATIENCE_S), strict=True):
        assert any(found)


# -- Copies of a node --------------------------------------------------------------------------------------------------


def _copies(rank: int, world: int, path: str, offload: Offload | None) -> None:
    for row in (HYBRID, SECONDARY):
        sharding = _sharding(row, NODE)
        engine, model, optimizer = programs.make(sharding, 0, units=("Block",), offload=offload)  # type: ignore[arg-type]
        programs.step(engine, model, optimizer, 0)
        _assert_whole(engine, model, "a step")
        directory.save(engine, programs.snapshot(engine, model, optimizer), path + row[1], full=False)
        programs.step(engine, model, optimizer, 1)
        with engine.gathered(model, write="rank0"), torch.no_grad():
            if rank == 0:
                for param in model.parameters():
                    param.add_(1.0)
        _assert_whole(engine, model, "a write of rank 0")
        with engine.gathered(model, write="all"), torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        _assert_whole(engine, model, "a write of all")
        programs.restore(engine, model, optimizer, path + row[1])
        _assert_whole(engine, model, "a load")
        engine.offload_states()
        engine.reload_states()
        _assert_whole(engine, model, "states were away")
        engine.close()


def _assert_whole(engine: ZeroEngine, model: nn.Module, behind: str) -> None:
    """Compare what forwards see with the masters of all ranks."""
    expected = {name: engine.full_param(param) for name, param in model.named_parameters()}
    with engine.gathered(model):
        for name, param in model.named_parameters():
            assert torch.equal(param, expected[name]), f"`{name}` is stale behind {behind}"


@pytest.mark.parametrize("place", ["device", "nvme"])
def test_copies_of_a_node_are_never_stale(place: str, tmp_path: Path) -> None:
    offload = Offload(optimizer="nvme", params="nvme", path=tmp_path) if place == "nvme" else None
    worlds.run(_copies, 4, str(tmp_path / "checkpoint"), offload, timeout_s=PATIENCE_S)


# -- Checkpoints -------------------------------------------------------------------------------------------------------


def _save(rank: int, world: int, stage: Any, path: str) -> Any:
    engine, model, optimizer = programs.make(stage, 0)
    for number in range(2):
        programs.step(engine, model, optimizer, number)
    directory.save(engine, programs.snapshot(engine, model, optimizer), path, full=False)
    held = programs.held(engine, optimizer)
    engine.close()
    return held


def _load(rank: int, world: int, stages: list[Any], path: str) -> list[Any]:
    found = []
    for stage in stages:
        engine, model, optimizer = programs.make(stage, 1)
        programs.restore(engine, model, optimizer, path)
        found.append(programs.held(engine, optimizer))
        programs.step(engine, model, optimizer, 2)
        engine.close()
    return found


def test_checkpoints_resume_with_other_scopes_and_worlds_to_the_bit(tmp_path: Path) -> None:
    hybrid, secondary = _sharding(HYBRID, NODE), _sharding(SECONDARY, NODE)
    for name, stage, others in (("hybrid", hybrid, [secondary, 1, 3]), ("three", 3, [hybrid])):
        path = str(tmp_path / name)
        saved = programs.whole(worlds.run(_save, 4, stage, path, timeout_s=PATIENCE_S))
        for world, stages in ((4, others), (2, [3]), (1, [0])):
            for held in zip(*worlds.run(_load, world, stages, path, timeout_s=PATIENCE_S), strict=True):
                loaded = programs.whole(list(held))
                assert loaded.keys() == saved.keys()
                for parameter, slots in saved.items():
                    for slot, value in slots.items():
                        assert torch.equal(loaded[parameter][slot], value), (name, world, parameter, slot)


# -- Bytes -------------------------------------------------------------------------------------------------------------

WIDTH, DEPTH = 64, 3
NUMEL = WIDTH * WIDTH * DEPTH


def _cost(rank: int, world: int, row: tuple[str, str, str], micro_batches: int, tensor: int) -> dict[str, Any]:
    """Return what the third step sent, and the bytes that were kept in it.

    With tensor ranks each has a part of the first matrix, and all of the others.
    """
    engine = ZeroEngine(_sharding(row, NODE), units=("Linear",), precision=MixedPrecision(compute_dtype=torch.bfloat16))
    module = engine.shard(
        nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]),
        grid=None if tensor == 1 else _first_is_cut(rank, world, tensor),
    )
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=1e-3))
    kept: list[dict[str, int]] = []

    def step() -> None:
        kept.clear()
        for index in range(micro_batches):
            with engine.microbatch(last=index == micro_batches - 1):
                with engine.scope("training_step"), torch.autocast("cpu", torch.bfloat16):
                    loss = module(torch.ones(2, WIDTH)).float().square().mean()
                with engine.backward_scope():
                    loss.backward()
            kept.append(engine.stats().memory)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    engine.internals.fits.reset_stats()
    with worlds.count_collectives() as ledger:
        step()
    stats, plan = engine.stats(), engine.plan()
    engine.close()
    return {"payload": ledger.payload, "stats": stats, "kept": list(kept), "plan": plan}


def _first_is_cut(rank: int, world: int, tensor: int) -> Grid:
    groups = [dist.new_group(range(first, world, tensor)) for first in range(tensor)]
    part = Part.along((WIDTH * tensor, WIDTH), 0, (WIDTH * (rank % tensor), WIDTH))
    return Grid({"data": groups[rank % tensor]}, world // tensor, {"0.weight": ParamAxes("data", part=part)})


def _costs(rank: int, world: int, tensor: int = 1) -> list[dict[str, Any]]:
    return [_cost(rank, world, row, 2, tensor) for row in (GRADIENTS, HYBRID, SECONDARY)]


def _sum(cut: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    return {key: value + rest[key] if isinstance(value, int) else _sum(value, rest[key]) for key, value in cut.items()}


def _formulas(row: tuple[str, str, str], numel: int, inner: int) -> dict[str, Any]:
    """Return the bytes of parameters on two nodes of some ranks of their group, with two micro-batches."""
    nodes = 2
    over_nodes = numel * (nodes - 1) // (inner * nodes)  # elements that a rank sends to other nodes at a time
    in_node = numel * (inner - 1) // inner
    gathers = 1 if row[0] == "none" else 2 * 2  # a forward and a backward of two micro-batches
    reductions = 1 if row[1] == "node" else 2
    return {
        "all_gather": 2 * (gathers * in_node + over_nodes),
        "reduce_scatter": 4 * (2 * in_node + reductions * over_nodes),
        "across": {"all_gather": 2 * over_nodes, "reduce_scatter": 4 * reductions * over_nodes},
        "parameters": 2 * (numel if row[0] == "none" else numel // inner),
        "between": 4 * numel // (inner if row[1] == "node" else inner * nodes),
        "behind": 4 * numel // (inner * nodes),
        "optimizer": 12 * numel // (inner * nodes),
    }


def _check_costs(row: tuple[str, str, str], answer: dict[str, Any], expected: dict[str, Any], groups: int) -> None:
    stats, (between, behind) = answer["stats"], answer["kept"]
    assert stats.traffic["all_gather"] == expected["all_gather"], row
    assert stats.traffic["reduce_scatter"] == expected["reduce_scatter"], row
    assert stats.across_nodes == expected["across"], row
    assert answer["payload"] == stats.traffic["all_gather"] + stats.traffic["reduce_scatter"]
    assert between["parameters"] == expected["parameters"], row
    assert between["gradients"] == expected["between"], row
    assert behind["gradients"] == expected["behind"], row
    assert 0 <= behind["optimizer"] - expected["optimizer"] <= 8 * DEPTH, row
    assert ["2 nodes" in line for line in answer["plan"]][-groups:] == [True] * groups
    assert "across nodes" in answer["plan"][-groups - 1]


def test_bytes_inside_and_across_nodes_and_in_memory_follow_the_formulas() -> None:
    for answers in worlds.run(_costs, 4, timeout_s=PATIENCE_S):
        for row, answer in zip((GRADIENTS, HYBRID, SECONDARY), answers, strict=True):
            _check_costs(row, answer, _formulas(row, NUMEL, NODE), groups=1)


@pytest.mark.slow
def test_bytes_of_tensor_ranks_follow_the_formulas_of_their_groups() -> None:
    """Two nodes of two data ranks of two tensor ranks."""
    cut = WIDTH * WIDTH
    for answers in worlds.run(_costs, 8, 2, timeout_s=PATIENCE_S):
        for row, answer in zip((GRADIENTS, HYBRID, SECONDARY), answers, strict=True):
            _check_costs(row, answer, _sum(_formulas(row, cut, NODE), _formulas(row, NUMEL - cut, 2 * NODE)), groups=2)


# -- Refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": "world", "grads": "node"}, "is not nested: `params='world'` is sharded over more ranks than"),
        ({"params": "node", "grads": "none"}, "is not nested: `params='node'`.*for example `grads='node'`"),
        ({"params": 2, "grads": 4}, "has nodes of several sizes"),
        ({"params": 2, "grads": "node"}, "has nodes of several sizes"),
        ({"params": 0}, r"`Sharding\(params=0\)` must be a number of ranks, 1 or more"),
        ({"params": "rack"}, r"`Sharding\(params='rack'\)` is not known. Use 'none', 'node', 'world' or a number"),
    ],
)
def test_scopes_that_are_not_nested_or_not_known_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sharding(**options)


@pytest.mark.parametrize(
    ("ranks", "numbers"),
    [(range(3), "3 ranks: {0: 2, 1: 1}"), ((1, 2, 3), "3 ranks: {0: 1, 1: 2}"), (range(4), ""), ((1, 3), "")],
)
def test_nodes_of_different_sizes_are_refused(ranks: Sequence[int], numbers: str) -> None:
    nodes = _sharding(HYBRID).nodes(ranks, NodeRanks(2))
    assert nodes is not None
    if not numbers:
        assert len(nodes.divide(ranks)) == 2
        return
    with pytest.raises(ValueError, match=f"nodes have different numbers of the {numbers}"):
        nodes.divide(ranks)


def _refused(rank: int, world: int) -> None:
    def shard(row: tuple[str, str, str], node: int | None = None, grid: Grid | None = None, **options: Any) -> Any:
        engine = ZeroEngine(_sharding(row, node), units=("Block",), **options)
        return engine, engine.shard(TinyGPT(), grid=grid)

    with mock.patch.dict(os.environ):
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        with pytest.raises(ValueError, match="the launcher has not set `LOCAL_WORLD_SIZE`"):
            shard(HYBRID)
    with _launched(rank // 2), pytest.raises(ValueError, match="the ranks of a node must be neighbours"):
        shard(HYBRID)
    with (
        _launched(rank, 1),
        pytest.raises(ValueError, match=r"`Offload\(params='cpu'\)` does not work .* one data rank"),
    ):
        shard(HYBRID, offload=Offload(params="cpu"))
    with pytest.raises(ValueError, match="3 ranks per node do not divide the 4 ranks"):
        shard(HYBRID, 3)
    with pytest.raises(ValueError, match="3 ranks per node do not divide the 2 data ranks"):
        shard(HYBRID, 3, Grid({}, 2))

    engine, module = shard(HYBRID, 2)
    optimizer = engine.attach(_sgd(module))
    with engine.microbatch(last=False):
        token_loss(module, rank, 0).backward()
    weight = module.embedding.weight
    for use in (
        lambda: engine.grad_norm(),
        lambda: engine.full_grad(weight),
        lambda: weight.grad,
        lambda: engine.clip_grad_norm(optimizer, 1.0),
        optimizer.step,
    ):
        with pytest.raises(RuntimeError, match="last micro-batch"):
            use()
    optimizer.zero_grad()
    assert engine.grad_norm() == 0.0
    engine.close()


def test_nodes_that_cannot_be_and_sums_of_nodes_are_refused_by_name() -> None:
    worlds.run(_refused, 4, timeout_s=PATIENCE_S)


# -- Errors ------------------------------------------------------------------------------------------------------------


def _recovered(rank: int, world: int, every: int) -> list[Any]:
    """Run the programs of the contract on errors with hybrid sharding beside sums in two levels. Collective."""

    def plain(module: nn.Module, rank: int, world: int, **_: Any) -> Replica:
        return _NodeReplica(module, rank, world, waits=True)

    def sharded(module: nn.Module, rank: int, world: int, stage: int, **options: Any) -> Sharded:
        return Sharded(module, rank, world, stage=_sharding(HYBRID, NODE), **options)  # type: ignore[arg-type]

    with mock.patch.multiple(test_recovery, Replica=plain, Sharded=sharded):
        recovers = partial(test_recovery._recovers, rank, world, 3)
        return [
            recovers("accumulated", test_recovery._Fault, False, 3, every, False, {}),
            recovers("scoped", test_recovery._Interrupt, True, 2, every, False, {}),
            {} if test_recovery._other_blocks(rank, world, 3) else {"other blocks": "losses"},
        ]


@pytest.mark.slow
def test_training_goes_on_after_an_error_in_either_half_of_a_reduction() -> None:
    assert worlds.run(_recovered, 4, 37, timeout_s=PATIENCE_S) == [[{}, {}, {}]] * 4


# -- Lightning ---------------------------------------------------------------------------------------------------------


def _fit(rank: int, world: int) -> None:
    found = []
    for stage, options in (({"params": "node", "grads": "node"}, nodes(rank, world, NODE)), (3, {})):
        strategy = ZeroStrategy(stage=stage)  # type: ignore[arg-type]
        run = trainer(rank, world, strategy, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.1, **options)
        run.fit(seeded(Net), loader(rank, world))
        found.append(weights(run))
        assert strategy.engine.stats().across_nodes["reduce_scatter"] > 0 or stage == 3
    assert_equal(*found, atol=1e-6)


def test_a_fit_on_nodes_of_the_trainer_agrees_with_stage_3() -> None:
    worlds.run(_fit, 4, timeout_s=PATIENCE_S)


def _averages(rank: int, world: int, name: str, folder: str) -> None:
    fit = partial(test_averaging.fit, rank, world, name=name, precision="64-true")  # AdamW makes roundings larger
    expected = fit(strategy=3, folder=f"{folder}/3")
    for row in (HYBRID, SECONDARY, GRADIENTS):
        strategy = ZeroStrategy(stage=_sharding(row, NODE))  # type: ignore[arg-type]
        assert_equal(fit(strategy=strategy, folder=f"{folder}/{row}"), expected, 1e-9, row)


@pytest.mark.parametrize("name", ["ema", "swa"])
def test_averages_of_weights_on_nodes_are_those_of_stage_3(name: str, tmp_path: Path) -> None:
    worlds.run(_averages, 4, name, str(tmp_path), timeout_s=PATIENCE_S)


def _scaled(rank: int, world: int) -> list[list[float]]:
    found, scales = [], []
    for stage in (3, _sharding(HYBRID, NODE), _sharding(SECONDARY, NODE)):
        strategy = ZeroStrategy(stage=stage, units=["Block"], loss_scale=LossScale(init_scale=64.0, hysteresis=1))  # type: ignore[arg-type]
        plugins = [MixedPrecisionPlugin("16-mixed", "cpu")]
        run = trainer(rank, world, strategy, max_epochs=1, plugins=plugins, accumulate_grad_batches=2)
        module = seeded(Overflows)
        run.fit(module, loader(rank, world, size=96))
        found.append(weights(run))
        scales.append(module.scales)
    for values in found[1:]:
        assert_equal(values, found[0], atol=1e-3)
    return scales


def test_losses_are_scaled_on_nodes_as_at_stage_3() -> None:
    """The gradient of rank 1 is infinite in the second of six micro-batches: the step of two is skipped on all."""
    for scales in worlds.run(_scaled, 4, timeout_s=PATIENCE_S):
        assert scales == [[64.0, 32.0, 32.0, 32.0, 32.0, 32.0]] * 3


# -- Pipeline stages ---------------------------------------------------------------------------------------------------


def _in_pipeline(rank: int, world: int, rows: Sequence[Any], node: int, crosses: bool) -> None:
    found = []
    for stage in (3, *rows):
        for accumulated in (1, 2):
            strategy = ZeroStrategy(stage=stage, pipeline={"stages": 2, "microbatches": 2})
            clips = {"accumulate_grad_batches": accumulated, "gradient_clip_val": 0.1}
            run = trainer(rank, world, strategy, max_epochs=1, **clips, **nodes(rank, world, node))
            run.fit(seeded(Net), loader(strategy.distributed_sampler_kwargs["rank"], world // 2, size=64))
            found.append(weights(run))
            assert (strategy.engine.stats().across_nodes["reduce_scatter"] > 0) == (crosses and stage != 3)
    for place, values in enumerate(found[2:]):
        assert_equal(values, found[place % 2], atol=1e-6, what=rows[place // 2])


@pytest.mark.slow
def test_scopes_of_pipeline_stages_on_one_level_agree_with_stage_3() -> None:
    """A stage has two ranks: on one node, on two, or in a number."""
    hybrid = {"params": "node", "grads": "node"}
    for node in (1, 2):
        worlds.run(_in_pipeline, 4, [hybrid, {"params": 2, "grads": 2}], node, False, timeout_s=PATIENCE_S)


@pytest.mark.slow
def test_scopes_of_pipeline_stages_on_several_nodes_agree_with_stage_3() -> None:
    rows = [{"params": "node", "grads": "node"}, {"params": 2, "grads": "world"}, {"grads": "node"}]
    worlds.run(_in_pipeline, 8, rows, NODE, True, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("as_class", [True, False], ids=["class", "dict"])
def test_scopes_are_options_in_yaml(as_class: bool) -> None:
    fields = {"params": 4, "grads": 4, "optim": "world"}
    stage = {"class_path": "lightning_zero.Sharding", "init_args": fields} if as_class else fields
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(ZeroStrategy, "strategy")
    given = {"strategy": {"class_path": "lightning_zero.ZeroStrategy", "init_args": {"stage": stage}}}
    strategy = parser.instantiate_classes(parser.parse_object(given)).strategy
    assert strategy.sharding == Sharding(params=4, grads=4, optim="world")
    assert strategy.stage == 3
