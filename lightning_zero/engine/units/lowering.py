"""Parameters that compute in 16 bits under mixed precision: matrices that only lowered operations take (ADR 0014)."""

from __future__ import annotations

import types
from collections import Counter
from typing import Any

import torch
from torch import nn

from lightning_zero.blocks import inner_module, modules_of_classes
from lightning_zero.config import MixedPrecision
from lightning_zero.engine.buffers.parameter import face_of

__all__ = ["Lowering", "embed_in_fp32", "is_lowered"]

_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_WEIGHT = frozenset({"weight"})
_IN_PROJECTIONS = frozenset({"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"})
_LOWERED: dict[type[nn.Module], frozenset[str]] = {
    nn.Linear: _WEIGHT,
    nn.Embedding: _WEIGHT,
    nn.MultiheadAttention: _IN_PROJECTIONS,
    **dict.fromkeys(_CONVOLUTIONS, _WEIGHT),
}
_LOWERED_OF_OTHERS = {
    "transformers.pytorch_utils.Conv1D": _WEIGHT,
    "lightning_zero.moe.experts.StackedLinear": _WEIGHT,
}
_CODE = ("forward", "_conv_forward")  # methods that decide which operation takes the weight


class Lowering:
    """Knows for the parameters of one module in which dtype they compute.

    Args:
        module: The module.
        precision: Compute dtype, and classes of modules whose matrices compute in it as well.

    Attributes:
        kept: Elements of matrices that stay in fp32, by the name of the class that holds them.

    Raises:
        ValueError: A class in ``precision.lowered`` is that of no module.
    """

    def __init__(self, module: nn.Module, precision: MixedPrecision) -> None:
        self._dtype = precision.compute_dtype
        self._named: set[int] = set()  # modules that the user named
        self._holders: set[tuple[int, str]] = set()  # module and key of each parameter that is lowered
        self.kept: Counter[str] = Counter()
        if self._dtype is None:
            return
        if precision.lowered:
            named = modules_of_classes(module, precision.lowered, option="lowered")
            self._named = {id(inner_module(one)) for _, one in named}
        self._find(module)

    def _find(self, module: nn.Module) -> None:
        holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for holder in module.modules():
            for key, param in holder._parameters.items():
                if param is not None and param.ndim >= 2 and param.dtype == torch.float32:
                    holders.setdefault(param, []).append((holder, key))
        for param, places in holders.items():
            if all(self._lowers(holder, key) for holder, key in places):  # a tied one in all of its modules
                self._holders.update((id(holder), key) for holder, key in places)
            else:
                self.kept[type(places[0][0]).__name__] += param.numel()

    def _lowers(self, holder: nn.Module, key: str) -> bool:
        return id(holder) in self._named or is_lowered(holder, key)

    def plan(self) -> str:
        """Return the plan's words about matrices that stay in fp32; empty if none do."""
        if not self.kept:
            return ""
        classes = ", ".join(f"`{name}`" for name, _ in self.kept.most_common(4)) + ", …" * (len(self.kept) > 4)
        return (
            f"; matrices in fp32: {self.kept.total():,} parameters of {classes}; `lowered=[...]` names classes whose"
            " matrices go only into matrix products"
        )

    def dtype(self, param: nn.Parameter, holder: nn.Module, key: str) -> torch.dtype:
        """Return the dtype in which the parameter ``key`` of the module ``holder`` computes."""
        is_lowered = self._dtype is not None and (id(holder), key) in self._holders
        return self._dtype if is_lowered and self._dtype is not None else param.dtype


def is_lowered(module: nn.Module, key: str) -> bool:
    """Say whether a module gives its parameter ``key`` to nothing but operations that round it, as far as is known.

    Known are the classes of PyTorch and Hugging Face below, and subclasses that compute as they do.
    """
    if isinstance(vars(module).get("forward"), (types.FunctionType, types.MethodType)):  # somebody's own computation
        return False
    for cls in type(module).__mro__:
        keys = _LOWERED.get(cls) or _LOWERED_OF_OTHERS.get(f"{cls.__module__}.{cls.__qualname__}")
        if keys is not None:
            return key in keys and _computes_as(module, cls) and not _writes_or_adds_rows(module)
    return False


def _computes_as(module: nn.Module, cls: type) -> bool:
    return all(getattr(type(module), name, None) is getattr(cls, name, None) for name in _CODE)


def _writes_or_adds_rows(module: nn.Module) -> bool:
    """Say whether a module is an embedding that writes its weight, or adds up rows of gradients in their own dtype."""
    return isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse)


# -- Embeddings --------------------------------------------------------------------------------------------------------


class _Lookup(torch.autograd.Function):
    """Rows of a 16-bit weight as fp32; the gradients of a row that was looked up often are added in fp32."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, module: nn.Embedding) -> Any:
        ctx.save_for_backward(ids)
        ctx.options = len(weight), -1 if module.padding_idx is None else module.padding_idx, module.scale_grad_by_freq
        return rows.float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        return torch.ops.aten.embedding_dense_backward(grads[0], ids, *ctx.options), None, None, None


def embed_in_fp32(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
    """Give an embedding's output the dtype it has under autocast, where the weight is fp32: its first forward hook.

    A CPU adds gradients in the dtype of the weight, where 256 ones and one more are 256 in bf16.
    """
    if output.dtype == torch.float32:  # outside autocast
        return output
    weight: Any = module.weight
    if face_of(weight) is not None:  # the rank has some of the rows
        return output.float()
    is_plain = isinstance(module, nn.Embedding) and is_lowered(module, "weight")
    # A hook that the program has put in front of this one may have returned another tensor.
    is_own = output.grad_fn is not None and output.grad_fn.name() == "EmbeddingBackward0"
    if not (is_plain and is_own and output.device.type == "cpu"):
        return output.float()
    assert isinstance(module, nn.Embedding)
    ids = args[0] if args else kwargs["input"]
    rows: torch.Tensor = _Lookup.apply(module.weight, ids, output.detach(), module)  # type: ignore[no-untyped-call]
    return rows
