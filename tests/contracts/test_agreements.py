"""How often the ranks of a large world agree on something, once their order of collectives is learned."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.references import TinyGPT

WORLD = 64
# In a step of one micro-batch: on used parameters behind a backward. At stage 3, where ranks may need gathers that are
# not in the list, on the end of the forward and on that of the backward, which says that used parameters are the same.
AGREEMENTS = {0: 1, 1: 1, 2: 1, 3: 2}


def _agreements(rank: int, world: int, stage: int) -> list[int]:
    """Return how often rank 0 of a world whose other ranks are pretended has agreed with them, by step."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    engine = ZeroEngine(stage, units=["Block"])
    module = engine.shard(TinyGPT())
    optimizer = engine.attach(torch.optim.AdamW(module.parameters()))
    counts = []
    for _ in range(5):
        engine.internals.communicator.reset_stats()
        with engine.scope("training_step"):
            loss = module(torch.ones(2, 5, dtype=torch.int64)).square().mean()
        with engine.backward_scope():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(engine.internals.communicator.calls["control"])
    engine.close()
    return counts


@pytest.mark.parametrize("stage", AGREEMENTS, ids="stage{}".format)
def test_ranks_agree_a_few_times_a_step_when_their_order_is_learned(stage: int) -> None:
    assert worlds.run(_agreements, 1, stage)[0][2:] == [AGREEMENTS[stage]] * 3
