"""Lightning's averaging callbacks on this rank's segments of the masters (ADR 0036).

Note [Averages of segments]
    A callback gets a class between its own and Lightning's. Lightning's code stays: where it would copy the module, it
    gets a module of this rank's segments, and where it would walk over the module's parameters, a view of the module
    whose parameters are the segments of the masters. An update sends nothing; a swap or a transfer is published.

Note [Frozen parameters]
    Frozen values that 16 bits hold have no master until an optimizer steps them. Averages are kept in the dtype of a
    master that may come; one that comes unexpectedly, because the user gave 16-bit values, widens the average. An
    update reads such values in that dtype; to be written, they get a master for the time being.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_zero.checkpoint import state
from lightning_zero.engine.access.records import ParameterRecord
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.lightning.checkpoint_hooks import CheckpointHooks

__all__ = ["begin_averages", "bind_averages", "forget_averages", "saved_average"]


_SAVED = "averaging_state"  # Lightning's key of checkpoints whose `state_dict` is the average


class _SegmentView:
    """A module whose parameters are this rank's segments of the masters; all else is the module's own.

    The segments are live, but for those of Note [Frozen parameters]: copies, unless the view was made for writing.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._segments = [_segment(record) for record in _engine_of(module).records()]

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._segments)

    def buffers(self) -> Iterator[Tensor]:
        return iter(self._module.buffers())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _SegmentAverages(AveragedModel):
    """Averages of segments, under the names of parameters and buffers."""

    def update_parameters(self, model: Any) -> None:
        with _writing():
            _widen(self.module, model)
            super().update_parameters(_view(model))  # type: ignore[arg-type]


def _segments_of(module: pl.LightningModule) -> nn.Module:
    """Return a module with this rank's segments as parameters, and the module's buffers; both may be live."""
    segments = nn.Module()
    for record in _engine_of(module).records():
        segments._parameters[record.name] = nn.Parameter(_segment(record), requires_grad=False)
    segments._buffers.update({name: buffer.detach() for name, buffer in module.named_buffers()})
    return segments


def _segment(record: ParameterRecord) -> Tensor:
    """Return this rank's segment in the dtype of averages: live if it has that, else a copy."""
    segment = record.master().detach()
    return segment if segment.dtype == record.shown_dtype else segment.to(record.shown_dtype)


def _view(module: Any) -> _SegmentView:
    return module if isinstance(module, _SegmentView) else _SegmentView(module)


def _view_for_writing(average: nn.Module, module: pl.LightningModule) -> _SegmentView:
    """Return a view whose segments are all live until they are published."""
    _engine_of(module).internals.checkpoints.prepare_load()
    _widen(average, module)
    return _SegmentView(module)


def _widen(average: nn.Module, module: Any) -> None:
    """Give averages the dtype of masters that have come since; see Note [Frozen parameters]."""
    for record in _engine_of(module).records():
        kept = average._parameters[record.name]
        if kept is not None and kept.dtype != record.shown_dtype:
            average._parameters[record.name] = nn.Parameter(kept.detach().to(record.shown_dtype), requires_grad=False)


def _engine_of(module: pl.LightningModule) -> ZeroEngine:
    strategy = module.trainer.strategy
    assert isinstance(strategy, CheckpointHooks)
    return strategy.engine


@contextmanager
def _writing() -> Generator[None, None, None]:
    """Write into tensors that are trained later, also while Lightning evaluates."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class _OnSegments(Callback):
    """Common part of the averaging callbacks below: averages of this rank's segments."""

    _average_model: Any
    user_class: type  # the user's own, without this class
    _made_for: weakref.ref[ZeroEngine] | None = None  # the engine of the segments that are averaged

    def begin(self, module: pl.LightningModule) -> None:
        """Make the averages, when a fit begins and the module is sharded."""
        self._made_for = weakref.ref(_engine_of(module))
        with torch.inference_mode(False):
            self._average_model = self._make(module)

    def forget(self, module: pl.LightningModule) -> None:
        """Let go of the averages of another engine's segments."""
        if self._made_for is not None and self._made_for() is not _engine_of(module):
            self._average_model, self._made_for = None, None

    def _make(self, module: pl.LightningModule) -> nn.Module:
        raise NotImplementedError

    def _is_elsewhere(self, trainer: pl.Trainer) -> bool:
        """Say whether another strategy runs the callback now; then it has its own class again."""
        if isinstance(trainer.strategy, CheckpointHooks):
            return False
        self.__class__ = self.user_class
        return True


