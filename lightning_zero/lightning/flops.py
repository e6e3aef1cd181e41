"""Floating-point operations of training steps: counted, by module, and as a share of the device's.

Note [Whose operations]
    A backward runs without gradients, and a recomputation of checkpointed activations inside of it with them: that
    tells the two apart. Operations of a recomputation are none of the model's. A backward with ``create_graph=True``
    is taken for one. Operations without gradients and outside of modules are an optimizer's, such as Muon's products,
    or those of a backward in two halves, which says so (``counted_as_backward``).

Note [One counter at a time]
    Modes of PyTorch end in the reverse order of their begin, and callbacks do not. So of several that count the same
    step the first one counts for all.

Note [Compiled code]
    Operations of compiled code are not seen, and PyTorch gives code up for good that is called under a mode. So the
    step that is counted is not compiled.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_zero.flop_formulas import FlopTotal
from lightning_zero.forecast.report import aligned
from lightning_zero.lightning.monitor import elements_in
from lightning_zero.option_checks import checked_arguments

__all__ = ["FlopCount", "FlopsProfile", "ReachedFlops", "StepFlops", "peak_flops", "uncounted"]

_DTYPES = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}
# Of Lightning's table: an L40 is taken for an L4, an H100 NVL for a pair, and others have no rate of tensor cores.
_WRONG_PEAKS = ("l40", "h100 nvl", "geforce", "titan rtx", "a40", "a6000")
_TF32 = "tfloat32"  # in the table
# The table knows an H200 by names alone that devices do not have, and with sparsity; NVIDIA's data sheet, halved.
_H200_PEAKS: dict[str, dict[torch.dtype | str, float]] = {
    "nvl": {
        torch.float64: 30e12,
        torch.float32: 60e12,
        _TF32: 417.5e12,
        torch.bfloat16: 835.5e12,
        torch.float16: 835.5e12,
    },
    "": {
        torch.float64: 34e12,
        torch.float32: 67e12,
        _TF32: 494.7e12,
        torch.bfloat16: 989.5e12,
        torch.float16: 989.5e12,
    },
}


class FlopCount(FlopTotal):
    """Counts the operations of matrix products, convolutions and attention, in this process.

    Attributes:
        flops: All of them.
        forward: Those of forwards.
        backward: Those of backwards.
        recomputed: Those of forwards inside of backwards.
        other: Those of optimizers.
        by_module: Those of forwards, by module with its submodules.
        is_paused: Whether operations are not counted, as in a validation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward = 0
        self.backward = 0
        self.recomputed = 0
        self.other = 0
        self.by_module: Counter[nn.Module] = Counter()
        self.is_paused = False
        self._running: list[nn.Module] = []
        self._context = ExitStack()

    @property
    def model(self) -> int:
        """Those of forwards and backwards, without recomputation."""
        return self.forward + self.backward

    def __enter__(self) -> FlopCount:
        """Begin to count."""
        self._context.enter_context(torch.compiler.set_stance("force_eager"))
        for handle in (
            register_module_forward_pre_hook(self._begin_module),
            register_module_forward_hook(self._end_module, always_call=True),
        ):
            self._context.callback(handle.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End counting."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._context.close()

    def _add(self, flops: int) -> None:
        if not flops or self.is_paused:
            return
        super()._add(flops)
        is_in_autograd = torch._C._current_autograd_node() is not None
        if not is_in_autograd and self.is_in_backward:
            self.backward += flops
        elif not is_in_autograd and not torch.is_grad_enabled() and not self._running:
            self.other += flops
        elif not is_in_autograd:
            self.forward += flops
            self.by_module.update(dict.fromkeys(self._running, flops))
        elif torch.is_grad_enabled():
            self.recomputed += flops
        else:
            self.backward += flops

    def _begin_module(self, module: nn.Module, args: Any) -> None:
        self._running.append(module)

    def _end_module(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._running and self._running.pop() is not module:  # those that an error has ended
            pass


@contextmanager
def uncounted() -> Iterator[None]:
    """Leave operations out of the count that runs, if one does: they are none of the step's."""
    counts = [one for one in _get_current_dispatch_mode_stack() if isinstance(one, FlopCount) and not one.is_paused]
    for count in counts:
        count.is_paused = True
    try:
        yield
    finally:
        for count in counts:
            count.is_paused = False


class StepFlops:
    """The operations of one training step, for a callback.

    Call protocol: ``begin`` in front of its first micro-batch, ``end`` behind its last one; ``stop`` at any time.

    Attributes:
        count: Those of the step that has ended, or runs; None before it, and if it was not made.
        num_steps: Steps of optimizers that were made in it: several, where several optimizers step.
    """

    def __init__(self) -> None:
        self.count: FlopCount | None = None
        self.num_steps = 0
        self.is_running = False
        self._is_own = False  # else another callback's, which ends it
        self._steps_before = 0

    def begin(self, global_step: int) -> None:
        """Begin to count."""
        others = [one for one in _get_current_dispatch_mode_stack() if isinstance(one, FlopCount)]
        self.count = others[0] if others else FlopCount()
        self._is_own, self.is_running, self._steps_before = not others, True, global_step
        if self._is_own:
            self.count.__enter__()

    def end(self, global_step: int) -> bool:
        """End counting if the step was made, and say so."""
        if not self.is_running or global_step == self._steps_before:
            return False
        self.num_steps = global_step - self._steps_before
        self._leave()
        return True

    def pause(self, is_paused: bool) -> None:
        """Leave out the steps that follow, or count on."""
        if self.is_running and self.count is not None:
            self.count.is_paused = is_paused

    def stop(self) -> None:
        """Drop a count whose step was not made."""
        if self.is_running:
            self._leave()
            self.count = None

    def _leave(self) -> None:
        self.is_running = False
        if self._is_own and self.count is not None:
            self.count.__exit__(None, None, None)


class ReachedFlops:
    """The operations of the model per second: those of a step that is counted, over the time of later ones.

    Rows tell nothing whose steps are others than the one that was counted: with another number of micro-batches or
    other trained parameters, which counts a step anew, or with batches of another size. Nor does the row that the
    counted step is in, which is slower.

    Call protocol: ``begin_batch`` and ``end_batch`` around every batch, ``row`` behind some of them; ``stop`` at the
    end.

    Args:
        peak: Operations per second that the device can make; None if nobody knows.

    Attributes:
        step: The step that is counted.
    """

    def __init__(self, peak: float | None) -> None:
        self._peak = peak
        self.step = StepFlops()
        self._counts_anew = True
        self._kind: Hashable = None  # of the step that is counted
        self._elements = self._elements_counted = 0  # of batches since the last row, and of the step that was counted
        self._is_first_row = True

    def begin_batch(self, trainer: pl.Trainer, module: nn.Module) -> None:
        """Begin to count, in front of the first batch of a step that is to be counted."""
        if self._counts_anew:
            self._counts_anew, self._elements_counted = False, 0
            self.step, self._kind = StepFlops(), _kind(trainer, module)
            self.step.begin(trainer.global_step)

    def end_batch(self, trainer: pl.Trainer, batch: Any) -> None:
        """End counting behind the last batch of the step."""
        elements = elements_in(batch)
        self._elements += elements
        if self.step.is_running:
            self._elements_counted += elements
            self.step.end(trainer.global_step)

    def row(self, trainer: pl.Trainer, module: nn.Module, steps: int, step_s: float) -> dict[str, float]:
        """Return the rates of the steps since the last row.

        Args:
            trainer: The Trainer.
            module: The module, whose parameters are trained or frozen.
            steps: Their number.
            step_s: Seconds of one of them.
        """
        elements, self._elements = self._elements / steps, 0
        is_first, self._is_first_row = self._is_first_row, False
        if self.step.is_running:
            self._is_first_row = True
            return {}
        if self._kind != _kind(trainer, module):
            self._counts_anew = self._is_first_row = True
            return {}
        count, num_steps = self.step.count, self.step.num_steps
        if count is None or is_first or not step_s or elements != self._elements_counted / num_steps:
            return {}
        reached = count.model / num_steps / step_s
        row = {"throughput/model_TFLOP_per_s": reached / 1e12}
        return row if self._peak is None else {**row, "throughput/mfu": reached / self._peak}

    def stop(self) -> None:
        """End counting a step that was not made."""
        self.step.stop()


def _kind(trainer: pl.Trainer, module: nn.Module) -> Hashable:
    """Return the settings that operations of a step depend on, besides its batches."""
    return trainer.accumulate_grad_batches, tuple(param.requires_grad for param in module.parameters())


class FlopsProfile(Callback):
    """Print the floating-point operations of one training step, by module; once per fit, on rank 0.

    Those of matrix products, grouped ones too, convolutions, recurrent layers and attention are counted, in a step
    without compiled code; Triton kernels and fused attention of other packages are not. ``linear_cross_entropy`` makes
    its gradients in the forward, so they count there. The table has the parameters of each module, the operations of
    its forward with its submodules, and their share. In a pipeline and with ``tensor_parallel`` they are those of rank
    0.

    Args:
        step: The training step of the fit that is counted; the first one is 1. It is slower than others.
        depth: Levels of submodules that are shown.
    """

    @checked_arguments(
        use={"step": "Use a number of 1 or more.", "depth": "Use a number of levels, for example `depth=3`."}
    )
    def __init__(self, step: int = 1, depth: int = 3) -> None:
        for name, value in (("step", step), ("depth", depth)):
            if value < 1:
                raise ValueError(f"`{name}={value}` must be 1 or more.")
        self.step = step
        self.depth = depth
        self._flops = StepFlops()
        self._first = 0  # step of the fit's begin

    @property
    def count(self) -> FlopCount | None:
        """The operations of the step; None before it."""
        return self._flops.count

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the step of this fit."""
        self._flops = StepFlops()
        self._first = trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Begin to count."""
        if self.count is None and trainer.global_step - self._first >= self.step - 1:
            self._flops.begin(trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Print the table when the step is made."""
        if self._flops.end(trainer.global_step):
            assert self.count is not None
            rank_zero_info(_table(self.count, pl_module, self.depth))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave validation out."""
        self._flops.pause(True)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count on."""
        self._flops.pause(False)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """End counting."""
        self._flops.stop()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn of a step that was not made."""
        self._flops.stop()
        if self.count is None:
            made = trainer.global_step - self._first
            rank_zero_warn(f"`FlopsProfile(step={self.step})` has counted nothing: the fit made {made} step(s).")


def _table(count: FlopCount, module: nn.Module, depth: int) -> str:
    """Return the operations of a step in words, with a row per module that has some."""
    rows = [("module", "class", "parameters", "forward GFLOP", "share")]
    for name, child in module.named_modules():
        flops = count.by_module[child]
        if flops and name.count(".") < depth:
            numel = sum(param.numel() for param in child.parameters())
            share = f"{flops / count.forward:.1%}"
            rows.append((name or "(all)", type(child).__name__, f"{numel:,}", f"{flops / 1e9:,.3f}", share))
    parts = f"forward {count.forward / 1e9:,.3f}, backward {count.backward / 1e9:,.3f}"
    rest = {"recomputed": count.recomputed, "optimizers": count.other}
    parts += "".join(f", {name} {flops / 1e9:,.3f}" for name, flops in rest.items() if flops)
    return "\n".join([f"GFLOP of a training step of this rank: {parts}", *aligned(rows, left=(0, 1))])


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the operations per second that a device can make of dense matrix products; None if nobody knows.

    With TF32, where the program allows it. Warns if the peak of a GPU is not known.
    """
    if device.type != "cuda":
        return None
    name = torch.get_device_module(device).get_device_name(device)
    dtype: torch.dtype | str | None = _DTYPES.get(precision)
    if dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        dtype = _TF32
    found: float | None = None
    if dtype is not None and "h200" in name.lower():
        found = _H200_PEAKS["nvl" if "nvl" in name.lower() else ""][dtype]
    elif dtype is not None and not any(one in name.lower() for one in _WRONG_PEAKS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = get_available_flops(device, dtype)
            if found is None and dtype == _TF32:  # older than TF32
                found = get_available_flops(device, torch.float32)
    if found is None:
        rank_zero_warn(
            f"`throughput/mfu` is left out: the peak of `{name}` in `precision={precision!r}` is not known. Give it, in"
            " 10**12 operations per second: `ZeroMonitor(peak_tflops=...)`."
        )
        return None
    return float(found)
