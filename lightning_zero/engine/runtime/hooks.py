"""The hooks of a module: which hook is put on which module and parameter, and the objects that they drive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_zero.engine.runtime.accumulation_hooks import on_accumulated
from lightning_zero.engine.runtime.backward import Backward
from lightning_zero.engine.runtime.backward_hooks import BackwardHooks
from lightning_zero.engine.runtime.call_stack import apart_from_program
from lightning_zero.engine.runtime.compute_dtypes import ComputeDtypes
from lightning_zero.engine.runtime.forward_hooks import ForwardHooks
from lightning_zero.engine.runtime.order import PassOrder
from lightning_zero.engine.runtime.passes import Passes
from lightning_zero.engine.runtime.reduction import Reducer
from lightning_zero.engine.runtime.saved_tensors import SavedTensors
from lightning_zero.engine.runtime.scopes import Scopes
from lightning_zero.engine.runtime.uses import UnitUses
from lightning_zero.engine.units.lowering import embed_in_fp32
from lightning_zero.engine.units.submodules import submodules_of
from lightning_zero.engine.units.unit import Unit

__all__ = ["Hooks", "is_hooked"]


class _ModuleHook:
    """A hook that a copy of the module does not take along."""

    def __init__(self, call: Callable[..., Any] | None) -> None:
        self._call = call

    @property
    def is_live(self) -> bool:
        """Whether an engine is called; a copy's is not."""
        return self._call is not None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            return None
        with apart_from_program():
            return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> _ModuleHook:
        return _ModuleHook(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ModuleHook, (None,)


class _SubmoduleHook(_ModuleHook):
    """One that compilers trace, as nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self._call is None:
            return None
        with apart_from_program():
            return self._call(*args)


def is_hooked(module: nn.Module) -> bool:
    """Say whether an engine drives a module or a part of it."""
    return any(
        isinstance(hook, _ModuleHook) and hook.is_live
        for child in module.modules()
        for hook in child._forward_pre_hooks.values()
    )


class Hooks:
    """Turns PyTorch's events into uses of the units of one module.

    Args:
        module: The root.
        units: All units; the first is the root's.
        order: Makes units whole, and starts their reductions, in one order on all ranks.
        reducer: Finishes the reductions.
        close_windows: Called when a forward or backward begins.
        broadcast_buffers: Called when a step begins (`scope`, or a forward of the root), with whether the next one
            needs it too. Collective.
        check_module: Called when a scope begins that is in no other.
        show_original: Shows a unit's parameters in their own dtype, below stage 3. Collective at stages 1 and 2.
        reduces_each_backward: Whether gradients are reduced in every backward (stages 2 and 3).
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        *,
        order: PassOrder,
        reducer: Reducer,
        close_windows: Callable[[], None],
        broadcast_buffers: Callable[[bool], None],
        check_module: Callable[[], None],
        show_original: Callable[[Unit], None],
        reduces_each_backward: bool,
    ) -> None:
        self._units = list(units)
        dtypes = ComputeDtypes(self._units)
        self.passes = passes = Passes(self._units, order, dtypes)
        self.backward = Backward(
            self._units,
            passes,
            order=order,
            reducer=reducer,
            dtypes=dtypes,
            close_windows=close_windows,
            reduces_each=reduces_each_backward,
        )
        self.uses = UnitUses(
            self._units, order, passes=passes, backward=self.backward, dtypes=dtypes, show_original=show_original
        )
        self.saved = SavedTensors(self._units, passes, self.uses)
        self.scopes = Scopes(
            self._units,
            passes,
            order=order,
            backward=self.backward,
            uses=self.uses,
            saved=self.saved,
            dtypes=dtypes,
            close_windows=close_windows,
            broadcast_buffers=broadcast_buffers,
            check_module=check_module,
        )
        self._backward_hooks = BackwardHooks(self.uses, self.backward)
        self.forwards = ForwardHooks(
            self._units,
            self.scopes,
            uses=self.uses,
            backward=self.backward,
            backward_hooks=self._backward_hooks,
            dtypes=dtypes,
        )
        self._handles: list[Any] = []
        self.install(module)

    def install(self, module: nn.Module) -> None:
        """Put the hooks in, unless they are."""
        if self._handles:
            return
        for unit in self._units:
            self._hook_unit(module if unit is self._units[0] else unit.module, unit)
        if any(unit.is_sharded_between_uses for unit in self._units):
            self._hook_submodules(module)
        for unit in self._units:
            self._hook_params(unit)
        for child in module.modules():
            if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and self._computes_lower(child.weight):
                embed = _ModuleHook(embed_in_fp32)
                self._handles.append(child.register_forward_hook(embed, prepend=True, with_kwargs=True))

    def _hook_unit(self, module: nn.Module, unit: Unit) -> None:
        before = _ModuleHook(lambda _, args, kwargs: self.forwards.pre_forward(unit, args, kwargs))
        after = _ModuleHook(lambda _, args, kwargs, output: self.forwards.post_forward(unit, output))
        self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def _hook_submodules(self, module: nn.Module) -> None:
        for target, submodule in submodules_of(module, self._units):
            before = _SubmoduleHook(lambda _, args, at=submodule: self.forwards.pre_submodule(at))
            after = _SubmoduleHook(lambda _, args, output, at=submodule: self.forwards.post_submodule(at))
            self._handles.append(target.register_forward_pre_hook(before, prepend=True))
            self._handles.append(target.register_forward_hook(after, always_call=True))
        for unit in self._units:
            watch = _ModuleHook(lambda _, args, output, unit=unit: self._backward_hooks.watch_outputs(unit, output))
            self._handles += [watched.register_forward_hook(watch) for watched in unit.watched]

    def _hook_params(self, unit: Unit) -> None:
        for place, buffer in enumerate(unit.buffers):
            if buffer.kind.compute.is_floating_point or buffer.kind.compute.is_complex:
                for index, param in enumerate(buffer.params):
                    show, take = self.backward.takers(unit, place, index)
                    self._handles.append(on_accumulated(param, show, take))

    def _computes_lower(self, param: torch.Tensor) -> bool:
        return any(
            param is candidate and buffer.kind.compute != buffer.kind.original
            for unit in self._units
            for buffer in unit.buffers
            for candidate in buffer.params
        )

    def remove(self) -> None:
        """Take all hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
