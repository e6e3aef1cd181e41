"""Parameters that other parts of the model hold: placeholders here, values for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.boxes import Part
from lightning_zero.config import Communication, MixedPrecision
from lightning_zero.engine.buffers.parameter import (
    ReleasedParameter,
    own,
    placeholder,
    restore_class,
    set_raw_grad,
    swap_class,
)
from lightning_zero.engine.units.lowering import Lowering
from lightning_zero.engine.units.partition import kind_of
from lightning_zero.engine.units.pipeline_peers import PipelinePeers
from lightning_zero.errors import PipelineError
from lightning_zero.grid import Grid

__all__ = ["RemoteParams"]


@dataclass(frozen=True)
class _Absent:
    """One parameter that another part of the model holds."""

    param: nn.Parameter
    shape: tuple[int, ...]  # of the whole parameter
    part: Part | None  # that this rank would have of it where it is held; None: all of it
    master: torch.Tensor  # without elements, in the dtype of the master
    placeholder: torch.Tensor


class RemoteParams:
    """The parameters of a module that only other parts of the model hold.

    Args:
        module: The whole module. The values that are not of this part are given up.
        parts: The parameters of each part.
        names: First fully qualified name and aliases of every parameter, by ``id``; names of absent ones are added.
        precision: Compute and master dtypes.
        lowering: Which parameters compute in 16 bits.
        communication: Dtype of reductions.
        grid: Of which parameters the parts hold a part; None: of none.
        device: Where the module goes.
        is_stepping: Tells whether a step is running.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: PipelinePeers,
        *,
        names: dict[int, tuple[str, ...]],
        precision: MixedPrecision,
        lowering: Lowering,
        communication: Communication,
        grid: Grid | None,
        device: torch.device,
        is_stepping: Callable[[], bool],
    ) -> None:
        self.parts = parts
        self._is_stepping = is_stepping
        self._names = names
        self._absent: dict[int, _Absent] = {}
        self._all_groups: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()
        for name, param in module.named_parameters(remove_duplicate=False):
            if parts.is_here(param):
                continue
            names[id(param)] = (*names.get(id(param), ()), name)
            if id(param) not in self._absent:
                path, _, key = name.rpartition(".")
                compute = lowering.dtype(param, module.get_submodule(path), key)
                kind = kind_of(param, compute, precision=precision, communication=communication)
                empty = torch.empty(0, dtype=kind.shown, device=device)
                part = None if grid is None or name not in grid.params else grid.params[name].part
                shape = tuple(param.shape) if part is None else part.whole
                self._absent[id(param)] = _Absent(param, shape, part, empty, placeholder(param, device))
        for absent in self._absent.values():
            self._give_up(absent)

    def _give_up(self, absent: _Absent) -> None:
        param = absent.param
        own(param, self)
        if param.is_meta:  # its `data` cannot be of another device
            real = nn.Parameter(absent.placeholder, requires_grad=param.requires_grad)
            torch.utils.swap_tensors(param, real)  # type: ignore[no-untyped-call]
        _show(param, absent.placeholder)
        swap_class(param, ReleasedParameter)

    def __contains__(self, param: object) -> bool:
        return id(param) in self._absent

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that other parts hold, in the module's order."""
        return [absent.param for absent in self._absent.values()]

    def master(self, param: nn.Parameter) -> torch.Tensor:
        """Return the master of an absent parameter: no elements, in the dtype of the master."""
        return self._absent[id(param)].master

    def whole_shape(self, param: nn.Parameter) -> tuple[int, ...]:
        """Return the shape of an absent parameter; on a grid that of the whole one."""
        return self._absent[id(param)].shape

    def part(self, param: nn.Parameter) -> Part | None:
        """Return the part of an absent parameter that this rank would have where it is held; None: all of it."""
        return self._absent[id(param)].part

    @contextmanager
    def borrowed(self, params: Iterable[torch.Tensor]) -> Iterator[None]:
        """Let parameters of other parts have values for a while. Collective on entry: all ranks."""
        borrowed = []
        below = torch._C.DisableTorchFunctionSubclass  # parts, on a grid
        with torch.inference_mode(False), torch.no_grad(), below():
            for param in [one for one in params if isinstance(one, nn.Parameter) and id(one) in self._names]:
                away = self._absent.get(id(param))
                if away is None:
                    values = param.detach().clone()
                else:
                    values = torch.empty(param.shape, dtype=away.placeholder.dtype, device=away.master.device)
                    borrowed.append((away, values))
                what = f"parameter `{self.param_name(param)}`"
                self.parts.communicator.any_is(False, f"borrowing of {what}")  # all parts have come for the same
                self.parts.communicator.broadcast(values, what, self.parts.first_holder(param))
        for away, values in borrowed:
            restore_class(away.param)
            _show(away.param, values)
        try:
            yield
        finally:
            for away, _ in borrowed:
                _show(away.param, away.placeholder)
                swap_class(away.param, ReleasedParameter)

    # -- Optimizers ------------------------------------------------------------------------------------------------

    def drop(self, optimizer: Optimizer) -> None:
        """Take the absent parameters, and their names, out of an optimizer's groups."""
        self._all_groups[optimizer] = [_members(group) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            is_here = [param not in self for param in group["params"]]
            group.update({key: list(compress(values, is_here)) for key, values in _members(group).items()})

    @contextmanager
    def whole_groups(self, optimizer: Optimizer) -> Iterator[None]:
        """Put the absent parameters back into an optimizer's groups for a while."""
        here = [_members(group) for group in optimizer.param_groups]
        for group, whole in zip(optimizer.param_groups, self._all_groups.get(optimizer, here), strict=False):
            group.update(whole)
        try:
            yield
        finally:
            for group, own in zip(optimizer.param_groups, here, strict=True):
                group.update(own)
            for param in self.params:
                optimizer.state.pop(param, None)

    # -- Answers for absent parameters -----------------------------------------------------------------------------

    @property
    def is_elsewhere(self) -> bool:
        """Whether another pipeline stage holds the values: always."""
        return True

    def param_name(self, param: nn.Parameter) -> str:
        """Return the first fully qualified name of a parameter."""
        return self._names[id(param)][0]

    def refuse_step(self, param: nn.Parameter, optimizer: Optimizer) -> None:
        """Do nothing: an absent parameter has no gradient."""

    def touch(self, param: nn.Parameter) -> bool:
        """Refuse the values of an absent parameter.

        Raises:
            PipelineError: Always.
        """
        where = (
            f"Parameter `{self.param_name(param)}` lies on pipeline stage {self.parts.first_holder(param)}, and code of"
            f" stage {self.parts.communicator.rank} uses its values"
        )
        if not self._is_stepping():
            raise PipelineError(
                f"{where} outside of a step. Read parameters, and call the model, inside of"
                " `with lightning_zero.gathered(module):` on every rank; write into them inside of"
                " `with lightning_zero.gathered(module, write='all'):`. `strategy.full_param(param)` on every rank"
                " returns a copy of one parameter. To convert the module (`module.double()`), call"
                " `strategy.engine.unshard()` on every rank before. `ModelSummary` calls a model with an"
                " `example_input_array`: leave that out, or use `Trainer(enable_model_summary=False)`."
            )
        raise PipelineError(
            f"{where}. Stages pass over a block of"
            " another stage where the program calls it, not where it calls the block's method or modules inside of it"
            " (`block.forward(x)`, `block.attention(x)`): call `block(x)`, or cut another list with"
            " `Pipeline(module=...)`. If several stages use the parameter, name it:"
            f" `Pipeline(shared=[{self.param_name(param)!r}])`; for a copy call `strategy.full_param(param)` on every"
            " rank."
        )

    def own_dtype(self, param: nn.Parameter) -> torch.dtype:
        """Return the dtype of a parameter: an absent one has no other."""
        return self._absent[id(param)].placeholder.dtype

    def show_original(self, param: nn.Parameter) -> None:
        """Do nothing: an absent parameter has no values."""

    def show_gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return None: there is none."""
        return None

    def write_gradient(self, param: nn.Parameter, grad: torch.Tensor | None) -> None:
        """Let it be read here; the part that holds the parameter steps it."""
        set_raw_grad(param, grad)


def _show(param: nn.Parameter, values: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        param.data = values


def _members(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a group, and their names if it has them."""
    return {key: group[key] for key in ("params", "param_names") if key in group}
