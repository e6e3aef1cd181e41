"""Parameters and module buffers that a step writes, which runs that do not count cannot undo."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.stages.sources import is_fake

__all__ = ["Held", "undone_in", "unwritten"]

_MOST_NUMEL = 2**12  # of a tensor whose values are compared, which shows writes into `.data` too


class Held(NamedTuple):
    """The tensors that are not put back behind a run that does not count.

    Attributes:
        params: By name.
        buffers: Module buffers, by name.
        num_writes: Returns how often each parameter was written by the program.
        lost: Gets a tensor for each fake that is written into it, which moves its version and nothing else.
    """

    params: Iterable[tuple[str, Tensor]]
    buffers: Iterable[tuple[str, Tensor]]
    num_writes: Callable[[], Mapping[str, int]]
    lost: list[Tensor]

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return {name for tensors in (self.params, self.buffers) for name, _ in tensors}


@contextmanager
def unwritten(held: Held, *, may_write: Collection[str] = (), compares_values: bool = True) -> Iterator[set[str]]:
    """Refuse code that writes into tensors, and yield a set that gets the names of those that it was allowed to write.

    Values that arrive meanwhile are no writes: of a unit that is gathered, of a step that was deferred.

    Args:
        held: The tensors.
        may_write: Names of tensors that get their values back, if they have values now; others are refused.
        compares_values: Whether values of other small tensors are compared too.

    Raises:
        PipelineError: One was written.
    """
    undone: set[str] = set()
    held.lost.clear()
    below = torch._C.DisableTorchFunctionSubclass  # released parameters, which have no values
    writes = dict(held.num_writes())
    with torch.no_grad(), below():
        before = [_Before.of_param(name, one) for name, one in held.params if _has_values(one)]
        before += [_Before.of_buffer(name, one) for name, one in held.buffers if _has_values(one)]
        copied = [one for one in before if one.name in may_write or (compares_values and one.is_small)]
        copies = [(one, one.copied()) for one in copied if one.shows_writes]
    yield undone
    now = held.num_writes()
    written = {name for name, number in now.items() if number != writes.get(name, 0)}
    with torch.no_grad(), below():
        written |= {one.name for one in before if one.is_moved(held.lost)}
        written |= set(_changed([(one, copy) for one, copy in copies if one.is_there(copy)]))
        restored = {one.name for one, copy in copies if one.name in written and one.restore(copy)}
    undone |= restored.intersection(may_write)
    held.lost.clear()
    refused = sorted(written - undone)
    if refused:
        raise PipelineError(
            f"The step writes into `{refused[0]}` in place. Pipeline stages run a step several times, and what follows"
            " the blocks on the last stage alone, so the write would count more than once there, or not at all on the"
            " other stages. Write in a hook after the step that runs on all stages (`on_train_batch_end`), or, if it is"
            " a module buffer, assign a new tensor in the step."
        )


@contextmanager
def undone_in(modules: Iterable[nn.Module], params: Collection[int]) -> Iterator[None]:
    """Undo the writes of modules into their own parameters when their forwards end, which run once more later.

    Args:
        modules: The modules, with their submodules.
        params: By ``id``: those that may be written.
    """
    found: list[list[tuple[_Before, Tensor]]] = []  # of the calls that run

    def keep(module: nn.Module, *_: Any) -> None:
        own = [(name, one) for name, one in module._parameters.items() if one is not None and id(one) in params]
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            before = [_Before.of_param(name, one) for name, one in own if _has_values(one)]
            found.append([(one, one.copied()) for one in before])

    def undo(*_: Any) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for one, values in found.pop() if found else ():
                one.restore(values)

    with ExitStack() as stack:
        for module in modules:
            if any(id(param) in params for param in module._parameters.values()):
                stack.callback(module.register_forward_pre_hook(keep).remove)
                # Before the hooks that release the parameters.
                stack.callback(module.register_forward_hook(undo, prepend=True, always_call=True).remove)
        yield


class _Before(NamedTuple):
    """A tensor as it was."""

    name: str
    tensor: Tensor
    of_class: type[Tensor]
    place: int  # of its memory
    version: int
    is_buffer: bool = False

    @classmethod
    def of_param(cls, name: str, param: Tensor) -> _Before:
        return cls(name, param, type(param), param.data_ptr(), param._version)

    @classmethod
    def of_buffer(cls, name: str, buffer: Tensor) -> _Before:
        return cls(name, buffer, type(buffer), buffer.data_ptr(), buffer._version, is_buffer=True)

    @property
    def is_small(self) -> bool:
        """Whether a copy is small."""
        return self.tensor.numel() <= _MOST_NUMEL

    @property
    def shows_writes(self) -> bool:
        """Whether other values are writes: it is no parameter whose class answers for its values."""
        return self.is_buffer or self.of_class.__torch_function__ is nn.Parameter.__torch_function__

    def copied(self) -> Tensor:
        """Return a copy of the values; in host memory if it is large, for a stage may have no room for it."""
        values = self.tensor.detach()
        return values.clone() if self.is_small else values.to("cpu", copy=True)

    def is_moved(self, lost: Sequence[Tensor]) -> bool:
        """Say whether a module buffer was written, also with the same values, which may be others in a later batch."""
        if not self.is_buffer or self.tensor._version == self.version:
            return False
        return self.tensor._version - sum(_share_version(self.tensor, one) for one in lost) != self.version

    def is_there(self, values: Tensor) -> bool:
        """Say whether the tensor lies where it was, with values to compare with."""
        is_same = (type(self.tensor), self.tensor.data_ptr()) == (self.of_class, self.place)
        return is_same and _has_values(self.tensor) and self.tensor.shape == values.shape

    def restore(self, values: Tensor) -> bool:
        """Give the tensor its values back, if it can have them, as if nobody had written it: a master has more bits."""
        is_there = self.is_there(values)  # not in memory of the program, to which `.data` was pointed
        if is_there:
            self.tensor.copy_(values)
            torch._C._autograd._unsafe_set_version_counter((self.tensor,), (self.version,))
        return is_there


def _changed(found: Sequence[tuple[_Before, Tensor]]) -> Iterator[str]:
    """Yield the names of tensors with other values than these. The host waits for a device once."""
    if found:
        differing = [_differs(one.tensor.detach(), values.to(one.tensor.device)) for one, values in found]
        flags = torch.stack([flag.to(differing[0].device) for flag in differing]).tolist()
        yield from (one.name for (one, _), flag in zip(found, flags, strict=True) if flag)


def _differs(tensor: Tensor, other: Tensor) -> Tensor:
    return ((tensor != other) & ~((tensor != tensor) & (other != other))).any()


def _share_version(tensor: Tensor, other: Tensor) -> bool:
    """Say whether a write into one tensor moves the version of the other: ``.data`` has one of its own."""
    if other.is_inference() or tensor.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    before, version = tensor._version, other._version
    torch.autograd.graph.increment_version(other)
    is_moved = tensor._version != before
    torch._C._autograd._unsafe_set_version_counter((other,), (version,))
    return is_moved


def _has_values(tensor: Tensor) -> bool:
    if is_fake(tensor) or tensor.is_meta or tensor.layout != torch.strided or tensor.is_inference():
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.itemsize
