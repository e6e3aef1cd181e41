"""The ranks over which a flat buffer is cut; see Note [A group per buffer] in ``lightning_zero.grid``.

Note [Two levels]
    Where something is kept sharded over the ranks of a node, a buffer of n elements on M nodes of L ranks is cut in
    two levels: rank l of every node has range l of n/L elements, and of that node j has piece j of n/(L M). So a gather
    over the nodes, and one inside a node behind it, move contiguous memory each, without a copy, and each rank sends
    its own part of the bytes between nodes: a sum inside a node comes first, and only the ranges travel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_zero.comm.communicator import Communicator, Pending

__all__ = ["BufferGroup", "NodeLevels"]


@dataclass(frozen=True, eq=False)
class NodeLevels:
    """The two levels of a group: see Note [Two levels].

    Attributes:
        inner: Of the ranks of this node.
        outer: Of the ranks with this place in their nodes.
    """

    inner: Communicator
    outer: Communicator


@dataclass(frozen=True, eq=False)
class BufferGroup:
    """The ranks over which a flat buffer is cut.

    Attributes:
        communicator: Of these ranks; they tile the buffer.
        everyone: Of all ranks, which have all elements of the model once.
        divisor: Of sums of gradients.
        nodes: The ranks in two levels; None: in one.
    """

    communicator: Communicator
    everyone: Communicator
    divisor: int
    nodes: NodeLevels | None = None

    @staticmethod
    def of_all(communicator: Communicator) -> BufferGroup:
        """Return the group of a buffer that is cut over all ranks, each of which has other data."""
        return BufferGroup(communicator, communicator, communicator.world_size)

    @property
    def place(self) -> int:
        """The shard of this rank among those of the buffer."""
        if self.nodes is None:
            return self.communicator.rank
        return self.nodes.inner.rank * self.nodes.outer.world_size + self.nodes.outer.rank

    def node_range(self, numel: int) -> slice:
        """Return this rank's range in a node's buffer of ``numel`` elements; without nodes its shard."""
        ranks = self.communicator if self.nodes is None else self.nodes.inner
        size = numel // ranks.world_size
        return slice(ranks.rank * size, (ranks.rank + 1) * size)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, what: str) -> Pending:
        """Start filling a buffer with the shards of all ranks. Collective: all ranks of the group.

        Args:
            full: (n,) contiguous.
            shard: (n / ranks,) of the same dtype; may be its place in ``full``.
            what: Name of the call, for errors.
        """
        if self.nodes is None:
            return self.communicator.all_gather(full, shard, what)
        over_nodes = self.nodes.outer.all_gather(full[self.node_range(full.numel())], shard, what)
        return self.nodes.inner.all_gather_later(full, over_nodes.wait, what)

    def reduce_scatter(self, own: torch.Tensor, full: torch.Tensor, what: str) -> Pending:
        """Start averaging a buffer over the ranks, with nodes over those of this one. Collective: all ranks of these.

        On a grid an average is one of the data ranks: ranks with the same data have a factor or a summand each.

        Args:
            own: (n / ranks,), with nodes (n / ranks of a node,); may be this rank's range in ``full``.
            full: (n,) of the same dtype; its content is used up.
            what: Name of the call, for errors.
        """
        if self.nodes is None:
            return self.communicator.reduce_scatter(own, full, what, divisor=self.divisor)
        return self.nodes.inner.reduce_scatter(own, full, what, divisor=self.divisor / self.nodes.outer.world_size)

    def reduce_scatter_over_nodes(self, shard: torch.Tensor, node_sum: torch.Tensor, what: str) -> Pending:
        """Start averaging the averages of the nodes. Collective: the ranks with this one's place in their nodes.

        Args:
            shard: (n / ranks,); may be this rank's piece of ``node_sum``.
            node_sum: (n / ranks of a node,) of the same dtype; its content is used up.
            what: Name of the call, for errors.
        """
        assert self.nodes is not None
        return self.nodes.outer.reduce_scatter(shard, node_sum, f"{what} over nodes")
