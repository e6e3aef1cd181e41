"""Which optimizers and groups can be stepped on segments; the others are refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_zero.engine.buffers.parameter import owner_of
from lightning_zero.engine.optim.elementwise import ElementwiseTrial, Stepped
from lightning_zero.engine.optim.flat_step import BufferSlot, FlatStep
from lightning_zero.engine.optim.moments import MomentFormat
from lightning_zero.engine.optim.whole_gradients import WholeGradients

__all__ = ["OptimizerChecks"]

_ALIKE_ON_DENSE = (torch.optim.SGD, torch.optim.Adagrad)  # they step a dense gradient as they step a sparse one


class OptimizerChecks:
    """Refuses one optimizer, or groups of it.

    Args:
        optimizer: The user's object, of its own class.
        places: Where every parameter of the module lies, by ``id``.
        attached: Those of the optimizer.
        flat_step: Steps them over flat ranges; None if PyTorch does.
        gradients: Asks all ranks.
        moments: The format of the moments of AdamW and Adam.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        places: Mapping[int, BufferSlot],
        *,
        attached: Mapping[int, BufferSlot],
        flat_step: FlatStep | None,
        gradients: WholeGradients,
        moments: MomentFormat,
    ) -> None:
        self._optimizer = optimizer
        self._class = type(optimizer)
        self._places = places
        self._attached = attached
        self._flat_step = flat_step
        self._gradients = gradients
        self._moments = moments
        is_sharded = any(buffer.own_range.is_shard for buffer, _ in places.values())
        has_parts = any(buffer.has_parts for buffer, _ in places.values())
        left_out = ["`tensor_parallel` or `expert_parallel`"] * has_parts + ["`pipeline`"] * gradients.is_of_stage
        self._remedy = "stage 0" + (f" without {' and '.join(left_out)}" if left_out else "")
        is_tried = is_sharded or gradients.is_of_stage
        module_params = [buffer.params[index] for buffer, index in places.values()]
        self._trial = (
            ElementwiseTrial(optimizer, self._stepped, cuts_parameters=is_sharded, module_params=module_params)
            if is_tried
            else None
        )

    def refuse_unless_elementwise(self) -> None:
        """Try an optimizer of an unknown class, if its groups are of new kinds. Collective then: all ranks.

        On pipeline stages, one of which may have no parameters of it and see no new kinds, always collective.
        """
        if self._trial is None or not self._trial.may_be_due:
            return
        is_due = self._trial.is_due
        if not (self._gradients.any_is(is_due, "agreement on a trial") if self._gradients.is_of_stage else is_due):
            return
        obstacle = self._trial.find_obstacle() if is_due else None
        if self._gradients.any_is(obstacle is not None, "agreement on the optimizer"):
            reason = "is refused by another rank" if obstacle is None else obstacle.reason
            raise ValueError(
                f"`{self._class.__name__}` {reason}. Use {self._remedy}, or an element-wise optimizer such as"
                " AdamW, SGD, Adagrad, RMSprop or Lion."
            ) from (obstacle.error if obstacle is not None else None)

    def begin_step(self) -> None:
        """Try the optimizer if its groups are of new kinds. Collective then: all ranks."""
        self.refuse_unless_elementwise()
        if self._trial is not None:
            self._trial.begin_step()

    def end_step(self) -> None:
        """Take note of the options that the step has changed."""
        if self._trial is not None:
            self._trial.end_step()

    def _stepped(self, param: torch.Tensor) -> Stepped:
        place = self._places.get(id(param))
        if place is None:
            return Stepped(tuple(param.shape), param.dtype, param.device)
        buffer, index = place
        device = buffer.home.device if buffer.home.is_apart else buffer.whole.flat.device
        return Stepped(buffer.layout.slots[index].shape, buffer.kind.shown, device)

    # -- Parameters ------------------------------------------------------------------------------------------------

    def place_of(self, param: torch.Tensor, known: set[int]) -> BufferSlot:
        """Return where a parameter of a group lies.

        Raises:
            ValueError: It is not in the module, or one of those ``known`` in the group.
        """
        place = self._places.get(id(param))
        if place is None:
            raise ValueError(
                f"`{self._class.__name__}` has a parameter of shape {tuple(param.shape)} that is not in"
                " the sharded module. Make the optimizer from the module's parameters after `engine.shard(module)`"
                " (in Lightning: in `configure_optimizers`, from `self.parameters()`)."
            )
        if id(param) in known:
            raise ValueError(
                f"`{self._class.__name__}` has `{place[0].layout.slots[place[1]].name}` twice in a group,"
                " so each step would step it twice. Give it each parameter once."
            )
        return place

    def refuse_params_past_add(self) -> None:
        """Refuse parameters that were put into groups without ``add_param_group``."""
        params = {id(param): param for group in self._optimizer.param_groups for param in group["params"]}
        if params.keys() <= self._attached.keys():
            return
        param = next(param for key, param in params.items() if key not in self._attached)
        owner = owner_of(param)
        name = "a tensor that is not in the sharded module" if owner is None else f"`{owner.param_name(param)}`"
        raise RuntimeError(
            f"`param_groups` of `{self._class.__name__}` got {name} of shape {tuple(param.shape)} behind the"
            " engine's back, so its gradient was left out of norms and clipping, and it would not be trained. Use"
            " `optimizer.add_param_group({'params': [...]})`, before the backward, of the optimizer that is attached."
        )

    def refuse_sparse_gradients(self, places: Iterable[BufferSlot]) -> None:
        """Refuse a step with gradients that autograd gave as sparse ones, unless dense ones are stepped alike.

        On the rank that had such a gradient: the others learn of its error.
        """
        if self._class in _ALIKE_ON_DENSE:
            return
        for buffer, index in places:
            if index in buffer.gradients.sums.sparse:
                raise ValueError(
                    f"`{buffer.layout.slots[index].name}` has a sparse gradient (`nn.Embedding(sparse=True)`), and"
                    f" `{self._class.__name__}` would get it as a dense tensor, with zeros for the rows that were not"
                    " used. Use `sparse=False`, or `torch.optim.SGD` or `Adagrad` for this parameter."
                )

    def refuse_scaled_gradients(self, places: Iterable[BufferSlot]) -> None:
        """Refuse a step with gradients that are multiplied by a loss scale, or have overflowed."""
        for buffer, index in places:
            gradients = buffer.gradients
            scale = gradients.scales.of(index, assigned=1.0) if index in gradients.has_grad else None
            if scale not in (None, 1.0) or (scale is not None and gradients.scales.has_overflowed(index)):
                raise RuntimeError(
                    f"`{self._class.__name__}` would step the gradient of `{buffer.layout.slots[index].name}`, which is"
                    f" multiplied by the loss scale {scale:g} or has overflowed. Step the optimizer of"
                    " `self.optimizers()`, without `use_pl_optimizer=False`: it divides gradients by the scale, and"
                    " skips steps that overflow."
                )

    # -- Groups ----------------------------------------------------------------------------------------------------

    def refuse_group(self, group: dict[str, Any]) -> None:
        """Refuse a group that PyTorch does not step, or whose states cannot be kept as asked."""
        self._refuse_idle_steps(group)
        self._refuse_what_pytorch_steps(group)

    def _refuse_idle_steps(self, group: dict[str, Any]) -> None:
        if not (issubclass(self._class, torch.optim.SGD) and group.get("fused")):
            return
        for param in group["params"]:
            stepped = self._attached[id(param)][0].values.stepped
            if stepped.is_cpu and stepped.itemsize < 4:
                raise ValueError(
                    f"`fused=True`: PyTorch's fused `{self._class.__name__}` does not step {stepped.dtype}"
                    " values on a CPU. Use `fused=False`, or fp32 masters (`masters=True`)."
                )

    def _refuse_what_pytorch_steps(self, group: dict[str, Any]) -> None:
        if self._flat_step is not None:
            self._flat_step.refuse_moments(group)
            self._flat_step.refuse_unless_flat(group)
        elif homes := [home for param in group["params"] if (home := self._attached[id(param)][0].home).flat_for]:
            raise ValueError(
                f"`{self._class.__name__}` cannot be stepped where {homes[0].flat_for} has its states:"
                " it is for `torch.optim.AdamW`, `Adam` and `SGD` themselves. Use one of them, or"
                " `Offload(optimizer='cpu')`."
            )
        elif not self._moments.is_pytorchs:
            raise ValueError(
                f"`moments={self._moments.name!r}` is for `torch.optim.AdamW` and `Adam` themselves, got"
                f" `{self._class.__name__}`. Use one of them, or `moments='fp32'`."
            )

    def require_runs(self, option: str) -> None:
        """Refuse an optimizer of which PyTorch would have to step a group.

        Raises:
            ValueError: It is one; names ``option``.
        """
        flat = self._flat_step
        if flat is None or not all(flat.can_step(group) for group in self._optimizer.param_groups):
            raise ValueError(
                f"`{option}` is for `torch.optim.AdamW`, `Adam` and `SGD` that step fp32 values, with numbers as"
                f" options and without `foreach`, `fused=False` and the like; got `{self._class.__name__}`."
                " Use one of them, or leave the option out."
            )
