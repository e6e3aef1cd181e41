"""Wherever a shard is stored and whenever it is stepped, the bits are those of training in memory."""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_zero.checkpoint.export import export_safetensors
from lightning_zero.config import MixedPrecision, Offload
from lightning_zero.engine.buffers.parameter import PendingParameter, ReducedParameter
from lightning_zero.engine.buffers.update import Update
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.optim import step_rules
from lightning_zero.engine.optim.flat_step import FlatStep
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.lightning_programs import Net, assert_equal, loader, seeded, trainer, weights
from tests.references import Outcome, TinyGPT, difference, token_loss, tokens, train, train_zero
from tests.sampling import sample

STEPS = 4
PRECISIONS = {"fp32": MixedPrecision(), "bf16-mixed": MixedPrecision(compute_dtype=torch.bfloat16)}


def adamw(module: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, **options)


OPTIMIZERS = {
    "adamw": adamw,
    "adamw-loop": partial(adamw, fused=False),
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
    "rmsprop": lambda module: torch.optim.RMSprop(module.parameters(), lr=1e-2),
}


def _loss(lowered: bool, module: nn.Module, rank: int, step: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
        return token_loss(module, rank, step)


def _trained(
    rank: int, world: int, stage: int, precision: str, optimizer: str, steps: int = STEPS, **options: Any
) -> Outcome:
    program = partial(
        train,
        loss=partial(_loss, precision != "fp32"),
        optimizer=OPTIMIZERS[optimizer],
        steps=steps,
        micro_batches=2,
        max_norm=0.5,
    )
    return train_zero(
        TinyGPT, program, rank, world, stage=stage, precision=PRECISIONS[precision], units=["Block"], **options
    )


def _compare(
    rank: int, world: int, stage: int, precision: str, optimizer: str, placements: list[Any], **options: Any
) -> list[str]:
    expected = _trained(rank, world, stage, precision, optimizer, **options)
    return [
        difference(_trained(rank, world, stage, precision, optimizer, **placement, **options), expected)
        for placement in placements
    ]


def _compare_long(rank: int, world: int, *case: Any) -> list[str]:
    return _compare(rank, world, *case, steps=50)


PLACEMENTS = [
    {"step": "deferred"},
    {"offload": "cpu"},
    {"offload": "cpu", "step": "now"},
    {"offload": Offload(optimizer="cpu", fraction=0.5)},
]
AT_STAGE_3 = [
    {"offload": Offload(optimizer="cpu", params="cpu")},
    {"offload": Offload(optimizer=None, params="cpu")},
]

CASES = [
    (world, stage, precision, optimizer)
    for world in (1, 2)
    for stage in (0, 1, 2, 3)
    for precision in PRECISIONS
    for optimizer in OPTIMIZERS
]


@pytest.mark.parametrize(
    "case",
    sample(CASES, (2, 3, "bf16-mixed", "adamw"), (2, 1, "fp32", "adamw"), (1, 2, "bf16-mixed", "rmsprop")),
    ids=lambda case: "{}ranks-stage{}-{}-{}".format(*case),
)  # fmt: skip
def test_every_placement_gives_the_same_bits(case: tuple[int, int, str, str]) -> None:
    world, stage, precision, optimizer = case
    placements = PLACEMENTS + (AT_STAGE_3 if stage == 3 else [])
    for found in worlds.run(_compare, world, stage, precision, optimizer, placements):
        assert not any(found), dict(zip(map(str, placements), found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3], ids="stage{}".format)
def test_every_placement_gives_the_same_bits_after_fifty_steps(stage: int, precision: str, world: int) -> None:
    at_stage_3 = [{**placement, "step": step} for placement in AT_STAGE_3 for step in ("deferred", "now")]
    placements = PLACEMENTS + (at_stage_3 if stage == 3 else [])
    for found in worlds.run(_compare_long, world, stage, precision, "adamw", placements, timeout_s=240.0):
        assert not any(found), dict(zip(map(str, placements), found, strict=True))


def _compare_moments(rank: int, world: int, moments: str, stage: int) -> list[str]:
    placements = PLACEMENTS + (AT_STAGE_3 if stage == 3 else [])
    return _compare(rank, world, stage, "bf16-mixed", "adamw", placements, moments=moments)


@pytest.mark.parametrize(
    "case",
    sample([(world, moments, stage) for world in (1, 2) for moments in ("bf16", "int8") for stage in (0, 1, 2, 3)],
           (2, "int8", 3)),
    ids=lambda case: "{}ranks-{}-stage{}".format(*case),
)  # fmt: skip
def test_moments_of_fewer_bytes_have_the_same_bits_wherever_they_are(case: tuple[int, str, int]) -> None:
    world, *options = case
    for found in worlds.run(_compare_moments, world, *options):
        assert not any(found), found


# -- Steps that are made later -----------------------------------------------------------------------------------------


def _started(stage: int, **options: Any) -> tuple[ZeroEngine, nn.Module, Optimizer]:
    worlds.seed()
    engine = ZeroEngine(stage, units=["Block"], **options)
    module = engine.shard(TinyGPT())
    return engine, module, engine.attach(adamw(module))


def _step(engine: ZeroEngine, module: nn.Module, optimizer: Optimizer, number: int) -> None:
    optimizer.zero_grad()
    with engine.scope("training_step"):
        loss = token_loss(module, engine.rank, number)
    with engine.backward_scope():
        loss.backward()
    optimizer.step()


def _values(engine: ZeroEngine, module: nn.Module) -> dict[str, Tensor]:
    return {name: engine.full_param(param) for name, param in module.named_parameters()}


def _same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(mine[name], value) for name, value in theirs.items())


