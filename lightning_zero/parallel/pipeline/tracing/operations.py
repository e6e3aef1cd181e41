"""Operations of a run on fakes, and the place where each input of an operation comes from.

Note [Where a tensor comes from]
    A label names the origin of a tensor in a way that is the same in every run of a step: the n-th operation between
    the modules, the second output of a call of ``blocks.0``, the attribute ``table`` of the model. Two runs that do the
    same compute the same operations on tensors of the same labels. A tensor may have several labels, for example an
    output that the module keeps in an attribute as well; one label in common is enough.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero.parallel.module_state import OF_MODULES
from lightning_zero.parallel.pipeline.stages.attributes import attribute_spaces
from lightning_zero.parallel.pipeline.stages.sources import is_fake
from lightning_zero.parallel.pipeline.tracing.fake_mode import written_by
from lightning_zero.parallel.pipeline.tracing.object_state import held_leaves
from lightning_zero.trees import tree_leaves

__all__ = ["Difference", "Operation", "Operations", "first_difference"]

_BETWEEN = ""  # scope of code between the modules
_NOT_USER = frozenset({"torch", "lightning", "lightning_zero", *sys.stdlib_module_names})
_NUMBERS = (bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device)
_MOST_COMPARED = 4096  # elements of a tensor whose values are a part of its label
_MOST_LETTERS = 400  # of a label
_LEAST_FRAMES = 2
_MOST_LEAVES = 1024  # of an attribute


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation is given.

    Attributes:
        labels: Where it comes from.
        kind: Its shape, dtype, and whether it has a graph.
        strides: Of its dimensions; PyTorch may compute the same function by other operations where they differ.
    """

    labels: frozenset[str]
    kind: str
    strides: tuple[int, ...]

    def is_as(self, other: Any) -> bool:
        """Say whether another run gives the same."""
        return isinstance(other, Operand) and self.kind == other.kind and bool(self.labels & other.labels)

    def __str__(self) -> str:
        return f"{min(self.labels)} ({self.kind})"


