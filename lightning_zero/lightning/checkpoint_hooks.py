"""The strategy's hooks for checkpoints, which Lightning calls to save, load and remove them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import lightning.pytorch as pl
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_zero.checkpoint import directory, state
from lightning_zero.checkpoint.asynchronous import AsyncSaver
from lightning_zero.checkpoint.flat import PARAMETER_NAMES
from lightning_zero.checkpoint.random_state import RANDOM_STATES, gather_random_states, restore_random_state
from lightning_zero.checkpoint.ranks import COPIES, CheckpointError, Ranks, describe_layouts
from lightning_zero.comm.peers import Peers, PeersError
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.errors import CollectiveError
from lightning_zero.lightning.metrics import METRIC_STATES, metric_states, with_own_metric_states
from lightning_zero.lightning.pipelined_steps import PipelinedSteps
from lightning_zero.lightning.progress import open_microbatches, place_of, why_not_to_save
from lightning_zero.lightning.rank_states import (
    RANK_STATES,
    describe_states,
    differing_in_copies,
    differing_paths,
    digests_of,
    kept_states,
    own_states,
    take_own_states,
)

__all__ = ["CheckpointFollower", "CheckpointHooks", "raw"]

OPEN_MICROBATCHES = "open_microbatches"  # key of a checkpoint: how many have gradients that it does not have
STEP_DEVICES = "step_devices"  # key of a checkpoint: on which processor each offloaded unit is stepped
PEERS_TIMEOUT_S = 10.0  # how long a rank that saves after an error waits for the others


class _NotSaved(dict[str, Any]):
    """The content of a checkpoint that is not written."""


class CheckpointFollower(Protocol):
    """Does something beside every checkpoint that ``ZeroStrategy`` saves."""

    def checkpoint_saved(self, module: nn.Module, filepath: _PATH, checkpoint: Mapping[str, Any]) -> None:
        """Follow a save, which in the background may still be running. Collective: all ranks."""
        ...

    def checkpoint_removed(self, filepath: _PATH) -> None:
        """Follow a removal, on rank 0; that of a checkpoint saved in the background in its thread."""
        ...


class CheckpointHooks(ParallelStrategy):
    """The part of a strategy that deals with checkpoints.

    Attributes:
        state_dict_type: ``"full"``: a checkpoint is one file. ``"sharded"``: a directory that all ranks write.
        async_save: Write checkpoints in the background.
        weights_only: Passed to ``torch.load`` when the Trainer does not say.
        followers: Told of checkpoints, in this order.
    """

    state_dict_type: Literal["sharded", "full"]
    async_save: bool
    weights_only: bool | None
    followers: list[CheckpointFollower]
    _engine: ZeroEngine | None
    _saver: AsyncSaver | None  # from the first asynchronous save to teardown
    _is_running: bool  # from setup to teardown: somebody will wait for asynchronous saves
    _steps: PipelinedSteps | None  # with a pipeline
    _random_states: tuple[list[dict[str, Any]], int] | None  # by rank, and of how many copies, for the start
    _stored: dict[int, dict[str, Hashable]]  # by identity of a file's dictionary: of its model, before hooks change it
    _restore: Callable[[], None] | None = None  # reads the checkpoint of this run; None: it is read
    _is_nested: bool = False  # a finder restores what it has saved
    _has_barrier_to_skip: bool = False  # behind a checkpoint that is not written
    _is_alone: bool  # see `ProcessHooks`
    _have_met: bool = False  # all ranks, for the checkpoint whose content was made last

    @property
    def engine(self) -> ZeroEngine:
        """The engine that shards the module.

        Raises:
            RuntimeError: the module is not sharded yet.
        """
        if self._engine is None:
            raise RuntimeError("The module is not sharded before `Trainer.fit`, `validate`, `test` or `predict` runs.")
        return self._engine

    @property
    def _sharded_module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning calls ``load_optimizer_state_dict``."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's segments of the parameters and everything else the module keeps."""
        if self._engine is None:
            return super().lightning_module_state_dict()
        self._engine.internals.checkpoints.gather_module_buffers()
        return state.model_state(self._engine, self._sharded_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this rank's segments of the optimizer's state, by parameter name."""
        if self._engine is None:
            return super().optimizer_state(optimizer)
        with self._engine.internals.checkpoints.whole_groups(raw(optimizer)):
            return state.optimizer_state(self._engine, raw(optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write a checkpoint. Collective: all ranks.

        Raises:
            CheckpointError: Not all ranks came to save, or another one could not write.
        """
        if isinstance(checkpoint, _NotSaved) or not (self._have_met or self._all_ranks_came()):
            return
        if self._engine is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self._have_met = False
        if self._engine.internals.checkpoints.are_rounded:
            rank_zero_warn(state.ROUNDED)
        filepath = Ranks(self._engine).from_first(filepath)
        if "loops" in checkpoint:  # more than weights
            checkpoint = {**checkpoint, **self._states_of_ranks(self._engine, checkpoint)}
        is_full = self.state_dict_type == "full"
        is_plain = self.has_plain_checkpoint_io and not _has_protocol(filepath) and storage_options is None
        if is_full and not is_plain and not self.async_save:
            whole = directory.gather_full(self._engine, checkpoint)
            super().save_checkpoint(whole, filepath, storage_options)
        elif storage_options is not None:
            raise ValueError(
                "`storage_options` needs a single file. Use `ZeroStrategy(state_dict_type='full')`, without"
                " `async_save`."
            )
        elif self.async_save and self._is_running:
            self._saver_of(self._engine).save(checkpoint, filepath, full=is_full)
        else:
            directory.save(self._engine, checkpoint, filepath, full=is_full)
        for follower in self.followers:
            follower.checkpoint_saved(self._sharded_module, filepath, checkpoint)

    def _states_of_ranks(self, engine: ZeroEngine, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states kept per rank: of loaders, callbacks, metrics, random numbers. Collective: all ranks."""
        datamodule = getattr(self._sharded_module._trainer, "datamodule", None)
        ranks = Ranks(engine)
        with ranks.agree("Copying the states of dataloaders and callbacks"):
            own = own_states(checkpoint, None if datamodule is None else type(datamodule).__qualname__)
            digests = digests_of(own)
        differing = differing_paths(ranks.gather_data(digests))
        others = {path: state for path, state in own.items() if path in differing}
        rank_states = kept_states(ranks.gather_data(others)) if differing else []
        metrics = ranks.gather_data(metric_states(self._sharded_module))[: ranks.num_copies]  # stages have the same
        of_chunks = None if self._steps is None else self._steps.random_states()
        random_states = gather_random_states(engine, of_chunks)
        devices = engine.internals.checkpoints.step_devices
        num_open = open_microbatches(self._sharded_module.trainer)
        return {
            COPIES: ranks.num_copies,
            **({OPEN_MICROBATCHES: num_open} if num_open else {}),
            RANDOM_STATES: random_states,
            **({METRIC_STATES: metrics} if any(metrics) else {}),
            **({RANK_STATES: rank_states} if rank_states else {}),
            **({STEP_DEVICES: devices} if devices else {}),
        }

    def _saver_of(self, engine: ZeroEngine) -> AsyncSaver:
        if self._saver is not None and self._saver.engine is not engine:
            self._saver.close()
            self._saver = None
        if self._saver is None:
            self._saver = AsyncSaver(engine)
        return self._saver

    def wait_for_save(self) -> None:
        """Return when every checkpoint saved with ``async_save=True`` is on the disk.

        Raises:
            CheckpointError, OSError: The last save failed.
        """
        if self._saver is not None:
            self._saver.wait()

    @property
    def has_plain_checkpoint_io(self) -> bool:
        """Whether single files are written as ``torch.save`` does."""
        return type(self.checkpoint_io) is TorchCheckpointIO

    def restore_when_sharded(self, trainer: pl.Trainer) -> None:
        """Let a checkpoint be read in ``setup``: every rank reads only its own ranges, so the module is sharded first.

        All else is as under DDP: optimizers are made, and ``on_fit_start`` is called, when it has been read.
        """
        connector = trainer._checkpoint_connector
        vars(connector)["_restore_modules_and_callbacks"] = partial(self._note_restore, connector)
        vars(connector)["restore"] = partial(self._restore_inside, connector)

    def _note_restore(self, connector: Any, *args: Any) -> None:
        self._restore = partial(type(connector)._restore_modules_and_callbacks, connector, *args)

    def _restore_inside(self, connector: Any, *args: Any, **kwargs: Any) -> None:
        """Restore the checkpoint of a finder, and keep that of the run, which is not all read yet."""
        checkpoint, path = connector._loaded_checkpoint, connector._ckpt_path
        self._is_nested = True
        try:
            type(connector).restore(connector, *args, **kwargs)
        finally:
            self._is_nested = False
        connector._loaded_checkpoint, connector._ckpt_path = checkpoint, path

    def _restore_checkpoint(self) -> None:
        """Read the checkpoint of this run, if there is one. Collective: all ranks."""
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    def meet_before_dumps(self, trainer: pl.Trainer) -> None:
        """Let all ranks meet before the content of a checkpoint is made, which may be collective."""
        connector = trainer._checkpoint_connector
        vars(connector)["dump_checkpoint"] = partial(self._dump_checkpoint, connector)

    def _dump_checkpoint(self, connector: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._have_met = False
        if not self._all_ranks_came():
            self._has_barrier_to_skip = True
            return _NotSaved()
        checkpoint: dict[str, Any] = type(connector).dump_checkpoint(connector, weights_only)
        self._have_met = self._engine is not None
        return checkpoint

    def _all_ranks_came(self) -> bool:
        """Wait for the previous save and for all ranks; say whether they are there after an error. Collective.

        Raises:
            CheckpointError: They are not, or at other places of the run.
        """
        module, peers, error = self.lightning_module, Peers.of_world(), sys.exception()
        trainer = None if module is None else module._trainer
        is_interrupted = trainer is not None and trainer.interrupted
        if self._engine is None and not is_interrupted:
            return True  # this rank has all there is
        if is_interrupted and error is not None:
            peers.tell(error)
        if is_interrupted and self._is_alone:
            return False
        try:
            if self._engine is None:
                raise CheckpointError("the model was not set up.")
            self.wait_for_save()
            self._meet(peers, place_of(trainer, self._engine), is_interrupted)
        except (CheckpointError, CollectiveError, OSError) as error:
            if not is_interrupted:
                raise
            self._is_alone = isinstance(error.__cause__, PeersError)
            warnings.warn(f"No checkpoint is saved after the error: {error}", stacklevel=2)
            return False
        return True

    def _meet(self, peers: Peers, place: Mapping[str, str], is_interrupted: bool) -> None:
        timeout_s = self.engine.internals.world_communicator.timeout_s
        try:
            why_not = peers.meet(
                "Saving a checkpoint",
                place,
                why_not_to_save,
                timeout_s=min(timeout_s, PEERS_TIMEOUT_S) if is_interrupted else timeout_s,
                ends_with_errors=not is_interrupted,
            )
        except PeersError as error:
            raise CheckpointError(
                f"{error} Call `trainer.save_checkpoint` and the like on every rank, not under `if"
                " trainer.is_global_zero`."
            ) from error
        if why_not:
            raise CheckpointError(
                f"Saving a checkpoint: {why_not}. It would mix the states of several steps. Save on every rank in the"
                " same hook and step, for example with `ModelCheckpoint`; an error, or a signal, that one rank has"
                " alone leaves the ranks at different places."
            )

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, but not behind a checkpoint that is not written because some rank is missing."""
        if self._has_barrier_to_skip and name == "Trainer.save_checkpoint":
            self._has_barrier_to_skip = False
        else:
            super().barrier(name)  # type: ignore[safe-super]

    def _is_saving(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._saver is not None and self._saver.is_running

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of any stage, number of ranks or strategy. Collective: all ranks."""
        self.wait_for_save()
        weights_only = self.weights_only if weights_only is None else weights_only
        checkpoint_path = Ranks(self._engine).from_first(checkpoint_path)
        is_plain = self.has_plain_checkpoint_io and not _has_protocol(checkpoint_path)
        if is_plain or Path(checkpoint_path).is_dir():
            checkpoint = directory.load(self._engine, checkpoint_path, weights_only=weights_only)
        else:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        directory.check_is_trainers(checkpoint, checkpoint_path)
        self._stored.pop(id(checkpoint), None)  # of a dictionary that is gone
        if PARAMETER_NAMES in checkpoint:
            self._stored[id(checkpoint)] = state.identities(checkpoint["state_dict"])
        self._take_own_states(checkpoint)
        return checkpoint

    def _take_own_states(self, checkpoint: dict[str, Any]) -> None:
        """Put this rank's states of dataloaders and callbacks in place of rank 0's."""
        saved = checkpoint.pop(RANK_STATES, [])
        if self._engine is None or not saved:
            return
        ranks = Ranks(self._engine)
        copies = ranks.num_copies
        then, now = (len(saved), checkpoint.get(COPIES, len(saved))), (ranks.num_data_ranks, copies)
        message = ""
        if then == now:
            take_own_states(checkpoint, saved, ranks.data_rank)
        elif then[1] == copies:  # in other stages: the data are those of a copy
            take_own_states(checkpoint, saved, ranks.data_rank % copies)
            if lost := differing_in_copies(saved, copies):
                message = f"the first stage's state of {describe_states(lost)}."
        else:
            message = (
                f"rank 0's state of {describe_states(saved)}. States of dataloaders cannot be divided otherwise, so"
                " data of the current epoch may be seen twice or left out."
            )
        if message and self._sharded_module.trainer.state.fn == TrainerFn.FITTING:
            rank_zero_warn(f"{describe_layouts(then, now)}: every rank takes {message}")

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load ``checkpoint["state_dict"]`` as it is now. Collective: all ranks."""
        module, saved = self._sharded_module, checkpoint.get(METRIC_STATES, [])
        ranks = Ranks(self.engine)
        values, undivided = with_own_metric_states(
            module,
            checkpoint["state_dict"],
            saved=saved,
            rank=ranks.data_rank % ranks.num_copies,
            world_size=ranks.num_copies,
        )
        if undivided:
            rank_zero_warn(
                f"The checkpoint was saved on {len(saved)} ranks and is loaded on {ranks.num_copies}. All take rank 0's"
                f" {', '.join(f'`{name}`' for name in undivided)}: the metric does not say how to merge the states."
            )
        state.load_model_state(self.engine, module, values, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of all optimizers. Collective: all ranks."""
        if checkpoint.get(OPEN_MICROBATCHES):
            rank_zero_warn(
                f"The checkpoint was saved when {checkpoint[OPEN_MICROBATCHES]} micro-batch(es) had added to the"
                " gradients of the next step, which no checkpoint keeps: that step is made of the others alone, so the"
                " losses differ from those of an uninterrupted run. Save where a step has been made: let"
                " `val_check_interval` be a multiple of `accumulate_grad_batches`, and save at the end of a validation"
                " or epoch, or if `trainer.global_step` has changed."
            )
        states = checkpoint.get(RANDOM_STATES)
        self._random_states = None if states is None else (states, checkpoint.get(COPIES, len(states)))
        self.engine.internals.checkpoints.use_step_devices(checkpoint.get(STEP_DEVICES, {}))
        stored = self._stored.pop(id(checkpoint), None) or state.identities(checkpoint.get("state_dict", {}))
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(self.engine.internals.checkpoints.whole_groups(optimizer))
            permuted = state.load_optimizer_state(
                self.engine,
                self.optimizers,
                states=checkpoint["optimizer_states"],
                names=checkpoint.get(PARAMETER_NAMES, ()),
                stored=stored,
            )
        self._check_schedulers(checkpoint.get("lr_schedulers", ()))
        for config, saved in zip(self.lr_scheduler_configs, checkpoint.get("lr_schedulers", ()), strict=False):
            optimizer = raw(config.scheduler.optimizer)
            if optimizer in permuted:
                _refuse_values_of_groups(config.scheduler, saved, len(optimizer.param_groups))

    def _check_schedulers(self, saved: Sequence[Any]) -> None:
        """Warn of schedulers without a saved state, and refuse states of other schedulers.

        Raises:
            ValueError: A state has no entry of the scheduler that would load it.
        """
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        for scheduler, state_dict in zip(schedulers, saved, strict=False):
            is_checked = isinstance(scheduler, LRScheduler) and isinstance(state_dict, Mapping) and state_dict
            if is_checked and not state_dict.keys() & scheduler.state_dict().keys():
                raise ValueError(
                    f"The checkpoint has the state of another scheduler than `{type(scheduler).__name__}`:"
                    f" {', '.join(f'`{key}`' for key in state_dict)}. Use the scheduler of the checkpoint; for"
                    " DeepSpeed's there are `lightning_zero.WarmupLR` and the like. To start the schedule anew, set"
                    " `checkpoint['lr_schedulers'] = []` in `on_load_checkpoint`."
                )
        if len(saved) < len(schedulers):
            names = ", ".join(f"`{type(scheduler).__name__}`" for scheduler in schedulers[len(saved) :])
            rank_zero_warn(f"The checkpoint has no state of {names}, so its schedule starts anew.")

    def on_train_end(self) -> None:
        """Make the steps that are still due, and show parameters in their own dtype. Collective: all ranks."""
        self.engine.show_masters()

    def on_train_start(self) -> None:
        """Set the random number generators as they were at the checkpoint that is resumed."""
        self.engine.internals.fits.resume()  # a learning rate finder trains twice
        checkpoints = self.engine.internals.checkpoints
        if checkpoints.are_rounded:  # an evaluation has loaded them, and no `ckpt_path`
            rank_zero_warn(state.ROUNDED)
            checkpoints.are_rounded = False
        states, self._random_states = self._random_states, None
        if states is None:
            return
        message = restore_random_state(self.engine, *states)
        if message is None:
            _begin_epoch_as_uninterrupted(self._sharded_module.trainer)
            if self._steps is not None:
                message = self._steps.take_random_states(states[0][Ranks(self.engine).data_rank])
        if message is not None:
            rank_zero_warn(message)

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove a checkpoint file, directory or link."""
        if not self.is_global_zero:
            return
        if self._saver is not None:
            self._saver.remove(filepath, then=partial(self._tell_removed, filepath))
            return
        if (self.has_plain_checkpoint_io and not _has_protocol(filepath)) or self._wrote_directory(filepath):
            directory.remove(filepath)
        else:
            self.checkpoint_io.remove_checkpoint(filepath)
        self._tell_removed(filepath)

    def _tell_removed(self, filepath: _PATH) -> None:
        for follower in self.followers:
            follower.checkpoint_removed(filepath)

    def _wrote_directory(self, path: _PATH) -> bool:
        """Say whether a folder is not one of a ``CheckpointIO``."""
        return directory.is_directory(path) or (self.state_dict_type == "sharded" and Path(path).is_dir())

    def _begin_saving(self, trainer: pl.Trainer) -> None:
        """Let callbacks that look for a free name wait for the save that is running: its file is not there yet."""
        self._is_running = True
        for callback in _savers_of(trainer) if self.async_save else ():
            looks = partial(type(callback).file_exists, callback)
            vars(callback)["file_exists"] = partial(self._exists_after_save, looks)

    def _exists_after_save(self, looks: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        self.wait_for_save()
        return looks(*args, **kwargs)

    def _finish_saving(self) -> None:
        self._is_running = False
        trainer = self._sharded_module._trainer
        for callback in _savers_of(trainer):
            vars(callback).pop("file_exists", None)
        if self._saver is None:
            return
        try:
            self._saver.close()
        except Exception as error:
            if trainer is None or not trainer.interrupted or _leaves_with_success():
                raise
            warnings.warn(f"The last checkpoint is not complete: {error}", stacklevel=2)
        finally:
            self._saver = None


def _savers_of(trainer: pl.Trainer | None) -> list[ModelCheckpoint]:
    callbacks = [] if trainer is None else trainer.checkpoint_callbacks
    return [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]


def _refuse_values_of_groups(scheduler: Any, saved: Any, num_groups: int) -> None:
    """Refuse a scheduler's saved state with values that differ between groups, whose order is another one now.

    Raises:
        ValueError: It has such a list.
    """
    if isinstance(saved, Mapping):
        for key, value in saved.items():
            if isinstance(value, list) and len(value) == num_groups and any(item != value[0] for item in value):
                raise ValueError(
                    f"The checkpoint has the parameter groups in another order, and `{key}` of"
                    f" `{type(scheduler).__name__}` has a value for each: {value}. `configure_optimizers` must make the"
                    " groups in the order of the checkpoint."
                )
            _refuse_values_of_groups(scheduler, value, num_groups)
    elif isinstance(saved, list):
        for item in saved:
            _refuse_values_of_groups(scheduler, item, num_groups)


def _leaves_with_success() -> bool:
    """Whether `sys.exit` is ending the program with the status 0."""
    error = sys.exception()
    while error is not None and not isinstance(error, SystemExit):
        error = error.__context__
    return error is not None and error.code in (None, 0)


def _has_protocol(path: _PATH) -> bool:
    return "://" in str(path)


def raw(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer behind Lightning's wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)


def _begin_epoch_as_uninterrupted(trainer: pl.Trainer) -> None:
    """Draw the same numbers for the next epoch's iterator as an uninterrupted run, if the last epoch was complete.

    Lightning has made that iterator before the generators were set, and making one draws numbers.
    """
    fit_loop = trainer.fit_loop
    if not fit_loop.epoch_loop.batch_progress.is_last_batch:
        return
    if fit_loop.epoch_loop.restarted_on_train_batch_end and fit_loop._data_fetcher is not None:
        iter(fit_loop._data_fetcher)
    else:
        fit_loop._resuming_from_checkpoint = False  # Lightning makes it again, after the hooks of the epoch's start
