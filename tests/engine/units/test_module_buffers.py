"""Module buffers are rank 0's on every rank, whatever is assigned to them, or an error names them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.sampling import sample


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("shift", torch.zeros(2))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        shift = self.shift.to_dense() if self.shift.layout != torch.strided else self.shift
        return self.norm(self.linear(x)) + shift.float().sum()


Change = Callable[[Buffered, int], None]


def _inference(module: Buffered, rank: int) -> None:
    with torch.inference_mode():
        module.shift = torch.full((2,), rank + 1.0)
        module.norm.running_mean = torch.full((2,), rank + 1.0)


def _assign(make: Callable[[int], Any], name: str = "shift") -> Change:
    return lambda module, rank: setattr(module, name, make(rank))


def _alias(module: Buffered, rank: int) -> None:
    module.late = torch.full((4,), rank + 1.0)
    module.shift = module.late[1:3]


def _register(module: Buffered, rank: int) -> None:
    module.norm.register_buffer("new", torch.full((2,), rank + 1.0))


def _delete(module: Buffered, rank: int) -> None:
    del module.shift
    module.shift = torch.zeros(2)


CHANGES: dict[str, Change] = {
    "inference": _inference,
    "shape": _assign(lambda rank: torch.full((5, 1), rank + 1.0)),
    "dtype": _assign(lambda rank: torch.full((2,), rank + 1.0, dtype=torch.float64)),
    "bool": _assign(lambda rank: torch.tensor([rank == 0, True])),
    "complex": _assign(lambda rank: torch.full((2,), complex(rank, 1.0)).conj(), "late"),
    "zero-dim": _assign(lambda rank: torch.tensor(rank + 1)),
    "empty": _assign(lambda rank: torch.empty(0, 3)),
    "expanded": _assign(lambda rank: torch.full((1,), rank + 1.0).expand(4)),
    "transposed": _assign(lambda rank: torch.full((2, 3), rank + 1.0).T),
    "none": _assign(lambda rank: None, "late"),
    "from-none": _assign(lambda rank: torch.full((3,), rank + 1.0), "late"),
    "sparse": _assign(lambda rank: torch.full((2, 2), rank + 1.0).to_sparse()),
    "csr": _assign(lambda rank: torch.full((2, 2), rank + 1.0).to_sparse_csr()),
    "alias": _alias,
    "registered": _register,
    "deleted": _delete,
}


def _step(module: nn.Module, forward: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    worlds.seed(rank)
    forward(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _changed(rank: int, world: int, stage: int, change: str) -> dict[str, Tensor]:
    worlds.seed()
    module = Buffered()
    engine = ZeroEngine(stage)
    engine.shard(module)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    _step(module, module, optimizer, rank)
    CHANGES[change](module, rank)
    _step(module, module, optimizer, rank)
    values = _values(module)
    _step(module, module, optimizer, rank)
    engine.close()
    values.pop("norm.running_mean")  # of this rank's batch
    values.pop("norm.running_var")
    return values


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stage", sample((0, 3), 3), ids="stage{}".format)
def test_a_buffer_that_is_assigned_between_steps_is_rank_zeros_afterwards(stage: int, change: str) -> None:
    first, second = worlds.run(_changed, 2, stage, change)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(_dense(value), _dense(second[name])), name


def _dense(value: Tensor) -> Tensor:
    return value if value.layout == torch.strided else value.to_dense()


ALONE: dict[str, tuple[Change, str]] = {
    "shape": (_assign(lambda rank: torch.zeros(3)), r"`shift` is \(\d,\) float32 on rank 0, \(\d,\) float32 on rank 1"),
    "dtype": (_assign(lambda rank: torch.zeros(2).double()), r"`shift` is \(2,\) float(32|64) on rank 0, \(2,\) float"),
    "none": (_assign(lambda rank: None), r"`shift` is (missing|\(2,\) float32) on rank 0"),
    "registered": (_register, r"`norm.new` is (missing|\(2,\) float32) on rank 0"),
}


def _alone(rank: int, world: int, changed: int, change: str) -> str:
    module = Buffered()
    engine = ZeroEngine(0)
    engine.shard(module)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    _step(module, module, optimizer, rank)
    if rank == changed:
        ALONE[change][0](module, rank)
    try:
        _step(module, module, optimizer, rank)
    except Exception as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize("change", ALONE)
@pytest.mark.parametrize("changed", [0, 1], ids="rank{}".format)
def test_a_buffer_that_one_rank_changes_alone_is_an_error_that_names_it(changed: int, change: str) -> None:
    errors = worlds.run(_alone, 2, changed, change)
    pattern = ALONE[change][1]
    assert re.search(pattern, errors[1]), errors
    if changed == 0:
        assert errors[0] == errors[1]


# -- When they are broadcast, as under DistributedDataParallel ---------------------------------------------------------


class Counts(nn.Module):
    """Counts what it sees of each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.abs().sum()
        return self.linear(x) * self.seen.clone()


