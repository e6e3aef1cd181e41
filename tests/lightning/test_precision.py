"""The rule of the loss scale and the translation of Lightning's precision plugins."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
)

from lightning_zero.lightning.precision import (
    LossScale,
    LossScaler,
    ZeroDoublePrecision,
    ZeroHalfPrecision,
    ZeroMixedPrecision,
    ZeroPrecision,
    adopt,
    engine_precision,
)
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import lightning_programs, worlds

GOOD, OVERFLOW = ".", "x"


def scales(config: LossScale, steps: str) -> list[float]:
    scaler = LossScaler(config)
    out = []
    for step in steps:
        scaler.update(step == OVERFLOW)
        out.append(scaler.scale)
    return out


TABLE = {
    "first-doubling-after-window-plus-one": ({"window": 2}, "......", [16, 16, 32, 32, 64, 64]),
    "second-overflow-halves": ({}, "xx", [16, 8]),
    "hysteresis-is-not-refilled-by-halving": ({}, "xxx", [16, 8, 4]),
    "good-steps-do-not-refill-hysteresis": ({}, "x.x", [16, 16, 8]),
    "consecutive-hysteresis-refills-at-a-good-step": ({"consecutive_hysteresis": True}, "x.x", [16, 16, 16]),
    "doubling-refills-hysteresis": ({"window": 1}, "x..x", [16, 16, 32, 32]),
    "window-counts-from-the-overflow": ({"window": 2, "hysteresis": 1}, "x...", [8, 8, 8, 16]),
    "floor": ({"init_scale": 2.0, "min_scale": 1.5, "hysteresis": 1}, "x", [1.5]),
    "static": ({"static": 128.0}, "x.x.", [128] * 4),
}


@pytest.mark.parametrize(("options", "steps", "expected"), TABLE.values(), ids=TABLE.keys())
def test_scale_follows_the_table(options: dict[str, Any], steps: str, expected: list[float]) -> None:
    assert scales(LossScale(**{"init_scale": 16.0, **options}), steps) == expected


class Reference:
    """DeepSpeed's DynamicLossScaler, transcribed."""

    def __init__(self, config: LossScale) -> None:
        self.config, self.scale = config, config.init_scale
        self.iteration, self.last_overflow, self.hysteresis = 0, -1, config.hysteresis

    def update(self, overflow: bool) -> None:
        config = self.config
        if overflow:
            if config.hysteresis == 1 or self.hysteresis == 1:
                self.scale = max(self.scale / 2, config.min_scale)
            else:
                self.hysteresis -= 1
            self.last_overflow = self.iteration
        else:
            if config.consecutive_hysteresis:
                self.hysteresis = config.hysteresis
            stable = self.iteration - self.last_overflow - 1
            if stable > 0 and stable % config.window == 0:
                if not config.consecutive_hysteresis:
                    self.hysteresis = config.hysteresis
                self.scale *= 2
        self.iteration += 1


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_scale_equals_the_transcribed_rule_step_by_step(hysteresis: int, consecutive: bool) -> None:
    config = LossScale(init_scale=2.0**40, window=3, hysteresis=hysteresis, consecutive_hysteresis=consecutive)
    scaler, reference = LossScaler(config), Reference(config)
    steps = random.Random(hysteresis)
    for _ in range(400):
        overflow = steps.random() < 0.15
        scaler.update(overflow)
        reference.update(overflow)
        assert (scaler.scale, scaler.hysteresis) == (reference.scale, reference.hysteresis)


def test_overflow_at_the_floor_raises_and_names_it() -> None:
    scaler = LossScaler(LossScale(init_scale=1.0, hysteresis=1))
    with pytest.raises(RuntimeError, match=r"min_scale=1\.0"):
        scaler.update(True)


