"""The files that one parameter's life goes through: ``python -m benchmarks.hops``.

A module of one block and a head is trained for two steps on one rank, saved and loaded. For every phase the calls
between files of ``lightning_zero`` are traced: ``files`` are those that the phase enters, ``hops`` the different pairs
of a calling and a called function that lie in different files. Every pair that enters a file but the first returns to
it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero import ZeroEngine, ZeroStrategy

__all__ = ["Hops", "main"]

ROOT = str(Path(lightning_zero.__file__).parent) + "/"


class Hops:
    """Calls between files, by phase of a parameter's life."""

    def __init__(self) -> None:
        self.calls: dict[str, set[tuple[str, str, str, str]]] = {}  # of a phase: file and function, called from which

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Trace the calls in a phase, those of this thread."""
        found = self.calls.setdefault(name, set())

        def trace(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and (file := _file(frame)):
                caller = frame.f_back
                while caller is not None and not _file(caller):
                    caller = caller.f_back
                outer = ("", "") if caller is None else (_file(caller), caller.f_code.co_name)
                if outer[0] != file:
                    found.add((file, frame.f_code.co_name, *outer))

        before = sys.getprofile()
        threading.setprofile(trace)
        sys.setprofile(trace)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(None)

    def files(self, name: str | None = None) -> Counter[str]:
        """Return how often each file is entered, in a phase or in all."""
        calls = set().union(*self.calls.values()) if name is None else self.calls[name]
        return Counter(file for file, *_ in calls)


def _file(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    return path.removeprefix(ROOT) if path.startswith(ROOT) else ""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).relu()
        return out


class _Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(_Block(), nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def _train(hops: Hops, stage: int) -> None:
    torch.manual_seed(0)
    module = _Module().model
    with hops.phase("construct"):
        engine = ZeroEngine(stage, units=["_Block"], device="cpu")  # type: ignore[arg-type]
    with hops.phase("shard"):
        engine.shard(module)
    with hops.phase("attach"):
        optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=0.1))
    for _ in range(2):
        with hops.phase("forward"), engine.scope("training_step"):
            loss = module(torch.ones(2, 4)).square().mean()
        with hops.phase("backward, reduce"):
            loss.backward()
        with hops.phase("clip"):
            engine.clip_grad_norm(optimizer, 1.0)
        with hops.phase("step, publish"):
            optimizer.step()
            optimizer.zero_grad()
    with hops.phase("gathered"), engine.gathered(module):
        pass
    engine.close()


def _save_and_load(hops: Hops, stage: int) -> None:
    def trainer() -> L.Trainer:
        return L.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=ZeroStrategy(stage=stage, state_dict_type="sharded"),  # type: ignore[arg-type]
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    loader = DataLoader(torch.ones(8, 4), batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        first, path = trainer(), str(Path(folder, "saved.ckpt"))
        first.fit(_Module(), loader)
        with hops.phase("save"):
            first.save_checkpoint(path, weights_only=False)
        again = trainer()
        load = again.strategy.load_checkpoint

        def traced(*args: Any, **options: Any) -> Any:
            with hops.phase("load"):
                return load(*args, **options)

        again.strategy.load_checkpoint = traced  # type: ignore[method-assign]
        again.fit(_Module(), loader, ckpt_path=path)


def main(argv: list[str] | None = None) -> Hops:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=3)
    options = parser.parse_args(argv)
    hops = Hops()
    _train(hops, options.stage)
    _save_and_load(hops, options.stage)
    print("| phase | files | hops | returned to most |\n|---|---|---|---|")
    for name in [*hops.calls, None]:
        files = hops.files(name)
        most = ", ".join(f"{file} {number - 1}" for file, number in files.most_common(3) if number > 1)
        print(f"| {name or 'all'} | {len(files)} | {files.total()} | {most} |")
    return hops


if __name__ == "__main__":
    main()
