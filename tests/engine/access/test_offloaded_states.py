"""States in host memory for a while: bytes leave the device, bits do not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.config import MixedPrecision
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.lightning_programs import Net, assert_equal, loader, seeded, trainer, weights
from tests.references import TinyGPT, token_loss
from tests.sampling import sample

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2),
    "rmsprop": lambda module: torch.optim.RMSprop(module.parameters(), lr=1e-2, momentum=0.9),
}


class Run:
    """A few steps, between which something happens."""

    def __init__(self, stage: int, optimizer: str, **options: Any) -> None:
        worlds.seed()
        self.engine = ZeroEngine(
            stage, units=["Block"], precision=MixedPrecision(compute_dtype=torch.bfloat16), **options
        )
        self.module = self.engine.shard(TinyGPT())
        self.optimizer = self.engine.attach(OPTIMIZERS[optimizer](self.module))

    def backward(self, number: int, last: bool = True) -> None:
        with self.engine.microbatch(last), torch.autocast("cpu", torch.bfloat16):
            with self.engine.scope("training_step"):
                loss = token_loss(self.module, self.engine.rank, number)
            with self.engine.backward_scope():
                loss.backward()

    def step(self) -> None:
        self.engine.clip_grad_norm(self.optimizer, 0.5)
        self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [self.engine.full_param(param) for param in self.module.parameters()]

    def device_bytes(self) -> int:
        memory = self.engine.stats().memory
        return sum(memory[kind] for kind in ("optimizer", "gradients"))

    def look(self) -> list[Tensor]:
        """Everything that a checkpoint reads."""
        seen = []
        for record in self.engine.records():
            seen.append(record.master().clone())
            state = record.state(self.optimizer)
            seen += [state[key].clone() for key in sorted(state)]
        return seen


def _train(run: Run, *, puts_aside: bool) -> list[Tensor]:
    seen: list[Tensor] = []

    def pause(reloads: bool) -> None:
        seen.extend(run.look())
        if not puts_aside:
            return
        before = run.device_bytes()
        run.engine.offload_states()
        run.engine.offload_states()
        assert before > run.device_bytes() == 0
        assert run.engine.stats().host["optimizer"] > 0
        lowered = torch.autocast("cpu", torch.bfloat16)
        with torch.no_grad(), lowered, run.engine.scope("validation_step"):
            token_loss(run.module, run.engine.rank, 99)
        seen[-len(run.look()) :] = run.look()
        assert run.device_bytes() == 0  # neither a forward nor reading brings anything back
        if reloads:
            run.engine.reload_states()
            assert 0 < run.device_bytes() <= before  # an empty sum of gradients is made when it is needed

    for number in range(3):
        run.backward(2 * number, last=False)
        pause(reloads=number == 0)
        run.backward(2 * number + 1)
        pause(reloads=number == 0)
        run.step()
        run.optimizer.zero_grad()
        pause(reloads=number == 1)
    return [*seen, *run.values()]


def _compare(rank: int, world: int, stage: int) -> None:
    for optimizer, options in (("adamw", {}), ("adamw", {"step": "deferred"}), ("rmsprop", {})):
        plain = _train(Run(stage, optimizer, **options), puts_aside=False)
        aside = _train(Run(stage, optimizer, **options), puts_aside=True)
        assert len(plain) == len(aside)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(aside, plain, strict=True))


@pytest.mark.parametrize("stage", sample((0, 1, 2, 3), 3), ids="stage{}".format)
def test_states_leave_the_device_and_return_with_the_same_bits(stage: int) -> None:
    worlds.run(_compare, 2, stage)


def _gradients(rank: int, world: int) -> None:
    run = Run(2, "adamw")
    run.backward(0)
    expected = [run.engine.full_grad(param) for param in run.module.parameters()]
    run.engine.offload_states()
    for param, values in zip(run.module.parameters(), expected, strict=True):
        found = run.engine.full_grad(param)
        assert found is not None
        assert values is not None
        assert torch.equal(found, values)
    assert run.device_bytes() == 0
    assert run.module.head.weight.grad is not None  # the step window opens, and everything is back
    assert run.device_bytes() > 0
    run.engine.offload_states()
    run.optimizer.zero_grad()
    run.engine.internals.fits.detach()
    assert run.device_bytes() == run.engine.stats().memory["optimizer"]
    assert all(value.is_contiguous() for state in run.optimizer.state.values() for value in state.values())


def test_gradients_are_read_where_they_are_and_shown_on_the_device() -> None:
    worlds.run(_gradients, 2)


# -- Through the Trainer -----------------------------------------------------------------------------------------------


class PutsAside(Callback):
    """Frees the device for validations, and saves while it is free."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.bytes: list[int] = []

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.strategy.offload_states()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        memory = trainer.strategy.engine.stats().memory
        self.bytes.append(memory["optimizer"] + memory["gradients"])
        trainer.save_checkpoint(self.path)
        if trainer.current_epoch == 0:
            trainer.strategy.reload_states()


def _validates(rank: int, world: int, folder: str) -> None:
    def fit(callback: PutsAside | None, stage: int, load: str | None = None, epochs: int = 3) -> dict[str, Tensor]:
        callbacks = [] if callback is None else [callback]
        run = trainer(rank, world, ZeroStrategy(stage=stage), max_epochs=epochs, callbacks=callbacks)
        run.fit(seeded(Net), loader(rank, world), loader(rank, world), ckpt_path=load)
        return weights(run)

    plain = fit(None, 2)
    for stage in (1, 3):
        callback = PutsAside(f"{folder}/{stage}.ckpt")
        assert_equal(fit(callback, stage), plain, what=f"stage {stage}")
        assert callback.bytes == [0] * 3
        first = PutsAside(f"{folder}/first-{stage}.ckpt")
        fit(first, stage, epochs=2)
        assert_equal(fit(None, 2, load=first.path), plain, what=f"resumed from stage {stage}")


@pytest.mark.slow
def test_a_fit_that_frees_the_device_while_it_validates_has_the_same_bits(tmp_path: Path) -> None:
    worlds.run(_validates, 2, str(tmp_path))
