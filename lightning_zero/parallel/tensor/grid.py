"""The grid of ranks on which an engine trains a cut module."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from lightning_zero.grid import Grid, ParamAxes
from lightning_zero.parallel.tensor.cuts import ParamRecord

__all__ = ["ALL_RANKS", "DATA_RANKS", "grid_of"]

ALL_RANKS = "all ranks"  # data and tensor ranks
DATA_RANKS = "data ranks"


def grid_of(
    cut: Mapping[str, ParamRecord],
    *,
    tensor_group: dist.ProcessGroup | None,
    data_group: dist.ProcessGroup | None,
    data_ranks: int,
) -> Grid:
    """Return the grid for ``engine.shard(module, grid=...)``.

    Parameters that are cut lie over the data ranks; those that all tensor ranks have lie over all ranks of the engine,
    so that their copies cannot drift apart. A whole gradient is counted once: each of T tensor ranks has it.

    Args:
        cut: The records of ``cut_module``, by the names that the parameters have in the engine's module.
        tensor_group: The ranks with parts of the same parameters, which have the same data; None: all ranks.
        data_group: The ranks with the same parts and other data; None: all ranks.
        data_ranks: Number of ranks with different data.

    Raises:
        ValueError: The module was cut for another number of tensor ranks, or the groups do not make the grid.
    """
    num_tensor, num_data = dist.get_world_size(tensor_group), dist.get_world_size(data_group)
    other = next((record for record in cut.values() if record.size != num_tensor), None)
    if other is not None:
        raise ValueError(
            f"`{other.name}` was cut for {other.size} tensor ranks, and `tensor_group` has {num_tensor}. Use the group"
            " of the ranks for which `cut_module` cut the module."
        )
    if num_data != data_ranks:
        raise ValueError(
            f"`data_group` has {num_data} ranks, and `data_ranks` is {data_ranks}. Every rank of a data group has other"
            " data."
        )
    params = {name: _axes(record) for name, record in cut.items()}
    return Grid({ALL_RANKS: None, DATA_RANKS: data_group}, data_ranks, params)


def _axes(record: ParamRecord) -> ParamAxes:
    if record.part is not None:
        return ParamAxes(DATA_RANKS, part=record.part)
    return ParamAxes(ALL_RANKS, factor=1.0 if record.kind == "partial" else 1.0 / record.size)