class _WeightAveraging(_OnSegments, WeightAveraging):
    """``WeightAveraging`` of segments; see Note [Averages of segments]."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._is_elsewhere(trainer):
            self.setup(trainer, pl_module, stage)

    def _make(self, module: pl.LightningModule) -> nn.Module:
        segments, options = _segments_of(module), {"use_buffers": self._use_buffers, **self._kwargs}
        return _SegmentAverages(segments, device=self._device, **options)

    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        with _writing():
            super()._swap_models(_view_for_writing(self._average_model.module, pl_module))  # type: ignore[arg-type]
        _engine_of(pl_module).internals.checkpoints.publish()

    def _copy_average_to_current(self, pl_module: pl.LightningModule) -> None:
        with _writing():
            view = _view_for_writing(self._average_model.module, pl_module)
            super()._copy_average_to_current(view)  # type: ignore[arg-type]
        _engine_of(pl_module).internals.checkpoints.publish()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        average = self._average_model
        if average is None:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
            return
        checkpoint["current_model_state"] = checkpoint["state_dict"]
        checkpoint["state_dict"] = state.model_state(_engine_of(pl_module), pl_module, average.module)
        checkpoint[_SAVED] = {
            name: value for name, value in average.state_dict().items() if not name.startswith("module.")
        }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        average = self._average_model
        if average is None:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
            return
        current = checkpoint.get("current_model_state")
        was_averaged = current is not None and _SAVED in checkpoint
        if not was_averaged:
            rank_zero_warn(
                "The checkpoint was not created with WeightAveraging. Both the current and the average model start from"
                " its state_dict."
            )
        with _writing():  # the strategy has loaded `state_dict` into the module
            for mine, loaded in zip(_tensors(average.module), _tensors(_view(pl_module)), strict=True):
                mine.copy_(loaded)
            if was_averaged:
                average.n_averaged.copy_(checkpoint[_SAVED]["n_averaged"])
        if was_averaged:
            trainer.strategy.load_model_state_dict(
                {**checkpoint, "state_dict": current}, strict=pl_module.strict_loading
            )


class _StochasticAveraging(_OnSegments, StochasticWeightAveraging):
    """``StochasticWeightAveraging`` of segments; see Note [Averages of segments]."""

    _module: weakref.ref[pl.LightningModule] | None = None  # whose segments are averaged

    @property
    def _averaged(self) -> pl.LightningModule | None:
        return None if self._module is None or self._average_model is None else self._module()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._is_elsewhere(trainer):
            self.setup(trainer, pl_module, stage)

    def _make(self, module: pl.LightningModule) -> nn.Module:
        self._module = weakref.ref(module)
        return copy.deepcopy(_segments_of(module))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not (self._max_epochs != -1 and trainer.current_epoch == self.swa_end + 1):
            _widen(self._average_model, pl_module)
            super().on_train_epoch_start(trainer, _view(pl_module))  # type: ignore[arg-type]
            return
        view = _view_for_writing(self._average_model, pl_module)
        super().on_train_epoch_start(trainer, view)  # type: ignore[arg-type]
        _engine_of(pl_module).internals.checkpoints.publish()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        view = _view_for_writing(self._average_model, pl_module)
        super().on_train_end(trainer, view)  # type: ignore[arg-type]
        _engine_of(pl_module).internals.checkpoints.publish()

    def state_dict(self) -> dict[str, Any]:
        values, module = super().state_dict(), self._averaged
        if module is not None:
            values["average_model_state"] = state.model_state(_engine_of(module), module, self._average_model)
        return values

    def _load_average_model_state(self, model_state: Any) -> None:
        module = self._averaged
        if model_state is not None and module is not None:
            state.load_average(_engine_of(module), module, self._average_model, model_state)


# -- For the strategy --------------------------------------------------------------------------------------------------

_KINDS: dict[type[Callback], type[_OnSegments]] = {
    WeightAveraging: _WeightAveraging,
    StochasticWeightAveraging: _StochasticAveraging,
}


def bind_averages(trainer: pl.Trainer) -> None:
    """Let averaging callbacks average segments, before their ``setup`` copies the module."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, on_segments in _KINDS.items():
            if isinstance(callback, kind) and not isinstance(callback, _OnSegments):
                callback.__class__ = _class_over(type(callback), kind, on_segments)


def _class_over(cls: type[Callback], kind: type[Callback], on_segments: type[_OnSegments]) -> Any:
    bases = (on_segments,) if cls is kind else (cls, on_segments)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "user_class": cls}
    return type(cls.__name__, bases, names)


def begin_averages(trainer: pl.Trainer) -> None:
    """Make the averages of a fit that begins; the module is sharded."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, _OnSegments):
            callback.begin(trainer.lightning_module)


def forget_averages(trainer: pl.Trainer) -> None:
    """Let go of averages that do not fit the engine which evaluates."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, _OnSegments):
            callback.forget(trainer.lightning_module)


def saved_average(module: Any, checkpoint: Mapping[str, Any]) -> nn.Module | None:
    """Return the average that a checkpoint has in the place of the module's weights; None if it has these."""
    if _SAVED not in checkpoint:
        return None
    averages = [one._average_model for one in module.trainer.callbacks if isinstance(one, _WeightAveraging)]
    return next((average.module for average in averages if average is not None), None)


def _tensors(module: Any) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())
