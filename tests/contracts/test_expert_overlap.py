"""Mixtures compute shared experts while tokens travel, and pad rows: results are those without."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_zero.comm.expert_groups import ExpertGroups
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.moe import MoE
from lightning_zero.moe.division import divide_experts, grid_of_experts
from lightning_zero.moe.exchange import ExpertRanks
from tests.simulated_device import SimulatedDevice
from tests.simulated_transport import BACKEND
from tests.worlds import count_collectives, run, seed, slow_collectives

H, E = 8, 4
SENDS = ("numbers", "rows", "results", "gradients of results", "gradients of rows")  # of a rank to the other one
DROPPING = {"drop_tokens": True, "capacity_factor": 0.8, "min_capacity": 1}


class SwiGLU(nn.Module):
    """Reads its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(H, 8), nn.Linear(H, 8), nn.Linear(8, H)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Normed(SwiGLU):
    """Has a parameter of its own, so experts run one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def _layer(expert: type[nn.Module] = SwiGLU, **options: Any) -> MoE:
    seed(3)
    return MoE(H, [expert() for _ in range(E)], E, k=2, shared_expert=SwiGLU(), **options)


def _tokens(rank: int, number: int | None = None) -> Tensor:
    number = (5, 0, 11, 2)[rank] if number is None else number
    return torch.randn(number, H, generator=torch.Generator().manual_seed(rank))


def _run(layer: MoE, x: Tensor, *, recomputes: bool = False) -> list[Tensor]:
    """Return output, gradients of the tokens, and of all parameters."""
    x = x.detach().requires_grad_()
    out = checkpoint(lambda x: layer(x)[0], x, use_reentrant=False) if recomputes else layer(x)[0]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


# -- Shared experts --------------------------------------------------------------------------------------------


def _serial(layer: MoE, x: Tensor) -> list[Tensor]:
    """Return the same with the shared expert, and the residual one, behind the layer."""
    shared, mlp, coefficient = layer.shared_expert, layer.mlp, layer.coefficient
    assert shared is not None
    x = x.detach().requires_grad_()
    layer.shared_expert = layer.mlp = layer.coefficient = None
    out = layer(x)[0]
    layer.shared_expert, layer.mlp, layer.coefficient = shared, mlp, coefficient
    if mlp is not None and coefficient is not None:
        shares = coefficient(x).softmax(-1)
        out = out * shares[:, :1] + mlp(x) * shares[:, 1:]
    out = out + shared(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


def _both_orders(rank: int, world: int, residual: bool, recomputes: bool) -> list[bool]:
    layer = _layer(use_residual=residual)
    divide_experts(layer, ExpertRanks())
    with slow_collectives(0.01, seed=rank):
        found = _run(layer, _tokens(rank), recomputes=recomputes)
        expected = _serial(layer, _tokens(rank))
    return [torch.equal(one, other) for one, other in zip(found, expected, strict=True)]


@pytest.mark.parametrize(("residual", "recomputes"), [(False, False), (True, False), (False, True)])
def test_a_shared_expert_between_start_and_wait_has_the_bits_of_one_behind(residual: bool, recomputes: bool) -> None:
    for same in run(_both_orders, 2, residual, recomputes):
        assert all(same), same


class Telling(SwiGLU):
    """Touches files when its forward has run, and its backward."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(lambda grad: (self._folder / "backward").touch())
        (self._folder / "forward").touch()
        return y


def _await(path: Path) -> None:
    deadline = time.monotonic() + 20.0
    while not path.exists():
        assert time.monotonic() < deadline, f"the shared expert of the other rank has not run its {path.name}"
        time.sleep(0.001)


def _late_rows(rank: int, world: int, folder: Path, options: dict[str, Any]) -> list[Tensor]:
    """Train; rank 1 sends rows, and gradients of rows, after the shared expert of rank 0 has run."""
    layer = _layer(**options)
    layer.shared_expert = Telling(folder / str(rank))
    divide_experts(layer, ExpertRanks())
    num_sends = 0

    def before_send() -> None:
        nonlocal num_sends
        awaited = {"rows": "forward", "gradients of rows": "backward"}.get(SENDS[num_sends])
        num_sends += 1
        if rank == 1 and awaited:
            _await(folder / "0" / awaited)

    (folder / str(rank)).mkdir()
    with count_collectives(on_call=before_send):
        found = _run(layer, _tokens(rank, 9))
    assert num_sends == len(SENDS)
    return found


