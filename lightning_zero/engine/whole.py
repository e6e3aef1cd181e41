"""Whole parameters: gathered for a while; copies of values and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.buffer import FlatBuffer
from lightning_zero.engine.elsewhere import Elsewhere
from lightning_zero.engine.hooks import Hooks
from lightning_zero.engine.order import PassOrder
from lightning_zero.engine.unit import Unit, UnitState

__all__ = ["Whole", "Write"]

Write = Literal["rank0", "all"]

_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


class Whole:
    """Makes parameters whole outside of forward and backward. Step windows are closed before.

    Args:
        units: The engine's units.
        communicator: Over the ranks that share the model.
        hooks: The engine's hooks.
        order: The engine's order of gathers.
        elsewhere: What other parts of the model hold; None if it is whole.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        communicator: Communicator,
        hooks: Hooks,
        order: PassOrder,
        elsewhere: Elsewhere | None,
    ) -> None:
        self._units = units
        self._communicator = communicator
        self._hooks = hooks
        self._order = order
        self._elsewhere = elsewhere

    @contextmanager
    def gathered(self, units: Sequence[Unit], params: Sequence[torch.Tensor], write: Write | None) -> Iterator[None]:
        """Hold units whole, and let parameters of other parts have values; see ``ZeroEngine.gathered``."""
        if write not in (None, "rank0", "all"):
            raise ValueError(f"`write={write!r}` is not known. Use None, 'rank0' or 'all'.")
        if write == "rank0" and self._elsewhere is not None:
            raise ValueError(
                "`write='rank0'` needs all parameters on rank 0, and a pipeline stage has its own. Make the same change"
                " on every rank and use `write='all'`."
            )
        held: list[Unit] = []
        all_held = False
        try:
            with self._hooks.boundary():
                for unit in units:
                    unit.holds += 1
                    held.append(unit)
                    if not unit.holds > 1 and unit.state is UnitState.SHARDED:
                        unit.unshard()
                    unit.wait()
            all_held = all(unit.holds for unit in self._units)
            self._order.is_suspended += all_held
            for unit in units:
                for buffer in unit.buffers:
                    buffer.collect_writes()
            with self._elsewhere.borrowed(params) if self._elsewhere is not None else nullcontext():
                yield
            self._accept(units, write)
        finally:
            self._order.is_suspended -= all_held
            for unit in held:
                unit.holds -= 1
                if not unit.is_busy:
                    unit.reshard()

    def _accept(self, units: Sequence[Unit], write: Write | None) -> None:
        for unit in units:
            for buffer in unit.buffers:
                if write is None:
                    if buffer.is_written():
                        raise RuntimeError(
                            f"A parameter of unit `{unit.name}` was changed inside `gathered`. Say whose change counts:"
                            " `gathered(…, write='rank0')` or `write='all'`."
                        )
                    continue
                buffer.collect_writes()
                if write == "rank0":
                    self._communicator.broadcast(buffer.full, f"unit `{unit.name}`")
                buffer.accept_writes()

    def values(self, buffer: FlatBuffer, index: int) -> torch.Tensor:
        """Return a copy of a parameter's values as they are stepped. Collective: all ranks of its part."""
        buffer.refresh_master()
        whole = self._whole(buffer, index, buffer.segment(index))
        return whole.to(buffer.kind.master) if buffer.kind.trained and buffer.master is None else whole

    def values_of_part(self, param: nn.Parameter, here: torch.Tensor | None, elsewhere: Elsewhere) -> torch.Tensor:
        """Return a parameter's values, given those of the part that holds it. Collective: all parts."""
        parts, what = elsewhere.parts, f"parameter `{elsewhere.param_name(param)}`"
        # A frozen parameter has a master where an optimizer of its part holds it, which other parts cannot know.
        code = torch.tensor([0 if here is None else 1 + _DTYPES.index(here.dtype)])
        dtype = _DTYPES[int(parts.communicator.agree(code, f"agreement on the dtype of {what}").item()) - 1]
        if here is None:
            here = torch.empty(param.shape, dtype=dtype, device=elsewhere.master(param).device)
        parts.communicator.broadcast(here, what, parts.first_holder(param))
        return here

    def gradient(self, buffer: FlatBuffer, index: int) -> torch.Tensor | None:
        """Return a copy of a parameter's reduced gradient; None if it has none. Collective: all ranks."""
        values = buffer.gradients.for_reading()
        if index not in buffer.gradients.has_grad or values is None:
            return None
        return self._whole(buffer, index, buffer.own_range.segment(index, values).to(buffer.stepped.dtype))

    def _whole(self, buffer: FlatBuffer, index: int, piece: torch.Tensor) -> torch.Tensor:
        slot = buffer.layout.slots[index]
        if not buffer.sharding.optim:
            return piece.detach().clone()
        start, stop = buffer.own_range.elements(index)
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.zeros(slot.numel, dtype=piece.dtype, device=self._communicator.device)  # not the host's
            whole[start:stop] = piece
            # One rank has each byte, the others zero: their sum is exact, and few transports add every dtype.
            summed = whole if piece.dtype in _SUMMED else whole.view(torch.uint8)
            self._communicator.all_reduce(summed, f"parameter `{slot.name}`", kind="reads")
            return whole.view(slot.shape)