def test_resumed_scale_goes_on_as_if_uninterrupted() -> None:
    config = LossScale(init_scale=64.0, window=3)
    steps = [number % 5 == 0 for number in range(40)]
    whole, first, second = LossScaler(config), LossScaler(config), LossScaler(config)
    for overflow in steps:
        whole.update(overflow)
    for overflow in steps[:17]:
        first.update(overflow)
    second.load_state_dict(first.state_dict())
    for overflow in steps[17:]:
        second.update(overflow)
    assert second.state_dict() == whole.state_dict()


def test_scale_of_another_strategys_checkpoint_is_taken_over() -> None:
    plugin = ZeroMixedPrecision("16-mixed", "cpu")
    plugin.on_load_checkpoint({"MixedPrecision": {"scale": 1024.0, "growth_factor": 2.0, "_growth_tracker": 7}})
    assert plugin.scaler is not None
    assert plugin.scaler.scale == 1024.0


class _Renamed(ZeroMixedPrecision):
    """A plugin of the user's."""


@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        (ZeroMixedPrecision, _Renamed),
        (_Renamed, ZeroMixedPrecision),
        (lambda precision, device: ZeroHalfPrecision("16-true"), ZeroMixedPrecision),
    ],
    ids=["to a subclass", "from a subclass", "from 16-true"],
)
@pytest.mark.parametrize("is_old", [False, True], ids=["new", "old file"])
def test_the_loss_scale_is_kept_where_the_plugin_has_another_class(saves: Any, loads: Any, is_old: bool) -> None:
    saved, resumed = saves("16-mixed", "cpu"), loads("16-mixed", "cpu")
    for _ in range(3):
        saved.scaler.update(True)
    checkpoint: dict[str, Any] = {type(saved).__qualname__: saved.state_dict()}
    if not is_old:
        saved.on_save_checkpoint(checkpoint)
    resumed.on_load_checkpoint(checkpoint)
    is_lost = is_old and type(saved) is _Renamed  # nobody knows its name
    assert (resumed.scaler.state_dict() == saved.scaler.state_dict()) is not is_lost


@pytest.mark.parametrize("static", [None, 64.0])
def test_ddp_goes_on_with_the_loss_scale(static: float | None) -> None:
    config = LossScale(static=static) if static else LossScale(init_scale=64.0, window=4, hysteresis=1)
    ours = ZeroMixedPrecision("16-mixed", "cpu", config)
    assert ours.scaler is not None
    checkpoint: dict[str, Any] = {}
    stock = torch.amp.GradScaler("cpu")
    plugin = MixedPrecision("16-mixed", "cpu", stock)
    for number in range(14):
        ours.on_save_checkpoint(checkpoint)
        plugin.load_state_dict(checkpoint.pop("MixedPrecision"))
        stock.scale(torch.ones(()))
        has_overflowed = number == 5
        inf = torch.full((), float(has_overflowed))
        torch._amp_update_scale_(
            stock._scale,
            stock._growth_tracker,
            inf,
            stock.get_growth_factor(),
            stock.get_backoff_factor(),
            stock.get_growth_interval(),
        )
        ours.scaler.update(has_overflowed)
        assert stock.get_scale() == ours.scaler.scale, number


def test_no_dynamic_scale_of_a_loss_in_fp16_is_above_its_range() -> None:
    """The default of 65536 is infinite in fp16, so the first steps, and those behind each doubling, were skipped."""
    plugin = ZeroHalfPrecision("16-true")
    for rule in (None, LossScale(window=1), LossScale(init_scale=2.0**20)):
        plugin.scale_loss(rule)
        assert plugin.scaler is not None
        for _ in range(5):
            plugin.scaler.update(overflow=False)
        assert plugin.scaler.scale == 32768
    plugin.load_state_dict({"scale": 65536.0})
    assert plugin.get_scale() == 32768
    plugin.scale_loss(LossScale(static=65536.0))  # refused with a loss in fp16
    assert plugin.get_scale() == 65536
    assert ZeroMixedPrecision("16-mixed").get_scale() == 65536


