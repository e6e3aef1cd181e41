"""A process that makes engine after engine needs no more threads, descriptors, disk room and memory than for a few."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.comm.mesh import Mesh
from lightning_zero.comm.p2p import P2P
from lightning_zero.config import Offload
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.lightning_programs import Net, loader, trainer
from tests.sampling import sample


def _held(folder: str) -> dict[str, int]:
    pages = Path("/proc/self/statm").read_text().split()[1]
    room = os.statvfs(folder)
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "resident": int(pages) * os.sysconf("SC_PAGE_SIZE"),
        "disk": (room.f_blocks - room.f_bfree) * room.f_frsize,
    }


def _assert_constant(after: list[dict[str, int]]) -> None:
    few = len(after) // 2  # fits, after which a process has all that it will need
    last = after[-1]
    slack = {"threads": 3, "descriptors": 4, "resident": 2**26, "disk": 2**26}  # threads of a fit that is just over
    for kind, spare in slack.items():
        most = max(one[kind] for one in after[:few])
        assert last[kind] <= most + spare, f"{kind}: {most} after {few} fits, {last[kind]} after {len(after)}"


def _loop(rank: int, world: int, end: str, fits: int, options: dict[str, Any], folder: str) -> list[dict[str, int]]:
    after, kept = [], []
    for _ in range(fits):
        module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        module.loop = [module]  # a reference cycle of the user's
        engine = ZeroEngine(units=["Linear"], **options)
        optimizer = engine.attach(torch.optim.AdamW(engine.shard(module).parameters()))
        for _ in range(2):
            module(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if end == "closed":
            engine.flush()
            engine.close()
        if end == "kept":
            kept.append((engine, optimizer))
        after.append(_held(folder))
    for engine, optimizer in kept:  # all of them still train, also those that share their groups
        engine.module(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return after


OPTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "stage3": lambda folder: {"stage": 3},
    "stage1": lambda folder: {"stage": 1},
    "deferred": lambda folder: {"stage": 2, "step": "deferred"},
    "cpu": lambda folder: {"stage": 3, "offload": "cpu"},
    "nvme": lambda folder: {"stage": 3, "offload": Offload(optimizer="nvme", params="nvme", path=folder)},
}


@pytest.mark.parametrize("world", sample((1, 2, 3), 2), ids="w{}".format)
@pytest.mark.parametrize("options", sample(OPTIONS, "stage3"))
@pytest.mark.parametrize("end", ["dropped", "closed", "kept"])
def test_engine_after_engine_needs_no_more_than_a_few(end: str, options: str, world: int, tmp_path: Path) -> None:
    fits = 12 if (options, world) == ("stage3", 2) else 100
    made = OPTIONS[options](str(tmp_path))
    if end == "kept" and options in ("cpu", "nvme", "deferred"):
        pytest.skip("an engine that is kept keeps what it has offloaded, and the thread that steps it")
    for after in worlds.run(_loop, world, end, fits, made, str(tmp_path), timeout_s=600.0):
        _assert_constant(after)


def _loop_with_errors(rank: int, world: int, where: str, options: dict[str, Any], folder: str) -> list[dict[str, int]]:
    after, kept = [], []
    for _ in range(12):
        module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        engine = ZeroEngine(units=["Linear"], **options)
        optimizer = engine.attach(torch.optim.SGD(engine.shard(module).parameters()))
        kept.append((engine, optimizer))
        for step in range(4):
            failing = _fail(module[0], where) if step == 2 else None
            try:
                module(torch.ones(2, 4)).sum().backward()
            except ZeroDivisionError:
                assert failing is not None
            if failing is not None:
                failing.remove()
                continue
            optimizer.step()
            optimizer.zero_grad()
        after.append(_held(folder))
    return after


def _fail(module: nn.Module, where: str) -> Any:
    if where == "forward":
        return module.register_forward_hook(lambda *_: 1 / 0)
    return module.register_forward_hook(lambda _, args, output: output.register_hook(lambda grad: 1 / 0) and None)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("options", sample(("stage1", "stage3", "early"), "stage3"))
def test_kept_engines_that_have_seen_an_error_need_no_more_than_a_few(options: str, where: str, tmp_path: Path) -> None:
    made = {"stage": 2, "step": "backward"} if options == "early" else OPTIONS[options]("")
    for after in worlds.run(_loop_with_errors, 2, where, made, str(tmp_path), timeout_s=600.0):
        _assert_constant(after)


def _fits(rank: int, world: int, end: str, fits: int, kind: str, folder: str) -> list[dict[str, int]]:
    after, kept = [], []
    for _ in range(fits):
        strategy = ZeroStrategy(**STRATEGIES[kind])
        saves = {"enable_checkpointing": kind == "async_save", "default_root_dir": folder}
        one = trainer(rank, world, strategy, max_epochs=1, limit_train_batches=2, **saves)
        module = Net()
        one.fit(module, loader(0, 1) if kind == "pipeline" else loader(rank, world))
        if end == "kept":
            kept.append((one, module))
        after.append(_held(folder))
    return after


STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {"stage": 3},
    "pipeline": {"stage": 1, "pipeline": 2},
    "async_save": {"stage": 1, "async_save": True},
}


@pytest.mark.parametrize("fits", sample([8, 100], 8), ids="fits{}".format)
@pytest.mark.parametrize(
    ("kind", "end"),
    [
        ("plain", "dropped"),
        ("plain", "kept"),
        ("pipeline", "dropped"),
        pytest.param("pipeline", "kept", marks=pytest.mark.slow),
        ("async_save", "dropped"),
        pytest.param("async_save", "kept", marks=pytest.mark.slow),
    ],
)
def test_fit_after_fit_needs_no_more_than_a_few(kind: str, end: str, fits: int, tmp_path: Path) -> None:
    for after in worlds.run(_fits, 2, end, fits, kind, str(tmp_path), timeout_s=600.0):
        _assert_constant(after)


def _unnamed(folder: str) -> tuple[int, int]:
    """Return how many files without a name this process has in a folder, and their bytes."""
    sizes = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            if os.readlink(f"/proc/self/fd/{number}").startswith(folder):
                sizes.append(os.fstat(int(number)).st_blocks * 512)
    return len(sizes), sum(sizes)


def _refits(rank: int, world: int, end: str, new_trainers: bool, folder: str) -> list[tuple[int, int]]:
    offload = Offload(optimizer="nvme", params="nvme", path=folder)
    after, trainers, module = [], [], Net(width=64)
    for _ in range(6):
        if new_trainers or not trainers:
            strategy = ZeroStrategy(stage=3, offload=offload)
            trainers = trainers if end == "kept" else []
            trainers.append(trainer(rank, world, strategy, max_epochs=0, limit_train_batches=2))
        one = trainers[-1]
        one.fit_loop.max_epochs += 1
        one.fit(module, loader(rank, world))
        after.append(_unnamed(folder))
    return after


@pytest.mark.parametrize("world", sample([1, 2], 2), ids="w{}".format)
@pytest.mark.parametrize(
    ("end", "new_trainers"),
    [("kept", False), ("kept", True), ("dropped", True)],
    ids=["one-trainer", "kept-trainers", "dropped-trainers"],
)
def test_refits_of_one_module_keep_the_files_of_one_fit(
    end: str, new_trainers: bool, world: int, tmp_path: Path
) -> None:
    for after in worlds.run(_refits, world, end, new_trainers, str(tmp_path)):
        assert max(after) == after[0], f"files and bytes on disk after each fit: {after}"


# -- Who has which groups ----------------------------------------------------------------------------------------------


def _engine() -> ZeroEngine:
    engine = ZeroEngine(1)
    engine.shard(nn.Linear(2, 2))
    return engine


def _one_rank_collects_late(rank: int, world: int) -> list[int]:
    """An engine is gone on rank 0 and alive on rank 1: its groups are lent on neither."""
    loans = []
    first: Any = _engine()
    held = first.internals.communicator.control_group
    if rank == 0:
        first.close()
    second = _engine()
    loans.append(int(second.internals.communicator.control_group is held))
    second.close()
    first.close()
    third = _engine()
    loans.append(int(third.internals.communicator.control_group is held))
    third.close()
    return loans


def test_groups_are_lent_when_they_are_free_on_every_rank() -> None:
    assert worlds.run(_one_rank_collects_late, 2) == [[0, 1]] * 2


def _after_an_error(rank: int, world: int) -> bool:
    engine = _engine()
    held = engine.internals.communicator.control_group
    if rank == 1:
        engine.internals.communicator.interrupt()
    engine.close()
    second = _engine()
    (value,) = second.internals.communicator.agree_on([rank], "a number")
    second.close()
    return second.internals.communicator.control_group is not held and value == 1


def test_groups_of_an_interrupted_step_are_not_lent_again() -> None:
    assert worlds.run(_after_an_error, 2) == [True, True]


def _default_group_is_made_anew(rank: int, world: int, folder: str) -> float:
    for number in range(3):
        engine = _engine()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/store{number}", rank=rank, world_size=world)
        engine.close()
    engine = _engine()
    value = engine.internals.communicator.all_reduce(torch.ones(1), "a number")
    engine.close()
    return float(value)


def test_a_new_default_group_has_groups_of_its_own(tmp_path: Path) -> None:
    assert worlds.run(_default_group_is_made_anew, 2, str(tmp_path)) == [2.0, 2.0]


def _mesh_after_an_error(rank: int, world: int) -> list[bool]:
    """The groups of a mesh are lent again, and not after an exception that one rank alone has seen."""
    mesh: Any = Mesh(2, 60.0)
    held, loans = mesh.message_group, [mesh.loan]
    mesh = None
    mesh = Mesh(2, 60.0)
    is_lent_again = mesh.message_group is held
    loans.append(mesh.loan)
    if rank == 1:
        mesh.distrust()
    mesh = None
    mesh = Mesh(2, 60.0)
    value = torch.tensor([rank])
    (first, second) = mesh.gather_numbers(value, "a test")
    return [is_lent_again, loans == [1, 2], mesh.message_group is not held, (int(first), int(second)) == (0, 1)]


def test_groups_of_a_mesh_are_lent_again_but_not_after_an_error() -> None:
    assert worlds.run(_mesh_after_an_error, 2) == [[True] * 4] * 2


def _letter_of_an_earlier_mesh(rank: int, world: int) -> float:
    """A message that nobody has taken does not reach the next mesh on the same groups."""
    p2p: Any = P2P(Mesh(2, 60.0), torch.device("cpu"))
    if rank == 0:
        p2p.send(1, torch.full((2,), 1.0), "a letter")
    kept, group, p2p = p2p._outgoing, p2p._group, None
    p2p = P2P(Mesh(2, 60.0), torch.device("cpu"))
    assert p2p._group is group
    value = 2.0
    if rank == 0:
        p2p.send(1, torch.full((2,), value), "a letter")
        p2p.flush()
    else:
        value = float(p2p.receive(0, (2,), torch.float32, "a letter").wait()[0])
    dist.barrier()
    assert len(kept) == (rank == 0)
    return value


def test_a_message_that_was_not_taken_does_not_reach_the_next_mesh() -> None:
    assert worlds.run(_letter_of_an_earlier_mesh, 2) == [2.0, 2.0]
