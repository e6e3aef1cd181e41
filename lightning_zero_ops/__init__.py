"""Fused operations on flat tensors: a Triton kernel for GPUs and a plain PyTorch implementation for CPUs each."""

from __future__ import annotations

from lightning_zero_ops.flat import accumulate_, clip_value_, sq_norm_and_finite

__all__ = ["accumulate_", "clip_value_", "sq_norm_and_finite"]
