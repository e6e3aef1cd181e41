"""``ZeroMonitor`` logs the loads of experts that the tokens of all data ranks have, each counted once."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_zero import LayerSpec
from lightning_zero.lightning.callbacks import ZeroMonitor
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.moe import MoE
from tests.contracts import test_expert_tensor as programs
from tests.contracts.test_expert_tensor import BATCHES, EXPERTS, Batches, Block
from tests.lightning_programs import trainer
from tests.sampling import sample
from tests.worlds import run, seed

EVERY = 2  # steps of a row
DROPPING = {"drop_tokens": True, "capacity_factor": 0.7, "min_capacity": 1}


class Still:
    """Keeps its weights, so that a row is known from its batches alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)  # type: ignore[attr-defined]


class Program(Still, programs.Program):
    pass


class Quiet(Still, programs.Quiet):
    pass


class Mixtral(Still, programs.Mixtral):
    pass


class QuietMixtral(Still, programs.QuietMixtral):
    pass


class SameBlock(Block):
    """Has the same weights wherever it is built."""

    def __init__(self, **options: Any) -> None:
        seed(5)
        super().__init__(**options)


class Specified(Program):
    """Has blocks that are built on their stage."""

    def build(self, **options: Any) -> None:
        super().build(**options)
        self.blocks = nn.ModuleList(LayerSpec(SameBlock, **options) for _ in range(2))


class Repeats(Program):
    """Computes its blocks again in the backward."""

    reentrant = False

    def loss(self, ids: Tensor) -> Tensor:
        x, total = self.tokens(ids).requires_grad_(), torch.zeros(())
        for block in self.blocks:
            x, aux_loss = checkpoint(block, x, use_reentrant=self.reentrant)
            total = total + aux_loss
        return self.head(x).square().mean() + 0.1 * total


class RepeatsReentrant(Repeats):
    reentrant = True


@dataclass(frozen=True)
class Case:
    """A program on a grid of data ranks and tensor ranks, and how it trains."""

    data: int
    program: type[Any] = Program
    strategy: Any = field(default_factory=dict)  # options of ours, or the name of another one
    tensor: int = 1
    stages: int = 1
    parts: int = 1  # batches of a step
    layers: Mapping[str, Any] = field(default_factory=dict)
    lengths: str = "even"

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.stages

    def __str__(self) -> str:
        options = self.strategy if isinstance(self.strategy, str) else "-".join(map(str, self.strategy.items()))
        more = [*(["micro"] if self.parts > 1 else []), *self.layers]
        return "-".join([f"d{self.data}t{self.tensor}", self.program.__name__, options, *more])


def _batches(case: Case, data_rank: int) -> Batches:
    return Batches([data_rank], 0, case.lengths)


def _fit(rank: int, world: int, case: Case, folder: str) -> None:
    strategy = case.strategy if isinstance(case.strategy, str) else ZeroStrategy(**case.strategy)
    loggers = [CSVLogger(folder), TensorBoardLogger(folder)]
    fitted = trainer(
        rank, world, strategy, max_epochs=1, callbacks=ZeroMonitor(), logger=loggers, log_every_n_steps=EVERY,
        accumulate_grad_batches=case.parts, val_check_interval=1, check_val_every_n_epoch=None,
    )  # fmt: skip
    data_rank = rank // case.tensor % case.data
    batches = (_batches(case, data_rank), Batches([data_rank], 50, "even"))
    loaders = [DataLoader(one, batch_size=None) for one in batches]
    fitted.fit(case.program(**case.layers), *loaders)


def rows(folder: Path) -> list[dict[str, float]]:
    """Return the scalars of layers with experts, row by row."""
    written = csv.DictReader(next(folder.rglob("metrics.csv")).open())
    found = [{key: float(value) for key, value in row.items() if key.startswith("moe/") and value} for row in written]
    return [row for row in found if row]