@dataclass(frozen=True)
class Operation:
    """An operation, or a call of a module.

    Attributes:
        scope: The module that computes it; empty between the modules.
        name: Of the operation.
        given: Its tensors and other arguments.
        line: The line of the program.
    """

    scope: str
    name: str
    given: tuple[Operand | str, ...]
    line: str

    @property
    def strides(self) -> list[tuple[int, ...]]:
        """Those of its tensors."""
        return [one.strides for one in self.given if isinstance(one, Operand)]

    def is_as(self, other: Operation) -> bool:
        """Say whether another run does the same."""
        if (self.scope, self.name, len(self.given)) != (other.scope, other.name, len(other.given)):
            return False
        return all(
            mine.is_as(theirs) if isinstance(mine, Operand) else mine == theirs
            for mine, theirs in zip(self.given, other.given, strict=True)
        )


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of a run.

    Args:
        module: The root, whose tensors have names.
        chunk: The chunk of the modules whose operations are recorded.
        parameters: Those that fakes replace now, with their names: objects of the program may hold them.

    Attributes:
        chunk: As given.
        found: The operations.
    """

    def __init__(self, module: nn.Module, chunk: int, parameters: Iterable[tuple[str, nn.Parameter]] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.chunk = chunk
        self.found: list[Operation] = []
        self._scope: str | None = None  # that is running; None: not recorded
        self._module = ""  # that is running, or was last
        self._calls: Counter[str] = Counter()  # of modules
        self._results: Counter[str] = Counter()  # of operations, by scope
        self._unknown: Counter[str] = Counter()  # tensors without a name, by their kind
        self._labels: dict[int, set[str]] = {}
        self._kept: list[Tensor] = []  # that have labels
        self._own: set[int] = set()  # tensors of the module, by `id`
        self._written: set[int] = set()  # of these, by the module that is running
        for name, tensor in [*((f"the parameter `{name}`", param) for name, param in parameters), *_tensors_of(module)]:
            self._add(tensor, name)
            self._own.add(id(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._scope != _BETWEEN:
            written = [*written_by(func, args, kwargs), *_statistics_of(func, args)]
            self._written.update(id(leaf) for leaf in written if id(leaf) in self._own)
        if self._scope is None or func.namespace == "prim":  # the device of a fake is asked for
            return func(*args, **kwargs)
        if _is_view(func):
            result = func(*args, **kwargs)
            self._add_views(func, (args, kwargs), result)
            return result
        given = self._given((args, kwargs))
        result = func(*args, **kwargs)
        number, self._results[self._scope] = self._results[self._scope], self._results[self._scope] + 1
        self.found.append(Operation(self._scope, str(func), given, _line()))
        for position, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, Tensor):
                where = f" of `{self._scope}`" if self._scope else ""
                self._add(leaf, f"result {position} of operation {number} (`{func}`){where}", is_only=True)
        return result

    @contextmanager
    def inside(self, name: str, *, is_recorded: bool) -> Iterator[None]:
        """Run a module, whose operations are recorded or not."""
        before, self._scope, self._module = self._scope, name if is_recorded else None, name
        try:
            yield
        finally:
            self._scope = before

    def start(self) -> None:
        """Record from here on."""
        self._scope = _BETWEEN

    def stop(self) -> None:
        """Record no more."""
        self._scope = None

    def note_call(self, name: str, arguments: Any) -> None:
        """Note that a module is called."""
        if self._scope is not None:
            self.found.append(Operation(self._scope, f"call of `{name}`", self._given(arguments), _line()))

    def note_outcome(self, name: str, module: nn.Module, output: Any) -> None:
        """Label the outputs of a call, and the attributes that it has left."""
        number, self._calls[name] = self._calls[name], self._calls[name] + 1
        unchanged = self._own - self._written
        for position, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, Tensor):
                self._add(leaf, f"output {position} of call {number} of `{name}`")
        for (child, kept), space in attribute_spaces(module).items():
            for key, value in space.items():
                for position, leaf in enumerate(tree_leaves(value)):
                    if is_fake(leaf) and id(leaf) not in unchanged:
                        place = ".".join(str(part) for part in (name, child, kept, key) if part != "")
                        label = f"tensor {position} that call {number} of `{name}` leaves in `{place}`"
                        self._add(leaf, label, is_only=id(leaf) in self._written)
        self._written.clear()

    def note_hook(self, number: int, arguments: Any) -> None:
        """Label the tensors that a hook of the program in the module that is running is given."""
        for position, leaf in enumerate(tree_leaves(arguments)):
            if is_fake(leaf) and id(leaf) not in self._own:
                call = f"call {self._calls[self._module]} of `{self._module}`"
                self._add(leaf, f"argument {position} of hook {number} in {call}")

    def note_state(self, modules: Iterable[nn.Module]) -> None:
        """Note the attributes and module buffers of modules as they are now."""
        for number, module in enumerate(modules):
            own = {key: value for key, value in vars(module).items() if key not in OF_MODULES}
            for key, value in {**module._buffers, **own}.items():
                given = tuple(map(self._operand, islice(held_leaves(value), _MOST_LEAVES)))
                name = f"attribute `{key}` of a `{type(module).__name__}` after the step"
                self.found.append(Operation(_BETWEEN, name, (str(number), *given), ""))

    def note_result(self, result: Any) -> None:
        """Note the values that the step returns."""
        self.found.append(Operation(_BETWEEN, "result of the step", self._given(result), ""))

    def end(self) -> None:
        """Let go of the tensors."""
        self._kept.clear()
        self._labels.clear()

    def _given(self, values: Any) -> tuple[Operand | str, ...]:
        return tuple(map(self._operand, tree_leaves(values)))

    def _operand(self, leaf: Any) -> Operand | str:
        if not isinstance(leaf, Tensor):
            return repr(leaf) if isinstance(leaf, _NUMBERS) else type(leaf).__name__
        graph = ", with a graph" if leaf.requires_grad else ""
        kind = f"shape {tuple(leaf.shape)}, {leaf.dtype}{graph}"
        if id(leaf) not in self._labels:
            self._add(leaf, self._unknown_label(leaf, kind))
        return Operand(frozenset(self._labels[id(leaf)]), kind, _strides_of(leaf))

    def _unknown_label(self, leaf: Tensor, kind: str) -> str:
        """Return a label for a tensor that no operation between the modules has made."""
        where = "a tensor made inside of a module" if is_fake(leaf) else "a tensor that was there before"
        number, self._unknown[where] = self._unknown[where], self._unknown[where] + 1
        return f"{where} (number {number}{_value_of(leaf)})"

    def _add_views(self, func: Any, arguments: Any, result: Any) -> None:
        """Label views by the tensor that they are of.

        They count as no operation, because autograd makes the view of a tensor that is written in place once more.
        """
        base = next((leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)), None)
        others = ", ".join(repr(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, _NUMBERS))
        labels = list(self._labels.get(id(base), ()))
        for position, leaf in enumerate(tree_leaves(result)):
            for label in labels if isinstance(leaf, Tensor) else ():
                self._add(leaf, _shortened(f"`{func}` ({position}; {others}) of {label}"))

    def _add(self, tensor: Tensor, label: str, *, is_only: bool = False) -> None:
        if id(tensor) not in self._labels:
            self._kept.append(tensor)
        elif is_only:
            self._labels[id(tensor)].clear()
        self._labels.setdefault(id(tensor), set()).add(label)


@dataclass(frozen=True)
class Difference:
    """The first operation in which two runs differ; None where one has ended.

    Attributes:
        whole: Of the run of the whole step.
        staged: Of the run in stages.
    """

    whole: Operation | None
    staged: Operation | None

    @property
    def line(self) -> str:
        """The line of the program."""
        return next((one.line for one in (self.staged, self.whole) if one is not None and one.line), "")

    def words(self) -> tuple[str, str]:
        """Return the operation of the whole step and that of the stage, as texts."""
        whole, staged = self.whole, self.staged
        if whole is None or staged is None or (whole.scope, whole.name) != (staged.scope, staged.name):
            return _name_of(whole), _name_of(staged)
        pairs = zip_longest(whole.given, staged.given)
        mine, theirs = next(
            (a, b) for a, b in pairs if not (a.is_as(b) if isinstance(a, Operand) else a == b)
        )  # fmt: skip
        return f"`{whole.name}` is given {mine}", f"{theirs}"


def first_difference(whole: Sequence[Operation], staged: Sequence[Operation]) -> Difference | None:
    """Return the first operation in which two runs differ, if there is one.

    None as well where tensors differ in strides before: the operations that follow depend on these.
    """
    has_other_strides = False
    for mine, theirs in zip_longest(whole, staged):
        if mine is None or theirs is None or not mine.is_as(theirs):
            return None if has_other_strides else Difference(mine, theirs)
        has_other_strides |= mine.strides != theirs.strides
    return None


def _strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of dimensions with more than one element."""
    if tensor.layout is not torch.strided:
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


