"""All gradients of an optimizer as one vector: norms, clipping, unscaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.exact_norms import norm_over_ranks_exactly
from lightning_zero.engine.buffers.sharded_gradient import norm_of_norms, norms_of
from lightning_zero.engine.buffers.window import compare_assigned
from lightning_zero.engine.optim.flat_step import BufferSlot
from lightning_zero.engine.units.pipeline_peers import PipelinePeers

__all__ = ["Unscaled", "WholeGradients", "by_buffer"]


@dataclass(frozen=True)
class Unscaled:
    """Gradients that are divided by their loss scales, of all parts of the model; the same on every rank.

    Attributes:
        has_overflowed: One of them was not finite.
        has_gradients: There are some, on this rank or on others.
    """

    has_overflowed: bool
    has_gradients: bool


class WholeGradients:
    """The reduced gradients of chosen parameters over all ranks, of all parts of the model.

    Args:
        communicator: The ranks that share the parameters.
        parts: The other parts of the model, if there are any.
    """

    def __init__(self, communicator: Communicator, parts: PipelinePeers | None) -> None:
        self.communicator = communicator
        self._parts = parts

    @property
    def is_of_stage(self) -> bool:
        """Whether other ranks have other parameters, as pipeline stages have."""
        return self._parts is not None

    def any_is(self, flag: bool, topic: str) -> bool:
        """Say whether a flag is set on some rank, of all parts. Collective: all ranks."""
        return self._any_are([flag], topic)[0]

    def _any_are(self, flags: Sequence[bool], topic: str) -> list[bool]:
        """Say for each flag whether it is set on some rank, of all parts. Collective: all ranks."""
        agreed = self.communicator.agree_on(flags, topic)
        return [bool(one) for one in (agreed if self._parts is None else self._parts.agree_on(agreed))]

    def compare(self, buffers: Iterable[FlatBuffer]) -> None:
        """Refuse gradients that were assigned on some ranks alone. Collective where some were: all ranks."""
        compare_assigned((buffer.window for buffer in buffers), self.communicator)

    def norm(self, places: Iterable[BufferSlot], order: float = 2.0) -> torch.Tensor:
        """Return the norm of the gradients at ``places``: () fp32, fp64 if one is. Collective: all ranks."""
        places = list(places)
        has_double = any(buffer.values.stepped.dtype.to_real() == torch.float64 for buffer, _ in by_buffer(places))
        self._take(places)
        is_sharded = any(buffer.own_range.is_shard for buffer, _ in places)
        parts = self._parts
        if parts is not None:
            places = [(buffer, index) for buffer, index in places if parts.is_counted_here(buffer.params[index])]
        over = self.communicator if is_sharded else None
        if has_double and order == 2.0:
            pieces = [
                piece
                for buffer, indices in by_buffer(places)
                for piece in _pieces(buffer, indices, buffer.gradients.for_reading())
            ]
            norm = norm_over_ranks_exactly(pieces, over, self.communicator.device)
        else:
            norms = [norm for buffer, indices in by_buffer(places) for norm in _norms(buffer, indices, order)]
            norm = norm_of_norms(norms, order, over)
        norm = norm if parts is None else parts.combine_norms(norm.to(self.communicator.device), order)
        return norm.to(torch.float64 if has_double else torch.float32)

    def scale(self, places: Iterable[BufferSlot], factor: torch.Tensor, *, in_step: bool) -> None:
        """Multiply the gradients: in the step where that is one pass over them less, else at once.

        Args:
            places: Of the parameters.
            factor: () fp32 or fp64.
            in_step: The step takes factors.
        """
        factors: dict[torch.device, torch.Tensor] = {}  # the host waits once for those that it multiplies with
        for buffer, indices in by_buffer(places):
            home = buffer.home.device
            if home not in factors:
                factors[home] = factor.to(home)
            buffer.window.show_again()
            buffer.gradients.assigned.change(indices, lambda source: source.mul_(factor.to(source)))
            if not in_step or not buffer.window.scale_later(indices, factors[home].float()):
                for grad in _pieces(buffer, indices, buffer.gradients.for_writing()):
                    grad.mul_(factors[home].to(grad))
                buffer.gradients.clear_padding()

    def multiply(self, places: Iterable[BufferSlot], factor: float) -> bool:
        """Multiply the gradients; say whether one was not finite on some rank. Collective: all ranks."""
        is_finite = self._multiply([(factor, list(places))])
        return self.any_is(not is_finite, "agreement on overflow")

    def unscale(self, places: Iterable[BufferSlot], scale: float) -> Unscaled:
        """Divide the gradients by their loss scales, once. Collective: all ranks, who get the same answer.

        Args:
            places: Of the parameters.
            scale: Of gradients that the program has assigned.
        """
        places = list(places)
        self._take(places)
        there = [(buffer, index) for buffer, index in places if index in buffer.gradients.has_grad]
        by_scale: dict[float, list[BufferSlot]] = {}
        for place in there:
            by_scale.setdefault(_scale_of(place, scale), []).append(place)
        is_finite = self._multiply([(1.0 / one, some) for one, some in by_scale.items()])
        is_overflow = not is_finite or any(buffer.gradients.scales.has_overflowed(index) for buffer, index in there)
        is_overflow, has_gradients = self._any_are([is_overflow, bool(there)], "agreement on overflow")
        for buffer, indices in by_buffer(there):
            buffer.gradients.scales.unscaled(indices, overflow=is_overflow)
        return Unscaled(is_overflow, has_gradients)

    def _multiply(self, places_by_factor: Iterable[tuple[float, list[BufferSlot]]]) -> bool:
        """Multiply gradients, each group of places by its factor; say whether all were finite on this rank."""
        finite: dict[torch.device, torch.Tensor] = {}

        def multiply(grad: torch.Tensor, factor: float) -> None:
            is_finite = torch.isfinite(grad).all()
            finite[grad.device] = is_finite & finite.get(grad.device, is_finite)
            grad.mul_(factor)

        for factor, places in places_by_factor:
            self.change(places, partial(multiply, factor=factor))
        return all(bool(one) for one in finite.values())  # one wait of the host

    def change(self, places: Iterable[BufferSlot], change: Callable[[torch.Tensor], Any]) -> None:
        """Do something to each gradient of this rank."""
        places = list(places)
        self._take(places)
        for buffer, indices in by_buffer(places):
            buffer.window.show_again()
            buffer.gradients.assigned.change(indices, change)
            for grad in _pieces(buffer, indices, buffer.gradients.for_writing()):
                change(grad)

    def _take(self, places: Iterable[BufferSlot]) -> None:
        """Take over changes to gradients. Collective: all ranks that have assigned some by hand."""
        wanted = by_buffer(places)
        for buffer, indices in wanted:
            if buffer.gradients.is_waiting and indices & buffer.gradients.waiting:
                raise RuntimeError(
                    f"The gradients of unit `{buffer.name}` are used as a whole (their norm, clipping, unscaling), and"
                    " wait on every rank for the last micro-batch. Use them behind `microbatch(last=True)`, in a"
                    " LightningModule in `on_before_optimizer_step`."
                )
        buffers = [buffer for buffer, _ in wanted]
        for buffer in buffers:
            buffer.window.take_gradients()
        self.compare(buffers)


def _norms(buffer: FlatBuffer, indices: set[int], order: float) -> list[torch.Tensor]:
    known = buffer.gradients.known_norm(order) if buffer.gradients.has_grad <= indices else None
    return [known] if known is not None else norms_of(_pieces(buffer, indices, buffer.gradients.for_reading()), order)


def by_buffer(places: Iterable[BufferSlot]) -> list[tuple[FlatBuffer, set[int]]]:
    """Return the buffers at ``places``, each with its slots."""
    wanted: dict[int, tuple[FlatBuffer, set[int]]] = {}
    for buffer, index in places:
        wanted.setdefault(id(buffer), (buffer, set()))[1].add(index)
    return list(wanted.values())


def _scale_of(place: BufferSlot, assigned: float) -> float:
    buffer, index = place
    scale = buffer.gradients.scales.of(index, assigned=assigned)
    if scale is None:
        raise RuntimeError(
            f"The gradient of `{buffer.layout.slots[index].name}` comes from `loss.backward()`, or is a sum with such a"
            " gradient, while the losses of this precision are multiplied by a scale. Call"
            " `self.manual_backward(loss)`, which multiplies the loss."
        )
    return scale


def _pieces(buffer: FlatBuffer, indices: set[int], values: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the gradients of some slots as few tensors as possible: the whole buffer where all of them are meant."""
    if values is None or not buffer.gradients.has_grad:
        return []
    if buffer.gradients.has_grad <= indices:
        return [values]
    return [buffer.own_range.segment(index, values) for index in sorted(buffer.gradients.has_grad & indices)]