def test_skipped_steps_are_counted() -> None:
    scaler = LossScaler(LossScale(static=4.0))
    for step in "x.xx":
        scaler.update(step == OVERFLOW)
    assert scaler.skipped == 3


def test_a_fixed_scale_with_which_every_step_overflows_ends_the_run() -> None:
    scaler = LossScaler(LossScale(static=4.0, window=3))
    for step in "xx.xx":
        scaler.update(step == OVERFLOW)
    with pytest.raises(RuntimeError, match="overflowed in 3 steps in a row at the fixed loss scale 4, so nothing was"):
        scaler.update(True)


@pytest.mark.parametrize("static", [65536.0, 32768.0])
def test_a_fixed_scale_that_fp16_does_not_have_is_refused(static: float) -> None:
    plugin = ZeroHalfPrecision("16-true")
    plugin.scaler = LossScaler(LossScale(static=static))
    module: Any = pl.LightningModule()
    module._trainer = pl.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False)
    module._trainer.strategy._lightning_module = module
    weight = torch.ones((), dtype=torch.float16, requires_grad=True)
    if static > 65504:
        with pytest.raises(ValueError, match="static=65536.* is infinite in torch.float16, the dtype of the loss"):
            plugin.pre_backward(weight * 1, module)
    else:
        plugin.pre_backward(weight * 1, module).backward()
        assert weight.grad is not None
        assert float(weight.grad) == static
    assert plugin.pre_backward((weight * 1).float(), module).isfinite()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_scale": 0.0}, "`LossScale.min_scale=0.0.` must be positive"),
        ({"init_scale": 1.0, "min_scale": 2.0}, "`LossScale.init_scale=1.0.` must be at least `min_scale=2.0`"),
        ({"window": 0}, "`LossScale.window=0.` must be a whole number"),
        ({"hysteresis": -1}, "`LossScale.hysteresis=-1.` must be a whole number"),
        ({"static": -1.0}, "`LossScale.static=-1.0.` must be positive"),
    ],
)
def test_wrong_loss_scale_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossScale(**options)


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        (Precision(), ZeroPrecision),
        (MixedPrecision("bf16-mixed", "cpu"), ZeroMixedPrecision),
        (MixedPrecision("16-mixed", "cpu"), ZeroMixedPrecision),
        (HalfPrecision("bf16-true"), ZeroHalfPrecision),
        (HalfPrecision("16-true"), ZeroHalfPrecision),
        (DoublePrecision(), ZeroDoublePrecision),
    ],
    ids=lambda value: getattr(value, "precision", None),
)
def test_stock_plugin_becomes_ours_of_the_same_class_and_name(stock: Precision, ours: type[Precision]) -> None:
    plugin = adopt(stock)
    assert type(plugin) is ours
    assert isinstance(plugin, type(stock))
    assert plugin.precision == stock.precision
    assert adopt(plugin) is plugin


def test_fp16_scales_the_loss_by_default_and_bf16_does_not() -> None:
    assert adopt(MixedPrecision("16-mixed", "cpu")).scaler is not None
    assert adopt(MixedPrecision("bf16-mixed", "cpu")).scaler is None
    assert adopt(HalfPrecision("16-true")).scaler is not None
    assert adopt(HalfPrecision("bf16-true")).scaler is None


def test_settings_of_a_given_grad_scaler_are_honoured_or_refused() -> None:
    given = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5))
    scaler = adopt(given).scaler
    assert scaler is not None
    assert (scaler.scale, scaler.config.window, scaler.config.hysteresis) == (8.0, 5, 1)
    given = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False))
    assert adopt(given).get_scale() == 1.0
    with pytest.raises(ValueError, match="growth_factor=4.0"):
        adopt(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_factor=4.0)))