@pytest.mark.parametrize("options", [{}, {**DROPPING, "pad_to_tokens": 9}], ids=["counts", "padded"])
def test_shared_experts_run_before_the_rows_of_others_are_there(options: dict[str, Any], tmp_path: Path) -> None:
    """In the forward and in the backward; in a serial order the ranks would wait for each other."""
    run(_late_rows, 2, tmp_path, options)


def _num_gathers(rank: int, world: int, shares: bool) -> int:
    """Return the gathers of a step in which experts are a unit, sharded over the ranks."""
    layer, groups = _layer(), ExpertGroups(1, 30.0)
    if not shares:
        layer.shared_expert = None
    ranks = ExpertRanks(groups.expert_group)
    parts = divide_experts(layer, ranks)
    engine = ZeroEngine(3, units=["Experts"])
    engine.shard(layer, grid=grid_of_experts(parts, groups.shard_group, world))
    ranks.meet = engine.meet
    with engine.scope("training_step"):
        loss = layer(_tokens(rank, 9).requires_grad_())[0].square().sum()
    loss.backward()
    found = engine.stats().calls["all_gather"]
    engine.close()
    return found


def test_experts_are_not_gathered_again_for_the_backward_of_a_shared_expert() -> None:
    assert run(_num_gathers, 2, True) == run(_num_gathers, 2, False)


def _recomputed_inside(rank: int, world: int, implementation: CheckpointImpl) -> list[bool]:
    layer = _layer(use_residual=True)
    divide_experts(layer, ExpertRanks())
    outcomes = []
    for _ in range(2):
        x = (_tokens(rank).requires_grad_() * 2.0).tanh()  # has a graph, through which a backward can go once
        x.retain_grad()
        layer.zero_grad()
        layer(x)[0].square().sum().backward()
        assert x.grad is not None
        outcomes.append([x.grad, *(param.grad for param in layer.parameters())])
        layer.experts = checkpoint_wrapper(layer.experts, implementation)  # type: ignore[assignment]
    return [torch.equal(one, other) for one, other in zip(*outcomes, strict=True)]


@pytest.mark.parametrize("implementation", list(CheckpointImpl), ids=str)
def test_experts_may_be_computed_again_with_what_runs_while_rows_travel(implementation: CheckpointImpl) -> None:
    for same in run(_recomputed_inside, 2, implementation):
        assert all(same), same


def _recomputed_of_data(rank: int, world: int) -> list[bool]:
    """The inputs are data, so reentrant checkpoints of experts have no graph; other modules of the layer train."""
    layer = _layer(use_residual=True)
    divide_experts(layer, ExpertRanks())
    layer.experts = checkpoint_wrapper(layer.experts, CheckpointImpl.REENTRANT)  # type: ignore[assignment]
    layer(_tokens(rank, 7))[0].square().sum().backward()
    return [param.grad is not None for name, param in layer.named_parameters() if not name.startswith("experts.")]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_shared_experts_train_beside_a_checkpoint_of_experts_on_data() -> None:
    for have_grads in run(_recomputed_of_data, 2):
        assert all(have_grads)


# -- Transfers that nobody waits for -----------------------------------------------------------------------------------


