"""What modules of other pipeline stages return, as PyTorch's ``FakeTensor``: shapes and dtypes, no values.

Note [What a passed module leaves]
    A forward may leave tensors in its module (``self.aux_loss = ...``, statistics in a module buffer), which code
    behind it reads. A module that is passed over must not be left with fakes, and that code must not read old values in
    silence. So its forward finds fakes in place of the module's tensors; what it has changed is put back, and is shown
    as fakes until the step is run to its end. Modules with hooks of the program run on fakes in every call.

Note [Guesses]
    What an operation returns may depend on values (which tokens an expert is given). Where nothing is computed from the
    result but shapes, it is guessed from ones: a module that routes tokens returns as many as it is given. The stage
    that computes compares the shapes of what it sends, so a wrong guess is an error.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.sources import FOR_HOOKS, Origins, Shape, Source, describe_tensor, is_fake

__all__ = ["VALUES_NEEDED", "Fakes", "attribute_spaces"]

# What operations raise that need values of a fake.
VALUES_NEEDED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

Fetch = Callable[[Source], Tensor | None]
_Key = tuple[str, str, str]  # submodule, dictionary among its attributes, and key
_Position = tuple[_Key | None, int]  # see `Source`

_MOST_CALLS = 4096  # that are remembered
_MISSING = object()
_NUMBERS = (int, float, complex, str)
_KNOWN_BY_IDENTITY = (nn.Module, type, Enum, FunctionType, BuiltinFunctionType, torch.Generator)  # and nothing else
_KNOWN_BY_VALUE = (int, float, complex, str, bool, bytes, type(None), torch.dtype, torch.device)


class Fakes:
    """Tells what modules return from what they are called with, and remembers it.

    Args:
        names: Of the modules, by ``id``; for errors.
        free: Parameters that code outside of these modules uses.
        asleep: Around forwards of modules.
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
        # - The run
        self._times: Counter[str] = Counter()  # calls by name of the module
        self._sharing: list[tuple[str, Tensor, int]] = []  # module, tensor that shares memory with others, and version
        self._origins: Origins | None = None  # of a run on fakes
        self._fetch: Fetch | None = None  # of a run that computes

    def begin(self, *, origins: Origins | None = None, fetch: Fetch | None = None) -> None:
        """Begin a run: tell what fake tensors make of parameters that code may add to them; they read ``grad`` else.

        Args:
            origins: In a run on fakes, follows what they are computed from.
            fetch: Returns the tensor of a source that this chunk has, else None.
        """
        self._given.clear()
        self._times.clear()
        self._sharing.clear()
        self._origins = self._mode.origins = origins
        self._fetch = fetch
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
        self._origins = self._mode.origins = self._fetch = None
        while self._shown:
            attributes, name, value = self._shown.pop()
            _assign(attributes, name, value)

    def require_unwritten(self) -> None:
        """Raise where the program has written into one of several tensors that share memory on their own stage."""
        for name, tensor, version in self._sharing:
            if tensor._version != version:
                raise PipelineError(
                    f"The step writes into a tensor that `{name}` of another pipeline stage has returned or was given,"
                    " and that shares memory with another one. This stage does not see the write in the other. Write"
                    " into a copy (`tensor.clone()`), or compute a new tensor."
                )

    @property
    def shown(self) -> list[Any]:
        """What modules show as fakes, of all calls in this run."""
        return [space.get(name) for space, name, _ in self._shown]

    def outputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, are_sources: bool = True
    ) -> Any:
        """Return what a call would return, as fakes, and show what it would leave in the module.

        Args:
            module: The module.
            args: Of the call.
            kwargs: Of the call.
            are_sources: The module is one of an earlier chunk: sources that this chunk has are returned as they are.
        """
        name = self._names[id(module)]
        number = self._times[name]
        call, inputs = self._call(module, args, kwargs, are_sources=are_sources)
        self._times[name] += 1

        def make(leaf: int, known: Shape) -> Tensor:
            left, position = call.positions[leaf]
            source = Source(name, number, left, position)
            fetched = self._fetched(source) if are_sources else None
            if fetched is not None:
                return fetched
            fake = self._fake(call, leaf, known)
            if self._origins is not None and are_sources:
                self._origins.mark(fake, source)
            return fake

        return self._result(module, call, inputs, make)

    def _fetched(self, source: Source) -> Tensor | None:
        if self._fetch is None:
            return None
        with self._mode.paused():
            return self._fetch(source)

    def zeros(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call would return, with zeros that take no memory."""
        call, inputs = self._call(module, args, kwargs, are_sources=False)
        return self._result(module, call, inputs, lambda _, known: _zeros(known))

    def _result(
        self, module: nn.Module, call: _Call, inputs: Sequence[Any], make: Callable[[int, Shape], Tensor]
    ) -> Any:
        leaves = [_again(leaf, inputs, partial(make, number)) for number, leaf in enumerate(call.leaves)]
        for shared in call.sharing:
            alike = [leaves[number] for number in shared.leaves] + [inputs[number] for number in shared.inputs]
            self._sharing += [(self._names[id(module)], one, one._version) for one in alike if not one.is_inference()]
        output, left = tree_unflatten(leaves, call.spec)
        spaces = attribute_spaces(module) if left else {}
        for (child, kept, name), value in left.items():
            space = spaces[child, kept]
            self._shown.append((space, name, space.get(name, _MISSING)))
            space[name] = value
        return output

    def _fake(self, call: _Call, leaf: int, known: Shape) -> Tensor:
        """Return a fake that this run has not had yet: one of an earlier run, if nobody has changed it in place."""
        made, number = call.made.setdefault(leaf, []), self._given[id(call), leaf]
        self._given[id(call), leaf] += 1
        old = made[number] if number < len(made) else None
        is_same = old is not None and _describe(old) == replace(known, is_fake=True)
        if old is not None and is_same and not old._version and not old._backward_hooks:
            return old
        with self._mode:
            fake = _empty(known)
            fake = fake.clone() if fake.requires_grad else fake  # what a module returns may be changed in place
        made[number : number + 1] = [fake]
        return fake

    def _call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, are_sources: bool
    ) -> tuple[_Call, list[Any]]:
        inputs, spec = tree_flatten((args, kwargs))
        if _runs_code_of_users(module):
            with self._watching_inside(module) if are_sources else nullcontext(), self._hooks_outside(module):
                return self._imagine(module, inputs, spec), inputs
        if not all(map(_is_known, inputs)):
            return self._imagine(module, inputs, spec), inputs
        trained = tuple(param.requires_grad for param in module.parameters())
        device = _autocast_device(inputs)
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        modes = (torch.is_grad_enabled(), autocast, tuple(child.training for child in module.modules()))
        key = (id(module), spec, tuple(map(_describe, inputs)), trained, modes)
        if key not in self._calls:
            call = self._imagine(module, inputs, spec)
            if any(isinstance(leaf, _NUMBERS) for leaf in call.leaves):
                return call, inputs  # they may be others in the next call
            self._calls[key] = call
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
                real = [leaf for leaf in inputs if isinstance(leaf, Tensor) and not is_fake(leaf)]
                versions = [leaf._version for leaf in real if not leaf.is_inference()]  # which views share
                output = self._forward(module, args, kwargs)
                self._require_same(tree_flatten((args, kwargs)), inputs, spec)
                if [leaf._version for leaf in real if not leaf.is_inference()] != versions:
                    raise PipelineError("it writes into an argument that this stage has, which other stages do not see")
        except Exception as error:
            raise PipelineError(
                f"`{self._names[id(module)]}` lies on another pipeline stage, and what it returns could not be told"
                f" from the shapes of its arguments: {error}"
            ) from error
        positions = {
            id(leaf): index for index, leaf in enumerate(inputs) if isinstance(leaf, Tensor) and not is_fake(leaf)
        }
        leaves, out_spec = tree_flatten((output, left))
        places: list[_Position] = [(None, number) for number in range(len(tree_leaves(output)))]
        places += [(key, number) for key, value in left.items() for number in range(len(tree_leaves(value)))]
        described = [_Input(positions[id(leaf)]) if id(leaf) in positions else _describe(leaf) for leaf in leaves]
        return _Call(out_spec, described, places, _sharing(leaves, inputs))

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
    def _watching_inside(self, module: nn.Module) -> Iterator[None]:
        """Let hooks of the program on modules inside of one find sources: fakes that are known as such, or tensors."""
        own = self._names[id(module)]
        names = {child: f"{own}.{name}" if name else own for name, child in module.named_modules()}
        marked: dict[int, Any] = {}  # what modules further inside have returned, by `id`

        def watch(child: nn.Module, args: Any, output: Any) -> Any:
            name, left = names[child], FOR_HOOKS if child is module else None
            number = self._times[name]
            self._times[name] += child is not module
            leaves, spec = tree_flatten(output)
            for position, leaf in enumerate(leaves):
                if not is_fake(leaf) or id(leaf) in marked:
                    continue
                source = Source(name, number, left, position)
                fetched = self._fetched(source)
                if fetched is not None:
                    leaves[position] = fetched
                elif self._origins is not None:
                    self._origins.mark(leaf, source)
                marked[id(leaves[position])] = leaves[position]
            return tree_unflatten(leaves, spec)

        handles = [child.register_forward_hook(watch, prepend=True) for child in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _hooks_outside(self, module: nn.Module) -> Iterator[None]:
        """Let hooks of the program compute as code between modules does, with tensors where they find tensors."""

        def outside(hook: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                with self._mode.paused():
                    return hook(*args, **kwargs)

            call.__module__ = ""  # not one of ours
            return call

        hooks = [one for child in module.modules() for one in (child._forward_pre_hooks, child._forward_hooks)]
        before = [dict(one) for one in hooks]
        for one in hooks:
            one.update({key: outside(hook) for key, hook in one.items() if not _is_own(hook)})
        try:
            yield
        finally:
            for one, old in zip(hooks, before, strict=True):
                one.update({key: old.get(key, hook) for key, hook in one.items()})

    @contextmanager
    def _apart(self, module: nn.Module) -> Iterator[dict[_Key, Any]]:
        """Let a forward find fakes in place of the module's tensors, and put back what it has changed.

        Yields:
            A dictionary for what it has left that is fake, by submodule, dictionary and name.
        """
        left: dict[_Key, Any] = {}
        keys, spaces = zip(*attribute_spaces(module).items(), strict=True)
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
                        left[*keys[number], name] = value
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
    """Refuses operations that would write nothing: of a fake into a tensor with values, and any while imagining.

    In a run on fakes they are taken note of, and results that depend on values are guessed; see the note.
    """

    origins: Origins | None = None  # of a run on fakes
    _is_imagining = False
    _is_drawn = False  # an operation is running whose random numbers have been drawn

    @contextmanager
    def imagining(self) -> Iterator[None]:
        """Run code that computes with fakes only."""
        self._is_imagining = True
        try:
            with self:
                yield
        finally:
            self._is_imagining = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run code of the program while imagining."""
        was, self._is_imagining = self._is_imagining, False
        try:
            with unset_fake_temporarily():
                yield
        finally:
            self._is_imagining = was

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lost = self._lost_writes(func, args, kwargs)
        if lost and self.origins is None:
            raise PipelineError(
                f"`{func}` writes a value of an earlier pipeline stage into a tensor of shape {tuple(lost[0].shape)}"
                " that is not of that stage, as in `loss += block.aux_loss`, and it could not be told before the step"
                " that it is needed. Add it to what goes from block to block, or write `pipeline_step` and"
                " `pipeline_loss`."
            )
        if lost and self.origins is not None:
            self.origins.need((args, kwargs))
            return lost[0]
        if not (self._is_imagining or self._is_drawn) and torch.Tag.nondeterministic_seeded in getattr(
            func, "tags", ()
        ):
            _draw(func, args, kwargs)
            self._is_drawn = True  # also where PyTorch makes it of other random operations
            try:
                return self.__torch_dispatch__(func, types, args, kwargs)
            finally:
                self._is_drawn = False
        if func is torch.ops.aten._grouped_mm.default:
            result: Any = self._empty_product(*args, **kwargs)
            if self.origins is not None and not self._is_imagining:
                self.origins.derive(result, (args, kwargs))
            return result
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except VALUES_NEEDED as error:
            reads = isinstance(error, DataDependentOutputException)  # what is read may be shown, or computed with
            if reads or func._schema.is_mutable or not (self._is_imagining or self.origins is not None):
                raise
            result = self._guess(func, args, kwargs)
        if self.origins is not None and not self._is_imagining:
            self.origins.derive(result, (args, kwargs))
        return result

    def _lost_writes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors with values that an operation would write fakes into."""
        schema = getattr(func, "_schema", None)
        if schema is None or not schema.is_mutable:
            return []
        given = {**dict(zip((one.name for one in schema.arguments), args, strict=False)), **kwargs}
        written = [
            given.get(one.name) for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write
        ]
        lost = [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor) and not is_fake(leaf)]
        if lost and self._is_imagining:
            raise PipelineError(
                f"it writes into a tensor of shape {tuple(lost[0].shape)} (`{func}`) that is not its own"
            )
        return lost if any(map(is_fake, tree_leaves(given))) else []

    def _empty_product(
        self, left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
    ) -> Tensor:
        """Return what products of groups (of experts) are like; PyTorch's shapes are for bf16 only."""
        groups = [right.shape[0]] if right.dim() == 3 else [0 if offs is None else offs.shape[0]]
        shape = [*(groups if left.dim() == right.dim() else []), left.shape[-2], right.shape[-1]]
        with self:
            return left.new_empty(shape, dtype=out_dtype)

    def _guess(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation that needs values returns for ones, and for zeros where they may be indices."""
        with torch.no_grad(), unset_fake_temporarily():
            result = func(*tree_map(_filled, args), **tree_map(_filled, kwargs))

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            with self:
                return _empty(describe_tensor(leaf))

        return tree_map(fake, result)


def _filled(leaf: Any) -> Any:
    if not is_fake(leaf):
        return leaf
    value = 1 if leaf.dtype.is_floating_point or leaf.dtype is torch.bool else 0
    return torch.full(leaf.shape, value, dtype=leaf.dtype, device=leaf.device)


_DRAWN_BY_VALUES = ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")


def _draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Draw as many random numbers as the stage that has the values: all stages draw the same ones behind it."""
    if func._schema.name.rpartition("::")[2] in _DRAWN_BY_VALUES:
        raise PipelineError(
            f"`{func}` draws random numbers for a value of an earlier pipeline stage, as many as its values tell, so"
            " that this stage would draw others from here on. Move it into a block."
        )

    def ones(leaf: Any) -> Any:
        return torch.ones_like(_empty(_describe(leaf)), requires_grad=False) if is_fake(leaf) else leaf

    with torch.no_grad():
        func(*tree_map(ones, args), **tree_map(ones, kwargs))


@dataclass
class _Call:
    """What is known of a call of a module.

    Attributes:
        spec: Of what it returns, and of what it leaves in the module.
        leaves: Of these, described.
        positions: Of these, as sources have them.
        sharing: Leaves, and inputs, that share memory on the stage that computes.
        made: Fakes that stand for them, by leaf.
    """

    spec: TreeSpec
    leaves: list[Any]
    positions: list[_Position]
    sharing: list[_Sharing]
    made: dict[int, list[Tensor]] = field(default_factory=dict)


@dataclass
class _Sharing:
    """Positions of tensors that share memory."""

    leaves: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)


def _sharing(leaves: Sequence[Any], inputs: Sequence[Any]) -> list[_Sharing]:
    found: dict[int, _Sharing] = {}
    for number, leaf in enumerate(leaves):
        if is_fake(leaf):
            found.setdefault(leaf.untyped_storage()._cdata, _Sharing()).leaves.append(number)
    for number, leaf in enumerate(inputs):
        if is_fake(leaf) and leaf.untyped_storage()._cdata in found:
            found[leaf.untyped_storage()._cdata].inputs.append(number)
    return [one for one in found.values() if len(one.leaves) + len(one.inputs) > 1]


@dataclass(frozen=True)
class _Input:
    """An output that is an input."""

    leaf: int


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return describe_tensor(leaf)
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


def _empty(known: Shape) -> Tensor:
    tensor = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device=known.device)
    return tensor.requires_grad_(known.requires_grad)


