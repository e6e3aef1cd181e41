"""On disks as in memory: the same bits, whoever looks in between, and no more than a few units awake."""

from __future__ import annotations

import contextlib
import copy
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks import storage
from lightning_zero.config import Offload, StepTime
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.storage import nvme
from lightning_zero.storage.disk import DiskStore
from lightning_zero.storage.nvme import StorageError
from tests import worlds
from tests.contracts import test_offload
from tests.contracts.test_offload import PRECISIONS, clamp, evaluate, forget_gradients, move_options, step_again
from tests.lightning_programs import Net, assert_equal, loader, seeded, trainer, weights
from tests.references import TinyGPT, difference, token_loss
from tests.sampling import sample


def on_disk(path: Any, **options: Any) -> Offload:
    return Offload(
        **{
            "optimizer": "nvme",
            "path": path if isinstance(path, list) else str(path),
            "buffer_bytes": 4096,
            "io_threads": 2,
            **options,
        }
    )


def _compare(rank: int, world: int, stage: int, precision: str, optimizer: str, path: str, steps: int = 4) -> list[str]:
    placements: list[dict[str, Any]] = [
        {"offload": on_disk(path)},
        {"offload": on_disk(path), "step": "now"},
        {"offload": on_disk([f"{path}/a", f"{path}/b"], fraction=0.5)},
    ]
    if stage == 3:
        placements += [
            {"offload": on_disk(path, params="nvme")},
            {"offload": on_disk(path, params="nvme"), "step": "now"},
            {"offload": on_disk(path, optimizer="cpu", params="nvme")},
            {"offload": on_disk(path, optimizer=None, params="nvme")},
            {"offload": on_disk(path, params="cpu")},
        ]
    expected = test_offload._trained(rank, world, stage, precision, optimizer, steps=steps)
    return [
        difference(test_offload._trained(rank, world, stage, precision, optimizer, steps=steps, **placement), expected)
        for placement in placements
    ]


CASES = [
    (world, stage, precision, optimizer)
    for world in (1, 2)
    for stage in (0, 1, 2, 3)
    for precision in PRECISIONS
    for optimizer in ("adamw", "sgd")
]


@pytest.mark.parametrize(
    "case",
    sample(CASES, (2, 1, "fp32", "sgd"), (1, 3, "bf16-mixed", "adamw")),
    ids=lambda case: "{}ranks-stage{}-{}-{}".format(*case),
)  # fmt: skip
def test_disks_give_the_bits_of_memory(case: tuple[int, int, str, str], tmp_path: Path) -> None:
    world, *rest = case
    for found in worlds.run(_compare, world, *rest, str(tmp_path)):
        assert not any(found), found
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# -- Whoever looks in between ------------------------------------------------------------------------------------------


def change_states(engine: ZeroEngine, module: nn.Module, optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)
        state["exp_avg_sq"] += 1e-4
        torch._foreach_mul_([state["exp_avg"]], 2.0)
        state["exp_avg_sq"].view(-1).clamp_(min=2e-4)  # an index means the whole only where states are in memory


def drop_states(engine: ZeroEngine, module: nn.Module, optimizer: Optimizer) -> None:
    for param in list(optimizer.state):
        del optimizer.state[param]


def change_masters(engine: ZeroEngine, module: nn.Module, optimizer: Optimizer) -> None:
    engine.internals.steps.open_window(optimizer)
    for param in module.parameters():
        with torch.no_grad():
            param.mul_(0.9)
            param.data.add_(0.01)
    engine.internals.steps.close_window(optimizer)
    engine.internals.checkpoints.publish()


def change_gradients(engine: ZeroEngine, module: nn.Module, optimizer: Optimizer) -> None:
    engine.clip_grad_value(optimizer, 1e-3)
    engine.clip_grad_norm(optimizer, 1e-3)
    for param in list(module.parameters())[::2]:
        assert param.grad is not None
        param.grad.mul_(0.5)
    optimizer.step()


def read_gradients(engine: ZeroEngine, module: nn.Module, optimizer: Optimizer) -> None:
    engine.clip_grad_norm(optimizer, 1e-3)
    optimizer.step()
    for param in module.parameters():
        engine.full_grad(param)
    engine.grad_norm(optimizer)


