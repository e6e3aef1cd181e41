"""``expert_parallel`` beside ``tensor_parallel`` trains as one rank does on the batches of all data ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.moe import MoE
from tests.lightning_programs import assert_equal, trainer, weights
from tests.sampling import sample
from tests.worlds import run, seed

WIDTH, HEADS, VOCAB, EXPERTS, BATCHES = 8, 2, 12, 4, 4
BOUND = 1e-6


class Attention(nn.Module):
    """Counts its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = [layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        return self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a mixture; returns the auxiliary loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        experts = [nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH)) for _ in range(EXPERTS)]
        self.moe = MoE(WIDTH, experts, EXPERTS, **{"k": 2, **options})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.first(x))
        mixed, aux_loss, _ = self.moe(self.second(x))
        return x + mixed, aux_loss


class Model(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.tokens(ids), torch.zeros(())
        for block in self.blocks:
            x, aux_loss = block(x)
            total = total + aux_loss
        return self.head(x), total


class Program(LightningModule):
    """Trains on sequences; logs."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        seed(3)
        self.model = self.build(**options)

    def build(self, **options: Any) -> nn.Module:
        return Model(**options)

    def loss(self, ids: Tensor) -> Tensor:
        logits, aux_loss = self.model(ids)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum") / 8 + 0.1 * aux_loss

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(ids)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True, batch_size=1)
        self.log("tokens", float(ids.numel()), sync_dist=True, on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(ids), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)


class Mixtral(Program):
    """Its experts are one module, and its plan of tensor parallelism would cut them."""

    def build(self, **options: Any) -> nn.Module:
        sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 4}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "num_experts_per_tok": 2}
        more = {"vocab_size": VOCAB, "num_local_experts": EXPERTS, "output_router_logits": True}
        return MixtralForCausalLM(MixtralConfig(**sizes, **heads, **more, attn_implementation="eager"))

    def loss(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return found


class Batches(Dataset[Tensor]):
    """The batches of some data ranks, one rank after the other, of different lengths."""

    def __init__(self, data_ranks: list[int], start: int = 0) -> None:
        self._numbers = [(start + number, rank) for number in range(BATCHES) for rank in data_ranks]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Tensor:
        number, rank = self._numbers[index]
        generator = torch.Generator().manual_seed(100 * number + rank)
        return torch.randint(0, VOCAB, (2, 2 + (number + 3 * rank) % 5), generator=generator)


@dataclass(frozen=True)
class Case:
    """A grid and a program."""

    data: int
    tensor: int
    experts: int
    stage: int
    program: type[Program] = Program
    options: dict[str, Any] = field(default_factory=dict)  # of the strategy
    more: dict[str, Any] = field(default_factory=dict)  # of the Trainer
    stages: int = 1

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.stages

    def __str__(self) -> str:
        shown = [f"{name}={value}" for one in (self.options, self.more) for name, value in one.items()]
        grid = f"d{self.data}t{self.tensor}e{self.experts}"
        return "-".join([grid, f"stage{self.stage}", self.program.__name__, *shown])


Outcome = tuple[dict[str, float], dict[str, Tensor]]


def fit(rank: int, world: int, case: Case, paths: dict[str, str]) -> Outcome:
    """Fit on a grid, or in one world of one rank on the batches of all data ranks."""
    strategy: Any = "auto"
    more, data_ranks = {"max_epochs": 2, **case.more}, list(range(case.data))
    if world > 1:
        groups = {"tensor_parallel": case.tensor, "expert_parallel": case.experts}
        strategy = ZeroStrategy(**{"stage": case.stage, **groups, **case.options})  # type: ignore[arg-type]
        data_ranks = [rank // case.tensor % case.data]
    else:
        more["accumulate_grad_batches"] = case.data * more.get("accumulate_grad_batches", 1)
    fitted = trainer(rank, world, strategy, **more)
    loaders = [DataLoader(Batches(data_ranks, start), batch_size=None) for start in (0, 50)]
    fitted.fit(case.program(), *loaders, ckpt_path=paths.get("resume"))
    if "save" in paths:
        fitted.save_checkpoint(paths["save"])
    return {name: float(value) for name, value in fitted.callback_metrics.items()}, weights(fitted)


def check(case: Case) -> None:
    metrics, expected = run(fit, 1, case, {})[0]
    for found, values in run(fit, case.world, case, {}, timeout_s=180.0):
        assert found == pytest.approx(metrics, rel=BOUND, abs=BOUND), case
        assert_equal(values, expected, BOUND, case)


CLIPS = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
MATRIX = [
    Case(2, 2, experts, stage, program, more=more)
    for experts in (2, 1)
    for stage in (0, 1, 2, 3)
    for program in (Program, Mixtral)
    for more in ({}, CLIPS)
]
QUICK = [MATRIX[3], MATRIX[5], MATRIX[8], MATRIX[15]]


@pytest.mark.parametrize("case", sample(MATRIX, *QUICK), ids=str)
def test_divided_experts_on_tensor_ranks_train_as_on_one_rank(case: Case) -> None:
    check(case)


OFFLOADED = {"optimizer": "cpu", "params": "cpu"}
OPTIONS = [
    Case(2, 2, 2, 3, Program, {"activation_checkpointing": True}),
    Case(2, 2, 2, 2, Mixtral, {"activation_checkpointing": {"policy": "selective"}}, CLIPS),
    Case(2, 2, 2, 2, Program, {"activation_checkpointing": {"policy": "partition"}}),
    Case(2, 2, 2, 3, Mixtral, {"offload": OFFLOADED}, CLIPS),
    Case(2, 2, 2, 1, Program, {"offload": "cpu"}, CLIPS),
    Case(2, 2, 2, 1, Program, {"step": "backward"}),
    Case(2, 2, 2, 2, Mixtral, {"step": "deferred"}),
    Case(2, 2, 2, 3, Program, {"units": ["Experts", "Attention"]}, CLIPS),
    Case(2, 2, 2, 2, Program, {"stage": {"params": 2, "grads": 2}}, CLIPS),
    Case(2, 2, 2, 2, Mixtral, {"stage": {"params": 2, "grads": "world"}}),
    Case(2, 2, 2, 2, Program, {"stage": {"params": "none", "grads": 2}}, CLIPS),
]


@pytest.mark.parametrize("case", sample(OPTIONS, OPTIONS[0], OPTIONS[3]), ids=str)
def test_options_of_the_engine_train_as_on_one_rank(case: Case) -> None:
    check(case)


SHARDED = [
    *(Case(4, 2, 2, stage, program, more=CLIPS) for stage in (0, 1, 2, 3) for program in (Program, Mixtral)),
    *(Case(4, 2, 4, stage, Program) for stage in (1, 3)),
    *(Case(2, 4, 2, stage, Program) for stage in ()),
    Case(4, 2, 2, 2, Program, {"stage": {"params": 2, "grads": 2}}, CLIPS),
    Case(4, 2, 2, 2, Mixtral, {"stage": {"params": 4, "grads": "world"}}, CLIPS),
    Case(4, 2, 2, 2, Program, {"stage": {"params": "none", "grads": 2}}, CLIPS),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARDED, ids=str)
def test_experts_of_several_data_ranks_train_as_on_one_rank(case: Case) -> None:
    check(case)