def clamp(engine: ZeroEngine, module: nn.Module, optimizer: Optimizer) -> None:
    with engine.gathered(module, write="all"), torch.no_grad():
        for param in module.parameters():
            param.clamp_(-0.05, 0.05)


def clamp_in_the_open(engine: ZeroEngine, module: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.clamp_(-0.05, 0.05)


def clamp_data(engine: ZeroEngine, module: nn.Module, optimizer: Optimizer) -> None:
    for param in module.parameters():
        param.data.clamp_(-0.05, 0.05)


def move_options(engine: ZeroEngine, module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def forget_gradients(engine: ZeroEngine, module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def step_again(engine: ZeroEngine, module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()


def read_states(engine: ZeroEngine, module: nn.Module, optimizer: Optimizer) -> None:
    for record in engine.records():
        for value in record.state(optimizer).values():
            assert torch.isfinite(value).all()
            value.mul_(1.0)


def evaluate(engine: ZeroEngine, module: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad(), engine.scope("validation_step"):
        token_loss(module, 0, 99)


ACTS = [clamp, move_options, forget_gradients, step_again, read_states, evaluate]
IN_THE_OPEN = [clamp_in_the_open, clamp_data]


def _act_between_steps(rank: int, world: int, stage: int) -> list[str]:
    wrong = []
    for act in ACTS + (IN_THE_OPEN if stage < 3 else []):
        results = []
        for options in ({"step": "now"}, {"step": "deferred"}, {"offload": "cpu"}):
            engine, module, optimizer = _started(stage, **options)
            for number in range(3):
                _step(engine, module, optimizer, number)
                act(engine, module, optimizer)
            results.append(_values(engine, module))
            engine.close()
        wrong += [f"{act.__name__} {kind}" for kind, values in zip(("deferred", "offloaded"), results[1:], strict=True)
                  if not _same(values, results[0])]  # fmt: skip
    return wrong


@pytest.mark.parametrize("world", sample([1, 2], 2))
@pytest.mark.parametrize("stage", sample((0, 1, 2, 3), 3), ids="stage{}".format)
def test_what_is_done_between_a_step_and_the_next_forward_sees_the_step(stage: int, world: int) -> None:
    for wrong in worlds.run(_act_between_steps, world, stage):
        assert not wrong


def _states_right_after_a_step(rank: int, world: int, stage: int) -> None:
    run = Update._run

    def late(update: Update) -> None:
        time.sleep(0.05)
        run(update)

    seen = []
    for options in ({"step": "now"}, {"step": "deferred"}, {"offload": "cpu"}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Update, "_run", late)
            engine, module, optimizer = _started(stage, **options)
            for look in (lambda o=optimizer: o.state_dict()["state"], lambda o=optimizer: list(o.state.values()),
                         lambda o=optimizer, e=engine: [record.state(o) for record in e.records()]):  # fmt: skip
                _step(engine, module, optimizer, 0)
                seen.append(copy.deepcopy(look()))
            _step(engine, module, optimizer, 0)
            engine.internals.fits.detach()
            seen.append(copy.deepcopy(list(optimizer.state.values())))
            engine.close()
    leaves = [[leaf.as_subclass(torch.Tensor) for leaf in tree_leaves(one) if torch.is_tensor(leaf)] for one in seen]
    for index in range(4):
        for other in (leaves[4 + index], leaves[8 + index]):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other, leaves[index], strict=True))


@pytest.mark.parametrize("stage", sample((1, 3), 3), ids="stage{}".format)
def test_whoever_looks_at_the_states_sees_the_step(stage: int) -> None:
    worlds.run(_states_right_after_a_step, 2, stage)


def _is_deferred(rank: int, world: int, stage: int) -> None:
    for options, expected in (({}, False), ({"step": "deferred"}, True), ({"offload": "cpu"}, True)):
        engine, module, optimizer = _started(stage, **options)
        before = {name: param.detach().clone() for name, param in module.named_parameters()} if stage < 3 else {}
        _step(engine, module, optimizer, 0)
        engine.stats()  # looks at sizes only
        pending = [buffer.values._update is not None for buffer in engine._state.buffers]
        assert all(pending) if expected else not any(pending)
        if stage < 3:
            kinds = {type(param) for param in module.parameters()}
            assert kinds == ({PendingParameter} if expected else {nn.Parameter, ReducedParameter} & kinds)
            assert not torch.equal(copy.deepcopy(module).head.weight, before["head.weight"])
            assert not any(type(param) is PendingParameter for param in module.parameters())
            assert "grad" in repr(module.head.weight)
        engine.flush()
        assert not any(buffer.values._update for buffer in engine._state.buffers)
        engine.close()


@pytest.mark.parametrize("stage", [0, 2, 3], ids="stage{}".format)
def test_a_step_is_deferred_where_it_should_be_and_a_touch_makes_it(stage: int) -> None:
    worlds.run(_is_deferred, 2, stage)


def _steps_in_captures(rank: int, world: int) -> None:
    engine, module, optimizer = _started(1, step="deferred")
    _step(engine, module, optimizer, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_initialized", lambda: True)
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="is deferred, and a CUDA graph is being captured.*engine.flush"):
            module(tokens(rank, 0))
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
        engine.flush()
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
        _step(engine, module, optimizer, 0)
        assert not any(buffer.values._update for buffer in engine._state.buffers)
    engine.close()


def test_a_step_in_a_captured_graph_is_made_there_and_one_from_before_is_refused() -> None:
    worlds.run(_steps_in_captures, 1)


def _failing(rank: int, world: int) -> None:
    engine, module, optimizer = _started(3, offload="cpu")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_zero.engine.optim.step_rules.adamw.pytorch_step_", fail)
        rule = dataclasses.replace(step_rules.ADAM, step=fail)
        patch.setitem(step_rules.RULES, torch.optim.AdamW, rule)
        engine, module, optimizer = _started(3, offload="cpu")
        _step(engine, module, optimizer, 0)
    with pytest.raises(RuntimeError, match="deferred step of unit `.*` failed: no room"):
        engine.flush()


def test_an_error_in_a_deferred_step_names_the_unit() -> None:
    worlds.run(_failing, 2)


def _after_an_error(rank: int, world: int, options: dict[str, Any], error: type[BaseException]) -> None:
    run, calls = Update._run, 0

    def fail(update: Update) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error
        run(update)

    engine, module, optimizer = _started(3, **options)
    _step(engine, module, optimizer, 0)
    checkpoints = engine.internals.checkpoints
    saved = [record.master().clone() for record in checkpoints.records()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Update, "_run", fail)
        _step(engine, module, optimizer, 1)
        for number in range(3):
            kind = RuntimeError if number or issubclass(error, Exception) else error
            with pytest.raises(kind):
                engine.flush()
            assert checkpoints.progress["optimizer 0"] == "inside a step"
    for look in (lambda: _step(engine, module, optimizer, 2), lambda: _values(engine, module),
                 lambda: list(optimizer.state.values()), lambda: optimizer.state_dict(),
                 lambda: [record.master() for record in checkpoints.records()],
                 lambda: [record.state(optimizer) for record in checkpoints.records()]):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"failed: {error.__name__}.* go on from the last checkpoint"):
            look()
    engine.internals.fits.pause()
    assert checkpoints.progress["optimizer 0"] == "inside a step"
    checkpoints.prepare_load()
    records = checkpoints.records()
    for record, values in zip(records, saved, strict=True):
        record.master().copy_(values)
    torn = next(buffer for buffer in engine._state.buffers if buffer.values.are_torn)
    others = [record for record in records if record.parameter is not torn.params[0]]
    for loaded in ((), others):  # a swap with averages, a file without one parameter
        checkpoints.publish(loaded)
        assert checkpoints.progress["optimizer 0"] == "inside a step"
        with pytest.raises(RuntimeError, match="a step of an optimizer was interrupted"):
            export_safetensors(engine, "model")
    checkpoints.publish(records)
    assert "optimizer 0" not in checkpoints.progress
    for record, values in zip(checkpoints.records(), saved, strict=True):
        assert torch.equal(record.master(), values)
    engine.close()


@pytest.mark.parametrize(
    ("options", "error"),
    [({"step": "deferred"}, MemoryError), ({"step": "deferred"}, KeyboardInterrupt), ({"offload": "cpu"}, MemoryError)],
    ids=["deferred", "interrupted", "offloaded"],
)
def test_a_deferred_step_that_failed_is_not_forgotten(options: dict[str, Any], error: type[BaseException]) -> None:
    worlds.run(_after_an_error, 1, options, error)


def _sharded_anew(rank: int, world: int) -> None:
    run, calls = Update._run, 0

    def fail(update: Update) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        run(update)

    module = seeded(Net)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Update, "_run", fail)
        with pytest.raises(RuntimeError, match="failed: MemoryError"):
            trainer(rank, world, ZeroStrategy(stage=3, step="deferred")).fit(module, loader(rank, world))
    strategy = ZeroStrategy(stage=2)
    with pytest.warns(UserWarning, match="Training goes on from parameters of which some .* `trainer.fit"):
        trainer(rank, world, strategy).fit(module, loader(rank, world))
    assert "parameters" not in strategy.engine.internals.checkpoints.progress


def test_a_run_that_is_sharded_anew_warns_of_a_deferred_step_that_failed() -> None:
    worlds.run(_sharded_anew, 1)


def _loaded_after_an_error(rank: int, world: int, options: dict[str, Any]) -> None:
    take_calls = FlatStep.take_calls

    def fail() -> None:
        raise MemoryError

    engine, module, optimizer = _started(3, precision=PRECISIONS["bf16-mixed"], **options)
    checkpoints = engine.internals.checkpoints
    with engine.scope("training_step"):
        loss = _loss(True, module, rank, 0)
    with engine.backward_scope():
        loss.backward()

    def step() -> None:
        optimizer.step()
        engine.flush()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatStep, "take_calls", lambda step, buffer: [fail, *take_calls(step, buffer)])
        with pytest.raises((MemoryError, RuntimeError)):
            step()
    checkpoints.prepare_load()
    for record in checkpoints.records():
        record.master().fill_(0.5)
    checkpoints.publish()
    for buffer in engine._state.buffers:
        assert bool((buffer.values.computed == buffer.values.stepped.to(buffer.values.computed.dtype)).all())
    engine.close()


