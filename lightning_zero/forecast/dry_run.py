"""Operations that compute nothing: results have shapes, dtypes and memory that nobody touches.

Note [How]
    Tensors are ordinary ones on the CPU, so hooks, autocast, autograd and the engine run as ever. But an operation on
    anything that is not small is not computed: a run of it on fake tensors says which results it has, and these get
    memory that is never written. The system gives a page of memory when it is first touched, so a model of any size
    takes address space alone. Small tensors (``_SMALL`` elements) have their values, which decide how a program goes
    on: counters, flags, agreements. Small results of large tensors are zeros.

Note [What is run nevertheless]
    Views, which move no memory. Operations of which fake tensors do not know the result, because it depends on values
    (``nonzero``); they read memory that was never written, zeros.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_zero.forecast.live_bytes import LiveBytes

__all__ = ["DryRun"]

_SMALL = 1024  # elements of a tensor that is computed
_aten = torch.ops.aten
_READ_VALUES = frozenset({_aten._local_scalar_dense.default, _aten.is_nonzero.default})
_UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException, NotImplementedError)

_Result = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


class DryRun(LiveBytes):
    """Counts live bytes as ``LiveBytes`` does, of a program whose operations compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._results: dict[Hashable, tuple[list[_Result | Any], Any]] = {}  # of operations on tensors of some kinds

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return what an operation would return, and count it."""
        result = self._run(func, args, kwargs or {})
        self.count(result, func)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _READ_VALUES or (tags := _kind(func)) is _VIEW:
            return func(*args, **kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if all(one.numel() <= _SMALL for one in tensors):
            return self._computed(func, args, kwargs, leaves)
        if tags is _COLLECTIVE:
            return _call_without_values(func, args, kwargs)
        if func is _aten.equal.default:
            return True  # both were made from the same values, or from none
        if tags is _IN_PLACE:
            return _written(func, args, kwargs)
        return self._unwritten(func, leaves, tree)

    def _computed(self, func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        """Compute an operation on small tensors, unless its result is large."""
        if _kind(func) is _FRESH and func not in _KEEP_SMALL:
            with suppress(*_UNKNOWN):
                results, tree = self._fake_results(func, leaves, tree_flatten((args, kwargs))[1])
                if any(_numel(one) > _SMALL for one in results):
                    return tree_unflatten([_made(one) for one in results], tree)
        return func(*args, **kwargs)

    def _unwritten(self, func: Any, leaves: list[Any], tree: Any) -> Any:
        try:
            results, result_tree = self._fake_results(func, leaves, tree)
        except _UNKNOWN:
            args, kwargs = tree_unflatten(leaves, tree)
            return func(*args, **kwargs)
        return tree_unflatten([_made(one) for one in results], result_tree)

    def _fake_results(self, func: Any, leaves: list[Any], tree: Any) -> tuple[list[Any], Any]:
        """Return sizes, strides and dtypes of an operation's results, or values that are no tensors."""
        key = (func, tree, *(_described(leaf) for leaf in leaves), torch.is_inference_mode_enabled())
        try:
            known = self._results.get(key)
        except TypeError:  # an argument that cannot be a key
            return self._ask(func, leaves, tree)
        if known is None:
            known = self._results[key] = self._ask(func, leaves, tree)
        return known

    def _ask(self, func: Any, leaves: list[Any], tree: Any) -> tuple[list[Any], Any]:
        with self._fakes:
            args, kwargs = tree_unflatten([_fake(leaf) for leaf in leaves], tree)
            results, result_tree = tree_flatten(func(*args, **kwargs))
        return [
            (one.size(), one.stride(), one.dtype, one.device) if isinstance(one, Tensor) else one for one in results
        ], result_tree


# -- Kinds of operations -----------------------------------------------------------------------------------------------

_VIEW, _IN_PLACE, _FRESH, _COLLECTIVE = "view", "in place", "fresh", "collective"
_KEEP_SMALL = frozenset({_aten.lift_fresh.default, _aten.lift_fresh_copy.default})
_KINDS: dict[Any, str] = {}


def _kind(func: Any) -> str:
    kind = _KINDS.get(func)
    if kind is None:
        kind = _KINDS[func] = _find_kind(func)
    return kind


def _find_kind(func: Any) -> str:
    schema = func._schema
    if func.namespace == "c10d":
        return _COLLECTIVE
    aliases = [one.alias_info for one in schema.returns]
    if any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments):
        return _IN_PLACE if all(one is not None and one.is_write for one in aliases) else _FRESH
    if any(one is not None for one in aliases) or func in (_aten.resize_.default, _aten.set_.source_Storage):
        return _VIEW
    return _FRESH


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments that an operation writes, as it would return them."""
    schema = func._schema
    by_alias: dict[str, Any] = {}
    for place, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            by_alias.update(dict.fromkeys(info.before_set, value))
    found = [by_alias[next(iter(one.alias_info.before_set))] for one in schema.returns]
    return None if not found else found[0] if len(found) == 1 else tuple(found)


def _call_without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a collective of a pretended world, which would write its tensors, with empty ones."""
    return func(*tree_map(_emptied, args), **tree_map(_emptied, kwargs))


def _emptied(leaf: Any) -> Any:
    return leaf.new_empty(0) if isinstance(leaf, Tensor) and leaf.numel() > _SMALL else leaf


# -- Tensors -----------------------------------------------------------------------------------------------------------


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (leaf.size(), leaf.stride(), leaf.dtype, leaf.device.type, leaf.is_conj(), leaf.is_neg())
    return (type(leaf), leaf)  # True, 1 and 1.0 are equal


def _fake(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return leaf


def _numel(result: Any) -> int:
    return result[0].numel() if isinstance(result, tuple) else 0


def _made(result: Any) -> Any:
    """Return a tensor of a kind: zeros if it is small, else memory that is not touched."""
    if not isinstance(result, tuple):
        return result
    size, stride, dtype, device = result
    tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return tensor.zero_() if size.numel() <= _SMALL else tensor
