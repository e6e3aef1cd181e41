"""The step window of one flat buffer: parameters show segments of the master, and their gradients (ADR 0011)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Set

import torch
from torch import nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.buffers.assigned_gradients import Digest, Source, compare, refuse_two_changes
from lightning_zero.engine.buffers.gradients import BufferGradients
from lightning_zero.engine.buffers.parameter import (
    ReducedParameter,
    begin_window,
    begin_writes,
    end_writes,
    face_of,
    has_class,
    is_pointed,
    is_written,
    raw_grad,
    renew_writes,
    restore_class,
    set_raw_grad,
    swap_class,
    user_class,
    written_before_window,
)
from lightning_zero.engine.buffers.segment_parameter import SegmentParameter, ShardedValues, segment_parameter_class
from lightning_zero.engine.buffers.sharded_gradient import (
    Cut,
    ShardedGradient,
    StageGradient,
    kept_part,
    require_same_part,
    sharded_gradient_class,
)
from lightning_zero.engine.buffers.sharded_state import ShardedState, sharded_state_class
from lightning_zero.engine.buffers.spec import BufferSpec
from lightning_zero.engine.buffers.stepped import SteppedValues
from lightning_zero.storage.residence import ordinary

__all__ = ["BufferWindow", "compare_assigned"]


class BufferWindow:
    """The step window of one buffer; several optimizers may have parameters in it.

    Call protocol, parameter by parameter: ``enter``, ``show`` if its gradient is wanted, ``leave``; then
    ``close``. Whoever reads the average calls ``take_gradients`` before, whoever changes it ``show_again`` too.

    Args:
        spec: The facts of the buffer.
        values: Its stepped values.
        gradients: Its gradients.
        leave_stepped: Called before values are copied into segments: the program may keep tensors that lie there.
    """

    def __init__(
        self,
        spec: BufferSpec,
        values: SteppedValues,
        gradients: BufferGradients,
        *,
        leave_stepped: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._values = values
        self._gradients = gradients
        self._leave_stepped = leave_stepped
        self._classes: dict[int, type[ShardedGradient]] = {}  # of gradients that are shown
        self._param_classes: dict[int, type[SegmentParameter]] = {}  # of entered parameters
        self._entered: set[int] = set()  # slots whose parameter shows its segment of the master
        self._versions: dict[int, int] = {}  # of entered parameters when their segments were last published
        self._moved: set[int] = set()  # entered slots whose ``data`` was taken over, and nothing published it
        self._written: set[int] = set()  # slots that have left and were written, and nothing published it
        self._shown: dict[int, torch.Tensor] = {}  # segments of the average that parameters show as ``grad``
        self._shown_at: dict[int, int] = {}  # and the addresses of their values
        self._given: dict[int, weakref.ref[torch.Tensor]] = {}  # those that were shown and are not dropped
        self.assigned: dict[int, Digest] = {}  # of whole gradients assigned by hand, until the ranks have compared them

    def enter(self, index: int) -> None:
        """Show a parameter as the optimizer steps it: ``data`` is the master's segment; reading ``grad`` shows it."""
        values = self._values
        values.take_back()
        values.shard.await_uploads()
        self.take_gradient(index)
        param = self._spec.params[index]
        if index not in self._entered and (face := face_of(param)) is not None:
            face.hide(param)  # until it leaves
        restore_class(param)
        segment = ordinary(values.segment(index))
        same = (segment.data_ptr(), segment.shape, segment.dtype) == (param.data_ptr(), param.shape, param.dtype)
        if not same:
            with torch._C.DisableTorchFunctionSubclass():
                param.data = segment
        self._versions[index] = begin_writes(param) if index in self._entered else begin_window(param)
        self._entered.add(index)
        values.forget_rounding()
        self._let_grad_be_written(index)

    def _let_grad_be_written(self, index: int) -> None:
        param = self._spec.params[index]
        entered_class = self._values.home.entered_class
        if entered_class is not None:
            swap_class(param, entered_class)
        elif self._spec.sharding.optim and user_class(param) is nn.Parameter:
            swap_class(param, self._param_class_of(index))
        else:
            swap_class(param, ReducedParameter)

    @property
    def communicator(self) -> Communicator:
        """The communicator of the ranks over which the buffer is cut."""
        return self._spec.communicator

    @property
    def has_parts(self) -> bool:
        """Whether other groups of ranks have other parts of the parameters."""
        return self._spec.has_parts

    @property
    def entered(self) -> Set[int]:
        """The slots whose parameters show their segment of the master."""
        return self._entered

    # -- Values that parameters show -------------------------------------------------------------------------------

    def show(self, index: int) -> None:
        """Let an entered parameter's ``grad`` be its segment of the reduced gradient, if it has one."""
        if index not in self._gradients.has_grad or index not in self._entered:
            return
        param = self._spec.params[index]
        if index in self._shown or raw_grad(param) is not None:
            return
        values = self._gradients.for_showing()
        if values is None:
            return
        segment = self._spec.own_range.segment(index, values)
        shown = self._given_before(index, segment)
        if shown is None:
            shown = self._as_shown(index, segment)
            self._given[index] = weakref.ref(shown)
        self._shown[index], self._shown_at[index] = shown, segment.data_ptr()
        set_raw_grad(param, shown)

    def give_out(self, index: int) -> None:
        """Show a gradient to the program, which may change it and assign the result, also after dropping it."""
        if index in self._gradients.assigned.sources:
            self._take_source(index)
        self.show(index)
        self._note_read(index)
        self._gradients.sums.is_read = True
        if self._spec.sharding.optim:
            self._gradients.given_out.add(index)

    def _given_before(self, index: int, segment: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor that showed a segment before, if the program keeps it: ``p.grad`` is one object."""
        given = self._given.get(index)
        kept = given() if given is not None else None
        if kept is None:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            is_same = (kept.data_ptr(), kept.dtype, kept.shape) == (segment.data_ptr(), segment.dtype, segment.shape)
        return kept if is_same else None

    def _as_shown(self, index: int, segment: torch.Tensor) -> torch.Tensor:
        shown = segment.detach()  # no view to autograd, so that it can be detached in place
        if self._spec.sharding.optim:
            shown.__class__ = self._class_of(index)
        return shown

    def _class_of(self, index: int) -> type[ShardedGradient]:
        if index not in self._classes:
            self._classes[index] = sharded_gradient_class(self._spec.group.everyone, self._cut_of(index))
        return self._classes[index]

    def _param_class_of(self, index: int) -> type[SegmentParameter]:
        if index not in self._param_classes:
            self._param_classes[index] = segment_parameter_class(self._spec.group.everyone, self._cut_of(index))
        return self._param_classes[index]

    def state_class(self, index: int) -> type[ShardedState] | None:
        """Return the class in which a program sees the states of a slot; None if it sees whole ones."""
        if not self._spec.sharding.optim:
            return None
        return sharded_state_class(self._spec.group.everyone, self._cut_of(index))

    def _cut_of(self, index: int) -> Cut:
        part = self._spec.part(index)
        start, stop = self._spec.own_range.elements(index)
        return Cut(self._spec.layout.slots[index].name, self._whole_shape(index), start, stop, part)

    def _whole_shape(self, index: int) -> torch.Size:
        """Return the shape of the whole parameter, of which a slot may be a part."""
        part = self._spec.part(index)
        return torch.Size(self._spec.layout.slots[index].shape if part is None else part.whole)

    def _of_group(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole tensor that this rank's group has."""
        part = self._spec.part(index)
        return values if part is None or values.shape != self._whole_shape(index) else part.read(values)

    def strip(self, index: int) -> None:
        """Make a parameter and its gradient plain tensors: optimizers have fast paths for exact classes only."""
        param = self._spec.params[index]
        grad = raw_grad(param)
        if isinstance(grad, (ShardedGradient, StageGradient)):
            grad.__class__ = torch.Tensor  # type: ignore[assignment]
        if has_class(param, ReducedParameter):
            restore_class(param)

    def mark_again(self, index: int) -> None:
        """Undo ``strip``: the program looks at an entered parameter and its gradient."""
        self._let_grad_be_written(index)
        grad = raw_grad(self._spec.params[index])
        if type(grad) is torch.Tensor and self._spec.sharding.optim:
            grad.__class__ = self._class_of(index)

    def scale_later(self, indices: set[int], factor: torch.Tensor) -> bool:
        """Keep a factor of the reduced gradients for the step, if they are those of ``indices`` and nobody saw them.

        Returns:
            Whether nothing is left to do; if not, the caller multiplies.
        """
        return not self._shown and not self.is_kept and self._gradients.scale_later(indices, factor)

    @property
    def is_kept(self) -> bool:
        """Whether the program keeps a gradient that was shown to it."""
        return any(given() is not None for given in self._given.values())

    # -- Changes of gradients --------------------------------------------------------------------------------------

    def write(self, index: int, grad: torch.Tensor | None) -> None:
        """Set a parameter's ``grad`` to an assigned tensor; None drops the gradient.

        In the window that is this rank's segment, or the whole gradient, of which the segment is taken.
        """
        param = self._spec.params[index]
        if grad is None:
            self.drop([index])
            return
        if grad is self._shown.get(index) or self._gradients.is_sum(index, grad):  # `p.grad *= 2`
            return
        local = kept_part(self._cut_of(index), grad, "grad = ...")
        grad = _ordinary_memory(grad if local is None else local)
        if index not in self._entered:
            set_raw_grad(param, _apart(self._of_group(index, grad)))
            self._gradients.forget([index])
            return
        is_whole = self._is_whole(index, grad)
        set_raw_grad(param, None if is_whole else self._segment_of(index, grad))
        self._leave_to_program(index)  # it may be assigned to another one (`p.grad, q.grad = q.grad, p.grad`)
        if is_whole:
            self._take_whole(index, grad)
            self.show(index)

    def _segment_of(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        if isinstance(grad, ShardedGradient):
            require_same_part(self._cut_of(index), type(grad).cut, "grad = ...")
        if isinstance(grad, ShardedValues):  # made of parameters: `torch.full_like(param, 2.0)`
            return self._as_shown(index, grad.detach().as_subclass(torch.Tensor))
        if not self._spec.sharding.optim or isinstance(grad, ShardedGradient):
            return grad
        return self._as_shown(index, grad.detach()) if grad.shape == self._values.segment(index).shape else grad

    def _is_whole(self, index: int, grad: torch.Tensor) -> bool:
        """Say whether a tensor assigned to an entered parameter is a whole gradient, or a segment of all elements."""
        if not self._spec.sharding.optim or isinstance(grad, ShardedGradient):
            return False
        return grad.shape in (self._whole_shape(index), torch.Size(self._spec.layout.slots[index].shape))

    def _may_be_segment(self, index: int) -> bool:
        """Say whether a whole gradient has the shape that a segment has on some rank."""
        layout = self._spec.layout
        segments = [layout.segments(rank)[index] for rank in range(self._spec.communicator.world_size)]
        numel = layout.slots[index].numel
        return len(layout.slots[index].shape) == 1 and any(one.stop - one.start == numel for one in segments)

    def drop(self, indices: Iterable[int]) -> None:
        """Drop the gradients of some parameters, reduced or assigned."""
        params, indices = self._spec.params, list(indices)
        for index in indices:
            self.assigned.pop(index, None)
            set_raw_grad(params[index], None)
            self._leave_to_program(index)
        self._gradients.forget(indices)
        for index in self._entered.intersection(indices):
            self._let_grad_be_written(index)

    def _leave_to_program(self, index: int) -> None:
        """Give a gradient that the program keeps (``kept = p.grad``) memory of its own: the buffer's is used again."""
        self._shown.pop(index, None)
        given = self._given.pop(index, None)
        kept = given() if given is not None else None
        if kept is not None:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                kept.data = kept.detach().clone()

    def zero(self, indices: Iterable[int]) -> None:
        """Make the gradients of some parameters zero, reduced or assigned."""
        indices = list(indices)
        for index in indices:
            grad = raw_grad(self._spec.params[index])
            if grad is not None:
                grad.detach().zero_()
        self._gradients.zero(indices)

    def take_gradients(self) -> None:
        """Take over the program's changes to the ``grad`` of every parameter of the buffer."""
        for index in range(len(self._spec.params)):
            self.take_gradient(index)

    def show_again(self) -> None:
        """Let entered parameters show the gradients that were taken over: they are about to be changed."""
        for index in self._entered:
            param = self._spec.params[index]
            if raw_grad(param) is not self._shown.get(index):
                set_raw_grad(param, None)
                self._shown.pop(index, None)
                self.show(index)

    def take_gradient(self, index: int) -> None:
        """Take over the program's changes to a parameter's ``grad``."""
        if self._gradients.assigned.outdated:
            grad = raw_grad(self._spec.params[index])
            if grad is not None and grad is not self._shown.get(index):  # another one has been assigned
                self._gradients.assigned.outdated.pop(index, None)
        if self._gradients.assigned.sources or self._gradients.assigned.outdated:
            self._take_source(index)
        grad, shown = raw_grad(self._spec.params[index]), self._shown.get(index)
        if grad is None and shown is not None:
            self.drop([index])
        elif grad is not None and grad is not shown:
            self._take_assigned(index, grad)
        elif grad is not None:
            self._take_moved(index, grad)

    def _take_moved(self, index: int, shown: torch.Tensor) -> None:
        """Take over the tensor to which ``data`` of a shown gradient was pointed (``p.grad.data = ...``)."""
        with torch._C.DisableTorchFunctionSubclass():
            if shown.data_ptr() == self._shown_at[index]:
                return
            values = shown.detach().as_subclass(torch.Tensor)
        del self._shown[index]
        set_raw_grad(self._spec.params[index], None)
        self.write(index, values)
        self.take_gradient(index)

    def _take_assigned(self, index: int, grad: torch.Tensor) -> None:
        if index in self._entered:
            self._gradients.assign(index, grad)
            return
        set_raw_grad(self._spec.params[index], None)
        self._take_whole(index, _ordinary_memory(grad))
        self._gradients.mark_reduced()

    def _take_whole(self, index: int, grad: torch.Tensor, is_other: bool = False) -> None:
        local = self._of_group(index, grad)
        digest = Digest.of(local)._replace(is_other=is_other)
        if index not in self._entered or not self._may_be_segment(index):
            self.assigned[index] = digest
        else:  # the other ranks may not come to compare
            refuse_two_changes(self._spec.layout.slots[index].name, [digest])
        start, stop = self._spec.own_range.elements(index)
        self._gradients.assign(index, local.reshape(-1)[start:stop])
        self._gradients.assigned.sources[index] = Source.of(grad)

    def _take_source(self, index: int) -> None:
        """Take over later changes to the tensor that was assigned (``grads = [p.grad ...]``, then ``g.mul_``).

        Raises:
            RuntimeError: A backward has added to it in between, and the tensor does not show that.
        """
        outdated = self._gradients.assigned.outdated.get(index)
        if outdated is not None and outdated.is_changed:
            raise RuntimeError(
                f"The tensor that was assigned to `grad` of `{self._spec.layout.slots[index].name}` was changed"
                " after a backward that has added to the gradient, which the tensor does not show. Change `p.grad`."
            )
        if outdated is not None and not outdated.is_held:
            del self._gradients.assigned.outdated[index]
        source = self._gradients.assigned.sources.pop(index, None)
        if source is None:
            return
        if source.is_changed:
            self._take_whole(index, source.tensor, is_other=self._is_changed(index, source))
        elif source.is_held:
            self._gradients.assigned.sources[index] = source

    def _keep_source(self, index: int) -> None:
        """Note the tensor that was assigned, if the program has it: at stage 0 the window shows that tensor itself."""
        grad = raw_grad(self._spec.params[index])
        if grad is None or grad is self._shown.get(index) or self._spec.sharding.optim:
            return
        set_raw_grad(self._spec.params[index], None)
        source = Source(grad, grad._version, None)
        del grad
        if source.is_held:
            self._gradients.assigned.sources[index] = Source.of(source.tensor)

    def _note_read(self, index: int) -> None:
        source, shown = self._gradients.assigned.sources.get(index), self._shown.get(index)
        if source is not None and source.read is None and shown is not None:
            read = shown.detach().as_subclass(torch.Tensor).clone()
            self._gradients.assigned.sources[index] = source._replace(read=read)

    def _is_changed(self, index: int, source: Source) -> bool:
        """Say whether the segment that was read of a tensor that was assigned was changed too."""
        values, kept = self._gradients.for_writing(), self._gradients.reduced
        if source.read is None or values is None or kept is None:
            return False
        segment = self._spec.own_range.segment(index, values).to(kept.dtype)  # it may have been rounded to that
        return not torch.allclose(segment, source.read.to(kept.dtype), rtol=0.0, atol=0.0, equal_nan=True)

    # -- The end ---------------------------------------------------------------------------------------------------

    def take_values(self, index: int) -> bool:
        """Copy tensors that ``data`` of entered parameters was pointed to (``p.data = p.data - ...``) into segments.

        Returns:
            Whether that of this one was since values were published.
        """
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if self._points_elsewhere(index):
                self._take_all_values()
            if index in self._entered:
                self._take_earlier(index)
        return index in self._moved

    def _take_earlier(self, index: int) -> None:
        """Copy results of ``data`` of before the window, into which somebody has written since, into the segment.

        Raises:
            RuntimeError: The segment was written too, or they have another dtype.
        """
        param, segment = self._spec.params[index], ordinary(self._values.segment(index))
        for data in written_before_window(param):
            self._moved.add(index)
            if data.untyped_storage()._cdata == segment.untyped_storage()._cdata:
                continue
            is_other = data.dtype != segment.dtype
            if is_other or is_written(param, self._versions[index]):
                reason = f"has {data.dtype} there" if is_other else "was written in both"
                raise RuntimeError(
                    f"`.data` of parameter `{self._spec.layout.slots[index].name}` was read before a read of `p.grad`"
                    f" and written behind it, and the parameter {reason}. Read `p.grad` first"
                    " (`grad = p.grad`), and `p.data` behind it."
                )
            segment.copy_(self._own_part(index, data, segment))

    def _points_elsewhere(self, index: int) -> bool:
        param, segment = self._spec.params[index], ordinary(self._values.segment(index))
        is_elsewhere = param.data_ptr() != segment.data_ptr() or (segment.numel() == 0 and is_pointed(param))
        return index in self._entered and is_elsewhere

    def _take_all_values(self) -> None:
        """Take them over together: parameters may have been pointed to each other's segments."""
        found = {}
        for index in filter(self._points_elsewhere, sorted(self._entered)):
            param, segment = self._spec.params[index], ordinary(self._values.segment(index))
            values = self._own_part(index, param.detach(), segment)
            is_inside = values.untyped_storage()._cdata == segment.untyped_storage()._cdata
            found[index] = values.clone() if is_inside else values
        for index in found:
            written_before_window(self._spec.params[index])  # it was copied, or is not the parameter any more
            self._spec.params[index].data = ordinary(self._values.segment(index))
            renew_writes(self._spec.params[index])
        self._leave_stepped()
        for index, values in found.items():
            ordinary(self._values.segment(index)).copy_(values)
        self._moved.update(found)

    def _own_part(self, index: int, values: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the tensor to which ``data`` was pointed: a segment, or a whole parameter."""
        slot, whole = self._spec.layout.slots[index], self._whole_shape(index)
        if values.numel() != segment.numel() and values.shape in (whole, torch.Size(slot.shape)):
            start, stop = self._spec.own_range.elements(index)
            values = self._of_group(index, values).reshape(-1)[start:stop]
        if values.numel() != segment.numel():
            raise RuntimeError(
                f"`.data` of parameter `{slot.name}` was pointed to a tensor of shape {tuple(values.shape)} in the step"
                f" window, which `p.grad` opens and where this rank has {segment.numel()} of {whole.numel()} elements."
                f" Give it a tensor of the segment's shape or of the whole parameter's, {tuple(whole)}."
            )
        return values.reshape(segment.shape)

    def published(self) -> None:
        """Note that writes into entered parameters are published, or are going to be."""
        self._moved.clear()
        for index in self._entered:
            self._versions[index] = begin_writes(self._spec.params[index])

    def leave(self, index: int) -> None:
        """Take over changes to the ``grad`` and values of a parameter, which the caller shows as it computes."""
        param = self._spec.params[index]
        if index in self._entered:
            is_moved = self.take_values(index)
            if is_written(param, self._versions.pop(index)) or is_moved:
                self._written.add(index)
            end_writes(param)
        self._moved.discard(index)
        self.take_gradient(index)
        self._keep_source(index)
        set_raw_grad(param, None)
        shown = self._shown.pop(index, None)
        if shown is not None and self._spec.sharding.optim:  # a program that keeps it has a segment
            shown.__class__ = self._class_of(index)
        if index in self._entered and (face := face_of(param)) is not None:
            restore_class(param)
            face.show(param)
        self._entered.discard(index)

    @property
    def is_written(self) -> bool:
        """Whether somebody has written values of entered parameters since they were published."""
        entered = ((self._spec.params[index], version) for index, version in self._versions.items())
        return bool(self._moved or self._written) or any(is_written(param, version) for param, version in entered)

    def close(self) -> set[int]:
        """Take over changes to the gradients in the dtype in which they are kept.

        Returns:
            The slots whose values were written, and nothing published it; the caller does.
        """
        self.end_writing()
        written, self._written = self._written, set()
        return written

    def end_writing(self) -> None:
        """Keep the gradients in their own dtype again, behind changes such as clipping."""
        self._gradients.accept_writes()
        if not self._shown and not self.is_kept:  # another optimizer's window may be open
            self._gradients.end_writing()

    def take_assigned(self) -> dict[str, Digest]:
        """Return the whole gradients that were assigned by hand, by name, and forget them."""
        slots = self._spec.layout.slots
        assigned, self.assigned = self.assigned, {}
        return {slots[index].name: digest for index, digest in assigned.items()}


def compare_assigned(windows: Iterable[BufferWindow], communicator: Communicator) -> None:
    """Compare the gradients that the ranks have assigned by hand, once. Collective: all ranks that assigned some.

    Raises:
        RuntimeError: They have not assigned the same.
    """
    assigned: dict[Communicator, dict[str, Digest]] = {}
    for window in windows:
        found = window.take_assigned()
        if found:  # on a grid other groups have other parts of a parameter
            group = window.communicator if window.has_parts else communicator
            assigned.setdefault(group, {}).update(found)
    for group, digests in assigned.items():
        compare(digests, group)


def _ordinary_memory(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient that is strided and can be changed in place, as the program has it if it is both."""
    if grad.layout is not torch.strided:
        return grad.to_dense()
    with torch.inference_mode(False):
        return grad.clone() if grad.is_inference() else grad


def _apart(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient whose elements have memory each: one that was expanded has not."""
    is_strided = grad.layout is torch.strided
    return grad.contiguous() if is_strided and 0 in grad.stride() and grad.numel() > 1 else grad
