"""Experts that are divided over ranks train as on one rank: every stage, accumulation, clipping, uneven tokens."""

from __future__ import annotations

import itertools
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lightning_zero import LayerSpec, ZeroEngine
from lightning_zero.checkpoint import directory, state
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.expert_groups import ExpertGroups
from lightning_zero.config import ActivationCheckpointing, Communication, Pipeline
from lightning_zero.errors import CollectiveError, PipelineError
from lightning_zero.grid import Grid
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.microbatch import Microbatch
from lightning_zero.moe import MoE
from lightning_zero.moe.division import divide_experts, grid_of_experts
from lightning_zero.moe.exchange import ExpertRanks
from lightning_zero.parallel.activation.checkpointing import checkpoint_activations
from lightning_zero.sharding import Sharding
from tests.lightning_programs import assert_equal, trainer, weights
from tests.sampling import sample
from tests.worlds import run, seed, slow_collectives

WIDTH, VOCAB, EXPERTS, WORLD = 6, 11, 4, 4
BOUND = 1e-6
CLIP = 0.3


@dataclass(frozen=True)
class Case:
    """A program: ranks over which experts are divided, and how it trains."""

    size: int
    stage: int | Sharding = 2
    parts: int = 1  # micro-batches of a step
    clips: bool = False
    optimizer: str = "SGD"
    tokens: str = "uneven"
    k: int = 2
    loops: bool = False  # experts that run one after the other
    options: tuple[tuple[str, Any], ...] = ()
    recomputes: bool = False
    steps: int = 3
    doubles: bool = False  # in fp64
    mixture: tuple[tuple[str, Any], ...] = ()  # options of the layer
    shares: bool = False  # has a shared expert
    wrong: str = ""
    world: int = WORLD

    def __str__(self) -> str:
        more = [self.optimizer, self.tokens, *(str(one) for one in (*self.options, *self.mixture)), self.wrong]
        flags = [name for name in ("clips", "loops", "recomputes", "shares") if getattr(self, name)]
        stage = self.stage if isinstance(self.stage, int) else "-".join(str(one) for one in astuple(self.stage))
        return "-".join([f"ep{self.size}", f"stage{stage}", f"micro{self.parts}", *flags, *filter(None, more)])


class Block(nn.Module):
    """A residual mixture; keeps the auxiliary loss of its last forward."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        experts = [nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH)) for _ in range(EXPERTS)]
        if case.loops:
            experts = [nn.Sequential(expert, nn.LayerNorm(WIDTH)) for expert in experts]
        shared = nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH)) if case.shares else None
        self.moe = MoE(WIDTH, experts, EXPERTS, k=case.k, shared_expert=shared, **dict(case.mixture))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, aux_loss, _ = self.moe(self.norm(x))
        return x + out, aux_loss


class Model(nn.Module):
    """An embedding, two mixtures and a head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(case) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.tokens(ids), torch.zeros(())
        for block in self.blocks:
            x, aux_loss = block(x)
            total = total + aux_loss
        return self.head(x), total


def build(case: Case) -> Model:
    seed(3)
    model = Model(case)
    if case.doubles:
        model.double()
    if case.tokens == "two experts":
        with torch.no_grad():
            for block in model.blocks:
                block.norm.bias[0] = 9.0  # type: ignore[union-attr]
                block.moe.router.weight[:, 0] = torch.tensor([2.0, 2.0, -2.0, -2.0])  # type: ignore[union-attr]
    return model


def ids_of(case: Case, rank: int, step: int, part: int) -> Tensor:
    number = (3 * rank + 2 * step + part) % 6  # of tokens; none on some rank in most steps
    if case.tokens == "one rank":
        number = 5 if rank == step % WORLD and step != 1 else 0  # in step 1 there are none at all
    generator = torch.Generator().manual_seed(1000 * step + 100 * part + rank)
    return torch.randint(0, VOCAB, (2, number), generator=generator)


def loss_of(model: nn.Module, case: Case, rank: int, step: int, part: int) -> Tensor:
    """Return a loss whose mean over ranks and micro-batches is that of a step."""
    ids = ids_of(case, rank, step, part)
    logits, aux_loss = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum") / 8
    return (loss + 0.1 * aux_loss) / case.parts


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "SGD":
        return torch.optim.SGD(model.parameters(), lr=1.0)
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)


Outcome = tuple[dict[str, Tensor], list[float]]


