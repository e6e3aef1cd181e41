"""The gradient of a parameter in the step window: this rank's segment, which never passes for the whole.

Element-wise operations act on the segment, norms are finished over the ranks, everything else raises an error that
names ``full_grad``. So ``torch.nn.utils.clip_grad_norm_`` and Lightning's ``grad_norm`` are right without knowing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from lightning_zero.comm.communicator import Communicator
from lightning_zero.errors import ShardedGradientError
from lightning_zero.storage.sleeping import call_awake

__all__ = [
    "ShardedGradient",
    "norm_of_norms",
    "norm_over_ranks",
    "norm_in_double",
    "norms_of",
    "sharded_gradient_class",
]

_ELEMENTWISE = frozenset([
    "clone", "detach", "detach_", "copy_", "zero_", "fill_", "to", "float", "double", "half", "bfloat16", "type",
    "cpu", "cuda", "contiguous", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "requires_grad_", "masked_fill", "masked_fill_", "type_as", "bernoulli_", "normal_", "uniform_", "numel",
    "nelement", "dim", "size", "stride", "element_size", "is_floating_point", "is_complex", "is_contiguous",
    "get_device", "data_ptr", "__hash__", "__repr__", "is_inference", "untyped_storage", "record_stream", "clip",
    "clip_", "nan_to_num", "nan_to_num_",
])  # fmt: skip
_NORMS = frozenset(["vector_norm", "linalg_vector_norm", "linalg_norm", "norm", "_foreach_norm"])
_EXTREMA = frozenset(["max", "min"])  # element-wise with a second tensor only
_OPERATORS = {"truediv": "div", "floordiv": "div", "or": "bitwise_or", "and": "bitwise_and"}


class ShardedGradient(torch.Tensor):
    """This rank's segment of a reduced gradient: (segment numel,), 1-D."""

    communicator: ClassVar[Communicator]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run element-wise operations, finish norms over the ranks, refuse the rest.

        Gradients of several units have a class each; lists of them (``_foreach_mul_``) are no conflict.
        """
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if name in _NORMS:
            return cls._norm(name, args, kwargs)
        if name == "_amp_foreach_non_finite_check_and_unscale_":  # torch.amp.GradScaler
            return cls._unscale(func, *args)
        is_reduction = name in _EXTREMA and not (len(args) > 1 and torch.is_tensor(args[1]))
        if name in ("__get__", "__set__", "__delete__") or (_is_elementwise(name) and not is_reduction):
            if any(getattr(kind, "sleeps", False) for kind in types):
                return tree_map_only(torch.Tensor, cls._own, call_awake(func, args, kwargs))
            return super().__torch_function__(func, (cls,), args, kwargs)  # type: ignore[no-untyped-call]
        raise ShardedGradientError(
            f"`{name}` needs a whole gradient, but this rank holds one segment of it. Use `strategy.full_grad(param)`"
            " (`engine.full_grad(param)`) on every rank; element-wise operations and norms work on the segment."
        )

    @classmethod
    def _own(cls, result: torch.Tensor) -> torch.Tensor:
        return result.as_subclass(cls) if type(result) is torch.Tensor else result

    @classmethod
    def _unscale(
        cls, func: Callable[..., Any], grads: Sequence[torch.Tensor], found: torch.Tensor, factor: torch.Tensor
    ) -> None:
        """Multiply gradients; all ranks learn whether one of them is not finite on some rank. Collective: all ranks."""
        func([grad.detach().as_subclass(torch.Tensor) for grad in grads], found, factor)
        on_some_rank = cls.communicator.all_reduce(
            found.to(cls.communicator.device, copy=True), "agreement on overflow", dist.ReduceOp.MAX
        )
        found.copy_(on_some_rank)

    @classmethod
    def _norm(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("input", "self", "x", "A", "tensors")
        tensors = args[0] if args else next(kwargs[key] for key in names if key in kwargs)
        order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2.0))
        if len(args) > 2 or kwargs.get("dim") is not None or kwargs.get("keepdim"):
            raise ShardedGradientError(
                f"`{name}` over a dimension needs a whole gradient. Use `strategy.full_grad(param)` on every rank."
            )
        order = 2.0 if order in (None, "fro") else float(order)
        if name == "_foreach_norm":
            return [_finished(tensor, order, cls.communicator) for tensor in tensors]
        return _finished(tensors, order, cls.communicator)


def sharded_gradient_class(communicator: Communicator) -> type[ShardedGradient]:
    """Return a gradient class whose norms are finished over ``communicator``."""
    return type("ShardedGradient", (ShardedGradient,), {"communicator": communicator})


def norm_over_ranks(segments: Sequence[torch.Tensor], order: float, communicator: Communicator | None) -> torch.Tensor:
    """Return the norm of the vector whose pieces are ``segments`` on every rank: () float64.

    Collective: all ranks, unless ``communicator`` is None because this rank holds everything. Sums are float64, so that
    how a vector is cut does not show after rounding.
    """
    return norm_of_norms(norms_of(segments, order), order, communicator)


def norm_in_double(values: torch.Tensor, order: float = 2.0) -> torch.Tensor:
    """Return the norm of real or complex values, added in float64: () float64."""
    dtype = torch.complex128 if values.is_complex() else torch.float64
    norm: torch.Tensor = torch.linalg.vector_norm(values, order, dtype=dtype)
    return norm


def norms_of(segments: Iterable[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the norm of every tensor that has elements: () float64 each."""
    return [norm_in_double(segment, order) for segment in segments if segment.numel()]


def norm_of_norms(norms: Sequence[torch.Tensor], order: float, communicator: Communicator | None) -> torch.Tensor:
    """Return the norm of the vector whose pieces have the norms ``norms`` on every rank; see ``norm_over_ranks``."""

    def over_ranks(total: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        return total if communicator is None else communicator.all_reduce(total, "a norm", op)

    device = communicator.device if communicator is not None else None
    if norms:  # some gradients may be in host memory
        norms = [norm.to(device or norms[0].device) for norm in norms]
    local = torch.stack(list(norms)) if norms else torch.zeros(1, dtype=torch.float64, device=device)
    if math.isinf(order) and order > 0:
        return over_ranks(local.max(), dist.ReduceOp.MAX)
    if math.isinf(order):
        return over_ranks(local.min() if norms else torch.full_like(local[0], math.inf), dist.ReduceOp.MIN)
    if order == 0:
        return over_ranks(local.sum())
    return over_ranks(local.pow(order).sum()).pow(1.0 / order)


def _finished(gradient: torch.Tensor, order: float, communicator: Communicator) -> torch.Tensor:
    segment = gradient.detach().as_subclass(torch.Tensor)
    return norm_over_ranks([segment], order, communicator).to(gradient.dtype)


@cache
def _is_elementwise(name: str) -> bool:
    if name in _ELEMENTWISE:
        return True
    operator = re.fullmatch(r"__(i|r)?(\w+?)__", name)
    if operator is not None:
        base = _OPERATORS.get(operator[2], operator[2])
        name = base + "_" if operator[1] == "i" else base
    name = name.removeprefix("_foreach_")
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())
