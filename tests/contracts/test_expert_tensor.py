"""``expert_parallel`` beside ``tensor_parallel`` trains as one rank does on the batches of all data ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_zero.checkpoint.export import export_safetensors
from lightning_zero.grid import Grid
from lightning_zero.lightning import expert_training
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.moe import MoE
from lightning_zero.moe.division import grid_of_experts
from tests.contracts.test_expert_parallel import leaves
from tests.lightning_programs import assert_equal, trainer, weights
from tests.sampling import sample
from tests.worlds import run, seed

WIDTH, HEADS, VOCAB, EXPERTS, BATCHES = 8, 2, 12, 4, 4
BOUND = 1e-6
PATIENCE_S = 300.0


class Attention(nn.Module):
    """Counts its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in parts)
        result: Tensor = self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return result


def expert(rate: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.Dropout(rate), nn.Linear(6, WIDTH))


class Block(nn.Module):
    """Attention and a mixture."""

    def __init__(self, rate: float = 0.0, num: int = EXPERTS, **options: Any) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.moe = MoE(WIDTH, [expert(rate) for _ in range(num)], num, **{"k": 2, **options})

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = x + self.attention(self.first(x))
        mixed, aux_loss, _ = self.moe(self.second(x))
        return x + mixed, aux_loss


class BlockWithoutLoss(Block):
    """Returns no auxiliary loss, which would be one of a part of the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class BlockThatCounts(Block):
    """Reads the number of experts in the shape of a parameter of theirs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, aux_loss = super().forward(x)
        return x, aux_loss * len(next(self.moe.experts.parameters())) / EXPERTS


class Program(LightningModule):
    """Trains an embedding, two blocks and a head on sequences; logs."""

    block: type[Block] = Block

    def __init__(self, **options: Any) -> None:
        super().__init__()
        seed(3)
        self.build(**options)

    def build(self, **options: Any) -> None:
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(self.block(**options) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def loss(self, ids: Tensor) -> Tensor:
        x, total = self.tokens(ids), torch.zeros(())
        for block in self.blocks:
            x, aux_loss = block(x)
            total = total + aux_loss
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten(), reduction="sum") / 8 + 0.1 * total

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(ids)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True, batch_size=1)
        self.log("tokens", float(ids.numel()), sync_dist=True, on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(ids), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)


class Quiet(Program):
    """Has no auxiliary loss."""

    block = BlockWithoutLoss

    def loss(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten(), reduction="sum") / 8


class Counting(Program):
    """Weighs its auxiliary loss by the number of experts."""

    block = BlockThatCounts


class WithoutList(Counting):
    """Has no list of blocks, so its plan is for the module as a whole."""

    def build(self, **options: Any) -> None:
        super().build(**options)
        self.only = self.blocks[0]
        del self.blocks

    def loss(self, ids: Tensor) -> Tensor:
        x, aux_loss = self.only(self.tokens(ids))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten(), reduction="sum") / 8 + 0.1 * aux_loss


class Mixtral(Program):
    """Its experts are one module, and its plan of tensor parallelism would cut them."""

    has_aux_loss = True

    def build(self, **options: Any) -> None:
        sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 4}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "num_experts_per_tok": 2}
        more = {"vocab_size": VOCAB, "num_local_experts": EXPERTS, "attn_implementation": "eager"}
        tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
        self.model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, **more, **tokens))

    def loss(self, ids: Tensor) -> Tensor:
        given = {"input_ids": ids, "labels": ids, "use_cache": False, "output_router_logits": self.has_aux_loss}
        found: Tensor = self.model(**given).loss
        return found


class QuietMixtral(Mixtral):
    """Has no auxiliary loss."""

    has_aux_loss = False


