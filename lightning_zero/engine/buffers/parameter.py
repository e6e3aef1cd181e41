"""Parameter classes, swapped in and out of the user's own parameters while the engine owns them.

The user's ``nn.Parameter`` stays the same object from ``shard`` to ``close``; its ``data`` and, for a moment, its class
change (ADR 0011):

the user's own class   whole below stage 3 and in compiled forwards, or stepping (data is a segment).
``ReducedParameter``   whole at stage 3 (inside forward and backward), where writes into ``data`` are watched; or whole,
                       and the engine holds a reduced gradient: reading ``grad`` opens the step window. Or a segment in
                       the step window: assigning ``grad`` there takes a segment or a whole tensor.
``HookedParameter``    whole, while hooks of the program have its gradient: writes into ``data`` are watched.
``SegmentParameter``   the latter, where a rank steps a part of a parameter (``segment_parameter.py``).
``ReleasedParameter``  sharded: metadata is true, values are not there.
``PendingParameter``   whole, but a step was asked for that its values do not show; touching them makes the step.
``LoweredParameter``   whole in the 16 bits in which it computes; touching it shows the master in its own dtype.

Swapping class and data costs a few microseconds per parameter and nothing per operation.

Note [Subclasses of nn.Parameter]
    A user's class, such as the quantised weights of bitsandbytes, has subclasses made from it and the classes above, so
    that ``isinstance`` and the attributes of the object hold in every state, and its memory layout (``__slots__``)
    allows the swap. The engine reads and sets ``data`` underneath the methods that the class overrides.
"""

from __future__ import annotations

import copy
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_zero.errors import ReleasedParameterError
from lightning_zero.storage.metadata import QUESTION_FUNCTIONS
from lightning_zero.trees import tree_leaves

__all__ = [
    "FILL",
    "METADATA",
    "TO_EDGES",
    "Face",
    "HookedParameter",
    "LoweredParameter",
    "OwnedParameter",
    "Owner",
    "PendingParameter",
    "ReducedParameter",
    "ReleasedParameter",
    "WatchedParameter",
    "are_handed_out",
    "begin_window",
    "begin_writes",
    "call_program",
    "call_with_values",
    "class_over",
    "copy_attributes",
    "end_writes",
    "face_of",
    "filled_like",
    "handed_out",
    "has_class",
    "is_called_by",
    "is_data_kept",
    "is_plain",
    "is_pointed",
    "is_written",
    "name_of",
    "note_pointed",
    "num_writes",
    "operation_of",
    "own",
    "owner_of",
    "placeholder",
    "raw_grad",
    "remove_face",
    "renew_writes",
    "restore_class",
    "set_face",
    "set_raw_grad",
    "source_of",
    "swap_class",
    "unwatch",
    "user_class",
    "watch",
    "written_before_window",
]


