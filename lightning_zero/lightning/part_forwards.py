"""Forwards inside of which parameters are the parts that tensor or expert parallelism has left on this rank.

To all other code a parameter has the whole shape (``lightning_zero/engine/buffers/part_parameter.py``). The modules are
those of the plan that were verified as a whole (blocks, embeddings and heads), and the experts of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from lightning_zero.engine.buffers.part_parameter import computing_with_parts
from lightning_zero.errors import PartialParameterError

__all__ = ["PartsForward", "TensorRun", "compute_with_parts"]


@dataclass
class TensorRun:
    """Whether a strategy with the same option runs the module: another one would train parts as wholes."""

    size: int
    is_running: bool = True
    option: str = "tensor_parallel"


class PartsForward:
    """Stands in for a forward of one module. Copies of the module get a copy that is theirs.

    Args:
        module: Its parameters are parts in the call.
        run: The forward that it stands in for; None: that of the module's class.
        tensor_run: Of the cut module.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any] | None, tensor_run: TensorRun) -> None:
        self.module = module
        self.params = list(module.parameters())
        self.stands_in_for = run
        self._tensor_run = tensor_run

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
        with computing_with_parts(self.params):
            return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.stands_in_for is not None:
            return self.stands_in_for(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def compute_with_parts(module: nn.Module, names: Iterable[str], tensor_run: TensorRun) -> None:
    """Let modules of a cut module, by name, compute with parts."""
    modules = dict(module.named_modules(remove_duplicate=False))
    chosen = {id(modules[name]): modules[name] for name in names}
    for child in _with_wrappers(module, chosen):
        if not isinstance(child.__dict__.get("forward"), PartsForward):
            child.forward = PartsForward(child, child.__dict__.get("forward"), tensor_run)
        compiled = child._compiled_call_impl
        if compiled is not None and not isinstance(compiled, PartsForward):
            child._compiled_call_impl = PartsForward(child, compiled, tensor_run)  # its graph holds the forward


def _with_wrappers(module: nn.Module, chosen: dict[int, nn.Module]) -> Iterator[nn.Module]:
    """Yield modules, the children of a root among them, and the results of ``torch.compile`` on them."""
    if id(module) in chosen:  # a program may call the children of the root by themselves
        chosen = {**chosen, **{id(child): child for child in module.children() if list(child.parameters())}}
    yield from chosen.values()
    for child in module.modules():
        if isinstance(child, OptimizedModule) and id(child._orig_mod) in chosen and id(child) not in chosen:
            yield child
