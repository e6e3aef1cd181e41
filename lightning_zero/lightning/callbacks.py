"""Callbacks for the strategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.checkpoint.export import EXPORTED, DtypeName, Include, dtype_named, export_average
from lightning_zero.checkpoint.paths import remove_path
from lightning_zero.checkpoint.safetensors import parse_size
from lightning_zero.forecast.compare import FORECAST_PEAK, forecast_peak
from lightning_zero.lightning.averaging import saved_average
from lightning_zero.lightning.expert_scalars import ExpertScalars
from lightning_zero.lightning.flops import ReachedFlops, peak_flops, uncounted
from lightning_zero.lightning.monitor import Meter, Phases, samples_in, tokens_in
from lightning_zero.lightning.precision import ZeroStep
from lightning_zero.lightning.rank_zero_calls import replaced
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.option_checks import checked_arguments

__all__ = ["ExportSafetensors", "ZeroMonitor"]


class ZeroMonitor(Callback):
    """Log memory, traffic, time and throughput to every logger of the Trainer, each ``log_every_n_steps``.

    Scalars, with the units in their names: ``memory/{parameters,gradients,optimizer,gathered,gathered_peak,other}_GiB``
    on rank 0, on a GPU ``memory/peak_GiB`` of training, for which PyTorch's statistics of peaks are reset;
    ``traffic/<collective>_MiB`` that rank 0 sent per step; ``time/step_s``, without validation and saving, and of it
    ``time/wait_s``, for which rank 0 waited for others, and ``time/{data,forward,backward,optimizer}_s``;
    ``throughput/{tokens,samples}_per_s`` over all ranks; ``grad_norm`` (``grad_norm/<number>`` of each optimizer where
    there are several) and ``loss_scale`` where there are any. In a pipeline ``pipeline/busy_s_<stage>`` in seconds per
    step and ``pipeline/bubble_share`` (not over NCCL), and no phases. Waiting does not contain sums of tensor groups
    and exchanges of experts; messages between pipeline stages are in no number of traffic and waiting. With experts
    ``moe/<layer>/{load_max_over_mean,dropped,router_entropy,aux_loss}`` over all ranks, and for TensorBoard a histogram
    ``moe/<layer>/load``. With other strategies memory, traffic and waiting are left out.

    Args:
        tokens: Number of tokens in a batch. The default is the number of elements of the batch's first integer tensor
            with two or more dimensions.
        grad_norm: Log the norm of the gradients also where nothing is clipped (one more pass over the gradients).
            ``"units"``: those of each unit as well, as ``grad_norm/<unit>`` (a collective per unit); not with
            ``pipeline``, and not with several optimizers.
        forecast: File that ``python -m lightning_zero estimate --json=true`` has written: its peak is logged as
            ``memory/forecast_peak_GiB``, beside the measured one.
        flops: Count the floating-point operations of the model in the first step, which is slower for it, and log what
            later ones reach on rank 0, recomputation left out: ``throughput/model_TFLOP_per_s``, and where the peak of
            the device is known ``throughput/mfu``. See ``FlopsProfile``, which has them by module. Rows whose batches
            have another size are left out, and another step is counted when other parameters are trained, or the
            number of micro-batches is another one.
        peak_tflops: The peak of the device, in 10**12 per second. By default that of its name in Lightning's table or,
            for an H200, in NVIDIA's data sheet, for the precision of the Trainer (TF32 where the program allows it).
    """

    @checked_arguments(
        use={
            "tokens": "Use a function that returns the number of tokens in a batch, or None.",
            "forecast": "Use the path of a file of `estimate --json=true`, or None.",
            "grad_norm": "Use True or False, or 'units'.",
            "peak_tflops": "Use a number, for example `peak_tflops=989`, or None.",
        }
    )
    def __init__(
        self,
        tokens: Callable[[Any], int] | None = None,
        grad_norm: bool | Literal["units"] = False,
        *,
        forecast: str | Path | None = None,
        flops: bool = False,
        peak_tflops: float | None = None,
    ) -> None:
        if peak_tflops is not None and peak_tflops <= 0:
            raise ValueError(f"`peak_tflops={peak_tflops}` must be above 0.")
        self.tokens = tokens or tokens_in
        self.grad_norm = grad_norm
        self.flops = flops
        self.peak_tflops = peak_tflops
        self._flops: ReachedFlops | None = None  # in a fit, with `flops`
        self._forecast = None if forecast is None else forecast_peak(Path(forecast))
        self._meter = Meter(None)  # of the engine of a fit
        self._phases: Phases | None = None  # in a fit, where a batch has one forward, one backward and one step at most
        self._logged_step = 0  # step of the last row
        self._norms: dict[str, float] = {}  # since the last row, if they were computed for it
        self._bound = ExitStack()  # takes back at the end of a fit what was bound to the Trainer and its loops
        self._experts: ExpertScalars | None = None  # in a fit

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting.

        Raises:
            ValueError: Norms of units are wanted in a pipeline, or with several optimizers.
        """
        if not trainer.loggers:
            rank_zero_warn(
                "`ZeroMonitor` has no logger to write to. Use `Trainer(logger=True)` or remove the callback."
            )
        strategy = trainer.strategy
        engine = strategy.engine if isinstance(strategy, ZeroStrategy) else None
        slices = getattr(strategy, "distributed_sampler_kwargs", None)  # of the data; ranks of a tensor group have one
        self._meter = Meter(engine, slices["num_replicas"] if slices else trainer.world_size)
        self._meter.start()
        has_pipeline = isinstance(strategy, ZeroStrategy) and strategy.pipeline is not None
        if has_pipeline and self.grad_norm == "units":
            raise ValueError(
                "`ZeroMonitor(grad_norm='units')` does not work with `pipeline`: stages have different units. Use"
                " `grad_norm=True`."
            )
        if self.grad_norm == "units" and len(trainer.optimizers) > 1:
            raise ValueError(
                "`ZeroMonitor(grad_norm='units')` does not work with several optimizers: a unit may have parameters of"
                " each. Use `grad_norm=True`."
            )
        self._phases = Phases(strategy.root_device) if pl_module.automatic_optimization and not has_pipeline else None
        self._begin("data")
        batches = trainer.fit_loop.epoch_loop
        for owner, name, by in (
            (trainer, "save_checkpoint", self._leave_out),
            (batches.val_loop, "run", self._leave_out),
            (batches, "_broadcast_sigterm_tensor", self._wait),  # where ranks wait for others before each batch
        ):
            self._bound.enter_context(replaced(owner, name, partial(by, getattr(owner, name))))
        self._logged_step = trainer.global_step
        self._experts = ExpertScalars(trainer, pl_module, has_stages=has_pipeline)
        self._flops = ReachedFlops(self._peak(trainer)) if self.flops else None
        if self._forecast is not None and self._forecast.world_size != trainer.world_size:
            rank_zero_warn(
                f"The forecast of `ZeroMonitor` is for {self._forecast.world_size} rank(s), and this run has"
                f" {trainer.world_size}. Make one with `estimate --world={trainer.world_size}`."
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin the forward."""
        self._meter.note_peak()
        self._begin("forward")
        self._count_experts(True)
        if self._flops is not None:
            self._flops.begin_batch(trainer, pl_module)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Begin the backward."""
        self._begin("backward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin the step of the optimizer."""
        self._begin("optimizer")

    def _begin(self, phase: str | None) -> None:
        if self._phases is not None:
            self._phases.begin(phase)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Compute the norm of the gradients that the next row shows. Collective: all ranks."""
        strategy = trainer.strategy
        optimizers = trainer.optimizers
        is_next = self._is_due(trainer, trainer.global_step + len(optimizers) - self._logged_step)
        if self.grad_norm and is_next and isinstance(strategy, ZeroStrategy):
            self._norms |= _norms_by_name(trainer, {optimizer: strategy.grad_norm(optimizer)})
            if self.grad_norm == "units":
                norms = strategy.engine.unit_grad_norms()
                self._norms |= {f"grad_norm/{name}": float(norm) for name, norm in norms.items()}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and write a row when one is due."""
        self._begin("data")
        self._count_experts(False)
        if self._flops is not None:
            self._flops.end_batch(trainer, batch)
        self._meter.count(tokens=self.tokens(batch), samples=samples_in(batch))
        steps = trainer.global_step - self._logged_step
        if not self._is_due(trainer, steps):
            return
        row = {**self._meter.row(steps), **self._norm_and_scale(trainer)}
        if isinstance(trainer.strategy, ZeroStrategy):
            row |= trainer.strategy.pipeline_timings(steps)
        if self._flops is not None:
            row |= self._flops.row(trainer, pl_module, steps, row["time/step_s"])
        if self._forecast is not None:
            row[FORECAST_PEAK] = self._forecast.gib
        if self._phases is not None:
            row |= {f"time/{phase}_s": seconds / steps for phase, seconds in self._phases.take().items()}
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if self._experts is not None:
            row |= self._experts.row(step)
        for logger in trainer.loggers:
            logger.log_metrics(row, step=step)
            logger.save()
        self._logged_step = trainer.global_step

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """End counting."""
        self._end()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End counting, also operations of a step that was not made."""
        self._end()

    def _end(self) -> None:
        """Forget the fit, with its engine."""
        self._bound.close()
        if self._flops is not None:
            self._flops.stop()
        if self._experts is not None:
            self._experts.stop()
        self._meter, self._phases, self._flops, self._experts = Meter(None), None, None, None

    def _count_experts(self, is_on: bool) -> None:
        if self._experts is not None:
            self._experts.count(is_on)

    def _leave_out(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run work that is not training: a validation with the start of its loaders, or saving a checkpoint."""
        with self._meter.paused(), self._outside_of_phases(), uncounted():
            return work(*args, **kwargs)

    def _wait(self, agreement: Callable[[], None]) -> None:
        """Agree with other ranks, which is in no phase."""
        with self._outside_of_phases():
            agreement()

    def _outside_of_phases(self) -> AbstractContextManager[None]:
        return nullcontext() if self._phases is None else self._phases.paused()

    def _peak(self, trainer: pl.Trainer) -> float | None:
        """Return the operations per second that the device can make."""
        if self.peak_tflops is not None:
            return self.peak_tflops * 1e12
        return peak_flops(trainer.strategy.root_device, str(trainer.precision_plugin.precision))

    def _norm_and_scale(self, trainer: pl.Trainer) -> dict[str, float]:
        plugin = trainer.precision_plugin
        row: dict[str, float] = {}
        norms, self._norms = self._norms, {}
        if isinstance(plugin, ZeroStep):
            clipped, plugin.clipped_norms = plugin.clipped_norms, {}
            norms = norms or _norms_by_name(trainer, clipped)
            if plugin.scaler is not None:
                row |= {"loss_scale": plugin.scaler.scale, "skipped_steps": float(plugin.scaler.skipped)}
        return {**row, **norms}

    @staticmethod
    def _is_due(trainer: pl.Trainer, steps: int) -> bool:
        """Say whether a row is due after so many steps; never with ``log_every_n_steps=0``, as in Lightning."""
        return 0 < int(trainer.log_every_n_steps) <= steps  # type: ignore[attr-defined]


def _norms_by_name(trainer: pl.Trainer, norms: Mapping[Optimizer, Tensor]) -> dict[str, float]:
    """Return the norms of some optimizers, by the names of their scalars."""
    optimizers = trainer.optimizers
    names = ["grad_norm"] if len(optimizers) == 1 else [f"grad_norm/{number}" for number in range(len(optimizers))]
    return {name: float(norms[one]) for name, one in zip(names, optimizers, strict=True) if one in norms}


class ExportSafetensors(Callback):
    """Write safetensors files beside every checkpoint, in the manner of Hugging Face; see ``export_safetensors``.

    The folder has the name of the checkpoint: beside ``epoch=3.ckpt`` it is ``epoch=3-safetensors``. It is removed with
    the checkpoint, so ``ModelCheckpoint`` decides which ones are made and kept. Files that others put into it stay.
    Every rank writes its own bytes. Beside ``WeightAveraging`` and ``EMAWeightAveraging`` the average is written, as in
    the checkpoint's ``state_dict``.

    Args:
        dtype: In which floating-point weights are written; by default that of the values that are stepped.
        max_shard_size: Most bytes of a file.
        include: ``"trained"``, patterns of names, or a function of the name. The default is everything.
        prefix: Write only weights whose names start with it, without it: ``"model."`` for ``self.model`` in the
            ``LightningModule``.
    """

    @checked_arguments(use={"include": "Use 'trained', a list of patterns of names, a function of the name, or None."})
    def __init__(
        self,
        dtype: DtypeName | None = None,
        max_shard_size: str = "5GB",
        include: Include | None = None,
        prefix: str = "",
    ) -> None:
        dtype_named(dtype)
        parse_size(max_shard_size)
        self.dtype = dtype
        self.max_shard_size = max_shard_size
        self.include = include
        self.prefix = prefix

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Follow the strategy's checkpoints, also those that are saved after the run."""
        strategy = trainer.strategy
        if not isinstance(strategy, ZeroStrategy):
            raise ValueError(
                f"`ExportSafetensors` needs `ZeroStrategy`, and the strategy is `{type(strategy).__name__}`. Use"
                " `python -m lightning_zero consolidate` on its checkpoints."
            )
        if self not in strategy.followers:
            strategy.followers.append(self)

    def checkpoint_saved(self, module: nn.Module, filepath: _PATH, checkpoint: Mapping[str, Any]) -> None:
        """Export the weights, or their average where the checkpoint has that. Collective: all ranks."""
        export_average(
            module,
            saved_average(module, checkpoint),
            path=_folder_of(filepath),
            dtype=self.dtype,
            max_shard_size=self.max_shard_size,
            include=self.include,
            prefix=self.prefix,
            overwrite=True,
        )

    def checkpoint_removed(self, filepath: _PATH) -> None:
        """Remove the export."""
        if _folder_of(filepath).exists():
            remove_path(_folder_of(filepath), EXPORTED)


def _folder_of(filepath: _PATH) -> Path:
    return Path(os.fspath(filepath).removesuffix(".ckpt") + "-safetensors")
