"""Gradients of weight matrices, computed apart from those of activations: the W of zero-bubble schedules.

Note [Two halves of a backward]
    ``y = x @ w`` takes two products in the backward: ``g @ w.T``, which the stage before waits for, and ``x.T @ g``,
    which only the optimizer's step needs (arXiv:2401.10241). While a forward runs, a mode lets products with a
    parameter run as a node that, in the first half, returns the former and keeps the factors of the latter; ``bring``
    multiplies them later and gives the product to autograd at the parameter, whose hooks fire as ever. The node stands
    where ``addmm`` or ``mm`` of PyTorch would stand in the graph and makes the same calls, so bits are the same. It
    saves the same tensors in the same order, which a trial finds out: activation checkpointing pairs saved and
    recomputed tensors by order, and a recomputation runs without the mode.

    Everything else is done in the first half, by autograd: biases, norms, embeddings, functions of users, compiled
    code, and products that the mode does not know. The first half is one backward of the whole graph, so each node
    and each hook runs once, and so does each recomputation.

Note [Products that are not split]
    A parameter with hooks of the program, which have its gradient once per micro-batch. A gradient asked for by
    ``torch.autograd.grad``, and a backward that builds a graph: they return it at once. A weight that autocast would
    cast, because autocast sums the gradients of several uses in the dtype that it casts to; an input that is such a
    leaf. Products that reentrant checkpointing recomputes, and other backwards inside of the first half. Forwards with
    a ``nn.MultiheadAttention`` or a layer of ``nn.TransformerEncoder`` in eval mode: any mode turns their fast path
    off, whose results differ.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from lightning_zero.flop_formulas import counted_as_backward

__all__ = ["WeightGradients"]


class WeightGradients:
    """The products for gradients of weights that wait, by micro-batch.

    Call protocol, for every micro-batch:
        1. ``split`` around its forward.
        2. ``deferring`` around the first half of its backward.
        3. ``bring``: the second half.

    Args:
        device: Where the products are computed.
        has_hooks: Says whether the program has hooks on a parameter's gradient.
    """

    def __init__(self, device: torch.device, has_hooks: Callable[[nn.Parameter], bool]) -> None:
        self.has_hooks = has_hooks
        self.orders = {kind: _save_order(kind, device) for kind in _KINDS}
        self._waiting: dict[Hashable, list[_Waiting]] = {}  # by micro-batch, in the order of the backward
        self._running: Hashable | None = None  # the micro-batch whose first half runs
        self._task: int | None = None  # PyTorch's number of that backward, once it has begun

    def split(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for a module's forward, whose products with parameters have a backward in two halves."""
        return nullcontext() if any(map(_asks_for_modes, module.modules())) else _Splitting(self)

    @contextmanager
    def deferring(self, key: Hashable, roots: Sequence[Tensor]) -> Iterator[None]:
        """Let the backward of ``roots`` leave the gradients of weights for ``bring``."""
        self._running, self._task = key, None
        self._waiting[key] = []
        # One of the roots runs before every other node, and before backwards inside of this one.
        handles = [get_gradient_edge(root).node.register_prehook(self._note_task) for root in roots]
        try:
            yield
        finally:
            self._running = self._task = None
            for handle in handles:
                handle.remove()

    def _note_task(self, grads: Any) -> None:
        if self._task is None:
            self._task = torch._C._current_graph_task_id()

    @counted_as_backward()
    def bring(self, key: Hashable) -> None:
        """Compute the gradients that a micro-batch has left, and give each to autograd at its parameter.

        Raises:
            RuntimeError: The input of a product was changed in place meanwhile, or its weight frozen.
        """
        by_weight = _by_weight(self._waiting.pop(key))
        while by_weight:
            weight, uses = next(iter(by_weight.items()))
            del by_weight[weight]
            uses[0].product.require_trained()
            with torch.no_grad():
                gradient = uses.pop(0).gradient()
                while uses:  # of one backward, so autograd would add them before the parameter has them
                    gradient = gradient + uses.pop(0).gradient()
            torch.autograd.backward([weight], [gradient])
            del gradient

    def forget(self) -> None:
        """Drop the products that wait for their gradients of weights."""
        self._waiting.clear()

    @property
    def is_deferring(self) -> bool:
        """Whether the backward that is running is a first half, and not one inside of it for some tensors only."""
        is_whole: bool = torch.autograd._is_checkpoint_valid()  # type: ignore[no-untyped-call]
        is_first_half = self._task is not None and self._task == torch._C._current_graph_task_id()
        return is_first_half and is_whole and not torch.is_grad_enabled()

    def defer(self, product: _Product, rows: Tensor, grad: Tensor) -> None:
        """Keep the input and output gradient of a product, of which the gradient of its weight is made.

        Autograd gives one tensor to several branches, whose hooks may write to it, so its values are copied.
        """
        assert self._running is not None
        self._waiting[self._running].append(_Waiting(product, rows, rows._version, _copy(grad)))


