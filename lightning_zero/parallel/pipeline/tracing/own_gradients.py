"""Gradients that a step computes by itself (``torch.autograd.grad``), where a stage has a part of the graph alone.

Note [Parts of a graph]
    The graph of a stage goes back to the tensors that it was sent. A gradient by a value that went into modules of
    earlier chunks lacks the paths through them: it is a part, or None, or PyTorch's error that the value was not used.
    So the stage notes the arguments and the outputs of modules of earlier chunks. A gradient is whole unless its
    outputs are computed from such an output, and such an argument from its input. A gradient with respect to an output
    of a module of this chunk, or to a parameter that this chunk alone uses, is whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.stages.sources import is_fake
from lightning_zero.parallel.pipeline.stages.split import Split
from lightning_zero.trees import tree_leaves

__all__ = ["OwnGradients", "Users", "enclosing_function", "leaf_of", "users_of_parameters"]

_Inputs = Sequence[Tensor | GradientEdge]


@dataclass
class Users:
    """The users of a parameter.

    Attributes:
        name: First name of the parameter.
        chunks: Whose modules have it; None among them for a module around them.
    """

    name: str
    chunks: set[int | None] = field(default_factory=set)


def users_of_parameters(module: nn.Module, split: Split) -> dict[int, Users]:
    """Return the users of every parameter, by its ``id``."""
    users: dict[int, Users] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        chunks = [place.chunk for place in split.places if name.startswith(f"{place.name}.")]
        users.setdefault(id(param), Users(name)).chunks.add(next(iter(chunks), None))
    return users


class OwnGradients:
    """Refuses gradients of which a run of a step for a chunk has a part.

    Args:
        chunk: The chunk.
        users: Of parameters, by ``id``.
    """

    def __init__(self, chunk: int, users: Mapping[int, Users]) -> None:
        self._chunk = chunk
        self._users = users
        self._given: set[Any] = set()  # nodes of arguments of modules of earlier chunks
        self._received: set[Any] = set()  # nodes of their outputs
        self._own: set[Any] = set()  # nodes of outputs of modules of this chunk

    def note_given(self, values: Any) -> None:
        """Note the arguments of a module of an earlier chunk."""
        self._given.update(_nodes_of(tree_leaves(values)))

    def note_received(self, values: Any) -> None:
        """Note the outputs of a module of an earlier chunk, as this stage has them."""
        self._received.update(_nodes_of(tree_leaves(values)))

    def note_own(self, values: Any) -> None:
        """Note the outputs of a module of this chunk."""
        self._own.update(_nodes_of(tree_leaves(values)))

    @contextmanager
    def watched(
        self, is_between: Callable[[], bool], stand_in: Callable[[Sequence[Any], Sequence[Any], bool], Any] | None
    ) -> Iterator[None]:
        """Watch backwards that code between the modules runs.

        Args:
            is_between: Says whether it is running.
            stand_in: In a run that computes nothing, returns the gradients of outputs by inputs, with a graph or not.
        """
        engine: Any = torch.autograd
        run = engine._engine_run_backward  # of `grad` and `backward`, under whatever name the program has them

        def run_watched(outputs: Any, grads: Any, keeps: bool, creates: bool, by: Any, *rest: Any, **to: Any) -> Any:
            if is_between() and torch._C._functorch.maybe_current_level() is None:
                if to.get("accumulate_grad"):
                    self._require_no_sum(outputs, by)
                elif stand_in is not None and (any(map(is_fake, outputs)) or not torch.is_grad_enabled()):
                    return stand_in(outputs, by, creates)
                else:
                    self._require_whole(outputs, by)
            return run(outputs, grads, keeps, creates, by, *rest, **to)

        engine._engine_run_backward = run_watched
        try:
            yield
        finally:
            engine._engine_run_backward = run

    def _require_whole(self, outputs: _Inputs, inputs: _Inputs) -> None:
        """Refuse gradients that lack the paths through earlier chunks.

        Raises:
            PipelineError: One does.
        """
        if not self._received.intersection(_ancestors(_nodes_of(outputs))):
            return
        hidden = _ancestors(self._given)
        for one in inputs:
            if self._is_used_elsewhere(one, hidden):
                raise PipelineError(
                    f"The step computes a gradient (`torch.autograd.grad`) by {self._words(one)}, which modules of"
                    " earlier pipeline stages use. This stage has the graph back to its own first block alone, so the"
                    " gradient would lack the paths through the earlier ones. Compute it by a value that a module of"
                    " the last stage returns, move the term into a block, or leave `pipeline` out."
                )

    def _is_used_elsewhere(self, one: Tensor | GradientEdge, hidden: set[Any]) -> bool:
        users = self._users.get(id(leaf_of(one)))
        if users is None or users.chunks == {None}:
            return bool(_nodes_of([one]) & hidden)
        return users.chunks != {self._chunk}

    def _require_no_sum(self, outputs: _Inputs, inputs: _Inputs) -> None:
        """Refuse a backward that adds to gradients of the module.

        Raises:
            PipelineError: It is one.
        """
        reached = _ancestors(_nodes_of(outputs))
        found = [getattr(node, "variable", None) for node in (_nodes_of(inputs) if inputs else reached)]
        adds = any(id(leaf) in self._users for leaf in found)
        if adds or reached & self._received or (not inputs and reached & self._own):
            raise PipelineError(
                "The step calls `backward` by itself, between the modules. A pipeline runs the backwards of a step"
                " after it, and Lightning drops gradients that a step leaves. Return the loss (add the term to it), or"
                " use `torch.autograd.grad` for gradients that the step needs."
            )

    def _words(self, one: Tensor | GradientEdge) -> str:
        leaf = leaf_of(one)
        if id(leaf) in self._users:
            return f"the parameter `{self._users[id(leaf)].name}`"
        return f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else "a tensor"


def enclosing_function() -> str:
    """Return the class of the program's ``torch.autograd.Function`` whose forward is running; empty if none is."""
    frame: FrameType | None = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None:
        is_forward = frame.f_code.co_name == "forward" and not str(frame.f_globals.get("__name__")).startswith("torch.")
        for value in frame.f_locals.values() if is_forward else ():
            if isinstance(value, BackwardCFunction):
                return type(value).__name__.removesuffix("Backward")
        frame = frame.f_back
    return ""


def _nodes_of(values: Iterable[Any]) -> set[Any]:
    """Return the nodes of the graph that compute tensors, or sum the gradients of leaves."""
    with torch._C.DisableTorchFunctionSubclass():
        edges = [
            _edge_of(one)
            for one in values
            if isinstance(one, GradientEdge) or (isinstance(one, Tensor) and one.requires_grad)
        ]
    return {edge.node for edge in edges if edge is not None}


def _edge_of(one: Tensor | GradientEdge) -> GradientEdge | None:
    """Return the edge of the graph to a tensor; None for one that no graph computes."""
    try:
        return get_gradient_edge(one) if isinstance(one, Tensor) else one
    except AssertionError:  # a view that the forward of a function of the program has made
        return None


def _ancestors(nodes: Iterable[Any]) -> set[Any]:
    """Return nodes, and all that their tensors are computed by."""
    found: set[Any] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [further for further, _ in node.next_functions]
    return found


def leaf_of(one: Tensor | GradientEdge) -> Any:
    """Return the tensor that an input of a gradient is; edges name it if it is a leaf."""
    return getattr(one.node, "variable", None) if isinstance(one, GradientEdge) else one
