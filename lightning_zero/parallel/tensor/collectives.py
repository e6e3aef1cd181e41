"""Collectives inside a forward: autograd functions whose backward is the mirrored collective.

============================  ============================  ============================
function                      forward                       backward
============================  ============================  ============================
``copy_to_ranks``             the tensor itself             sum over the ranks
``reduce_from_ranks``         sum over the ranks            the gradient itself
``gather_from_ranks``         concatenation of the shards   this rank's shard
``scatter_to_ranks``          this rank's shard             concatenation of the shards
``gather_sequence``           concatenation of the shards   this rank's shard of the sum
``reduce_scatter_sequence``   this rank's shard of the sum  concatenation of the shards
============================  ============================  ============================

The first four are f, g and their relatives of Megatron-LM (arXiv:1909.08053, section 3), the last two those of sequence
parallelism (arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_zero.comm import direct
from lightning_zero.comm.peers import told_error
from lightning_zero.comm.traffic import Traffic
from lightning_zero.errors import CollectiveError

__all__ = [
    "ProcessGroupRanks",
    "Ranks",
    "copy_to_ranks",
    "gather_from_ranks",
    "gather_sequence",
    "reduce_from_ranks",
    "reduce_scatter_sequence",
    "scatter_to_ranks",
]

_Operation = Literal["none", "sum", "gather", "shard", "sum_shard"]


class Ranks(Protocol):
    """The ranks of a tensor group, as one of them sees them. All of its methods are collective.

    Attributes:
        on_indices: Is called with the indices of every embedding in parts, which must be the same on all ranks.
        end_region: While random numbers are this rank's own, lets it go on with those that all ranks draw.
        runs_all_blocks: Whether they run all blocks of a list in one forward; those of a pipeline stage do not.
    """

    rank: int
    size: int
    on_indices: Callable[[Tensor], None] | None
    end_region: Callable[[], None] | None
    runs_all_blocks: bool

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> Tensor:
        """Return the sum, or the maximum, over the ranks in a new tensor; the same bits on every rank."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order."""

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's shard, along ``dim``, of the sum over the ranks."""


class ProcessGroupRanks:
    """Ranks of a process group. Copies of a module share it. Tensors without values are not sent.

    Args:
        group: The ranks; all when None.

    Attributes:
        traffic: Counts the calls, but for those of compiled code; that of the engine which shards the module.
        transport: As in ``direct.is_direct``.

    Raises:
        CollectiveError: A rank of the group did not come in time, or has failed; from every method.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.traffic = Traffic()
        self.transport: str | None = None
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.on_indices: Callable[[Tensor], None] | None = None
        self.end_region: Callable[[], None] | None = None
        self.runs_all_blocks = True

    def __deepcopy__(self, memo: Any) -> ProcessGroupRanks:
        return self

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> Tensor:
        """Return the sum, or the maximum, over the ranks in a new tensor."""
        if isinstance(tensor, FakeTensor):
            return tensor.detach().clone(memory_format=torch.contiguous_format)
        sent_bytes = 2 * tensor.nbytes * (self.size - 1) // self.size
        with self._called("sum" if not maximum else "maximum", tensor, sent_bytes):
            if direct.is_direct(tensor, self.group, self.transport):
                return direct.all_reduce(tensor, self.group, maximum=maximum)
            result = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.all_reduce(result, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=self.group)
            return result

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order."""
        tensor = tensor.detach().contiguous()
        if isinstance(tensor, FakeTensor):
            return [torch.empty_like(tensor) for _ in range(self.size)]
        with self._called("gather", tensor, tensor.nbytes * (self.size - 1)):
            if direct.is_direct(tensor, self.group, self.transport):
                return direct.all_gather(tensor, self.group)
            results = [torch.empty_like(tensor) for _ in range(self.size)]
            dist.all_gather(results, tensor, group=self.group)
            return results

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's shard, along ``dim``, of the sum over the ranks."""
        shards = [shard.contiguous() for shard in tensor.detach().chunk(self.size, dim)]
        if isinstance(tensor, FakeTensor):
            return torch.empty_like(shards[self.rank])
        with self._called("reduce-scatter", tensor, shards[self.rank].nbytes * (self.size - 1)):
            if direct.is_direct(tensor, self.group, self.transport):
                return direct.reduce_scatter(shards, self.group)
            result = torch.empty_like(shards[self.rank])
            dist.reduce_scatter(result, shards, group=self.group)
            return result

    def _called(self, operation: str, tensor: Tensor, sent_bytes: int) -> AbstractContextManager[None]:
        """Count a call, unless it is being compiled, and name it in errors."""
        if torch.compiler.is_compiling():
            return self._named(operation, tensor)
        return self._counted(operation, tensor, sent_bytes)

    @contextmanager
    def _counted(self, operation: str, tensor: Tensor, sent_bytes: int) -> Iterator[None]:
        what = f"{operation} of activations of shape {tuple(tensor.shape)}"
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        with self._named(operation, tensor), self.traffic.during("tensor", what, sent_bytes, ranks=ranks):
            yield

    @contextmanager
    def _named(self, operation: str, tensor: Tensor) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            start = (
                f"Tensor rank {self.rank} of {self.size} (rank {dist.get_rank()}): the {operation} of activations of"
                f" shape {tuple(tensor.shape)} failed"
            )
            if told := told_error():
                raise CollectiveError(f"{start}.{told}") from None
            raise CollectiveError(
                f"{start}: {error}. A rank of the group has stopped, runs other layers, or was slower than `timeout`:"
                " the first error of the other ranks says which. All ranks of a tensor group must run the same layers"
                " on the same batches."
            ) from None