@pytest.mark.parametrize("options", [{"step": "now"}, {"step": "deferred"}, {"offload": "cpu"}], ids=str)
def test_values_that_are_loaded_after_an_error_in_a_step_are_rounded(options: dict[str, Any]) -> None:
    worlds.run(_loaded_after_an_error, 1, options)


def _after_an_interrupted_wait(rank: int, world: int) -> bool:
    run, result = Update._run, Future.result
    may_run = threading.Event()

    def late(update: Update) -> None:
        may_run.wait(10.0)
        run(update)

    def interrupt(future: Future[Any], timeout: float | None = None) -> Any:
        raise KeyboardInterrupt

    values = []
    for is_interrupted in (False, True):
        engine, module, optimizer = _started(3, offload="cpu")
        with pytest.MonkeyPatch.context() as patch:
            if is_interrupted:
                patch.setattr(Update, "_run", late)
            _step(engine, module, optimizer, 0)
            if is_interrupted:
                patch.setattr(Future, "result", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    engine.flush()
                with pytest.raises(KeyboardInterrupt):
                    list(optimizer.state.values())
                patch.setattr(Future, "result", result)
                threading.Timer(0.1, may_run.set).start()
            states = [dict(record.state(optimizer)) for record in engine.internals.checkpoints.records()]
        values.append([*_values(engine, module).values(), *(state["exp_avg"].clone() for state in states)])
        engine.close()
    return all(torch.equal(mine, theirs) for mine, theirs in zip(*values, strict=True))


def test_an_interrupted_wait_for_a_deferred_step_is_made_up_for() -> None:
    assert worlds.run(_after_an_interrupted_wait, 1) == [True]


def _with_two_optimizers(rank: int, world: int, stage: int) -> list[bool]:
    results = []
    for options in ({"step": "now"}, {"step": "deferred"}, {"offload": "cpu"}):
        worlds.seed()
        engine = ZeroEngine(stage, units=["Block"], **options)
        module = engine.shard(TinyGPT())
        params = list(module.parameters())
        optimizers = [torch.optim.AdamW(params[start::2], lr=1e-2) for start in (0, 1)]
        engine.attach(*optimizers)
        for number in range(2):
            with engine.scope("training_step"):
                loss = token_loss(module, rank, number)
            with engine.backward_scope():
                loss.backward()
            for optimizer in optimizers:
                engine.clip_grad_norm(optimizer, 1e-3)
                optimizer.step()
                optimizer.zero_grad()
        results.append(_values(engine, module))
        engine.close()
    return [_same(values, results[0]) for values in results[1:]]


@pytest.mark.parametrize("stage", [1, 3], ids="stage{}".format)
def test_gradients_of_a_step_that_is_due_outlive_zero_grad_beside_another_optimizer(stage: int) -> None:
    for same in worlds.run(_with_two_optimizers, 2, stage):
        assert all(same)


# -- Bytes -------------------------------------------------------------------------------------------------------------


def _bytes(rank: int, world: int, stage: int, offload: Any) -> tuple[dict[str, int], dict[str, int], int]:
    engine, module, optimizer = _started(stage, offload=offload, step="now", precision=PRECISIONS["bf16-mixed"])
    with torch.autocast("cpu", torch.bfloat16):
        _step(engine, module, optimizer, 0)
    stats = engine.stats()
    return stats.memory, stats.host, sum(param.numel() for param in module.parameters())


@pytest.mark.parametrize("world", sample([1, 2], 2))
@pytest.mark.parametrize("stage", sample([1, 2, 3], 2, 3), ids="stage{}".format)
def test_masters_states_and_gradients_are_in_host_memory(stage: int, world: int) -> None:
    expected = worlds.run(_bytes, world, stage, None)
    for (inside, nothing, _), (device, host, _) in zip(expected, worlds.run(_bytes, world, stage, "cpu"), strict=True):
        assert not any(nothing.values())
        assert device["optimizer"] == 0
        assert device["parameters"] == inside["parameters"]
        assert host["optimizer"] >= inside["optimizer"]  # norms compute in fp32, and have a master too
        if stage >= 2:
            assert (device["gradients"], host["gradients"]) == (0, inside["gradients"])


def test_parameters_are_in_host_memory_at_stage_3() -> None:
    inside = worlds.run(_bytes, 2, 3, None)
    for (memory, _, _), (device, host, _) in zip(
        inside, worlds.run(_bytes, 2, 3, Offload(optimizer="cpu", params="cpu")), strict=True
    ):
        assert (device["parameters"], host["parameters"]) == (0, memory["parameters"])


WIDTH, DEPTH = 64, 12


def _device_peak(rank: int, world: int, stage: int) -> tuple[int, int, int]:
    """Return the most bytes that were outside of host memory, the parameters and those of the largest unit."""
    engine = ZeroEngine(stage, units=["Linear"], offload="cpu", precision=PRECISIONS["bf16-mixed"])
    module = engine.shard(nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]))
    optimizer = engine.attach(adamw(module))
    for _ in range(3):
        optimizer.zero_grad()
        with engine.scope("training_step"), torch.autocast("cpu", torch.bfloat16):
            loss = module(torch.ones(1, WIDTH)).float().square().mean()
        with engine.backward_scope():
            loss.backward()
        engine.clip_grad_norm(optimizer, 0.5)
        optimizer.step()
    store = engine._state.sharded.store
    peak = sum(store.peak(kind) for kind in ("parameters", "gradients", "optimizer", "gathered"))
    assert sum(engine.stats().memory.values()) <= peak
    return peak, WIDTH * WIDTH * DEPTH, WIDTH * WIDTH


