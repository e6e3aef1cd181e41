"""Fused operations on flat tensors: a Triton kernel for GPUs and a plain PyTorch implementation for CPUs each."""

from __future__ import annotations

from lightning_zero_ops.adamw import adamw_step_
from lightning_zero_ops.flat import accumulate_, clip_value_, sq_norm_and_finite
from lightning_zero_ops.lion import lion_step_
from lightning_zero_ops.sgd import sgd_step_

__all__ = ["accumulate_", "adamw_step_", "clip_value_", "lion_step_", "sgd_step_", "sq_norm_and_finite"]
