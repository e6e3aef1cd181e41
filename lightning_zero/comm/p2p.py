"""Tensors from one rank to another, as messages that need no common point in time."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.comm.communicator import as_bytes
from lightning_zero.comm.direct import backend_for
from lightning_zero.comm.mesh import Mesh
from lightning_zero.comm.waits import Call, Waits, lets_device_wait

__all__ = ["PendingReceive", "P2P"]


class PendingReceive:
    """A tensor that is on its way here."""

    def __init__(
        self, p2p: P2P, peer: int, *, shape: tuple[int, ...], call: Call, work: Any, buffer: torch.Tensor
    ) -> None:
        self._mailbox = p2p
        self._shape = shape
        self._peer = peer
        self._call = call
        self._work = work
        self._buffer = buffer

    def wait(self, layout: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return the tensor when it is there.

        Args:
            layout: The strides with which it was sent; by default it is contiguous.

        Raises:
            CollectiveError: The sender failed or did not send in time.
        """
        self._mailbox.finish(self._peer, self._call, self._work)
        self._mailbox.traffic.end(f"receiving of {self._call.what}")
        flat = self._buffer.to(self._mailbox.device)
        shaped = flat.view(self._shape) if layout is None else flat.as_strided(self._shape, layout)
        return shaped.data  # no view: autograd refuses writes into views that were made without gradients


class P2P:
    """Sends to and receives from the stages of a copy. Two ranks must agree on the order of messages between them.

    Args:
        mesh: The ranks.
        device: Device of the tensors.

    Attributes:
        lets_device_wait: Whether a message that has come lies on a device, and reading it makes the host wait.
        wait_s: Seconds that the host has waited for messages. Over NCCL it does not: the device does.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.device = device
        self.sent_bytes = 0
        self.wait_s = 0.0
        self.traffic = mesh.traffic
        self._mesh = mesh
        self._group = mesh.message_group
        backend = backend_for(self._group, device)
        self._is_gloo = backend == "gloo"
        self.lets_device_wait = lets_device_wait(device, backend)
        self._waits = Waits(device, [self._group] if self.lets_device_wait else [])
        self._numbers: Counter[tuple[str, int]] = Counter()  # messages so far, by direction and peer
        self._outgoing: list[tuple[int, Call, Any, torch.Tensor]] = []  # running sends: receiver, call, work, tensor

    def send(self, peer: int, tensor: torch.Tensor, what: str, layout: tuple[int, ...] | None = None) -> None:
        """Start sending; ``flush`` before the end of the step.

        Args:
            peer: The receiver.
            tensor: The tensor.
            what: Its name, for errors.
            layout: Strides without gaps with which it is to arrive; by default it arrives contiguous.
        """
        host = _flat(tensor.detach().resolve_conj().resolve_neg(), layout)
        host = host.cpu() if self._is_gloo else host
        self._refuse_failed()
        ranks = self._mesh.ranks_of(self._mesh.stage, peer)
        self.traffic.add("messages", f"sending of {what}", host.nbytes, ranks=ranks, is_across=False)
        try:
            work = dist.isend(as_bytes(host), group=self._group, group_dst=peer, tag=self._tag("send", peer))
        except (RuntimeError, ValueError) as error:
            raise self._mesh.failure(what, error, peer) from None
        self.sent_bytes += host.nbytes
        self._outgoing.append((peer, self._waits.start(what, self._group), work, host))

    def receive(self, peer: int, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> PendingReceive:
        """Start receiving."""
        buffer = torch.empty(math.prod(shape), dtype=dtype, device="cpu" if self._is_gloo else self.device)
        self._refuse_failed()
        self.traffic.expect(f"receiving of {what}", ranks=self._mesh.ranks_of(peer, self._mesh.stage))
        try:
            work = dist.irecv(as_bytes(buffer), group=self._group, group_src=peer, tag=self._tag("receive", peer))
        except (RuntimeError, ValueError) as error:
            raise self._mesh.failure(what, error, peer) from None
        return PendingReceive(
            self, peer, shape=shape, call=self._waits.start(what, self._group), work=work, buffer=buffer
        )

    def flush(self) -> None:
        """Return when everything has been sent."""
        for peer, call, work, _ in self._outgoing:
            self.finish(peer, call, work)
            self.traffic.end(f"sending of {call.what}")
        self._outgoing.clear()

    def finish(self, peer: int, call: Call, work: Any) -> None:
        """Wait for a message to or from another stage."""
        started = time.perf_counter()
        try:
            with self._waits.wait(call):
                work.wait()
        except (RuntimeError, ValueError) as error:
            raise self._mesh.failure(call.what, error, peer) from None
        finally:
            self.wait_s += time.perf_counter() - started

    def _refuse_failed(self) -> None:
        """Refuse to send or receive more behind a message that the group has given up."""
        failure = self._waits.failure()
        if failure is not None:
            raise self._mesh.failure(failure.what, failure.reason)

    def _tag(self, direction: str, peer: int) -> int:
        self._numbers[direction, peer] += 1
        return self._mesh.loan % 2**15 * 2**15 + self._numbers[direction, peer] % 2**15


def _flat(tensor: torch.Tensor, layout: tuple[int, ...] | None) -> torch.Tensor:
    """Return the values in the order in which they lie in memory with some strides, by default contiguous."""
    if layout is None:
        return tensor.contiguous().view(-1)
    if tensor.stride() != layout:
        tensor = torch.empty_strided(tensor.shape, layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
