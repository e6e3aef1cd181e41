"""A torch optimizer on segments whose steps are made in the backward, each when a buffer is reduced (ADR 0027)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.update import Update
from lightning_zero.engine.optim.flat_step import BufferSlot
from lightning_zero.engine.optim.optimizer import ShardedOptimizer
from lightning_zero.engine.optim.steps_made_early import StepsMadeEarly

__all__ = ["OptimizerInBackward"]


class OptimizerInBackward(ShardedOptimizer):
    """Steps buffers in the backward; ``step`` steps the others and shows all of the result."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._early = StepsMadeEarly()
        super().__init__(*args, **kwargs)
        # The program's hooks see values as between steps: no window shows those of the buffers that are stepped already
        self._put_first(self._hooks[1])

    # -- In the backward -------------------------------------------------------------------------------------------

    def holds_all_of(self, buffer: FlatBuffer) -> bool:
        """Say whether the optimizer steps every trained parameter of a buffer."""
        return all(id(param) in self._attached for param in buffer.params if param.requires_grad)

    def step_early(self, buffer: FlatBuffer) -> None:
        """Step a buffer whose gradients are complete, in the backward; ``step`` shows the result later."""
        assert self._flat_step is not None
        self.states.hide()
        self._early.begin(self.optimizer.param_groups)
        with torch.inference_mode(False), torch.no_grad():
            buffer.gradients.has_grad.update(index for index, param in enumerate(buffer.params) if param.requires_grad)
            buffer.forget_original()
            buffer.refresh_master()
            self._plan(buffer)
            self._spend_gradients(buffer)
        self._early.add(buffer, None)
        if self._deferred.wants(buffer) and buffer.home.is_apart:
            self._early.add(buffer, self._deferred.update(buffer, gradient=None, rounds=False))
        else:
            Update(buffer.name, self._flat_step.take_calls(buffer), thread=None).finish()
            buffer.home.give_back_lent()

    def _plan(self, buffer: FlatBuffer) -> None:
        """Prepare to step all of a buffer.

        Raises:
            RuntimeError: PyTorch would have to step a part of it.
            ValueError: A gradient was sparse.
        """
        flat = self._flat_step
        assert flat is not None
        flat.forget_calls()
        found = []
        for group in self.optimizer.param_groups:
            places = [self._attached[id(param)] for param in group["params"]]
            indices = [index for owner, index in places if owner is buffer and buffer.params[index].requires_grad]
            found.append((group, indices))
            self.checks.refuse_sparse_gradients([(buffer, index) for index in indices])
            fits = all(flat.fits(group, buffer, index) for index in indices)
            if indices and not (fits and flat.covers(group)):
                raise RuntimeError(
                    f"Unit `{buffer.name}` cannot be stepped in the backward: `{type(self.optimizer).__name__}` has"
                    " options or states that PyTorch has to step. Use `step='auto'`."
                )
        for group, indices in found:  # behind all checks: nothing is planned for a buffer that is refused
            flat.plan(group, buffer, indices, rounds=False)

    @staticmethod
    def _spend_gradients(buffer: FlatBuffer) -> None:
        """Give up the reduced gradients of a buffer to its step."""
        buffer.gradients.spend()
        if buffer.values.master is None and not buffer.sharding.params:
            for index in range(len(buffer.params)):  # saved tensors of this backward must notice the write
                buffer.mark_stepped(index)

    # -- Behind it -------------------------------------------------------------------------------------------------

    @property
    def is_halfway(self) -> bool:
        """Whether some values are those before a step and others those behind it, also after an error in a step."""
        return super().is_halfway or not self._early.is_empty

    def detach(self) -> None:
        """Give the optimizer back as it was, behind the steps that are running."""
        self.close()
        self._early.finish()
        super().detach()

    def forget_gradients(self, set_to_none: bool = True) -> None:
        """Drop the gradients.

        Raises:
            RuntimeError: Steps were made with them that ``step`` has not shown.
            ValueError: They are to be set to zero.
        """
        if not self._early.is_empty:
            raise RuntimeError(
                "`zero_grad` was called between backward and `optimizer.step()`, but `step='backward'` has made"
                " steps with these gradients. Call `step` first, or use `step='auto'`."
            )
        self.close()
        if not set_to_none and not self._keeps_gradients():
            raise ValueError(
                "`zero_grad(set_to_none=False)` keeps gradients of zero, with which a unit without a gradient would be"
                " stepped; `step='backward'` has none to keep. Use `zero_grad()`, or `step='auto'`."
            )
        super().forget_gradients(set_to_none)

    def step_runs(self, group: dict[str, Any]) -> dict[str, Any]:
        """Step the flat ranges of a group that are left; return a group of the parameters that PyTorch has to step."""
        self._early.refuse_moved_options(self.optimizer.param_groups)
        return super().step_runs(group)

    def _left_to_step(self, group: dict[str, Any]) -> dict[str, Any]:
        params = [param for param in group["params"] if not self._attached[id(param)][0].gradients.is_spent]
        return {**group, "params": params}

    def _check_closure(self) -> None:
        raise ValueError(
            "`step(closure)` may call backward several times, which `step='backward'` excludes. A Trainer calls it for"
            " optimizers with a step of their own, and for those with hooks of `register_step_pre_hook`."
        )

    def _prepare_window(self) -> None:
        super()._prepare_window()
        for buffer in self.buffers:
            if buffer.gradients.is_ahead:
                buffer.window.take_gradients()  # refuses assigned gradients

    def _buffers_to_show(self) -> list[FlatBuffer]:
        return [buffer for buffer in self.buffers if not buffer.gradients.is_ahead]

    def _places_to_show(self) -> Iterable[BufferSlot]:
        return [(buffer, index) for buffer, index in self.places if not buffer.gradients.is_ahead]

    def _is_due_later(self, buffer: FlatBuffer) -> bool:
        return super()._is_due_later(buffer) or self._early.is_running(buffer)

    def _defer(self) -> None:
        self._deferred.begun.update(self._early.take())
        super()._defer()
