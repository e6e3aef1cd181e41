"""Run a user's step for one chunk of the model: what lies on other stages is passed over, not computed.

Note [Passing over]
    Every stage runs the user's own code from its first line. A module of another stage in front of this chunk does not
    compute: it returns *fake* tensors (PyTorch's ``FakeTensor``), which have a shape and a dtype and no values. What
    the code derives from them is fake as well; masks, positions and rotary tables that it derives from the batch are
    real. At the first block of the chunk fake arguments are replaced by what the stage before has computed. At the
    first block of the next chunk the run is broken off, and the arguments of that call are what is sent on. So the code
    between blocks, keyword arguments and values that all blocks share need no rules. A fake value that reaches a module
    of this chunk in another way, or the loss, is an error: nothing is ever computed from it.

Note [Gates]
    While a step runs the class of every module with a place in the split is a subclass that asks here first. Inside of
    such a module nothing is different.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.split import Place, Split

__all__ = ["Gates", "Message", "is_fake"]


@dataclass(frozen=True)
class Message:
    """A tensor that goes from one chunk to the next: a leaf of the arguments of the next chunk's first block."""

    leaf: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class _Visit:
    """A run of the step for one chunk."""

    chunk: int
    start: int  # first block of the chunk
    stop: int  # first block of the next one
    expected: Sequence[Message] = ()
    received: Sequence[torch.Tensor] = ()
    reached: int = -1  # block that was run last
    passed: int = -1  # block that was passed over last
    is_inside: bool = False  # a gated module is running
    swaps: dict[int, tuple[Any, torch.Tensor]] = field(default_factory=dict)  # fake leaf, by id -> received tensor


