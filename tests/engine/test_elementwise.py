"""Which optimizers are right on segments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.engine.elementwise import is_elementwise


class _SignSgd(Optimizer):
    """Somebody's own, right on segments."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad.sign(), alpha=0.1)


class _Whitened(_SignSgd):
    """Somebody's own, which needs the whole gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad / param.grad.norm())


RIGHT: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, weight_decay=0.1),
    "AdamW-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW-foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW-capturable": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.1),
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.9),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "own": _SignSgd,
}
WRONG: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "LBFGS": torch.optim.LBFGS,
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
    "SparseAdam": torch.optim.SparseAdam,
    "own": _Whitened,
}


@pytest.mark.parametrize("name", list(RIGHT))
def test_elementwise_optimizers_are_recognised(name: str) -> None:
    assert is_elementwise(RIGHT[name]([nn.Parameter(torch.ones(4, 3))]))


@pytest.mark.parametrize("name", list(WRONG))
def test_optimizers_that_need_whole_matrices_are_recognised(name: str) -> None:
    assert not is_elementwise(WRONG[name]([nn.Parameter(torch.ones(4, 3))]))


def test_the_trial_leaves_the_optimizer_as_it_was() -> None:
    param = nn.Parameter(torch.ones(4, 3))
    optimizer = torch.optim.Adagrad([param], lr=0.5)
    before = copy.deepcopy(optimizer.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert is_elementwise(optimizer)
    assert torch.equal(param, torch.ones(4, 3))
    after = optimizer.state_dict()
    assert before["param_groups"][0]["lr"] == after["param_groups"][0]["lr"]
    assert torch.equal(before["state"][0]["sum"], after["state"][0]["sum"])
    assert before["state"][0]["step"] == after["state"][0]["step"]
    assert scheduler.last_epoch == 0


def test_the_trial_calls_no_hooks_of_the_user() -> None:
    called = []
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(4, 3))])
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    assert is_elementwise(optimizer)
    assert not called
