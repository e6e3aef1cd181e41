"""``ZeroStrategy(tensor_parallel=...)`` trains as one rank does on the joined batches, and tells what it cannot do."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics import MeanMetric, SumMetric

from lightning_zero.checkpoint.pretrained import load_pretrained
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.tensor.plan import TensorParallel
from tests.lightning_programs import assert_equal, nodes, trainer, weights
from tests.parallel.tensor.families import HEADS, VOCAB, WIDTH, make
from tests.worlds import run, seed

SAMPLES, LENGTH, BATCH, STEPS = 40, 12, 4, 20
BOUND = 1e-6
PATIENCE_S = 300.0
DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob",
           "dropout_rate")  # fmt: skip
GRIDS = [(1, 2), (2, 2), (1, 4)]  # data ranks x tensor ranks


class Samples(Dataset[dict[str, Tensor]]):
    """Random inputs of a model, the same on every rank."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(number)
        if self.kind == "images":
            return {"pixel_values": torch.randn(3, 16, 16, generator=generator)}
        ids = torch.randint(2, VOCAB, (LENGTH,), generator=generator)
        if self.kind == "pairs":
            return {"input_ids": ids, "decoder_input_ids": ids.flip(0)}
        if self.kind == "padded":
            mask = (torch.arange(LENGTH) < LENGTH - number % 4).long()
            return {"input_ids": ids * mask, "attention_mask": mask}
        return {"input_ids": ids} if self.kind == "text" else {"ids": ids}


KINDS = {
    "bert": "padded",
    "llama": "padded",
    "vit": "images",
    "t5": "pairs",
    "hand-tied": "plain",
    "hand-separate": "plain",
}