class Failing(SwiGLU):
    """Fails once, in its forward or in its backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self._where == "forward":
            self._fail()
        y.register_hook(lambda grad: self._fail() if self._where == "backward" else None)
        return y

    def _fail(self) -> None:
        self._where = ""
        raise ArithmeticError("once")


def _left(rank: int, world: int, where: str) -> list[bool]:
    """Leave a transfer in a step that fails, or in every recomputation that needs the shared expert only."""
    layer = _layer()
    layer.shared_expert = Failing(where)
    expected = copy.deepcopy(layer)
    divide_experts(layer, ranks := ExpertRanks())
    x = _tokens(rank, 9)
    if where == "backward":
        x.requires_grad_()
    else:  # in a graph rows on their way would outlive an error
        for one in (layer, expected):
            one.router.requires_grad_(False)
            one.experts.requires_grad_(False)
    with slow_collectives(0.05 * rank):  # rank 0 leaves before rows of the other one arrive
        for _ in range(3):
            layer.zero_grad()
            try:
                out = checkpoint(layer, x, use_reentrant=False)[0] if where == "recomputation" else layer(x)[0]
                out.square().sum().backward()
            except ArithmeticError:
                assert where != "recomputation"
    ranks.settle()
    expected.shared_expert._where = ""  # type: ignore[union-attr]
    expected(x.detach())[0].square().sum().backward()
    pairs = zip(layer.shared_expert.parameters(), expected.shared_expert.parameters(), strict=True)  # type: ignore[union-attr]
    return [torch.allclose(one.grad, other.grad, atol=1e-5) for one, other in pairs]  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["recomputation", "forward", "backward"])
def test_rows_that_a_forward_or_backward_leaves_on_their_way_are_awaited_by_the_next(where: str) -> None:
    for same in run(_left, 2, where):
        assert all(same), same


# -- Padded rows -------------------------------------------------------------------------------------------------------


def _padded_and_not(rank: int, world: int, expert: type[nn.Module], options: dict[str, Any]) -> float:
    """Return the largest difference between both forms, in training and in evaluation."""
    layer = _layer(expert, **DROPPING, **options)
    padded = copy.deepcopy(layer)
    padded.pad_to_tokens = 11
    differences = [0.0]
    for one in (layer, padded):
        divide_experts(one, ExpertRanks())
    for training in (True, False):
        found, expected = (_run(one.train(training), _tokens(rank)) for one in (padded, layer))
        pairs = zip(found, expected, strict=True)
        differences += [float((one - other).abs().max()) for one, other in pairs if one.numel()]
    return max(differences)


@pytest.mark.parametrize("expert", [SwiGLU, Normed])
@pytest.mark.parametrize("world", [2, 4])
def test_padded_rows_have_the_results_of_counted_ones(world: int, expert: type[nn.Module]) -> None:
    """With other numbers of tokens on every rank, one of them 0. Ends of vectorised loops are elsewhere."""
    assert max(run(_padded_and_not, world, expert, {"eval_capacity_factor": 3.0})) < 1e-6


def _too_many(rank: int, world: int) -> None:
    layer = _layer(**DROPPING, pad_to_tokens=4)
    divide_experts(layer, ExpertRanks())
    layer(_tokens(rank, 5))


def test_more_tokens_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(ValueError, match="`pad_to_tokens=4` of a mixture of experts, but this rank has 5 tokens: .*"):
        run(_too_many, 2)


def test_without_divided_experts_any_number_of_tokens_is_computed() -> None:
    layer, x = _layer(**DROPPING, pad_to_tokens=4), _tokens(0, 9)
    assert torch.equal(layer(x)[0], _layer(**DROPPING)(x)[0])


def _waits(rank: int, world: int, options: dict[str, Any]) -> list[str]:
    """Return where the host waits for a simulated GPU in a forward and a backward of the whole layer."""
    group = dist.new_group(backend=BACKEND)
    with SimulatedDevice() as device, mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        layer = _layer(**DROPPING, **options).bfloat16()
        divide_experts(layer, ExpertRanks())
        layer.experts.ranks.group = group  # type: ignore[union-attr]
        layer.to("cuda")
        x = _tokens(rank, 9).bfloat16().to("cuda").requires_grad_()
        device.waits.clear()
        layer(x)[0].square().sum().backward()
        waits = [place for place, number in device.waits.items() for _ in range(number)]
        assert x.grad is not None
        assert x.grad.cpu().isfinite().all()
        return waits


@pytest.mark.parametrize(("options", "number"), [({}, 1), ({"pad_to_tokens": 9}, 0)], ids=["counts", "padded"])
def test_a_layer_with_padded_rows_waits_for_no_device(options: dict[str, Any], number: int) -> None:
    for waits in run(_waits, 2, options):
        assert len(waits) == number, waits
