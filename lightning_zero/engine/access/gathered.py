"""Whole parameters: gathered for a while; copies of values and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import nn

from lightning_zero.boxes import Part
from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.runtime.order import PassOrder
from lightning_zero.engine.runtime.saved_tensors import SavedTensors
from lightning_zero.engine.runtime.scopes import Scopes
from lightning_zero.engine.runtime.transforms import explain_transform
from lightning_zero.engine.units.remote_params import RemoteParams
from lightning_zero.engine.units.unit import Unit
from lightning_zero.errors import CollectiveError
from lightning_zero.storage.copies import memory_of

__all__ = ["GatheredParams", "Write"]

Write = Literal["rank0", "all"]

_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


class GatheredParams:
    """Makes parameters whole outside of forward and backward. Step windows are closed before.

    Args:
        units: The engine's units.
        communicator: Over the ranks that share the model.
        scopes: The engine's scopes.
        saved: Keeps the values that graphs need.
        order: The engine's order of gathers.
        remote_params: The parameters of other parts of the model; None if it is whole.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        communicator: Communicator,
        *,
        scopes: Scopes,
        saved: SavedTensors,
        order: PassOrder,
        remote_params: RemoteParams | None,
    ) -> None:
        self._units = units
        self._communicator = communicator
        self._scopes = scopes
        self._saved = saved
        self._order = order
        self._remote_params = remote_params
        self._is_resting = False

    @contextmanager
    def gathered(self, units: Sequence[Unit], params: Sequence[torch.Tensor], write: Write | None) -> Iterator[None]:
        """Hold units whole, and let parameters of other parts have values; see ``ZeroEngine.gathered``."""
        if write not in (None, "rank0", "all"):
            raise ValueError(f"`write={write!r}` is not known. Use None, 'rank0' or 'all'.")
        if write == "rank0":
            _refuse_parts(units, params)
        if write == "rank0" and self._remote_params is not None:
            raise ValueError(
                "`write='rank0'` needs all parameters on rank 0, and a pipeline stage has its own. Make the same change"
                " on every rank and use `write='all'`."
            )
        held: list[Unit] = []
        all_held = False
        try:
            with self._scopes.boundary():
                for unit in units:
                    unit.hold()
                    held.append(unit)
                    if unit.holds == 1 and unit.needs_gather:
                        unit.unshard()
                    unit.wait()
                    if unit.holds == 1:
                        unit.accept_originals()
                    unit.show_original()
            all_held = all(unit.holds for unit in self._units)
            self._order.is_suspended += all_held
            for unit in units:
                for buffer in unit.buffers:
                    buffer.collect_writes()
            changes = any(
                unit.is_sharded_between_uses or buffer.original is not None for unit in units for buffer in unit.buffers
            )
            graphs = self._saved.keeping_graphs() if changes else nullcontext()
            with self._remote_params.borrowed(params) if self._remote_params is not None else nullcontext(), graphs:
                error = None
                try:
                    yield
                except Exception as raised:
                    explain_transform(raised)
                    if write != "rank0" or isinstance(raised, CollectiveError):
                        raise
                    error = raised  # the others wait for this rank
            if write == "rank0":
                self._accept_from_rank0(units, error or _changed_part(units))
            else:
                self._accept(units, write)
        finally:
            self._order.is_suspended -= all_held
            for unit in held:  # of all, before one of them fails
                unit.unhold()
            for unit in held:
                if not unit.holds:
                    unit.hide_original()
                unit.give_back()

    def _accept_from_rank0(self, units: Sequence[Unit], error: Exception | None) -> None:
        """Take rank 0's values on every rank, also where the block has ended in an error, and raise that then.

        A rank that left without the others would meet their broadcasts with its next collective.
        """
        names = ", ".join(f"`{unit.name}`" for unit in units)
        what = f"agreement on the end of `gathered(write='rank0')` for {names}"
        failed: list[int] = []
        try:
            if self._communicator.any_is(error is not None, what):
                errors = enumerate(self._communicator.gather_objects(error is not None, what))
                failed = [rank for rank, has_failed in errors if has_failed]
            self._accept(units, "rank0")
        except CollectiveError as failure:
            raise error or failure from None
        if error is not None:
            raise error
        if failed:
            raise RuntimeError(
                f"Rank(s) {failed} left `gathered(..., write='rank0')` with an error, which is printed or caught there."
                " All ranks have rank 0's values. Catch the error inside the block, or on every rank outside."
            )

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
                if write == "rank0" and buffer.has_parts:
                    continue
                buffer.collect_writes()
                if write == "rank0":
                    self._communicator.broadcast(buffer.shown, f"unit `{unit.name}`")
                buffer.accept_writes()

    def rest(self, *, together: bool) -> None:
        """Let parameters show themselves in their own dtype until ``end_rest``, whenever they are whole.

        Args:
            together: Every rank does, so that whole parameters can be gathered. Else they stay as they compute where
                a rank has not all masters.
        """
        self._is_resting = True
        has_room = self._has_room(together=together)
        for unit in self._units:
            unit.give_back_idle()
            if not unit.is_sharded_between_uses and has_room and (together or _can_show_alone(unit)):
                unit.show_original()
            elif not unit.is_sharded_between_uses:
                unit.begin_computing()  # nobody may come to gather the masters
            for buffer in unit.buffers:
                buffer.gradients.forget_given_out()
                buffer.rest()

    def end_rest(self) -> None:
        """Let parameters show themselves as they compute. No collective."""
        if not self._is_resting:
            return
        self._is_resting = False
        for unit in self._units:
            unit.give_back_idle()
            for buffer in unit.buffers:
                buffer.end_rest()
            unit.end_computing()

    def show_original(self, unit: Unit) -> None:
        """Show a whole unit's parameters in their own dtype until the next forward that computes, or step.

        Collective at stages 1 and 2: all ranks.
        """
        if any(buffer.is_lowered and buffer.original.needs_others for buffer in unit.buffers if buffer.original):
            self._communicator.meet(unit.index, f"reading of a parameter of unit `{unit.name}`")
        unit.show_original()

    def hide_originals(self) -> None:
        """Copy writes into the masters, which are going to be stepped, and show parameters as they compute."""
        for unit in self._units:
            if not unit.is_sharded_between_uses and not unit.holds:
                for buffer in unit.buffers:
                    buffer.forget_original()

    def _has_room(self, *, together: bool) -> bool:
        """Say whether a GPU has room for whole parameters in their own dtype, on every rank if all ask."""
        device = self._communicator.device
        buffers = [buffer for unit in self._units if not unit.is_sharded_between_uses for buffer in unit.buffers]
        needed = sum(
            one.layout.padded_numel * one.kind.original.itemsize for one in buffers if one.original is not None
        )
        if device.type != "cuda" or not needed:
            return True
        memory = memory_of(device)
        fits = memory.free + memory.reserved - memory.allocated > needed
        if together:
            fits = not self._communicator.any_is(not fits, "agreement on room for parameters")
        if not fits:
            warnings.warn(
                f"The GPU has no room for the parameters in their own dtype ({needed / 2**30:.1f} GiB): the module"
                " stays as it computes. Checkpoints, `full_param` and `gathered` have the masters.",
                stacklevel=2,
            )
        return fits

    def values(self, buffer: FlatBuffer, index: int) -> torch.Tensor:
        """Return a copy of a parameter's values as they are stepped. Collective: all ranks of its part."""
        buffer.refresh_master()
        whole = self._whole(buffer, index, buffer.values.segment(index))
        return whole.to(buffer.kind.shown) if buffer.values.master is None else whole

    def values_of_part(
        self, param: nn.Parameter, here: torch.Tensor | None, remote_params: RemoteParams
    ) -> torch.Tensor:
        """Return a parameter's values, given those of the part that holds it. Collective: all parts."""
        parts, what = remote_params.parts, f"parameter `{remote_params.param_name(param)}`"
        # A frozen parameter has a master where an optimizer of its part holds it, which other parts cannot know.
        code = 0 if here is None else 1 + _DTYPES.index(here.dtype)
        dtype = _DTYPES[parts.communicator.agree_on([code], f"agreement on the dtype of {what}")[0] - 1]
        if here is None:
            shape = remote_params.whole_shape(param)
            here = torch.empty(shape, dtype=dtype, device=parts.communicator.device)
        parts.communicator.broadcast(here, what, parts.first_holder(param))
        return here

    def gradient(self, buffer: FlatBuffer, index: int) -> torch.Tensor | None:
        """Return a copy of a parameter's reduced gradient; None if it has none. Collective: all ranks."""
        values = buffer.gradients.for_reading()
        if index not in buffer.gradients.has_grad or values is None:
            return None
        return self._whole(buffer, index, buffer.own_range.segment(index, values).to(buffer.values.stepped.dtype))

    def _whole(self, buffer: FlatBuffer, index: int, piece: torch.Tensor) -> torch.Tensor:
        slot, part = buffer.layout.slots[index], buffer.part(index)
        if not buffer.own_range.is_shard:
            return piece.detach().to(self._communicator.device, copy=True)  # it may be offloaded
        start, stop = buffer.own_range.elements(index)
        with torch.inference_mode(False), torch.no_grad():
            here = torch.zeros(slot.numel, dtype=piece.dtype, device=self._communicator.device)  # not the host's
            here[start:stop] = piece
            whole = here.view(slot.shape) if part is None else _in_whole(here.view(slot.shape), part)
            # One rank has each byte, the others zero: their sum is exact, and few transports add every dtype.
            summed = whole if piece.dtype in _SUMMED else whole.view(-1).view(torch.uint8)
            self._communicator.any_is(False, f"reading of parameter `{slot.name}`")  # all ranks have come for the same
            self._communicator.all_reduce(summed, f"parameter `{slot.name}`", kind="reads")
            return whole


