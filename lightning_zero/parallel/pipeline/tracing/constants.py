"""Tables that a forward on fakes computes from constants and keeps outside: in a cached function, a global, a class.

Note [Tables in caches]
    A forward may fill a cache (rotary angles by length, masks by shape) that later forwards read, those that compute
    among them. On fakes the entry would be a fake, which has no values. So operations whose arguments are constants are
    noted while a forward is imagined. If a result lives on when the forward has ended, the operations are run for real,
    and the fake becomes the tensor: the same object, because the cache may be anywhere.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import swap_tensors

from lightning_zero.parallel.pipeline.stages.sources import is_fake
from lightning_zero.trees import tree_leaves, tree_map

__all__ = ["Constants"]

_MOST_NUMEL = 2**24  # of a tensor that is computed for real


@dataclass(frozen=True)
class _Known:
    """A fake whose values are known, by its ``id``."""

    key: int


@dataclass(frozen=True)
class _Operation:
    function: Any
    args: Any
    kwargs: Any
    results: tuple[int | None, ...]  # by leaf: `id` of the fake


class Constants:
    """The operations of a forward on fakes whose values are known on every stage.

    Args:
        inputs: Leaves of the forward's arguments, whose values do not count: a survey has zeros in their places.
        memo: The mode's table of fakes, with weak references to them.
    """

    def __init__(self, inputs: Iterable[Any], memo: MutableMapping[Any, Tensor]) -> None:
        self._inputs = {_storage_of(one) for one in inputs if isinstance(one, Tensor) and one.layout is torch.strided}
        self._memo = memo
        self._operations: list[_Operation] = []
        self._fakes: dict[int, Tensor] = {}  # known results, by `id`
        self._storages: set[int] = set()  # of these

    def note(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, *, is_of_forward: bool
    ) -> None:
        """Note an operation, and its results if they are known.

        Args:
            function: The operation.
            args: Of it.
            kwargs: Of it.
            result: Of it.
            is_of_forward: False in hooks of the program, whose operations are not noted.
        """
        found = [leaf for leaf in tree_leaves(result) if is_fake(leaf)]
        if is_of_forward and self._are_known(function, (args, kwargs), found):
            known = [id(leaf) if is_fake(leaf) else None for leaf in tree_leaves(result)]
            self._operations.append(
                _Operation(function, tree_map(_as_known, args), tree_map(_as_known, kwargs), tuple(known))
            )
            self._fakes.update({id(leaf): leaf for leaf in found})
            self._storages.update(map(_storage_of, found))
        elif function._schema.is_mutable:
            self._storages.difference_update(map(_storage_of, filter(is_fake, tree_leaves((args, kwargs, result)))))

    def _are_known(self, function: Any, arguments: Any, results: Sequence[Tensor]) -> bool:
        given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        return (
            torch.Tag.nondeterministic_seeded not in function.tags
            and all(map(_is_plain, [*given, *results]))
            and all(map(self._is_known, given))
        )

    def _is_known(self, tensor: Tensor) -> bool:
        if is_fake(tensor):
            return id(tensor) in self._fakes and _storage_of(tensor) in self._storages
        return _storage_of(tensor) not in self._inputs

    def fill(self) -> bool:
        """Give the results that somebody keeps their values, now that the forward and its outputs are gone.

        Returns:
            Whether there are any.
        """
        alive = self._kept()
        values = self._values() if alive else {}
        self._operations.clear()  # they hold tensors
        kept = {id(fake) for _, fake in alive}
        for entry in [entry for entry, fake in self._memo.items() if id(fake) in kept]:
            del self._memo[entry]
        for key, fake in alive:
            if key in values and _storage_of(fake) in self._storages:
                _become(fake, values[key])
        return bool(alive)

    def _kept(self) -> list[tuple[int, Tensor]]:
        """Let go of the results; return those that are alive all the same."""
        found = [(key, weakref.ref(fake)) for key, fake in self._fakes.items()]
        self._fakes.clear()
        if any(one() is not None for _, one in found):
            gc.collect()  # of cycles, as those of errors that were caught
        return [(key, fake) for key, one in found if (fake := one()) is not None]

    def _values(self) -> dict[int, Tensor]:
        values: dict[int, Tensor] = {}
        with torch.no_grad(), torch.inference_mode(False), unset_fake_temporarily():
            for one in self._operations:
                args, kwargs = tree_map(_value_in(values), one.args), tree_map(_value_in(values), one.kwargs)
                results = tree_leaves(one.function(*args, **kwargs))
                values.update({key: value for key, value in zip(one.results, results, strict=True) if key is not None})
        return values


def _is_plain(tensor: Tensor) -> bool:
    return tensor.numel() <= _MOST_NUMEL and tensor.layout is torch.strided and not tensor.requires_grad


def _as_known(leaf: Any) -> Any:
    return _Known(id(leaf)) if is_fake(leaf) else leaf


def _value_in(values: Mapping[int, Tensor]) -> Any:
    return lambda leaf: values[leaf.key] if isinstance(leaf, _Known) else leaf


def _become(fake: Tensor, value: Tensor) -> None:
    """Make a fake the tensor ``value``, if nothing of PyTorch's refers to it; else it stays a fake."""
    apart = torch.empty(0, dtype=value.dtype, device=value.device)
    apart.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())  # no view of another
    try:
        swap_tensors(fake, apart)  # type: ignore[no-untyped-call]
    except RuntimeError:  # a view of it is kept as well, or a weak reference
        return


def _storage_of(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
