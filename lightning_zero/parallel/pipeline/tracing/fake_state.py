"""Modules with fakes in place of their tensors, for forwards that compute nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from lightning_zero.parallel.pipeline.stages.attributes import attribute_spaces
from lightning_zero.parallel.pipeline.stages.sources import describe_tensor, is_fake
from lightning_zero.parallel.pipeline.tracing.fake_mode import Mode, empty_like

__all__ = ["fake_state"]


@contextmanager
def fake_state(modules: Sequence[nn.Module], mode: Mode) -> Iterator[None]:
    """Show modules with fakes in place of their parameters, module buffers, and tensors in attributes.

    Args:
        modules: The outermost ones.
        mode: Of the fakes.
    """
    children = list({id(child): child for module in modules for child in module.modules()}.values())
    params = {id(param): param for child in children for param in child._parameters.values() if param is not None}
    with mode:
        fakes = {
            key: nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device=param.device), param.requires_grad)
            for key, param in params.items()
        }
    with _fake_tensors(modules, mode), ExitStack() as stack:
        for module in modules:
            named: dict[str, Tensor] = {
                name: fakes[id(one)] for name, one in module.named_parameters(remove_duplicate=False)
            }
            stack.enter_context(_reparametrize_module(module, named))
        yield


@contextmanager
def _fake_tensors(modules: Sequence[nn.Module], mode: Mode) -> Iterator[None]:
    """Show fakes in place of module buffers, and of tensors in attributes."""
    spaces = {id(space): space for module in modules for space in attribute_spaces(module).values()}
    before = {key: dict(space) for key, space in spaces.items()}
    made: dict[int, Tensor] = {}
    with mode:
        for space in spaces.values():
            for name, value in space.items():
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not is_fake(value):
                    space[name] = made.setdefault(id(value), empty_like(describe_tensor(value)))
    try:
        yield
    finally:
        for key, space in spaces.items():
            space.clear()
            space.update(before[key])
