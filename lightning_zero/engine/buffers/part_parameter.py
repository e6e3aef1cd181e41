"""Parameters of which this rank has a part, as the program sees them: they have the whole shape, and never pass for it.

Tensor parallelism gives every rank a part of a matrix (``lightning_zero/boxes.py``), and expert parallelism some of the
experts. The modules that are cut compute with the part. To all other code, such as hooks, callbacks and
``configure_optimizers``, the parameter has the shape of the whole. Element-wise operations, random numbers and copies
of whole tensors work on the part and give one rank's values; everything else, such as a norm, raises an error that
names ``full_param``.

Note [Faces]
    A parameter with a part has a face: its class is one over whatever class the engine has given it, and comes off
    while a module computes with the part, and in the step window. The engine reads and sets values underneath, as it
    does with users' classes (ADR 0037), so it sees the part always. Tensors that the program makes of a parameter
    (``w.detach()``, ``w * 2``) are ``PartValues``, with the same rules.

Note [Backwards]
    A backward computes with the parts: recomputed modules do, and so do custom functions with weights that autograd has
    saved, where no forward of a block has taken faces off. ``part_graphs.py`` tells their operations from those of the
    program's functions and hooks. Hooks on gradients of a part are wrapped, when they are registered or when the face
    is given, so that they get the gradient as a part.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch._functorch.vmap import _process_batched_inputs

from lightning_zero.boxes import Part
from lightning_zero.engine.buffers.parameter import (
    FILL,
    METADATA,
    TO_EDGES,
    OwnedParameter,
    face_of,
    filled_like,
    is_called_by,
    operation_of,
    remove_face,
    set_face,
    swap_class,
)
from lightning_zero.engine.buffers.part_graphs import is_of_module, recorded_as_module
from lightning_zero.engine.buffers.segment_parameter import SegmentParameter
from lightning_zero.engine.buffers.sharded_gradient import RANDOM, ShardedGradient, asks_for_shape, is_elementwise
from lightning_zero.errors import PartialParameterError
from lightning_zero.trees import tree_leaves, tree_map_only

__all__ = ["PartFace", "PartParameter", "PartValues", "computing_with_parts", "show_as_whole", "show_parts"]

_VIEWS = frozenset(["view", "view_as", "reshape", "reshape_as", "expand", "expand_as", "unflatten"])
_NEW = frozenset(f"new_{name}" for name in ("empty", "zeros", "ones", "full", "tensor"))
_TYPES = frozenset(["type_as", "to"])
_IN_PLACE = re.compile(r"(?!__).*_|__i(?!nvert).*__")
_CALLING = frozenset([__name__])  # for `is_of_module`
_BATCHED: Any = _process_batched_inputs
_DDP = nn.parallel.DistributedDataParallel


class PartFace:
    """The face of one parameter.

    Args:
        name: Of the parameter.
        part: That this rank has.
        option: Of the strategy, which has cut the parameter.
    """

    def __init__(self, name: str, part: Part, option: str = "tensor_parallel") -> None:
        self.name = name
        self.option = option
        self.part = part
        self.whole = torch.Size(part.whole)
        self.local = torch.Size(part.shape)
        self._num_hidden = 0  # forwards that compute with the part, and open step windows

    def over(self, cls: type[Tensor]) -> type[Tensor]:
        """Return the class that the parameter shows where the engine gives it ``cls``."""
        return cls if self._num_hidden else _class_over(cls)

    def hide(self, param: Tensor) -> None:
        """Let the parameter be the part until ``show``."""
        self._num_hidden += 1
        if self._num_hidden == 1:
            param.__class__ = getattr(type(param), "under", type(param))

    def show(self, param: Tensor) -> None:
        """Undo one ``hide``."""
        self._num_hidden -= 1
        if not self._num_hidden:
            param.__class__ = self.over(type(param))

    def mark(self, values: Tensor) -> Tensor:
        """Return values of the part's shape as those of a part, with the same memory and graph."""
        marked: Any = values.as_subclass(PartValues)
        marked.face = self
        return marked  # type: ignore[no-any-return]

    def cut(self, value: Tensor, operation: str) -> Tensor:
        """Return the elements of a tensor beside the parameter that belong to the part.

        Args:
            value: It can be expanded to the whole parameter's shape.
            operation: For errors.

        Raises:
            PartialParameterError: It cannot.
        """
        if value.dim() == 0:
            return value
        try:
            whole = value.expand(self.whole)
        except RuntimeError:
            pointed = (
                " Has its `data` been given a part's, as `tensor.data = param.data` does? Make it of the parameter"
                " (`param.detach().clone()`), so that it is a part with the same rules."
            )
            raise PartialParameterError(
                f"`{operation}` got parameter `{self.name}` of shape {tuple(self.whole)}, of which this rank has a part"
                f" of shape {tuple(self.local)}, and a tensor of shape {tuple(value.shape)}. Give it one that can be"
                " expanded to the whole parameter's shape: it is cut. Or take `strategy.full_param(param)` on every"
                f" rank.{pointed if value.shape == self.local else ''}"
            ) from None
        return self.part.read(whole)

    def spread(self, values: Tensor) -> Tensor:
        """Return a tensor of the whole shape with this rank's values in their places, and zeros."""
        whole = torch.zeros(self.whole, dtype=values.dtype, device=values.device)
        self.part.write(whole, values)
        return whole

    def refuse(self, operation: str) -> NoReturn:
        """Refuse an operation that needs all elements.

        Raises:
            PartialParameterError: Always.
        """
        raise PartialParameterError(
            f"`{operation}` needs the whole parameter `{self.name}` of shape {tuple(self.whole)}, and with"
            f" `{self.option}` this rank has a part of shape {tuple(self.local)}. Read"
            " `strategy.full_param(param)` (`engine.full_param(param)`) on every rank. Element-wise operations and"
            " `param.copy_(whole)`, where it cuts a tensor of the whole shape, change the part; at stage 3 inside"
            " `engine.gathered([param], write='all')`."
        )

    def refuse_state_dict(self) -> NoReturn:
        """Refuse a state dictionary of parts.

        Raises:
            PartialParameterError: Always.
        """
        raise PartialParameterError(
            f"`state_dict()` of a module with `{self.option}` would have a part of `{self.name}`."
            " `trainer.save_checkpoint(path)` writes a checkpoint, `lightning_zero.export_safetensors(module, folder)`"
            " the whole weights, and `strategy.full_param(param)` returns one parameter; each on every rank."
        )

    def refuse_other_strategy(self) -> NoReturn:
        """Refuse to train parts as wholes.

        Raises:
            PartialParameterError: Always.
        """
        raise PartialParameterError(
            f"The module is cut by `{self.option}`, so this rank has a part of `{self.name}`, and"
            " `DistributedDataParallel` would train it as if it were the whole. Use `ZeroStrategy` with the same"
            f" `{self.option}`, or make the module anew and load its checkpoint."
        )


