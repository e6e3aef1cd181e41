"""Run random pipeline programs beside plain PyTorch, and say where they differ."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero.config import Pipeline
from lightning_zero.errors import PipelineError
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.fuzz.pipelines import PipelineProgram, batches, module_of, show, smaller
from tests.lightning_programs import trainer

__all__ = ["Outcome", "check", "check_all", "report", "shrunk"]

Mutant = Callable[[], AbstractContextManager[None]]
TIMEOUT_S = 20.0
TOLERANCE = 1e-9  # of weights; everything is computed in float64
TOLERANCE_LOGGED = 1e-6  # relative, of losses and logged values, which are averaged in float32


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        kind: It trained alike; it was refused by name; PyTorch refuses it without a pipeline; it differs; it raised
            something else.
        text: What a person reads.
    """

    kind: Literal["alike", "refused", "invalid", "differs", "error"]
    text: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the pipeline is wrong."""
        return self.kind in ("differs", "error")


@dataclass
class _Trained:
    """What a training leaves."""

    losses: list[float]
    logged: dict[str, float]
    weights: dict[str, Tensor]


@dataclass
class _Failed:
    """What a rank that raised leaves.

    Attributes:
        kind: Class of the error.
        text: Of the error.
        trace: Of the error, with its notes.
        batch: In which it was raised.
        num_steps: Of the optimizer before.
        changed: Parameters that differ from those at the start, where the first batch failed.
    """

    kind: str
    text: str
    trace: str
    batch: int
    num_steps: int
    changed: list[str]

    @property
    def is_refusal(self) -> bool:
        """Whether it names what a pipeline cannot do."""
        return self.kind == PipelineError.__name__ and "`" in self.text and "failed:" not in self.text

    def knows(self, refusals: Iterable[_Failed]) -> bool:
        """Say whether the error is a refusal, or names one of another rank."""
        return self.is_refusal or any(one.text[:500] in self.trace for one in refusals)

    @property
    def is_clean(self) -> bool:
        """Whether nothing has come of the batch that failed."""
        return self.num_steps == self.batch and not self.changed


def check(program: PipelineProgram, mutant: Mutant = nullcontext) -> Outcome:
    """Train a program with and without a pipeline."""
    try:
        everyone = _reference(program)
    except Exception as error:
        return Outcome("invalid", f"{type(error).__name__}: {error}")
    try:
        found = worlds.run(_in_rank, program.world, program, mutant, timeout_s=3 * TIMEOUT_S)
    except Exception as error:  # a rank died, or hangs
        return Outcome("error", "".join(traceback.format_exception(error))[-6000:])
    errors = [one for one in found if isinstance(one, _Failed)]
    if errors:
        worlds.close()  # process groups of a fit that failed stay until the process ends
        refusals = [one for one in errors if one.is_refusal]
        is_refused = all(isinstance(one, _Failed) and one.knows(refusals) and one.is_clean for one in found)
        return Outcome("refused", refusals[0].text) if refusals and is_refused else Outcome("error", _told(found))
    pairs = [(everyone[rank % program.copies], one) for rank, one in enumerate(found)]
    texts = [f"rank {rank}: {text}" for rank, pair in enumerate(pairs) for text in _differences(*pair)]
    return Outcome("differs", "\n".join(texts)) if texts else Outcome("alike")


def _told(found: list[Any]) -> str:
    """Return what every rank ended with, where some raised."""
    return "\n".join(
        f"rank {rank}: batch {one.batch}, {one.num_steps} steps, changed {one.changed}: {one.trace[-1500:]}"
        if isinstance(one, _Failed) else f"rank {rank}: trained"
        for rank, one in enumerate(found)
    )  # fmt: skip


def check_all(programs: Iterable[PipelineProgram], mutant: Mutant = nullcontext) -> Iterator[Outcome]:
    """Yield the outcomes of programs."""
    for program in programs:
        yield check(program, mutant)


def shrunk(
    program: PipelineProgram, outcome: Outcome, limit_s: float = 60.0, mutant: Mutant = nullcontext
) -> tuple[PipelineProgram, Outcome]:
    """Return the smallest program found within the time that fails in the same way."""
    deadline = time.monotonic() + limit_s
    again = True
    while again:
        again = False
        for candidate in smaller(program):
            if time.monotonic() > deadline:
                return program, outcome
            found = check(candidate, mutant)
            if found.kind == outcome.kind:
                program, outcome, again = candidate, found, True
                break
    return program, outcome


def report(program: PipelineProgram, outcome: Outcome) -> str:
    """Return what a person reads."""
    return f"{outcome.kind}: {outcome.text}\n\n{show(program)}\n{program!r}"


def _differences(expected: _Trained, found: _Trained) -> Iterator[str]:
    for step, (mine, theirs) in enumerate(zip(found.losses, expected.losses, strict=True)):
        if not _is_close(mine, theirs):
            yield f"loss of step {step} is {mine}, not {theirs}"
    if found.logged.keys() != expected.logged.keys():
        yield f"logged are {sorted(found.logged)}, not {sorted(expected.logged)}"
    for name in found.logged.keys() & expected.logged.keys():
        if not _is_close(found.logged[name], expected.logged[name]):
            yield f"`{name}` is logged as {found.logged[name]}, not {expected.logged[name]}"
    for name, theirs in expected.weights.items():
        gap = (found.weights[name] - theirs).abs().max().item()
        if not gap <= TOLERANCE:
            yield f"`{name}` differs by {gap:g}"


def _is_close(mine: float, theirs: float) -> bool:
    return abs(mine - theirs) <= TOLERANCE_LOGGED * max(1.0, abs(theirs))


# -- Plain PyTorch -----------------------------------------------------------------------------------------------------


def _reference(program: PipelineProgram) -> list[_Trained]:
    """Train every copy without a pipeline, on equal micro-batches one after the other; gradients are averaged."""
    default = torch.get_default_dtype()
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        return _train_plainly(program)
    finally:
        torch.set_default_dtype(default)
        torch.set_rng_state(state)


def _train_plainly(program: PipelineProgram) -> list[_Trained]:
    replicas = [_in_double(program) for _ in range(program.copies)]
    data = [batches(program, copy) for copy in range(program.copies)]
    optimizer = replicas[0].configure_optimizers()
    logs: list[dict[str, list[float]]] = [{} for _ in replicas]
    losses: list[list[float]] = [[] for _ in replicas]
    for module, logged in zip(replicas, logs, strict=True):
        vars(module)["log"] = partial(_log, logged)
    for step in range(len(program.lengths)):
        for copy, module in enumerate(replicas):
            losses[copy].append(_backward(program, module, data[copy][step], step))
        _average(replicas)
        optimizer.step()
        _copy_weights(replicas)
    weights = {name: param.detach().clone() for name, param in replicas[0].named_parameters()}
    means = [{name: sum(values) / len(values) for name, values in logged.items()} for logged in logs]
    return [_Trained(*one, weights) for one in zip(losses, means, strict=True)]


def _log(logged: dict[str, list[float]], name: str, value: Tensor, **_: Any) -> None:
    logged.setdefault(name, []).append(value.detach().item())


def _in_double(program: PipelineProgram) -> Any:
    torch.set_default_dtype(torch.float32)
    module = module_of(program).double()
    torch.set_default_dtype(torch.float64)
    return module


def _backward(program: PipelineProgram, module: Any, batch: Any, step: int) -> float:
    """Return the loss of a batch, and leave its gradients in the module."""
    number = program.microbatches
    module.zero_grad()
    module.on_train_batch_start(batch, step)
    losses = []
    for index in range(number):
        piece = {**batch, **{key: batch[key].chunk(number)[index] for key in ("ids", "labels")}}
        loss = module.training_step(piece, step)
        (loss / number).backward()
        losses.append(float(loss))
    return sum(losses) / number


def _average(replicas: list[Any]) -> None:
    for params in zip(*(module.parameters() for module in replicas), strict=True):
        grads = [param.grad for param in params if param.grad is not None]
        if grads:
            params[0].grad = torch.stack(grads).sum(0) / len(replicas)


@torch.no_grad()
def _copy_weights(replicas: list[Any]) -> None:
    """Give all replicas the weights and the module buffers of the first one."""
    for params in zip(*(module.parameters() for module in replicas), strict=True):
        for param in params[1:]:
            param.copy_(params[0])
    for buffers in zip(*(module.buffers() for module in replicas), strict=True):
        for buffer in buffers[1:]:
            buffer.copy_(buffers[0])


# -- In a rank ---------------------------------------------------------------------------------------------------------


def _in_rank(rank: int, world: int, program: PipelineProgram, mutant: Mutant) -> Any:
    module = module_of(program)
    started = {name: param.detach().double() for name, param in module.named_parameters()}
    strategy = ZeroStrategy(stage=program.zero, pipeline=Pipeline(**program.options), timeout=TIMEOUT_S)  # type: ignore[arg-type]
    try:
        with mutant():
            return _train(rank, world, program, module, strategy)
    except Exception as error:
        batch = len(module.losses)
        changed = [] if batch else _changed(program, module, strategy, started)
        trace = "".join(traceback.format_exception(error))[-4000:]
        return _Failed(type(error).__name__, str(error), trace, batch, module.num_steps, changed)


def _changed(program: PipelineProgram, module: Any, strategy: ZeroStrategy, started: dict[str, Tensor]) -> list[str]:
    """Return the parameters that are not as at the start, of those that are whole on this rank. No collective."""
    parts = None if strategy._engine is None else strategy._engine._state.parts
    if program.zero == 3 or parts is None:
        return []
    here = {name: param for name, param in module.named_parameters() if parts.is_here(param)}
    return [name for name, param in here.items() if not torch.equal(param.detach().double(), started[name])]


def _train(rank: int, world: int, program: PipelineProgram, module: Any, strategy: ZeroStrategy) -> _Trained:
    lightning = trainer(rank, world, strategy, max_epochs=1, precision="64-true")
    lightning.fit(module, DataLoader(batches(program, rank % program.copies), batch_size=None))  # type: ignore[arg-type]
    weights = {name: strategy.full_param(param).clone() for name, param in module.named_parameters()}
    return _Trained(module.losses, {key: float(value) for key, value in lightning.callback_metrics.items()}, weights)
