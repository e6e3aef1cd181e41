from __future__ import annotations

from typing import Any

import torch

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.traffic import CollectiveCall, Traffic
from lightning_zero.config import Communication
from tests import worlds


class Written:
    def __init__(self) -> None:
        self.lines: list[Any] = []

    def add(self, call: CollectiveCall) -> None:
        self.lines.append(call)

    def end(self, what: str) -> None:
        self.lines.append(what)


def test_calls_are_counted_by_kind() -> None:
    traffic = Traffic()
    traffic.add("all_gather", "a", 8, ranks=[0, 1], is_across=False)
    traffic.add("all_gather", "b", 4, ranks=[0, 2], is_across=True)
    assert (traffic.calls, traffic.sent_bytes) == ({"all_gather": 2}, {"all_gather": 12})
    assert traffic.across_nodes == {"all_gather": 4}
    traffic.reset()
    assert (traffic.calls, traffic.sent_bytes, traffic.across_nodes) == ({}, {}, {})


def test_a_call_ends_with_its_context() -> None:
    traffic = Traffic()
    written = traffic.ledger = Written()
    with traffic.during("tensor", "a sum", 8, ranks=[0, 1]):
        assert written.lines == [CollectiveCall("tensor", "a sum", 8, (0, 1))]
    assert written.lines[1:] == ["a sum"]


def _write_down(rank: int, world: int) -> list[Any]:
    communicator = Communicator(Communication(), torch.device("cpu"))
    part = communicator.among([0, 1], is_across=True)
    written = communicator.traffic.ledger = Written()
    full = torch.zeros(4)
    gather = communicator.all_gather(full, torch.full((2,), float(rank)), "unit `a`")
    communicator.agree_on([rank], "agreement on numbers (a detail)")
    gather.wait()
    part.all_reduce(torch.ones(1), "a norm")
    communicator.traffic.ledger = None
    part.all_reduce(torch.ones(1), "another norm")
    communicator.close()
    return written.lines


def test_a_ledger_has_calls_and_waits_in_their_order_with_those_of_parts() -> None:
    for lines in worlds.run(_write_down, 2):
        assert lines == [
            CollectiveCall("all_gather", "all-gather of unit `a`", 8, (0, 1)),
            CollectiveCall("control", "agreement on numbers (a detail)", 16, (0, 1)),
            "agreement on numbers (a detail)",
            "all-gather of unit `a`",
            CollectiveCall("control", "all-reduce of a norm", 4, (0, 1)),
            "all-reduce of a norm",
        ]


def test_traffic_that_shares_a_ledger_is_counted_apart() -> None:
    one, other, written = Traffic(), Traffic(), Written()
    other.share_ledger(one)
    one.ledger = written
    other.add("messages", "sending of it", 8, ranks=[0, 2], is_across=False)
    other.expect("receiving of it", ranks=[2, 0])
    assert [(call.kind, call.sent_bytes) for call in written.lines] == [("messages", 8), ("receive", 0)]
    assert not one.sent_bytes
    assert other.sent_bytes == {"messages": 8}
