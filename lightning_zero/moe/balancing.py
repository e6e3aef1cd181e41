"""Loads of experts that are evened out by a bias in the place of an auxiliary loss (arXiv:2408.15664)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.moe.routing import Router

__all__ = ["balance_experts"]


@torch.no_grad()
def balance_experts(module: nn.Module, *, rate: float = 1e-3, group: dist.ProcessGroup | None = None) -> None:
    """Raise the bias of experts that had fewer tokens than the average since the last call, and lower that of others.

    Call it once per optimizer step. Layers without a bias are left alone.
    Collective where ``torch.distributed`` is initialized: all ranks of the group, with the same layers.

    Args:
        module: Has layers ``MoE(bias_balancing=True)``, at any depth.
        rate: By how much biases change; the paper's ``u``.
        group: The ranks whose tokens count; all by default.
    """
    routers = [one for one in module.modules() if isinstance(one, Router) and one.expert_bias is not None]
    if not routers:
        return
    loads = [_load(one) for one in routers]
    total: Tensor = torch.cat([load.to(loads[0].device) for load in loads])
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(total, group=group)
    for router, load in zip(routers, torch.split(total, [len(load) for load in loads]), strict=True):
        assert router.expert_bias is not None
        error = load.double().mean() - load.double()
        router.expert_bias += rate * error.sign().to(router.expert_bias)
        router.load = None


def _load(router: Router) -> Tensor:
    """Return the load that this rank has counted: zeros in a pipeline stage that does not run the layer."""
    assert router.expert_bias is not None
    load: Tensor | None = vars(router)["load"]  # pipelines refuse `router.load`, of which other stages have the value
    return torch.zeros_like(router.expert_bias, dtype=torch.int64) if load is None else load
