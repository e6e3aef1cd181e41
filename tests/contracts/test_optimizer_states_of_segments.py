"""`optimizer.state` and `optimizer.state_dict()` where a rank has segments: right, or refused by name."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero import ZeroEngine
from tests.sampling import sample
from tests.worlds import run

STAGES = (1, 2, 3)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


def _make(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(module.parameters(), lr=0.1)
    if name == "foreach":
        return torch.optim.AdamW(module.parameters(), lr=0.1, foreach=True)
    return torch.optim.RMSprop(module.parameters(), lr=0.1)


def _key(name: str) -> str:
    return "square_avg" if name == "RMSprop" else "exp_avg_sq"


def _train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        module(torch.randn(4, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _built(name: str, stage: int | None) -> tuple[ZeroEngine | None, Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = _Net()
    if stage is None:
        return None, module, _make(name, module)
    engine = ZeroEngine(stage, units=["Linear"])
    engine.shard(module)
    return engine, module, engine.attach(_make(name, module))


def _weights(engine: ZeroEngine | None, module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: param.detach().clone() if engine is None else engine.full_param(param).clone()
        for name, param in module.named_parameters()
    }


# -- state_dict --------------------------------------------------------------------------------------------------------


def _load_of_rank_0(rank: int, world: int, stage: int) -> tuple[str, str]:
    """Return the errors of loading this rank's own state, and that of rank 0."""
    _, module, optimizer = _built("AdamW", stage)
    _train(module, optimizer, 2)
    saved = [copy.deepcopy(optimizer.state_dict())]
    errors = []
    for broadcasts in (False, True):
        if broadcasts:
            dist.broadcast_object_list(saved, src=0)
        try:
            optimizer.load_state_dict(saved[0])
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
    return errors[0], errors[1]


@pytest.mark.parametrize("stage", sample(STAGES, 2), ids="stage{}".format)
def test_a_state_dict_of_another_rank_is_refused(stage: int) -> None:
    first, second = run(_load_of_rank_0, 2, stage)
    assert first == ("", "")
    assert second[0] == ""
    assert "segments of rank 0 of 2, and they are loaded for rank 1 of 2" in second[1]
    assert "trainer.save_checkpoint" in second[1]


def test_a_state_dict_of_whole_states_has_no_mark() -> None:
    for stage, world in ((0, 2), (2, 1)):
        assert run(_keys, world, stage)[0] == ["param_groups", "state"]


def _keys(rank: int, world: int, stage: int) -> list[str]:
    _, module, optimizer = _built("AdamW", stage)
    _train(module, optimizer, 1)
    return sorted(optimizer.state_dict())
