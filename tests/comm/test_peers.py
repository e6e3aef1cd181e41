"""Meetings end in time on every rank, and the first error of a run is known to all."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import time
from pathlib import Path

import pytest

from lightning_zero.comm import peers as peers_module
from lightning_zero.comm.peers import Peers, PeersError
from tests import worlds


def _meet_late(rank: int, world: int, late: int) -> list[str]:
    peers, said = Peers.of_world(), []
    if rank == late:
        time.sleep(1.0)
    began = time.monotonic()
    with pytest.raises(PeersError) as caught:
        peers.meet("A test", {}, lambda facts: "", timeout_s=0.3)
    assert time.monotonic() - began < 0.9
    said.append(str(caught.value))
    said.append(peers.meet("Another", {"rank": str(rank)}, lambda facts: str(len(facts)), timeout_s=30))
    return said


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late_reads_that_the_meeting_is_over(late: int) -> None:
    said = worlds.run(_meet_late, 2, late)
    assert said[0] == said[1]
    assert f"rank {late} did not come to rank {1 - late} within 0.3 s" in said[0][0]
    assert said[0][1] == "2"


def _fail(rank: int, world: int) -> list[str]:
    peers, said = Peers.of_world(), []
    for run in range(2):
        peers.begin_run()
        if rank == run:
            peers.tell(ValueError(f"in run {run}"))
            peers.wait_until_heard()
            said.append(str(peers.error_elsewhere()))
        else:
            with pytest.raises(PeersError) as caught:
                peers.meet("A test", {}, lambda facts: "", timeout_s=30)
            said.append(str(caught.value))
    peers.end_run()
    return said


def test_an_error_ends_the_meetings_of_its_run_alone() -> None:
    first, second = worlds.run(_fail, 2)
    assert first[0] == second[1] == "None"
    assert "the first error was on rank 1: ValueError: in run 1" in first[1]
    assert "the first error was on rank 0: ValueError: in run 0" in second[0]


def _end_without_a_word(rank: int, world: int, is_gone: bool) -> str:
    limits = {"_SILENCE_S": 1.5, "_PULSE_S": 0.2}
    before = {name: getattr(peers_module, name) for name in limits}
    vars(peers_module).update(limits)
    peers, said = Peers.of_world(), ""
    peers.begin_run()
    if rank == 1 and peers._watcher is not None:
        peers._watcher.stop()  # as a process that was killed, or one that holds the interpreter's lock
        if not is_gone:
            time.sleep(3.0)
            peers.meet("A test", {}, lambda facts: "", timeout_s=30)
        else:
            ended = subprocess.Popen(["true"])
            ended.wait()
            process = [*peers_module._this_process()[:-1], ended.pid]
            peers._store.set(peers.key(f"process/{rank}"), json.dumps(process))
            time.sleep(4.0)
    elif not is_gone:
        peers.meet("A test", {}, lambda facts: "", timeout_s=30)
    else:
        with pytest.raises(PeersError) as caught:
            peers.meet("A test", {}, lambda facts: "", timeout_s=30)
        said = str(caught.value)
    peers.end_run()
    vars(peers_module).update(before)
    return said


def test_a_rank_that_was_killed_is_named_long_before_the_timeout() -> None:
    assert "rank 1 gave no sign of life" in worlds.run(_end_without_a_word, 2, True)[0]


def test_a_process_is_known_by_the_start_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers of two hosts may have one name, and the first numbering of processes is the same on every host."""
    mine, read = peers_module._this_process(), Path.read_text

    def restarted(path: Path) -> str:
        return "another" if path.name == "boot_id" else read(path)

    monkeypatch.setattr(Path, "read_text", restarted)
    assert peers_module._this_process()[:-1] != mine[:-1]
    assert peers_module._this_process()[-1] == mine[-1]


def test_a_rank_whose_threads_stand_still_for_a_while_is_waited_for() -> None:
    assert worlds.run(_end_without_a_word, 2, False) == ["", ""]


def _run_inside(rank: int, world: int) -> str:
    peers = Peers.of_world()
    peers.begin_run("outer")
    peers.meet("Before", {}, lambda facts: "", timeout_s=30)
    peers.begin_run("inner")
    peers.meet("Inside", {}, lambda facts: "", timeout_s=30)
    peers.end_run("inner")
    said = ""
    if rank == 1:
        peers.tell(ValueError("behind the inner run"))
        peers.wait_until_heard()
    else:
        with pytest.raises(PeersError) as caught:
            peers.meet("Behind", {}, lambda facts: "", timeout_s=30)
        said = str(caught.value)
    peers.end_run("outer")
    assert peers._watcher is None
    peers.begin_run("next")
    peers.meet("Next", {}, lambda facts: "", timeout_s=30)
    peers.end_run("next")
    return said


def test_a_run_goes_on_when_one_inside_of_it_has_ended() -> None:
    """The inner run ended the watch of the outer one."""
    assert "ValueError: behind the inner run" in worlds.run(_run_inside, 2)[0]


def _come_again(rank: int, world: int) -> list[list[int]]:
    peers = Peers.of_world()
    peers.begin_run("run")
    missing = [peers.await_all("a place", 10) for _ in range(3)]
    if rank == 0:  # all others have been there before
        missing.append(peers.await_all("a place", 0.2))
    peers.begin_run("inner")
    missing.append(peers.await_all("a place", 10))
    peers.end_run("run")
    return missing


def test_ranks_come_to_a_place_again_and_wait_for_one_another_again() -> None:
    """A learning-rate finder restores the counters of a fit: the place was left at once, and the others hung."""
    assert worlds.run(_come_again, 2) == [[[], [], [], [1], []], [[], [], [], []]]


def _wait_long(rank: int, world: int) -> str:
    before, peers_module._SILENCE_S = peers_module._SILENCE_S, 0.5
    said = io.StringIO()
    try:
        if rank == 1:
            time.sleep(1.5)
        with contextlib.redirect_stderr(said):
            Peers.of_world().meet("A test", {}, lambda facts: "", timeout_s=30)
    finally:
        peers_module._SILENCE_S = before
    return said.getvalue()


def test_a_rank_that_waits_long_says_for_whom() -> None:
    first, second = worlds.run(_wait_long, 2)
    assert "for rank 1: A test. It gives up after 30 s." in first
    assert not second
