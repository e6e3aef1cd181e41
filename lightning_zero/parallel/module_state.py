"""The state of a module that a forward may change, kept for the recomputation of that forward.

Note [One forward, computed twice]
    A recomputation stands for a forward that has happened. It finds the module buffers and attributes as that forward
    found them, because its result must be the same (the power iteration of a spectral norm starts from the same
    vectors), and leaves them as they are by now, because the forward has changed them already (the running statistics
    of batch norm count a batch once). Buffers are not written back: the recomputation has copies, which autograd may
    keep, and the module gets its own tensors again.
"""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import cached_property, lru_cache, partial
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.errors import PipelineError

__all__ = [
    "LIBRARIES",
    "OF_MODULES",
    "AttributeState",
    "HookState",
    "KeptValues",
    "ModuleState",
    "RunAgain",
    "assign_slots",
    "contents_put_back",
    "copies_of",
    "fields_of",
    "is_empty_cache",
    "is_of_the_program",
    "put_back",
    "set_buffer",
    "set_field",
    "slots_of",
    "unregistered_modules",
    "version_of",
    "without_caches",
]

_SMALL_BYTES = 2**16  # buffers of up to this size are copied always
_PLAIN = (bool, int, float, complex, str, type(None), Tensor)  # attributes that are bound anew, not changed in place
_MISSING = object()


class RunAgain:
    """A call of a module that runs again: every run finds the module's state as the first one did.

    Args:
        module: Whose buffers and attributes, with those of its submodules, are kept.
        run: Calls it.
        unwritten: Large buffers that calls leave alone, as ``(number of the submodule, name)``; kept up to date.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any], unwritten: set[tuple[int, str]]) -> None:
        self._module = module
        self._run = run
        self._unwritten = unwritten
        self._start: ModuleState | None = None  # from the first run on
        self._caches: dict[str, Any] = {}  # of keys and values, among the arguments, as the first run found them

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call."""
        if self._start is None:
            self._caches = _copied_caches(kwargs)
            self._start = ModuleState(self._module.modules(), self._unwritten)
            result = self._run(*args, **kwargs)
            self._start.drop_unwritten(self._unwritten)
            return result
        with self._start.shown():
            return self._run(*args, **{**kwargs, **_copied_caches(self._caches)})