def _in_whole(values: torch.Tensor, part: Part) -> torch.Tensor:
    """Return a tensor of the whole parameter's shape with the values of a part, and zeros elsewhere."""
    whole = torch.zeros(part.whole, dtype=values.dtype, device=values.device)
    part.write(whole, values)
    return whole


def _refuse_parts(units: Sequence[Unit], params: Sequence[torch.Tensor]) -> None:
    """Refuse to take rank 0's values of parameters that it has a part of.

    Raises:
        ValueError: There is one.
    """
    wanted = {id(param) for param in params}
    for buffer in (buffer for unit in units for buffer in unit.buffers):
        for index, (param, slot) in enumerate(zip(buffer.params, buffer.layout.slots, strict=True)):
            if id(param) in wanted and buffer.part(index) is not None:
                raise ValueError(
                    f"`write='rank0'` needs whole parameters on rank 0, which has a part of `{slot.name}`. Change each"
                    " rank's part there, and use `write='all'`."
                )


def _changed_part(units: Sequence[Unit]) -> RuntimeError | None:
    """Return the error of a change to a part, which was gathered with its unit only."""
    if not any(buffer.has_parts and buffer.is_written() for unit in units for buffer in unit.buffers):
        return None
    return RuntimeError(
        "A parameter of which rank 0 has a part was changed inside `gathered(…, write='rank0')` of another one. Change"
        " each rank's part there, inside `gathered(…, write='all')`."
    )


def _can_show_alone(unit: Unit) -> bool:
    """Say whether this rank can show a unit in its own dtype by itself."""
    return all(buffer.can_show_alone for buffer in unit.buffers)