def _by_weight(waiting: list[_Waiting]) -> dict[GradientEdge, list[_Waiting]]:
    found: dict[GradientEdge, list[_Waiting]] = {}
    for one in waiting:
        found.setdefault(one.product.weight, []).append(one)
    return found


@dataclass(frozen=True)
class _Product:
    """A product of rows with a matrix, which is a weight or its transpose.

    Attributes:
        weight: Where the gradient goes.
        shape: Of the weight.
        is_transposed: The matrix is the weight's transpose.
        is_column_major: PyTorch's formulas take the matrix for a transposed one.
        saves_rows_first: PyTorch's node saves the rows before the matrix.
    """

    weight: GradientEdge
    shape: torch.Size
    is_transposed: bool
    is_column_major: bool
    saves_rows_first: bool

    @property
    def parameter(self) -> nn.Parameter:
        """The weight."""
        parameter: nn.Parameter = self.weight.node.variable  # type: ignore[attr-defined]
        return parameter

    def require_trained(self) -> None:
        """Raise if the weight was frozen behind the first half: autograd would drop its gradient in silence."""
        if not self.parameter.requires_grad:
            raise RuntimeError(
                f"A weight of shape {tuple(self.shape)} was frozen (`requires_grad_(False)`) between the two halves of"
                " a backward, and its gradient would be lost. Freeze it after the training step, or use"
                " `Pipeline(schedule='1f1b')`."
            )

    def gradient(self, rows: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of the matrix (in, out), given rows (any, in) and the product's gradient (any, out)."""
        return grad.t().mm(rows).t() if self.is_column_major else rows.t().mm(grad)


@dataclass(frozen=True)
class _Waiting:
    """The input and output gradient of a product, and the version that the input had."""

    product: _Product
    rows: Tensor
    rows_version: int
    grad: Tensor

    def gradient(self) -> Tensor:
        """Return the gradient of the weight."""
        if self.rows._version != self.rows_version:
            raise RuntimeError(
                f"The input of a product with a weight of shape {tuple(self.product.shape)} was changed in place"
                " between the two halves of a backward, and the weight's gradient is made of it. Change a copy, or use"
                " `Pipeline(schedule='1f1b')`."
            )
        gradient = self.product.gradient(self.rows, self.grad)
        return gradient.t() if self.product.is_transposed else gradient


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, on which the bits of a product may depend."""
    if tensor.numel() == 0:
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


class _Split(torch.autograd.Function):
    """``rows @ matrix``, plus a bias, whose node defers the gradient of the matrix."""

    @staticmethod
    def forward(
        ctx: Any, gradients: WeightGradients, product: _Product, rows: Tensor, matrix: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.product = gradients, product
        ctx.bias_shape = None if bias is None else bias.shape
        saved = (rows, matrix) if product.saves_rows_first else (matrix, rows)
        ctx.save_for_backward(*(saved if rows.requires_grad else (rows,)))
        return rows.mm(matrix) if bias is None else torch.addmm(bias, rows, matrix)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (grad,) = grads
        if grad is None:
            return None, None, None, None, None
        saved = ctx.saved_tensors
        rows, matrix = saved if len(saved) == 2 and ctx.product.saves_rows_first else (saved[-1], saved[0])
        of_rows = of_matrix = of_bias = None
        _, _, needs_rows, needs_matrix, needs_bias = ctx.needs_input_grad
        if needs_rows:
            of_rows = _gradient_of_rows(grad, rows, matrix)
        if needs_bias:
            of_bias = grad.sum_to_size(ctx.bias_shape)
        gradients = ctx.gradients
        if needs_matrix and gradients.is_deferring and not gradients.has_hooks(ctx.product.parameter):
            gradients.defer(ctx.product, rows, grad)
        elif needs_matrix:
            of_matrix = ctx.product.gradient(rows, grad)
        return None, None, of_rows, of_matrix, of_bias


def _gradient_of_rows(grad: Tensor, rows: Tensor, matrix: Tensor) -> Tensor:
    return matrix.mm(grad.t()).t() if _is_column_major(rows) else grad.mm(matrix.t())


def _is_column_major(matrix: Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) == matrix.size(0)


# -- Which calls are such products -------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """Properties on which the order of tensors that PyTorch saves for a product may depend."""

    is_transposed: bool
    has_bias: bool
    is_flat: bool  # of 2 dimensions


class _Call(NamedTuple):
    """The arguments of a function that multiplies by a weight."""

    x: Any
    weight: Any
    bias: Any
    is_transposed: bool

    @property
    def kind(self) -> _Kind:
        return _Kind(self.is_transposed, self.bias is not None, self.x.ndim == 2)


def _linear(input: Any, weight: Any, bias: Any = None) -> _Call:
    return _Call(input, weight, bias, is_transposed=True)


def _matmul(input: Any, other: Any) -> _Call:
    return _Call(input, other, None, is_transposed=False)


def _mm(input: Any, mat2: Any) -> _Call:
    return _Call(input, mat2, None, is_transposed=False)


def _addmm(input: Any, mat1: Any, mat2: Any) -> _Call:
    return _Call(mat1, mat2, input, is_transposed=False)


_CALLS: dict[Any, Callable[..., _Call]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.mm: _mm,
    torch.Tensor.mm: _mm,
    torch.addmm: _addmm,
}

_KINDS: dict[_Kind, Callable[[Tensor, Tensor, Tensor], Tensor]] = {  # given x, the weight, and a bias
    _Kind(True, True, True): F.linear,
    _Kind(True, True, False): F.linear,
    _Kind(True, False, True): lambda x, weight, _: F.linear(x, weight),
    _Kind(True, False, False): lambda x, weight, _: F.linear(x, weight),
    _Kind(False, False, True): lambda x, weight, _: torch.matmul(x, weight),
    _Kind(False, False, False): lambda x, weight, _: torch.matmul(x, weight),
    _Kind(False, True, True): lambda x, weight, bias: torch.addmm(bias, x, weight),
}


def _save_order(kind: _Kind, device: torch.device) -> tuple[str, ...] | None:
    """Return whether PyTorch saves rows or the matrix first; None if it saves something else."""
    names: dict[tuple[int, ...], str] = {(2, 3): "rows", (3, 5): "matrix"}
    saved: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(names.get(tuple(tensor.shape), "another"))
        return tensor

    x = torch.ones((2, 3) if kind.is_flat else (2, 1, 3), device=device, requires_grad=True)
    weight = torch.ones((5, 3) if kind.is_transposed else (3, 5), device=device, requires_grad=True)
    bias = torch.ones(5, device=device, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.enable_grad(), torch.autocast(device.type, enabled=False), hooks:
        _KINDS[kind](x, weight, bias)
    return tuple(saved) if sorted(saved) == ["matrix", "rows"] else None


def _asks_for_modes(module: nn.Module) -> bool:
    """Say whether a module computes otherwise while a mode is on."""
    kinds = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
    return not module.training and isinstance(module, kinds)


class _Splitting(TorchFunctionMode):
    """Runs products with parameters as ``_Split``."""

    def __init__(self, gradients: WeightGradients) -> None:
        super().__init__()
        self._gradients = gradients

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _CALLS or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            return func(*args, **kwargs)
        try:
            call = _CALLS[func](*args, **kwargs)
        except TypeError:  # arguments besides, such as `out`
            return func(*args, **kwargs)
        is_split = _is_split(call) and not self._gradients.has_hooks(call.weight)
        order = self._gradients.orders.get(call.kind) if is_split else None
        return func(*args, **kwargs) if order is None else self._split(call, order)

    def _split(self, call: _Call, order: Sequence[str]) -> Tensor:
        """Compute a product as PyTorch does: of 2 dimensions."""
        weight, bias = call.weight, call.bias
        x = call.x.to(_dtype_of_product(call.x))
        matrix = weight.t() if call.is_transposed else weight
        product = _Product(
            get_gradient_edge(weight),
            weight.shape,
            is_transposed=call.is_transposed,
            is_column_major=_is_column_major(matrix),
            saves_rows_first=order[0] == "rows",
        )
        rows = x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
        result: Tensor = _Split.apply(self._gradients, product, rows, matrix, bias)  # type: ignore[no-untyped-call]
        if x.ndim == 2:
            return result
        shape = [*x.shape[:-1], result.shape[-1]]
        return torch.ops.aten._unsafe_view(result, shape) if bias is None else result.view(shape)


def _is_split(call: _Call) -> bool:
    x, weight, bias = call.x, call.weight, call.bias
    if type(x) is not Tensor or x.is_nested or not _is_plain(weight) or not (weight.is_leaf and weight.requires_grad):
        return False
    if weight.ndim != 2 or x.ndim < 2 or x.shape[-1] != weight.shape[1 if call.is_transposed else 0]:
        return False
    if isinstance(x._base, nn.Parameter):  # the optimizer may write to it behind PyTorch's versions
        return False
    if x.is_leaf and x.requires_grad and _dtype_of_product(x) != x.dtype:  # autocast keeps one cast for all uses
        return False
    if x.ndim > 2 and not x.is_contiguous():  # PyTorch may batch the product
        return False
    if bias is not None and (not _is_plain(bias) or bias.ndim != 1 or bias.dtype != weight.dtype):
        return False
    if weight.device != x.device or not weight.is_floating_point() or _dtype_of_product(x) != weight.dtype:
        return False
    return forward_ad._current_level < 0 and peek_interpreter_stack() is None


def _is_plain(value: Any) -> bool:
    """Say whether a value is a parameter whose class does nothing else in operations."""
    return isinstance(value, nn.Parameter) and (
        type(value).__torch_function__ is nn.Parameter.__torch_function__
        and type(value).__torch_dispatch__ is nn.Parameter.__torch_dispatch__
    )


def _dtype_of_product(x: Tensor) -> torch.dtype:
    """Return the dtype in which a product of ``x`` is computed: that of autocast, if it is on."""
    kind = x.device.type
    is_cast = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_cast else x.dtype
