"""The options and modules that forecasts and simulations take."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.lightning.precision import (
    ZeroDoublePrecision,
    ZeroHalfPrecision,
    ZeroMixedPrecision,
    ZeroPrecision,
    ZeroStep,
)
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.module_copies import copied
from lightning_zero.parallel.pipeline.schedule.streams import RandomState, seed_generators

__all__ = [
    "BUILDING_HOOKS",
    "Optimizers",
    "accumulation_of",
    "check_memory",
    "new_module",
    "new_precision",
    "on_cpu",
    "precision_of",
    "refuse_unforecast",
    "seeded",
    "told_steps",
    "without_meta",
]

_PRECISIONS: dict[str, Callable[[], ZeroStep]] = {
    "32-true": ZeroPrecision,
    "64-true": ZeroDoublePrecision,
    "bf16-mixed": partial(ZeroMixedPrecision, "bf16-mixed", "cpu"),
    "bf16-true": partial(ZeroHalfPrecision, "bf16-true"),
    "16-mixed": partial(ZeroMixedPrecision, "16-mixed", "cpu"),
    "16-true": partial(ZeroHalfPrecision, "16-true"),
}

# Hooks in which a module may be built, in the Trainer's order, with their arguments.
BUILDING_HOOKS: dict[str, dict[str, Any]] = {"setup": {"stage": "fit"}, "configure_model": {}}

Optimizers = Callable[[Iterator[nn.Parameter]], Optimizer]


def precision_of(given: str | None, strategy: ZeroStrategy, accelerator: str) -> str:
    """Return the name of the precision that a Trainer would have, by default the strategy's.

    Raises:
        ValueError: It is not forecast, or a configuration of DeepSpeed says another one.
    """
    name = str(given or strategy.precision_plugin.precision)
    name = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed", "16": "16-mixed"}.get(name, name)
    if name not in _PRECISIONS:
        raise ValueError(f"`precision={name!r}` is not forecast yet. Use {', '.join(map(repr, _PRECISIONS))}.")
    on_cpu = accelerator == "cpu"
    if name == "16-mixed" and on_cpu:
        name = "bf16-mixed"  # as in Lightning
    if strategy.imported is not None:
        imported = copy.deepcopy(strategy.imported)  # takes notes for its table
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            name = str(imported.precision(new_precision(name), on_cpu=on_cpu).precision)
    return name


def new_precision(name: str) -> ZeroStep:
    """Return a new plugin, which computes on a CPU."""
    return _PRECISIONS[name]()


def accumulation_of(given: int, strategy: ZeroStrategy, world_size: int) -> int:
    """Return the number of micro-batches of a step: those of a configuration of DeepSpeed, if it says it.

    Raises:
        ValueError: Another number is given, or the batch of the configuration cannot be divided.
    """
    ranks = 1 if strategy.pipeline is None else strategy.pipeline.stages
    ranks *= 1 if strategy.tensor_parallel is None else strategy.tensor_parallel.size
    copies = max(world_size // ranks, 1)  # of the model, each with a slice of the batch
    if strategy.imported is None:
        return given
    batch = strategy.imported.plan.batch
    wanted = batch.accumulation_on(copies)
    if wanted not in (None, given) and given != 1:
        raise ValueError(
            f"The configuration of DeepSpeed accumulates {wanted} batches, and `accumulate_grad_batches={given}`"
            f' differs. Leave it out, or say "auto" for `gradient_accumulation_steps` and `train_batch_size`.'
        )
    found = given if wanted is None else wanted
    batch.micro_on(copies, found)  # as in the run, which compares its loader
    return found


def check_memory(option: str, nbytes: int | None) -> None:
    """Refuse a memory of a device that is no number of bytes.

    Raises:
        ValueError: It is none.
    """
    if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1):
        raise ValueError(f"`{option}={nbytes!r}` must be a number of bytes above 0, such as 24 * 2**30.")


def refuse_unforecast(
    strategy: ZeroStrategy, *, world_size: int, accelerator: str, verb: str = "forecast", noun: str = "forecast"
) -> None:
    """Refuse options that are not forecast, or not simulated.

    Raises:
        ValueError: There is one.
    """
    offload = strategy.offload
    refused = {
        "`Pipeline(partition='measured')`": strategy.pipeline is not None and strategy.pipeline.partition == "measured",
        "`Offload(fraction='auto')` to disks, or on a CPU,": offload is not None
        and offload.fraction == "auto"
        and (offload.uses_disks or accelerator == "cpu"),
        "`Offload(step_device='cuda')`": offload is not None and offload.step_device == "cuda",
    }
    for option, is_used in refused.items():
        if is_used:
            raise ValueError(f"{option} is not {verb} yet. Leave it out, or change it for the {noun}.")
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"`world_size={world_size!r}` must be a number of ranks, 1 or more.")
    if accelerator not in ("gpu", "cuda", "cpu"):
        raise ValueError(f"`accelerator={accelerator!r}` is not known. Use 'gpu' or 'cpu'.")


def new_module(module: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return the result of a function, or a copy of a module without its Trainer, which logs nothing.

    Neither is that of ``torch.compile``, but the module inside.
    """
    made = module if isinstance(module, nn.Module) else module()
    made = getattr(made, "_orig_mod", made)
    if not isinstance(module, nn.Module):
        return made
    kept = [getattr(made, name, None) for name in ("_trainer", "_fabric")]
    memo: dict[int, Any] = {id(one): None for one in kept if one is not None}
    return copied(made, memo)


@contextmanager
def seeded() -> Iterator[None]:
    """Let random numbers inside be the same every time, and those of the process go on afterwards as before."""
    device = torch.device("cpu")  # where everything is run
    before = RandomState(device)
    try:
        seed_generators(0, device)
        yield
    finally:
        before.restore()


class _Steps:
    """Numbers that hooks ask a Trainer for: they change schedules, not memory. It has nothing else of a Trainer."""

    max_epochs = 1
    max_steps = 1000
    num_training_batches = 1000
    estimated_stepping_batches = 1000


@contextmanager
def told_steps(module: pl.LightningModule) -> Iterator[None]:
    """Let hooks of a module ask how many steps there are; one with a Trainer finds all else in it as before."""
    trainer: Any = module._trainer
    if trainer is None:
        module.trainer = _Steps()  # type: ignore[assignment]
        try:
            yield
        finally:
            module.trainer = None
        return
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (_Steps, kind), {})
    try:
        yield
    finally:
        trainer.__class__ = kind


def without_meta(module: nn.Module) -> None:
    """Let parameters and buffers on the meta device be tensors on the CPU, the same ones under all their names."""
    made: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, param in child._parameters.items():
            if param is not None and param.is_meta:
                if id(param) not in made:
                    values = torch.empty_like(param, device="cpu")
                    made[id(param)] = nn.Parameter(values, requires_grad=param.requires_grad)
                child._parameters[name] = made[id(param)]
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[name] = torch.zeros_like(buffer, device="cpu")


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, with zeros for a tensor on the meta device."""
    return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.to("cpu", copy=True)
