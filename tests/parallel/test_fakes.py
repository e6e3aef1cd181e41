"""What modules that do not compute return."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from lightning_zero.parallel.fakes import Fakes, is_fake


def call(fakes: Fakes, module: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = fakes.outputs(module, (x,), {})
    return output


def test_a_fake_has_the_shape_and_no_values() -> None:
    module = nn.Linear(3, 5)
    fakes = Fakes({id(module): "layer"}, [], nullcontext)
    fakes.begin()
    output = call(fakes, module, torch.ones(2, 3))
    assert is_fake(output)
    assert (tuple(output.shape), output.dtype, output.requires_grad) == ((2, 5), torch.float32, True)
    zeros = fakes.zeros(module, (torch.ones(2, 3),), {})
    assert torch.equal(zeros, torch.zeros(2, 5))
    assert zeros.untyped_storage().nbytes() == 4


def test_calls_of_a_run_have_fakes_of_their_own_and_the_next_run_has_them_again() -> None:
    """What is received replaces fakes one by one: two calls with one fake would get one value."""
    module = nn.Linear(3, 5)
    fakes = Fakes({id(module): "layer"}, [], nullcontext)
    fakes.begin()
    first, second = (call(fakes, module, torch.ones(2, 3)) for _ in range(2))
    assert first is not second
    fakes.begin()
    again, other = (call(fakes, module, torch.ones(2, 3)) for _ in range(2))
    assert again is first
    assert other is second
    first.requires_grad_(False)
    fakes.begin()
    changed = call(fakes, module, torch.ones(2, 3))
    assert changed is not first
    assert changed.requires_grad
