"""After an error on all ranks at the same point, caught by the program, training goes on with the reference's bits.

Note [Every point]
    A step of a program counts the calls of everything that PyTorch calls in the engine, of what these call in turn, and
    of hooks of the user's, and raises at the k-th of them, before or behind the call. That is done for every k on one
    engine, until a step has fewer calls than k. After each such step comes an ordinary one, and its loss must have the
    bits of a plain run that has made the ordinary steps only.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.comm.communicator import Pending
from lightning_zero.config import Communication
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.gradients import BufferGradients
from lightning_zero.engine.runtime.backward import Backward
from lightning_zero.engine.runtime.forward_hooks import ForwardHooks
from lightning_zero.engine.runtime.order import PassOrder
from lightning_zero.engine.runtime.passes import Passes
from lightning_zero.engine.runtime.reduction import Reducer
from lightning_zero.engine.runtime.saved_tensors import SavedTensors
from lightning_zero.engine.runtime.scopes import Scopes
from lightning_zero.engine.runtime.uses import UnitUses
from lightning_zero.engine.units.unit import Unit, UnitState
from tests import worlds
from tests.references import Replica, Sharded, TinyGPT, Trainer, adamw, token_loss
from tests.sampling import sample

_POINTS: list[tuple[type, tuple[str, ...]]] = [
    (ForwardHooks, ("pre_forward", "post_forward")),
    (UnitUses, ("enter", "leave", "make_whole")),
    (SavedTensors, ("_pack", "_unpack")),
    (Backward, ("arm", "_take_gradient", "end")),
    (Scopes, ("_enter", "leave")),
    (Passes, ("begin",)),
    (PassOrder, ("request", "completed", "finish")),
    (Reducer, ("begin", "start", "finish", "_drain")),
    (Unit, ("unshard", "wait", "accumulate")),
    (BufferGradients, ("accumulate", "finish_reduce")),
    (FlatBuffer, ("bind",)),
    (Pending, ("wait",)),
]  # fmt: skip


class _Fault(Exception):
    """What the program catches."""


class _Interrupt(KeyboardInterrupt):
    """The same, of a kind that PyTorch does not tell hooks of."""


class _Points:
    """Raises at the ``due``-th call of a point."""

    def __init__(self, error: type[BaseException], behind: bool) -> None:
        self.error = error
        self.behind = behind
        self.due = 0
        self.count = 0
        self.raised_at = ""
        self.is_on = False

    def visit(self, name: str) -> None:
        if not self.is_on:
            return
        self.count += 1
        if self.count == self.due:
            self.is_on = False
            self.raised_at = name
            raise self.error(name)

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def method(*args: Any, **kwargs: Any) -> Any:
            if not self.behind:
                self.visit(name)
            result = call(*args, **kwargs)
            if self.behind:
                self.visit(name)
            return result

        return method

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        originals = [(owner, name, vars(owner)[name]) for owner, names in _POINTS for name in names]
        for owner, name, call in originals:
            setattr(owner, name, self.around(f"{owner.__name__}.{name}", call))
        try:
            yield
        finally:
            for owner, name, call in originals:
                setattr(owner, name, call)

    @contextlib.contextmanager
    def at(self, due: int) -> Iterator[None]:
        self.due, self.count, self.raised_at, self.is_on = due, 0, "", True
        try:
            yield
        except self.error:
            pass
        finally:
            self.is_on = False


# -- Programs ----------------------------------------------------------------------------------------------------------

Step = Callable[[Trainer, int], None]


def scoped(trainer: Trainer, step: int) -> None:
    with trainer.scope():
        loss = token_loss(trainer.module, trainer.rank, step)
    trainer.backward(loss)


def bare(trainer: Trainer, step: int) -> None:
    trainer.backward(token_loss(trainer.module, trainer.rank, step), bare=True)


def validated(trainer: Trainer, step: int) -> None:
    with torch.no_grad(), trainer.scope("validation_step"):
        token_loss(trainer.module, trainer.rank, step + 1)
    with torch.no_grad():
        token_loss(trainer.module, trainer.rank, step + 2)
    scoped(trainer, step)


def several(trainer: Trainer, step: int) -> None:
    """Two backwards, the first in the scope, and a penalty."""
    with trainer.scope():
        first = token_loss(trainer.module, trainer.rank, step)
        trainer.backward(first, retain_graph=True)
        second = token_loss(trainer.module, trainer.rank, step + 1)
        (slope,) = torch.autograd.grad(second, trainer.module.embedding.weight, create_graph=True)
    trainer.backward(first + second + slope.square().sum(), bare=True)


def read(trainer: Trainer, step: int) -> None:
    with trainer.gathered(trainer.module):
        trainer.losses.append(sum(param.detach().sum() for param in trainer.module.parameters()))
    trainer.losses.pop()
    with trainer.scope(), trainer.gathered(trainer.module.blocks):
        token_loss(trainer.module, trainer.rank, step)
    bare(trainer, step)


def accumulated(trainer: Trainer, step: int) -> None:
    for last in (False, True):
        with trainer.microbatch(last):
            scoped(trainer, 2 * step + last)


PROGRAMS: dict[str, Step] = {
    program.__name__: program for program in (scoped, bare, validated, several, read, accumulated)
}


class _Checkpointed(TinyGPT):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _build(checkpoints: bool) -> TinyGPT:
    module = _Checkpointed() if checkpoints else TinyGPT()
    module.blocks[1].up.requires_grad_(False)
    return module


def _with_hooks(module: nn.Module, points: _Points) -> None:
    """Let the user have hooks everywhere."""

    def before(child: nn.Module, args: Any) -> None:
        points.visit("user's pre-hook")

    def after(child: nn.Module, args: Any, output: Tensor) -> None:
        points.visit("user's hook")
        if output.requires_grad:
            output.register_hook(lambda grad: points.visit("user's tensor hook"))

    for child in module.modules():
        child.register_forward_pre_hook(before)
        child.register_forward_hook(after)


def _ordinary(trainer: Trainer, program: Step, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    program(trainer, step)
    optimizer.step()


WARM = 3  # lists of passes are learned


def _recovers(
    rank: int, world: int, stage: int, name: str, error: type[BaseException], behind: bool, first: int, every: int,
    checkpoints: bool, options: dict[str, Any],
) -> dict[str, str]:  # fmt: skip
    """Return what differs after an error, by the point at which it was raised. Collective."""
    program = PROGRAMS[name]
    options = {"communication": Communication(prefetch=2, timeout_s=20), "units": ["Block"], **options}
    points = _Points(error, behind)
    worlds.seed()
    plain = Replica(_build(checkpoints), rank, world, average="once" if stage < 2 else "each")
    worlds.seed()
    module = _build(checkpoints)
    _with_hooks(module, points)
    zero = Sharded(module, rank, world, stage=stage, **options)
    trainers: list[Trainer] = [plain, zero]
    optimizers = [adamw(trainer.module) for trainer in trainers]
    zero.attach(optimizers[1])
    step, due, wrong = 0, first, {}
    with points.installed():
        while True:
            for trainer, optimizer in zip(trainers, optimizers, strict=True):
                trainer.losses.clear()
                try:
                    _ordinary(trainer, program, optimizer, step)
                except Exception as failure:
                    failure.add_note(f"after {points.raised_at} ({due - every})")
                    raise
            if not all(torch.equal(a, b) for a, b in zip(plain.losses, zero.losses, strict=True)):
                wrong[f"{due - every}: {points.raised_at}"] = str([plain.losses, zero.losses])
                break
            step += 1
            if step < WARM:
                continue
            if step > WARM and not points.raised_at:
                break
            optimizers[1].zero_grad()
            with points.at(due):
                program(zero, 1000 + step)
            due += every
    if not wrong:
        for mine, theirs in zip(zero.module.parameters(), plain.module.parameters(), strict=True):
            if not torch.equal(zero.full_param(mine), theirs):
                wrong["end"] = "weights"
    assert zero.engine.stats().memory["gathered"] == 0
    assert not zero.engine.internals.communicator.running
    assert all(
        unit.state is UnitState.SHARDED for unit in zero.engine.internals.fits.units if unit.is_sharded_between_uses
    )
    zero.engine.close()
    return wrong


_CASES = {
    f"stage{stage}-{name}-{error.__name__[1:].lower()}-{'behind' if behind else 'before'}": (stage, name, error, behind)
    for stage in (3, 2, 1, 0)
    for name in PROGRAMS
    for error in (_Fault, _Interrupt)
    for behind in (False, True)
}
_KEPT = ("stage3-scoped-fault-behind", "stage3-bare-interrupt-before", "stage1-accumulated-fault-before")


@pytest.mark.parametrize("name", sample(_CASES, *_KEPT))
def test_training_goes_on_after_an_error_at_any_point(name: str) -> None:
    first, every = (2, 29) if name in _KEPT else (1, 5)
    assert worlds.run(_recovers, 2, *_CASES[name], first, every, False, {}, timeout_s=300) == [{}, {}]


_OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage3-deferred": (3, {"step": "deferred"}),
    "stage1-deferred": (1, {"step": "deferred"}),
    "stage3-offloaded": (3, {"offload": "cpu"}),
    "stage2-offloaded": (2, {"offload": "cpu"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(_OPTIONS))
def test_training_goes_on_after_an_error_where_steps_are_made_later(name: str) -> None:
    stage, options = _OPTIONS[name]
    found = worlds.run(_recovers, 2, stage, "bare", _Fault, False, 1, 11, False, options, timeout_s=300)
    assert found == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_training_goes_on_after_an_error_in_a_recomputation(behind: bool) -> None:
    assert worlds.run(_recovers, 2, 3, "scoped", _Fault, behind, 1, 11, True, {}, timeout_s=300) == [{}, {}]


def _other_blocks(rank: int, world: int, learned: int) -> bool:
    """Each rank uses other blocks before the error; the first passes are learned, or not."""

    def train(trainer: Trainer, fails: bool) -> list[Tensor]:
        optimizer = torch.optim.SGD(trainer.module.parameters(), lr=0.1, fused=True)
        trainer.attach(optimizer)
        for step in range(8):
            if fails and step >= learned:
                with contextlib.suppress(_Fault), trainer.scope():
                    x = torch.ones(2, 6)
                    for index in [(0, 1, 2), (1, 3), (), (2,)][(step + rank) % 4]:
                        x = trainer.module.blocks[index](x)
                    raise _Fault
            _ordinary(trainer, scoped, optimizer, step)
        return trainer.losses

    worlds.seed()
    expected = train(Replica(TinyGPT(depth=4), rank, world), fails=False)
    worlds.seed()
    communication = Communication(prefetch=2, timeout_s=20)
    zero = Sharded(TinyGPT(depth=4), rank, world, stage=3, units=["Block"], communication=communication)
    found = train(zero, fails=True)
    zero.engine.close()
    return all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _raise(grad: Tensor) -> None:
    raise _Fault


@pytest.mark.parametrize("learned", [0, 3])
def test_training_goes_on_after_an_error_behind_other_blocks_on_every_rank(learned: int) -> None:
    assert worlds.run(_other_blocks, 2, learned) == [True, True]


def _inside_a_scope(rank: int, world: int, stage: int) -> list[str]:
    """The program catches the error in the step and goes on with it."""

    def program(trainer: Trainer, step: int, fails: bool) -> None:
        with trainer.scope():
            if fails:
                handle = trainer.module.blocks[1].down.register_forward_pre_hook(lambda *_: _raise(torch.ones(1)))
                for _ in range(2):
                    with contextlib.suppress(_Fault):
                        trainer.module.blocks[1](torch.ones(1, 6))
                    with contextlib.suppress(_Fault):
                        token_loss(trainer.module, rank, step)
                handle.remove()
                loss = token_loss(trainer.module, rank, step)
                trainer.module.embedding.weight.register_hook(lambda grad: None)
                loss.register_hook(_raise)
                with contextlib.suppress(_Fault):
                    loss.backward()
            loss = token_loss(trainer.module, rank, step)
        trainer.backward(loss, bare=True)

    wrong = []
    worlds.seed()
    plain = Replica(TinyGPT(), rank, world, average="once" if stage < 2 else "each")
    worlds.seed()
    zero = Sharded(TinyGPT(), rank, world, stage=stage, units=["Block"])
    optimizers = [adamw(trainer.module) for trainer in (plain, zero)]
    zero.attach(optimizers[1])
    for step in range(7):
        for trainer, optimizer in zip((plain, zero), optimizers, strict=True):
            _ordinary(trainer, functools.partial(program, fails=trainer is zero and step > 1), optimizer, step)
        if not torch.equal(plain.losses[-1], zero.losses[-1]):
            wrong.append(f"loss {step}")
    zero.engine.close()
    return wrong


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_goes_on_after_an_error_that_it_catches(stage: int) -> None:
    assert worlds.run(_inside_a_scope, 2, stage) == [[], []]


def _raise_behind(*_: Any) -> None:
    raise _Fault


def _steps_behind_a_failed_backward(rank: int, world: int, stage: int, clips: bool) -> list[bool]:
    """The gradients of a backward that has failed are gone: the step that follows at once has none to step."""
    worlds.seed()
    trainer = Sharded(TinyGPT(), rank, world, stage=stage, units=["Block"])
    optimizer = adamw(trainer.module)
    trainer.attach(optimizer)
    found = []
    for fails in (False, True, False, True):
        before = [trainer.full_param(param) for param in trainer.module.parameters()]
        loss = token_loss(trainer.module, rank, 0)
        if fails:
            first = trainer.module.blocks[0].register_full_backward_hook(_raise_behind)
            loss = token_loss(trainer.module, rank, 0)
            with contextlib.suppress(_Fault):
                loss.backward()
            first.remove()
        else:
            loss.backward()
        if clips:  # opens the step window
            norm = trainer.clip_grad_norm(optimizer, 1.0)
            assert (norm == 0) == fails
        optimizer.step()
        after = [trainer.full_param(param) for param in trainer.module.parameters()]
        found.append(all(torch.equal(*pair) for pair in zip(before, after, strict=True)))
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("clips", [False, True], ids=["step", "clip"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_behind_a_failed_backward_has_no_gradients(stage: int, clips: bool) -> None:
    assert worlds.run(_steps_behind_a_failed_backward, 2, stage, clips) == [[False, True, False, True]] * 2
