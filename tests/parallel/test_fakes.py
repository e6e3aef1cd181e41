"""What modules that do not compute return."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.fakes import Fakes
from lightning_zero.parallel.sources import is_fake


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
    first += 1.0
    fakes.begin()
    changed = call(fakes, module, torch.ones(2, 3))
    assert changed is not first
    assert changed.requires_grad


class Leaves(nn.Module):
    """Leaves in itself what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("anew", torch.zeros(()))
        self.calls = 0
        self.aux: Tensor | None = None
        self.written = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.count += x.mean()
        self.anew = self.anew + x.mean()
        self.written.add_(x.mean())
        self.aux = x.mean()
        self.calls += 1
        self.new = [x.sum()]
        return x


def test_what_a_passed_module_would_leave_is_shown_as_fakes_and_put_back() -> None:
    module = Leaves()
    before = dict(vars(module)), dict(module._buffers)
    fakes = Fakes({id(module): "block"}, [], nullcontext)
    for _ in range(2):  # the second is remembered
        fakes.begin()
        call(fakes, module, torch.ones(2, 3))
        assert all(map(is_fake, (module.count, module.anew, module.aux, module.written, module.new[0])))
        fakes.end()
        assert (dict(vars(module)), dict(module._buffers)) == before
        assert module.count == 0
        assert module.written == 0


def test_hooks_of_the_program_run_in_every_call() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5))
    seen: list[Tensor] = []
    module[0].register_forward_hook(lambda child, args, output: seen.append(output))
    module.register_forward_hook(lambda child, args, output: output[:, :2])
    fakes = Fakes({id(module): "block"}, [], nullcontext)
    for number in range(3):
        fakes.begin()
        assert call(fakes, module, torch.ones(2, 3)).shape == (2, 2)
        assert len(seen) == number + 1
        assert is_fake(seen[-1])


class Takes(nn.Module):
    def forward(self, x: Tensor, cache: object) -> Tensor:
        return x + 1.0


def test_calls_with_objects_of_one_step_are_not_kept() -> None:
    """A cache of keys and values is a new object in every step: what was kept of it grew without end."""
    module = Takes()
    fakes = Fakes({id(module): "block"}, [], nullcontext)
    for _ in range(5):
        fakes.begin()
        fakes.outputs(module, (torch.ones(2), object()), {})
    assert len(fakes._calls) == 0
    for width in range(1, 6):
        fakes.begin()
        fakes.outputs(module, (torch.ones(width), "none"), {})
    assert len(fakes._calls) == 5


def test_calls_of_which_shapes_change_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zero.parallel.fakes._MOST_CALLS", 3)
    module = nn.Linear(3, 5)
    fakes = Fakes({id(module): "layer"}, [], nullcontext)
    for number in range(1, 9):
        fakes.begin()
        assert call(fakes, module, torch.ones(number, 3)).shape == (number, 5)
    assert len(fakes._calls) == 3


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda real, fake: real.add_(fake),
    "slice": lambda real, fake: real[0].copy_(fake[0]),
    "item": lambda real, fake: real.__setitem__(0, fake[0]),
    "out": lambda real, fake: torch.add(fake, 1.0, out=real),
    "foreach": lambda real, fake: torch._foreach_add_([real], [fake]),
    "data": lambda real, fake: real.data.copy_(fake),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_fake_is_not_written_into_a_tensor_with_values(write: str) -> None:
    module = nn.Linear(3, 5)
    fakes = Fakes({id(module): "layer"}, [], nullcontext)
    fakes.begin()
    fake, real = call(fakes, module, torch.ones(2, 3)).detach(), torch.zeros(2, 5)
    with pytest.raises(PipelineError, match="writes a value of an earlier pipeline stage"):
        WRITES[write](real, fake)
    assert is_fake(fake.add_(real))
