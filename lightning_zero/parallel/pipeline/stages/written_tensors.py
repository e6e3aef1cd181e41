"""Parameters and module buffers that a step writes in place, which runs that do not count cannot undo."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.stages.sources import is_fake

__all__ = ["unwritten"]

_MOST_NUMEL = 2**12  # of a tensor whose values are compared, which shows writes through `.data` too


@contextmanager
def unwritten(tensors: Iterable[tuple[str, Tensor]], *, refuses: bool = True) -> Iterator[None]:
    """Refuse code that writes into tensors; small ones get their values back.

    Values that arrive meanwhile are no writes: of a unit that is gathered, of a step that was deferred.

    Args:
        tensors: By name. Those without memory, as of released units, are passed over.
        refuses: Else small tensors get their values back, and others are not looked at: the code need not run.

    Raises:
        PipelineError: One was written.
    """
    below = torch._C.DisableTorchFunctionSubclass  # released parameters, which have no values
    with torch.no_grad(), below():
        before = [_Before.of(name, tensor) for name, tensor in tensors if _has_values(tensor)]
    yield
    with torch.no_grad(), below():
        written = [one for one in before if one.is_written(refuses=refuses)]
        for one in written:
            if one.values is not None:
                one.tensor.copy_(one.values)
    if written and refuses:
        raise PipelineError(
            f"The step writes into `{written[0].name}` in place. Pipeline stages run a step several times, and what"
            " follows the blocks on the last stage alone, so the write would count more than once there, or not at all"
            " on the other stages. Write in a hook after the step that runs on all stages (`on_train_batch_end`), or,"
            " if it is a module buffer, assign a new tensor in the step."
        )


class _Before(NamedTuple):
    """A tensor as it was."""

    name: str
    tensor: Tensor
    of_class: type[Tensor]
    place: int  # of its memory
    version: int
    values: Tensor | None

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> _Before:
        values = tensor.detach().clone() if tensor.numel() <= _MOST_NUMEL else None
        return cls(name, tensor, type(tensor), tensor.data_ptr(), tensor._version, values)

    def is_written(self, *, refuses: bool) -> bool:
        tensor = self.tensor
        if not _has_values(tensor) or (type(tensor), tensor.data_ptr()) != (self.of_class, self.place):
            return False
        if refuses and tensor._version != self.version:
            return True  # also with the same values, which may be others in a later batch
        if self.values is None:
            return False
        now, values = tensor.detach(), self.values
        return now.shape != values.shape or not bool(((now == values) | ((now != now) & (values != values))).all())


def _has_values(tensor: Tensor) -> bool:
    if is_fake(tensor) or tensor.is_meta or tensor.layout != torch.strided or tensor.is_inference():
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.itemsize