# -- Classes -----------------------------------------------------------------------------------------------------------


class _Part:
    """The operations and the text of a tensor of which this rank has a part."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run element-wise operations on the part, refuse others."""
        return _operate(func, types, args, dict(kwargs or {}))

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse other memory, which PyTorch gives without asking ``__torch_function__``."""
        _known_face(self).refuse("set_")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Describe the tensor without its values."""
        return _described(self)

    def __format__(self, format_spec: str) -> str:
        """Return the same text as ``repr``."""
        return format(_described(self), format_spec)


class PartValues(_Part, torch.Tensor):  # type: ignore[misc]
    """Values of a part that a program has computed of a parameter: (part's shape); its shape is the whole's."""

    face: PartFace


class PartParameter(_Part, nn.Parameter):  # type: ignore[misc]
    """A parameter of which this rank has a part; see Note [Faces]."""

    user_class: ClassVar[type[torch.Tensor]] = nn.Parameter
    under: ClassVar[type[torch.Tensor]] = nn.Parameter  # the class without the face

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse a copy, which would have the part only."""
        _known_face(self).refuse("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, for the same reason."""
        _known_face(self).refuse("pickle")


@lru_cache(maxsize=256)
def _class_over(cls: type[Tensor]) -> type[Tensor]:
    """Return the face of a class of the engine."""
    if cls is nn.Parameter:
        return PartParameter
    if issubclass(cls, PartParameter):
        return cls
    body: dict[str, Any] = {"under": cls, "user_class": nn.Parameter, "__slots__": (), "__module__": cls.__module__}
    grad = next((vars(base)["grad"] for base in cls.__mro__ if isinstance(vars(base).get("grad"), property)), None)
    if grad is not None:
        body["grad"] = property(lambda param: _marked_grad(param, grad.fget(param)), grad.fset, grad.fdel)
    made: type[Tensor] = type(cls.__name__, (PartParameter, cls), body)
    return made


