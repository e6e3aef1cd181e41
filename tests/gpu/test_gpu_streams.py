"""Programs that compute in several CUDA streams, in PyTorch's order: they train with the bits of one stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import Communication, Offload
from lightning_zero.engine.engine import ZeroEngine
from tests import worlds

TIMEOUT_S = 120.0  # the first use of a device by a process takes seconds
SLEEP = 200_000_000  # cycles: about a tenth of a second

pytestmark = pytest.mark.gpu


class _Slow(torch.autograd.Function):
    """The identity, whose backward takes long on the device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        torch.cuda._sleep(SLEEP)
        return grads[0].clone()


# -- Gradients on two streams ------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Computes one half in a stream of its own."""

    def __init__(self, has_streams: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self._has_streams = has_streams

    def forward(self, x: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        side = torch.cuda.Stream() if self._has_streams else main  # type: ignore[no-untyped-call]
        left: Tensor = self.a(x)
        side.wait_stream(main)
        x.record_stream(side)
        with torch.cuda.stream(side):
            right: Tensor = _Slow.apply(self.b(x))  # type: ignore[no-untyped-call]
        main.wait_stream(side)
        right.record_stream(main)
        return left + right


def _train_branches(rank: int, world: int, options: dict[str, Any], has_streams: bool) -> list[Tensor]:
    torch.manual_seed(0)
    module: nn.Module = nn.Sequential(Branches(has_streams), Branches(has_streams)).to("cuda")
    engine = ZeroEngine(units=["Branches"], communication=Communication(prefetch=world - 1), **options)
    module = engine.shard(module)
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(3):
        batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * rank + step)).to("cuda")
        with engine.scope("training_step"):
            loss = module(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.flush()
    weights = [engine.full_param(param).cpu() for param in module.parameters()]
    engine.close()
    return weights


BRANCHES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage2-cpu-w1": (1, {"stage": 2, "offload": Offload(optimizer="cpu", step_device="cpu")}),
    "stage2-w2": (2, {"stage": 2}),
    "stage3-w2": (2, {"stage": 3}),
}


@pytest.mark.parametrize("case", BRANCHES)
def test_gradients_that_arrive_on_two_streams_are_summed_in_order(case: str) -> None:
    world, options = BRANCHES[case]
    expected = worlds.run(_train_branches, world, options, False, timeout_s=TIMEOUT_S)
    found = worlds.run(_train_branches, world, options, True, timeout_s=TIMEOUT_S)
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # cuBLAS may choose other kernels by stream
