"""A model with every kind of parameter, trained a little, and what of it a checkpoint must keep."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint import directory, state
from lightning_zero.checkpoint.flat import PARAMETER_NAMES
from lightning_zero.config import MixedPrecision
from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.lightning_programs import Block

__all__ = ["Model", "Whole", "make", "held", "restore", "snapshot", "step", "whole"]

Whole = dict[str, dict[str, Tensor]]  # name -> "value" or slot of the optimizer -> whole tensor


class Model(nn.Module):
    """Tied, frozen, unused, 0-dim, 4-dim and zero-element parameters, buffers, extra state."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, width)
        self.conv = nn.Conv2d(1, 3, (2, 3), padding=1)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.batch_norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(7))
        self.head = nn.Linear(width, 13)
        self.head.weight = self.embedding.weight
        self.note = "new"

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = x + self.conv(x[:, None]).mean(1)[:, : x.shape[1], : x.shape[2]]
        for block in self.blocks:
            x = block(x)
        x = self.batch_norm(self.frozen(x).flatten(0, 1)).view_as(x)
        return self.head(x * self.scale) + self.nothing.sum()

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, extra: dict[str, str]) -> None:
        self.note = extra["note"]


def make(
    stage: int, seed: int, precision: MixedPrecision | None = None, units: Any = None, **options: Any
) -> tuple[ZeroEngine, Model, Optimizer]:
    worlds.seed(seed)
    model = Model()
    engine = ZeroEngine(stage, precision=precision, units=units, **options)
    engine.shard(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.ndim >= 2], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0, "lr": 2e-3},
    ]
    return engine, model, engine.attach(torch.optim.AdamW(groups, lr=1e-2))


def step(engine: ZeroEngine, model: Model, optimizer: Optimizer, number: int) -> Tensor:
    worlds.seed(100 * number + engine.rank)
    tokens = torch.randint(0, 13, (3, 5))
    lowered = any(unit.computes_lower for unit in engine.internals.fits.units)
    with engine.scope("training_step"), torch.autocast("cpu", torch.bfloat16, enabled=lowered):
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    with engine.backward_scope():
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def snapshot(engine: ZeroEngine, model: nn.Module, *optimizers: Optimizer) -> dict[str, Any]:
    """Return the dictionary that a strategy hands over for saving."""
    return {
        "epoch": 3,
        "state_dict": state.model_state(engine, model),
        "optimizer_states": [state.optimizer_state(engine, optimizer) for optimizer in optimizers],
        "callbacks": {"best": torch.tensor(0.25), "path": "somewhere"},
    }


def restore(engine: ZeroEngine, model: nn.Module, optimizer: Optimizer, path: Any) -> dict[str, Any]:
    checkpoint = directory.load(engine, path)
    state.load_model_state(engine, model, checkpoint["state_dict"])
    names = checkpoint.get(PARAMETER_NAMES, ())
    state.load_optimizer_state(engine, [optimizer], states=checkpoint["optimizer_states"], names=names)
    return checkpoint


def held(
    engine: ZeroEngine, optimizer: Optimizer
) -> list[tuple[str, tuple[int, ...], tuple[int, int], dict[str, Tensor]]]:
    """Return what this rank holds: name, shape, range, and value and slots."""
    return [
        (
            record.name,
            tuple(record.shape),
            record.own_range,
            {"value": record.master().clone(), **{k: v.clone() for k, v in record.state(optimizer).items()}},
        )
        for record in engine.records()
    ]


def whole(ranks: list[list[Any]]) -> Whole:
    """Put together what the ranks hold."""
    result: Whole = {}
    for rank in ranks:
        for name, shape, (start, stop), slots in rank:
            for slot, value in slots.items():
                if slot == "step":
                    result.setdefault(name, {})[slot] = value
                    continue
                full = result.setdefault(name, {}).setdefault(slot, torch.full(shape, float("nan"), dtype=value.dtype))
                full.view(-1)[start:stop] = value.reshape(-1)
    return result