def _counted(rank: int, world: int, wraps: bool) -> list[float]:
    module = Counts()
    engine = ZeroEngine(0)
    forward: Any = DistributedDataParallel(module) if wraps else engine.shard(module)
    found = []
    x = torch.full((2, 3), rank + 1.0)
    for last in (True, False, False, True, True):
        context = engine.microbatch(last) if not wraps else forward.no_sync() if not last else torch.enable_grad()
        with context:
            forward(x).sum().backward()
        found.append(float(module.seen))
    for _ in range(3):  # an evaluation that counts the examples of each rank
        with torch.no_grad():
            forward(x)
        found.append(float(module.seen))
    (forward(x) + forward(x)).sum().backward()  # two forwards before one backward
    return [*found, float(module.seen)]


def test_evaluation_and_micro_batches_keep_each_ranks_own_buffers_as_under_ddp() -> None:
    assert worlds.run(_counted, 2, False) == worlds.run(_counted, 2, True)


def test_a_buffer_that_is_a_view_of_a_parameter_is_refused_by_name() -> None:
    module = Buffered()
    module.register_buffer("view", module.linear.weight.data[0])
    with pytest.raises(ValueError, match="share memory without being one object: `view` and `linear.weight`"):
        ZeroEngine(0).shard(module)


def test_buffers_that_were_moved_come_back_for_the_next_run() -> None:
    module = nn.BatchNorm1d(2)
    engine = ZeroEngine(stage=1)
    engine.shard(module)
    module.running_mean = torch.empty(2, device="meta")  # as `module.cpu()` does
    engine.internals.steps.broadcast_module_buffers("scopes")
    assert module.running_mean.device.type == "cpu"


class Table(nn.Module):
    """Has a module buffer, and no parameters."""

    values: Tensor

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values)


class Filled(Table):
    def reset_parameters(self) -> None:
        self.values.fill_(3.0)


def _run_again(stage: int, made: Callable[[nn.Module], nn.Module]) -> Any:
    """Return a module that is made between two runs."""
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    engine = ZeroEngine(stage)
    engine.shard(module)
    engine.internals.fits.pause()
    module.append(made(module))
    engine.internals.fits.make_equal()
    engine.internals.fits.resume()
    engine.internals.steps.broadcast_module_buffers("scopes")
    return module[2]


def test_meta_buffers_of_a_module_that_is_made_between_two_runs_get_values() -> None:
    """They became zeros."""
    assert _run_again(1, lambda module: Filled(torch.empty(2, device="meta"))).values.tolist() == [3.0, 3.0]
    with pytest.raises(ValueError, match="`2` .Table. was built on the meta device and has no `reset_parameters`"):
        _run_again(1, lambda module: Table(torch.empty(2, device="meta")))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_view_of_a_parameter_in_a_module_that_is_made_between_two_runs_is_refused(stage: int) -> None:
    with pytest.raises(ValueError, match="share memory without being one object: .*`2.values`"):
        _run_again(stage, lambda module: Table(module[0].weight.detach()[0]))
