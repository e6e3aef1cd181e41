"""A gradient that is assigned before a backward is added to, as in PyTorch, or refused where ranks hold other sums."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_expert_parallel import WORLD, Case, Program, _loader
from tests.contracts.test_tensor_parallel import Program as TensorProgram
from tests.contracts.test_tensor_parallel import Samples
from tests.lightning_programs import assert_equal, trainer, weights
from tests.sampling import sample
from tests.worlds import run


class Assigns(Program):
    """Assigns gradients before its backwards; ``names`` says of which parameters."""

    names = ""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        for name, param in self.named_parameters():
            if self.names in name:
                param.grad = torch.full(param.shape, 0.1)


class AssignsRouters(Assigns):
    """Every rank has these whole."""

    names = "router"


def _fit(rank: int, world: int, make: type[Assigns], size: int, stage: int) -> tuple[str, dict[str, torch.Tensor]]:
    strategy = ZeroStrategy(stage=stage, expert_parallel=size, timeout=30)  # type: ignore[arg-type]
    fitted = trainer(rank, world, strategy, max_steps=2)
    try:
        fitted.fit(make(Case(size, stage)), _loader(rank, world))
    except RuntimeError as error:
        return str(error), {}
    return "", weights(fitted)


@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 2), ids="stage{}".format)
def test_gradients_of_experts_that_are_assigned_before_a_backward_are_refused(stage: int) -> None:
    for error, _ in run(_fit, WORLD, Assigns, 2, stage):
        assert re.search("experts.*cannot be assigned before a backward", error), error


@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 2), ids="stage{}".format)
def test_gradients_of_whole_parameters_beside_experts_are_added_to(stage: int) -> None:
    (error, expected), *_ = run(_fit, WORLD, AssignsRouters, 1, stage)
    assert not error
    for error, found in run(_fit, WORLD, AssignsRouters, 2, stage):
        assert not error, error
        assert_equal(found, expected, 1e-6)


class AssignsNorms(TensorProgram):
    """Assigns gradients of parameters that are not cut: with sequence parallelism a rank has summands of them."""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        for name, param in self.named_parameters():
            if "ln1" in name:
                param.grad = torch.full(param.shape, 0.1)


def _fit_tensors(rank: int, world: int, stage: int) -> str:
    strategy = ZeroStrategy(stage=stage, tensor_parallel={"size": 2, "sequence": True})  # type: ignore[arg-type]
    fitted = trainer(rank, world, strategy, max_steps=1)
    try:
        fitted.fit(AssignsNorms("hand-separate"), DataLoader(Samples("plain"), batch_size=2))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 1), ids="stage{}".format)
def test_gradients_of_norms_that_are_assigned_before_a_backward_are_refused(stage: int) -> None:
    for error in run(_fit_tensors, 2, stage):
        assert re.search("ln1.*cannot be assigned before a backward", error), error