@pytest.mark.parametrize("world", sample([1, 2], 2))
@pytest.mark.parametrize("stage", sample([1, 2, 3], 2, 3), ids="stage{}".format)
def test_the_device_holds_parameters_and_two_units(stage: int, world: int) -> None:
    shards = world if stage == 3 else 1
    bytes_per_param = 2 / shards + (4 if stage == 1 else 0)
    for peak, numel, unit in worlds.run(_device_peak, world, stage):
        two_units = 2 * (2 + 4 + 4 / world) * unit  # parameters, gradients, and their average on the way home
        assert peak <= bytes_per_param * numel + two_units


# -- Through the Trainer -----------------------------------------------------------------------------------------------


SAVED = [
    {"stage": 1, "offload": "cpu"},
    {"stage": 2, "offload": {"optimizer": "cpu", "fraction": 0.5}, "step": "now"},
    {"stage": 2, "step": "deferred"},
    {"stage": 3, "offload": {"optimizer": "cpu", "params": "cpu"}},
    {"stage": 3},
]
RESUMED = [{"stage": 3, "offload": "cpu"}, {"stage": 3, "offload": {"params": "cpu"}}, {"stage": 1}]


def _fit(rank: int, world: int, folder: str, precision: Any) -> None:
    settings: dict[str, Any] = {"precision": precision, "gradient_clip_val": 0.1}
    plain = trainer(rank, world, ZeroStrategy(stage=3), max_epochs=2, **settings)
    plain.fit(seeded(Net), loader(rank, world))
    for number, options in enumerate(SAVED):
        path = f"{folder}/{number}.ckpt"
        first = trainer(rank, world, ZeroStrategy(**options), max_epochs=1, **settings)
        first.fit(seeded(Net), loader(rank, world))
        first.save_checkpoint(path)
        for others in RESUMED[number % 2 :: 2]:
            again = trainer(rank, world, ZeroStrategy(**others), max_epochs=2, **settings)
            again.fit(seeded(Net), loader(rank, world), ckpt_path=path)
            assert_equal(weights(again), weights(plain), what=f"{options} -> {others}")


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-true", marks=pytest.mark.always)])
def test_fits_resume_across_placements(precision: str, tmp_path: Path) -> None:
    worlds.run(_fit, 2, str(tmp_path), precision)


