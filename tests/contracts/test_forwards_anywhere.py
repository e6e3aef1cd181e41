"""Forwards of any submodule, wherever every rank makes them, without a scope: as under DistributedDataParallel."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_zero.config import Communication
from lightning_zero.errors import ReleasedParameterError
from tests import worlds
from tests.lightning_programs import WORLD, Net, assert_equal, loader, seeded, trainer, weights
from tests.references import WIDTH, Block, Replica, Sharded, Trainer, adamw, difference, token_loss, tokens
from tests.references import outcome as outcome_of
from tests.worlds import run


class Scaled(nn.Module):
    """A parent that uses its own parameter directly, and its children, and has a method beside ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH) * 1.25)
        self.shift = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Sequential(nn.LayerNorm(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x * self.scale) + self.shift
        return result


class Positions(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, WIDTH))

    def forward(self, count: int) -> Tensor:
        return self.weight[:count]


class Nested(nn.Module):
    """Parameters in the root's unit, in blocks, and in containers of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.positions = Positions()
        self.encoder = nn.Sequential(Scaled(), nn.Sequential(Block(), Block()), Scaled())
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def encode(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids) + self.positions(ids.shape[-1])
        x = self.encoder(x)
        return self.norm(self.weighted(self.recurrent(x)[0]))

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.encode(ids))
        return result


# -- Plain loops -------------------------------------------------------------------------------------------------------

Look = Callable[[Trainer, int], Tensor]


def _x(trainer: Trainer, step: int) -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(100 * trainer.rank + step))


LOOKS: dict[str, Look] = {
    "leaf of the root": lambda trainer, step: trainer.module.norm(_x(trainer, step)),
    "tied head": lambda trainer, step: trainer.module.head(_x(trainer, step)),
    "embedding": lambda trainer, step: trainer.module.embedding(tokens(trainer.rank, step)),
    "inside a block": lambda trainer, step: trainer.module.encoder[1][0].up(_x(trainer, step)),
    "own parameter": lambda trainer, step: trainer.module.encoder[0](_x(trainer, step)),
    "container": lambda trainer, step: trainer.module.encoder(_x(trainer, step)),
    "view of a parameter": lambda trainer, step: trainer.module.positions(5) * 2,
    "recurrent": lambda trainer, step: trainer.module.recurrent(_x(trainer, step))[0],
    "parametrized": lambda trainer, step: trainer.module.weighted(_x(trainer, step)),
    "method": lambda trainer, step: trainer.module.encode(tokens(trainer.rank, step)),
    "root": lambda trainer, step: trainer.module(tokens(trainer.rank, step)),
}


def _looks(trainer: Trainer, mode: Callable[[], Any], training: bool, only: list[str]) -> None:
    optimizer = adamw(trainer.module)
    trainer.attach(optimizer)
    module = trainer.module

    def look(step: int) -> None:
        module.train(training)
        with mode():
            for name in only:
                for _ in range(2):
                    trainer.losses.append(LOOKS[name](trainer, step).detach().clone())
        module.train()

    for step in range(3):
        look(step)
        optimizer.zero_grad()
        with trainer.scope():
            loss = token_loss(module, trainer.rank, step)
        look(step)
        trainer.backward(loss)
        look(step)
        optimizer.step()
        look(step)


def _compared(
    rank: int, world: int, prefetch: int, program: Callable[..., None], arguments: tuple[Any, ...], **options: Any
) -> str:
    worlds.seed()
    plain = Replica(Nested(), rank, world)
    program(plain, *arguments)
    worlds.seed()
    communication = Communication(prefetch=prefetch, timeout_s=20)
    zero = Sharded(Nested(), rank, world, stage=3, units=["Block"], communication=communication, **options)
    program(zero, *arguments)
    found = difference(outcome_of(zero), outcome_of(plain), tolerance=1e-6)
    assert zero.engine.stats().memory["gathered"] == 0
    zero.engine.close()
    return found


MODES: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def _looks_in(rank: int, world: int, prefetch: int, mode: str, training: bool, only: list[str]) -> str:
    return _compared(rank, world, prefetch, _looks, (MODES[mode], training, only))


@pytest.mark.parametrize(
    ("mode", "training", "prefetch"),
    [("grad", True, 2), pytest.param("no_grad", False, 1, marks=pytest.mark.slow), ("inference", False, 0)],
)
def test_forwards_of_submodules_between_steps_need_no_scope(mode: str, training: bool, prefetch: int) -> None:
    assert worlds.run(_looks_in, 2, prefetch, mode, training, list(LOOKS)) == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("name", list(LOOKS))
def test_a_forward_of_one_submodule_between_steps_needs_no_scope(name: str, mode: str, prefetch: int) -> None:
    assert worlds.run(_looks_in, 2, prefetch, mode, mode == "grad", [name]) == ["", ""]


def _losses_of_parts(trainer: Trainer, bare: bool) -> None:
    """The loss is made of forwards of submodules alone; ranks make the same ones."""
    optimizer = adamw(trainer.module)
    trainer.attach(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        module = trainer.module
        x = module.encode(tokens(trainer.rank, step))
        side = module.encoder[1][1].up(module.norm(x)).square().mean()
        trainer.backward(
            F.cross_entropy(module.head(x).flatten(0, 1), tokens(trainer.rank, step).flatten()) + side, bare=bare
        )
        trainer.backward(module.encoder[0](_x(trainer, step)).square().mean(), bare=bare)
        optimizer.step()


def _losses_in(rank: int, world: int, prefetch: int, bare: bool) -> str:
    return _compared(rank, world, prefetch, _losses_of_parts, (bare,))


@pytest.mark.parametrize(("prefetch", "bare"), [(0, True), (2, False), (2, True)])
def test_a_loss_of_forwards_of_submodules_trains(prefetch: int, bare: bool) -> None:
    assert worlds.run(_losses_in, 2, prefetch, bare) == ["", ""]


class _Fault(Exception):
    pass


def _failing(trainer: Trainer, error: type[BaseException]) -> None:
    def fail(*_: Any) -> None:
        raise error

    optimizer = adamw(trainer.module)
    trainer.attach(optimizer)
    for step in range(5):
        module = trainer.module
        for part in (module.encoder[2].inner[1], module.encoder[1][1].up, module.norm):
            handle = part.register_forward_pre_hook(fail)
            for name in ("container", "method", "leaf of the root"):
                with contextlib.suppress(error):
                    LOOKS[name](trainer, step)
            handle.remove()
            trainer.losses.append(LOOKS["container"](trainer, step).detach().clone())
        optimizer.zero_grad()
        trainer.backward(token_loss(module, trainer.rank, step), bare=True)
        optimizer.step()


def _failing_in(rank: int, world: int, error: type[BaseException]) -> str:
    return _compared(rank, world, 2, _failing, (error,))


@pytest.mark.parametrize("error", [_Fault, KeyboardInterrupt])
def test_training_goes_on_after_an_error_in_a_forward_of_a_submodule(error: type[BaseException]) -> None:
    assert worlds.run(_failing_in, 2, error) == ["", ""]


# -- Beside it ---------------------------------------------------------------------------------------------------------


def _beside(rank: int, world: int) -> list[str]:
    worlds.seed()
    zero = Sharded(Nested(), rank, world, stage=3, units=["Block"], communication=Communication(timeout_s=20))
    module: Any = zero.module
    wrong = []
    for use in (lambda: module.norm.weight.sum(), lambda: F.linear(torch.ones(WIDTH), module.head.weight)):
        with contextlib.suppress(ReleasedParameterError):
            use()
            wrong.append("a parameter could be used outside of any forward")
    expected = module.encoder[0](torch.ones(2, WIDTH))
    with zero.engine.gathered(module):
        copied = copy.deepcopy(module.encoder[0])
        pickled = pickle.loads(pickle.dumps(module.encoder[0]))
        whole = copy.deepcopy(module)
    for other in (copied, pickled, whole.encoder[0]):
        if rank == 0 and not torch.equal(other(torch.ones(2, WIDTH)), expected):  # one rank alone: nothing is gathered
            wrong.append("a copy computes something else")
    with zero.engine.gathered(module.encoder[0]):
        if rank == 0 and not torch.equal(module.encoder[0](torch.ones(2, WIDTH)), expected):
            wrong.append("inside `gathered`")
    with zero.engine.gathered(module.encoder[1][0]):
        if rank == 1:
            module.encoder[1][0](torch.ones(2, WIDTH))
            module.encoder[1][0].up(torch.ones(2, WIDTH)).sum().item()
    zero.engine.close()
    return wrong


def test_submodules_are_copied_pickled_and_used_by_one_rank_inside_gathered() -> None:
    assert worlds.run(_beside, 2) == [[], []]


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _compiled(rank: int, world: int) -> bool:
    torch._dynamo.reset()
    worlds.seed()
    zero = Sharded(_Deep(), rank, world, stage=3, units=["Scaled"], communication=Communication(timeout_s=20))
    module: Any = zero.module
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        plain = module(x)
    for block in module.blocks:
        block.inner = torch.compile(block.inner, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        same = torch.allclose(module(x), plain, atol=1e-6)
    module(x).sum().backward()
    zero.engine.close()
    return same


@pytest.mark.slow
def test_a_part_of_a_block_is_compiled_as_one_graph() -> None:
    assert worlds.run(_compiled, 2, timeout_s=120) == [True, True]


# -- Lightning ---------------------------------------------------------------------------------------------------------


def sample(module: Any) -> list[Tensor]:
    with torch.no_grad():
        x = module.first(torch.ones(2, 4))
        return [module.blocks[0].linear(x), module.blocks[1].norm(x), module.last(x), module.blocks[1](x)]


class Sampling(Net):
    """Makes samples in hooks of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def on_train_start(self) -> None:
        self.seen += sample(self)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += sample(self)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen += sample(self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += sample(self)

    def on_validation_epoch_end(self) -> None:
        self.seen += sample(self)

    def on_train_epoch_end(self) -> None:
        self.seen += sample(self)


class Sampler(Callback):
    """And in those of a callback."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.seen += sample(module)

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.seen += sample(module)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        module.seen += sample(module)


def sampled(rank: int, world: int) -> None:
    found = {}
    for strategy in ("ddp", 3):
        module = seeded(Sampling)
        fitted = trainer(rank, world, strategy, max_epochs=1, callbacks=[Sampler()])
        fitted.fit(module, loader(rank, world, 16), loader(rank, world, 8))
        after = sample(module)
        found[strategy] = ([*module.seen, *after], weights(fitted))
    assert_equal(found[3][1], found["ddp"][1])
    assert len(found[3][0]) == len(found["ddp"][0])
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(found[3][0], found["ddp"][0], strict=True))


def test_samples_of_submodules_in_hooks_and_callbacks_are_those_of_ddp() -> None:
    run(sampled, WORLD, timeout_s=90)


# -- Module buffers ----------------------------------------------------------------------------------------------------


class Normed(Net):
    """Batch norm, and a centre of the data that every rank finds for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("center", torch.zeros(3))
        self.seen: list[tuple[str, dict[str, Tensor]]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.norm(self.blocks(self.first(x))))
        if self.training:
            self.center.lerp_(y.detach().mean(0), 0.5)
        return y - self.center

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.center += 0.125 * (1 + self.global_rank)
        self.loss(batch)


class Forwards(Callback):
    """Runs forwards of the whole module in hooks, which differ in mode from hook to hook."""

    def __init__(self, rank: int) -> None:
        self.x = torch.randn(4, 4, generator=torch.Generator().manual_seed(90 + rank))

    def look(self, name: str, module: Any, *, grad: bool, training: bool | None = None) -> None:
        was_training = module.training
        module.train(was_training if training is None else training)
        with torch.set_grad_enabled(grad):
            module(self.x)
        module.train(was_training)
        module.seen.append((name, {key: buffer.clone() for key, buffer in module.named_buffers()}))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.look("start", module, grad=batch_idx % 2 == 0)

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if trainer.global_step % 2:
            self.look("after backward", module, grad=False, training=True)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look("end", module, grad=False, training=batch_idx % 3 == 0)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.look("validation", module, grad=True, training=True)

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.look("validation batch", module, grad=False)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.look("fit end", module, grad=False, training=True)


def normed(rank: int, world: int) -> None:
    def fit(strategy: Any) -> list[tuple[str, dict[str, Tensor]]]:
        module = seeded(Normed)
        options = {"max_epochs": 1, "callbacks": [Forwards(rank)]}
        fitted = trainer(rank, world, strategy, accumulate_grad_batches=2, val_check_interval=3, **options)
        fitted.fit(module, loader(rank, world, 56), loader(rank, world, 16))
        seen = [*module.seen, ("weights", weights(fitted))]
        fitted.validate(module, loader(rank, world, 16), verbose=False)
        seen += [("validated", {key: buffer.clone() for key, buffer in module.named_buffers()})]
        again = trainer(rank, world, strategy, **options)
        again.fit(module, loader(rank, world, 16))
        return [*seen, *module.seen, ("weights", weights(again))]

    expected = fit("ddp")
    for stage in (1, 3):
        found = fit(stage)
        assert [name for name, _ in found] == [name for name, _ in expected]
        for place, (name, values) in enumerate(found):
            assert_equal(values, expected[place][1], 1e-6, (stage, place, name))


def test_forwards_in_hooks_leave_module_buffers_as_ddp_leaves_them() -> None:
    run(normed, WORLD, timeout_s=90)
