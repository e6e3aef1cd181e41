"""What modules of other pipeline stages return, as PyTorch's ``FakeTensor``: shapes and dtypes, no values.

Note [What a passed module leaves]
    A forward may leave tensors in its module (``self.aux_loss = ...``, statistics in a module buffer), which code
    behind it reads. A module that is passed over must not be left with fakes, and that code must not read old values in
    silence. So its forward finds fakes in place of the module's tensors; what it has changed is put back, and is shown
    as fakes until the step is run to its end. Modules with hooks of the program run on fakes in every call.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from lightning_zero.errors import PipelineError

__all__ = ["VALUES_NEEDED", "Fakes", "is_fake"]

# What operations raise that need values of a fake.
VALUES_NEEDED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

_MOST_CALLS = 4096  # that are remembered
_MISSING = object()
_KNOWN_BY_IDENTITY = (nn.Module, type, Enum, FunctionType, BuiltinFunctionType, torch.Generator)  # and nothing else
_KNOWN_BY_VALUE = (int, float, complex, str, bool, bytes, type(None), torch.dtype, torch.device)


class Fakes:
    """Tells what modules return from what they are called with, and remembers it.

    Args:
        names: Of the modules, by ``id``; for errors.
        free: Parameters that code outside of these modules uses.
        asleep: Lets forwards of modules go unnoticed.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        free: Sequence[nn.Parameter],
        asleep: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._names = names
        self._asleep = asleep
        self._mode = _Mode(allow_non_fake_inputs=True)
        self._parameters: dict[int, dict[str, nn.Parameter]] = {}  # of a module, as fakes
        self._free = free
        self._known: dict[nn.Parameter, Tensor] = {}  # of these, as fakes
        self._calls: OrderedDict[Hashable, _Call] = OrderedDict()
        self._given: Counter[tuple[int, int]] = Counter()  # fakes in this run, by `id` of the call and leaf
        self._shown: list[tuple[dict[str, Any], str, Any]] = []  # what is to be put back: (attributes, name, value)

    def begin(self) -> None:
        """Begin a run: tell what fake tensors make of parameters that code may add to them; they read ``grad`` else."""
        self._given.clear()
        convert: Any = self._mode.fake_tensor_converter
        for param in self._free:
            known = self._known.get(param)
            if known is None or (known.dtype, known.requires_grad) != (param.dtype, param.requires_grad):
                with self._mode:
                    known = torch.empty(param.shape, dtype=param.dtype, device=param.device)
                self._known[param] = known.requires_grad_(param.requires_grad)
                convert.set_tensor_memo(param, known)

    def end(self) -> None:
        """End a run: put back what modules that were passed over show as fakes."""
        while self._shown:
            attributes, name, value = self._shown.pop()
            _assign(attributes, name, value)

    def outputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call would return, as fakes, and show what it would leave in the module."""
        call, inputs = self._call(module, args, kwargs)
        return self._result(module, call, inputs, partial(self._fake, call))

    def zeros(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call would return, with zeros that take no memory."""
        call, inputs = self._call(module, args, kwargs)
        return self._result(module, call, inputs, lambda _, known: _zeros(known))

    def _result(
        self, module: nn.Module, call: _Call, inputs: Sequence[Any], make: Callable[[int, _Shape], Tensor]
    ) -> Any:
        leaves = [_again(leaf, inputs, partial(make, number)) for number, leaf in enumerate(call.leaves)]
        output, left = tree_unflatten(leaves, call.spec)
        spaces = _spaces(module) if left else []
        for (number, name), value in left.items():
            self._shown.append((spaces[number], name, spaces[number].get(name, _MISSING)))
            spaces[number][name] = value
        return output

    def _fake(self, call: _Call, leaf: int, known: _Shape) -> Tensor:
        """Return a fake that this run has not had yet: one of an earlier run, if nobody has changed it in place."""
        made, number = call.made.setdefault(leaf, []), self._given[id(call), leaf]
        self._given[id(call), leaf] += 1
        if number < len(made) and _describe(made[number]) == replace(known, is_fake=True) and not made[number]._version:
            return made[number]
        with self._mode:
            fake = _empty(known)
            fake = fake.clone() if fake.requires_grad else fake  # what a module returns may be changed in place
        made[number : number + 1] = [fake]
        return fake

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Call, list[Any]]:
        inputs, spec = tree_flatten((args, kwargs))
        if _runs_code_of_users(module) or not all(map(_is_known, inputs)):
            return self._imagine(module, inputs, spec), inputs
        trained = tuple(param.requires_grad for param in module.parameters())
        device = _autocast_device(inputs)
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        modes = (torch.is_grad_enabled(), autocast, tuple(child.training for child in module.modules()))
        key = (id(module), spec, tuple(map(_describe, inputs)), trained, modes)
        if key not in self._calls:
            self._calls[key] = self._imagine(module, inputs, spec)
            if len(self._calls) > _MOST_CALLS:
                self._calls.popitem(last=False)
        self._calls.move_to_end(key)
        return self._calls[key], inputs

    def _imagine(self, module: nn.Module, inputs: list[Any], spec: TreeSpec) -> _Call:
        args, kwargs = tree_unflatten(inputs, spec)
        try:
            with (
                self._asleep(),
                self._mode.imagining(),
                _reparametrize_module(module, dict(self._fake_parameters(module))),
                self._apart(module) as left,
            ):
                output = self._forward(module, args, kwargs)
                self._require_same(tree_flatten((args, kwargs)), inputs, spec)
        except Exception as error:
            raise PipelineError(
                f"`{self._names[id(module)]}` lies on another pipeline stage, and what it returns could not be told"
                f" from the shapes of its arguments: {error}"
            ) from error
        positions = {id(leaf): index for index, leaf in enumerate(inputs) if isinstance(leaf, Tensor)}
        leaves, out_spec = tree_flatten((output, left))
        return _Call(out_spec, [_Input(positions[id(leaf)]) if id(leaf) in positions else _describe(leaf)
                                for leaf in leaves])  # fmt: skip

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward with the program's hooks; without them if they read values, as those that only watch do."""
        try:
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        except VALUES_NEEDED:
            if not _runs_code_of_users(module):
                raise
        with _without_hooks(module):
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _require_same(self, now: tuple[list[Any], TreeSpec], inputs: Sequence[Any], spec: TreeSpec) -> None:
        leaves, now_spec = now
        if now_spec != spec or any(mine is not given for mine, given in zip(leaves, inputs, strict=True)):
            raise PipelineError("it changes a list or a dictionary among its arguments, which other stages do not see")

    @contextmanager
    def _apart(self, module: nn.Module) -> Iterator[dict[tuple[int, str], Any]]:
        """Let a forward find fakes in place of the module's tensors, and put back what it has changed.

        Yields:
            A dictionary for what it has left that is fake, by number in ``_spaces`` and name.
        """
        left: dict[tuple[int, str], Any] = {}
        spaces = _spaces(module)
        lists = {id(value): (value, list(value)) for space in spaces for value in space.values() if type(value) is list}
        before = [dict(space) for space in spaces]
        fakes: dict[int, Tensor] = {}  # by `id` of the tensor
        for space in spaces:
            for name, value in space.items():
                if isinstance(value, Tensor) and not is_fake(value):
                    fakes.setdefault(id(value), _empty(_describe(value)))
                    space[name] = fakes[id(value)]
        versions = {id(fake): fake._version for fake in fakes.values()}
        try:
            yield left
            for now, was in lists.values():
                if len(now) != len(was) or any(mine is not given for mine, given in zip(now, was, strict=True)):
                    raise PipelineError("it changes a list that it keeps, which code on other stages would not see")
        finally:
            for now, was in lists.values():
                now[:] = was
            for number, (space, old) in enumerate(zip(spaces, before, strict=True)):
                for name in [*space, *(name for name in old if name not in space)]:
                    value, was = space.get(name, _MISSING), old.get(name, _MISSING)
                    stood = fakes.get(id(was))
                    is_changed = value is not was if stood is None else (
                        value is not stood or stood._version != versions[id(stood)]
                    )  # fmt: skip
                    if is_changed and any(map(is_fake, tree_leaves(value))):
                        left[number, name] = value
                    _assign(space, name, was)

    def _fake_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        if id(module) not in self._parameters:
            with self._mode:
                self._parameters[id(module)] = {
                    name: nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device=param.device), False)
                    for name, param in module.named_parameters()
                }
        fakes = self._parameters[id(module)]
        for name, param in module.named_parameters():
            fakes[name].requires_grad_(param.requires_grad)
        return fakes


