"""Facts that ranks compare: digests that differ if a rank has another option or another frozen parameter."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import ZeroEngine
from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication
from lightning_zero.engine.runtime.rank_facts import RankFacts
from tests.engine.units.test_unit import make_unit
from tests.worlds import count_collectives, run


class _Ranks(Communicator):
    """Two ranks that have the same facts."""

    def __init__(self) -> None:
        super().__init__(Communication(), torch.device("cpu"))
        self.world_size = 2


def _facts(**options: Any) -> tuple[RankFacts, torch.optim.Optimizer, nn.Module]:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters(), **options)
    facts = RankFacts([make_unit(module, 0)], _Ranks())
    facts.watch([optimizer])
    return facts, optimizer, module


def test_a_digest_and_its_complement_have_the_bits_that_are_asked_for() -> None:
    facts, _, _ = _facts()
    for num_bits in (16, 25, 32):
        digest, opposite = facts.digest(num_bits)
        assert digest + opposite == 2**num_bits - 1
        facts.compare((digest, opposite), num_bits)


def test_one_rank_has_nothing_to_compare() -> None:
    facts = RankFacts([make_unit(nn.Linear(2, 2), 0)], Communicator(Communication(), torch.device("cpu")))
    assert facts.digest() == (0, 0)
    facts.compare((0, 0))


@pytest.mark.parametrize("option", ["lr", "weight_decay", "eps"])
def test_a_digest_shows_options_of_optimizers(option: str) -> None:
    facts, optimizer, _ = _facts()
    before = facts.digest()
    optimizer.param_groups[0][option] *= 1.001
    assert facts.digest() != before


def test_a_digest_shows_betas_frozen_parameters_and_tensors_as_options() -> None:
    facts, optimizer, module = _facts(lr=torch.tensor(0.1), foreach=False)
    found = [facts.digest()]
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    found.append(facts.digest())
    optimizer.param_groups[0]["lr"].mul_(0.5)
    found.append(facts.digest())
    module.bias.requires_grad_(False)
    found.append(facts.digest())
    assert len(set(found)) == 4


def test_the_last_bit_of_a_schedule_does_not_count() -> None:
    facts, optimizer, _ = _facts()
    before = facts.digest()
    optimizer.param_groups[0]["lr"] *= 1 + 1e-15
    assert facts.digest() == before


def test_options_of_a_step_that_nobody_has_compared_are_in_the_next_digest() -> None:
    facts, optimizer, _ = _facts()
    before = facts.digest()
    facts.compare(before)
    lr = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 1.0
    facts.note_step()
    optimizer.param_groups[0]["lr"] = lr
    after = facts.digest()
    assert after != before
    facts.compare(after)
    assert facts.digest() == before


# -- Engines without a Trainer -----------------------------------------------------------------------------------------


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)).square().mean()


def _set_lr(rank: int, module: _Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 + rank


def _freeze(rank: int, module: _Net, optimizer: torch.optim.Optimizer) -> None:
    module.a.bias.requires_grad_(rank == 0)


def _freeze_all(rank: int, module: _Net, optimizer: torch.optim.Optimizer) -> None:
    module.a.requires_grad_(rank == 0)


def _loop(rank: int, world: int, stage: int, change: Callable[..., None] | None) -> tuple[str, list[int]]:
    engine = ZeroEngine(stage, units=["Linear"], communication=Communication(timeout_s=10.0))
    torch.manual_seed(0)
    module = engine.shard(_Net())
    optimizer = engine.attach(torch.optim.SGD(module.parameters(), lr=0.1))
    calls = []
    try:
        for step in range(5):
            if step == 3 and change is not None:
                change(rank, module, optimizer)
            if change is None:  # a schedule that is the same on all ranks
                optimizer.param_groups[0]["lr"] *= 0.5
            with count_collectives() as ledger:
                module(torch.ones(2, 4)).backward()
                optimizer.step()
                optimizer.zero_grad()
            calls.append(ledger.calls.total())
    except RuntimeError as error:
        return str(error), calls
    return "no error", calls


@pytest.mark.parametrize("stage", [0, 2, 3], ids="stage{}".format)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set_lr, r"`lr` of group 0 of optimizer 0 is 0\.1 on rank 0, 1\.1 on rank 1"),
        (_freeze, r"`a\.bias` is trained on rank 0, frozen on rank 1"),
        (_freeze_all, r"`a\.weight` is trained on rank 0, frozen on rank 1"),
    ],
    ids=["lr", "one frozen", "a unit frozen"],
)
def test_a_rank_that_changes_facts_alone_is_an_error_on_all(
    stage: int, change: Callable[..., None], message: str
) -> None:
    for error, calls in run(_loop, 2, stage, change):
        assert re.search(message, error), error
        assert len(calls) == 3  # before the step


@pytest.mark.parametrize("stage", [0, 1, 2, 3], ids="stage{}".format)
def test_a_schedule_costs_no_collective(stage: int) -> None:
    for error, calls in run(_loop, 2, stage, None):
        assert error == "no error"
        assert calls[2:] == [{0: 3, 1: 3, 2: 3, 3: 2}[stage]] * 3 or len(set(calls[2:])) == 1
