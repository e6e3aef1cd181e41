"""Fused operations on flat tensors, each with a plain PyTorch implementation for CPUs. It has none yet."""

from __future__ import annotations

__all__: list[str] = []
