"""Time steps of tensor parallelism beside PyTorch's DTensor: ``python -m benchmarks.tensor_parallel``.

Two ranks train the same decoder on the same batches, with the same cuts: columns of queries, keys, values, the first
layer of the MLP and the head, rows of the other two and of the embedding. One side is the engine over a module that
``cut_module`` has cut, the other is ``parallelize_module`` of the installed PyTorch in a plain loop; both step with the
same fused AdamW. They live in the same processes and take turns. Before anything is timed losses and weights have to
agree.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from benchmarks.opponents import fused_adamw
from benchmarks.step import GATE_STEPS, GATE_TOLERANCE, WARMUP_PAIRS, percentiles_ms, ratio_interval
from benchmarks.table import Row, append, heading
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.parallel.tensor.collectives import ProcessGroupRanks
from lightning_zero.parallel.tensor.grid import grid_of
from lightning_zero.parallel.tensor.plan import TensorPlan
from lightning_zero.parallel.tensor.transform import cut_module

__all__ = ["BOUND", "measure"]

BOUND = 0.8
RANKS = 2
VOCABULARY, HEAD = 512, 64
PLAN = TensorPlan(
    {
        "blocks.*.query": "column", "blocks.*.key": "column", "blocks.*.value": "column", "blocks.*.projection": "row",
        "blocks.*.up": "column", "blocks.*.down": "row", "embedding": "vocab", "head": "column_gather",
    }
)  # fmt: skip


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(width, eps=1e-5) for _ in range(2))
        self.query, self.key, self.value, self.projection = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.attention_norm(hidden)
        query, key, value = (
            layer(normed).view(*hidden.shape[:2], -1, HEAD).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).flatten(2))
        result: Tensor = hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))
        return result


class _Decoder(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


class _Ours:
    def __init__(self, model: nn.Module) -> None:
        ranks = ProcessGroupRanks()
        records = cut_module(model, PLAN, ranks)
        alone = [dist.new_group([rank]) for rank in range(ranks.size)][ranks.rank]
        grid = grid_of(records, tensor_group=None, data_group=alone, data_ranks=1)
        self.engine = ZeroEngine(0, units=["_Block"])
        self.model = self.engine.shard(model, grid=grid)
        self.optimizer = fused_adamw(self.model.parameters())
        self.engine.attach(self.optimizer)

    def step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(batch)
        with self.engine.backward_scope():
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def weights(self) -> dict[str, Tensor]:
        return {name: self.engine.full_param(param) for name, param in self.model.named_parameters()}


class _DTensor:
    def __init__(self, model: _Decoder) -> None:
        styles = {
            "column": ColwiseParallel(), "row": RowwiseParallel(), "vocab": RowwiseParallel(input_layouts=Replicate()),
            "column_gather": ColwiseParallel(output_layouts=Replicate(), use_local_output=True),
        }  # fmt: skip
        plan = {name: styles[str(rule)] for name, rule in PLAN.rules.items()}
        parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
        self.model = model
        cut = [param for param in model.parameters() if isinstance(param, DTensor)]
        whole = [param for param in model.parameters() if not isinstance(param, DTensor)]
        # One fused call takes either the ones or the others.
        self.optimizer = fused_adamw([{"params": cut}, {"params": whole}])  # type: ignore[list-item]

    def step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def weights(self) -> dict[str, Tensor]:
        return {
            name: (param.full_tensor() if isinstance(param, DTensor) else param).detach()
            for name, param in self.model.named_parameters()
        }


def measure(width: int, depth: int, tokens: int, *, steps: int) -> list[Row]:
    """Return the row of one shape; its ratio is the time of a step over that of a step with DTensors.

    Raises:
        AssertionError: The sides do not agree.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, args=(width, depth, tokens, steps, folder), nprocs=RANKS)
        seconds: dict[str, list[float]] = torch.load(Path(folder) / "seconds.pt")
    ratio, lo, hi = ratio_interval(seconds["engine"], seconds["dtensor"])
    return [
        Row(
            what="step", variant="tensor/dtensor", shape=f"{width}x{depth}-{tokens}tok", dtype="fp32", world=RANKS,
            metric="time", unit="ms", **percentiles_ms(seconds["engine"]), ratio=f"{ratio:.3f}", lo=f"{lo:.3f}",
            hi=f"{hi:.3f}", bound=f"{BOUND}", verdict="ok" if ratio <= BOUND else "MISSED",
        )
    ]  # fmt: skip


def _worker(rank: int, width: int, depth: int, tokens: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    sides: dict[str, _Ours | _DTensor] = {}
    for name, make in (("engine", _Ours), ("dtensor", _DTensor)):
        torch.manual_seed(0)
        sides[name] = make(_Decoder(width, depth))
    batches = [
        torch.randint(VOCABULARY, (max(tokens // 128, 1), min(tokens, 128) + 1), generator=_generator(number))
        for number in range(GATE_STEPS)
    ]
    for batch in batches:
        first, second = (side.step(batch) for side in sides.values())
        assert abs(first - second) <= GATE_TOLERANCE, f"losses differ: {first} and {second}"
    weights = [side.weights() for side in sides.values()]
    for name, value in weights[0].items():
        difference = (value - weights[1][name]).abs().max().item()
        assert difference <= GATE_TOLERANCE, f"{name} differs by {difference}"
    laps = _laps({name: side.step for name, side in sides.items()}, batches[0], steps)
    if rank == 0:
        torch.save(laps, f"{folder}/seconds.pt")
    dist.barrier()
    dist.destroy_process_group()


def _laps(calls: dict[str, Callable[[Tensor], Tensor]], batch: Tensor, steps: int) -> dict[str, list[float]]:
    """Return the seconds of the slower rank, in turns."""
    laps: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-WARMUP_PAIRS, steps):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call(batch)
            dist.barrier()
            if number >= 0:
                laps[name].append(time.perf_counter() - start)
    return laps


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def main() -> None:
    """Measure the chosen shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["256x4x128", "256x12x512"], help="width x depth x tokens")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--no-csv", action="store_true", help="print only")
    options = parser.parse_args()
    print(heading())
    for shape in options.shapes:
        width, depth, tokens = map(int, shape.split("x"))
        measured = measure(width, depth, tokens, steps=options.steps)
        print(*measured, sep="\n", flush=True)
        if not options.no_csv:
            append(measured, "tensor_parallel")


if __name__ == "__main__":
    main()
