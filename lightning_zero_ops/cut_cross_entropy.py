"""Losses and gradients of logits of which every rank of a group has consecutive columns (arXiv:1909.08053, section 3).

The logits are never gathered: per token the maximum is exchanged, and then one sum of three numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["CutRows", "Terms"]

_PART_NUMEL = 1 << 22  # of a part of the logits that exists in fp32 at a time
_FEWEST_ROWS = 64


@dataclass(frozen=True)
class Terms:
    """Constants over rows, see Note [Formula] of ``cross_entropy``. ``softcap`` and ``z_loss`` are 0 for none."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float


@dataclass(frozen=True)
class CutRows:
    """The columns of one rank: of ``V`` logits of a token it has those from ``rank * V / size`` on.

    Args:
        group: All of its ranks call the object, in one order, with the same targets.
    """

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self.group)

    def __call__(self, logits: Tensor, target: Tensor, losses: Tensor, factor: Tensor, terms: Terms) -> None:
        """Write the losses of a chunk, and put ``factor`` times the gradients in the place of the logits.

        Collective: all ranks of the group.

        Args:
            logits: ``(n, V / size)`` in fp32 or 16 bits; overwritten.
            target: ``(n,)`` int64, of the whole vocabulary.
            losses: ``(n,)`` fp32; overwritten, with the same values on every rank.
            factor: 0-dim fp32.
            terms: The constants.

        Raises:
            ValueError: The ranks have different numbers of columns; on a GPU the losses are NaN instead.
        """
        width = logits.shape[1]
        vocabulary = width * self.size
        local = target - dist.get_rank(self.group) * width
        is_here = (local >= 0) & (local < width)
        is_known = (target >= 0) & (target < vocabulary)
        is_counted = target != terms.ignore_index
        label = torch.where(is_here, local, 0).unsqueeze(1)

        largest, exponentials, of_label, total = self._statistics(logits, label, is_here, terms)
        widest = self._widest(largest, width)
        whole_largest = largest.clone()
        dist.all_reduce(whole_largest, op=dist.ReduceOp.MAX, group=self.group)
        # Ranks with -inf alone have exponentials of 0, not those of -inf + inf.
        exponentials *= torch.where(largest == whole_largest, 0.0, largest - whole_largest).exp()
        sums = torch.stack([exponentials, of_label, total])
        dist.all_reduce(sums, group=self.group)
        exponentials, of_label, total = sums

        lse = whole_largest + exponentials.log()
        loss = lse - (1.0 - terms.label_smoothing) * of_label
        if terms.z_loss:  # the square overflows, and 0 times that is NaN
            loss = loss + terms.z_loss * lse.square()
        if terms.label_smoothing:
            loss = loss - terms.label_smoothing * (total / vocabulary)
        is_valid = is_known & (widest == width)
        losses.copy_(torch.where(is_counted, torch.where(is_valid, loss, torch.nan), 0.0))

        on_all = (1.0 + 2.0 * terms.z_loss * lse) / exponentials
        for part in _parts(logits):
            value = _capped(logits[part], terms)
            slope = 1.0 - (value / terms.softcap).square_() if terms.softcap else None
            grad = value.sub_(whole_largest[part].unsqueeze(1)).exp_().mul_(on_all[part].unsqueeze(1))
            grad.sub_(terms.label_smoothing / vocabulary)
            of_one = torch.where(is_here[part], terms.label_smoothing - 1.0, 0.0).to(grad.dtype)
            grad.scatter_add_(1, label[part], of_one.unsqueeze(1))
            if slope is not None:
                grad.mul_(slope)
            grad.masked_fill_(~is_valid[part].unsqueeze(1), torch.nan)
            logits[part] = torch.where(is_counted[part].unsqueeze(1), grad.mul_(factor), 0.0)

    def _statistics(self, logits: Tensor, label: Tensor, is_here: Tensor, terms: Terms) -> list[Tensor]:
        """Return per token of this rank's columns: maximum, sum of exponentials, logit of the label, sum of logits."""
        found = []
        for part in _parts(logits):
            value = _capped(logits[part], terms)
            of_label = torch.where(is_here[part], value.gather(1, label[part]).squeeze(1), 0.0)
            total, largest = value.sum(1), value.amax(1)
            base = torch.where(largest == -torch.inf, 0.0, largest).unsqueeze(1)
            found.append((largest, value.sub_(base).exp_().sum(1), of_label, total))
        return [torch.cat(column) for column in zip(*found, strict=True)]

    def _widest(self, like: Tensor, width: int) -> Tensor:
        """Return the largest number of columns of a rank, 0-dim; NaN where a rank has fewer than another."""
        widths = like.new_tensor([width, -width])
        dist.all_reduce(widths, op=dist.ReduceOp.MAX, group=self.group)
        widest, fewest = widths[0], -widths[1]
        if like.is_cpu and widest != fewest:
            raise ValueError(
                f"`weight` has {width} rows on rank {dist.get_rank(self.group)} of `group`, and {int(fewest)} to"
                f" {int(widest)} on its ranks. Every rank must have as many rows: pad the vocabulary to a multiple of"
                f" {self.size}."
            )
        return torch.where(widest == fewest, widest, torch.nan)


def _capped(logits: Tensor, terms: Terms) -> Tensor:
    """Return a new fp32 tensor."""
    value = logits.to(torch.float32, copy=True)
    return value.div_(terms.softcap).tanh_().mul_(terms.softcap) if terms.softcap else value


def _parts(logits: Tensor) -> Iterator[slice]:
    rows = max(_PART_NUMEL // max(logits.shape[1], 1), _FEWEST_ROWS)
    for start in range(0, len(logits), rows):
        yield slice(start, min(start + rows, len(logits)))