def _marked_grad(param: Tensor, grad: Tensor | None) -> Tensor | None:
    face: PartFace | None = face_of(param)
    return grad if face is None else _marked_grad_of(face, grad)


def _described(tensor: Any) -> str:
    face = _face_of(tensor)
    shape = None if face is None else tuple(face.whole)
    local = None if face is None else tuple(face.local)
    name = "?" if face is None else face.name
    return f"{type(tensor).__name__}({name!r}, shape={shape}, dtype={tensor.dtype}; this rank has a part of {local})"


def _known_face(param: Any) -> PartFace:
    face = _face_of(param)
    assert face is not None
    return face


def _face_of(tensor: Any) -> PartFace | None:
    if isinstance(tensor, PartValues):
        return getattr(tensor, "face", None)
    face: PartFace | None = face_of(tensor) if isinstance(tensor, PartParameter) else None
    return face


# -- For the engine ----------------------------------------------------------------------------------------------------


def show_as_whole(
    params: Mapping[str, nn.Parameter], parts: Mapping[str, Part], option: str = "tensor_parallel"
) -> None:
    """Give parameters of which this rank has a part their faces, by name; those of users' classes have none."""
    for name, part in parts.items():
        param = params.get(name)
        if param is None:  # a pipeline stage has left it out
            continue
        if getattr(type(param), "user_class", type(param)) is nn.Parameter and face_of(param) is None:
            face = PartFace(name, part, option)
            set_face(param, face)
            _wrap_hooks(param, face)
            swap_class(param, type(param))


def show_parts(params: Iterable[nn.Parameter]) -> None:
    """Take the faces off: the parameters are their parts to everybody."""
    for param in params:
        face = face_of(param)
        if face is not None:
            remove_face(param)
            param.__class__ = getattr(type(param), "under", type(param))


@contextmanager
def computing_with_parts(params: Iterable[nn.Parameter], option: str = "tensor_parallel") -> Iterator[None]:
    """Let parameters that an option has cut be the parts that a module computes with, for the time of its forward."""
    faces = [(param, face) for param in params if (face := face_of(param)) is not None]
    found = [(param, face) for param, face in faces if face.option == option]
    for param, face in found:
        face.hide(param)
    try:
        with recorded_as_module():
            yield
    finally:
        for param, face in found:
            face.show(param)


# -- Operations --------------------------------------------------------------------------------------------------------


