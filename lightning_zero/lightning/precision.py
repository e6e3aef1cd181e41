"""Precision plugins of the strategy: loss scaling, clipping over shards and the order of a step.

Note [Four classes]
    Lightning hands over its stock plugin and later asks ``isinstance`` (``ThroughputMonitor`` derives peak FLOPs from
    the class, a checkpoint keeps the plugin's state under its name). So each class is the stock one with ``ZeroStep``
    in front; which parameters compute in 16 bits is decided by the engine, not here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NoReturn, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.config import MixedPrecision as PrecisionConfig
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.optim.methods import has_pre_hooks, may_use_closure, needs_closure
from lightning_zero.engine.optim.whole_gradients import Unscaled
from lightning_zero.option_checks import checked_fields

__all__ = [
    "LossScale",
    "LossScaler",
    "ZeroDoublePrecision",
    "ZeroHalfPrecision",
    "ZeroMixedPrecision",
    "ZeroPrecision",
    "adopt",
    "engine_precision",
]

log = logging.getLogger(__name__)

_PLAIN_BACKWARD = pl.LightningModule.backward.__code__
_STOCK_STATE = "MixedPrecision"  # where checkpoints of DDP keep a loss scale
_SCALER_STATES = ("ZeroMixedPrecision", "ZeroHalfPrecision", _STOCK_STATE, "FSDPPrecision")


@checked_fields()
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The rule of the loss scale, which keeps small fp16 gradients from vanishing.

    Args:
        init_scale: Factor of the first step. With ``16-true`` no dynamic factor is above 32768, because it is the
            gradient of the loss, which is in fp16 there.
        window: The factor doubles after ``window + 1`` steps without overflow, then after every further ``window``.
        hysteresis: Overflows that are forgiven before the factor is halved: the ``hysteresis``-th halves it. They are
            refilled when the factor doubles.
        consecutive_hysteresis: Refill the forgiven overflows at every step without overflow.
        min_scale: The factor is never lower; an overflow there ends the run.
        static: Use this factor always. Steps that overflow are skipped, and ``window`` of them in a row end the run.
    """

    init_scale: float = 65536.0
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0
    static: float | None = None

    def __post_init__(self) -> None:
        if self.min_scale <= 0:
            raise ValueError(f"`LossScale(min_scale={self.min_scale!r})` must be positive.")
        if self.init_scale < self.min_scale:
            raise ValueError(
                f"`LossScale(init_scale={self.init_scale!r})` must be at least `min_scale={self.min_scale!r}`."
            )
        for option in ("window", "hysteresis"):
            value = getattr(self, option)
            if value < 1:
                raise ValueError(f"`LossScale({option}={value!r})` must be a whole number of steps, 1 or more.")
        if self.static is not None and self.static <= 0:
            raise ValueError(f"`LossScale(static={self.static!r})` must be positive, or None for a dynamic scale.")


