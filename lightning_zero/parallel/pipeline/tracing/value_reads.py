"""Reads of a fake's values that PyTorch's dispatcher does not see: by NumPy, pickle, DLPack, or as a text."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from lightning_zero.errors import PipelineError

__all__ = ["value_reads_refused"]

_GUESSED = ("numpy", "__array__", "__format__", "tolist")
_READS = ("numpy", "__array__", "tolist", "__dlpack__", "__reduce_ex__", "__format__", "data_ptr")


@contextmanager
def value_reads_refused(mode: Any, is_between: Callable[[], bool], advice: Callable[[], str]) -> Iterator[None]:
    """Refuse reads of values of fakes.

    Args:
        mode: Whose fakes are watched.
        is_between: Says whether code between modules is running.
        advice: Returns a sentence for the error.
    """
    before = {name: vars(FakeTensor).get(name) for name in _READS}
    for name in _READS:
        setattr(FakeTensor, name, _refusing(name, mode, is_between, advice))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                delattr(FakeTensor, name)
            else:
                setattr(FakeTensor, name, value)


def _refusing(name: str, mode: Any, is_between: Callable[[], bool], advice: Callable[[], str]) -> Callable[..., Any]:
    read = getattr(FakeTensor, name)

    def refusing(fake: Tensor, *args: Any, **kwargs: Any) -> Any:
        if fake.fake_mode is mode and is_between() and _is_read(name, fake):  # type: ignore[attr-defined]
            if name in _GUESSED and mode.guesses(fake):
                with unset_fake_temporarily():
                    return getattr(torch.ones(fake.shape, dtype=fake.dtype), name)(*args, **kwargs)
            raise PipelineError(
                f"The step reads the values of a tensor of an earlier pipeline stage between the modules (`{name}`, as"
                " `tensor.numpy()`, `torch.save` and a text of one number do), and this stage does not"
                " have them. Move the code into a block, or write `pipeline_step` and"
                f" `pipeline_loss`.{advice()}"
            )
        return read(fake, *args, **kwargs)

    return refusing


def _is_read(name: str, fake: Tensor) -> bool:
    """Say whether a method reads values for the caller of the caller."""
    caller = sys._getframe(2)
    if name == "__format__":
        return fake.dim() == 0
    if name == "data_ptr":  # copies of PyTorch's ask whether there is memory
        return not str(caller.f_globals.get("__name__")).startswith("torch.")
    return name != "__reduce_ex__" or caller.f_code is not copy.copy.__code__
