"""The engine's memory, traffic and plan, in numbers and in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, get_args

import torch
from torch.optim import Optimizer

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.buffers.buffer import FlatBuffer
from lightning_zero.engine.buffers.group import NodeLevels
from lightning_zero.engine.optim.flat_step import BufferSlot
from lightning_zero.engine.optim.moments import MomentFormat
from lightning_zero.engine.optim.planned_states import PlannedStates
from lightning_zero.engine.units.lowering import Lowering
from lightning_zero.engine.units.unit import Unit
from lightning_zero.sharding import Sharding, ShardingScope
from lightning_zero.storage.residence import is_in_memory
from lightning_zero.storage.store import Accounts, DeviceStore, Kind

__all__ = ["EngineStats", "Statistics", "away_bytes"]


@dataclass(frozen=True)
class EngineStats:
    """The engine's memory and traffic on this rank.

    Attributes:
        stage: ZeRO stage.
        world_size: Ranks that share the model.
        num_units: Units with parameters.
        memory: Bytes that are alive on this rank: ``parameters``, ``gradients``, ``optimizer`` (masters and states),
            ``gathered`` (whole parameters at stage 3).
        host: Bytes of these kinds that are offloaded to host memory.
        disk: Bytes of these kinds that are offloaded to disks.
        traffic: Bytes this rank has sent since ``reset_stats``: ``all_gather``, ``reduce_scatter``, ``broadcast``
            (buffers), ``control``; ``tensor`` (activations of a tensor group, but for those of compiled code) and
            ``experts`` (their exchanges) are not in ``wait_s``. Messages between pipeline stages are not counted.
        across_nodes: Those of them that were sent by calls over nodes, where ``stage`` has a scope of a node; else
            nothing is known, and they are zero.
        calls: Number of calls of each of these.
        wait_s: Seconds this rank has waited for collectives: the host, and over NCCL the GPU, as far as it has come.
        peak_gathered: Most bytes of whole parameters that were alive at once.
    """

    stage: int
    world_size: int
    num_units: int
    memory: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]
    traffic: dict[str, int]
    across_nodes: dict[str, int]
    calls: dict[str, int]
    wait_s: float
    peak_gathered: int


def away_bytes(stats: EngineStats) -> dict[str, float]:
    """Return the bytes that are offloaded, by place and kind, without those of which there are none."""
    places = {"host": stats.host, "disk": stats.disk}
    return {f"{place}_{kind}": float(n) for place, held in places.items() for kind, n in held.items() if n}


class Statistics:
    """Counts for one engine.

    Args:
        sharding: The option ``stage``.
        units: The engine's units.
        places: Where its parameters lie, by ``id``.
        communicator: That of the shards.
        store: The store on the device.
        stores: The stores away from the device: ``"host"``, and ``"disk"`` if something is offloaded to disks.
        prefetch: Units that are prefetched at a time.
        moments: The format of the moments of AdamW and Adam.
        lowering: Which matrices compute in 16 bits.
    """

    def __init__(
        self,
        sharding: Sharding,
        units: Sequence[Unit],
        places: Mapping[int, BufferSlot],
        *,
        communicator: Communicator,
        store: DeviceStore,
        stores: Mapping[str, Accounts],
        prefetch: int,
        moments: MomentFormat,
        lowering: Lowering,
    ) -> None:
        self._sharding = sharding
        self._units = units
        self._places = places
        self._communicator = communicator
        self._store = store
        self._host = stores["host"]
        self._disk = stores.get("disk")
        self._prefetch = prefetch
        self._moments = moments
        self._lowering = lowering

    def take(self, optimizers: Iterable[Optimizer]) -> EngineStats:
        """Return bytes held, bytes sent and seconds waited on this rank. No collective."""
        memory, host = self._held(self._store), self._held(self._host)
        for optimizer in optimizers:
            device_bytes, host_bytes = self._state_bytes(optimizer)
            memory["optimizer"] += device_bytes
            host["optimizer"] += host_bytes
        traffic = dict.fromkeys(("all_gather", "reduce_scatter", "broadcast", "control"), 0)
        return EngineStats(
            stage=self._sharding.stage,
            world_size=self._communicator.world_size,
            num_units=sum(1 for unit in self._units if unit.buffers),
            memory=memory,
            host=host,
            disk=self._held(self._disk),
            traffic={**traffic, **self._communicator.sent_bytes},
            across_nodes={key: self._communicator.across_nodes[key] for key in ("all_gather", "reduce_scatter")},
            calls={**traffic, **self._communicator.calls},
            wait_s=self._communicator.wait_s,
            peak_gathered=self._store.peak("gathered"),
        )

    def reset(self) -> None:
        """Start counting traffic and peaks anew."""
        self._communicator.reset_stats()
        self._store.reset_peak()

    def plan(self, optimizers: Iterable[Optimizer] = ()) -> list[str]:
        """Return about six lines of text: units, dtypes, memory and traffic; states are those of the optimizers."""
        buffers = [buffer for unit in self._units for buffer in unit.buffers]
        trained = [buffer for buffer in buffers if buffer.kind.trained]
        total = sum(map(_whole_numel, buffers))
        largest = max(self._units, key=lambda unit: unit.numel)
        memory, states = self._held(self._store), PlannedStates.of(optimizers, self._places, self._moments)
        grad_bytes = sum(_gradient_bytes(buffer) for buffer in trained)
        leaving = [buffer for buffer in trained if buffer.sharding.grads]
        host_grads = sum(_gradient_bytes(buffer) for buffer in leaving if buffer.home.where == "host")
        disk_grads = sum(_gradient_bytes(buffer) for buffer in leaving if buffer.home.where == "disk")
        grads, params = [_sent_gradients(buffer) for buffer in trained], [_sent_params(buffer) for buffer in buffers]
        sent_grads = sum(map(sum, grads))
        sent = sent_grads + sum(map(sum, params))
        across = sum(one.across_nodes for one in (*grads, *params))
        gathered = "parameters" if self._sharding.stage else "their average"
        each = sum(map(_sent_in_each_backward, trained)) + sum(
            one.inside for one, buffer in zip(params, buffers, strict=True) if buffer.sharding.params
        )
        dtypes = sorted({_short(buffer.kind.compute) for buffer in buffers})
        reduce = sorted({_short(buffer.kind.reduce) for buffer in trained})
        return [
            f"ZeRO stage {self._sharding.stage} on {self._communicator.world_size} rank(s),"
            f" {self._communicator.device.type}: {total:,} parameters, {sum(map(_whole_numel, trained)):,} trained",
            f"units: {sum(1 for unit in self._units if unit.buffers)}, the largest `{largest.name}`"
            f" with {largest.numel:,} parameters; prefetch {self._prefetch}" + self._places_of_units(),
            f"dtypes: compute {', '.join(dtypes)}; gradients {', '.join(reduce) or 'none'}"
            + ("" if self._moments.is_pytorchs else f"; moments {self._moments.name}")
            + self._lowering.plan(),
            "memory per rank: "
            + self._at("device", memory, states, grad_bytes - host_grads - disk_grads)
            + self._away("host", self._held(self._host), states, host_grads)
            + ("" if self._disk is None else self._away("disk", self._held(self._disk), states, disk_grads))
            + ("" if not states.unknown else f"; states of {', '.join(sorted(states.unknown))} are not counted"),
            f"sent per rank and step: {_size(sent)}"
            f" (gradients {_size(sent_grads)}, {gathered} {_size(sent - sent_grads)})"
            + (f", and {_size(each)} more in each further micro-batch" if each else "")
            + (f", {_size(sent - across)} inside a node and {_size(across)} across nodes" if across else ""),
            *self._nodes(buffers),
        ]

    def _nodes(self, buffers: Sequence[FlatBuffer]) -> list[str]:
        """Say over which ranks tensors are kept sharded, if not all are over all ranks or none: a line per group."""
        groups = {buffer.nodes: buffer for buffer in buffers if buffer.nodes is not None}
        if not groups:
            return [] if not self._sharding.has_nodes else [f"scopes: {self._sharding} is one level on these ranks"]
        return [self._scopes(buffer, nodes) for nodes, buffer in groups.items()]

    def _scopes(self, buffer: FlatBuffer, nodes: NodeLevels) -> str:
        inner, outer = nodes.inner, nodes.outer
        over = {
            ShardingScope.NONE: "on each rank",
            ShardingScope.NODE: f"over the {inner.world_size} ranks of a node",
            ShardingScope.WORLD: f"over {inner.world_size * outer.world_size} ranks",
        }
        sharding = buffer.sharding
        return (
            f"scopes: parameters {over[sharding.params]}, gradients {over[sharding.grads]}, optimizer states"
            f" {over[sharding.optim]}; {outer.world_size} nodes, rank {self._communicator.rank} in that of"
            f" {_ranks(inner.ranks)}, its ranges reduced with {_ranks(outer.ranks)}"
        )

    def _places_of_units(self) -> str:
        """Say where the states of units are, if not all are on the device."""
        units = [{buffer.home.where for buffer in unit.buffers if buffer.kind.trained} for unit in self._units]
        on_disk = sum("disk" in places for places in units)
        in_host = sum("host" in places and "disk" not in places for places in units)
        if not (on_disk or in_host):
            return ""
        here = sum(1 for places in units if places) - on_disk - in_host
        return f"; states of {here} units on the device, {in_host} in host memory, {on_disk} on disks"

    def _at(self, place: str, held: Mapping[str, int], states: PlannedStates, grads: int) -> str:
        """Name the bytes in one place by kind, and on the device their sum, if optimizers are known."""
        gathered = self._gathered_estimate() if place == "device" and self._sharding.stage == 3 else 0
        total = held["parameters"] + held["optimizer"] + grads + states.nbytes[place] + gathered
        return (
            f"parameters {_size(held['parameters'])}, masters {_size(held['optimizer'])}"
            + (f", optimizer states {_size(states.nbytes[place])}" if states.are_known else "")
            + f", gradients {_size(grads)}"
            + (f", gathered at most about {_size(gathered)}" if gathered else "")
            + (f", in all {_size(total)}" if states.are_known and place == "device" else "")
        )

    def _away(self, place: str, held: Mapping[str, int], states: PlannedStates, grads: int) -> str:
        """Name the bytes that are offloaded to a place."""
        where = {"host": "in host memory", "disk": "on disks"}[place]
        is_used = place == "disk" or any(held.values()) or states.nbytes[place]
        return f"; {where}: {self._at(place, held, states, grads)}" if is_used else ""

    @staticmethod
    def _held(store: Accounts | None) -> dict[str, int]:
        """Return the bytes that are alive, by kind."""
        return {kind: 0 if store is None else store.live(kind) for kind in get_args(Kind)}

    def _gathered_estimate(self) -> int:
        sizes = [sum(buffer.whole.flat.nbytes for buffer in unit.buffers) for unit in self._units]
        root, others = sizes[0], sorted(sizes[1:], reverse=True)
        is_sharded = any(unit.is_sharded_between_uses for unit in self._units)
        return root + sum(others[: 1 + self._prefetch]) if is_sharded else 0

    def _state_bytes(self, optimizer: Optimizer) -> tuple[int, int]:
        """Return the bytes of an optimizer's states, on the device and offloaded."""
        storages: dict[bool, dict[int, int]] = {False: {}, True: {}}
        for param, state in vars(optimizer)["state"].items():  # sizes are known before a deferred step is made
            place = self._places.get(id(param))
            is_offloaded = place is not None and not place[0].values.is_on_device
            for value in state.values():
                if torch.is_tensor(value) and is_in_memory(value):  # the store counts those
                    storage = value.untyped_storage()
                    storages[is_offloaded][storage._cdata] = storage.nbytes()
        return sum(storages[False].values()), sum(storages[True].values())


