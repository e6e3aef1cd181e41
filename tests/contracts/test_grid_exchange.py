"""Experts that exchange tokens in forward and backward, on a grid: no rank waits for ever, and sums are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero import Grid, ParamAxes, Part, ZeroEngine
from lightning_zero.config import Communication
from tests.sampling import sample
from tests.worlds import RankError, run

EXPERTS, WIDTH, VOCAB, LENGTH, SAMPLES, STEPS = 4, 12, 23, 9, 8, 6
RATE = 0.3


class _Exchange(torch.autograd.Function):
    """Sends rows to the ranks of a group, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange, send: list[int], receive: list[int]) -> Tensor:
        ctx.of = exchange, send, receive
        return exchange.rows(rows, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        exchange, send, receive = ctx.of
        return exchange.rows(grads[0], receive, send), None, None, None


@dataclass
class Exchange:
    """The ranks that share the experts, and the call before each exchange."""

    group: Any
    meet: Callable[[], None] = lambda: None

    def rows(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        self.meet()
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=self.group)
        return out

    def counts(self, counts: Tensor) -> Tensor:
        self.meet()
        out = torch.empty_like(counts)
        dist.all_to_all_single(out, counts, group=self.group)
        return out


class Experts(nn.Module):
    """Experts of which a rank has some; without tokens an expert brings no gradient."""

    def __init__(self, exchange: Exchange | None) -> None:
        super().__init__()
        self.exchange = exchange
        self.ranks = 1 if exchange is None else dist.get_world_size(exchange.group)
        self.first = nn.Parameter(torch.empty(EXPERTS // self.ranks, WIDTH, 2 * WIDTH))
        self.second = nn.Parameter(torch.empty(EXPERTS // self.ranks, 2 * WIDTH, WIDTH))

    def _local(self, rows: Tensor, experts: Tensor) -> Tensor:
        out = rows * 0.0
        for number in range(len(self.first)):
            mine = (experts == number).nonzero().flatten()
            if len(mine):
                hidden = F.gelu(rows[mine] @ self.first[number]) @ self.second[number]
                out = out.index_copy(0, mine, hidden)
        return out

    def forward(self, rows: Tensor, experts: Tensor) -> Tensor:
        if self.exchange is None:
            return self._local(rows, experts)
        order, here = experts.argsort(stable=True), EXPERTS // self.ranks
        counts = torch.bincount(experts, minlength=EXPERTS)
        theirs = self.exchange.counts(counts)
        send, receive = (one.view(self.ranks, here).sum(1).tolist() for one in (counts, theirs))
        got = _Exchange.apply(rows[order], self.exchange, send, receive)
        local = torch.cat([torch.arange(here).repeat_interleave(one) for one in theirs.view(self.ranks, here)])
        back = _Exchange.apply(self._local(got, local), self.exchange, receive, send)
        return torch.zeros_like(rows).index_copy(0, order, back)


class Mixture(nn.Module):
    def __init__(self, exchange: Exchange | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(exchange)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = self.norm(hidden).flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        mixed = sum(weights[:, place : place + 1] * self.experts(rows, chosen[:, place]) for place in range(2))
        return hidden + mixed.view_as(hidden)


class Model(nn.Module):
    def __init__(self, exchange: Exchange | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Mixture(exchange) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden @ self.embedding.weight.t()


def whole_model(bias: float) -> Model:
    """Return the whole model; with a bias all tokens go to the first two experts."""
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "experts" in name:
                param.normal_(0, 0.3)
        for block in model.blocks:
            block.gate.bias[:2] += bias
    return model


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def batches(parts: int) -> Tensor:
    return torch.randint(0, VOCAB, (STEPS, parts, SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))


def reference(parts: int, clip: float, bias: float) -> tuple[dict[str, Tensor], list[float]]:
    model = whole_model(bias)
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=RATE), []
    for batch in batches(parts):
        for part in batch:
            (loss_of(model, part) / parts).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


def _train(
    rank: int, world: int, shared: int, stage: int, parts: int, clip: float, bias: float, meets: bool, timeout_s: float
) -> tuple[dict[str, Tensor], list[float]]:
    mine: dict[str, Any] = {}
    for first in range(0, world, shared):
        ranks = list(range(first, first + shared))
        mine["exchange"] = dist.new_group(ranks) if rank in ranks else (dist.new_group(ranks), mine.get("exchange"))[1]
    for place in range(shared):
        ranks = list(range(place, world, shared))
        mine["shard"] = dist.new_group(ranks) if rank in ranks else (dist.new_group(ranks), mine.get("shard"))[1]
    exchange = Exchange(mine["exchange"])
    model, place, axes = Model(exchange), rank % shared, {}
    whole = dict(whole_model(bias).named_parameters())
    with torch.no_grad():
        for name, param in model.named_parameters():
            values = whole[name]
            if "experts" in name:
                part = Part.along(values.shape, 0, (place * EXPERTS // shared, EXPERTS // shared))
                axes[name], values = ParamAxes("experts", part=part), part.read(values)
            param.copy_(values)
    engine = ZeroEngine(stage=stage, units=["Mixture"], communication=Communication(timeout_s=timeout_s))
    engine.shard(model, grid=Grid({"experts": mine["shard"]}, world, axes))
    exchange.meet = engine.meet if meets else lambda: None
    optimizer = engine.attach(torch.optim.SGD(model.parameters(), lr=RATE))
    norms, per_rank = [], SAMPLES // world
    for batch in batches(parts):
        for number, part in enumerate(batch):
            with engine.microbatch(last=number == parts - 1):
                (loss_of(model, part[rank * per_rank : (rank + 1) * per_rank]) / parts).backward()
        norms.append(float(engine.clip_grad_norm(optimizer, clip)))
        optimizer.step()
        optimizer.zero_grad()
    found = {name: engine.full_param(param) for name, param in model.named_parameters()}
    engine.close()
    return found, norms


CASES = [(2, 3, 1), (4, 3, 2), (4, 1, 1), (2, 0, 2), (2, 2, 2), (4, 2, 1), (2, 1, 1), (4, 0, 1)]


@pytest.mark.parametrize("case", sample(CASES, *CASES[:3]), ids=lambda case: "ranks{}-stage{}-parts{}".format(*case))
@pytest.mark.parametrize("bias", [0.0, 20.0], ids=["spread", "two-experts"])
def test_experts_with_and_without_tokens_train_as_on_one_rank(case: tuple[int, int, int], bias: float) -> None:
    shared, stage, parts = case
    expected, norms = reference(parts, 0.5, bias)
    for found, own in run(_train, 4, shared, stage, parts, 0.5, bias, True, 60.0):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)
        assert own == pytest.approx(norms, abs=1e-5)


def test_without_the_meetings_ranks_wait_for_one_another() -> None:
    """The reason for them: one waits for gradients in the engine, the other in the exchange behind."""
    with pytest.raises((RuntimeError, RankError)):
        run(_train, 4, 2, 3, 1, 0.5, 20.0, False, 4.0, timeout_s=20.0)


def _passes_by(rank: int, world: int) -> None:
    model = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    engine = ZeroEngine(stage=3, units=["Linear"], communication=Communication(timeout_s=20.0))
    engine.shard(model)
    with engine.scope("training_step"):
        model[0](torch.ones(3))
        if rank == 0:
            engine.meet()
        model[1](torch.ones(3))


def test_a_rank_that_passes_a_collective_of_the_model_by_is_told() -> None:
    with pytest.raises(RuntimeError, match="which this rank has passed by. Blocks that communicate must run on every"):
        run(_passes_by, 2)
