from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_zero.checkpoint.random_state import gather_random_states, restore_random_state
from tests import worlds
from tests.checkpoint import programs


def _draw() -> tuple[float, float, float]:
    return random.gauss(0, 1), float(np.random.normal()), float(torch.randn(()))


def _go_back(rank: int, world: int) -> Any:
    engine, _, _ = programs.make(3, 0)
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    _draw()
    states = gather_random_states(engine)
    expected = [_draw() for _ in range(3)]
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    assert restore_random_state(engine, states, world) is None
    assert [_draw() for _ in range(3)] == expected
    message = restore_random_state(engine, states[1:], world - 1)
    assert message is not None
    assert message.startswith(f"The checkpoint was saved on {world - 1} ranks and is resumed on {world}")
    states[rank]["device"] = {"cuda": torch.get_rng_state()}
    assert "another kind of device than cpu" in str(restore_random_state(engine, states, world))
    return expected


@pytest.mark.parametrize("world", [1, 2])
def test_every_rank_draws_again_what_it_drew(world: int) -> None:
    drawn = worlds.run(_go_back, world)
    assert len({str(numbers) for numbers in drawn}) == world
