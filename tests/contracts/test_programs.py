"""Programs that must train exactly as under DistributedDataParallel, at every stage on two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.config import MixedPrecision
from tests import worlds
from tests.references import WIDTH, Block, Case, TinyGPT, Trainer, adamw, clone_weights, token_loss, tokens
from tests.sampling import sample

Program = Callable[[Trainer], None]


def _forward_backward(trainer: Trainer, step: int, **kwargs: Any) -> None:
    with trainer.scope():
        loss = token_loss(trainer.module, trainer.rank, step)
    trainer.backward(loss, **kwargs)


def _attached(trainer: Trainer, optimizer: Optimizer | None = None) -> Optimizer:
    optimizer = optimizer or adamw(trainer.module)
    trainer.attach(optimizer)
    return optimizer


# -- Backwards and steps -----------------------------------------------------------------------------------------------


def plain_loop(trainer: Trainer) -> None:
    """No scope, no call of ours between attach and the end."""
    optimizer = _attached(trainer)
    for step in range(4):
        optimizer.zero_grad()
        trainer.backward(token_loss(trainer.module, trainer.rank, step), bare=True)
        optimizer.step()


def attach_before_every_step(trainer: Trainer) -> None:
    for step in range(3):
        optimizer = _attached(trainer, torch.optim.SGD(trainer.module.parameters(), lr=0.1, fused=True))
        _forward_backward(trainer, step)
        optimizer.step()
        optimizer.zero_grad()


def several_backwards(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(3):
        for part in range(3):
            _forward_backward(trainer, 3 * step + part)
        optimizer.step()
        optimizer.zero_grad()


def backward_twice_through_one_graph(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(3):
        with trainer.scope():
            loss = token_loss(trainer.module, trainer.rank, step)
        trainer.backward(loss, retain_graph=True)
        trainer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def two_forwards_then_two_backwards(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(3):
        with trainer.scope():
            first = token_loss(trainer.module, trainer.rank, 2 * step)
            second = token_loss(trainer.module, trainer.rank, 2 * step + 1)
        trainer.backward(first)
        trainer.backward(second)
        optimizer.step()
        optimizer.zero_grad()


def two_losses_summed(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        with trainer.scope():
            loss = token_loss(trainer.module, trainer.rank, 2 * step)
            loss = loss + token_loss(trainer.module, trainer.rank, 2 * step + 1)
        trainer.backward(loss)
        optimizer.step()


def step_without_zero_grad(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(4):
        _forward_backward(trainer, step)
        optimizer.step()


def zeros_instead_of_none(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        _forward_backward(trainer, step)
        optimizer.step()


def step_with_closure(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            _forward_backward(trainer, step)
            return trainer.losses[-1]

        optimizer.step(closure)


def step_twice(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(2):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        optimizer.step()
        optimizer.step()


def backward_without_step(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(4):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        if step % 2:
            optimizer.step()


def gradient_penalty(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(3):
        ids = tokens(trainer.rank, step)
        optimizer.zero_grad()
        with trainer.scope():
            embedded = F.one_hot(ids, 11).float()[..., :WIDTH].requires_grad_()
            score = trainer.module.head(trainer.module.norm(trainer.module.body(embedded))).logsumexp(-1).mean()
            (slope,) = torch.autograd.grad(score, embedded, create_graph=True)
            loss = score + (slope.flatten(1).norm(dim=1) - 1).square().mean()
        trainer.backward(loss)
        optimizer.step()


def gradients_by_autograd_grad(trainer: Trainer) -> None:
    """Asks for the gradient of the input only; no parameter's gradient is written."""
    optimizer = _attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        with trainer.scope():
            x = torch.ones(2, WIDTH, requires_grad=True)
            (slope,) = torch.autograd.grad(trainer.module.body(x).square().sum(), x)
        trainer.losses.append(slope)
        _forward_backward(trainer, step)
        optimizer.step()


# -- Several optimizers, groups, freezing ------------------------------------------------------------------------------


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(Block(), Block())
        self.critic = nn.Sequential(Block(), nn.Linear(WIDTH, 1))


