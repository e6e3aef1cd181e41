"""Facts of ranks are compared by digest; the first difference is named."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.comm.agreement import digest_of, first_difference, require_same
from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication
from tests.worlds import count_collectives, run


def test_a_digest_depends_on_names_values_and_order() -> None:
    facts = {"stage": "3", "units": "4"}
    others = [{"stage": "2", "units": "4"}, {"stages": "3", "units": "4"}, {"units": "4", "stage": "3"}, {}]
    assert digest_of(facts) == digest_of(dict(facts))
    assert len({digest_of(one) for one in (facts, *others)}) == 5


def test_the_first_difference_has_the_values_and_the_ranks() -> None:
    facts = {0: {"a": "1", "b": "2"}, 1: {"a": "1", "b": "3"}, 2: {"a": "1", "b": "2"}}
    assert first_difference(facts) == "b is 2 on ranks 0, 2, 3 on rank 1"


def test_a_fact_that_a_rank_does_not_have_is_missing_there() -> None:
    assert first_difference({0: {"a": "1"}, 1: {}}) == "a is 1 on rank 0, missing on rank 1"


def test_another_order_is_a_difference() -> None:
    assert (
        first_difference({0: {"a": "1", "b": "2"}, 1: {"b": "2", "a": "1"}}) == "number 0 is a on rank 0, b on rank 1"
    )


def _compare(rank: int, world: int, differs: bool) -> tuple[str, int]:
    communicator = Communicator(Communication(), torch.device("cpu"))
    facts = {"weight": "(4, 2)", "bias": f"({4 + (rank if differs else 0)},)"}
    with count_collectives() as ledger:
        try:
            require_same(communicator, facts, "models", "Build the same one.")
        except ValueError as error:
            return str(error), 0
    communicator.close()
    return "", sum(ledger.calls.values())


@pytest.mark.parametrize("world", [2, 3])
def test_different_facts_are_the_same_error_on_all_ranks(world: int) -> None:
    said = {text for text, _ in run(_compare, world, True)}
    assert len(said) == 1
    assert said.pop().startswith("The ranks have different models: bias is (4,) on rank 0, (5,) on rank 1")


def test_the_same_facts_are_not_sent() -> None:
    for text, calls in run(_compare, 2, False):
        assert text == ""
        assert calls == 2  # the four halves of the digest, two in a message
