"""The random number generators of every rank, so that dropout and shuffling go on where they were."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_zero.checkpoint.ranks import Ranks

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ZeroEngine

__all__ = ["RANDOM_STATES", "gather_random_states", "restore_random_state"]

RANDOM_STATES = "random_states"  # key of a checkpoint dictionary


def gather_random_states(engine: ZeroEngine) -> list[dict[str, Any]]:
    """Return the state of Python's, NumPy's, torch's and the device's generator of every rank, in rank order.

    About 15 KB per rank, of tensors and plain values only. Collective: all ranks.
    """
    return Ranks(engine).gather(_random_state(engine.communicator.device))


def restore_random_state(engine: ZeroEngine, states: Sequence[dict[str, Any]]) -> str | None:
    """Set this rank's generators, as far as a checkpoint has them, and return what could not carry over.

    Args:
        engine: Whose rank and device it is.
        states: What ``gather_random_states`` returned.
    """
    if len(states) != engine.everyone.world_size:
        return (
            f"The checkpoint was saved on {len(states)} ranks and is resumed on {engine.everyone.world_size}: the state"
            " of the random number generators (dropout, shuffling), which is that of a rank, is not restored."
        )
    state = states[engine.everyone.rank]
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if state["numpy"] is not None:
        name, key, *rest = state["numpy"]
        np.random.set_state((name, key.numpy().astype(np.uint32), *rest))
    device = engine.communicator.device
    if device.type not in state["device"]:
        if device.type == "cpu" and not state["device"]:
            return None
        return (
            f"The checkpoint was saved on another kind of device than {device.type}: the state of the device's random"
            " number generator (dropout) is not restored."
        )
    torch.get_device_module(device).set_rng_state(state["device"][device.type], device)
    return None


def _random_state(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    numpy = None
    if isinstance(legacy, tuple):  # not so with a bit generator that the user has set
        numpy = (legacy[0], torch.from_numpy(legacy[1].astype(np.int64)), *legacy[2:])
    of_device = {}
    if device.type != "cpu":
        of_device[device.type] = torch.get_device_module(device).get_rng_state(device)
    return {
        "python": (version, torch.tensor(words), gauss),
        "numpy": numpy,
        "torch": torch.get_rng_state(),
        "device": of_device,
    }
