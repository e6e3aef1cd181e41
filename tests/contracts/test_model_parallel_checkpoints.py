"""Checkpoints of Lightning's ``ModelParallelStrategy``: DTensors over two axes of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from lightning_zero.__main__ import main
from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.convert import convert
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.dtensor_programs import Plain, TwoAxes, batches
from tests.lightning_programs import assert_equal, seeded, trainer, weights
from tests.sampling import sample

GRIDS = [(1, 2), (2, 2), (1, 4)]  # data ranks x tensor ranks
PLAN = {"tokens": "vocab", "blocks.*.up": "column", "blocks.*.down": "row", "head": "column_gather"}


def _theirs(rank: int, world: int, path: str, data_ranks: int, is_directory: bool) -> tuple[Any, dict[str, Tensor]]:
    """Save after one epoch; return the states of the optimizer then, and the weights after another one."""
    states: dict[str, Any] = {}
    tensor_ranks = world // data_ranks
    for epochs, resume in ((1, None), (2, path)):
        strategy = ModelParallelStrategy(data_ranks, tensor_ranks, save_distributed_checkpoint=is_directory)
        fitted = trainer(rank, world, strategy, max_epochs=epochs)
        module = seeded(TwoAxes)
        fitted.fit(module, batches(rank // tensor_ranks, data_ranks), ckpt_path=resume)
        if resume is None:
            fitted.save_checkpoint(path)
            held = fitted.optimizers[0].state
            states = {
                name: {slot: _whole(value) for slot, value in held[param].items()}
                for name, param in module.named_parameters()
            }
    return states, {name: _whole(param) for name, param in module.named_parameters()}


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _ours(rank: int, world: int, path: str, stage: Any, tensor_ranks: int) -> dict[str, Tensor]:
    options = {"size": tensor_ranks, "plan": PLAN} if tensor_ranks > 1 else None
    fitted = trainer(rank, world, ZeroStrategy(stage=stage, tensor_parallel=options), max_epochs=2)
    fitted.fit(seeded(Plain), batches(rank // tensor_ranks, world // tensor_ranks), ckpt_path=path)
    return weights(fitted)


@pytest.mark.parametrize("grid", sample(GRIDS, (2, 2)), ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("form", ["directory", "file"])
def test_training_goes_on_from_it(grid: tuple[int, int], form: str, tmp_path: Path) -> None:
    data_ranks, tensor_ranks = grid
    world, path, converted = data_ranks * tensor_ranks, str(tmp_path / "theirs.ckpt"), str(tmp_path / "ours.ckpt")
    _, expected = worlds.run(_theirs, world, path, data_ranks, form == "directory")[0]
    sources = [path]
    if form == "directory":
        assert main(["convert", path, converted]) == 0
        sources = [path, converted]
    for source, stage, ours in zip(sources, (3, 1), (2, 1), strict=False):
        # The ranks add in another order than DTensors.
        assert_equal(worlds.run(_ours, 2, source, stage, ours)[0], expected, atol=1e-6)


@pytest.mark.parametrize("grid", sample(GRIDS, (2, 2)), ids="{0[0]}x{0[1]}".format)
def test_converted_values_and_optimizer_states_are_the_whole_ones(grid: tuple[int, int], tmp_path: Path) -> None:
    data_ranks, tensor_ranks = grid
    states, _ = worlds.run(_theirs, data_ranks * tensor_ranks, str(tmp_path / "theirs"), data_ranks, True)[0]
    convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))
    content = directory.load(None, tmp_path / "ours")
    module = seeded(Plain)
    module.load_state_dict(content["state_dict"])
    (state,) = content["optimizer_states"]
    assert sorted(state["state"]) == sorted(states)
    for name, expected in states.items():
        for slot, value in expected.items():
            found = state["state"][name][slot]
            found = found.read() if hasattr(found, "read") else found
            assert torch.equal(found, value), (name, slot)
    assert (content["epoch"], content["global_step"]) == (1, 8)