def reference(case: Case) -> Outcome:
    """Train on the batches of all ranks in one process."""
    model = build(case)
    optimizer, norms = optimizer_of(case, model), []
    for step in range(case.steps):
        for rank, part in itertools.product(range(case.world), range(case.parts)):
            (loss_of(model, case, rank, step, part) / case.world).backward()  # type: ignore[no-untyped-call]
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        nn.utils.clip_grads_with_norm_(model.parameters(), CLIP if case.clips else 1e9, norm)
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


def shard(case: Case, model: nn.Module, rank: int, world: int) -> ZeroEngine:
    """Divide the experts of a model and shard it. Collective: all ranks."""
    groups = ExpertGroups(case.size, 30.0)
    ranks = ExpertRanks(groups.expert_group)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(float(rank))  # the values of rank 0 count
    grid: Grid | None = None
    if case.size > 1:
        parts = divide_experts(model, ranks)
        shards = None if case.wrong == "all ranks" else groups.shard_group
        grid = grid_of_experts(parts, shards, groups.num_groups if case.wrong == "divisor" else world)
    if case.recomputes:
        checkpoint_activations(model, ActivationCheckpointing.of(["Block"]))
    options = {"units": ["Block"], "communication": Communication(timeout_s=30.0), **dict(case.options)}
    engine = ZeroEngine(case.stage, **options)
    engine.shard(model, grid=grid)
    if case.wrong != "no meeting":
        ranks.meet = engine.meet
    return engine


def train(rank: int, world: int, case: Case, delays: bool = False) -> Outcome:
    model = build(case)
    engine = shard(case, model, rank, world)
    optimizer = engine.attach(optimizer_of(case, model))
    norms = []
    for step in range(case.steps):
        for part in range(case.parts):
            with engine.microbatch(last=part == case.parts - 1):
                with engine.scope("training_step"):
                    loss = loss_of(model, case, rank, step, part)
                loss.backward()  # type: ignore[no-untyped-call]
        if dict(case.options).get("step") != "backward":
            norms.append(float(engine.clip_grad_norm(optimizer, CLIP if case.clips else 1e9)))
        optimizer.step()
        optimizer.zero_grad()
        if delays:
            time.sleep(0.002 * rank)
    whole = {name: engine.full_param(param) for name, param in model.named_parameters()}
    engine.close()
    return whole, norms


def difference(found: Outcome, expected: Outcome) -> float:
    worst = [float((found[0][name] - value).abs().max()) for name, value in expected[0].items()]
    worst += [abs(one - other) for one, other in zip(found[1], expected[1], strict=bool(found[1]))]
    return max(worst)


def check(case: Case) -> None:
    expected = reference(case)
    for found in run(train, case.world, case):
        assert difference(found, expected) < BOUND, case


MATRIX = [
    Case(size, stage, parts, clips, optimizer)
    for size in (1, 2, 4)
    for stage in (0, 1, 2, 3)
    for parts in (1, 2)
    for clips in (False, True)
    for optimizer in ("SGD", "AdamW")
]
QUICK = [
    Case(2, 0),
    Case(4, 1, 2, True, "AdamW"),
    Case(2, 2, 2, True),
    Case(2, 3, 2, False, "AdamW"),
    Case(4, 3, 1, True),
]


@pytest.mark.parametrize("case", sample(MATRIX, *QUICK), ids=str)
def test_divided_experts_train_as_on_one_rank(case: Case) -> None:
    check(case)


PROGRAMS = [
    Case(2, 3, recomputes=True),
    Case(4, 1, 2, recomputes=True, loops=True),
    Case(2, 2, loops=True, k=1),
    Case(2, 1, options=(("offload", "cpu"),), optimizer="AdamW"),
    Case(2, 3, options=(("offload", {"optimizer": "cpu", "params": "cpu"}),), optimizer="AdamW"),
    Case(4, 2, options=(("step", "backward"),), optimizer="AdamW"),
    Case(2, 3, options=(("step", "deferred"),), optimizer="AdamW"),
    Case(2, 3, options=(("units", None),)),
    Case(2, 3, options=(("units", ["Experts"]),)),
]


@pytest.mark.parametrize("case", sample(PROGRAMS, PROGRAMS[0], PROGRAMS[3]), ids=str)
def test_other_programs_train_as_on_one_rank(case: Case) -> None:
    check(case)


