"""Training steps of one setting, by the engine that a run uses, on one pretended rank and without values.

Note [Why two steps]
    The first step makes optimizer states and learns the order in which units are gathered; from the second on every
    step is the same. ``ActivationCheckpointing(policy="auto")`` chooses after two steps, so a third one is made.
    Python's garbage collector does not run in the last one: tensors in reference cycles, which models of transformers
    make, are alive for as long as they may be.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from lightning_zero.config import ActivationCheckpointing
from lightning_zero.engine.access.statistics import EngineStats
from lightning_zero.engine.buffers.home import HostHome
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.forecast.live_bytes import LiveBytes, Moment, replaced
from lightning_zero.parallel.activation.checkpointing import _Parked, checkpoint_activations, forecast_of
from lightning_zero.storage.copies import Landing
from lightning_zero.storage.store import Kind

__all__ = [
    "LOSS_SCALE",
    "HostActivations",
    "Rehearsed",
    "Trainee",
    "count_states",
    "host_apart",
    "kinds_at",
    "pretended_world",
    "rehearse",
]

LOSS_SCALE = 2.0  # with which values that are computed do not overflow
_KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A model as a run trains it.

    Attributes:
        module: The model.
        optimizers: Makes its optimizers.
        loss: Computes the loss of a batch.
        context: Makes the context of a forward, such as autocast.
        is_scaled: Whether the loss is scaled, and gradients are divided by the scale.
        clips: Whether gradients are clipped by their norm.
        microbatches: Micro-batches per step.
    """

    module: nn.Module
    optimizers: Callable[[], list[Optimizer]]
    loss: Callable[[], Tensor]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    is_scaled: bool = False
    clips: bool = False
    microbatches: int = 1


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """The bytes of a rank in the second step.

    Attributes:
        device: At the end of the backward, by kind.
        host: Of these kinds in host memory.
        disk: Of these kinds on disks.
        windows: Most bytes of host memory through which those on disks are read and written.
        host_activations: Most bytes of host memory that activation checkpointing takes.
        peak: The moment of the most bytes on the device.
        at_peak: Bytes on the device at this moment, by kind.
        sent: Bytes that a rank sends in a step.
        sent_across: Those of them that are sent by calls over nodes, where ``stage`` has a scope of a node.
        units: Number of units.
    """

    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]
    windows: int
    host_activations: int
    peak: Moment
    at_peak: dict[str, int] = field(default_factory=dict)
    sent: int
    sent_across: int
    units: int = 0


