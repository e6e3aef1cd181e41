"""Steps of PyTorch's plain optimizers over flat ranges: one pass over memory for neighbouring parameters (ADR 0018).

A *run* is a range of a buffer's own range whose parameters are of one group, at one step, and whose states lie beside
each other. The optimizer's state keeps PyTorch's keys and one tensor per parameter; they are views of one flat tensor
per buffer where the optimizer steps all of the buffer. A rule may make states of one segment each instead, and a run is
then one segment (``step_rules.py`` beside this file).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.optim.moments import MomentFormat
from lightning_zero.engine.optim.step_rules import ADAM, RULES
from lightning_zero.engine.optim.streamed import step_streamed
from lightning_zero.storage.references import num_tensors_in
from lightning_zero.storage.residence import is_in_memory, ordinary
from lightning_zero_ops.chunks import vector_numel

__all__ = ["FlatStep", "BufferSlot"]

BufferSlot = tuple[FlatBuffer, int]
"""A parameter as (buffer, slot)."""
_Run = tuple[int, int]

_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
_STEPPED = (
    "fp32 values with numbers as options, `fused=None` or True, and without `foreach`, `amsgrad`, `maximize`,"
    " `capturable`, `differentiable` and PyTorch's `GradScaler`"
)
_UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable", "foreach")


@cache
def _own_references() -> int:
    """Return how many references Python counts to a tensor that only a dictionary has."""
    for value in {"state": torch.empty(1, device="cpu")}.values():
        return sys.getrefcount(value)
    raise AssertionError


class FlatStep:
    """Steps the groups of one optimizer run by run.

    Args:
        optimizer: Exactly of one of PyTorch's classes; see ``suits``.
        places: Where its parameters lie, by ``id``; it may grow.
        moments: The format of the moments of AdamW and Adam.
        has_kernels: Triton's kernels agree with PyTorch's on the devices of all ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        places: Mapping[int, BufferSlot],
        moments: MomentFormat,
        *,
        has_kernels: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._places = places
        self._moments = moments
        rule = RULES[type(optimizer)]
        self._rule = moments.adam if rule is ADAM else rule
        self._has_kernels = has_kernels
        self._counts = _CountsOnDevice()
        self._flat: dict[tuple[int, str], Tensor] = {}  # states over an own range, by (buffer, key)
        self._num_tensors: dict[tuple[int, str], int] = {}  # in the memory of these, apart from the optimizer's states
        # Views of these in states, with their addresses, by (buffer, slot)
        self._placed: dict[tuple[int, int], dict[str, tuple[Tensor, int]]] = {}
        self._planned: dict[int, _Planned] = {}  # of the step that is being taken, by buffer

    @staticmethod
    def suits(optimizer: Optimizer) -> bool:
        """Say whether the optimizer's class is one that can be stepped by runs."""
        return type(optimizer) in RULES

    def has_calls(self, buffer: FlatBuffer) -> bool:
        """Say whether ``take_calls`` has something for a buffer."""
        return id(buffer) in self._planned

    def take_calls(self, buffer: FlatBuffer) -> list[Callable[[], None]]:
        """Return the calls that make a buffer's step, in order, and forget them."""
        planned = self._planned.pop(id(buffer), None)
        return [] if planned is None else planned.calls

    def forget_calls(self) -> None:
        """Forget the calls of a step that an error has ended."""
        self._planned.clear()

    def flat_states(self, buffer: FlatBuffer) -> list[Tensor]:
        """Return the states that lie beside each other for all of a buffer's own range."""
        return [state for (owner, _), state in self._flat.items() if owner == id(buffer)]

    def are_held(self, buffers: Iterable[FlatBuffer]) -> bool:
        """Say whether somebody but the optimizer has states of buffers, views of them, or dictionaries of them."""
        states, own = vars(self._optimizer)["state"], _own_references()
        if sys.getrefcount(states) > own:
            return True
        owners = {id(buffer) for buffer in buffers}
        flats = [(place, flat) for place, flat in self._flat.items() if place[0] in owners and is_in_memory(flat)]
        num_tensors = {flat.untyped_storage()._cdata: self._num_tensors.get(place, 1) for place, flat in flats}
        placed = Counter(id(one) for there in self._placed.values() for one, _ in there.values())
        for state in states.values():
            is_kept = sys.getrefcount(state) > own
            for value in state.values():
                if not torch.is_tensor(value) or not is_in_memory(value):
                    continue
                if value.untyped_storage()._cdata in num_tensors:
                    num_tensors[value.untyped_storage()._cdata] += 1
                    if is_kept or sys.getrefcount(value) > own + placed[id(value)]:
                        return True
        return any(num_tensors_in(flat) > num_tensors[flat.untyped_storage()._cdata] for _, flat in flats)

    def state_place(self, buffer: FlatBuffer, index: int, key: str) -> Tensor | None:
        """Return where a state that is not kept in memory is to be; None if it is."""
        if buffer.home.flat_for is None or key not in self._rule.moments({"momentum": True}):
            return None
        return buffer.own_range.segment(index, self._flat_state(buffer, key))

    def step(self, group: dict[str, Any], *, rounds: bool, all_fit: bool) -> list[nn.Parameter]:
        """Prepare to step a group's flat ranges; return the parameters that PyTorch has to step.

        States are made and steps counted; ``take_calls`` gives the calls to make.

        Args:
            group: One of the optimizer's groups, whose gradients were taken over. Its step window is open.
            rounds: Write the parameters in the dtype in which they compute too.
            all_fit: ``steps_all`` has said so in this step.
        """
        self.refuse_moments(group)
        self.refuse_unless_flat(group)
        if not self.covers(group):
            return list(group["params"])
        left: list[nn.Parameter] = []
        chosen: dict[int, tuple[FlatBuffer, list[int]]] = {}
        for param in group["params"]:
            buffer, index = self._places[id(param)]
            has_flat_gradient = index in buffer.gradients.has_grad and buffer.gradients.reduced is not None
            if has_flat_gradient and (all_fit or self.fits(group, buffer, index)):
                chosen.setdefault(id(buffer), (buffer, []))[1].append(index)
                continue
            if has_flat_gradient and not (self._moments.is_pytorchs and buffer.home.flat_for is None):
                option = buffer.home.flat_for or f"`moments={self._moments.name!r}`"
                raise RuntimeError(
                    f"The state of `{buffer.layout.slots[index].name}` in `{type(self._optimizer).__name__}` does not"
                    f" fit its segment, so {option} cannot be kept. Load the state of this rank, or a checkpoint."
                )
            left.append(param)
        for buffer, indices in chosen.values():
            self.plan(group, buffer, sorted(indices), rounds=rounds)
        return left

    def can_step(self, group: Mapping[str, Any]) -> bool:
        """Say whether a group is stepped by runs."""
        buffers = [self._places[id(param)][0] for param in group["params"]]
        return self.covers(group) and all(self._suits_buffer(buffer) for buffer in buffers)

    def steps_all(self, group: Mapping[str, Any]) -> bool:
        """Say whether everything in a group that has a gradient can be stepped by runs now: they were taken over."""
        if not self.covers(group):
            return False
        for param in group["params"]:
            buffer, index = self._places[id(param)]
            is_stepped = index in buffer.gradients.has_grad
            if is_stepped and (buffer.gradients.reduced is None or not self.fits(group, buffer, index)):
                return False
        return True

    @property
    def is_outside_memory(self) -> bool:
        """Whether it has states that are not kept in memory."""
        return any(not is_in_memory(flat) for flat in self._flat.values())

    def take_over(self, former: FlatStep) -> None:
        """Go on with the states of the same optimizer that was attached before."""
        self._flat, self._placed, self._num_tensors = former._flat, former._placed, former._num_tensors
        self._counts = former._counts

    def give_back(self) -> None:
        """Give the room of states outside memory back; using them is an error from here on."""
        buffers = {id(buffer): buffer for buffer, _ in self._places.values()}
        for (owner, _), flat in self._flat.items():
            buffers[owner].home.give_back_state(flat)
        self._flat, self._placed = {}, {}

    def move_states(self, buffers: Collection[int], move: Callable[[Tensor], Tensor]) -> None:
        """Put ``move(flat)`` in the place of the flat states of some buffers, given by ``id``."""
        self._placed.clear()
        for place, flat in self._flat.items():
            if place[0] in buffers:
                self._flat[place] = move(flat)
                self._note_tensors(place)

    # -- Conditions of a flat step ---------------------------------------------------------------------------------

    def refuse_moments(self, group: Mapping[str, Any]) -> None:
        """Refuse a group whose moments PyTorch would have to keep, where they are to be kept otherwise.

        Raises:
            ValueError: ``moments`` is not ``"fp32"``, and the group is not stepped by runs.
        """
        if self._moments.is_pytorchs:
            return
        buffers = [self._places[id(param)][0] for param in group["params"]]
        found = f"`{type(self._optimizer).__name__}`" if not self._rule.counts else self._obstacle(group, buffers)
        if found is not None:
            raise ValueError(
                f"`moments={self._moments.name!r}` is for `torch.optim.AdamW` and `Adam` that step {_STEPPED}; got"
                f" {found}. Change that, or use `moments='fp32'`."
            )

    def refuse_unless_flat(self, group: Mapping[str, Any]) -> None:
        """Refuse a group that PyTorch would have to step, where its states lie flat.

        Raises:
            ValueError: It has parameters with such states, and is not stepped by runs over flat states.
        """
        buffers = [buffer for param in group["params"] if (buffer := self._places[id(param)][0]).home.flat_for]
        if not buffers:
            return
        is_flat = self._rule.make_state is None
        found = self._obstacle(group, buffers) if is_flat else f"`moments={self._moments.name!r}`"
        if found is not None:
            raise ValueError(
                f"{buffers[0].home.flat_for} is for `torch.optim.AdamW`, `Adam` and `SGD` that step {_STEPPED}, with"
                f" moments in fp32 or bf16; got {found}. Change that, or use `Offload(optimizer='cpu')`."
            )

    def _obstacle(self, group: Mapping[str, Any], buffers: Iterable[FlatBuffer]) -> str | None:
        """Return the options or values that keep a group from being stepped by flat ranges; None if none do."""
        names = ("lr", "weight_decay", "betas", "fused", *_UNSUPPORTED)
        if not self.covers(group):
            return ", ".join(f"`{name}={group[name]!r}`" for name in names if name in group)
        buffer = next((buffer for buffer in buffers if not self._suits_buffer(buffer)), None)
        if buffer is None:
            return None
        return f"{buffer.values.stepped.dtype} values of unit `{buffer.name}`"

    def covers(self, group: Mapping[str, Any]) -> bool:
        """Say whether the options of a group are those of a step by runs."""
        scaled = [getattr(self._optimizer, name, None) for name in ("grad_scale", "found_inf")]  # torch.amp.GradScaler
        numbers = [group["lr"], group["weight_decay"], *group.get("betas", ())]
        return (
            group["fused"] in (None, True)
            and group["foreach"] is None
            and not any(group.get(option) for option in _UNSUPPORTED)
            and not any(torch.is_tensor(number) for number in numbers)
            and all(value is None for value in scaled)
        )

    def fits(self, group: Mapping[str, Any], buffer: FlatBuffer, index: int) -> bool:
        """Say whether values, gradient and state of a parameter are those of a step by runs."""
        return self._suits_buffer(buffer) and self._suits_state(group, buffer, index)

    def _suits_buffer(self, buffer: FlatBuffer) -> bool:
        return buffer.values.stepped.dtype == torch.float32 and buffer.kind.reduce in _GRADIENTS

    def _step_of(self, buffer: FlatBuffer) -> Callable[..., None]:
        """Return the op for a buffer.

        The choice follows from the buffer's dtypes alone, so that neither the stage nor clipping shows in the bits: a
        unit of fp32 has those of PyTorch's fused step; one in 16 bits, of which that would take passes for the
        gradient and for rounding, is stepped by Triton's kernel in one (ADR 0018).
        """
        device = buffer.home.steps_on or buffer.values.stepped.device
        is_narrow = min(buffer.kind.compute.itemsize, buffer.kind.reduce.itemsize) < 4
        if self._rule.launch is None or not (self._has_kernels and is_narrow and device.type == "cuda"):
            return self._rule.step
        return self._rule.launch

    def _suits_state(self, group: Mapping[str, Any], buffer: FlatBuffer, index: int) -> bool:
        state = vars(self._optimizer)["state"].get(buffer.params[index])
        if not state:
            return True
        if self._rule.counts and not torch.is_tensor(state.get("step")):
            return False
        keys = self._rule.moments(group)
        if self._is_placed(state, keys, buffer, index):
            return True
        segment = buffer.values.segment(index)
        moments = [state.get(key) for key in keys]
        if not self._rule.counts:
            moments = [moment for moment in moments if moment is not None]
        dtypes = (segment.dtype, self._moments.dtype)
        return all(
            torch.is_tensor(moment) and moment.shape == segment.shape and moment.dtype in dtypes for moment in moments
        )

    # -- Runs ------------------------------------------------------------------------------------------------------

    def plan(self, group: dict[str, Any], buffer: FlatBuffer, indices: list[int], *, rounds: bool) -> None:
        """Prepare to step slots of a buffer; ``take_calls`` gives the calls to make.

        Args:
            group: The group of their parameters.
            buffer: The buffer.
            indices: The slots.
            rounds: Write the parameters in the dtype in which they compute too.
        """
        group = {key: value for key, value in group.items() if key != "params"}  # schedulers move its options
        steps = self._make_states(group, buffer, indices)
        # Tensors that are not kept in memory are there when the calls are made.
        if id(buffer) not in self._planned:
            self._planned[id(buffer)] = _Planned(ordinary(buffer.gradients.unscaled()), [])
        gradient, calls = self._planned[id(buffer)]
        stepped = ordinary(buffer.values.stepped)
        factor = buffer.gradients.factor
        rounding = buffer.values.begin_rounding() if rounds else None
        step = self._step_of(buffer)
        if buffer.home.steps_on is not None:
            copies = buffer.store.copies
            step = partial(step_streamed, step, buffer.home.steps_on, copies=copies, behind=copies.mark())
        for lo, hi, members in self._runs(group, buffer, sorted(indices), steps):
            first = self._optimizer.state.get(buffer.params[members[0]], {})
            moments = [_stretched(ordinary(first[key]), hi - lo) for key in self._rule.moments(group)]
            moments += [first[key] for key in self._rule.scales]
            call = partial(
                step,
                group=group,
                number=steps[members[0]],
                param=stepped[lo:hi],
                moments=moments,
                grad=gradient[lo:hi],
                out=None if rounding is None else rounding.out[lo:hi],
                factor=None if factor is None else factor.to(stepped.device),
                tails=_tails(buffer, members, lo) if stepped.is_cpu else (),
            )
            if not calls:
                calls += [buffer.home.await_brought, buffer.values.shard.await_uploads]
            calls += [call] if rounding is None else rounding.around(call, lo, hi)
        if rounding is not None:
            buffer.values.note_rounded(indices)

    def _runs(
        self, group: Mapping[str, Any], buffer: FlatBuffer, indices: Iterable[int], steps: Mapping[int, int]
    ) -> Iterator[tuple[int, int, list[int]]]:
        """Yield runs as (start, stop, slots); ranges of the own range."""
        keys = self._rule.moments(group)
        is_flat = all((id(buffer), key) in self._flat for key in keys)
        # Padding between parameters is zero and stays so, unless it is divided by `eps=0`.
        may_join = is_flat and group.get("eps", 1.0) != 0.0
        members: list[int] = []
        lo = hi = -1
        for index in indices:
            start, stop = buffer.own_range.place(index)
            if start == stop:
                continue
            follows = may_join and members and buffer.own_range.is_next(members[-1], index)
            if follows and steps[index] == steps[members[-1]]:
                members.append(index)
                hi = stop
                continue
            if members:
                yield lo, hi, members
            lo, hi, members = start, stop, [index]
        if members:
            yield lo, hi, members

    # -- States ----------------------------------------------------------------------------------------------------

    def _make_states(self, group: Mapping[str, Any], buffer: FlatBuffer, indices: list[int]) -> dict[int, int]:
        """Make or move the states of parameters and count the step; return the number of this step by slot."""
        keys = self._rule.moments(group)
        is_whole = buffer.home.flat_for is not None or self._steps_whole(buffer)
        kept = self._optimizer.state if keys else {}
        states = {index: kept[buffer.params[index]] if keys else {} for index in indices}
        if self._rule.counts:
            steps = self._count(states, group, buffer)
        else:
            is_first = {index: any(state.get(key) is None for key in keys) for index, state in states.items()}
            steps = {index: 1 if first else 2 for index, first in is_first.items()}  # SGD asks for nothing else
        for index, state in states.items():
            if self._is_placed(state, keys, buffer, index):
                continue
            if self._rule.make_state is not None:
                with torch.inference_mode(False):
                    self._rule.make_state(state, buffer.values.segment(index))
                continue
            for key in keys:
                self._place_state(state, key, buffer=buffer, index=index, is_whole=is_whole)
        return steps

    def _count(
        self, states: Mapping[int, dict[str, Any]], group: Mapping[str, Any], buffer: FlatBuffer
    ) -> dict[int, int]:
        """Count the step in states; return its number, by slot."""
        device = buffer.values.stepped.device if group["fused"] else torch.device("cpu")
        is_double = torch.get_default_dtype() == torch.float64 and not group["fused"]
        for index, state in states.items():
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float64 if is_double else torch.float32, device=device)
                self._counts.note((id(buffer), index), state["step"], 0)
        counters = {(id(buffer), index): state["step"] for index, state in states.items()}
        on_device = self._counts.add_one({key: one for key, one in counters.items() if not one.is_cpu})
        numbers = {}
        for (_, index), counter in counters.items():
            if counter.is_cpu:
                numbers[index] = int(counter.add_(1).item())
            else:
                numbers[index] = on_device[id(buffer), index]
        return numbers

    def _is_placed(self, state: Mapping[str, Any], keys: Collection[str], buffer: FlatBuffer, index: int) -> bool:
        """Say whether the moments of a parameter are the views that were put there in an earlier step."""
        placed = self._placed.get((id(buffer), index), {})
        for key in keys:
            if key not in placed or state.get(key) is not placed[key][0]:
                return False
            present, address = placed[key]
            if buffer.home.flat_for is None and present.data_ptr() != address:  # `state["exp_avg"].data = ...`
                return False
        return True

    def _place_state(self, state: dict[str, Any], key: str, *, buffer: FlatBuffer, index: int, is_whole: bool) -> None:
        present, place = state.get(key), (id(buffer), key)
        with torch.inference_mode(False):
            if place not in self._flat and not is_whole:
                dtype = self._dtype(buffer)
                state[key] = (
                    torch.zeros_like(buffer.values.segment(index), dtype=dtype)
                    if present is None
                    else present.to(dtype)
                )
                return
            flat = self._flat_state(buffer, key)
            view = buffer.own_range.segment(index, flat)
        if present is None:
            state[key] = view if buffer.home.is_zero(flat) else view.zero_()
        elif ordinary(present).data_ptr() != ordinary(view).data_ptr():
            state[key] = view.copy_(present)  # loaded, or made when other parameters had no gradient
        self._placed.setdefault((id(buffer), index), {})[key] = state[key], ordinary(view).data_ptr()

    def _flat_state(self, buffer: FlatBuffer, key: str) -> Tensor:
        place = (id(buffer), key)
        if place not in self._flat:
            self._flat[place] = buffer.home.zeros(self._dtype(buffer))
            self._note_tensors(place)
        return self._flat[place]

    def _note_tensors(self, place: tuple[int, str]) -> None:
        if is_in_memory(self._flat[place]):
            self._num_tensors[place] = num_tensors_in(self._flat[place])

    def _dtype(self, buffer: FlatBuffer) -> torch.dtype:
        return self._moments.dtype_for(buffer.values.stepped.dtype)

    def _steps_whole(self, buffer: FlatBuffer) -> bool:
        """Say whether this optimizer steps every element that this rank has of a buffer."""
        for index, param in enumerate(buffer.params):
            start, stop = buffer.own_range.place(index)
            if stop > start and not (id(param) in self._places and index in buffer.gradients.has_grad):
                return False
        return True


