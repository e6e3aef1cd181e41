"""A default device of the program is not that of the engine's own tensors in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.config import MixedPrecision
from lightning_zero.engine.engine import ZeroEngine
from tests.engine.optimizers import Momentum
from tests.references import VOCAB, TinyGPT
from tests.sampling import sample
from tests.worlds import run

BF16 = MixedPrecision(compute_dtype=torch.bfloat16)


def _steps(rank: int, world: int, options: dict[str, Any], default: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module, ids = TinyGPT(depth=2), torch.randint(0, VOCAB, (2, 6))
    ones = torch.ones((), device="cpu")
    with torch.device(default):  # nothing that is made there has values
        engine = ZeroEngine(**options)
        engine.shard(module)
        optimizer = engine.attach(Momentum(module.parameters(), lr=0.1))
        for _ in range(2):
            with engine.scope("step"), torch.autocast("cpu", torch.bfloat16, enabled="precision" in options):
                loss = module(ids).float().square().mean()
                loss.backward(ones)
            optimizer.step()
            optimizer.zero_grad()
    found = {name: engine.full_param(param).clone() for name, param in module.named_parameters()}
    engine.close()
    return found


@pytest.mark.parametrize(
    "options",
    sample(
        [{"stage": stage, "precision": precision} for stage in (1, 3) for precision in (None, BF16)],
        {"stage": 3, "precision": None},
    ),
    ids=str,
)
def test_steps_under_a_default_device_are_those_without(options: dict[str, Any]) -> None:
    options = {key: value for key, value in options.items() if value is not None}
    expected = run(_steps, 2, options, "cpu")[0]
    for found in run(_steps, 2, options, "meta"):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