class ModuleState:
    """Buffers and plain attributes of modules, as they are now.

    Args:
        modules: The modules, without their submodules.
        unwritten: Large buffers that are not to be written, and not copied, as ``(number of the module, name)``.
    """

    def __init__(self, modules: Iterable[nn.Module], unwritten: Collection[tuple[int, str]] = ()) -> None:
        self._modules = list(modules)
        self._attributes = [
            {key: value for key, value in vars(child).items() if _is_plain(value)} for child in self._modules
        ]
        self._others = [
            {key: value for key, value in vars(child).items() if not _is_plain(value)} for child in self._modules
        ]
        self._buffers = [dict(child._buffers) for child in self._modules]
        places = [
            (number, key, buffer)
            for number, buffers in enumerate(self._buffers)
            for key, buffer in buffers.items()
            if buffer is not None
        ]
        self._large = [  # with their versions
            (number, key, buffer, version_of(buffer))
            for number, key, buffer in places
            if _is_large(self._modules[number], buffer)
        ]
        without = {id(buffer) for number, key, buffer, _ in self._large if (number, key) in unwritten}
        copied = {id(buffer): buffer for _, _, buffer in places if id(buffer) not in without}
        self._copies = copies_of(copied)  # by `id` of the buffer, which stays alive

    def drop_unwritten(self, unwritten: set[tuple[int, str]]) -> None:
        """Give up the copies of large buffers that the forward has not written, and make none in later calls.

        Raises:
            RuntimeError: It has written one that no call before has, so that there is no copy.
        """
        for number, key, buffer, version in self._large:
            child = self._modules[number]
            if child._buffers.get(key) is not buffer or version_of(buffer) == version:
                unwritten.add((number, key))
                self._copies.pop(id(buffer), None)
            elif id(buffer) not in self._copies:
                unwritten.discard((number, key))
                raise RuntimeError(
                    f"`{key}` of a `{type(child).__name__}` was changed in place by a forward, and was not in its"
                    f" earlier forwards. Activation checkpointing computes this forward again, and keeps no copy of a"
                    f" module buffer of {buffer.nbytes} bytes that seems constant. Assign a new tensor"
                    f" (`self.{key} = ...`), or leave the module out of `activation_checkpointing`."
                )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Put copies of this state into the modules for a while; their present state comes back afterwards."""
        copies = copies_of(self._copies)  # the module may run once more
        buffers_now = [dict(child._buffers) for child in self._modules]
        for child, buffers in zip(self._modules, self._buffers, strict=True):
            _refill(child._buffers, {key: copies.get(id(buffer), buffer) for key, buffer in buffers.items()})
        attributes_now = [
            _bind(vars(child), attributes) for child, attributes in zip(self._modules, self._attributes, strict=True)
        ]
        try:
            yield
        finally:
            for child, attributes, others in zip(self._modules, attributes_now, self._others, strict=True):
                _bind(vars(child), attributes, others)
            for child, buffers in zip(self._modules, buffers_now, strict=True):
                _refill(child._buffers, buffers)


class AttributeState:
    """Attributes of modules now, and the contents of those that are lists, sets, arrays, tensors and objects.

    Module buffers, hooks and submodules are not among them. Modules in plain lists, dictionaries and objects are, with
    their module buffers.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._spaces = [(vars(child), dict(vars(child))) for child in self._modules]
        self._kept = KeptValues()
        for (_, attributes), child in zip(self._spaces, self._modules, strict=True):
            for key, value in attributes.items():
                if key not in OF_MODULES:
                    self._kept.add(value, f"{type(child).__name__}.{key}")
        for name, child in _unregistered(self._modules, self._kept.modules):
            self._kept.add_module(child, name)

    def restore(self) -> None:
        """Restore the attributes."""
        for space, attributes in self._spaces:
            for key in [key for key in space if key not in attributes]:
                del space[key]
            space.update(attributes)
        self._kept.put_back()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Put this state into the modules for a while; their present state comes back afterwards."""
        now = AttributeState(self._modules)
        self.restore()
        try:
            yield
        finally:
            now.restore()

    @contextmanager
    def large_arrays_locked(self) -> Iterator[None]:
        """Refuse writes into NumPy arrays that are too large for a copy.

        Raises:
            PipelineError: There is one.
        """
        locked = [(name, array) for name, array in self._kept.large if array.flags.writeable]
        for _, array in locked:
            array.flags.writeable = False
        try:
            yield
        except ValueError as error:
            if not locked or "read-only" not in str(error):
                raise
            found = ", ".join(f"`{name}` ({array.nbytes} bytes)" for name, array in locked)
            raise PipelineError(
                f"The step writes into a NumPy array of more than {_MOST_OF_ARRAY} bytes, of {found}. Pipeline stages"
                " run a step in advance to describe it, and undo changes in smaller arrays only. Keep it"
                " as a tensor (`torch.from_numpy(...)`), or write into it in `on_train_batch_end`."
            ) from error
        finally:
            for _, array in sorted(locked, key=lambda one: one[1].base is not None):  # views behind their base arrays
                array.flags.writeable = True


@contextmanager
def put_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the attributes of modules, and their contents that are changed in place.

    Raises:
        PipelineError: A NumPy array that is too large for a copy was written.
    """
    before = AttributeState(modules)
    try:
        with before.large_arrays_locked():
            yield
    finally:
        before.restore()


@contextmanager
def contents_put_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore lists, objects, arrays and the like among the attributes of modules, and not the attributes."""
    kept = KeptValues()
    for child in modules:
        for key, value in vars(child).items():
            if key not in OF_MODULES and not isinstance(value, Tensor):
                kept.add(value, f"{type(child).__name__}.{key}")
    try:
        yield
    finally:
        kept.put_back()


def set_buffer(module: nn.Module, name: str, value: Tensor | None, device: torch.device) -> None:
    """Give a module buffer the value of another rank, in its memory if it has the shape.

    Args:
        module: Has the buffer.
        name: Of the buffer.
        value: On any device.
        device: Of a buffer that there is not yet.
    """
    old = module._buffers.get(name)
    if value is None or old is None or (old.shape, old.dtype) != (value.shape, value.dtype):
        module._buffers[name] = None if value is None else value.to(device if old is None else old.device)
        return
    with torch.inference_mode(old.is_inference()), torch.no_grad():
        old.copy_(value)


def unregistered_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return modules in plain lists, dictionaries and objects among the attributes of a module, with their names."""
    modules = list(module.modules())
    kept = KeptValues()
    for child in modules:
        for key, value in vars(child).items():
            if key not in OF_MODULES:
                kept.walk(value, f"{type(child).__name__}.{key}", keep=_ignore)
    return list(_unregistered(modules, kept.modules))


