"""Tensors on disks that are read when their values are used.

Shape, dtype and views of a ``DiskTensor`` are answered without reading. Any other operation wakes it first: its
record is read, the operation runs on ordinary memory, and changes are written before the memory is given back.
A view of one is one too. Copies (``clone``, ``to``, ``numpy``, pickles) are ordinary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from lightning_zero.storage.metadata import QUESTIONS
from lightning_zero.storage.residence import is_in_memory
from lightning_zero.trees import tree_leaves, tree_map_only

__all__ = [
    "RecordOwner",
    "DiskTensor",
    "on_disk",
    "call_in_memory",
    "register",
    "record_owner_of",
    "unregister",
]


class RecordOwner(Protocol):
    """The owner of a disk tensor's values."""

    name: str

    def in_memory(self, others: Sequence[Any], written: Sequence[Any]) -> AbstractContextManager[None]:
        """Have the values of this tensor and of ``others`` in memory; those of ``written`` are changed."""
        ...


_OWNERS: WeakValueDictionary[int, RecordOwner] = WeakValueDictionary()  # by storage, which a owner keeps alive

_METADATA = QUESTIONS | frozenset([
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros",
    "new_ones", "new_full", "new_tensor",
])  # fmt: skip
_VIEWS = frozenset([
    "detach", "view", "view_as", "narrow", "select", "chunk", "split", "split_with_sizes", "unbind", "squeeze",
    "unsqueeze", "expand", "expand_as", "t", "transpose", "permute", "as_strided", "alias", "movedim",
    "diagonal", "unfold", "tensor_split", "as_subclass",
])  # fmt: skip
_VIEWS_IF_CONTIGUOUS = frozenset(["reshape", "reshape_as", "flatten", "ravel", "contiguous"])
_COPIED_FIRST = frozenset(["numpy", "__array__", "__dlpack__"])
_REFUSED = frozenset(["data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_", "set_", "resize_"])
_READS = frozenset(["__invert__", "__int__", "__index__"])
# Of other functions that write, every argument is taken to be changed.
_WRITE_FIRST_ONLY = frozenset([
    "copy_", "add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "__setitem__", "__iadd__",
    "__isub__", "__imul__", "__itruediv__",
])  # fmt: skip


class DiskTensor(torch.Tensor):
    """A tensor on a disk, read from its record when its values are used."""

    is_read_lazily = True

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer questions about metadata, make views, and wake for everything else."""
        return call_in_memory(func, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        """Return an ordinary copy."""
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an ordinary copy."""
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def register(tensor: torch.Tensor, owner: RecordOwner) -> DiskTensor:
    """Return a disk tensor over the memory of ``tensor``, which ``owner`` answers for and must keep alive."""
    _OWNERS[_storage(tensor)] = owner
    face: DiskTensor = on_disk(tensor)
    return face


def unregister(tensor: torch.Tensor) -> None:
    """Remove the owner of a tensor: using the tensor is an error from now on."""
    _OWNERS.pop(_storage(tensor), None)


def on_disk(tensor: torch.Tensor) -> Any:
    """Return a disk tensor over the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        alias = tensor.detach()
    alias.__class__ = DiskTensor
    return alias


def record_owner_of(tensor: torch.Tensor) -> Any:
    """Return the owner that has a tensor's values, or None for a tensor that is not on a disk.

    Raises:
        RuntimeError: Its record was given back.
    """
    if is_in_memory(tensor):
        return None
    found = _OWNERS.get(_storage(tensor))
    if found is None:
        raise RuntimeError(
            f"The values of a tensor of shape {_shape(tensor)} were on a disk and are gone: its engine was closed,"
            " or other optimizers were attached in the place of its own. Save a checkpoint, or copy the values"
            " (`tensor.clone()`), before."
        )
    return found


def _storage(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor.untyped_storage()._cdata)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(tensor.shape)


# -- Operations --------------------------------------------------------------------------------------------------------


def call_in_memory(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
    """Call ``func`` with disk tensors among its arguments; see the note of the module."""
    kwargs = dict(kwargs or {})
    name = getattr(func, "__name__", str(func)).split(".")[0]
    if name in _REFUSED:
        raise RuntimeError(
            f"`{name}` reaches for the memory of a tensor of shape {_shape(args[0])} whose values are on a disk. Use a"
            " copy of it: `tensor.clone()`."
        )
    if name in _METADATA or name in ("__get__", "__set__", "__delete__") or _makes_view(name, args):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return result if name == "__set__" else tree_map_only(torch.Tensor, _as_disk_view, result)
    if name in _COPIED_FIRST:
        return func(args[0].clone(), *args[1:], **kwargs)
    return _call(func, name, args, kwargs)


def _call(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    owners, written = _record_owners_in((args, kwargs)), _written(name, args, kwargs)
    with owners[0].in_memory(owners, written), torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        # A written tensor is returned as it is; `to` and the like, which may return their argument, copy.
        given = {id(leaf) for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)} if written else set()
        return tree_map_only(torch.Tensor, lambda tensor: _own_memory(tensor, given), result)


def _record_owners_in(values: Any) -> list[Any]:
    found = [record_owner_of(leaf) for leaf in tree_leaves(values) if not is_in_memory(leaf)]
    return list({id(owner): owner for owner in found}.values())


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    changed = _record_owners_in(kwargs["out"]) if kwargs.get("out") is not None else []
    if kwargs.get("inplace") or kwargs.get("max_norm") is not None:  # of `torch.nn.functional`
        return changed + _record_owners_in((args, kwargs))
    is_operator = name.startswith("__")
    if name in _WRITE_FIRST_ONLY or (name.startswith("_foreach_") and name.endswith("_")):
        return changed + _record_owners_in(args[:1])
    if (name.endswith("_") and not is_operator) or (is_operator and name[2:3] == "i" and name not in _READS):
        return changed + _record_owners_in((args, kwargs))
    return changed


def _makes_view(name: str, args: tuple[Any, ...]) -> bool:
    if name in _VIEWS:
        return True
    if name in _VIEWS_IF_CONTIGUOUS:
        with torch._C.DisableTorchFunctionSubclass():
            return not is_in_memory(args[0]) and bool(args[0].is_contiguous())
    if name == "__getitem__":
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(key is None or key is Ellipsis or type(key) in (int, slice) for key in keys)
    return False


def _as_disk_view(tensor: torch.Tensor) -> torch.Tensor:
    is_plain = type(tensor) is torch.Tensor
    return on_disk(tensor) if is_plain and _storage(tensor) in _OWNERS else tensor


def _own_memory(tensor: torch.Tensor, given: set[int]) -> torch.Tensor:
    """Return a result that outlives the call: a copy, if it shares memory with a disk tensor."""
    return tensor if id(tensor) in given or _storage(tensor) not in _OWNERS else tensor.clone()