NODES = [Sharding(params=2, grads=2), Sharding(params=2, grads="world"), Sharding(params="none", grads=2)]
OFFLOADED = (("offload", {"optimizer": "cpu", "params": "cpu"}),)
SCOPES = [
    *(Case(size, nodes, parts, True, "AdamW") for size in (2, 4) for nodes in NODES for parts in (1, 2)),
    # Of an expert a node has two ranks of four, or of two.
    *(Case(2, Sharding(params=4, grads=4), parts, True, "AdamW", world=8) for parts in (1, 2)),
    Case(2, Sharding(params=4, grads=4), 2, recomputes=True, options=OFFLOADED, optimizer="AdamW", world=8),
    Case(4, Sharding(params=4, grads="world"), 2, True, world=8),
    Case(2, NODES[0], 2, optimizer="AdamW", options=(("offload", "cpu"),)),
    Case(2, NODES[1], 1, optimizer="AdamW", options=(("step", "backward"),)),
]


@pytest.mark.parametrize("case", sample(SCOPES, SCOPES[1], SCOPES[10]), ids=str)
def test_scopes_of_a_node_train_as_on_one_rank(case: Case) -> None:
    check(case)


DROPS = (("drop_tokens", True), ("capacity_factor", 0.8), ("min_capacity", 1))
PADDED = (*DROPS, ("pad_to_tokens", 12))
LAYERS = [
    *(Case(size, stage, 2, stage == 3, shares=True) for size in (2, 4) for stage in (0, 1, 2, 3)),
    *(Case(size, stage, 2, mixture=PADDED) for size in (2, 4) for stage in (0, 1, 2, 3)),
    Case(2, 3, 2, mixture=DROPS, optimizer="AdamW"),
    Case(2, 3, shares=True, mixture=(*PADDED, ("use_residual", True)), recomputes=True),
    Case(4, 2, shares=True, mixture=(*PADDED, ("use_rts", False)), loops=True, k=1),
    Case(2, 3, 2, shares=True, mixture=PADDED, options=(("units", ["Experts", "Linear"]),)),
    Case(4, 3, shares=True, mixture=PADDED, tokens="one rank", steps=6, doubles=True),
]


@pytest.mark.parametrize("case", sample(LAYERS, LAYERS[3], LAYERS[19]), ids=str)
def test_shared_experts_and_padded_rows_train_as_on_one_rank(case: Case) -> None:
    expected = reference(case)
    for found in run(_train_apart, case.world, case):
        assert difference(found, expected) < BOUND, case


# -- Nothing to send ---------------------------------------------------------------------------------------------------

EMPTY = [
    Case(size, stage, 1, stage == 3, tokens=tokens, steps=20, loops=loops, doubles=True)
    for size in (2, 4)
    for stage in (0, 1, 2, 3)
    for tokens in ("two experts", "one rank")
    for loops in (False, True)
]


def _train_apart(rank: int, world: int, case: Case) -> Outcome:
    with slow_collectives(0.001, seed=rank):
        return train(rank, world, case, delays=True)


@pytest.mark.parametrize("case", sample(EMPTY, EMPTY[10], EMPTY[29]), ids=str)
def test_ranks_and_experts_without_tokens_train_for_20_steps(case: Case) -> None:
    """In fp64, because twenty steps of a rate of 1 make 5e-5 of the roundings of fp32."""
    expected = reference(case)
    for found in run(_train_apart, WORLD, case):
        assert difference(found, expected) < BOUND


