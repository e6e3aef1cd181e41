"""Random generators of the program, from which the code around the blocks draws on several stages.

Note [One sequence]
    Every stage runs the code up to its own blocks and draws there from generators of the program, so a stage in front
    draws less than the last one, which runs all of a step. Numbers drawn in front of the blocks must be the same
    everywhere: stages compare the states behind each such draw with those of the last stage. Behind a batch they take
    over its states. Where code behind the blocks draws as well, that is too late for the next micro-batch, whose front
    has run before: refused. A program that seeds its generator in front of every draw is not.
"""

from __future__ import annotations

import pickle
import random
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.module_state import LIBRARIES, OF_MODULES, is_of_the_program

__all__ = ["Draws", "GeneratorState", "Told", "generators_of"]

_MOST_ITEMS = 64  # of a list that is searched
_DrawKey = tuple[int, int, str]  # micro-batch, number of the call of a module that follows, and name of the generator


class GeneratorState:
    """The states of random generators, as they are now."""

    def __init__(self, generators: Iterable[Any]) -> None:
        self._states = [(one, _state_of(one)) for one in generators]

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Set the generators to these states for a while; their present states come back afterwards."""
        now = [(one, _state_of(one)) for one, _ in self._states]
        for one, state in self._states:
            _go_on(one, state)
        try:
            yield
        finally:
            for one, state in now:
                _go_on(one, state)


@dataclass
class Told:
    """Draws of a batch on the last stage.

    Attributes:
        digests: Of the states behind the draws of code around the blocks.
        states: At the end, of the generators that this code has drawn from.
    """

    digests: dict[_DrawKey, int]
    states: dict[str, Any]


@dataclass
class _Run:
    """A run of a chunk that is watched."""

    microbatch: int
    found: dict[str, int]  # digests of the states behind the last call of a module
    number: int = 0  # of that call
    digests: dict[_DrawKey, int] = field(default_factory=dict)


class Draws:
    """Keeps the generators of the program alike on all stages.

    Call protocol:
        1. ``begin`` before a batch; ``watched`` around every run of a chunk, in it ``note`` in front of every call of
           a module of the split and ``inside`` around those that compute.
        2. ``told`` on the last stage, ``settle`` with its result on all.

    Args:
        module: The root.
        modules: Around the blocks.
        num_chunks: Of the whole model.
        is_repeated: Whether all stages run the code in front of their chunks; else the first one alone does.
    """

    def __init__(self, module: nn.Module, modules: Iterable[nn.Module], num_chunks: int, *, is_repeated: bool) -> None:
        self._module = module
        self._modules = list(modules)
        self._last = num_chunks - 1
        self._is_repeated = is_repeated
        # - The batch that is running
        self._generators: dict[str, Any] = {}
        self._digests: dict[int, dict[_DrawKey, int]] = {}  # by chunk
        self._run: _Run | None = None

    def begin(self) -> None:
        """Begin a batch."""
        names = {id(child): name for name, child in self._module.named_modules()}
        found = generators_of(self._modules, names)
        self._generators = dict(sorted(found.items()))
        self._digests = {}

    @contextmanager
    def watched(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Watch the draws of code around the blocks in a run of a chunk."""
        if not self._generators:
            yield
            return
        self._run = run = _Run(microbatch, self._now())
        try:
            yield
            self.note()
        finally:
            self._run = None
        self._digests.setdefault(chunk, {}).update(run.digests)

    def note(self) -> None:
        """Note the draws since the last call of a module."""
        run = self._run
        if run is not None:
            now = self._now()
            drawn = {(run.microbatch, run.number, name): one for name, one in now.items() if one != run.found[name]}
            run.digests.update(drawn)
            run.found, run.number = now, run.number + 1

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Run a module of the split, whose draws do not count."""
        yield
        if self._run is not None:
            self._run.found = self._now()

    def told(self) -> Told:
        """Return the draws of the last stage, for the others."""
        digests = self._digests.get(self._last, {})
        return Told(digests, {name: _state_of(self._generators[name]) for name in _names_in(digests)})

    def settle(self, told: Told) -> None:
        """Compare this stage's draws with those of the last one, and take over its states.

        Raises:
            PipelineError: They differ.
        """
        for chunk, digests in sorted(self._digests.items()):
            if chunk != self._last:
                self._compare(digests, told.digests)
        if self._is_repeated and self._last not in self._digests:
            for name, state in told.states.items():
                if name in self._generators:
                    _go_on(self._generators[name], state)

    def _compare(self, mine: Mapping[_DrawKey, int], last: Mapping[_DrawKey, int]) -> None:
        for name in sorted(_names_in(mine) & _names_in(last)):
            keys = [key for key in mine if key[2] == name]
            if not self._is_repeated or any(last.get(key) != mine[key] for key in keys):
                raise PipelineError(
                    f"The step draws random numbers from the generator `{name}` both before the blocks and after"
                    " them, and earlier pipeline stages do not run the code after them: they would draw other"
                    " numbers than the last stage in the next micro-batch. Use two generators, one for each side, seed"
                    " it (`generator.manual_seed`) before every use, or use PyTorch's own generator."
                )

    def _now(self) -> dict[str, int]:
        return {name: _digest(_state_of(one)) for name, one in self._generators.items()}


def _names_in(keys: Iterable[_DrawKey]) -> set[str]:
    return {name for _, _, name in keys}


# -- Where generators are ----------------------------------------------------------------------------------------------


def generators_of(modules: Iterable[nn.Module], names: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return the generators in attributes of modules, and in globals and closures of their methods, by name.

    Args:
        modules: The modules, without their submodules.
        names: Of the modules, by ``id``.
    """
    modules = list(modules)
    found: dict[str, Any] = {}
    for number, child in enumerate(modules):
        start = (names or {}).get(id(child), str(number)) or type(child).__name__
        for key, value in list(vars(child).items()):
            if key not in OF_MODULES:
                found.update(_found_in(value, f"{start}.{key}", 2))
    for cls in {base: None for child in modules for base in type(child).__mro__}:
        found.update(_outside_of(cls))
    first: dict[int, str] = {}
    for name, one in found.items():
        first.setdefault(id(one), name)
    return {name: found[name] for name in first.values() if not _is_ordinary(found[name])}


