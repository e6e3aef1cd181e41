"""Gradients that were assigned by hand: every rank must have assigned the same (ADR 0033).

Note [Whole and local]
    ``param.grad = g`` with a whole ``g``, as ``torch.autograd.grad`` returns it, is no average of the engine: under
    DistributedDataParallel too such a gradient is this rank's own until the program averages it. Each rank keeps its
    segment. If the ranks had assigned different tensors, they would train segments of different gradients, and nobody
    would notice. So before a step they compare a digest of each. Ranks that have assigned nothing do not ask, so
    programs that assign nothing pay nothing; a rank that asks alone gets an error when the others do not come.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from lightning_zero.comm.communicator import Communicator
from lightning_zero.storage.references import num_tensors_in

__all__ = ["AssignedSources", "Digest", "Source", "compare", "refuse_two_changes"]

_TOLERANCE = 1e-4  # ranks that add in other orders differ in the last bits, gradients of other batches in the first


class Digest(NamedTuple):
    """A fingerprint of a gradient that distinguishes it from another rank's.

    Attributes:
        norm: Its norm.
        ramp: The sum of its elements, with weights that rise from 1 to 2.
        eps: Relative rounding error of its dtype.
        is_other: Whether ``p.grad``, which shows a segment of it, was changed beside it.
    """

    norm: float
    ramp: float
    eps: float
    is_other: bool = False

    @staticmethod
    def of(grad: torch.Tensor) -> Digest:
        """Return the digest of a whole gradient."""
        values = _flat(grad)
        eps = torch.finfo(values.dtype).eps
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        weights = torch.linspace(1, 2, values.numel(), dtype=values.dtype, device=values.device)
        return Digest(torch.linalg.vector_norm(values).item(), torch.dot(values, weights).item(), eps)

    def is_that_of(self, other: Digest) -> bool:
        """Say whether two gradients may be the same, up to their last bits."""
        tolerance = max(_TOLERANCE, 8 * self.eps, 8 * other.eps) * max(self.norm, other.norm)
        pairs = ((self.norm, other.norm), (self.ramp, other.ramp))
        return all(mine == theirs or abs(mine - theirs) <= tolerance or _both_nan(mine, theirs)
                   for mine, theirs in pairs)  # fmt: skip


class Source(NamedTuple):
    """A whole tensor that the program has assigned to ``grad``, and may change while it has it.

    Attributes:
        tensor: The tensor, strided.
        version: Of its values when they were taken over.
        bits: Sum over the bits of its values then: a version does not show writes through ``g.data`` and NumPy.
        read: A copy of the segment that the program has read of it since, and may change too; None if it has not.
    """

    tensor: torch.Tensor
    version: int
    bits: int | None
    read: torch.Tensor | None = None

    @staticmethod
    def of(tensor: torch.Tensor, read: torch.Tensor | None = None) -> Source:
        """Return the source that a tensor is with the values that it has."""
        return Source(tensor, tensor._version, _sum_of_bits(tensor), read)

    @property
    def is_changed(self) -> bool:
        """Whether the values were changed since they were taken over."""
        return self.tensor._version != self.version or _sum_of_bits(self.tensor) != self.bits

    @property
    def is_held(self) -> bool:
        """Whether anything but this refers to the tensor, or to its memory."""
        return sys.getrefcount(self.tensor) > _OWN_REFERENCES or num_tensors_in(self.tensor) > 1

    @property
    def own_references(self) -> int:
        """The number of references that ``is_held`` finds if nothing else refers to the tensor."""
        return sys.getrefcount(self.tensor)


_OWN_REFERENCES = Source(torch.empty(0, device="cpu"), 0, None).own_references


class AssignedSources:
    """The whole tensors that a program has assigned to the gradients of one buffer, by slot."""

    def __init__(self) -> None:
        self.sources: dict[int, Source] = {}  # of gradients as they are
        self.outdated: dict[int, Source] = {}  # those to which a backward has added, which they do not show
        self.brought: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # to which this backward has added

    def replace(self, index: int) -> None:
        """Take note that a gradient is assigned anew."""
        self.brought.pop(index, None)
        self.outdated.pop(index, None)

    def forget(self, indices: Iterable[int]) -> None:
        """Take note that gradients are dropped."""
        if self.sources or self.outdated or self.brought:
            for index in indices:
                self.sources.pop(index, None)
                self.replace(index)

    def agree(self, indices: Set[int]) -> None:
        """Take note of the slots to which a backward has added on some rank."""
        for index in indices & self.sources.keys():  # the gradient assigned before is only a part now
            self.outdated[index] = self.sources.pop(index)
        for index, (brought, version) in self.brought.items():
            self._note_outdated(index, brought(), version)
        self.brought.clear()
        self.outdated = {index: source for index, source in self.outdated.items() if source.is_held}

    def _note_outdated(self, index: int, tensor: torch.Tensor | None, version: int) -> None:
        if tensor is not None:
            self.outdated[index] = Source.of(tensor)._replace(version=version)

    def change(self, indices: Iterable[int], change: Callable[[torch.Tensor], Any]) -> None:
        """Apply ``change`` to tensors that the program still holds, as to the gradients made of them.

        In PyTorch they are one tensor. One that several parameters have is changed for each, and taken over again.
        """
        held = {index: self.sources.pop(index) for index in self.sources.keys() & set(indices)}
        held = {index: source for index, source in held.items() if source.is_held}
        memory = Counter(source.tensor.untyped_storage()._cdata for source in held.values())
        with torch.no_grad():
            for source in held.values():
                change(source.tensor)
                if source.read is not None:
                    change(source.read)
        for index, source in held.items():
            is_alone = memory[source.tensor.untyped_storage()._cdata] == 1
            self.sources[index] = Source.of(source.tensor, source.read) if is_alone else source


def _flat(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient's real numbers: 1-D."""
    values = grad.detach().as_subclass(torch.Tensor)
    values = (values.coalesce().to_dense() if values.is_sparse else values).reshape(-1)
    return torch.view_as_real(values).reshape(-1) if values.is_complex() else values


