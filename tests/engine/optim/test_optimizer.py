"""Torch optimizers on segments: what the window shows, what their subclass does."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import pickle
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.boxes import Part
from lightning_zero.config import Communication, MixedPrecision
from lightning_zero.engine.buffers.parameter import raw_grad
from lightning_zero.engine.buffers.sharded_gradient import ShardedGradient
from lightning_zero.engine.buffers.window import BufferWindow
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.optim.flat_step import FlatStep
from lightning_zero.engine.optim.optimizer_checks import OptimizerChecks
from lightning_zero.grid import Grid, ParamAxes
from tests import worlds
from tests.engine.optimizers import Clipped, Lamb, Momentum, Several, SometimesFactored, Unfinished
from tests.references import TinyGPT, token_loss

STAGES = (0, 1, 2, 3)
stages = pytest.mark.parametrize("stage", STAGES)


def _engine(stage: int, **options: Any) -> tuple[ZeroEngine, nn.Module]:
    worlds.seed()
    engine = ZeroEngine(stage, units=["Block"], **options)
    return engine, engine.shard(TinyGPT())


def _double(rank: int, world: int, stage: int, dtype: torch.dtype) -> None:
    worlds.seed()
    module, engine = nn.Linear(3, 2).to(dtype), ZeroEngine(stage)
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine.shard(module)
    engine.attach(optimizer)
    for one in (plain, module):
        one(torch.full((1, 3), 1 / 3, dtype=dtype)).abs().square().sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    norm = engine.clip_grad_norm(optimizer, 0.1)
    torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0.0)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(engine.full_grad(mine), theirs.grad, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@stages
def test_gradients_in_double_are_clipped_by_a_factor_in_double(stage: int, dtype: torch.dtype) -> None:
    worlds.run(_double, 2, stage, dtype)


def _waits_with_others(rank: int, world: int) -> None:
    module, engine = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)), ZeroEngine(1, units=[])
    engine.shard(module)
    first, second = (torch.optim.SGD(one.parameters(), lr=0.1) for one in module)
    engine.attach(first, second)
    module[1].requires_grad_(False)
    module(torch.ones(1, 2)).sum().backward()
    module.requires_grad_(True)
    module[0].requires_grad_(False)
    with engine.microbatch(last=False):
        module(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="waits with those of other parameters of unit .*Call this step before"):
        first.step()


def test_a_step_that_comes_behind_micro_batches_of_others_names_the_order() -> None:
    worlds.run(_waits_with_others, 1)


def _backward(engine: ZeroEngine, module: nn.Module, rank: int, step: int = 0) -> None:
    token_loss(module, rank, step).backward()


def _object(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage)
    params = list(module.parameters())
    optimizer = torch.optim.AdamW(params, lr=0.1)
    assert engine.attach(optimizer) is optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    assert type(optimizer).__name__ == "AdamW"
    assert type(optimizer).__module__ == torch.optim.AdamW.__module__
    assert all(mine is theirs for mine, theirs in zip(optimizer.param_groups[0]["params"], params, strict=True))
    second = torch.optim.SGD(params, lr=0.1)
    assert engine.attach(optimizer, second) == [optimizer, second]
    assert engine.internals.fits.optimizers == [optimizer, second]
    assert engine.attach(second) is second
    assert type(optimizer) is torch.optim.AdamW
    engine.internals.fits.detach()
    assert type(second) is torch.optim.SGD
    assert not second._optimizer_step_pre_hooks
    assert engine.internals.fits.optimizers == []
    pickle.dumps(optimizer.state_dict())
    engine.close()


@stages
def test_an_attached_optimizer_stays_the_same_object(stage: int) -> None:
    worlds.run(_object, 2, stage)


def _window(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage, precision=MixedPrecision(compute_dtype=torch.bfloat16))
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    shapes = [param.shape for param in module.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        _backward(engine, module, rank)
    assert all(raw_grad(param) is None for param in module.parameters())
    engine.internals.steps.open_window(optimizer)
    engine.internals.steps.open_window(optimizer)
    counts = []
    for param in module.parameters():
        assert (param.dtype, param.grad.dtype) == (torch.float32, torch.float32)
        assert param.shape == param.grad.shape
        assert isinstance(param.grad, ShardedGradient) == (stage > 0)
        counts.append(param.detach().as_subclass(torch.Tensor).numel())
    engine.internals.steps.close_window(optimizer)
    engine.internals.steps.close_window(optimizer)
    assert [param.shape for param in module.parameters()] == shapes
    total = torch.tensor(counts)
    if stage:
        torch.distributed.all_reduce(total)
    assert total.tolist() == [shape.numel() for shape in shapes]
    engine.close()


@stages
def test_the_window_shows_each_rank_its_part_and_nothing_twice(stage: int) -> None:
    worlds.run(_window, 2, stage)


def _zero_grad(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage)
    halves = list(module.parameters())[:4], list(module.parameters())[4:]
    first, second = engine.attach(*[torch.optim.SGD(half, lr=0.1) for half in halves])
    _backward(engine, module, rank)
    norms = [engine.grad_norm(optimizer) for optimizer in (first, second)]
    assert min(norms) > 0
    assert torch.allclose(torch.stack(norms).norm(), engine.grad_norm())
    first.zero_grad()
    assert engine.grad_norm(first) == 0
    assert engine.full_grad(halves[0][0]) is None
    assert torch.equal(engine.grad_norm(second), norms[1])
    second.zero_grad(set_to_none=False)
    assert engine.grad_norm() == 0
    assert torch.equal(engine.full_grad(halves[1][0]), torch.zeros(halves[1][0].shape))
    before = [engine.full_param(param) for param in module.parameters()]
    first.step()
    second.step()
    assert all(torch.equal(engine.full_param(p), value) for p, value in zip(module.parameters(), before, strict=True))
    engine.close()


@stages
def test_zero_grad_drops_the_gradients_of_one_optimizer(stage: int) -> None:
    worlds.run(_zero_grad, 2, stage)


def _accumulate(rank: int, world: int, stage: int) -> None:
    """Without zero_grad gradients add up, as in torch."""
    engine, module = _engine(stage)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.0))
    weight = module.head.weight
    for step in range(2):
        _backward(engine, module, rank, step)
        optimizer.step()
    both = engine.full_grad(weight)
    parts = []
    for step in range(2):
        optimizer.zero_grad()
        _backward(engine, module, rank, step)
        parts.append(engine.full_grad(weight))
    assert torch.equal(both, parts[0] + parts[1])
    engine.close()


@stages
def test_gradients_stay_over_a_step_without_zero_grad(stage: int) -> None:
    worlds.run(_accumulate, 2, stage)


def _groups(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage)
    optimizer = engine.attach(torch.optim.AdamW(module.head.parameters(), lr=0.1))
    optimizer.add_param_group({"params": module.embedding.parameters(), "lr": 0.0})
    before = {name: engine.full_param(param) for name, param in module.named_parameters()}
    _backward(engine, module, rank)
    optimizer.step()
    moved = {name for name, p in module.named_parameters() if not torch.equal(engine.full_param(p), before[name])}
    assert moved == {"head.weight"}
    optimizer.param_groups[1]["lr"] = 0.1
    optimizer.zero_grad()
    _backward(engine, module, rank)
    optimizer.step()
    assert not torch.equal(engine.full_param(module.embedding.weight), before["embedding.weight"])
    with pytest.raises(ValueError, match="not in the sharded module"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    engine.close()


@stages
def test_a_group_that_is_added_later_is_stepped(stage: int) -> None:
    worlds.run(_groups, 2, stage)


def _state(rank: int, world: int, stage: int) -> int:
    engine, module = _engine(stage)
    optimizer = engine.attach(torch.optim.Adagrad(module.parameters(), lr=0.1, initial_accumulator_value=0.5))
    for record in engine.records():
        start, stop = record.own_range
        state = record.state(optimizer)
        assert state["sum"].numel() == stop - start
        assert record.master().numel() == stop - start
        assert bool((state["sum"] == 0.5).all())
    _backward(engine, module, rank)
    optimizer.step()
    nbytes = engine.stats().memory["optimizer"]
    engine.close()
    return nbytes


@stages
def test_state_made_in_the_constructor_is_cut_to_segments(stage: int) -> None:
    whole = sum(param.numel() for param in TinyGPT().parameters()) * 4
    for nbytes in worlds.run(_state, 2, stage):
        assert whole / (2 if stage else 1) * 0.7 < nbytes < whole / (2 if stage else 1) * 1.6


def _closure(rank: int, world: int, stage: int) -> list[Tensor]:
    """Step with a closure, which some optimizers call themselves."""
    engine, module = _engine(stage)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        mask = torch.zeros_like(module.head.weight)
        mask[0] = 1.0
        assert mask[1:].count_nonzero() == 0
        loss = token_loss(module, rank, 0)
        loss.backward()
        return loss

    for _ in range(3):
        losses.append(optimizer.step(closure).detach())
        losses.append(optimizer.step(closure=closure).detach())
    weight = engine.full_param(module.head.weight)
    engine.close()
    return [*losses, weight]


def test_a_closure_computes_on_whole_parameters_at_every_stage() -> None:
    expected = worlds.run(_closure, 2, 0)
    assert all(losses[0] > losses[5] for losses in expected)
    for stage in (1, 2, 3):
        for found, wanted in zip(worlds.run(_closure, 2, stage), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


class _Deaf(torch.optim.SGD):
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        super().step()


def _last_in_closure(rank: int, world: int, hears: bool) -> None:
    """Step with a closure that runs the last micro-batch."""
    engine, module = _engine(1)
    optimizer = engine.attach((torch.optim.SGD if hears else _Deaf)(module.parameters(), lr=0.1))
    with engine.microbatch(last=False):
        token_loss(module, rank, 0).backward()

    def closure() -> Tensor:
        loss = token_loss(module, rank, 1)
        loss.backward()
        return loss

    optimizer.step(closure)
    engine.close()


def test_a_closure_may_run_the_last_micro_batch_and_must_be_called() -> None:
    worlds.run(_last_in_closure, 2, True)
    with pytest.raises(RuntimeError, match="waits on every rank for the last micro-batch"):
        worlds.run(_last_in_closure, 2, False)


def _clip(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    _backward(engine, module, rank)
    grads = [engine.full_grad(param) for param in module.parameters()]
    whole = torch.cat([grad.reshape(-1) for grad in grads])
    for order in (1.0, 2.0, 3.0, float("inf")):
        assert torch.allclose(engine.grad_norm(norm_type=order), torch.linalg.vector_norm(whole, order), rtol=1e-6)
    norm = engine.clip_grad_norm(optimizer, 0.1)
    assert torch.allclose(norm, whole.norm(), rtol=1e-6)
    assert torch.allclose(engine.grad_norm(), torch.tensor(0.1), rtol=1e-4)
    assert torch.allclose(engine.full_grad(module.head.weight), grads[-1] * 0.1 / whole.norm(), rtol=1e-4)
    engine.clip_grad_value(optimizer, 1e-3)
    assert engine.grad_norm(norm_type=float("inf")) <= 1e-3
    engine.close()


@stages
def test_norms_and_clipping_see_the_whole_gradient(stage: int) -> None:
    worlds.run(_clip, 2, stage)


def _unscale(rank: int, world: int, stage: int) -> list[bool]:
    engine, module = _engine(stage)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    found = []
    for step in range(2):
        loss = token_loss(module, rank, step) * 8
        (loss * float("inf") if step == 1 and rank == 1 else loss).backward()
        before = engine.grad_norm()
        found.append(engine.unscale(optimizer, 0.125))
        if step == 0:
            assert torch.allclose(engine.grad_norm(), before / 8)
        optimizer.zero_grad()
    engine.close()
    return found


@stages
def test_an_overflow_on_one_rank_is_known_to_all(stage: int) -> None:
    assert worlds.run(_unscale, 2, stage) == [[False, True]] * 2


def _order_of_windows(rank: int, world: int, stage: int) -> None:
    """Two optimizers over the same parameters: one window closes the other."""
    engine, module = _engine(stage)
    first, second = engine.attach(*[torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2)])
    _backward(engine, module, rank)
    before = engine.full_param(module.head.weight)
    grad = engine.full_grad(module.head.weight)
    engine.internals.steps.open_window(first)
    engine.internals.steps.open_window(second)
    first.step()
    second.step()
    assert torch.allclose(engine.full_param(module.head.weight), before - 0.2 * grad, atol=1e-7)
    assert module.head.weight.shape == (11, 6)
    engine.close()


@stages
def test_optimizers_may_share_parameters(stage: int) -> None:
    worlds.run(_order_of_windows, 2, stage)


class ClipsOutside(torch.optim.AdamW):
    """Clips gradients of parameters that it reaches past its groups."""

    def __init__(self, params: Any, reach: Any) -> None:
        super().__init__(params, lr=0.1)
        self.reach = reach

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.reach.parameters() if isinstance(self.reach, nn.Module) else self.reach(), 1.0)
        return super().step(closure)


def _reaching_outside(rank: int, world: int, stage: int) -> None:
    engine = ZeroEngine(stage=stage)
    module = engine.shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)))
    for reach in (module, module.parameters, lambda: module.parameters()):
        for params in (module.parameters(), module[1].parameters()):
            with pytest.raises(ValueError, match=r"`ClipsOutside` uses `0.weight` past its `param_groups`"):
                engine.attach(ClipsOutside(params, reach))
    with pytest.raises(ValueError, match="`Clipped` is not element-wise"):
        engine.attach(Clipped(module.parameters()))
    params = list(module.parameters())
    optimizer = engine.attach(Several(torch.optim.Adam(params[:2]), torch.optim.Adam(params[2:])))
    before = [engine.full_param(param).clone() for param in params]
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert not any(torch.equal(engine.full_param(param), old) for param, old in zip(params, before, strict=True))
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_optimizers_that_reach_parameters_past_their_groups_are_refused(stage: int) -> None:
    worlds.run(_reaching_outside, 2, stage)


class Masked(Momentum):
    """Makes states of several dtypes in its constructor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for param in self.param_groups[0]["params"]:
            self.state[param]["mask"] = torch.ones(param.shape, dtype=torch.bool)
            self.state[param]["average"] = torch.zeros(param.shape)

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        return average.where(self.state[param]["mask"], 0)


