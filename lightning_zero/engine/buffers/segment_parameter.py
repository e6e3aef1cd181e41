"""A parameter in the step window: its values are this rank's segment, which never passes for the whole.

The tensors that its ``data``, ``detach`` and element-wise operations return are segments too: they are cut, refuse
operations and finish norms as the gradient does (``sharded_gradient.py``). So a program that logs the norms of its
weights after ``p.grad.norm()``, or writes one of their rows, is right, and a program that sums them gets an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.buffers.parameter import ReducedParameter, has_class, name_of, operation_of
from lightning_zero.engine.buffers.sharded_gradient import (
    RANDOM,
    Cut,
    ShardedGradient,
    answer_for_whole,
    asks_for_shape,
    cut_all,
    draw,
    is_elementwise,
)
from lightning_zero.errors import ShardedGradientError
from lightning_zero.storage.metadata import QUESTION_FUNCTIONS
from lightning_zero.trees import tree_leaves, tree_map_only

__all__ = ["SegmentParameter", "ShardedValues", "segment_parameter_class"]

_FILLS = {nn.init.constant_, nn.init.ones_, nn.init.zeros_}


class ShardedValues(ShardedGradient):
    """This rank's segment of a parameter's values: (segment numel,), 1-D."""

    noun = "parameter"
    reader = "full_param"

    @classmethod
    def _norm(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in _tensors(args, kwargs)):
            raise ShardedGradientError(
                f"The gradient of `{name}` needs the whole parameter, of which this rank shows one segment between a"
                " read of `p.grad`, or clipping, and the step. Compute it in the forward; under `torch.no_grad()` it"
                " is the norm of `full_param(param)`."
            )
        return super()._norm(name, args, kwargs)


class SegmentParameter(ReducedParameter):
    """A parameter in the step window that shows this rank's segment; operations on the whole parameter are refused.

    In methods of the optimizer, which are written for segments as its step is, shapes are those of the segments.
    """

    values_class: ClassVar[type[ShardedValues] | None] = None
    whole: ClassVar[Cut | None] = None
    in_methods: ClassVar[type[SegmentParameter]]  # the class that answers with the segment's shape

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run elementwise operations, refuse others by name, or leave them to the gradient beside it."""
        if func not in QUESTION_FUNCTIONS and func not in _FILLS and not is_elementwise(func, args, kwargs or {}):
            _refuse(next(leaf for leaf in _tensors(args, kwargs) if has_class(leaf, SegmentParameter)), func)
        if any(not issubclass(one, SegmentParameter) for one in types):
            return NotImplemented
        if asks_for_shape(func):
            return answer_for_whole(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if cls.values_class is not None and not name.startswith("__"):
            args, kwargs = _cut_beside(name, args, dict(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            if cls.values_class is None:
                return func(*args, **(kwargs or {}))
            if name in RANDOM and args and has_class(args[0], SegmentParameter):
                shown = args[0].detach().as_subclass(cls.values_class)
                drawn = draw(func, shown, (shown, *args[1:]), kwargs or {})
                return args[0] if name.endswith("_") else drawn
            return _as_values(cls.values_class, args, func(*args, **(kwargs or {})))

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient; in methods of the optimizer its shape is the segment's, as that of the parameter."""
        grad: torch.Tensor | None = super().grad
        if isinstance(grad, ShardedGradient) and self.whole is None:  # else `zero_grad` may have ended the window
            grad.__class__ = type(grad).in_methods
        return grad

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        super(SegmentParameter, type(self)).grad.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:
        super(SegmentParameter, type(self)).grad.__delete__(self)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse a copy, which would have this rank's segment only."""
        _refuse(self, "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled, for the same reason."""
        _refuse(self, "pickle")


def segment_parameter_class(communicator: Communicator, cut: Cut) -> type[SegmentParameter]:
    """Return the class of one parameter in the step window."""
    values = type("ShardedValues", (ShardedValues,), {"communicator": communicator, "cut": cut, "whole": cut})
    made: type[SegmentParameter] = type("SegmentParameter", (SegmentParameter,), {"values_class": values, "whole": cut})
    shown = type("ShardedValues", (values,), {"whole": None})
    made.in_methods = type("SegmentParameter", (made,), {"values_class": shown, "whole": None})
    return made


def _cut_beside(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cut whole tensors that an element-wise operation gets beside parameters."""
    tensors = _tensors(args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        shapes = {leaf.shape for leaf in tensors if has_class(leaf, SegmentParameter)}
    others = [leaf for leaf in tensors if type(leaf) is torch.Tensor or hasattr(leaf, "face")]
    if all(leaf.dim() == 0 or leaf.shape in shapes for leaf in others):
        return args, kwargs
    params: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def as_values(leaf: torch.Tensor) -> torch.Tensor:
        values = getattr(type(leaf), "values_class", None)
        if values is None:
            return leaf
        with torch._C.DisableTorchFunctionSubclass():
            shown: torch.Tensor = leaf.detach().as_subclass(values)
        params[id(shown)] = shown, leaf
        return shown

    cut = cut_all(name, *tree_map_only(torch.Tensor, as_values, (args, kwargs)))
    args, kwargs = tree_map_only(torch.Tensor, lambda leaf: params.get(id(leaf), (leaf, leaf))[1], cut)
    return args, kwargs


def _as_values(values: type[ShardedValues], args: Sequence[Any], result: Any) -> Any:
    """Mark the results of an operation on segments as segments of the same parameters."""
    if isinstance(result, (list, tuple)) and args and isinstance(args[0], (list, tuple)):
        made = [_as_values(_values_of(source, values), (), one) for source, one in zip(args[0], result, strict=False)]
        return type(result)(made)
    if type(result) is torch.Tensor and result.dim() == 1:
        return result.as_subclass(values)
    return result


def _values_of(source: Any, values: type[ShardedValues]) -> type[ShardedValues]:
    found = type(source).values_class if has_class(source, SegmentParameter) else None
    return found or values


def _tensors(*trees: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor)]


def _refuse(param: torch.Tensor, func: Any) -> NoReturn:
    raise ShardedGradientError(
        f"`{operation_of(func)}` needs the whole parameter `{name_of(param)}`, but a read of `p.grad`, or clipping, has"
        " opened the step window, in which this rank shows one segment of it. Use `strategy.full_param(param)`"
        " (`engine.full_param(param)`) on every rank, or do it before."
    )
