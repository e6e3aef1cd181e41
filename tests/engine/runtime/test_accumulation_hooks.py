"""Hooks of a program on accumulated gradients, before ``shard`` and behind it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine.buffers.parameter import HookedParameter, ReducedParameter
from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.references import Case, TinyGPT, adamw, token_loss

DEPTH = 2


class Noting(TinyGPT):
    """Has hooks before it is sharded."""

    def __init__(self) -> None:
        super().__init__(depth=DEPTH)
        self.seen: list[Tensor] = []
        self.head.weight.register_post_accumulate_grad_hook(self._triple)  # type: ignore[no-untyped-call]
        self.early: Any = self.norm.bias.register_post_accumulate_grad_hook(self._triple)  # type: ignore[no-untyped-call]

    def _triple(self, param: nn.Parameter) -> None:
        assert param.grad is not None
        self.seen.append(param.grad.clone())
        param.grad.mul_(3)


def _program(micro_batches: int) -> Any:
    def program(trainer: Any) -> None:
        module = trainer.module
        optimizer = adamw(module)
        trainer.attach(optimizer)
        blocks = module.blocks

        def replace(param: nn.Parameter) -> None:
            param.grad = param.grad * 0.5 + 0.01  # type: ignore[operator]

        def note(param: nn.Parameter) -> None:
            module.seen.append(param.grad.clone())  # type: ignore[union-attr]

        def drop(param: nn.Parameter) -> None:
            param.grad = None

        for weight, hook in [
            (module.head.weight, note), (blocks[0].up.weight, module._triple), (blocks[1].up.weight, replace),
            (blocks[1].down.weight, note), (blocks[0].norm.weight, drop),
        ]:  # fmt: skip
            weight.register_post_accumulate_grad_hook(hook)
        late = blocks[0].up.bias.register_post_accumulate_grad_hook(module._triple)
        for step in range(3):
            optimizer.zero_grad()
            for index in range(micro_batches):
                with trainer.microbatch(last=index == micro_batches - 1):
                    trainer.backward(token_loss(module, trainer.rank, micro_batches * step + index), bare=step == 1)
            trainer.losses += module.seen
            module.seen.clear()
            optimizer.step()
            if step == 1:
                late.remove()
                module.early.remove()

    return program


def _check(rank: int, world: int, micro_batches: int) -> dict[str, str]:
    stages = (0, 1) if micro_batches > 1 else (0, 1, 2, 3)
    return Case(build=Noting, program=_program(micro_batches), stages=stages, tolerance=1e-6).check(rank, world)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_hooks_see_and_change_the_gradient_of_this_rank_before_it_is_averaged(micro_batches: int) -> None:
    assert worlds.run(_check, 2, micro_batches) == [{}, {}]


def _in_place(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.sub_(param.grad, alpha=0.1)  # type: ignore[arg-type]
    param.grad = None


def _through_data(param: nn.Parameter) -> None:
    param.data.add_(param.grad, alpha=-0.1)  # type: ignore[arg-type]
    param.grad = None


def _assigned(param: nn.Parameter) -> None:
    param.data = param.data - 0.1 * param.grad  # type: ignore[operator]
    param.grad = None


def _decay(param: nn.Parameter) -> None:
    param.grad.add_(param.data, alpha=0.1)  # type: ignore[union-attr]


def _stepped_by_hand(rank: int, world: int, stage: int) -> None:
    for step in (_in_place, _through_data, _assigned):
        engine = ZeroEngine(stage, units=["Block"])
        module = engine.shard(TinyGPT(depth=DEPTH))
        weight = module.blocks[0].up.weight
        handle = weight.register_post_accumulate_grad_hook(_decay)
        token_loss(module, rank, 0).backward()
        handle.remove()
        module.zero_grad()
        weight.register_post_accumulate_grad_hook(step)
        with pytest.raises(RuntimeError, match=r"written `blocks.0.up.weight` in the\s+backward .*step='backward'"):
            token_loss(module, rank, 0).backward()
        assert not isinstance(weight, HookedParameter) or isinstance(weight, ReducedParameter)
        engine.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_by_hand_in_a_hook_is_refused(stage: int) -> None:
    worlds.run(_stepped_by_hand, 2, stage)


def _stepped_in_a_hook(rank: int, world: int, is_attached: bool) -> None:
    engine = ZeroEngine(2, units=["Block"])
    module = engine.shard(TinyGPT(depth=DEPTH))
    weight = module.blocks[0].up.weight
    optimizer = torch.optim.SGD([weight], lr=0.1)
    if is_attached:
        engine.attach(optimizer)
    weight.register_post_accumulate_grad_hook(lambda param: optimizer.step())
    with pytest.raises(RuntimeError, match="called in a backward" if is_attached else "not attached to the engine"):
        token_loss(module, rank, 0).backward()
    engine.close()


@pytest.mark.parametrize("is_attached", [True, False], ids=["attached", "loose"])
def test_an_optimizer_in_a_hook_is_refused(is_attached: bool) -> None:
    worlds.run(_stepped_in_a_hook, 2, is_attached)


def _clamp(param: nn.Parameter, grad: Tensor) -> None:
    param.data.clamp_(-0.01, 0.01)


def _clamped(rank: int, world: int) -> None:
    for stage in range(4):
        engine = ZeroEngine(stage, units=["Block"])
        module = TinyGPT(depth=DEPTH)
        weight = module.blocks[0].up.weight
        expected = weight.detach().clamp(-0.01, 0.01)
        engine.shard(module)
        weight.register_hook(partial(_clamp, weight))  # type: ignore[no-untyped-call]
        token_loss(module, rank, 0).backward()
        assert torch.equal(engine.full_param(weight), expected)
        engine.close()


def test_a_hook_on_a_tensor_may_write_the_parameter_alike_on_all_ranks() -> None:
    worlds.run(_clamped, 2)


def _sharded_twice(rank: int, world: int) -> list[int]:
    module = TinyGPT(depth=DEPTH)
    calls: list[int] = []
    handles = [module.head.weight.register_post_accumulate_grad_hook(lambda param: calls.append(0))]
    counts = []
    for stage in (1, 3):
        engine = ZeroEngine(stage, units=["Block"])
        engine.shard(module)
        handles.append(module.head.weight.register_post_accumulate_grad_hook(lambda param: calls.append(1)))
        token_loss(module, rank, 0).backward()
        counts.append(len(calls))
        engine.close()
    for handle in handles:
        handle.remove()
    assert not [key for key in module.head.weight._post_accumulate_grad_hooks if key != "the program's before"]
    return counts


def test_hooks_stay_when_a_module_is_sharded_again() -> None:
    assert worlds.run(_sharded_twice, 2) == [[2, 5], [2, 5]]
