"""Parameters of any dtype, shape and stride are sharded, and come back as they were."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.export import export_safetensors
from lightning_zero.checkpoint.state import load_model_state, model_state
from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.references import Case, train
from tests.sampling import sample

WIDTH = 6
KINDS = [
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.uint16, torch.float16,
    torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def _values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    values = torch.randint(0, 100, shape, dtype=torch.uint8)
    if dtype in (torch.bool, torch.complex64) or dtype.is_floating_point:
        return (values.float() / 50 - 1).to(dtype)
    return values.to(dtype)


class Block(nn.Module):
    """A frozen integer matrix with a trained adapter beside it, and frozen parameters of every dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.keep = nn.Parameter(torch.rand(WIDTH) > 0.3, requires_grad=False)
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1 / 127), requires_grad=False)  # 0-dim
        self.zeros = nn.Parameter(torch.tensor(3, dtype=torch.int32), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.int64), requires_grad=False)
        self.across = nn.Parameter(_values(torch.int16, 3, 4).t(), requires_grad=False)
        self.others = nn.ParameterList([nn.Parameter(_values(dtype, 5), requires_grad=False) for dtype in KINDS])
        self.image = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.codes - self.zeros).to(x.dtype) * self.scale
        hidden = F.linear(x[..., self.order] * self.keep, weight) + self.up(self.down(x))
        return x + torch.tanh(hidden) + self.image[0, 1, 1, 0]


def _build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1))


def _loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    loss: torch.Tensor = module(torch.randn(4, 3, generator=generator)).square().mean()
    return loss


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in module.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-4, fused=True)


def _program(trainer: Any) -> None:
    train(trainer, loss=_loss, optimizer=_adamw, steps=3)


def _check(rank: int, world: int, options: dict[str, Any], stages: tuple[int, ...]) -> dict[str, str]:
    case = Case(
        build=_build,
        program=_program,
        units=("Block",),
        options=options,
        stages=stages,
        tolerance=0.0 if world < 3 else 1e-6,
    )
    return case.check(rank, world)


@pytest.mark.parametrize("world", sample([1, 2, 3, 4], 3))
def test_frozen_integer_and_bool_parameters_train_as_on_a_replica(world: int) -> None:
    assert worlds.run(_check, world, {}, (0, 1, 2, 3)) == [{}] * world


@pytest.mark.parametrize("offload", sample(["optimizer-cpu", "cpu", "nvme"], "nvme"))
def test_frozen_integer_parameters_are_offloaded(offload: str, tmp_path: Path) -> None:
    where = {"optimizer": offload.split("-")[-1], "params": None if "-" in offload else offload, "path": str(tmp_path)}
    if offload != "nvme":
        del where["path"]
    assert worlds.run(_check, 2, {"offload": where}, (3,)) == [{}] * 2


def _reads(rank: int, world: int, stage: int, folder: str) -> list[str]:
    worlds.seed()
    plain = _build()
    module = copy.deepcopy(plain)
    if rank:
        with torch.no_grad():
            for param in module.parameters():
                param.zero_()
    engine = ZeroEngine(stage, units=("Block",))
    engine.shard(module)
    found = []

    def same(values: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        if values.shape != expected.shape or values.dtype != expected.dtype:
            found.append(f"{what}: {values.dtype} {tuple(values.shape)}")
        elif not torch.equal(values.contiguous().reshape(-1).view(torch.uint8), _bytes(expected)):
            found.append(f"{what}: values")

    pairs = list(zip(module.named_parameters(), plain.parameters(), strict=True))
    for (name, param), expected in pairs:
        same(engine.full_param(param), expected, f"full_param of {name}")
    with engine.gathered(module):
        copied = copy.deepcopy(module)
    for (name, param), expected in zip(copied.named_parameters(), plain.parameters(), strict=True):
        same(param.detach(), expected, f"copy of {name}")
    with engine.gathered(module, write="rank0"):
        for param in [] if rank else module.parameters():
            param.data.zero_()
    for (name, param), expected in pairs:
        same(engine.full_param(param), torch.zeros_like(expected), f"written {name}")
    load_model_state(engine, module, plain.state_dict())
    for (name, param), expected in pairs:
        same(engine.full_param(param), expected, f"loaded {name}")
    state = {"state_dict": model_state(engine, module)}
    for full in (False, True):
        directory.save(engine, state, f"{folder}/saved-{full}", full=full)
    with engine.gathered(module, write="all"):
        for param in module.parameters():
            param.data.zero_()
    for full in (False, True):
        load_model_state(engine, module, directory.load(engine, f"{folder}/saved-{full}")["state_dict"])
        for (name, param), expected in pairs:
            same(engine.full_param(param), expected, f"checkpoint of {name}, full={full}")
    export_safetensors(module, f"{folder}/exported.safetensors")
    exported = load_file(f"{folder}/exported.safetensors")
    for (name, _), expected in pairs:
        same(exported[name], expected, f"export of {name}")
    engine.unshard()
    for (name, param), expected in pairs:
        same(param.detach(), expected, f"unsharded {name}")
    return found


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 3))
@pytest.mark.parametrize("world", sample([1, 2, 3], 3))
def test_parameters_of_any_dtype_are_read_written_copied_and_loaded(stage: int, world: int, tmp_path: Path) -> None:
    assert worlds.run(_reads, world, stage, str(tmp_path)) == [[]] * world