@dataclass
class Sums:
    """Of a layer, by hand."""

    load: Tensor = field(default_factory=lambda: torch.zeros(EXPERTS))
    dropped: float = 0.0
    tokens: int = 0
    entropy: float = 0.0
    forwards: int = 0
    aux_loss: float = 0.0

    def add(self, layer: MoE, tokens: Tensor, aux_loss: Tensor) -> None:
        scores = (tokens.flatten(0, -2) @ layer.router.weight.t()).softmax(-1)
        counts = torch.bincount(scores.topk(layer.k, -1).indices.flatten(), minlength=EXPERTS)
        capacity = max(math.ceil(len(scores) * layer.k / EXPERTS * layer.capacity_factor), layer.min_capacity)
        self.load += counts
        self.dropped += float((counts - capacity).clamp(min=0).sum()) if layer.drop_tokens else 0.0
        self.tokens += len(scores)
        self.entropy -= float((scores * scores.log()).sum())
        self.forwards += 1
        self.aux_loss += aux_loss.item()

    def add_choices(self, choices: Tensor) -> None:
        self.load += torch.bincount(choices.flatten(), minlength=EXPERTS)

    def scalars(self, name: str) -> Iterator[tuple[str, float]]:
        yield f"moe/{name}/load_max_over_mean", float(self.load.max() / self.load.mean())
        if self.forwards:
            yield f"moe/{name}/dropped", self.dropped / float(self.load.sum())
            yield f"moe/{name}/router_entropy", self.entropy / self.tokens
            yield f"moe/{name}/aux_loss", self.aux_loss / self.forwards


def expected(case: Case) -> list[dict[str, float]]:
    """Compute each row in plain PyTorch: its batches on all data ranks, in micro-batches of a pipeline."""
    module = case.program(**case.layers).requires_grad_(False)
    if isinstance(module, Specified):
        module.blocks = nn.ModuleList(SameBlock(**case.layers) for _ in range(2))
    sums: dict[str, Sums] = defaultdict(Sums)
    for name, child in module.named_modules():
        if isinstance(child, MoE):
            child.register_forward_hook(
                lambda layer, args, output, name=name: sums[name].add(layer, args[0].detach(), output[1])
            )
        elif name.endswith("mlp.experts"):
            child.register_forward_pre_hook(lambda _, args, name=name: sums[name].add_choices(args[1]))
    found = []
    steps = BATCHES // case.parts
    for step in range(steps):
        for part in range(case.parts):
            for data_rank in range(case.data):
                batch = _batches(case, data_rank)[case.parts * step + part]
                for ids in batch.split(len(batch) // case.stages):
                    module.loss(ids)
        if (step + 1) % EVERY == 0:
            found.append(dict(scalar for name, one in sums.items() for scalar in one.scalars(name)))
            sums.clear()
    return found


TENSOR = {"stage": 2, "tensor_parallel": 2}
SEQUENCE = {"stage": 1, "tensor_parallel": {"size": 2, "sequence": True}}
TWO = {"pipeline": {"stages": 2, "microbatches": 2}}
CASES = [
    Case(1, Program, "auto", layers=DROPPING),
    Case(2, Program, "ddp", layers=DROPPING),
    Case(2, Mixtral, "ddp"),
    *(Case(2, Program, {"stage": stage}, parts=2, layers=DROPPING) for stage in (0, 1, 3)),
    Case(2, Mixtral, {"stage": 3}),
    Case(2, Program, {"stage": 3}, layers={"k": 1, "use_rts": False, "score_function": "softmax"}),
    *(Case(2, program, {"stage": 2, "expert_parallel": 2}, layers={}) for program in (Program, Mixtral)),
    Case(2, Program, {"stage": 3, "expert_parallel": 2, "activation_checkpointing": True}, layers=DROPPING),
    Case(1, Repeats, "auto"),
    Case(1, RepeatsReentrant, "auto"),
    Case(2, Program, {"stage": 3, "activation_checkpointing": {"policy": "selective"}}),
    Case(2, Mixtral, {"stage": 2, "step": "backward", "activation_checkpointing": True}),
    *(Case(2, program, {**TENSOR, "expert_parallel": 2}, tensor=2) for program in (Program, Mixtral)),
    Case(1, Program, TENSOR, tensor=2, layers=DROPPING),
    *(Case(2, program, {**SEQUENCE, "expert_parallel": 2}, tensor=2) for program in (QuietMixtral,)),
    *(Case(1, program, {"stage": 1, **TWO}, stages=2) for program in (Program, Mixtral, Specified)),
    Case(1, Program, {"stage": 2, **TWO, "activation_checkpointing": True}, stages=2, parts=2),
    Case(1, Program, {"pipeline": {**TWO["pipeline"], "schedule": "zb_h1"}}, stages=2, layers=DROPPING),
    *(Case(2, program, {"stage": 3, **TWO, "expert_parallel": 2}, stages=2) for program in (Program, Mixtral)),
]


@pytest.mark.parametrize("case", sample(CASES, CASES[3], CASES[17]), ids=str)
def test_every_choice_is_counted_once(case: Case, tmp_path: Path) -> None:
    run(_fit, case.world, case, str(tmp_path))
    found, wanted = rows(tmp_path), expected(case)
    assert len(found) == len(wanted) == BATCHES // case.parts // EVERY
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