def _dtypes_of_states(rank: int, world: int, stage: int) -> None:
    worlds.seed()
    engine = ZeroEngine(stage=stage)
    module = engine.shard(nn.Linear(5, 3).bfloat16())
    masked = engine.attach(Masked(module.parameters()))
    assert all(state["mask"].dtype == torch.bool for state in masked.state.values())
    for make in (Momentum, torch.optim.Adam, torch.optim.NAdam, torch.optim.Adagrad):
        optimizer = engine.attach(make(module.parameters()))
        for number in range(2):
            module(torch.full((2, 5), 0.3 + number, dtype=torch.bfloat16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(copy.deepcopy(saved))
        for state, expected in zip(optimizer.state.values(), saved["state"].values(), strict=True):
            for key, value in expected.items():
                assert state[key].dtype == value.dtype == torch.float32
                assert torch.equal(*(one.as_subclass(Tensor) for one in (state[key], value)))
    engine.close()


@stages
def test_states_keep_their_dtype(stage: int) -> None:
    worlds.run(_dtypes_of_states, 2, stage)


@dataclasses.dataclass
class Counted:
    number: int = 0


class Counting(nn.Linear):
    """Counts calls of its methods, in numbers, containers and a module buffer; and of those of a child."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.calls, self.rates = 0, [[0.1]]
        self.register_buffer("count", torch.zeros(()))
        self.child: Any = nn.Identity()
        self.others = (deque([0], maxlen=9), {0}, defaultdict(int), Counted(), OrderedDict(number=0))

    def current_rate(self, factor: float = 1.0) -> float:
        self.calls += 1
        self.count.add_(1)
        self.rates[0].append(0.1)
        self.child.last = self.calls
        recent, seen, by_name, counted, ordered = self.others
        recent.append(self.calls)
        seen.add(self.calls)
        by_name["calls"] += 1
        counted.number += 1
        ordered["number"] += 1
        return factor * self.rates[0][-1]


def _note(params: list[nn.Parameter], noted: list[str]) -> None:
    params[0].mul_(1.0)
    noted.append("step")


class AsksTheModule(torch.optim.Optimizer):
    """Has functions of a module that say how far it steps, frees a resource at its end, and writes into the module."""

    freed = 0

    def __init__(self, module: Counting) -> None:
        super().__init__(module.parameters(), {"lr": 1.0})
        self.module = module
        self.rates = (module.current_rate, functools.partial(module.current_rate, 2.0))
        self.note = functools.partial(_note, params=self.param_groups[0]["params"], noted=[])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.module.last_step = "made"  # type: ignore[assignment]
        self.note()
        for param in self.param_groups[0]["params"]:
            for rate in self.rates:
                param.sub_(param.grad, alpha=rate())

    def __del__(self) -> None:
        AsksTheModule.freed += 1


def _asks_the_module(rank: int, world: int) -> None:
    engine = ZeroEngine(stage=3)
    module = Counting()
    engine.shard(module)
    optimizer = engine.attach(AsksTheModule(module))
    gc.collect()
    assert (module.calls, float(module.count), module.rates, AsksTheModule.freed) == (0, 0.0, [[0.1]], 0)
    assert not hasattr(module, "last_step")
    assert optimizer.note.keywords["noted"] == []
    assert module.others == (deque([0]), {0}, {}, Counted(), {"number": 0})
    assert not hasattr(module.child, "last")
    before = engine.full_param(module.weight)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(engine.full_param(module.weight), before - 0.3)
    assert (module.calls, float(module.count), module.child.last, module.last_step) == (4, 4.0, 4, "made")
    engine.close()


def test_the_trial_leaves_a_module_that_the_optimizer_asks_as_it_was() -> None:
    worlds.run(_asks_the_module, 2)


class InOtherDtypes(Momentum):
    """Makes states in its constructor that are wider or narrower than the parameters."""

    def __init__(self, params: Any, dtype: torch.dtype) -> None:
        super().__init__(params)
        for param in self.param_groups[0]["params"]:
            self.state[param]["average"] = torch.zeros(param.shape)
            self.state[param]["other"] = torch.zeros_like(param, dtype=dtype)
            self.state[param]["alike"] = torch.zeros_like(param)


def _other_dtypes(rank: int, world: int, stage: int) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    for own, other, masters, alike in ((fp32, bf16, True, fp32), (bf16, fp32, False, bf16), (bf16, fp32, True, fp32)):
        engine = ZeroEngine(stage=stage, precision=MixedPrecision(masters=masters))
        module = engine.shard(nn.Linear(5, 3).to(own))
        optimizer = InOtherDtypes(module.parameters(), other)
        for _ in range(2):  # attached again
            engine.attach(optimizer)
            states = list(optimizer.state.values())
            assert [state["other"].dtype for state in states] == [other] * 2
            assert [state["alike"].dtype for state in states] == [alike] * 2
        engine.close()


@stages
def test_states_of_other_dtypes_than_the_parameter_keep_them(stage: int) -> None:
    worlds.run(_other_dtypes, 2, stage)


def _attached_again(rank: int, world: int, stage: int) -> None:
    module = nn.Linear(1, 1)
    module.bias = nn.Parameter(torch.ones(()))
    plain = copy.deepcopy(module)
    engine = ZeroEngine(stage=stage)
    engine.shard(module)
    for make in (torch.optim.NAdam, torch.optim.ASGD):
        pairs = [(model, make(model.parameters(), lr=0.1)) for model in (module, plain)]
        for _ in range(2):
            engine.attach(pairs[0][1])
            for model, optimizer in pairs:
                model(torch.ones(2, 1)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    for param, expected in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(engine.full_param(param), expected.detach())
    engine.close()


@stages
def test_counters_of_parameters_without_dimensions_are_kept_when_attached_again(stage: int) -> None:
    worlds.run(_attached_again, 2, stage)


class _Stages:
    """Agreements of two pipeline stages, the first of which runs first: the second has to ask for the same."""

    is_of_stage = True

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.replayed: list[tuple[str, bool]] | None = None

    def any_is(self, flag: bool, topic: str) -> bool:
        if self.replayed is None:
            self.asked.append((topic, flag))
            return flag
        expected, answer = self.replayed.pop(0)
        assert (topic, flag <= answer) == (expected, True)
        return answer


class SwitchesInTheLoop(Momentum):
    """Sets a switch for each parameter that it steps."""

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        group["calls"] = group.get("calls", 0) + 1
        group["is_late"] = group["calls"] > 20
        return average


def test_a_stage_without_parameters_agrees_on_the_trials_of_the_others() -> None:
    stages = _Stages()
    for params in ([nn.Parameter(torch.ones(4, 3))], []):
        optimizer = SwitchesInTheLoop([nn.Parameter(torch.ones(1))])
        optimizer.param_groups[0].update(params=params, calls=0, is_late=False)
        checks = OptimizerChecks(
            optimizer, {}, attached={}, flat_step=None, gradients=cast(Any, stages), moments=cast(Any, None)
        )
        for _ in range(30):
            checks.begin_step()
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
            checks.end_step()
        if stages.replayed is None:
            assert ("agreement on a trial", True) in stages.asked[10:]
            stages.replayed = stages.asked
    assert not stages.replayed


def _sparse(rank: int, world: int, stage: int) -> None:
    worlds.seed()
    module = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    plain = copy.deepcopy(module)
    engine = ZeroEngine(stage=stage)
    engine.shard(module)
    for make in (torch.optim.AdamW, Momentum, type("Own", (torch.optim.SGD,), {})):
        optimizer = engine.attach(make(module.parameters()))
        module[1](torch.ones(1, 4)).sum().backward()  # the embedding has no gradient
        optimizer.step()
        optimizer.zero_grad()
        with engine.microbatch(last=False):
            module(torch.tensor([1, 3, 1])).square().sum().backward()
        with engine.microbatch(last=True):
            module(torch.tensor([2])).sum().backward()
        with pytest.raises(ValueError, match="`0.weight` has a sparse gradient .* Use `sparse=False`"):
            optimizer.step()
        optimizer.zero_grad()
    plain.load_state_dict({name: engine.full_param(param).detach() for name, param in module.named_parameters()})
    makes = {0: torch.optim.Adagrad, 1: torch.optim.AdamW}
    for index, make in makes.items():
        mine, theirs = (make(model[index].parameters(), lr=0.1) for model in (module, plain))
        engine.attach(mine)
        for model, optimizer in ((module, mine), (plain, theirs)):
            for _ in range(2):
                model(torch.tensor([1, 3, 1])).square().sum().backward()
                optimizer.step()
                model.zero_grad()
    for param, expected in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(engine.full_param(param), expected.detach())
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_sparse_gradients_are_for_optimizers_that_step_dense_ones_alike(stage: int) -> None:
    worlds.run(_sparse, 2, stage)


def _refusal_on_a_grid(rank: int, world: int) -> None:
    alone = [dist.new_group([one]) for one in range(world)][rank]
    linear = nn.Linear(6, 4, bias=False)
    part = Part.along((8, 6), 0, (4 * rank, 4))
    engine = ZeroEngine(stage=0)
    engine.shard(linear, grid=Grid({"data": alone}, 1, {"weight": ParamAxes("data", part=part)}))
    with pytest.raises(ValueError, match="Use stage 0 without `tensor_parallel` or `expert_parallel`, or"):
        engine.attach(Lamb(linear.parameters(), lr=0.1))
    engine.close()


def test_on_parts_of_parameters_the_remedy_is_to_have_none() -> None:
    worlds.run(_refusal_on_a_grid, 2)


def _refusals(rank: int, world: int, stage: int, in_closure: bool) -> None:
    engine, module = _engine(stage)
    *others, last = module.parameters()
    with pytest.raises(ValueError, match="`Lamb` is not element-wise: it gives other numbers .* Use stage 0"):
        engine.attach(Lamb(module.parameters(), lr=0.0))  # a warm-up starts with 0
    groups = [{"params": others, "factored": False}, {"params": [last], "least": 2}]
    with pytest.raises(ValueError, match="`SometimesFactored` is not element-wise"):
        engine.attach(SometimesFactored(groups))
    optimizer = engine.attach(SometimesFactored(groups[:1]))
    with pytest.raises(ValueError, match="`SometimesFactored` is not element-wise"):
        optimizer.add_param_group({"params": [last], "least": 2})
    optimizer.add_param_group({"params": [last], "factored": False})
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(others), 1]
    _backward(engine, module, rank)
    optimizer.param_groups[1].update(lr=0.5, momentum=0.5)
    optimizer.step()

    def closure() -> torch.Tensor:
        optimizer.param_groups[1].update(factored=True, least=2)
        _backward(engine, module, rank)
        return torch.zeros(())

    if not in_closure:
        closure()
    with pytest.raises(ValueError, match="`SometimesFactored` is not element-wise"):
        optimizer.step(closure if in_closure else None)
    engine.close()


@pytest.mark.parametrize("in_closure", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_every_group_and_every_kind_of_options_is_tried_before_it_steps(stage: int, in_closure: bool) -> None:
    """What a closure changed was taken for a change by the optimizer itself."""
    worlds.run(_refusals, 2, stage, in_closure)


def _unlike(rank: int, world: int) -> None:
    engine, module = _engine(1)
    make = type("Momentum", (Lamb,), {}) if rank else Momentum  # ranks compare names first
    with pytest.raises(ValueError, match="is not element-wise" if rank else "`Momentum` is refused by another rank"):
        engine.attach(make(module.parameters()))
    engine.close()


def test_a_refusal_on_one_rank_is_known_to_all() -> None:
    worlds.run(_unlike, 2)


def _without_hooks(rank: int, world: int) -> None:
    engine, module = _engine(1)
    optimizer = Unfinished(torch.optim.SGD(module.parameters(), lr=0.1))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match=r"`Unfinished` does not call `super\(\).__init__\(\)`"):
        engine.attach(optimizer)
    engine.close()


def test_a_wrapper_without_hooks_under_a_scheduler_is_refused() -> None:
    worlds.run(_without_hooks, 2)


def _unattached(rank: int, world: int) -> None:
    engine, module = _engine(2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for call in (engine.internals.steps.open_window, engine.internals.steps.close_window, engine.grad_norm):
        with pytest.raises(RuntimeError, match=r"`SGD` is not attached to the engine. Call `engine.attach"):
            call(optimizer)
    engine.close()


def test_an_optimizer_that_was_not_attached_is_refused() -> None:
    worlds.run(_unattached, 2)


def _stepped_unattached(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage)
    head, others = list(module.head.parameters()), list(module.embedding.parameters())
    first, second = torch.optim.SGD(head, lr=0.1), torch.optim.RMSprop(others, lr=0.1)
    first.step()  # there is no gradient
    _backward(engine, module, rank)
    with pytest.raises(RuntimeError, match=r"A `SGD` steps `head.weight`, .*attached: none.*`engine.attach"):
        first.step()
    engine.attach(first)
    engine.attach(second)
    _backward(engine, module, rank)
    with pytest.raises(RuntimeError, match=r"attached: `RMSprop`.* a second `attach` replaces"):
        first.step()
    assert head[0].grad is not None
    with pytest.raises(RuntimeError, match="is not attached"):  # nor in the window
        first.step()
    second.step()
    engine.attach(first, second)
    first.step()
    second.step()
    engine.close()
    if stage < 3:
        for param in head:
            param.grad = torch.ones_like(param)
        plain = torch.optim.SGD(head, lr=0.1)
        before = head[0].detach().clone()
        plain.step()
        assert torch.equal(head[0], before - 0.1)


@stages
def test_an_optimizer_that_is_not_attached_does_not_step_a_part_in_silence(stage: int) -> None:
    worlds.run(_stepped_unattached, 2, stage)


class _Grows(Momentum):
    """Takes parameters in and scales them, behind those that it has."""

    @torch.no_grad()
    def grow(self, params: list[nn.Parameter], is_first: bool) -> Tensor:
        if not is_first:
            self.param_groups[0]["params"][0].mul_(0.5)
        self.add_param_group({"params": params})
        norms = []
        for param in (param for group in self.param_groups for param in group["params"]):
            param.mul_(0.5)
            norms.append(param.data.norm().as_subclass(Tensor))
        return torch.stack(norms)


def _grown(rank: int, world: int) -> None:
    found = []
    for stage, is_first in ((0, True), (0, False), (2, True), (2, False), (3, False)):
        engine, module = _engine(stage)
        params = list(module.parameters())
        optimizer = engine.attach(_Grows(params[:-2], lr=0.1))
        norms = optimizer.grow(params[-2:], is_first)
        _backward(engine, module, rank)
        optimizer.step()
        found.append((norms, *[engine.full_param(param) for param in params]))
        engine.close()
    torch.testing.assert_close(found[2], found[0])
    torch.testing.assert_close(found[3], found[1])
    torch.testing.assert_close(found[4], found[1])


def test_a_method_may_add_a_group_and_use_parameters() -> None:
    worlds.run(_grown, 2)


def _past_add_param_group(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage)
    head, others = list(module.head.parameters()), list(module.embedding.parameters())
    for make in (torch.optim.RMSprop, torch.optim.SGD):
        optimizer = engine.attach(make(head, lr=0.1))
        _backward(engine, module, rank)
        optimizer.param_groups[0]["params"].append(others[0])
        with pytest.raises(RuntimeError, match=r"got `embedding.weight` .*Use `optimizer.add_param_group\("):
            optimizer.step()
        optimizer.param_groups[0]["params"].pop()
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": others})
        with pytest.raises(RuntimeError, match=r"got `embedding.weight` .*Use `optimizer.add_param_group\("):
            optimizer.step()
        optimizer.param_groups.pop()
        optimizer.add_param_group({"params": others})
        optimizer.step()
    engine.close()


@stages
def test_parameters_put_into_groups_by_hand_are_refused(stage: int) -> None:
    worlds.run(_past_add_param_group, 2, stage)


def _clipped_in_16_bits(rank: int, world: int, stage: Any) -> list[bool]:
    """Clip some of a buffer's gradients, which are kept in 16 bits; say whether there are others in 32 afterwards."""
    module = nn.Linear(4, 4).bfloat16()
    engine = ZeroEngine(stage, precision=MixedPrecision(), communication=Communication(reduce_dtype="bf16"))
    engine.shard(module)
    optimizer = engine.attach(torch.optim.AdamW([module.weight]))
    with engine.scope("training_step"):
        module(torch.ones(2, 4).bfloat16()).sum().backward()
    engine.clip_grad_norm(optimizer, 1e-3)
    gradients = [buffer.gradients for unit in engine._state.units for buffer in unit.buffers]
    found = [any(one._written is not None for one in gradients)]
    optimizer.step()
    found.append(any(one._written is not None for one in gradients))
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_were_clipped_without_a_window_are_kept_in_their_own_dtype_behind_the_step(stage: int) -> None:
    assert worlds.run(_clipped_in_16_bits, 1, stage) == [[True, False]]


def _looks(rank: int, world: int) -> dict[str, int]:
    """Return how often a step looks at all gradients, and at all states."""
    engine, module = _engine(3)
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.01))
    token_loss(module, rank, 0).backward()
    num = dict.fromkeys(("take_gradient", "fits"), 0)
    with pytest.MonkeyPatch.context() as patch:
        for cls, name in ((BufferWindow, "take_gradient"), (FlatStep, "fits")):
            patch.setattr(cls, name, _counted(getattr(cls, name), num))
        optimizer.step()
    return {name: number // len(list(module.parameters())) for name, number in num.items()}


def _counted(function: Callable[..., Any], num: dict[str, int]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        num[function.__name__] += 1
        return function(*args)

    return call


def test_a_step_looks_at_gradients_and_states_once() -> None:
    assert worlds.run(_looks, 1) == [{"take_gradient": 1, "fits": 1}]
