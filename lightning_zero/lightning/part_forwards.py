"""Forwards inside of which parameters are the parts that tensor or expert parallelism has left on this rank.

To all other code a parameter has the whole shape (``lightning_zero/engine/buffers/part_parameter.py``). The modules are
those of the plan that were verified as a whole (blocks, embeddings and heads), and the experts of each layer.

Note [Local attributes]
    A cut module has attributes that count a rank's features, rows or heads (``in_features``, ``num_heads``, a copied
    configuration). Forwards compute with them, but a learning rate or a loss by them must be that of the whole. So
    they are shown inside of forwards alone: in those that were verified, and in those of the modules that have them,
    which a recomputation may call by itself. Other functions that are recomputed in a backward read what a plan has
    divided, so it is shown in backwards too; sizes of layers, which hooks on gradients read, are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from lightning_zero.engine.buffers.part_parameter import computing_with_parts
from lightning_zero.errors import PartialParameterError
from lightning_zero.parallel.tensor.blocks import OF_EVERY_MODULE
from lightning_zero.parallel.tensor.collectives import ProcessGroupRanks
from lightning_zero.parallel.tensor.resolution import is_linear

__all__ = ["LocalAttribute", "LocalAttributes", "PartsForward", "TensorRun", "compute_with_parts", "showing"]


@dataclass
class TensorRun:
    """Whether a strategy with the same option runs the module: another one would train parts as wholes.

    Attributes:
        size: Number of ranks.
        ranks: The tensor group, if there is one.
    """

    size: int
    is_running: bool = True
    option: str = "tensor_parallel"
    ranks: ProcessGroupRanks | None = None

    @contextmanager
    def ending_region(self) -> Iterator[None]:
        """Let generators of the ranks draw alike again if an error leaves a region that was entered in the context."""
        is_inside = self.ranks is None or self.ranks.end_region is not None
        try:
            yield
        except BaseException:
            if not is_inside and self.ranks is not None and self.ranks.end_region is not None:
                self.ranks.end_region()
            raise


@dataclass
class LocalAttribute:
    """An attribute that cutting a module has changed; see Note [Local attributes].

    Attributes:
        owner: Has it.
        name: Of the attribute.
        whole: Its value before.
        local: Its value for this rank.
    """

    owner: nn.Module
    name: str
    whole: Any
    local: Any
    _num_shown: int = 1  # contexts that show the local value; the first one ends in `settle`

    @property
    def is_size(self) -> bool:
        """Whether it is a size of a layer, which its own functions do not read."""
        return is_linear(self.owner) or isinstance(self.owner, nn.Embedding)

    def settle(self) -> None:
        """Let the attribute have its whole value outside of forwards from now on."""
        if self._num_shown:
            self.hide()

    def show(self) -> None:
        """Let the attribute have its local value until ``hide``, unless the program has set another.

        Activation checkpointing gives attributes the values that they had before the forward that it computes again.
        """
        self._num_shown += 1
        if _is_same(vars(self.owner).get(self.name), self.whole):
            setattr(self.owner, self.name, self.local)

    def hide(self) -> None:
        """Undo one ``show``."""
        self._num_shown -= 1
        if not self._num_shown and _is_same(vars(self.owner).get(self.name), self.local):
            setattr(self.owner, self.name, self.whole)


class LocalAttributes:
    """The attributes of a module before it is cut, which say afterwards which ones are local.

    Args:
        module: That will be cut.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before = {child: dict(vars(child)) for child in module.modules()}

    def changed(self) -> list[LocalAttribute]:
        """Return the attributes that have other values now."""
        return [
            LocalAttribute(child, name, before[name], value)
            for child, before in self._before.items()
            for name, value in vars(child).items()
            if name in before and name not in OF_EVERY_MODULE and not _is_same(value, before[name])
        ]


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) is int and value == other)


@contextmanager
def showing(attributes: Iterable[LocalAttribute]) -> Iterator[None]:
    """Let attributes have their local values in the context."""
    with ExitStack() as stack:
        for one in attributes:
            one.show()
            stack.callback(one.hide)
        yield


