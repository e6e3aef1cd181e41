"""Direct exchanges over gloo: the results and the bytes of the ring algorithms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.comm import direct
from lightning_zero.forecast.rehearsal import pretended_world
from tests import worlds

SHAPES = [(4, 6), (5,), (), (0, 3)]


def _value(rank: int, shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _results(rank: int, world: int, dtype: torch.dtype) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for shape in SHAPES:
        value = _value(rank, shape, dtype)
        results["sum", shape] = direct.all_reduce(value.T if value.dim() > 1 else value, None)
        results["maximum", shape] = direct.all_reduce(value, None, maximum=True)
        results["gather", shape] = direct.all_gather(value, None)
    shards = [_value(10 * rank + peer, (3, 2), dtype) for peer in range(world)]
    results["scatter"] = direct.reduce_scatter(shards, None)
    with worlds.count_collectives() as ledger:
        direct.all_reduce(torch.ones(12, 5), None)
    results["bytes"] = dict(ledger.sent)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_rank_has_the_results_of_all(world: int, dtype: torch.dtype) -> None:
    exact = torch.float32 if dtype == torch.bfloat16 else dtype
    answers = worlds.run(_results, world, dtype)
    for shape in SHAPES:
        values = [_value(rank, shape, dtype) for rank in range(world)]
        total = sum(value.to(exact) for value in values)
        assert isinstance(total, Tensor)
        for answer in answers:
            transposed = total.T if total.dim() > 1 else total
            assert torch.equal(answer["sum", shape], transposed.to(dtype))
            assert torch.equal(answer["maximum", shape], torch.stack(values).amax(0))
            assert all(map(torch.equal, answer["gather", shape], values))
    for rank, answer in enumerate(answers):
        shards = [_value(10 * peer + rank, (3, 2), dtype).to(exact) for peer in range(world)]
        assert torch.equal(answer["scatter"], sum(shards).to(dtype))  # type: ignore[union-attr]
        sent = 2 * 240 * (world - 1) // world
        assert answer["bytes"] == ({"send": sent} if sent else {})


def _direct(rank: int, world: int) -> list[bool]:
    return [direct.is_direct(torch.ones(1, device=device), dist.group.WORLD) for device in ("cpu", "meta")]


def test_only_host_tensors_over_gloo_are_exchanged_directly() -> None:
    assert worlds.run(_direct, 2) == [[True, False]] * 2


def _all_to_all(rank: int, world: int) -> list[list[float]]:
    send = [(rank + peer) % 3 for peer in range(world)]  # to each rank; none to some
    rows = torch.tensor([[rank, peer] for peer in range(world) for _ in range(send[peer])]).view(-1, 2).float()
    return direct.all_to_all(rows, send, [(peer + rank) % 3 for peer in range(world)], None).tolist()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_go_to_their_ranks(world: int) -> None:
    for rank, found in enumerate(worlds.run(_all_to_all, world)):
        assert found == [[float(peer), float(rank)] for peer in range(world) for _ in range((peer + rank) % 3)]


def test_a_pretended_group_stands_for_another() -> None:
    with pretended_world(2):
        assert [direct.is_direct(torch.ones(1), None, name) for name in ("gloo", "nccl", None)] == [True, False, False]
