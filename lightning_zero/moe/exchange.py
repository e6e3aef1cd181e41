"""Tokens on their way to the ranks of their experts, and results on their way back.

Note [Four exchanges]
    ``compute_on_ranks`` tells the ranks how many rows come from each other rank for each expert, sends the rows, lets
    the local experts compute what has arrived, and sends the results back; the backward sends gradients along the same
    ways. The host waits once, for the numbers of rows. Rows arrive by rank, in each by expert, and are permuted into
    the order of experts.

    Every rank makes every exchange, in the forward and in the backward, also without a row to send: an exchange of no
    rows is in the graph as any other. Before each of them it *meets* the other ranks (``ZeroEngine.meet``). Checkpoints
    of activations repeat the exchanges of a forward inside of the backward, in the same order on all ranks.

Note [The same call]
    With the numbers of rows the ranks compare the call: the layer, the dtype of rows, whether there is a graph, whether
    a backward computes it again. Ranks that run different layers, or one of them without gradients, would exchange rows
    of different layers in silence, or wait in the backward for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from lightning_zero.comm import direct
from lightning_zero.comm.peers import told_error
from lightning_zero.errors import CollectiveError
from lightning_zero_ops import permute_tokens

__all__ = ["ExpertRanks", "compute_on_ranks"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NUM_FACTS = 5  # of a call: layer, dtype, whether gradients are on, whether rows have one, whether a backward runs


class ExpertRanks:
    """The ranks over which experts are divided, as one of them sees them. Copies of a module share it.

    Args:
        group: These ranks, all of which have different batches; all ranks when None.
        meet: Called before each exchange, on every rank: that of the engine which shards the module.

    Attributes:
        rank: This rank in the group.
        size: Number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, meet: Callable[[], None] = lambda: None) -> None:
        self.group = group
        self.meet = meet
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def __deepcopy__(self, memo: Any) -> ExpertRanks:
        return self

    def broadcast(self, tensor: Tensor) -> None:
        """Give all ranks the first one's values. Collective: all ranks of the group."""
        dist.broadcast(tensor, group=self.group, group_src=0)

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Return the rows that the ranks have for this one, in rank order. Collective: all ranks of the engine.

        Args:
            rows: (sum of ``send``, ...).
            send: How many rows go to each rank.
            receive: How many come from each.

        Raises:
            CollectiveError: A rank of the group did not come in time, or has failed.
        """
        self.meet()
        rows = rows.detach().contiguous()
        with self._named(rows):
            if direct.is_direct(rows, self.group):
                return direct.all_to_all(rows, send, receive, self.group)
            result = rows.new_empty(sum(receive), *rows.shape[1:])
            dist.all_to_all_single(result, rows, list(receive), list(send), group=self.group)
            return result

    @contextmanager
    def _named(self, rows: Tensor) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            start = (
                f"Expert rank {self.rank} of {self.size} (rank {dist.get_rank()}): the exchange of {len(rows)} rows"
                " between experts failed"
            )
            if told := told_error():
                raise CollectiveError(f"{start}.{told}") from None
            raise CollectiveError(
                f"{start}: {error}. A rank of the group has stopped, runs other layers, or was slower than `timeout`:"
                " the first error of the other ranks says which. All ranks must run every layer with experts, in every"
                " forward and backward, also without tokens."
            ) from None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def compute_on_ranks(
    rows: Tensor, offsets: Tensor, *, compute: Callable[[Tensor, Tensor], Tensor], ranks: ExpertRanks, layer: int
) -> Tensor:
    """Compute each row on the rank of its expert. Collective: all ranks of the engine.

    Args:
        rows: (M, H), sorted by expert.
        offsets: (E,) int32: where the rows of each expert end.
        compute: The experts of this rank, by rows (R, H) and offsets (E / ranks,).
        ranks: Have different experts, as many each, in order.
        layer: Number of the layer in its module.

    Returns:
        (M, H); rows from ``offsets[-1]`` on are zeros.

    Raises:
        CollectiveError: A rank has failed, or runs something else.
    """
    if isinstance(rows, FakeTensor):  # of another pipeline stage, whose shapes are asked for
        return compute(rows, offsets[: len(offsets) // ranks.size])
    mine = _message(rows, offsets, ranks, layer)
    theirs = ranks.exchange(mine, [1] * ranks.size, [1] * ranks.size)
    sent, received = torch.stack([mine, theirs]).tolist()  # the one wait of the host
    _compare([message[:_NUM_FACTS] for message in received], ranks)
    send, receive = ([sum(message[_NUM_FACTS:]) for message in messages] for messages in (sent, received))
    used = rows if len(rows) == sum(send) else rows[: sum(send)]
    arrived = _exchange(used, ranks, send, receive)
    order, places, ends = _by_expert(theirs[:, _NUM_FACTS:], sum(receive))
    results = compute(permute_tokens(arrived, order, places.unsqueeze(1)), ends)
    returned = _exchange(permute_tokens(results, places, order.unsqueeze(1)), ranks, receive, send)
    return returned if len(returned) == len(rows) else F.pad(returned, (0, 0, 0, len(rows) - len(returned)))


def _message(rows: Tensor, offsets: Tensor, ranks: ExpertRanks, layer: int) -> Tensor:
    """Return the messages to all ranks: (ranks, facts and E / ranks) int64, the call and the numbers of rows."""
    in_backward = torch._C._current_graph_task_id() != -1
    facts = [layer, _DTYPES.index(rows.dtype), torch.is_grad_enabled(), rows.requires_grad, in_backward]
    ends = offsets.long()
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).view(ranks.size, -1)
    return torch.cat([torch.tensor(facts, dtype=torch.int64, device=ends.device).expand(ranks.size, -1), counts], 1)


def _compare(facts: Sequence[Sequence[int]], ranks: ExpertRanks) -> None:
    """Refuse calls that differ; see Note [The same call].

    Raises:
        CollectiveError: The same on all ranks of the group.
    """
    if all(one == facts[0] for one in facts):
        return
    listed = "; ".join(
        f"expert rank {rank} is at layer {layer} with rows of {_DTYPES[dtype]}, gradients {'on' if is_on else 'off'},"
        f" rows {'with' if has_graph else 'without'} a graph{', in a backward' if in_backward else ''}"
        for rank, (layer, dtype, is_on, has_graph, in_backward) in enumerate(facts)
    )
    raise CollectiveError(
        f"The ranks that exchange tokens with rank {dist.get_rank()} run different calls of layers with experts:"
        f" {listed}. Let all ranks run the same layers in the same order, also without tokens, with the same precision"
        " and gradients."
    )


def _by_expert(counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order by expert of rows that have arrived by rank and expert. Nobody waits for a device.

    Args:
        counts: (ranks, n) int64: rows from each rank for each expert.
        num_rows: R, their sum.

    Returns:
        (R,) the rows in the order of experts, in each by rank; (R,) the place of each row there; (n,) int32 where the
        rows of each expert end.
    """
    num_ranks, num_experts = counts.shape
    experts = torch.arange(num_experts, device=counts.device).repeat(num_ranks)
    order = experts.repeat_interleave(counts.reshape(-1), output_size=num_rows).argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(num_rows, device=order.device))
    return order, places, counts.sum(0).cumsum(0).int()


def _exchange(rows: Tensor, ranks: ExpertRanks, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    result: Tensor = _Exchange.apply(rows, ranks, send, receive)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """Rows to the ranks; gradients go back the same ways. The gradient of a gradient is an exchange again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: ExpertRanks, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        ctx.ranks, ctx.mirrored = ranks, (receive, send)
        return ranks.exchange(rows, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchange(grads[0], ctx.ranks, *ctx.mirrored), None, None, None
