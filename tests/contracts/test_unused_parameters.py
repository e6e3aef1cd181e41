"""Ranks may skip, repeat and reorder units: nothing hangs, and what a rank did not use counts as zero."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import worlds
from tests.references import Case, TinyGPT, token_loss, train
from tests.sampling import sample

Route = Callable[[int, int], list[int]]
DEPTH = 4


class Routed(TinyGPT):
    """Runs the blocks that a route names, in its order."""

    def __init__(self, route: Route, recompute: bool = False) -> None:
        super().__init__(depth=DEPTH)
        self.route = route
        self.recompute = recompute
        self.place = (0, 0)

    def body(self, x: Tensor) -> Tensor:
        for index in self.route(*self.place):
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def _loss(module: nn.Module, rank: int, step: int) -> Tensor:
    module.place = (rank, step)
    return token_loss(module, rank, step)


def _decayed(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.5, fused=True)


def _random_subset(rank: int, step: int) -> list[int]:
    chosen = random.Random(100 * step + rank)
    return [index for index in range(DEPTH) if chosen.random() < 0.6]


def _random_order(rank: int, step: int) -> list[int]:
    return random.Random(100 * step + rank).sample(range(DEPTH), DEPTH)


def _random_walk(rank: int, step: int) -> list[int]:
    chosen = random.Random(100 * step + rank)
    return [chosen.randrange(DEPTH) for _ in range(chosen.randrange(6))]


ROUTES: dict[str, Route] = {
    "rank-0-skips-1-rank-1-skips-2": lambda rank, step: [0, 2, 3] if rank == 0 else [0, 1, 3],
    "every-step-another-subset": _random_subset,
    "never-used": lambda rank, step: [0, 1, 3],
    "unused-on-one-rank": lambda rank, step: [0, 1, 2, 3] if rank == 0 else [0, 1, 3],
    "nothing-on-one-rank": lambda rank, step: [] if rank == 1 else [0, 1, 2, 3],
    "used-by-one-rank-from-step-3-on": lambda rank, step: [0, 1, 2, 3] if rank == 1 and step >= 3 else [0, 1, 3],
    "used-by-all-from-step-3-on": lambda rank, step: [0, 1, 2, 3] if step >= 3 else [0, 1, 3],
    "used-until-step-2": lambda rank, step: [0, 1, 2, 3] if step < 2 else [0, 1],
    "other-order-on-every-rank": lambda rank, step: [0, 1, 2, 3] if rank == 0 else [0, 2, 1, 3],
    "reversed-on-one-rank": lambda rank, step: [0, 1, 2, 3] if rank == 0 else [3, 2, 1, 0],
    "every-step-another-order": _random_order,
    "every-step-another-walk": _random_walk,
    "one-rank-loops": lambda rank, step: [0, 1, 1, 1, 2, 3] if rank == 0 else [0, 1, 2, 3],
}


def _case(name: str, recompute: bool, prefetch: int, tolerance: float = 0.0) -> Case:
    from lightning_zero.config import Communication

    return Case(
        build=lambda: Routed(ROUTES[name], recompute),
        program=lambda trainer: train(trainer, loss=_loss, optimizer=_decayed, steps=6),
        tolerance=tolerance,
        options={"communication": Communication(prefetch=prefetch)},
    )


def _check(rank: int, world: int, name: str, recompute: bool = False, prefetch: int = 1) -> dict[str, str]:
    case = _case(name, recompute, prefetch, 0.0 if world < 3 else 1e-6)
    with worlds.slow_collectives(0.002 * rank, seed=rank):
        return case.check(rank, world)


@pytest.mark.parametrize("name", sample(ROUTES, "every-step-another-walk"))
def test_ranks_with_different_forwards_train_as_the_reference(name: str) -> None:
    assert worlds.run(_check, 2, name) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("name", ["every-step-another-subset", "every-step-another-order", "every-step-another-walk"])
def test_more_ranks_with_different_forwards_train_as_the_reference(name: str, world: int) -> None:
    assert worlds.run(_check, world, name) == [{}] * world


@pytest.mark.slow
@pytest.mark.parametrize("name", ["every-step-another-subset", "other-order-on-every-rank", "one-rank-loops"])
def test_different_forwards_are_recomputed(name: str) -> None:
    assert worlds.run(_check, 2, name, True) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("name", ["every-step-another-subset", "every-step-another-order"])
def test_different_forwards_with_any_look_ahead(name: str, prefetch: int) -> None:
    assert worlds.run(_check, 2, name, False, prefetch) == [{}, {}]


def _check_clipped(rank: int, world: int, offload: str | None) -> dict[str, str]:
    case = Case(
        build=lambda: Routed(ROUTES["every-step-another-subset"]),
        program=lambda trainer: train(trainer, loss=_loss, optimizer=_decayed, steps=5, max_norm=0.1),
        tolerance=1e-6,  # a norm over shards and one over parameters round differently
        options={"offload": offload},
    )
    return case.check(rank, world)


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_a_clip_factor_does_not_multiply_the_gradient_of_a_block_that_was_skipped(offload: str | None) -> None:
    assert worlds.run(_check_clipped, 2, offload) == [{}, {}]


def _without_gradient(rank: int, world: int) -> list[bool]:
    from lightning_zero.engine.engine import ZeroEngine

    answers = []
    for stage in (0, 1, 2, 3):
        engine = ZeroEngine(stage, units=("Block",))
        module = engine.shard(Routed(ROUTES["never-used"]))
        optimizer = _decayed(module)
        engine.attach(optimizer)
        before = engine.full_param(module.blocks[2].up.weight)
        for step in range(2):
            with engine.scope("training_step"):
                loss = _loss(module, rank, step)
            with engine.backward_scope():
                loss.backward()
            answers.append(engine.full_grad(module.blocks[2].up.weight) is None)
            answers.append(engine.full_grad(module.blocks[1].up.weight) is not None)
            optimizer.step()
            optimizer.zero_grad()
        answers.append(torch.equal(before, engine.full_param(module.blocks[2].up.weight)))
        engine.close()
    return answers


def test_parameters_that_no_rank_used_have_no_gradient_and_no_decay() -> None:
    answers = worlds.run(_without_gradient, 2)
    assert all(answers[0])
    assert all(answers[1])
