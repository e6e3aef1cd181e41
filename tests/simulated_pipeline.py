"""Training in pipeline stages, a rank each, on simulated devices or on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.comm.mesh import Mesh, _MeshGroups
from lightning_zero.config import ActivationCheckpointing, Communication, MixedPrecision, Pipeline
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.lightning.pipelined_steps import PipelinedSteps
from lightning_zero.parallel.activation.checkpointing import checkpoint_activations
from lightning_zero.parallel.pipeline.stages.split import split_module
from tests.references import Block, TinyGPT
from tests.simulated_transport import BACKEND

__all__ = ["MODELS", "PipelinedTraining"]

_along: Callable[..., Any] = _MeshGroups._along


def _loss(logits: Tensor, batch: Any) -> Tensor:
    """Return a mean over as many tokens as a micro-batch happens to have."""
    ids, mask = batch
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.masked_fill(mask, -100).flatten())


class Traced(TinyGPT):
    """A model whose step is cut where it calls its blocks."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        return _loss(self(batch[0]), batch)

    validation_step = training_step


class Explicit(TinyGPT):
    """A model with a step in three parts."""

    def pipeline_step(self, batch: Any, index: int) -> Any:
        embedded: Tensor = self.embedding(batch[0])
        return embedded

    def pipeline_loss(self, hidden: Tensor, batch: Any, index: int) -> Tensor:
        return _loss(self.head(self.norm(hidden)), batch)


class CountingBlock(Block):
    """Hands on how often it was called, in a tensor that the next call changes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, 1, 1))

    def forward(self, x: Tensor, before: Tensor) -> Any:  # type: ignore[override]
        self.calls += 1 + before
        return super().forward(x) * (1 + 0.1 * before), self.calls


class Counting(Explicit):
    """A model whose blocks hand on module buffers."""

    def __init__(self, *, depth: int, tied: bool = False) -> None:
        super().__init__(blocks=[CountingBlock() for _ in range(depth)], tied=tied)

    def pipeline_step(self, batch: Any, index: int) -> Any:
        return super().pipeline_step(batch, index), torch.ones(1, 1, 1, device=batch[0].device)

    def pipeline_loss(self, hidden: Any, batch: Any, index: int) -> Tensor:
        loss: Tensor = super().pipeline_loss(hidden[0], batch, index) * hidden[1].mean()
        return loss


MODELS: dict[str, Callable[..., nn.Module]] = {"traced": Traced, "explicit": Explicit, "counting": Counting}


@contextlib.contextmanager
def _transport(device: str) -> Iterator[None]:
    """Let messages between stages go from device to device."""

    def along(groups: Any, lines: Any, backend: str | None = None) -> Any:
        return _along(groups, lines, backend or (BACKEND if device == "cuda" else None))

    with mock.patch.object(_MeshGroups, "_along", along):
        yield


class PipelinedTraining:
    """A model in stages, its optimizer, and what was seen of them."""

    def __init__(
        self,
        device: str,
        precision: MixedPrecision | None,
        *,
        pipeline: Pipeline,
        model: str = "traced",
        tied: bool = False,
        activations: str | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(dist.get_rank())  # the first holder's values count
        self.device = torch.device(device)
        self.precision = precision
        timeout_s = 60.0 if device == "cpu" else 61.0  # groups are lent by it, and have the transport of their device
        with _transport(device):
            self.mesh = Mesh(pipeline.stages, timeout_s)
        self.module = MODELS[model](depth=4, tied=tied).to(device)
        if activations is not None:
            checkpoint_activations(self.module, ActivationCheckpointing(policy=activations))  # type: ignore[arg-type]
        split = split_module(self.module, pipeline)
        self.engine = ZeroEngine(
            units=["Block"],
            device=self.device,
            precision=precision,
            communication=Communication(backend=BACKEND if device == "cuda" else None),
            process_group=self.mesh.copy_group,
            parts_group=self.mesh.stage_group,
            **options,
        )
        self.engine.shard(self.module, split.holders)
        self.steps = PipelinedSteps(
            self.module, self.engine, split=split, pipeline=pipeline, mesh=self.mesh, device=self.device
        )
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self.engine.internals.fits.drop_remote(optimizer)
        self.optimizer = self.engine.attach(optimizer)
        self.seen: list[Tensor] = []

    def backward(self, number: int) -> None:
        """Run forwards and backwards of a batch."""
        loss = self.steps.training_step((self.batch(number), number), context=self.context, scale=1.0, is_first=True)
        self.seen.append(loss.detach())

    def evaluate(self, number: int) -> None:
        """Run a forward of a batch."""
        with torch.no_grad():
            loss = self.steps.evaluation_step("validation_step", (self.batch(number), number), context=self.context)
        if loss is not None:
            self.seen.append(loss)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Return tokens and which of them do not count, the same on all stages."""
        generator = torch.Generator().manual_seed(100 * self.mesh.copy + number)
        ids = torch.randint(0, 11, (8, 5), generator=generator)
        return ids.to(self.device), (torch.rand(8, 5, generator=generator) < 0.3).to(self.device)

    def context(self) -> Any:
        """Return what is around every micro-batch."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision is not None)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        """Return all parameters. Collective: all ranks."""
        return [self.engine.full_param(param) for param in self.module.parameters()]
