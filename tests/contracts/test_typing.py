"""Programs of users are typed: what the README writes passes ``mypy --strict``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.contracts.test_documents import ROOT, _blocks

# What the README calls the reader's own, as a reader with types would write it.
TYPED = """
import torch
from torch import nn
import lightning as L

class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

module, loader = Module(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=4)
class Model(nn.Sequential):
    def __getitem__(self, index: int) -> nn.Linear:  # type: ignore[override]
        raise NotImplementedError

model = Model(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
batches = [(torch.ones(2, 4), torch.ones(2, 1))] * 2
x = torch.ones(2, 4)
"""

PROGRAM = """
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import assert_type

import torch
from lightning_zero import (
    ActivationCheckpointing, Communication, LossScale, MixedPrecision, Offload, Pipeline, ZeroEngine, ZeroStrategy,
    gathered, load_from_checkpoint,
)
from torch import Tensor, nn
from torch.optim import SGD, AdamW


class Net(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


engine = ZeroEngine(stage=3, units=("Block", nn.Linear), device="cpu", step="backward")
net = engine.shard(Net())
assert_type(net, Net)
assert_type(engine.attach(AdamW(net.parameters())), AdamW)
first, second = engine.attach(AdamW(net.parameters()), SGD(net.parameters()))
assert_type(engine.full_param(net.layer.weight), Tensor)
assert_type(engine.full_param(net.blocks[0].weight), Tensor)
assert_type(engine.full_grad(net.blocks[0].weight), Tensor | None)
with gathered(net), gathered(net.blocks[0]), gathered([net.layer, net.blocks[0].weight], write="all"):
    pass
with engine.gathered(net.parameters(), write="rank0"), engine.scope("training_step"), engine.microbatch(last=False):
    pass

names: list[str] = ["Block"]
classes: tuple[type[nn.Module], ...] = (nn.Linear,)
strategy = ZeroStrategy(
    stage=2, units=names, pipeline=Pipeline(stages=2, partition=names, first=("embed",)),
    communication=Communication(reduce_dtype="bf16"), loss_scale=LossScale(static=1024), step="deferred",
    offload=Offload(optimizer="nvme", path=[Path("/a"), "/b"]), timeout=timedelta(minutes=30),
    activation_checkpointing=ActivationCheckpointing(modules=classes),
)
ZeroStrategy(units=classes, activation_checkpointing=names, offload="cpu", communication={"prefetch": 2})
ZeroStrategy(activation_checkpointing=nn.Linear, pipeline=4, timeout=1800)
assert_type(strategy.full_param(net.blocks[0].weight), Tensor)
with strategy.gathered([net.layer.weight, net.layer.bias]):
    pass
MixedPrecision(compute_dtype=torch.bfloat16)
"""

WRONG = """
from lightning_zero import Communication, ZeroEngine, ZeroStrategy

ZeroStrategy(stge=3)
ZeroStrategy(stage=4)
ZeroStrategy(step="later")
ZeroStrategy(async_save="no")
ZeroEngine(units=3.5)
Communication(prefetch_count=2)
"""


def _mypy(*programs: Path) -> str:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", ROOT / ".mypy_cache"),
            "--allow-untyped-calls",  # `loss.backward()`
            "--follow-imports=silent",  # as for an installed package: its own lines are checked by `make type`
            *programs,
        ],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)  # mypy reads all of PyTorch and Lightning
def test_programs_of_users_pass_mypy(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "readme.py").write_text(TYPED + "\n".join(_blocks(ROOT / "README.md", "python")))
    (tmp_path / "wrong.py").write_text(WRONG)
    found = _mypy(*sorted(tmp_path.glob("*.py")))
    assert [line for line in found.splitlines() if "wrong.py" not in line][:-1] == []
    assert found.count("error:") == WRONG.count("(")