class Owner(Protocol):
    """The object that answers for a parameter (its flat buffer)."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether another pipeline stage holds the values, so that ``touch`` raises."""
        ...

    def param_name(self, param: nn.Parameter) -> str:
        """Return the fully qualified name."""
        ...

    def touch(self, param: nn.Parameter) -> bool:
        """Make the values of a released parameter present if that is allowed now; say whether they are."""
        ...

    def own_dtype(self, param: nn.Parameter) -> torch.dtype:
        """Return the dtype that a parameter has for its user, which may differ from the compute dtype."""
        ...

    def show_original(self, param: nn.Parameter) -> None:
        """Bind a parameter that computes in 16 bits to the master's values in its own dtype.

        Collective at stages 1 and 2: all ranks.
        """
        ...

    def show_gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """Bring the reduced gradient of ``param``, if there is one, into its ``grad``; return one that waits."""
        ...

    def write_gradient(self, param: nn.Parameter, grad: torch.Tensor | None) -> None:
        """Let ``grad`` take the place of the gradient of ``param``; None drops it."""
        ...

    def refuse_step(self, param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        """Refuse that an optimizer that nothing is attached to steps the gradient of ``param``."""
        ...


# A buffer holds its parameters strongly, so an id in this table is never that of another object.
_OWNERS: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()


def own(param: nn.Parameter, owner: Owner) -> None:
    """Record who answers for ``param``."""
    _OWNERS[id(param)] = owner


def owner_of(param: torch.Tensor) -> Owner | None:
    """Return who answers for ``param``, or None for a parameter that no engine owns."""
    return _OWNERS.get(id(param))


# -- Classes -----------------------------------------------------------------------------------------------------------


def user_class(param: torch.Tensor) -> type[torch.Tensor]:
    """Return the class that the user gave a parameter, which may differ from its present one."""
    cls = type(param)
    return getattr(cls, "user_class", cls)


def has_class(param: torch.Tensor, cls: type[torch.Tensor]) -> bool:
    """Say whether a parameter has a class of this module, alone or with the user's."""
    return issubclass(type(param), cls)


def swap_class(param: torch.Tensor, cls: type[torch.Tensor]) -> None:
    """Give a parameter a class of this module; an instance of the user's class stays one."""
    user = user_class(param)
    made = cls if user is nn.Parameter else class_over(cls, user)
    param.__class__ = _with_face(param, made) if _FACES else made


def is_plain(param: torch.Tensor) -> bool:
    """Say whether a parameter has the user's class, and none of this module."""
    user = user_class(param)
    return type(param) is (_with_face(param, user) if _FACES else user)


def restore_class(param: torch.Tensor) -> None:
    """Give a parameter the user's class back."""
    user = user_class(param)
    param.__class__ = _with_face(param, user) if _FACES else user


class Face(Protocol):
    """A class that a parameter shows to the program over the classes of this module (``part_parameter.py``)."""

    def over(self, cls: type[torch.Tensor]) -> type[torch.Tensor]:
        """Return the class to show where the parameter would have ``cls``."""
        ...

    def hide(self, param: torch.Tensor) -> None:
        """Show no other class until ``show``."""
        ...

    def show(self, param: torch.Tensor) -> None:
        """Undo one ``hide``."""
        ...


_FACES: dict[int, tuple[weakref.ref[torch.Tensor], Face]] = {}  # by id of the parameter, as long as it lives


def set_face(param: torch.Tensor, face: Face) -> None:
    """Let a parameter show ``face``, from the next change of its class on."""
    key = id(param)
    _FACES[key] = (weakref.ref(param, lambda _: _FACES.pop(key, None)), face)


def remove_face(param: torch.Tensor) -> None:
    """Let a parameter show the classes of this module from its next change of class on."""
    _FACES.pop(id(param), None)


def face_of(param: torch.Tensor) -> Any:
    """Return a parameter's face, or None."""
    found = _FACES.get(id(param))
    return None if found is None else found[1]


def _with_face(param: torch.Tensor, cls: type[torch.Tensor]) -> type[torch.Tensor]:
    found = _FACES.get(id(param))
    return cls if found is None else found[1].over(cls)


@lru_cache(maxsize=256)  # classes that users make in functions are let go in the end
def class_over(cls: type[torch.Tensor], user: type[torch.Tensor]) -> type[torch.Tensor]:
    """Return a subclass of ``cls`` and of a user's class, with the memory layout of the latter."""
    body: dict[str, Any] = {"user_class": user, "__slots__": (), "__module__": cls.__module__}
    if cls.__torch_function__ is nn.Parameter.__torch_function__:  # operations are those of the user's class
        body["__torch_function__"] = _torch_function_of(user)
    made: type[torch.Tensor] = types.new_class(cls.__name__, (cls, user), exec_body=lambda names: names.update(body))
    return made


def _torch_function_of(user: type[torch.Tensor]) -> Any:
    plain = nn.Parameter.__torch_function__
    if user.__torch_function__ is plain:
        return plain

    def torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen = tuple(user if issubclass(one, cls) else one for one in types)
        return user.__torch_function__(func, seen, args, kwargs or {})  # type: ignore[no-untyped-call]

    return classmethod(torch_function)


def copy_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give a tensor the attributes of another one of the same class, without copies of their values."""
    vars(target).update(vars(source))
    for cls in type(source).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in [slots] if isinstance(slots, str) else slots:
            if hasattr(source, slot):
                setattr(target, slot, getattr(source, slot))


def placeholder(
    like: torch.Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return one element of the tensor's shape, NaN where there is one: nothing reads it in silence."""
    dtype, device = dtype or like.dtype, device or like.device
    with torch.inference_mode(False):
        if dtype.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex):
            one = torch.full((), float("nan"), dtype=dtype, device=device)
        else:  # few kernels know all of these; a byte of ones is NaN in most of the 8-bit formats
            byte = 255 if dtype.is_floating_point else 0
            one = torch.full((dtype.itemsize,), byte, dtype=torch.uint8, device=device).view(dtype)[0]
        return one.expand(like.shape)


