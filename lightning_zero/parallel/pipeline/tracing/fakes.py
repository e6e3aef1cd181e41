"""Outputs of modules of other pipeline stages, as PyTorch's ``FakeTensor``: shapes and dtypes, no values.

Note [State of a passed module]
    A forward may leave tensors in its module (``self.aux_loss = ...``, statistics in a module buffer), which code
    after it reads. A module that is passed over must not be left with fakes, and that code must not read old values in
    silence. So its forward finds fakes in place of the module's tensors; changed tensors are put back, and are shown
    as fakes until the step is run to its end. Modules with hooks of the program run on fakes in every call.

Note [Guesses]
    An operation's result may depend on values (which tokens an expert is given). Where nothing is computed from the
    result but shapes, it is guessed from ones: a module that routes tokens returns as many as it is given. The stage
    that computes compares the shapes of the tensors that it sends, so a wrong guess is an error.

Tensors that a forward leaves outside of its module are told in ``escapes.py``.
"""

from __future__ import annotations

import dis
import itertools
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn.utils.stateless import _reparametrize_module

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.module_state import LIBRARIES, set_field
from lightning_zero.parallel.pipeline.stages.attributes import MISSING, Key, assign, attribute_spaces
from lightning_zero.parallel.pipeline.stages.sources import (
    BEFORE,
    FOR_HOOKS,
    WHOLE,
    Origins,
    Shape,
    Source,
    is_fake,
)
from lightning_zero.parallel.pipeline.tracing.containers import Contents, refill
from lightning_zero.parallel.pipeline.tracing.escapes import Escapes
from lightning_zero.parallel.pipeline.tracing.fake_mode import VALUES_NEEDED, Mode, empty_like
from lightning_zero.parallel.pipeline.tracing.known_calls import (
    KNOWN_BY_VALUE,
    NUMBERS,
    Call,
    Input,
    Position,
    Same,
    SetAttribute,
    again,
    describe,
    is_known,
    may_be_another,
    sharing,
    strides,
    zeros,
)
from lightning_zero.parallel.pipeline.tracing.object_state import ObjectState, SharedNumbers
from lightning_zero.parallel.pipeline.tracing.outcomes import Outcome
from lightning_zero.parallel.pipeline.tracing.own_gradients import leaf_of
from lightning_zero.parallel.pipeline.tracing.replays import Recording
from lightning_zero.parallel.pipeline.tracing.sent_numbers import ABSENT, NUMBER, decoded, is_sent
from lightning_zero.parallel.pipeline.tracing.shown_attributes import ShownAttributes
from lightning_zero.parallel.pipeline.tracing.user_hooks import (
    has_hooks_only,
    hooks_of_users,
    is_own,
    kind_of_hook,
    runs_code_of_users,
    without_hooks,
)
from lightning_zero.trees import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

__all__ = ["Fakes", "is_raised_by_program"]

Fetch = Callable[[Source], Tensor | None]
_MOST_CALLS = 4096  # that are remembered
_PLAIN = (Tensor, *KNOWN_BY_VALUE)


@dataclass
class _Run:
    """The surroundings of a run.

    Attributes:
        num_logged: Returns how many calls of ``self.log`` were made.
        num_by_hooks: Of these calls, those by hooks of the program.
        logging: Modules that have made one in any run, by ``id``.
        fetch: Of a run that computes.
        read: Attributes with numbers that it is sent.
        imagined: Name of the module whose forward is imagined.
        hooked: Name of the module whose hook runs.
        is_before: That hook runs before the module's forward.
        given_numbers: To code between the modules.
    """

    num_logged: Callable[[], int]
    num_by_hooks: int = 0
    logging: set[int] = field(default_factory=set)
    fetch: Fetch | None = None
    read: Sequence[Source] = ()
    imagined: str = ""
    hooked: str = ""
    is_before: bool = False
    given_numbers: list[Any] = field(default_factory=list)


def _unchanged(leaf: int, value: Any) -> Any:
    """Return a value that is no tensor as it is."""
    return value


