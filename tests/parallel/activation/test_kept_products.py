"""Results that selective checkpointing keeps: copied before the program writes into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import ZeroEngine
from lightning_zero.config import ActivationCheckpointing, Communication
from lightning_zero.parallel.activation.checkpointing import checkpoint_activations
from lightning_zero.parallel.activation.kept_products import is_product
from tests.worlds import run, seed


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


class Compiled(nn.Module):
    """Calls a compiled function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x @ self.weight)


def test_functions_inside_of_a_checkpointed_module_stay_compiled() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(Compiled(torch.compile(lambda x: torch.tanh(x) + 1, backend=backend)))
    checkpoint_activations(model, ActivationCheckpointing(modules=["Compiled"], policy="selective"))
    model(torch.randn(3, 4)).sum().backward()  # type: ignore[no-untyped-call]
    assert len(graphs) > 0


class Deep(nn.Module):
    """Two layers, each a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def _units_inside(rank: int, world: int, policy: Any) -> list[Tensor]:
    seed(1)
    model = nn.Sequential(*(Deep() for _ in range(4)))
    checkpoint_activations(model, ActivationCheckpointing(modules=["Deep"], policy=policy))
    engine = ZeroEngine(3, units=["Linear"], communication=Communication(prefetch=4, timeout_s=30.0))
    engine.shard(model)
    optimizer = engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        with engine.scope("training_step"):
            loss = model(torch.randn(2, 4, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return [engine.full_param(param) for param in model.parameters()]


def test_operations_of_the_engine_are_no_part_of_a_recomputation() -> None:
    """Units inside of checkpointed modules, some of which a recomputation gathers at another place."""
    expected, found = (run(_units_inside, 2, policy)[0] for policy in ("full", "selective"))
    assert all(map(torch.equal, found, expected))


def test_products_are_those_of_matrices_and_attention() -> None:
    assert is_product(torch.ops.aten.mm.default)
    assert not is_product(torch.ops.aten.add.Tensor)
