"""Forecasts of memory beside what the allocator of a GPU has given out at its highest, in the second step."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import ActivationCheckpointing, MixedPrecision, ZeroEngine, ZeroStrategy
from lightning_zero.lightning.estimate import estimate_memory
from lightning_zero.parallel.activation.checkpointing import checkpoint_activations, forecast_of
from tests import worlds

WIDTH, DEPTH, VOCABULARY, TOKENS = 512, 6, 16000, (8, 256)
PEAK = 0.05
TIMEOUT_S = 200.0

pytestmark = pytest.mark.gpu


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 8, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        out: Tensor = x + self.mlp(x)
        return out


class _GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


def _peak(rank: int, world: int, options: dict[str, Any], policy: Any, is_16_bit: bool) -> int:
    """Return the highest bytes of the last of some steps, less those of libraries."""
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    ids = torch.zeros(*TOKENS, dtype=torch.long, device="cuda")

    def autocast() -> torch.autocast:
        return torch.autocast("cuda", torch.bfloat16, enabled=is_16_bit)

    with autocast():
        warm = _GPT().cuda()(ids)
    warm.backward()
    del warm
    gc.collect()
    before = torch.cuda.memory_allocated()
    module = _GPT().cuda()
    checkpoint_activations(module, policy, None)
    choice = forecast_of(module)
    engine = ZeroEngine(precision=MixedPrecision(compute_dtype=torch.bfloat16 if is_16_bit else None), **options)
    engine.shard(module)
    optimizer = engine.attach(torch.optim.AdamW(module.parameters()))
    for _ in range(2 if choice is None else 3):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with engine.scope("training_step"), autocast():
            loss = module(ids)
        optimizer.zero_grad()
        with engine.backward_scope():
            loss.backward()
        del loss
        optimizer.step()
        if choice is not None:
            choice.settle(int)
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() - before
    engine.close()
    return found


def _auto(budget_bytes: int) -> ActivationCheckpointing:
    return ActivationCheckpointing(policy="auto", budget_bytes=budget_bytes)


CASES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "stage0": ({"stage": 0}, None, "32-true"),
    "stage3": ({"stage": 3}, None, "32-true"),
    "stage3-bf16": ({"stage": 3}, None, "bf16-mixed"),
    "stage2-bf16-checkpointed": ({"stage": 2}, ActivationCheckpointing(), "bf16-mixed"),
    "stage3-offload-bf16": ({"stage": 3, "offload": "cpu"}, None, "bf16-mixed"),
    "stage2-activations-on-host": ({"stage": 2}, ActivationCheckpointing(policy="offload"), "bf16-mixed"),
    "stage2-auto-recomputed": ({"stage": 2}, _auto(64 * 2**20), "bf16-mixed"),
    "stage2-auto-kept": ({"stage": 2}, _auto(2**34), "32-true"),
    "stage3-offload-checkpointed": ({"stage": 3, "offload": "cpu"}, ActivationCheckpointing(), "32-true"),
}


@pytest.mark.parametrize("name", CASES)
def test_forecasts_are_those_of_the_allocator(name: str) -> None:
    options, policy, precision = CASES[name]
    forecast = estimate_memory(
        _GPT,
        ZeroStrategy(activation_checkpointing=policy, **options),
        world_size=1,
        batch=torch.zeros(*TOKENS, dtype=torch.long),
        optimizer=torch.optim.AdamW,
        precision=precision,
        side_by_side=False,
    ).own
    (found,) = worlds.run(_peak, 1, options, policy, precision == "bf16-mixed", timeout_s=TIMEOUT_S)
    print(f"{name}: forecast {forecast.peak_bytes / 2**20:.1f} MiB, allocated {found / 2**20:.1f}")
    assert abs(forecast.peak_bytes - found) <= PEAK * found, (forecast.peak_bytes, found)
