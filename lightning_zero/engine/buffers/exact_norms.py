"""Norms of fp64 gradients, to the last bit the same however the gradients are cut.

Note [Two numbers for each]
    A square and a sum of fp64 numbers are two fp64 numbers: the rounded result, and what the rounding has left out.
    Sums of such pairs are wrong by 2**-100 or so of themselves, and rounded once in the end. Gradients of other dtypes
    need no pairs: their sums are fp64, and rounded to fp32.

    T. J. Dekker, A floating-point technique for extending the available precision, 1971; T. Ogita, S. M. Rump and
    S. Oishi, Accurate sum and dot product, 2005, algorithms 3.1 (TwoSum), 3.3 (TwoProduct).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_zero.comm.communicator import Communicator

__all__ = ["norm_over_ranks_exactly"]

_NUMEL = 2**20  # of gradients that are squared at a time
_SPLIT = 2.0**27 + 1.0


def norm_over_ranks_exactly(
    pieces: Iterable[Tensor], communicator: Communicator | None, device: torch.device
) -> Tensor:
    """Return the 2-norm of the vector whose pieces every rank has: () float64.

    Collective: all ranks, unless ``communicator`` is None because this rank holds everything.

    Args:
        pieces: Of this rank, of any shapes and dtypes.
        communicator: The ranks.
        device: Of the result.
    """
    parts = [part for piece in pieces if piece.numel() for part in torch.split(piece.reshape(-1), _NUMEL)]
    pairs = [_squares(part).to(device) for part in parts]
    total = _sum(torch.stack(pairs)) if pairs else torch.zeros(2, dtype=torch.float64, device=device)
    if communicator is not None:
        every = torch.zeros(communicator.world_size, 2, dtype=torch.float64, device=device)
        every[communicator.rank] = total
        total = _sum(communicator.all_reduce(every, "a norm"))
    return total.sum().sqrt()


def _squares(values: Tensor) -> Tensor:
    """Return the sum of squares: (2,) float64."""
    one = (torch.view_as_real(values).reshape(-1) if values.is_complex() else values).double()
    square, high = one * one, one * _SPLIT
    high = high - (high - one)
    low = one - high
    rest = ((high * high - square) + 2.0 * high * low) + low * low
    return _sum(torch.stack((square, rest), 1))


def _sum(pairs: Tensor) -> Tensor:
    """Return the sum of pairs, (number, 2) float64, of which there is one at least: (2,) float64."""
    sums, rests = pairs.unbind(1)
    plain = sums.sum()
    while sums.numel() > 1:
        half = sums.numel() // 2
        first, second, alone = sums[:half], sums[half : 2 * half], sums[2 * half :]
        both = first + second
        shift = both - first
        left_out = (first - (both - shift)) + (second - shift)
        rests = torch.cat((rests[:half] + rests[half : 2 * half] + left_out, rests[2 * half :]))
        sums = torch.cat((both, alone))
    total = torch.cat((sums, rests))
    return torch.where(total.sum().isfinite(), total, torch.stack((plain, torch.zeros_like(plain))))