@contextmanager
def _toggled(parameters: list[nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(False)
    yield
    for parameter in parameters:
        parameter.requires_grad_(True)


def alternating_optimizers(trainer: Trainer) -> None:
    generator, critic = trainer.module.generator, trainer.module.critic
    first = torch.optim.AdamW(generator.parameters(), lr=1e-2, eps=1e-4, fused=True)
    second = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9, fused=True)
    trainer.attach(first, second)
    for step in range(6):
        noise = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * trainer.rank + step))
        optimizer, other = (first, critic) if step % 2 else (second, generator)
        with _toggled(list(other.parameters())):
            with trainer.scope():
                loss = critic(generator(noise)).mean() * (1 if step % 2 else -1) + critic(noise).square().mean()
            trainer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def alternating_without_toggling(trainer: Trainer) -> None:
    """The other optimizer's gradients pile up until its own ``zero_grad``."""
    generator, critic = trainer.module.generator, trainer.module.critic
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2, eps=1e-4, fused=True) for part in (generator, critic)]
    trainer.attach(*optimizers)
    for step in range(6):
        noise = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * trainer.rank + step))
        optimizer = optimizers[step % 2]
        optimizer.zero_grad()
        with trainer.scope():
            loss = critic(generator(noise)).square().mean()
        trainer.backward(loss)
        optimizer.step()


def two_optimizers_in_one_unit(trainer: Trainer) -> None:
    matrices = [parameter for parameter in trainer.module.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in trainer.module.parameters() if parameter.ndim < 2]
    optimizers = [
        torch.optim.AdamW(matrices, lr=1e-2, eps=1e-4, fused=True),
        torch.optim.SGD(vectors, lr=0.1, fused=True),
    ]
    trainer.attach(*optimizers)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        _forward_backward(trainer, step)
        for optimizer in optimizers:
            optimizer.step()


def decay_by_dimensions(trainer: Trainer) -> None:
    decayed = [parameter for parameter in trainer.module.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in trainer.module.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0, "lr": 0.05}]
    optimizer = _attached(trainer, torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, fused=True))
    for step in range(3):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        optimizer.step()


def part_of_the_parameters(trainer: Trainer) -> None:
    optimizer = _attached(
        trainer, torch.optim.AdamW(trainer.module.blocks[1].parameters(), lr=1e-2, eps=1e-4, fused=True)
    )
    for step in range(3):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        optimizer.step()


def unfrozen_later(trainer: Trainer) -> None:
    module = trainer.module
    module.blocks[0].requires_grad_(False)
    optimizer = _attached(
        trainer, torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], eps=1e-4, fused=True)
    )
    for step in range(5):
        if step == 2:
            module.blocks[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(module.blocks[0].parameters()), "lr": 0.05})
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        optimizer.step()


