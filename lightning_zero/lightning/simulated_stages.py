"""Pipeline stages in a simulation: parts of a step are named, messages are those between the stages' processes."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, Protocol

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm.p2p import P2P
from lightning_zero.config import Pipeline
from lightning_zero.forecast.clock import Clock
from lightning_zero.forecast.live_bytes import replaced
from lightning_zero.forecast.stage_groups import PostBox, between_stages
from lightning_zero.lightning.process_hooks import ProcessHooks
from lightning_zero.lightning.tensor_training import TensorTraining
from lightning_zero.parallel.pipeline.pipeline import PipelineRunner

__all__ = ["ranks_of_copy", "staged"]


class Counter(Protocol):
    """Counts a simulated step."""

    clock: Clock
    is_on: bool

    def enter_phase(self, name: str) -> None:
        """Name the part of the step that follows."""
        ...

    def is_blank(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies in memory that is never written."""
        ...


def ranks_of_copy(pipeline: Pipeline, world_size: int, rank: int) -> list[int]:
    """Return the ranks of the stages of a rank's copy of the model.

    Raises:
        ValueError: The stages do not divide the ranks.
    """
    if world_size % pipeline.stages:
        raise ValueError(
            f"`pipeline={pipeline.stages}` does not divide `world_size={world_size}`. Use a multiple of"
            f" {pipeline.stages} ranks, or a number of stages that divides them."
        )
    copies = world_size // pipeline.stages
    return [stage * copies + rank % copies for stage in range(pipeline.stages)]


@contextmanager
def staged(store: Any, counter: Counter, accelerator: str) -> Iterator[None]:
    """Simulate a stage beside the others.

    Args:
        store: Of the processes of all stages.
        counter: Of this one.
        accelerator: As in ``simulate_step``: over NCCL a device waits for messages by itself.
    """
    forward, backward, p2p = PipelineRunner._forward, PipelineRunner._backward, P2P.__init__
    plan, asked = TensorTraining._agreed_plan, count()

    def in_forward(runner: Any, *args: Any) -> None:
        counter.enter_phase("forward")
        forward(runner, *args)
        counter.enter_phase("")

    def in_backward(runner: Any, *args: Any) -> None:
        counter.enter_phase("backward")
        backward(runner, *args)
        counter.enter_phase("")

    def of_device(one: P2P, *args: Any) -> None:
        p2p(one, *args)
        one.lets_device_wait = True

    def of_first_stage(training: TensorTraining, module: pl.LightningModule, whole: Collection[str]) -> Any:
        groups = training.groups
        if dist.get_rank() < groups.num_data_ranks * groups.size:  # rank 0 plans in a run
            store.set("plan", pickle.dumps(plan(training, module, whole)))
        return pickle.loads(store.get("plan"))

    def of_all_stages(hooks: Any, value: int) -> int:
        """Return the largest number of the stages, whose answers differ: those of other copies are alike."""
        stages = hooks.pipeline.stages
        key = f"largest/{next(asked)}"
        store.set(f"{key}/{dist.get_rank() * stages // dist.get_world_size()}", str(value))
        return max(int(store.get(f"{key}/{stage}")) for stage in range(stages))

    def last_call() -> Any:
        return counter.clock.calls[-1] if counter.is_on and counter.clock.calls else None

    with ExitStack() as stack:
        stack.enter_context(between_stages(PostBox(store, last_call, counter.is_blank)))
        stack.enter_context(replaced(PipelineRunner, "_forward", in_forward))
        stack.enter_context(replaced(PipelineRunner, "_backward", in_backward))
        stack.enter_context(replaced(TensorTraining, "_agreed_plan", of_first_stage))
        stack.enter_context(replaced(ProcessHooks, "_largest", of_all_stages))
        if accelerator != "cpu":
            stack.enter_context(replaced(P2P, "__init__", of_device))
        yield
