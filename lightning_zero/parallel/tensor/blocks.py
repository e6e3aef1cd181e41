"""The distinct blocks of a model, with the arguments that the model calls them with.

Note [A run without weights]
    The model runs once as a copy whose parameters have no values. Modules with parameters return random tensors of the
    right shapes; all code between them (masks, rotary tables, ALiBi) runs as it is, so arguments that are computed have
    their true values. Where that fails and the model has values, a full copy of it runs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_zero.parallel.module_copies import copied_to_cpu
from lightning_zero.parallel.module_state import without_caches
from lightning_zero.parallel.tensor.examples import Arguments, keep
from lightning_zero.trees import tree_leaves, tree_map_only

__all__ = [
    "NUMBERS",
    "OF_EVERY_MODULE",
    "Block",
    "Call",
    "Capture",
    "ResultsRead",
    "blocks_of",
    "capture",
    "copy_with",
    "distinct_blocks",
    "leaving_results",
    "results_read",
]

Call = Callable[[nn.Module], Any]

# Integers that number the blocks of a list.
NUMBERS = frozenset({"layer_idx", "layer_id", "layer_number", "layer_index", "idx", "index"})
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_READS_NO_VALUES = frozenset(
    getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "requires_grad", "is_leaf", "grad")
) | {Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.numel}
_HOOKS = frozenset([Tensor.register_hook, Tensor.register_post_accumulate_grad_hook])  # parameters' are seen later


@dataclass(frozen=True)
class Block:
    """A kind of block.

    Attributes:
        names: Of all blocks of this kind, in the model.
        module: The first of them.
    """

    names: tuple[str, ...]
    module: nn.Module

    @property
    def name(self) -> str:
        """Name of the first block of this kind."""
        return self.names[0]


def blocks_of(module: nn.Module) -> list[str]:
    """Return the names of the children of the outermost lists of blocks; ``[""]`` if the module has no such list."""
    found: list[str] = []
    for name, child in module.named_modules():
        if any(name.startswith(f"{block}.") or name == block for block in found):
            continue
        if isinstance(child, nn.ModuleList):
            found += [f"{name}.{key}".lstrip(".") for key, one in child.named_children() if _is_block(one)]
        elif isinstance(child, (nn.Sequential, nn.ModuleDict)):
            blocks = {key: one for key, one in child.named_children() if _is_block(one)}
            classes = [type(one) for one in blocks.values()]
            found += [f"{name}.{key}".lstrip(".") for key, one in blocks.items() if classes.count(type(one)) > 1]
    return found or [""]


def _is_block(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(param.dim() > 1 for param in module.parameters())


def distinct_blocks(module: nn.Module, names: Collection[str]) -> list[Block]:
    """Group blocks by list, classes, shapes and attributes: functions, containers and configurations too."""
    groups: dict[Any, list[str]] = {}
    for name in names:
        signature = name.rpartition(".")[0], _signature(module.get_submodule(name))
        groups.setdefault(signature, []).append(name)
    return [Block(tuple(alike), module.get_submodule(alike[0])) for alike in groups.values()]


def _signature(module: nn.Module) -> Any:
    return _Described(module).modules_of(module)


def _is_telling(key: str, value: Any) -> bool:
    return key not in OF_EVERY_MODULE and not (key in NUMBERS and type(value) is int)


class _Described:
    """Describes values of attributes of a block, so that equal descriptions are of values that act alike."""

    def __init__(self, block: nn.Module) -> None:
        self._names = {id(child): name for name, child in block.named_modules()}
        self._around: list[int] = []  # the objects that are being described
        self._known: dict[int, tuple[Any, Any]] = {}  # objects, kept so that their ids stay theirs; descriptions

    def __call__(self, value: Any) -> Any:
        """Return a description that can be hashed."""
        if isinstance(value, Tensor):
            is_index = not value.is_floating_point() and value.numel() <= 64 and value.device.type != "meta"
            return tuple(value.shape), str(value.dtype), repr(value.tolist()) if is_index else ""
        if isinstance(value, nn.Module) and id(value) in self._names:
            return type(value), self._names[id(value)]
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, type, ModuleType, Enum)):
            return type(value), repr(value)
        if id(value) in self._around:
            return type(value), self._around.index(id(value))
        if id(value) not in self._known:
            self._around.append(id(value))
            self._known[id(value)] = value, (type(value), self._parts(value))
            self._around.pop()
        return self._known[id(value)][1]

    def modules_of(self, module: nn.Module) -> Any:
        """Describe a module and those below it: classes, attributes and shapes."""
        return tuple(
            (
                name,
                type(child),
                tuple((key, self(value)) for key, value in sorted(vars(child).items()) if _is_telling(key, value)),
                tuple((key, tuple(param.shape)) for key, param in child.named_parameters(recurse=False)),
                tuple((key, self(buffer)) for key, buffer in child.named_buffers(recurse=False)),
            )
            for name, child in module.named_modules()
        )

    def _parts(self, value: Any) -> Any:
        if isinstance(value, nn.Module):  # outside of the block, or hidden in it, as experts hide their template
            return self.modules_of(value)
        if isinstance(value, Mapping):
            return tuple((self(key), self(one)) for key, one in value.items())
        if isinstance(value, (list, tuple)):
            return tuple(self(one) for one in value)
        if isinstance(value, (set, frozenset)):
            return tuple(sorted(repr(self(one)) for one in value))
        if isinstance(value, FunctionType):
            cells = tuple(_contents(cell) for cell in value.__closure__ or ())
            return value.__qualname__, value.__code__, self((cells, value.__defaults__, value.__kwdefaults__))
        if isinstance(value, MethodType):
            return self((value.__func__, value.__self__))
        if isinstance(value, functools.partial):
            return self((value.func, value.args, value.keywords))
        if hasattr(value, "__dict__") and not isinstance(value, torch.jit.ScriptFunction):
            return tuple((key, self(one)) for key, one in sorted(vars(value).items()))
        return repr(value)  # with an address where a class has no words for its values: it counts as another one


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def copy_with(module: nn.Module, replacement: Callable[[str, nn.Parameter], nn.Parameter]) -> nn.Module:
    """Return a copy of a module on the CPU with other parameters; those of the module are not copied."""
    memo: dict[int, Any] = {id(param): replacement(name, param) for name, param in module.named_parameters()}
    return copied_to_cpu(module, memo)


@dataclass(frozen=True)
class Capture:
    """The outcome of a run of a model.

    Attributes:
        arguments: By name of a module, those of its first call; modules that are not called are missing.
        read_outside: Names of parameters that code outside of their block (of their module, if they are in no block)
            reads, for example an embedding's weight that the model multiplies with as its head.
        used_between: Names of blocks, but for the last of a list, whose results code between the blocks computes with.
    """

    arguments: dict[str, Arguments]
    read_outside: frozenset[str]
    used_between: frozenset[str] = frozenset()


def capture(module: nn.Module, call: Call, names: Collection[str], blocks: Collection[str] = ()) -> Capture:
    """Run a copy of a model, and return the arguments with which ``call`` calls modules of it.

    Args:
        module: The model. It is not changed; copies run.
        call: Runs a model that is given, for example on a batch.
        names: Of the modules in question.
        blocks: Of all blocks of the model.

    Raises:
        ValueError: The model does not run.
    """
    try:
        return _run(_hollow(module), call, names, blocks)
    except Exception as error:
        if any(param.device.type == "meta" for param in module.parameters()):
            raise ValueError(
                f"The model cannot be run without values of its parameters ({type(error).__name__}: {error}), so its"
                " plan of tensor parallelism cannot be verified. Build it with values, on the CPU."
            ) from error
        return _run(copied_to_cpu(module).cpu(), call, names, blocks)


def _run(module: nn.Module, call: Call, names: Collection[str], blocks: Collection[str]) -> Capture:
    found: dict[str, Arguments] = {}
    reads = _Reads(module, blocks)  # its hooks run before those that keep arguments

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name not in found:
            found[name] = keep(args, kwargs)

    for name in names:
        module.get_submodule(name).register_forward_pre_hook(
            lambda _, args, kwargs, name=name: note(name, args, kwargs), with_kwargs=True
        )
    state = torch.get_rng_state()
    try:
        with without_caches(module), torch.enable_grad(), reads:
            call(module)
    finally:
        torch.set_rng_state(state)
    return Capture(found, frozenset(reads.outside), frozenset(reads.between))


@dataclass(frozen=True)
class ResultsRead:
    """Tensors that blocks, and modules in them, compute, and that code outside of blocks reads.

    Attributes:
        blocks: Names of blocks whose results behind the first are read.
        captured: Names of modules inside of blocks, and places among their results, that are read: a hook of
            transformers takes them (`output_attentions=True`), or the block puts them into a list.
        leaking: Names of blocks of which other tensors are read that are neither returned nor left on modules or in
            arguments, for example those in a list of the program.
    """

    blocks: frozenset[str]
    captured: frozenset[tuple[str, int]]
    leaking: frozenset[str]


def results_read(module: nn.Module, call: Call, names: Collection[str]) -> ResultsRead:
    """Return the results that are read by code outside of blocks. Runs as in ``capture``."""
    try:
        return _results_read(_hollow(module), call, names)
    except Exception:
        return _results_read(copied_to_cpu(module).cpu(), call, names)


def _results_read(module: nn.Module, call: Call, names: Collection[str]) -> ResultsRead:
    reads = _ResultReads()
    for name in names:
        block = module.get_submodule(name)
        for inner, child in block.named_modules(prefix=name):
            if child is not block:
                child.register_forward_hook(lambda _, args, result, inner=inner: reads.keep(inner, result))
        block.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: reads.enter(name, (args, kwargs)), with_kwargs=True
        )
        # in front of the program's hooks, which see whole results
        block.register_forward_hook(
            lambda one, args, kwargs, result: reads.leave(one, (args, kwargs), result), with_kwargs=True, prepend=True
        )
    state = torch.get_rng_state()
    try:
        with without_caches(module), torch.enable_grad(), reads:
            call(module)
    finally:
        torch.set_rng_state(state)
    return ResultsRead(
        blocks=frozenset(name for name, _ in reads.found if name in names),
        captured=frozenset((name, place) for name, place in reads.found if name not in names),
        leaking=frozenset(reads.leaking),
    )


def leaving_results(module: nn.Module, places: Mapping[str, Collection[int]]) -> nn.Module:
    """Return a copy of a module, with its parameters, whose forward leaves results of modules in it on these.

    Args:
        module: Is not changed.
        places: By name of a module in it, those of its results that stay.
    """
    result = copy_with(module, lambda _, param: param)
    for name, some in places.items():
        result.get_submodule(name).register_forward_hook(functools.partial(_leave, sorted(some)))
    return result


def _leave(places: Collection[int], module: nn.Module, args: Any, result: Any) -> None:
    tensors = _tensors(result)
    module.captured_results = [tensors[place] for place in places if place < len(tensors)]  # type: ignore[assignment]


def _tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]


class _ResultReads(TorchFunctionMode):
    """Notes tensors of blocks, but for their first results, that functions outside are given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, int]] = set()  # name of a block or of a module in it, and place of the result
        self.leaking: set[str] = set()  # blocks of other tensors
        self._results: dict[int, tuple[str, int]] = {}
        self._computed: dict[int, tuple[ReferenceType[Tensor], str]] = {}  # in a block that has this name
        self._inputs: set[int] = set()  # of blocks
        self._kept: list[Tensor] = []  # so that their ids stay theirs
        self._running: list[str] = []

    def enter(self, name: str, arguments: Any) -> None:
        self._running.append(name)
        self._inputs.update(map(id, self._keeping(arguments)))

    def keep(self, name: str, result: Any) -> None:
        tensors = self._keeping(result)
        self._results.update(
            {id(one): (name, place) for place, one in enumerate(tensors) if id(one) not in self._inputs}
        )

    def leave(self, block: nn.Module, arguments: Any, result: Any) -> None:
        name = self._running.pop()
        tensors = self._keeping(result)
        self._results.update({id(one): (name, place) for place, one in enumerate(tensors)})
        if tensors:
            del self._results[id(tensors[0])]
        left = [value for child in block.modules() for value in vars(child).values()]
        for one in (*tensors, *_tensors(arguments), *_tensors(left)):  # their check compares them
            self._computed.pop(id(one), None)

    def _keeping(self, tree: Any) -> list[Tensor]:
        tensors = _tensors(tree)
        self._kept += tensors
        return tensors

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _READS_NO_VALUES:
            return function(*args, **(kwargs or {}))
        if not self._running:
            for one in _tensors((args, kwargs)):
                self._note(one)
            return function(*args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        for one in _tensors(result):
            if id(one) not in self._inputs:
                self._computed[id(one)] = ref(one), self._running[-1]
        return result

    def _note(self, tensor: Tensor) -> None:
        if id(tensor) in self._results:
            self.found.add(self._results[id(tensor)])
            return
        known, name = self._computed.get(id(tensor), (None, ""))
        if known is not None and known() is tensor:
            self.leaking.add(name)


class _Reads(TorchFunctionMode):
    """Notes reads of parameters outside of their blocks, and of blocks' results between the blocks.

    Args:
        module: The model.
        blocks: Names of its blocks.
    """

    def __init__(self, module: nn.Module, blocks: Collection[str]) -> None:
        super().__init__()
        self.outside: set[str] = set()
        self.between: set[str] = set()
        self._owners: dict[int, tuple[str, set[nn.Module]]] = {}  # of a parameter: its name, modules that may read it
        self._running: Counter[nn.Module] = Counter()
        self._results: dict[int, tuple[Tensor, str]] = {}  # by id: the result of a block, and its name
        kept = [name for name in blocks if name]
        for name, param in module.named_parameters(remove_duplicate=False):
            block = next((one for one in kept if name.startswith(f"{one}.")), name.rpartition(".")[0])
            self._owners.setdefault(id(param), (name, set()))[1].add(module.get_submodule(block))
        for owner in {owner for _, owners in self._owners.values() for owner in owners}:
            owner.register_forward_pre_hook(lambda one, _: self._running.update([one]))
            owner.register_forward_hook(lambda one, *_: self._running.subtract([one]))
        last = {name.rpartition(".")[0]: name for name in kept}.values()
        for name in kept:
            if name not in last:
                module.get_submodule(name).register_forward_hook(lambda *call, name=name: self._keep(call[-1], name))
        self._blocks = {module.get_submodule(name) for name in kept}

    def _keep(self, result: Any, name: str) -> None:
        first = next((one for one in tree_leaves(result) if isinstance(one, Tensor)), None)
        if first is not None:
            self._results[id(first)] = first, name

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _READS_NO_VALUES:
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, Tensor) and not (function in _HOOKS and id(one) in self._owners):
                    self._note(one)
        return function(*args, **(kwargs or {}))

    def _note(self, tensor: Tensor) -> None:
        name, owners = self._owners.get(id(tensor), ("", set()))
        if name and not any(self._running[owner] > 0 for owner in owners):
            self.outside.add(name)
        if id(tensor) in self._results and not any(self._running[block] > 0 for block in self._blocks):
            self.between.add(self._results[id(tensor)][1])


