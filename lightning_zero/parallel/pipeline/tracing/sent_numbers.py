"""Numbers that modules of earlier stages return or keep in attributes, sent with the tensors of a micro-batch.

Note [Numbers]
    A stage knows the numbers that a module of another stage returns from its forward on fakes. A block that counts its
    calls counts them on its own stage alone, so from the second call on the other stages would know an old number. So
    the stage that computes sends, with every micro-batch, the numbers among the outputs of its modules, and those
    attributes of them that code between the modules has read after a call when the step was described. They go the way
    of sources. Objects and strings are not sent: a checksum of the numbers in them is, and another one is an error.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.module_state import OF_MODULES
from lightning_zero.parallel.pipeline.stages.sources import Shape, Source
from lightning_zero.parallel.pipeline.stages.subclasses import subclass_of
from lightning_zero.parallel.pipeline.tracing.object_state import held_leaves

__all__ = ["ABSENT", "NUMBER", "NumberReads", "decoded", "encoded", "is_number", "is_sent"]

NUMBER = Shape((2,), (1,), torch.int64, torch.device("cpu"), requires_grad=False, is_fake=False)  # of a message

_BOOL, _INT, _FLOAT, _NONE, _CHECKSUM, _ABSENT = range(6)
_NUMBERS = (bool, int, float, complex, str)
_WITH_TEXT = (Enum, Number, slice, range, bytes)  # their text says all of them
ABSENT = object()  # in the place of an attribute that a module does not have
_MOST_BITS = 63
_MOST_LEAVES = 1024  # of an object that has a checksum


def is_number(value: Any) -> bool:
    """Say whether a value is a number that is sent as it is."""
    return isinstance(value, (bool, int, float)) or _is_of_numpy(value)


def is_sent(value: Any) -> bool:
    """Say whether a value is a number, or a string or object with numbers in it."""
    return (
        _is_of_numpy(value)
        or isinstance(value, _NUMBERS)
        or (not isinstance(value, (Tensor, nn.Module)) and bool(_numbers_in(value)))
    )


def encoded(value: Any, device: torch.device) -> Tensor:
    """Return a number, or the checksum of the numbers in another value, as a tensor (2,) of int64."""
    return torch.tensor(_encoded(value), dtype=torch.int64, device=device)


def _encoded(value: Any) -> tuple[int, int]:
    if value is ABSENT:
        return _ABSENT, 0
    if _is_of_numpy(value):
        value = value.item()
    if value is None:
        return _NONE, 0
    if type(value) is bool:
        return _BOOL, int(value)
    if type(value) is int and value.bit_length() <= _MOST_BITS:
        return _INT, value
    if type(value) is float:
        return _FLOAT, struct.unpack("<q", struct.pack("<d", value))[0]
    return _CHECKSUM, zlib.crc32(repr(_numbers_in(value)).encode())


def decoded(message: Tensor, value: Any, source: Source) -> Any:
    """Return the number that was sent.

    Args:
        message: As ``encoded`` has returned it.
        value: The value that this stage knows.
        source: The place that the number comes from.

    Raises:
        PipelineError: Numbers in an object differ, which is not sent.
    """
    kind, bits = message.tolist()
    like: Callable[[Any], Any] = type(value) if _encoded(value)[0] == kind and _is_of_numpy(value) else _as_it_is
    if kind == _BOOL:
        return like(bool(bits))
    if kind == _INT:
        return like(bits)
    if kind in (_NONE, _ABSENT):
        return None if kind == _NONE else ABSENT
    if kind == _FLOAT:
        return like(struct.unpack("<d", struct.pack("<q", bits))[0])
    if _encoded(value) == (kind, bits):
        return value
    place = "returns" if source.left is None else f"keeps in its attribute `{'.'.join(filter(None, source.left))}`"
    raise PipelineError(
        f"`{source.module}` lies on an earlier pipeline stage, and {place} a `{type(value).__name__}` with numbers or"
        " strings that this stage does not know, because a block counts or keeps them. Only plain numbers (`bool`,"
        " `int`, `float`) and tensors are sent: let it return them, alone or in tuples, lists and dictionaries, or keep"
        " them in attributes of their own."
    )


def _numbers_in(value: Any) -> list[Any]:
    """Return the numbers in an object."""
    found = []
    for number, leaf in enumerate(held_leaves(value)):
        if number == _MOST_LEAVES:
            break
        if isinstance(leaf, _NUMBERS) or _is_of_numpy(leaf):
            found.append(leaf)
        elif isinstance(leaf, _WITH_TEXT):
            found.append(repr(leaf))
        elif _is_array(leaf):
            found.append((leaf.shape, str(leaf.dtype), zlib.crc32(leaf.tobytes())))
    return found


def _is_of_numpy(value: Any) -> bool:
    """Say whether a value is a number of NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.number, numpy.bool_))


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject


def _as_it_is(value: Any) -> Any:
    return value


class NumberReads:
    """Lets modules tell which of their attributes with numbers are read; keep it, because it keeps their classes."""

    def __init__(self) -> None:
        self._note: Callable[[nn.Module, str, Any], None] | None = None
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}

    @contextmanager
    def watched(self, modules: Sequence[nn.Module], note: Callable[[nn.Module, str, Any], None]) -> Iterator[None]:
        """Watch modules of the program; of those of PyTorch it is rates of dropout that change.

        Args:
            modules: To be watched.
            note: Called with the module, the name of the attribute, and its value.
        """
        before = [(module, type(module)) for module in modules if _may_change(type(module))]
        outer, self._note = self._note, note
        try:
            for module, cls in before:
                module.__class__ = self._watched_class(cls)
            yield
        finally:
            self._note = outer
            for module, cls in before:
                module.__class__ = cls

    def _tell(self, module: nn.Module, name: str, value: Any) -> None:
        if self._note is not None:
            self._note(module, name, value)

    def _watched_class(self, cls: type[nn.Module]) -> type[nn.Module]:
        if cls not in self._classes:

            def read(module: nn.Module, name: str) -> Any:
                try:
                    value = cls.__getattribute__(module, name)
                except AttributeError:
                    registered = (vars(module)[kept] for kept in ("_parameters", "_buffers", "_modules"))
                    if not (name.startswith("__") or any(name in kept for kept in registered)):
                        self._tell(module, name, ABSENT)
                    raise
                if name not in OF_MODULES and not name.startswith("__") and not callable(value):
                    self._tell(module, name, value)
                return value

            self._classes[cls] = subclass_of(cls, {"__getattribute__": read})
        return self._classes[cls]


def _may_change(cls: type[nn.Module]) -> bool:
    return not cls.__module__.startswith("torch.") or cls.__module__ == "torch.nn.modules.dropout"
