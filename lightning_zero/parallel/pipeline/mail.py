"""Tensors between the chunks of a pipeline, as their senders have them, and gradients, some of which do not exist.

Note [Layouts and missing gradients]
    A tensor arrives with the strides that ``torch.empty_like`` gives it on its sender, because ``torch.randn_like``
    draws in the order of memory. And an input that nothing has used has no gradient, on the stage that sent it either:
    zeros would let an optimizer decay weights, and move them by their momentum. Neither follows from a shape. In a
    step of a new kind a small message in front of the others tells them, and the host waits for it. In later steps
    tensors are sent in the layouts of the first. Which gradients exist is told in every step where a message lies in
    host memory, and where the micro-batches of the first step differed. Elsewhere the host would have to wait for the
    device in each of them: a step in which other gradients exist ends by an error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.comm.p2p import P2P, PendingReceive
from lightning_zero.errors import PipelineError

__all__ = ["Letter", "Mail"]

_Layout = tuple[int, ...]  # strides
_Sizes = Sequence[tuple[tuple[int, ...], torch.dtype]]  # shapes and dtypes of tensors
_Key = tuple[Hashable, int]  # kind of a micro-batch, and the chunk that its tensors go into


class Letter(NamedTuple):
    """Tensors that are on their way here, and the message in front of them, if there is one."""

    head: PendingReceive | None
    tensors: list[PendingReceive]


class Mail:
    """Sends tensors to the next chunk, and gradients to the one before.

    Call protocol: ``begin`` in every step; then both ends of a boundary name the same micro-batches, in one order.

    Args:
        p2p: Sends single tensors.
        num_stages: Chunks are on the stages in turn.
    """

    def __init__(self, p2p: P2P, num_stages: int) -> None:
        self.p2p = p2p
        self._num_stages = num_stages
        self._layouts: dict[_Key, list[_Layout]] = {}
        self._exist: dict[_Key, set[tuple[bool, ...]]] = {}  # gradients, in the micro-batches of the first step
        # - The step that is running
        self._kinds: Sequence[Hashable] = ()  # of its micro-batches
        self._is_new = False
        self._agreed: dict[_Key, tuple[bool, ...]] = {}  # gradients that exist, where nobody tells

    def begin(self, kinds: Sequence[Hashable], *, is_new: bool) -> None:
        """Begin a step whose micro-batches have these kinds."""
        self._kinds, self._is_new, self._agreed = kinds, is_new, {}
        if is_new:
            self.forget(lambda kind: kind in kinds)
        elif self.p2p.lets_device_wait:
            self._agreed = {key: next(iter(found)) for key, found in self._exist.items() if len(found) == 1}

    def forget(self, is_forgotten: Callable[[Hashable], bool]) -> None:
        """Forget some kinds."""
        for known in (self._layouts, self._exist):
            for key in [key for key in known if is_forgotten(key[0])]:
                del known[key]

    # -- To the next chunk ---------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], into: int, index: int, *, what: str) -> None:
        """Send tensors of a micro-batch into a chunk."""
        peer, key = into % self._num_stages, (self._kinds[index], into)
        if self._is_new:
            self._layouts[key] = [_layout_of(tensor) for tensor in tensors]
            strides = [stride for layout in self._layouts[key] for stride in layout]
            if strides:
                self.p2p.send(peer, torch.tensor(strides, device=self.p2p.device), f"layout of the {what}")
        for tensor, layout in zip(tensors, self._layouts[key], strict=True):
            self.p2p.send(peer, tensor, what, layout)

    def expect(self, sizes: _Sizes, into: int, *, what: str) -> Letter:
        """Start receiving tensors into a chunk."""
        peer, num_strides = (into - 1) % self._num_stages, sum(len(shape) for shape, _ in sizes)
        is_told = self._is_new and num_strides > 0
        head = self.p2p.receive(peer, (num_strides,), torch.int64, f"layout of the {what}") if is_told else None
        return Letter(head, [self.p2p.receive(peer, shape, dtype, what) for shape, dtype in sizes])

    def tensors(self, letter: Letter, sizes: _Sizes, into: int, index: int) -> list[Tensor]:
        """Return the tensors of a letter when they are there, in the layouts of their sender."""
        key = (self._kinds[index], into)
        if self._is_new:
            strides = iter([] if letter.head is None else letter.head.wait().tolist())
            self._layouts[key] = [tuple(next(strides) for _ in shape) for shape, _ in sizes]
        return [one.wait(layout) for one, layout in zip(letter.tensors, self._layouts[key], strict=True)]

    # -- To the chunk before -------------------------------------------------------------------------------------------

    def send_gradients(self, tensors: Sequence[Tensor], of: int, index: int, *, what: str) -> None:
        """Send the gradients of values that a chunk was sent; zeros where there is none, which the receiver is told.

        Raises:
            PipelineError: Other ones exist than in the first step of the kind, and nobody tells.
        """
        peer, key = (of - 1) % self._num_stages, (self._kinds[index], of)
        exist = tuple(tensor.grad is not None for tensor in tensors)
        if tensors and key not in self._agreed:
            flags = torch.tensor(exist, dtype=torch.uint8, device=self.p2p.device)
            self.p2p.send(peer, flags, f"existence of the {what}")
            self._note(key, exist)
        elif exist != self._agreed.get(key, exist):
            raise _changed(tensors, exist, self._agreed[key])
        for tensor in tensors:
            self.p2p.send(peer, torch.zeros_like(tensor) if tensor.grad is None else tensor.grad, what)

    def expect_gradients(self, sizes: _Sizes, of: int, index: int, *, what: str) -> Letter:
        """Start receiving the gradients of values that were sent to a chunk."""
        peer, is_told = of % self._num_stages, len(sizes) > 0 and (self._kinds[index], of) not in self._agreed
        head = self.p2p.receive(peer, (len(sizes),), torch.uint8, f"existence of the {what}") if is_told else None
        return Letter(head, [self.p2p.receive(peer, shape, dtype, what) for shape, dtype in sizes])

    def gradients(self, letter: Letter, of: int, index: int) -> list[Tensor | None]:
        """Return the gradients of a letter when they are there, None for those that do not exist."""
        key = (self._kinds[index], of)
        if letter.head is not None:
            exist = tuple(map(bool, letter.head.wait().tolist()))
            self._note(key, exist)
        else:
            exist = self._agreed.get(key, ())
        arrived = [one.wait() for one in letter.tensors]
        return [gradient if is_there else None for gradient, is_there in zip(arrived, exist, strict=True)]

    def _note(self, key: _Key, exist: tuple[bool, ...]) -> None:
        if self._is_new:
            self._exist.setdefault(key, set()).add(exist)


def _layout_of(tensor: Tensor) -> _Layout:
    return tuple(tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride())


def _changed(tensors: Sequence[Tensor], exist: tuple[bool, ...], agreed: tuple[bool, ...]) -> PipelineError:
    place = next(place for place, (now, then) in enumerate(zip(exist, agreed, strict=True)) if now != then)
    return PipelineError(
        f"The loss {'depends' if exist[place] else 'does not depend'} on a tensor of shape"
        f" {tuple(tensors[place].shape)} that an earlier pipeline stage has sent, unlike in the first batch of its"
        " kind. Let it depend on it in all batches, if need be by `loss + 0.0 * value.sum()`, or in none (`detach`)."
    )
