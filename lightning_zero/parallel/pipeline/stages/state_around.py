"""State of the modules around the blocks: changes by code behind the blocks go to the stages in front of it.

Note [Prefixes]
    A chunk runs the step up to the first block of the next one, so it has the module buffers and attributes as code up
    to there leaves them. The last chunk runs all of the step: after a batch the other stages are given the
    values that differ there. Within a batch that would be too late: the front of the next micro-batch has run before.
    Code that reads there a value that code after its chunk changes is refused.

Note [Who reads]
    In the first batch of a kind of step all reads of attributes are noted, and chunks compare their values at its end.
    From then on only values that are known to change after a chunk are watched. A value that begins to change there in
    a later batch is refused at the end of that batch if the first batch has read it.

Note [State that is not sent]
    Of a value that is not sent (a graph, an object, or a large tensor) the others are told a fingerprint. Who has not
    made the same change to it has an old value, which must not be read any more. So has who has not run the code that
    the last stage has run on tensors without values.

Note [Parts]
    With ``pipeline_step`` and ``pipeline_loss`` each part runs on one stage. A value that the one changes and the other
    reads in the same micro-batch is refused in the first batch.
"""

from __future__ import annotations

import dis
import sys
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.module_state import version_of
from lightning_zero.parallel.pipeline.stages.sources import is_fake
from lightning_zero.parallel.pipeline.stages.split import Split
from lightning_zero.parallel.pipeline.stages.subclasses import subclass_of

__all__ = ["Change", "StateAround"]

Key = tuple[str, str]  # name of a module and of its attribute or module buffer
Exchange = Callable[[Any], list[Any]]  # returns the values of all stages

_MOST_BYTES = 2**16  # of a tensor that is sent
_MOST_ITEMS = 256  # of a list that is sent whole
_DEPTH = 4  # of containers in containers
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_NUMBERS = (bool, int, float, complex, str, type(None))
_OF_MODULES = frozenset(vars(nn.Module()))
_FRAMEWORKS = ("lightning", "pytorch_lightning")