class Batches(Dataset[Tensor]):
    """The batches of some data ranks, one rank after the other, of different lengths; or one sample after the other."""

    def __init__(self, data_ranks: list[int], start: int, lengths: str, *, one_by_one: bool = False) -> None:
        samples = (slice(0, 1), slice(1, 2)) if one_by_one else (slice(None),)
        numbers = range(start, start + BATCHES)
        self._numbers = list(itertools.product(numbers, data_ranks, samples))
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Tensor:
        number, rank, samples = self._numbers[index]
        length = 2 + (number + 3 * rank) % 5
        if self._lengths == "even":
            length *= 2
        elif self._lengths == "none" and index and rank == number % 2:
            length = 0
        generator = torch.Generator().manual_seed(100 * number + rank)
        return torch.randint(0, VOCAB, (2, length), generator=generator)[samples]


@dataclass(frozen=True)
class Case:
    """A grid of data ranks, tensor ranks and expert ranks, and a program."""

    data: int
    tensor: int
    experts: int
    stage: int
    program: type[Program] = Program
    options: Mapping[str, Any] = field(default_factory=dict)  # of the strategy
    more: Mapping[str, Any] = field(default_factory=dict)  # of the Trainer
    layers: Mapping[str, Any] = field(default_factory=dict)  # of the mixtures
    lengths: str = "uneven"

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return int(self.options.get("pipeline", {}).get("stages", 1))

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.stages

    @property
    def strategy(self) -> ZeroStrategy:
        groups = {"tensor_parallel": self.tensor, "expert_parallel": self.experts}
        return ZeroStrategy(**{"stage": self.stage, **groups, **self.options})  # type: ignore[arg-type]

    def __str__(self) -> str:
        shown = [f"{name}={value}" for one in (self.options, self.more, self.layers) for name, value in one.items()]
        grid = f"d{self.data}t{self.tensor}e{self.experts}"
        return "-".join([grid, f"stage{self.stage}", self.program.__name__, self.lengths, *shown])


Outcome = tuple[dict[str, float], dict[str, Tensor]]


