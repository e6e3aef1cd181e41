"""A step on the device of masters and states that are stored in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_zero.storage.copies import Copies, Landing

__all__ = ["step_streamed"]


def step_streamed(
    step: Callable[..., None],
    device: torch.device,
    *,
    copies: Copies,
    behind: Landing,
    group: Mapping[str, Any],
    number: int,
    param: Tensor,
    moments: Sequence[Tensor],
    grad: Tensor,
    out: Tensor | None,
    factor: Tensor | None,
    tails: Sequence[int],
) -> None:
    """Step offloaded tensors on the device: they are uploaded, stepped there, and copied back.

    Args:
        step: Makes a step where its tensors are; takes the arguments that follow ``behind``.
        device: Where.
        copies: Its streams.
        behind: Landing to wait for before ``out`` is written.
        group: Options.
        number: Of the step.
        param: (n,) the master; written.
        moments: Its moments; written.
        grad: (n,), offloaded as well, or on the device.
        out: (n,) on the device, or offloaded as well; takes the rounded parameters.
        factor: () multiplies the gradient.
        tails: See ``lightning_zero_ops/chunks.py``.
    """
    with copies.stepping(behind):
        there = [torch.empty_like(one, device=device).copy_(one, non_blocking=True) for one in (param, *moments)]
        grad = torch.empty_like(grad, device=device).copy_(grad, non_blocking=True) if grad.is_cpu else grad
        factor = None if factor is None else factor.to(device)
        rounded = torch.empty_like(out, device=device) if out is not None and out.is_cpu else out
        step(
            group, number, param=there[0], moments=there[1:], grad=grad, out=rounded, factor=factor, tails=tails
        )  # fmt: skip
        for target, source in zip((param, *moments), there, strict=True):
            target.copy_(source, non_blocking=True)
        if out is not None and rounded is not None and rounded is not out:
            out.copy_(rounded, non_blocking=True)