@contextmanager
def pretended_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be one rank of a world whose other ranks are pretended.

    Raises:
        RuntimeError: There is a process group.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "Forecasts and simulations pretend their ranks, and this process has a process group. Make them before"
            " training, or in a process of their own, with `python -m lightning_zero estimate` or `simulate`."
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def rehearse(
    counter: LiveBytes,
    trainee: Callable[[], Trainee],
    engine: ZeroEngine,
    *,
    checkpointing: ActivationCheckpointing | None = None,
    page_locks: bool = False,
) -> Rehearsed:
    """Train two steps under a counter, or three, and return the bytes of the last.

    Args:
        counter: A ``LiveBytes``, or one that computes nothing.
        trainee: Makes the model. Called under the counter, so its tensors count.
        engine: Without a module; is closed behind the steps.
        checkpointing: Activations that are recomputed.
        page_locks: See ``host_apart``.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    with host_apart(counter, page_locks=page_locks) as host, counter:
        try:
            return _Steps(counter, trainee(), engine, checkpointing).run(host)
        finally:
            if was_enabled:
                gc.enable()
            counter.parts = tuple
            if engine.module is not None:
                engine.close()


class HostActivations:
    """Counts the inputs that activation checkpointing has in host memory.

    Args:
        page_locks: Whether the memory is PyTorch's page-locked one, which takes the next power of two of bytes.
    """

    def __init__(self, *, page_locks: bool) -> None:
        self.most = 0  # bytes
        self._page_locks = page_locks
        self._now = 0

    def note(self, tensor: Tensor) -> None:
        """Count a tensor until its end, unless it is a fake one, which a pipeline makes to find out shapes."""
        if isinstance(tensor, FakeTensor):
            return
        nbytes = tensor.nbytes
        if self._page_locks and nbytes:
            nbytes = 1 << (nbytes - 1).bit_length()
        self._add(nbytes)
        weakref.finalize(tensor.untyped_storage(), self._add, -nbytes)

    def _add(self, nbytes: int) -> None:
        self._now += nbytes
        self.most = max(self.most, self._now)


@contextmanager
def host_apart(counter: LiveBytes, *, page_locks: bool = False) -> Iterator[HostActivations]:
    """Do not count copies in host memory that are in no account: of gradients, and of activations, which are yielded.

    Args:
        counter: Of bytes on the device.
        page_locks: Whether activations go to page-locked memory.
    """
    bring, send, activations = HostHome.bring_gradient, _Parked._to_host, HostActivations(page_locks=page_locks)

    def bring_apart(home: HostHome, average: Tensor) -> Tensor:
        with counter.apart():
            return bring(home, average)

    def send_apart(parked: _Parked, tensor: Tensor) -> tuple[Tensor, Landing]:
        with counter.apart():
            host, landing = send(parked, tensor)
        activations.note(host)
        return host, landing

    with replaced(HostHome, "bring_gradient", bring_apart), replaced(_Parked, "_to_host", send_apart):
        yield activations


class _Steps:
    """The steps of one engine."""

    def __init__(
        self, counter: LiveBytes, trainee: Trainee, engine: ZeroEngine, checkpointing: ActivationCheckpointing | None
    ) -> None:
        self._counter = counter
        self._trainee = trainee
        self._engine = engine
        module = trainee.module
        counter.name_modules(module)
        checkpoint_activations(module, checkpointing, None)
        self._choice = forecast_of(module)
        engine.shard(module)
        engine.internals.steps.make_in_this_thread(counter.apart)
        self._optimizers = trainee.optimizers()
        engine.attach(*self._optimizers)

    def run(self, host: HostActivations) -> Rehearsed:
        """Make the steps, and measure the last."""
        self._step()
        self._measure()
        if self._choice is not None:
            self._step()
            self._measure()
        rest = self._step()
        stats = self._engine.stats()
        peak = self._counter.peak
        return Rehearsed(
            device=rest.memory,
            host=rest.host,
            disk=rest.disk,
            windows=self._engine.internals.steps.window_bytes(),
            host_activations=host.most,
            peak=peak,
            at_peak=kinds_at(peak, self._trainee.module),
            sent=sum(stats.traffic.values()),
            sent_across=sum(stats.across_nodes.values()),
            units=stats.num_units,
        )

    def _measure(self) -> None:
        """Measure from here."""
        gc.collect()
        gc.disable()
        self._engine.internals.fits.reset_stats()
        count_states(self._counter, self._engine)
        self._counter.reset_peak()

    def _step(self) -> EngineStats:
        """Train on one batch in Lightning's order; return the statistics at the end of the backward."""
        for number in range(self._trainee.microbatches):
            is_last = number == self._trainee.microbatches - 1
            with ExitStack() as stack:
                stack.enter_context(self._engine.microbatch(last=is_last))
                self._forward_backward(is_first=number == 0)
        stats = self._engine.stats()
        with self._counter.phase("step"):
            for number, optimizer in enumerate(self._optimizers):
                if self._trainee.is_scaled:
                    self._engine.internals.steps.unscale(optimizer, LOSS_SCALE)
                if self._trainee.clips:
                    self._engine.clip_grad_norm(optimizer, 1.0)
                optimizer.step()
                if self._choice is not None and self._choice.policy is None:
                    self._choice.settle(int, stepped=number, num_optimizers=len(self._optimizers))
        return stats

    def _forward_backward(self, *, is_first: bool) -> None:
        if self._choice is not None:
            self._choice.begin_batch(torch.device("cpu"))
        with self._counter.phase("forward"), self._engine.scope("training_step"), self._trainee.context():
            loss = self._trainee.loss()
        if is_first:
            for optimizer in self._optimizers:
                optimizer.zero_grad()
        with self._counter.phase("backward"):
            if self._trainee.is_scaled:
                with self._engine.internals.steps.scaled(LOSS_SCALE):
                    self._backward(loss * LOSS_SCALE)
            else:
                self._backward(loss)

    def _backward(self, loss: Tensor) -> None:
        with self._engine.backward_scope():
            loss.backward()  # type: ignore[no-untyped-call]


# -- Kinds of bytes ----------------------------------------------------------------------------------------------------


def count_states(counter: LiveBytes, engine: ZeroEngine) -> None:
    """Let a counter tell an engine's bytes by kind; the optimizers must have their states by now."""
    device, host = engine.internals.steps.accounts()
    stats = engine.stats()
    states = stats.memory["optimizer"] - device.live("optimizer")
    host_states = stats.host["optimizer"] - host.live("optimizer")

    def parts() -> tuple[int, ...]:
        return (*(device.live(kind) for kind in _KINDS), states, host_states + sum(host.live(k) for k in _KINDS))

    counter.parts, counter.num_away = parts, 1


def kinds_at(peak: Moment, module: nn.Module) -> dict[str, int]:
    """Return the bytes on the device at a peak, by kind; those that are not the engine's are the program's."""
    kinds: dict[str, int] = dict(zip(_KINDS, peak.parts, strict=False))
    kinds["optimizer"] += peak.parts[len(_KINDS)]
    buffers = {id(one): one.nbytes for one in module.buffers()}
    kinds["buffers"] = sum(buffers.values())
    rest = peak.nbytes - sum(kinds.values())
    return {**kinds, "workspace" if peak.phase == "step" else "activations": rest}
