"""State that the public engine and its internal objects share: the sharded module, the optimizers, deferred steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.comm.agreement import require_same
from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.access.param_index import ParamIndex
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.parameter import Owner
from lightning_zero.engine.buffers.update import StepThread
from lightning_zero.engine.optim.attached import Attached
from lightning_zero.engine.optim.optimizer import ShardedOptimizer
from lightning_zero.engine.runtime.hooks import is_hooked
from lightning_zero.engine.runtime.step_timing import StepTiming
from lightning_zero.engine.sharded_module import EngineOptions, ShardedModule
from lightning_zero.engine.units.deferred_init import deferred_params
from lightning_zero.engine.units.facts import optimizer_facts
from lightning_zero.engine.units.pipeline_peers import PipelinePeers
from lightning_zero.engine.units.shardable import check_shardable
from lightning_zero.engine.units.unit import Unit, UnitState
from lightning_zero.grid import Grid
from lightning_zero.sharding import NodeRanks

__all__ = ["EngineState"]

_NO_MODULE = "The engine holds no module yet. Call `engine.shard(module)` first."
_CLOSED = (
    "This engine is closed, by `close()` or `unshard()`. Make a new `ZeroEngine`, shard the module with it and attach"
    " the optimizers again. To keep values that are sharded call `unshard()` instead of `close()`."
)


class EngineState:
    """A module, sharded, with its optimizers.

    Args:
        options: The engine's.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        # - Set by `shard`
        self.module: nn.Module | None = None  # None again when the engine is closed
        self.engine: object | None = None  # hooks of the module keep it alive: it is found by its parameters
        self.on_close: Callable[[], None] | None = None  # called when the engine is closed: who keeps it lets it go
        self.param_index = ParamIndex()
        self._made: ShardedModule | None = None
        # - Set by `attach`
        self.attached = Attached(self._mark_stale)
        self._thread = StepThread(lambda: self.communicator.device)

    # -- Set-up and end --------------------------------------------------------------------------------------------

    def refuse_module(self, module: nn.Module) -> None:
        """Refuse to shard a module where one is held, or one that cannot be sharded.

        Raises:
            RuntimeError: The engine holds another module, or another engine this one.
            ValueError: A parameter cannot be sharded.
        """
        self.require_open()
        if self.module is not None:
            raise RuntimeError("This engine holds another module. Make a new `ZeroEngine` for each module.")
        if is_hooked(module):
            raise RuntimeError(
                "The module, or a part of it, is sharded by another engine, which would take its gradients. Call"
                " `unshard()` or `close()` of that engine before, on every rank, and keep it until then."
            )
        check_shardable(module)

    def shard(
        self,
        module: nn.Module,
        holders: Mapping[str, tuple[int, ...]] | None,
        *,
        grid: Grid | None,
        node: NodeRanks | None,
        owner: Callable[[Unit], Owner],
    ) -> None:
        """Partition a module in place. Collective: all ranks."""
        self._made = ShardedModule(
            module,
            self.options,
            holders,
            grid=grid,
            node=node,
            awaited=deferred_params(module),
            param_index=self.param_index,
            close_windows=self.attached.close,
            owner=owner,
        )
        self.module = module
        for buffer in self.buffers:
            buffer.on_rounded_write = self._made.rounded_writes
        self._made.module_buffers.broadcast()

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers step this rank's segments, in the place of those before. Collective: all ranks."""
        if self.communicator.world_size > 1:
            require_same(
                self.communicator,
                optimizer_facts(optimizers, self._name_of),
                "optimizers",
                "Make the same optimizers, with the same parameters in the same order, on every rank.",
            )
        self.let_go()
        timing = self.timing
        timing.refuse_many(len(optimizers))
        for optimizer in optimizers:
            sharded = self._sharded_optimizer(optimizer)
            self.attached.add(sharded)
            if self.options.offload is not None and self.options.offload.step_device == "cuda":
                sharded.checks.require_runs("Offload(step_device='cuda')")
            timing.attach(sharded)
        self.attached.replace_former()
        self.sharded.rank_facts.watch(optimizers)

    def _sharded_optimizer(self, optimizer: Optimizer) -> ShardedOptimizer:
        return self.options.timing.optimizer_class(
            optimizer,
            self.param_index.by_id,
            communicator=self.communicator,
            before_open=self._before_open,
            parts=self.parts,
            keeps_gradients=self._keeps_gradients,
            thread=self._thread,
            defers=self.timing.defers,
            after_defer=self._mark_stale,
            moments=self.options.moment_format,
            before_step=self._begin_step,
            after_step=self._end_step,
        )

    def _name_of(self, param: torch.Tensor) -> str:
        names = self.param_index.names.get(id(param))
        return names[0] if names else f"a tensor of shape {tuple(param.shape)} that the module does not have"

    def let_go(self) -> None:
        """Let go of the optimizers."""
        self.attached.close()
        if self.module is not None:
            self.sharded.offloaded_states.reload()
        self.attached.detach()
        if self._made is not None:
            self._made.timing.let_go()
            self._made.rank_facts.watch(())

    def drop_gradients(self) -> None:
        """Drop the gradients of all parameters."""
        for buffer in self.buffers:
            buffer.window.drop(range(len(buffer.params)))

    def rest(self) -> None:
        """Make the steps that need no other rank, and let parameters show their own dtype. No collective."""
        self.attached.close()
        self.flush_here()
        self.sharded.whole.rest(together=False)

    def close(self) -> None:
        """End the steps, take the hooks out, let other engines use the process groups. No collective."""
        try:
            self.attached.close()
            self.flush_here()
        finally:
            self._thread.close()
            self.sharded.close()
            self.module = None
            self.engine = None
            if self.on_close is not None:
                self.on_close()

    # -- The parts ---------------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        """Refuse an engine that is closed."""
        if self.module is None and self._made is not None:
            raise RuntimeError(_CLOSED)

    def require_module(self) -> nn.Module:
        """Return the module; refuse an engine that has none."""
        self.require_open()
        if self.module is None:
            raise RuntimeError(_NO_MODULE)
        return self.module

    @property
    def sharded(self) -> ShardedModule:
        """The sharded module of an engine that is open."""
        self.require_module()
        return self._last_made

    @property
    def _last_made(self) -> ShardedModule:
        """The sharded module, also of an engine that is closed."""
        if self._made is None:
            raise RuntimeError(_NO_MODULE)
        return self._made

    @property
    def timing(self) -> StepTiming:
        """When units are stepped."""
        return self._last_made.timing

    @property
    def buffers(self) -> list[FlatBuffer]:
        """The flat buffers of all units."""
        return self.param_index.buffers

    @property
    def units(self) -> list[Unit]:
        """The units, the root's first."""
        return self.param_index.units

    @property
    def parts(self) -> PipelinePeers | None:
        """The other parts of a model that is cut; None if it is whole."""
        return None if self._made is None else self._made.parts

    @property
    def communicator(self) -> Communicator:
        """The communicator over the ranks that share the parameters.

        Raises:
            RuntimeError: There is no module yet.
        """
        return self._last_made.communicator

    @property
    def world_communicator(self) -> Communicator:
        """The communicator over all ranks of the model, which write a checkpoint together, other parts included.

        Raises:
            RuntimeError: There is no module yet.
        """
        return self._last_made.world_communicator

    # -- Steps -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Make the steps that were deferred. Collective at stages 1 and 2: all ranks."""
        self.require_module()
        stale = [unit for unit in self.units if unit.state is UnitState.STALE]
        with self.sharded.hooks.scopes.boundary() if stale else nullcontext():
            for unit in stale:
                if unit.needs_gather:  # it may have been gathered at the end of a pass that an error has interrupted
                    unit.unshard()
            for unit in stale:
                unit.wait()
        for buffer in self.buffers:
            buffer.values.flush()

    def flush_here(self) -> None:
        """Make the steps that were deferred, as far as no other rank is needed: training ends."""
        self.give_up_failed_steps()
        if not any(unit.buffers and unit.buffers[0].own_range.is_shard for unit in self.units):
            self.flush()
        for buffer in self.buffers:
            buffer.values.flush()

    def give_up_failed_steps(self) -> None:
        """Forget deferred steps of which one has failed, and has said so: training ends, or other values are loaded."""
        if any(buffer.values.has_failed for buffer in self.buffers):
            for buffer in self.buffers:
                buffer.values.give_up()

    def recover(self) -> None:
        """End a backward before its gradients are used; abandon an interrupted one.

        Collective in ``backward_scope`` only: all ranks, some of them at its end.
        """
        if self.module is not None:
            self.sharded.hooks.scopes.recover()
            self.sharded.hooks.scopes.end_backward()

    def stay_in_thread(self, during: Callable[[], AbstractContextManager[None]]) -> None:
        """Make the steps of offloaded units at once, in the thread that asks for them, each in a context."""
        self._thread.stay_here(during)

    def _mark_stale(self, buffer: FlatBuffer) -> None:
        self.param_index.unit_of(buffer).mark_stale()

    def _keeps_gradients(self) -> bool:
        self.recover()
        return self.attached.keeps_gradients()

    def _before_open(self, opening: ShardedOptimizer) -> None:
        self.recover()
        self.sharded.membership.require()
        self.sharded.offloaded_states.reload()
        self.sharded.whole.end_rest()
        self.sharded.whole.hide_originals()
        self.attached.close_others(opening)

    def _begin_step(self) -> None:
        self.recover()
        self._warn_of_torn_values()
        self.sharded.rank_facts.note_step()
        self.sharded.hooks.scopes.begin_step()

    def _warn_of_torn_values(self) -> None:
        """Say that training goes on from a step that has failed: the program was told, and has loaded nothing since."""
        torn = [buffer for buffer in self.buffers if buffer.values.are_torn]
        if torn:
            warnings.warn(
                f"Training goes on from parameters of which some (unit `{torn[0].name}`) are those from before a"
                " deferred step that has failed, and others those from after it. Load the last checkpoint before:"
                " `trainer.fit(module, ckpt_path=...)`.",
                stacklevel=2,
            )
        for buffer in torn:
            buffer.values.are_torn = False

    def _end_step(self, buffers: Sequence[FlatBuffer]) -> None:
        units = {unit.index: unit for unit in map(self.param_index.unit_of, buffers)}
        self.sharded.hooks.scopes.end_step(list(units.values()))
