"""ZeRO in a plain PyTorch loop.

Alone or on several ranks:

    python examples/minimal.py
    torchrun --nproc-per-node 2 examples/minimal.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from lightning_zero import ZeroEngine


def main(num_steps: int = 100) -> None:
    """Fit a small network to a function, with everything sharded over the ranks."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu")

    model = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    engine = ZeroEngine(stage=3, units=[nn.Linear], device=device)
    engine.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine.attach(optimizer)

    generator = torch.Generator().manual_seed(rank)
    for step in range(1, num_steps + 1):
        x = torch.rand(64, 8, generator=generator).to(device)
        loss = F.mse_loss(model(x), x.sum(dim=1, keepdim=True).sin())
        loss.backward()
        engine.clip_grad_norm(optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    if rank == 0:
        print("\n".join(engine.plan()))
    engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
