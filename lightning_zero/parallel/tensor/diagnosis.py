"""Finds the module at which a block in parts departs from the whole one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.trees import tree_leaves

__all__ = ["ModuleTrace", "Suspect", "relation", "suspect"]

_LIMIT = 1e-4


@dataclass(frozen=True)
class Suspect:
    """A module, by name in its block, and the way in which it is wrong."""

    module: str
    finding: str


class ModuleTrace:
    """Notes the first result of every module of a block, and the gradient of it, in order."""

    def __init__(self, block: nn.Module) -> None:
        self.called: list[str] = []
        self.results: dict[str, Tensor] = {}
        self.grads: dict[str, Tensor] = {}
        for name, child in block.named_modules():
            if name:
                child.register_forward_pre_hook(lambda _, args, name=name: self._enter(name))
                child.register_forward_hook(lambda _, args, result, name=name: self._note(name, result))

    def _enter(self, name: str) -> None:
        if name not in self.called:
            self.called.append(name)

    def _note(self, name: str, result: Any) -> None:
        tensors = [one for one in tree_leaves(result) if isinstance(one, Tensor) and one.is_floating_point()]
        if tensors and name not in self.results:
            self.results[name] = tensors[0].detach()
            if tensors[0].requires_grad:
                note = partial(self._note_grad, name)
                tensors[0].register_hook(note)  # type: ignore[no-untyped-call]

    def _note_grad(self, name: str, grad: Tensor) -> None:
        self.grads.setdefault(name, grad.detach())


def relation(parts: Sequence[Tensor], whole: Tensor) -> str:
    """Return how tensors of the ranks relate to the whole one: equal, sum, shard N, or other."""
    if all(_is_close(part, whole) for part in parts):
        return "equal"
    if all(part.shape == whole.shape for part in parts):
        return "sum" if _is_close(torch.stack([*parts]).sum(0), whole) else "other"
    if len({part.shape for part in parts}) > 1 or parts[0].dim() != whole.dim():
        return "other"
    for dim in range(whole.dim()):
        if parts[0].shape[dim] * len(parts) != whole.shape[dim]:
            continue
        joined = torch.cat([*parts], dim)
        # packed sections come in another order
        if joined.shape == whole.shape and _is_close(joined.sort(dim).values, whole.sort(dim).values):
            return f"shard {dim}"
    return "other"


def suspect(whole: ModuleTrace, parts: Sequence[ModuleTrace]) -> Suspect | None:
    """Return the first module whose results are wrong, else the last one whose gradient is, or None."""
    for name in whole.results:  # in the order in which modules end, inner ones first
        if not all(name in part.results for part in parts):
            continue
        if relation([part.results[name] for part in parts], whole.results[name]) == "other":
            return Suspect(name, "its result is another one")
    stopped = [name for name in whole.called if not all(name in part.results for part in parts)]
    if stopped:
        return Suspect(stopped[0], "it does not finish")
    for name in reversed(whole.called):
        if name in whole.grads and all(name in part.grads for part in parts):
            found = relation([part.grads[name] for part in parts], whole.grads[name])
            if found == "other":
                return Suspect(name, "the gradient of its result is another one")
    return None


def _is_close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    error = (found.double() - expected.double()).square().mean().sqrt().item()
    return error <= _LIMIT * max(expected.double().square().mean().sqrt().item(), 1e-300)