def test_two_rules_of_the_loss_scale_are_refused() -> None:
    strategy = ZeroStrategy(loss_scale=LossScale(init_scale=4.0))
    with pytest.raises(ValueError, match="init_scale=8.0.* and `ZeroStrategy.loss_scale=.*init_scale=4.0.*Leave one"):
        strategy.precision_plugin = ZeroMixedPrecision("16-mixed", "cpu", LossScale(init_scale=8.0))
    for plugin in (ZeroMixedPrecision("16-mixed", "cpu"), ZeroMixedPrecision("16-mixed", "cpu", strategy.loss_scale)):
        strategy.precision_plugin = plugin
        assert plugin.get_scale() == 4.0


def test_calls_of_a_grad_scaler_name_what_to_use() -> None:
    scaler: Any = LossScaler()
    with pytest.raises(TypeError, match="`scaler.unscale_` is called .*`self.clip_gradients"):
        scaler.unscale_(object())
    with pytest.raises(TypeError, match=r"`scaler.step` is called .*`self.optimizers\(\).step"):
        scaler.step(object())
    for arguments in ((), (512.0,)):
        with pytest.raises(TypeError, match="`scaler.update` is called .*leave the call out.*`self.manual_backward"):
            scaler.update(*arguments)


def test_plugin_that_cannot_work_on_shards_is_refused_with_the_choices() -> None:
    class Own(Precision):
        pass

    with pytest.raises(TypeError, match="`Own` cannot work with sharded parameters.*bf16-mixed.*ZeroPrecision"):
        adopt(Own())
    assert not issubclass(TransformerEnginePrecision, ZeroPrecision)


def test_loss_scale_with_bf16_is_refused() -> None:
    with pytest.raises(ValueError, match="no effect with 'bf16-mixed'"):
        ZeroMixedPrecision("bf16-mixed", "cpu", LossScale())


@pytest.mark.parametrize(
    ("plugin", "dtype"),
    [
        (ZeroPrecision(), None),
        (ZeroMixedPrecision("bf16-mixed", "cpu"), torch.bfloat16),
        (ZeroMixedPrecision("16-mixed", "cpu"), torch.float16),
        (ZeroHalfPrecision("bf16-true"), None),
        (ZeroDoublePrecision(), None),
    ],
    ids=lambda value: getattr(value, "precision", None),
)
def test_engine_is_told_the_compute_dtype_of_mixed_precision_only(plugin: Precision, dtype: torch.dtype) -> None:
    assert engine_precision(plugin, masters=True).compute_dtype is dtype


class _Masked(lightning_programs.Net):
    """Makes masks in the shape of a released parameter, in a step and in a closure of manual optimization."""

    def __init__(self, is_manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not is_manual
        self.sums: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.blocks[1].linear.weight

        def mask() -> None:
            made = torch.zeros_like(weight)
            made[0] = 1.0
            self.sums.append(made.sum().item())

        if self.automatic_optimization:
            mask()
            return self.loss(batch)
        self.manual_backward(self.loss(batch))
        self.optimizers().step(closure=mask)
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.0)


class _MasksGradients(pl.Callback):
    """Trains one row of a released parameter."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        weight = pl_module.blocks[1].linear.weight
        mask = torch.ones_like(weight)
        mask[1:] = 0.0
        weight.grad.mul_(mask)


def _mask(rank: int, world: int) -> None:
    for is_manual in (False, True):
        module = _Masked(is_manual)
        before = module.blocks[1].linear.weight.detach().clone()
        callbacks = [_MasksGradients()]
        trainer = lightning_programs.trainer(rank, world, 3, max_steps=1, callbacks=callbacks)
        trainer.fit(module, lightning_programs.loader(rank, world))
        assert module.sums == [6.0]
        changes = trainer.strategy.full_param(module.blocks[1].linear.weight) - before
        assert changes[0].count_nonzero() > 0
        assert changes[1:].count_nonzero() == 0


def test_steps_closures_and_callbacks_are_no_code_of_the_optimizer() -> None:
    worlds.run(_mask, 2)