def _rounded(rank: int, world: int, folder: str) -> None:
    path, batches = f"{folder}/a.ckpt", loader(rank, world)

    def make(stage: int, offload: str | None) -> Trainer:
        options = {"precision": "bf16-true", "max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1}
        return trainer(rank, world, ZeroStrategy(stage=stage, offload=offload), **options)

    def says(act: Callable[[], Any]) -> bool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            act()
        return any("those of a checkpoint, rounded to 16 bits" in str(one.message) for one in caught)

    first = make(3, None)
    first.fit(seeded(Net), batches)
    first.save_checkpoint(path)
    for offload in ("cpu", None):
        for stage, resumed in ((3, None), (2, None), (2, path)):
            module, evaluation = Net(), make(3, offload)
            evaluation.validate(module, batches, ckpt_path=path, verbose=False)
            assert says(partial(evaluation.save_checkpoint, f"{folder}/b.ckpt")) == bool(offload)
            assert says(partial(export_safetensors, module, f"{folder}/b", overwrite=True)) == bool(offload)
            fit = make(stage, offload)
            assert says(partial(fit.fit, module, batches, ckpt_path=resumed)) == (bool(offload) and resumed is None)
            assert not says(partial(fit.save_checkpoint, f"{folder}/c.ckpt"))


def test_rounded_values_of_an_offloaded_evaluation_are_told_where_they_are_used(tmp_path: Path) -> None:
    """A save and a fit behind `validate(ckpt_path=...)` had them without a word."""
    worlds.run(_rounded, 1, str(tmp_path))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Offload(optimizer="nvme"), "`path` says in which directories 'nvme' keeps its files"),
        (lambda: Offload(path="/tmp"), "`Offload.optimizer='cpu', params=None, path='/tmp'.`.*Give both or neither"),
        (lambda: Offload(optimizer="nvme", path="/tmp", buffer_bytes=5000), "`Offload.buffer_bytes=5000.` must be a"),
        (lambda: Offload(io_threads=0), "`Offload.io_threads=0.` must be a whole number"),
        (lambda: ZeroStrategy(offload="nvme"), "`offload='nvme'` needs a path"),
        (
            lambda: ZeroStrategy(pipeline=2, offload={"optimizer": "nvme", "path": "/tmp"}),
            "`pipeline` with `Offload.optimizer='nvme'.` or",
        ),
        (lambda: ZeroStrategy(offload="disk"), "`offload='disk'` is not known"),
        (lambda: Offload(params="gpu"), "`Offload.params='gpu'.` is not known"),
        (lambda: Offload(fraction=1.5), "`Offload.fraction=1.5.` must be a number from 0 to 1"),
        (lambda: ZeroStrategy(stage=2, offload=Offload(params="cpu")), "needs `stage=3`.*got `stage=2`"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
