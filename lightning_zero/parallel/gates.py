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

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.denominators import unwatched
from lightning_zero.parallel.fakes import VALUES_NEEDED, Fakes, is_fake
from lightning_zero.parallel.module_state import without_caches
from lightning_zero.parallel.split import Place, Split, modules_around

__all__ = ["Gates", "Message"]


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
    computes: bool = True  # False: a survey
    expected: Sequence[Message] = ()
    receive: Callable[[], Sequence[Tensor]] = tuple
    send: Callable[[Sequence[Any]], None] | None = None
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
        asleep: Lets forwards that compute nothing go unnoticed.
    """

    def __init__(
        self,
        module: nn.Module,
        split: Split,
        on_first_call: Callable[[], None],
        asleep: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._root = module
        self._around = list(modules_around(module, split))
        self._split = split
        self._on_first_call = on_first_call
        self._places = {id(module.get_submodule(place.name)): place for place in split.places}
        self._modules = [module.get_submodule(place.name) for place in split.places]
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}
        names = {key: place.name for key, place in self._places.items()}
        self._fakes = Fakes(names, _ungated_parameters(module, split), asleep)
        self._visit: _Visit | None = None

    # -- Running a step ------------------------------------------------------------------------------------------------

    def run(
        self,
        step: Callable[[], Any],
        chunk: int,
        expected: Sequence[Message],
        receive: Callable[[], Sequence[Tensor]],
        send: Callable[[Sequence[Any]], None],
    ) -> tuple[bool, Any]:
        """Run a step for one chunk.

        Args:
            step: The user's code.
            chunk: The chunk that computes.
            expected: What comes from the chunk before.
            receive: Waits for it and returns it. Called at the chunk's first block, so that what is in front of it does
                not wait.
            send: Called with the leaves of the arguments of the next chunk's first block, when it is called.

        Returns:
            Whether the step came to its end (the last chunk), and what it returned.

        Raises:
            PipelineError: The step cannot be run in chunks.
        """
        bounds = self._split.bounds
        visit = _Visit(chunk, bounds[chunk], bounds[chunk + 1], expected=expected, receive=receive, send=send)
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

    def survey(self, step: Callable[[], Any]) -> Any:
        """Run a step in which no module of the split computes: what they return is zeros without memory."""
        return self._run(step, _Visit(-1, 0, 0, computes=False))

    def _run(self, step: Callable[[], Any], visit: _Visit) -> tuple[bool, Any]:
        assert self._visit is None
        self._visit = visit
        try:
            self._fakes.begin()
            with self._keeping_buffers():
                return self._run_installed(step)
        except VALUES_NEEDED as error:
            raise PipelineError(
                "The step needs a value that an earlier pipeline stage computes, outside of the blocks of"
                f" `{self._split.blocks}`: {error}. The line is in the traceback. Move it into a block, or write"
                " `pipeline_step` and `pipeline_loss`."
            ) from error
        finally:
            self._visit = None
            self._fakes.end()

    def _run_installed(self, step: Callable[[], Any]) -> tuple[bool, Any]:
        try:
            with self._installed():
                return True, step()
        except _BrokenOff as end:
            return False, end.leaves

    @contextmanager
    def _installed(self) -> Iterator[None]:
        before = [type(module) for module in self._modules]
        try:
            for module in self._modules:
                module.__class__ = self._gated(type(module))
            with without_caches(self._root):
                yield
        finally:
            for module, cls in zip(self._modules, before, strict=True):
                module.__class__ = cls

    @contextmanager
    def _keeping_buffers(self) -> Iterator[None]:
        before = [(module, dict(module._buffers)) for module in self._around]
        yield
        for module, buffers in before:
            for name, buffer in module._buffers.items():
                if is_fake(buffer):
                    module._buffers.update(buffers)
                    raise PipelineError(
                        f"The step assigns a value of an earlier pipeline stage to the module buffer `{name}` of"
                        f" `{type(module).__name__}`, which lies around the blocks of `{self._split.blocks}`: stages"
                        " behind it do not have the value. Make it a buffer of a block, or a plain attribute."
                    )

    def _gated(self, cls: type[nn.Module]) -> type[nn.Module]:
        if cls not in self._classes:

            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return self._call(module, cls, args, kwargs)

            names = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
            gated = type(cls.__name__, (cls,), names)
            if "forward" in vars(gated):  # a base class has wrapped it once more (gradient checkpointing does)
                delattr(gated, "forward")
            self._classes[cls] = gated
        return self._classes[cls]

    # -- A call of a module that has a place ---------------------------------------------------------------------------

    def _call(self, module: nn.Module, cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        visit = self._visit
        if visit is None or visit.is_inside:
            return cls.__call__(module, *args, **kwargs)
        place = self._places[id(module)]
        with unwatched():
            self._on_first_call()
            if not self._computes(visit, place, args, kwargs):
                return self._pass_over(module, visit, args, kwargs)
            args, kwargs = self._with_received(visit, place, args, kwargs)
        visit.is_inside = True
        try:
            with nullcontext() if place.block is None else unwatched():
                return cls.__call__(module, *args, **kwargs)
        finally:
            visit.is_inside = False

    def _computes(self, visit: _Visit, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not visit.computes:
            return False
        if place.block is None:
            return self._computes_outside(visit, place)
        return self._computes_block(visit, place, place.block, args, kwargs)

    def _pass_over(self, module: nn.Module, visit: _Visit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        visit.is_inside = True
        try:
            outputs = self._fakes.outputs if visit.computes else self._fakes.zeros
            return outputs(module, args, kwargs)
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
            end = _BrokenOff(args, kwargs)
            if visit.send is not None:
                visit.send(end.leaves)
            raise end
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
        if visit.expected and place.block == visit.start and not visit.swaps:
            for message, tensor in zip(visit.expected, visit.receive(), strict=True):
                visit.swaps[id(leaves[message.leaf])] = (leaves[message.leaf], tensor)
        leaves = [visit.swaps[id(leaf)][1] if id(leaf) in visit.swaps else leaf for leaf in leaves]
        if any(is_fake(leaf) for leaf in leaves):
            raise PipelineError(
                f"`{place.name}` is given a value that an earlier pipeline stage computes, but not as an argument of"
                f" `{self._block_name(visit.start)}`. A pipeline hands on what the first block of a stage is called"
                " with: pass the value to every block, cut the list elsewhere (`Pipeline(partition=[...])`), or write"
                " `pipeline_step` and `pipeline_loss`."
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


def _ungated_parameters(module: nn.Module, split: Split) -> list[nn.Parameter]:
    """Return the parameters that lie in no module of the split."""
    inside = {id(param) for place in split.places for param in module.get_submodule(place.name).parameters()}
    return [param for param in module.parameters() if id(param) not in inside]
