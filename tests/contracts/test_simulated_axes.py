"""Simulated steps with tensor and expert parallelism against fits on real ranks: the same calls, bytes and ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from lightning_zero import ZeroStrategy, simulate_step
from lightning_zero.comm.traffic import CollectiveCall
from lightning_zero.moe import MoE
from lightning_zero.moe.routing import Router, Routing, count_choices
from tests import worlds
from tests.contracts import test_simulated_steps
from tests.contracts.test_forecast import MODELS, Attention
from tests.contracts.test_simulated_steps import DISKS, STEPS, Written
from tests.lightning_programs import nodes, trainer

EXPERTS = 4


def _in_turn(experts: Tensor) -> Tensor:
    """Return choices that are even, whatever the values are: a simulation has none."""
    return (torch.arange(experts.numel()) % EXPERTS).view(experts.shape)


class EvenRouter(Router):
    def forward(self, tokens: Tensor, used_token: Tensor | None = None) -> Routing:
        routing = super().forward(tokens, used_token)
        experts = _in_turn(routing.experts)
        return replaced(routing, experts=experts, counts=count_choices(experts, EXPERTS).sum(0))


class EvenGate(MixtralTopKRouter):  # type: ignore[misc, no-any-unimported]
    def forward(self, hidden_states: Tensor) -> Any:
        logits, scores, experts = super().forward(hidden_states)
        return logits, scores, _in_turn(experts)


class MixtureBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.moe = MoE(width, expert, EXPERTS, k=2, shared_expert=nn.Linear(width, width))
        self.moe.router.__class__ = EvenRouter

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.moe(x)[0]


class Mixture(nn.Module):
    def __init__(self, width: int = 48, vocabulary: int = 200) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(MixtureBlock(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


class Mixtral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = MixtralConfig(
            vocab_size=200, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=2, use_cache=False,
        )  # fmt: skip
        self.model = MixtralForCausalLM(config)
        for module in self.model.modules():
            if isinstance(module, MixtralTopKRouter):
                module.__class__ = EvenGate

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


def _ids() -> Tensor:
    return torch.zeros(4, 48, dtype=torch.long)


AXES_MODELS: dict[str, tuple[type[nn.Module], Any]] = {**MODELS, "moe": (Mixture, _ids), "mixtral": (Mixtral, _ids)}


class Fitted(test_simulated_steps.Fitted):
    models = AXES_MODELS


@dataclass(frozen=True)
class Case:
    model: str
    world: int
    strategy: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    node: int | None = None  # its ranks; None: all

    def __str__(self) -> str:
        options = {**self.strategy, **self.fit, **({} if self.node is None else {"node": self.node})}
        return "-".join([self.model, f"w{self.world}", *(f"{name}={value}" for name, value in options.items())])


def _fit(rank: int, world: int, case: Case) -> list[CollectiveCall]:
    num_batches = case.fit.get("accumulate_grad_batches", 1)
    written = Written(num_batches)
    options = {**case.fit, **({} if case.node is None else nodes(rank, world, case.node))}
    fit = trainer(rank, world, ZeroStrategy(**case.strategy), max_steps=STEPS, callbacks=[written], **options)
    batch = AXES_MODELS[case.model][1]()
    fit.fit(Fitted(case.model), DataLoader([batch] * STEPS * num_batches, batch_size=None))
    return written.calls


def _simulated(rank: int, case: Case) -> list[CollectiveCall]:
    found = simulate_step(
        lambda: Fitted(case.model),
        ZeroStrategy(**case.strategy),
        world_size=case.world,
        rank=rank,
        batch=AXES_MODELS[case.model][1](),
        accelerator="cpu",
        ranks_per_node=case.node,
        **case.fit,
    )
    return [one.call for one in found.calls]


def _compare(case: Case) -> None:
    kind = "tensor" if "tensor_parallel" in case.strategy else "experts"
    for rank, calls in enumerate(worlds.run(_fit, case.world, case)):
        assert sum(one.sent_bytes for one in calls if one.kind == kind) > 0
        assert _simulated(rank, case) == calls


SEQUENCE = {"size": 2, "sequence": True}
CHECKPOINTED = {"activation_checkpointing": True}
CLIPPED = {"gradient_clip_val": 1.0}
QUICK = [
    Case("gpt", 2, {"stage": 3, "tensor_parallel": 2}),
    Case("moe", 2, {"stage": 2, "expert_parallel": 2}),
]
CASES = [
    *[Case(model, 4, {"stage": stage, "tensor_parallel": 2}) for model in ("gpt", "llama") for stage in (0, 1, 2, 3)],
    Case("gpt", 4, {"stage": 2, "tensor_parallel": 4}, {"gradient_clip_val": 1.0}),
    Case("llama", 2, {"stage": 1, "tensor_parallel": SEQUENCE}),
    *[Case("llama", 4, {"stage": stage, "tensor_parallel": SEQUENCE}) for stage in (2, 3)],
    Case("gpt", 4, {"stage": 3, "tensor_parallel": {"size": 2, "vocabulary": False}}, {"precision": "bf16-mixed"}),
    Case("llama", 4, {"stage": 3, "tensor_parallel": 2, **CHECKPOINTED}, {"accumulate_grad_batches": 2}),
    Case("mixtral", 2, {"stage": 3, "tensor_parallel": 2}),
    *[Case(model, 4, {"stage": stage, "expert_parallel": 2}) for model in ("moe", "mixtral") for stage in (0, 1, 2, 3)],
    Case("moe", 4, {"stage": 3, "expert_parallel": 4, **CHECKPOINTED}, {"gradient_clip_val": 1.0}),
    Case("mixtral", 2, {"stage": 2, "expert_parallel": 2}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
    Case("mixtral", 4, {"stage": 3, "tensor_parallel": 2, "expert_parallel": 2}),
    *[Case("gpt", 2, {"stage": stage, "tensor_parallel": 2, "offload": DISKS}) for stage in (1, 2, 3)],
    Case("llama", 4, {"stage": 3, "tensor_parallel": 2, "offload": {**DISKS, "params": "nvme"}}, CLIPPED),
    Case("moe", 2, {"stage": 2, "expert_parallel": 2, "offload": DISKS}),
    Case("mixtral", 4, {"stage": 3, "expert_parallel": 2, "offload": {**DISKS, "params": "nvme"}}, CLIPPED),
    Case("gpt", 4, {"stage": {"params": "node", "grads": "node"}, "tensor_parallel": 2}, node=4),
    Case("gpt", 4, {"stage": {"params": "node", "grads": "node", "optim": "world"}, "tensor_parallel": 2}, node=2),
    Case("moe", 4, {"stage": {"params": "node", "grads": "node"}, "expert_parallel": 2}, node=2),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_simulated_calls_of_groups_are_those_of_a_fit(case: Case) -> None:
    _compare(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_simulated_calls_of_groups_are_those_of_a_fit_on_every_grid(case: Case) -> None:
    _compare(case)