class Skips(nn.Module):
    """A layer that only some ranks run, between two mixtures."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.first, self.second = Block(case), Block(case)
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, runs: bool, mixes: bool) -> Tensor:
        x = self.first(x)[0]
        if runs:
            x = self.between(x)
        return self.second(x)[0] if mixes else x


def _skips(rank: int, world: int, case: Case, mixes: bool) -> float:
    seed(3)
    model = Skips(case)
    engine = shard(case, model, rank, world)
    optimizer = engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        with engine.scope("training_step"):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
            loss = model(x, runs=(rank + step) % 2 == 0, mixes=mixes or rank > 0).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(engine.full_param(model.between.weight).sum())


@pytest.mark.parametrize("stage", sample([1, 2, 3], 3))
def test_ranks_may_skip_layers_that_do_not_communicate(stage: int) -> None:
    case = Case(2, stage, options=(("units", ["Block", "Linear"]),))
    assert len(set(run(_skips, 2, case, True))) == 1


def _skips_in_flight(rank: int, world: int, position: Microbatch) -> tuple[Tensor, list[str]]:
    """Train on two micro-batches, as a pipeline does; return a weight, and what the ranks agreed on in the last step.

    Each rank runs the layer in the middle in one of them.
    """
    seed(3)
    case = Case(2, 3, options=(("units", ["Block", "Linear"]),))
    model = Skips(case)
    engine = shard(case, model, rank, world)
    optimizer = engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    steps = engine.internals.steps
    for _ in range(3):
        agreements, losses = [], []
        with mock.patch.object(Communicator, "agree_on", _noting(agreements)):
            for part in range(2):
                with engine.scope("training_step"):
                    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
                    losses.append(model(x, runs=rank == part, mixes=True).square().mean())
            for loss, place in zip(losses, (position, Microbatch.LAST), strict=True):
                with steps.microbatch(place), steps.backward_scope():
                    loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine.full_param(model.between.weight), agreements


def _noting(agreements: list[str]) -> Any:
    agree_on = Communicator.agree_on

    def noted(self: Communicator, numbers: Any, what: str) -> Any:
        agreements.append(what)
        return agree_on(self, numbers, what)

    return noted


def test_backwards_that_a_pipeline_sums_gather_in_one_order() -> None:
    """One rank waited in a gather, the other one in the exchange behind it."""
    for (found, agreements), (expected, _) in zip(
        run(_skips_in_flight, 2, Microbatch.IN_FLIGHT_SUMMED),
        run(_skips_in_flight, 2, Microbatch.IN_FLIGHT),
        strict=True,
    ):
        assert torch.allclose(found, expected, atol=BOUND)
        assert len(agreements) == 4  # the ends of four passes
        assert all("has ended" in one for one in agreements)


@pytest.mark.slow
def test_without_meetings_they_wait_for_each_other() -> None:
    """The mutant: one rank waits in an exchange, the other one in a gather."""
    options = (("units", ["Block", "Linear"]), ("communication", Communication(timeout_s=5.0)))
    with pytest.raises((CollectiveError, RuntimeError), match="."):
        run(_skips, 2, Case(2, 3, options=options, wrong="no meeting"), True)


@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 0))
def test_a_rank_that_leaves_a_mixture_out_is_refused(stage: int) -> None:
    case = Case(2, stage, options=(("units", ["Block", "Linear"]),))
    with pytest.raises(RuntimeError, match="which this rank has passed by. Blocks that communicate must run on every"):
        run(_skips, 2, case, False)


# -- Mutants -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 2))
def test_a_divisor_of_the_expert_shards_is_found(stage: int) -> None:
    case = Case(2, stage, wrong="divisor")
    assert difference(run(train, WORLD, case)[0], reference(case)) > 1e-2


def test_gradients_of_experts_summed_over_all_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="are no division of a parameter"):
        run(train, WORLD, Case(2, 1, wrong="all ranks"))


# -- Resume ------------------------------------------------------------------------------------------------------------


def _save(rank: int, world: int, case: Case, path: str) -> None:
    model = build(case)
    engine = shard(case, model, rank, world)
    optimizer = engine.attach(optimizer_of(case, model))
    for step in range(case.steps):
        with engine.scope("training_step"):
            loss = loss_of(model, case, rank, step, 0)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    saved = {
        "state_dict": state.model_state(engine, model),
        "optimizer_states": [state.optimizer_state(engine, optimizer)],
    }
    directory.save(engine, saved, f"{path}/directory", full=False)
    directory.save(engine, saved, f"{path}/file.ckpt", full=True)
    engine.close()


def _resume(rank: int, world: int, case: Case, path: str, is_file: bool) -> None:
    """Load a checkpoint, and save it again. Collective: all ranks."""
    model = build(case)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    engine = shard(case, model, rank, world)
    optimizer = engine.attach(optimizer_of(case, model))
    checkpoint = directory.load(engine, f"{path}/{'file.ckpt' if is_file else 'directory'}")
    state.load_model_state(engine, model, checkpoint["state_dict"])
    state.load_optimizer_state(engine, [optimizer], states=checkpoint["optimizer_states"])
    saved = {
        "state_dict": state.model_state(engine, model),
        "optimizer_states": [state.optimizer_state(engine, optimizer)],
    }
    directory.save(engine, saved, f"{path}/again.ckpt", full=True)
    engine.close()


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: leaf for one, item in value.items() for key, leaf in leaves(item, f"{name}/{one}").items()}
    if isinstance(value, list):
        return {key: leaf for one, item in enumerate(value) for key, leaf in leaves(item, f"{name}/{one}").items()}
    return {name: value}


RESUMES = list(itertools.product((1, 2, 4), (1, 2, 4), (1, 3)))


@pytest.mark.parametrize("way", sample(RESUMES, (2, 4, 3), (4, 1, 1)), ids=str)
def test_checkpoints_resume_at_another_expert_parallelism(way: tuple[int, int, int], tmp_path: Path) -> None:
    first, second, stage = way
    run(_save, WORLD, Case(first, stage, optimizer="AdamW"), str(tmp_path))
    expected = leaves(torch.load(tmp_path / "file.ckpt", weights_only=False))
    name = "/state_dict/blocks.0.moe.experts.0.weight"
    assert expected[name].shape == (EXPERTS, 5, WIDTH)
    for is_file in (False, True):
        run(_resume, WORLD, Case(second, 4 - stage, optimizer="AdamW"), str(tmp_path), is_file)
        found = leaves(torch.load(tmp_path / "again.ckpt", weights_only=False))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            same = torch.equal(found[key], value) if isinstance(value, Tensor) else found[key] == value
            assert same, (key, is_file)


# -- In a Trainer ------------------------------------------------------------------------------------------------------


class Program(LightningModule):
    """Trains on sequences of ``VOCAB`` tokens; logs."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = build(case)
        self.case = case

    def _loss(self, batch: Any) -> Tensor:
        logits, aux_loss = self.model(batch[0])
        return F.cross_entropy(logits.flatten(0, 1), batch[0].flatten()) + 0.1 * aux_loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.case, self)


