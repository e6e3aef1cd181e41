"""The random number generators of every rank, so that dropout and shuffling go on where they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy  # noqa: F401 (its generator is saved where the module is imported)

from lightning_zero.checkpoint.ranks import Ranks, describe_layouts
from lightning_zero.parallel.pipeline.schedule.streams import RandomState

if TYPE_CHECKING:
    from lightning_zero.engine.engine import ZeroEngine

__all__ = ["RANDOM_STATES", "gather_random_states", "restore_random_state"]

RANDOM_STATES = "random_states"  # key of a checkpoint dictionary


def gather_random_states(engine: ZeroEngine, more: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the state of Python's, NumPy's, torch's and the device's generator of every data rank, in rank order.

    About 15 KB per rank, of tensors and plain values only. Collective: all ranks.

    Args:
        engine: Whose ranks and device it is.
        more: States of this rank that are kept with them.
    """
    return Ranks(engine).gather_data({**RandomState(engine.internals.communicator.device).plain(), **(more or {})})


def restore_random_state(engine: ZeroEngine, states: Sequence[dict[str, Any]], copies: int) -> str | None:
    """Set this rank's generators, as far as a checkpoint has them; return a sentence on those that it has not.

    Args:
        engine: Whose rank and device it is.
        states: Results of ``gather_random_states``.
        copies: Copies of the model that there were.
    """
    saved = len(states), copies
    ranks = Ranks(engine)
    here = ranks.num_data_ranks, ranks.num_copies
    if saved != here:
        return (
            f"{describe_layouts(saved, here)}: the state of the random number generators (dropout, shuffling), which is"
            " that of a rank, is not restored."
        )
    state = states[ranks.data_rank]
    device = engine.internals.communicator.device
    RandomState.of(state, device).restore()
    if device.type not in state["device"]:
        if device.type == "cpu" and not state["device"]:
            return None
        return (
            f"The checkpoint was saved on another kind of device than {device.type}: the state of the device's random"
            " number generator (dropout) is not restored."
        )
    return None
