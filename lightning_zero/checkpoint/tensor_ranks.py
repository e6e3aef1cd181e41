"""Checkpoints of several tensor ranks, each of which has its parts of the parameters, joined to one of whole ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_zero.checkpoint.autotp import USE, CutRules, recorded_layouts, recorded_reasons
from lightning_zero.checkpoint.joined import Copies, JoinedTensors, Layout, are_copies, same
from lightning_zero.checkpoint.stored import StoredTensor

__all__ = ["PREFIX", "TensorRank", "join"]

PREFIX = "_forward_module."  # of Lightning's strategy, in the names that DeepSpeed knows
SHOWN = 5  # names in an error


@dataclasses.dataclass(frozen=True)
class TensorRank:
    """The checkpoint of one tensor rank.

    Attributes:
        content: As a strategy's checkpoint, with this rank's parts.
        buffers: Names of the module buffers in it.
        info: ``universal_checkpoint_info`` of DeepSpeed, or nothing.
    """

    content: dict[str, Any]
    buffers: frozenset[str]
    info: Mapping[str, Any]


def join(folder: Path, ranks: Sequence[TensorRank], rules: CutRules | None, copies: Copies) -> dict[str, Any]:
    """Return a checkpoint with whole tensors; they are read when their values are used.

    Args:
        folder: The checkpoint, for errors.
        ranks: In the order of the tensor ranks.
        rules: How parameters are cut that the checkpoint does not describe.
        copies: For values that several ranks have, as in ``JoinedTensors``.

    Raises:
        ValueError: A parameter is not described, or is described in two ways; parts do not fit to their description;
            ranks have different names, options or values beside tensors.
    """
    return _Join(folder, ranks, rules, copies).content()


class _Join:
    def __init__(self, folder: Path, ranks: Sequence[TensorRank], rules: CutRules | None, copies: Copies) -> None:
        self.folder = folder
        self.ranks = ranks
        self.rules = rules
        self.source = JoinedTensors(folder, copies)
        self.recorded = self._recorded()
        self.layouts: dict[str, Layout] = {}  # by parameter name
        self.values: dict[tuple[int, ...], Any] = {}  # by identity of the parts: names of tied parameters have one

    def content(self) -> dict[str, Any]:
        states = [self._with_empty_parts(rank.content["state_dict"], number) for number, rank in enumerate(self.ranks)]
        self._require_same_names(states)
        self._find_layouts(states)
        content = dict(self.ranks[0].content)
        content["state_dict"] = {name: self._value(name, [state[name] for state in states]) for name in states[0]}
        optimizers = [rank.content["optimizer_states"] for rank in self.ranks]
        content["optimizer_states"] = [self._optimizer(parts) for parts in zip(*optimizers, strict=True)]
        return content

    # -- Layouts -------------------------------------------------------------------------------------------------------

    def _recorded(self) -> dict[str, Layout]:
        infos = [rank.info for rank in self.ranks]
        if not all(same(dict(infos[0]), dict(info)) for info in infos[1:]):
            raise ValueError(
                f"`{self.folder}`: the tensor ranks have different `universal_checkpoint_info`. The files are not of"
                " one save."
            )
        found = recorded_layouts(infos[0], self.folder, len(self.ranks))
        return {name.removeprefix(PREFIX): layout for name, layout in found.items()}

    def _find_layouts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Set the layouts of all parameters; the names of a tied one are described by one of them."""
        names: dict[tuple[int, ...], list[str]] = {}
        for name, value in states[0].items():
            if isinstance(value, torch.Tensor) and name not in self.ranks[0].buffers:
                names.setdefault(tuple(id(state[name]) for state in states), []).append(name)
        if self.rules is not None:
            self.rules.require_names([name for tied in names.values() for name in tied])
        unknown: list[str] = []
        for tied in names.values():
            parts = [state[tied[0]] for state in states]
            layout = self._layout(tied, [part.shape for part in parts])
            if layout is not None and tied[0] not in self.recorded:
                self._require_parts(tied[0], layout, parts)
            unknown += tied[:1] if layout is None else []
            self.layouts |= {name: layout for name in tied if layout is not None}
        if unknown:
            raise ValueError(self._unknown(unknown))

    def _require_parts(self, name: str, layout: Layout, parts: Sequence[torch.Tensor]) -> None:
        """Refuse a plan that cuts copies."""
        if layout.is_cut and are_copies(parts):
            raise ValueError(
                f"`{self.folder}`: the plan says that `{name}` is cut, and every tensor rank has the same values of it."
                " Its rule is 'whole'. All rules are, if the model was not cut: earlier releases of DeepSpeed cut it in"
                " `deepspeed.tp_model_init` alone."
            )

    def _layout(self, names: Sequence[str], shapes: Sequence[torch.Size]) -> Layout | None:
        found = {}
        for name in names:
            if name in self.recorded:
                found[f"the checkpoint for `{name}`"] = self.recorded[name]
            planned = self.rules.layout(name, shapes) if self.rules is not None else None
            if planned is not None:
                found[f"the plan for `{name}`"] = planned
        if len(set(found.values())) > 1:
            raise ValueError(
                f"`{self.folder}`: {' and '.join(found)} describe different parts. Take the rule out of the plan, or"
                " correct it."
            )
        return next(iter(found.values()), None)

    def _unknown(self, names: Sequence[str]) -> str:
        reasons = {name.removeprefix(PREFIX): reason for name, reason in recorded_reasons(self.ranks[0].info).items()}
        why = [f" DeepSpeed says of `{name}`: {reasons[name]}." for name in names if name in reasons]
        shown = ", ".join(f"`{name}`" for name in names[:SHOWN])
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return (
            f"`{self.folder}` has parts of {len(self.ranks)} tensor ranks, and does not say how {shown}{more} are cut."
            f"{''.join(why[:1])} Say it by `tensor_plan`, a YAML file or a dict with `rules` from name patterns to"
            f" cuts. {USE} DeepSpeed 0.19.8 and later write it into checkpoints."
        )

    def _with_empty_parts(self, state: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
        """Add parameters of which a rank has no elements: at stage 3 nothing tells them from stand-ins."""
        empty = {
            name: torch.empty(layout.parts[rank], device="cpu")
            for name, layout in self.recorded.items()
            if name not in state and not layout.has_elements(rank)
        }
        return {**state, **empty}

    # -- Values --------------------------------------------------------------------------------------------------------

    def _require_same_names(self, states: Sequence[Mapping[str, Any]]) -> None:
        for rank, state in enumerate(states):
            different = sorted(state.keys() ^ states[0].keys())
            if different:
                raise ValueError(
                    f"`{self.folder}`: the files of tensor ranks 0 and {rank} do not both have `{different[0]}`. They"
                    " are not of one save."
                )

    def _value(self, name: str, parts: Sequence[Any]) -> Any:
        if not isinstance(parts[0], torch.Tensor):
            return self._equal(name, parts)
        key = tuple(map(id, parts))
        if key not in self.values:
            layout = self.layouts.get(name) or Layout.copies(parts[0].shape, len(parts))  # of a module buffer
            self.values[key] = self.source.add(name, layout, parts)
        return self.values[key]

    def _equal(self, name: str, parts: Sequence[Any]) -> Any:
        """Return a value that all ranks have."""
        for rank, part in enumerate(parts):
            if not same(part, parts[0]):
                raise ValueError(
                    f"`{self.folder}`: `{name}` differs between tensor ranks 0 and {rank}, although it is no parameter"
                    " of which ranks have parts. The files are not of one save."
                )
        return parts[0]

    # -- Optimizers: DeepSpeed leaves parameters out of a rank's groups of which the rank has no elements -------------

    def _optimizer(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        most = max((part["state"] for part in parts), key=len)
        return {
            "state": {name: self._slots(name, [part["state"].get(name) for part in parts]) for name in most},
            "param_groups": self._groups([part["param_groups"] for part in parts]),
        }

    def _slots(self, name: str, parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
        absent = [rank for rank, part in enumerate(parts) if part is None and self.layouts[name].has_elements(rank)]
        if absent:
            raise ValueError(
                f"`{self.folder}` has no optimizer states of `{name}` on tensor rank {absent[0]}, and has some on"
                " others. The files are not of one save."
            )
        states = [part for part in parts if part is not None]
        self._require_same_names(states)
        return {
            slot: self._slot(name, slot, [None if part is None else part[slot] for part in parts]) for slot in states[0]
        }

    def _slot(self, name: str, slot: str, parts: Sequence[Any]) -> Any:
        held = [part for part in parts if part is not None]
        if not isinstance(held[0], StoredTensor):  # of the parameter's shape
            return self._equal(f"{name}.{slot}", held)
        layout = self.layouts[name]
        filled = [
            torch.empty(layout.parts[rank], device="cpu") if part is None else part for rank, part in enumerate(parts)
        ]
        return self.source.add(f"{name}.{slot}", layout, filled)

    def _groups(self, ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """Return the parameter groups, which all ranks have."""
        self._equal("the number of parameter groups", [len(groups) for groups in ranks])
        most = [max((group["params"] for group in groups), key=len) for groups in zip(*ranks, strict=True)]
        completed = [
            [
                {**group, "params": self._completed(group["params"], names, rank)}
                for group, names in zip(groups, most, strict=True)
            ]
            for rank, groups in enumerate(ranks)
        ]
        found: list[dict[str, Any]] = self._equal("param_groups", completed)
        return found

    def _completed(self, names: Sequence[str], most: Sequence[str], rank: int) -> list[str]:
        """Return a rank's names of a group, and those of parameters of which it has no elements."""
        own = set(names)
        if own - set(most):
            return list(names)
        return [name for name in most if name in own or not self.layouts[name].has_elements(rank)]