def _of_framework(cls: type[nn.Module]) -> frozenset[str]:
    """Return the attributes that belong to the Trainer: their values hold for this process only."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in _FRAMEWORKS and issubclass(base, nn.Module):
            return frozenset(vars(base()))
    return frozenset()


_RESETS = frozenset({"clear", "copy_", "fill_", "zero_"})  # methods that overwrite all of the old value
_ADDS = frozenset({"add", "append", "extend", "update"})  # methods of lists, sets and dictionaries that read nothing


class _Mark(Enum):
    """Replaces a value that is not sent."""

    MISSING = "missing"  # there is none
    UNSENT = "unsent"  # a graph, an object, or too large


@dataclass(frozen=True)
class Change:
    """A value that code behind the blocks has changed.

    Attributes:
        key: Module and attribute.
        is_buffer: It is a module buffer.
        is_in_place: The object is the same as before the batch.
        value: The new one.
        fingerprint: Of a value that is not sent and that code in front of the blocks may have changed; else None.
    """

    key: Key
    is_buffer: bool
    is_in_place: bool
    value: Any
    fingerprint: Any = None


@dataclass(frozen=True)
class _Sent:
    """A tensor on its way, and whether it lies on the device of its rank."""

    tensor: Tensor
    is_on_device: bool


@dataclass(frozen=True)
class _Appended:
    """New items of a list.

    Attributes:
        start: Index of the first one; those before are as they were before the batch.
        items: As they are sent.
    """

    start: int
    items: list[Any]


@dataclass
class _Watch:
    """A run of a chunk that is watched.

    Attributes:
        refused: Keys that must not be read.
        is_noting: Other reads are noted.
        seen: Keys that were read before they were written.
        written: Keys that were written.
    """

    refused: Collection[Key]
    is_noting: bool
    seen: set[Key] = field(default_factory=set)
    written: set[Key] = field(default_factory=set)


@dataclass
class _View:
    """A chunk's module state at the end of a batch.

    Attributes:
        values: Fingerprints.
        changed: Keys that this batch has changed.
        read: The last micro-batch that has read a key before it has written it.
    """

    values: dict[Key, Any]
    changed: set[Key]
    read: dict[Key, int]


class StateAround:
    """Keeps the state around the blocks alike on all stages.

    Call protocol:
        1. ``begin`` before a batch; ``watched`` around every run of a chunk.
        2. ``compare`` behind the first batch of a kind.
        3. ``changes`` on the last stage, and ``take`` its result on the others.

    Args:
        module: The root.
        split: The cut of the module.
        stage: Of this rank.
        device: Device of this rank.
        is_repeated: Whether all stages run the code in front of their chunks; else the first one alone does.
    """

    def __init__(self, module: nn.Module, split: Split, stage: int, device: torch.device, *, is_repeated: bool) -> None:
        # - State kept equal on all stages
        last = split.num_chunks - 1
        behind = [place for place in split.places if place.block is None and place.chunk == last]  # the head
        inside = {id(child) for place in split.places if place not in behind
                  for child in module.get_submodule(place.name).modules()}  # fmt: skip
        inside |= {id(child) for metric in filter(_is_metric, module.modules()) for child in metric.modules()}
        self._modules = {name: child for name, child in module.named_modules() if id(child) not in inside}
        self._names = {id(child): name for name, child in self._modules.items()}
        self._placed = _modules_elsewhere(module, split, stage)
        self._all = {**self._placed, **self._modules}
        self._root = type(module).__name__
        self._not_kept = _OF_MODULES.union(*map(_of_framework, {type(child) for child in self._modules.values()}))
        self._split = split
        self._device = device
        self._is_repeated = is_repeated
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}
        # - Known changes
        self._behind: dict[str, dict[int, set[Key]]] = {}  # changed behind a chunk, by name of the step's method
        self._reads: dict[str, dict[int, set[Key]]] = {}  # in later micro-batches of first batches, likewise
        self._stale: set[Key] = set()  # that the last stage has not sent
        self._reset: set[Key] = set()  # in modules of places that code behind the blocks changes
        # - The batch that is running
        self._name = ""  # of its method
        self._is_noting = False
        self._num_run = 0  # micro-batches
        self._before: dict[Key, tuple[Any, Any]] = {}  # object and mark
        self._views: dict[int, _View] = {}  # of chunks, at the end of their last run
        self._watch: _Watch | None = None

    def buffers(self) -> dict[Key, Tensor]:
        """Return the module buffers that the last stage has as all code of a step leaves them."""
        modules = self._modules if self._is_repeated else {}
        return {(name, key): buffer for name, child in modules.items() for key, buffer in child._buffers.items()
                if buffer is not None}  # fmt: skip

    def fill(self, buffers: Mapping[Key, Tensor]) -> None:
        """Give the module buffers the values of the last stage."""
        for (name, key), value in buffers.items():
            space: dict[str, Any] = self._modules[name]._buffers
            old = space.get(key)
            device = self._device if old is None else old.device
            _assign(space, key, old, value.to(device), is_in_place=True)

    def begin(self, name: str, *, is_new: bool) -> None:
        """Begin a batch.

        Args:
            name: Of the step's method.
            is_new: Reads are noted, and ``compare`` follows.
        """
        self._name, self._is_noting = name, is_new
        self._num_run = 0
        self._views.clear()
        items = self._items_of(self._all) if is_new else self._items()
        self._before = {key: (value, _mark(value)) for key, _, value in items}

    @contextmanager
    def watched(self, chunk: int, index: int) -> Iterator[None]:
        """Watch which attributes a run of a chunk reads.

        Raises:
            PipelineError: It reads state that code behind it has changed in an earlier micro-batch.
        """
        self._num_run = max(self._num_run, index + 1)
        watch = self._watch_of(chunk, index)
        if watch is not None:
            names = None if watch.is_noting else {name for name, _ in watch.refused}
            with self._installed(watch, [child for name, child in self._modules.items() if not names or name in names]):
                yield
        else:
            yield
        if self._is_noting:
            read = self._views[chunk].read if chunk in self._views else {}
            read.update(dict.fromkeys(() if watch is None else watch.seen, index))
            items = [(key, value) for key, _, value in self._items()]
            changed = {key for key in {key for key, _ in items} | self._before.keys() if self._has_changed(key)}
            self._views[chunk] = _View({key: _fingerprint(value) for key, value in items}, changed, read)

    def _watch_of(self, chunk: int, index: int) -> _Watch | None:
        is_last = chunk == self._split.num_chunks - 1
        is_noting = self._is_noting and (not self._is_repeated or (index > 0 and not is_last))
        refused = set() if is_last else set(self._stale)
        if index > 0 and not self._is_noting and not is_last:
            refused |= self._behind.get(self._name, {}).get(chunk, set())
        return _Watch(refused, is_noting) if refused or is_noting else None

    def compare(self, exchange: Exchange) -> None:
        """Find the state that is changed behind each chunk. Collective: all ranks of a copy.

        Raises:
            PipelineError: On all of them, where a chunk has read such a value.
        """
        given = exchange((self._views, self._changed_in_places()))
        everyone = {chunk: view for views, _ in given for chunk, view in views.items()}
        last = everyone.pop(self._split.num_chunks - 1)
        self._compare_places([changed for _, changed in given])
        if not self._is_repeated:
            self._require_apart(everyone[0], last)
        behind = self._behind.setdefault(self._name, {})
        reads = self._reads.setdefault(self._name, {})
        for chunk, view in sorted(everyone.items()):
            found = {key for key in last.values | view.values if self._is_behind(key, view, last)}
            read = {key for key, index in view.read.items() if index > 0}
            behind.setdefault(chunk, set()).update(found)
            reads.setdefault(chunk, set()).update(read)
            for key in sorted(found & read):
                raise self._error(key, chunk)

    def _changed_in_places(self) -> dict[Key, Any]:
        """Return the fingerprints of the values that the batch has changed in modules that run on other stages."""
        found = {}
        for key, _, value in self._items_of(self._placed):
            if self._has_changed(key):
                found[key] = _fingerprint(value)
        return found

    def _compare_places(self, changed: Sequence[Mapping[Key, Any]]) -> None:
        """Find out which values in modules of other stages code behind the blocks has changed.

        Raises:
            PipelineError: It has run several micro-batches.
        """
        last = changed[(self._split.num_chunks - 1) % self._split.stages]
        for key, value in last.items():
            if value is not None and any(one.get(key, _Mark.MISSING) != value for one in changed):
                self._require_one_microbatch(key)
                self._reset.add(key)

    def _require_one_microbatch(self, key: Key) -> None:
        if self._num_run > 1:
            raise PipelineError(
                f"`{'.'.join(filter(None, key))}` of `{self._root}` is changed by code after the blocks of"
                f" `{self._split.blocks}`, in a module of another pipeline stage, which runs the next micro-batch"
                " before that. Change it in a hook after the step (`on_train_batch_end`), which runs on all stages, or"
                " use `Pipeline(microbatches=1, schedule='gpipe')`."
            )

    def _is_behind(self, key: Key, view: _View, last: _View) -> bool:
        """Say whether code behind a chunk has changed a value."""
        if not self._is_repeated and key not in last.changed:
            return False
        if key in last.values and last.values[key] is None:  # a fake, whose value an earlier stage has
            return key in last.changed and key not in view.changed
        return _differ(view.values.get(key, _Mark.MISSING), last.values.get(key, _Mark.MISSING))

    def _require_apart(self, first: _View, last: _View) -> None:
        """Raise where a part of a step reads state that only the other part, on another stage, has changed."""
        for key in sorted(first.changed & (last.read.keys() | (last.changed & first.read.keys()))):
            name = ".".join(filter(None, key))
            raise PipelineError(
                f"`{name}` of `{self._root}` is changed by `pipeline_step`, which the first pipeline stage runs, and"
                " read or changed by `pipeline_loss`, which the last one runs: neither has the other's value. Compute"
                " it in both from the batch, under two names, or let it go through the blocks with the hidden states."
            )

    # -- Changes from the last stage to the others ---------------------------------------------------------------------

    def changes(self) -> list[Change]:
        """Return the state that this batch has changed, on the last stage."""
        known = set().union(*self._behind.get(self._name, {}).values()) if self._is_repeated else set()
        now = {key: (is_buffer, value) for key, is_buffer, value in self._items()}
        found = []
        kept = {key for key in self._before if key[0] in self._modules or key in self._reset}
        for key in sorted(now.keys() | kept):
            is_buffer, value = now.get(key, (False, _Mark.MISSING))
            if key in known or self._has_changed(key):
                is_in_place = key in self._before and self._before[key][0] is value
                packed = self._packed_change(key, value, is_in_place=is_in_place)
                is_told = packed is _Mark.UNSENT and key not in known and self._is_repeated
                found.append(Change(key, is_buffer, is_in_place, packed, _fingerprint(value) if is_told else None))
        return found

    def take(self, changes: Iterable[Change]) -> None:
        """Take over the last stage's changes.

        Raises:
            PipelineError: A micro-batch of this batch has read an old value.
        """
        behind = self._behind.setdefault(self._name, {})
        for change in changes:
            if self._is_repeated or not self._has_changed(change.key):  # by code that the last stage does not run
                known = set().union(*behind.values())
                differs = self._take(change)
                if differs and change.key in self._reset:
                    self._require_one_microbatch(change.key)
                elif differs and change.key not in known:
                    self._note_behind(change.key)

    def _take(self, change: Change) -> bool:
        """Take over a value; say whether this stage had another one."""
        space = self._space(change)
        name = change.key[1]
        old = space.get(name, _Mark.MISSING)
        if isinstance(change.value, _Appended):
            return self._take_items(change.key, old, change.value)
        if change.value is _Mark.UNSENT:
            is_same = self._has_changed(change.key) and not _has_fake(old)
            if is_same and change.fingerprint is not None:
                is_same = not _differ(_fingerprint(old), change.fingerprint)
            if not is_same:
                self._stale.add(change.key)
            return not is_same
        self._stale.discard(change.key)
        new = self._unpacked(change.value)
        differs = _differ(_fingerprint(old), _fingerprint(new)) or _has_fake(old)
        if differs:
            _assign(space, name, old, new, is_in_place=change.is_in_place)
        return differs

    def _take_items(self, key: Key, old: Any, appended: _Appended) -> bool:
        if type(old) is not list or len(old) < appended.start or key in self._stale:
            self._stale.add(key)
            return True
        mine, items = old[appended.start :], self._unpacked(appended.items)
        differs = _differ(_fingerprint(mine), _fingerprint(items)) or _has_fake(mine)
        if differs:
            old[appended.start :] = items
        return differs

    def _note_behind(self, key: Key) -> None:
        """Watch a value from now on; raise if it was read in this batch."""
        behind, reads = self._behind[self._name], self._reads.get(self._name, {})
        for chunk in range(self._split.num_chunks - 1):
            behind.setdefault(chunk, set()).add(key)
            if self._num_run > 1 and key in reads.get(chunk, set()):
                raise self._error(key, chunk)

    def _packed_change(self, key: Key, value: Any, *, is_in_place: bool) -> Any:
        """Return a value, or the items appended to it, as it is sent."""
        start = _num_kept(self._before[key][1], value) if is_in_place and type(value) is list else 0
        if not is_in_place and isinstance(value, _CONTAINERS) and type(value) not in (list, tuple, dict):
            return _Mark.UNSENT  # containers of other classes are filled, not made
        new = value[start:] if start else value
        packed = self._packed(new)
        if _has_fake(new) or packed is _Mark.UNSENT:
            return _Mark.UNSENT
        return _Appended(start, packed) if start else packed

    def _packed(self, value: Any, depth: int = _DEPTH) -> Any:
        """Return a value as it is sent."""
        if isinstance(value, (_Mark, *_NUMBERS)):
            return value
        if isinstance(value, Tensor):
            if value.requires_grad or value.nbytes > _MOST_BYTES or value.layout is not torch.strided:
                return _Mark.UNSENT
            return _Sent(value.detach().to("cpu", copy=True), value.device == self._device)
        if _is_array(value):
            return value.copy() if value.nbytes <= _MOST_BYTES and not value.dtype.hasobject else _Mark.UNSENT
        items = _entries(value)
        is_whole = depth == _DEPTH or type(value) in (list, tuple, dict)  # others keep their class: they are filled
        if items is None or not is_whole or not depth or len(items) > _MOST_ITEMS:
            return _Mark.UNSENT
        packed = [self._packed(item, depth - 1) for _, item in items]
        if any(item is _Mark.UNSENT for item in packed):
            return _Mark.UNSENT
        if isinstance(value, dict):
            is_known = all(isinstance(key, _NUMBERS) for key, _ in items)
            return dict(zip([key for key, _ in items], packed, strict=True)) if is_known else _Mark.UNSENT
        return tuple(packed) if type(value) is tuple else packed

    def _unpacked(self, value: Any) -> Any:
        if isinstance(value, _Sent):
            return value.tensor.to(self._device) if value.is_on_device else value.tensor
        if isinstance(value, dict):
            return {key: self._unpacked(item) for key, item in value.items()}
        return type(value)(map(self._unpacked, value)) if isinstance(value, (list, tuple)) else value

    def _space(self, change: Change) -> dict[str, Any]:
        child = self._all[change.key[0]]
        buffers: dict[str, Any] = child._buffers
        return buffers if change.is_buffer or change.key[1] in buffers else vars(child)

    def _items(self) -> Iterator[tuple[Key, bool, Any]]:
        """Yield keys, whether they are module buffers, and values of everything that is kept alike."""
        yield from self._items_of(self._modules)
        for one in self._items_of({name: self._placed[name] for name, _ in self._reset if name in self._placed}):
            if one[0] in self._reset:
                yield one

    def _items_of(self, modules: Mapping[str, nn.Module]) -> Iterator[tuple[Key, bool, Any]]:
        for name, child in modules.items():
            for key, value in vars(child).items():
                if key not in self._not_kept and not callable(value):
                    yield (name, key), False, value
            for key, value in child._buffers.items():
                yield (name, key), True, value

    def _has_changed(self, key: Key) -> bool:
        child = self._all[key[0]]
        value = child._buffers.get(key[1], vars(child).get(key[1], _Mark.MISSING))
        before = self._before.get(key)
        return before is None or before[0] is not value or before[1] != _mark(value)

    # -- Who reads -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _installed(self, watch: _Watch, modules: Iterable[nn.Module]) -> Iterator[None]:
        before = [(module, type(module)) for module in modules]
        self._watch = watch
        try:
            for module, cls in before:
                module.__class__ = self._watched_class(cls)
            yield
        finally:
            self._watch = None
            for module, cls in before:
                module.__class__ = cls

    def _watched_class(self, cls: type[nn.Module]) -> type[nn.Module]:
        if cls not in self._classes:

            def read(module: nn.Module, name: str) -> Any:
                # The program may make modules of the class of one: `blocks[:4]` is a new list.
                if name not in self._not_kept and not name.startswith("__") and id(module) in self._names:
                    self._note_read(module, name)
                return cls.__getattribute__(module, name)

            def write(module: nn.Module, name: str, value: Any) -> None:
                if self._watch is not None and id(module) in self._names:
                    self._watch.written.add((self._names[id(module)], name))
                cls.__setattr__(module, name, value)

            self._classes[cls] = subclass_of(cls, {"__getattribute__": read, "__setattr__": write})
        return self._classes[cls]

    def _note_read(self, module: nn.Module, name: str) -> None:
        watch, key = self._watch, (self._names[id(module)], name)
        if watch is None or key in watch.written or not (watch.is_noting or key in watch.refused):
            return
        space = vars(module)
        value = space["_buffers"].get(name, space.get(name))
        if isinstance(value, (Tensor, list, dict, set)):
            method = _next_attribute(2)
            if method in _RESETS:
                watch.written.add(key)
                return
            if method in _ADDS and not isinstance(value, Tensor):
                return
        if key in watch.refused:
            raise self._error(key, None)
        watch.seen.add(key)

    def _error(self, key: Key, chunk: int | None) -> PipelineError:
        where = "before them" if chunk in (None, 0) else f"before the end of pipeline chunk {chunk}"
        name = ".".join(filter(None, key))
        if key in self._stale:
            return PipelineError(
                f"`{name}` of `{self._root}` is changed by code after the blocks of `{self._split.blocks}` and read"
                f" {where}, on a pipeline stage that does not have the new value: numbers, strings, tensors of up to"
                f" {_MOST_BYTES} bytes without a graph, and lists and dictionaries of them are sent. Keep it as one of"
                " these (`.detach()`), or read it after the blocks."
            )
        return PipelineError(
            f"`{name}` of `{self._root}` is changed by code after the blocks of `{self._split.blocks}` and read"
            f" {where} in the next micro-batch, which a pipeline begins before the end of the one before. Read it"
            " after the blocks, assign it in code before them, or use `Pipeline(microbatches=1,"
            " schedule='gpipe')`."
        )


def _is_metric(module: nn.Module) -> bool:
    """Say whether a module is a metric, whose states are merged."""
    return any(cls.__module__.startswith("torchmetrics.") for cls in type(module).__mro__)


def _next_attribute(depth: int) -> str | None:
    """Return the attribute that code above this takes next, if it takes one of the value that it reads now."""
    frame = sys._getframe(depth + 1)
    following = (one for one in dis.get_instructions(frame.f_code) if one.offset > frame.f_lasti)
    one = next(following, None)
    return one.argval if one is not None and one.opname in ("LOAD_ATTR", "LOAD_METHOD") else None


def _entries(value: Any) -> list[tuple[Any, Any]] | None:
    """Return keys and items of a container; None of anything else. Items of sets are in an order of their own."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (set, frozenset)):
        return list(enumerate(sorted(value, key=repr)))
    return list(enumerate(value)) if type(value) in (list, tuple, deque) else None


