"""Simulated steps against fits on real ranks: the same calls in the same order, with the same bytes."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, simulate_step
from lightning_zero.comm.traffic import CollectiveCall
from tests import worlds
from tests.contracts.test_forecast import MODELS
from tests.lightning_programs import nodes, trainer

WORLD, STEPS = 4, 3


class Fitted(pl.LightningModule):
    models: dict[str, tuple[type[nn.Module], Any]] | None = None  # None: those below

    def __init__(self, model: str) -> None:
        super().__init__()
        self.net = (self.models or MODELS)[model][0]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Tied(nn.Module):
    """A model one of whose blocks is not used, and whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks[:2]:
            x = x + block(x)
        return nn.functional.cross_entropy((x @ self.tokens.weight.t()).flatten(0, 1), ids.flatten())


MODELS = {**MODELS, "tied": (Tied, lambda: torch.zeros(4, 8, dtype=torch.long))}


class Written(pl.Callback):
    """Writes the calls of the last step down."""

    def __init__(self, num_batches: int) -> None:
        self.calls: list[CollectiveCall] = []
        self._num_batches = num_batches

    def add(self, call: CollectiveCall) -> None:
        self.calls.append(call)

    def end(self, what: str) -> None:
        pass

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == (STEPS - 1) * self._num_batches:
            trainer.strategy.engine.internals.communicator.traffic.ledger = self  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if args[-1] == STEPS * self._num_batches - 1:
            trainer.strategy.engine.internals.communicator.traffic.ledger = None  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Case:
    model: str
    strategy: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    node: int = WORLD

    def __str__(self) -> str:
        return "-".join(str(one) for one in (self.model, *self.strategy.values(), *self.fit.values(), self.node))


def _fit(rank: int, world: int, case: Case) -> list[CollectiveCall]:
    num_batches = case.fit.get("accumulate_grad_batches", 1)
    written = Written(num_batches)
    batch = MODELS[case.model][1]()
    options = {**case.fit, **(nodes(rank, world, case.node) if case.node < world else {})}
    fit = trainer(rank, world, ZeroStrategy(**case.strategy), max_steps=STEPS, callbacks=[written], **options)
    fit.fit(Fitted(case.model), DataLoader([batch] * STEPS * num_batches, batch_size=None))
    return written.calls


def _simulated(rank: int, case: Case) -> list[CollectiveCall]:
    found = simulate_step(
        lambda: Fitted(case.model),
        ZeroStrategy(**case.strategy),
        world_size=WORLD,
        rank=rank,
        batch=MODELS[case.model][1](),
        accelerator="cpu",
        ranks_per_node=case.node,
        **case.fit,
    )
    return [one.call for one in found.calls]


def _compare(case: Case) -> None:
    ran = worlds.run(_fit, WORLD, case)
    assert any(call.kind == "reduce_scatter" for call in ran[0])
    for rank, calls in enumerate(ran):
        assert _simulated(rank, case) == calls


DISKS = {"optimizer": "nvme", "path": tempfile.gettempdir()}
SCOPES = {"params": "node", "grads": "node", "optim": "world"}
QUICK = [
    Case("gpt", {"stage": 3, "activation_checkpointing": True}, {"gradient_clip_val": 1.0}),
    Case("tied", {"stage": 1}, {"accumulate_grad_batches": 2}),
]
CASES = [
    *[Case(model, {"stage": stage}) for model in MODELS for stage in (0, 1, 2, 3)],
    *[Case("gpt", {"stage": stage}, {"accumulate_grad_batches": 3}) for stage in (0, 2, 3)],
    *[Case("gpt", {"stage": stage, "offload": "cpu"}, {"gradient_clip_val": 1.0}) for stage in (1, 2, 3)],
    *[Case("llama", {"stage": stage}, {"precision": "bf16-mixed"}) for stage in (0, 2, 3)],
    Case("conv", {"stage": 2}, {"precision": "bf16-true"}),
    *[Case("gpt", {"stage": stage, "offload": DISKS}, {"gradient_clip_val": 1.0}) for stage in (1, 2, 3)],
    Case("gpt", {"stage": 3, "offload": {**DISKS, "params": "nvme"}}, {"precision": "bf16-mixed"}),
    Case("gpt", {"stage": 2, "step": "backward"}),
    Case("gpt", {"stage": 3, "moments": "int8"}),
    Case("gpt", {"stage": SCOPES}, {"gradient_clip_val": 1.0}, node=2),
    Case("gpt", {"stage": {**SCOPES, "grads": "world"}}, {"accumulate_grad_batches": 2}, node=2),
    Case("conv", {"stage": {"params": "none", "grads": "node", "optim": "node"}}, node=2),
    Case("gpt", {"stage": 3, "communication": {"reduce_dtype": "bf16"}}),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_simulated_calls_are_those_of_a_fit(case: Case) -> None:
    _compare(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_simulated_calls_are_those_of_a_fit_in_every_setting(case: Case) -> None:
    _compare(case)
