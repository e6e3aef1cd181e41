"""The losses of steps that a tensor group computes together: those of its ranks must be alike.

Indices of an embedding in parts must be, too: the sum over the ranks hides from the loss that they are not. Steps of
an evaluation have no backward, so a sample of their batches and results is compared in the place of a loss.

Note [Alike]
    All ranks of a tensor group sum the same parts, so on a CPU their losses have the same bits, but for a library that
    adds by the alignment of memory. On a GPU a rank may choose other kernels than its neighbour, or such as add in any
    order, and in 16 bits the rounding of all activations differs then. Ranks that draw inputs of their own differ by
    the noise of a batch, which is above that, in some step at the latest.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_zero.storage.copies import Copies, Landing
from lightning_zero.trees import tree_leaves

__all__ = ["GroupLosses", "StepDigest", "as_float", "as_number"]

_SAMPLED = 64  # elements of a tensor
_MOST_SAMPLES = 32  # tensors of a batch
_MODULUS = 2**31 - 1  # of a checksum of indices
_OF_CPU, _OF_DEVICE = (1e-5, 1e-8), (1e-2, 1e-5)  # differences that are taken for rounding: relative, absolute


class StepDigest(NamedTuple):
    """The sum of the losses of a step, that of their absolute values, and a checksum of its indices of embeddings."""

    loss: float = 0.0
    magnitude: float = 0.0
    indices: int = 0


class GroupLosses:
    """The losses of the last steps of this rank, until they are compared; the host waits for no step but old ones.

    Args:
        device: Of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = Copies(device)
        self._late = 0 if device.type == "cpu" else 1  # steps that the device may still compute
        self._loss: Tensor | None = None  # sums of losses of this step, and of their absolute values
        self._indices: Tensor | None = None  # checksum of those of this step
        self._steps: deque[tuple[Tensor, Landing]] = deque()  # in host memory, oldest first
        self._relative, self._absolute = _OF_CPU if device.type == "cpu" else _OF_DEVICE

    def add(self, loss: Tensor) -> None:
        """Add a loss of this step."""
        loss = loss.detach()
        if loss.is_floating_point():
            self._relative = max(self._relative, 2 * torch.finfo(loss.dtype).eps)
            loss = loss.double()
            sums = torch.stack([loss.sum(), loss.abs().sum()])
            self._loss = sums if self._loss is None else self._loss + sums

    def add_indices(self, indices: Tensor) -> None:
        """Add indices of an embedding in parts, of this step."""
        if torch.compiler.is_compiling() or isinstance(indices, FakeTensor) or _is_traced():
            return
        with torch.no_grad():
            flat = indices.detach().reshape(-1).long()
            places = torch.arange(1, 1 + len(flat), device=flat.device)
            found = (flat * places % _MODULUS).sum() % _MODULUS
            self._indices = found if self._indices is None else (self._indices * 31 + found) % _MODULUS

    def add_batch(self, batch: Any) -> None:
        """Add some elements of the device's tensors in a batch, before a step writes into it."""
        if self._loss is None:  # all ranks have a digest of the step
            self._loss = torch.zeros(2, dtype=torch.float64, device=self._device)
        for some in self._samples(batch):
            if some.is_floating_point():
                self.add(some.double())  # nothing has computed with it
            elif not some.is_complex():
                self.add_indices(some)

    def add_result(self, result: Any) -> None:
        """Add some numbers of a result; integers may be indices of the largest of those that differ by rounding."""
        for some in self._samples(result):
            self.add(some)

    def _samples(self, tree: Any) -> Iterator[Tensor]:
        leaves = [leaf.detach() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        kind = self._device.type
        found = [leaf for leaf in leaves if leaf.layout == torch.strided and leaf.numel() and leaf.device.type == kind]
        for leaf in found[:_MOST_SAMPLES]:
            places = torch.arange(0, leaf.numel(), max(leaf.numel() // _SAMPLED, 1), device=leaf.device)
            yield leaf[torch.unravel_index(places, leaf.shape)] if leaf.ndim else leaf

    def end_step(self) -> None:
        """Start copying the digest of a step, if there is one, to the host."""
        if self._loss is None and self._indices is None:
            return
        digest = torch.zeros(3, dtype=torch.float64, device=self._device)
        if self._loss is not None:
            digest[:2] = self._loss
        if self._indices is not None:
            digest[2] = self._indices
        host = torch.empty(3, dtype=torch.float64, pin_memory=self._device.type == "cuda", device="cpu")
        self._steps.append((host, self._copies.down(host, digest)))
        self._loss = self._indices = None

    def next(self) -> StepDigest:
        """Return the digest of the oldest step that the device has left behind; zeros if there is none."""
        return self._oldest() if len(self._steps) > self._late else StepDigest()

    def rest(self) -> Iterator[StepDigest]:
        """Yield the digests of all steps that ``next`` has not returned."""
        self.end_step()
        while self._steps:
            yield self._oldest()

    def are_alike(self, losses: Sequence[float], magnitude: float) -> bool:
        """Say whether losses of several ranks are those of one step; see Note [Alike].

        Args:
            losses: Sums, by rank.
            magnitude: The sum of the absolute values that one of them adds up, which may cancel.
        """
        first = losses[0]
        limit = max(self._absolute, self._relative * magnitude)
        return all(
            one == first
            or (math.isnan(one) and math.isnan(first))
            or math.isclose(one, first, rel_tol=0, abs_tol=limit)
            for one in losses
        )

    def _oldest(self) -> StepDigest:
        host, landing = self._steps.popleft()
        landing.finish()
        return StepDigest(float(host[0]), float(host[1]), int(host[2]))


def _is_traced() -> bool:
    """Say whether a run of the step is being described, as those of a pipeline are: it computes nothing."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0


def as_number(value: float) -> int:
    """Return the bits of a number as a signed integer of 64 bits."""
    return int.from_bytes(struct.pack("<d", value), "little", signed=True)


def as_float(number: int) -> float:
    """Return the number of which ``as_number`` has returned the bits."""
    value: float = struct.unpack("<d", number.to_bytes(8, "little", signed=True))[0]
    return value
