"""Code between two steps of a ``bf16-mixed`` fit has fp32 parameters with the masters' values, as under DDP."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.comm import communicator
from lightning_zero.config import Communication, MixedPrecision, Offload
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.errors import CollectiveError
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.lightning_programs import STAGES, Net, assert_equal, loader, seeded, trainer, weights
from tests.references import TinyGPT, token_loss
from tests.sampling import sample
from tests.simulated_device import SimulatedDevice
from tests.simulated_transport import BACKEND


class Pair(Net):
    """A model and a frozen copy of it that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(nn.Sequential(self.first, *self.blocks, self.last)).requires_grad_(False)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            aim = self.target(x)
        out = self(x)  # once: gradients of several uses would be added in 16 bits
        return F.mse_loss(out, y) + 0.1 * F.mse_loss(out, aim)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02, fused=True)

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        online = nn.Sequential(self.first, *self.blocks, self.last)
        return list(zip(online.parameters(), self.target.parameters(), strict=True))


class Do(Callback):
    """Does something in a hook."""

    def __init__(self, hook: str, act: Callable[[Any], object]) -> None:
        def call(trainer: Trainer, module: LightningModule, *_: Any, **__: Any) -> None:
            if trainer.state.fn == "fit":
                act(module)

        setattr(self, hook, call)


@torch.no_grad()
def follow(module: Any) -> None:
    for online, target in module.pairs:
        target.lerp_(online, 0.01)


@torch.no_grad()
def follow_by_data(module: Any) -> None:
    for online, target in module.pairs:
        target.data = target.data * 0.99 + online.data * 0.01


@torch.no_grad()
def follow_at_once(module: Any) -> None:
    torch._foreach_lerp_([target for _, target in module.pairs], [online for online, _ in module.pairs], 0.01)


@torch.no_grad()
def decay(module: Any) -> None:
    for param in module.parameters():
        param.mul_(1 - 2**-12)


@torch.no_grad()
def clamp_data(module: Any) -> None:
    for param in module.parameters():
        param.data.clamp_(-0.3, 0.3)


@torch.no_grad()
def look(module: Any) -> None:
    look_with_gradients(module)


def look_with_gradients(module: Any) -> None:
    """Compute with the module and its parts, without autocast."""
    x = torch.linspace(-1, 1, 8).view(2, 4)
    module.seen.append(module(x))
    module.seen.append(module.target(x) + module.target[0](x).sum())


def keep_a_copy(module: Any) -> None:
    module.seen += [value.clone() for value in module.state_dict().values()]
    module.seen += [value.detach() for value in copy.deepcopy(module.blocks).parameters()]
    module.seen.append(nn.utils.parameters_to_vector(module.parameters()).detach())
    module.seen.append(F.linear(torch.ones(4), module.first.weight).detach())


def slope(module: Any) -> None:
    """Differentiate in a hook, by an input and by a weight."""
    x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
    module.seen += torch.autograd.grad(module(x).square().sum(), [x, module.first.weight, module.last.bias])


PROGRAMS: dict[str, list[tuple[str, Callable[[Any], object]]]] = {
    "follow": [("on_train_batch_end", follow)],
    "follow-by-data": [("on_train_batch_end", follow_by_data)],
    "follow-at-once": [("on_train_batch_start", follow_at_once)],
    "follow-between-forward-and-backward": [("on_before_zero_grad", follow)],
    "decay": [("on_train_batch_end", decay)],
    "clamp-data": [("on_train_batch_start", clamp_data)],
    "look": [("on_train_batch_start", look), ("on_train_batch_end", look), ("on_train_epoch_end", look)],
    "look-between-forward-and-backward": [("on_before_zero_grad", look), ("on_before_backward", look)],
    "look-with-gradients": [("on_before_zero_grad", look_with_gradients), ("on_train_batch_end", look_with_gradients)],
    "slope-between-forward-and-backward": [("on_before_zero_grad", slope), ("on_before_backward", slope)],
    "look-before-the-step": [("on_before_optimizer_step", look)],
    "copies": [("on_train_start", keep_a_copy), ("on_train_batch_end", keep_a_copy), ("on_train_end", keep_a_copy)],
    "copies-before-the-step": [("on_before_optimizer_step", keep_a_copy), ("on_after_backward", keep_a_copy)],
    "slope": [("on_train_batch_end", slope)],
    "all": [
        ("on_train_start", keep_a_copy), ("on_train_batch_start", look), ("on_before_zero_grad", follow),
        ("on_train_batch_end", decay), ("on_train_epoch_end", slope), ("on_train_end", look),
    ],
}  # fmt: skip
RELEASED = (
    "look",
    "look-between-forward-and-backward",
    "look-with-gradients",
    "look-before-the-step",
    "slope",
    "slope-between-forward-and-backward",
)  # works at stage 3 without `gathered`