def _zeros(known: Shape) -> Tensor:
    return torch.zeros((), dtype=known.dtype, device=known.device).expand(known.shape)


def _again(output: Any, inputs: Sequence[Any], make: Callable[[Shape], Tensor]) -> Any:
    """Return an output of a call that is known."""
    if isinstance(output, _Input):
        return inputs[output.leaf]
    if isinstance(output, _Object):
        return output.value
    if not isinstance(output, Shape):
        return output
    return make(output)


def _autocast_device(leaves: Sequence[Any]) -> str:
    return next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")


def attribute_spaces(module: nn.Module) -> dict[tuple[str, str], dict[str, Any]]:
    """Return where a module and its submodules have attributes, module buffers and dictionaries of them.

    Returns:
        By name of the submodule, and of the dictionary among its attributes ("" for these).
    """
    spaces: dict[int, tuple[tuple[str, str], dict[str, Any]]] = {}
    for child_name, child in module.named_modules():
        own = vars(child)
        kept = {name: value for name, value in own.items() if type(value) is dict and name not in _OF_MODULES}
        for name, space in {"": own, "_buffers": child._buffers, **kept}.items():
            spaces.setdefault(id(space), ((child_name, name), space))
    return dict(spaces.values())


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
        "forward" in vars(child)  # as code does that collects what a module returns
        or not all(map(_is_own, (*child._forward_pre_hooks.values(), *child._forward_hooks.values())))
        for child in module.modules()
    )


def _is_own(hook: Any) -> bool:
    while isinstance(hook, (partial, MethodType)):
        hook = hook.func if isinstance(hook, partial) else hook.__func__
    name = getattr(hook, "__module__", None) or type(hook).__module__
    return name.partition(".")[0] == __name__.partition(".")[0]
