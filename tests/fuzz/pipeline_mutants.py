"""Pipelines that are broken on purpose: the random programs must find each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from lightning_zero.comm.peers import Peers
from lightning_zero.errors import PipelineError
from lightning_zero.lightning.pipelined_steps import PipelinedSteps
from lightning_zero.parallel.pipeline import pipeline
from lightning_zero.parallel.pipeline.pipeline import PipelineRunner
from lightning_zero.parallel.pipeline.stages.sources import Source
from lightning_zero.parallel.pipeline.tracing.fakes import Fakes
from lightning_zero.parallel.pipeline.tracing.gradient_hooks import GradientHooks
from lightning_zero.parallel.pipeline.tracing.module_interception import ModuleInterception
from lightning_zero.parallel.pipeline.tracing.user_hooks import without_hooks

__all__ = ["MUTANTS"]


@contextmanager
def gradients_of_sources_are_dropped() -> Iterator[None]:
    """What goes around the blocks has no gradient."""
    received = ModuleInterception._received

    def detached(self: ModuleInterception, trace: Any) -> Any:
        found = received(self, trace)
        return {key: one.detach().requires_grad_(one.requires_grad) if isinstance(key, Source) else one
                for key, one in found.items()}  # fmt: skip

    with mock.patch.object(ModuleInterception, "_received", detached):
        yield


@contextmanager
def sources_are_of_the_micro_batch_before() -> Iterator[None]:
    """What goes around the blocks is one micro-batch late."""
    before: dict[Any, torch.Tensor] = {}
    fetched = ModuleInterception._fetched

    def late(self: ModuleInterception, trace: Any, source: Source) -> Any:
        tensor = fetched(self, trace, source)
        if tensor is None:
            return None
        old = before.get((trace.chunk, source))
        before[trace.chunk, source] = tensor.detach()
        if old is not None and old.shape == tensor.shape:
            return tensor - tensor.detach() + old
        return tensor

    with mock.patch.object(ModuleInterception, "_fetched", late):
        yield


@contextmanager
def hooks_are_not_run() -> Iterator[None]:
    """Hooks on modules of other stages do not run."""
    forward = Fakes._forward

    def without(self: Fakes, module: Any, args: Any, kwargs: Any) -> Any:
        with without_hooks(module):
            return forward(self, module, args, kwargs)

    with mock.patch.object(Fakes, "_forward", without):
        yield


@contextmanager
def chunks_share_their_state() -> Iterator[None]:
    """What a step leaves in its module is left once per chunk of a stage."""
    with mock.patch.object(PipelineRunner, "_state_of", return_value=nullcontext()):
        yield


@contextmanager
def gradient_hooks_run_everywhere() -> Iterator[None]:
    """A hook on a gradient runs on every stage that has the value."""
    with mock.patch.object(GradientHooks, "_is_whole_elsewhere", return_value=False):
        yield


@contextmanager
def sources_are_kept_as_they_become() -> Iterator[None]:
    """What a module has returned is sent as it is when it leaves."""

    def keep(trace: Any, source: Source, leaves: Any) -> None:
        if source.leaf < len(leaves) and isinstance(leaves[source.leaf], torch.Tensor):
            trace.computed[source] = leaves[source.leaf]

    with mock.patch("lightning_zero.parallel.pipeline.tracing.module_interception._keep", keep):
        yield


@contextmanager
def inputs_have_no_gradient() -> Iterator[None]:
    """The last gradient that goes back to a stage is zero."""
    send = pipeline.PipelineRunner._send_gradients

    def zeroed(self: Any, action: Any) -> None:
        for tensor in self._inputs[action.chunk, action.microbatch][-1:]:
            if tensor.grad is not None:
                tensor.grad.zero_()
        send(self, action)

    with mock.patch.object(PipelineRunner, "_send_gradients", zeroed):
        yield


@contextmanager
def steps_come_before_refusals() -> Iterator[None]:
    """The optimizer makes a step for a batch that is refused."""
    step = PipelinedSteps.training_step

    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(self, *args, **kwargs)
        except PipelineError:
            self._module.num_steps += 1
            raise

    with mock.patch.object(PipelinedSteps, "training_step", stepped):
        yield


@contextmanager
def refusals_change_weights() -> Iterator[None]:
    """A batch that is refused has changed weights."""
    step = PipelinedSteps.training_step

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(self, *args, **kwargs)
        except PipelineError:
            self._module.shift.data.add_(1.0)
            raise

    with mock.patch.object(PipelinedSteps, "training_step", changed):
        yield


@contextmanager
def refusals_have_no_cause_elsewhere() -> Iterator[None]:
    """A stage that hears of another one's refusal does not say so."""
    step = PipelinedSteps.training_step

    def nameless(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(self, *args, **kwargs)
        except PipelineError:
            if self._mesh.stage == 0:
                Peers.of_world().has_told = True
                raise RuntimeError("the connection was closed") from None
            Peers.of_world().has_told = True
            raise

    with mock.patch.object(PipelinedSteps, "training_step", nameless):
        yield


MUTANTS: dict[str, Callable[[], Any]] = {
    one.__name__: one
    for one in (
        gradients_of_sources_are_dropped,
        sources_are_of_the_micro_batch_before,
        hooks_are_not_run,
        chunks_share_their_state,
        gradient_hooks_run_everywhere,
        sources_are_kept_as_they_become,
        inputs_have_no_gradient,
        steps_come_before_refusals,
        refusals_change_weights,
        refusals_have_no_cause_elsewhere,
    )
}
