"""Calls of a rank to others: how many of a kind, how many bytes, and a ledger of each on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

__all__ = ["RECEIVE", "CollectiveCall", "Ledger", "Traffic"]

RECEIVE = "receive"  # kind of a call that sends nothing


@dataclass(frozen=True)
class CollectiveCall:
    """A call of a rank to others.

    Attributes:
        kind: As in ``EngineStats.traffic``.
        what: Name of the call, as in errors.
        sent_bytes: Bytes that this rank sends.
        ranks: The ranks that take part, in the default group.
    """

    kind: str
    what: str
    sent_bytes: int
    ranks: tuple[int, ...]


class Ledger(Protocol):
    """Writes calls down, in their order."""

    def add(self, call: CollectiveCall) -> None:
        """Take note of a call that is about to be made."""

    def end(self, what: str) -> None:
        """Take note that the program has waited for a call with this name; of several the first made."""


class _Book:
    """The ledger of the traffic of several objects."""

    ledger: Ledger | None = None


class Traffic:
    """Calls and bytes since the last reset, of a communicator and its parts."""

    def __init__(self) -> None:
        self.sent_bytes: Counter[str] = Counter()
        self.across_nodes: Counter[str] = Counter()  # those of them that go to other nodes, as far as that is known
        self.calls: Counter[str] = Counter()
        self._book = _Book()

    @property
    def ledger(self) -> Ledger | None:
        """Where calls are written down."""
        return self._book.ledger

    @ledger.setter
    def ledger(self, ledger: Ledger | None) -> None:
        self._book.ledger = ledger

    def share_ledger(self, other: Traffic) -> None:
        """Write calls from now on where ``other`` writes them; the counts stay apart."""
        self._book = other._book

    def add(self, kind: str, what: str, sent_bytes: int, *, ranks: Sequence[int], is_across: bool) -> None:
        """Count a call, see ``CollectiveCall``; ``is_across`` says that all peers are on other nodes."""
        self.sent_bytes[kind] += sent_bytes
        if is_across:
            self.across_nodes[kind] += sent_bytes
        self.calls[kind] += 1
        if self.ledger is not None:
            self.ledger.add(CollectiveCall(kind, what, sent_bytes, tuple(ranks)))

    def expect(self, what: str, *, ranks: Sequence[int]) -> None:
        """Write down that a message is received, which counts as its sender's; ``ranks`` are the two of them."""
        if self.ledger is not None:
            self.ledger.add(CollectiveCall(RECEIVE, what, 0, tuple(ranks)))

    def end(self, what: str) -> None:
        """Take note that a call has ended."""
        if self.ledger is not None:
            self.ledger.end(what)

    @contextmanager
    def during(self, kind: str, what: str, sent_bytes: int, *, ranks: Sequence[int]) -> Iterator[None]:
        """Count a call that is made in the context, see ``CollectiveCall``; it ends with the context."""
        self.add(kind, what, sent_bytes, ranks=ranks, is_across=False)
        yield
        self.end(what)

    def reset(self) -> None:
        """Start counting anew."""
        self.sent_bytes.clear()
        self.across_nodes.clear()
        self.calls.clear()
