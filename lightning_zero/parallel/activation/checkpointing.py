"""Activation checkpointing: which activations of a model are kept for the backward pass, and which are computed again.

A chosen module's ``forward`` runs inside ``torch.utils.checkpoint`` (non-reentrant); the module, its names, hooks and
parameters stay the same. A recomputation changes no module buffer: ``lightning_zero/parallel/module_state.py``.
Tensors of a call that are kept, besides its result:

=============  =====================================================================================================
``full``       its inputs (arXiv:1604.06174)
``selective``  its inputs and the results of matrix products and attention, the expensive part of the forward
               (arXiv:2205.05198, section 5)
``offload``    its inputs, in host memory; they come back while the block after it goes backward
``partition``  this rank's piece of its inputs; the ranks of a tensor group have one each (``partition.py``)
``auto``       as one of these, or all; which one is known after two steps (``forecast.py``)
=============  =====================================================================================================
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from lightning_zero.blocks import modules_of_classes, repeated_blocks
from lightning_zero.config import ActivationCheckpointing
from lightning_zero.parallel.activation.forecast import Forecast
from lightning_zero.parallel.activation.input_versions import with_first_inputs
from lightning_zero.parallel.activation.kept_products import is_product, keep_products
from lightning_zero.parallel.activation.partition import Gathering, PartitionedInputs, ReplicatedInputs
from lightning_zero.parallel.module_state import RunAgain, is_empty_cache, version_of
from lightning_zero.parallel.writable import writable
from lightning_zero.storage.copies import Copies, Landing
from lightning_zero.trees import tree_leaves, tree_map_only

__all__ = ["checkpoint_activations", "forecast_of"]

_Run = Callable[..., Any]


def checkpoint_activations(
    module: nn.Module, options: ActivationCheckpointing | None, tensor_ranks: Gathering | None = None
) -> list[nn.Module]:
    """Checkpoint the chosen modules below ``module`` in place, and no others; return them in the order of the model.

    Args:
        module: Is cut already if there is tensor parallelism.
        options: None: nothing is checkpointed.
        tensor_ranks: The tensor group of this rank, over which ``"partition"`` divides inputs; without it the policy
            keeps as much as ``"full"``.

    Raises:
        ValueError: A class in ``options.modules`` matches nothing, or ``module`` has no repeated blocks.
    """
    for child in module.modules():
        if isinstance(child.__dict__.get("forward"), _Forward):
            child.__dict__["forward"].remove()
    if options is None:
        return []
    chosen = [found for _, found in _chosen(module, options)]
    forecast = Forecast(options.budget_bytes, is_product) if options.policy == "auto" else None
    lane = _Lane(forecast)
    partition = PartitionedInputs(tensor_ranks) if options.policy == "partition" and tensor_ranks is not None else None
    for child in chosen:
        _Forward(child, options, lane=lane, partition=partition, forecast=forecast)
    return chosen


def forecast_of(module: nn.Module) -> Forecast | None:
    """Return the forecast that chooses the policy of modules below ``module``, where the option is ``"auto"``."""
    stand_ins = (child.__dict__.get("forward") for child in module.modules())
    return next((one.forecast for one in stand_ins if isinstance(one, _Forward)), None)


def _chosen(module: nn.Module, options: ActivationCheckpointing) -> Iterator[tuple[str, nn.Module]]:
    if options.modules is None:
        found = list(repeated_blocks(module))
        if not found:
            raise ValueError(
                f"`{type(module).__name__}` has no repeated blocks to checkpoint. Name classes:"
                " `activation_checkpointing=['Block']`."
            )
    else:
        if not options.modules:
            raise ValueError(
                f"`activation_checkpointing={options.modules!r}` names no class. Name some, as in `['Block']`, or leave"
                " the option out."
            )
        found = list(modules_of_classes(module, options.modules, option="activation_checkpointing"))
    outermost = [
        (name, child)
        for name, child in found
        if not any(child is not other and child in other.modules() for _, other in found)
    ]
    seen: dict[int, tuple[str, nn.Module]] = {id(child): (name, child) for name, child in reversed(outermost)}
    yield from list(reversed(seen.values()))[:: options.every]


class _Forward:
    """Stands in for the ``forward`` of one module. Copies of the module get a copy that is theirs."""

    def __init__(
        self,
        module: nn.Module,
        options: ActivationCheckpointing,
        *,
        lane: _Lane,
        partition: PartitionedInputs | None,
        forecast: Forecast | None,
    ) -> None:
        self.module = module
        self.forecast = forecast
        self._options = options
        self._lane = lane
        self._partition = partition
        self.stands_in_for = module.__dict__.get("forward")  # somebody else's stand-in
        self._unwritten: set[tuple[int, str]] = set()  # see `RunAgain`
        self._inputs = _Inputs()
        self._replicated = ReplicatedInputs()  # of the module's inputs
        module.forward = self

    def remove(self) -> None:
        """Let the module keep its activations again."""
        del self.module.forward
        if self.stands_in_for is not None:
            self.module.forward = self.stands_in_for

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.stands_in_for if self.stands_in_for is not None else partial(type(self.module).forward, self.module)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        policy: str = self._options.policy
        if self.forecast is not None:
            if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
                return run(*args, **kwargs)  # it keeps no memory
            if self.forecast.wants(self.module):
                return self.forecast.trace(self.module, run, *args, **kwargs)
            policy = self.forecast.policy or "offload"
        if policy == "none":
            return run(*args, **kwargs)
        if torch.compiler.is_compiling() and (self._partition is not None or policy == "offload"):
            return _run_eagerly(self, *args, **kwargs)
        if any(map(is_empty_cache, kwargs.values())):
            _tell_of_caches()
            kwargs = {name: None if is_empty_cache(value) else value for name, value in kwargs.items()}
        witnesses = _witnesses(self.module, args, kwargs)
        is_traced = torch.compiler.is_compiling()  # compiled code recomputes values, and writes to buffers once
        if not is_traced:
            run, args, kwargs = self._prepared(run, args, kwargs, policy)
        call = partial(
            checkpoint,
            use_reentrant=False,
            preserve_rng_state=self._options.preserve_rng_state,
        )
        if policy == "selective":
            call = partial(call, context_fn=keep_products)
        elif policy == "offload":
            run, args, kwargs = self._lane.send(run, args, kwargs, self._inputs)
        prepare = partial(self._prepared, policy=policy) if is_traced else None
        kwargs = {_ASIDE + name: value for name, value in kwargs.items()}
        return call(_WithWitnesses(run, prepare), witnesses, *args, **kwargs)

    def _prepared(self, run: _Run, args: Any, kwargs: Any, policy: str) -> tuple[_Run, Any, Any]:
        """Return a call that may be run again, with its arguments."""
        run = RunAgain(self.module, run, self._unwritten)
        if self._partition is not None:
            run, args, kwargs = self._partition.send(run, args, kwargs, self._replicated)
        if policy != "offload":
            run, args, kwargs = with_first_inputs(run, type(self.module).__name__, args, kwargs)
        return run, args, kwargs


# -- Random numbers ----------------------------------------------------------------------------------------------------


def _witnesses(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return an empty tensor on each device of a call.

    ``checkpoint`` restores the random state of devices that it finds among the positional arguments, and of no others;
    a tensor may be an argument by name, or lie in an object that only the module knows.
    """
    places = [*tree_leaves((args, kwargs)), next(module.parameters(), None)]
    devices: list[torch.device] = []
    for one in places:
        is_placed = isinstance(one, Tensor) and not isinstance(one, FakeTensor)
        if is_placed and one.device.type not in ("cpu", "meta") and one.device not in devices:
            devices.append(one.device)
    return [torch.empty(0, device=device) for device in devices]


