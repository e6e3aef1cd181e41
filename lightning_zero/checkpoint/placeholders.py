"""Stand-ins for tensors of a module while its ``state_dict`` and ``load_state_dict`` run.

Note [Stand-ins]
    A module's own ``state_dict`` and ``load_state_dict`` run, with their hooks and overrides, but see a stand-in in
    place of every parameter: it has the shape and no values. ``state_dict`` hands it through; when ``load_state_dict``
    copies something into it, or assigns a tensor in its place (``assign=True``), it notes which. So renaming, dropping
    and adding of keys works as in any module at every stage. Code that computes with parameter values in these methods
    is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_zero.checkpoint.stored import METADATA_FUNCTIONS
from lightning_zero.engine.buffers.parameter import class_over, copy_attributes, has_class, user_class
from lightning_zero.errors import ReleasedParameterError

__all__ = ["StandIn", "replaced", "stand_ins"]


class StandIn(nn.Parameter):
    """A tensor's shape and dtype. See Note [Stand-ins]."""

    fqn: str
    sources: list[Any]  # values copied into it or assigned, one entry per name of a tied parameter

    def __new__(cls, name: str, shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor | None = None) -> StandIn:
        """Make the stand-in of a tensor, with the class and the attributes of ``like``."""
        values = torch.empty((), dtype=dtype, device="cpu").expand(tuple(shape))
        user = nn.Parameter if like is None else user_class(like)
        made: Any = cls if user in (nn.Parameter, torch.Tensor) else class_over(cls, user)
        stand_in: StandIn = torch.Tensor._make_subclass(made, values, False)
        if like is not None:
            copy_attributes(like, stand_in)
        stand_in.fqn, stand_in.sources = name, []
        return stand_in

    def __init__(self, name: str, shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor | None = None) -> None:
        pass

    def note_assigned(self, found: torch.Tensor | None) -> None:
        """Note a tensor that is in the place of this stand-in now.

        Raises:
            ValueError: There is none, or one of another shape.
        """
        if found is self:
            return
        shape = self.size()
        if found is None or found.shape != shape:
            there = "nothing" if found is None else f"a tensor of shape {tuple(found.shape)}"
            raise ValueError(
                f"`load_state_dict` of the module has put {there} in the place of `{self.fqn}`, whose shape is"
                f" {tuple(shape)}: which parameters there are is settled when the module is sharded. Change them in"
                " `configure_model` or before the strategy sets up, and keep their shapes there."
            )
        self.sources.append(found)

    def give_attributes(self, like: torch.Tensor) -> None:
        """Copy the attributes that code has set on this stand-in to the tensor it stands for."""
        mine = {key: value for key, value in vars(self).items() if key not in ("fqn", "sources")}
        if mine:
            vars(like).update(mine)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record copies, hand itself through, answer questions about metadata, refuse the rest."""
        if func is torch.Tensor.copy_ and has_class(args[0], StandIn):
            if args[1] is not args[0]:
                args[0].sources.append(args[1])
            return args[0]
        if func is torch.Tensor.detach:
            return args[0]
        if func in METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = next(arg.fqn for arg in args if has_class(arg, StandIn))
        raise ReleasedParameterError(
            f"`{getattr(func, '__name__', func)}` needs the values of parameter `{name}`, which `state_dict` and"
            " `load_state_dict` do not have: they are sharded over the ranks. Rename, drop or add entries there, and"
            " change values under `lightning_zero.gathered(param)`."
        )


@contextlib.contextmanager
def stand_ins(module: nn.Module, wanted: Mapping[int, StandIn]) -> Iterator[None]:
    """Put stand-ins in place of a module's parameters and buffers, by the ``id`` of the tensor each stands for.

    Raises:
        ValueError: The code inside has put a tensor of another shape, or none, in the place of one.
    """
    places = _tensors_of(module, wanted)
    try:
        with replaced(module, wanted):
            yield
            for tensors, key, tensor in places:
                wanted[id(tensor)].note_assigned(tensors.get(key))
    finally:
        for _, _, tensor in places:
            wanted[id(tensor)].give_attributes(tensor)


@contextlib.contextmanager
def replaced(module: nn.Module, wanted: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Put tensors in place of a module's parameters and buffers, by the ``id`` of the tensor each replaces."""
    places = _tensors_of(module, wanted)
    try:
        for tensors, key, tensor in places:
            tensors[key] = wanted[id(tensor)]
        yield
    finally:
        for tensors, key, tensor in places:
            tensors[key] = tensor


def _tensors_of(module: nn.Module, wanted: Mapping[int, Any]) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Return where the parameters and buffers in ``wanted``, by ``id``, are kept."""
    return [
        (tensors, key, tensor)
        for submodule in module.modules()
        for tensors in (submodule._parameters, submodule._buffers)
        for key, tensor in tensors.items()
        if tensor is not None and id(tensor) in wanted
    ]
