from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ExponentialLR

from lightning_zero.__main__ import main
from lightning_zero.checkpoint import directory, state
from lightning_zero.checkpoint.convert import convert
from lightning_zero.checkpoint.stored import StoredTensor
from lightning_zero.schedules import WarmupLR
from tests import worlds
from tests.checkpoint import deepspeed_files, programs
from tests.checkpoint.test_deepspeed import trained
from tests.lightning_programs import Net, assert_equal, loader, seeded, trainer, weights
from tests.sampling import sample


def load(rank: int, world: int, path: str, stage: int) -> Any:
    engine, model, optimizer = programs.make(stage, 1)
    checkpoint = directory.load(engine, path)
    state.load_model_state(engine, model, checkpoint["state_dict"])
    state.load_optimizer_state(engine, [optimizer], states=checkpoint["optimizer_states"])
    return programs.held(engine, optimizer), [group["lr"] for group in optimizer.param_groups], model.note


@pytest.mark.parametrize("written", [1, 2, 3], ids="deepspeed{}".format)
@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 3), ids="stage{}".format)
def test_a_converted_directory_of_deepspeed_loads_with_its_optimizer(stage: int, written: int, tmp_path: Path) -> None:
    model, optimizer = trained()
    deepspeed_files.write(tmp_path / "theirs", model, optimizer, written, 3)
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    ranks = worlds.run(load, 2, str(tmp_path / "ours"), stage)
    loaded = programs.whole([held for held, _, _ in ranks])
    for name, param in model.named_parameters():
        expected = param if param.requires_grad else param.bfloat16().float()
        assert torch.equal(loaded[name]["value"], expected), name
        for slot, value in optimizer.state.get(param, {}).items():
            assert torch.equal(loaded[name][slot], torch.tensor(7.0) if slot == "step" else value), (name, slot)
    assert ranks[0][1:] == ([1e-2, 2e-3], "of DeepSpeed")


def test_a_tied_tensor_is_written_once(tmp_path: Path) -> None:
    deepspeed_files.write(tmp_path / "theirs", *trained(), 3, 2)
    convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    stored = directory.StoredTensors(tmp_path / "ours")
    places = stored.metadata.storage_data
    names = ("model.embedding.weight", "model.head.weight")
    one, other = ({key.fqn: place for key, place in places.items()}[name] for name in names)
    assert one == other


def test_tensors_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed_files.write(tmp_path / "theirs", *trained(), 2, 2)
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    read = StoredTensor.read

    def watched(stored: StoredTensor) -> Tensor:
        alive.append(sum(one() is not None for one in made))
        tensor = read(stored)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(StoredTensor, "read", watched)
    convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    assert len(alive) > 20
    assert max(alive) <= 2


def test_what_needs_no_conversion_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deepspeed_files.write(tmp_path / "theirs", *trained(), 2, 2)
    convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    with pytest.raises(FileExistsError, match=r"`.*ours` exists. Remove it, or choose another name"):
        convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    with pytest.raises(ValueError, match=r"`.*ours` is a checkpoint of this package: it needs no conversion"):
        convert(str(tmp_path / "ours"), str(tmp_path / "again"))
    with pytest.raises(FileNotFoundError, match=r"is not a directory. Single files need no conversion"):
        convert(str(tmp_path / "theirs" / "latest"), str(tmp_path / "again"))
    (tmp_path / "empty").mkdir()
    assert main(["convert", str(tmp_path / "empty"), str(tmp_path / "again")]) == 1
    assert "is not a checkpoint: it has no `.metadata`" in capsys.readouterr().err
    dcp.save({"weights": torch.ones(3)}, checkpoint_id=tmp_path / "torch", no_dist=True)
    with pytest.raises(ValueError, match=r"`.*torch` has no entry `model` or `state_dict`"):
        convert(str(tmp_path / "torch"), str(tmp_path / "again"))


class Scheduled(Net):
    def __init__(self, schedule: Any) -> None:
        super().__init__()
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step"}]


def _warmup(optimizer: Any) -> WarmupLR:
    return WarmupLR(optimizer, warmup_max_lr=0.1, warmup_num_steps=20, warmup_type="linear")


def _resume_scheduled(rank: int, world: int, path: str, schedule: Any) -> tuple[int, Any]:
    fitted = trainer(rank, world, 1, max_steps=5, max_epochs=9)
    fitted.fit(seeded(lambda: Scheduled(schedule)), loader(rank, world), ckpt_path=path)
    assert fitted.fit_loop.epoch_loop._batches_that_stepped == fitted.global_step  # of which loggers are told
    return fitted.global_step, fitted.lr_scheduler_configs[0].scheduler.state_dict()


