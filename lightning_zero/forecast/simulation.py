"""A simulated step of one rank: its calls in order, its memory over time, and a modelled time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from lightning_zero.forecast.clock import MachineRates, SimulatedCall
from lightning_zero.forecast.report import aligned, new_figure

__all__ = ["Sample", "Simulation", "draw_simulation", "simulation_json", "simulation_text"]

_MIB, _GIB = 2**20, 2**30
_COLOURS = {"forward": "#9fc5e8", "backward": "#f6c89f", "step": "#b6d7a8"}
_MOST_POINTS = 4000  # of a picture
_HEAD = ("#", "phase", "call", "sent MiB", "ranks", "made ms", "begins", "ends", "exposed")


class Sample(NamedTuple):
    """Memory of the device at one moment.

    Attributes:
        at_s: Modelled seconds from the begin of the step.
        nbytes: Bytes.
        phase: The part of the step.
    """

    at_s: float
    nbytes: int
    phase: str


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A training step as one rank of a pretended world makes it.

    Attributes:
        rank: The rank.
        world_size: Number of ranks.
        ranks_per_node: Ranks of a node.
        precision: As in the Trainer.
        rates: By which the step was timed.
        calls: To other ranks, in the order in which they are made.
        memory: Bytes on the device over the step.
        peak_bytes: The most.
        at_peak: Bytes at that moment by kind, as in ``SettingForecast``.
        phase: The part of the step at that moment.
        module: The innermost module that ran then, or whose backward did.
        seconds: Modelled time of the step.
        phases: Modelled time of its parts without waits for other ranks: ``"forward"``, ``"backward"``, ``"step"``,
            and ``""`` between.
        flops: Operations of matrix products, convolutions and attention, recomputation included.
        device: Bytes on the device at the end of the backward, by kind, without activations.
        host: Of these kinds in host memory; also ``windows``, and the most of ``activations``, as in
            ``SettingForecast``.
        disk: Of these kinds on disks.
        notes: Sentences about what was assumed.
    """

    rank: int
    world_size: int
    ranks_per_node: int
    precision: str
    rates: MachineRates
    calls: Sequence[SimulatedCall]
    memory: Sequence[Sample]
    peak_bytes: int
    at_peak: Mapping[str, int]
    phase: str
    module: str
    seconds: float
    phases: Mapping[str, float]
    flops: int
    device: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)
    disk: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes that the rank sends, by kind of call."""
        sent: dict[str, int] = {}
        for one in self.calls:
            sent[one.call.kind] = sent.get(one.call.kind, 0) + one.call.sent_bytes
        return sent

    @property
    def exposed_s(self) -> float:
        """Modelled time in which the computation waits for other ranks."""
        return sum(one.exposed_s for one in self.calls)

    @property
    def utilisation(self) -> float:
        """The share of ``tflops`` that the step uses."""
        return self.flops / 1e12 / self.tflops / self.seconds if self.seconds else 0.0

    @property
    def tflops(self) -> float:
        """The rate of products in the precision: ``rates.tflops``, or ``rates.tflops_fp32``."""
        return self.rates.tflops_fp32 if self.precision in ("32-true", "64-true") else self.rates.tflops


def simulation_text(simulation: Simulation, *, lists_calls: bool = True) -> str:
    """Return a simulation in words, with a row per call."""
    one = simulation
    words = [
        f"rank {one.rank} of {one.world_size}, {one.ranks_per_node} per node, precision {one.precision}",
        "rates: " + ", ".join(f"{name} {value:g}" for name, value in asdict(one.rates).items()),
        f"peak {one.peak_bytes / _GIB:.3f} GiB in {one.phase} {one.module}".rstrip(),
        "  " + ", ".join(f"{kind} {nbytes / _GIB:.3f}" for kind, nbytes in one.at_peak.items() if nbytes),
        *_away(one),
        f"modelled step {one.seconds * 1e3:.3f} ms: "
        + ", ".join(f"{name or 'between'} {seconds * 1e3:.3f}" for name, seconds in one.phases.items())
        + f", exposed communication {one.exposed_s * 1e3:.3f}",
        f"{one.flops / 1e12:.4f} TFLOP, {one.utilisation:.1%} of {one.tflops:g} TFLOP/s",
        f"{len(one.calls)} calls; MiB sent: "
        + (", ".join(f"{kind} {nbytes / _MIB:.3f}" for kind, nbytes in one.sent_bytes.items()) or "none"),
        *one.notes,
    ]
    if lists_calls and one.calls:
        words += ["", *aligned([_HEAD, *(_row(number, call) for number, call in enumerate(one.calls, 1))], left=(1, 2))]
    return "\n".join(words)


def _away(one: Simulation) -> Iterator[str]:
    """Yield a line with the bytes in host memory and on disks, if there are any."""
    sizes = {"host": sum(one.host.values()), "disk": sum(one.disk.values())}
    if any(sizes.values()):
        yield ", ".join(f"{name} {nbytes / _GIB:.3f} GiB" for name, nbytes in sizes.items() if nbytes)


def _row(number: int, one: SimulatedCall) -> tuple[str, ...]:
    times = (one.made_s, one.started_s, one.ended_s, one.exposed_s)
    sent = f"{one.call.sent_bytes / _MIB:.3f}"
    return (str(number), one.phase, one.call.what, sent, _ranks(one.call.ranks), *(f"{at * 1e3:.3f}" for at in times))


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in few characters: ``0-7``, or ``0-56 by 8``."""
    if len(ranks) < 3:
        return ",".join(map(str, ranks))
    by = ranks[1] - ranks[0]
    if list(ranks) != list(range(ranks[0], ranks[-1] + 1, by)):
        return ",".join(map(str, ranks))
    return f"{ranks[0]}-{ranks[-1]}" + (f" by {by}" if by > 1 else "")