class _Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Refuses operations that would write nothing: of a fake into a tensor with values, and any while imagining."""

    _is_imagining = False

    @contextmanager
    def imagining(self) -> Iterator[None]:
        """Run code that computes with fakes only."""
        self._is_imagining = True
        try:
            with self:
                yield
        finally:
            self._is_imagining = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            _refuse_lost_write(func, schema, args, kwargs or {}, is_imagined=self._is_imagining)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _refuse_lost_write(
    func: Any, schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_imagined: bool
) -> None:
    given = {**dict(zip((one.name for one in schema.arguments), args, strict=False)), **kwargs}
    written = [
        given.get(one.name) for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write
    ]
    if not (is_imagined or any(map(is_fake, tree_leaves(given)))):
        return
    for leaf in tree_leaves(written):
        if not isinstance(leaf, Tensor) or is_fake(leaf):
            continue
        if is_imagined:
            raise PipelineError(f"it writes into a tensor of shape {tuple(leaf.shape)} (`{func}`) that is not its own")
        raise PipelineError(
            f"`{func}` writes a value of an earlier pipeline stage into a tensor of shape {tuple(leaf.shape)} that"
            " is not of that stage, as in `loss += block.aux_loss`. A pipeline hands on what the first block of a"
            " stage is called with, and nothing else, so the value is not there. Add it to what goes from block to"
            " block, or write `pipeline_step` and `pipeline_loss`."
        )


@dataclass
class _Call:
    """What is known of a call of a module.

    Attributes:
        spec: Of what it returns, and of what it leaves in the module.
        leaves: Of these, described.
        made: Fakes that stand for them, by leaf.
    """

    spec: TreeSpec
    leaves: list[Any]
    made: dict[int, list[Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Shape:
    """What is known of a tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_fake: bool


