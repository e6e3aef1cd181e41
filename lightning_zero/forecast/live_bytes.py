"""Bytes of tensors that are alive while a program runs, and the moment at which they are most.

Note [Storages]
    Every operation of PyTorch, in forwards, backwards and steps, passes a ``TorchDispatchMode``, also those of
    autograd. A storage counts from the operation that returns it until nobody has it any more; what autograd
    keeps for a backward is counted, which a walk over Python's objects does not see. Memory that a kernel takes and
    gives back by itself is not.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes", "Moment", "OperationKind", "kind_of", "replaced"]

_LIFTED = frozenset({torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default})


@dataclass(frozen=True)
class Moment:
    """The moment at which most bytes were alive.

    Attributes:
        nbytes: Bytes then, without those that are away.
        phase: The part of a step that ran: ``"forward"``, ``"backward"``, ...
        module: Name of the innermost module that ran, or whose backward ran; empty for none.
        operation: The operation that ran.
        parts: Bytes by kind, as ``parts`` of ``LiveBytes`` gave them.
    """

    nbytes: int
    phase: str
    module: str
    operation: str
    parts: tuple[int, ...]


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages on the CPU that operations make, and those of ``adopt``.

    Call protocol:
        1. Enter it before tensors are made that are to be counted.
        2. ``phase`` around a part of a step; ``reset_peak`` where peaks are to be measured anew.
        3. ``live`` and ``peak`` at any time.

    Args:
        parts: Returns bytes by kind, of which the last ones, ``num_away`` of them, are not in the memory in question.
        num_away: See ``parts``.
    """

    def __init__(self, parts: Callable[[], tuple[int, ...]] = tuple, num_away: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts = parts
        self.num_away = num_away
        self.live = 0  # bytes of all storages
        self._sizes: dict[int, int] = {}  # by address of the storage object
        self._ends: dict[int, Any] = {}  # weak references to them
        self._uncounted: set[int] = set()  # of these storages, those made inside `apart`
        self._is_apart = False
        self._is_suspended = False
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._running: list[nn.Module] = []
        # The number of autograd's nodes when a forward ended, and the module, which may end before this does.
        self._ended: list[tuple[int, weakref.ref[nn.Module]]] = []
        self._phase = ""
        self._most = -1
        self._at: tuple[str, nn.Module | int | None, Any, tuple[int, ...]] = ("", None, "", ())
        self._context = ExitStack()

    def __enter__(self) -> LiveBytes:
        """Begin to count."""
        counter, resize = self, torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in counter._sizes:
                counter._note(storage)
                counter._sample("resize_")
            return result

        self._context.enter_context(replaced(torch.UntypedStorage, "resize_", counted))
        for handle in (
            register_module_forward_pre_hook(self._unless_suspended("_begin_module")),
            register_module_forward_hook(self._unless_suspended("_end_module"), always_call=True),
        ):
            self._context.callback(handle.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End counting."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._context.close()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count its results."""
        result = func(*args, **(kwargs or {}))
        self.count(result, func)
        return result

    def name_modules(self, module: nn.Module) -> None:
        """Call modules by their names in ``module``."""
        for name, child in module.named_modules():
            self._names[child] = name or type(module).__name__

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Call a part of a step by a name."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Do not count storages that are made inside: they are in another memory."""
        before, self._is_apart = self._is_apart, True
        try:
            yield
        finally:
            self._is_apart = before

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Count nothing inside, and compute everything; in other threads too."""
        before, self._is_suspended = self._is_suspended, True
        try:
            with _disable_current_modes():
                yield
        finally:
            self._is_suspended = before

    def _unless_suspended(self, name: str) -> Callable[..., None]:
        def hook(*call: Any) -> None:
            if not self._is_suspended:
                getattr(self, name)(*call)

        return hook

    # -- Bytes -----------------------------------------------------------------------------------------------------

    def count(self, result: Any, func: Any) -> None:
        """Count the storages of the results of an operation that makes tensors."""
        if not kind_of(func).makes_tensors:
            return
        if isinstance(result, Tensor):
            self._note_tensor(result)
        elif result is not None:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._note_tensor(leaf)
        self._sample(func)

    def adopt(self, *tensors: Tensor) -> None:
        """Count tensors that were made before."""
        for tensor in tensors:
            self._note_tensor(tensor)

    def _note_tensor(self, tensor: Tensor) -> None:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.device.type == "cpu":  # that of a fake tensor is on the meta device
                self._note(storage)

    def _note(self, storage: torch.UntypedStorage) -> None:
        """Take note of a storage, or of its new size."""
        key, nbytes = storage._cdata, storage.nbytes()
        before = self._sizes.get(key)
        if before is None:
            self._ends[key] = weakref.ref(storage, lambda _: self._forget(key))
            if self._is_apart:
                self._uncounted.add(key)
        if key in self._uncounted:
            nbytes = 0
        if before != nbytes:
            self._sizes[key] = nbytes
            self.live += nbytes - (before or 0)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        self._uncounted.discard(key)
        del self._ends[key]

    # -- The peak --------------------------------------------------------------------------------------------------

    def reset_peak(self) -> None:
        """Measure the peak from here."""
        self._most = -1

    def _sample(self, operation: Any) -> None:
        if self.live <= self._most:
            return
        parts = self.parts()
        nbytes = self.live - sum(parts[len(parts) - self.num_away :])
        if nbytes > self._most:
            self._most = nbytes
            node = None if self._running else torch._C._current_autograd_node()
            place = self._running[-1] if self._running else None if node is None else node._sequence_nr()
            self._at = (self._phase, place, operation, parts)

    @property
    def peak(self) -> Moment:
        """The moment of the most bytes since ``reset_peak``."""
        phase, place, operation, parts = self._at
        if isinstance(place, int):
            found = bisect_left(self._ended, place + 1, key=lambda one: one[0])
            place = self._ended[found][1]() if found < len(self._ended) else None
        name = "" if place is None else self._names.get(place, type(place).__name__)
        return Moment(max(self._most, 0), phase, name, str(operation), parts)

    # -- Modules ---------------------------------------------------------------------------------------------------

    def _begin_module(self, module: nn.Module, args: Any) -> None:
        self._running.append(module)

    def _end_module(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._running and self._running.pop() is not module:  # those that an error has ended
            pass
        self._ended.append((torch._C._autograd._get_sequence_nr(), weakref.ref(module)))


class OperationKind(Enum):
    """The use of memory by an operation: makes tensors, writes its arguments, shows their memory, or communicates."""

    FRESH = "fresh"
    LIFTED = "lifted"  # a tensor that was made elsewhere, from Python's values
    IN_PLACE = "in place"
    VIEW = "view"
    COLLECTIVE = "collective"

    @property
    def makes_tensors(self) -> bool:
        """Whether results are new tensors."""
        return self in (OperationKind.FRESH, OperationKind.LIFTED)


@cache
def kind_of(func: Any) -> OperationKind:
    """Return the kind of an operation, from its schema."""
    schema = func._schema
    if func.namespace == "c10d":
        return OperationKind.COLLECTIVE
    if func in _LIFTED:
        return OperationKind.LIFTED
    aliases = [one.alias_info for one in schema.returns]
    if any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments):
        is_all = all(one is not None and one.is_write for one in aliases)
        return OperationKind.IN_PLACE if is_all else OperationKind.FRESH
    return OperationKind.VIEW if any(one is not None for one in aliases) else OperationKind.FRESH


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an attribute have another value for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
