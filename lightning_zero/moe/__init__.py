"""Mixtures of experts: a layer whose tokens each use a few of many experts."""

from __future__ import annotations

from lightning_zero.moe.balancing import balance_experts
from lightning_zero.moe.layer import MoE

__all__ = ["MoE", "balance_experts"]