def _hollow(module: nn.Module) -> nn.Module:
    """Return a copy without values, whose modules with parameters return random tensors."""
    hollow = copy_with(module, lambda _, param: nn.Parameter(param.detach().to("meta"), param.requires_grad))
    for child in _outermost_with_params(hollow, set(blocks_of(module)) - {""}):
        for inner in child.modules():
            for key, buffer in inner._buffers.items():
                inner._buffers[key] = None if buffer is None else buffer.to("meta")
        _Hollow(child)
    return hollow


def _outermost_with_params(module: nn.Module, blocks: Collection[str]) -> Iterator[nn.Module]:
    inside: set[nn.Module] = set()
    for name, child in module.named_modules():
        if child in inside or not name:
            continue
        if name in blocks or any(True for _ in child.parameters(recurse=False)):
            inside.update(child.modules())
            yield child


class _Hollow:
    """Stands in for the forward of a module without values: it runs on shapes, and random tensors are the results."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forward = module.forward
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda one: one.to("meta"), (args, kwargs))
        with _on_meta():
            result = self._forward(*args, **kwargs)
        return tree_map_only(Tensor, _random_like, result)


@contextmanager
def _on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


def _random_like(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    result = torch.randn(tensor.shape).to(tensor.dtype)
    return result.requires_grad_().clone() if tensor.requires_grad else result  # may be changed in place