def _operate(func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of PyTorch with parts among its arguments, as Note [Faces] says."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    is_away = any(isinstance(leaf, OwnedParameter) for leaf in tensors)
    if not is_away and torch._C._current_graph_task_id() != -1 and is_of_module(sys._getframe(1), _CALLING):
        with torch._C.DisableTorchFunctionSubclass():  # see Note [Backwards]
            return func(*args, **kwargs)
    if asks_for_shape(func):
        if sys._getframe(2).f_code is _BATCHED.__code__:  # it takes rows of the part, and asks nothing else
            _refuse_first(tensors, "torch.vmap")
        return _answer_for_whole(func, args, kwargs)
    if func in TO_EDGES:
        return _gradients(func, args, kwargs)
    name = operation_of(func)
    if any(isinstance(leaf, (SegmentParameter, ShardedGradient)) for leaf in tensors):
        return _beside_segments(func, name, args, kwargs)
    away = next((leaf for leaf in tensors if isinstance(leaf, OwnedParameter)), None)
    if away is not None and func in FILL and (known := _face_of(away)) is not None:
        return known.mark(filled_like(away, func, args, kwargs))
    if away is not None:  # it is gathered, or its step is made; then the function is called again
        under: Any = getattr(type(away), "under", type(away))
        return under.__torch_function__(func, types, args, kwargs)
    face = next((found for leaf in tensors if (found := _face_of(leaf)) is not None), None)
    if face is None:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in ("register_hook", "register_post_accumulate_grad_hook"):
        args, kwargs = (args[0], _marking(face, args[1] if len(args) > 1 else kwargs["hook"])), {}
    if func in METADATA:
        return _metadata(func, args, kwargs=kwargs, name=name, face=face)
    return _compute(func, args, kwargs=kwargs, name=name, face=face)


def _refuse_first(tensors: Iterable[Tensor], operation: str) -> None:
    """Refuse an operation for the first part among tensors.

    Raises:
        PartialParameterError: There is one.
    """
    face = next((found for one in tensors if (found := _face_of(one)) is not None), None)
    if face is not None:
        face.refuse(operation)


def _beside_segments(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """Call a function with segments of the step window, which cut parts once more."""
    _refuse_first((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PartParameter)), name)
    segments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (SegmentParameter, ShardedGradient))]
    cls: Any = type(next((leaf for leaf in segments if isinstance(leaf, ShardedGradient)), segments[0]))
    return cls.__torch_function__(func, (cls,), args, kwargs)


def _metadata(func: Callable[..., Any], args: tuple[Any, ...], *, kwargs: Any, name: str, face: PartFace) -> Any:
    if name == ".grad = ..." and isinstance(args[1], Tensor) and args[1].shape == face.whole:
        args = (args[0], args[1].as_subclass(Tensor) if isinstance(args[1], PartValues) else _cut_copy(face, args[1]))
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    return _marked_grad_of(face, result) if name == ".grad" else result


def _marked_grad_of(face: PartFace, grad: Any) -> Any:
    return face.mark(grad) if type(grad) is Tensor and grad.shape == face.local else grad


def _cut_copy(face: PartFace, whole: Tensor) -> Tensor:
    return face.cut(whole, "grad = ...").clone(memory_format=torch.contiguous_format)


def _compute(func: Callable[..., Any], args: tuple[Any, ...], *, kwargs: Any, name: str, face: PartFace) -> Any:
    """Call a function that needs values."""
    if name == "detach" and is_called_by(nn.Module._save_to_state_dict):
        face.refuse_state_dict()
    if name == "detach" and is_called_by(_DDP.__init__):
        face.refuse_other_strategy()
    if name == "detach" and isinstance(args[0], PartParameter) and is_called_by(nn.Parameter.__new__):
        face.refuse("nn.Parameter")
    if name == "_is_view":  # asked while it looks at arguments
        face.refuse("torch.compile")
    if torch._C._are_functorch_transforms_active():
        face.refuse(f"{name}` in a function of `torch.func")
    if name == "__setitem__" and _face_of(args[0]) is not None:
        return _set_items(face, *args)
    if name in RANDOM or getattr(func, "__module__", "") == "torch.nn.init":
        return _draw(func, name, args, kwargs)
    if name in _VIEWS and len(args) == 2 and _face_of(args[0]) is None:  # `values.view_as(param)`
        return getattr(args[0], name.removesuffix("_as"))(face.whole)
    if name in _VIEWS and _is_same_shape(face, name, args[1:]):
        return _viewed(face, args[0])
    if name in _TYPES and _face_of(args[0]) is None:  # `values.to(param)`
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name in _NEW or name == "_has_compatible_shallow_copy_type":  # the latter is of `module.to`
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if not is_elementwise(func, args, kwargs) or "out" in kwargs:
        face.refuse(name)
    return _run(func, name, args, kwargs)