def fit(rank: int, world: int, case: Case, paths: Mapping[str, str], module: Program | None = None) -> Outcome:
    """Fit on a grid, or on one rank with the batches of all data ranks."""
    chosen: Any = "auto"
    more, data_ranks = {"max_epochs": 2, **case.more}, list(range(case.data))
    if case.world == world:
        chosen, data_ranks = case.strategy, [rank // case.tensor % case.data]
    else:
        more["accumulate_grad_batches"] = case.data * more.get("accumulate_grad_batches", 1) * case.stages
    fitted = trainer(rank, world, chosen, **more)
    is_cut = case.stages > 1 and world == 1  # into the micro-batches of a pipeline
    batches = [Batches(data_ranks, 0, case.lengths, one_by_one=is_cut), Batches(data_ranks, 50, case.lengths)]
    loaders = [DataLoader(one, batch_size=None) for one in batches]
    fitted.fit(module or case.program(**case.layers), *loaders, ckpt_path=paths.get("resume"))
    if "save" in paths:
        fitted.save_checkpoint(paths["save"])
    if "export" in paths:
        export_safetensors(fitted.lightning_module, paths["export"], prefix="model.")
    return {name: float(value) for name, value in fitted.callback_metrics.items()}, weights(fitted)


def compare(found: Outcome, expected: Outcome, what: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=BOUND, abs=BOUND), what
    assert_equal(found[1], expected[1], BOUND, what)


def check(case: Case) -> None:
    expected = run(fit, 1, case, {})[0]
    for found in run(fit, case.world, case, {}, timeout_s=PATIENCE_S):
        compare(found, expected, case)


CLIPS = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
MATRIX = [
    Case(2, 2, experts, stage, program, more=more)
    for experts in (2, 1)
    for stage in (0, 1, 2, 3)
    for program in (Program, Mixtral)
    for more in ({}, CLIPS)
]


@pytest.mark.parametrize("case", sample(MATRIX, MATRIX[1], MATRIX[14]), ids=str)
def test_divided_experts_on_tensor_ranks_train_as_on_one_rank(case: Case) -> None:
    check(case)


PARTITION = {"activation_checkpointing": {"policy": "partition"}}
SELECTIVE = {"activation_checkpointing": {"policy": "selective"}}
OPTIONS = [
    Case(2, 2, 2, 3, Program, {"activation_checkpointing": True}),
    Case(2, 2, 2, 2, Mixtral, SELECTIVE, CLIPS),
    Case(2, 2, 2, 2, Program, PARTITION),
    Case(2, 2, 2, 1, Counting),
    Case(2, 2, 2, 2, WithoutList),
    Case(2, 2, 2, 3, Mixtral, {"offload": {"optimizer": "cpu", "params": "cpu"}}, CLIPS),
    Case(2, 2, 2, 1, Program, {"offload": "cpu"}, CLIPS),
    Case(2, 2, 2, 1, Program, {"step": "backward"}),
    Case(2, 2, 2, 2, Mixtral, {"step": "deferred"}),
    Case(2, 2, 2, 3, Program, {"units": ["Experts", "Attention"]}, CLIPS),
    Case(2, 2, 2, 2, Program, {"stage": {"params": 2, "grads": 2}}, CLIPS),
    Case(2, 2, 2, 2, Mixtral, {"stage": {"params": 2, "grads": "world"}}),
    Case(2, 2, 2, 2, Program, {"stage": {"params": "none", "grads": 2}}, CLIPS),
    *(Case(2, 2, 2, stage, Program, lengths="none") for stage in (0, 1, 2, 3)),
    Case(2, 2, 2, 2, Program, layers={"drop_tokens": True, "capacity_factor": 0.5}),
    Case(2, 2, 2, 3, Program, layers={"use_residual": True, "shared_expert": expert()}),
    Case(2, 2, 2, 1, Program, layers={"k": 1, "bias_balancing": True}),
]


@pytest.mark.parametrize("case", sample(OPTIONS, OPTIONS[3]), ids=str)
def test_other_programs_train_as_on_one_rank(case: Case) -> None:
    check(case)


SEQUENCE = {"tensor_parallel": {"size": 2, "sequence": True}}
SEQUENCES = [
    *(
        Case(2, 2, 2, stage, program, SEQUENCE, more, lengths="even")
        for stage in (0, 1, 2, 3)
        for program in (Quiet, QuietMixtral)
        for more in ({}, CLIPS)
    ),
    Case(2, 2, 2, 3, Quiet, {**SEQUENCE, "activation_checkpointing": True}, lengths="even"),
    Case(2, 2, 2, 2, QuietMixtral, {**SEQUENCE, **SELECTIVE}, lengths="even"),
]


@pytest.mark.parametrize("case", sample(SEQUENCES, SEQUENCES[13]), ids=str)
def test_experts_of_parts_of_a_sequence_train_as_on_one_rank(case: Case) -> None:
    """Each tensor rank sends the tokens of its part."""
    check(case)


SHARDED = [
    *(Case(4, 2, 2, stage, program, more=CLIPS) for stage in (0, 1, 2, 3) for program in (Program, Mixtral)),
    *(Case(4, 2, 4, stage) for stage in (1, 3)),
    *(Case(4, 2, 2, stage, QuietMixtral, SEQUENCE, CLIPS, lengths="even") for stage in (1, 3)),
    Case(4, 2, 2, 2, Program, {"stage": {"params": 2, "grads": 2}}, CLIPS),
    Case(4, 2, 2, 2, Mixtral, {"stage": {"params": 2, "grads": "world"}}, CLIPS),
    Case(4, 2, 2, 2, Program, {"stage": {"params": "none", "grads": 2}}, CLIPS),
    Case(4, 2, 2, 2, Quiet, {**SEQUENCE, "stage": {"params": 2, "grads": 2}}, CLIPS, lengths="even"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARDED, ids=str)
def test_experts_of_several_data_ranks_train_as_on_one_rank(case: Case) -> None:
    check(case)


# -- Random numbers ----------------------------------------------------------------------------------------------------

RANDOM: list[Mapping[str, Any]] = [
    {"noisy_gate_policy": "RSample", "rate": 0.3},
    {"noisy_gate_policy": "Jitter"},
    {"top2_2nd_expert_sampling": True},
    {"k": 1, "drop_tokens": True, "capacity_factor": 0.5, "min_capacity": 0},
    {"rate": 0.3},
]


@pytest.mark.parametrize("layers", sample(RANDOM, RANDOM[0]), ids=str)
def test_tensor_ranks_draw_the_noise_of_routers_and_experts_that_one_rank_draws(layers: Mapping[str, Any]) -> None:
    case = Case(2, 2, 2, 2, layers=layers)
    expected = run(fit, 2, replace(case, tensor=1), {})[0]
    for found in run(fit, 4, case, {}):
        compare(found, expected, case)


# -- Mutants -----------------------------------------------------------------------------------------------------------


def _fit_wrongly(rank: int, world: int, case: Case, factor: float) -> Outcome:
    def wrong(parts: Any, *args: Any) -> Grid:
        grid = grid_of_experts(parts, *args)
        params = {name: replace(axes, factor=factor) if name in parts else axes for name, axes in grid.params.items()}
        return replace(grid, params=params)

    with patch.object(expert_training, "grid_of_experts", wrong):
        return fit(rank, world, case, {})


MUTANTS = [(MATRIX[1], 1.0), (MATRIX[10], 1.0), (SEQUENCES[2], 0.5)]


@pytest.mark.parametrize("mutant", sample(MUTANTS, MUTANTS[0]), ids=str)
def test_a_wrong_factor_of_experts_is_found(mutant: tuple[Case, float]) -> None:
    case, factor = mutant
    expected = run(fit, 1, case, {})[0][1]
    found = run(_fit_wrongly, 4, case, factor)[0][1]
    assert max(float((found[name] - value).abs().max()) for name, value in expected.items()) > 1e-3


# -- Checkpoints -------------------------------------------------------------------------------------------------------

GRIDS = {
    "both": Case(2, 2, 2, 2),
    "both at stage 3": Case(2, 2, 2, 3),
    "tensor ranks": Case(1, 2, 1, 1),
    "experts": Case(2, 1, 2, 3),
    "data ranks": Case(2, 1, 1, 2),
}
RESUMES = [
    (first, second, program)
    for first, second in itertools.permutations(GRIDS, 2)
    if "both" in first or "both" in second
    for program in (Program, Mixtral)
]


def _saved(path: Path) -> dict[str, Any]:
    content = torch.load(path, weights_only=False)
    return leaves({key: content[key] for key in ("state_dict", "optimizer_states")})


SOME = [("both", "tensor ranks", Mixtral), ("experts", "both at stage 3", Program)]


@pytest.mark.parametrize("way", sample(RESUMES, *SOME), ids=str)
def test_checkpoints_resume_on_other_grids_bit_equal(way: tuple[str, str, type[Program]], tmp_path: Path) -> None:
    first, second, program = way
    cases = [replace(GRIDS[name], program=program, options={"state_dict_type": "full"}) for name in (first, second)]
    paths = {"save": str(tmp_path / "first.ckpt")}
    run(fit, cases[0].world, replace(cases[0], more={"max_epochs": 1}), paths)
    paths = {"save": str(tmp_path / "second.ckpt"), "resume": paths["save"]}
    run(fit, cases[1].world, replace(cases[1], more={"max_epochs": 1}), paths)
    expected, found = _saved(tmp_path / "first.ckpt"), _saved(tmp_path / "second.ckpt")
    assert found.keys() == expected.keys()
    assert sum("exp_avg_sq" in key for key in found) > 20
    for key, value in expected.items():
        assert torch.equal(found[key], value) if isinstance(value, Tensor) else found[key] == value, key


@pytest.mark.slow
@pytest.mark.parametrize("second", ["both at stage 3", "experts", "data ranks"])
def test_a_resumed_fit_goes_on_as_on_one_rank(second: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    expected = run(fit, 1, GRIDS["both"], {})[0]
    run(fit, 4, replace(GRIDS["both"], more={"max_epochs": 1}), {"save": path})
    for found in run(fit, GRIDS[second].world, GRIDS[second], {"resume": path}):
        compare(found, expected, second)


def test_an_export_of_divided_experts_is_read_by_transformers(tmp_path: Path) -> None:
    case = Case(2, 2, 2, 3, Mixtral, more={"max_epochs": 1})
    values = run(fit, 4, case, {"export": str(tmp_path / "exported")})[0][1]
    Mixtral().model.config.save_pretrained(tmp_path / "exported")
    model = MixtralForCausalLM.from_pretrained(tmp_path / "exported")
    found = {f"model.{name}": one.detach() for name, one in model.named_parameters()}
    assert_equal(found, {name: value for name, value in values.items() if name in found})
    assert sum("experts" in name for name in found) == 4


# -- In pipeline stages ------------------------------------------------------------------------------------------------

PIPELINE = {"stages": 2, "microbatches": 2}
TWO = {"pipeline": PIPELINE}
STAGED = [
    *(Case(2, 2, 2, stage, program, TWO) for stage in (0, 1, 2, 3) for program in (Program, Mixtral)),
    Case(2, 2, 2, 2, Program, {**TWO, "activation_checkpointing": True}, CLIPS),
    Case(2, 2, 2, 1, Quiet, {"pipeline": {**PIPELINE, "schedule": "zb_h1"}}),
    Case(2, 2, 2, 2, QuietMixtral, {**TWO, **SEQUENCE}, lengths="even"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", STAGED, ids=str)
def test_pipeline_stages_of_tensor_ranks_with_divided_experts_train_as_one_rank(case: Case) -> None:
    check(case)


# -- One module, several runs ------------------------------------------------------------------------------------------


def _fit_twice(rank: int, world: int, case: Case) -> Outcome:
    module = case.program(**case.layers)
    fit(rank, world, case, {}, module)
    return fit(rank, world, case, {}, module)


TWICE = [
    Case(2, 2, 2, stage, program, more={"max_epochs": 1}) for stage in (0, 1, 2, 3) for program in (Program, Mixtral)
]


@pytest.mark.parametrize("case", sample(TWICE, TWICE[6]), ids=str)
def test_a_module_is_fitted_twice(case: Case) -> None:
    expected = run(_fit_twice, 1, case)[0]
    for found in run(_fit_twice, 4, case):
        compare(found, expected, case)


# -- Refused -----------------------------------------------------------------------------------------------------------


def _message(rank: int, world: int, case: Case, kind: str) -> str:
    module = case.program(**case.layers)
    if kind.startswith("earlier"):
        groups = {"tensor_parallel": 2} if kind == "earlier tensor ranks" else {"expert_parallel": 2}
        first = replace(case, options={**groups, **dict.fromkeys({"tensor_parallel", "expert_parallel"} - set(groups))})
        first = replace(first, data=2 if kind == "earlier tensor ranks" else 4)
        fit(rank, world, replace(first, tensor=4 // first.data), {}, module)
    if kind.endswith("later"):
        fit(rank, world, case, {}, module)
        gone = "expert_parallel" if kind == "tensor ranks later" else "tensor_parallel"
        case = replace(case, options={gone: None})
    with pytest.raises(ValueError, match=".") as caught:
        fit(rank, world, case, {}, module)
    return str(caught.value)


CASE = Case(2, 2, 2, 1, more={"max_epochs": 1})
DROPS = Case(2, 2, 2, 1, Quiet, SEQUENCE, layers={"drop_tokens": True})
BALANCED = Case(2, 2, 2, 1, Quiet, SEQUENCE, layers={"bias_balancing": True}, lengths="even")
REFUSED = [
    (replace(CASE, experts=4), "", "`expert_parallel=4` does not divide the 2 data ranks. Use a multiple of 8 dev"),
    (replace(CASE, layers={"num": 5}), "", "which has 5 experts: every rank has as many. Use"),
    (DROPS, "", "`blocks.0.moe` has `drop_tokens=True`, and with `sequence=True` each rank would drop tokens by"),
    (replace(CASE, options=SEQUENCE, lengths="even"), "", "and a router's auxiliary loss, or its counts of tokens"),
    (BALANCED, "", "the tensor that the forward leaves as `moe.router.load`"),
    (replace(CASE, program=Mixtral), "earlier tensor ranks", "tensor ranks by an earlier Trainer without `expert_pa"),
    (CASE, "earlier experts", "by an earlier Trainer with `expert_parallel=2`, beside `tensor_parallel=1`, and not `t"),
    (CASE, "tensor ranks later", "by an earlier Trainer with `expert_parallel=2`, and this strategy does not divide"),
    (CASE, "experts later", "is cut over 2 ranks by an earlier Trainer with `tensor_parallel=2`. Use the same"),
]


class Reads(Quiet):
    """Changes gradients of experts between micro-batches."""

    def on_after_backward(self) -> None:
        for name, param in self.named_parameters():
            if "experts" in name and param.grad is not None:
                param.grad.mul_(2.0)


def _message_of_gradients(rank: int, world: int, case: Case) -> str:
    with pytest.raises(RuntimeError, match=".") as caught:
        fit(rank, world, case, {})
    return str(caught.value)


@pytest.mark.parametrize("options", sample([{}, SEQUENCE], SEQUENCE), ids=str)
def test_gradients_of_experts_are_not_shown_before_the_last_micro_batch(options: Mapping[str, Any]) -> None:
    """With two expert ranks and parts of a sequence on two tensor ranks, an expert's group has as many as there are."""
    case = Case(2, 2, 2, 1, Reads, options, CLIPS, lengths="even")
    for message in run(_message_of_gradients, 4, case):
        assert "cannot be read before the last micro-batch: on this rank it is" in message


def _evaluate(rank: int, world: int, case: Case, kind: str) -> Any:
    module = case.program(**case.layers)
    fitted = trainer(rank, world, case.strategy if world > 1 else "auto", max_epochs=1)
    ranks = [rank // case.tensor] if world > 1 else list(range(case.data))
    batches: Dataset[Tensor] = Batches(ranks, 50, case.lengths)
    if kind == "uneven":
        batches = Subset(batches, range(2 + rank // case.tensor))
    if kind == "other batches":
        batches = Batches([rank], 50, case.lengths)
    found = fitted.validate(module, DataLoader(batches, batch_size=None), verbose=False)
    return found[0]["val_loss"]


@pytest.mark.parametrize("case", sample(MATRIX[:16:2], MATRIX[4], MATRIX[14]), ids=str)
def test_evaluations_are_those_of_one_rank(case: Case) -> None:
    expected = run(_evaluate, 1, case, "")[0]
    assert run(_evaluate, 4, case, "") == pytest.approx([expected] * 4, abs=BOUND)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("uneven", "With `expert_parallel` all ranks compute every batch together"),
        ("other batches", "are one tensor group, and got different batches"),
    ],
)
def test_evaluations_of_other_batches_are_refused(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(_evaluate, 4, CASE, kind)


@pytest.mark.parametrize("refused", sample(REFUSED, *REFUSED[:3], REFUSED[6]), ids=lambda one: one[2][:40])
def test_programs_that_cannot_be_divided_are_refused(refused: tuple[Case, str, str]) -> None:
    case, kind, message = refused
    for found in run(_message, 4, case, kind):
        assert message in found