class Program(LightningModule):
    """Trains a model of a family without dropout, and logs all that can be wrong by a factor."""

    def __init__(self, family: str, rate: float = 0.05) -> None:
        super().__init__()
        seed(7)
        self.model = make(family)[0]
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name in ("attention_dropout", "dropout", *DROPOUT):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        self.rate = rate
        self.losses: list[float] = []
        self.mean, self.count = MeanMetric(), SumMetric()

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        output = self.model(**batch)
        value = output if isinstance(output, Tensor) else output["logits" if "logits" in output else 0]
        return (value.tanh() * torch.linspace(-1, 1, value.shape[-1])).mean() + 0.1 * value.square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        size = float(len(next(iter(batch.values()))))
        self.losses.append(float(self.all_gather(loss.detach()).mean()))
        self.mean.update(loss.detach())
        self.count.update(size)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True, batch_size=1)
        self.log("samples", size, sync_dist=True, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("mean", self.mean, on_step=False, on_epoch=True, batch_size=1)
        self.log("count", self.count, on_step=False, on_epoch=True, batch_size=1)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("validation", self._loss(batch), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)


Outcome = tuple[list[float], dict[str, float], dict[str, Tensor]]


def loaders(family: str, ranks: int, rank: int) -> dict[str, Any]:
    """Return the loaders of a data rank of some, which does not shuffle."""
    samples = Samples(KINDS.get(family, "text"))

    def loader() -> DataLoader[dict[str, Tensor]]:
        sampler = DistributedSampler(samples, ranks, rank, shuffle=False)
        return DataLoader(samples, batch_size=BATCH // ranks, sampler=sampler)

    return {"train_dataloaders": loader(), "val_dataloaders": loader()}


def fit(rank: int, world: int, family: str, options: dict[str, Any] | None, more: dict[str, Any]) -> Outcome:
    """Fit with a strategy of these options; None: with Lightning's plain strategy on one rank."""
    strategy = "auto" if options is None else ZeroStrategy(**options)
    module = Program(family)
    fitted = trainer(
        rank, world, strategy, max_steps=STEPS, max_epochs=10, limit_val_batches=4,
        val_check_interval=5, **more,
    )  # fmt: skip
    size = 1 if options is None else TensorParallel.of(options.get("tensor_parallel")).size  # type: ignore[union-attr]
    fitted.fit(module, **loaders(family, world // size, rank // size))
    return module.losses, {name: float(value) for name, value in fitted.callback_metrics.items()}, weights(fitted)


def compare(got: Outcome, expected: Outcome, what: Any, bound: float = BOUND) -> None:
    assert got[0] == pytest.approx(expected[0], abs=bound), what
    assert got[1] == pytest.approx(expected[1], rel=bound, abs=bound), what
    assert_equal(
        {name: one for name, one in got[2].items() if ".mean" not in name},
        {name: one for name, one in expected[2].items() if ".mean" not in name},
        bound,
        what,
    )


def expected_of(family: str, **more: Any) -> Outcome:
    outcome: Outcome = run(fit, 1, family, None, more)[0]
    assert outcome[0][0] != pytest.approx(outcome[0][-1], abs=1e-4)  # it has learned something
    return outcome


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_hand_written_model_trains_as_on_one_rank(grid: tuple[int, int], stage: int) -> None:
    expected = expected_of("hand-separate")
    options = {"stage": stage, "tensor_parallel": grid[1]}
    for outcome in run(fit, grid[0] * grid[1], "hand-separate", options, {}):
        compare(outcome, expected, (grid, stage))


FAMILIES = ["hand-tied", "llama", "qwen2", "qwen3", "gemma", "gpt2", "bert", "vit", "t5"]
MODELS = [
    (family, sequence) for family in FAMILIES for sequence in (False, True) if (family, sequence) != ("vit", True)
]


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("family", "sequence"), MODELS, ids=str)
def test_unmodified_models_train_as_on_one_rank(family: str, sequence: bool, grid: tuple[int, int]) -> None:
    expected = expected_of(family)
    for stage in (0, 1, 2, 3):
        options = {"stage": stage, "tensor_parallel": {"size": grid[1], "sequence": sequence}}
        for outcome in run(fit, grid[0] * grid[1], family, options, {}, timeout_s=180.0):
            compare(outcome, expected, (family, grid, stage, sequence))


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"stage": 2}, {"gradient_clip_val": 0.05}),
        ({"stage": 1}, {"accumulate_grad_batches": 2}),
        ({"stage": 3}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
        ({"stage": 3, "offload": "cpu"}, {}),
        ({"stage": 3, "offload": {"optimizer": "cpu", "params": "cpu"}}, {"gradient_clip_val": 0.05}),
        ({"stage": 3, "activation_checkpointing": True}, {}),
        ({"stage": 1, "step": "backward"}, {}),
        ({"stage": 2, "step": "deferred"}, {}),
    ],
    ids=str,
)
def test_options_of_the_engine_train_as_on_one_rank(options: dict[str, Any], more: dict[str, Any]) -> None:
    expected = expected_of("hand-separate", **more)
    for outcome in run(fit, 4, "hand-separate", {**options, "tensor_parallel": 2}, more):
        compare(outcome, expected, options)


# -- Scopes ------------------------------------------------------------------------------------------------------------


def fit_on_nodes(rank: int, world: int, options: dict[str, Any], more: dict[str, Any], node: int) -> Outcome:
    return fit(rank, world, "hand-separate", options, {**more, **nodes(rank, world, node)})


HYBRID, SECONDARY = {"params": "node", "grads": "node"}, {"params": "node", "grads": "world"}
LEVELS = [
    ({"params": 2, "grads": 2}, 4, {"accumulate_grad_batches": 2}),  # all data ranks
    (HYBRID, 2, {"gradient_clip_val": 0.05}),  # one data rank per node
    (SECONDARY, 4, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),  # one node
]


@pytest.mark.parametrize(("stage", "node", "more"), LEVELS, ids=str)
def test_scopes_on_one_level_train_as_on_one_rank(stage: dict[str, Any], node: int, more: dict[str, Any]) -> None:
    expected = expected_of("hand-separate", **more)
    for outcome in run(fit_on_nodes, 4, {"stage": stage, "tensor_parallel": 2}, more, node, timeout_s=PATIENCE_S):
        compare(outcome, expected, stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [HYBRID, SECONDARY, {"grads": 2}], ids=str)
