"""Optimizer states of segments: cut to them, fitted before PyTorch's step, widened for everybody else."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.part_parameter import PartValues
from lightning_zero.engine.buffers.sharded_gradient import ShardedGradient
from lightning_zero.engine.buffers.sharded_state import ShardedState
from lightning_zero.engine.optim.flat_step import BufferSlot, FlatStep
from lightning_zero.engine.optim.moments import MomentFormat
from lightning_zero.storage.residence import is_in_memory

__all__ = ["COUNTERS", "SEGMENTS", "SegmentStates", "is_counter"]

# Names of PyTorch's states that count steps: they tell counters of 0-dim parameters from states by element.
COUNTERS = ("step", "mu_product", "mu", "eta")
SEGMENTS = "segments"  # entry of `state_dict` that says of which rank its states are

_PYTORCH_STATES = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"})  # of fused kernels


def is_counter(key: str, value: torch.Tensor) -> bool:
    """Say whether a state counts steps, and is no state by element of a 0-dim parameter."""
    return value.ndim == 0 and key in COUNTERS


class SegmentStates:
    """The states of one optimizer, of this rank's segments.

    Args:
        optimizer: Holds the states.
        places: Where its parameters lie, by ``id``.
        flat_step: Steps them over flat ranges; None if PyTorch does.
        moments: The format of the moments of AdamW and Adam.
    """

    def __init__(
        self, optimizer: Optimizer, places: dict[int, BufferSlot], *, flat_step: FlatStep | None, moments: MomentFormat
    ) -> None:
        self._optimizer = optimizer
        self._name = type(optimizer).__name__
        self._places = places
        self._flat_step = flat_step
        self._moments = moments
        # - The program, which may keep states
        self.are_seen = False
        self.are_kept = False
        self._are_shown = False  # some may have the class that programs see
        self._are_of_methods = False  # or the one that methods of the optimizer see
        self._have_been_shown = False
        self._given: dict[str, Any] | None = None  # to ``load_state_dict``, while it runs
        self._classes: dict[int, type[ShardedState] | None] = {}  # these classes, by ``id`` of the parameter

    def look_for_kept(self, buffers: Callable[[], Iterable[FlatBuffer]]) -> None:
        """Find out whether the program keeps states of those that it has seen."""
        flat = self._flat_step
        self.are_kept = self.are_seen and flat is not None and flat.are_held(buffers())
        self.are_seen = self.are_kept

    # -- Readers ---------------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Let the program see segments that do not pass for whole states, until ``hide``."""
        if not self._are_shown:
            self._have_been_shown = True
            self._show(lambda made: made)

    def show_to_methods(self) -> None:
        """Let a method of the optimizer see segments of their own shape that do not pass for whole states."""
        if not self._are_of_methods:
            self.hide()
            self._show(lambda made: made.in_methods)
            self._are_of_methods = True

    def end_methods(self) -> None:
        """Make those that a method has made, or has seen, plain tensors again."""
        self.make_plain()
        if self._are_of_methods:
            self.hide()
            self.show_again()

    def _show(self, choose: Callable[[type[ShardedState]], type[ShardedState]]) -> None:
        if not self._moments.dtype.is_floating_point:  # those are codes
            return
        self._are_shown = True
        for param, state in vars(self._optimizer)["state"].items():
            made = self._class_of(param)
            if made is None:
                continue
            shape = self._segment_shape(param)
            for key, value in state.items():
                if key != "step" and type(value) is torch.Tensor and value.shape == shape:
                    value.__class__ = choose(made)

    def hide(self) -> None:
        """Let the optimizer and the engine see plain tensors."""
        if not self._are_shown:
            return
        self._are_shown = self._are_of_methods = False
        for state in vars(self._optimizer)["state"].values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, ShardedState):
                    value.__class__ = torch.Tensor  # type: ignore[assignment]

    def make_plain(self) -> None:
        """Make states plain tensors that a method has made of segments."""
        for state in vars(self._optimizer).get("state", {}).values():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, ShardedGradient) and not isinstance(value, ShardedState):
                    state[key] = value.as_subclass(torch.Tensor)

    def show_again(self) -> None:
        """Show them behind a step to a program that may keep some of before."""
        if self.are_kept or (self._have_been_shown and self._flat_step is None):
            self.show()

    def _class_of(self, param: torch.Tensor) -> type[ShardedState] | None:
        place = self._places.get(id(param))
        if place is None:
            return None
        if id(param) not in self._classes:
            self._classes[id(param)] = place[0].window.state_class(place[1])
        return self._classes[id(param)]

    def _segment_shape(self, param: torch.Tensor) -> torch.Size:
        buffer, index = self._places[id(param)]
        start, stop = buffer.own_range.elements(index)
        return torch.Size([stop - start])

    # -- Segments --------------------------------------------------------------------------------------------------

    def cut(self, param: nn.Parameter, place: BufferSlot) -> None:
        """Cut states that the optimizer made in its constructor to this rank's segment, on the device of that.

        Those in the parameter's own dtype get that of the segment; others were given theirs on purpose.
        """
        buffer, index = place
        start, stop = buffer.own_range.elements(index)
        whole = torch.Size(buffer.layout.slots[index].shape)
        state = self._optimizer.state.get(param, {})
        for key, value in state.items():
            if isinstance(value, PartValues):  # it was made of a parameter with a part
                value = value.as_subclass(torch.Tensor)
            if isinstance(value, ShardedGradient):  # a segment: it was made of the step window's segments
                state[key] = value.as_subclass(torch.Tensor)
            elif torch.is_tensor(value) and key != "step" and value.shape == whole and not is_counter(key, value):
                piece = value.reshape(-1)[start:stop].clone() if buffer.own_range.is_shard else value
                stepped = buffer.values.stepped
                is_like_param = value.dtype == buffer.kind.original
                state[key] = piece.to(stepped.device, stepped.dtype if is_like_param else value.dtype)

    def fit(self, places: Iterable[BufferSlot]) -> None:
        """Cut whole states that were assigned by hand; PyTorch's kernels do not look how long a state is.

        Raises:
            RuntimeError: One that PyTorch takes has the shape neither of the parameter nor of its segment.
        """
        for buffer, index in places:
            param, shape = buffer.params[index], buffer.values.segment(index).shape
            state = self._optimizer.state.get(param)
            if not state or not buffer.own_range.is_shard:
                continue
            if any(isinstance(one, ShardedGradient) for one in state.values()):
                self.cut(param, (buffer, index))
            odd = [key for key, one in state.items() if torch.is_tensor(one) and one.dim() and one.shape != shape]
            if not odd:
                continue
            self.cut(param, (buffer, index))
            for key in odd:
                if key in _PYTORCH_STATES and state[key].shape != shape:
                    raise RuntimeError(
                        f"State `{key}` of `{buffer.layout.slots[index].name}` in `{self._name}` has"
                        f" shape {tuple(state[key].shape)}, but {tuple(shape)} is this rank's segment and"
                        f" {tuple(buffer.layout.slots[index].shape)} the parameter. Assign a tensor of one of these."
                    )

    # -- `state_dict` of the optimizer -----------------------------------------------------------------------------

    def tag(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Let ``state_dict`` say that it has this rank's segments, if it has."""
        segments = self._segments()
        if segments is not None:
            state_dict[SEGMENTS] = segments

    def refuse_others(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Refuse to load a ``state_dict`` of other segments than this rank's.

        Raises:
            ValueError: It was made on another rank, or with other options.
        """
        self._given = state_dict
        self._are_shown = True  # the program may have copied states when it saw them
        found, own = state_dict.get(SEGMENTS), self._segments()
        if found is None or found == own:
            return
        here = "whole states" if own is None else f"rank {own['rank']} of {own['world_size']}"
        raise ValueError(
            f"This `state_dict` of `{self._name}` has the segments of rank {found['rank']} of {found['world_size']},"
            f" and they are loaded for {here}, whose elements are others. `optimizer.state_dict()` of a sharded"
            " optimizer is for the same rank of the same run alone. Save with `trainer.save_checkpoint(path)`"
            " (`lightning_zero.checkpoint` without a Trainer), which every rank calls and any number of ranks can load."
        )

    def restore_dtypes(self, optimizer: Optimizer) -> None:
        """Give states that ``load_state_dict`` has cast to the parameters' dtype and device those of the segments."""
        given, self._given = self._given, None
        if given is None:
            return
        saved = [key for group in given["param_groups"] for key in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for key, param in zip(saved, params, strict=False):
            place, state = self._places.get(id(param)), optimizer.state.get(param)
            if place is not None and state:
                _restore(state, given["state"].get(key, {}), place[0].values.stepped)

    def _segments(self) -> dict[str, int] | None:
        """Return this rank and a sum over the elements that it has; None if its states are whole."""
        places = [self._places.get(id(param)) for group in self._optimizer.param_groups for param in group["params"]]
        cuts = [place[0].own_range.elements(place[1]) for place in places if place and place[0].own_range.is_shard]
        if not cuts:
            return None
        communicator = next(iter(self._places.values()))[0].communicator
        elements = zlib.crc32(repr(cuts).encode())
        return {"rank": communicator.rank, "world_size": communicator.world_size, "elements": elements}

    # -- Places ----------------------------------------------------------------------------------------------------

    def place_of(self, param: torch.Tensor, key: str) -> torch.Tensor | None:
        """Return where a state of a parameter is to be, 1-D, if that is not in memory."""
        attached = self._places.get(id(param))  # none of a parameter that lies on another pipeline stage
        if attached is None or self._flat_step is None:
            return None
        place = self._flat_step.state_place(*attached, key)
        return None if place is None else place.reshape(-1)

    def move(self, buffers: Sequence[FlatBuffer], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the optimizer states of some buffers' own ranges by ``change(state)``."""
        self.hide()
        chosen = {id(buffer) for buffer in buffers}
        for param, state in vars(self._optimizer)["state"].items():
            place = self._places.get(id(param))
            if place is None or id(place[0]) not in chosen:
                continue
            for key, value in state.items():
                if torch.is_tensor(value) and value.dim():  # numbers stay where they are
                    state[key] = change(value)
        if self._flat_step is not None:
            self._flat_step.move_states(chosen, change)

    # -- Moments of few bits, other stores ---------------------------------------------------------------------------

    def widen(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Let ``state_dict`` have the moments that PyTorch's own step would have."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for key, state in state_dict["state"].items():
            param = params[key] if isinstance(key, int) else key
            state_dict["state"][key] = self._widened(param, state)

    def _widened(self, param: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
        buffer, _ = self._places[id(param)]
        buffer.values.flush()
        return self._moments.widened(state, buffer.values.stepped.dtype)

    def widen_all(self) -> None:
        """Give the optimizer the moments that PyTorch's own step would have, but for those outside memory."""
        if self._moments.is_pytorchs:
            return
        for param, state in self._optimizer.state.items():
            if all(is_in_memory(value) for value in state.values()):
                self._optimizer.state[param] = self._widened(param, state)

    @property
    def is_outside_memory(self) -> bool:
        """Whether it has states that are not kept in memory."""
        return self._flat_step is not None and self._flat_step.is_outside_memory

    def leave_to(self, successor: SegmentStates | None) -> None:
        """Leave states outside memory to the sharded optimizer that follows; free their room if there is none."""
        assert self._flat_step is not None
        if successor is None or successor._flat_step is None:
            self._flat_step.give_back()
        else:
            successor._flat_step.take_over(self._flat_step)


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.as_subclass(torch.Tensor) if isinstance(value, ShardedState) else value


def _beside(stepped: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a state on the device of the stepped values, and in their dtype if both are floating point."""
    return value.to(stepped.device, _dtype_beside(stepped, value))


def _dtype_beside(stepped: torch.Tensor, value: torch.Tensor) -> torch.dtype:
    return stepped.dtype if value.is_floating_point() and stepped.is_floating_point() else value.dtype


def _restore(state: dict[str, Any], given: Any, stepped: torch.Tensor) -> None:
    """Replace values that were cast, and that nothing else has changed, by the given ones."""
    for key, loaded in state.items():
        before = given.get(key) if isinstance(given, dict) else None
        if not (torch.is_tensor(loaded) and torch.is_tensor(before)) or key == "step":
            continue
        loaded, before = _plain(loaded), _plain(before)
        is_number = is_counter(key, before)
        wanted = before.dtype if is_number else _dtype_beside(stepped, before)
        if loaded.dtype == wanted and (is_number or loaded.device == stepped.device):
            continue
        if loaded.shape == before.shape and torch.equal(loaded, before.to(loaded.device, loaded.dtype)):
            state[key] = before.clone() if is_number else _beside(stepped, before)
