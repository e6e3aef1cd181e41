"""Operations on whole values are found among the operations of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine.optim.whole_operations import WholeOperations

ELEMENTWISE: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda grad: grad.mul(2).add_(grad, alpha=3).sqrt().clamp_(min=1),
    "reversed": lambda grad: 1 - (1 / (2 ** (1 - grad))),
    "shifts": lambda grad: (((grad.int() << 1) >> 1) << torch.ones(4, dtype=torch.int)).__irshift__(1),
    "log-sigmoid": nn.functional.logsigmoid,
    "foreach": lambda grad: torch._foreach_addcdiv_([grad], [grad], [grad + 1], [0.5]),
    "views": lambda grad: grad.view(-1).reshape(3, 4).t().unsqueeze(0).to(torch.float64).clone(),
    "masks": lambda grad: grad.masked_fill_(grad > 1, 1).isfinite(),
    "written-masks": lambda grad: grad.__setitem__(grad > 1, 0.5),
    "where": lambda grad: torch.where(grad.isnan(), 0, grad),
    "lerp": lambda grad: torch.zeros_like(grad).lerp_(grad, 0.1),
    "maximum": lambda grad: torch.maximum(grad, -grad),
    "maximum-of-stacked": lambda grad: torch.stack([grad, -grad]).amax(0),
    "counter": lambda grad: grad.new_zeros(()).add_(1).item(),
    "other-values": lambda grad: torch.ones(5).sum().item(),
}
WHOLE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "norm": (lambda grad: grad.norm(), "norm"),
    "foreach-norm": (lambda grad: torch._foreach_norm([grad.neg()]), "foreach_norm"),
    "any": (lambda grad: grad.isnan().any(), "any"),
    "mean-of-rows": (lambda grad: grad.mean(1, keepdim=True), "mean"),
    "dot": (lambda grad: torch.dot(grad.view(-1), grad.view(-1)), "dot"),
    "matmul": (lambda grad: grad @ grad.mT, "matmul"),
    "sort": (lambda grad: grad.reshape(-1).sort(), "sort"),
    "element": (lambda grad: float(grad[0, 0]), "item"),
    "equal": (lambda grad: torch.equal(grad, grad + 0), "equal"),
    "of-a-sum": (lambda grad: torch.zeros(3, 4).add_(grad).sum(), "sum"),
}


def found(act: Callable[[Tensor], Any]) -> str | None:
    grad = torch.rand(3, 4)
    operations = WholeOperations()
    operations.follow([grad])
    with operations:
        act(grad)
    return operations.found


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_operations_by_element_are_let_pass(name: str) -> None:
    assert found(ELEMENTWISE[name]) is None


@pytest.mark.parametrize("name", WHOLE)
def test_operations_on_whole_values_are_found(name: str) -> None:
    act, operation = WHOLE[name]
    assert found(act) == operation
