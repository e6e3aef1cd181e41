from __future__ import annotations

import random

import pytest
import torch

from lightning_zero_ops import adamw_step_, chunks, sgd_step_
from lightning_zero_ops.chunks import vector_numel
from tests.ops.accuracy import fresh


def _cuts(numel: int, pick: random.Random) -> list[tuple[int, int]]:
    inner = sorted(pick.randrange(numel + 1) // 8 * 8 for _ in range(2))  # as shards are cut
    points = [0, *inner, numel]
    return [(a, b) for a, b in zip(points, points[1:], strict=False) if b > a]


def _tails(start: int, stop: int, body: int) -> list[int]:
    """Return the part of ``[start, stop)`` behind ``body``, relative to ``start``."""
    return [max(body, start) - start, stop - start] if stop > body else []


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("scaled", [True, False], ids=["in-chunks", "at-once"])
def test_a_cut_parameter_has_the_bits_of_pytorchs_fused_step(decoupled: bool, scaled: bool) -> None:
    pick = random.Random(0)
    generator = fresh()
    for _ in range(40):
        numel = pick.randrange(1, 300)
        start = torch.randn(numel, generator=generator)
        expected = torch.nn.Parameter(start.clone())
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        optimizer = kind([expected], fused=True, weight_decay=0.1)
        param, exp_avg, exp_avg_sq = start.clone(), torch.zeros(numel), torch.zeros(numel)
        decay = {"weight_decay": 0.1} if decoupled else {"l2": 0.1}
        cuts, body = _cuts(numel, pick), numel - numel % vector_numel()
        for step in (1, 2, 3):
            expected.grad = torch.randn(numel, generator=generator)
            optimizer.step()
            for a, b in cuts:
                adamw_step_(
                    param[a:b], exp_avg[a:b], exp_avg_sq[a:b], expected.grad[a:b], step=step, lr=1e-3,
                    factor=torch.tensor(1.0) if scaled else None, tails=_tails(a, b, body), **decay,
                )  # fmt: skip
        assert torch.equal(param, expected.detach())
        assert torch.equal(exp_avg, optimizer.state[expected]["exp_avg"])
        assert torch.equal(exp_avg_sq, optimizer.state[expected]["exp_avg_sq"])


def test_bits_do_not_depend_on_chunks_or_on_how_a_tensor_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = fresh()
    numel = 5003
    start, grads = torch.randn(numel, generator=generator), torch.randn(3, numel, generator=generator).bfloat16()
    found = []
    for chunk, cuts in [(1024, 1), (131072, 1), (131072, 7), (64, 3)]:
        monkeypatch.setattr(chunks, "CHUNK", chunk)
        param, exp_avg, exp_avg_sq = start.clone(), torch.zeros(numel), torch.zeros(numel)
        out = torch.full((numel,), float("nan"), dtype=torch.bfloat16)
        for step, grad in enumerate(grads, 1):
            for piece in torch.arange(numel).tensor_split(cuts):
                a, b = int(piece[0]), int(piece[-1]) + 1
                adamw_step_(
                    param[a:b], exp_avg[a:b], exp_avg_sq[a:b], grad[a:b], step=step, lr=0.1, weight_decay=0.1,
                    factor=torch.tensor(0.3), out=out[a:b],
                )  # fmt: skip
        assert torch.equal(out, param.bfloat16())
        found.append(torch.cat([param, exp_avg, exp_avg_sq]))
    assert all(torch.equal(other, found[0]) for other in found[1:])


def test_several_threads_give_the_same_bits_and_leave_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 256)
    start, grad = torch.randn(5003), torch.randn(5003).bfloat16()
    found = []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            param, momentum = start.clone(), torch.empty(5003)
            for step in (1, 2):
                sgd_step_(param, momentum, grad, step=step, lr=0.1, momentum=0.9)
            found.append(param)
            assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(1)
    assert torch.equal(*found)


def test_windows_tile_a_tensor() -> None:
    tails = ((5, 12), (40, 41), (90, 100))
    for window_chunk in (16, 32, 1000):
        windows = chunks._windows(100, tails, 8, window_chunk)
        pieces = sorted(piece for w in windows for piece in (*w.vectors, *w.singles, *w.padded))
        assert [a for a, _ in pieces] == [0, *[b for _, b in pieces[:-1]]]
        assert pieces[-1][1] == 100
        assert all((b - a) % 8 == 0 for w in windows for a, b in w.vectors)
        assert all(b - a < 8 for w in windows for a, b in w.padded)
        assert tuple(piece for w in windows for piece in w.singles) == tails


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_the_default_dtype_of_another_thread_does_not_show_in_a_step(moments: torch.dtype) -> None:
    """A deferred step runs beside a forward, for which ``16-true`` and ``bf16-true`` change the default dtype."""
    numel, results = 3 * vector_numel() + 5, []
    for default in (torch.float32, torch.bfloat16):
        param = torch.linspace(-1, 1, numel, dtype=torch.float32)
        states = [torch.zeros(numel, dtype=moments) for _ in range(2)]
        scales = {} if moments != torch.int8 else {
            name: torch.zeros(1, dtype=torch.float32) for name in ("exp_avg_scales", "exp_avg_sq_scales")
        }  # fmt: skip
        torch.set_default_dtype(default)
        try:
            for step in (301, 302):  # bf16 has no such number
                adamw_step_(param, *states, param.cos(), step=step, lr=0.01, betas=(0.9, 0.999), **scales)
        finally:
            torch.set_default_dtype(torch.float32)
        results.append([param, *states])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))
