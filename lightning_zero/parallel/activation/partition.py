"""Inputs of checkpointed calls, divided over the ranks of a tensor group (``ActivationCheckpointing("partition")``).

The ranks of a tensor group call every block with the same hidden states. Each of them keeps ``ceil(n / T)`` of the
``n`` elements of such an input, and they gather it before the block is computed again (arXiv:1910.02054, section 6.1).

Note [Replicated inputs]
    Some inputs differ between the ranks: position biases of a rank's own heads, activations inside of a region. In the
    first call of a module the ranks compare a checksum of every input, and keep those that differ whole. Every gathered
    input is compared with the checksum of the forward, so an input that differs in a later call is an error. Inputs
    without gradients are not divided: masks and tables of positions are the same tensors in all blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_zero.parallel.module_state import version_of
from lightning_zero.parallel.writable import writable
from lightning_zero.trees import tree_flatten, tree_map_only, tree_unflatten

__all__ = ["Gathering", "PartitionedInputs", "ReplicatedInputs"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Gathering(Protocol):
    """The ranks of a tensor group, as one of them sees them."""

    rank: int
    size: int

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, of one shape, in rank order. Collective: the tensor group."""


class ReplicatedInputs:
    """The inputs of one module that are the same on all ranks, found in its first call with each number of inputs."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], bool] = {}  # by number of leaves of the arguments, and the leaf's number

    def among(self, leaves: list[Any], ranks: Gathering) -> set[int]:
        """Return the numbers of the inputs that can be divided.

        Collective in the first call: the tensor group.
        """
        candidates = [number for number, leaf in enumerate(leaves) if _can_be_divided(leaf)]
        new = [number for number in candidates if (len(leaves), number) not in self._found]
        if new:
            own = torch.stack([_checksum(_in_memory_order(leaves[number])) for number in new])
            everyone = torch.stack(ranks.all_gather(own)).tolist()
            for number, *sums in zip(new, *everyone, strict=True):
                self._found[len(leaves), number] = len(set(sums)) == 1
        return {number for number in candidates if self._found[len(leaves), number]}


class PartitionedInputs:
    """Divides inputs of calls over ranks, and gathers them for recomputations. Checkpointed modules share one.

    Args:
        ranks: The tensor group.
    """

    def __init__(self, ranks: Gathering) -> None:
        self._ranks = ranks
        # Tensors that several calls are given, such as an encoder's result; pieces live as long as their graphs.
        self._pieces: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[_Piece]]] = {}

    def __deepcopy__(self, memo: Any) -> PartitionedInputs:
        return PartitionedInputs(self._ranks)

    def send(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], inputs: ReplicatedInputs
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the call with its replicated inputs divided; the first run uses the originals, later ones gather.

        Collective in every run but the first, and in the first call of a module: the tensor group.
        """
        first = [(args, kwargs)]  # with the caller's own lists and dictionaries, which the call may fill
        leaves, spec = tree_flatten((args, kwargs))
        divided = inputs.among(leaves, self._ranks)
        leaves = [self._piece(leaf) if number in divided else leaf for number, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(leaves, spec)

        def gathering(*args: Any, **kwargs: Any) -> Any:
            if first:
                args, kwargs = first.pop()
                return run(*args, **kwargs)
            gathered: dict[_Piece, Tensor] = {}  # a tensor that is two arguments is one in every run
            args, kwargs = tree_map_only(_Piece, lambda piece: _gather_once(piece, gathered), (args, kwargs))
            return run(*args, **kwargs)

        return gathering, args, kwargs

    def _piece(self, tensor: Tensor) -> _Piece:
        """Return this rank's piece of a tensor; calls that are given the same tensor share one."""
        self._pieces = {key: known for key, known in self._pieces.items() if known[2]() is not None}
        known = self._pieces.get(id(tensor))
        piece = None if known is None else known[2]()
        if piece is None or known is None or known[0]() is not tensor or known[1] != version_of(tensor):
            piece = _Piece(tensor, self._ranks)
            self._pieces[id(tensor)] = (weakref.ref(tensor), version_of(tensor), weakref.ref(piece))
        return piece


class _Piece:
    """One rank's elements of a tensor: ``ceil(n / T)`` in the order of its memory.

    Args:
        tensor: The same on all ranks.
        ranks: The tensor group.
    """

    def __init__(self, tensor: Tensor, ranks: Gathering) -> None:
        self._ranks = ranks
        self._shape, self._strides = tensor.shape, tensor.stride()
        with torch.no_grad():
            flat = _in_memory_order(tensor.detach())
            self._numel = flat.numel()
            self._checksum = _checksum(flat)
            length = -(-flat.numel() // ranks.size)
            own = flat[ranks.rank * length : (ranks.rank + 1) * length]
            self.elements = flat.new_zeros(length)  # of the last rank some may be padding
            self.elements[: own.numel()] = own

    def gather(self) -> Tensor:
        """Return the tensor, with a gradient of its own. Collective: the tensor group.

        Raises:
            RuntimeError: It was not the same on all ranks.
        """
        with torch.no_grad():
            pieces = self._ranks.all_gather(self.elements.view(torch.uint8))  # bits of any dtype
            flat = torch.cat(pieces).view(self.elements.dtype)[: self._numel]
            torch._assert_async(_checksum(flat) == self._checksum, _DIFFERENT)
            return flat.as_strided(self._shape, self._strides)


_DIFFERENT = (  # fewer than 255 characters, which CUDA takes
    "An input of a checkpointed module was the same on all ranks of the tensor group in its first call, and differs"
    " now: `ActivationCheckpointing(policy='partition')` cannot gather it. Use policy='full', or leave it out with"
    " `modules`."
)


def _gather_once(piece: _Piece, gathered: dict[_Piece, Tensor]) -> Tensor:
    if piece not in gathered:
        gathered[piece] = writable(piece.gather().requires_grad_())
    return gathered[piece]


def _can_be_divided(leaf: Any) -> bool:
    """Say whether a leaf is a tensor with a gradient and without gaps in its memory."""
    return (
        isinstance(leaf, Tensor)
        and not isinstance(leaf, FakeTensor)
        and leaf.requires_grad
        and leaf.layout is torch.strided
        and leaf.numel() > 0
        and _has_no_gaps(leaf)
    )


def _has_no_gaps(tensor: Tensor) -> bool:
    """Say whether every element has one place, one behind the other in some order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return a 1-D view of a tensor without gaps."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _checksum(flat: Tensor) -> Tensor:
    """Return a number () int64 by which bits of a 1-D tensor can be compared."""
    as_integers = (torch.view_as_real(flat) if flat.is_complex() else flat).view(_INTEGERS[_itemsize(flat)])
    return as_integers.sum(dtype=torch.int64)


def _itemsize(flat: Tensor) -> int:
    return flat.itemsize // 2 if flat.is_complex() else flat.itemsize
