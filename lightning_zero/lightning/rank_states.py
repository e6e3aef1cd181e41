"""States of dataloaders, data modules and callbacks in checkpoints: every rank goes on with its own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch

from lightning_zero.checkpoint.planner import Segment
from lightning_zero.trees import tree_flatten, tree_leaves, tree_map_only

__all__ = [
    "RANK_STATES",
    "describe_states",
    "differing_in_copies",
    "differing_paths",
    "digests_of",
    "kept_states",
    "own_states",
    "take_own_states",
]

RANK_STATES = "rank_states"  # key of a checkpoint: by rank, by path in the checkpoint

Path = tuple[str, ...]

LOADERS: Path = ("loops", "fit_loop", "state_dict", "combined_loader")


def own_states(checkpoint: Mapping[str, Any], datamodule: str | None) -> dict[Path, Any]:
    """Return copies of this rank's states, in host memory.

    Args:
        checkpoint: As the Trainer made it on this rank.
        datamodule: Key of the data module's state, if there is a data module.
    """
    paths = [LOADERS, *(("callbacks", key) for key in checkpoint.get("callbacks", {}))]
    paths += [(datamodule,)] if datamodule is not None else []
    found = {path: _get(checkpoint, path) for path in paths}
    return {
        path: copy.deepcopy(tree_map_only(torch.Tensor, _on_host, state))
        for path, state in found.items()
        if state is not None and not any(isinstance(leaf, Segment) for leaf in tree_leaves(state))  # saved by range
    }


def digests_of(states: Mapping[Path, Any]) -> dict[Path, bytes]:
    """Return a digest of every state. Those of other states differ; those of equal states may."""
    return {
        path: sha256(pickle.dumps(tree_map_only(torch.Tensor, _digest_of, state))).digest()
        for path, state in states.items()
    }


def differing_paths(of_ranks: Sequence[Mapping[Path, bytes]]) -> list[Path]:
    """Return the paths of which ranks may have other states, given their digests, and that of the loaders."""
    paths = dict.fromkeys(path for digests in of_ranks for path in digests)
    return [path for path in paths if path == LOADERS or len({digests.get(path) for digests in of_ranks}) > 1]


def kept_states(of_ranks: Sequence[dict[Path, Any]]) -> list[dict[Path, Any]]:
    """Return the states that a checkpoint keeps per rank: those of loaders, and those that differ between ranks."""
    paths = dict.fromkeys(path for states in of_ranks for path in states)
    kept = [
        path
        for path in paths
        if path == LOADERS or not all(_is_same(states.get(path), of_ranks[0].get(path)) for states in of_ranks)
    ]
    return [{path: states[path] for path in kept if path in states} for states in of_ranks] if kept else []


def take_own_states(checkpoint: dict[str, Any], saved: Sequence[Mapping[Path, Any]], rank: int) -> None:
    """Put a rank's states in place of rank 0's."""
    for path in dict.fromkeys(path for states in saved for path in states):
        *folders, name = path
        place: Any = checkpoint
        for folder in folders:
            place = place.get(folder) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            continue  # taken out of the checkpoint
        if path in saved[rank]:
            place[name] = saved[rank][path]
        else:
            place.pop(name, None)


def differing_in_copies(saved: Sequence[Mapping[Path, Any]], copies: int) -> list[dict[Path, Any]]:
    """Return the states that the pipeline stages of a copy of the model have otherwise than its first stage."""
    return [
        {path: state for path, state in states.items() if not _is_same(state, saved[rank % copies].get(path))}
        for rank, states in enumerate(saved)
        if not _is_same(states, saved[rank % copies])
    ]


def describe_states(saved: Sequence[Mapping[Path, Any]]) -> str:
    """Name the states that a checkpoint keeps by rank."""
    paths = dict.fromkeys(path for states in saved for path in states)
    return ", ".join("the train dataloaders" if path == LOADERS else f"`{path[-1]}`" for path in paths)


def _get(checkpoint: Any, path: Path) -> Any:
    for key in path:
        checkpoint = checkpoint.get(key) if isinstance(checkpoint, Mapping) else None
    return checkpoint


def _digest_of(tensor: torch.Tensor) -> Any:
    """Return dtype, shape and digest of a plain tensor; other tensors as they are."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return tensor
    values = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), sha256(values.numpy().data).digest()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _is_same(first: Any, second: Any) -> bool:
    """Whether two states are equal for sure."""
    leaves, structure = tree_flatten(first)
    others, other_structure = tree_flatten(second)
    return structure == other_structure and all(map(_is_same_leaf, leaves, others))


def _is_same_leaf(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    try:
        return type(first) is type(second) and bool(first == second)
    except Exception:  # an array of NumPy, anything
        return False
