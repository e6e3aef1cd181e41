"""Frozen parameters that compute in 16 bits keep their own values, where 16 bits do not hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.checkpoint.export import export_safetensors
from lightning_zero.checkpoint.pretrained import load_pretrained
from lightning_zero.checkpoint.state import model_state
from lightning_zero.config import MixedPrecision
from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.references import TinyGPT, token_loss

SLOW = pytest.mark.slow
STAGES = [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW), 3]
BF16 = MixedPrecision(compute_dtype=torch.bfloat16)


def _backbone(*, holds: bool) -> nn.Module:
    """Return a model of which only the head trains; ``holds``: 16 bits hold all frozen values."""
    worlds.seed()
    module = TinyGPT()
    for name, param in module.named_parameters():
        param.requires_grad_(name.startswith("head"))
        if holds and not param.requires_grad:
            param.data = param.data.bfloat16().float()
    return module


def _engine(stage: int, module: nn.Module, **options: Any) -> tuple[ZeroEngine, torch.optim.Optimizer]:
    engine = ZeroEngine(stage, precision=BF16, **options)
    engine.shard(module)
    optimizer = torch.optim.AdamW([param for param in module.parameters() if param.requires_grad], lr=1e-2)
    engine.attach(optimizer)
    return engine, optimizer


def _train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 2) -> None:
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = token_loss(module, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _frozen(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters() if not param.requires_grad}


def _are(values: Any, expected: dict[str, Tensor]) -> bool:
    return all(values[name].dtype == one.dtype and torch.equal(values[name], one) for name, one in expected.items())


def _full(engine: ZeroEngine, module: nn.Module) -> dict[str, Tensor]:
    return {name: engine.full_param(param) for name, param in module.named_parameters()}


def _keeps(rank: int, world: int, stage: int, options: dict[str, Any], path: str, holds: bool) -> None:
    from safetensors.torch import load_file

    module = _backbone(holds=holds)
    expected = _frozen(module)
    engine, optimizer = _engine(stage, module, **options)
    _train(module, optimizer, rank)
    assert _are(_full(engine, module), expected)
    with engine.gathered(module):
        assert _are(module.state_dict(), expected)
    assert {value.dtype for value in model_state(engine, module).values()} == {torch.float32}
    export_safetensors(engine, f"{path}/{stage}.safetensors")
    assert _are(load_file(f"{path}/{stage}.safetensors"), expected)
    engine.offload_states()
    engine.reload_states()
    engine.show_masters()
    engine.internals.fits.pause()
    if stage < 3:
        assert _are(module.state_dict(), expected)
    plain = TinyGPT()
    plain.load_state_dict(_full(engine, module))
    assert torch.equal(module(torch.tensor([[1, 2]])), plain(torch.tensor([[1, 2]])))
    engine.internals.fits.resume()
    _train(module, optimizer, rank)
    engine.unshard()
    assert _are(module.state_dict(), expected)


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_keep_their_values(tmp_path: Path, stage: int) -> None:
    worlds.run(_keeps, 2, stage, {}, str(tmp_path), False)


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_whose_values_16_bits_hold_are_shown_in_their_own_dtype(tmp_path: Path, stage: int) -> None:
    worlds.run(_keeps, 2, stage, {}, str(tmp_path), True)


OFFLOADED = [
    (1, {"optimizer": "cpu"}),
    pytest.param(2, {"optimizer": "nvme"}, marks=SLOW),
    pytest.param(3, {"optimizer": "cpu", "params": "cpu"}, marks=SLOW),
    pytest.param(3, {"optimizer": None, "params": "cpu"}, marks=SLOW),
    (3, {"optimizer": "nvme", "params": "nvme"}),
    pytest.param(3, {"optimizer": None, "params": "nvme"}, marks=SLOW),
]


@pytest.mark.parametrize(("stage", "offload"), OFFLOADED)
def test_offloaded_frozen_parameters_keep_their_values(tmp_path: Path, stage: int, offload: dict[str, Any]) -> None:
    if "nvme" in offload.values():
        offload = {**offload, "path": str(tmp_path)}
    worlds.run(_keeps, 2, stage, {"offload": offload}, str(tmp_path), False)


def _bytes(rank: int, world: int, stage: int, holds: bool) -> tuple[int, int]:
    module = _backbone(holds=holds)
    engine, _ = _engine(stage, module)
    held = engine.stats().memory["optimizer"]
    buffers = [buffer for unit in engine.internals.fits.units for buffer in unit.buffers]
    trained = sum(one.own_range.numel for one in buffers if one.kind.trained and one.original is not None) * 4
    lowered = sum(one.own_range.numel for one in buffers if not one.kind.trained and one.original is not None) * 4
    engine.close()
    return held - trained, lowered


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_whose_values_16_bits_hold_cost_nothing(stage: int) -> None:
    assert all(held == 0 for held, _ in worlds.run(_bytes, 2, stage, True))
    assert all(held == lowered > 0 for held, lowered in worlds.run(_bytes, 2, stage, False))


def _loads(rank: int, world: int, stage: int, path: str, how: str) -> None:
    source = _backbone(holds=False)
    expected = _frozen(source)
    if rank == 0:
        torch.save(source.state_dict(), f"{path}/{how}.bin")
    torch.distributed.barrier()
    module: nn.Module = _backbone(holds=True)
    if how == "meta":
        with torch.device("meta"):
            module = TinyGPT()
        for name, param in module.named_parameters():
            param.requires_grad_(name.startswith("head"))
        load_pretrained(module, f"{path}/{how}.bin")
    engine, optimizer = _engine(stage, module)
    if how != "meta":
        load_pretrained(engine, f"{path}/{how}.bin")
    assert _are(_full(engine, module), expected)
    _train(module, optimizer, rank)
    exact = _backbone(holds=True)
    if rank == 0:
        torch.save(exact.state_dict(), f"{path}/{how}.bin")
    torch.distributed.barrier()
    load_pretrained(engine, f"{path}/{how}.bin")
    assert _are(_full(engine, module), _frozen(exact))
    engine.close()


@pytest.mark.parametrize("how", ["meta", "later"])
@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_are_loaded_exactly(tmp_path: Path, stage: int, how: str) -> None:
    worlds.run(_loads, 2, stage, str(tmp_path), how)


def _loads_what_16_bits_hold(rank: int, world: int, stage: int, path: str) -> int:
    worlds.seed()
    if rank == 0:
        torch.save(TinyGPT().bfloat16().float().state_dict(), f"{path}/exact.bin")
    torch.distributed.barrier()
    with torch.device("meta"):
        module = TinyGPT().requires_grad_(False)
    load_pretrained(module, f"{path}/exact.bin")
    engine = ZeroEngine(stage, precision=BF16)
    engine.shard(module)
    held = engine.stats().memory["optimizer"]
    engine.close()
    return held


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_loading_what_16_bits_hold_costs_nothing(tmp_path: Path, stage: int) -> None:
    assert worlds.run(_loads_what_16_bits_hold, 2, stage, str(tmp_path)) == [0, 0]


def _thaws(rank: int, world: int, stage: int, options: dict[str, Any]) -> None:
    module = _backbone(holds=False)
    expected = _frozen(module)
    engine, optimizer = _engine(stage, module, **options)
    _train(module, optimizer, rank)
    module.requires_grad_(True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, weight_decay=0.0)
    engine.attach(optimizer)
    _train(module, optimizer, rank)
    assert _are(_full(engine, module), expected)
    engine.close()


@pytest.mark.parametrize("options", [{}, {"offload": "cpu"}], ids=["device", "cpu"])
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_are_unfrozen_train_from_their_own_values(stage: int, options: dict[str, Any]) -> None:
    worlds.run(_thaws, 2, stage, options)