def test_scopes_of_tensor_groups_on_two_nodes_train_as_on_one_rank(stage: dict[str, Any]) -> None:
    """Two nodes of two data ranks of two tensor ranks."""
    for options, more in (
        ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
        ({"tensor_parallel": {"size": 2, "sequence": True}, "offload": "cpu"}, {}),
    ):
        expected = expected_of("hand-separate", **more)
        given = {"stage": stage, "tensor_parallel": 2, **options}
        for outcome in run(fit_on_nodes, 8, given, more, 4, timeout_s=PATIENCE_S):
            compare(outcome, expected, given)


# -- Pipeline stages ---------------------------------------------------------------------------------------------------


class Logging(Program):
    """Calls no collective of its own in a step: on pipeline stages only the last one would reach it."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        size = float(len(next(iter(batch.values()))))
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True, batch_size=int(size))
        self.log("samples", size, sync_dist=True, on_step=False, on_epoch=True, reduce_fx="sum")
        return loss


def fit_logging(rank: int, world: int, family: str, options: dict[str, Any] | None, more: dict[str, Any]) -> Outcome:
    strategy = "auto" if options is None else ZeroStrategy(**options)
    fitted = trainer(
        rank, world, strategy, max_steps=8, max_epochs=10, limit_val_batches=2, val_check_interval=4, **more
    )
    slice_ = {"num_replicas": 1, "rank": 0} if options is None else strategy.distributed_sampler_kwargs  # type: ignore[union-attr]
    fitted.fit(Logging(family), **loaders(family, slice_["num_replicas"], slice_["rank"]))
    return [], {name: float(value) for name, value in fitted.callback_metrics.items()}, weights(fitted)


STAGES = [
    ("hand-separate", {}, {}, {}),
    ("hand-separate", {"schedule": "zb_h1"}, {}, {"gradient_clip_val": 0.02}),
    ("hand-separate", {}, {"activation_checkpointing": True}, {}),
    ("llama", {}, {"tensor_parallel": {"size": 2, "sequence": True}}, {}),
    ("gpt2", {}, {"offload": "cpu"}, {"accumulate_grad_batches": 2}),
]


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow), 3]
)
@pytest.mark.parametrize(("family", "pipeline", "options", "more"), STAGES, ids=str)
def test_pipeline_stages_of_tensor_ranks_train_as_one_rank(
    family: str, pipeline: dict[str, Any], options: dict[str, Any], more: dict[str, Any], stage: int
) -> None:
    if options.get("offload") and stage == 0:
        stage = 1  # there is nothing to offload at stage 0
    expected = run(fit_logging, 1, family, None, more)[0]
    given = {"stage": stage, "tensor_parallel": 2, "pipeline": {"stages": 2, "microbatches": 2, **pipeline}, **options}
    for outcome in run(fit_logging, 4, family, given, more):
        compare(outcome, expected, (family, given))


def _fit_twice(rank: int, world: int, options: dict[str, Any]) -> Outcome:
    module, data = Logging("hand-separate"), loaders("hand-separate", 1, 0)
    for stage in (1, 3):
        fitted = trainer(rank, world, ZeroStrategy(stage=stage, **options), max_steps=2)  # type: ignore[arg-type]
        fitted.fit(module, data["train_dataloaders"])
    metrics = fitted.validate(module, data["val_dataloaders"], verbose=False)[0]
    return [], dict(metrics), weights(fitted)


@pytest.mark.slow
def test_a_module_in_pipeline_stages_of_tensor_ranks_is_trained_by_a_second_strategy() -> None:
    expected = run(_fit_twice, 1, {})[0]
    for outcome in run(_fit_twice, 4, {"tensor_parallel": 2, "pipeline": {"stages": 2, "microbatches": 2}}):
        compare(outcome, expected, "second strategy")


@pytest.mark.slow
def test_a_grid_of_three_axes_trains_as_one_rank() -> None:
    expected = run(fit_logging, 1, "hand-separate", None, {})[0]
    given = {"stage": 2, "tensor_parallel": 2, "pipeline": {"stages": 2, "microbatches": 2}}
    for outcome in run(fit_logging, 8, "hand-separate", given, {}, timeout_s=180.0):
        compare(outcome, expected, "8 ranks")


# -- Checkpoints -------------------------------------------------------------------------------------------------------

Layout = tuple[int, dict[str, Any]]  # number of ranks, options

TWO_STAGES = {"stages": 2, "microbatches": 2}
LAYOUTS: list[Layout] = [
    (1, {"stage": 0}),
    (2, {"stage": 3}),
    (2, {"stage": 1, "tensor_parallel": 2}),
    (4, {"stage": 3, "tensor_parallel": 2}),
    (4, {"stage": 2, "tensor_parallel": 4}),
    (4, {"stage": 1, "tensor_parallel": 2, "pipeline": TWO_STAGES}),
    (4, {"stage": 3, "pipeline": TWO_STAGES}),
]
SOME = [LAYOUTS[3], LAYOUTS[5]]


def fit_to(rank: int, world: int, options: dict[str, Any], folder: str, steps: int, kind: str | None) -> Outcome:
    """Fit to a step, from the checkpoint of the folder if there is one, or save there if a kind is given."""
    strategy = ZeroStrategy(**options, state_dict_type=kind)  # type: ignore[arg-type]
    fitted = trainer(rank, world, strategy, max_steps=steps, limit_val_batches=0)
    slice_ = strategy.distributed_sampler_kwargs
    path = Path(folder) / "saved"
    fitted.fit(
        Logging("hand-separate"),
        ckpt_path=None if kind else path,
        **loaders("hand-separate", slice_["num_replicas"], slice_["rank"]),
    )
    if kind:
        fitted.save_checkpoint(path)
    return [], {}, weights(fitted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize(
    "saved", [pytest.param(one, marks=() if one in SOME else pytest.mark.slow) for one in LAYOUTS], ids=str
)
def test_checkpoints_resume_on_other_grids(saved: Layout, kind: str, tmp_path: Path) -> None:
    world, options = saved
    values = run(fit_to, world, options, str(tmp_path), 4, kind)[0][2]
    outcomes = []
    for ranks, others in LAYOUTS:
        at_start = run(fit_to, ranks, others, str(tmp_path), 4, None)[0][2]
        for name, value in values.items():
            assert ".mean" in name or torch.equal(at_start[name], value), (name, ranks, others)
        outcomes.append(run(fit_to, ranks, others, str(tmp_path), 8, None)[0])
    for layout, outcome in zip(LAYOUTS, outcomes, strict=True):
        compare(outcome, outcomes[0], layout)


class Pretrained(Program):
    """Has no values before its file is read."""

    def __init__(self, path: str) -> None:
        super().__init__("hand-separate")
        self.path = path
        self.model.to("meta")

    def configure_model(self) -> None:
        load_pretrained(self, self.path, strict=False)


def fit_pretrained(rank: int, world: int, path: str) -> dict[str, Tensor]:
    fitted = trainer(rank, world, ZeroStrategy(stage=3, tensor_parallel=2), max_steps=0, limit_val_batches=0)
    fitted.fit(Pretrained(path), **loaders("hand-separate", world // 2, rank // 2))
    return weights(fitted)


def test_ranks_read_their_parts_of_pretrained_files(tmp_path: Path) -> None:
    whole = Program("hand-separate").state_dict()
    torch.save(whole, tmp_path / "weights.pt")
    for values in run(fit_pretrained, 4, str(tmp_path / "weights.pt")):
        for name, value in whole.items():
            assert name.startswith(("mean", "count")) or torch.equal(values[name], value), name


# -- Random numbers and batches ----------------------------------------------------------------------------------------


class Noisy(Program):
    """Adds noise of four generators, drops out, and is disturbed on rank 0."""

    def __init__(self) -> None:
        super().__init__("hand-separate")
        self.seen: list[float] = []
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        noise = torch.rand(()) + random.random() + float(np.random.rand())
        self.seen.append(float(noise))
        return self._loss(batch) * (1 + noise)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            torch.rand(3)
            random.random()


def fit_noisy(rank: int, world: int) -> tuple[list[float], float]:
    torch.manual_seed(100 + rank)
    random.seed(rank)
    np.random.seed(rank)
    module = Noisy()
    torch.manual_seed(200 + rank)
    strategy = ZeroStrategy(stage=1, tensor_parallel=2)
    fitted = trainer(rank, world, strategy, max_steps=6, limit_val_batches=0)
    fitted.fit(module, **loaders("hand-separate", world // 2, rank // 2))
    return module.seen, float(sum(value.double().sum() for value in weights(fitted).values()))


def test_generators_of_a_tensor_group_go_on_from_one_state() -> None:
    outcomes = run(fit_noisy, 4)
    assert outcomes[0][0] == outcomes[1][0]
    assert outcomes[2][0] == outcomes[3][0]
    assert outcomes[0][0] != outcomes[2][0]
    assert len({weight for _, weight in outcomes}) == 1


def fit_reloading(rank: int, world: int) -> list[float]:
    class Reloading(Noisy):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Samples("plain"), batch_size=8, shuffle=True)

        def on_train_epoch_end(self) -> None:
            if self.global_rank == 0:
                torch.rand(3)

    module = Reloading()
    strategy = ZeroStrategy(stage=1, tensor_parallel=2)
    fitted = trainer(rank, world, strategy, max_epochs=3, limit_val_batches=0, reload_dataloaders_every_n_epochs=1)
    fitted.fit(module)
    return module.seen


def test_loaders_that_are_made_anew_in_every_epoch_have_one_order_in_a_tensor_group() -> None:
    """The second one was shuffled otherwise on rank 0, and its batches were refused."""
    first, second = run(fit_reloading, 2)
    assert first == second


def fit_with_sampler(rank: int, world: int) -> str:
    samples = Samples("plain")
    sampler = DistributedSampler(samples, world, rank, shuffle=False)  # of all ranks
    strategy = ZeroStrategy(stage=1, tensor_parallel=2)
    fitted = trainer(rank, world, strategy, max_steps=2)
    try:
        fitted.fit(Program("hand-separate"), DataLoader(samples, batch_size=2, sampler=sampler))
    except ValueError as error:
        return str(error)
    return ""


def test_other_batches_in_a_tensor_group_are_refused() -> None:
    for rank, text in enumerate(run(fit_with_sampler, 4)):
        assert (
            f"The ranks {rank // 2 * 2} to {rank // 2 * 2 + 1} are one tensor group, and got different batches" in text
        )
        assert "distributed_sampler_kwargs" in text


class Drawn(Samples):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__("plain")
        self.generator = np.random.default_rng(0)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"ids": torch.as_tensor(self.generator.integers(2, VOCAB, LENGTH))}


def fit_drawn(rank: int, world: int) -> list[float]:
    module = Program("hand-separate")
    fitted = trainer(rank, world, ZeroStrategy(stage=1, tensor_parallel=2), max_steps=3, limit_val_batches=0)
    fitted.fit(module, DataLoader(Drawn(), batch_size=2))
    return module.losses


def test_data_sets_with_a_state_stay_equal() -> None:
    first, second = run(fit_drawn, 2)
    assert first == second


# -- Around ------------------------------------------------------------------------------------------------------------


def _around(rank: int, world: int) -> dict[str, Any]:
    strategy = ZeroStrategy(stage=3, tensor_parallel=2)
    module = Program("hand-separate")
    fitted = trainer(rank, world, strategy, max_steps=1, limit_val_batches=0)
    given = loaders("hand-separate", 2, rank // 2)
    fitted.fit(module, given["train_dataloaders"])
    mesh = strategy.device_mesh
    assert mesh is not None
    assert module.device_mesh is mesh
    found = {
        "axes": {name: mesh[name].get_local_rank() for name in ("data_parallel", "tensor_parallel")},
        "sampler": strategy.distributed_sampler_kwargs,
        "all": strategy.reduce_boolean_decision(rank != 3),
        "any": strategy.reduce_boolean_decision(rank == 3, all=False),
        "sum": float(strategy.reduce(torch.tensor(1.0), reduce_op="sum")),
        "gathered": strategy.all_gather(torch.tensor(float(rank))).tolist(),
        "gathered by the module": module.all_gather(torch.tensor(float(rank))).tolist(),
    }
    fitted.limit_val_batches = 4
    first = fitted.validate(module, given["val_dataloaders"], verbose=False)[0]["validation"]
    other = trainer(rank, world, ZeroStrategy(stage=1, tensor_parallel=2), max_steps=1)
    other.fit(module, given["train_dataloaders"])  # a cut module stays cut
    assert first > 0
    for options in ({"tensor_parallel": 4}, {}):
        again = trainer(rank, world, ZeroStrategy(stage=1, **options), max_steps=1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="is cut over 2 ranks by an earlier Trainer"):
            again.fit(module, given["train_dataloaders"])
    return found


def test_around_a_fit() -> None:
    for rank, found in enumerate(run(_around, 4)):
        assert found == {
            "axes": {"data_parallel": rank // 2, "tensor_parallel": rank % 2},
            "sampler": {"num_replicas": 2, "rank": rank // 2},
            "all": False,
            "any": True,
            "sum": 2.0,
            "gathered": [rank % 2, 2.0 + rank % 2],
            "gathered by the module": [rank % 2, 2.0 + rank % 2],
        }


class Penalised(Program):
    """Reads all weights in a step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch) + 0.01 * sum(param.norm() for param in self.parameters())  # type: ignore[no-any-return]


