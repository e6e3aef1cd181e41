"""Distribution of units over device, host memory and slower stores: the fastest memory is filled first.

Units are taken in the order of the model, so that those whose steps are made beside the next forward come last.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Offload, OffloadTarget, last_target
from lightning_zero.engine.units.nodes import launched_node
from lightning_zero.sharding import NodeRanks, ShardedOver
from lightning_zero.storage.copies import memory_of

__all__ = ["Memory", "fill", "free_bytes", "free_host_bytes", "memories_of_units"]

Memory = Literal["device"] | OffloadTarget

_STATE_BYTES = 16  # per trained parameter: master, two moments, gradient
# Folder and files of cgroups, by the controllers of their line in `/proc/self/cgroup`: those of v2 and v1.
_CGROUP_FILES = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
_USED = 0.7  # of the free bytes; the rest is for activations and the program's other tensors


def fill(needs: Sequence[int], device_bytes: int, host_bytes: int, last: OffloadTarget) -> list[Memory]:
    """Return where each unit goes: on the device while it fits, then in host memory, then in the last store.

    Args:
        needs: Bytes of each unit.
        device_bytes: Bytes that units may take on the device.
        host_bytes: Bytes that they may take in host memory.
        last: Where units go that fit nowhere else; ``"cpu"`` where there is no slower store.
    """
    memories: list[Memory] = []
    for need in needs:
        if set(memories) <= {"device"} and need <= device_bytes:
            memories.append("device")
            device_bytes -= need
        elif last == "cpu" or (last not in memories and need <= host_bytes):
            memories.append("cpu")
            host_bytes -= need
        else:
            memories.append(last)
    return memories


def free_bytes(device: torch.device, ranks: int) -> tuple[int, int]:
    """Return the bytes that are free on the device, and this rank's share of those in host memory.

    Where the device is the CPU they are the same, and count once.

    Args:
        device: The device.
        ranks: Number of ranks that share the host memory.
    """
    host = free_host_bytes() // ranks
    if device.type != "cuda":
        return host, 0
    return memory_of(device).free, host


def free_host_bytes(system: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process may take: those of the machine, within limits of cgroups.

    Raises:
        ValueError: The system is not Linux, and does not say.
    """
    try:
        lines = (system / "proc/meminfo").read_text().splitlines()
    except OSError as error:
        raise ValueError(
            "`Offload(fraction='auto')` needs the number of free bytes of host memory, which Linux says in"
            " `/proc/meminfo`. Use a number from 0 to 1."
        ) from error
    free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    return max(0, min([free, *_left_in_cgroups(system)]))


def _left_in_cgroups(system: Path) -> Iterator[int]:
    """Yield the bytes that each cgroup around this process leaves; pages of files that may be dropped count as free."""
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in _CGROUP_FILES:
            folder, limit, used, cached = _CGROUP_FILES[controllers]
            inner = system / folder / path.lstrip("/")
            outer = [one for one in inner.parents if one.is_relative_to(system / folder)]
            for group in (inner, *outer):  # in a container the path may be the host's, of which only the root is there
                try:
                    stat = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
                    yield int((group / limit).read_text()) - int((group / used).read_text()) + int(stat[cached])
                except (OSError, ValueError, KeyError):  # there is no such group, or no limit: "max"
                    continue


def memories_of_units(
    offload: Offload,
    numels: Sequence[tuple[int, int]],
    *,
    sharding: ShardedOver,
    communicator: Communicator,
    params_ranks: int,
    itemsize: int,
    node: NodeRanks | None,
) -> list[Memory]:
    """Return the placement of each unit with ``fraction="auto"``, the same on all ranks. Collective: all ranks.

    Args:
        offload: The option.
        numels: All and trained parameters of each unit.
        sharding: The scopes in which tensors are kept sharded.
        communicator: Over the ranks; the one with the least memory decides.
        params_ranks: Over which parameters are sharded: all, those of a node, or 1.
        itemsize: Bytes of a parameter as it computes.
        node: The ranks of this node; None: those that the environment says, or that have the same name of the host.
    """
    world_size = communicator.world_size
    own = world_size if sharding.optim else 1
    leaves = offload.params is not None
    needs = [
        trained * _STATE_BYTES // own + (numel * itemsize // params_ranks if leaves else 0) for numel, trained in numels
    ]
    fixed = 0 if leaves else sum(numel for numel, _ in numels) * itemsize // params_ranks
    largest = sum(sorted((numel for numel, _ in numels), reverse=True)[:2])
    fixed += largest * (itemsize + 4) if sharding.grads else sum(trained for _, trained in numels) * 4
    hosts = communicator.gather_objects(socket.gethostname(), "agreement on free memory")
    launched = node or launched_node()
    ranks = hosts.count(hosts[communicator.rank]) if launched is None else launched.number
    device, host = (int(_USED * nbytes) for nbytes in free_bytes(communicator.device, ranks))
    found = communicator.gather_objects((device - fixed, host), "agreement on free memory")
    device, host = (min(of_ranks) for of_ranks in zip(*found, strict=True))
    return fill(needs, device, host, last_target(offload))