def _loader(rank: int, world: int, size: int = 32, batch: int = 2) -> DataLoader[Any]:
    ids = torch.randint(0, VOCAB, (size, 3), generator=torch.Generator().manual_seed(5))
    dataset = TensorDataset(ids)
    return DataLoader(dataset, batch_size=batch, sampler=DistributedSampler(dataset, world, rank, shuffle=False))


def _fit(rank: int, world: int, size: int, stage: int, path: str, options: dict[str, Any]) -> Any:
    case = Case(size, stage, optimizer="AdamW", loops=options.get("loops", False))
    strategy = ZeroStrategy(stage=stage, expert_parallel=size, **options.get("strategy", {}))  # type: ignore[arg-type]
    fitted = trainer(rank, world, strategy, **options.get("trainer", {}))
    copies = world // (1 if strategy.pipeline is None else strategy.pipeline.stages)
    data, batch = (rank % copies, copies), options.get("batch", 2)
    module = options.get("module", Program)(case)
    fitted.fit(module, _loader(*data, batch=batch), _loader(*data, 16), ckpt_path=options.get("resume"))
    metrics = {name: float(value) for name, value in fitted.callback_metrics.items()}
    if path:
        fitted.save_checkpoint(path)
    return metrics, weights(fitted)


FITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"trainer": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}},
    "checkpointing": {"strategy": {"activation_checkpointing": True}},
    "selective": {"strategy": {"activation_checkpointing": {"policy": "selective"}}},
    "offload": {"strategy": {"offload": "cpu"}},
}


@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 3))
@pytest.mark.parametrize("name", sample(FITS, "clip"))
def test_fits_are_those_without_expert_parallelism(name: str, stage: int) -> None:
    """All ranks have different data with and without it, so logged values and weights are the same."""
    metrics, expected = run(_fit, WORLD, 1, stage, "", FITS[name])[0]
    for found, values in run(_fit, WORLD, 2, stage, "", FITS[name]):
        assert found == pytest.approx(metrics, abs=BOUND)
        assert_equal(values, expected, BOUND, name)


@pytest.mark.slow
def test_a_fit_resumes_at_another_expert_parallelism(tmp_path: Path) -> None:
    run(_fit, WORLD, 2, 3, str(tmp_path / "one"), {"trainer": {"max_epochs": 1}})
    options = {"resume": str(tmp_path / "one"), "trainer": {"max_epochs": 2}}
    expected = run(_fit, WORLD, 1, 3, "", {"trainer": {"max_epochs": 2}})[0][1]
    for _, values in run(_fit, WORLD, 4, 1, "", options):
        assert_equal(values, expected, BOUND)


# -- In pipeline stages ------------------------------------------------------------------------------------------------


class Family(Program):
    """Trains Mixtral, whose losses of the router go around its blocks."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.model = _family("mixtral", output_router_logits=True)

    def _loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0], use_cache=False).loss
        return loss


class Deep(Program):
    """Four mixtures."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        seed(4)
        self.model.blocks.extend([Block(case), Block(case)])