def unfrozen_later_in_the_optimizer(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    trainer.module.blocks[1].requires_grad_(False)
    for step in range(5):
        if step == 2:
            trainer.module.blocks[1].requires_grad_(True)
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        optimizer.step()


def frozen_later(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(4):
        if step == 2:
            trainer.module.blocks[1].requires_grad_(False)
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        optimizer.step()


def frozen_between_backward_and_step(trainer: Trainer) -> None:
    """A gradient that is there is stepped, whatever ``requires_grad`` says by then."""
    optimizer = _attached(trainer)
    for step in range(4):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        trainer.module.blocks[1].requires_grad_(False)
        optimizer.step()
        trainer.module.blocks[1].requires_grad_(True)


def frozen_with_a_gradient_left(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(4):
        if step == 2:
            trainer.module.blocks[1].requires_grad_(False)
        _forward_backward(trainer, step)
        optimizer.step()


def learning_rate_schedule(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for step in range(4):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        optimizer.step()
        scheduler.step()


# -- Weights written and read between steps ----------------------------------------------------------------------------


def clamped(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        optimizer.step()
        with trainer.gathered(trainer.module, write="all"), torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter.clamp_(-0.2, 0.2)


def clamped_in_the_open(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        optimizer.step()
        with torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter.clamp_(-0.2, 0.2)


def clamped_before_the_step(trainer: Trainer) -> None:
    """The write happens between backward and step."""
    optimizer = _attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        with trainer.gathered(trainer.module, write="all"), torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter.clamp_(-0.2, 0.2)
        optimizer.step()


def _swap_averages(trainer: Trainer, averages: dict[str, Tensor], gathered: bool) -> None:
    """Update the averages, evaluate with them and put the weights back."""

    def swap() -> None:
        for name, parameter in trainer.module.named_parameters():
            kept = parameter.data.clone()
            parameter.data.copy_(averages[name])
            averages[name] = kept

    def both(action: Callable[[], None]) -> None:
        if gathered:
            with trainer.gathered(trainer.module, write="all"):
                action()
        else:
            action()

    def update() -> None:
        for name, parameter in trainer.module.named_parameters():
            averages.setdefault(name, parameter.data.clone()).lerp_(parameter.data, 0.5)

    both(update)
    both(swap)
    trainer.module.eval()
    with torch.no_grad(), trainer.scope("validation_step"):
        trainer.losses.append(token_loss(trainer.module, trainer.rank, 99))
    trainer.module.train()
    both(swap)


def _averages(gathered: bool) -> Program:
    def program(trainer: Trainer) -> None:
        optimizer = _attached(trainer)
        averages: dict[str, Tensor] = {}
        for step in range(3):
            optimizer.zero_grad()
            _forward_backward(trainer, step)
            optimizer.step()
            _swap_averages(trainer, averages, gathered)

    return program


def state_dict_loaded(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    with trainer.gathered(trainer.module):
        start = clone_weights(trainer.module)
    for step in range(4):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        optimizer.step()
        if step == 1:
            with trainer.gathered(trainer.module, write="all"):
                trainer.module.load_state_dict(start)


def state_dict_loaded_in_the_open(trainer: Trainer) -> None:
    start = clone_weights(trainer.module)
    optimizer = _attached(trainer)
    for step in range(4):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        optimizer.step()
        if step == 1:
            trainer.module.load_state_dict(start)


def written_by_one_rank(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(3):
        with trainer.gathered(trainer.module.head.weight, write="rank0"), torch.no_grad():
            if trainer.rank == 0:
                trainer.module.head.weight.mul_(0.5)
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        optimizer.step()


def sampled_by_one_rank(trainer: Trainer) -> None:
    """Rank 0 generates until an end that the others do not know."""
    optimizer = _attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        optimizer.step()
        with trainer.gathered(trainer.module), torch.no_grad():
            ids = torch.ones(1, 1, dtype=torch.long)
            while trainer.rank == 0 and ids.shape[1] < 4 + step:
                ids = torch.cat([ids, trainer.module(ids)[:, -1:].argmax(-1)], 1)
            trainer.losses.append(ids)


def validated_between(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(4):
        trainer.module.eval()
        with torch.inference_mode() if step % 2 else torch.no_grad(), trainer.scope("validation_step"):
            trainer.losses.append(token_loss(trainer.module, trainer.rank, 50 + step).clone())
        trainer.module.train()
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        optimizer.step()


def validated_before_attach(trainer: Trainer) -> None:
    with torch.inference_mode(), trainer.scope("validation_step"):
        trainer.losses.append(token_loss(trainer.module, trainer.rank, 7).clone())
    plain_loop(trainer)


def interrupted(trainer: Trainer) -> None:
    """A forward and a backward that end with an error leave nothing behind."""
    optimizer = _attached(trainer)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for step in range(3):
        handle = trainer.module.blocks[1].down.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError), trainer.scope():
            token_loss(trainer.module, trainer.rank, 77)
        handle.remove()
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        optimizer.step()


def dropout(trainer: Trainer) -> None:
    """The engine draws no random number of the user's generators."""
    torch.manual_seed(trainer.rank)
    trainer.module.body = _with_dropout(trainer.module.body)  # type: ignore[method-assign]
    plain_loop(trainer)
    trainer.losses.append(torch.rand(3))


def _with_dropout(body: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: F.dropout(body(F.dropout(x)))


# -- Gradients seen and edited -----------------------------------------------------------------------------------------


def clipped_by_hand(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        trainer.losses.append(nn.utils.clip_grad_norm_(trainer.module.parameters(), 0.1).clone())
        optimizer.step()


def clipped_by_value(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        trainer.clip_grad_value(optimizer, 0.01)
        optimizer.step()


def clipped_by_value_by_hand(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        nn.utils.clip_grad_value_(trainer.module.parameters(), 0.01)
        optimizer.step()


def edited_in_hooks(trainer: Trainer) -> None:
    for parameter in trainer.module.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05) * 2)
    plain_loop(trainer)


def edited_before_the_step(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        for parameter in trainer.module.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.05, 0.05)
                parameter.grad.data.mul_(2)
                parameter.grad = parameter.grad.sign() * parameter.grad.abs().sqrt()
        optimizer.step()


def dropped_before_the_step(trainer: Trainer) -> None:
    """A gradient that the user takes away is not stepped."""
    optimizer = _attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        trainer.module.head.weight.grad = None
        optimizer.step()


def whole_gradients_read(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        for parameter in trainer.module.parameters():
            gradient = trainer.full_grad(parameter)
            trainer.losses.append(torch.zeros(()) if gradient is None else gradient)
        optimizer.step()


def norms_logged(trainer: Trainer) -> None:
    """What Lightning's ``grad_norm`` does in ``on_before_optimizer_step``."""
    optimizer = _attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        norms = [p.grad.data.norm(2) for p in trainer.module.parameters() if p.grad is not None]
        trainer.losses.append(torch.stack([norm.clone() for norm in norms]))
        trainer.losses.append(torch.stack([p.grad.norm(float("inf")) for p in trainer.module.parameters()]))
        optimizer.step()


def norms_through_parameters_to_vector(trainer: Trainer) -> None:
    optimizer = _attached(trainer)
    for step in range(3):
        optimizer.zero_grad()
        _forward_backward(trainer, step)
        grads = [p.grad for p in trainer.module.parameters() if p.grad is not None]
        trainer.losses.append(nn.utils.get_total_norm(grads).clone())
        optimizer.step()


def bf16_weights_written_through_data(trainer: Trainer) -> None:
    """Writes that leave no trace on the parameter reach the fp32 masters of 16-bit parameters."""
    optimizer = _attached(trainer)
    written = {name: torch.randn(p.shape).bfloat16() for name, p in trainer.module.named_parameters()}
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), trainer.scope():
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = trainer.module.body(x).float().square().mean()
        trainer.backward(loss)
        optimizer.step()
        if step == 1:
            for name, parameter in trainer.module.named_parameters():
                parameter.data.copy_(written[name])


def case(program: Program, /, **options: Any) -> Case:
    return Case(**{"build": TinyGPT, "program": program, **options})


# Sums of squares are added in float64 by the engine, in fp32 by torch: clipped steps differ in the last bits.
_NORM = 1e-6

CASES: dict[str, Case] = {
    **{program.__name__.replace("_", "-"): case(program) for program in (
        plain_loop, attach_before_every_step, several_backwards, backward_twice_through_one_graph,
        two_forwards_then_two_backwards, two_losses_summed, step_without_zero_grad, zeros_instead_of_none,
        step_with_closure, step_twice, backward_without_step, gradient_penalty, gradients_by_autograd_grad,
        two_optimizers_in_one_unit, decay_by_dimensions, part_of_the_parameters, unfrozen_later,
        unfrozen_later_in_the_optimizer, frozen_later, frozen_between_backward_and_step,
        frozen_with_a_gradient_left, learning_rate_schedule, clamped, clamped_before_the_step,
        state_dict_loaded, written_by_one_rank, sampled_by_one_rank, validated_between, validated_before_attach,
        interrupted, dropout, clipped_by_value, clipped_by_value_by_hand, edited_in_hooks, edited_before_the_step,
        dropped_before_the_step, whole_gradients_read,
    )},
    "alternating-optimizers": case(alternating_optimizers, build=Adversaries),
    "alternating-without-toggling": case(alternating_without_toggling, build=Adversaries),
    "averages-swapped": case(_averages(gathered=True)),
    "averages-swapped-in-the-open": case(_averages(gathered=False), stages=(0, 1, 2)),
    "clamped-in-the-open": case(clamped_in_the_open, stages=(0, 1, 2)),
    "state-dict-loaded-in-the-open": case(state_dict_loaded_in_the_open, stages=(0, 1, 2)),
    "bf16-weights-written-through-data": case(
        bf16_weights_written_through_data, stages=(0, 1, 2),
        options={"precision": MixedPrecision(compute_dtype=torch.bfloat16)},
    ),
    "clipped-by-hand": case(clipped_by_hand, tolerance=_NORM),
    "norms-logged": case(norms_logged, tolerance=_NORM),
    "norms-of-a-list": case(norms_through_parameters_to_vector, tolerance=_NORM),
}  # fmt: skip


def _check(rank: int, world: int, name: str) -> dict[str, str]:
    return CASES[name].check(rank, world)


@pytest.mark.parametrize("name", list(CASES))
def test_two_ranks_train_as_the_reference(name: str) -> None:
    assert worlds.run(_check, 2, name) == [{}, {}]


def _check_delayed(rank: int, world: int, name: str) -> dict[str, str]:
    case = replace(CASES[name], tolerance=1e-6)  # DistributedDataParallel sums in another order from 3 ranks on
    with worlds.slow_collectives(0.003 * ((rank + 1) % world), seed=rank):
        return case.check(rank, world)


@pytest.mark.parametrize(
    "name",
    sample(["plain-loop", "several-backwards", "validated-between", "clamped", "gradient-penalty"], "clamped"),
)
def test_three_ranks_of_different_speed_train_as_the_reference(name: str) -> None:
    assert worlds.run(_check_delayed, 3, name) == [{}] * 3


@pytest.mark.parametrize(
    "name", ["plain-loop", "clipped-by-hand", "edited-before-the-step", "clamped", "unfrozen-later"]
)
def test_one_rank_trains_as_the_reference(name: str) -> None:
    assert worlds.run(_check, 1, name) == [{}]