class PartsForward:
    """Stands in for a forward of one module. Copies of the module get a copy that is theirs.

    Args:
        module: Its parameters are parts in the call.
        run: The forward that it stands in for; None: that of the module's class.
        tensor_run: Of the cut module.
        attributes: That are local in the call.
    """

    def __init__(
        self,
        module: nn.Module,
        run: Callable[..., Any] | None,
        tensor_run: TensorRun,
        attributes: Sequence[LocalAttribute] = (),
    ) -> None:
        self.module = module
        self.params = list(module.parameters())
        self.stands_in_for = run
        self._tensor_run = tensor_run
        self._attributes = attributes

    @property
    def option(self) -> str:
        """The option of the strategy that has cut the module; another one may have cut modules inside of it."""
        return self._tensor_run.option

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward.

        Raises:
            PartialParameterError: It is trained, and no strategy with the option that has cut it runs.
        """
        if torch.compiler.is_compiling():  # the graph is called with parts
            return self._run(*args, **kwargs)
        if not self._tensor_run.is_running and torch.is_grad_enabled():
            size, option = self._tensor_run.size, self._tensor_run.option
            raise PartialParameterError(
                f"`{type(self.module).__name__}` is cut over {size} ranks by an earlier Trainer with"
                f" `{option}={size}`, and its gradients would be those of parts. Use `ZeroStrategy` with the same"
                " option, or make the module anew and load its checkpoint. Under `torch.no_grad()` all ranks that have"
                " its parts can compute with it together."
            )
        parts = computing_with_parts(self.params, self.option)
        with parts, showing(self._attributes), self._tensor_run.ending_region():
            return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.stands_in_for is not None:
            return self.stands_in_for(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


class _LocalForward:
    """Stands in for the forward of a module with local attributes. Copies of the module get a copy that is theirs."""

    def __init__(self, module: nn.Module, attributes: Sequence[LocalAttribute]) -> None:
        self.module = module
        self.stands_in_for: Callable[..., Any] | None = module.__dict__.get("forward")
        self._attributes = attributes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.stands_in_for or partial(type(self.module).forward, self.module)
        if torch.compiler.is_compiling():
            return run(*args, **kwargs)
        with showing(self._attributes):
            return run(*args, **kwargs)


def compute_with_parts(
    module: nn.Module, names: Iterable[str], tensor_run: TensorRun, attributes: Iterable[LocalAttribute] = ()
) -> None:
    """Let modules of a cut module, by name, compute with parts and with local attributes."""
    modules = dict(module.named_modules(remove_duplicate=False))
    chosen = {id(modules[name]): modules[name] for name in names}
    local: dict[nn.Module, list[LocalAttribute]] = {}
    for one in attributes:
        local.setdefault(one.owner, []).append(one)
    for owner, own in local.items():
        if not isinstance(owner, nn.Linear) and id(owner) not in chosen:
            owner.forward = _LocalForward(owner, own)
    for child in _with_wrappers(module, chosen):
        inside = [one for owner in child.modules() for one in local.get(owner, ())]
        if not _is_parts_forward(child.__dict__.get("forward"), tensor_run):
            child.forward = PartsForward(child, child.__dict__.get("forward"), tensor_run, inside)
        compiled = child._compiled_call_impl
        if compiled is not None and not _is_parts_forward(compiled, tensor_run):  # its graph holds the forward
            child._compiled_call_impl = PartsForward(child, compiled, tensor_run, inside)


def _is_parts_forward(forward: Any, tensor_run: TensorRun) -> bool:
    return isinstance(forward, PartsForward) and forward.option == tensor_run.option


def _with_wrappers(module: nn.Module, chosen: dict[int, nn.Module]) -> Iterator[nn.Module]:
    """Yield modules, the children of a root among them, and the results of ``torch.compile`` on them."""
    if id(module) in chosen:  # a program may call the children of the root by themselves
        chosen = {**chosen, **{id(child): child for child in module.children() if list(child.parameters())}}
    yield from chosen.values()
    for child in module.modules():
        if isinstance(child, OptimizedModule) and id(child._orig_mod) in chosen and id(child) not in chosen:
            yield child
