"""The engine between fits: optimizers come and go, the module computes as if it were not sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.engine.engine_state import EngineState
from lightning_zero.engine.unit_owner import refuse_held
from lightning_zero.engine.units.shardable import refuse_graphs
from lightning_zero.engine.units.unit import Unit

__all__ = ["FitControl", "Parts"]


class Parts(Protocol):
    """Steps of a model whose parts are on several ranks, each with an engine of its own."""

    def end(self) -> None:
        """Let the module run as a whole: `unshard` follows. Collective: all ranks."""
        ...


class FitControl:
    """Beginnings and ends of fits and evaluations over one engine."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self.parts: Parts | None = None  # whose steps run over this engine; None: the module is whole

    @property
    def units(self) -> list[Unit]:
        """The units, the root's first."""
        return self._state.units

    @property
    def optimizers(self) -> list[Optimizer]:
        """The attached optimizers."""
        return [sharded.optimizer for sharded in self._state.attached]

    @property
    def ranks_per_batch(self) -> int:
        """Neighbouring ranks that have the same batches: those of a tensor group."""
        return self._state.sharded.ranks_per_batch

    def reset_stats(self) -> None:
        """Start counting traffic and peaks anew."""
        self._state.sharded.statistics.reset()

    # -- Optimizers ------------------------------------------------------------------------------------------------

    def drop_remote(self, optimizer: Optimizer) -> None:
        """Take the parameters that other parts of the model hold out of an optimizer's groups; ``attach`` it then."""
        if self._state.param_index.remote_params is not None:
            self._state.param_index.remote_params.drop(optimizer)

    def detach(self) -> None:
        """Let go of the optimizers and of all gradients."""
        self._state.require_module()
        self._state.let_go()
        self._state.drop_gradients()

    # -- Values ----------------------------------------------------------------------------------------------------

    def when_closed(self, act: Callable[[], None]) -> None:
        """Call ``act``, and no earlier one, when the engine is closed."""
        self._state.on_close = act

    def pause(self) -> None:
        """Let the module compute as if it were not sharded, until ``resume``. No collective.

        Parameters show themselves in their own dtype, with the values of the masters; at stages 1 and 2 on several
        ranks only after ``show_masters``. Gradients are dropped. Where parameters are released between uses (stage 3)
        the hooks stay: without them nothing could compute.
        """
        self._state.require_module()
        self._state.attached.close()
        self._state.flush_here()
        self._state.drop_gradients()
        self._state.sharded.whole.rest(together=False)
        if not any(unit.is_sharded_between_uses for unit in self._state.units):
            self._state.sharded.hooks.remove()

    @property
    def unshard_rounds(self) -> bool:
        """Whether ``unshard`` drops digits of masters, because parameters are in 16 bits in the module's own dtype."""
        masters = [(one.values.master, one.kind.original) for one in self._state.buffers]
        return any(master is not None and master.dtype.itemsize > own.itemsize for master, own in masters)

    @property
    def are_torn(self) -> bool:
        """Whether some parameters are those from before a deferred step that has failed, also behind ``unshard``."""
        return any(buffer.values.are_torn for buffer in self._state.buffers)

    def mark_torn(self) -> None:
        """Note that the parameters are those of an engine where they were ``are_torn``."""
        self._state.require_module()
        for buffer in self._state.buffers:
            buffer.values.are_torn = buffer.kind.trained

    def converted(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the tensors of another dtype that ``.data`` of whole parameters was pointed to. No collective."""
        self._state.require_module()
        return {param: values for buffer in self._state.buffers for param, values in buffer.converted().items()}

    def any_is_converted(self) -> bool:
        """Say whether the program has given parameters another dtype, on any rank. Collective: all ranks."""
        return self._state.world_communicator.any_is(bool(self.converted()), "dtypes of parameters between two runs")

    def refuse_held(self) -> None:
        """Refuse parameters whose values another engine holds and does not show. No collective.

        Raises:
            RuntimeError: It shows them rounded, older or not at all.
        """
        refuse_held(self._state.require_module(), self._state)

    def converted_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes of ``converted`` parameters of all parts by name. Collective: all ranks."""
        names = self._state.param_index.names
        dtypes = {name: values.dtype for param, values in self.converted().items() for name in names[id(param)]}
        everyone = self._state.world_communicator.gather_objects(dtypes, "dtypes of parameters between two runs")
        return {name: dtype for one in everyone for name, dtype in one.items()}

    def make_equal(self) -> None:
        """Give all ranks the whole parameters that the first one shows, before ``resume``. Collective: all ranks.

        Tensors that ``.data`` was pointed to, also on another device, are copied back before. At stage 3 every rank has
        its piece of one whole; values that an interrupted run has left stale stay as they are.

        Raises:
            ValueError: The program has added a module whose buffers cannot be kept; see ``ModuleBuffers.admit``. One
                replays a CUDA graph.
        """
        refuse_graphs(self._state.require_module())
        self._state.attached.close()
        self._state.sharded.module_buffers.admit()
        buffers = [buffer for buffer in self._state.buffers if not buffer.sharding.params]
        for buffer in buffers:
            buffer.collect_writes()
        is_stale = any(buffer.is_stale for buffer in buffers)
        if self._state.communicator.any_is(is_stale, "agreement on parameters between two runs"):
            return
        for buffer in buffers:
            buffer.take_from_first_rank()

    def resume(self) -> None:
        """Go on after ``pause`` or ``show_masters``, with the values written since; else do nothing. No collective.

        Parameters may have been those of another engine meanwhile, which has trained a part of the module.
        """
        module = self._state.require_module()
        self._state.sharded.own_params()
        self._state.sharded.whole.end_rest()
        self._state.sharded.hooks.install(module)

    def keep_params_on_device(self) -> None:
        """Keep the shards of parameters on the device from now on, before optimizers are attached (stage 3)."""
        self._state.require_module()
        for buffer in self._state.buffers:
            buffer.values.bring_shard()
