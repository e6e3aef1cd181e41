"""Checkpoints of devices that run everything as late as they may: the values of their step, also in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.asynchronous import AsyncSaver
from lightning_zero.checkpoint.stored import StoredTensor
from tests import worlds
from tests.checkpoint import programs
from tests.contracts.test_simulated_device import (
    AT_ONCE,
    PLACEMENTS,
    PRECISIONS,
    PROGRAMS,
    SCHEDULES,
    _Training,
    split_case,
)
from tests.sampling import sample
from tests.simulated_device import SimulatedDevice

STEPS, SAVED = 4, 2  # a run, and behind how many of them it is saved
KINDS = ("none", "now", "background", "file", "background-file")


def _trained(
    case: str, kind: str, folder: str, eager: tuple[str, ...], deaf_to: str | None = None, *, resumes: bool = False
) -> tuple[list[Tensor], dict[str, int], set[str]]:
    """Return what was seen behind the save, with the weights at the end, the waits of the save, and all orders."""
    program, placement, precision = split_case(case)
    path = f"{folder}/{kind}"
    waits: dict[str, int] = {}
    with SimulatedDevice(eager, deaf_to) as device:
        one = _Training("cuda", PRECISIONS[precision], **PLACEMENTS[placement])
        saver = AsyncSaver(one.engine)
        if resumes:
            programs.restore(one.engine, one.module, one.optimizer, path)
        for step in range(SAVED if resumes else 0, STEPS):
            if step == SAVED and not resumes:
                one.seen.clear()
                device.waits.clear()
                _save(one, saver, kind, path)
                waits = dict(device.waits)
            PROGRAMS[program](one, step)
        one.engine.flush()
        one.seen += [one.engine.full_param(param) for param in one.module.parameters()]
        seen = [value.cpu() for value in one.seen]
        saver.close()
        one.engine.close()
    return seen, waits, set(device.orders)


def _save(one: _Training, saver: AsyncSaver, kind: str, path: str) -> None:
    is_full = kind.endswith("file")
    if kind != "none":
        checkpoint = programs.snapshot(one.engine, one.module, one.optimizer)
        if kind.startswith("background"):
            saver.save(checkpoint, path, is_full)
        else:
            directory.save(one.engine, checkpoint, path, is_full)


def _stored(path: str) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by where they are."""
    found, _ = tree_flatten_with_path(dict(directory.load(None, path)))
    leaves = ((keystr(where), leaf.read() if isinstance(leaf, StoredTensor) else leaf) for where, leaf in found)
    return {where: leaf for where, leaf in leaves if isinstance(leaf, Tensor)}


def _differences(rank: int, world: int, case: str, kind: str, folder: str, deaf_to: str | None = None) -> list[str]:
    """Return what differs from devices that run everything at once, where the run was not saved."""
    expected, _, _ = _trained(case, "none", folder, AT_ONCE)
    _trained(case, kind, folder, AT_ONCE)
    stored = _stored(f"{folder}/{kind}") if rank == 0 else {}
    found = [] if _are_equal(_trained(case, kind, folder, AT_ONCE, resumes=True)[0], expected) else ["resumed"]
    for name, eager in SCHEDULES.items():
        dist.barrier()
        if not _are_equal(_trained(case, kind, folder, eager, deaf_to)[0], expected):
            found.append(f"{name}: training")
        if rank == 0 and not _are_equal(_stored(f"{folder}/{kind}"), stored):
            found.append(f"{name}: the checkpoint")
        if not _are_equal(_trained(case, kind, folder, eager, resumes=True)[0], expected):
            found.append(f"{name}: resumed")
    return found


def _are_equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    return all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


CASES = [
    (kind, f"{program}-{placement}-{precision}")
    for kind in KINDS[1:]
    for program, placement, precision in (
        ("clipped", "stage1", "bf16"),
        ("accumulated", "stage1-deferred", "bf16"),
        ("accumulated", "stage2-cpu", "fp32"),
        ("clipped", "stage3", "bf16"),
        ("clipped", "stage3-cpu", "bf16"),
        ("plain", "stage3-streamed", "bf16"),
        ("validated", "stage3-cpu-params", "bf16"),
        ("plain", "stage3-params", "fp32"),
    )
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("saved", sample(CASES, ("background", "clipped-stage3-cpu-bf16")), ids="-".join)
def test_a_checkpoint_holds_its_step_and_training_goes_on_and_resumes_with_the_same_bits(
    saved: tuple[str, str], tmp_path: Path
) -> None:
    kind, case = saved
    assert worlds.run(_differences, 2, case, kind, str(tmp_path), timeout_s=180) == [[], []]


def _waits(rank: int, world: int, case: str, folder: str) -> int:
    return sum(_trained(case, "background", folder, SCHEDULES["late"])[1].values())


@pytest.mark.parametrize("case", sample(["clipped-stage1-bf16", "clipped-stage3-bf16"], "clipped-stage3-bf16"))
def test_the_host_waits_once_for_a_save_in_the_background(case: str, tmp_path: Path) -> None:
    assert worlds.run(_waits, 2, case, str(tmp_path)) == [1, 1]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_wait_of_a_save_in_the_background_that_is_not_heard_is_missed(tmp_path: Path) -> None:
    order = "synchronize: checkpoint/asynchronous.py copy"
    assert any(worlds.run(_differences, 2, "clipped-stage3-bf16", "background", str(tmp_path), order, timeout_s=180))
