"""Which optimizers give the same numbers on the segments of parameters as on the parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["is_elementwise"]


def is_elementwise(optimizer: Optimizer) -> bool:
    """Say whether an optimizer gives the same bits on the pieces of a parameter as on the whole, by trying.

    A copy steps a small matrix whole, another its two halves one after the other, as 1-D parameters.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 6, generator=generator)
    grads = [torch.randn(4, 6, generator=generator) for _ in range(3)]
    try:
        whole = _trial(optimizer, [start.clone()], [[grad] for grad in grads])
        halves = _trial(
            optimizer, list(start.reshape(-1).clone().chunk(2)), [list(grad.reshape(-1).chunk(2)) for grad in grads]
        )
    except Exception:  # whatever an unknown optimizer raises on a plain step, it is not one that segments can use
        return False
    return torch.equal(whole[0].reshape(-1), torch.cat(halves))


def _is_filled(state: dict[str, Any]) -> bool:
    return all(value.numel() for value in state.values() if torch.is_tensor(value))


def _trial(optimizer: Optimizer, values: list[torch.Tensor], grads: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    probes = []
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    options = {key: torch.tensor(0.1) if torch.is_tensor(value) else value for key, value in options.items()}
    if "fused" in options:  # its last bits depend on how a tensor is cut
        options["fused"] = None
    params = [nn.Parameter(value.clone()) for value in values]
    for param in params:
        probe = copy.copy(optimizer)
        probe.__dict__ = {key: value for key, value in vars(optimizer).items() if key != "step"}
        probe._optimizer_step_pre_hooks, probe._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        probe.param_groups = [{**options, "params": [param]}]
        probe.state = defaultdict(dict)
        initial = next((state for param, state in optimizer.state.items() if param.dim() and _is_filled(state)), None)
        if initial is not None:  # made in the constructor
            probe.state[param] = {
                key: torch.zeros_like(param) + value.reshape(-1)[0] if torch.is_tensor(value) and value.dim() else
                copy.deepcopy(value) for key, value in initial.items()
            }  # fmt: skip
        probes.append(probe)
    for step in grads:
        for probe, param, grad in zip(probes, params, step, strict=True):
            param.grad = grad.clone()
            type(optimizer).step(probe)
    return [param.detach() for param in params]
