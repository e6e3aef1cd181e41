"""Random numbers of steps in parts."""

from __future__ import annotations

import random

import numpy
import torch

from lightning_zero.parallel.pipeline.schedule.streams import RandomState, RandomStreams

CPU = torch.device("cpu")


def test_draws_before_the_model_are_those_of_a_plain_run_on_every_stage() -> None:
    torch.manual_seed(5)
    plain = [torch.rand(3) for _ in range(4)]
    for chunk, inside in ((0, 2), (1, 7)):
        torch.manual_seed(5)
        streams = RandomStreams(CPU)
        streams.begin()
        drawn = []
        for microbatch in range(4):
            streams.enter(chunk, microbatch)
            drawn.append(torch.rand(3))
            streams.leave_common()
            with streams.inside():
                torch.rand(inside)
            streams.leave()
        streams.end()
        assert torch.equal(torch.stack(drawn), torch.stack(plain))


def test_chunks_draw_different_numbers_that_do_not_repeat() -> None:
    torch.manual_seed(5)
    streams = RandomStreams(CPU)
    streams.begin()
    seen = []
    for microbatch in range(3):
        for chunk in range(2):
            streams.enter(chunk, microbatch)
            streams.leave_common()
            with streams.inside():
                seen.append(torch.rand(()).item())
            streams.leave()
    assert len(set(seen)) == 6


def test_a_look_leaves_no_trace() -> None:
    before = RandomState(CPU)
    RandomStreams(CPU).apart(lambda: (torch.rand(3), random.random()))
    assert RandomState(CPU).digest() == before.digest()


def test_digests_tell_every_generator_apart() -> None:
    plain = {**RandomState(CPU).plain(), "device": {"cpu": torch.arange(16, dtype=torch.uint8)}}
    plain["numpy"] = ("MT19937", torch.arange(624), 1, 0, 0.0)
    before = RandomState.of(plain, CPU).digest()
    assert RandomState.of(plain, CPU).digest() == before
    version, words, gauss = plain["python"]
    for other in (
        {"device": {"cpu": torch.arange(1, 17, dtype=torch.uint8)}},
        {"numpy": ("MT19937", torch.arange(624), 2, 0, 0.0)},
        {"numpy": ("MT19937", torch.arange(624) + 1, 1, 0, 0.0)},
        {"torch": plain["torch"] ^ 1},
        {"python": (version, words + 1, gauss)},
    ):
        assert RandomState.of({**plain, **other}, CPU).digest() != before


def test_a_resumed_stream_draws_what_an_uninterrupted_one_draws() -> None:
    def draw(streams: RandomStreams) -> list[float]:
        streams.begin()
        streams.enter(1, 0)
        streams.leave_common()
        drawn = [torch.rand(()).item(), random.random()]
        with streams.inside():
            drawn += [torch.rand(()).item(), random.random(), numpy.random.rand()]
        streams.leave()
        return drawn

    streams = RandomStreams(CPU)
    first = draw(streams)
    saved = streams.plain()
    second = draw(streams)
    resumed = RandomStreams(CPU)
    resumed.take(saved)
    assert draw(resumed) == second != first


def test_code_between_modules_draws_the_same_numbers_for_every_chunk_and_others_in_every_micro_batch() -> None:
    drawn: list[list[float]] = []
    for chunk in range(2):
        torch.manual_seed(5)
        random.seed(5)
        streams = RandomStreams(CPU)
        mine = []
        for _ in range(2):  # steps
            streams.begin()
            for microbatch in range(2):
                streams.enter(chunk, microbatch)
                streams.leave_common()
                mine.append(torch.rand(()).item())
                with streams.inside():
                    torch.rand(1 + chunk)
                    random.random()
                mine += [torch.rand(()).item(), random.random(), numpy.random.rand()]
                streams.leave()
            streams.end()
        drawn.append(mine)
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 16


def test_streams_draw_the_same_with_another_default_device() -> None:
    def draw() -> list[int]:
        torch.manual_seed(5)
        streams = RandomStreams(CPU)
        streams.begin()
        streams.enter(0, 0)
        streams.leave_common()
        return [int(torch.randint(9, (), device="cpu")) for _ in range(8)]

    expected = draw()
    with torch.device("meta"):
        assert draw() == expected
