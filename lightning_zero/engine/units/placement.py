"""The placement of each unit: on the device, in host memory or on disks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Offload, last_target
from lightning_zero.engine.buffers.disk_home import DiskHome
from lightning_zero.engine.buffers.home import HomeMaker, HostHome
from lightning_zero.engine.units.capacity import Memory, memories_of_units
from lightning_zero.engine.units.partition import Territory
from lightning_zero.sharding import NodeRanks, ShardedOver
from lightning_zero.storage.copies import Copies, first_call_of_thread
from lightning_zero.storage.disk import DiskStore
from lightning_zero.storage.downloads import Downloads
from lightning_zero.storage.host import HostStore
from lightning_zero.storage.nvme import NvmeStore, StorageError
from lightning_zero.storage.store import Accounts

__all__ = ["Placement"]


class Placement:
    """Host memory and disks of one engine, and which unit uses which.

    Collective: all ranks; a path that one rank cannot use is an error on every rank.

    Args:
        offload: The option; None for nothing.
        territories: The units to be, in order.
        communicator: Over the ranks that share the model.
        sharding: The scopes in which tensors are kept sharded.
        params_ranks: The number of ranks over which parameters are sharded.
        itemsize: Bytes of a parameter as it computes, for ``fraction="auto"``.
        node: The ranks of this node, which share its host memory; None: see ``memories_of_units``.
        copies: The streams of the device.

    Raises:
        StorageError: A path cannot be used here, or on another rank.
    """

    def __init__(
        self,
        offload: Offload | None,
        territories: Sequence[Territory],
        *,
        communicator: Communicator,
        sharding: ShardedOver,
        params_ranks: int,
        itemsize: int,
        node: NodeRanks | None,
        copies: Copies,
    ) -> None:
        self._offload = offload
        self._communicator = communicator
        is_pinned = offload is None or offload.pin_memory
        device = communicator.device
        self.host = HostStore(pinned=is_pinned and device.type == "cuda", copies_of=device)
        self.disk: DiskStore | None = None
        self._memories: list[Memory] = ["device"] * len(territories)
        if offload is not None and offload.fraction == "auto":
            numels = [(_numel(one.params), _numel([p for p in one.params if p.requires_grad])) for one in territories]
            self._memories = memories_of_units(
                offload,
                numels,
                sharding=sharding,
                communicator=communicator,
                params_ranks=params_ranks,
                itemsize=itemsize,
                node=node,
            )
        elif offload is not None:
            self._memories = _by_fraction(offload, [_numel(one.params) for one in territories])
        if offload is not None and offload.uses_disks:
            self.disk = self._open(offload, copies)

    def _open(self, offload: Offload, copies: Copies) -> DiskStore:
        error: StorageError | None = None
        try:
            disks = NvmeStore(
                offload.paths,
                block_bytes=offload.buffer_bytes,
                threads=offload.io_threads,
                direct=offload.direct,
                first_call=first_call_of_thread(self._communicator.device),
            )
        except StorageError as caught:
            error = caught
        self.agree(error)
        has_streams = self._communicator.device.type != "cpu"
        store = DiskStore(disks, Downloads(self.host, copies) if has_streams else None)
        store.on_failure = partial(self._communicator.abandon, "an error of its disks")
        return store

    def agree(self, error: Exception | None) -> None:
        """Raise an error of this rank, and on the others one that names this rank. Collective: all ranks."""
        rank, world_size = self._communicator.rank, self._communicator.world_size
        errors = self._communicator.gather_objects(error is not None, "agreement on the disks of `Offload(path=...)`")
        if error is not None:
            raise error
        if any(errors):
            ranks = ", ".join(str(rank) for rank, has_failed in enumerate(errors) if has_failed)
            raise StorageError(
                f"rank {rank} of {world_size}: `Offload(path={self._offload.path!r})` cannot be used on rank(s)"  # type: ignore[union-attr]
                f" {ranks}; the error there says why."
            )

    def home(self, index: int) -> HomeMaker | None:
        """Return the maker of the homes of a unit's masters, states and gradient shards; None is the device."""
        return self._maker(self._offload.optimizer if self._offload is not None else None, index)

    def params_home(self, index: int) -> HomeMaker | None:
        """Return the maker of the homes of a unit's parameters at stage 3; None is the device."""
        return self._maker(self._offload.params if self._offload is not None else None, index)

    def _maker(self, place: str | None, index: int) -> HomeMaker | None:
        if place is None or self._memories[index] == "device":
            return None
        if self.disk is None or "cpu" in (place, self._memories[index]):
            return partial(HostHome, self.host)
        return partial(DiskHome, self.disk)

    @property
    def obstacle_in_backward(self) -> str | None:
        """Why a step cannot be made in the backward, behind "does not work with"; None if it can."""
        if self.disk is None:
            return None
        return (
            "'nvme': gradients go to the disk, and a step would wait for it. Steps are made beside the next forward"
            " anyhow; or use `Offload(optimizer='cpu')`."
        )

    @property
    def stores(self) -> dict[str, Accounts]:
        """The stores away from the device, by the name that homes have for them."""
        return {"host": self.host} if self.disk is None else {"host": self.host, "disk": self.disk}

    @staticmethod
    def keeps_freed(offload: Offload | None) -> bool:
        """Say whether freed blocks of device memory are kept for tensors of the same size.

        Blocks of freed memory are not used again for slightly larger tensors, and pile up.
        """
        return offload is None or not offload.uses_disks

    def close(self) -> None:
        """Give host memory and the room on disks back."""
        if self.disk is not None:
            self.disk.close()  # its last values come through host memory
        self.host.close()


def _by_fraction(offload: Offload, sizes: Sequence[int]) -> list[Memory]:
    """Return the store of each unit under ``fraction``; the first ones stay on the device."""
    stays = (1.0 - float(offload.fraction)) * sum(sizes)
    away: Memory = last_target(offload)
    return [away if sum(sizes[: index + 1]) > stays else "device" for index in range(len(sizes))]


def _numel(params: Sequence[torch.nn.Parameter]) -> int:
    return sum(param.numel() for param in params)