class Specified(Program):
    """Blocks that are built on their own stage."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        seed(4)
        self.model.blocks = nn.ModuleList(LayerSpec(Block, case) for _ in range(2))


TWO = {"stages": 2, "microbatches": 2}
# Micro-batches of one sample each; without a pipeline they are those of an accumulation.
ACCUMULATED = {"batch": 1, "trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}}
STAGED: dict[str, dict[str, Any]] = {
    "1f1b": {"strategy": {"pipeline": TWO}},
    "zb_h1": {"strategy": {"pipeline": {**TWO, "schedule": "zb_h1"}}},
    "checkpointing": {"strategy": {"pipeline": TWO, "activation_checkpointing": True}},
    "offload": {"strategy": {"pipeline": TWO, "offload": "cpu"}},
    "specified": {"strategy": {"pipeline": TWO}, "module": Specified},
    "mixtral": {"strategy": {"pipeline": TWO}, "module": Family},
    "mixtral-selective": {
        "strategy": {"pipeline": TWO, "activation_checkpointing": {"policy": "selective"}},
        "module": Family,
    },
}


@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 2))
@pytest.mark.parametrize("name", sample(STAGED, "1f1b", "specified", "mixtral"))
def test_pipeline_stages_with_divided_experts_train_as_data_parallel_ranks(name: str, stage: int) -> None:
    options = STAGED[name]
    plain = {**ACCUMULATED, "module": options.get("module", Program)}
    metrics, expected = run(_fit, 2, 1, stage, "", plain)[0]
    for found, values in run(_fit, WORLD, 2, stage, "", {"trainer": {"gradient_clip_val": 0.1}, **options}):
        assert found == pytest.approx(metrics, abs=BOUND)
        assert_equal(values, expected, BOUND, name)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_interleaved_chunks_with_divided_experts_train_as_data_parallel_ranks(stage: int) -> None:
    pipeline = {"stages": 2, "microbatches": 2, "schedule": "interleaved_1f1b", "chunks": 2}
    metrics, expected = run(_fit, 2, 1, stage, "", {**ACCUMULATED, "module": Deep})[0]
    options = {"strategy": {"pipeline": pipeline}, "trainer": {"gradient_clip_val": 0.1}, "module": Deep}
    for found, values in run(_fit, WORLD, 2, stage, "", options):
        assert found == pytest.approx(metrics, abs=BOUND)
        assert_equal(values, expected, BOUND)


def _fit_twice(rank: int, world: int, size: int, pipeline: dict[str, Any] | None) -> Any:
    module, copies = Program(Case(2)), world // (1 if pipeline is None else 2)
    parts = {"accumulate_grad_batches": 2} if pipeline is None else {}
    train = _loader(rank % copies, copies, batch=1 if pipeline is None else 2)
    for stage in (1, 3):
        strategy = ZeroStrategy(stage=stage, expert_parallel=size, pipeline=pipeline)
        trainer(rank, world, strategy, max_steps=2, **parts).fit(module, train)
    if pipeline is not None:
        measured = ZeroStrategy(expert_parallel=size, pipeline={**pipeline, "partition": "flops"})
        with pytest.raises(ValueError, match="runs a step on rank 0 alone, and an earlier Trainer with `expert_parall"):
            trainer(rank, world, measured, max_steps=2).fit(module, train)
    again = trainer(rank, world, ZeroStrategy(stage=2, expert_parallel=size, pipeline=pipeline))
    losses = again.validate(module, _loader(rank % copies, copies, 8), verbose=False)
    return losses[0]["val_loss"], weights(again)


@pytest.mark.slow
def test_a_module_in_pipeline_stages_is_trained_by_a_second_strategy() -> None:
    loss, expected = run(_fit_twice, 2, 1, None)[0]
    for found, values in run(_fit_twice, WORLD, 2, TWO):
        assert found == pytest.approx(loss, abs=BOUND)
        assert_equal(values, expected, BOUND)


def _validate_unevenly(rank: int, world: int) -> str:
    strategy = ZeroStrategy(stage=1, expert_parallel=2, pipeline=2)
    val = DataLoader(_loader(0, 1, 4 + 4 * (rank % 2)).dataset, batch_size=2)
    with pytest.raises(PipelineError) as error:
        trainer(rank, world, strategy).validate(Program(Case(2)), val)
    return str(error.value)


def test_copies_of_a_pipeline_with_divided_experts_need_as_many_batches() -> None:
    for message in run(_validate_unevenly, WORLD):
        assert "different numbers of batches: rank 0 has [2], rank 1 has [4]" in message
        assert "and the stages of a copy of the model the same ones" in message


def _agreements(rank: int, world: int, schedule: str) -> list[str]:
    """Return what the ranks of a stage agree on in the third step."""
    agreements: list[str] = []

    class Noting(Deep):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            agreements.clear()

    pipeline = {"stages": 2, "microbatches": 4, "schedule": schedule}
    strategy = ZeroStrategy(stage=3, expert_parallel=2, pipeline=pipeline)
    with mock.patch.object(Communicator, "agree_on", _noting(agreements)):
        trainer(rank, world, strategy, max_steps=3).fit(Noting(Case(2, 3)), _loader(rank % 2, 2, batch=4))
    return [one for one in agreements if "next collective" in one]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_h1"])
def test_later_steps_of_a_pipeline_agree_on_the_ends_of_passes_alone(schedule: str) -> None:
    for agreements in run(_agreements, WORLD, schedule):
        assert agreements
        assert all("has ended" in one for one in agreements)


class _Lengths(Dataset[Tensor]):
    """Sequences whose lengths differ between ranks, and from batch to batch."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * index + self._rank)
        return torch.randint(0, VOCAB, (2 + (index // 4 + 3 * self._rank) % 5,), generator=generator)


def _fit_lengths(rank: int, world: int, size: int, stage: int) -> Any:
    strategy = ZeroStrategy(stage=stage, expert_parallel=size, pipeline=Pipeline(stages=2, microbatches=2))  # type: ignore[arg-type]
    fitted = trainer(rank, world, strategy)
    loader = DataLoader(_Lengths(rank % 2), batch_size=4, collate_fn=lambda rows: [torch.stack(rows)])
    fitted.fit(Program(Case(size, stage)), loader, loader)
    return {name: float(value) for name, value in fitted.callback_metrics.items()}, weights(fitted)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_copies_of_a_pipeline_may_have_batches_of_other_lengths(stage: int) -> None:
    """A copy describes a kind of batch while the other one knows its own already."""
    metrics, expected = run(_fit_lengths, WORLD, 1, stage)[0]
    for found, values in run(_fit_lengths, WORLD, 2, stage):
        assert found == pytest.approx(metrics, abs=BOUND)
        assert_equal(values, expected, BOUND)


@pytest.mark.slow
def test_a_pipeline_with_divided_experts_resumes_without_and_the_reverse(tmp_path: Path) -> None:
    whole = {"max_epochs": 2, "accumulate_grad_batches": 2}
    expected = run(_fit, 2, 1, 2, "", {"batch": 1, "trainer": whole})[0][1]
    staged = {"strategy": {"pipeline": TWO}, "trainer": {"max_epochs": 1}}
    run(_fit, WORLD, 2, 3, str(tmp_path / "staged"), staged)
    options = {"batch": 1, "trainer": whole, "resume": str(tmp_path / "staged")}
    for _, values in run(_fit, 2, 2, 1, "", options):
        assert_equal(values, expected, BOUND)
    first = {"batch": 1, "trainer": {**whole, "max_epochs": 1}}
    run(_fit, 2, 2, 2, str(tmp_path / "plain"), first)
    options = {"strategy": {"pipeline": TWO}, "trainer": {"max_epochs": 2}, "resume": str(tmp_path / "plain")}
    for _, values in run(_fit, WORLD, 2, 3, "", options):
        assert_equal(values, expected, BOUND)


# -- Refused -----------------------------------------------------------------------------------------------------------


def test_a_number_of_ranks_below_1_is_refused() -> None:
    with pytest.raises(ValueError, match="`expert_parallel=0` must be a number of ranks, 1 or more"):
        ZeroStrategy(expert_parallel=0)


@pytest.mark.parametrize("value", [2.0, "2", True])
def test_other_kinds_of_numbers_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="expert_parallel"):
        ZeroStrategy(expert_parallel=value)


def _fit_of_two(rank: int, world: int, size: int, kind: str) -> Any:
    module = Program(Case(2))
    if kind == "no experts":
        module.model.blocks = nn.ModuleList()
    if kind == "six experts":
        module.model.blocks[0].moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 6)
    if kind == "buffers":
        expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        module.model.blocks[0].moe = MoE(WIDTH, expert, 4)
    if kind == "tied":
        first, second = (block.moe.experts for block in module.model.blocks)
        second.get_submodule("0").weight = first.get_submodule("0").weight
    if kind == "compiled":
        module.model.blocks[0].compile()
    val = _loader(rank, world, 16 + 16 * rank) if kind == "uneven" else None
    if val is not None:
        val = DataLoader(val.dataset, batch_size=2)
    pipeline = 2 if kind == "pipeline" else None
    strategy = ZeroStrategy(stage=1, expert_parallel=size, pipeline=pipeline)
    fitted = trainer(rank, world, strategy, limit_train_batches=1, max_epochs=1)
    fitted.fit(module, _loader(rank, world), val)


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("", 3, "`expert_parallel=3` does not divide the 2 ranks. Use a multiple of 3 devices"),
        ("", 4, "`expert_parallel=4` does not divide the 2 ranks"),
        ("pipeline", 2, "`expert_parallel=2` does not divide the 1 ranks of a pipeline stage. Use a multiple of 4"),
        ("no experts", 2, "`expert_parallel=2` finds no experts in `Program` that can be divided"),
        ("buffers", 2, "whose experts have the module buffer `1.running_mean`"),
        ("tied", 2, "`model.blocks.1.moe.experts.0.weight`, which belongs to experts and to another module"),
        ("compiled", 2, "does not work with `torch.compile` of `model.blocks.0`"),
        (
            "uneven",
            2,
            "different numbers of batches: rank 0 has .*With `expert_parallel` all ranks compute every batch",
        ),
    ],
)
def test_programs_that_cannot_be_divided_are_refused(kind: str, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(_fit_of_two, 2, size, kind)


def _divides(rank: int, world: int) -> None:
    divide_experts(nn.Sequential(MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 2)), ExpertRanks())


