"""Collectives over gloo as direct exchanges between the ranks.

gloo's own sums and gathers pass chunks around a ring, which takes about twice as long for the sizes of activations. As
many bytes are sent here, in one step or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather", "all_reduce", "all_to_all", "backend_for", "is_direct", "reduce_scatter", "start_all_to_all"]


def backend_for(group: Any, device: torch.device) -> str:
    """Return the backend of a process group, None for the default one, that serves a device."""
    name: str = dist.get_backend(group)
    if ":" not in name and name != "undefined":
        return name
    whole: Any = group or dist.group.WORLD  # `cpu:gloo,cuda:nccl`, or none was named
    return str(whole._get_backend(device).name())


def is_direct(tensor: Tensor, group: Any, transport: str | None = None) -> bool:
    """Say whether the functions of this module take ``tensor``: on the host, over gloo, and not being compiled.

    Args:
        tensor: On any device.
        group: The ranks; the default group when None.
        transport: The backend that a pretended group stands for; None: the group is what it is.
    """
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return (transport or backend_for(group, tensor.device)) == "gloo"


def all_reduce(tensor: Tensor, group: Any, *, maximum: bool = False) -> Tensor:
    """Return the sum, or the maximum, over the ranks in a new contiguous tensor; the same bits on every rank.

    Collective: all ranks of ``group``. 16-bit values are added in fp32 and rounded once.
    """
    size, flat = dist.get_world_size(group), tensor.detach().contiguous().view(-1)
    if size == 2:
        return _reduced(_exchange([flat, flat], [flat.shape] * 2, group), maximum).view(tensor.shape)
    chunks = flat.tensor_split(size)
    own = _reduced(_exchange(chunks, [chunks[dist.get_rank(group)].shape] * size, group), maximum)
    return torch.cat(_exchange([own] * size, [chunk.shape for chunk in chunks], group)).view(tensor.shape)


def all_gather(tensor: Tensor, group: Any) -> list[Tensor]:
    """Return the tensors of all ranks, of one shape, in rank order. Collective: all ranks of ``group``."""
    size = dist.get_world_size(group)
    return _exchange([tensor.detach().contiguous()] * size, [tensor.shape] * size, group)


def reduce_scatter(shards: Sequence[Tensor], group: Any) -> Tensor:
    """Return the sum over the ranks of their tensors for this one. Collective: all ranks of ``group``.

    Args:
        shards: By rank, contiguous, of one shape.
        group: The ranks; the default group when None.
    """
    return _reduced(_exchange(shards, [shards[0].shape] * len(shards), group), maximum=False)


def all_to_all(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: Any) -> Tensor:
    """Return the rows that the ranks have for this one, in rank order. Collective: all ranks of ``group``.

    Args:
        rows: (sum of ``send``, ...) contiguous.
        send: How many rows go to each rank.
        receive: How many come from each.
        group: The ranks; the default group when None.
    """
    result, works = start_all_to_all(rows, send, receive, group)
    for work in works:
        work.wait()
    return result


def start_all_to_all(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: Any
) -> tuple[Tensor, list[dist.Work]]:
    """Return the rows of ``all_to_all`` before they have arrived, and their works. Collective: all ranks of ``group``.

    The arguments are those of ``all_to_all``.
    """
    result = rows.new_empty(sum(receive), *rows.shape[1:])
    outgoing, incoming = torch.split(rows, list(send)), torch.split(result, list(receive))
    rank = dist.get_rank(group)
    incoming[rank].copy_(outgoing[rank])
    return result, _start(outgoing, incoming, group)


def _exchange(outgoing: Sequence[Tensor], shapes: Sequence[torch.Size], group: Any) -> list[Tensor]:
    """Return the tensors that the ranks have for this one, by rank; this rank's own is not copied."""
    rank = dist.get_rank(group)
    incoming = [
        outgoing[peer] if peer == rank else torch.empty(shape, dtype=outgoing[peer].dtype, device="cpu")
        for peer, shape in enumerate(shapes)
    ]
    _send_and_receive(outgoing, incoming, group)
    return incoming


def _send_and_receive(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: Any) -> None:
    """Send each other rank its tensor, and fill the tensors of ``incoming`` with theirs; empty ones are not sent."""
    for work in _start(outgoing, incoming, group):
        work.wait()


def _start(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: Any) -> list[dist.Work]:
    """Start the transfers of ``_send_and_receive``."""
    rank = dist.get_rank(group)
    works = []
    for peer in range(len(outgoing)):
        if peer != rank and outgoing[peer].numel():
            works.append(dist.isend(outgoing[peer], group=group, group_dst=peer))
        if peer != rank and incoming[peer].numel():
            works.append(dist.irecv(incoming[peer], group=group, group_src=peer))
    return [work for work in works if work is not None]


def _reduced(tensors: Sequence[Tensor], maximum: bool) -> Tensor:
    """Return the sum, or the maximum, in rank order."""
    first, *others = tensors
    is_rounded = first.dtype in (torch.bfloat16, torch.float16) and len(others) > 1
    total = first.float() if is_rounded and not maximum else first
    for other in others:
        total = torch.maximum(total, other) if maximum else total + other
    return total.to(first.dtype)
