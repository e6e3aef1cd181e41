"""What modules of other pipeline stages return, as PyTorch's ``FakeTensor``: shapes and dtypes, no values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_zero.errors import PipelineError

__all__ = ["VALUES_NEEDED", "Fakes", "is_fake"]

# What operations raise that need values of a fake.
VALUES_NEEDED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class Fakes:
    """Tells what modules return from what they are called with, and remembers it.

    Args:
        names: Of the modules, by ``id``; for errors.
        free: Parameters that code outside of these modules uses.
        asleep: Lets forwards of modules go unnoticed.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        free: Sequence[nn.Parameter],
        asleep: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._names = names
        self._asleep = asleep
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._parameters: dict[int, dict[str, nn.Parameter]] = {}  # of a module, as fakes
        self._free = free
        self._known: dict[nn.Parameter, Tensor] = {}  # of these, as fakes
        self._outputs: dict[Hashable, tuple[TreeSpec, list[Any]]] = {}  # of calls
        self._made: dict[int, list[Tensor]] = {}  # fakes, by the id of what they are made of, which `_outputs` keeps
        self._given: Counter[int] = Counter()  # how many of them in this run

    def begin(self) -> None:
        """Begin a run: tell what fake tensors make of parameters that code may add to them; they read ``grad`` else."""
        self._given.clear()
        convert: Any = self._mode.fake_tensor_converter
        for param in self._free:
            known = self._known.get(param)
            if known is None or (known.dtype, known.requires_grad) != (param.dtype, param.requires_grad):
                with self._mode:
                    known = torch.empty(param.shape, dtype=param.dtype, device=param.device)
                self._known[param] = known.requires_grad_(param.requires_grad)
                convert.set_tensor_memo(param, known)

    def outputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call would return, as fakes."""
        spec, outputs, inputs = self._known_outputs(module, args, kwargs)
        return tree_unflatten([_again(output, inputs, self._fake) for output in outputs], spec)

    def _fake(self, known: _Shape) -> Tensor:
        """Return a fake that this run has not had yet: one of an earlier run, if nobody has changed it in place."""
        made, number = self._made.setdefault(id(known), []), self._given[id(known)]
        self._given[id(known)] += 1
        if number < len(made) and _describe(made[number]) == replace(known, is_fake=True):
            return made[number]
        with self._mode:
            fake = _empty(known)
        made[number : number + 1] = [fake]
        return fake

    def zeros(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call would return, with zeros that take no memory."""
        spec, outputs, inputs = self._known_outputs(module, args, kwargs)
        return tree_unflatten([_again(output, inputs, _zeros) for output in outputs], spec)

    def _known_outputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[TreeSpec, list[Any], list[Any]]:
        inputs, spec = tree_flatten((args, kwargs))
        trained = tuple(param.requires_grad for param in module.parameters())
        known = [_describe(leaf) for leaf in inputs]
        modes = (torch.is_grad_enabled(), torch.is_autocast_enabled(_autocast_device(inputs)), module.training)
        key = (id(module), spec, tuple(known), trained, modes)
        if key not in self._outputs:
            self._outputs[key] = self._imagine(module, inputs, spec)
        return *self._outputs[key], inputs

    def _imagine(self, module: nn.Module, inputs: list[Any], spec: TreeSpec) -> tuple[TreeSpec, list[Any]]:
        args, kwargs = tree_unflatten(inputs, spec)
        try:
            with self._asleep(), self._mode, _reparametrize_module(module, dict(self._fake_parameters(module))):
                output = module.forward(*args, **kwargs)
        except Exception as error:
            raise PipelineError(
                f"`{self._names[id(module)]}` lies on another pipeline stage, and what it returns could not be told"
                f" from the shapes of its arguments: {error}"
            ) from error
        positions = {id(leaf): index for index, leaf in enumerate(inputs)}
        leaves, out_spec = tree_flatten(output)
        return out_spec, [_Input(positions[id(leaf)]) if id(leaf) in positions else _describe(leaf) for leaf in leaves]

    def _fake_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        if id(module) not in self._parameters:
            with self._mode:
                self._parameters[id(module)] = {
                    name: nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device=param.device), False)
                    for name, param in module.named_parameters()
                }
        fakes = self._parameters[id(module)]
        for name, param in module.named_parameters():
            fakes[name].requires_grad_(param.requires_grad)
        return fakes


@dataclass(frozen=True)
class _Shape:
    """What is known of a tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_fake: bool


@dataclass(frozen=True)
class _Input:
    """An output that is an input."""

    leaf: int


def is_fake(value: Any) -> bool:
    """Say whether a value stands for one that another stage computes."""
    return isinstance(value, FakeTensor)


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        shape, stride = tuple(leaf.shape), tuple(leaf.stride())
        return _Shape(shape, stride, leaf.dtype, leaf.device, leaf.requires_grad, is_fake(leaf))
    return leaf if isinstance(leaf, (int, float, str, bool, bytes, torch.dtype, torch.device)) else _Object(leaf)


class _Object:
    """A value of which nothing is known but which one it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _empty(known: _Shape) -> Tensor:
    tensor = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device=known.device)
    return tensor.requires_grad_(known.requires_grad)


def _zeros(known: _Shape) -> Tensor:
    return torch.zeros((), dtype=known.dtype, device=known.device).expand(known.shape)


def _again(output: Any, inputs: Sequence[Any], make: Callable[[_Shape], Tensor]) -> Any:
    """Return an output of a call that is known."""
    if isinstance(output, _Input):
        return inputs[output.leaf]
    if isinstance(output, _Object):
        return output.value
    if not isinstance(output, _Shape):
        return output
    return make(output)


def _autocast_device(leaves: Sequence[Any]) -> str:
    return next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