def _viewed(face: PartFace, tensor: Tensor) -> Tensor:
    """Return a view of a part, made by the tensor's own node of the graph, as ``register_multi_grad_hook`` needs it."""
    with torch._C.DisableTorchFunctionSubclass():
        view: Any = tensor.view_as(tensor)
    view.__class__ = PartValues
    view.face = face
    return view  # type: ignore[no-any-return]


def _run(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an element-wise function on parts, with whole tensors beside them cut."""
    values = [*args, *kwargs.values()]
    if name.startswith("_foreach_"):
        rows = list(zip(*(value for value in values if isinstance(value, (list, tuple))), strict=False))
        faces: list[Any] = [next((face for one in row if (face := _face_of(one)) is not None), None) for row in rows]
        for face, row in zip(faces, rows, strict=True):
            _require_part_is_written(face, name, row[0])
        values = [
            [_beside(face, one, name) for face, one in zip(faces, value, strict=False)]
            if isinstance(value, (list, tuple))
            else value
            for value in values
        ]
    else:
        faces = [next((face for one in values if (face := _face_of(one)) is not None), None)]
        _require_part_is_written(faces[0], name, values[0])
        values = [_beside(faces[0], value, name) if isinstance(value, Tensor) else value for value in values]
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
    if isinstance(result, (list, tuple)) and name.startswith("_foreach_"):
        return type(result)(_result_of(face, one) for face, one in zip(faces, result, strict=True))
    if isinstance(result, tuple):  # of `frexp`
        return type(result)(_result_of(faces[0], one) for one in result)
    return _result_of(faces[0], result)


def _require_part_is_written(face: PartFace | None, name: str, target: Any) -> None:
    """Refuse to write a part into a tensor of the program, which has the whole shape.

    Raises:
        PartialParameterError: The function would.
    """
    if face is not None and _IN_PLACE.fullmatch(name) and isinstance(target, Tensor) and _face_of(target) is None:
        raise PartialParameterError(
            f"`{name}` writes parameter `{face.name}`, of which this rank has a part of shape {tuple(face.local)}, into"
            f" a tensor of shape {tuple(target.shape)}. Make the tensor of the parameter (`param.detach().clone()`), so"
            " that it is a part too, or read `strategy.full_param(param)` on every rank."
        )


def _beside(face: PartFace | None, value: Any, name: str) -> Any:
    """Return an argument of an element-wise function: a part of the same elements, or the elements of a whole tensor.

    Raises:
        PartialParameterError: It is a part of other elements, or of another shape.
    """
    if face is None or not isinstance(value, Tensor):
        return value
    other = _face_of(value)
    if other is None:
        if name in _TYPES:
            return value
        cut = face.cut(value, name)
        return cut.contiguous() if name == ".data = ..." else cut
    _require_same_part(face, other, name)
    return value


def _require_same_part(face: PartFace, other: PartFace | None, name: str) -> None:
    """Refuse a part of other elements beside a parameter.

    Raises:
        PartialParameterError: It is one.
    """
    if other is not None and other.part != face.part:
        raise PartialParameterError(
            f"`{name}` got `{face.name}` and `{other.name}`, of which this rank has parts of other elements. Use"
            " `strategy.full_param(param)` on every rank."
        )


def _result_of(face: PartFace | None, result: Any) -> Any:
    is_plain = type(result) is Tensor and face is not None and result.shape == face.local
    return face.mark(result) if is_plain else result  # type: ignore[union-attr]


def _answer_for_whole(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    def outline(tensor: Tensor) -> Tensor:
        face = _face_of(tensor)
        return tensor if face is None else torch.empty(face.whole, dtype=tensor.dtype, device="meta")

    args, kwargs = tree_map_only(Tensor, outline, (args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _is_same_shape(face: PartFace, name: str, shape: tuple[Any, ...]) -> bool:
    """Say whether a view has the whole parameter's shape."""
    if len(shape) != 1 or not isinstance(shape[0], Tensor):
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        return wanted == tuple(face.whole)
    return name.endswith("_as") and tuple(shape[0].shape) == tuple(face.whole)


def _draw(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw numbers for the whole parameter, as one rank does, and take this rank's."""
    given: list[tuple[Tensor, Tensor, PartFace]] = []

    def spread(leaf: Tensor) -> Tensor:
        face = _face_of(leaf)
        if face is None:
            return leaf
        with torch._C.DisableTorchFunctionSubclass():
            given.append((leaf, face.spread(leaf.detach()), face))
        return given[-1][1]

    args, kwargs = tree_map_only(Tensor, spread, (args, kwargs))
    with torch.no_grad():
        drawn = func(*args, **kwargs)
        target, whole, face = given[0]
        if drawn is whole:
            with torch._C.DisableTorchFunctionSubclass():
                target.copy_(face.part.read(whole))
            return target
        return face.mark(face.part.read(drawn).clone()) if drawn.shape == face.whole else face.refuse(name)


def _set_items(face: PartFace, target: Tensor, index: Any, value: Any) -> None:
    """Write elements that are named by an index into the whole parameter, or by a mask made of parts."""
    for one in (index, value):
        _require_same_part(face, _face_of(one), "__setitem__")
    with torch._C.DisableTorchFunctionSubclass():
        local = target.detach()
        if isinstance(index, PartValues):
            if isinstance(value, Tensor) and value.dim():
                face.refuse("__setitem__")
            local[index.as_subclass(Tensor)] = value
            return
        chosen = torch.zeros(face.whole, dtype=torch.bool, device=local.device)
        values = torch.zeros(face.whole, dtype=local.dtype, device=local.device)
        chosen[index] = True
        mine = face.part.read(chosen).clone()
        if _face_of(value) is None:
            values[index] = value
        else:
            chosen[index] = face.spread(torch.ones_like(value, dtype=torch.bool))
            if not torch.equal(face.part.read(chosen), mine):
                face.refuse("__setitem__")  # elements of other ranks would come here
            values[index] = face.spread(value)
        local.copy_(torch.where(mine, face.part.read(values), local))


# -- Gradients ---------------------------------------------------------------------------------------------------------


def _gradients(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Differentiate by parts: the gradients are parts too."""
    found = TO_EDGES[func](*args, **kwargs)
    if found is None:
        return None
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    return tuple(_result_of(_face_of(one), grad) for one, grad in zip(inputs, found, strict=True))


class _Marking:
    """Gives a program's hook on a gradient the gradient as a part."""

    def __init__(self, face: PartFace, hook: Callable[..., Any]) -> None:
        self._face = face
        self._hook = hook

    def __call__(self, grad: Tensor) -> Any:
        """Run the hook; ``grad`` is the parameter itself for hooks behind the accumulation."""
        result = self._hook(_marked_grad_of(self._face, grad))
        return result.as_subclass(Tensor) if isinstance(result, PartValues) else result


def _marking(face: PartFace, hook: Callable[..., Any]) -> Callable[..., Any]:
    return hook if isinstance(hook, _Marking) else _Marking(face, hook)


def _wrap_hooks(param: nn.Parameter, face: PartFace) -> None:
    """Wrap hooks on gradients that the program has registered before."""
    with torch._C.DisableTorchFunctionSubclass():
        before, behind = param._backward_hooks, param._post_accumulate_grad_hooks
    # the engine has a dictionary of its own, with that of the program beside it
    for hooks in (before or {}, getattr(behind, "earlier", behind) or {}):
        for key, hook in list(hooks.items()):
            hooks[key] = _marking(face, hook)