def test_steps_and_schedule_of_deepspeed_go_on(tmp_path: Path) -> None:
    module = seeded(lambda: Scheduled(_warmup))
    (optimizer,), _ = module.configure_optimizers()
    module.loss((torch.ones(2, 4), torch.ones(2, 3))).backward()
    optimizer.step()
    paths = {name: str(tmp_path / name) for name in ("scheduled", "alone")}
    for name, schedule in (("scheduled", {"last_batch_iteration": 2}), ("alone", None)):
        deepspeed_files.write(tmp_path / f"{name}-theirs", module, optimizer, 2, 1, {"lr_scheduler": schedule})
        convert(str(tmp_path / f"{name}-theirs"), paths[name])
    step, place = _resume_scheduled(0, 1, paths["scheduled"], _warmup)
    assert (step, place["last_batch_iteration"]) == (5, 4)
    with pytest.raises(ValueError, match="another scheduler than `ExponentialLR`: `last_batch_iteration`. Use the"):
        _resume_scheduled(0, 1, paths["scheduled"], lambda optimizer: ExponentialLR(optimizer, 0.9))
    with pytest.warns(UserWarning, match="The checkpoint has no state of `WarmupLR`, so its schedule starts anew"):
        step, place = _resume_scheduled(0, 1, paths["alone"], _warmup)
    assert (step, place["last_batch_iteration"]) == (5, 1)


# -- Lightning's own sharded checkpoints -------------------------------------------------------------------------------


class Sharded(Net):
    """Sharded by FSDP2 under Lightning's strategy for it."""

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in self.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self, mesh=mesh)

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.blocks.parameters(), "weight_decay": 0.1}]
        groups += [{"params": [*self.first.parameters(), *self.last.parameters()], "lr": 0.05}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def _fsdp2(rank: int, world: int, path: str) -> dict[str, Tensor]:
    """Save after 2 epochs, and return the weights after 4."""
    for epochs, resume in ((2, None), (4, path)):
        strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
        fitted = trainer(rank, world, strategy, max_epochs=epochs)
        fitted.fit(seeded(Sharded), loader(rank, world), ckpt_path=resume)
        if resume is None:
            fitted.save_checkpoint(path)
    return {name: param.full_tensor().detach() for name, param in fitted.lightning_module.named_parameters()}


def _go_on(rank: int, world: int, path: str, stage: int) -> dict[str, Tensor]:
    fitted = trainer(rank, world, stage, max_epochs=4)
    fitted.fit(seeded(Sharded), loader(rank, world), ckpt_path=path)
    return weights(fitted)


@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 3), ids="stage{}".format)
def test_a_checkpoint_of_fsdp2_goes_on_as_it_is_and_converted(stage: int, tmp_path: Path) -> None:
    path, converted = str(tmp_path / "fsdp2.ckpt"), str(tmp_path / "ours.ckpt")
    expected = worlds.run(_fsdp2, 2, path)[0]
    assert main(["convert", path, converted]) == 0
    for source in (path, converted):
        # FSDP2 averages in another order
        assert_equal(worlds.run(_go_on, 2, source, stage)[0], expected, atol=1e-6)


def _wrap_as_fsdp(rank: int, world: int, path: str) -> None:
    """Write what `FSDPStrategy(state_dict_type="sharded")` writes, from DTensors."""
    module = seeded(Sharded)
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    module.loss((torch.ones(2, 4), torch.ones(2, 3))).backward()
    optimizer.step()
    content = {"model": get_model_state_dict(module), "optimizer_0": get_optimizer_state_dict(module, optimizer)}
    dcp.save(content, checkpoint_id=path)
    if rank == 0:
        torch.save({"epoch": 1, "pytorch-lightning_version": "2.6.0"}, Path(path, "meta.pt"))


def test_a_sharded_checkpoint_of_the_strategy_for_fsdp1_is_converted(tmp_path: Path) -> None:
    worlds.run(_wrap_as_fsdp, 2, str(tmp_path / "theirs"))
    convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    content = directory.load(None, tmp_path / "ours")
    assert content["epoch"] == 1
    module = seeded(Sharded)
    module.load_state_dict(content["state_dict"])
    (state,) = content["optimizer_states"]
    assert state["state"]["blocks.0.linear.weight"]["exp_avg"].shape == (6, 6)
    assert state["param_groups"][0]["params"] == [name for name, _ in module.named_parameters()]


# -- What others read --------------------------------------------------------------------------------------------------


def _stop_and_go_on(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    """Save under the strategy after 2 epochs, and return the weights after 4."""
    fitted = trainer(rank, world, 3)
    fitted.fit(seeded(Sharded), loader(rank, world))
    fitted.save_checkpoint(f"{folder}/saved.ckpt")
    return _go_on(rank, world, f"{folder}/saved.ckpt", 3)


def _stock(rank: int, world: int, path: str) -> dict[str, Tensor]:
    fitted = trainer(rank, world, "ddp" if world > 1 else "auto", max_epochs=4)
    fitted.fit(seeded(Sharded), loader(rank, world), ckpt_path=path)
    return weights(fitted)


@pytest.mark.parametrize("tool", sample(["lightning", "ours"], "lightning"))
@pytest.mark.parametrize("world", sample([1, 2], 1))
def test_a_stock_trainer_resumes_from_the_consolidated_file_with_its_optimizer(
    world: int, tool: str, tmp_path: Path
) -> None:
    expected = worlds.run(_stop_and_go_on, world, str(tmp_path))[0]
    path = tmp_path / "saved.ckpt"
    if tool == "lightning":
        module = "lightning.pytorch.utilities.consolidate_checkpoint"
        subprocess.run([sys.executable, "-W", "ignore", "-m", module, str(path)], check=True, timeout=100)
    else:
        assert main(["consolidate", str(path), f"{path}.consolidated", "--format", "ckpt"]) == 0
    assert_equal(worlds.run(_stock, world, f"{path}.consolidated")[0], expected)