def load_states(engine: ZeroEngine, module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


ACTS = [clamp, evaluate, forget_gradients, move_options, step_again, change_states, drop_states, change_masters,
        change_gradients, read_gradients, load_states]  # fmt: skip
IN_THE_OPEN = [test_offload.clamp_in_the_open, test_offload.clamp_data]


def _act_between_steps(rank: int, world: int, stage: int, precision: str, path: str) -> list[str]:
    wrong = []
    for act in [*ACTS, *(IN_THE_OPEN if stage < 3 else [])]:
        results = []
        for options in ({}, {"offload": on_disk(path)}, {"offload": on_disk(path), "step": "now"}):
            engine, module, optimizer = test_offload._started(stage, precision=PRECISIONS[precision], **options)
            for number in range(3):
                with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
                    test_offload._step(engine, module, optimizer, number)
                    act(engine, module, optimizer)
            results.append(test_offload._values(engine, module))
            engine.close()
        wrong += [f"{act.__name__} {kind}" for kind, values in zip(("deferred", "at once"), results[1:], strict=True)
                  if not test_offload._same(values, results[0])]  # fmt: skip
    return wrong


@pytest.mark.parametrize(
    "case",
    sample([(world, stage, precision) for world in (1, 2) for stage in (0, 1, 2, 3) for precision in PRECISIONS],
           (1, 3, "bf16-mixed")),
    ids=lambda case: "{}ranks-stage{}-{}".format(*case),
)  # fmt: skip
def test_who_uses_a_sleeping_tensor_wakes_it(case: tuple[int, int, str], tmp_path: Path) -> None:
    world, *rest = case
    for wrong in worlds.run(_act_between_steps, world, *rest, str(tmp_path)):
        assert not wrong


# -- Through the Trainer -----------------------------------------------------------------------------------------------


def _failed_merge(rank: int, world: int, path: str) -> None:
    worlds.seed()
    engine = ZeroEngine(2, offload=on_disk(path))
    module = engine.shard(TinyGPT())
    engine.attach(torch.optim.AdamW(module.parameters()))
    with torch.no_grad():
        module.head.weight.fill_(0.5)
    buffer, index = engine._state.param_index.of(module.head.weight)
    buffer.refresh_master()
    home: Any = buffer.home
    computed, errors = home._computed, [StorageError("no such disk")]

    def fail() -> Tensor:
        if errors:
            raise errors.pop()
        return computed()

    home._computed = fail
    with pytest.raises(StorageError, match="no such disk"):
        buffer.values.segment(index).sum()
    assert bool((buffer.values.segment(index) == 0.5).all())
    engine.close()


def test_a_write_to_a_parameter_outlives_an_error_of_the_disk_when_the_master_takes_it_over(tmp_path: Path) -> None:
    worlds.run(_failed_merge, 1, str(tmp_path))


def _fit(rank: int, world: int, folder: str, stages: list[int]) -> None:
    plain = trainer(rank, world, ZeroStrategy(stage=3), max_epochs=2, gradient_clip_val=0.1)
    plain.fit(seeded(Net), loader(rank, world))
    for stage in stages:
        params = "nvme" if stage == 3 else None
        placements: list[Any] = [None, "cpu", on_disk(f"{folder}/disk", params=params)]
        for before, after in [(2, 0), (2, 1), (0, 2), (1, 2), (2, 2)]:
            path = f"{folder}/{stage}.ckpt"
            first = trainer(
                rank, world, ZeroStrategy(stage=stage, offload=placements[before]), max_epochs=1, gradient_clip_val=0.1
            )
            first.fit(seeded(Net), loader(rank, world))
            first.save_checkpoint(path)
            step: StepTime = "deferred" if before == after else "now"
            strategy = ZeroStrategy(stage=stage, offload=placements[after], step=step)
            again = trainer(rank, world, strategy, max_epochs=2, gradient_clip_val=0.1)
            again.fit(seeded(Net), loader(rank, world), ckpt_path=path)
            assert_equal(weights(again), weights(plain), what=f"stage {stage}, {before} to {after}")


@pytest.mark.parametrize(
    ("world", "stages"), [(1, [3]), pytest.param(1, [1, 2], marks=pytest.mark.slow),
                          pytest.param(2, [1, 2, 3], marks=pytest.mark.slow)]
)  # fmt: skip
def test_fits_resume_between_disks_and_memory(world: int, stages: list[int], tmp_path: Path) -> None:
    worlds.run(_fit, world, str(tmp_path), stages, timeout_s=240.0)
    assert not [path for path in (tmp_path / "disk").rglob("*") if path.is_file()]


# -- Memory ------------------------------------------------------------------------------------------------------------


def _program(path: Path | str, blocks: int, width: int, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.contracts.resident", str(path), *map(str, (blocks, width, steps))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_no_more_than_four_units_are_resident(tmp_path: Path) -> None:
    blocks, width = 40, 2048
    unit, disks = 16 * width * width, 2 * (1 << 22)
    found = _program(tmp_path, blocks, width, 5)
    assert found["resident"] <= 4 * unit + disks + (64 << 20), f"{found['resident'] / 2**20:.0f} MiB"
    assert found["awake"] <= 3 * unit
    assert found["weights"] == _program("", blocks, width, 5)["weights"]


@pytest.mark.slow
def test_the_program_that_measures_memory_trains_alike_on_disks(tmp_path: Path) -> None:
    found, expected = _program(tmp_path, 3, 64, 2), _program("", 3, 64, 2)
    assert (found["weights"], found["loss"]) == (expected["weights"], expected["loss"])


# -- Trouble -----------------------------------------------------------------------------------------------------------


def _cut(engine: ZeroEngine) -> None:
    for file in _store(engine).disks._files:
        os.ftruncate(file, 4096)


def _change(engine: ZeroEngine) -> None:
    for file in _store(engine).disks._files:
        page = mmap.mmap(-1, 4096)
        page.write(b"x" * 4096)
        for start in range(0, os.fstat(file).st_size, 4096):
            os.pwritev(file, [page], start)


def _refuse_writes(engine: ZeroEngine) -> None:
    for file in _store(engine).disks._files:
        os.dup2(os.open("/dev/full", os.O_WRONLY), file)


def _store(engine: ZeroEngine) -> DiskStore:
    store = engine._state.sharded.placement.disk
    assert store is not None
    store.drain()
    return store


def _two_more_steps(engine: ZeroEngine, module: nn.Module, optimizer: Optimizer) -> None:
    for number in (1, 2):
        test_offload._step(engine, module, optimizer, number)
    engine.flush()


def _steps_with_trouble(rank: int, world: int, trouble: str, params: str | None, path: str) -> tuple[str, str]:
    engine, module, optimizer = test_offload._started(3, offload=on_disk(path, params=params))
    test_offload._step(engine, module, optimizer, 0)
    engine.flush()
    if rank == world - 1:
        {"cut": _cut, "changed": _change, "full": _refuse_writes}[trouble](engine)
    started = time.monotonic()
    with pytest.raises((RuntimeError, OSError)) as caught:
        _two_more_steps(engine, module, optimizer)
    assert time.monotonic() - started < 20.0
    with pytest.raises((RuntimeError, OSError)):
        test_offload._step(engine, module, optimizer, 3)
    with contextlib.suppress(RuntimeError, OSError):
        engine.close()
    assert os.listdir(path) == []
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("params", [None, "nvme"], ids=["optimizer", "params"])
@pytest.mark.parametrize("trouble", ["cut", "changed", "full"])
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_trouble_with_a_disk_is_an_error_on_every_rank(
    world: int, trouble: str, params: str | None, tmp_path: Path
) -> None:
    reasons = {"cut": "the file ends at byte|is damaged", "changed": "is damaged", "full": "cannot be|No space left"}
    found = worlds.run(_steps_with_trouble, world, trouble, params, str(tmp_path))
    kind, message = found[-1]
    assert kind in ("StorageError", "RuntimeError")
    assert re.search(reasons[trouble], message), message
    for kind, message in found[:-1]:
        assert kind == "CollectiveError"
        assert re.search("rank 0 of 2: the .* failed", message), message


def _unusable(rank: int, world: int, path: str) -> str:
    mine = f"{path}/file" if rank == world - 1 else path
    with pytest.raises(StorageError) as caught:
        test_offload._started(3, offload=on_disk(mine))
    return str(caught.value)


def test_a_path_that_one_rank_cannot_use_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = worlds.run(_unusable, 2, str(tmp_path))
    assert "cannot be used on rank(s) 1; the error there says why" in first
    assert "It must be a directory on a local disk that can be written" in second


def _no_room(rank: int, world: int, path: str) -> tuple[str, str]:
    full = shutil.disk_usage(path)._replace(free=0)
    with pytest.MonkeyPatch.context() as patch:
        if rank == world - 1:
            patch.setattr(nvme.shutil, "disk_usage", lambda path: full)
        with pytest.raises((RuntimeError, OSError)) as caught:
            test_offload._step(*test_offload._started(3, offload=on_disk(path)), 0)
    return type(caught.value).__name__, str(caught.value)


def test_a_full_disk_on_one_rank_is_an_error_on_every_rank(tmp_path: Path) -> None:
    first, second = worlds.run(_no_room, 2, str(tmp_path))
    assert first[0] == "CollectiveError"
    assert second[0] == "StorageError"
    assert "There is no room for" in second[1]
    assert os.listdir(tmp_path) == []


def _mounted(path: Path, megabytes: int, *arguments: str) -> dict[str, Any]:
    """Return what the program says that trains on a file system of so many megabytes, seen by nobody else."""
    mount = f"mount -t tmpfs -o size={megabytes}m tmpfs {path}"
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*alone, mount], capture_output=True).returncode:
        pytest.skip("nobody may mount a file system here")
    program = " ".join([sys.executable, "-m", "tests.contracts.small_disk", str(path), *arguments])
    done = subprocess.run([*alone, f"{mount} && exec {program}"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _checkpointed(rank: int, world: int, path: str, width: int) -> None:
    fitted = trainer(rank, world, ZeroStrategy(stage=3), max_epochs=1)
    fitted.fit(seeded(lambda: Net(width)), loader(rank, world))
    fitted.save_checkpoint(path)


def _content(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_small_file_system_is_an_error_on_every_rank_and_the_checkpoint_stays(tmp_path: Path) -> None:
    disk, checkpoint, width = tmp_path / "disk", tmp_path / "before.ckpt", 512
    disk.mkdir()
    worlds.run(_checkpointed, 2, str(checkpoint), width)
    content = _content(checkpoint)
    found = _mounted(disk, 2, str(width), str(checkpoint))  # 12 bytes of 0.5M parameters
    assert any("There is no room for" in end and "No space left" in end for end in found["ends"]), found
    assert all(end.startswith(("StorageError", "CollectiveError")) for end in found["ends"]), found
    assert found["files"] == []
    assert _content(checkpoint) == content
    found = _mounted(disk, 64, str(width), str(checkpoint))
    assert found == {"ends": ["trained", "trained"], "files": []}


class _Breaks(Callback):
    """Lets the disk of the last rank refuse what is written from a step on."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        engine = cast(ZeroStrategy, trainer.strategy)._engine
        assert engine is not None
        if trainer.global_step == self._step and trainer.global_rank == trainer.world_size - 1:
            _refuse_writes(engine)


def _breaks_in_fit(rank: int, world: int, folder: str) -> str:
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    breaks = _Breaks(step=5)
    strategy = ZeroStrategy(stage=3, offload=on_disk(f"{folder}/disk", params="nvme"))
    fitted = trainer(rank, world, strategy, callbacks=[saving, breaks], enable_checkpointing=True)
    with pytest.raises((RuntimeError, OSError)) as caught:
        fitted.fit(seeded(Net), loader(rank, world))
    return type(caught.value).__name__


def _goes_on(rank: int, world: int, folder: str) -> None:
    plain = trainer(rank, world, ZeroStrategy(stage=3))
    plain.fit(seeded(Net), loader(rank, world))
    strategy = ZeroStrategy(stage=3, offload=on_disk(f"{folder}/disk", params="nvme"))
    again = trainer(rank, world, strategy)
    again.fit(seeded(Net), loader(rank, world), ckpt_path=f"{folder}/step=4.ckpt")
    assert_equal(weights(again), weights(plain))


def test_a_run_goes_on_from_the_last_checkpoint_before_its_disk_failed(tmp_path: Path) -> None:
    kinds = worlds.run(_breaks_in_fit, 2, str(tmp_path))
    assert kinds[0] in ("CollectiveError", "CheckpointError")
    assert kinds[1] in ("StorageError", "RuntimeError")
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=4.ckpt"]
    assert not list((tmp_path / "disk").iterdir())
    worlds.run(_goes_on, 2, str(tmp_path))


def _two_runs(rank: int, world: int, path: str) -> bool:
    runs = [test_offload._started(3, offload=on_disk(path, params="nvme")) for _ in range(2)]
    for number in range(2):
        for engine, module, optimizer in runs:
            test_offload._step(engine, module, optimizer, number)
    first, second = [test_offload._values(engine, module) for engine, module, _ in runs]
    for engine, _, _ in runs:
        engine.close()
    return test_offload._same(first, second)


def test_two_runs_may_share_a_path(tmp_path: Path) -> None:
    assert worlds.run(_two_runs, 1, str(tmp_path)) == [True]


def _attached_again(
    rank: int, world: int, path: str | None, moments: Any
) -> tuple[dict[str, torch.Tensor], list[int], str]:
    torch.manual_seed(0)
    engine = ZeroEngine(3, units=["Block"], moments=moments, offload=on_disk(path) if path else None)
    module = engine.shard(TinyGPT(depth=1))
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.01))
    taken = []
    for _ in range(3):
        _two_more_steps(engine, module, optimizer)
        engine.flush()
        taken.append(_store(engine).disks.nbytes if path else 0)
        engine.attach(optimizer)
    engine.attach(torch.optim.AdamW(module.parameters(), lr=0.01))
    weight = optimizer.param_groups[0]["params"][0]
    found = ""
    try:
        optimizer.state[weight]["exp_avg"].clone()
    except RuntimeError as error:
        found = str(error)
    return {name: engine.full_param(param) for name, param in module.named_parameters()}, taken, found


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_an_optimizer_that_is_attached_again_goes_on_with_its_states_and_another_starts_without(
    moments: str, tmp_path: Path
) -> None:
    expected = worlds.run(_attached_again, 2, None, moments)
    for found, (values, _, _) in zip(worlds.run(_attached_again, 2, str(tmp_path), moments), expected, strict=True):
        assert found[1] == found[1][:1] * 3
        assert "or other optimizers were attached" in found[2]
        for name, value in values.items():
            assert torch.equal(found[0][name], value), name


def _plan(rank: int, world: int, path: str) -> tuple[dict[str, int], list[str]]:
    engine, module, optimizer = test_offload._started(3, offload=on_disk(path, params="nvme"))
    test_offload._step(engine, module, optimizer, 0)
    found = engine.stats().disk, engine.plan()
    engine.close()
    return found


def test_plan_and_statistics_tell_what_is_on_disks(tmp_path: Path) -> None:
    ((disk, plan),) = worlds.run(_plan, 1, str(tmp_path))
    assert disk["optimizer"] == 2 * disk["parameters"] == 2 * disk["gradients"] > 0
    assert any("; on disks: parameters" in line for line in plan)


def test_the_benchmark_of_disks_runs(tmp_path: Path) -> None:
    rows = storage.measure(str(tmp_path), blocks=3, width=64, tokens=4, repeats=2, buffer_bytes=4096)
    assert [row.variant for row in rows][:2] == ["phase", "step"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda params: torch.optim.RMSprop(params), {}, "`RMSprop` cannot be stepped where"),
        (lambda params: torch.optim.AdamW(params, foreach=True), {}, "optimizer='nvme'.` is for .*`foreach=True`"),
        (lambda params: torch.optim.Adam(params, amsgrad=True), {}, "optimizer='nvme'.` is for .*`amsgrad=True`"),
        (lambda params: torch.optim.AdamW(params), {"moments": "int8"}, "in fp32 or bf16; got `moments='int8'`"),
        (lambda params: torch.optim.AdamW(params), {"step": "backward"}, "`step='backward'` does not work"),
    ],
    ids=["class", "foreach", "amsgrad", "int8", "backward"],
)  # fmt: skip
def test_what_would_need_everything_in_memory_is_refused(
    make: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    engine = ZeroEngine(3, offload=on_disk(tmp_path), **options)
    with pytest.raises(ValueError, match=message):
        engine.attach(make(engine.shard(nn.Linear(3, 3)).parameters()))
    if engine.module is not None:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_disks_give_the_bits_of_memory_after_fifty_steps(
    stage: int, precision: str, world: int, tmp_path: Path
) -> None:
    for found in worlds.run(_compare, world, stage, precision, "adamw", str(tmp_path), 50, timeout_s=240.0):
        assert not any(found), found


def _evaluated(rank: int, world: int, path: str) -> bool:
    results = []
    for offload in (None, on_disk(path, params="nvme")):
        worlds.seed()
        engine = ZeroEngine(3, units=["Block"], offload=offload)
        module = engine.shard(TinyGPT())
        with torch.no_grad():
            for number in range(3):  # the second and third read ahead
                with engine.scope("predict_step"):
                    results.append(token_loss(module, rank, number))
        assert offload is None or engine.stats().memory["parameters"] == 0
        engine.close()
    return all(torch.equal(one, other) for one, other in zip(results[:3], results[3:], strict=True))


def test_a_model_is_evaluated_from_disks_without_an_optimizer(tmp_path: Path) -> None:
    assert all(worlds.run(_evaluated, 2, str(tmp_path)))