# -- Gradients ---------------------------------------------------------------------------------------------------------

_Tensor: Any = torch.Tensor
_get_grad = _Tensor.grad.__get__
_set_grad = _Tensor.grad.__set__


def raw_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return ``param.grad`` as autograd sees it, without opening a step window."""
    with torch._C.DisableTorchFunctionSubclass():
        grad: torch.Tensor | None = _get_grad(param)
    return grad


def set_raw_grad(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Set ``param.grad`` as autograd sees it."""
    with torch._C.DisableTorchFunctionSubclass():
        _set_grad(param, grad)


def _read_grad(param: nn.Parameter) -> torch.Tensor | None:
    owner = owner_of(param)
    waiting = owner.show_gradient(param) if owner is not None else None
    grad = raw_grad(param)
    return waiting if grad is None else grad  # one that hooks of the program are shown


def _write_grad(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    owner = owner_of(param)
    if owner is None:
        set_raw_grad(param, grad)
    else:
        owner.write_gradient(param, grad)


class _HandedOut:
    """The results of ``data`` of one parameter, and their versions, which are their own."""

    __slots__ = ("before", "now", "param")

    def __init__(self, param: torch.Tensor) -> None:
        key = id(param)
        self.param = weakref.ref(param, lambda _: _HANDED_OUT.pop(key, None))
        self.now: list[tuple[torch.Tensor | None, int]] = []  # None: `data` was pointed elsewhere
        self.before: list[tuple[torch.Tensor, int]] = []  # read before the step window opened, of the whole parameter


_HANDED_OUT: dict[int, _HandedOut] = {}  # by id of the parameter, as long as it lives


def begin_writes(param: nn.Parameter) -> int:
    """Watch writes into a parameter anew; return its version. ``end_writes`` ends it.

    All ranks that make the same write find it, also those whose segment is empty or stays as it was.
    """
    end_writes(param)
    _handed_out_by(param)
    return renew_writes(param)


def begin_window(param: nn.Parameter) -> int:
    """Watch writes into a parameter that shows its segment from now on, and into results of ``data`` of before."""
    before = [(data, data._version) for data in handed_out(param)]
    version = begin_writes(param)
    _handed_out_by(param).before = before
    return version


def renew_writes(param: nn.Parameter) -> int:
    """Take the writes into a parameter, and into results of its ``data``, as known; return its version."""
    found = _HANDED_OUT.get(id(param))
    if found is not None:
        found.now = [(data, data._version) for data, _ in found.now if data is not None]
    with torch._C.DisableTorchFunctionSubclass():
        return param._version


def num_writes(param: nn.Parameter, version: int) -> int:
    """Return how often somebody wrote into a parameter, or into its ``data``, since a version."""
    found = _HANDED_OUT.get(id(param))
    with torch._C.DisableTorchFunctionSubclass():
        num = param._version - version
        if found is not None:
            num += sum(1 if data is None else data._version - before for data, before in found.now)
        return num


def is_written(param: nn.Parameter, version: int) -> bool:
    """Say whether somebody wrote into a parameter, or into its ``data``, since a version."""
    return num_writes(param, version) != 0


def handed_out(param: nn.Parameter) -> list[torch.Tensor]:
    """Return the results of ``data`` that are watched."""
    found = _HANDED_OUT.get(id(param))
    return [] if found is None else [data for data, _ in found.now if data is not None]


def are_handed_out() -> bool:
    """Say whether results of ``data`` of any parameter are watched."""
    return bool(_HANDED_OUT)


def is_data_kept(param: nn.Parameter) -> bool:
    """Say whether the program has a result of ``data`` that is watched, itself and not a view of it."""
    found = _HANDED_OUT.get(id(param))
    return found is not None and max(_num_references(found.now), default=0) > _num_own_references()


def _num_references(handed: Iterable[tuple[torch.Tensor | None, int]]) -> list[int]:
    return [sys.getrefcount(pair[0]) for pair in handed if pair[0] is not None]


@cache
def _num_own_references() -> int:
    return _num_references([(torch.empty(0, device="cpu"), 0)])[0]


def written_before_window(param: nn.Parameter) -> list[torch.Tensor]:
    """Return the results of ``data`` of before the window into which somebody wrote in it, once for each write."""
    found = _HANDED_OUT.get(id(param))
    if found is None or not found.before:
        return []
    written = [data for data, version in found.before if data._version != version]
    found.before = [(data, data._version) for data, _ in found.before]
    return written


def source_of(data: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter in the step window of whose ``data`` a tensor is a result of before; None: of none."""
    sources = (one.param() for one in _HANDED_OUT.values() if any(data is before for before, _ in one.before))
    return next(sources, None)


def note_pointed(param: nn.Parameter) -> None:
    """Note that ``data`` is pointed elsewhere: a segment without elements has no address that would tell."""
    found = _HANDED_OUT.get(id(param))
    if found is not None:
        found.now.append((None, -1))


def is_pointed(param: nn.Parameter) -> bool:
    """Say whether ``data`` was pointed elsewhere since writes are watched, or were taken as known."""
    found = _HANDED_OUT.get(id(param))
    return found is not None and any(data is None for data, _ in found.now)


def end_writes(param: nn.Parameter) -> None:
    """Watch no writes any more, up to the next read of ``data``."""
    _HANDED_OUT.pop(id(param), None)


def _handed_out_by(param: torch.Tensor) -> _HandedOut:
    found = _HANDED_OUT.get(id(param))
    if found is None:
        found = _HANDED_OUT[id(param)] = _HandedOut(param)
    return found


class HookedParameter(nn.Parameter):
    """A whole parameter whose gradient hooks of the program have: they may write into ``data``.

    A result of ``data`` has a version counter of its own, so it is kept to be asked whether somebody wrote into it.
    """

    user_class: ClassVar[type[torch.Tensor]] = nn.Parameter

    @property
    def data(self) -> torch.Tensor:
        """The values."""
        values: torch.Tensor = super().data
        _handed_out_by(self).now.append((values, values._version))
        return values

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        note_pointed(self)
        super(HookedParameter, type(self)).data.__set__(self, values)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy the parameter in the user's own class."""
        return _as_user_class(self, lambda: copy.deepcopy(self, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the parameter in the user's own class."""
        return _as_user_class(self, lambda: self.__reduce_ex__(protocol))


class ReducedParameter(HookedParameter):
    """A whole parameter that is sharded between uses, or whose reduced gradient is held, or one in the step window."""

    grad = property(_read_grad, _write_grad, lambda param: _write_grad(param, None))


def _as_user_class(param: torch.Tensor, call: Callable[[], Any]) -> Any:
    cls = type(param)
    restore_class(param)
    try:
        return call()
    finally:
        param.__class__ = cls


def _getters(*names: str) -> set[Any]:
    return {getattr(_Tensor, name).__get__ for name in names if hasattr(_Tensor, name)}


# Functions that make tensors (`rand_like`, `new_zeros`) are not among them: states that optimizers make with them would
# have the size of the whole parameter.
METADATA: frozenset[Any] = QUESTION_FUNCTIONS | _getters(
    "shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "ndim", "grad_fn", "layout", "is_sparse", "is_cuda",
    "is_cpu", "is_meta", "is_quantized", "is_nested", "itemsize", "_backward_hooks", "_version", "names", "is_mkldnn",
    "is_xla", "is_mps", "nbytes", "output_nr", "retains_grad", "_post_accumulate_grad_hooks",
) | {
    _Tensor.requires_grad.__set__, _Tensor.grad.__set__, _Tensor.grad.__delete__, _Tensor._backward_hooks.__set__,
}  # fmt: skip

# Functions that depend on the dtype: the parameter computes in another one than the user's.
_DTYPE_QUESTIONS: dict[Any, Callable[[torch.Tensor, torch.dtype], Any]] = {
    _Tensor.dtype.__get__: lambda _, dtype: dtype,
    _Tensor.itemsize.__get__: lambda _, dtype: dtype.itemsize,
    _Tensor.element_size: lambda _, dtype: dtype.itemsize,
    _Tensor.nbytes.__get__: lambda param, dtype: param.numel() * dtype.itemsize,
}

FILL: dict[Any, Callable[..., float]] = {
    torch.zeros_like: lambda *_, **__: 0.0,
    torch.ones_like: lambda *_, **__: 1.0,
    torch.empty_like: lambda *_, **__: float("nan"),
    torch.full_like: lambda _, fill_value, **__: fill_value,
}


class OwnedParameter(nn.Parameter):
    """A parameter without values: metadata is answered, ``_use`` handles every other operation."""

    user_class: ClassVar[type[torch.Tensor]] = nn.Parameter
    grad = property(_read_grad, _write_grad, lambda param: _write_grad(param, None))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer questions about metadata; leave the rest to ``_use``."""
        kwargs = kwargs or {}
        if func in TO_EDGES:
            return TO_EDGES[func](*args, **kwargs)
        if func in _DTYPE_QUESTIONS:
            owner = owner_of(args[0])
            if owner is not None:
                return _DTYPE_QUESTIONS[func](args[0], owner.own_dtype(args[0]))
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return cls._use(func, args, kwargs)

    @classmethod
    def _use(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function that needs values."""
        raise NotImplementedError


def call_with_values(func: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> Any:
    """Call a function that does not ask ``__torch_function__``, as if it did."""
    return type(tensor)._use(func, (tensor, *args), {}) if isinstance(tensor, OwnedParameter) else func(tensor, *args)


_GET_DATA = _Tensor.data.__get__


def _call_with_shown(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with parameters that show their values now: their present class may handle the call."""
    return args[0].data if func == _GET_DATA else func(*args, **kwargs)


class ReleasedParameter(OwnedParameter):
    """A parameter whose values are sharded over the ranks.

    Its shape, number of elements, dtype, device and ``requires_grad`` are those of the whole parameter. Inside a step
    an operation on it gathers its unit; anywhere else it raises ``ReleasedParameterError``.
    """

    @classmethod
    def _use(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Gather, or refuse."""
        if func in FILL:
            return filled_like(args[0], func, args, kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if has_class(leaf, ReleasedParameter):
                owner = owner_of(leaf)
                if owner is None or not owner.touch(leaf):
                    raise ReleasedParameterError(_refusal(leaf, operation_of(func)))
        return _call_with_shown(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe the parameter without its values."""
        return (
            f"ReleasedParameter({name_of(self)!r}, shape={tuple(self.shape)}, dtype={self.dtype},"
            f" requires_grad={self.requires_grad}; its values are sharded over the ranks)"
        )

    def __format__(self, format_spec: str) -> str:
        """Return the same text as ``repr``."""
        return format(repr(self), format_spec)

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse: there are no values to copy."""
        _require_own_stage(self)
        raise ReleasedParameterError(_refusal(self, "deepcopy"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: there are no values to pickle."""
        _require_own_stage(self)
        raise ReleasedParameterError(_refusal(self, "pickle"))


class _OutdatedParameter(OwnedParameter):
    """A whole parameter that shows its values when somebody touches them."""

    @classmethod
    def _use(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Show the values first."""
        for leaf in tree_leaves((args, kwargs)):
            if has_class(leaf, _OutdatedParameter):
                _show(leaf)
        return _call_with_shown(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show the current values, then return the parameter's own ``repr``."""
        _show(self)
        return repr(self)

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy the values that are shown then."""
        _show(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values that are shown then."""
        _show(self)
        return self.__reduce_ex__(protocol)


class PendingParameter(_OutdatedParameter):
    """A whole parameter whose step was asked for and is made when somebody touches its values."""


class LoweredParameter(_OutdatedParameter):
    """A whole parameter that computes in 16 bits, between two forwards.

    Its dtype is its own, and whoever touches its values gets the master's (ADR 0041).
    """


_WATCHERS: dict[int, Callable[[bool], None]] = {}  # while a method of an optimizer runs


def watch(param: nn.Parameter, touched: Callable[[bool], None]) -> Callable[[bool], None] | None:
    """Call ``touched`` with each use of a ``WatchedParameter``, saying whether values are used, until ``unwatch``.

    Returns:
        What was called so far, in whose place it is.
    """
    former = _WATCHERS.get(id(param))
    _WATCHERS[id(param)] = touched
    return former


def unwatch(param: nn.Parameter) -> None:
    """Forget about a parameter."""
    _WATCHERS.pop(id(param), None)


def _touch_and(act: Callable[..., Any]) -> Callable[..., Any]:
    def touch(param: nn.Parameter, *args: Any) -> Any:
        _WATCHERS[id(param)](True)
        return act(param, *args)

    return touch


class WatchedParameter(OwnedParameter):
    """A parameter while a method of its optimizer runs; see ``lightning_zero/engine/optim/methods.py``."""

    grad = property(
        _touch_and(lambda param: param.grad),
        _touch_and(lambda param, grad: setattr(param, "grad", grad)),
        _touch_and(lambda param: delattr(param, "grad")),
    )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Tell the watcher first."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and has_class(leaf, WatchedParameter):
                _WATCHERS[id(leaf)](func not in METADATA)
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))  # now the window shows the segments, as to a step


def _gradients_of_edges(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``torch.autograd.grad``, which needs no values of the parameters that it differentiates by."""
    wanted = [inputs] if isinstance(inputs, (torch.Tensor, GradientEdge)) else list(inputs)
    is_filled = kwargs.pop("materialize_grads", False)
    if is_filled:
        kwargs["allow_unused"] = True
    found = torch.autograd.grad(outputs, _edges(wanted), *args, **kwargs)
    if not is_filled:
        return found
    return tuple(
        torch.zeros(one.shape, dtype=one.dtype, device=one.device) if grad is None and torch.is_tensor(one) else grad
        for grad, one in zip(found, wanted, strict=True)
    )


def _backward_to_edges(tensors: Any, *, inputs: Any, **kwargs: Any) -> None:
    """Call ``torch.autograd.backward``, which needs no values of the parameters whose gradients it adds to."""
    torch.autograd.backward(tensors, inputs=_edges(inputs), **kwargs)


def _edges(inputs: Iterable[Any]) -> list[GradientEdge]:
    with torch._C.DisableTorchFunctionSubclass():  # not around the backward, whose hooks use parameters
        return [get_gradient_edge(one) if torch.is_tensor(one) else one for one in inputs]


TO_EDGES: dict[Any, Callable[..., Any]] = {
    torch.autograd.grad: _gradients_of_edges,
    torch.autograd.backward: _backward_to_edges,
}


def _show(param: nn.Parameter) -> None:
    """Make the step that a parameter waits for, or show the master's values in its own dtype."""
    owner, cls = owner_of(param), type(param)
    if owner is not None and has_class(param, PendingParameter):
        owner.touch(param)
    elif owner is not None:
        owner.show_original(param)
    if type(param) is cls:
        raise RuntimeError(
            f"The values of parameter `{name_of(param)}` could not be shown: the engine that"
            " has its master is gone. Keep it, or call `engine.unshard()` before."
        )


def name_of(param: torch.Tensor) -> str:
    """Return a parameter's name in the sharded module."""
    owner = owner_of(param)
    return owner.param_name(param) if owner is not None else "?"  # type: ignore[arg-type]


def operation_of(func: Callable[..., Any]) -> str:
    """Return an operation as the user wrote it: functions that read and set attributes share two names."""
    name: str = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    attribute = getattr(getattr(owner, "fget", owner), "__name__", None)  # properties have no name of their own
    return {"__get__": f".{attribute}", "__set__": f".{attribute} = ...", "__delete__": f".{attribute}"}.get(name, name)


def _is_in_state_dict() -> bool:
    """Say whether ``module.state_dict()`` is running."""
    return is_called_by(nn.Module._save_to_state_dict)


def is_called_by(function: Any) -> bool:
    """Say whether a Python function is running, at any depth."""
    return running_call_of(function) is not None


def running_call_of(*functions: Any) -> types.FrameType | None:
    """Return the frame of the innermost running call of one of some Python functions, at any depth."""
    codes = {function.__code__ for function in functions}
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame


def _require_own_stage(param: nn.Parameter) -> None:
    """Raise the error of the parameter's owner, if the owner is another pipeline stage."""
    owner = owner_of(param)
    if owner is not None and owner.is_elsewhere:
        owner.touch(param)


def _refusal(param: nn.Parameter, operation: str) -> str:
    if _is_in_state_dict():
        return (
            f"`state_dict()` needs the values of parameter `{name_of(param)}`, which are sharded over the ranks."
            " `trainer.save_checkpoint(path)` writes a checkpoint, `lightning_zero.export_safetensors(module, folder)`"
            " the weights alone, both without gathering them. For the dict itself call `state_dict()` inside"
            " `with lightning_zero.gathered(module):` on every rank."
        )
    return (
        f"`{operation}` needs the values of parameter `{name_of(param)}`, which are sharded over the ranks."
        " Use `with lightning_zero.gathered(param_or_module):` on every rank (add `write='rank0'` or `write='all'` to"
        " change them), or `strategy.full_param(param)` for a copy."
    )


def filled_like(
    param: torch.Tensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """Return a tensor of the shape that a parameter without values has here, as ``zeros_like`` and the like fill it.

    To code of an optimizer, which may size its states by it, one element that is expanded.
    """
    options = {**kwargs, "dtype": kwargs.get("dtype") or param.dtype}
    with torch._C.DisableTorchFunctionSubclass():
        if not _is_optimizer_running():
            made: torch.Tensor = func(*args, **options)
            return made
        value, device = FILL[func](*args, **kwargs), kwargs.get("device") or param.device
        return torch.full((), value, dtype=options["dtype"], device=device).expand(param.shape)


def call_program(closure: Callable[[], Any]) -> Any:
    """Call a closure that an optimizer was given: the code in it is not the optimizer's."""
    return closure()


# Functions that call code of the program, the second its hooks around a step.
_CALLERS = {call_program.__code__, torch.optim.Optimizer.profile_hook_step(lambda: None).__code__}


def _is_optimizer_running() -> bool:
    """Say whether a method of an optimizer is running, its constructor for example, and nothing of the program in it.

    Methods of modules, closures of steps and hooks are of the program, also those that have an optimizer as argument.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _CALLERS:
        names = frame.f_code.co_varnames
        first = frame.f_locals.get(names[0]) if frame.f_code.co_argcount else None
        if isinstance(first, nn.Module):
            return False
        if isinstance(first, torch.optim.Optimizer):
            cls = _class_with(frame.f_code, type(first))
            if cls is not None:
                return cls is not torch.optim.Optimizer  # what that calls outside of its subclasses are hooks
        frame = frame.f_back
    return False


def _class_with(code: types.CodeType, cls: type) -> type | None:
    """Return the class of optimizers that defines a method; `LightningOptimizer`, which is a base too, is none."""
    for base in cls.__mro__:
        method = vars(base).get(code.co_name) if issubclass(base, torch.optim.Optimizer) else None
        if callable(method) and getattr(inspect.unwrap(method), "__code__", None) is code:
            return base
    return None