def _fit(rank: int, world: int, strategy: Any, program: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    callbacks = [Do(hook, act) for hook, act in PROGRAMS[program]]
    fitted = trainer(
        rank, world, strategy, precision="bf16-mixed", callbacks=callbacks, max_epochs=1, gradient_clip_val=None
    )
    module: Any = seeded(Pair)
    fitted.fit(module, loader(rank, world))
    return weights(fitted), [value.detach().clone() for value in module.seen]


def _as_under_ddp(rank: int, world: int, stages: list[int], program: str, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        expected, expected_seen = _fit(rank, world, "ddp", program)
        for stage in stages:
            got, seen = _fit(rank, world, ZeroStrategy(stage=stage, **options), program)  # type: ignore[arg-type]
            assert_equal(got, expected, 1e-6, (stage, program))
            assert len(seen) == len(expected_seen)
            for mine, theirs in zip(seen, expected_seen, strict=True):
                assert mine.dtype == theirs.dtype
                torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("program", PROGRAMS)
def test_hooks_see_and_write_what_they_do_under_ddp(program: str) -> None:
    stages = [1, 3] if program in RELEASED else [1]
    worlds.run(_as_under_ddp, 2, stages, program, {})


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"offload": "cpu"}, {"step": "deferred"}], ids=["plain", "cpu", "deferred"])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_hooks_do_so_at_every_stage(program: str, world: int, options: dict[str, Any]) -> None:
    stages = [stage for stage in STAGES if stage < 3 or program in RELEASED or world == 1]
    worlds.run(_as_under_ddp, world, stages, program, options)


class Fp32Head(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.first(batch[0])
        with torch.autocast("cpu", enabled=False):
            return F.mse_loss(self.last(x.float()), batch[1])


def _refused(rank: int, world: int, stage: int) -> None:
    with pytest.raises(RuntimeError, match=r"weights of linear layers.*are in 16 bits.*cast the input"):
        trainer(rank, world, stage, precision="bf16-mixed").fit(seeded(Fp32Head), loader(rank, world))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_layer_without_autocast_in_a_step_is_told_of_its_dtype(stage: int) -> None:
    worlds.run(_refused, 2, stage)


class Writes(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.last.weight.data.mul_(0.9)


def _written_before_backward(rank: int, world: int, stage: int) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trainer(rank, world, stage, precision="bf16-mixed").fit(seeded(Writes), loader(rank, world))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_write_through_data_between_forward_and_backward_is_no_other_gradient(stage: int) -> None:
    worlds.run(_written_before_backward, 2, stage)


class Swaps(Net):
    """Validates with other weights, as averages do, inside an epoch."""

    @torch.no_grad()
    def on_validation_epoch_start(self) -> None:
        self.kept = [param.data.clone() for param in self.parameters()]
        for param in self.parameters():
            param.data.copy_(param.data * 0.5)

    @torch.no_grad()
    def on_validation_epoch_end(self) -> None:
        for param, kept in zip(self.parameters(), self.kept, strict=True):
            param.data.copy_(kept)


def _swap(rank: int, world: int, precision: str) -> None:
    values = []
    for strategy in ("ddp", 1):
        fitted = trainer(rank, world, strategy, precision=precision, max_epochs=1, val_check_interval=2)
        fitted.fit(seeded(Swaps), loader(rank, world), loader(rank, world))
        values.append({**weights(fitted), "val_loss": fitted.callback_metrics["val_loss"]})
    assert_equal(values[1], values[0], 1e-6)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_validation_inside_an_epoch_may_swap_weights(precision: str) -> None:
    worlds.run(_swap, 2, precision)


# -- Plain loops -------------------------------------------------------------------------------------------------------

BF16 = MixedPrecision(compute_dtype=torch.bfloat16)


def _train(rank: int, world: int, stage: int, precision: MixedPrecision, options: dict[str, Any]) -> dict[str, Tensor]:
    """Train without autocast, with and without activation checkpointing."""
    engine = ZeroEngine(stage, precision=precision, **options)
    module: Any = engine.shard(TinyGPT())
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=1e-2))
    for step in range(4):
        if step == 2:
            module.blocks[1].forward = partial(checkpoint, module.blocks[1].forward, use_reentrant=False)
        token_loss(module, rank, step).backward()
        assert all(param.dtype == torch.float32 for param in module.parameters())
        optimizer.step()
        optimizer.zero_grad()
    values = {name: engine.full_param(param) for name, param in module.named_parameters()}
    engine.close()
    return values