def _sum_of_bits(grad: torch.Tensor) -> int:
    """Return a sum, modulo 2^64, that changes with any single element, and by all chances with several.

    Four bytes, or an element of less, are an integer, which is multiplied by an odd number of its place: a hash of it,
    because those of plain numbers cancel, for example when the signs of a power of two of elements change.
    """
    values = _flat(grad)
    if values.stride(0) != 1:  # also of one element, which counts as contiguous
        values = values.clone(memory_format=torch.contiguous_format)
    bits = values.view(_INTEGERS[min(values.itemsize, 4)])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _AT_ONCE):
        part = bits[start : start + _AT_ONCE]
        place = torch.arange(start, start + part.numel(), device=bits.device).mul_(_GOLDEN)
        total += place.bitwise_xor_(place >> 29).bitwise_or_(1).mul_(part).sum()
    return int(total.item())


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # the golden ratio in 64 bits, which spreads neighbours
_AT_ONCE = 2**20  # elements: temporaries of so many take little memory


def _both_nan(mine: float, theirs: float) -> bool:
    return mine != mine and theirs != theirs


def compare(assigned: Mapping[str, Digest], communicator: Communicator) -> None:
    """Compare the ranks' assigned gradients by parameter. Collective: all ranks that have assigned a gradient.

    Raises:
        RuntimeError: They have not assigned the same, or changed it in two places.
    """
    if communicator.world_size == 1:
        for name, digest in assigned.items():
            refuse_two_changes(name, [digest])
        return
    first = next(iter(assigned))
    try:
        found = communicator.gather_objects(dict(assigned), "comparison of gradients that were assigned by hand")
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {communicator.rank} of {communicator.world_size}: the gradients of {len(assigned)} parameter(s),"
            f" `{first}` first, were assigned by hand on this rank, and not all ranks compared the gradients that they"
            f" assigned ({str(error).splitlines()[0]}). {_REMEDY}"
        ) from error
    names = list(dict.fromkeys(name for digests in found for name in digests))
    for name in names:
        _compare_one(name, [digests.get(name) for digests in found])


def _compare_one(name: str, digests: list[Digest | None]) -> None:
    without = [rank for rank, digest in enumerate(digests) if digest is None]
    if without:
        ranks = [rank for rank, digest in enumerate(digests) if digest is not None]
        raise RuntimeError(
            f"The gradient of `{name}` was assigned by hand on rank(s) {ranks} and not on rank(s) {without}. {_REMEDY}"
        )
    refuse_two_changes(name, digests)
    first = digests[0]
    assert first is not None
    others = [rank for rank, digest in enumerate(digests) if digest is not None and not first.is_that_of(digest)]
    if others:
        norms = ", ".join(f"{digest.norm:.6g}" for digest in digests if digest is not None)
        raise RuntimeError(
            f"The gradient of `{name}` was assigned by hand, and rank(s) {others} have assigned another one than rank 0"
            f" (norms by rank: {norms}). {_REMEDY}"
        )


def refuse_two_changes(name: str, digests: Sequence[Digest | None]) -> None:
    """Refuse a gradient that was changed in two places.

    Raises:
        RuntimeError: One of the digests says so.
    """
    if any(digest is not None and digest.is_other for digest in digests):
        raise RuntimeError(
            f"The gradient of `{name}` was assigned by hand, and then changed both in the tensor that was assigned and"
            " in `p.grad`, which shows a segment of a copy of it. Change one of the two, or assign it again."
        )


_REMEDY = (
    "A tensor that is assigned to `grad` (or left there by `backward(create_graph=True)`) is one rank's gradient."
    " Average it on all ranks before the step (`torch.distributed.all_reduce(grad)`, then divide it by the number of"
    " ranks; on a grid of ranks in the group of the parameter), or let `loss.backward()` do it."
)