@dataclass(frozen=True)
class _Input:
    """An output that is an input."""

    leaf: int


def is_fake(value: Any) -> bool:
    """Say whether a value stands for one that another stage computes."""
    return isinstance(value, FakeTensor)


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        shape, stride = tuple(leaf.shape), tuple(leaf.stride())
        return _Shape(shape, stride, leaf.dtype, leaf.device, leaf.requires_grad, is_fake(leaf))
    return leaf if isinstance(leaf, _KNOWN_BY_VALUE) else _Object(leaf)


def _is_known(leaf: Any) -> bool:
    """Say whether the next call with this argument is a call with the same argument."""
    return isinstance(leaf, (Tensor, *_KNOWN_BY_VALUE, *_KNOWN_BY_IDENTITY))


class _Object:
    """A value of which nothing is known but which one it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _empty(known: _Shape) -> Tensor:
    tensor = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device=known.device)
    return tensor.requires_grad_(known.requires_grad)


def _zeros(known: _Shape) -> Tensor:
    return torch.zeros((), dtype=known.dtype, device=known.device).expand(known.shape)


def _again(output: Any, inputs: Sequence[Any], make: Callable[[_Shape], Tensor]) -> Any:
    """Return an output of a call that is known."""
    if isinstance(output, _Input):
        return inputs[output.leaf]
    if isinstance(output, _Object):
        return output.value
    if not isinstance(output, _Shape):
        return output
    return make(output)


def _autocast_device(leaves: Sequence[Any]) -> str:
    return next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")


def _spaces(module: nn.Module) -> list[dict[str, Any]]:
    """Return where a module and its submodules have attributes, module buffers and dictionaries of them, in order."""
    spaces: dict[int, dict[str, Any]] = {}
    for child in module.modules():
        own = vars(child)
        kept = [value for name, value in own.items() if type(value) is dict and name not in _OF_MODULES]
        spaces.update({id(space): space for space in (own, child._buffers, *kept)})
    return list(spaces.values())


_OF_MODULES = frozenset(vars(nn.Module()))


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Leave the hooks of the program out."""
    hooks = [one for child in module.modules() for one in (child._forward_pre_hooks, child._forward_hooks)]
    before = [dict(one) for one in hooks]
    for one in hooks:
        for key in [key for key, hook in one.items() if not _is_own(hook)]:
            del one[key]
    try:
        yield
    finally:
        for one, old in zip(hooks, before, strict=True):
            one.clear()
            one.update(old)


def _assign(space: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        space.pop(name, None)
    else:
        space[name] = value


def _runs_code_of_users(module: nn.Module) -> bool:
    """Say whether forwards of a module run hooks that are not the engine's."""
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return True
    return any(
        not _is_own(hook)
        for child in module.modules()
        for hook in (*child._forward_pre_hooks.values(), *child._forward_hooks.values())
    )


def _is_own(hook: Any) -> bool:
    while isinstance(hook, (partial, MethodType)):
        hook = hook.func if isinstance(hook, partial) else hook.__func__
    name = getattr(hook, "__module__", None) or type(hook).__module__
    return name.partition(".")[0] == __name__.partition(".")[0]
