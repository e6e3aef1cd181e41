"""Parameters and module buffers that a step writes in place, which runs that do not count cannot undo."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.stages.sources import is_fake

__all__ = ["unwritten"]

_MOST_NUMEL = 2**12  # of a tensor whose values are compared, which shows writes through `.data` too


@contextmanager
def unwritten(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
    """Refuse code that writes into tensors; small ones get their values back.

    Args:
        tensors: By name. Those without memory, as of released units, are passed over.

    Raises:
        PipelineError: One was written.
    """
    below = torch._C.DisableTorchFunctionSubclass  # released parameters, which have no values
    with torch.no_grad(), below():
        before = [
            (name, tensor, tensor._version, tensor.detach().clone() if tensor.numel() <= _MOST_NUMEL else None)
            for name, tensor in tensors
            if _has_values(tensor)
        ]
    yield
    written = []
    with torch.no_grad(), below():
        for name, tensor, version, values in before:
            if _is_written(tensor, version, values):
                written.append(name)
                if values is not None:
                    tensor.copy_(values)
    if written:
        raise PipelineError(
            f"The step writes into `{written[0]}` in place. Pipeline stages run a step several times, and what follows"
            " the blocks on the last stage alone, so the write would count more than once there, or not at all on the"
            " other stages. Write in a hook after the step that runs on all stages (`on_train_batch_end`), or, if it is"
            " a module buffer, assign a new tensor in the step."
        )


def _has_values(tensor: Tensor) -> bool:
    if is_fake(tensor) or tensor.is_meta or tensor.layout != torch.strided or tensor.is_inference():
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.itemsize


def _is_written(tensor: Tensor, version: int, values: Tensor | None) -> bool:
    if not _has_values(tensor):
        return False  # its unit was released
    if values is None:
        return tensor._version != version
    now = tensor.detach()
    is_same = (now == values) | ((now != now) & (values != values))
    return now.shape != values.shape or not bool(is_same.all())
