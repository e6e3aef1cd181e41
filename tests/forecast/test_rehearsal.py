from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero import ActivationCheckpointing, Communication, Sharding, ZeroEngine
from lightning_zero.forecast.dry_run import DryRun
from lightning_zero.forecast.rehearsal import Rehearsed, Trainee, pretended_world, rehearse
from tests import worlds

WIDTH, DEPTH = 64, 4
NUMEL = WIDTH * WIDTH * DEPTH


def _trainee(*, batch: int = 2, **options: Any) -> Trainee:
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])
    return Trainee(
        module=module,
        optimizers=lambda: [torch.optim.AdamW(module.parameters())],
        loss=lambda: module(torch.ones(batch, WIDTH)).square().mean(),
        **options,
    )


def _rehearsed(stage: Any, world: int, backend: str = "nccl", **options: Any) -> Rehearsed:
    with pretended_world(world):
        engine = ZeroEngine(stage, communication=Communication(backend=backend))
        return rehearse(DryRun(), lambda: _trainee(**options), engine)


@pytest.mark.parametrize("world", [1, 2, 64])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_that_stay_follow_the_formulas(stage: int, world: int) -> None:
    found = _rehearsed(stage, world)
    share = [world if stage >= one else 1 for one in (3, 2, 1)]
    assert found.device["parameters"] == 4 * NUMEL // share[0]
    assert found.device["gradients"] == 4 * NUMEL // share[1]
    assert abs(found.device["optimizer"] - 8 * NUMEL // share[2]) <= 64
    assert found.peak.nbytes == sum(found.at_peak.values())
    assert not dist.is_initialized()


def test_bytes_that_are_sent_follow_the_formulas() -> None:
    once = 4 * NUMEL * 7 // 8
    control = 4096
    assert 0 <= _rehearsed(1, 8).sent - 2 * once < control
    assert 0 <= _rehearsed(3, 8).sent - 3 * once < control
    of_nodes = _rehearsed(Sharding(params=4, grads=4), 8)
    assert of_nodes.sent_across == 2 * 4 * NUMEL // 8


def test_offloaded_activations_are_counted_in_host_memory_where_they_lie() -> None:
    """Each layer has an input of 3 x 64 numbers in fp32; page-locked memory takes a power of two."""
    policies = (None, ActivationCheckpointing(modules=["Linear"]), _offloading())
    peaks = [_checkpointed(one) for one in policies]
    assert [one.host_activations for one in peaks] == [0, 0, DEPTH * 3 * WIDTH * 4]
    assert _checkpointed(_offloading(), page_locks=True).host_activations == DEPTH * 4 * WIDTH * 4


def _offloading() -> ActivationCheckpointing:
    return ActivationCheckpointing(modules=["Linear"], policy="offload")


def _checkpointed(policy: ActivationCheckpointing | None, *, page_locks: bool = False) -> Rehearsed:
    with pretended_world(1):
        make = partial(_trainee, batch=3)
        return rehearse(DryRun(), make, ZeroEngine(2), checkpointing=policy, page_locks=page_locks)


def test_reductions_over_gloo_take_a_copy_from_every_peer() -> None:
    assert _rehearsed(3, 8, "gloo").peak.nbytes > _rehearsed(3, 8).peak.nbytes


def test_gradients_of_accumulated_microbatches_are_there_in_the_next_forward() -> None:
    once, twice = _rehearsed(2, 2), _rehearsed(2, 2, microbatches=2)
    assert twice.peak.nbytes >= once.peak.nbytes
    assert twice.sent > once.sent
    assert _rehearsed(2, 2, clips=True).device == once.device


def _in_a_group(rank: int, world: int) -> str:
    with pytest.raises(RuntimeError, match="this process has a process group") as caught, pretended_world(2):
        pass
    return str(caught.value)


def test_a_process_with_a_group_is_refused() -> None:
    assert "process of their own" in worlds.run(_in_a_group, 1)[0]