def simulation_json(simulation: Simulation) -> str:
    """Return a simulation as JSON, in bytes and seconds."""
    content = asdict(simulation)
    content["calls"] = [{**one.pop("call"), **one} for one in content["calls"]]
    content["memory"] = [one._asdict() for one in simulation.memory]
    extra = {"sent_bytes": simulation.sent_bytes, "exposed_s": simulation.exposed_s}
    return json.dumps({**content, **extra, "utilisation": simulation.utilisation}, indent=1)


def draw_simulation(simulation: Simulation, path: Path) -> None:
    """Write a picture: memory over the modelled time of the step, and the calls below it.

    Raises:
        ValueError: The folder does not exist, or the ending of the name is no format of a picture.
        RuntimeError: matplotlib is not installed.
    """
    figure = new_figure(path, (9, 4.5))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    samples = _thinned(simulation.memory)
    above.step([one.at_s * 1e3 for one in samples], [one.nbytes / _GIB for one in samples], where="post", color="black")
    named: set[str] = set()
    for phase, begin, end in _spans(simulation):
        label = None if phase in named else phase
        named.add(phase)
        above.axvspan(begin * 1e3, end * 1e3, color=_COLOURS[phase], alpha=0.5, label=label)
    above.set_ylabel("GiB on the device")
    above.set_ylim(bottom=0)
    above.legend(loc="upper left", fontsize="small")
    for place, kind in enumerate(simulation.sent_bytes):
        found = [one for one in simulation.calls if one.call.kind == kind]
        below.broken_barh(
            [(one.started_s * 1e3, max(one.ended_s - one.started_s, 1e-6) * 1e3) for one in found], (place - 0.4, 0.8)
        )
    below.set_yticks(range(len(simulation.sent_bytes)), list(simulation.sent_bytes), fontsize="small")
    below.set_xlabel(f"modelled ms of a step, rank {simulation.rank} of {simulation.world_size}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _spans(simulation: Simulation) -> list[tuple[str, float, float]]:
    """Return the parts of a step in their order, with begin and end; those between them have no name."""
    spans: list[tuple[str, float, float]] = []
    samples = simulation.memory
    for place, one in enumerate(samples):
        end = samples[place + 1].at_s if place + 1 < len(samples) else simulation.seconds
        if spans and spans[-1][0] == one.phase:
            spans[-1] = (one.phase, spans[-1][1], end)
        else:
            spans.append((one.phase, one.at_s, end))
    return [span for span in spans if span[0]]


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """Return at most a number of samples; of neighbours the one with the most bytes."""
    width = -(-len(samples) // _MOST_POINTS)
    parts = [samples[start : start + width] for start in range(0, len(samples), max(width, 1))]
    return [max(part, key=lambda one: one.nbytes) for part in parts]
