"""The arguments that sequence parallelism divides and gathers in a block, found from one run of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.parallel.tensor.check import random_copy
from lightning_zero.parallel.tensor.examples import Arguments, call_block, replay
from lightning_zero.parallel.tensor.plan import Packed, SequenceWord, TensorPlan
from lightning_zero.parallel.tensor.resolution import resolve

__all__ = ["with_sequence"]


def with_sequence(block: nn.Module, arguments: Arguments, plan: TensorPlan, size: int) -> TensorPlan:
    """Return a block's plan with sequence parallelism between its regions.

    Args:
        block: Is not changed.
        arguments: Of a call, from ``capture``.
        plan: The plan without it, relative to the block.
        size: Number of ranks.

    Raises:
        ValueError: The block has no hidden states ``(batch, sequence, features)`` among its arguments.
    """
    resolution = resolve(block, plan, size)
    columns = [name for name, rule in resolution.forwards.items() if rule == "column" or isinstance(rule, Packed)]
    rows = [name for name, rule in resolution.forwards.items() if rule == "row"]
    run = _Run(block, arguments, [*columns, *rows])
    sequence: dict[str, dict[str | int, SequenceWord]] = {"": {run.hidden_key: "scatter"}}
    for row, members in _regions(run, columns, rows).items():
        # a module around one packed layer reads the sequence's length, as one around several layers does
        whole = _common_module(members if len(members) > 1 else [*members, row])
        for name in [whole] if whole else members:
            sequence[name] = run.words_of(name, members)
    return replace(plan, sequence=sequence)


class _Run:
    """A forward of a whole block: the arguments of its modules, the inputs and results of its cut layers."""

    def __init__(self, block: nn.Module, arguments: Arguments, layers: Sequence[str]) -> None:
        self.order: list[str] = []
        self.inputs: dict[str, Tensor] = {}
        self.results: dict[str, Tensor] = {}
        self._arguments: dict[str, Mapping[str | int, Any]] = {}
        self._block = random_copy(block, torch.float32)
        args, kwargs = replay(arguments, torch.float32)
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        hidden = [key for key, one in given.items() if isinstance(one, Tensor) and one.requires_grad and one.dim() == 3]
        if not hidden:
            raise ValueError(
                f"`TensorParallel(sequence=True)` needs blocks with hidden states (batch, sequence, features) as an"
                f" argument, and `{type(block).__name__}` is called without. Use sequence=False."
            )
        self.hidden_key = hidden[0]
        self._hidden = given[self.hidden_key]
        for name, child in self._block.named_modules():
            child.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: self._note_call(name, args, kwargs), with_kwargs=True
            )
            if name in layers:
                child.register_forward_hook(lambda _, args, result, name=name: self._note(name, result))
        call_block(self._block, (args, kwargs))

    def _note_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        self._arguments.setdefault(name, given)

    def _note(self, name: str, result: Tensor) -> None:
        self.order.append(name)
        self.inputs[name] = next(one for one in self._arguments[name].values() if isinstance(one, Tensor))
        self.results[name] = result

    def words_of(self, name: str, columns: Sequence[str]) -> dict[str | int, SequenceWord]:
        """Return which arguments of a module are gathered, and which are copied, because column layers read them."""
        leaves, inputs = self._read_by(name, columns)
        words: dict[str | int, SequenceWord] = {}
        for key, leaf in leaves.items():
            value = self._arguments[name][key]
            if any(depends(one, leaf) for one in inputs):
                is_of_tokens = value.shape[:-1].numel() == self._hidden.shape[:-1].numel()
                words[key] = "gather" if is_of_tokens and depends(value, self._hidden) else "copy"
        return words

    def _read_by(self, name: str, columns: Sequence[str]) -> tuple[dict[str | int, Tensor], list[Tensor]]:
        """Run a module again with arguments that do not depend on each other; return them and the columns' inputs."""
        given = dict(self._arguments[name])
        leaves = {
            key: value.detach().requires_grad_()
            for key, value in given.items()
            if isinstance(value, Tensor) and value.requires_grad
        }
        given.update(leaves)
        inputs: list[Tensor] = []
        handles = [
            self._block.get_submodule(column).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
            for column in columns
        ]
        positional = tuple(given.pop(position) for position in range(len(given)) if position in given)
        call_block(self._block.get_submodule(name), (positional, {str(key): value for key, value in given.items()}))
        for handle in handles:
            handle.remove()
        return leaves, [one for one in inputs if one.requires_grad]


def depends(tensor: Tensor, other: Tensor) -> bool:
    """Say whether a tensor is computed from another."""
    if tensor is other:
        return True
    (grad,) = torch.autograd.grad(tensor.sum(), [other], retain_graph=True, allow_unused=True)
    return grad is not None


def _regions(run: _Run, columns: Sequence[str], rows: Sequence[str]) -> dict[str, list[str]]:
    """Return the column layers of each row layer, by the row layer's name."""
    left = [name for name in run.order if name in columns]
    found = {}
    for row in (name for name in run.order if name in rows):
        members = [name for name in left if depends(run.inputs[row], run.results[name])]
        left = [name for name in left if name not in members]
        if members:
            found[row] = members
    return found


def _common_module(names: Sequence[str]) -> str:
    """Return the name of the smallest module around all of ``names``."""
    parts = [name.split(".") for name in names]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common)
