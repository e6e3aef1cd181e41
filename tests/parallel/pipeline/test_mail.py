"""Letters between chunks: layouts, and which gradients exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.comm.mesh import Mesh
from lightning_zero.comm.p2p import P2P
from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.mail import Mail
from tests.worlds import run

SHAPES = [(2, 3), (), (4, 2, 3)]
SIZES = [(shape, torch.float32) for shape in SHAPES]


def _mail(is_device: bool = False) -> Mail:
    p2p = P2P(Mesh(2, 30.0), torch.device("cpu"))
    p2p.lets_device_wait = is_device
    return Mail(p2p, 2)


def _tensors(number: float) -> list[Tensor]:
    plain = [torch.arange(6.0).view(3, 2).t(), torch.tensor(1.0), torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)]
    return [number * tensor for tensor in plain]


def _sent(rank: int, world: int) -> list[list[tuple[Any, ...]]]:
    mail, found = _mail(), []
    for step in range(2):
        mail.begin(["kind", "kind"], is_new=step == 0)
        for index in range(2):
            if rank == 0:
                values = _tensors(index + 1.0)
                mail.send(values if step == 0 else [value.contiguous() for value in values], 1, index, what="output")
            else:
                letter = mail.expect(SIZES, 1, what="input")
                got = mail.tensors(letter, SIZES, 1, index)
                assert all(map(torch.equal, got, _tensors(index + 1.0)))
                found.append([tensor.stride() for tensor in got])
        mail.p2p.flush()
    return found


def test_tensors_arrive_in_the_layout_of_the_first_step() -> None:
    assert run(_sent, 2)[1] == [[tensor.stride() for tensor in _tensors(1.0)]] * 4


def _gradients(rank: int, world: int, is_device: bool, exist: list[tuple[bool, ...]]) -> list[list[bool]]:
    """Send the gradients of two tensors in steps of one micro-batch; in the first of them, which is new, of two."""
    mail, found = _mail(is_device), []
    for step, index in [(0, 0), (0, 1), *((step, 0) for step in range(1, len(exist) - 1))]:
        if index == 0:
            mail.begin(["kind", "kind"] if step == 0 else ["kind"], is_new=step == 0)
        if rank == 1:
            tensors = [torch.zeros(2, requires_grad=True) for _ in range(2)]
            for tensor, is_there in zip(tensors, exist[step + index if step == 0 else step + 1], strict=True):
                tensor.grad = torch.ones(2) if is_there else None
            mail.send_gradients(tensors, 1, index, what="gradient")
        else:
            letter = mail.expect_gradients([((2,), torch.float32)] * 2, 1, index, what="gradient")
            found.append([one is not None for one in mail.gradients(letter, 1, index)])
        mail.p2p.flush()
    return found


@pytest.mark.parametrize("is_device", [False, True])
def test_gradients_that_do_not_exist_are_none(is_device: bool) -> None:
    same = [(True, False)] * 4
    assert run(_gradients, 2, is_device, same)[0] == [[True, False]] * 4


@pytest.mark.parametrize("is_device", [False, True])
def test_gradients_that_differ_in_the_first_step_are_told_in_all(is_device: bool) -> None:
    varying = [(True, False), (True, True), (False, True), (True, True)]
    assert run(_gradients, 2, is_device, varying)[0] == [list(exist) for exist in varying]


def test_gradients_that_differ_later_are_told_where_the_host_need_not_wait() -> None:
    late = [(True, False), (True, False), (True, True)]
    assert run(_gradients, 2, False, late)[0] == [list(exist) for exist in late]
    with pytest.raises(
        PipelineError, match=r"The loss depends on a tensor of shape \(2,\) .* unlike in the first batch"
    ):
        run(_gradients, 2, True, late)