class LossScaler:
    """The factor of a dynamic loss scale, step by step (DeepSpeed's rule).

    ``update`` is called once per optimizer step that has gradients on some rank, on every rank and with the same
    argument, so the factor is the same on every rank without communication, also on those of other pipeline stages.

    Args:
        config: The rule.
        max_scale: The largest dynamic factor.
    """

    def __init__(self, config: LossScale | None = None, max_scale: float = math.inf) -> None:
        self.config = config or LossScale()
        self.max_scale = max_scale
        self.scale: float = min(self.config.init_scale, max_scale)
        if self.config.static is not None:
            self.scale = self.config.static
        self.hysteresis = self.config.hysteresis  # overflows left, the last of which halves the scale
        self.steps = 0  # calls of `update`
        self.last_overflow = -1  # the step of the last overflow
        self.skipped = 0  # overflows so far
        self._in_a_row = 0  # overflows since the last step without

    def get_scale(self) -> float:
        """Return the factor (as ``torch.amp.GradScaler`` does)."""
        return self.scale

    def update(self, overflow: bool | None = None) -> None:
        """Account for one step.

        Raises:
            TypeError: It is called as that of a ``GradScaler`` is.
            RuntimeError: Overflow at the lowest scale, or in every step of a window at a fixed one.
        """
        if not isinstance(overflow, bool):
            _refuse_call("update", "The scale follows `ZeroStrategy(loss_scale=...)`: leave the call out.")
        if overflow:
            self.skipped += 1
        self._in_a_row = self._in_a_row + 1 if overflow else 0
        if self.config.static is None:
            self._after_overflow() if overflow else self._after_good_step()
        elif self._in_a_row >= self.config.window:
            raise RuntimeError(
                f"Gradients overflowed in {self._in_a_row} steps in a row at the fixed loss scale {self.scale:g}, so"
                " nothing was trained. Use a smaller `LossScale(static=...)`, `static=None`, or precision='bf16-mixed'."
            )
        self.steps += 1

    def unscale_(self, *_: Any) -> NoReturn:
        """Refuse a call of ``GradScaler``."""
        _refuse_call("unscale_", "`self.clip_gradients(...)` unscales them: use it, or `on_before_optimizer_step`.")

    def step(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a call of ``GradScaler``."""
        _refuse_call("step", "Use `self.optimizers().step()`, which unscales the gradients and skips overflows.")

    def _after_overflow(self) -> None:
        self.last_overflow = self.steps
        if self.hysteresis > 1:
            self.hysteresis -= 1
            return
        if self.scale <= self.config.min_scale:
            raise RuntimeError(
                f"Gradients overflow although the loss scale is at its floor (`min_scale={self.config.min_scale}`)."
                " The loss diverges or does not fit fp16: lower the learning rate, or use precision='bf16-mixed'."
            )
        self.scale = max(self.scale / 2, self.config.min_scale)

    def _after_good_step(self) -> None:
        if self.config.consecutive_hysteresis:
            self.hysteresis = self.config.hysteresis
        good_steps = self.steps - self.last_overflow - 1
        if good_steps > 0 and good_steps % self.config.window == 0:
            self.scale = min(self.scale * 2, self.max_scale)
            self.hysteresis = self.config.hysteresis

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its counters, which a resumed run needs."""
        return {
            "scale": self.scale,
            "hysteresis": self.hysteresis,
            "steps": self.steps,
            "last_overflow": self.last_overflow,
            "skipped": self.skipped,
            "config": asdict(self.config),
        }

    def stock_state(self) -> dict[str, Any]:
        """Return ``state_dict`` with the entries that a ``GradScaler`` reads."""
        is_static = self.config.static is not None
        return {
            **self.state_dict(),
            "growth_factor": 1.0 if is_static else 2.0,
            "backoff_factor": 1.0 if is_static else 0.5,
            "growth_interval": self.config.window,
            "_growth_tracker": max(self.steps - self.last_overflow - 2, 0) % self.config.window,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict`` of this class, or from the factor that a ``GradScaler`` has saved."""
        if self.config.static is not None:
            return
        self.scale = min(max(float(state["scale"]), self.config.min_scale), self.max_scale)
        self.hysteresis = int(state.get("hysteresis", self.config.hysteresis))
        self.steps = int(state.get("steps", 0))
        self.last_overflow = int(state.get("last_overflow", -1))
        self.skipped = int(state.get("skipped", 0))


def _refuse_call(method: str, remedy: str) -> NoReturn:
    """Refuse a call of ``GradScaler``, by which a program would scale on its own.

    Raises:
        TypeError: Always.
    """
    raise TypeError(
        f"`scaler.{method}` is called as that of a `torch.amp.GradScaler`, but the strategy scales losses and"
        f" gradients. {remedy} `self.manual_backward(loss)` scales the loss."
    )


class ZeroStep(Precision):
    """The order of an optimizer step over shards. Mixed into each plugin below.

    Attributes:
        max_scale: The largest dynamic loss scale.

    Call protocol:
        1. The strategy sets ``engine`` when it has sharded the module, and ``scaler`` if the loss is scaled.
        2. ``pre_backward`` scales the loss.
        3. ``optimizer_step`` runs the closure, unscales once, runs the hooks and the clipping, steps, and updates the
           scale. Whoever reads gradients meanwhile gets this rank's segments of the reduced ones.
        4. ``clip_gradients`` may come before 3 (manual optimization).
    """

    max_scale: ClassVar[float] = math.inf

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine: ZeroEngine | None = None
        self.scaler: LossScaler | None = None
        self.clipped_norms: dict[Optimizer, Tensor] = {}  # norm that the last clipping of each has computed
        self.around_hooks: Callable[[], AbstractContextManager[None]] = nullcontext
        self._in_step: Optimizer | None = None  # whose step runs its hooks; its gradients are unscaled

    def scale_loss(self, rule: LossScale | None) -> None:
        """Scale the loss from now on; None is the default rule."""
        self.scaler = LossScaler(rule, self.max_scale)

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss and call ``on_before_backward``."""
        if self.scaler is not None:
            self._refuse_scale_beyond(tensor.dtype)
            tensor = tensor * self.scaler.scale
        return Precision.pre_backward(self, tensor, module)

    def _refuse_scale_beyond(self, dtype: torch.dtype) -> None:
        """Refuse a fixed scale that is infinite as the gradient of a loss: every step would overflow."""
        assert self.scaler is not None
        is_beyond = dtype == torch.float16 and self.scaler.scale > torch.finfo(dtype).max
        if self.scaler.config.static is not None and is_beyond:
            raise ValueError(
                f"`LossScale(static={self.scaler.scale:g})` is infinite in {dtype}, the dtype of the loss, so every"
                " step would overflow. Use `LossScale(static=32768)` or less, or `static=None`."
            )

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, the hooks, the clipping and the step, in this order.

        Collective: all ranks.
        """
        engine = self._require_engine()
        is_manual = _does_nothing(closure)
        if self._gives_closure(optimizer, is_manual=is_manual):
            if not is_manual:
                return self._step_with_closure(optimizer, model, closure, **kwargs)
            kwargs["closure"] = do_nothing_closure  # the gradients of manual optimization are there
        closure_result = closure()
        unscaled = self._finish_gradients(model, optimizer)
        if unscaled.has_overflowed:
            engine.internals.steps.close_window(optimizer)
        else:
            optimizer.step(**kwargs)
        if unscaled.has_gradients:
            self._update_scale(unscaled.has_overflowed)
        return closure_result

    def _gives_closure(self, optimizer: Optimizer, *, is_manual: bool) -> bool:
        """Say whether the optimizer calls the closure itself; with ``16-mixed`` none does, as in Lightning.

        Hooks of ``register_step_pre_hook`` run before the backward, because Lightning steps with the closure.
        """
        if self.scaler is not None and isinstance(self, MixedPrecision):
            return needs_closure(optimizer)
        return may_use_closure(optimizer) or (has_pre_hooks(optimizer) and not is_manual)

    def _step_with_closure(
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Let an optimizer evaluate the closure as often as it likes; without gradients where they overflow.

        Collective: all ranks, each time.
        """
        if self.scaler is not None and needs_closure(optimizer):
            raise ValueError(f"`{type(optimizer).__name__}` cannot be used with a scaled loss. Use another precision.")
        overflows: list[bool] = []

        def evaluate() -> Any:
            closure_result = closure()
            unscaled = self._finish_gradients(model, optimizer)
            if unscaled.has_gradients:
                overflows.append(unscaled.has_overflowed)
            if unscaled.has_overflowed:  # other code of the step has to run, for example to put values back
                self._require_engine().internals.steps.drop_gradients(optimizer)
            return closure_result

        output = optimizer.step(closure=evaluate, **kwargs)
        if overflows:
            self._update_scale(any(overflows))
        return output

    def _finish_gradients(self, model: pl.LightningModule, optimizer: Optimizer) -> Unscaled:
        """Unscale the gradients, run the hooks and the clipping; return the agreement of the ranks."""
        unscaled = self._unscale(optimizer)
        self._in_step = optimizer
        try:
            with self.around_hooks():
                self._after_closure(model, optimizer)
        finally:
            self._in_step = None
        return unscaled

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> None:
        """Run ``LightningModule.backward``; every rank's reductions happen in it.

        Collective: all ranks.
        """
        # It may, between two backwards of its own: also a wrapper around Lightning's method.
        uses_gradients = getattr(model.backward, "__code__", None) is not _PLAIN_BACKWARD
        watched = tensor if uses_gradients else None
        steps = self._require_engine().internals.steps
        with self.scaled_backward(), steps.backward_scope(watched, shows_gradients=uses_gradients):
            Precision.backward(self, tensor, model, optimizer, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the gradients of one optimizer, in automatic and in manual optimization.

        Collective for the norm: all ranks.
        """
        if clip_val <= 0:
            return
        engine = self._require_engine()
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if optimizer is not self._in_step:
            self._unscale(optimizer)
        if GradClipAlgorithmType(gradient_clip_algorithm) == GradClipAlgorithmType.VALUE:
            engine.clip_grad_value(optimizer, float(clip_val))
        else:
            self.clipped_norms[optimizer] = engine.clip_grad_norm(optimizer, float(clip_val))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with the loss scale that a plugin of another class, or another strategy, has saved."""
        if self.scaler is None or type(self).__qualname__ in checkpoint:
            return
        for name in (*(base.__qualname__ for base in type(self).__mro__), *_SCALER_STATES):
            saved = checkpoint.get(name)
            if isinstance(saved, Mapping) and saved.get("scale") is not None:
                self.scaler.load_state_dict(saved)
                return

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the loss scale a second time, where DDP and plugins of other classes read it."""
        if self.scaler is not None:
            checkpoint.setdefault(_STOCK_STATE, self.scaler.stock_state())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the loss scale."""
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)

    def get_scale(self) -> float:
        """Return the factor of the loss; 1 where it is not scaled."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def _require_engine(self) -> ZeroEngine:
        if self.engine is None:
            raise RuntimeError("The optimizer is stepped before the strategy has sharded the module.")
        return self.engine

    def scaled_backward(self) -> AbstractContextManager[None]:
        """Return a context for the backward of a loss that is multiplied by ``get_scale()``."""
        return self._require_engine().internals.steps.scaled(self.get_scale())

    def _unscale(self, optimizer: Optimizer) -> Unscaled:
        """Divide the gradients by the scales of their losses, once; none are scaled without a loss scale."""
        if self.scaler is None:
            return Unscaled(has_overflowed=False, has_gradients=False)
        return self._require_engine().internals.steps.unscale(optimizer, self.scaler.scale)

    def _update_scale(self, overflow: bool) -> None:
        assert self.scaler is not None
        before = self.scaler.scale
        self.scaler.update(overflow)
        if overflow and self.scaler.config.static is not None and self.scaler.skipped == 1:
            rank_zero_warn(
                f"An optimizer step is skipped: gradients overflowed at the fixed loss scale {before:g}. If later steps"
                " overflow too, use a smaller `LossScale(static=...)` or `static=None`."
            )
        elif overflow:
            log.info("Skipped an optimizer step: gradients overflowed at loss scale %g.", before)


class ZeroPrecision(ZeroStep, Precision):
    """``32-true``."""


class ZeroMixedPrecision(ZeroStep, MixedPrecision):  # type: ignore[misc]
    """``bf16-mixed`` and ``16-mixed``.

    Args:
        precision: ``"16-mixed"`` scales the loss, ``"bf16-mixed"`` does not.
        device: Device type of ``torch.autocast``. The strategy sets it to the type of its root device.
        loss_scale: How ``"16-mixed"`` scales the loss.
    """

    def __init__(
        self, precision: Literal["16-mixed", "bf16-mixed"], device: str = "cuda", loss_scale: LossScale | None = None
    ) -> None:
        if precision not in ("16-mixed", "bf16-mixed"):
            raise ValueError(f"`precision={precision!r}` must be '16-mixed' or 'bf16-mixed'.")
        if precision == "bf16-mixed" and loss_scale is not None:
            raise ValueError("`loss_scale` has no effect with 'bf16-mixed': bf16 has the range of fp32. Leave it out.")
        super().__init__("bf16-mixed", device)  # with "16-mixed" the base makes a scaler that nothing would use
        self.precision = precision
        if precision == "16-mixed":
            self.scale_loss(loss_scale)


class ZeroHalfPrecision(ZeroStep, HalfPrecision):
    """``bf16-true`` and ``16-true``: the module computes in 16 bits, the optimizer steps fp32 masters.

    Args:
        precision: ``"16-true"`` scales the loss, ``"bf16-true"`` does not.
    """

    max_scale: ClassVar[float] = 2.0**15  # the largest power of two of fp16

    def __init__(self, precision: Literal["bf16-true", "16-true"] = "16-true") -> None:
        super().__init__(precision)
        if precision == "16-true":
            self.scale_loss(None)


class ZeroDoublePrecision(ZeroStep, DoublePrecision):
    """``64-true``."""


def adopt(plugin: Precision) -> ZeroStep:
    """Return this package's counterpart of a stock precision plugin of Lightning.

    Raises:
        TypeError: the plugin is none of the four that can work on shards.
    """
    if isinstance(plugin, ZeroStep):
        return plugin
    if type(plugin) is Precision:
        return ZeroPrecision()
    if type(plugin) is HalfPrecision:
        return ZeroHalfPrecision(plugin.precision)
    if type(plugin) is DoublePrecision:
        return ZeroDoublePrecision()
    if type(plugin) is MixedPrecision:
        loss_scale = None if plugin.scaler is None else _loss_scale_of(plugin.scaler)
        return ZeroMixedPrecision(cast(Literal["16-mixed", "bf16-mixed"], plugin.precision), plugin.device, loss_scale)
    raise TypeError(
        f"`{type(plugin).__name__}` cannot work with sharded parameters. Use precision='32-true', 'bf16-mixed',"
        " '16-mixed', 'bf16-true', '16-true' or '64-true', or a subclass of ZeroPrecision, ZeroMixedPrecision,"
        " ZeroHalfPrecision or ZeroDoublePrecision."
    )


def engine_precision(
    plugin: Precision, *, masters: bool, lowered: Sequence[str | type[nn.Module]] | None = None
) -> PrecisionConfig:
    """Return in which dtype the engine lets parameters compute under ``plugin``."""
    compute_dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(str(plugin.precision))
    return PrecisionConfig(compute_dtype=compute_dtype, masters=masters, lowered=lowered or ())


def _does_nothing(closure: Callable[[], Any]) -> bool:
    """Say whether a closure is Lightning's for ``optimizer.step()`` in manual optimization; the strategy wraps it."""
    inner = closure.args[0] if isinstance(closure, partial) and closure.args else closure
    return inner is do_nothing_closure


def _loss_scale_of(scaler: torch.amp.GradScaler) -> LossScale:
    """Translate a ``GradScaler`` that the user gave; one with the defaults becomes our defaults."""
    if not scaler.is_enabled():  # by the user, or because there is no such device
        has_device = scaler._device != "cuda" or CUDAAccelerator.is_available()
        return LossScale(static=1.0) if has_device else LossScale()
    given = (scaler._init_scale, scaler._growth_interval, scaler._growth_factor, scaler._backoff_factor)
    if given == (2.0**16, 2000, 2.0, 0.5):
        return LossScale()
    if given[2:] != (2.0, 0.5):
        raise ValueError(
            f"A GradScaler with `growth_factor={given[2]}` and `backoff_factor={given[3]}` cannot be honoured: the"
            " scale doubles and halves. Use `ZeroStrategy(loss_scale=LossScale(...))`."
        )
    return LossScale(init_scale=given[0], window=given[1], hysteresis=1)
