"""Bytes of optimizer states before the first step makes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_zero.engine.optim.flat_step import BufferSlot
from lightning_zero.engine.optim.moments import MomentFormat
from lightning_zero.engine.optim.step_rules import ADAM, RULES, StepRule

__all__ = ["PlannedStates"]


@dataclass
class PlannedStates:
    """The states of optimizers on this rank, from their first step on.

    Attributes:
        nbytes: Bytes by the place of the parameters' masters: ``"device"``, ``"host"``, ``"disk"``.
        unknown: Classes of optimizers whose states are not counted.
        are_known: There are optimizers.
    """

    nbytes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("device", "host", "disk"), 0.0))
    unknown: set[str] = field(default_factory=set)
    are_known: bool = False

    @classmethod
    def of(
        cls, optimizers: Iterable[Optimizer], places: Mapping[int, BufferSlot], moments: MomentFormat
    ) -> PlannedStates:
        """Return the states of optimizers.

        Args:
            optimizers: That are attached.
            places: The buffer and slot of each parameter, by ``id``.
            moments: The format of the moments of AdamW and Adam.
        """
        planned = cls()
        for optimizer in optimizers:
            planned.are_known = True
            rule = _rule_of(optimizer)
            if rule is None:
                planned.unknown.add(f"`{type(optimizer).__name__}`")
                continue
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if (place := places.get(id(param))) is not None and place[0].kind.trained:
                        planned._add(optimizer, param, place, _itemsize(rule, group, moments, place[0].kind.master))
        return planned

    def _add(self, optimizer: Optimizer, param: torch.Tensor, place: BufferSlot, itemsize: float) -> None:
        buffer, index = place
        where = buffer.home.where
        if where == "disk" and param in vars(optimizer)["state"]:
            return  # the store of the disks has them, and counts them as optimizer states
        start, stop = buffer.own_range.elements(index)
        self.nbytes[where] += (stop - start) * itemsize


def _rule_of(optimizer: Optimizer) -> StepRule | None:
    """Return the rule by which an optimizer is stepped; one that is attached has a class behind the engine's."""
    return next((RULES[cls] for cls in type(optimizer).__mro__[:2] if cls in RULES), None)


def _itemsize(rule: StepRule, group: Mapping[str, Any], moments: MomentFormat, stepped: torch.dtype) -> float:
    """Return the bytes of states per element of a parameter."""
    if rule is ADAM and not moments.is_pytorchs:
        return moments.bytes_per_element
    return float((len(rule.moments(group)) + bool(group.get("amsgrad"))) * stepped.itemsize)
