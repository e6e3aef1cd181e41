"""Programs that start processes of their own, and what is left of them when one fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# -- Starting processes ------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
torch.set_num_threads(1)
from tests import lightning_programs as t
from lightning.pytorch import Trainer

def main(start_method, stage):
    strategy = t.ZeroStrategy(stage=stage, units=["Block"], start_method=start_method)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=True,
    )
    module = t.seeded(t.Net)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    trainer.fit(module, t.DataLoader(t.data(), 4))
    assert trainer.global_step == 4 or start_method != "popen", trainer.global_step
    if start_method == "popen":
        after = t.weights(trainer)
    else:
        after = dict(module.named_parameters())
    assert all(after[n].shape == before[n].shape for n in before)
    assert all(not torch.equal(after[n], before[n]) for n in before)
    print("FITTED", flush=True)

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
"""


def start(folder: Path, launcher: list[str], *args: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(textwrap.dedent(script))
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR", "NODE_RANK"):
        environment.pop(name, None)
    command = [sys.executable, *launcher, str(folder / "program.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
def test_start_methods(start_method: str, stage: int, tmp_path: Path) -> None:
    result = start(tmp_path, [], start_method, str(stage))
    assert result.returncode == 0, result.stderr[-3000:]
    assert "FITTED" in result.stdout


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = start(tmp_path, launcher, "popen", "3")
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("FITTED") == 2


CLI_SCRIPT = """
import sys
import torch
torch.set_num_threads(1)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch import LightningDataModule
from tests import lightning_programs as t

class Data(LightningDataModule):
    def train_dataloader(self):
        return t.DataLoader(t.data(), 4)

if __name__ == "__main__":
    cli = LightningCLI(t.Net, Data, seed_everything_default=3)
    total = sum(float(v.double().sum()) for v in t.weights(cli.trainer).values())
    if cli.trainer.is_global_zero:
        print("WEIGHTS", total, flush=True)
"""

CLI_YAML = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {save_dir: logs, name: run, version: 0}
  enable_progress_bar: false
  strategy:
    class_path: lightning_zero.ZeroStrategy
    init_args: {stage: 2, units: [Block], communication: {prefetch: 0}}
"""


@pytest.mark.slow
def test_yaml_run_is_reproduced_by_the_config_it_logs(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CLI_YAML)
    first = start(tmp_path, [], "fit", "--config=c.yaml", "--trainer.strategy.stage=3", script=CLI_SCRIPT)
    assert first.returncode == 0, first.stderr[-3000:]
    logged = tmp_path / "logs/run/version_0/config.yaml"
    again = tmp_path / "again.yaml"
    again.write_text(logged.read_text().replace("version: 0", "version: 1"))
    second = start(tmp_path, [], "fit", "--config=again.yaml", script=CLI_SCRIPT)
    assert second.returncode == 0, second.stderr[-3000:]
    values = [[line for line in r.stdout.splitlines() if line.startswith("WEIGHTS")] for r in (first, second)]
    assert values[0]
    assert values[0] == values[1]


# -- When something goes wrong -----------------------------------------------------------------------------------------

FAILING = """
import sys
import torch
torch.set_num_threads(1)
from tests import lightning_programs as t
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint

class Failing(t.Net):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == int(sys.argv[1]):
            raise ValueError("the error of the user's")
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    strategy = t.ZeroStrategy(stage=3, units=["Block"], timeout=30)  # the processes' start takes long
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=OnExceptionCheckpoint("."),
    )
    trainer.fit(Failing(), t.DataLoader(t.data(), 4))
"""


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])  # rank 0 hosts the store
def test_error_on_one_rank_ends_the_run_with_that_error(rank: int, tmp_path: Path) -> None:
    result = start(tmp_path, [], str(rank), script=FAILING)
    assert result.returncode != 0
    assert "ValueError: the error of the user's" in result.stderr
    assert re.search(f"(?i)the first error was on rank {rank}: ValueError: the error of the user's", result.stderr)
