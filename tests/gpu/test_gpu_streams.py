"""Programs that compute in several CUDA streams, in PyTorch's order: they train with the bits of one stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import Communication, Offload
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.moe.exchange import ExpertRanks
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


# -- A gathered unit on two streams ------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """A large layer: its upload from host memory takes longer than a small forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16_384, 8_192) / 128)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight[:, : x.shape[1]].T


class Twice(nn.Module):
    """Uses one encoder in two streams."""

    def __init__(self, has_streams: bool) -> None:
        super().__init__()
        self.encoder = Encoder()
        self._has_streams = has_streams

    def forward(self, x: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        sides = [torch.cuda.Stream() if self._has_streams else main for _ in range(2)]  # type: ignore[no-untyped-call]
        results: list[Tensor] = []
        for side in sides:
            side.wait_stream(main)
            x.record_stream(side)
            with torch.cuda.stream(side):
                results.append(self.encoder(x).sin())
        for side, result in zip(sides, results, strict=True):
            main.wait_stream(side)
            result.record_stream(main)
        return results[0] + 2 * results[1]


def _gradients_of_twice(rank: int, world: int, has_streams: bool) -> list[Tensor]:
    torch.manual_seed(0)
    engine = ZeroEngine(3, units=["Encoder"], offload=Offload(optimizer=None, params="cpu"))
    module = engine.shard(Twice(has_streams).to("cuda"))
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.0))
    found = []
    for step in range(3):
        x = torch.randn(4, 8_192, generator=torch.Generator().manual_seed(step)).to("cuda").requires_grad_()
        with engine.scope("training_step"):
            loss = module(x).square().mean()
        loss.backward()
        assert x.grad is not None
        found.append(x.grad.cpu())
        found.extend(grad[::64, ::64].cpu() for grad in map(engine.full_grad, module.parameters()) if grad is not None)
        optimizer.zero_grad()
    engine.close()
    return found


def test_a_unit_that_one_stream_has_gathered_is_used_by_another_behind_the_gather() -> None:
    expected = worlds.run(_gradients_of_twice, 1, False, timeout_s=TIMEOUT_S)[0]
    found = worlds.run(_gradients_of_twice, 1, True, timeout_s=TIMEOUT_S)[0]
    assert len(found) == len(expected) > 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)  # cuBLAS may choose other kernels by stream


# -- Rows between experts ----------------------------------------------------------------------------------------------


def _exchange(rank: int, world: int) -> bool:
    """Start an exchange in one stream, settle it in another, and read the rows in the first; say if they are right."""
    ranks = ExpertRanks()
    numel = 2**16
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    rows = torch.full((2 * numel, 1024), float(rank), device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        result, transfer = ranks.start(rows, [numel, numel], [numel, numel])
    with torch.cuda.stream(second):
        torch.cuda._sleep(SLEEP)  # what waits in this stream comes late
        ranks.settle()
    with torch.cuda.stream(first):
        transfer.wait()
        is_right = bool((result.view(2, -1).mean(1).cpu() == torch.arange(2.0)).all())
    torch.cuda.synchronize()
    return is_right


def test_rows_whose_exchange_is_settled_in_another_stream_are_waited_for() -> None:
    assert worlds.run(_exchange, 2, timeout_s=TIMEOUT_S) == [True, True]
