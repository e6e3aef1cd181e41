"""The cost of each layer of a LightningModule on its first batch, for a pipeline that is cut by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties

from lightning_zero.comm.peers import failure_named, is_pretended
from lightning_zero.config import Pipeline
from lightning_zero.engine.buffers.parameter import face_of
from lightning_zero.lightning.first_batch import first_batch, step_arguments
from lightning_zero.lightning.pipeline_logging import Logs, MetricStates
from lightning_zero.parallel.module_state import ModuleState
from lightning_zero.parallel.pipeline.schedule.costs import count_flops, measure_time
from lightning_zero.parallel.pipeline.schedule.microbatches import copy_of, split_batch
from lightning_zero.parallel.pipeline.schedule.streams import RandomState
from lightning_zero.parallel.pipeline.stages.split import costed_layers

__all__ = ["layer_costs"]


def layer_costs(
    module: Any, pipeline: Pipeline, device: torch.device, context: Callable[[], AbstractContextManager[Any]]
) -> dict[str, int] | None:
    """Return the costs of the blocks, and of the modules around them, if the pipeline is cut by them.

    Rank 0 runs ``training_step`` on a micro-batch of the first batch. Collective: all ranks.

    Args:
        module: With a Trainer that is about to fit.
        pipeline: The options.
        device: Where the step runs.
        context: Of the precision plugin, around the step.

    Raises:
        ValueError: There is no batch to measure with, a layer has no values, the step fails, or rank 0 cannot run it
            alone.
    """
    if pipeline.partition not in ("measured", "flops"):
        return None
    _refuse_parts(module, pipeline)
    _update_properties(module, device=device)  # Lightning has not done it for modules of `configure_model`
    answer: list[Any] = [None]
    if dist.get_rank() == 0 or is_pretended():
        try:
            answer = [_costs(module, pipeline, device, context)]
        except Exception as error:  # told to all ranks, which would wait for ever
            answer = [error]
    if not is_pretended():
        with failure_named("broadcast of the costs of layers"):
            dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise ValueError(
            f"`Pipeline(partition={pipeline.partition!r})` could not run a step on rank 0: {answer[0]}"
        ) from answer[0]
    costs: dict[str, int] = answer[0]
    return costs


def _refuse_parts(module: Any, pipeline: Pipeline) -> None:
    """Refuse a module of which every rank has a part: its layers communicate.

    Raises:
        ValueError: The same on all ranks.
    """
    name = next((name for name, param in module.named_parameters() if face_of(param) is not None), None)
    if name is not None:
        raise ValueError(
            f"`Pipeline(partition={pipeline.partition!r})` runs a step on rank 0 alone, and an earlier Trainer with"
            f" `{face_of(module.get_parameter(name)).option}` has left every rank a part of `{name}`. Cut the module"
            " where the earlier run did, by the list of first blocks that its summary shows, or make the module anew."
        )


def _costs(
    module: Any, pipeline: Pipeline, device: torch.device, context: Callable[[], AbstractContextManager[Any]]
) -> dict[str, int]:
    names = costed_layers(module, pipeline)
    before = RandomState(device)
    batch = first_batch(_loader(module.trainer))
    before.restore()
    piece = split_batch(module._apply_batch_transfer_handler(batch, device, 0), pipeline.num_microbatches)[0]

    def run() -> None:
        with context():
            module.training_step(
                *step_arguments(module.training_step, copy_of(piece))
            )  # it may change its batch, and runs twice

    measure = measure_time if pipeline.partition == "measured" else count_flops
    with Logs(module).recording(), MetricStates(module, None).muted(), ModuleState(module.modules()).shown():
        return dict(zip(names, measure(module, names, run, device), strict=True))


def _loader(trainer: Any) -> Any:
    if trainer.state.fn != "fit":
        raise ValueError("layers are measured on a training batch, and only `Trainer.fit` has one. Name first blocks.")
    loader = trainer.fit_loop._data_source.dataloader()
    if isinstance(loader, Iterator):
        raise ValueError("the training data is an iterator, and its first batch would be lost. Use a DataLoader.")
    return loader