def copy_to_ranks(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Enter a region in which every rank computes its part: the gradient is the sum of the parts' gradients."""
    return _apply(tensor, ranks, forward="none", backward="sum")


def reduce_from_ranks(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Leave a region: sum the partial results of the ranks."""
    return _apply(tensor, ranks, forward="sum", backward="none")


def gather_from_ranks(tensor: Tensor, ranks: Ranks, dim: int = -1) -> Tensor:
    """Concatenate the shards of the ranks along ``dim``; all ranks go on with the same values."""
    return _apply(tensor, ranks, forward="gather", backward="shard", dim=dim)


def scatter_to_ranks(tensor: Tensor, ranks: Ranks, dim: int = -1) -> Tensor:
    """Return this rank's shard, along ``dim``, of a tensor that all ranks have."""
    _require_divisible(tensor, ranks, dim)
    return _apply(tensor, ranks, forward="shard", backward="gather", dim=dim)


def gather_sequence(tensor: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Enter a region from shards of a sequence: concatenate them; the gradient is this rank's shard of the sum."""
    return _apply(tensor, ranks, forward="gather", backward="sum_shard", dim=dim)


def reduce_scatter_sequence(tensor: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Leave a region to shards of a sequence: return this rank's shard of the sum of partial results."""
    _require_divisible(tensor, ranks, dim)
    return _apply(tensor, ranks, forward="sum_shard", backward="gather", dim=dim)


def _require_divisible(tensor: Tensor, ranks: Ranks, dim: int) -> None:
    if tensor.shape[dim] % ranks.size:
        raise ValueError(
            f"Dimension {dim} of a tensor of shape {tuple(tensor.shape)} cannot be divided over {ranks.size} ranks of"
            " tensor parallelism. Pad it to a multiple of their number."
        )


def _eager_before_2_13(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Break the graph of a compiled block around a collective: older versions lose sums in backwards they trace."""
    disable: Any = torch.compiler.disable
    return disable(function) if torch.torch_version.TorchVersion(torch.__version__) < "2.13" else function


@_eager_before_2_13
def _apply(tensor: Tensor, ranks: Ranks, *, forward: _Operation, backward: _Operation, dim: int = -1) -> Tensor:
    result: Tensor = _Mirrored.apply(tensor, ranks, forward, backward, dim)  # type: ignore[no-untyped-call]
    return result


def _run(operation: _Operation, tensor: Tensor, ranks: Ranks, dim: int) -> Tensor:
    if operation == "sum":
        return ranks.all_reduce(tensor)
    if operation == "gather":
        return torch.cat(ranks.all_gather(tensor), dim)
    if operation == "shard":
        return tensor.chunk(ranks.size, dim)[ranks.rank].clone(memory_format=torch.contiguous_format)
    return ranks.reduce_scatter(tensor, dim)


class _Mirrored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks, forward: _Operation, backward: _Operation, dim: int) -> Tensor:
        ctx.ranks, ctx.mirrored, ctx.dim = ranks, (backward, forward), dim
        return tensor.view_as(tensor) if forward == "none" else _run(forward, tensor, ranks, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # The gradient of a gradient is the operation itself: `torch.autograd.grad(..., create_graph=True)`.
        forward, backward = ctx.mirrored
        return _apply(grads[0], ctx.ranks, forward=forward, backward=backward, dim=ctx.dim), None, None, None, None
