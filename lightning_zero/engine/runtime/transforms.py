"""Parameters as arguments of ``torch.func``'s transforms, which read values beneath ``__torch_function__``.

``grad``, ``vjp``, ``jvp`` and ``vmap`` wrap the tensors that they are given in C++, so a class of ours is not asked: of
a released parameter they would see the placeholder, of one with a deferred step the values before it. The two functions
of PyTorch that call C++ are therefore replaced, once, when a module is sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap

from lightning_zero.engine.buffers.parameter import call_with_values

__all__ = ["explain_transform", "serve_transforms"]


def serve_transforms() -> None:
    """Let transforms of ``torch.func`` gather, or refuse by name, the parameters that they are given."""
    for module, name in ((eager_transforms, "_wrap_for_grad"), (vmap, "_add_batch_dim")):
        wrap = getattr(module, name)
        if wrap.__module__ != __name__:
            setattr(module, name, _with_values(wrap))


def _with_values(wrap: Callable[..., Any]) -> Callable[..., Any]:
    def transform(tensor: torch.Tensor, *args: Any) -> Any:
        return wrap(tensor, *args)

    def wrapped(tensor: torch.Tensor, *args: Any) -> Any:
        return call_with_values(transform, tensor, *args)

    transform.__name__ = "torch.func"  # in errors
    return wrapped


def explain_transform(error: BaseException) -> None:
    """Raise an error with the remedy if PyTorch has refused a transform because of the engine's hooks.

    Raises:
        RuntimeError: That is the case.
    """
    if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
        raise RuntimeError(
            "`torch.func.grad`, `vjp`, `jacrev` and `hessian` do not work inside a training step, nor inside `gathered`"
            " with gradients on, where parameters are sharded: weights that autograd saves have hooks there, which"
            " PyTorch does not allow. In a step use `torch.autograd.grad(..., create_graph=True)`, `torch.func.jvp` or"
            " `jacfwd`. Elsewhere put `torch.no_grad()` around `gathered`: transforms make gradients there, too."
        ) from error