def _whole_numel(buffer: FlatBuffer) -> int:
    """Return the elements of the whole parameters of which a buffer has parts."""
    parts = {index: buffer.part(index) for index in range(len(buffer.params))}
    slots = enumerate(buffer.layout.slots)
    return sum(slot.numel if (part := parts[index]) is None else prod(part.whole) for index, slot in slots)


class _Sent(NamedTuple):
    """Bytes that a rank sends: to ranks of its node, or of a group that has no nodes, and to other nodes."""

    inside: int
    across_nodes: int

    @classmethod
    def once(cls, buffer: FlatBuffer, itemsize: int) -> _Sent:
        """Return the bytes of one gather or reduction of a buffer in a dtype."""
        nbytes, num_ranks = buffer.layout.padded_numel * itemsize, buffer.communicator.world_size
        if buffer.nodes is None:
            return cls(nbytes // num_ranks * (num_ranks - 1), 0)
        inner, outer = buffer.nodes.inner.world_size, buffer.nodes.outer.world_size
        return cls(nbytes // inner * (inner - 1), nbytes // num_ranks * (outer - 1))


def _sent_gradients(buffer: FlatBuffer) -> _Sent:
    """Return the bytes that a rank sends to reduce a buffer's gradients once."""
    return _Sent.once(buffer, buffer.kind.reduce.itemsize)


def _sent_in_each_backward(buffer: FlatBuffer) -> int:
    """Return the bytes that a rank sends to reduce a buffer's gradients in each backward; others wait for the last."""
    sent, grads = _sent_gradients(buffer), buffer.sharding.grads
    return sum(sent) if grads is ShardingScope.WORLD else sent.inside if grads else 0


def _sent_params(buffer: FlatBuffer) -> _Sent:
    """Return the bytes that a rank sends to gather a buffer's parameters in a step; gradients at stage 0."""
    sharding, gathered = buffer.sharding, _Sent.once(buffer, buffer.kind.compute.itemsize)
    if sharding.params:  # those of other nodes are gathered behind a step alone
        return _Sent(2 * gathered.inside, gathered.across_nodes if buffer.kind.trained else 0)
    if not buffer.kind.trained:
        return _Sent(0, 0)
    return gathered if sharding.optim else _sent_gradients(buffer)


def _gradient_bytes(buffer: FlatBuffer) -> int:
    numel = buffer.layout.shard_numel if buffer.sharding.grads else buffer.layout.padded_numel
    return numel * buffer.kind.reduce.itemsize


def _ranks(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.1f} {unit}" if unit != "B" else f"{nbytes:.0f} B"
        nbytes /= 1024
    raise AssertionError
