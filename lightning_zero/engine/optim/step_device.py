"""The processor on which an offloaded unit is stepped: the host, or a device that states are streamed to (ADR 0028).

Note [Which is faster]
    The host steps at the speed of its memory. The device steps in no time, and its time is that of the copies: masters,
    moments and gradients up, masters and moments down, both at once. Each unit takes the faster way. The two processors
    round differently in the last bit, so the choice is made once, for all ranks, kept in checkpoints and used again
    when training is resumed. Neighbours share the memory of a host and its links, so all ranks measure at the same
    time, and the slowest counts: a step is done when the last rank is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.optim.moments import MomentFormat
from lightning_zero.engine.units.unit import Unit
from lightning_zero.storage.copies import Copies
from lightning_zero_ops import adamw

__all__ = ["Rates", "StepDevice", "StepDevices", "choose_step_device", "fastest_s", "measure_rates"]

StepDevice = Literal["cpu", "cuda"]
Meet = Callable[..., object]  # called with an error or without

_SAMPLE_NUMEL = 2**24  # 64 MiB of fp32: more than the caches hold
_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speeds of a machine, per second.

    Attributes:
        host_step: Elements that the host steps.
        up: Bytes from page-locked host memory to the device.
        down: Bytes back.
    """

    host_step: float
    up: float
    down: float


def choose_step_device(numel: int, up_bytes: int, down_bytes: int, rates: Rates) -> StepDevice:
    """Return where ``numel`` elements are stepped sooner; see Note [Which is faster]."""
    streaming_s = max(up_bytes / rates.up, down_bytes / rates.down)
    return "cuda" if streaming_s < numel / rates.host_step else "cpu"


def measure_rates(device: torch.device, meet: Meet = lambda error=None: None) -> Rates:
    """Return the rates of this rank; takes about a second.

    Args:
        device: Where the model computes.
        meet: Called before each measured call, and with an error if this rank cannot make them; returns when all ranks
            have come to theirs, or raises on all of them.
    """
    try:
        values = [torch.zeros(_SAMPLE_NUMEL, dtype=torch.float32, device="cpu") for _ in range(4)]
        host = torch.zeros(_SAMPLE_NUMEL, dtype=torch.float32, pin_memory=device.type == "cuda", device="cpu")
        there = torch.zeros(_SAMPLE_NUMEL, dtype=torch.float32, device=device)
    except RuntimeError as error:  # no memory is left
        meet(error)
        raise
    options = {"lr": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "l2": 0.0, "tails": ()}

    def step() -> None:
        param, exp_avg, exp_avg_sq, grad = values
        adamw.pytorch_step_(param, exp_avg, exp_avg_sq, None, grad, None, 1, **options)  # type: ignore[arg-type]

    copies = Copies(device)
    return Rates(
        host_step=_SAMPLE_NUMEL / fastest_s(step, meet),
        up=host.nbytes / fastest_s(lambda: copies.up(there, host).finish(), meet),
        down=host.nbytes / fastest_s(lambda: copies.down(host, there).finish(), meet),
    )


def fastest_s(call: Callable[[], None], meet: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few calls, before each of which ``meet`` is called."""
    seconds = []
    for _ in range(_REPEATS):
        meet()
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


class StepDevices:
    """The choice for every offloaded unit of an engine.

    Args:
        units: The engine's units.
        device: Where the model computes.
        moments: The format of the moments.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device, moments: MomentFormat) -> None:
        self._units = [unit for unit in units if any(buffer.home.is_apart for buffer in unit.buffers)]
        self._device = device
        self._moments = moments
        self.rates: Rates | None = None  # with a choice that was measured

    def choose(
        self,
        fixed: StepDevice | None,
        communicator: Communicator,
        measure: Callable[[torch.device, Meet], Rates] = measure_rates,
    ) -> None:
        """Choose as the option says, or by measured rates. Collective: all ranks.

        Raises:
            ValueError: ``fixed`` is a device that the model does not compute on.
        """
        if fixed == "cuda" and self._device.type != "cuda":
            raise ValueError(
                f"`Offload(step_device='cuda')` needs a model on a CUDA device, got `{self._device}`. Use 'cpu' or"
                " None."
            )
        if fixed is None and self._device.type == "cuda" and self._units:
            self._choose_by_rates(communicator, measure)
        elif fixed is not None:
            self.use({unit.name: fixed for unit in self._units})

    def _choose_by_rates(self, communicator: Communicator, measure: Callable[[torch.device, Meet], Rates]) -> None:
        def meet(error: Exception | None = None) -> None:
            if communicator.any_is(error is not None, "start of a measurement"):
                told = communicator.gather_objects(error and str(error), "errors of a measurement")
                rank, text = next((rank, text) for rank, text in enumerate(told) if text)
                raise RuntimeError(
                    f"Where offloaded units are stepped could not be measured on rank {rank}: {text}. Name the device:"
                    " `Offload(step_device='cpu')` or `Offload(step_device='cuda')`."
                ) from error

        measured = measure(self._device, meet)
        found = communicator.gather_objects(measured, "rates of the ranks")
        self.rates = rates = Rates(
            host_step=min(one.host_step for one in found),
            up=min(one.up for one in found),
            down=min(one.down for one in found),
        )
        chosen: dict[str, StepDevice] = {}
        for unit in self._units:
            numel, up_bytes, down_bytes = self._costs(unit)
            chosen[unit.name] = choose_step_device(numel, up_bytes, down_bytes, rates)
        self.use(chosen)

    def _costs(self, unit: Unit) -> tuple[int, int, int]:
        """Return elements, and bytes up and down, of a rank's step."""
        numel = up_bytes = down_bytes = 0
        for buffer in unit.buffers:
            if buffer.home.is_apart:
                own = buffer.own_range.numel
                states = own * (buffer.kind.master.itemsize + self._moments.itemsize)
                numel, down_bytes = numel + own, down_bytes + states
                up_bytes += states + own * buffer.kind.reduce.itemsize
        return numel, up_bytes, down_bytes

    def use(self, chosen: Mapping[str, StepDevice]) -> None:
        """Step units, by name, where the choice says; those that it does not know stay.

        Raises:
            ValueError: A device is not known.
        """
        for unit in self._units:
            place = chosen.get(unit.name)
            if place is None:
                continue
            if place not in get_args(StepDevice):
                raise ValueError(
                    f"`{place!r}` is not a device for the steps of unit `{unit.name}`. Use 'cpu' or 'cuda'."
                )
            streams = place == "cuda" and self._device.type == "cuda"
            for buffer in unit.buffers:
                buffer.home.steps_on = buffer.whole.flat.device if streams and buffer.home.is_apart else None

    @property
    def chosen(self) -> dict[str, StepDevice]:
        """The processor of each offloaded unit's step, by name."""
        return {
            unit.name: "cuda" if any(buffer.home.steps_on is not None for buffer in unit.buffers) else "cpu"
            for unit in self._units
        }

    def plan(self) -> list[str]:
        """Return a line that says where offloaded units are stepped; none without them."""
        places = list(self.chosen.values())
        if not places:
            return []
        counts = ", ".join(f"{places.count(place)} on {place}" for place in get_args(StepDevice) if place in places)
        if self.rates is None:
            return [f"steps of offloaded units: {counts}"]
        rates = self.rates
        return [
            f"steps of offloaded units: {counts} (measured: host {rates.host_step / 1e9:.2f}e9 elements/s, up"
            f" {rates.up / 1e9:.1f} GB/s, down {rates.down / 1e9:.1f} GB/s)"
        ]
