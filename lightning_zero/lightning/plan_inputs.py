"""A call of a LightningModule from which a plan of tensor parallelism learns the arguments of its blocks."""

from __future__ import annotations

import copy
import dis
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero.lightning.first_batch import step_arguments
from lightning_zero.parallel.tensor.examples import described_inputs, run_example

__all__ = ["call_for_plan", "without_collectives"]

_SAMPLES = 2  # with one sample a sum over the batch looks like the sample
_STEPS = {
    TrainerFn.FITTING: ("fit_loop", "training_step"),
    TrainerFn.VALIDATING: ("validate_loop", "validation_step"),
    TrainerFn.TESTING: ("test_loop", "test_step"),
    TrainerFn.PREDICTING: ("predict_loop", "predict_step"),
}


def call_for_plan(module: pl.LightningModule) -> Callable[[Any], Any]:
    """Return a function that runs a copy of a module: on its example, on a batch, or on inputs that a model describes.

    Args:
        module: With its Trainer, before loaders are made.

    Raises:
        ValueError: Nothing says how the module is called.
    """
    example, trainer = _on_cpu(module.example_input_array), module.trainer  # where the copy is that runs
    try:
        batch, step = _batch(module)
    except Exception as error:
        found = _described(module) if example is None else lambda one: run_example(one, example)
        if found is None:
            raise ValueError(
                f"`tensor_parallel` verifies its plan with a call of `{type(module).__name__}`, and found no batch for"
                f" it ({type(error).__name__}: {error}). Set its `example_input_array` to two samples."
            ) from error
        return found
    others = [one for one in ("training_step", "validation_step") if one != step and is_overridden(one, module)]

    def call(one: Any) -> None:
        if example is None:
            _run_step(one, step, batch, trainer)
        else:
            run_example(one, example)
        for other in [*([] if example is None else [step]), *others]:  # may read parameters that would be cut
            with suppress(Exception):
                _run_step(one, other, batch, trainer)

    return call


def _on_cpu(inputs: Any) -> Any:
    return move_data_to_device(inputs, torch.device("cpu"))


def _run_step(module: Any, step: str, batch: Any, trainer: Any) -> Any:
    """Run a step of a copy of a module, which logs nothing and meets no other rank.

    Raises:
        ValueError: It fails, and the module's ``example_input_array`` would replace it.
    """
    module.log = module.log_dict = lambda *args, **kwargs: None
    module._trainer = _Trainer(trainer)
    for name in ("optimizers", "lr_schedulers", "manual_backward", "clip_gradients", "toggle_optimizer",
                 "untoggle_optimizer"):  # fmt: skip
        setattr(module, name, _Inert(1.0))
    try:
        function = getattr(module, step)
        return function(*step_arguments(function, _own(batch)))
    except Exception as error:
        raise ValueError(
            f"`tensor_parallel` verifies its plan with a call of `{step}` on rank 0 alone, before there are optimizers,"
            f" and it failed ({type(error).__name__}: {error}). Set the module's `example_input_array` to two samples,"
            " which are given to its `forward` instead."
        ) from error
    finally:
        module._trainer = None


def _own(batch: Any) -> Any:
    """Return a copy of a batch, into which a step may write; the batch if it cannot be copied."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # of the program's class
        return batch


_COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
)  # fmt: skip


@contextmanager
def without_collectives() -> Iterator[None]:
    """Let a program see no other rank for a while: metrics compute their own states, and collectives raise."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the step calls a collective of `torch.distributed`, and other ranks do not run it")

    names = [name for name in _COLLECTIVES if hasattr(dist, name)]
    was = {name: getattr(dist, name) for name in (*names, "is_initialized")}
    for name in names:
        setattr(dist, name, refuse)
    dist.is_initialized = lambda: False
    try:
        yield
    finally:
        for name, function in was.items():
            setattr(dist, name, function)


class _Inert(float):
    """Stands for optimizers, schedulers and their options: a number that does nothing whatever it is asked for."""

    def __call__(self, *args: Any, **kwargs: Any) -> _Inert:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> _Inert:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Do nothing."""

    def __delitem__(self, key: Any) -> None:
        """Do nothing."""

    def __contains__(self, key: Any) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter([self] * _num_unpacked(sys._getframe(1)))

    def __len__(self) -> int:
        return 1

    def __enter__(self) -> _Inert:
        return self

    def __exit__(self, *error: Any) -> None:
        """Do nothing."""


def _num_unpacked(frame: FrameType) -> int:
    """Return the number of names to which a frame assigns the items of the iterator that it makes; 1 for a loop."""
    code = frame.f_code.co_code
    is_unpacked = dis.opname[code[frame.f_lasti]] == "UNPACK_SEQUENCE"
    return code[frame.f_lasti + 1] if is_unpacked else 1


class _Trainer:
    """A Trainer whose collectives are those of one rank."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.strategy = _Strategy(trainer.strategy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


class _Strategy:
    """A strategy whose collectives are those of one rank."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def all_gather(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor.unsqueeze(0)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    def barrier(self, name: str | None = None) -> None:
        pass


def _batch(module: pl.LightningModule) -> tuple[Any, str]:
    """Return a batch of two samples where the data set has numbers, or else the first one, and the step's name."""
    trainer: Any = module.trainer
    loop, step = _STEPS[trainer.state.fn]
    source = getattr(trainer, loop)._data_source
    batch = _first(source.dataloader())
    return module._apply_batch_transfer_handler(batch, torch.device("cpu"), 0), step


def _first(loader: Any) -> Any:
    if isinstance(loader, Mapping):
        return {key: _first(one) for key, one in loader.items()}
    if isinstance(loader, (list, tuple)) and not isinstance(loader[0], torch.Tensor):
        return [_first(one) for one in loader]
    if _is_read_once(loader):
        raise ValueError("the data is an iterator, and its first batch would be lost")
    if isinstance(loader, DataLoader) and loader.batch_size and not isinstance(loader.dataset, IterableDataset):
        dataset: Any = loader.dataset
        return loader.collate_fn([dataset[number % len(dataset)] for number in range(_SAMPLES)])
    return next(iter(loader))


def _is_read_once(loader: Any) -> bool:
    """Say whether a loader, or the data set that it reads in this process, gives the same iterator each time."""
    if isinstance(loader, DataLoader):
        return not loader.num_workers and isinstance(loader.dataset, IterableDataset) and _is_shared(loader.dataset)
    return isinstance(loader, Iterator) or _is_shared(loader)


def _is_shared(data: Any) -> bool:
    first = iter(data)
    return first is iter(data)


def _described(module: nn.Module) -> Callable[[Any], Any] | None:
    for name, child in module.named_modules():
        inputs = _on_cpu(described_inputs(child))
        if inputs:
            return lambda one, name=name, inputs=inputs: one.get_submodule(name)(**inputs)  # type: ignore[misc]
    return None