_ASIDE = "lightning_zero: "  # in front of names of arguments, some of which ``checkpoint`` would take for itself


class _WithWitnesses:
    """A call that is given an empty tensor on each of its devices as well.

    Args:
        run: The call.
        prepare: Of a call that was traced: makes it one that may be run again. Where the graph breaks in the module
            itself, its forward and its recomputation are not compiled.
    """

    def __init__(self, run: _Run, prepare: Callable[..., tuple[_Run, Any, Any]] | None) -> None:
        self._run = run
        self._prepare = prepare
        self._prepared: tuple[Any, Any] | None = None  # arguments for all runs; `checkpoint` has the caller's own

    def __call__(self, witnesses: list[Tensor], /, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name.removeprefix(_ASIDE): value for name, value in kwargs.items()}
        if self._prepare is not None and not torch.compiler.is_compiling():
            prepare, self._prepare = self._prepare, None
            self._run, *prepared = prepare(self._run, args, kwargs)
            self._prepared = (prepared[0], prepared[1])
        if self._prepared is not None:
            args, kwargs = self._prepared
        return self._run(*args, **kwargs)


# -- Graphs ------------------------------------------------------------------------------------------------------------


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_eagerly(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Make a call between two graphs: gathers, and copies to the host, are not part of one."""
    return call(*args, **kwargs)


@cache
def _tell_of_caches() -> None:
    """Say once that a cache of keys and values stays empty."""
    warnings.warn(
        "`activation_checkpointing` leaves the cache of keys and values empty that the model makes in training"
        " (`use_cache=True`): it would keep tensors that are to be recomputed. Set `use_cache=False`, or do not use the"
        " `past_key_values` that a checkpointed forward returns.",
        stacklevel=2,
    )


# -- Offload -----------------------------------------------------------------------------------------------------------


class _Lane:
    """Moves the inputs of calls to host memory and back; the backward of a call fetches those of the call before it."""

    def __init__(self, forecast: Forecast | None = None) -> None:
        self._forecast = forecast
        self._parked: list[weakref.ref[_Parked]] = []  # in the order of the forward; alive as long as their graph
        self._copies: dict[torch.device, Copies] = {}

    def __deepcopy__(self, memo: Any) -> _Lane:
        return _Lane(copy.deepcopy(self._forecast, memo))

    def __reduce__(self) -> Any:
        return _Lane, (self._forecast,)

    def send(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], inputs: _Inputs
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the call with its tensors offloaded; the first run uses the originals, later ones fetched copies."""
        parked = _Parked(self, inputs)
        first = [(args, kwargs)]  # with the caller's own lists and dictionaries, which the call may fill
        args, kwargs = tree_map_only(Tensor, parked.add, (args, kwargs))
        self._parked = [*(one for one in self._parked if one() is not None), weakref.ref(parked)]
        if self._forecast is not None:
            self._forecast.note_waiting(len(self._parked))

        def fetching(*args: Any, **kwargs: Any) -> Any:
            with parked.present():
                if first:
                    args, kwargs = first.pop()
                else:
                    args, kwargs = tree_map_only(_Slot, parked.take, (args, kwargs))
                return run(*args, **kwargs)

        return fetching, args, kwargs

    def before(self, parked: _Parked) -> _Parked | None:
        """Return the call before this one, if its graph is alive; it goes backward next."""
        alive = [one for one in (ref() for ref in self._parked) if one is not None]
        place = alive.index(parked) if parked in alive else 0
        return alive[place - 1] if place else None

    def copies(self, device: torch.device) -> Copies:
        """Return the copy streams of a device."""
        if device not in self._copies:
            self._copies[device] = Copies(device)
        return self._copies[device]


class _Slot:
    """Stands for a tensor among the arguments of a call."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Inputs:
    """Whether the calls of a module change their input tensors in place.

    A recomputation needs the inputs as the call found them, so later writes wait for their copies to the host:
    code behind the call always, code inside where a call has been seen to do it. The first call is not known.
    """

    def __init__(self) -> None:
        self.may_change = True
        self._num_calls = 0

    def note(self, tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
        """Take note of a call.

        Raises:
            RuntimeError: It has changed an input, and no call before it has.
        """
        is_changed = [version_of(tensor) for tensor in tensors] != list(versions)
        if is_changed and not self.may_change:
            raise RuntimeError(
                "A forward has changed one of its inputs in place, and the module's forwards before it have not. With"
                " `activation_checkpointing` that offloads the input is being copied to the host meanwhile. Compute the"
                " value in a new tensor (`x = x + y`), or leave the module out of `activation_checkpointing`."
            )
        self._num_calls += 1
        self.may_change = is_changed or (self.may_change and self._num_calls > 1)


class _Parked:
    """The input tensors of one call: themselves in the first run, then copies in host memory, and copies of those."""

    def __init__(self, lane: _Lane, inputs: _Inputs) -> None:
        self._lane = lane
        self._inputs = inputs
        self._live: list[Tensor] | None = []
        self._host: list[tuple[Tensor, Landing]] = []
        self._places: list[tuple[torch.device, bool]] = []
        self._fetched: list[tuple[Tensor, Landing]] | None = None
        self._taken: dict[int, Tensor] = {}  # of these

    def add(self, tensor: Tensor) -> _Slot:
        assert self._live is not None
        for number, known in enumerate(self._live):
            if known is tensor:
                return _Slot(number)
        self._live.append(tensor)
        self._places.append((tensor.device, tensor.requires_grad))
        return _Slot(len(self._live) - 1)

    @contextmanager
    def present(self) -> Iterator[None]:
        """Have the tensors on their devices for one run of the call."""
        try:
            if self._live is not None:
                with self._kept(self._live):
                    yield
                return
            self.fetch()
            before = self._lane.before(self)
            if before is not None:
                before.fetch()
            for _, landing in self._fetched or ():
                landing.wait()
            yield
        finally:
            self._live = self._fetched = None
            self._taken.clear()

    @contextmanager
    def _kept(self, tensors: list[Tensor]) -> Iterator[None]:
        """Copy the tensors to the host as they are now, while the call runs."""
        self._host = [self._to_host(tensor.detach()) for tensor in tensors]
        if self._inputs.may_change:
            self._hold_back_writes()
        on_device = [tensor for tensor in tensors if tensor.device.type != "cpu"]
        versions = [version_of(tensor) for tensor in on_device]
        yield
        self._inputs.note(on_device, versions)
        self._hold_back_writes()

    def _hold_back_writes(self) -> None:
        """Let later work of the devices wait for the copies to the host."""
        for _, landing in self._host:
            landing.wait()

    def take(self, slot: _Slot) -> Tensor:
        assert self._fetched is not None
        if slot.number not in self._taken:
            leaf = self._fetched[slot.number][0].detach().requires_grad_(self._places[slot.number][1])
            self._taken[slot.number] = writable(leaf)
        return self._taken[slot.number]

    def fetch(self) -> None:
        """Start copying to the devices, once."""
        if self._fetched is None and self._live is None:
            places = zip(self._host, self._places, strict=True)
            self._fetched = [self._to_device(host, landing, device) for (host, landing), (device, _) in places]

    def _to_device(self, host: Tensor, landing: Landing, device: torch.device) -> tuple[Tensor, Landing]:
        return self._lane.copies(device).bring(host, landing)

    def _to_host(self, tensor: Tensor) -> tuple[Tensor, Landing]:
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        return host, self._lane.copies(tensor.device).down(host, tensor)
