"""A model of which other ranks hold other parts: pipeline stages, each with an engine of its own.

A parameter lies *here*, *elsewhere*, or in several parts (*shared*: tied embeddings). The gradients of a shared one are
summed over its holders when the last micro-batch before a step is done; the first of them counts it in norms and saves
it. Norms and overflows are those of all parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.buffers.buffer import FlatBuffer

__all__ = ["PipelinePeers"]


class PipelinePeers:
    """The parts of one copy of a model, and which of them hold a parameter.

    Args:
        communicator: Over one rank of every part.
        named: The parameters of the whole module by their first name.
        holders: Ranks of ``communicator`` that hold a parameter, in rising order, by the same name.
    """

    def __init__(
        self, communicator: Communicator, named: Mapping[str, nn.Parameter], holders: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.communicator = communicator
        self._holders = {id(param): holders[name] for name, param in named.items()}
        self._shared = sorted(name for name in named if len(holders[name]) > 1)

    def is_here(self, param: nn.Parameter) -> bool:
        """Say whether this part holds a parameter."""
        return self.communicator.rank in self._holders[id(param)]

    def is_shared(self, param: nn.Parameter) -> bool:
        """Say whether several parts hold a parameter."""
        return len(self._holders[id(param)]) > 1

    def is_counted_here(self, param: nn.Parameter) -> bool:
        """Say whether this part counts a parameter in norms and saves it."""
        return self._holders[id(param)][0] == self.communicator.rank

    def first_holder(self, param: nn.Parameter) -> int:
        """Return the part that counts a parameter."""
        return self._holders[id(param)][0]

    def combine_norms(self, norm: torch.Tensor, order: float) -> torch.Tensor:
        """Return the norm of all parts' vectors, given that of this part's: () float64. Collective: all parts."""
        if math.isinf(order):
            op = dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN
            return self.communicator.all_reduce(norm.clone(), "a norm", op)
        power = 1.0 if order == 0 else order
        return self.communicator.all_reduce(norm.pow(power), "a norm").pow(1.0 / power)

    def agree_on(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest numbers of all parts. Collective: all parts."""
        return self.communicator.agree_on(numbers, "agreement of the pipeline stages")

    def start_equal(self, buffers: Iterable[FlatBuffer]) -> None:
        """Give shared parameters the values of their first holder. Collective: the holders, all copies."""
        for buffer in _shared_of(buffers):
            what = f"parameter `{buffer.kind.shared}`"
            ranks = self._holders[id(buffer.params[0])]
            values = buffer.values.stepped.to(self.communicator.device)
            if self.communicator.rank == ranks[0]:
                for rank in ranks[1:]:
                    self.communicator.send(values, rank, what)
                continue
            self.communicator.receive(values, ranks[0], what)
            buffer.values.stepped.copy_(values)
            pending = buffer.publish()
            if pending is not None:
                pending.wait()
            buffer.published()

    def sum_gradients(self, buffers: Iterable[FlatBuffer]) -> list[str]:
        """Sum the reduced gradients of shared parameters over their holders, in their order. Collective: all parts.

        A parameter that is used in some of its parts only has a gradient in all of them.

        Returns:
            The names of those of which several parts had a gradient, the same in all parts.
        """
        if not self._shared:
            return []
        shared = {buffer.kind.shared: buffer for buffer in _shared_of(buffers)}
        used = [name in shared and bool(shared[name].gradients.has_grad) for name in self._shared]
        rank, last = self.communicator.rank, self.communicator.world_size - 1
        mine = [number for flag in used for number in ((rank + 1, last - rank + 1) if flag else (0, 0))]
        agreed = self.communicator.agree_on(mine, "agreement on used shared parameters")
        several = []
        for name, highest, from_end in zip(self._shared, agreed[::2], agreed[1::2], strict=True):
            if highest and name in shared:
                self._sum(shared[name])
            if highest - 1 > last - (from_end - 1):  # the lowest user
                several.append(name)
        return several

    def _sum(self, buffer: FlatBuffer) -> None:
        what = f"gradient of the shared parameter `{buffer.kind.shared}`"
        ranks = self._holders[id(buffer.params[0])]
        home = buffer.gradients.reduced_or_zeros()
        total = home.to(self.communicator.device)  # itself, unless it is offloaded
        if self.communicator.rank != ranks[0]:
            self.communicator.send(total, ranks[0], what)
            self.communicator.receive(total, ranks[0], what)
            home.copy_(total)
            return
        for rank in ranks[1:]:
            other = torch.empty_like(total)
            self.communicator.receive(other, rank, what)
            total.add_(other)
        for rank in ranks[1:]:
            self.communicator.send(total, rank, what)
        home.copy_(total)


def _shared_of(buffers: Iterable[FlatBuffer]) -> list[FlatBuffer]:
    """Return the buffers of shared parameters in the order of their names, which is the same in all parts."""
    return sorted((one for one in buffers if one.kind.shared is not None), key=lambda one: str(one.kind.shared))