class GradientPenalty(Program):
    """Differentiates a gradient, with plain attention, which has second derivatives."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.model.emb(batch["ids"])  # type: ignore[operator, union-attr]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            output = self.model.blocks(hidden)  # type: ignore[operator, union-attr]
        (grad,) = torch.autograd.grad(output.square().mean(), hidden, create_graph=True)
        loss: Tensor = output.square().mean() + 100.0 * grad.square().mean()
        self.losses.append(float(loss))
        return loss


def fit_penalty(rank: int, world: int, options: dict[str, Any] | None) -> Outcome:
    strategy = "auto" if options is None else ZeroStrategy(**options)
    module = GradientPenalty("hand-separate")
    fitted = trainer(rank, world, strategy, max_steps=5, limit_val_batches=0)
    fitted.fit(module, **loaders("hand-separate", 1, 0))
    return module.losses, {}, weights(fitted)


def test_gradients_of_gradients_are_those_of_one_rank() -> None:
    expected = run(fit_penalty, 1, None)[0]
    for outcome in run(fit_penalty, 2, {"stage": 1, "tensor_parallel": 2}):
        compare(outcome, expected, "gradient penalty")


class Stateless(LightningModule):
    """Nothing in it can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.example_input_array = torch.randn(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch["ids"].float()[:, :3]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PenalisedNorms(Program):
    """Adds a penalty on parameters that are not cut."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        norms = [param for name, param in self.named_parameters() if "ln1" in name]
        return self._loss(batch) + sum(param.square().sum() for param in norms)


class PenalisedByHand(PenalisedNorms):
    """Does so, and steps its optimizer itself, which there is none of when the model is planned."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Hooked(Program):
    """Has a hook on the gradient of a parameter that is not cut."""

    kind = ""

    def configure_model(self) -> None:
        weight: Any = self.model.blocks[0].ln1.weight  # type: ignore[index, union-attr]
        if self.kind == "hook":
            weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        if self.kind == "hook behind":
            weight.register_post_accumulate_grad_hook(lambda param: None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.kind == "late hook":
            self.model.blocks[0].ln1.weight.register_hook(lambda grad: grad.sign())  # type: ignore[index, union-attr]
        return self._loss(batch)


def _message(rank: int, world: int, what: str) -> str:
    options: Any = {"tensor_parallel": 2}
    module: LightningModule = Program("hand-separate")
    more: dict[str, Any] = {}
    if what == "nothing":
        module = Stateless()
    elif what == "size":
        options = {"tensor_parallel": 3}
    elif what == "meta":
        with torch.device("meta"):
            module.model.blocks[0].attn.q = nn.Linear(WIDTH, WIDTH)  # type: ignore[index, union-attr]
    elif what == "wrong":
        rules = {"blocks.*.attn.q": "row", "blocks.*.attn.proj": "column"}
        options = {"tensor_parallel": {"size": 2, "plan": {f"model.{name}": rule for name, rule in rules.items()}}}
    elif what == "penalty":
        module = Penalised("hand-separate")
    elif what == "penalty on norms":
        module, options = PenalisedNorms("hand-separate"), {"tensor_parallel": {"size": 2, "sequence": True}}
    elif what == "penalty by hand":
        module, options = PenalisedByHand("hand-separate"), {"tensor_parallel": {"size": 2, "sequence": True}}
    elif what == "finetuning":
        module.add_module("backbone", nn.Linear(3, 3))
        more = {"callbacks": [BackboneFinetuning()]}
    elif what in ("hook", "late hook", "hook behind"):
        module, options = Hooked("hand-separate"), {"tensor_parallel": {"size": 2, "sequence": True}}
        module.kind = what
        module.configure_model()
    elif what == "batch norm":
        module.add_module("norm", nn.BatchNorm1d(3))
        more = {"sync_batchnorm": True}
    elif what == "own batch norm":
        module.add_module("norm", nn.SyncBatchNorm(3))
    elif what == "stages":
        options = {"tensor_parallel": 2, "pipeline": 2}
    elif what == "length":
        module, options = Program("vit"), {"tensor_parallel": {"size": 2, "sequence": True}}
    try:
        fitted = trainer(rank, world, ZeroStrategy(stage=1, **options), max_steps=1, **more)
        fitted.fit(module, DataLoader(Samples("images" if what == "length" else "plain"), batch_size=2))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("nothing", "finds nothing in `Stateless` that can be cut"),
        ("size", "`tensor_parallel=3` does not divide the 2 ranks"),
        ("meta", "`model.blocks.0.attn.q.weight` is a part of a parameter"),
        ("wrong", "With this plan of tensor parallelism over 2 ranks, block `model.blocks.0`"),
        ("penalty", "code outside of its block reads it"),
        ("penalty on norms", "The gradient of `model.blocks.0.ln1.bias` is a sum over 2 ranks"),
        ("penalty by hand", "The gradient of `model.blocks.0.ln1.bias` is a sum over 2 ranks"),
        ("finetuning", "`BackboneFinetuning` compares whole parameters, and with `tensor_parallel`"),
        ("hook", "`model.blocks.0.ln1.weight` has a hook on its gradient"),
        ("late hook", "`model.blocks.0.ln1.weight` has a hook on its gradient"),
        ("hook behind", "`model.blocks.0.ln1.weight` has a hook on its gradient"),
        ("batch norm", "`sync_batchnorm=True` averages `norm` over all ranks"),
        ("own batch norm", "`nn.SyncBatchNorm` averages `norm` over all ranks"),
        ("length", "(2, 17, 64) cannot be divided over 2 ranks of tensor parallelism"),
        ("stages", "`tensor_parallel=2` does not divide the 1 ranks of a pipeline stage"),
    ],
)
def test_bad_input_is_told_on_every_rank(what: str, text: str) -> None:
    for message in run(_message, 2, what):
        assert text in message


def test_a_strategy_can_be_copied() -> None:
    strategy = ZeroStrategy(tensor_parallel=TensorParallel(size=2, sequence=True))
    assert copy.deepcopy(strategy).tensor_parallel == strategy.tensor_parallel
    assert ZeroStrategy(tensor_parallel=1).tensor_parallel is None
    assert HEADS % 2 == 0
