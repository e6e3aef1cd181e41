"""Tensors that a forward on fakes leaves outside: in globals, closures, class attributes, and objects of the program.

Note [Escapes]
    Stages that pass a module over run its forward once on fakes, and then remember its outputs and attributes. A loss
    that it appends to a global list is in neither. A fake that lives on when the forward, its outputs and their graph
    are gone is kept somewhere else, wherever that is. Such a call is not remembered: its forward runs on fakes in
    every step, so that code that reads the list finds fakes there, and is refused. Where nobody reads it, nothing is.

Note [Weak references]
    Where a module computes, the graph keeps tensors alive until the backward, and a program that looks at them through
    weak references finds them. Fakes of a forward that was imagined are gone when it ends, and such a program would go
    on without them. So weak references to them are refused when the forward ends.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.stages.sources import is_fake
from lightning_zero.trees import tree_leaves

__all__ = ["Escapes"]


_OF_FAKES = frozenset({"fake_mode", "fake_device", "constant", "real_tensor", "pytype", "dispatch_keys"})


class Escapes:
    """Watches a forward on fakes.

    Args:
        inputs: Leaves of its arguments.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._inputs = {id(leaf): leaf for leaf in inputs if isinstance(leaf, Tensor)}
        self._made: dict[int, StorageWeakRef] = {}
        self._fakes: list[Tensor] = []  # results, until the forward ends
        self._before = {key: _holders(self._inputs[key]) for key in self._inputs}
        self._weakly_held = {key: len(weakref.getweakrefs(one)) for key, one in self._inputs.items() if is_fake(one)}

    def note(self, result: Any, arguments: Any) -> None:
        """Note the results of an operation that have memory of their own."""
        given = {one.untyped_storage()._cdata for one in _strided(arguments)}
        known = set(map(id, tree_leaves(arguments)))  # a parameter that is written, to which recurrent layers refer
        self._fakes += [one for one in tree_leaves(result) if is_fake(one) and id(one) not in known]
        for one in _strided(result):
            storage = one.untyped_storage()
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def ignore(self, values: Any) -> None:
        """Do not count tensors that a hook of the program is given, which it may keep: other stages run it too."""
        self._fakes += filter(is_fake, tree_leaves(values))
        for one in _strided(values):
            key = one.untyped_storage()._cdata
            self._made.pop(key, None)
            self._weakly_held.pop(id(one), None)
            for mine in [mine for mine in _strided(self._inputs) if mine.untyped_storage()._cdata == key]:
                del self._inputs[id(mine)]

    def end(self, own: Collection[int], outputs: Iterable[Any]) -> None:
        """Let go of the results, when the forward has ended and its outputs and attributes are still there.

        Args:
            own: Weak references to fakes that are PyTorch's, by ``id``.
            outputs: Leaves of the forward's outputs.

        Raises:
            PipelineError: The program has weak references to results, or has set attributes on outputs.
        """
        held = any(id(one) not in own for fake in self._fakes for one in weakref.getweakrefs(fake))
        tagged = [
            key for fake in filter(is_fake, outputs) for key in vars(fake) if key not in _OF_FAKES and key[0] != "_"
        ]
        held |= any(len(weakref.getweakrefs(self._inputs[key])) > was for key, was in self._weakly_held.items())
        self._fakes.clear()
        if tagged:
            raise PipelineError(
                f"it sets the attribute `{tagged[0]}` on a tensor, which code on other stages would not find. Return"
                " the value, or keep it in an attribute of the module (`self.loss = ...`), which is sent"
            )
        if held:
            raise PipelineError(
                "it, or a hook on it, keeps a weak reference to a tensor that it computes (`weakref.ref`, a"
                " `WeakValueDictionary`), and code that reads it would go on without the tensor. Return the tensor, or"
                " keep it in an attribute of the module (`self.loss = ...`), which is sent"
            )

    def found(self) -> bool:
        """Say whether somebody keeps a tensor, now that the forward has ended and its outputs are gone."""
        if not self._is_kept():
            return False
        gc.collect()  # of cycles, as those of errors that were caught
        return self._is_kept()

    def _is_kept(self) -> bool:
        is_alive = any(not one.expired() for one in self._made.values())  # type: ignore[no-untyped-call]
        return is_alive or any(self._has_new_holder(key) for key in self._inputs)

    def _has_new_holder(self, key: int) -> bool:
        return any(now > was for now, was in zip(_holders(self._inputs[key]), self._before[key], strict=True))


def _holders(tensor: Tensor) -> tuple[int, int]:
    """Count references to a tensor, and tensors of its memory."""
    count = getattr(torch._C, "_storage_Use_Count", lambda _: 0)
    is_strided = tensor.layout is torch.strided
    return sys.getrefcount(tensor), count(tensor.untyped_storage()._cdata) if is_strided else 0


def _strided(values: Any) -> Iterable[Tensor]:
    return (one for one in tree_leaves(values) if isinstance(one, Tensor) and one.layout is torch.strided)