def _is_array(value: Any) -> bool:
    """Say whether a value is an array of NumPy, which the program may not have."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _mark(value: Any, depth: int = _DEPTH) -> Any:
    """Return a cheap mark that is another one when a value has changed in place."""
    if isinstance(value, _NUMBERS):
        return type(value), value
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if _is_array(value):
        is_read = value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
        return id(value), zlib.crc32(value.tobytes()) if is_read else 0
    is_container = isinstance(value, _CONTAINERS)
    if is_container and depth and len(value) <= _MOST_ITEMS and (entries := _entries(value)) is not None:
        return id(value), tuple((key, _mark(item, depth - 1)) for key, item in entries)
    return id(value), len(value) if is_container else 0


def _num_kept(mark: Any, value: list[Any]) -> int:
    """Return how many items a list had if it has more now, and 0 if some are not the same.

    Of a long list (see ``_mark``) the earlier ones are taken for the same.
    """
    kept = mark[1]
    number = kept if isinstance(kept, int) else len(kept)
    if len(value) <= number:
        return 0
    if isinstance(kept, int):
        return number
    now = tuple((index, _mark(one, _DEPTH - 1)) for index, one in enumerate(value[:number]))
    return number if now == kept else 0


def _fingerprint(value: Any, depth: int = _DEPTH) -> Any:
    """Return a mark that two ranks have alike where their values are; None for a value of another stage."""
    if _has_fake(value):
        return None
    if isinstance(value, (_Mark, *_NUMBERS)):
        return type(value).__name__, repr(value)
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            return "tensor", tuple(value.shape)
        return tuple(value.shape), value.dtype, _digest(value.detach().contiguous().reshape(-1).view(torch.uint8))
    if _is_array(value):
        return value.shape, str(value.dtype), 0 if value.dtype.hasobject else zlib.crc32(value.tobytes())
    entries = _entries(value) if depth else None
    if entries is not None:
        kind = "dict" if isinstance(value, dict) else "tuple" if type(value) is tuple else "list"  # as they are sent
        return kind, tuple((repr(key), _fingerprint(item, depth - 1)) for key, item in entries)
    return (type(value).__name__,)


def _digest(values: Tensor) -> tuple[int, int]:
    """Return a checksum of bytes; that of large tensors is computed on their device."""
    num_added = len(values) // 8 * 8 if len(values) > _MOST_BYTES else 0
    total = int(values[:num_added].clone().view(torch.int64).sum())
    return total, zlib.crc32(values[num_added:].cpu().numpy().tobytes())


def _differ(one: Any, other: Any) -> bool:
    return one is not None and other is not None and one != other


def _has_fake(value: Any, depth: int = _DEPTH) -> bool:
    if depth and isinstance(value, _CONTAINERS):
        return any(_has_fake(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value))
    return is_fake(value)


def _modules_elsewhere(module: nn.Module, split: Split, stage: int) -> dict[str, nn.Module]:
    """Return the modules of places that another stage than the last one runs; of the others, those of the last."""
    last = split.num_chunks - 1
    is_last = stage == last % split.stages
    found = {}
    for place in split.places:
        runs_here = is_last and place.chunk % split.stages == stage
        if not runs_here and (place.block is not None or place.chunk != last):
            for name, child in module.get_submodule(place.name).named_modules(prefix=place.name):
                if not _is_metric(child):
                    found[name] = child
    return found


def _assign(space: dict[str, Any], name: str, old: Any, new: Any, *, is_in_place: bool) -> None:
    if new is _Mark.MISSING:
        space.pop(name, None)
    elif is_in_place and isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape:
        with torch.inference_mode(old.is_inference()), torch.no_grad():
            old.copy_(new)
    elif is_in_place and _is_array(old) and _is_array(new) and old.shape == new.shape:
        old[...] = new
    elif is_in_place and type(old) is type(new) is list:
        old[:] = new
    elif is_in_place and isinstance(old, deque) and type(new) is list:
        old.clear()
        old.extend(new)
    elif is_in_place and isinstance(old, (dict, set)) and type(new) in (dict, list):
        old.clear()
        old.update(new)
    else:
        space[name] = new