@pytest.mark.parametrize(
    "case",
    sample(
        [(stage, how) for stage in (1, 2, 3) for how in ("plain", "backward", "cpu")],
        (1, "plain"), (2, "backward"), (3, "plain"),
    ),
    ids=lambda case: "stage{}-{}".format(*case),
)  # fmt: skip
def test_without_autocast_a_loop_trains_in_fp32(case: tuple[int, str]) -> None:
    stage, how = case
    options = {"plain": {}, "backward": {"step": "backward"}, "cpu": {"offload": "cpu"}}[how]
    lowered = worlds.run(_train, 2, stage, BF16, options)[0]
    assert_equal(lowered, worlds.run(_train, 2, stage, MixedPrecision(), options)[0])


def _mixed_graphs(rank: int, world: int, stage: int, autocast_first: bool) -> dict[str, Tensor]:
    """Add two losses, one of a forward under autocast, and return the gradients."""
    engine = ZeroEngine(stage, precision=BF16)
    module = engine.shard(TinyGPT())
    losses = []
    for enabled in (autocast_first, not autocast_first):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses.append(token_loss(module, 0, 0))
    sum(losses).backward()  # type: ignore[union-attr]
    grads = {name: engine.full_grad(param) for name, param in module.named_parameters()}
    engine.close()
    return grads  # type: ignore[return-value]


@pytest.mark.parametrize("autocast_first", [True, False])
def test_graphs_of_both_dtypes_run_in_one_backward_at_stage_3(autocast_first: bool) -> None:
    worlds.seed()
    module = TinyGPT()
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = token_loss(module, 0, 0)
        loss.backward()
    expected = {name: param.grad for name, param in module.named_parameters()}
    for name, grad in worlds.run(_mixed_graphs, 2, 3, autocast_first)[0].items():
        largest = expected[name].abs().max()  # type: ignore[union-attr]
        assert (grad - expected[name]).abs().max() < 2**-6 * largest, name  # embeddings are rounded


def _asymmetric(rank: int, world: int, how: str, stepped: bool) -> str:
    options: dict[str, Any] = {"offload": "cpu"} if stepped else {"precision": BF16}
    engine = ZeroEngine(1, communication=Communication(timeout_s=6.0), **options)
    module: Any = engine.shard(TinyGPT())
    communicator._PATIENCE_S = 1.0
    try:
        if stepped:
            optimizer = engine.attach(torch.optim.AdamW(module.parameters()))
            token_loss(module, 0, 0).backward()
            optimizer.step()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if how == "alone" and rank == 1:
                time.sleep(8)
                return ""
            param = module.head.weight if how == "alone" or rank == 0 else module.blocks[0].up.weight
            try:
                param.norm()
            except CollectiveError as error:
                return f"{error}; " + "; ".join(str(one.message) for one in found)
        return "no error"
    finally:
        communicator._PATIENCE_S = 10.0


