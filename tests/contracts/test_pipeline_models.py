"""Models that a pipeline needs to be told more of: steps in three parts, specified layers, measured ones."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_zero.errors import PipelineError
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.pipeline.stages.specs import LayerSpec, TiedLayerSpec
from tests.contracts.test_pipeline_programs import Program, _fit, _loader, _pipeline
from tests.lightning_programs import seeded, trainer
from tests.references import VOCAB, WIDTH, Block, TinyGPT
from tests.sampling import sample
from tests.worlds import run


class Carries(nn.Module):
    """Hands on what it does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x), start


class Scaled(Program):
    """Divides by a value that is read on the way, and takes its embeddings around the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyGPT(blocks=[Carries() for _ in range(4)])

    def start(self, batch: Any, batch_idx: int) -> tuple[Tensor, Tensor]:
        embedded = self.net.embedding(batch[0])
        embedded = embedded / embedded.detach().abs().max().item()
        return embedded, embedded

    def end(self, output: tuple[Tensor, Tensor], batch: Any, batch_idx: int) -> Tensor:
        logits = self.net.head(self.net.norm(output[0] + output[1]))
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        state = self.start(batch, batch_idx)
        for block in self.net.blocks:
            state = block(*state)
        return self.end(state, batch, batch_idx)

    validation_step = training_step


class InParts(Scaled):
    pipeline_step = Scaled.start
    pipeline_loss = Scaled.end


class HalfInParts(Scaled):
    pipeline_step = Scaled.start


def _fit_in_pieces(rank: int, world: int, make: Any, options: dict[str, Any], batch: int) -> Any:
    strategy = ZeroStrategy(**options)
    copies = world // (strategy.pipeline.stages if strategy.pipeline else 1)
    lightning = trainer(rank, world, strategy, max_epochs=2, accumulate_grad_batches=2 * (8 // batch))
    module = seeded(make)
    lightning.fit(module, _loader(copies, rank % copies, batch), _loader(copies, rank % copies, 8))
    logged = {key: float(value) for key, value in lightning.callback_metrics.items()}
    return {name: strategy.full_param(param) for name, param in module.named_parameters()}, logged


@pytest.mark.parametrize("copies", sample((1, 2), 1))
@pytest.mark.parametrize("zero", sample((1, 3), 3))
@pytest.mark.parametrize("schedule", sample(("gpipe", "1f1b", "interleaved_1f1b", "zb_h1"), "interleaved_1f1b"))
def test_a_step_in_three_parts_trains_as_without_a_pipeline(schedule: str, zero: int, copies: int) -> None:
    expected, logged = run(_fit_in_pieces, copies, Scaled, {"stage": 0}, 4)[0]
    for weights, numbers in run(
        _fit_in_pieces, 2 * copies, InParts, {**_pipeline(schedule=schedule), "stage": zero}, 8
    ):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)
        assert numbers.keys() == logged.keys()


class NoTensor(InParts):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[1].register_forward_hook(lambda module, args, output: (*output, 3))


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (Scaled, PipelineError, "or write `pipeline_step` and `pipeline_loss`"),
    (HalfInParts, ValueError, "`HalfInParts` has `pipeline_step` and no `pipeline_loss`"),
    (NoTensor, PipelineError, "`net.blocks.1` returned Tensor, Tensor, int"),
]


@pytest.mark.parametrize("case", sample(REFUSED, REFUSED[0]), ids=lambda case: case[0].__name__)
def test_steps_in_parts_that_cannot_be_are_refused(case: Any) -> None:
    make, error, message = case
    with pytest.raises(error, match=re.escape(message)):
        run(_fit, 2, make, _pipeline(), {}, True)


# -- Specified layers --------------------------------------------------------------------------------------------------

BUILT: list[bool] = []  # whether a block was built without memory, on this rank


def block() -> nn.Module:
    made = Block()
    BUILT.append(next(made.parameters()).is_meta)
    return made


def as_head(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight)


class Specified(Program):
    """A decoder in one list, from the embedding to the head that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None
        self.layers = nn.ModuleList([
            TiedLayerSpec("embedding", nn.Embedding, VOCAB, WIDTH),
            *(LayerSpec(block) for _ in range(4)),
            LayerSpec(nn.LayerNorm, WIDTH),
            TiedLayerSpec("embedding", nn.Embedding, VOCAB, WIDTH, forward_fn=as_head),
        ])  # fmt: skip

    def logits(self, ids: Tensor) -> Tensor:
        for layer in self.layers:
            ids = layer(ids)
        return ids


