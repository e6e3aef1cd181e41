"""The inputs of a checkpointed call, as its first run found them.

A recomputation is given the tensors of the first run, in containers of its own: the program may have added to its lists
meanwhile, and must not find a recomputation's additions. PyTorch compares the versions of tensors that are positional
arguments, and of no others. One that was changed in place is given as a copy, which the recomputation may add to, as
routers add their losses to a sum, and may not read: its values are not those of the first run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import MappingKey, keystr

from lightning_zero.parallel.module_state import version_of
from lightning_zero.parallel.writable import writable
from lightning_zero.trees import tree_flatten, tree_flatten_with_path, tree_unflatten

__all__ = ["with_first_inputs"]


def with_first_inputs(
    run: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return a call whose later runs have the inputs of the first one, and arguments to make it with.

    The first run is given the caller's own lists and dictionaries, which it may fill.

    Args:
        run: Makes the call.
        name: Of the module, for errors.
        args: Positional arguments; tensors may lie in lists, tuples and dictionaries.
        kwargs: Arguments by name.
    """
    first = [(args, kwargs)]
    leaves, spec = tree_flatten((args, kwargs))
    versions = [version_of(leaf) if isinstance(leaf, Tensor) else 0 for leaf in leaves]
    args, kwargs = tree_unflatten(leaves, spec)

    def again(*args: Any, **kwargs: Any) -> Any:
        if first:
            args, kwargs = first.pop()
            return run(*args, **kwargs)
        (found, spec), changed = tree_flatten((args, kwargs)), {}
        leaves = []
        for number, (leaf, version) in enumerate(zip(found, versions, strict=True)):
            if isinstance(leaf, Tensor) and version_of(leaf) != version:
                with _disable_current_modes():  # selective checkpointing would look for these operations
                    leaf = leaf.detach().clone().requires_grad_(leaf.requires_grad)
                leaf = writable(leaf)
                changed[_memory(leaf)] = _spelt(args, kwargs, number)
            leaves.append(leaf)
        args, kwargs = tree_unflatten(leaves, spec)
        with _Unread(changed, name) if changed else nullcontext():
            return run(*args, **kwargs)

    return again, args, kwargs


class _Unread(TorchFunctionMode):
    """Lets nobody read the memory of changed tensors; they may be changed further, and viewed.

    Args:
        changed: The argument by the address of its memory.
        name: Of the module, for errors.
    """

    def __init__(self, changed: Mapping[int, str], name: str) -> None:
        super().__init__()
        self._changed = changed
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch.

        Raises:
            RuntimeError: It reads a changed tensor.
        """
        kwargs = kwargs or {}
        found = self._tensors((args, kwargs))
        if not found:
            return func(*args, **kwargs)
        versions = [one._version for one in found]
        result = func(*args, **kwargs)
        is_written = [one._version for one in found] != versions
        if self._is_read_by_write(func, args, kwargs) if is_written else self._is_read(func, result):
            raise RuntimeError(
                f"`{self._changed[_memory(found[0])]}`, an argument of the checkpointed module `{self._name}`, was"
                " changed in place after the module was called, or by it, and the backward computes the module again"
                " with it. Compute a new tensor (`x = x + y`), give the module a copy (`.clone()`), or leave it out of"
                " `activation_checkpointing`."
            )
        return result

    def _tensors(self, values: Any) -> list[Tensor]:
        leaves = tree_flatten(values)[0]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and _memory(leaf) in self._changed]

    def _is_read_by_write(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Say whether a write depends on values that were changed, other than to add to them."""
        name = getattr(func, "__name__", "")
        if "out" in kwargs:
            return bool(self._tensors((args, {key: value for key, value in kwargs.items() if key != "out"})))
        if name in _SCALES:
            return any(isinstance(leaf, Tensor) for leaf in tree_flatten((args[1:], kwargs))[0])
        if name not in _ADDS:
            return True
        target = _memory(args[0])
        return any(_memory(one) != target for one in self._tensors((args[1:], kwargs)))

    def _is_read(self, func: Any, result: Any) -> bool:
        name = getattr(func, "__name__", "")
        if name in _NEW:
            return False
        results = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        if not results:
            return name in _READERS
        return len(self._tensors(result)) < len(results)  # others than views


_READERS = frozenset(("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "equal", "allclose"))
_ADDS = frozenset(  # nothing that autograd keeps, and no result, depends on the target
    ("add_", "sub_", "__iadd__", "__isub__", "index_add_", "scatter_add_", "zero_", "fill_", "copy_", "__setitem__")
)
_SCALES = frozenset(("mul_", "div_", "__imul__", "__itruediv__"))  # by numbers
_NEW = frozenset(  # of the target's shape or dtype
    f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
) | frozenset(f"new_{name}" for name in ("empty", "zeros", "ones", "full", "tensor", "empty_strided"))


def _memory(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        is_ordinary = tensor.layout is torch.strided
        return tensor.untyped_storage()._cdata if is_ordinary else id(tensor)


def _spelt(args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> str:
    """Return how an argument is written: its name or number, and the place in it."""
    try:
        path = tree_flatten_with_path((args, kwargs))[0][number][0]
    except ValueError:  # a class of the program's without names for its contents
        return f"tensor {number}"
    argument, rest = path[1], path[2:]  # in front of them: whether it is one by name
    name = argument.key if isinstance(argument, MappingKey) else f"argument {str(argument).strip('[]')}"
    return f"{name}{keystr(rest)}"
