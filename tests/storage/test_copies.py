"""Copies beside what the device computes; on a CPU they are made at once, by the same calls."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.storage.copies import Copies, WorkStream, keep_for_stream

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
NUMEL = 2**22  # long enough not to be done by chance


@devices
def test_a_copy_sees_what_was_computed_before_it_and_is_seen_by_what_comes_behind(device: str) -> None:
    copies = Copies(torch.device(device))
    values = torch.zeros(NUMEL, device=device)
    host = torch.empty(NUMEL, pin_memory=device == "cuda")
    for number in range(1, 20):
        values.fill_(number)
        landing = copies.down(host, values)
        landing.finish()
        assert bool((host == number).all())
        host.add_(0.5)
        copies.up(values, host, copies.mark()).wait()
        assert bool((values == number + 0.5).all())


@devices
def test_a_lane_and_a_step_run_behind_what_was_asked_before(device: str) -> None:
    copies = Copies(torch.device(device))
    values, other = torch.zeros(NUMEL, device=device), torch.zeros(NUMEL, device=device)
    for number in range(20):
        values.fill_(number)
        with copies.lane() as landing:
            other.copy_(values, non_blocking=True)
        for one in landing:
            one.wait()
        other.add_(1)
        with copies.stepping(copies.mark()):
            other.mul_(2)
        assert bool((other == 2 * (number + 1)).all())


@pytest.mark.gpu
def test_memory_that_another_stream_still_reads_is_not_taken_again() -> None:
    found, other = [], torch.cuda.Stream()
    for keeps in (False, True):
        values = torch.empty(NUMEL, device="cuda")
        with torch.cuda.stream(other):
            torch.cuda._sleep(100_000_000)  # cycles
            values.sum()
            if keeps:
                keep_for_stream(values)
            place = values.data_ptr()
            values.untyped_storage().resize_(0)
        found.append(torch.empty(NUMEL, device="cuda").data_ptr() == place)
        torch.cuda.synchronize()
    assert found == [True, False]


def test_memory_of_the_host_is_nobodys_stream() -> None:
    keep_for_stream(torch.zeros(1))


def test_on_a_cpu_every_stream_is_the_current_one() -> None:
    stream = WorkStream(torch.device("cpu"))
    stream.move_here()
    stream.wait()
    assert stream.is_current
    assert not stream.enter()
    assert stream.run(max, 1, 2) == 2


@pytest.mark.gpu
def test_work_of_two_streams_is_done_in_one() -> None:
    stream, other = WorkStream(torch.device("cuda")), torch.cuda.Stream()
    values = torch.zeros(NUMEL, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(100_000_000)  # cycles
        values.add_(1)
        stream.run(values.mul_, 2)
        values.add_(1)
        assert stream.enter()
        assert not stream.enter()
    stream.wait()
    torch.cuda.current_stream().wait_stream(other)
    assert bool((values == 3).all())
