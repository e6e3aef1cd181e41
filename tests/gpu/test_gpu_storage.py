"""Host memory and disks beside a GPU: offloaded tensors are where the device, the host and NCCL can use them.

Two ranks share one device and talk over gloo; one rank has NCCL.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.config import Offload
from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.engine.optimizers import Momentum

TIMEOUT_S = 120.0  # the first use of a device by a process takes seconds

pytestmark = pytest.mark.gpu


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).to("cuda")


# -- Random numbers ----------------------------------------------------------------------------------------------------


def _attach(rank: int, world: int, offloads: bool) -> tuple[bool, int]:
    """Attach an optimizer that is tried; return whether the device's generator is as before, and its seed."""
    module = _net()
    engine = ZeroEngine(2, offload=Offload(step_device="cpu") if offloads else None)
    module = engine.shard(module)
    torch.cuda.manual_seed(100 + rank)
    torch.rand(3, device="cuda")
    before = torch.cuda.get_rng_state()
    engine.attach(Momentum(module.parameters()))
    is_as_before = torch.equal(torch.cuda.get_rng_state(), before)
    seed = torch.cuda.initial_seed()
    engine.close()
    return is_as_before, seed


@pytest.mark.parametrize("offloads", [True, False], ids=["offloaded", "on-device"])
def test_the_trial_of_an_optimizer_leaves_the_generator_of_the_device_alone(offloads: bool) -> None:
    assert worlds.run(_attach, 2, offloads, timeout_s=TIMEOUT_S) == [(True, 100), (True, 101)]
