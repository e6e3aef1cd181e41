"""Writes through ``p.data`` inside a step, a forward and ``gathered`` count at every stage, as in a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.config import MixedPrecision
from lightning_zero.engine.buffers.parameter import _HANDED_OUT, handed_out
from lightning_zero.engine.engine import ZeroEngine
from tests import worlds

Scope = Callable[[], AbstractContextManager[None]]


class Block(nn.Module):
    def __init__(self, clamps: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.clamps = clamps

    def forward(self, x: Tensor) -> Tensor:
        if self.clamps:
            self.scale.data.clamp_(0.0, 0.9)
            self.linear.weight.data.mul_(0.9)
        return self.linear(x).tanh() * self.scale


class Student(nn.Module):
    """Blocks, and a teacher that follows them."""

    def __init__(self, *, clamps: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(clamps) for _ in range(2))
        self.head = nn.Linear(5, 3)
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        aim = x
        for block, other in zip(self.blocks, self.teacher, strict=True):
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
            aim = other(aim)
        return F.mse_loss(x, aim.detach()) + self.head(x).square().mean()


def _clamp_all(module: Student, loss: Tensor) -> None:
    for param in module.parameters():
        param.data.clamp_(-0.2, 0.2)


def _clamp_one(module: Student, loss: Tensor) -> None:
    module.blocks[1].linear.bias.data[2] = 0.5  # type: ignore[union-attr, index]
    module.head.weight.data.mul_(0.5)


def _follow(module: Student, loss: Tensor) -> None:
    for one, other in zip(module.blocks.parameters(), module.teacher.parameters(), strict=True):
        other.data.mul_(0.5).add_(one.data, alpha=0.5)


def _through_a_list(module: Student, loss: Tensor) -> None:
    views = [param.data for param in module.blocks.parameters()]
    loss = loss + 0.0 * module.head.weight.sum()
    for view in views:
        view.view(-1)[:1].add_(0.125)


def _nothing(module: Student, loss: Tensor) -> None:
    pass


WRITES: dict[str, Any] = {
    "clamp-all": (_clamp_all, {}),
    "clamp-one": (_clamp_one, {}),
    "follow": (_follow, {}),
    "list": (_through_a_list, {}),
    "forward": (_nothing, {"clamps": True}),
    "recomputed": (_clamp_one, {"recomputes": True}),
}


def _train(module: Student, write: Callable[[Student, Tensor], None], optimizer: Any, scope: Scope) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        with scope():
            write(module, torch.zeros(()))
            loss = module(torch.randn(4, 5))
            loss.backward()
            losses.append(loss.item())
            write(module, loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _writes_in_steps(rank: int, world: int, stage: int, options: dict[str, Any]) -> None:
    for name, (write, arguments) in WRITES.items():
        plain = Student(**arguments)
        optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1, momentum=0.5)
        expected = _train(plain, write, optimizer, nullcontext)
        module = Student(**arguments)
        engine = ZeroEngine(stage, units=Block, **options)
        engine.shard(module)
        trained = [p for p in module.parameters() if p.requires_grad]
        attached: Any = engine.attach(torch.optim.SGD(trained, lr=0.1, momentum=0.5))
        found = _train(module, write, attached, lambda engine=engine: engine.scope("training_step"))  # type: ignore[misc]
        engine.unshard()
        assert found == pytest.approx(expected, abs=1e-6), name
        for (key, one), other in zip(plain.named_parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(other, one, msg=lambda text, at=(name, key): f"{at}: {text}")


@pytest.mark.parametrize(
    ("stage", "options"),
    [(2, {}), (3, {}), (3, {"offload": "cpu"})],
    ids=["stage2", "stage3", "stage3-offload"],
)
def test_a_write_through_data_inside_a_step_counts(stage: int, options: dict[str, Any]) -> None:
    worlds.run(_writes_in_steps, 2, stage, options)


def _masters(rank: int, world: int) -> None:
    module = Student()
    engine = ZeroEngine(3, units=Block, precision=MixedPrecision(compute_dtype=torch.bfloat16))
    engine.shard(module)
    before = engine.full_param(module.blocks[0].linear.weight)  # type: ignore[union-attr, arg-type]
    told = pytest.warns(RuntimeWarning, match="computes in 16 bits") if rank == 0 else nullcontext()
    with told, engine.scope("training_step"):
        module.blocks[0].linear.weight.data[0] = 0.25  # type: ignore[union-attr, index]
    after = engine.full_param(module.blocks[0].linear.weight)  # type: ignore[union-attr, arg-type]
    assert torch.equal(after[0], torch.full((5,), 0.25))
    assert torch.equal(after[1:], before[1:])  # nothing else is rounded


def test_a_write_through_data_into_a_shard_of_16_bits_reaches_the_master() -> None:
    worlds.run(_masters, 2)


def _gathered(rank: int, world: int) -> None:
    module = Student()
    engine = ZeroEngine(3, units=Block)
    engine.shard(module)
    with pytest.raises(RuntimeError, match="was changed inside `gathered`"), engine.gathered(module):
        module.head.bias.data.zero_()
    with engine.gathered(module):
        assert float(module.head.bias.data.sum()) != 5.0


def test_a_write_through_data_inside_gathered_needs_write() -> None:
    worlds.run(_gathered, 2)


class Looking(Student):
    """Reads or drops gradients inside of its forward."""

    def __init__(self, *, drops: bool) -> None:
        super().__init__()
        self.drops = drops
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.drops:
            self.zero_grad()
        else:
            self.seen.append(self.head.weight.grad is not None)
        return super().forward(x)


def _gradients_in_forward(rank: int, world: int, stage: int) -> None:
    for drops in (False, True):
        grads, seen = [], []
        for is_plain in (True, False):
            module = Looking(drops=drops)
            engine = ZeroEngine(stage, units=Block)
            if not is_plain:
                engine.shard(module)
            torch.manual_seed(1)
            for _ in range(2):
                module(torch.randn(4, 5)).backward()
            grad = module.blocks[0].linear.weight.grad if is_plain else engine.full_grad(module.blocks[0].linear.weight)  # type: ignore[union-attr, arg-type]
            grads.append(grad)
            seen.append(module.seen)
        torch.testing.assert_close(grads[1], grads[0])
        assert seen[0] == seen[1]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_are_read_and_dropped_inside_of_a_forward(stage: int) -> None:
    worlds.run(_gradients_in_forward, 2, stage)


def _decay(param: nn.Parameter) -> None:
    param.data.mul_(1.0 - 0.5 * float(param.grad.norm() > 0))  # type: ignore[union-attr]


def _descend(param: nn.Parameter) -> None:
    param.data.add_(param.grad, alpha=-0.5)  # type: ignore[arg-type]


def _subtract(param: nn.Parameter) -> None:
    param.data -= 0.5 * param.grad  # type: ignore[operator]


def _subtract_twice(param: nn.Parameter) -> None:
    for _ in range(2):
        param.data -= 0.25 * param.grad  # type: ignore[operator]
    param.data.clamp_(-3.0, 3.0)


BY_HAND: dict[str, Callable[[nn.Parameter], None]] = {
    "decay": _decay,
    "descend": _descend,
    "subtract": _subtract,
    "twice": _subtract_twice,
}


def _by_hand(module: Student, change: Callable[[nn.Parameter], None], optimizer: Any, *, reads_first: bool) -> None:
    trained = [param for param in module.parameters() if param.requires_grad]
    torch.manual_seed(1)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            module(torch.randn(4, 5)).backward()
        grads = [param.grad for param in trained] if reads_first else []
        for param in trained:
            change(param)
        if step == 1:
            optimizer.step()
        grads.clear()
        optimizer.zero_grad()


def _window_opens_behind_data(rank: int, world: int, stage: int, options: dict[str, Any]) -> None:
    for name, change in BY_HAND.items():
        found = []
        for reads_first in (False, True):
            module = Student()
            engine = ZeroEngine(stage, units=Block, **options)
            engine.shard(module)
            trained = [param for param in module.parameters() if param.requires_grad]
            optimizer: Any = engine.attach(torch.optim.SGD(trained, lr=0.1))
            _by_hand(module, change, optimizer, reads_first=reads_first)
            found.append([engine.full_param(param) for param in module.parameters()])
            engine.close()
        for (key, _), one, other in zip(module.named_parameters(), *found, strict=True):
            assert torch.equal(one, other), (name, key)


BF16 = MixedPrecision(compute_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("stage", "options"),
    [(0, {"precision": BF16}), (1, {"precision": BF16}), (2, {"offload": "cpu"}), (1, {})],
    ids=["stage0-bf16", "stage1-bf16", "stage2-offload", "stage1"],
)
def test_a_write_through_data_that_was_read_before_the_gradient_counts(stage: int, options: dict[str, Any]) -> None:
    worlds.run(_window_opens_behind_data, 2, stage, options)


def _two_writes(rank: int, world: int) -> None:
    module = Student()
    engine = ZeroEngine(1, units=Block, precision=BF16)
    engine.shard(module)
    engine.attach(torch.optim.SGD(module.head.parameters(), lr=0.1))
    with torch.autocast("cpu", torch.bfloat16):
        module(torch.randn(4, 5)).backward()
    weight = module.head.weight
    before = weight.data
    assert weight.grad is not None
    before.mul_(0.5)
    weight.data.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"`.data` of parameter `head.weight` was read before a read of `p.grad`"):
        module(torch.randn(4, 5))
    engine.close()


def test_writes_through_data_of_before_and_behind_the_read_of_the_gradient_are_refused() -> None:
    worlds.run(_two_writes, 2)


def _two_writes_without_elements(rank: int, world: int) -> None:
    module = Student()
    engine = ZeroEngine(2, units=Block, offload="cpu")
    engine.shard(module)
    engine.attach(torch.optim.SGD(module.head.parameters(), lr=0.1))
    module(torch.randn(4, 5)).backward()
    bias = module.head.bias
    bias.data.sub_(0.1 * bias.grad)  # type: ignore[operator]
    bias.data.clamp_(-1.0, 1.0)
    with pytest.raises(RuntimeError, match=r"`.data` of parameter `head.bias` was read before a read of `p.grad`"):
        module(torch.randn(4, 5))
    engine.close()


def test_two_writes_are_refused_on_ranks_without_elements_too() -> None:
    worlds.run(_two_writes_without_elements, 2)


def _memory(rank: int, world: int) -> None:
    module = Student()
    engine = ZeroEngine(1, units=Block, precision=BF16)
    engine.shard(module)
    trained = [param for param in module.parameters() if param.requires_grad]
    engine.attach(torch.optim.SGD(trained, lr=0.1))
    with torch.autocast("cpu", torch.bfloat16):
        module(torch.randn(4, 5)).backward()
    for param in module.parameters():
        float(param.data.sum())
    assert any(handed_out(param) for param in module.parameters())
    assert module.head.weight.grad is not None

    assert not any(one.before for one in _HANDED_OUT.values())
    engine.close()


def test_the_window_keeps_no_data_that_the_program_does_not() -> None:
    worlds.run(_memory, 2)
