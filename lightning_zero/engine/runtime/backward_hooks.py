"""Hooks that a forward leaves in its graph: a unit is gathered before its backward, and given back behind it.

Note [Gathering again in backward]
    Two mechanisms together. A hook on the gradients of a unit's outputs gathers the unit before its backward starts.
    And while a scope runs, tensors that autograd saves and that lie in a unit's buffer are kept with it, and
    it is gathered when backward unpacks them (``saved_tensors``): so a loss that leaves by a side attribute, a
    parameter used outside its module and a unit that was given back early are all right. Inside activation
    checkpointing the checkpoint's own hooks are on top; it recomputes the forward, which gathers. Outputs may come from
    other modules, whose backward runs when the unit has its gradients: for these it is not gathered again.

Note [Giving back in backward]
    A unit is given back when all its gradients have arrived. A frozen parameter brings no gradient, so a unit with one
    also waits for the gradients of its inputs. The remaining units go at the end of backward. A forward that ends while
    a backward runs is a recomputation: its unit is needed right away, and is not given back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from lightning_zero.engine.runtime.backward import Backward
from lightning_zero.engine.runtime.call_stack import in_backward, may_keep_handles
from lightning_zero.engine.runtime.uses import UnitUses
from lightning_zero.engine.units.unit import Unit

__all__ = ["BackwardHooks", "tensors_in"]


class BackwardHooks:
    """Pre-backward hooks on outputs, and hooks behind the gradients of all inputs.

    Args:
        uses: Gathers units.
        backward: The one that is running.
    """

    def __init__(self, uses: UnitUses, backward: Backward) -> None:
        self._uses = uses
        self._backward = backward

    def watch_outputs(self, unit: Unit, output: Any, awaited: object | None = None) -> None:
        """Gather a unit when a backward comes to its outputs.

        Args:
            unit: The unit.
            output: A tensor, or anything that holds some.
            awaited: Stands for the call whose inputs are watched, too.
        """
        if not (unit.is_sharded_between_uses and may_keep_handles()):
            return

        come_to = -1  # the last backward of PyTorch that came to one of the outputs

        def pre_backward(_: Any) -> None:
            nonlocal come_to
            if come_to == torch._C._current_graph_task_id() and unit.is_passed:
                return
            come_to = torch._C._current_graph_task_id()
            if awaited is not None:
                unit.await_inputs(awaited)
            self._uses.make_whole_in_backward(unit)

        for node in _nodes_of(output):
            node.register_prehook(pre_backward)

    def watch_inputs(self, unit: Unit, inputs: Any) -> object:
        """Keep a unit in backwards that come to its outputs, until its inputs have their gradients, or to the end.

        Returns:
            An object that stands for this call in ``watch_outputs``.
        """
        call, is_expected = object(), not in_backward()
        # A leaf is an input of a reentrant recomputation. `autograd.grad` by a leaf that has such a hook would fail.
        tensors = [
            one for one in tensors_in(inputs) if one.grad_fn is not None or (one.requires_grad and not is_expected)
        ]
        if is_expected:
            unit.expect_inputs()

        def post_backward(_: Any) -> None:
            unit.pass_inputs(call, was_expected=is_expected)
            self._backward.give_back_if_passed(unit)

        if tensors:
            register_multi_grad_hook(tensors, post_backward, mode="all")
        return call

    def watch_beginning(self, output: Any) -> None:
        """Show whole parameters, as they compute, when a forward's backward begins in a plain loop, below stage 3."""
        for node in _nodes_of(output):
            self._backward.watch_node(node)


def _nodes_of(output: Any) -> set[Any]:
    """Return the nodes of the graph that made the tensors of an output."""
    return {tensor.grad_fn for tensor in tensors_in(output)} - {None}


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in anything a forward may take or return."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 6 or value is None or isinstance(value, (int, float, str, bool, nn.Module)):
        return
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from tensors_in(getattr(value, item.name, None), depth + 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for item in list(vars(value).values()):
            yield from tensors_in(item, depth + 1)
