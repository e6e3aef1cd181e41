"""Operations that compute nothing: results have shapes, dtypes and memory that nobody touches.

Note [How]
    Tensors are ordinary ones on the CPU, so hooks, autocast, autograd and the engine run as ever. But an operation on
    anything that is not small is not computed: a run of it on fake tensors says which results it has, and these get
    memory that is never written. The system gives a page of memory when it is first touched, so a model of any size
    takes address space alone. Small tensors (``_SMALL`` elements; more of integers and bools, such as positions and
    masks) have their values, which decide how a program goes on. Small results of large tensors are zeros, and so is
    everything that is read of them: what memory held before decides nothing. Gradients of a scaled
    loss count as finite.

Note [What is run nevertheless]
    Views, which move no memory. Operations of which fake tensors do not know the result, because it depends on values
    (``nonzero``); they read memory that was never written, zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_zero.engine.optim.whole_gradients import WholeGradients
from lightning_zero.engine.units import placement
from lightning_zero.forecast.live_bytes import LiveBytes, OperationKind, kind_of, replaced
from lightning_zero.forecast.pretended_disks import PretendedDisks
from lightning_zero_ops import chunks
from lightning_zero_ops.grouped import empty_grouped_mm

__all__ = ["DryRun"]

_SMALL, _SMALL_INTEGERS = 2**10, 2**20  # elements of a tensor that is computed, with and without fractions
_aten = torch.ops.aten
_RUN = frozenset(
    [
        _aten._local_scalar_dense.default, _aten.is_nonzero.default,
        _aten.resize_.default, _aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset,
    ]
)  # fmt: skip
_UNWRITTEN = frozenset(
    [_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided]
)  # fmt: skip
_READS = frozenset({_aten._local_scalar_dense.default, _aten.is_nonzero.default})
_UNKNOWN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    NotImplementedError,
)


class DryRun(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts live bytes as ``LiveBytes`` does, of a program whose operations compute nothing.

    Args:
        known: Results of operations, which runs may share.
    """

    def __init__(self, known: dict[Hashable, _Results] | None = None) -> None:
        super().__init__()
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._known = {} if known is None else known
        self._blank: set[int] = set()  # storages that are never written, by address
        self._num_threads = torch.get_num_threads()  # of the program
        self._fills = True  # new memory, where the program asks PyTorch for deterministic algorithms

    def __enter__(self) -> DryRun:
        """Begin to run dry; steps of optimizers on a CPU make no piece of theirs, and use one thread."""
        self._num_threads = torch.get_num_threads()
        self._context.callback(torch.set_num_threads, self._num_threads)
        torch.set_num_threads(1)
        deterministic: Any = torch.utils.deterministic
        self._fills = deterministic.fill_uninitialized_memory
        self._context.enter_context(replaced(deterministic, "fill_uninitialized_memory", False))
        self._context.enter_context(replaced(chunks, "_step_window", self._step_window))
        self._context.enter_context(replaced(placement, "NvmeStore", partial(PretendedDisks, transfer=self._transfer)))
        self._context.enter_context(replaced(WholeGradients, "_multiply", _multiply_finite))
        # Compiled code would be given up for good under a mode of ours.
        self._context.enter_context(torch.compiler.set_stance("force_eager"))
        super().__enter__()
        return self

    def _step_window(self, kernel: Any, window: Any, grad: Tensor, states: Sequence[Tensor], *rest: Any) -> None:
        """Make no piece of a flat step."""

    def _transfer(self, nbytes: int) -> Callable[[], None]:
        """Begin to read or write bytes of a disk; return a function that waits for it."""
        return lambda: None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Count nothing inside, and compute everything, with the program's threads and way with new memory."""
        torch.set_num_threads(self._num_threads)
        try:
            with super().suspended(), replaced(torch.utils.deterministic, "fill_uninitialized_memory", self._fills):
                yield
        finally:
            torch.set_num_threads(1)

    def write(self, tensors: Iterable[Tensor]) -> None:
        """Give values to those of some tensors that were never written: random ones from 0 to 1, zeros to integers.

        For use inside of ``suspended``.
        """
        generator = torch.Generator().manual_seed(0)
        for tensor in tensors:
            if self.is_blank(tensor):
                if tensor.is_floating_point():
                    tensor.uniform_(generator=generator)
                else:
                    tensor.zero_()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the results that an operation would have, and count them."""
        result = self._run(func, args, kwargs or {})
        self.count(result, func)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        if kind in (OperationKind.VIEW, OperationKind.LIFTED):
            return func(*args, **kwargs)
        if func in _RUN:
            is_blank = func in _READS and self.is_blank(args[0])
            return _zero_of(args[0].dtype) if is_blank else func(*args, **kwargs)
        key: list[Any] = [func, torch.get_default_dtype()]  # of new tensors, where no argument says it
        is_small = self._describe(args, key)
        if kwargs:
            key.extend(kwargs)
            is_small &= self._describe(kwargs.values(), key)
        if func is _aten.equal.default and not is_small:
            return True  # values of the same origin
        if kind is OperationKind.FRESH:
            return self._fresh(func, args, kwargs, key=key, is_small=is_small)
        if is_small:
            return func(*args, **kwargs)
        if kind is OperationKind.COLLECTIVE:
            return _call_without_values(func, args, kwargs)
        return _written(func, args, kwargs)

    def _fresh(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, key: Sequence[Hashable], is_small: bool
    ) -> Any:
        """Return new tensors: computed if they and the arguments are small, or if fakes do not know them."""
        try:
            results = self._results(func, args, kwargs, tuple(key))
        except _UNKNOWN:
            return func(*args, **kwargs)
        if is_small and results.are_small and func.overloadpacket not in _UNWRITTEN:
            return func(*args, **kwargs)
        return results.make(self._blank)

    def _describe(self, values: Iterable[Any], key: list[Any]) -> bool:
        """Append the arguments of an operation to a key, tensors without values; say whether all are to be computed."""
        is_small = True
        for value in values:
            if isinstance(value, Tensor):
                key.append((value.size(), value.stride(), value.dtype, value.device.type))
                is_small = is_small and _is_small(value.numel(), value.dtype) and not self.is_blank(value)
            elif type(value) in (list, tuple):
                key.append(len(value))
                is_small &= self._describe(value, key)
            else:
                key += (type(value), value)  # True, 1 and 1.0 are equal
        return is_small

    def is_blank(self, tensor: Tensor) -> bool:
        """Say whether a tensor lies in memory that is never written."""
        return tensor.device.type == "cpu" and tensor.untyped_storage()._cdata in self._blank

    def _forget(self, key: int) -> None:
        super()._forget(key)
        self._blank.discard(key)

    def _results(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable) -> _Results:
        try:
            known = self._known.get(key)
        except TypeError:  # an argument that cannot be a key
            return self._ask(func, args, kwargs)
        if known is None:
            known = self._known[key] = self._ask(func, args, kwargs)
        return known

    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Results:
        with self._fakes:
            of_fakes = empty_grouped_mm if func is _aten._grouped_mm.default else func
            return _Results(of_fakes(*tree_map(_fake, args), **tree_map(_fake, kwargs)))


class _Results:
    """Sizes, strides, dtypes and devices of an operation's results.

    Args:
        results: Fake tensors, and values that are none.
    """

    def __init__(self, results: Any) -> None:
        leaves, self._tree = tree_flatten(results)
        self._leaves = [_Kept.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.are_small = all(leaf.is_small for leaf in self._leaves if isinstance(leaf, _Kept))
        self._is_one = isinstance(results, Tensor)

    def make(self, blank: set[int]) -> Any:
        """Return tensors like them: zeros if they are small, else memory that is not touched, noted in ``blank``."""
        made = [leaf.make(blank) if isinstance(leaf, _Kept) else leaf for leaf in self._leaves]
        return made[0] if self._is_one else tree_unflatten(made, self._tree)


class _Kept(NamedTuple):
    """A tensor without its values."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Kept:
        return cls(tensor.size(), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def is_small(self) -> bool:
        return _is_small(self.size.numel(), self.dtype)

    def make(self, blank: set[int]) -> Tensor:
        tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        if self.is_small:
            return tensor.zero_()
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu":  # that of a fake tensor is on the meta device
            blank.add(storage._cdata)
        return tensor


def _multiply_finite(gradients: WholeGradients, *args: Any, _multiply: Any = WholeGradients._multiply) -> bool:
    """Multiply gradients, which are finite."""
    _multiply(gradients, *args)
    return True


def _is_small(numel: int, dtype: torch.dtype) -> bool:
    return numel <= (_SMALL if dtype.is_floating_point or dtype.is_complex else _SMALL_INTEGERS)


def _zero_of(dtype: torch.dtype) -> Any:
    return torch.zeros((), dtype=dtype).item()


# -- Operations --------------------------------------------------------------------------------------------------------


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments that an operation writes, as it would return them."""
    places = _PLACES.get(func)
    if places is None:
        places = _PLACES[func] = _find_places(func._schema)
    found = [args[place] if place < len(args) else kwargs[name] for place, name in places]
    return None if not found else found[0] if len(found) == 1 else tuple(found)


_PLACES: dict[Any, list[tuple[int, str]]] = {}


def _find_places(schema: Any) -> list[tuple[int, str]]:
    """Return the place and the name of the argument that is returned, for every result."""
    of = {
        alias: (place, one.name)
        for place, one in enumerate(schema.arguments)
        if one.alias_info is not None
        for alias in one.alias_info.before_set
    }
    return [of[next(iter(one.alias_info.before_set))] for one in schema.returns]


def _call_without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a collective of a pretended world, which would write its tensors, with empty ones."""
    return func(*tree_map(_emptied, args), **tree_map(_emptied, kwargs))


def _emptied(leaf: Any) -> Any:
    return leaf.new_empty(0) if isinstance(leaf, Tensor) else leaf


def _fake(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return leaf
