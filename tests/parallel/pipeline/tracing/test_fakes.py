"""What modules that do not compute return."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import ActivationCheckpointing
from lightning_zero.errors import PipelineError
from lightning_zero.parallel.activation.checkpointing import checkpoint_activations
from lightning_zero.parallel.pipeline.stages.sources import Source, is_fake
from lightning_zero.parallel.pipeline.tracing.fakes import Fakes


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
    monkeypatch.setattr("lightning_zero.parallel.pipeline.tracing.fakes._MOST_CALLS", 3)
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


class Counts(nn.Linear):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        seen.append(1)
        return super().forward(x)


seen: list[int] = []


@pytest.mark.parametrize(("has_stand_in", "times"), [(False, 1), (True, 3)])
def test_a_checkpointed_module_is_run_once_unless_somebody_else_stands_in_for_its_forward(
    has_stand_in: bool, times: int
) -> None:
    seen.clear()
    module = nn.Sequential(Counts())
    if has_stand_in:
        forward = module[0].forward
        module[0].forward = lambda x: forward(x)
    checkpoint_activations(module, ActivationCheckpointing(modules=["Counts"]))
    fakes = Fakes({id(module): "layer"}, [], nullcontext)
    for _ in range(3):
        fakes.begin()
        assert call(fakes, module, torch.ones(2, 3)).shape == (2, 5)
    assert len(seen) == times


class Runs(nn.Module):
    """Two layers, of which the program taps one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        seen.append(1)
        y: Tensor = self.second(self.first(x).tanh())
        return y


def _run_with_hook(fakes: Fakes, module: nn.Module, tapped: list[Any], rows: int = 2) -> Tensor:
    """Run with a hook that is registered for this run alone, as programs do."""
    handle = module.first.register_forward_hook(lambda child, args, output: tapped.append((child, args[0], output)))
    x = torch.ones(rows, 3)
    output = call(fakes, module, x)
    handle.remove()
    assert tapped[-1][0] is module.first
    assert tapped[-1][1] is x
    return output


def test_a_module_with_hooks_is_run_once_per_shape_and_its_hooks_every_time() -> None:
    seen.clear()
    module, tapped = Runs(), []
    fakes = Fakes({id(module): "blocks.0"}, [], nullcontext)
    for step in range(6):
        fakes.begin()
        assert _run_with_hook(fakes, module, tapped, rows=2 + step % 2).shape == (2 + step % 2, 5)
        assert (len(tapped), tapped[-1][2].shape) == (step + 1, (2 + step % 2, 3))
        assert is_fake(tapped[-1][2])
        assert tapped[-1][2].requires_grad
    assert len(seen) == 2


def test_hooks_are_given_what_their_stage_has_sent_also_where_the_forward_is_not_run() -> None:
    module, tapped = Runs(), []
    fakes = Fakes({id(module): "blocks.0"}, [], nullcontext)
    wanted = Source("blocks.0.first", 0, None, 0)
    for step in range(3):
        sent = torch.full((2, 3), float(step))
        fakes.begin(fetch=lambda source, sent=sent: sent if source == wanted else None)
        _run_with_hook(fakes, module, tapped)
        assert tapped[-1][2] is sent


@pytest.mark.parametrize("how", ["returns", "leaves", "reads", "is-given-an-object"])
def test_modules_whose_hooks_do_more_than_watch_are_run_every_time(how: str) -> None:
    seen.clear()
    module = Runs()

    def hook(child: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if how == "leaves":
            child.kept = output
        if how == "reads":
            output.sum().item()
        return output * 2 if how == "returns" else None

    if how == "is-given-an-object":
        module.register_forward_pre_hook(lambda child, args, kwargs: None, with_kwargs=True)
        module.first.register_forward_pre_hook(lambda child, args: None)
        module.first.forward = lambda x, forward=module.first.forward: forward(x)
    module.first.register_forward_hook(hook)
    fakes = Fakes({id(module): "blocks.0"}, [], nullcontext)
    for _ in range(3):
        fakes.begin()
        call(fakes, module, torch.ones(2, 3))
        fakes.end()
    assert len(seen) == 3 * (1 + (how == "reads"))


def test_a_hook_may_begin_to_return_values() -> None:
    seen.clear()
    module, returned, times = Runs(), [], []

    def first(child: nn.Module, args: Any, output: Tensor) -> None:
        times.append(1)

    module.first.register_forward_hook(first)
    module.second.register_forward_hook(lambda child, args, output: output.new_ones(2, 7) if returned else None)
    fakes = Fakes({id(module): "blocks.0"}, [], nullcontext)
    widths = []
    for step in range(6):
        returned[:] = [True] * (step in (2, 3))
        fakes.begin()
        widths.append(call(fakes, module, torch.ones(2, 3)).shape[1])
        assert len(times) == step + 1
    assert widths == [5, 5, 7, 7, 5, 5]
    assert len(seen) == 1 + 2 + 1


def test_a_hook_may_read_a_value_now_and_then() -> None:
    module, steps = Runs(), []

    def hook(child: nn.Module, args: Any, output: Tensor) -> None:
        steps.append(1)
        if len(steps) % 3 == 0:
            output.mean().item()

    module.first.register_forward_hook(hook)
    fakes = Fakes({id(module): "blocks.0"}, [], nullcontext)
    for _ in range(7):
        fakes.begin()
        assert call(fakes, module, torch.ones(2, 3)).shape == (2, 5)


class Tells(nn.Module):
    """Leaves a number for hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rows = nn.Linear(3, 3), -1

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        self.rows = x.shape[0]
        output: Tensor = self.linear(x)
        return output if y is None else output + y


def test_hooks_find_attributes_that_the_forward_has_set() -> None:
    module, found = Tells(), []
    module.register_forward_hook(lambda child, args, output: found.append(child.rows))
    fakes = Fakes({id(module): "blocks.0"}, [], nullcontext)
    for _ in range(3):
        fakes.begin()
        call(fakes, module, torch.ones(2, 3))
    assert found == [2, 2, 2]


def test_hooks_are_given_the_arguments_of_their_call() -> None:
    class Sums(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x + y)

    module, found = Sums(3, 3), []
    module.register_forward_hook(lambda child, args, output: found.append(args))
    fakes = Fakes({id(module): "blocks.0"}, [], nullcontext)
    x, y = torch.ones(2, 3), torch.zeros(2, 3)
    for args in ((x, x), (x, x), (x, y), (x, y)):
        fakes.begin()
        fakes.outputs(module, args, {})
        assert [id(one) for one in found[-1]] == [id(one) for one in args]
