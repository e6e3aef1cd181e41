"""Whether all ranks have the same model, options and optimizers, asked before a collective depends on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from lightning_zero.comm.communicator import Communicator

__all__ = ["digest_of", "first_difference", "require_same"]

Facts = Mapping[str, str]

_HALF = 2**32 - 1  # of a digest


def require_same(communicator: Communicator, facts: Facts, what: str, remedy: str) -> None:
    """Raise the same error on every rank if the ranks' facts, or their order, differ. Collective: all ranks.

    A digest is exchanged; the facts themselves only if they differ.

    Args:
        communicator: The ranks.
        facts: A value by name, in an order that matters.
        what: The subject of the facts, for the error.
        remedy: The remedy, for the error.

    Raises:
        ValueError: They differ; names the first difference, the values and the ranks.
    """
    digest = digest_of(facts)
    halves = [digest >> 32 & _HALF, digest & _HALF]
    most = communicator.agree_on([*halves, *(_HALF - half for half in halves)], f"comparison of {what}")
    if most[:2] == [_HALF - half for half in most[2:]]:
        return
    gathered: list[Facts] = communicator.gather_objects(dict(facts), f"comparison of {what}")
    difference = first_difference(dict(enumerate(gathered)))
    raise ValueError(f"The ranks have different {what}: {difference}. {remedy}")


def first_difference(facts: Mapping[int, Facts]) -> str:
    """Name the first fact in which the ranks differ, with its value on each; ``facts`` is given by rank."""
    names = dict.fromkeys(name for one in facts.values() for name in one)
    for name in names:
        values = {rank: one.get(name, "missing") for rank, one in facts.items()}
        if len(set(values.values())) > 1:
            return f"{name} is {_by_rank(values)}"
    for place, found in enumerate(zip(*facts.values(), strict=True)):
        if len(set(found)) > 1:
            return f"number {place} is {_by_rank(dict(zip(facts, found, strict=True)))}"
    return "none"


def _by_rank(values: Mapping[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {_ranks(found)}" for value, found in ranks.items())


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def digest_of(facts: Facts) -> int:
    """Return 64 bits that other facts, or another order of them, do not have."""
    hashed = hashlib.sha256("\0".join(f"{name}\0{value}" for name, value in facts.items()).encode())
    return int.from_bytes(hashed.digest()[:8], "little", signed=True)
