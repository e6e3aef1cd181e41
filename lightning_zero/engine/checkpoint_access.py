"""The engine as checkpoints see it: records, masters and states to write and to load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.access.records import ParameterRecord, records_of
from lightning_zero.engine.engine_state import EngineState
from lightning_zero.engine.optim.step_device import StepDevice

__all__ = ["CheckpointAccess"]


def _gather_nothing() -> None:
    """Leave the buffers of a whole module as they are."""


class CheckpointAccess:
    """Masters and optimizer states of one engine, read and written.

    To load: 1. ``prepare_load``; 2. write into ``master()`` of the ``records``; 3. ``complete_masters`` where each rank
    has written its ``save_range`` alone; 4. ``publish``. Optimizer states go to their ``state_place``.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        # Gives this rank the module buffers of the other parts of a model that is cut. Collective: all ranks.
        self.gather_module_buffers: Callable[[], None] = _gather_nothing
        self.optimizers_follow = True  # behind a load; a module that is only evaluated needs no masters
        self.are_rounded = False  # the values of the last load, because it found no masters to keep them in

    @property
    def world_communicator(self) -> Communicator:
        """The communicator over all ranks of the model, which write a checkpoint together, other parts included."""
        return self._state.world_communicator

    @property
    def is_whole(self) -> bool:
        """Whether the model is not cut into parts of several engines."""
        return self._state.parts is None

    # -- Saving ----------------------------------------------------------------------------------------------------

    def records(self) -> list[ParameterRecord]:
        """Return one record per parameter, in the order of ``named_parameters``. No collective."""
        state = self._state
        module = state.require_module()
        state.attached.close()
        state.sharded.membership.require()
        trained = {
            id(param)
            for sharded in state.attached
            for group in sharded.optimizer.param_groups
            for param in group["params"]
        }
        for buffer in state.buffers:
            buffer.refresh_master()
        return records_of(module, state.param_index, trained, parts=state.parts, moments=state.options.moment_format)

    @property
    def progress(self) -> dict[str, str]:
        """Return each optimizer's number of steps, as text: equal on all ranks wherever they may save together.

        Steps that were interrupted have an entry, too.
        """
        attached = self._state.attached
        steps = {f"steps of optimizer {index}": one.num_steps for index, one in enumerate(attached)}
        halfway = {f"optimizer {index}": "inside a step" for index, one in enumerate(attached) if one.is_halfway}
        if any(buffer.values.are_torn for buffer in self._state.buffers):  # also when the optimizers are let go of
            halfway["parameters"] = "inside a step"
        return {**{name: str(number) for name, number in steps.items()}, **halfway}

    def whole_groups(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Put the parameters of other parts back into an optimizer's groups for a while: checkpoints name them all."""
        remote_params = self._state.param_index.remote_params
        return nullcontext() if remote_params is None else remote_params.whole_groups(optimizer)

    # -- Loading ---------------------------------------------------------------------------------------------------

    def prepare_load(self) -> None:
        """Let ``master()`` of frozen parameters hold any values of their own dtype until ``publish``. No collective."""
        self._state.require_module()
        self._state.attached.close()
        self._state.give_up_failed_steps()
        for buffer in self._state.buffers:
            buffer.refresh_master()
            buffer.values.forget_rounding()  # of a step that has failed
            buffer.values.widen(is_stepped_later=self.optimizers_follow)

    def complete_masters(self) -> None:
        """Give every rank the masters that the others wrote in their ``save_range``. Collective: all ranks.

        Above stage 0 a rank has no more than its range, and nothing is sent.
        """
        self._state.require_module()
        for buffer in self._state.buffers:
            pending = buffer.gather_stepped()
            if pending is not None:
                pending.wait()
        if self._state.parts is not None:
            self._state.parts.start_equal(self._state.buffers)

    def publish(self, loaded: Iterable[ParameterRecord] = ()) -> None:
        """Make the masters the parameters' values. Collective: all ranks. Call after writing into ``master()``.

        Args:
            loaded: Records whose values are those of a file: nothing of a step that has failed is left in them.
        """
        self._state.require_module()
        whole = {id(record.parameter) for record in loaded}
        for buffer in self._state.buffers:
            pending = buffer.publish()
            if pending is not None:
                pending.wait()
            buffer.published()
            buffer.values.are_torn &= not all(id(param) in whole for param in buffer.params)
        widened = [buffer for buffer in self._state.buffers if buffer.is_widened]
        if widened:
            needed = [buffer.values.needs_master() for buffer in widened]
            flags = self._state.communicator.agree_on(needed, "agreement on masters of frozen parameters")
            for buffer, flag in zip(widened, flags, strict=True):
                buffer.values.narrow(needs_master=bool(flag))

    def state_place(self, optimizer: Optimizer, param: nn.Parameter, key: str) -> torch.Tensor | None:
        """Return where a state of a parameter is to be loaded to: 1-D over ``own_range``. No collective.

        None where the caller makes a tensor.
        """
        self._state.require_module()
        return self._state.attached.of(optimizer).states.place_of(param, key)

    # -- The processors of steps -----------------------------------------------------------------------------------

    @property
    def step_devices(self) -> dict[str, StepDevice]:
        """On which processor each offloaded unit is stepped, by name."""
        return self._state.sharded.step_devices.chosen

    def use_step_devices(self, chosen: Mapping[str, StepDevice]) -> None:
        """Step offloaded units where they were stepped before, as ``step_devices`` said; fixed ones stay.

        The two processors round differently in the last bit. Every rank chooses the same.
        """
        step_devices, offload = self._state.sharded.step_devices, self._state.options.offload
        if offload is None or offload.step_device is None:
            step_devices.use(chosen)
