"""A configuration of DeepSpeed in a run: filled in, or compared with the Trainer, and its table printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_zero.compat.deepspeed_config import Batch, DeepSpeedPlan, report
from lightning_zero.lightning.precision import LossScale, ZeroPrecision

__all__ = ["ImportedConfig"]


class ImportedConfig:
    """The parts of a plan that need a Trainer.

    Call protocol:
        1. ``precision`` and ``loss_scale`` when the Trainer gives its precision plugin.
        2. ``offer_optimizer`` before the Trainer looks for ``configure_optimizers``; ``withdraw_optimizer`` at the end.
        3. ``settle`` before the options are checked, and before the optimizers are made.
        4. ``schedule_for`` when the optimizers have been made, then ``announce``.
        5. ``compare_loader`` when the loaders have been made.

    Args:
        plan: The configuration as options.
        loss_scale: The argument of the strategy, which wins.
    """

    def __init__(self, plan: DeepSpeedPlan, loss_scale: LossScale | None) -> None:
        self.plan = plan
        self._loss_scale = loss_scale
        self._settled: dict[str, str] = {}  # by key, its value in the Trainer
        self._was_announced = False

    def without_batch(self) -> ImportedConfig:
        """Return the configuration with accumulation left to the Trainer."""
        return ImportedConfig(replace(self.plan, batch=Batch()), self._loss_scale)

    # -- Precision -------------------------------------------------------------------------------------------------

    def precision(self, plugin: Precision, *, on_cpu: bool) -> Precision:
        """Return the plugin of the Trainer, or the one that the configuration asks for in place of the default.

        Raises:
            ValueError: The Trainer has another precision than the configuration.
        """
        rule = self.plan.precision
        if rule.fills is not None and type(plugin) in (Precision, ZeroPrecision):
            return self._filled_precision(rule.fills, on_cpu=on_cpu)
        is_replaced = on_cpu and rule.fills == "16-mixed" and plugin.precision == "bf16-mixed"  # by Lightning, loudly
        if plugin.precision not in rule.accepts and not is_replaced:
            allowed = " or ".join(f"`Trainer(precision={one!r})`" for one in rule.accepts)
            raise ValueError(
                f"{rule.key} of DeepSpeed's configuration and `Trainer(precision={plugin.precision!r})` differ. Use"
                f' {allowed}, or say "auto" in the configuration.'
            )
        self._settle_precision(f"`Trainer(precision={plugin.precision!r})`")
        return plugin

    def _filled_precision(self, precision: str, *, on_cpu: bool) -> Precision:
        if precision == "16-mixed" and on_cpu:
            rank_zero_warn("fp16 does not exist under autocast on a CPU: `precision='bf16-mixed'` is used instead.")
            precision = "bf16-mixed"
        self._settle_precision(f"`Trainer(precision={precision!r})` is set, in place of its default")
        if precision.endswith("-true"):
            return HalfPrecision(precision)  # type: ignore[arg-type]
        return MixedPrecision(precision, "cpu" if on_cpu else "cuda")  # type: ignore[arg-type]

    def _settle_precision(self, becomes: str) -> None:
        for row in self.plan.rows:
            if row.status == "translated" and "Trainer(precision" in row.becomes and row.option is None:
                self._settled[row.key] = becomes

    def loss_scale(self, plugin: Precision) -> LossScale | None:
        """Return the rule of the loss scale: the strategy's argument, or the configuration's under fp16."""
        if self._loss_scale is not None or not self.plan.precision.loss_scale:
            return self._loss_scale
        is_scaled = plugin.precision in ("16-mixed", "16-true")
        return LossScale(**self.plan.precision.loss_scale) if is_scaled else None

    # -- Optimizer and schedule ------------------------------------------------------------------------------------

    def makes_optimizer_of(self, module: pl.LightningModule) -> bool:
        """Say whether the configuration has an optimizer and the module makes none."""
        return self.plan.optimizer is not None and not is_overridden("configure_optimizers", module)

    def offer_optimizer(self, module: pl.LightningModule) -> None:
        """Give a module that makes no optimizer the configuration's."""
        if self.makes_optimizer_of(module):
            vars(module)["configure_optimizers"] = MethodType(_configure_optimizers, module)

    def withdraw_optimizer(self, module: pl.LightningModule | None) -> None:
        """Take it back."""
        if module is not None and _is_ours(vars(module).get("configure_optimizers")):
            del vars(module)["configure_optimizers"]

    def optimizer_for(self, module: pl.LightningModule) -> Optimizer:
        """Return the configuration's optimizer of the module's trained parameters."""
        assert self.plan.optimizer is not None
        params = [param for param in module.parameters() if param.requires_grad]
        optimizer: Optimizer = self.plan.optimizer.make(params, _Hints(module))
        return optimizer

    def schedule_for(
        self, module: pl.LightningModule, optimizers: list[Optimizer], configs: list[LRSchedulerConfig]
    ) -> list[LRSchedulerConfig]:
        """Return the module's schedules, or the configuration's where there are none.

        Raises:
            ValueError: There is no single optimizer, or the program steps schedules itself.
        """
        if self.plan.optimizer is not None and not _is_ours(vars(module).get("configure_optimizers")):
            self._lose_section("optimizer", "`configure_optimizers` is used instead")
        if self.plan.schedule is None:
            return configs
        if configs:
            self._lose_section("scheduler", "the schedule of `configure_optimizers` is used instead")
            return configs
        if len(optimizers) != 1 or not module.automatic_optimization:
            raise ValueError(
                f"The section `scheduler` of DeepSpeed's configuration is for one optimizer that the Trainer steps, and"
                f" this module has {len(optimizers)} and `automatic_optimization={module.automatic_optimization}`. Make"
                " the schedule in `configure_optimizers`, or take the section out."
            )
        schedule = self.plan.schedule.make(optimizers[0], _Hints(module))
        return [LRSchedulerConfig(schedule, interval="step")]

    def _lose_section(self, section: str, becomes: str) -> None:
        """Use that of the module, and warn.

        Lightning's ``DeepSpeedStrategy`` does not call ``configure_optimizers`` if there is a section ``optimizer``;
        otherwise it passes the module's schedule on, and the version of DeepSpeed decides.
        """
        theirs = (
            "" if self.plan.optimizer is None else ", where Lightning's `DeepSpeedStrategy` uses the configuration's"
        )
        rank_zero_warn(
            f"DeepSpeed's configuration and the module both have the {section}: {becomes}{theirs}. Take `{section}` out"
            " of the configuration, or, to train with it, out of `configure_optimizers`."
        )
        for row in self.plan.rows:
            if row.key.strip("()").startswith(f"{section}."):
                self._settled[row.key] = becomes

    # -- The Trainer -----------------------------------------------------------------------------------------------

    def settle(self, trainer: pl.Trainer, *, ranks: int) -> None:
        """Fill arguments of the Trainer that it leaves open, and compare the others.

        Args:
            trainer: The Trainer, which is about to fit.
            ranks: Number of copies of the model.

        Raises:
            ValueError: The Trainer and the configuration say different things.
        """
        module = trainer.lightning_module
        self._settle_clipping(trainer, is_automatic=module.automatic_optimization)
        self._settle_accumulation(trainer, self.plan.batch.accumulation_on(ranks), module.automatic_optimization)

    def _settle_clipping(self, trainer: pl.Trainer, *, is_automatic: bool) -> None:
        wanted, given = self.plan.clipping, trainer.gradient_clip_val
        if wanted is None and self.plan.clipping_is_default:
            return  # the row says that it is the Trainer's
        key = "(gradient_clipping)" if self.plan.clipping_is_default else "gradient_clipping"
        if wanted is None or (given is not None and self.plan.clipping_is_default):
            self._settled[key] = f"the Trainer's `gradient_clip_val={given}`"
            return
        if not is_automatic:
            if wanted and not self.plan.clipping_is_default:
                raise ValueError(
                    f"`gradient_clipping={wanted}` of DeepSpeed's configuration: with `automatic_optimization=False`"
                    f' the program clips, by `self.clip_gradients(optimizer, {wanted})`. Say "auto" in the'
                    " configuration."
                )
            self._settled[key] = "with manual optimization the program clips"
            return
        by_value = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
        if given is None and not by_value:
            trainer.gradient_clip_val = wanted or None
            self._settled[key] = f"`Trainer(gradient_clip_val={wanted or None})` is set"
        elif given != wanted or (by_value and wanted):
            algorithm = ", gradient_clip_algorithm='value'" if by_value else ""
            raise ValueError(
                f"`gradient_clipping={wanted}` of DeepSpeed's configuration, which is a norm, and"
                f" `Trainer(gradient_clip_val={given}{algorithm})` differ. Use `Trainer(gradient_clip_val={wanted})`,"
                ' or say "auto" in the configuration.'
            )

    def _settle_accumulation(self, trainer: pl.Trainer, wanted: int | None, is_automatic: bool) -> None:
        given = trainer.accumulate_grad_batches
        for key in ("gradient_accumulation_steps", "train_batch_size"):
            if any(row.key == key for row in self.plan.rows):
                self._settled[key] = f"`Trainer(accumulate_grad_batches={wanted or given})`"
        if wanted is None or wanted == given:
            return
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        has_plan = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
        if given != 1 or has_plan or not is_automatic:
            other = f"`Trainer(accumulate_grad_batches={given})`"
            if has_plan:
                other = "the callback `GradientAccumulationScheduler`"
            elif not is_automatic:
                other = "`automatic_optimization=False`, with which the program accumulates,"
            raise ValueError(
                f"The configuration of DeepSpeed accumulates {wanted} batches, and {other} differs. Use"
                f' `Trainer(accumulate_grad_batches={wanted})`, or say "auto" for `gradient_accumulation_steps` and'
                " `train_batch_size`."
            )
        trainer.accumulate_grad_batches = wanted

    def compare_loader(self, trainer: pl.Trainer, *, ranks: int) -> None:
        """Warn where the loader has another batch size than the configuration says.

        Raises:
            ValueError: The batch of the configuration cannot be divided among the ranks.
        """
        micro = self.plan.batch.micro_on(ranks, trainer.accumulate_grad_batches)
        sizes = set(_batch_sizes(trainer))
        if micro is not None and sizes and sizes != {micro}:
            rank_zero_warn(
                f"The batches of the training loader have {' or '.join(map(str, sorted(sizes)))} sample(s), and those"
                f" of DeepSpeed's configuration {micro} (`train_micro_batch_size_per_gpu`, or `train_batch_size`"
                " divided by accumulation and ranks). The loader decides."
            )

    # -- Report ----------------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """Print the table of all keys, once, on rank 0."""
        if not self._was_announced:
            self._was_announced = True
            rank_zero_info(report(self.plan, self._settled))


def _configure_optimizers(module: pl.LightningModule) -> Optimizer:
    """Return the optimizer of the strategy's configuration; a method that modules get without one of their own."""
    imported: ImportedConfig = module.trainer.strategy.imported  # type: ignore[attr-defined]
    return imported.optimizer_for(module)


def _is_ours(method: Any) -> bool:
    return getattr(method, "__func__", None) is _configure_optimizers


class _Hints:
    """Numbers that a module keeps, by name: attributes first, then hyperparameters."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module

    def __call__(self, name: str) -> Any:
        value = getattr(self._module, name, None)
        if not isinstance(value, (int, float)):
            value = self._module.hparams.get(name)
        return value if isinstance(value, (int, float)) else None


def _batch_sizes(trainer: pl.Trainer) -> Iterator[int]:
    """Yield the batch sizes of the training loaders that have one."""
    combined = trainer.fit_loop._combined_loader
    for loader in combined.flattened if combined is not None else ():
        size = getattr(loader, "batch_size", None) or getattr(
            getattr(loader, "batch_sampler", None), "batch_size", None
        )
        if isinstance(size, int):
            yield size