def _fit_specified(rank: int, world: int, options: dict[str, Any], save: str | None = None, load: Any = None) -> Any:
    BUILT.clear()
    strategy = ZeroStrategy(**options)
    copies = world // (strategy.pipeline.stages if strategy.pipeline else 1)
    lightning = trainer(rank, world, strategy, max_epochs=1 if load is None else 2, accumulate_grad_batches=2)
    module = seeded(Specified)
    lightning.fit(module, _loader(copies, rank % copies), ckpt_path=load)
    if save is not None:
        lightning.save_checkpoint(save)
    return {name: strategy.full_param(param) for name, param in module.named_parameters()}, list(BUILT)


@pytest.mark.parametrize("zero", sample((1, 3), 3))
@pytest.mark.parametrize("copies", sample((1, 2), 1))
def test_specified_layers_train_as_the_whole_model_and_are_built_on_their_stage(
    zero: int, copies: int, tmp_path: Any
) -> None:
    path = str(tmp_path / "whole.ckpt")
    expected, built = run(_fit_specified, copies, {"stage": 0}, path)[0]
    assert built == [False] * 4
    options = {**_pipeline(partition=[3]), "stage": zero}
    for rank, (weights, built) in enumerate(run(_fit_specified, 2 * copies, options)):
        assert weights.keys() == expected.keys()
        assert built.count(True) == 4  # to be looked at
        assert built.count(False) == 2, rank
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)
    further, _ = run(_fit_specified, copies, {"stage": 0}, None, path)[0]
    for weights, _ in run(_fit_specified, 2 * copies, options, None, path):
        for name, value in further.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


# -- Measured layers ---------------------------------------------------------------------------------------------------


class Slow(Block):
    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            time.sleep(0.005)
        return super().forward(x)


class Uneven(Program):
    """Its last two blocks take long."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyGPT(blocks=[Block(), Block(), Block(), Block(), Slow(), Slow()])


def _cut(rank: int, world: int, partition: str, make: Any) -> Any:
    strategy = ZeroStrategy(**_pipeline(partition=partition))
    lightning = trainer(rank, world, strategy, max_epochs=1)
    module = seeded(make)
    lightning.fit(module, _loader(1, 0))
    weights = {name: strategy.full_param(param) for name, param in module.named_parameters()}
    return strategy._steps._split.bounds, weights, torch.rand(()).item()  # type: ignore[union-attr]


CUTS = [("measured", (0, 5, 6)), ("flops", (0, 3, 6))]


@pytest.mark.parametrize("case", sample(CUTS, CUTS[0]), ids=lambda case: case[0])
def test_a_pipeline_is_cut_by_what_layers_cost(case: Any) -> None:
    partition, bounds = case
    even, expected, drawn = run(_cut, 2, "uniform", Uneven)[0]
    assert even == (0, 3, 6)
    for found, weights, after in run(_cut, 2, partition, Uneven):
        assert found == bounds
        assert after == drawn
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


class Scale(LightningModule):
    """Is part of a model, and says that it is on another device until the strategy has moved it."""

    def __init__(self) -> None:
        super().__init__()
        self._device = torch.device("meta")

    def forward(self, x: Tensor) -> Tensor:
        assert self.device.type == "cpu"
        return x


class MadeLate(Uneven):
    def configure_model(self) -> None:
        self.scale = Scale()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.scale(super().training_step(batch, batch_idx))


def test_a_measured_step_finds_the_device_that_it_runs_on() -> None:
    """On a GPU ``self.device`` of modules that ``configure_model`` had made was the CPU while layers were measured."""
    for found, _, _ in run(_cut, 2, "flops", MadeLate):
        assert found == (0, 3, 6)


class OnMeta(Program):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.net = TinyGPT(depth=4)


def _refuse(rank: int, world: int, make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _fit(rank, world, make, _pipeline(partition="measured"), {}, True)


def test_a_model_without_values_cannot_be_measured_and_all_ranks_say_so() -> None:
    run(_refuse, 2, OnMeta, "could not run a step on rank 0: `net.embedding.weight` is on the meta device")
