"""Optimizers whose own ``step`` takes the closure: they get it from the Trainer, as under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lightning_programs import Net, parity
from tests.sampling import sample
from tests.worlds import run


class Careful(torch.optim.SGD):
    """Leaves the parameters alone where the loss is large."""

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if loss is not None and float(loss) > 50:
                return loss
        super().step()
        return loss


class Eager(torch.optim.SGD):
    """Needs the closure although its default is None, and drops the gradients before it calls it."""

    def step(self, closure: Any = None) -> Any:
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class Ahead(torch.optim.SGD):
    """Takes its gradient at a point ahead of the parameters, and steps from where they were."""

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        if closure is None:
            return super().step()
        params = [param for group in self.param_groups for param in group["params"]]
        before = [param.detach().clone() for param in params]
        with torch.no_grad():
            for param in params:
                param.mul_(0.9)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for param, old in zip(params, before, strict=True):
                param.copy_(old)
        super().step()
        return loss


class Twice(torch.optim.SGD):
    """Evaluates the closure again behind half a step."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            with torch.enable_grad():
                closure()
        super().step()
        if closure is None:
            return None
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


CLASSES = {"careful": Careful, "eager": Eager, "ahead": Ahead, "twice": Twice}


class Spiky(Net):
    """Has a loss that is a thousand times larger in the second batch."""

    optimizer = "careful"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * (1000 if batch_idx == 1 else 1)

    def configure_optimizers(self) -> Any:
        return CLASSES[self.optimizer](self.parameters(), lr=0.05, momentum=0.9)


class Manual(Spiky):
    """Steps by hand, with a closure and without."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = Spiky.training_step(self, batch, batch_idx)
            self.manual_backward(loss)
            return loss

        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


def _module(name: str, base: type[Spiky]) -> Any:
    return type(base.__name__, (base,), {"optimizer": name})


def _check(rank: int, world: int, name: str, base: type[Spiky], options: dict[str, Any], stages: Any) -> None:
    atol = 1e-5 if name == "careful" else 1e-4  # losses of a thousand make gradients of a thousand
    parity(rank, world, _module(name, base), atol=atol, max_epochs=1, stages=stages, **options)


@pytest.mark.parametrize("name", sample(list(CLASSES), "careful", "ahead"))
def test_an_optimizers_own_step_gets_the_closure(name: str) -> None:
    run(_check, 2, name, Spiky, {"gradient_clip_val": 1.0}, (0, 1, 2, 3))


@pytest.mark.parametrize("name", sample(["careful", "ahead"], "careful"))
def test_an_optimizers_own_step_gets_the_closure_of_the_last_micro_batch(name: str) -> None:
    run(_check, 2, name, Spiky, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}, (0, 1, 2, 3))


@pytest.mark.parametrize("name", sample(["careful", "ahead"], "ahead"))
def test_an_optimizers_own_step_gets_the_closure_of_manual_optimization(name: str) -> None:
    run(_check, 2, name, Manual, {}, (0, 2, 3))
