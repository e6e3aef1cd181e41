"""Tensors that modules of earlier pipeline chunks compute, and code of a later chunk needs.

Note [Sources]
    Tensors that go around the blocks (a skip from the embedding to the head, the auxiliary loss of a block, hidden
    states that a hook collects) are not among the arguments of the next chunk's first block. Before the first step of a
    kind, every chunk runs the step on fakes and follows which modules' results reach its modules, its loss, or a tensor
    that it writes. These *sources* go from chunk to chunk with the arguments, and their gradients come back with the
    arguments' gradients. In the step, a module of an earlier chunk that is passed over returns its sources as they were
    sent, and the code between the modules computes with them: it is the user's, so it needs no rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_zero.trees import tree_leaves

__all__ = ["BEFORE", "FOR_HOOKS", "WHOLE", "Origins", "Shape", "Source", "describe_tensor", "is_fake"]


FOR_HOOKS = ("", "_forward_hooks", "")
WHOLE = -1  # leaf of a value that is not taken apart
BEFORE = -2  # likewise, of an attribute as a call finds it


@dataclass(frozen=True)
class Source:
    """A tensor that a call of a module returns, or leaves in the module.

    Attributes:
        module: Fully qualified name.
        call: Number of the call in a run of the step.
        left: Submodule, dictionary of it and key, for an attribute of the module; None for an output, and
            ``FOR_HOOKS`` for an output as its forward hooks are given it.
        leaf: Position among the leaves of that; ``WHOLE`` for an attribute itself, ``BEFORE`` for one before the call.
        is_number: It is no tensor; see ``sent_numbers.py``.
    """

    module: str
    call: int
    left: tuple[str, str, str] | None
    leaf: int
    is_number: bool = False


@dataclass(frozen=True)
class Shape:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_fake: bool


def is_fake(value: Any) -> bool:
    """Say whether a value stands for one that another stage computes."""
    return isinstance(value, FakeTensor)


def describe_tensor(tensor: Tensor) -> Shape:
    """Return a tensor's description."""
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return Shape(shape, stride, tensor.dtype, tensor.device, tensor.requires_grad, is_fake(tensor))


class Origins:
    """Follows in a run on fakes which sources a tensor is computed from, and which of them the chunk needs.

    Tensors that share memory have the same origins, because a write into one is a write into all.

    Args:
        available: Sources that the chunk has.
    """

    def __init__(self, available: Iterable[Source] = ()) -> None:
        self._available = frozenset(available)
        self._of: dict[int, frozenset[Source]] = {}  # by storage
        self._own: set[int] = set()  # storages of tensors that the chunk computes
        self._had: set[int] = set()  # storages of sources that it has, and of results of these alone
        self._alive: list[torch.UntypedStorage] = []
        self.results: list[Tensor] = []  # of operations between modules that need nothing of the chunk
        self._shapes: dict[Source, Shape] = {}
        self.needed: dict[Source, Shape] = {}

    def mark(self, fake: Tensor, source: Source) -> None:
        """Take note that a fake stands for a source."""
        if source in self._available:
            self._keep(fake)
            self._had.add(_key(fake))
        else:
            self._shapes.setdefault(source, describe_tensor(fake))
            self._add(fake, frozenset([source]))

    def is_missing(self, value: Any) -> bool:
        """Say whether a value is a fake that is not computed from available sources alone."""
        return is_fake(value) and (_key(value) not in self._had or bool(self.of(value)))

    def is_own(self, value: Any) -> bool:
        """Say whether there is a fake in a value that the chunk computes."""
        return any(_key(leaf) in self._own for leaf in tree_leaves(value) if is_fake(leaf))

    def mark_own(self, value: Any) -> None:
        """Take note that the chunk computes a value."""
        for fake in filter(is_fake, tree_leaves(value)):
            self._keep(fake)
            self._own.add(_key(fake))

    def derive(self, result: Any, arguments: Any) -> None:
        """Note the sources of an operation's results, or of the arguments that it has written.

        A result of both sources and values of the chunk can be computed only there, with the sources.
        """
        if self.is_own(arguments):
            self.need(arguments)
            self.mark_own(result)
            return
        self.results += filter(is_fake, tree_leaves(result))
        found = self.of(arguments)
        has_all = not any(map(self.is_missing, tree_leaves(arguments)))
        for fake in filter(is_fake, tree_leaves(result)):
            if found:
                self._add(fake, found)
            elif has_all:
                self._keep(fake)
                self._had.add(_key(fake))

    def of(self, value: Any) -> frozenset[Source]:
        """Return the sources of the fakes in a value that the chunk does not have."""
        sets = [self._of.get(_key(leaf), frozenset()) for leaf in tree_leaves(value) if is_fake(leaf)]
        return frozenset().union(*sets)

    def shapes_of(self, value: Any) -> dict[Source, Shape]:
        """Return the sources of a value that the chunk does not have, in one order on all stages."""
        return {source: self._shapes[source] for source in sorted(self.of(value), key=repr)}

    def need(self, value: Any) -> None:
        """Take note that the chunk needs a value."""
        for source, shape in self.shapes_of(value).items():
            self.needed.setdefault(source, shape)

    def need_number(self, source: Source, shape: Shape) -> None:
        """Take note that the chunk needs a number, unless it has it."""
        if source not in self._available:
            self.needed.setdefault(source, shape)

    def _add(self, fake: Tensor, sources: frozenset[Source]) -> None:
        self._keep(fake)
        self._of[_key(fake)] = self.of(fake) | sources

    def _keep(self, fake: Tensor) -> None:
        self._alive.append(fake.untyped_storage())


def _key(fake: Tensor) -> int:
    key: int = fake.untyped_storage()._cdata
    return key
