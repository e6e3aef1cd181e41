"""The cost of each layer of a model in a step, in nanoseconds or operations; a pipeline is cut by it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.flop_formulas import FlopTotal
from lightning_zero.parallel.pipeline.schedule.streams import RandomState
from lightning_zero.storage.copies import finish_stream

__all__ = ["count_flops", "measure_time"]


def measure_time(module: nn.Module, names: Sequence[str], run: Callable[[], Any], device: torch.device) -> list[int]:
    """Return how long the forwards of some layers take, by name: ns. The step runs twice; the second time counts.

    Nothing is differentiated: the cost of a backward is assumed to be a multiple of it. Buffers and random numbers are
    afterwards as they were. A layer that waits on another device is on ``device`` while it runs.

    Args:
        module: The root, with values.
        names: Of the layers; none lies in another.
        run: Runs the step.
        device: Where it runs.

    Raises:
        ValueError: A parameter has no values, or a layer is not called.
    """
    _require_values(module)
    spent: Counter[str] = Counter()

    def now() -> int:
        finish_stream(device)
        return time.perf_counter_ns()

    with _as_it_was(module, device), _watched(module, names, spent=spent, now=now, device=device):
        run()
        spent.clear()
        run()
    return _listed(spent, names)


def count_flops(module: nn.Module, names: Sequence[str], run: Callable[[], Any], device: torch.device) -> list[int]:
    """Return how many operations the forwards of some layers are, by name; see ``measure_time``.

    Counted are those of matrix products, convolutions and attention; not those of compiled code's kernels.
    """
    _require_values(module)
    spent: Counter[str] = Counter()
    counter = FlopTotal()
    with (
        _as_it_was(module, device),
        counter,
        _watched(module, names, spent=spent, now=lambda: counter.flops, device=device),
    ):
        run()
    return _listed(spent, names)


def _require_values(module: nn.Module) -> None:
    for name, param in module.named_parameters():
        if param.is_meta:
            raise ValueError(
                f"`{name}` is on the meta device, and only a model with values can be measured. Use"
                " `Pipeline(partition='parameters')`, or the list of first blocks that a small run was cut at."
            )


def _listed(spent: Counter[str], names: Sequence[str]) -> list[int]:
    for name in names:
        if name not in spent:
            raise ValueError(f"`{name}` is not called in a step, so its cost cannot be measured.")
    return [spent[name] for name in names]


@contextmanager
def _as_it_was(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Put buffers and random numbers back at the end."""
    state = RandomState(device)
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        state.restore()


@contextmanager
def _watched(
    module: nn.Module, names: Sequence[str], *, spent: Counter[str], now: Callable[[], int], device: torch.device
) -> Iterator[None]:
    """Add up the time or operations of some layers' calls, each on the device while it runs."""
    layers = [(name, module.get_submodule(name)) for name in names]
    inside = {id(tensor) for _, layer in layers for tensor in _tensors(layer)}
    with ExitStack() as stack:
        for tensor in _tensors(module):
            if id(tensor) not in inside:
                stack.enter_context(_moved([tensor], device))
        for name, layer in layers:
            call = _TimedCall(name, layer, spent=spent, now=now, device=device)
            stack.callback(layer.register_forward_pre_hook(call.begin, prepend=True).remove)
            stack.callback(layer.register_forward_hook(call.end).remove)
        yield


class _TimedCall:
    """The call of a layer."""

    def __init__(
        self, name: str, layer: nn.Module, *, spent: Counter[str], now: Callable[[], int], device: torch.device
    ) -> None:
        self._name = name
        self._layer = layer
        self._spent = spent
        self._now = now
        self._device = device
        self._stay = ExitStack()  # of the layer on the device
        self._began = 0

    def begin(self, *_: Any) -> None:
        self._stay.enter_context(_moved(list(_tensors(self._layer)), self._device))
        self._began = self._now()

    def end(self, *_: Any) -> None:
        self._spent[self._name] += self._now() - self._began
        self._stay.close()


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


@contextmanager
def _moved(tensors: Sequence[Tensor], device: torch.device) -> Iterator[None]:
    before = [(tensor, tensor.data) for tensor in tensors if tensor.device != device]
    for tensor, _ in before:
        tensor.data = tensor.data.to(device)
    try:
        yield
    finally:
        for tensor, data in before:
            tensor.data = data