class _Planned(NamedTuple):
    """The step of a buffer, of all groups.

    Attributes:
        gradient: The average, which may be on its way from the device: (own range,).
        calls: They make the step, in order; none where this rank has no element: others may have some.
    """

    gradient: Tensor
    calls: list[Callable[[], None]]


class _Count(NamedTuple):
    counter: Tensor
    version: int
    number: int


class _CountsOnDevice:
    """Numbers of steps that are kept on a device, as PyTorch does with ``fused=True``, and known without a wait."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], _Count] = {}  # by (buffer, slot)

    def add_one(self, counters: Mapping[tuple[int, int], Tensor]) -> dict[tuple[int, int], int]:
        """Add one to counters; return their numbers. Waits for the device where somebody else has written some."""
        if not counters:
            return {}
        unknown = {key: counter for key, counter in counters.items() if not self._is_known(key, counter)}
        if unknown:
            for (key, counter), number in zip(
                unknown.items(), torch.stack(list(unknown.values())).tolist(), strict=True
            ):
                self.note(key, counter, int(number))
        torch._foreach_add_(list(counters.values()), 1)
        for key, counter in counters.items():
            self.note(key, counter, self._known[key].number + 1)
        return {key: self._known[key].number for key in counters}

    def note(self, key: tuple[int, int], counter: Tensor, number: int) -> None:
        """Store the number that a counter on the device holds, with the counter's version."""
        version = -1 if counter.is_inference() else counter._version  # those have none, and are read each time
        self._known[key] = _Count(counter, version, number)

    def _is_known(self, key: tuple[int, int], counter: Tensor) -> bool:
        known = self._known.get(key)
        if known is None or known.counter is not counter or counter.is_inference():
            return False
        return known.version == counter._version


def _stretched(state: Tensor, numel: int) -> Tensor:
    """Return ``numel`` elements from where a state begins."""
    return state.as_strided((numel,), (1,))


def _tails(buffer: FlatBuffer, indices: Iterable[int], origin: int) -> tuple[int, ...]:
    """Return the ends of parameters that PyTorch would not step in whole vectors, relative to ``origin``."""
    found: list[int] = []
    for index in indices:
        numel = buffer.layout.slots[index].numel
        start, stop = buffer.own_range.elements(index)
        body = max(numel - numel % vector_numel(), start)
        if body < stop:
            offset = buffer.own_range.place(index)[0] - start - origin
            found += [offset + body, offset + stop]
    return tuple(found)