def test_fewer_experts_than_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot divide `0.experts`, which has 2 experts: every rank has as many"):
        run(_divides, 4)


# -- Unmodified models -------------------------------------------------------------------------------------------------

FAMILIES = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": EXPERTS}),
    "qwen": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {"num_experts": EXPERTS, "moe_intermediate_size": 16}),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig, {"num_local_experts": EXPERTS}),
}


def _family(name: str, **options: Any) -> nn.Module:
    make, config, more = FAMILIES[name]
    seed(3)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 4, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return make(config(**sizes, **heads, **tokens, **more, **options, attn_implementation="eager"))  # type: ignore[no-any-return]


def _loss_of_family(model: nn.Module, rank: int, step: int) -> Tensor:
    ids = torch.randint(0, VOCAB, (1, 2 + 3 * rank), generator=torch.Generator().manual_seed(10 * step + rank))
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum") / 8


def _train_family(rank: int, world: int, name: str, case: Case) -> Outcome:
    model = _family(name)
    engine = shard(case, model, rank, world)
    optimizer = engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    norms = []
    for step in range(3):
        with engine.scope("training_step"):
            loss = _loss_of_family(model, rank, step)
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(engine.clip_grad_norm(optimizer, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    whole = {key: engine.full_param(param) for key, param in model.named_parameters()}
    engine.close()
    return whole, norms


def _reference_of_family(name: str) -> Outcome:
    model = _family(name)
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        for rank in range(WORLD):
            (_loss_of_family(model, rank, step) / WORLD).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {key: param.detach() for key, param in model.named_parameters()}, norms


@pytest.mark.always
@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 3))
@pytest.mark.parametrize("name", sample(FAMILIES, "mixtral"))
def test_unmodified_models_train_as_on_one_rank(name: str, stage: int) -> None:
    expected = _reference_of_family(name)
    for size in (2, 4):
        case = Case(size, stage, options=(("units", None),))
        for found in run(_train_family, WORLD, name, case):
            assert difference(found, expected) < BOUND, size