def _unregistered(modules: Iterable[nn.Module], found: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yield those of ``found`` that are no submodules, also those that are added meanwhile."""
    known: set[nn.Module] = set()
    if found:
        for module in modules:
            known.update(child for _, child in module.named_modules(memo=known))
    yield from ((name, one) for name, one in found if one not in known)


class KeptValues:
    """Attributes that can change in place: lists and the like, arrays, tensors, and objects of the program's classes.

    Attributes:
        modules: Modules among them, with the names of the attributes; they are not kept.
        large: NumPy arrays that are too large for a copy, likewise.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # values that are alive, by `id`
        self._undo: list[Callable[[], None]] = []
        self.modules: list[tuple[str, nn.Module]] = []
        self.large: list[tuple[str, Any]] = []

    def put_back(self) -> None:
        """Undo the changes since."""
        for undo in self._undo:
            undo()

    def add(self, value: Any, name: str) -> None:
        """Keep a value as it is now, with its contents."""
        self.walk(value, name, keep=self._keep)

    def add_module(self, module: nn.Module, name: str) -> None:
        """Keep attributes and module buffers of a module, and of its submodules."""
        for child in module.modules():
            for space in (vars(child), child._buffers):
                self._undo.append(partial(_refill_with, space, dict.clear, dict.update, dict(space)))
                for key, value in space.items():
                    if key not in OF_MODULES:
                        self.add(value, name)

    def walk(self, value: Any, name: str, *, keep: Callable[[Any, str], None], depth: int = 3) -> None:
        """Call ``keep`` with a value and those that it holds, and append modules to ``modules``."""
        if isinstance(value, (*_UNCHANGING, nn.Parameter)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self.modules.append((name, value))
            return
        keep(value, name)
        if depth and len(self._seen) < _MOST_KEPT:
            for one in _held_by(value):
                self.walk(one, name, keep=keep, depth=depth - 1)

    def _keep(self, value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            if not value.requires_grad:
                memory = value.data if _has_plain_memory(value) else None
                self._undo.append(partial(_write_back, value, version_of(value), value.detach().clone(), memory))
        elif _is_array(value):
            if value.nbytes > _MOST_OF_ARRAY:
                self.large.append((name, value))
            elif value.flags.writeable:
                self._undo.append(partial(_write_array_back, value, value.copy()))
        else:
            self._keep_items(value)
            slots = slots_of(value)
            if slots:
                self._undo.append(partial(assign_slots, value, slots))
            if _has_kept_attributes(value):
                self._undo.append(partial(_refill_with, vars(value), dict.clear, dict.update, dict(vars(value))))

    def _keep_items(self, value: Any) -> None:
        for kind, fill in _CONTAINERS:
            if isinstance(value, kind):
                content = dict(value) if isinstance(value, dict) else list(value)
                self._undo.append(partial(_refill_with, value, kind.clear, fill, content))
                return


_MOST_KEPT = 10_000
_MOST_OF_ARRAY = 2**26  # bytes of a NumPy array that is copied
_UNCHANGING = (bool, int, float, complex, str, bytes, type(None), type, FunctionType, BuiltinFunctionType, ModuleType)
_CONTAINERS: tuple[tuple[Any, Callable[[Any, Any], None]], ...] = (  # the first matching type decides
    (OrderedDict, OrderedDict.update),
    (dict, dict.update),
    (list, list.extend),
    (set, set.update),
    (deque, deque.extend),
    (bytearray, bytearray.extend),
)
LIBRARIES = (
    "torch", "lightning", "torchmetrics", "transformers", "builtins", "lightning_zero", "numpy", "numba", "triton",
)  # fmt: skip


def is_of_the_program(value: Any) -> bool:
    """Say whether a value is an object of a class of the program, with attributes; it may be callable."""
    return hasattr(value, "__dict__") and _is_object(value)


def _has_kept_attributes(value: Any) -> bool:
    return is_of_the_program(value) or _is_pretrained_config(value)  # programs count and set flags in configurations


def _is_object(value: Any) -> bool:
    return not isinstance(value, type) and type(value).__module__.partition(".")[0] not in LIBRARIES


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _held_by(value: Any) -> list[Any]:
    """Return the values in a container, in an object of the program, and behind a bound method."""
    held: list[Any] = []
    if isinstance(value, dict):
        held += value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        held += value
    elif _is_array(value) and value.dtype.hasobject:
        held += value.reshape(-1).tolist()
    elif isinstance(value, partial):
        held += (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        held.append(value.__self__)
    held += [one for one in slots_of(value).values() if one is not _MISSING]
    return held + list(vars(value).values()) if _has_kept_attributes(value) else held


def slots_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of the program that its classes name in ``__slots__``."""
    if not _is_object(value):
        return {}
    found = {}
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            full = f"_{cls.__name__.lstrip('_')}{name}" if is_private else name
            if not full.startswith("__"):
                found[full] = getattr(value, full, _MISSING)
    return found


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object of the program, or of a namespace; None of anything else."""
    if isinstance(value, _WITHOUT_FIELDS) or not _is_object(value):
        return None
    cls: Any = type(value)
    if cls.__module__.partition(".")[0] in sys.stdlib_module_names and not isinstance(value, _NAMESPACES):
        return None
    slots = {name: one for name, one in slots_of(value).items() if one is not _MISSING}
    cached = _cached_properties(cls)
    own = {name: one for name, one in getattr(value, "__dict__", {}).items() if name not in cached}
    return {**slots, **own}


_WITHOUT_FIELDS = (*_UNCHANGING, Tensor, nn.Module, Enum, torch.Generator, list, tuple, dict, set, frozenset, deque)
_NAMESPACES = (SimpleNamespace, Namespace)


@lru_cache(maxsize=256)
def _cached_properties(cls: Any) -> frozenset[str]:
    """Return the names of attributes that the object computes from others, wherever it is asked first."""
    return frozenset(name for one in cls.__mro__ for name, value in vars(one).items() if _is_cached_property(value))


def _is_cached_property(value: Any) -> bool:
    return isinstance(value, cached_property)


def set_field(value: Any, name: str, field: Any, *, is_deleted: bool) -> None:
    """Set or delete an attribute of an object, also if its class refuses writes."""
    if is_deleted:
        object.__delattr__(value, name)
    else:
        object.__setattr__(value, name, field)


def assign_slots(value: Any, attributes: Mapping[str, Any]) -> None:
    """Give an object back the attributes that ``slots_of`` has returned."""
    for name, attribute in attributes.items():
        if getattr(value, name, _MISSING) is attribute:
            continue
        if attribute is _MISSING:
            object.__delattr__(value, name)
        else:
            object.__setattr__(value, name, attribute)


def _ignore(value: Any, name: str) -> None:
    """Keep nothing."""


def _refill_with(value: Any, clear: Callable[[Any], None], fill: Callable[[Any, Any], None], content: Any) -> None:
    clear(value)
    fill(value, content)


def _write_array_back(array: Any, before: Any) -> None:
    if array.shape != before.shape or array.tobytes() != before.tobytes():
        array[...] = before


def _write_back(tensor: Tensor, version: int, before: Tensor, memory: Tensor | None) -> None:
    if version_of(tensor) != version or version < 0:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(before)
    elif memory is not None:  # writes by `tensor.data` or `tensor.numpy()` are not counted, and this one is not either
        if not tensor.is_set_to(memory):
            tensor.data = memory
        if tensor.device.type != "cpu" or not torch.equal(memory, before):  # a device's host does not wait
            memory.copy_(before)


def _has_plain_memory(tensor: Tensor) -> bool:
    """Say whether a tensor has memory of its own class and layout, each element at its own address."""
    is_plain = type(tensor) in (Tensor, nn.Buffer) and tensor.layout is torch.strided and not tensor.is_quantized
    return is_plain and not tensor.is_inference() and 0 not in tensor.stride() and tensor.device.type != "meta"


OF_MODULES = frozenset(vars(nn.Module()))


class HookState:
    """The hooks of a module and its submodules, as they are now.

    A program that notes in an attribute that its hooks are there needs both put back, or it registers them once more.
    """

    def __init__(self, module: nn.Module) -> None:
        spaces = [vars(child) for child in module.modules()]
        self._hooks = [
            (space[name], tuple(space[name].items())) for space in spaces for name in _HOOKS if name in space
        ]

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Put these hooks into the module for a while; its present hooks come back afterwards."""
        now = [(hooks, tuple(hooks.items())) for hooks, _ in self._hooks]
        _fill(self._hooks)
        try:
            yield
        finally:
            _fill(now)


def _fill(wanted: Iterable[tuple[dict[int, Any], tuple[tuple[int, Any], ...]]]) -> None:
    for hooks, content in wanted:
        if tuple(hooks.items()) != content:
            hooks.clear()
            hooks.update(content)


_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_with_kwargs", "_always_called")))


@contextmanager
def without_caches(module: nn.Module) -> Iterator[None]:
    """Let models of Hugging Face make no cache of keys and values, which they do by default (``config.use_cache``)."""
    configs: list[Any] = [vars(child).get("config") for child in module.modules()]
    found = {id(one): one for one in configs if _is_pretrained_config(one) and getattr(one, "use_cache", None) is True}
    try:
        for config in found.values():
            config.use_cache = False
        yield
    finally:
        for config in found.values():
            config.use_cache = True


def _is_pretrained_config(value: Any) -> bool:
    return any(cls.__name__ in ("PretrainedConfig", "PreTrainedConfig") for cls in type(value).__mro__)


def is_empty_cache(value: Any) -> bool:
    """Say whether an argument is a cache of keys and values, as Hugging Face has them, with nothing in it."""
    return _is_cache(value) and value.get_seq_length() == 0


def _is_cache(value: Any) -> bool:
    return callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))


def _copied_caches(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the caches among arguments; they share the tensors, which an update does not write."""
    copies = {name: copy.copy(value) for name, value in arguments.items() if _is_cache(value)}
    for cache in copies.values():
        if isinstance(vars(cache).get("layers"), list):
            cache.layers = [copy.copy(layer) for layer in cache.layers]
    return copies


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) and not isinstance(value, nn.Parameter)


def _is_large(module: nn.Module, buffer: Tensor) -> bool:
    """Say whether a buffer is copied only where forwards write it; batch norm does so without a change of version."""
    return buffer.nbytes > _SMALL_BYTES and not isinstance(module, nn.modules.batchnorm._NormBase)


def version_of(tensor: Tensor) -> int:
    """Return a number that every change in place makes larger; the same for ever where PyTorch does not count."""
    return -1 if tensor.is_inference() else tensor._version


def copies_of(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return copies, by the same keys; those of tensors that share memory share theirs."""
    sharing = Counter(_storage(tensor) for tensor in tensors.values())
    storages: dict[int, torch.UntypedStorage] = {}
    copies = {}
    with torch.inference_mode(False), torch.no_grad():
        for key, tensor in tensors.items():
            place = _storage(tensor)
            if place is None or sharing[place] == 1:
                copy = tensor.clone()
            else:
                storage = storages.setdefault(place, tensor.untyped_storage().clone())  # type: ignore[no-untyped-call]
                copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
            copies[key] = copy.requires_grad_(tensor.requires_grad)
    return copies


def _storage(tensor: Tensor) -> int | None:
    is_ordinary = type(tensor) in (Tensor, nn.Buffer) and tensor.layout is torch.strided
    return tensor.untyped_storage()._cdata if is_ordinary else None


def _refill(buffers: dict[str, Tensor | None], wanted: Mapping[str, Tensor | None]) -> None:
    buffers.clear()
    buffers.update(wanted)


def _bind(
    attributes: dict[str, Any], wanted: Mapping[str, Any], others: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Make ``wanted`` the plain attributes, and leave the ``others``; return the former ones, for the next call."""
    before = {key: attributes.get(key, _MISSING) for key in wanted}
    before.update({key: value for key, value in attributes.items() if key not in wanted and _is_plain(value)})
    for key in before:
        value = wanted.get(key, others.get(key, _MISSING))
        if value is _MISSING:
            attributes.pop(key, None)
        elif attributes.get(key, _MISSING) is not value:
            attributes[key] = value
    return before
