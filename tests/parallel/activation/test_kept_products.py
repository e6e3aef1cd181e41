"""Results that selective checkpointing keeps: copied before the program writes into them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import ActivationCheckpointing
from lightning_zero.parallel.activation.checkpointing import checkpoint_activations
from lightning_zero.parallel.activation.kept_products import is_product
from tests.worlds import seed


def _adds(out: Tensor, bias: Tensor) -> Tensor:
    out.add_(bias)
    return out.tanh()


def _adds_behind_a_use(out: Tensor, bias: Tensor) -> Tensor:
    early = torch.tanh(out + 1)  # is computed again from the first values
    out.mul_(bias).add_(early.detach())
    return out * early


def _writes_a_view(out: Tensor, bias: Tensor) -> Tensor:
    out.view(-1, 2)[:, :1] += 1
    out[0] = bias
    return out.exp()


def _writes_out(out: Tensor, bias: Tensor) -> Tensor:
    with torch.no_grad():
        torch.add(out, bias, out=out)
    return out.sigmoid()


class Writes(nn.Module):
    """Writes into the result of a product."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.write = write
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.write(x @ self.weight, self.bias) @ self.weight


@pytest.mark.parametrize("write", [_adds, _adds_behind_a_use, _writes_a_view, _writes_out])
def test_results_that_are_written_in_place_go_backward_as_without_checkpointing(
    write: Callable[[Tensor, Tensor], Tensor],
) -> None:
    gradients = []
    for is_checkpointed in (False, True):
        seed(1)
        model = nn.Sequential(Writes(write), Writes(write))
        if is_checkpointed:
            checkpoint_activations(model, ActivationCheckpointing(modules=["Writes"], policy="selective"))
        model(torch.randn(3, 4)).sum().backward()  # type: ignore[no-untyped-call]
        gradients.append({name: param.grad for name, param in model.named_parameters() if param.grad is not None})
    plain, checkpointed = gradients
    assert checkpointed.keys() == plain.keys()
    assert all(torch.equal(checkpointed[name], value) for name, value in plain.items())


def test_products_are_those_of_matrices_and_attention() -> None:
    assert is_product(torch.ops.aten.mm.default)
    assert not is_product(torch.ops.aten.add.Tensor)
