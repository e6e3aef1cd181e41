"""An unmodified LightningModule trains in pipeline stages as it does under DDP on the same samples."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.text import Perplexity

from lightning_zero.config import Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run

VOCAB = 16
MASK = 0
STEPS = 20
BATCH = 8
MICROBATCHES = 4
TOLERANCE = 1e-6  # micro-batches are added in another order than the samples of a batch


def gpt_class() -> Any:
    """Return the GPT of the example, which knows of no pipeline."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
    from model import GPT, GPTConfig

    return lambda depth: GPT(GPTConfig(width=8, depth=depth, heads=2, vocabulary=VOCAB))


class LanguageModel(LightningModule):
    """Predicts every next token."""

    def __init__(self, optimizer: str = "sgd", *, tied: bool = False, depth: int = 8) -> None:
        super().__init__()
        self.net = gpt_class()(depth)
        # Small embeddings are divided by their norm, and rounding with them: DDP on the same samples in other pieces is
        # then 6e-5 away from itself after 20 steps.
        torch.nn.init.normal_(self.net.embedding.weight)
        self.optimizer = optimizer
        self.perplexity = Perplexity()
        self.mean = MeanMetric()
        if tied:
            self.net.head.weight = self.net.embedding.weight

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        tokens, targets = batch
        logits = self.net(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.perplexity(logits.detach(), batch[1])
        self.log("perplexity", self.perplexity, on_step=True, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, _ = self.loss(batch)
        self.mean.update(loss)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_mean", self.mean)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=0.02, momentum=0.9)
        return torch.optim.AdamW(groups, lr=1e-3, eps=1e-5)


class MaskedLanguageModel(LanguageModel):
    """Guesses tokens that it has masked itself; how many there are differs from batch to batch."""

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        tokens, _ = batch
        mask = torch.rand(tokens.shape) < 0.4
        mask[:, 0] = True
        logits = self.net(tokens.masked_fill(mask, MASK))
        return F.cross_entropy(logits[mask], tokens[mask]), logits


MODELS: dict[str, Any] = {"gpt": LanguageModel, "mlm": MaskedLanguageModel}


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (samples, 7), generator=generator)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def loader(copies: int, copy: int, samples: int, batch: int) -> DataLoader[Any]:
    dataset = data(samples)
    return DataLoader(dataset, batch, sampler=DistributedSampler(dataset, copies, copy, shuffle=False))


def fit(
    rank: int, world: int, strategy: Any, model: str, options: dict[str, Any], steps: int, program: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Train for a number of optimizer steps and return whole weights and what was logged."""
    copies = world
    if isinstance(strategy, dict):
        strategy = ZeroStrategy(**strategy)
        copies = world // (strategy.pipeline.stages if strategy.pipeline else 1)
    module = seeded(lambda: MODELS[model](**options))
    lightning = trainer(
        rank,
        world,
        strategy,
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        log_every_n_steps=1,
        **program,
    )
    train = loader(copies, rank % copies, 2 * steps * BATCH * copies, BATCH)
    lightning.fit(module, train, loader(copies, rank % copies, 3 * BATCH * copies, BATCH))
    assert lightning.global_step == steps
    if isinstance(strategy, ZeroStrategy):
        weights = {name: strategy.full_param(param) for name, param in module.named_parameters()}
    else:
        weights = {name: param.detach().clone() for name, param in module.named_parameters()}
    return weights, {key: float(value) for key, value in lightning.callback_metrics.items()}


@cache
def reference(copies: int, model: str, options: tuple[tuple[str, Any], ...], steps: int) -> Any:
    """Return what DDP's ranks come to. On a CPU the masks of a batch are those of its micro-batches together."""
    return run(fit, copies, "ddp", model, dict(options), steps, {}, timeout_s=240.0)


def check(
    stages: int,
    copies: int,
    zero: int,
    schedule: Any,
    model: str,
    *,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
    program: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    expected = reference(copies, model, tuple(options.items()), steps)
    pipeline = Pipeline(stages=stages, schedule=schedule, microbatches=MICROBATCHES)
    strategy = {"stage": zero, "pipeline": pipeline}
    outcomes = run(fit, stages * copies, strategy, model, options, steps, program or {}, timeout_s=240.0)
    for rank, (here, numbers) in enumerate(outcomes):
        weights, logged = expected[rank % copies]
        for name, value in weights.items():
            torch.testing.assert_close(here[name], value, rtol=0, atol=tolerance, msg=lambda text, n=name: n + text)
        assert numbers == outcomes[rank % copies][1]  # on all stages of a copy
        for name, value in logged.items():
            assert numbers[name] == pytest.approx(value, rel=2e-6), name


CASES = [
    (stages, copies, zero, schedule, model, optimizer)
    for stages in (2, 4)
    for copies in (1, 2)
    for zero in (1, 2, 3)
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")
    for model in MODELS
    for optimizer in ("sgd", "adamw")
]
KEPT = [
    (2, 2, 3, "1f1b", "gpt", "sgd"),
    (2, 1, 2, "interleaved_1f1b", "mlm", "adamw"),
]


def _name(case: tuple[Any, ...]) -> str:
    stages, copies, zero, schedule, model, optimizer = case
    return f"pp{stages}-dp{copies}-zero{zero}-{schedule}-{model}-{optimizer}"


@pytest.mark.always
@pytest.mark.parametrize("case", sample(CASES, *KEPT), ids=_name)
def test_pipeline_trains_as_ddp(case: tuple[Any, ...]) -> None:
    stages, copies, zero, schedule, model, optimizer = case
    steps = STEPS if stages * copies > 4 or case not in KEPT else 6
    check(stages, copies, zero, schedule, model, steps=steps, optimizer=optimizer)


@pytest.mark.parametrize("copies", sample((1, 2), 1))
@pytest.mark.parametrize("zero", sample((0, 1, 2, 3), 2))
def test_tied_embeddings_train_as_ddp(copies: int, zero: int) -> None:
    check(2, copies, zero, "1f1b", "gpt", steps=6, tied=True)


def test_logged_values_are_those_of_the_whole_batch_with_one_microbatch() -> None:
    weights, logged = reference(1, "gpt", (("optimizer", "sgd"),), 3)[0]
    strategy = {"stage": 1, "pipeline": Pipeline(stages=2, schedule="gpipe", microbatches=1)}
    for here, numbers in run(fit, 2, strategy, "gpt", {"optimizer": "sgd"}, 3, {}):
        assert numbers == pytest.approx(logged, rel=2e-6)
        assert all(torch.allclose(here[name], weights[name], rtol=0, atol=TOLERANCE) for name in weights)
