"""Floating-point operations of PyTorch's operators: formulas, and their sum over code that runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import flop_registry

__all__ = ["FlopTotal", "counted_as_backward", "flops_of"]


class FlopTotal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the floating-point operations that are made in it, see ``flops_of``.

    Attributes:
        flops: Their number.
        is_in_backward: Whether those outside of autograd are a backward's.
    """

    supports_higher_order_operators = True  # they run as they are

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.is_in_backward = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count it."""
        result = self._by_parts(func, args, kwargs or {})
        if result is NotImplemented:
            result = func(*args, **(kwargs or {}))
            self._add(flops_of(func, args, kwargs or {}, result))
        return result

    def _add(self, flops: int) -> None:
        self.flops += flops

    def _by_parts(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator by its parts; NotImplemented if it has none, or a formula of its own.

        In inference mode the operators of layers (``linear``, ``matmul``) come whole.
        """
        packet = getattr(func, "overloadpacket", func)
        if not torch.is_inference_mode_enabled() or str(packet) in _OURS or packet in flop_registry:
            return NotImplemented
        is_nested = any(isinstance(one, Tensor) and one.is_nested for one in args)
        if not hasattr(func, "decompose") or func is torch.ops.prim.device.default or is_nested:
            return NotImplemented
        TorchDispatchMode.__enter__(self)  # type: ignore[no-untyped-call]  # not of a subclass, which begins a count
        try:
            return func.decompose(*args, **kwargs)
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]


@contextmanager
def counted_as_backward() -> Iterator[None]:
    """Run a part of a backward outside of autograd, for the counts that are running."""
    counts = [one for one in _get_current_dispatch_mode_stack() if isinstance(one, FlopTotal)]
    for count in counts:
        count.is_in_backward = True
    try:
        yield
    finally:
        for count in counts:
            count.is_in_backward = False


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the floating-point operations of a call of an operator; 0 for operators that have no formula.

    Formulas are PyTorch's, and ours where it has none: for grouped products (of experts), this package's
    ``grouped_linear`` and ``linear_cross_entropy``, recurrent layers, attention on CPUs, and attention whose keys have
    fewer heads than its queries, which PyTorch 2.11 does not take.
    """
    packet = getattr(func, "overloadpacket", func)  # higher-order operators are none
    ours, formula = _OURS.get(str(packet)), flop_registry.get(packet)
    try:
        if ours is not None:
            return int(ours(*args, **kwargs))
        return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
    except Exception as error:  # a formula does not end a training
        warnings.warn(
            f"The operations of `{packet.__name__}` are not counted, because its formula failed:"
            f" {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return 0


# -- Formulas ----------------------------------------------------------------------------------------------------------


def _grouped_product(left: Tensor, right: Tensor, *rest: Any, **options: Any) -> int:
    batches = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * batches * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _grouped_product_backward(left: Tensor, right: Tensor, *rest: Any) -> int:
    return 2 * _grouped_product(left, right)


def _grouped_linear(x: Tensor, weight: Tensor, *rest: Any) -> int:
    return 2 * x.numel() * weight.shape[1]


def _grouped_linear_backward(grad: Tensor, x: Tensor, *rest: Any) -> int:
    weight, _, by_x, by_weight, _ = rest
    return int(by_x + by_weight) * _grouped_linear(x, weight)


def _linear_cross_entropy(x: Tensor, weight: Tensor, *rest: Any) -> int:
    """Return those of logits and of gradients, which are made in the forward."""
    needs = rest[-1]
    return 2 * x.shape[0] * weight.numel() * (1 + int(needs[0]) + int(needs[1]))


def _recurrent(x: Tensor, weights: Sequence[Tensor], *rest: Any) -> int:
    steps = x.numel() // x.shape[-1]  # of all sequences
    return 2 * steps * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _recurrent_backward(x: Tensor, weights: Sequence[Tensor], *rest: Any) -> int:
    return 2 * _recurrent(x, weights)


def _recurrent_layer(x: Tensor, *rest: Any) -> int:
    return _recurrent(x, rest[:4])


def _recurrent_layer_backward(x: Tensor, *rest: Any) -> int:
    return _recurrent_backward(x, rest[:4])


def _attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> int:
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[2] * (width + value.shape[3])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> int:
    return _attention(query, key, value) * 5 // 2  # five products where the forward has two


_OURS: dict[str, Callable[..., int]] = {
    "aten._grouped_mm": _grouped_product,
    "aten._scaled_grouped_mm": _grouped_product,
    "transformers.grouped_mm_fallback": _grouped_product,
    "transformers.grouped_mm_fallback_backward": _grouped_product_backward,
    "lightning_zero.grouped_linear": _grouped_linear,
    "lightning_zero.grouped_linear_backward": _grouped_linear_backward,
    "lightning_zero.linear_cross_entropy": _linear_cross_entropy,
    "aten._cudnn_rnn": _recurrent,
    "aten._cudnn_rnn_backward": _recurrent_backward,
    "aten.mkldnn_rnn_layer": _recurrent_layer,
    "aten.mkldnn_rnn_layer_backward": _recurrent_layer_backward,
    **{
        f"aten._scaled_dot_product_{name}{suffix}": formula
        for name in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
        for suffix, formula in (("", _attention), ("_backward", _attention_backward))
    },
}
