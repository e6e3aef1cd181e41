"""Operations of an optimizer's step that need whole parameters or gradients, whatever their results are used for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero.engine.buffers.sharded_gradient import is_elementwise
from lightning_zero.trees import tree_leaves

__all__ = ["WholeOperations"]

_MOVES = frozenset([
    "_to_copy", "_unsafe_view", "_reshape_copy", "cat", "stack", "index", "index_put", "index_put_", "masked_select",
    "bucketize", "repeat", "constant_pad_nd", "lift_fresh", "lift_fresh_copy", "_pin_memory", "is_pinned", "set_",
    "resize_", "_conj", "unsqueeze_", "squeeze_", "transpose_", "t_", "as_strided_", "is_same_size", "record_stream",
    "sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "_assert_tensor_metadata", "complex", "polar",
])  # fmt: skip
_OF_STACKED = frozenset(["amax", "amin", "max", "min", "sum", "mean", "prod", "any", "all"])
_SPOKEN = {"_local_scalar_dense": "item", "linalg_vector_norm": "norm", "mm": "matmul", "bmm": "matmul", "mv": "matmul"}


class WholeOperations(TorchDispatchMode):
    """Finds the first operation on parameters, gradients, or values made of them, that is not element-wise.

    Values are followed by their memory. An operation of another library than PyTorch is not judged.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None
        self._numels: dict[StorageWeakRef, int] = {}  # by memory: elements of the parameter that values are made of

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Follow parameters or gradients."""
        for tensor in tensors:
            self._numels[_memory(tensor)] = tensor.numel()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and look at it."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self.found is None and func.namespace == "aten" and not _makes_new(name):
            if name.startswith("_foreach_"):
                self._look_at_rows(func, args, result)
            elif name.startswith("_fused_"):
                self._mark([one for one in tree_leaves(args) if torch.is_tensor(one) and one.dim()], 0)
            else:
                self._look(func, [*args, *(kwargs or {}).values()], result)
        return result

    def _look_at_rows(self, func: Any, args: Sequence[Any], result: Any) -> None:
        lists = [one for one in args if isinstance(one, (list, tuple))]
        rows = zip(*lists, strict=False)
        made = args[0] if result is None else result
        others = [one for one in args if torch.is_tensor(one)]
        for row, one in zip(rows, made, strict=False):
            self._look(func, [*row, *others], one)

    def _look(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Note an operation that needs whole values, or follow its results."""
        numel = max((self._numel_of(one) for one in tree_leaves(args)), default=0)
        if not numel:
            return
        made = [one for one in tree_leaves(result) if torch.is_tensor(one)]
        name = func.overloadpacket.__name__
        is_of_stacked = name in _OF_STACKED and made and min(one.numel() for one in made) >= numel
        if (
            numel == 1
            or is_of_stacked
            or name in _MOVES
            or func.is_view
            or is_elementwise(func.overloadpacket, args, {})
        ):
            self._mark(made, numel)
        else:
            self.found = _SPOKEN.get(name, name.strip("_"))

    def _numel_of(self, value: Any) -> int:
        is_followed = torch.is_tensor(value) and value.layout is torch.strided
        return self._numels.get(_memory(value), 0) if is_followed else 0

    def _mark(self, tensors: Iterable[Tensor], numel: int) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided:
                memory = _memory(tensor)
                self._numels[memory] = max(self._numels.get(memory, 0), numel or tensor.numel())


def _makes_new(name: str) -> bool:
    return name.endswith("_like") or name.startswith("new_")


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