class _BrokenOff(Exception):
    """The next chunk's first block was reached. An ``Exception``, because module hooks see no other end of a call."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.leaves = tree_flatten((args, kwargs))[0]


class Gates:
    """Runs steps of a module chunk by chunk.

    Args:
        module: The root.
        split: What lies where.
        on_first_call: Called when a step calls a module of the split, at the latest for its first one.
    """

    def __init__(self, module: nn.Module, split: Split, on_first_call: Callable[[], None]) -> None:
        self._split = split
        self._on_first_call = on_first_call
        self._places = {id(module.get_submodule(place.name)): place for place in split.places}
        self._modules = [module.get_submodule(place.name) for place in split.places]
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._parameters: dict[int, dict[str, nn.Parameter]] = {}  # of a module, as fakes
        self._ungated = _ungated_parameters(module, split)
        self._known: dict[nn.Parameter, torch.Tensor] = {}  # of these, as fakes
        self._outputs: dict[Hashable, tuple[TreeSpec, list[Any]]] = {}  # of calls that were passed over
        self._visit: _Visit | None = None

    # -- Running a step ------------------------------------------------------------------------------------------------

    def run(
        self, step: Callable[[], Any], chunk: int, expected: Sequence[Message], received: Sequence[torch.Tensor]
    ) -> tuple[bool, Any]:
        """Run a step for one chunk.

        Args:
            step: The user's code.
            chunk: The chunk that computes.
            expected: What ``received`` is.
            received: What the chunk before has sent.

        Returns:
            Whether the step came to its end (the last chunk), and what it returned; else the leaves of the arguments of
            the next chunk's first block.

        Raises:
            PipelineError: The step cannot be run in chunks.
        """
        bounds = self._split.bounds
        visit = _Visit(chunk, bounds[chunk], bounds[chunk + 1], expected, received)
        finished, result = self._run(step, visit)
        if finished and chunk < self._split.num_chunks - 1:
            raise PipelineError(
                f"The step ended before it called `{self._block_name(visit.stop)}`, the first block of the next"
                " pipeline stage. Every block of the list must be called in every step."
            )
        if finished and (visit.reached < visit.start or any(is_fake(leaf) for leaf in tree_leaves(result))):
            raise PipelineError(
                f"What the step returns depends on a value of an earlier pipeline stage that did not come through the"
                f" blocks of `{self._split.blocks}`. A pipeline hands on what the first block of a stage is called"
                " with, and nothing else."
            )
        return finished, result

    def arguments(self, step: Callable[[], Any], chunk: int) -> list[Any]:
        """Return the leaves of the arguments of a chunk's first block, fake where other chunks compute them."""
        start = self._split.bounds[chunk]
        finished, leaves = self._run(step, _Visit(chunk, start, start))
        if finished:
            raise PipelineError(
                f"The step did not call `{self._block_name(start)}`, the first block of pipeline chunk {chunk}."
                f" A pipeline needs every block of `{self._split.blocks}` to be called in every step."
            )
        result: list[Any] = leaves
        return result

    def _run(self, step: Callable[[], Any], visit: _Visit) -> tuple[bool, Any]:
        assert self._visit is None
        self._visit = visit
        self._introduce_parameters()
        try:
            with self._installed():
                return True, step()
        except _BrokenOff as end:
            return False, end.leaves
        finally:
            self._visit = None

    def _introduce_parameters(self) -> None:
        """Tell what fake tensors make of parameters that code may add to them; they would read ``grad`` else."""
        convert: Any = self._fakes.fake_tensor_converter
        for param in self._ungated:
            known = self._known.get(param)
            if known is None or (known.dtype, known.requires_grad) != (param.dtype, param.requires_grad):
                with self._fakes:
                    known = torch.empty(param.shape, dtype=param.dtype, device=param.device)
                self._known[param] = known.requires_grad_(param.requires_grad)
                convert.set_tensor_memo(param, known)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        before = [type(module) for module in self._modules]
        try:
            for module in self._modules:
                module.__class__ = self._gated(type(module))
            yield
        finally:
            for module, cls in zip(self._modules, before, strict=True):
                module.__class__ = cls

    def _gated(self, cls: type[nn.Module]) -> type[nn.Module]:
        if cls not in self._classes:

            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return self._call(module, cls, args, kwargs)

            names = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
            self._classes[cls] = type(cls.__name__, (cls,), names)
        return self._classes[cls]

    # -- A call of a module that has a place ---------------------------------------------------------------------------

    def _call(self, module: nn.Module, cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        visit = self._visit
        if visit is None or visit.is_inside:
            return cls.__call__(module, *args, **kwargs)
        self._on_first_call()
        place = self._places[id(module)]
        if place.block is None:
            computes = self._computes_outside(visit, place)
        else:
            computes = self._computes_block(visit, place, place.block, args, kwargs)
        if not computes:
            return self._pass_over(module, visit, args, kwargs)
        args, kwargs = self._with_received(visit, place, args, kwargs)
        visit.is_inside = True
        try:
            return cls.__call__(module, *args, **kwargs)
        finally:
            visit.is_inside = False

    def _computes_outside(self, visit: _Visit, place: Place) -> bool:
        is_before = visit.reached < visit.start
        if place.chunk == 0:
            if not is_before and visit.chunk > 0:
                self._refuse_place(place, "behind the first block of a later stage", "first", "last")
            return visit.chunk == 0 and visit.stop > 0
        if is_before and visit.passed >= 0:
            raise PipelineError(
                f"`{place.name}` is called before `{self._block_name(visit.start)}`, the first block of a pipeline"
                f" stage. A pipeline needs every block of `{self._split.blocks}` to be called in every step, in order."
            )
        if is_before:
            self._refuse_place(place, "in front of the blocks", "last", "first")
        return True

    def _computes_block(
        self, visit: _Visit, place: Place, block: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        if block == visit.stop:
            raise _BrokenOff(args, kwargs)
        if block < visit.start and visit.reached < 0:
            visit.passed = block
            return False
        if block <= visit.reached or block > visit.stop or (visit.reached < visit.start < block):
            raise PipelineError(
                f"`{place.name}` is called out of turn (the last block was {visit.reached}). A pipeline needs the"
                f" blocks of `{self._split.blocks}` to be called once and in order."
            )
        visit.reached = block
        return True

    def _with_received(
        self, visit: _Visit, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves, spec = tree_flatten((args, kwargs))
        if visit.received and place.block == visit.start and not visit.swaps:
            for message, tensor in zip(visit.expected, visit.received, strict=True):
                visit.swaps[id(leaves[message.leaf])] = (leaves[message.leaf], tensor)
        leaves = [visit.swaps[id(leaf)][1] if id(leaf) in visit.swaps else leaf for leaf in leaves]
        if any(is_fake(leaf) for leaf in leaves):
            raise PipelineError(
                f"`{place.name}` is given a value that an earlier pipeline stage computes, but not as an argument of"
                f" `{self._block_name(visit.start)}`. A pipeline hands on what the first block of a stage is called"
                " with: pass the value to every block, or cut the list elsewhere (`Pipeline(partition=[...])`)."
            )
        args, kwargs = tree_unflatten(leaves, spec)
        return args, kwargs

    def _refuse_place(self, place: Place, where: str, side: str, other: str) -> NoReturn:
        raise PipelineError(
            f"`{place.name}` is called {where}, but lies {'in front of' if side == 'first' else 'behind'} the blocks"
            f" of `{self._split.blocks}` in the order of registration. Name it:"
            f" `Pipeline({other}=[{place.name!r}])`, or, if both sides use it, give both a module of their own."
        )

    def _block_name(self, block: int) -> str:
        return next((place.name for place in self._split.places if place.block == block), f"block {block}")

    # -- Passing over --------------------------------------------------------------------------------------------------

    def _pass_over(self, module: nn.Module, visit: _Visit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of a call as fakes; see Note [Passing over]."""
        inputs, spec = tree_flatten((args, kwargs))
        trained = tuple(param.requires_grad for param in module.parameters())
        known = [_describe(leaf) for leaf in inputs]
        modes = (torch.is_grad_enabled(), torch.is_autocast_enabled(_autocast_device(inputs)), module.training)
        key = (id(module), spec, tuple(known), trained, modes)
        if key not in self._outputs:
            self._outputs[key] = self._imagine(module, visit, inputs, spec)
        out_spec, outputs = self._outputs[key]
        with self._fakes:
            return tree_unflatten([_again(output, inputs) for output in outputs], out_spec)

    def _imagine(
        self, module: nn.Module, visit: _Visit, inputs: list[Any], spec: TreeSpec
    ) -> tuple[TreeSpec, list[Any]]:
        args, kwargs = tree_unflatten(inputs, spec)
        visit.is_inside = True
        try:
            with self._fakes, _reparametrize_module(module, dict(self._fake_parameters(module))):
                output = module.forward(*args, **kwargs)
        except Exception as error:
            raise PipelineError(
                f"`{self._places[id(module)].name}` lies on another pipeline stage, and what it returns could not be"
                f" told from the shapes of its arguments: {error}"
            ) from error
        finally:
            visit.is_inside = False
        positions = {id(leaf): index for index, leaf in enumerate(inputs)}
        leaves, out_spec = tree_flatten(output)
        return out_spec, [_Input(positions[id(leaf)]) if id(leaf) in positions else _describe(leaf) for leaf in leaves]

    def _fake_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        if id(module) not in self._parameters:
            with self._fakes:
                self._parameters[id(module)] = {
                    name: nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device=param.device), False)
                    for name, param in module.named_parameters()
                }
        fakes = self._parameters[id(module)]
        for name, param in module.named_parameters():
            fakes[name].requires_grad_(param.requires_grad)
        return fakes


def _ungated_parameters(module: nn.Module, split: Split) -> list[nn.Parameter]:
    """Return the parameters that lie in no module of the split."""
    inside = {id(param) for place in split.places for param in module.get_submodule(place.name).parameters()}
    return [param for param in module.parameters() if id(param) not in inside]


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
    if isinstance(leaf, torch.Tensor):
        shape, stride = tuple(leaf.shape), tuple(leaf.stride())
        return _Shape(shape, stride, leaf.dtype, leaf.device, leaf.requires_grad, is_fake(leaf))
    return leaf if isinstance(leaf, (int, float, str, bool, bytes, torch.dtype, torch.device)) else _Object(leaf)


class _Object:
    """A value of which nothing is known but which one it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _again(output: Any, inputs: Sequence[Any]) -> Any:
    """Return an output of a call that was passed over before."""
    if isinstance(output, _Input):
        return inputs[output.leaf]
    if isinstance(output, _Object):
        return output.value
    if not isinstance(output, _Shape):
        return output
    tensor = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device=output.device)
    return tensor.requires_grad_(output.requires_grad)


def _autocast_device(leaves: Sequence[Any]) -> str:
    return next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