class Fakes:
    """Computes the shapes and dtypes of modules' outputs from their arguments, and remembers them.

    Args:
        names: Of the modules, by ``id``; for errors.
        free: Parameters that code outside of these modules uses.
        unnoticed: Context of forwards on fakes, which the engine ignores.
        placed: The modules, and the chunk of each.
        num_logged: Returns how many calls of ``self.log`` were made.

    Attributes:
        mode: Of the fakes.
        attributes: That modules show.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        free: Sequence[nn.Parameter],
        unnoticed: Callable[[], AbstractContextManager[None]],
        placed: Sequence[tuple[nn.Module, int]] = (),
        *,
        num_logged: Callable[[], int] = int,
    ) -> None:
        self._names = names
        self._unnoticed = unnoticed
        self.mode = Mode(allow_non_fake_inputs=True)
        self._parameters: dict[int, dict[str, nn.Parameter]] = {}  # of a module, as fakes
        self._free = free
        self._known: dict[nn.Parameter, Tensor] = {}  # of these, as fakes
        self._calls: OrderedDict[Hashable, Call] = OrderedDict()
        self._recorded: OrderedDict[Hashable, tuple[Call, Recording]] = OrderedDict()  # those with hooks
        self._given: Counter[tuple[int, int]] = Counter()  # fakes in this run, by `id` of the call and leaf
        self.attributes = ShownAttributes([module for module, _ in placed])
        self._has_changed_attributes = False  # a forward, or hooks in it
        self._has_run_hooks = True  # a forward has: they need no values
        # - The run
        self._times: Counter[str] = Counter()  # calls by name of the module
        self._sharing: list[tuple[str, Tensor, int]] = []  # module, tensor that shares memory with others, and version
        self._run = _Run(num_logged)
        self._escapes: Escapes | None = None  # of the forward that was imagined last
        self._outside: list[str] = []  # names of modules that have left fakes outside
        self._ever_outside = ""  # the first of these, in all runs
        self._shared = SharedNumbers(placed)
        last = max((chunk for _, chunk in placed), default=0)
        self._of_last_chunk = {id(module) for module, chunk in placed if chunk == last}  # nobody passes them over

    def begin(self, *, origins: Origins | None = None, fetch: Fetch | None = None, read: Sequence[Source] = ()) -> None:
        """Begin a run: register fakes of free parameters in advance, because converting them later reads ``grad``.

        Args:
            origins: In a run on fakes, follows their sources.
            fetch: Returns the tensor of a source that this chunk has, else None.
            read: Attributes with numbers that this chunk is sent.
        """
        self._given.clear()
        self._run.given_numbers.clear()
        self._run.read = read
        self._times.clear()
        self._sharing.clear()
        self._outside.clear()
        self.mode.origins = origins
        self._run.fetch = fetch
        convert: Any = self.mode.fake_tensor_converter
        for param in self._free:
            known = self._known.get(param)
            if known is None or (known.dtype, known.requires_grad) != (param.dtype, param.requires_grad):
                with self.mode:
                    known = torch.empty(param.shape, dtype=param.dtype, device=param.device)
                self._known[param] = known.requires_grad_(param.requires_grad)
                convert.set_tensor_memo(param, known)

    def end(self) -> None:
        """End a run: restore the attributes that modules passed over show as fakes."""
        self.mode.origins = self._run.fetch = None
        self.mode.refusal = None
        self.mode.note_hook = None
        self.attributes.end()

    def require_unwritten(self) -> None:
        """Raise where the program has written a value that another stage does not see, or that this one does not have.

        Raises:
            PipelineError: Into one of several tensors that share memory on their own stage, or a value of an earlier
                stage into an attribute of its module.
        """
        self.attributes.require_kept()
        for name, tensor, version in self._sharing:
            if tensor._version != version:
                raise PipelineError(
                    f"The step writes into a tensor that `{name}` of another pipeline stage has returned or was given,"
                    " and that shares memory with another one. This stage does not see the write in the other. Write"
                    " into a copy (`tensor.clone()`), or compute a new tensor."
                )

    def require_unrefused(self) -> None:
        """Raise the error of an operation in this run that the program has caught, to go on without the value."""
        if self.mode.refusal is not None:
            raise self.mode.refusal

    @property
    def advice(self) -> str:
        """A sentence on modules that have left fakes outside in this run, for errors; empty if there are none."""
        if not self._outside:
            return ""
        return (
            f" `{self._outside[0]}` leaves tensors outside of its modules (in a global, a closure, a class, or another"
            " object), where other pipeline stages do not have them. If the step uses them, let the module return them,"
            " or keep them in attributes of its own (`self.loss = ...`, also in a list or dictionary), which are sent."
            " A dataclass is sent after `torch.export.register_dataclass`."
        )

    def require_values(self, name: str, output: Any) -> None:
        """Refuse the output of a module of this chunk that has none, because the module has computed with a fake.

        Raises:
            PipelineError: It has none.
        """
        if any(map(is_fake, tree_leaves(output))):
            raise PipelineError(
                f"`{self._ever_outside or name}` leaves tensors outside of its modules (in a cached function, a global,"
                f" a class, or another object), and `{name}` uses them. Pipeline stages pass over modules of other"
                " stages, whose tensors have no values here. Compute them in every forward, keep them in attributes or"
                " module buffers of the module that uses them, or fill a cache before the first step (in"
                " `on_fit_start`)."
            )

    def require_strong(self, results: Sequence[Tensor]) -> None:
        """Refuse weak references of the program to results of operations between modules.

        Raises:
            PipelineError: There are some.
        """
        own = self.mode.own_references()
        if any(id(one) not in own for fake in results for one in weakref.getweakrefs(fake)):
            raise PipelineError(
                "The step keeps a weak reference (`weakref.ref`) to a tensor that it computes of an earlier pipeline"
                " stage's values. This stage has no graph that keeps the tensor alive, and code that reads it would go"
                " on without it. Keep the tensor itself."
            )

    @property
    def shown(self) -> list[Any]:
        """The attributes with tensors that modules show as fakes, of all calls in this run."""
        return [value for value in self.attributes.values if not isinstance(value, (*NUMBERS, type(None)))]

    def outputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, are_sources: bool = True
    ) -> Any:
        """Return the outputs of a call as fakes, and show the attributes it would set in the module as fakes.

        Args:
            module: The module.
            args: Of the call.
            kwargs: Of the call.
            are_sources: The module is one of an earlier chunk: sources that this chunk has are returned as they are.
        """
        number = self._times[self._names[id(module)]]
        call, inputs = self._call(module, args, kwargs, are_sources=are_sources)
        return self._shown_result(module, call, inputs, number, given=(args, kwargs), are_sources=are_sources)

    def executed(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of a module on fakes, with all that it leaves behind; its tensors are fakes already."""
        before = self.mode.refusal
        inputs = tree_leaves((args, kwargs))
        try:
            with (
                self._unnoticed(),
                self.mode.imagining(),
                self._hooks_outside(module, Recording(inputs), deque()),
            ):
                return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.mode.refusal = before

    def described(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Outcome | None]:
        """Return the outputs of a module of this chunk as ``outputs`` does, and the outcome that other stages expect.

        The outcome is None where hooks of the program could not run on fakes.
        """
        number = self._times[self._names[id(module)]]
        call, inputs = self._call(module, args, kwargs, are_sources=False)
        output = self._shown_result(module, call, inputs, number, given=(args, kwargs), are_sources=False)
        objects = [key for key, _, _ in call.opaque]
        outcome = Outcome.of(output, call.left, objects=objects, has_shapes=not call.is_guess)
        return output, outcome if call.has_hooks else None

    def _shown_result(
        self, module: nn.Module, call: Call, inputs: Sequence[Any], number: int, *, given: Any, are_sources: bool
    ) -> Any:
        name = self._names[id(module)]
        self._times[name] += 1

        def make(leaf: int, known: Shape) -> Tensor:
            left, position = call.positions[leaf]
            source = Source(name, number, left, position)
            fetched = self._fetched(source) if are_sources else None
            if fetched is not None:
                return fetched
            fake = self._fake(call, leaf, known)
            if self.mode.origins is not None and are_sources:
                self.mode.origins.mark(fake, source)
            return fake

        def keep(leaf: int, value: Any) -> Any:
            left, position = call.positions[leaf]
            return self._number(Source(name, number, left, position, is_number=True), value)

        output = self._result(module, call, inputs, make, given=given, keep=keep if are_sources else _unchanged)
        self._show_numbers(module, call)
        if are_sources:
            self._show_read(module, name, number)
        return output

    def _number(self, source: Source, value: Any) -> Any:
        """Return a number that the stage which computes it has sent; else the one that is known here."""
        if not is_sent(value):
            return value
        if self.mode.origins is not None:
            self.mode.origins.need_number(source, NUMBER)
        sent = self._fetched(source)
        value = value if sent is None else decoded(sent, value, source)
        self._run.given_numbers.append(value)
        return value

    def _show_numbers(self, module: nn.Module, call: Call) -> None:
        """Show the numbers that a forward has set in attributes, unless other chunks have the module as well."""
        spaces = attribute_spaces(module) if call.numbers else {}
        for (child, kept, name), value in call.numbers.items():
            if (child, kept) in spaces and not self._shared.is_shared(module.get_submodule(child)):
                self.attributes.show(spaces[child, kept], name, value)

    def _show_read(self, module: nn.Module, name: str, number: int, leaf: int = WHOLE) -> None:
        """Show the numbers in attributes that were read when the step was described, as they were sent."""
        for source in self._run.read:
            if (source.module, source.call, source.leaf) == (name, number, leaf) and source.left is not None:
                child, _, key = source.left
                owner = module.get_submodule(child)
                value = getattr(owner, key, None)
                sent = self._fetched(source)
                if sent is not None:
                    value = decoded(sent, value, source)
                    self.attributes.show(vars(owner), key, MISSING if value is ABSENT else value)
                if value is not ABSENT:
                    self._run.given_numbers.append(value)

    @contextmanager
    def _showing_read(self, module: nn.Module, *, is_before: bool) -> Iterator[None]:
        """Show a hook the numbers that its module has kept in this very call, or before it, as they were sent."""
        name, was_hooked = self._names[id(module)], (self._run.hooked, self._run.is_before)
        self._run.hooked, self._run.is_before = name, is_before
        leaf = BEFORE if is_before else WHOLE
        try:
            with self.attributes.shown_by(partial(self._show_read, module, name, self._times[name], leaf)):
                yield
        finally:
            self._run.hooked, self._run.is_before = was_hooked

    @property
    def reader(self) -> str:
        """The module whose forward reads attributes; empty for a hook of the program."""
        return "" if self._run.hooked else self._run.imagined

    def note_read(self, name: str, child: str, key: str) -> None:
        """Note, in a run on fakes, that other code than its forward reads a number that a module has, after a call."""
        source = self.number_of(name, child, key)
        if self.mode.origins is not None and source is not None:
            self.mode.origins.need_number(source, NUMBER)

    def number_of(self, name: str, child: str, key: str) -> Source | None:
        """Return the number that a module has now in an attribute; None before its first call."""
        number = self._times[name] - (name != self._run.hooked)
        is_before = self._run.is_before and name == self._run.hooked
        leaf = BEFORE if is_before else WHOLE
        return Source(name, number, (child, "", key), leaf, is_number=True) if number >= 0 else None

    def is_given(self, value: Any) -> bool:
        """Say whether a module of another chunk has returned this very number in the last run."""
        return any(value is one for one in self._run.given_numbers)

    def _fetched(self, source: Source) -> Tensor | None:
        if self._run.fetch is None:
            return None
        with self.mode.paused():
            return self._run.fetch(source)

    def gradients(self, outputs: Sequence[Any], inputs: Sequence[Any], has_graph: bool) -> tuple[Tensor, ...]:
        """Return fakes, or zeros in a survey, for gradients that the step computes in a run that computes nothing."""
        leaves = [leaf_of(one) for one in inputs]
        known = [Shape(tuple(one.shape), strides(one), one.dtype, one.device, has_graph, True) for one in leaves]
        if self.mode.origins is None:
            return tuple(map(zeros, known))
        with self.mode:
            found = tuple(map(empty_like, known))
        self.mode.origins.derive(found, outputs)
        return found

    def zeros(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs of a call as zeros that take no memory."""
        call, inputs = self._call(module, args, kwargs, are_sources=False)
        self._times[self._names[id(module)]] += 1
        return self._result(module, call, inputs, lambda _, known: zeros(known), given=(args, kwargs))

    def _result(
        self,
        module: nn.Module,
        call: Call,
        inputs: Sequence[Any],
        make: Callable[[int, Shape], Tensor],
        *,
        given: Any,
        keep: Callable[[int, Any], Any] = _unchanged,
    ) -> Any:
        leaves: list[Any] = []
        for number, leaf in enumerate(call.leaves):
            same = isinstance(leaf, Same)
            leaves.append(
                leaves[leaf.leaf] if same else again(leaf, inputs, partial(make, number), partial(keep, number))
            )
        for shared in call.sharing:
            alike = [leaves[number] for number in shared.leaves] + [inputs[number] for number in shared.inputs]
            self._sharing += [(self._names[id(module)], one, one._version) for one in alike if not one.is_inference()]
        output, left, filled = tree_unflatten(leaves, call.spec)
        refill(given, filled)
        spaces = attribute_spaces(module) if left else {}
        for (child, kept, name), value in left.items():
            space = spaces[child, kept]
            self.attributes.show(space, name, value)
        for (_, _, name), space, value in call.opaque:
            self.attributes.show(space, name, value)
        return output

    def _fake(self, call: Call, leaf: int, known: Shape) -> Tensor:
        """Return a fake that this run has not had yet: one of an earlier run, if nobody has changed it in place."""
        made, number = call.made.setdefault(leaf, []), self._given[id(call), leaf]
        self._given[id(call), leaf] += 1
        old = made[number] if number < len(made) else None
        is_same = old is not None and describe(old) == replace(known, is_fake=True)
        if old is not None and is_same and not old._version and not old._backward_hooks:
            return old
        with self.mode:
            fake = empty_like(known)
            fake = fake.clone() if fake.requires_grad else fake  # a module's output may be changed in place
        made[number : number + 1] = [fake]
        return fake

    def _call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, are_sources: bool
    ) -> tuple[Call, list[Any]]:
        inputs, spec = tree_flatten((args, kwargs))
        if runs_code_of_users(module):
            return self._call_with_hooks(module, inputs, spec, are_sources=are_sources), inputs
        if not all(map(is_known, inputs)):
            return self._imagined_alone(module, inputs, spec), inputs
        key = self._key(module, inputs, spec)
        if key not in self._calls or (self._calls[key].numbers and self.mode.origins is not None):
            call = self._imagined_alone(module, inputs, spec)
            if call.has_escapes or self._may_log(module, call) or any(map(may_be_another, call.leaves)):
                return call, inputs  # it logs in every call, and numbers may be others in the next one
            self._calls[key] = call
            if len(self._calls) > _MOST_CALLS:
                self._calls.popitem(last=False)
        self._calls.move_to_end(key)
        return self._calls[key], inputs

    def _may_log(self, module: nn.Module, call: Call) -> bool:
        """Say whether a module has logged in this call, or in an earlier one, as those that log every n-th step."""
        if call.has_logged:
            self._run.logging.add(id(module))
        return id(module) in self._run.logging

    def _key(self, module: nn.Module, inputs: list[Any], spec: TreeSpec) -> Hashable:
        """Return a key that is equal for calls that return the same shapes."""
        trained = tuple(param.requires_grad for param in module.parameters())
        device = _autocast_device(inputs)
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        modes = (torch.is_grad_enabled(), autocast, tuple(child.training for child in module.modules()))
        return id(module), spec, tuple(map(describe, inputs)), trained, modes

    def _call_with_hooks(self, module: nn.Module, inputs: list[Any], spec: TreeSpec, *, are_sources: bool) -> Call:
        """Describe a call in which hooks of the program run; see ``replays.py``."""
        is_alike = self.mode.origins is None and has_hooks_only(module) and all(map(is_known, inputs))
        hooks = tuple(map(kind_of_hook, hooks_of_users(module)))
        first = {id(leaf): number for number, leaf in reversed(list(enumerate(inputs)))}
        same = tuple(first[id(leaf)] for leaf in inputs if isinstance(leaf, Tensor))  # hooks are given these themselves
        key = (self._key(module, inputs, spec), same, hooks, are_sources) if is_alike else None
        if key in self._recorded:
            call, recording = self._recorded[key]
            results: deque[Any] = deque()
            times = self._times.copy()
            replay = partial(self._replay, module, recording, inputs, results)
            self._imagine(module, inputs, spec, forward=replay)
            if all(result is None for result in results):
                return call
            del self._recorded[key]
            self._times = times
        else:
            results = deque()
        recording = Recording(inputs)
        watching = self._watching_inside(module, recording) if are_sources else nullcontext()
        self._has_changed_attributes = False
        with watching, self._hooks_outside(module, recording, results):
            call = self._imagine(module, inputs, spec)
        recording.end()
        self._require_settled(module, inputs, spec)
        self._note_escapes(module, call)
        has_numbers = any(map(may_be_another, call.leaves))
        may_log = self._may_log(module, call)
        is_same = not (self._has_changed_attributes or has_numbers or call.has_escapes or may_log)
        if key is not None and recording.is_exact and is_same:
            self._recorded[key] = call, recording
            if len(self._recorded) > _MOST_CALLS:
                self._recorded.popitem(last=False)
        return call

    def _replay(self, module: nn.Module, recording: Recording, inputs: Sequence[Any], results: deque[Any]) -> None:
        """Run the hooks of a recorded forward, up to one that returns a value; append their results to ``results``."""
        hooks = list(hooks_of_users(module))

        def returned(name: str, is_inner: bool, leaves: Collection[int]) -> dict[int, Tensor]:
            number = self._times[name]
            self._times[name] += is_inner
            left = None if is_inner else FOR_HOOKS
            found = {leaf: self._fetched(Source(name, number, left, leaf)) for leaf in leaves}
            return {leaf: tensor for leaf, tensor in found.items() if tensor is not None}

        def make(known: Shape) -> Tensor:
            fake = empty_like(known)
            return fake.clone() if fake.requires_grad else fake

        def call(number: int, args: Any, kwargs: Any) -> Any:
            self._note_hook(number, (args, kwargs))
            (child, is_behind, _), hook = hooks[number]
            with self.mode.paused(), self._showing_read(module, is_before=child == 0 and not is_behind):
                results.append(hook(*args, **kwargs))
            return results[-1]

        with suppress(*VALUES_NEEDED):  # a forward would be run without hooks then
            recording.replay(inputs, returned, make, call)

    def _imagine(
        self, module: nn.Module, inputs: list[Any], spec: TreeSpec, *, forward: Callable[[], Any] | None = None
    ) -> Call:
        """Run a forward, or its replacement, on fakes; describe its outputs and the attributes it sets."""
        self._fake_parameters(module)  # stay
        self._escapes = self.mode.escapes = Escapes(inputs) if forward is None else None
        before, num_logged = self.mode.refusal, self._run.num_logged() - self._run.num_by_hooks
        was_imagined, self._run.imagined = self._run.imagined, self._names[id(module)]
        try:
            call = self._imagined(module, inputs, spec, forward=forward)
            call.has_logged = self._run.num_logged() - self._run.num_by_hooks != num_logged
            return call
        finally:
            self._run.imagined = was_imagined
            self.mode.escapes = None
            self.mode.refusal = before  # hooks that only watch may read values

    def _require_settled(self, module: nn.Module, inputs: list[Any], spec: TreeSpec) -> None:
        """Refuse a forward that counts in a module or object of other chunks; see ``object_state.py``."""
        shared = self._shared.found()
        if not shared:
            return
        args, kwargs = tree_unflatten(inputs, spec)
        before = [getattr(one, name, MISSING) for one, name, _ in shared]
        try:
            for one, name, number in shared:
                set_field(one, name, number, is_deleted=False)
            with without_hooks(module):
                self._imagined(module, inputs, spec, forward=partial(module._call_impl, *args, **kwargs))
        finally:
            for (one, name, _), was in zip(shared, before, strict=True):
                set_field(one, name, was, is_deleted=was is MISSING)
        again = {(id(one), name) for one, name, _ in self._shared.changed}
        for one, name, _ in shared:
            if (id(one), name) in again:
                raise PipelineError(
                    f"`{self._names[id(module)]}` changes the number `{name}` of a `{type(one).__name__}` that modules"
                    " of other pipeline stages have as well, and changes it again when it runs again, as a counter"
                    " does. Each stage would count its own calls alone. Let every block have its own, or pass the"
                    " number to the block as an argument."
                )

    def _imagined_alone(self, module: nn.Module, inputs: list[Any], spec: TreeSpec) -> Call:
        """Describe a call without hooks of the program."""
        call = self._imagine(module, inputs, spec)
        self._require_settled(module, inputs, spec)
        return self._note_escapes(module, call)

    def _note_escapes(self, module: nn.Module, call: Call) -> Call:
        """Note whether the forward that was imagined last has left tensors outside of its module."""
        escapes, self._escapes = self._escapes, None
        call.has_escapes = escapes is not None and escapes.found()
        if not call.has_escapes:
            call.opaque.clear()
        else:
            self._outside.append(self._names[id(module)])
            self._ever_outside = self._ever_outside or self._names[id(module)]
        return call

    def _imagined(
        self, module: nn.Module, inputs: list[Any], spec: TreeSpec, *, forward: Callable[[], Any] | None
    ) -> Call:
        args, kwargs = tree_unflatten(inputs, spec)
        self.mode.has_guessed, self._has_run_hooks = False, True
        try:
            with (
                self._unnoticed(),
                self.mode.imagining(),
                _reparametrize_module(module, dict(self._fake_parameters(module))),
                self._apart(module) as (left, opaque, numbers),
            ):
                real = [leaf for leaf in inputs if isinstance(leaf, Tensor) and not is_fake(leaf)]
                versions = [leaf._version for leaf in real if not leaf.is_inference()]  # which views share
                contents = Contents((args, kwargs))
                output = self._forward(module, args, kwargs) if forward is None else forward()
                filled = contents.changed() if id(module) in self._of_last_chunk else {}
                if filled:
                    contents.put_back()
                self._require_same(tree_flatten((args, kwargs)), inputs, spec)
                if [leaf._version for leaf in real if not leaf.is_inference()] != versions:
                    raise PipelineError("it writes into an argument that this stage has, which other stages do not see")
                if self.mode.escapes is not None:
                    self.mode.escapes.end(self.mode.own_references(), tree_leaves(output))
        except Exception as error:
            if not self.mode.has_guessed and is_raised_by_program(error):
                raise  # as where the module computes
            raise PipelineError(
                f"`{self._names[id(module)]}` lies on another pipeline stage, and its output could not be told"
                f" from the shapes of its arguments: {_cause(error)}"
            ) from error
        positions = {
            id(leaf): index
            for index, leaf in enumerate(inputs)
            if isinstance(leaf, Tensor) and (filled or not is_fake(leaf))
        }
        leaves, out_spec = tree_flatten((output, left, filled))
        places: list[Position] = [(None, number) for number in range(len(tree_leaves(output)))]
        places += [(key, number) for key, value in left.items() for number in range(len(tree_leaves(value)))]
        places += [(None, number) for number in range(len(tree_leaves(filled)))]
        first = {id(leaf): number for number, leaf in reversed(list(enumerate(leaves))) if isinstance(leaf, Tensor)}
        described = [
            Input(positions[id(leaf)])
            if id(leaf) in positions
            else Same(first[id(leaf)])
            if first.get(id(leaf), number) != number
            else describe(leaf)
            for number, leaf in enumerate(leaves)
        ]
        return Call(
            out_spec,
            described,
            places,
            sharing(leaves, inputs),
            is_guess=self.mode.has_guessed,
            has_hooks=self._has_run_hooks,
            opaque=opaque,
            numbers=numbers,
        )

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward with the program's hooks; without them if they read values, as those that only watch do."""
        try:
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        except VALUES_NEEDED:
            if not runs_code_of_users(module):
                raise
        self._has_run_hooks = False
        with without_hooks(module):
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _require_same(self, now: tuple[list[Any], TreeSpec], inputs: Sequence[Any], spec: TreeSpec) -> None:
        leaves, now_spec = now
        if now_spec != spec or any(mine is not given for mine, given in zip(leaves, inputs, strict=True)):
            raise PipelineError("it changes a list or a dictionary among its arguments, which other stages do not see")

    @contextmanager
    def _watching_inside(self, module: nn.Module, recording: Recording) -> Iterator[None]:
        """Let hooks of the program on modules inside of one find sources: fakes that are known as such, or tensors."""
        own = self._names[id(module)]
        names = {child: f"{own}.{name}" if name else own for name, child in module.named_modules()}
        marked: dict[int, Any] = {}  # outputs of modules further inside, by `id`

        def watch(child: nn.Module, args: Any, output: Any) -> Any:
            name, left = names[child], FOR_HOOKS if child is module else None
            number = self._times[name]
            self._times[name] += child is not module
            leaves, spec = tree_flatten(output)
            found: dict[int, tuple[Tensor, Tensor]] = {}
            for position, leaf in enumerate(leaves):
                if not is_fake(leaf) or id(leaf) in marked:
                    continue
                source = Source(name, number, left, position)
                fetched = self._fetched(source)
                if fetched is not None:
                    leaves[position] = fetched
                elif self.mode.origins is not None:
                    self.mode.origins.mark(leaf, source)
                marked[id(leaves[position])] = leaves[position]
                found[position] = leaf, leaves[position]
            recording.note_outputs(name, found, is_inner=child is not module)
            return tree_unflatten(leaves, spec)

        handles = [child.register_forward_hook(watch, prepend=True) for child in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_hook(self, number: int, arguments: Any) -> None:
        if self.mode.note_hook is not None:
            self.mode.note_hook(number, arguments)

    @contextmanager
    def _hooks_outside(self, module: nn.Module, recording: Recording, results: deque[Any]) -> Iterator[None]:
        """Let hooks of the program compute as code between modules does, with tensors where they find tensors.

        The first ones have been called already, and have returned ``results``.
        """
        numbers = itertools.count()

        def outside(hook: Any, *, is_before: bool) -> Any:
            number = next(numbers)
            showing = partial(self._showing_read, module, is_before=is_before)

            def call(*args: Any, **kwargs: Any) -> Any:
                self._note_hook(number, (args, kwargs))
                if self.mode.escapes is not None:
                    self.mode.escapes.ignore((args, kwargs))
                before = self._run.num_logged()
                with recording.hook(number, (args, kwargs)) as found, self.mode.paused(), showing():
                    found.append(results.popleft() if results else hook(*args, **kwargs))
                self._run.num_by_hooks += self._run.num_logged() - before
                return found[0]

            call.__module__ = ""  # not one of ours
            return call

        hooks = [one for child in module.modules() for one in (child._forward_pre_hooks, child._forward_hooks)]
        before = [dict(one) for one in hooks]
        for one in hooks:
            is_before = one is module._forward_pre_hooks
            one.update({key: outside(hook, is_before=is_before) for key, hook in one.items() if not is_own(hook)})
        try:
            yield
        finally:
            for one, old in zip(hooks, before, strict=True):
                one.update({key: old.get(key, hook) for key, hook in one.items()})

    @contextmanager
    def _apart(self, module: nn.Module) -> Iterator[tuple[dict[Key, Any], list[SetAttribute], dict[Key, Any]]]:
        """Show a forward fakes in place of the module's tensors, and restore its changes afterwards.

        Yields:
            A dictionary for the fakes that it has left, by submodule, dictionary and name, a list for the attributes
            that it has set to objects, which may hold fakes, and a dictionary for those that it has set to numbers.
        """
        left: dict[Key, Any] = {}
        opaque: list[SetAttribute] = []
        numbers: dict[Key, Any] = {}
        submodules = {(name, "_modules"): child._modules for name, child in module.named_modules()}
        keys, spaces = zip(*{**attribute_spaces(module), **submodules}.items(), strict=True)
        lists = {id(value): (value, list(value)) for space in spaces for value in space.values() if type(value) is list}
        before = [dict(space) for space in spaces]
        fakes: dict[int, Tensor] = {}  # by `id` of the tensor
        for space in spaces:
            for name, value in space.items():
                if isinstance(value, Tensor) and not is_fake(value):
                    fakes.setdefault(id(value), empty_like(describe(value)))
                    space[name] = fakes[id(value)]
        versions = {id(fake): fake._version for fake in fakes.values()}
        objects = ObjectState(module)
        self._shared.changed = []
        try:
            yield left, opaque, numbers
            for now, was in lists.values():
                if len(now) != len(was) or any(mine is not given for mine, given in zip(now, was, strict=True)):
                    raise PipelineError(
                        "it changes a list that it keeps, which code on other stages would not see. Let it assign a new"
                        " list to the attribute (`self.losses = [*self.losses, loss]`), which is sent"
                    )
        finally:
            for now, was in lists.values():
                now[:] = was
            for number, (space, old) in enumerate(zip(spaces, before, strict=True)):
                for name in [*space, *(name for name in old if name not in space)]:
                    value, was = space.get(name, MISSING), old.get(name, MISSING)
                    stood = fakes.get(id(was))
                    is_changed = value is not was if stood is None else (
                        value is not stood or stood._version != versions[id(stood)]
                    )  # fmt: skip
                    self._has_changed_attributes |= is_changed
                    if is_changed and any(map(is_fake, tree_leaves(value))):
                        left[*keys[number], name] = value
                    elif is_changed and not all(isinstance(leaf, _PLAIN) for leaf in tree_leaves(value)):
                        opaque.append(((*keys[number], name), space, value))
                    if is_changed and isinstance(value, (*NUMBERS, type(None))):
                        numbers[*keys[number], name] = value
                    if isinstance(value, NUMBERS) and value != was and not keys[number][1]:
                        self._shared.changed.append((module.get_submodule(keys[number][0]), name, value))
                    assign(space, name, was)
            self._shared.changed += objects.put_back()

    def _fake_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        if id(module) not in self._parameters:
            with self.mode:
                self._parameters[id(module)] = {
                    name: nn.Parameter(torch.empty(_shape_of(param), dtype=param.dtype, device=param.device), False)
                    for name, param in module.named_parameters()
                }
        fakes = self._parameters[id(module)]
        for name, param in module.named_parameters():
            fakes[name].requires_grad_(param.requires_grad)
        return fakes


def is_raised_by_program(error: BaseException) -> bool:
    """Say whether a ``raise`` in code of the program, which has read no value, has made an error."""
    trace = error.__traceback__
    if isinstance(error, (PipelineError, *VALUES_NEEDED)) or "FakeTensor(" in str(error) or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    if str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] in LIBRARIES:
        return False
    raised = [one for one in dis.get_instructions(trace.tb_frame.f_code) if one.offset == trace.tb_lasti]
    is_raise = bool(raised) and raised[0].opname == "RAISE_VARARGS"
    return is_raise and (error.__context__ is None or is_raised_by_program(error.__context__))


def _cause(error: Exception) -> str:
    """Return the text of an error, with a remedy where a value was read."""
    if "NestedTensor" in str(error):
        return (
            "it makes a nested tensor, whose shape no other stage can be told. `nn.TransformerEncoder` does so for a"
            " padding mask where no gradients are computed: build it with `enable_nested_tensor=False`, or set the"
            " attribute of that name, as in `transformer.encoder.enable_nested_tensor = False`"
        )
    if not (isinstance(error, DataDependentOutputException) or "FakeTensor(" in str(error)):  # f"expert_{index}"
        return str(error)
    return (
        f"it reads the value of a tensor (`{error}`, as in `int(self.pointer)`, `x.item()`, `if x.any():`), which this"
        " stage does not have. Keep numbers that a forward reads in plain attributes (`self.pointer = 0`), compute with"
        " tensors (`torch.where`), or write `pipeline_step` and `pipeline_loss`, with which no stage passes over"
        " modules of others. If the block updates a metric of torchmetrics: let it keep the value in an attribute, and"
        " update the metric with it after the blocks"
    )


def _autocast_device(leaves: Sequence[Any]) -> str:
    return next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")


def _shape_of(param: nn.Parameter) -> torch.Size:
    """Return the shape that modules compute with; to the program a parameter of tensor parallelism has the whole's."""
    with torch._C.DisableTorchFunctionSubclass():
        return param.shape
