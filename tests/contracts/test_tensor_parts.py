"""Programs that use parameters around the steps with ``tensor_parallel`` train as on one rank, or are told why not.

Each program is a few lines of a user's hooks. The right ones run on one rank and on two tensor ranks; the refused ones
would have computed with a part of a matrix.
"""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.errors import PartialParameterError
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_tensor_parallel import BATCH, Program, Samples, loaders
from tests.lightning_programs import assert_equal, trainer, weights
from tests.parallel.tensor.families import WIDTH
from tests.sampling import sample
from tests.worlds import run

STEPS, BOUND = 4, 1e-6


class User(Program):
    """A program with one use of parameters."""

    def __init__(self, name: str, folder: str = "") -> None:
        super().__init__("hand-separate", rate=0.1)
        self.name = name
        self.kept: dict[str, Tensor] = {}
        if name in CONSTRUCTED:
            CONSTRUCTED[name](self)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        return PENALIZED[self.name](self, loss) if self.name in PENALIZED else loss

    def configure_optimizers(self) -> Any:
        if self.name in CONFIGURED:
            return CONFIGURED[self.name](self)
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        if self.name in STARTED:
            torch.manual_seed(5)
            STARTED[self.name](self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.name in AFTER_BATCH and batch_idx == 1:
            AFTER_BATCH[self.name](self)
        if self.name in AFTER_EVERY_BATCH:
            AFTER_EVERY_BATCH[self.name](self)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.name in BEFORE_STEP:
            BEFORE_STEP[self.name](self)


def _query(module: Any) -> Any:
    return module.model.blocks[0].attn.q.weight


def _matrices(module: nn.Module) -> list[Any]:
    return [param for param in module.parameters() if param.ndim >= 2]


def _all(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def changed(module: Any) -> None:
        with torch.no_grad():
            for param in module.parameters():
                change(param)

    return changed


def _on_gradients(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def changed(module: Any) -> None:
        torch.manual_seed(3)
        with torch.no_grad():
            for param in module.parameters():
                if param.grad is not None:
                    change(param)

    return changed


def _wave(shape: Any) -> Tensor:
    """Return values that differ from row to row and from column to column."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).mul(0.37).sin().view(shape)


def _set_items(param: Any) -> None:
    param.grad[_wave(param.shape) > 0.5] = 0
    param.grad[3] = 0
    if param.ndim > 1:
        param.grad[:, 5] = 0.01


def _pulled_to_kept(module: Any) -> None:
    for name, param in module.named_parameters():
        if name not in module.kept:
            module.kept[name] = param.detach().clone()
        elif param.grad is not None:
            param.grad.add_(param.detach() - module.kept[name], alpha=0.1)


def _matrix(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def changed(module: Any) -> None:
        with torch.no_grad():
            for param in _matrices(module):
                change(param)

    return changed


def _wave(shape: Any) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).sin()


def _ema(module: Any) -> None:
    for name, param in module.named_parameters():
        if name not in module.kept:
            module.kept[name] = param.detach().clone()
        module.kept[name].mul_(0.9).add_(param.detach(), alpha=0.1)
        param.data.lerp_(module.kept[name], 0.25)


def _foreach(module: Any) -> None:
    params = list(module.parameters())
    with torch.no_grad():
        torch._foreach_mul_(params, 0.95)
        torch._foreach_add_(params, [_wave(param.shape) * 0.01 for param in params])


def _half_to_zero(module: Any) -> None:
    with torch.no_grad():
        _query(module)[: WIDTH // 4] = 0.0
        module.model.emb.weight[3] = 0.0


def _loaded(module: Any) -> None:
    values = {name: _wave(param.shape) * 0.1 for name, param in module.named_parameters()}
    module.load_state_dict(values, strict=False)


def _pointed(module: Any) -> None:
    for param in module.parameters():
        param.data = param.data * 0.5


def _by_shape(module: Any) -> Any:
    groups = [
        {"params": [param], "lr": 0.1 / param.shape[-1] ** 0.5, "weight_decay": 0.01 * (param.ndim >= 2)}
        for param in module.parameters()
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def _by_numel(module: Any) -> Any:
    large = [param for param in module.parameters() if param.numel() > WIDTH * WIDTH]
    small = [param for param in module.parameters() if param.numel() <= WIDTH * WIDTH]
    return torch.optim.AdamW([{"params": large, "lr": 1e-3}, {"params": small, "lr": 3e-3}], eps=1e-4)


def _hooked(hook: Callable[[Any], Any]) -> Callable[[Any], None]:
    def registered(module: Any) -> None:
        for param in module.parameters():
            param.register_hook(hook)

    return registered


def _after_hooked(hook: Callable[[Any], Any]) -> Callable[[Any], None]:
    def registered(module: Any) -> None:
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(hook)

    return registered


def _double_grad(param: Any) -> None:
    param.grad.mul_(2.0)


def _other_grad(param: Any) -> None:
    param.grad = param.grad * 0.5 + _wave(param.shape) * 1e-3


def _decayed_by_hooks(module: Any) -> None:
    for param in module.parameters():
        param.register_hook(lambda grad, param=param: grad + 0.01 * param.detach())


class Pull(torch.autograd.Function):
    """Adds signs of a weight to its gradient, as a penalty does."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return loss * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        return grad, grad * 0.01 * weight.sign()


class PullToMean(Pull):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        return grad, grad * weight.mean() * torch.ones_like(weight)


def _by_activation(hook: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
    def hooked(module: Any, loss: Tensor) -> Tensor:
        loss = loss * 1
        loss.register_hook(lambda _: hook(module))
        return loss

    return hooked


PENALIZED: dict[str, Callable[[Any, Tensor], Tensor]] = {  # the loss of a step
    "own function": lambda module, loss: Pull.apply(loss, _query(module)),  # type: ignore[no-untyped-call]
    "own function with a mean": lambda module, loss: PullToMean.apply(loss, _query(module)),  # type: ignore[no-untyped-call]
    "hook of an activation": _by_activation(lambda module: module.kept.update(twice=_query(module) * 2)),
    "norm in the hook of an activation": _by_activation(lambda module: _query(module).norm()),
}
CONSTRUCTED: dict[str, Callable[[Any], Any]] = {  # in __init__
    "hook halves gradients": _hooked(lambda grad: grad * 0.5),
    "hook clamps gradients": _hooked(lambda grad: grad.clamp(-1e-3, 1e-3)),
    "hook after accumulation": _after_hooked(_double_grad),
    "hook reduces gradient of init": _hooked(lambda grad: grad / grad.norm()),
    "hooks add weights": _decayed_by_hooks,
    "hook of an uncut parameter": lambda module: module.model.blocks[0].ln1.weight.register_hook(
        lambda grad: grad * (1 + _query(module).norm())
    ),
    "hook behind an uncut parameter": lambda module: module.model.blocks[
        0
    ].ln1.weight.register_post_accumulate_grad_hook(lambda one: module.kept.update(norm=_query(module).norm())),
}
CONFIGURED: dict[str, Callable[[Any], Any]] = {
    "rates by shape": _by_shape,
    "groups by size": _by_numel,
    "foreach optimizer": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "fused optimizer": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, fused=True),
    "init in configure_optimizers": lambda module: (
        _matrix(lambda one: one.mul_(one.shape[0] ** -0.5))(module),
        Program.configure_optimizers(module),
    )[1],
    "rates by norm": lambda module: torch.optim.SGD(
        [{"params": [one], "lr": 0.1 * float(one.norm())} for one in module.parameters()], lr=0.1
    ),
}
STARTED: dict[str, Callable[[Any], Any]] = {
    "normal": _matrix(lambda one: nn.init.normal_(one, std=0.02)),
    "kaiming": _matrix(nn.init.kaiming_uniform_),
    "xavier": _matrix(nn.init.xavier_normal_),
    "truncated": _matrix(lambda one: one.copy_(nn.init.trunc_normal_(torch.empty(one.shape), std=0.02))),
    "orthogonal": _matrix(nn.init.orthogonal_),
    "constants": _all(lambda one: nn.init.constant_(one, 0.01)),
    "method draws": _matrix(lambda one: one.uniform_(-0.1, 0.1)),
    "noise": _matrix(lambda one: one.add_(torch.randn_like(one), alpha=0.01)),
    "hook of fit start": _hooked(lambda grad: grad * 0.5),
    "hook with a mask": _hooked(lambda grad: grad * (_wave(grad.shape) > 0)),
    "hook after accumulation of fit start": _after_hooked(_other_grad),
    "hook reduces gradient": _hooked(lambda grad: grad / (grad.norm() + 1)),
    "hook centres gradient": _hooked(lambda grad: grad - grad.mean(0)),
    "spectral initialisation": _matrix(lambda one: one.div_(torch.linalg.matrix_norm(one, 2))),
    "sparse initialisation": _matrix(lambda one: nn.init.sparse_(one, 0.5)),
}
AFTER_EVERY_BATCH: dict[str, Callable[[Any], Any]] = {
    "clamp": _all(lambda one: one.clamp_(-0.1, 0.1)),
    "decay": _all(lambda one: one.mul_(0.9)),
    "decay of data": lambda module: [one.data.mul_(0.9) for one in module.parameters()],
    "whole mask": _matrix(lambda one: one.mul_(_wave(one.shape) > -0.5)),
    "own mask": _matrix(lambda one: one.mul_(one.abs() > 0.01)),
    "add whole": _matrix(lambda one: one.add_(_wave(one.shape), alpha=0.01)),
    "add rows": _matrix(lambda one: one.add_(_wave(one.shape[-1:]), alpha=0.01)),
    "foreach": _foreach,
    "ema by hand": _ema,
    "pointed data": _pointed,
}
AFTER_BATCH: dict[str, Callable[[Any], Any]] = {
    "copy whole": _matrix(lambda one: one.copy_(_wave(one.shape) * 0.1)),
    "set rows": _half_to_zero,
    "load_state_dict": _loaded,
    "zero": lambda module: nn.init.zeros_(_query(module)),
    "norm": lambda module: _query(module).norm(),
    "mean": lambda module: _query(module).data.mean(),
    "centre": lambda module: _query(module).data.sub_(_query(module).data.mean()),
    "largest": lambda module: _query(module).abs().max().item(),
    "histogram": lambda module: torch.histc(_query(module).detach()),
    "numpy": lambda module: _query(module).detach().cpu().numpy(),
    "row": lambda module: _query(module)[0].clone(),
    "view": lambda module: _query(module).view(-1),
    "transpose": lambda module: _query(module).t(),
    "product": lambda module: _query(module) @ _query(module).t(),
    "layer by hand": lambda module: module.model.blocks[0].attn.q(torch.ones(1, WIDTH)),
    "state_dict": lambda module: module.state_dict(),
    "state_dict of a block": lambda module: module.model.blocks[0].state_dict(),
    "deepcopy": lambda module: copy.deepcopy(module.model.blocks[0].attn.q),
    "pickle": lambda module: pickle.dumps(_query(module)),
    "torch.save": lambda module: torch.save({"q": _query(module)}, "/dev/null"),
    "vector": lambda module: nn.utils.parameters_to_vector(module.parameters()),
    "finite": lambda module: torch.isfinite(_query(module)).all(),
    "rank": lambda module: torch.linalg.matrix_rank(_query(module)),
    "equal": lambda module: torch.equal(_query(module), torch.zeros(WIDTH, WIDTH)),
    "copy into a whole tensor": lambda module: torch.zeros(WIDTH, WIDTH).copy_(_query(module)),
    "average in whole tensors": lambda module: torch.zeros(WIDTH, WIDTH).lerp_(_query(module).detach(), 0.1),
    "prune": lambda module: _query(module).data.mul_(_query(module).abs() > _query(module).abs().quantile(0.1)),
}
BEFORE_STEP: dict[str, Callable[[Any], Any]] = {
    "clipping by hand": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 0.05),
    "noise on gradients": lambda module: [one.grad.add_(0.001) for one in module.parameters()],
    "random noise on gradients": _on_gradients(lambda one: one.grad.add_(0.01 * torch.randn_like(one.grad))),
    "random noise of the shape": _on_gradients(lambda one: one.grad.add_(0.01 * torch.randn(one.grad.shape))),
    "mask of the shape": _on_gradients(lambda one: one.grad.mul_(_wave(one.shape) > -0.3)),
    "masked gradients assigned": _on_gradients(lambda one: setattr(one, "grad", one.grad * (_wave(one.shape) > -0.3))),
    "mask made of values": _on_gradients(lambda one: one.grad.mul_(one.detach() > 0)),
    "gradients of the shape assigned": _on_gradients(lambda one: setattr(one, "grad", 0.1 * _wave(one.shape))),
    "gradients assigned before they are read": lambda module: [
        setattr(one, "grad", 0.1 * _wave(one.shape)) for one in module.parameters()
    ],
    "items of gradients": _on_gradients(_set_items),
    "values after gradients": _on_gradients(
        lambda one: one.data.add_(one.grad, alpha=0.01).mul_(_wave(one.shape) > -0.9)
    ),
    "values assigned after gradients": _on_gradients(lambda one: setattr(one, "data", 0.1 * _wave(one.shape))),
    "rows of values after gradients": _on_gradients(lambda one: one.data.__setitem__(0, 0.01)),
    "pulled to kept values": _pulled_to_kept,
    "adaptive clipping by the size": _on_gradients(
        lambda one: one.grad.mul_(torch.rsqrt(one.grad.norm() ** 2 / one.numel() + 1e-3) * 0.01)
    ),
}
REFUSED = [
    "own function with a mean", "norm in the hook of an activation", "hook of an uncut parameter",
    "hook behind an uncut parameter",
    "hook reduces gradient of init", "rates by norm", "hook reduces gradient", "hook centres gradient",
    "spectral initialisation", "norm", "mean", "centre", "largest", "histogram", "numpy",
    "row", "view", "transpose", "product", "layer by hand", "state_dict", "state_dict of a block", "deepcopy", "pickle",
    "torch.save", "vector", "finite", "rank", "equal", "copy into a whole tensor",
    "average in whole tensors", "prune",
]  # fmt: skip
TABLES = (PENALIZED, CONSTRUCTED, CONFIGURED, STARTED, AFTER_EVERY_BATCH, AFTER_BATCH, BEFORE_STEP)
RIGHT = [name for table in TABLES for name in table if name not in REFUSED]


def _fit(rank: int, world: int, name: str, stage: int | None, more: dict[str, Any]) -> dict[str, Tensor]:
    strategy = "auto" if stage is None else ZeroStrategy(stage=stage, tensor_parallel=2, **more)  # type: ignore[arg-type]
    fitted = trainer(rank, world, strategy, max_steps=STEPS, limit_val_batches=0)
    size = 1 if stage is None else 2
    fitted.fit(User(name), loaders("hand-separate", world // size, rank // size)["train_dataloaders"])
    return {name: value for name, value in weights(fitted).items() if not name.startswith(("mean", "count"))}


def _compare(name: str, stage: int, more: dict[str, Any] | None = None, world: int = 2) -> None:
    expected = run(_fit, 1, name, None, {})[0]
    for got in run(_fit, world, name, stage, more or {}):
        assert_equal(got, expected, BOUND, name)


@pytest.mark.parametrize("name", sample(RIGHT, *sorted(RIGHT)[::5]))
def test_programs_train_as_on_one_rank(name: str) -> None:
    _compare(name, 1)


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", sample(["clamp", "ema by hand", "kaiming", "rates by shape", "hook halves gradients"], "kaiming")
)
def test_stages_with_whole_parameters_train_them_too(name: str, stage: int) -> None:
    _compare(name, stage)


@pytest.mark.parametrize(
    "name",
    sample(
        ["rates by shape", "groups by size", "hook with a mask", "hook after accumulation", "clipping by hand"],
        "hook with a mask",
        "clipping by hand",
    ),
)
def test_programs_train_where_parameters_are_released(name: str) -> None:
    _compare(name, 3)


SEGMENTS = [(name, stage) for name in BEFORE_STEP for stage in (2, 3) if (name, stage) != ("pulled to kept values", 3)]


@pytest.mark.parametrize("case", sample(SEGMENTS, ("items of gradients", 2), ("random noise on gradients", 3)))
def test_programs_change_gradients_of_which_a_rank_has_a_segment_of_a_part(case: tuple[str, int]) -> None:
    _compare(*case, world=4)


@pytest.mark.parametrize("name", sample(["clamp", "kaiming"], "clamp"))
def test_programs_train_with_deferred_steps(name: str) -> None:
    _compare(name, 1, {"step": "deferred"})


def _told(rank: int, world: int, name: str) -> str:
    try:
        _fit(rank, world, name, 1, {})
    except PartialParameterError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "name", sample(REFUSED, "norm", "state_dict", "hook reduces gradient", "view", "pickle", "rates by norm")
)
def test_programs_that_need_all_elements_are_refused_by_name(name: str) -> None:
    for text in run(_told, 2, name):
        assert "`model." in text
        assert "full_param" in text


# -- Around a fit ------------------------------------------------------------------------------------------------------


def _gathered(rank: int, world: int) -> None:
    class Gathering(Program):
        def on_train_batch_end(self, *args: Any) -> None:
            strategy, param = self.trainer.strategy, _query(self)
            with strategy.gathered([param], write="all"), torch.no_grad():
                param.mul_(0.5)
                with pytest.raises(PartialParameterError, match="attn.q.weight"):
                    param.norm()
            assert strategy.full_param(param).shape == (WIDTH, WIDTH)

    fitted = trainer(rank, world, ZeroStrategy(stage=3, tensor_parallel=2), max_steps=2, limit_val_batches=0)
    fitted.fit(Gathering("hand-separate"), loaders("hand-separate", 1, 0)["train_dataloaders"])


def test_gathered_parameters_look_whole_too() -> None:
    run(_gathered, 2)


class Average(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None


def _averaged(rank: int, world: int, stage: int | None, kind: str) -> dict[str, Tensor]:
    strategy = "auto" if stage is None else ZeroStrategy(stage=stage, tensor_parallel=2)  # type: ignore[arg-type]
    callback = Average() if kind == "ema" else StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    fitted = trainer(rank, world, strategy, max_epochs=2, limit_train_batches=2, limit_val_batches=0,
                     callbacks=[callback])  # fmt: skip
    fitted.fit(User("clamp"), loaders("hand-separate", 1, 0)["train_dataloaders"])
    return {name: value for name, value in weights(fitted).items() if not name.startswith(("mean", "count"))}


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averaging_callbacks_average_parts(kind: str) -> None:
    expected = run(_averaged, 1, None, kind)[0]
    for got in run(_averaged, 2, 1, kind):
        assert_equal(got, expected, BOUND, kind)


def _other_strategy(rank: int, world: int, kind: str) -> str:
    module = User("")
    fitted = trainer(rank, world, ZeroStrategy(stage=1, tensor_parallel=2), max_steps=1, limit_val_batches=0)
    fitted.fit(module, loaders("hand-separate", 1, 0)["train_dataloaders"])
    batch = next(iter(loaders("hand-separate", 1, 0)["train_dataloaders"]))
    with torch.no_grad():
        assert module._loss(batch).isfinite()
    try:
        if kind == "loop":
            module._loss(batch).backward()
        else:
            other = trainer(rank, world if kind == "ddp" else 1, kind, max_steps=1, limit_val_batches=0)
            other.fit(module, DataLoader(Samples("plain"), batch_size=BATCH))
    except PartialParameterError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [("ddp", "is cut by `tensor_parallel`"), ("auto", "is cut over 2 ranks"), ("loop", "is cut over 2 ranks")],
)
def test_nobody_else_trains_parts(kind: str, message: str) -> None:
    for text in run(_other_strategy, 2, kind):
        assert message in text


class Compiled(User):
    def __init__(self, is_compiled: bool) -> None:
        super().__init__("clamp")
        for block in self.model.blocks if is_compiled else ():  # type: ignore[union-attr]
            block.compile(backend="eager")  # type: ignore[union-attr]


def _compiled(rank: int, world: int, is_compiled: bool) -> dict[str, Tensor]:
    fitted = trainer(rank, world, ZeroStrategy(stage=1, tensor_parallel=2), max_steps=2, limit_val_batches=0)
    fitted.fit(Compiled(is_compiled), loaders("hand-separate", 1, 0)["train_dataloaders"])
    return {name: value for name, value in weights(fitted).items() if not name.startswith(("mean", "count"))}


def test_compiled_blocks_compute_with_parts() -> None:
    expected = run(_compiled, 2, False)[0]
    for got in run(_compiled, 2, True):
        assert_equal(got, expected, BOUND)


class Transformed(Samples):
    """Replaces random tokens."""

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids = super().__getitem__(number)["ids"]
        return {"ids": torch.where(torch.rand(ids.shape) < 0.3, torch.randint(2, 100, ids.shape), ids)}


class Drawing(User):
    def on_train_start(self) -> None:
        if self.global_rank == 0:
            torch.rand(2)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 0:
            torch.rand(3)


def _transformed(rank: int, world: int, workers: int) -> dict[str, Tensor]:
    strategy = "auto" if world == 1 else ZeroStrategy(stage=1, tensor_parallel=2)
    fitted = trainer(rank, world, strategy, max_epochs=2, limit_train_batches=3, limit_val_batches=0)
    module = Drawing("")
    torch.manual_seed(5)
    loader = DataLoader(
        Transformed("plain"),
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,  # as on Linux; a rank of `worlds` starts a server instead
    )
    with patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]  # for workers
        fitted.fit(module, loader)
    return {name: value for name, value in weights(fitted).items() if not name.startswith(("mean", "count"))}


@pytest.mark.parametrize("workers", [0, 2])
def test_random_transforms(workers: int) -> None:
    first, second = run(_transformed, 2, workers)
    assert_equal(first, second, 0.0)