def _found_in(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    if _is_generator(value):
        yield name, value
    elif depth and isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS:
        for number, one in enumerate(value):
            yield from _found_in(one, f"{name}[{number}]", depth - 1)
    elif depth and isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        for key, one in list(value.items()):
            yield from _found_in(one, f"{name}[{key!r}]", depth - 1)
    elif depth and not isinstance(value, nn.Module) and is_of_the_program(value):
        for key, one in list(vars(value).items()):
            yield from _found_in(one, f"{name}.{key}", depth - 1)


def _outside_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield generators in globals and closures of the methods of a class of the program."""
    functions = [one for one in vars(cls).values() if isinstance(one, FunctionType) and _is_of_a_program(one)]
    for function in functions:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield from _found_in(_content(cell), f"{function.__qualname__}.{name}", 1)
    for space in {id(function.__globals__): function.__globals__ for function in functions}.values():
        for name, value in list(space.items()):
            if not name.startswith("__"):
                yield from _found_in(value, f"{space.get('__name__', 'global')}.{name}", 1)


def _is_of_a_program(function: FunctionType) -> bool:
    name = function.__globals__.get("__name__") or ""
    return name.partition(".")[0] not in LIBRARIES


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_ordinary(generator: Any) -> bool:
    """Say whether ``RandomStreams`` keeps a generator."""
    if not isinstance(generator, torch.Generator):
        return generator is getattr(random, "_inst", None)
    if generator.device.type == "cpu":
        return generator is torch.default_generator
    ordinary = getattr(torch.get_device_module(generator.device), "default_generators", ())
    return any(generator is one for one in ordinary)


# -- States ------------------------------------------------------------------------------------------------------------


def _is_generator(value: Any) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def _state_of(generator: Any) -> Any:
    """Return the state of a generator of PyTorch, Python or NumPy."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _go_on(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _digest(state: Any) -> int:
    return zlib.crc32(state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state))