@pytest.mark.parametrize(
    "stepped", [pytest.param(False, id="lowered"), pytest.param(True, id="step-due", marks=pytest.mark.slow)]
)
def test_a_rank_that_reads_alone_says_so_while_it_waits(stepped: bool) -> None:
    told, _ = worlds.run(_asymmetric, 2, "alone", stepped)
    read = "parameter `head.weight`, whose step is due" if stepped else "a parameter of unit `head` failed"
    assert f"the reading of {read}" in told
    assert "rank 0 of 2 has waited 1 s for the other ranks" in told
    assert "lightning_zero.gathered(module)" in told


def test_ranks_that_read_different_parameters_get_an_error() -> None:
    for told in worlds.run(_asymmetric, 2, "different", False):
        assert "another rank reads something else" in told


def _gathered_in_a_forward(rank: int, world: int, stage: int) -> None:
    engine = ZeroEngine(stage, precision=BF16)
    module: Any = engine.shard(TinyGPT())
    expected = {name: engine.full_param(param) for name, param in module.named_parameters()}
    plain = TinyGPT()
    plain.load_state_dict(expected)

    def look(_: nn.Module, args: Any) -> None:
        with engine.gathered(module.blocks[0]):
            assert torch.equal(module.blocks[0].up.weight, expected["blocks.0.up.weight"])

    for block in module.blocks:
        block.register_forward_pre_hook(look)
    ids = torch.tensor([[1, 2, 3]])
    for _ in range(3):
        assert torch.equal(module(ids), plain(ids))
    with torch.no_grad():
        for param in module.parameters() if stage < 3 else ():
            param.data.mul_(1 + 2**-14)  # seen by whoever gathers next
    with engine.gathered(module):
        pass
    for name, param in module.named_parameters():
        scale = 1 + 2**-14 if stage < 3 else 1.0
        assert torch.equal(engine.full_param(param), expected[name] * scale)
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_gathered_inside_a_forward_in_fp32_leaves_it_whole(stage: int) -> None:
    worlds.run(_gathered_in_a_forward, 2, stage)


# -- Offloaded ---------------------------------------------------------------------------------------------------------


def _read_offloaded(rank: int, world: int, stage: int, device: str, options: dict[str, Any]) -> set[tuple[str, type]]:
    """Return devices and classes of values and gradients that are read from an offloaded model."""
    is_simulated = device == "cuda"
    with SimulatedDevice() if is_simulated else contextlib.nullcontext():
        engine = ZeroEngine(
            stage,
            units=["Block"],
            device=torch.device(device),
            communication=Communication(backend=BACKEND if is_simulated else None),
            offload=Offload(step_device="cpu", **options),
        )
        module = engine.shard(TinyGPT().to(device))
        optimizer = engine.attach(torch.optim.AdamW(module.parameters()))
        with engine.scope("training_step"):
            module(torch.ones(2, 5, dtype=torch.int64).to(device)).square().mean().backward()
        found = []
        for param in module.parameters():
            found += [engine.full_param(param), engine.full_grad(param)]
        seen = {(one.device.type, type(one)) for one in found if one is not None}
        optimizer.step()
        assert not torch.equal(found[0], engine.full_param(next(module.parameters())))  # a copy
        engine.close()
        return seen


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("stage", sample([0, 2, 3], 2))
@pytest.mark.parametrize("optimizer", ["cpu", "nvme"])
def test_values_and_gradients_are_read_on_the_device_where_they_are_offloaded(
    device: str, stage: int, optimizer: str, tmp_path: Path
) -> None:
    options = {"optimizer": optimizer, **({"path": str(tmp_path), "direct": False} if optimizer == "nvme" else {})}
    (seen,) = worlds.run(_read_offloaded, 1, stage, device, options)
    assert seen == {(device, Tensor)}
