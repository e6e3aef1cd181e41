"""The engine's own interface: what it holds, reads, writes, reports and refuses."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero
from lightning_zero.config import Communication, MixedPrecision
from lightning_zero.engine.buffers.parameter import ReducedParameter, ReleasedParameter
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.errors import CollectiveError, ReleasedParameterError
from tests import worlds
from tests.references import Block, TinyGPT, token_loss
from tests.sampling import sample

STAGES = (0, 1, 2, 3)
stages = pytest.mark.parametrize("stage", STAGES)


def _engine(stage: int, **options: Any) -> tuple[ZeroEngine, nn.Module]:
    worlds.seed()
    engine = ZeroEngine(stage, **{"units": ["Block"], **options})
    return engine, engine.shard(TinyGPT())


def _values(engine: ZeroEngine, module: nn.Module) -> dict[str, Tensor]:
    return {name: engine.full_param(param) for name, param in module.named_parameters()}


def _train(engine: ZeroEngine, module: nn.Module, rank: int, steps: int = 2) -> dict[str, Tensor]:
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.01))
    for step in range(steps):
        token_loss(module, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _values(engine, module)


def _equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


# -- Inference mode ----------------------------------------------------------------------------------------------------


def _after_inference(rank: int, world: int, stage: int, entered: str) -> dict[str, Tensor]:
    """Train; before, validate in inference mode if it is to be entered. Return gradients and weights."""
    engine, module = _engine(stage)
    ids = torch.zeros(1, 3, dtype=torch.long)
    if entered != "never":
        module.eval()
        with torch.inference_mode():
            for _ in range(2):
                if entered == "scope":
                    with engine.scope("validation_step"):
                        module(ids)
                        module.blocks[0].up.weight.sum()
                elif entered == "gathered":
                    with engine.gathered(module):
                        module(ids)
                else:
                    module(ids)
        module.train()
    token_loss(module, rank, 0).backward()
    gradients = {f"gradient of {name}": engine.full_grad(param) for name, param in module.named_parameters()}
    assert not any(grad is None for grad in gradients.values())
    assert not any(param.is_inference() for param in module.parameters())
    result = gradients | _train(engine, module, rank)
    engine.close()
    return result


@pytest.mark.parametrize("stage", sample(STAGES, 1, 3))
def test_validation_in_inference_mode_does_not_stop_the_training(stage: int) -> None:
    expected = worlds.run(_after_inference, 2, stage, "never")
    for entered in ("forward", "scope", "gathered"):
        for mine, theirs in zip(worlds.run(_after_inference, 2, stage, entered), expected, strict=True):
            assert _equal(mine, theirs), entered


# -- Ranks that stop ---------------------------------------------------------------------------------------------------


class _Breaks(Block):
    breaks = False

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            raise KeyError("out of luck")
        return super().forward(x)


def _one_rank_breaks(rank: int, world: int, stage: int, steps: int) -> tuple[str, float]:
    """Rank 1 raises in a forward and is silent from then on; return what rank 0 gets, and after which time."""
    worlds.seed()
    module = TinyGPT(blocks=[_Breaks(), Block(), Block(), Block()])
    engine = ZeroEngine(stage, units=[Block], communication=Communication(timeout_s=1.5))
    engine.shard(module)
    for step in range(steps):
        token_loss(module, rank, step).backward()
    module.blocks[0].breaks = rank == 1
    started = time.monotonic()
    with pytest.raises((CollectiveError, KeyError)) as caught:
        token_loss(module, rank, steps).backward()
    waited = time.monotonic() - started
    assert isinstance(caught.value, CollectiveError if rank == 0 else KeyError)
    dist.barrier()
    return str(caught.value), waited


@pytest.mark.parametrize("steps", [0, 1], ids=["first-step", "later"])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_other_ranks_learn_of_a_rank_that_stopped(stage: int, steps: int) -> None:
    (message, waited), _ = worlds.run(_one_rank_breaks, 2, stage, steps, timeout_s=30.0)
    assert message.startswith("rank 0 of 2: the ")
    assert "unit `" in message
    assert "Every rank must make the same calls" in message
    assert waited < 5


# -- Several engines, several modules ----------------------------------------------------------------------------------


def _two(rank: int, world: int, stage: int) -> None:
    (first, student), (second, teacher) = _engine(stage), _engine(3)
    lone, alone = _engine(stage)
    expected = _train(lone, alone, rank)
    lone.close()
    optimizer = first.attach(torch.optim.AdamW(student.parameters(), lr=0.01))
    before = _values(second, teacher)
    for step in range(2):
        with torch.no_grad():
            teacher(torch.zeros(1, 2, dtype=torch.long))
        with second.scope("predict_step"), torch.no_grad():
            loss = token_loss(teacher, rank, step)
        with first.scope("training_step"):
            loss = token_loss(student, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert _equal(_values(first, student), expected)
    assert _equal(_values(second, teacher), before)
    with (
        pytest.raises(ValueError, match="belong to several engines"),
        lightning_zero.gathered([student.head.weight, teacher.head.weight]),
    ):
        pass
    with lightning_zero.gathered(teacher), lightning_zero.gathered(student):
        assert torch.equal(teacher.head.weight, before["head.weight"])
    first.close()
    token_loss(teacher, rank, 0).backward()
    second.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_two_engines_do_not_know_of_each_other(stage: int) -> None:
    worlds.run(_two, 2, stage)


def test_an_engine_holds_one_module() -> None:
    engine, module = _engine(3)
    assert engine.shard(module) is module
    with pytest.raises(RuntimeError, match="holds another module. Make a new `ZeroEngine`"):
        engine.shard(TinyGPT())


def test_parameters_that_no_engine_holds_are_whole_already() -> None:
    module = TinyGPT()
    with lightning_zero.gathered(module), lightning_zero.gathered(iter(module.parameters())):
        assert type(module.head.weight) is nn.Parameter


@pytest.mark.parametrize(
    "units",
    [Block, "Block", [Block], ("Block", nn.Linear), f"{Block.__module__}.Block", None],
    ids=["class", "name", "classes", "mixed", "dotted", "automatic"],
)
def test_units_may_be_given_in_every_form(units: Any) -> None:
    assert worlds.run(_num_units, 2, units)[0] >= 4


def _num_units(rank: int, world: int, units: Any) -> int:
    engine, module = _engine(3, units=units)
    token_loss(module, rank, 0).backward()
    assert engine.grad_norm() > 0
    found = engine.stats().num_units
    engine.close()
    return found


def test_parameters_on_several_devices_are_refused() -> None:
    module = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    module[1].weight = nn.Parameter(_on_another_device())
    with pytest.raises(ValueError, match=r"on several devices \(cpu, .*\). Pass `device=`"):
        ZeroEngine(0).shard(module)


def _on_another_device() -> Tensor:
    """Return a tensor that says it is elsewhere."""

    class _Elsewhere(Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("xpu", 1)

    return torch.ones(1, 1).as_subclass(_Elsewhere)


# -- Reading and writing -----------------------------------------------------------------------------------------------


def _copies(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage)
    expected = _train(engine, module, rank)
    with engine.gathered(module):
        twin = copy.deepcopy(module)
        stored = pickle.dumps(module.state_dict())
    assert all(type(param) is nn.Parameter for param in twin.parameters())
    assert _equal({name: param.detach() for name, param in twin.named_parameters()}, expected)
    assert _equal(pickle.loads(stored), expected)
    storages = {param.untyped_storage()._cdata for param in twin.parameters()}
    assert not storages & {
        buffer.whole.flat.untyped_storage()._cdata for unit in engine.internals.fits.units for buffer in unit.buffers
    }
    calls = dict(engine.stats().calls)
    token_loss(twin, rank, 0).backward()  # on one rank alone, and without the engine
    assert all(param.grad is not None for param in twin.parameters())
    assert engine.stats().calls == calls
    assert engine.grad_norm() == 0
    token_loss(module, rank, 0).backward()
    assert engine.grad_norm() > 0
    engine.close()


@stages
def test_a_deep_copy_made_inside_gathered_is_a_plain_module(stage: int) -> None:
    worlds.run(_copies, 2, stage)


def _refused_copies(rank: int, world: int) -> None:
    engine, module = _engine(3)
    for copy_of in (copy.deepcopy, pickle.dumps, copy.copy):
        with pytest.raises(ReleasedParameterError, match=r"blocks\.1\.up\.weight"):
            copy_of(module.blocks[1].up.weight)
    for copy_of in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ReleasedParameterError, match="gathered"):
            copy_of(module)
    engine.close()


def test_copies_of_released_parameters_are_refused() -> None:
    worlds.run(_refused_copies, 2)


def _writes(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage)
    weight = module.blocks[0].up.weight
    with engine.gathered(weight, write="rank0"), torch.no_grad():
        weight.fill_(rank + 1.0)
    assert engine.full_param(weight).unique().tolist() == [1.0]
    with engine.gathered([weight], write="all"), torch.no_grad():
        weight.mul_(3)
    assert engine.full_param(weight).unique().tolist() == [3.0]
    message = "unit `blocks.0` was changed inside `gathered`"
    with pytest.raises(RuntimeError, match=message), engine.gathered(weight), torch.no_grad():
        weight.add_(1)
    with (
        pytest.raises(ValueError, match="`write='rank1'` is not known. Use None, 'rank0' or 'all'"),
        engine.gathered(
            weight,
            write="rank1",  # type: ignore[arg-type]
        ),
    ):
        pass
    with engine.gathered(module), engine.gathered(weight):
        assert type(module.head.weight) is (ReducedParameter if stage == 3 else nn.Parameter)
    assert (type(weight) is ReleasedParameter) == (stage == 3)
    engine.close()


@stages
def test_writes_inside_gathered_are_taken_from_whom_was_said(stage: int) -> None:
    worlds.run(_writes, 2, stage)


def _one_rank_leaves(rank: int, world: int, stage: int, failing: int) -> str:
    engine, module = _engine(stage)
    text = ""
    try:
        with engine.gathered(module, write="rank0"), torch.no_grad():
            for param in module.parameters():
                param.fill_(rank + 1.0)
            if rank == failing:
                raise LookupError("of this rank")
    except (LookupError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
    for param in module.parameters():  # the next collectives
        assert engine.full_param(param).unique().tolist() == [1.0]
    engine.close()
    return text


@stages
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_rank_inside_gathered_is_told_to_the_others(stage: int, failing: int) -> None:
    texts = worlds.run(_one_rank_leaves, 2, stage, failing)
    assert texts[failing] == "LookupError: of this rank"
    assert f"Rank(s) [{failing}] left `gathered(..., write='rank0')` with an error" in texts[1 - failing]


def _alone(rank: int, world: int) -> None:
    """Inside gathered a rank may run forwards on its own."""
    engine, module = _engine(3)
    with engine.gathered(module), torch.no_grad():
        calls = dict(engine.stats().calls)
        if rank == 0:
            for _ in range(3):
                module(torch.zeros(1, 2, dtype=torch.long))
                with engine.scope("predict_step"):
                    module(torch.zeros(1, 2, dtype=torch.long))
        assert engine.stats().calls == calls
    _train(engine, module, rank)
    engine.close()


def test_inside_gathered_one_rank_alone_may_compute() -> None:
    worlds.run(_alone, 2)


def _whole(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage, precision=MixedPrecision(compute_dtype=torch.bfloat16))
    values = _values(engine, module)
    assert {value.dtype for value in values.values()} == {torch.float32}
    worlds.seed()
    assert _equal(values, {name: param.detach() for name, param in TinyGPT().named_parameters()})
    plain = engine.unshard()
    assert plain is module
    assert engine.module is None
    assert _equal({name: param.detach() for name, param in plain.named_parameters()}, values)
    token_loss(plain, rank, 0).backward()
    assert all(param.grad is not None for param in plain.parameters())


@stages
def test_unshard_gives_the_plain_module_back_in_its_own_dtype(stage: int) -> None:
    worlds.run(_whole, 2, stage)


def _foreign(rank: int, world: int) -> None:
    engine, module = _engine(3)
    for call in (engine.full_param, engine.full_grad):
        with pytest.raises(ValueError, match=r"shape \(2,\) is not a parameter of the sharded module"):
            call(nn.Parameter(torch.ones(2)))
    engine.close()


def test_a_parameter_of_another_module_is_refused() -> None:
    worlds.run(_foreign, 2)


CALLS: dict[str, Callable[[ZeroEngine], Any]] = {
    "full_param": lambda engine: engine.full_param(nn.Parameter(torch.ones(1))),
    "grad_norm": lambda engine: engine.grad_norm(),
    "attach": lambda engine: engine.attach(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)),
    "stats": lambda engine: engine.stats(),
    "plan": lambda engine: engine.plan(),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_calls_before_shard_say_what_is_missing(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"holds no module yet. Call `engine.shard\(module\)` first"):
        CALLS[name](ZeroEngine(2))


# -- Records -----------------------------------------------------------------------------------------------------------


def _records(rank: int, world: int, stage: int) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    worlds.seed()
    engine = ZeroEngine(stage, units=["Block"])
    module = engine.shard(TinyGPT(tied=True))
    engine.attach(torch.optim.AdamW(module.blocks.parameters()))
    records = engine.records()
    params = dict(module.named_parameters())
    assert [record.name for record in records] == list(params)
    for record in records:
        assert record.parameter is params[record.name]
        assert record.shape == params[record.name].shape
        assert record.trained == record.name.startswith("blocks")
        whole = engine.full_param(record.parameter).reshape(-1)
        assert torch.equal(record.master(), whole[slice(*record.own_range)])
    assert records[0].aliases == ("embedding.weight", "head.weight")
    for record in records:
        record.master().fill_(0.5)
    engine.internals.checkpoints.publish()
    with engine.gathered(module):
        assert all(bool((param == 0.5).all()) for param in module.parameters())
    engine.close()
    return [(record.name, record.save_range, record.own_range) for record in records]


@stages
def test_the_ranges_of_all_ranks_tile_every_parameter_once(stage: int) -> None:
    found = worlds.run(_records, 3, stage)
    numels = {name: param.numel() for name, param in TinyGPT(tied=True).named_parameters()}
    for ranks in zip(*found, strict=True):
        name = ranks[0][0]
        elements = [element for _, saved, _ in ranks for element in range(*saved)]
        assert elements == list(range(numels[name]))
        for _, saved, own in ranks:
            assert own == (saved if stage else (0, numels[name]))


# -- Reports -----------------------------------------------------------------------------------------------------------


def _stats(rank: int, world: int, stage: int) -> None:
    engine, module = _engine(stage)
    stats = engine.stats()
    assert (stats.stage, stats.world_size, stats.num_units) == (stage, world, 4)
    assert sum(stats.traffic.values()) == stats.wait_s == 0  # sharding itself is not counted
    _train(engine, module, rank)
    stats = engine.stats()
    assert set(stats.memory) == {"parameters", "gradients", "optimizer", "gathered"}
    assert {"all_gather", "reduce_scatter", "broadcast", "control"} <= set(stats.traffic)
    assert stats.calls["reduce_scatter"] == 2 * 4
    assert stats.wait_s > 0
    assert (stats.peak_gathered > 0) == (stage == 3)
    engine.internals.fits.reset_stats()
    assert sum(engine.stats().calls.values()) == 0
    plan = engine.plan()
    assert 4 <= len(plan) <= 7
    assert plan[0].startswith(f"ZeRO stage {stage} on {world} rank(s), cpu: {_numel():,} parameters")
    assert "units: 4, the largest `blocks.0`" in plan[1]
    (sent,) = [line for line in plan if line.startswith("sent per rank and step")]
    assert ("more in each further micro-batch" in sent) == (stage >= 2)
    assert ("their average" in sent) == (stage == 0)
    engine.close()


def _numel() -> int:
    return sum(param.numel() for param in TinyGPT().parameters())


@stages
def test_the_reports_say_what_is_held_and_sent(stage: int) -> None:
    worlds.run(_stats, 2, stage)


def _alone_in_the_world(rank: int, world: int) -> dict[str, Tensor]:
    found = []
    for stage in STAGES:
        engine, module = _engine(stage)
        found.append(_train(engine, module, rank))
        assert type(module.head.weight) is nn.Parameter
        assert sum(engine.stats().traffic.values()) == 0
        engine.close()
    assert all(_equal(values, found[0]) for values in found)
    return found[0]


def test_one_rank_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    _alone_in_the_world(0, 1)


def _ids(rank: int, world: int, stage: int) -> None:
    worlds.seed()
    module = TinyGPT()
    before = [id(param) for param in module.parameters()]
    engine = ZeroEngine(stage)
    engine.shard(module)
    _train(engine, module, rank)
    assert [id(param) for param in module.parameters()] == before
    assert all(engine.param_name(param) == name for name, param in module.named_parameters())
    engine.close()
    if stage < 3:
        assert all(bool(param.isfinite().all()) for param in module.parameters())


@stages
def test_parameters_keep_their_identity(stage: int) -> None:
    worlds.run(_ids, 2, stage)


def _module_buffers(rank: int, world: int, stage: int) -> list[float]:
    worlds.seed(rank)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    module[1].running_mean.fill_(rank + 1.0)
    engine = ZeroEngine(stage)
    engine.shard(module)
    found = [module[1].running_mean[0].item()]
    module[1].running_mean.fill_(rank + 5.0)
    with engine.scope("validation_step"):
        found.append(module[1].running_mean[0].item())
    assert module[1].num_batches_tracked.dtype == torch.int64
    engine.close()
    return found


@stages
def test_module_buffers_are_those_of_rank_zero_in_every_scope(stage: int) -> None:
    assert worlds.run(_module_buffers, 2, stage) == [[1.0, 5.0]] * 2


# -- A unit that is frozen while its gradients wait --------------------------------------------------------------------


def _frozen_between_microbatches(rank: int, world: int) -> None:
    engine, module = _engine(1)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    for last in (False, True):
        with engine.microbatch(last):
            token_loss(module, rank, int(last)).backward()
        module.blocks[1].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(RuntimeError, match=r"All parameters of `blocks\.1` were frozen .* freeze them behind a step"):
        optimizer.step()


def test_a_unit_that_is_frozen_between_micro_batches_is_named() -> None:
    worlds.run(_frozen_between_microbatches, 2)