def _is_view(func: Any) -> bool:
    """Say whether an operation returns views of its first argument, and writes nothing."""
    aliases = [one.alias_info for one in func._schema.arguments if one.alias_info is not None]
    return bool(aliases) and not func._schema.is_mutable


def _shortened(label: str) -> str:
    return label if len(label) <= _MOST_LETTERS else f"{label[:_MOST_LETTERS]}... {zlib.crc32(label.encode()):x}"


def _statistics_of(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """Return the running statistics that a batch norm writes, of which its schema does not tell."""
    if func not in (torch.ops.aten.native_batch_norm.default, torch.ops.aten.cudnn_batch_norm.default):
        return []
    return [leaf for leaf in args[3:5] if isinstance(leaf, Tensor)]


def _name_of(operation: Operation | None) -> str:
    if operation is None:
        return "the step has ended"
    return f"`{operation.name}`" + (f" in `{operation.scope}`" if operation.scope else "")


def _tensors_of(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Yield parameters, module buffers, and tensors in attributes."""
    for (child, kept), space in attribute_spaces(module).items():
        for key, value in space.items():
            name = ".".join(str(part) for part in (child, kept, key) if part != "")
            for position, leaf in enumerate(() if not kept and key in OF_MODULES else tree_leaves(value)):
                if isinstance(leaf, Tensor):
                    yield f"tensor {position} in `{name}` as it was before the step", leaf
    for name, param in module.named_parameters(remove_duplicate=False):
        yield f"the parameter `{name}`", param


def _value_of(tensor: Tensor) -> str:
    """Return a checksum of a small tensor's values on the host; else an empty text."""
    is_plain = type(tensor) is Tensor or type(tensor).__torch_function__ is nn.Parameter.__torch_function__
    is_plain = is_plain and tensor.layout is torch.strided
    if not is_plain or tensor.device.type != "cpu" or tensor.numel() > _MOST_COMPARED or tensor.is_quantized:
        return ""
    with torch.no_grad(), unset_fake_temporarily():
        values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return f", values {zlib.crc32(values.numpy().tobytes()):x}"


def _line() -> str:
    """Return the line of the program that is running."""
    frame: FrameType | None = sys._getframe(_LEAST_FRAMES)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_USER:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
