"""Options of optimizers, and which parameters are frozen: the program may change them, on all ranks alike (ADR 0064).

Note [Comparison in other messages]
    Under DistributedDataParallel each rank steps whole parameters, so a rank with another learning rate trains other
    weights, and nobody notices. Here it would train its segments with it. So a digest travels in messages that a step
    sends anyway: that on used parameters at the end of a backward, or that on the end of a pass at stage 3. A message
    has the largest value of all ranks, so it carries the digest and its complement, which are complements of each other
    only if all ranks have sent the same. A step with options that no message has compared yet leaves them to the next
    one. The facts themselves are sent only if the digests differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_zero.comm.agreement import first_difference
from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.units.unit import Unit

__all__ = ["NUM_BITS", "RankFacts"]

NUM_BITS = 32  # of a digest
_MAX_KNOWN = 64
_DIGITS = 9  # of a number that count: other machines may compute another last bit of a schedule

_Options = tuple[tuple[tuple[str, Any], ...], ...]
"""Names and values of options, by group, the groups of all optimizers one after the other."""

_FROZEN = "Freeze and unfreeze parameters on every rank, between the same two steps."
_OPTIONS = (
    "Set options of optimizers on every rank, to the same value. A schedule that follows a logged value"
    " (`ReduceLROnPlateau`) needs the average over the ranks: `self.log(..., sync_dist=True)`."
)


class RankFacts:
    """The options of the optimizers and the frozen parameters of this rank, compared with those of the others.

    Call protocol: send ``digest`` in a message for the largest values of all ranks, and give the result to ``compare``.
    A rank that has nothing to say sends two zeros.

    Args:
        units: All units.
        communicator: Over which ranks agree.
    """

    def __init__(self, units: Sequence[Unit], communicator: Communicator) -> None:
        self._units = units
        self._communicator = communicator
        self._optimizers: Sequence[Optimizer] = ()
        self._sent: _Options = ()  # those of the last digest
        self._sent_trained = self._trained()  # those of the last digest; at first all ranks have the same
        self._known = {self._sent_trained}  # that all ranks have had
        self._steps: list[_Options] = []  # of steps since the last comparison, which had other options than that

    def watch(self, optimizers: Sequence[Optimizer]) -> None:
        """Compare the options of these optimizers from now on."""
        self._optimizers = list(optimizers)
        self._sent = self._options()
        self._steps.clear()

    def note_step(self) -> None:
        """Take note of the options of a step that begins. No collective."""
        if self._communicator.world_size == 1:
            return
        options = self._options()
        if options != self._sent and options not in self._steps:
            self._steps.append(options)

    def are_known(self) -> bool:
        """Say whether all ranks have had the same parameters frozen before as this one now."""
        return self._communicator.world_size == 1 or self._trained() in self._known

    def digest(self, num_bits: int = NUM_BITS) -> tuple[int, int]:
        """Return a digest of the facts and its complement; zeros in a world of one rank.

        Args:
            num_bits: Of each, at most ``NUM_BITS``.
        """
        if self._communicator.world_size == 1:
            return 0, 0
        self._sent, self._sent_trained = self._options(), self._trained()
        mask = (1 << num_bits) - 1
        digest = zlib.crc32(repr((self._sent, self._steps)).encode(), zlib.crc32(self._sent_trained)) & mask
        return digest, mask - digest

    def compare(self, agreed: tuple[int, int], num_bits: int = NUM_BITS) -> None:
        """Raise an error on every rank if the facts differ. Collective in that case: all ranks.

        Args:
            agreed: The largest digest and the largest complement of all ranks.
            num_bits: Of each.

        Raises:
            RuntimeError: Names the parameter or the option, its values, the ranks, and the remedy.
        """
        if not any(agreed) or sum(agreed) == (1 << num_bits) - 1:
            self._steps.clear()
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known.add(self._sent_trained)
            return
        topic = "comparison of frozen parameters and options of optimizers"
        for facts, remedy in ((self._frozen_facts(), _FROZEN), (self._option_facts(), _OPTIONS)):
            gathered = self._communicator.gather_objects(facts, topic)
            if any(one != gathered[0] for one in gathered):
                difference = first_difference(dict(enumerate(gathered)))
                raise RuntimeError(f"The ranks train differently: {difference}. {remedy}")
        raise RuntimeError(f"The ranks train differently. {_OPTIONS}")

    # -- Facts -----------------------------------------------------------------------------------------------------

    def _trained(self) -> bytes:
        """Return whether each parameter is trained."""
        with torch._C.DisableTorchFunctionSubclass():
            return bytes(
                param.requires_grad for unit in self._units for buffer in unit.buffers for param in buffer.params
            )

    def _frozen_facts(self) -> dict[str, str]:
        slots = [slot for unit in self._units for buffer in unit.buffers for slot in buffer.layout.slots]
        return {
            f"`{slot.name}`": "trained" if is_trained else "frozen"
            for slot, is_trained in zip(slots, self._trained(), strict=True)
        }

    def _options(self) -> _Options:
        return tuple(
            tuple((key, _comparable(value)) for key, value in group.items() if key != "params")
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        )

    def _option_facts(self) -> dict[str, str]:
        places = [
            f"group {place} of optimizer {number}"
            for number, optimizer in enumerate(self._optimizers)
            for place in range(len(optimizer.param_groups))
        ]
        facts = {}
        steps = [(f" in step {number} since the last comparison", one) for number, one in enumerate(self._steps, 1)]
        for when, options in [("", self._sent), *steps]:
            for place, group in zip(places, options, strict=False):
                facts.update({f"`{key}` of {place}{when}": str(value) for key, value in group})
        return facts


def _comparable(value: Any) -> Any:
    """Return an option as numbers and strings; None for one that cannot be read without a wait for a device."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Real):
        return float(f"{float(value):.{_DIGITS}g}")
    if isinstance(value, (tuple, list)):
        return tuple(_comparable(one) for one in value)
    if torch.is_tensor(value) and value.is_cpu and value.numel() == 1:
        return _comparable(value.item())
    return None
