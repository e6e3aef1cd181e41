"""Mixed precision learns as under autocast with fp32 parameters."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import GPT
from tests import worlds

STEPS = 200
LENGTH = 64


def _text() -> torch.Tensor:
    """Return real text as codes below 128: the source of this module's dependencies."""
    source = inspect.getsource(torch.optim) + inspect.getsource(torch.nn.modules.linear)
    return torch.tensor([code % 128 for code in source.encode()])


def _batch(text: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(0, len(text) - LENGTH - 1, (4,), generator=generator)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])


def _final_losses(rank: int, world: int, stage: int) -> tuple[float, float, float]:
    from lightning_zero import MixedPrecision, ZeroEngine

    text = _text()
    ddp = DistributedDataParallel(GPT.seeded("tiny"))
    ddp_optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3, fused=True)
    engine = ZeroEngine(stage, precision=MixedPrecision(compute_dtype=torch.bfloat16))
    module = engine.shard(GPT.seeded("tiny"))
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=3e-3, fused=True))
    losses: list[list[float]] = [[], []]
    for step in range(STEPS):
        tokens = _batch(text, rank, step)
        for side, (model, stepper) in enumerate([(ddp, ddp_optimizer), (module, optimizer)]):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens)
            loss.backward()
            stepper.step()
            stepper.zero_grad()
            losses[side].append(loss.item())
    engine.close()
    last = [sum(side[-20:]) / 20 for side in losses]
    return losses[0][0], last[0], last[1]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_mixed_ends_within_one_percent_of_ddp_under_autocast(stage: int) -> None:
    for first, expected, actual in worlds.run(_final_losses, 2, stage, timeout_s=200):
        assert expected < 0.8 * first, "the reference did not learn"
        assert abs(actual - expected) <= 0.01 * expected
