"""`optimizer.state` and `optimizer.state_dict()` where a rank has segments: right, or refused by name."""

from __future__ import annotations

import copy
import io
import re
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


# -- state -------------------------------------------------------------------------------------------------------------


def _clear_row(module: _Net, optimizer: torch.optim.Optimizer, key: str) -> None:
    optimizer.state[module.a.weight][key][2] = 0.0


def _clear_mask(module: _Net, optimizer: torch.optim.Optimizer, key: str) -> None:
    for param in module.parameters():
        mask = torch.arange(param.numel()).reshape(param.shape) % 3 == 0
        optimizer.state[param][key].masked_fill_(mask, 0.5)


def _scale(module: _Net, optimizer: torch.optim.Optimizer, key: str) -> None:
    for state in optimizer.state.values():
        state[key].mul_(0.5)
        state[key].view(-1).add_(0.1)
        state[key] = state[key] + 0.1


def _clip_by_norm(module: _Net, optimizer: torch.optim.Optimizer, key: str) -> None:
    for state in optimizer.state.values():
        state[key].mul_(0.1 / state[key].norm())


def _put_back(module: _Net, optimizer: torch.optim.Optimizer, key: str) -> None:
    kept = copy.deepcopy(list(optimizer.state.values()))
    _train(module, optimizer, 2)
    for state, before in zip(optimizer.state.values(), kept, strict=True):
        state.update(before)


EDITS = (_clear_row, _clear_mask, _scale, _clip_by_norm, _put_back)


def _edited(rank: int, world: int, name: str, stage: int, edit: Callable[..., None]) -> dict[str, Any]:
    """Return weights behind an edit of states between two steps, with segments and in plain PyTorch."""
    found = {}
    for where in (stage, None):
        engine, module, optimizer = _built(name, where)
        _train(module, optimizer, 2)
        edit(module, optimizer, _key(name))
        _train(module, optimizer, 2)
        found[str(where)] = _weights(engine, module)
    return found


EDITED = [(name, stage, edit) for name in ("AdamW", "foreach", "RMSprop") for stage in STAGES for edit in EDITS]
KEPT = [(("AdamW", "foreach", "RMSprop")[place % 3], 1 + place % 3, edit) for place, edit in enumerate(EDITS)]


@pytest.mark.parametrize(
    ("name", "stage", "edit"),
    [pytest.param(*one, marks=() if one in KEPT else pytest.mark.slow) for one in EDITED],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_edits_of_states_are_those_of_pytorch(name: str, stage: int, edit: Callable[..., None]) -> None:
    for found in run(_edited, 2, name, stage, edit):
        for param, expected in found["None"].items():
            assert torch.allclose(found[str(stage)][param], expected, rtol=0.0, atol=1e-6), param


def _mean(state: dict[str, Any], key: str) -> Any:
    return state[key].mean()


def _first_row(state: dict[str, Any], key: str) -> Any:
    return state[key][0]


def _as_list(state: dict[str, Any], key: str) -> Any:
    return state[key].tolist()


def _save(state: dict[str, Any], key: str) -> Any:
    torch.save(state, io.BytesIO())


def _refusals(rank: int, world: int, name: str, stage: int, read: Callable[..., Any]) -> list[str]:
    _, module, optimizer = _built(name, stage)
    _train(module, optimizer, 2)
    errors = []
    for param in module.parameters():
        assert optimizer.state[param][_key(name)].shape == param.shape
        try:
            read(optimizer.state[param], _key(name))
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    kept = optimizer.state[param][_key(name)]
    _train(module, optimizer, 1)
    try:
        kept.sum()
        errors.append("")
    except RuntimeError as error:
        errors.append(str(error))
    return errors


@pytest.mark.parametrize("read", [_mean, _first_row, _as_list, _save], ids=lambda read: read.__name__)
@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_reads_of_whole_states_are_refused(name: str, read: Callable[..., Any]) -> None:
    for errors in run(_refusals, 2, name, 2, read):
        for error in errors:
            assert re.search("needs a whole optimizer state.*save_checkpoint", error), error