class _OnGradients(Program):
    """Hooks on gradients, or changes of them between micro-batches."""

    what = ""

    def __init__(self, case: Case, what: str) -> None:
        super().__init__(case)
        self.what = what
        expert = next(param for name, param in self.named_parameters() if "experts" in name)
        if what == "hook":
            expert.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        elif what == "accumulate hook":
            expert.register_post_accumulate_grad_hook(lambda param: param.grad.add_(1.0))

    def on_after_backward(self) -> None:
        if self.what == "between":
            for name, param in self.named_parameters():
                if "experts" in name and param.grad is not None:
                    param.grad.add_(1.0)


def _message_of_gradients(rank: int, world: int, what: str) -> str:
    fitted = trainer(rank, world, ZeroStrategy(stage=1, expert_parallel=2), accumulate_grad_batches=2, max_steps=1)
    try:
        fitted.fit(_OnGradients(Case(2, 1), what), _loader(rank, world))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("hook", "has a hook on its gradient"),
        ("accumulate hook", "has a hook on its gradient"),
        ("between", "cannot be read before the last micro-batch: on this rank it is"),
    ],
)
def test_gradients_of_the_tokens_of_several_ranks_are_not_shown_as_those_of_one(what: str, text: str) -> None:
    for message in run(_message_of_gradients, 2, what):
        assert text in message
