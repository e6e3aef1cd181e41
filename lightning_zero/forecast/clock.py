"""A modelled clock: the time of operations and calls of a rank, from the rates of a machine.

Note [The model]
    One stream computes. An operation takes the time of its arithmetic or of the memory that it reads and writes,
    whichever is longer, and not less than a kernel's launch. One other stream communicates: calls run one after the
    other, each begins when it is made or when the one before has ended, and lasts its latency and the bytes that a rank
    sends, at the rate of the slowest link between its ranks. A wait moves the computing stream to the end of the call;
    the time that it stands still is exposed. Operations on host memory, such as steps of offloaded optimizers, are made
    in the computing stream, at the rate of the host. Disks read and write one after the other, beside both streams; the
    computing one waits for what it has read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_zero.comm.traffic import CollectiveCall
from lightning_zero.flop_formulas import flops_of
from lightning_zero.forecast.live_bytes import OperationKind, kind_of

__all__ = ["Clock", "MachineRates", "SimulatedCall"]

_NO_WORK = (OperationKind.VIEW, OperationKind.COLLECTIVE, OperationKind.LIFTED)
_NO_KERNEL = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_local_scalar_dense")
)
_LOOKUPS = frozenset(("embedding", "gather", "index", "index_select"))


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """Rates of a machine, by which a simulated step is timed. The defaults are those of a node of H100.

    Attributes:
        tflops: 10**12 floating-point operations per second that matrix products in 16 bits reach.
        tflops_fp32: Those that products in fp32 and fp64 reach, without TF32 unless it is said.
        memory: GB per second that operations read and write on the device.
        link: GB per second that a rank sends to ranks of its node.
        network: GB per second that a rank sends to other nodes.
        host: GB per second of host memory, and of copies between it and the device.
        disk: GB per second that a rank reads from and writes to its disks.
        latency_us: Microseconds that a collective takes beside its bytes.
        launch_us: Microseconds that any operation takes at least.
    """

    tflops: float = 500.0
    tflops_fp32: float = 50.0
    memory: float = 2500.0
    link: float = 300.0
    network: float = 40.0
    host: float = 50.0
    disk: float = 5.0
    latency_us: float = 20.0
    launch_us: float = 3.0

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            is_time = one.name.endswith("_us")
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or not (value or is_time):
                raise ValueError(f"`{one.name}={value!r}` must be a number {'of at least' if is_time else 'above'} 0.")

    def seconds_of_call(self, call: CollectiveCall, ranks_per_node: int) -> float:
        """Return the time of a call."""
        is_inside = len({rank // ranks_per_node for rank in call.ranks}) == 1
        return self.latency_us / 1e6 + call.sent_bytes / 1e9 / (self.link if is_inside else self.network)

    def seconds_of_operation(self, flops: int, nbytes: int, *, on_host: bool, in_fp32: bool = False) -> float:
        """Return the time of an operation that reads and writes ``nbytes``; ``in_fp32``: its arguments are in fp32."""
        moving = nbytes / 1e9 / (self.host if on_host else self.memory)
        return max(flops / 1e12 / (self.tflops_fp32 if in_fp32 else self.tflops), moving, self.launch_us / 1e6)


@dataclass
class SimulatedCall:
    """A call in a simulated step; times are modelled seconds from the step's begin.

    Attributes:
        call: The call.
        phase: The part of the step that made it.
        made_s: When it was made.
        started_s: When the calls before it had ended.
        ended_s: When its result is there.
        exposed_s: How long the computation stood still for it.
    """

    call: CollectiveCall
    phase: str
    made_s: float
    started_s: float
    ended_s: float
    exposed_s: float = 0.0


class Clock:
    """The time of one rank; a ``Ledger`` of its calls.

    Call protocol: ``compute`` for every operation, ``add`` and ``end`` for every call, in their order.

    Args:
        rates: Of the machine.
        ranks_per_node: Ranks of a node, which are neighbours.
        phase: Returns the part of the step that runs.
    """

    def __init__(self, rates: MachineRates, ranks_per_node: int, phase: Callable[[], str]) -> None:
        self.now_s = 0.0
        self.flops = 0
        self.calls: list[SimulatedCall] = []
        self.phases_s: dict[str, float] = {}  # without waits for other ranks
        self._rates = rates
        self._ranks_per_node = ranks_per_node
        self._phase = phase
        self._link_free_s = 0.0
        self._disk_free_s = 0.0
        self._running: dict[str, deque[SimulatedCall]] = {}  # by name

    def restart(self) -> None:
        """Begin at zero; calls that run are forgotten, which a later wait finds ended."""
        self.now_s = self._link_free_s = self._disk_free_s = 0.0
        self.flops = 0
        self.calls, self.phases_s, self._running = [], {}, {}

    def compute(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, *, on_host: bool) -> None:
        """Run an operation."""
        kind = kind_of(func)
        if kind in _NO_WORK or func.overloadpacket.__name__ in _NO_KERNEL:
            return
        flops = flops_of(func, args, kwargs, result)
        nbytes = _bytes_moved(func, args, kwargs, result)
        self.flops += flops
        in_fp32 = bool(flops) and _are_fp32((args, kwargs))
        self._spend(self._rates.seconds_of_operation(flops, nbytes, on_host=on_host, in_fp32=in_fp32))

    def move(self, nbytes: int, *, on_host: bool) -> None:
        """Read and write a number of bytes in a part of an operation."""
        self._spend(nbytes / 1e9 / (self._rates.host if on_host else self._rates.memory))

    def transfer(self, nbytes: int) -> Callable[[], None]:
        """Begin to read or write bytes of a disk; return a function that waits for it."""
        self._disk_free_s = done_s = max(self.now_s, self._disk_free_s) + nbytes / 1e9 / self._rates.disk
        return lambda: self._spend(max(done_s - self.now_s, 0.0))

    def _spend(self, seconds: float) -> None:
        self.now_s += seconds
        phase = self._phase()
        self.phases_s[phase] = self.phases_s.get(phase, 0.0) + seconds

    def add(self, call: CollectiveCall) -> None:
        """Make a call."""
        started = max(self.now_s, self._link_free_s)
        self._link_free_s = started + self._rates.seconds_of_call(call, self._ranks_per_node)
        made = SimulatedCall(call, self._phase(), self.now_s, started, self._link_free_s)
        self.calls.append(made)
        self._running.setdefault(call.what, deque()).append(made)

    def end(self, what: str) -> None:
        """Wait for a call."""
        running = self._running.get(what)
        if not running:
            return
        made = running.popleft()
        made.exposed_s = max(made.ended_s - self.now_s, 0.0)
        self.now_s += made.exposed_s


def _bytes_moved(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that an operation reads and writes: its arguments and results; of a lookup those looked up."""
    made = sum(map(_nbytes, tree_leaves(result)))
    if func.overloadpacket.__name__ in _LOOKUPS:
        return 2 * made
    return made + sum(map(_nbytes, tree_leaves((args, kwargs))))


def _are_fp32(arguments: Any) -> bool:
    """Say whether the first tensor of numbers among arguments is in fp32."""
    tensors = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    first = next(tensors, None)
    return first is not None and first.itemsize >= 4


def _nbytes(leaf: Any) -> int:
    """Return the bytes of a tensor, at most those of its memory; 0 for anything else."""
    return min(leaf.numel() * leaf.itemsize, leaf.untyped_storage().nbytes()) if isinstance(leaf, Tensor) else 0
