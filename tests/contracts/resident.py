"""A program that trains equal blocks and says how much memory was resident; run in a process of its own."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_zero.config import Offload
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.storage.disk import DiskStore

BATCH = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def kibibytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


def main(path: str, blocks: int, width: int, steps: int) -> None:
    """Train and print bytes: resident at most, over what the imports take; of the tensors on disks that are awake."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    offload = Offload(optimizer="nvme", params="nvme", path=path, buffer_bytes=1 << 22, io_threads=2) if path else None
    before = kibibytes("VmRSS")
    with torch.device("meta"):
        model = nn.Sequential(*[Block(width) for _ in range(blocks)])
    engine = ZeroEngine(3, units=["Block"], offload=offload, device="cpu")
    model = engine.shard(model)
    optimizer = engine.attach(torch.optim.AdamW(model.parameters(), lr=1e-3))
    awake = 0
    for step in range(steps):
        x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        engine.clip_grad_norm(optimizer, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        store = engine._state.sharded.placement.disk
        awake = max(awake, store.awake_bytes if isinstance(store, DiskStore) else 0)
    engine.flush()
    resident = (kibibytes("VmHWM") - before) * 1024
    total = 0
    for param in model.parameters():
        total = zlib.crc32(engine.full_param(param).numpy().data, total)
    print(json.dumps({"resident": resident, "awake": awake, "weights": total, "loss": loss.item()}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
