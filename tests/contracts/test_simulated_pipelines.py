"""Simulated steps in pipeline stages against fits on real ranks: the same calls and messages, and the same bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.comm.traffic import CollectiveCall
from lightning_zero.lightning.simulate import simulate_copy
from lightning_zero.lightning.tensor_training import TensorTraining
from tests import worlds
from tests.contracts import test_simulated_axes
from tests.contracts.test_forecast import GPT
from tests.contracts.test_simulated_axes import SEQUENCE
from tests.contracts.test_simulated_steps import STEPS, Fitted, Written
from tests.lightning_programs import trainer


@dataclass(frozen=True)
class Case:
    """A fit of a model in stages."""

    model: str
    schedule: str
    stages: int
    copies: int
    strategy: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 4

    def __str__(self) -> str:
        given = (*self.strategy.items(), *self.fit.items())
        options = [name if isinstance(value, dict) else f"{name}_{value}" for name, value in given]
        return "-".join((self.model, self.schedule, f"{self.stages}x{self.copies}", *options))

    @property
    def world(self) -> int:
        return self.stages * self.copies

    def make_strategy(self) -> ZeroStrategy:
        pipeline = {"stages": self.stages, "microbatches": self.microbatches, "schedule": self.schedule}
        return ZeroStrategy(**{"stage": 1, **self.strategy, "pipeline": pipeline})


class Deep(Fitted):
    """A model of enough blocks for two chunks on each of four stages."""

    def __init__(self, model: str) -> None:
        super().__init__("gpt")
        self.net = GPT(width=32, depth=8, vocabulary=50)


class Small(Fitted):
    """A model that is simulated in little time."""

    def __init__(self, model: str) -> None:
        super().__init__("tied")
        self.net = GPT(width=32, depth=2, vocabulary=50)


class Skipping(Fitted):
    """A model whose head is its embedding, and adds the output of its first block."""

    def __init__(self, model: str) -> None:
        super().__init__("tied")
        self.net = _Skipping()


class _Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        skip = None
        for block in self.blocks:
            x = x + block(x)
            skip = x if skip is None else skip
        return nn.functional.cross_entropy(self.head(x + skip).flatten(0, 1), ids.flatten())


PROGRAMS: dict[str, type[Fitted]] = {
    "gpt": Fitted,
    "llama": Fitted,
    "deep": Deep,
    "small": Small,
    "skipping": Skipping,
    "moe": test_simulated_axes.Fitted,
    "mixtral": test_simulated_axes.Fitted,
}
KINDS = {"tensor_parallel": "tensor", "expert_parallel": "experts"}  # of calls, by option


def _batch() -> torch.Tensor:
    return torch.zeros(8, 32, dtype=torch.long)


def _fit(rank: int, world: int, case: Case) -> list[CollectiveCall]:
    num_batches = case.fit.get("accumulate_grad_batches", 1)
    written = Written(num_batches)
    fit = trainer(rank, world, case.make_strategy(), max_steps=STEPS, callbacks=[written], **case.fit)
    fit.fit(PROGRAMS[case.model](case.model), DataLoader([_batch()] * STEPS * num_batches, batch_size=None))
    return written.calls


def _compare(case: Case) -> None:
    ran = worlds.run(_fit, case.world, case, timeout_s=250)
    for copy in range(case.copies):
        found = simulate_copy(
            lambda: PROGRAMS[case.model](case.model),
            case.make_strategy(),
            world_size=case.world,
            rank=copy,
            batch=_batch(),
            accelerator="cpu",
            **case.fit,
        )
        for rank, simulation in found.items():
            assert [one.call for one in simulation.calls] == ran[rank], rank
            sent = simulation.sent_bytes
            assert all(sent[kind] > 0 for option, kind in KINDS.items() if option in case.strategy), rank


SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")
TENSOR, EXPERTS = {"tensor_parallel": 2}, {"expert_parallel": 2}
GIVEN = {"size": 2, "plan": {"net.blocks.*.mlp.1": "column", "net.blocks.*.mlp.3": "row"}, "vocabulary": False}
QUICK = [
    Case("deep", "1f1b", 2, 1),
    Case("small", "gpipe", 2, 2, {"stage": 2, "tensor_parallel": GIVEN}, microbatches=2),
]
CASES = [
    *[Case("deep", schedule, stages, copies) for schedule in SCHEDULES for stages, copies in ((2, 1), (2, 2), (4, 1))],
    *[Case("gpt", "1f1b", 2, 2, {"stage": stage}) for stage in (0, 2, 3)],
    Case("llama", "zb_h1", 2, 2, {"stage": 3}, {"gradient_clip_val": 1.0}),
    Case("llama", "1f1b", 2, 2, {"stage": 3, "activation_checkpointing": True}, {"precision": "bf16-mixed"}),
    Case("skipping", "1f1b", 4, 1, {"stage": 1}, {"gradient_clip_val": 1.0}),
    Case("skipping", "interleaved_1f1b", 2, 2, {"stage": 2}, {"accumulate_grad_batches": 2}),
    Case("deep", "gpipe", 2, 2, {"stage": 1, "offload": "cpu"}),
    *[Case("gpt", "1f1b", 2, 2, {"stage": stage, **TENSOR}) for stage in (0, 1, 2, 3)],
    *[Case("llama", "1f1b", 2, 2, {"stage": stage, "tensor_parallel": SEQUENCE}) for stage in (1, 3)],
    Case("gpt", "zb_h1", 2, 4, {"stage": 3, **TENSOR}),
    Case("llama", "zb_h1", 2, 2, {"stage": 3, **TENSOR}, {"gradient_clip_val": 1.0}),
    Case("llama", "1f1b", 2, 2, {"activation_checkpointing": True, **TENSOR}, {"precision": "bf16-mixed"}),
    Case("deep", "interleaved_1f1b", 2, 2, {"stage": 2, **TENSOR}, {"accumulate_grad_batches": 2}),
    *[Case(model, "1f1b", 2, 2, {"stage": stage, **EXPERTS}) for model in ("moe", "mixtral") for stage in (0, 1, 2, 3)],
    Case("moe", "zb_h1", 2, 2, {"stage": 1, **EXPERTS}, {"accumulate_grad_batches": 2}),
    Case("mixtral", "gpipe", 2, 2, {"activation_checkpointing": True, **EXPERTS}, {"gradient_clip_val": 1.0}),
    Case("mixtral", "1f1b", 2, 4, {"stage": 3, **TENSOR, **EXPERTS}),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_simulated_calls_of_stages_are_those_of_a_fit(case: Case) -> None:
    _compare(case)


def test_the_first_stage_finds_the_plan_which_later_simulations_use(monkeypatch: pytest.MonkeyPatch) -> None:
    find = TensorTraining._plan

    def on_rank_0(*call: Any) -> Any:
        assert dist.get_rank() == 0
        return find(*call)

    def simulated() -> list[list[CollectiveCall]]:
        strategy = Case("small", "gpipe", 2, 2, {"tensor_parallel": GIVEN}, microbatches=2).make_strategy()
        options: dict[str, Any] = {"world_size": 4, "batch": _batch(), "plans": plans}
        return [
            [one.call for one in found.calls] for found in simulate_copy(Small("small"), strategy, **options).values()
        ]

    plans: list[Any] = []
    monkeypatch.setattr(TensorTraining, "_plan", on_rank_0)
    calls = simulated()
    assert len(plans) == 1
    monkeypatch.setattr(TensorTraining, "_plan", None)
    assert simulated() == calls


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK], ids=str)
def test_simulated_calls_of_stages_are_those_of_a_fit_in_every_setting(case: Case) -> None:
    _compare(case)
