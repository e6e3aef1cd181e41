"""A unit's states and who keeps it whole."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_zero.engine
from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication, MixedPrecision
from lightning_zero.engine.buffers.parameter import ReducedParameter, ReleasedParameter
from lightning_zero.engine.units.grid_groups import GridGroups
from lightning_zero.engine.units.lowering import Lowering
from lightning_zero.engine.units.partition import build_unit, choose_territories
from lightning_zero.engine.units.unit import Unit, UnitState
from lightning_zero.sharding import ShardedOver
from lightning_zero.storage.store import DeviceStore
from tests import worlds

CPU = torch.device("cpu")


def make_unit(module: nn.Module, stage: int, **options: Any) -> Unit:
    """Return the whole module as one unit. Collective."""
    communication = Communication()
    precision = MixedPrecision(**options)
    groups = GridGroups(None, Communicator(communication, CPU), lambda *_: ShardedOver.from_stage(stage))
    return build_unit(
        choose_territories(module, [])[0],
        0,
        root=module,
        awaited=set(),
        groups=groups,
        precision=precision,
        lowering=Lowering(module, precision),
        communication=communication,
        store=DeviceStore(CPU),
    )


def _cycle(rank: int, world: int) -> None:
    module = nn.Linear(5, 3)
    unit = make_unit(module, 3)
    values = module.weight.detach().clone()
    assert unit.state is UnitState.UNSHARDED
    unit.reshard()
    assert unit.state is UnitState.SHARDED
    assert type(module.weight) is ReleasedParameter
    unit.reshard()
    unit.unshard()
    assert unit.state is UnitState.UNSHARDING
    assert type(module.weight) is ReleasedParameter
    unit.wait()
    unit.wait()
    unit.mark_stale()  # of whole parameters below stage 3
    assert unit.state is UnitState.UNSHARDED
    assert type(module.weight) is ReducedParameter
    assert torch.equal(module.weight, values)


def test_parameters_are_whole_when_the_gather_was_waited_for() -> None:
    worlds.run(_cycle, 2)


def _change_of_mind(rank: int, world: int) -> None:
    module = nn.Linear(5, 3)
    unit = make_unit(module, 3)
    unit.reshard()
    unit.unshard()
    unit.reshard()
    assert unit.state is UnitState.SHARDED
    assert all(buffer.whole.flat.untyped_storage().nbytes() == 0 for buffer in unit.buffers)


def test_a_gather_that_nobody_needs_any_more_is_waited_for_before_its_storage_goes() -> None:
    worlds.run(_change_of_mind, 2)


def _below_stage_3(rank: int, world: int) -> None:
    for stage in (0, 1, 2):
        unit = make_unit(nn.Linear(5, 3), stage)
        assert not unit.is_sharded_between_uses
        unit.reshard()
        assert unit.state is UnitState.UNSHARDED
        unit.mark_stale()
        unit.reshard()
        assert unit.state is UnitState.STALE
        unit.serve()
        assert unit.is_whole


def test_a_unit_stays_whole_below_stage_3() -> None:
    worlds.run(_below_stage_3, 2)


def _serve(rank: int, world: int) -> None:
    module = nn.Linear(5, 3)
    unit = make_unit(module, 3)
    values = module.weight.detach().clone()
    unit.reshard()
    if rank == 0:
        unit.unshard()
        unit.wait()
        assert torch.equal(module.weight, values)
    else:
        unit.serve()
        assert unit.state is UnitState.SHARDED
        assert unit.buffers[0].whole.flat.untyped_storage().nbytes() == 0


def test_a_rank_may_take_part_in_a_gather_that_it_does_not_need() -> None:
    worlds.run(_serve, 2)


def test_a_unit_is_busy_while_anybody_needs_it() -> None:
    unit = make_unit(nn.Linear(5, 3), 0)
    assert not unit.is_busy
    for begin, end in ((unit.enter, unit.leave), (unit.hold, unit.unhold), (unit.touch, unit.end_touch)):
        begin()
        assert unit.is_busy
        end()
        assert not unit.is_busy


def test_an_error_ends_every_use_but_those_of_gathered() -> None:
    unit = make_unit(nn.Linear(5, 3), 0)
    for begin in (unit.enter, unit.enter, unit.enter, unit.touch, unit.hold):
        begin()
    assert unit.end_uses(above=1)
    assert not unit.end_uses(above=1)
    assert unit.uses == 1
    unit.abandon_uses()
    assert (unit.uses, unit.is_touched, unit.holds) == (0, False, 1)
    unit.leave()  # its record is gone
    assert unit.uses == 0


def test_a_unit_is_passed_when_the_gradients_of_its_inputs_have_arrived_too() -> None:
    unit = make_unit(nn.Linear(5, 3).requires_grad_(False), 0)
    unit.begin_backward()
    unit.expect_inputs()
    unit.await_inputs("call")
    assert unit.is_complete
    assert not unit.is_passed
    unit.pass_inputs("call", was_expected=True)
    assert unit.is_passed
    unit.await_inputs("recomputed")
    assert not unit.is_passed
    unit.forget_inputs()
    assert unit.is_passed


def test_a_unit_without_reductions_to_come_expects_no_gradients() -> None:
    unit = make_unit(nn.Linear(5, 3), 0)
    unit.note_forward(builds_graph=True)
    unit.note_forward(builds_graph=False)
    unit.begin_reduce()
    unit.end_backward(has_more_backwards=True)
    assert (unit.is_reduced, unit.ran_forward) == (False, True)
    unit.end_backward(has_more_backwards=False)
    assert not unit.ran_forward


def test_only_a_unit_writes_its_state() -> None:
    names = {"state", "uses", "holds", "is_touched", "expected", "arrived", "ran_forward", "is_reduced"}
    written = [
        f"{file.name}:{node.lineno}"
        for file in Path(lightning_zero.engine.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in names
        if ast.unparse(node.value) != "self"
    ]
    assert written == []


def test_a_unit_is_complete_when_every_gradient_has_arrived() -> None:
    module = nn.Linear(5, 3)
    unit = make_unit(module, 0)
    unit.begin_backward()
    unit.accumulate(0, 0, torch.ones(3, 5))
    assert not unit.is_complete
    unit.accumulate(0, 0, torch.ones(3, 5))
    assert not unit.is_complete
    unit.accumulate(0, 1, torch.ones(3))
    assert unit.is_complete
    unit.begin_backward()
    assert not unit.is_complete


def test_a_frozen_parameter_is_not_waited_for() -> None:
    module = nn.Linear(5, 3)
    unit = make_unit(module, 0)
    module.bias.requires_grad_(False)
    unit.begin_backward()
    unit.accumulate(0, 0, torch.ones(3, 5))
    assert unit.is_complete
    assert unit.reducing_buffers == unit.buffers
    module.weight.requires_grad_(False)
    unit.begin_backward()
    assert unit.reducing_buffers == []


@pytest.mark.parametrize(("frozen", "buffers"), [((), 1), (("weight",), 2), (("weight", "bias"), 1)])
def test_frozen_and_trained_parameters_never_share_a_buffer(frozen: tuple[str, ...], buffers: int) -> None:
    module = nn.Linear(5, 3)
    for name in frozen:
        getattr(module, name).requires_grad_(False)
    assert len(make_unit(module, 0).buffers) == buffers


def test_dtypes_never_share_a_buffer() -> None:
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2, dtype=torch.float64), nn.LayerNorm(2))
    unit = make_unit(module, 0, compute_dtype=torch.bfloat16)
    kinds = [(buffer.kind.original, buffer.kind.compute, buffer.kind.master) for buffer in unit.buffers]
    assert kinds == [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float64),
    ]
    assert unit.numel == 15 + 3 + 6 + 2 + 4
