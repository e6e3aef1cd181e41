"""Run a user's step for one chunk of the model: modules of other stages are passed over, not computed.

Note [Passing over]
    Every stage runs the user's own code from its first line. A module of another stage in front of this chunk does not
    compute: it returns *fake* tensors (PyTorch's ``FakeTensor``), which have a shape and a dtype and no values. Tensors
    that the code derives from them are fake as well; masks, positions and rotary tables that it derives from the batch
    are real. At the first block of the chunk fake arguments are replaced by the tensors of the stage before. At the
    first block of the next chunk the run is broken off, and the arguments of that call are sent on. So the code between
    blocks, keyword arguments and values that all blocks share need no rules. A value that reaches a module of this
    chunk in another way, or the loss, is computed from sources, which are sent with the arguments (see ``sources.py``).
    A fake that does so all the same is an error: nothing is ever computed from it.

Note [Interception of calls]
    While a step runs the class of every module with a place in the split is a subclass that asks here first. Inside of
    such a module nothing is different.

Note [Programs that catch errors]
    A step may have a ``try`` around its blocks, or around a value that it reads. If it catches the end of a run, the
    next call of a module ends the run once more, by an exception that ``except Exception`` does not catch; what is in
    between has no part in the result. If it catches a refusal, the next call, or the end of the run, raises it again:
    every ``PipelineError`` that is made between the modules is noted. A loop that tries again whatever happens is given
    zeros after many times, so that it ends, and is refused then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_zero.errors import PipelineError, noting_pipeline_errors
from lightning_zero.parallel.module_state import ModuleState, fields_of, put_back, version_of, without_caches
from lightning_zero.parallel.pipeline.schedule.streams import RandomState
from lightning_zero.parallel.pipeline.stages.attributes import Written, attribute_spaces
from lightning_zero.parallel.pipeline.stages.sources import BEFORE, FOR_HOOKS, WHOLE, Origins, Source, is_fake
from lightning_zero.parallel.pipeline.stages.split import PlacedModule, Split, modules_around
from lightning_zero.parallel.pipeline.stages.subclasses import subclass_of
from lightning_zero.parallel.pipeline.tracing.containers import Contents
from lightning_zero.parallel.pipeline.tracing.conversions import conversions_watched
from lightning_zero.parallel.pipeline.tracing.fake_mode import VALUES_NEEDED
from lightning_zero.parallel.pipeline.tracing.fake_state import fake_state
from lightning_zero.parallel.pipeline.tracing.fakes import Fakes, is_raised_by_program
from lightning_zero.parallel.pipeline.tracing.loss_normalization import uncounting, unwatched
from lightning_zero.parallel.pipeline.tracing.operations import Operation, Operations
from lightning_zero.parallel.pipeline.tracing.outcomes import Attributes, Outcome
from lightning_zero.parallel.pipeline.tracing.own_gradients import OwnGradients, enclosing_function, users_of_parameters
from lightning_zero.parallel.pipeline.tracing.recomputation import Again, Checkpoints, NotedCall, NotedOutput, uncounted
from lightning_zero.parallel.pipeline.tracing.sent_numbers import ABSENT, NumberReads, encoded, is_sent
from lightning_zero.parallel.pipeline.tracing.traces import BrokenOff, CalledBehindEnd, Logging, Message, Needs, Trace
from lightning_zero.parallel.pipeline.tracing.value_reads import value_reads_refused
from lightning_zero.parallel.writable import writable
from lightning_zero.trees import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["ModuleInterception"]

_HOST = torch.device("cpu")
_MOST_TRIES = 100  # of a call that ends by an error


class ModuleInterception:
    """Runs steps of a module chunk by chunk.

    Args:
        module: The root.
        split: The cut of the module.
        on_call: Called when a step calls a module of the split.
        inside: Around a module of the split that computes.
        unnoticed: Context of forwards on fakes, which the engine ignores.
        device: Whose random numbers modules draw.
        logging: Told which module is called, if given.

    Attributes:
        noted: Names of modules with a place of which runs note the attributes that are changed behind their calls;
            None for all of them.
    """

    def __init__(
        self,
        module: nn.Module,
        split: Split,
        on_call: Callable[[], None],
        *,
        inside: Callable[[], AbstractContextManager[None]] = nullcontext,
        unnoticed: Callable[[], AbstractContextManager[None]] = nullcontext,
        device: torch.device = _HOST,
        logging: Logging | None = None,
    ) -> None:
        self._root = module
        self._around = list(modules_around(module, split))
        self._split = split
        self._on_call = on_call
        self._inside = inside
        self._device = device
        self._unnoticed = unnoticed
        self._random_state = partial(RandomState, device)
        self._places = {id(module.get_submodule(place.name)): place for place in split.places}
        self._modules = [module.get_submodule(place.name) for place in split.places]
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}
        self._watched_numbers = NumberReads()
        self._users = users_of_parameters(module, split)
        names = {key: place.name for key, place in self._places.items()}
        placed = [(child, place.chunk) for child, place in zip(self._modules, split.places, strict=True)]
        self._fakes = Fakes(
            names,
            _free_parameters(module, split),
            unnoticed,
            placed,
            num_logged=int if logging is None else logging.num_calls,
        )
        self._logging = logging
        self.noted: Collection[str] | None = ()
        self._trace: Trace | None = None

    # -- Running a step ------------------------------------------------------------------------------------------------

    def run(
        self,
        step: Callable[[], Any],
        chunk: int,
        *,
        expected: Sequence[Message],
        receive: Callable[[], Sequence[Tensor]],
        send: Callable[[Mapping[int | Source, Any]], None],
        wanted: Collection[Source] = (),
        outcomes: Mapping[tuple[str, int], Outcome] | None = None,
        late: set[Source] | None = None,
    ) -> tuple[bool, Any]:
        """Run a step for one chunk.

        Args:
            step: The user's code.
            chunk: The chunk that computes.
            expected: The messages from the chunk before.
            receive: Waits for it and returns it. Called at the chunk's first block, or at the first module that has
                returned a source, so that code before it does not wait.
            send: Called with the leaves of the arguments of the next chunk's first block, when it is called, and with
                sources.
            wanted: Sources that this chunk computes and later ones need.
            outcomes: Of calls of its modules, as later chunks know them; see ``needed``.
            late: Gets the numbers of other chunks that the step reads and this one is not sent, if they are looked for.

        Returns:
            Whether the step came to its end (the last chunk), and its result.

        Raises:
            PipelineError: The step cannot be run in chunks.
        """
        bounds = self._split.bounds
        trace = Trace(
            chunk, bounds[chunk], bounds[chunk + 1], expected=expected, receive=receive, send=send, wanted=wanted
        )
        trace.outcomes.update(outcomes or {})
        with nullcontext() if late is None else self._number_reads(trace, self._note_of_late(trace, late)):
            finished, result = self._run(step, trace)
        self._fakes.require_unwritten()
        if finished and (chunk < self._split.num_chunks - 1 or trace.reached < trace.start):
            missed = trace.start if trace.reached < trace.start else trace.stop
            raise PipelineError(
                f"The step ended before it called `{self._block_name(missed)}`, the first block of a pipeline stage."
                " Every block of the list must be called in every step: a step that has nothing to train on"
                " returns its loss times zero, not None before it runs the model."
            )
        if finished and any(is_fake(leaf) for leaf in tree_leaves(result)):
            raise PipelineError(
                trace.hidden
                or "The result of the step depends on a value of an earlier pipeline stage that did not come through"
                f" the blocks of `{self._split.blocks}`, and it could not be told before the step that it is needed."
                " If every batch uses another value (`hidden[step % 4]`), use all of them in every batch, multiplied by"
                " zero where they are not to count."
                f"{self._fakes.advice}"
            )
        return finished, result

    def _note_of_late(self, trace: Trace, late: set[Source]) -> Callable[[str, str, str], None]:
        """Return a function that notes, in a run that computes, reads of numbers which were not described."""

        def note(place: str, child: str, name: str) -> None:
            source = self._fakes.number_of(place, child, name)
            if source is not None and not trace.is_inside and not any(one.leaf == source for one in trace.expected):
                late.add(source)

        return note

    def needed(
        self, step: Callable[[], Any], chunk: int, *, on_start: Callable[[], None], guess: bool = False
    ) -> Needs:
        """Run a step for one chunk on fakes. Numbers that it reads of the chunk's own values are guessed.

        Args:
            step: The user's code.
            chunk: The chunk.
            on_start: Called when its first block is.
            guess: The value of flags that it reads.
        """
        bounds = self._split.bounds
        trace = Trace(chunk, bounds[chunk], bounds[chunk + 1], origins=Origins(), on_start=on_start)
        assert trace.origins is not None
        is_whole = False
        # A guess may lead to errors; the step shows the program's.
        with _ends_suppressed(), self._fakes.mode.guessing(guess), self._number_reads(trace, self._fakes.note_read):
            finished, result = self._run(step, trace)
            if finished:
                trace.origins.need(result)
            is_whole = True
        self._fakes.require_strong(trace.origins.results)
        return Needs(trace.origins.needed, trace.outcomes, self._fakes.mode.num_reads > 0, is_whole)

    def _number_reads(
        self, trace: Trace, note_read: Callable[[str, str, str], None], *, before: int | None = None
    ) -> AbstractContextManager[None]:
        """Watch which numbers in attributes of earlier chunks' modules code between the modules reads.

        Args:
            trace: The run.
            note_read: Called with the name of the module with a place, that of the submodule, and the attribute.
            before: The chunk that the others are earlier than; None: that of the run.
        """
        chunk = trace.chunk if before is None else before
        owners: dict[int, tuple[str, str]] = {}  # module with a place, and name in it, by `id`
        watched: list[nn.Module] = []
        for module, place in zip(self._modules, self._split.places, strict=True):
            for name, child in module.named_modules() if place.chunk < chunk else ():
                owners.setdefault(id(child), (place.name, name))
                watched.append(child)

        def note(module: nn.Module, name: str, value: Any) -> None:
            if self._fakes.mode.is_dispatching or id(module) not in owners:
                return
            # Inside of modules, a hook of the program or a module of this chunk reads it.
            reader = self._fakes.reader if trace.is_inside else ""
            is_here = not reader or self._split.chunk_of(reader) == chunk
            is_object = trace.is_inside and fields_of(value) is not None  # its changes behind the blocks are told
            if is_here and not is_object and (value is None or value is ABSENT or is_sent(value) or _is_empty(value)):
                note_read(*owners[id(module)], name)

        return self._watched_numbers.watched(list({id(one): one for one in watched}.values()), note)

    def arguments(self, step: Callable[[], Any], chunk: int, available: Iterable[Source]) -> tuple[list[Any], Origins]:
        """Return the leaves of the arguments of a chunk's first block, fake where other chunks compute them.

        Args:
            step: The user's code.
            chunk: The chunk.
            available: Sources that it has.

        Returns:
            The leaves, and which sources that the chunk does not have they are computed from.
        """
        start = self._split.bounds[chunk]
        sources = tuple(available)
        origins = Origins(sources)
        finished, leaves = self._run(step, Trace(chunk, start, start, origins=origins, available=sources))
        if finished:
            raise PipelineError(
                f"The step did not call `{self._block_name(start)}`, the first block of pipeline chunk {chunk}."
                f" A pipeline needs every block of `{self._split.blocks}` to be called in every step."
            )
        return leaves, origins

    def is_sent_number(self, value: Any) -> bool:
        """Say whether a value that the last run has found is a number of a module of another chunk, which is sent."""
        return not isinstance(value, Tensor) and value is not None and self._fakes.is_given(value)

    def recorded(self, step: Callable[[], Any], chunk: int, *, is_whole: bool) -> list[Operation] | None:
        """Run a step on fakes up to the end of a chunk, and record its operations; see ``whole_run.py``.

        Args:
            step: The user's code.
            chunk: The chunk, whose modules run their forwards.
            is_whole: Whether modules of earlier chunks run their forwards too, and are not passed over.

        Returns:
            The operations between the modules and in modules of the chunk; None where the step does not run on fakes.
        """
        bounds = self._split.bounds
        chunks = range(chunk + 1) if is_whole else range(chunk, chunk + 1)
        placed = zip(self._modules, self._split.places, strict=True)
        modules = [module for module, place in placed if place.chunk in chunks]
        trace = Trace(chunks[0], bounds[chunks[0]], bounds[chunk + 1], origins=Origins())
        named = list(self._root.named_parameters(remove_duplicate=False))  # which objects of the program may hold
        with _ends_suppressed(), put_back(self._root.modules()), fake_state(modules, self._fakes.mode):
            trace.operations = operations = Operations(self._root, chunk, named)

            def run() -> Any:
                self._fakes.mode.note_hook = operations.note_hook
                operations.start()
                result = step()
                operations.stop()
                return result

            try:
                with operations, self._fakes.mode.guessing(False, of_all=True):
                    finished, result = self._run(run, trace)
                self._fakes.require_unwritten()
                if trace.refusal is not None:  # which the run that computes raises
                    return None
                if finished:
                    operations.note_result(result)
                operations.note_state(self._around)
                return operations.found
            finally:
                operations.end()
                self.lost_writes.clear()
        return None

    def read_in_survey(self, step: Callable[[], Any], chunk: int) -> set[Source]:
        """Return the numbers of earlier chunks that a step reads in a survey, whose tensors are zeros with values."""
        found: set[Source] = set()
        trace = Trace(-1, 0, 0, computes=False)
        with _ends_suppressed(), self._number_reads(trace, self._note_of_late(trace, found), before=chunk):
            self._run(step, trace)
        return found

    @property
    def lost_writes(self) -> list[Tensor]:
        """The tensors with values into which fakes were written, which does nothing."""
        return self._fakes.mode.lost

    def showing_again(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Return a function that makes a context with the attributes that the last run has shown, for its backward."""
        return self._fakes.attributes.showing_again()

    def take_written(self) -> Written:
        """Return the attributes of modules of other chunks that were changed behind their calls since the last time."""
        return self._fakes.attributes.take_written()

    def survey(self, step: Callable[[], Any]) -> Any:
        """Run a step in which no module of the split computes: they return zeros without memory."""
        return self._run(step, Trace(-1, 0, 0, computes=False))

    def _run(self, step: Callable[[], Any], trace: Trace) -> tuple[bool, Any]:
        assert self._trace is None
        self._trace = trace
        trace.own = OwnGradients(trace.chunk, self._users)
        stand_in = None if trace.computes and trace.origins is None else self._fakes.gradients
        mode = self._fakes.mode
        try:
            sources = [*trace.available, *(one.leaf for one in trace.expected if isinstance(one.leaf, Source))]
            read = [source for source in sources if source.leaf in (WHOLE, BEFORE)]
            self._fakes.begin(origins=trace.origins, fetch=partial(self._fetched, trace), read=read)
            with (
                noting_pipeline_errors(partial(self._note_refusal, trace)),
                value_reads_refused(
                    mode, lambda: not (trace.is_inside or mode.is_dispatching), lambda: self._fakes.advice
                ),
                self._keeping_buffers(),
                trace.gradients.watched(lambda: not trace.is_computing),
                trace.own.watched(lambda: not trace.is_inside, stand_in),
                self._checkpoints(trace),
            ):
                return self._run_installed(step, trace)
        except VALUES_NEEDED as error:
            raise PipelineError(
                "The step needs a value that an earlier pipeline stage computes, outside of the blocks of"
                f" `{self._split.blocks}`: {_words_of_read(error)}. The line is in the traceback. Move it into a block,"
                " leave a check out (`assert torch.isfinite(hidden).all()`; `Trainer(detect_anomaly=True)` finds"
                " the place), or write"
                f" `pipeline_step` and `pipeline_loss`.{self._fakes.advice}"
            ) from error
        except RuntimeError as error:
            if "NestedTensor" not in str(error) or isinstance(error, PipelineError) or trace.has_failed_inside:
                raise
            raise PipelineError(
                f"The step makes a nested tensor for the blocks of `{self._split.blocks}`, which has no shape that"
                " another pipeline stage could be told. `nn.TransformerEncoder` does so for a padding mask where no"
                " gradients are computed: build it with `enable_nested_tensor=False`."
            ) from error
        finally:
            self._trace = None
            self._fakes.end()

    def _run_installed(self, step: Callable[[], Any], trace: Trace) -> tuple[bool, Any]:
        result = None
        try:
            with self._installed():
                result = step()
        except (Exception, CalledBehindEnd):
            if trace.end is None and not trace.has_given_up:
                raise
        if trace.has_given_up:
            self._require_unrefused(trace)
            raise PipelineError(
                "The step calls a module again and again, whatever error the call ends by (`except:`, `except"
                " BaseException:`). A pipeline stage ends its run of the step by an exception at the first block of the"
                " next stage. Catch `Exception`, or limit the number of tries."
            )
        if trace.origins is not None:
            trace.origins.need(self._fakes.attributes.assigned)
        if trace.end is not None:
            trace.end.with_traceback(None)  # whose frames have the tensors of the step
            return False, trace.end.leaves
        self._require_unrefused(trace)
        return True, result

    def _note_refusal(self, trace: Trace, error: PipelineError) -> None:
        """Note an error of code between the modules; those of operations are noted when they end."""
        is_between = not (trace.is_inside or self._fakes.mode.is_dispatching or trace.end is not None)
        counts = trace.origins is None or trace.operations is not None
        if is_between and trace.computes and counts and trace.refusal is None:
            trace.refusal = error

    def _require_unrefused(self, trace: Trace) -> None:
        """Raise the refusal that the program has caught, in a run that computes."""
        if trace.refusal is not None:
            raise trace.refusal
        if trace.computes and trace.origins is None and trace.again is None:
            self._fakes.require_unrefused()

    @contextmanager
    def _checkpoints(self, trace: Trace) -> Iterator[None]:
        trace.checkpoints = Checkpoints(self._run_again, self._fakes.attributes.showing)
        with trace.checkpoints.watched(lambda: not trace.is_inside):
            yield

    def _run_again(self, again: Again, function: Callable[[], Any]) -> Any:
        """Run a checkpointed function of the program in a backward."""
        before, self._trace = self._trace, Trace(-1, 0, 0, again=again)
        random = self._random_state()
        try:
            with self._checkpoints(self._trace), self._installed() if before is None else nullcontext():
                return function()
        finally:
            self._trace = before
            random.restore()

    @contextmanager
    def _installed(self) -> Iterator[None]:
        before = [type(module) for module in self._modules]
        try:
            for module in self._modules:
                module.__class__ = self._intercepting(type(module))
            with without_caches(self._root), conversions_watched():
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
                        " after it do not have the value. Make it a buffer of a block, or a plain attribute."
                    )

    def _intercepting(self, cls: type[nn.Module]) -> type[nn.Module]:
        if cls not in self._classes:

            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return self._call(module, cls, args, kwargs)

            self._classes[cls] = subclass_of(cls, {"__call__": call})
        return self._classes[cls]

    # -- A call of a module that has a place ---------------------------------------------------------------------------

    def _call(self, module: nn.Module, cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trace = self._trace
        if trace is None or trace.is_inside or id(module) not in self._places:  # a copy that the step has made
            return cls.__call__(module, *args, **kwargs)
        if trace.raised[id(module)] >= _MOST_TRIES:
            return self._given_up(module, trace, args=args, kwargs=kwargs)
        reached = trace.reached
        try:
            if trace.end is not None:
                raise CalledBehindEnd
            self._require_unrefused(trace)
            with nullcontext() if self._logging is None else self._logging.inside(self._places[id(module)].name):
                return self._called(module, cls, trace=trace, args=args, kwargs=kwargs)
        except (PipelineError, CalledBehindEnd, *VALUES_NEEDED) as error:
            trace.raised[id(module)] += 1
            if isinstance(error, PipelineError):
                trace.refusal = error
            raise
        except Exception:
            trace.reached = reached  # the program may catch an error of its own, and call the module again
            raise

    def _given_up(self, module: nn.Module, trace: Trace, *, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return zeros to a loop that catches every error, so that it ends; the step is refused."""
        trace.has_given_up = True
        trace.is_inside = True
        try:
            return self._fakes.zeros(module, args, kwargs)
        except PipelineError:
            return args[0] if args else None
        finally:
            trace.is_inside = False

    def _called(
        self, module: nn.Module, cls: type[nn.Module], *, trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a module that has a place from code around the modules."""
        place = self._places[id(module)]
        if trace.checkpoints is not None:
            trace.checkpoints.require_plain(place.name)
        if place.block is not None and (function := enclosing_function()):
            raise PipelineError(
                f"`{place.name}` is called inside of the forward of `{function}`, a `torch.autograd.Function`, whose"
                " backward cannot reach modules of other pipeline stages. Call the blocks outside of it; to compute"
                " forwards again in the backward use `torch.utils.checkpoint` or"
                " `ZeroStrategy(activation_checkpointing=...)`."
            )
        if place.block is not None and (_is_transforming() or _has_tangent(args, kwargs)):
            raise self._of_transform(place)
        if trace.again is not None:
            return self._call_again(module, cls, trace=trace, args=args, kwargs=kwargs)
        with unwatched(), uncounted() if trace.notes_calls else nullcontext():
            self._on_call()
            behind = self._random_state() if trace.notes_calls else None
            if trace.operations is not None:
                trace.operations.note_call(place.name, (args, kwargs))
            if not self._computes(trace, place, args, kwargs):
                return self._pass_over(module, trace, place=place, args=args, kwargs=kwargs, behind=behind)
            if trace.operations is not None:
                return self._execute(module, trace, place=place, args=args, kwargs=kwargs)
            if trace.origins is not None:
                return self._stand_in(module, trace, place=place, args=args, kwargs=kwargs)
            given = args, kwargs
            args, kwargs = self._with_received(trace, place, args, kwargs)
            trace.hidden = trace.hidden or _hidden(place.name, (args, kwargs))
            contents = Contents((args, kwargs)) if args is not given[0] else None
        trace.is_inside = trace.is_computing = True
        try:
            with self._inside(), nullcontext() if place.block is None else unwatched():
                if behind is not None:
                    random = self._random_state()
                    trace.note(
                        NotedCall.computed(place.name, given, arguments=(args, kwargs), random=random, behind=behind)
                    )
                output = self._compared(module, cls, trace=trace, args=args, kwargs=kwargs)
        except RuntimeError:
            trace.has_failed_inside = True
            raise
        finally:
            trace.is_inside = trace.is_computing = False
        if contents is not None:
            contents.pass_on(given, {id(one): fake for fake, _, one in trace.swaps.values()})
        self._fakes.require_values(place.name, output)
        trace.gradients.mark_own(output)
        trace.own.note_own(output)
        return output

    def _call_again(
        self, module: nn.Module, cls: type[nn.Module], *, trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Repeat a call in a recomputation."""
        assert trace.again is not None
        noted = trace.again.next()
        trace.note(noted)
        if noted.output is not None:
            noted.behind.restore()
            return noted.output.again((args, kwargs))
        assert noted.random is not None
        args, kwargs = noted.with_received((args, kwargs))
        noted.random.restore()
        trace.is_inside = True
        try:
            return cls.__call__(module, *args, **kwargs)
        finally:
            trace.is_inside = False
            noted.behind.restore()

    def _compared(
        self, module: nn.Module, cls: type[nn.Module], *, trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a module, and compare with its description if later chunks pass over it; see ``outcomes.py``."""
        name = self._places[id(module)].name
        outcome = trace.outcomes.get((name, trace.calls[name]))
        if outcome is None or trace.chunk == self._split.num_chunks - 1:
            return self._compute(module, cls, trace=trace, args=args, kwargs=kwargs)
        attributes = Attributes(module)
        output = self._compute(module, cls, trace=trace, args=args, kwargs=kwargs)
        outcome.require_same(name, output, attributes)
        trace.calls[name] += 1
        return output

    def _compute(
        self, module: nn.Module, cls: type[nn.Module], *, trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a module, and keep the sources that later chunks want of it."""
        name = self._places[id(module)].name
        mine = [one for one in trace.wanted if one.module == name or one.module.startswith(f"{name}.")]
        if not mine:
            return cls.__call__(module, *args, **kwargs)
        seen = [one for one in mine if one.module != name or one.left == FOR_HOOKS]
        for source in mine:
            if source.leaf == BEFORE and source.call == trace.times[name]:
                trace.computed[source] = self._encoded_attribute(module, source)
        with self._watching(trace, seen, name):
            output = cls.__call__(module, *args, **kwargs)
        for source in mine:
            if source not in seen and source.call == trace.times[name]:
                left = source.left
                if source.leaf < 0:
                    if source.leaf == WHOLE:
                        trace.computed[source] = self._encoded_attribute(module, source)
                    continue
                space = output if left is None else attribute_spaces(module).get(left[:2], {}).get(left[2])
                leaves = tree_leaves(space)
                if not source.is_number:
                    _keep(trace, source, leaves)
                elif source.leaf < len(leaves):
                    trace.computed[source] = encoded(leaves[source.leaf], self._device)
        trace.times[name] += 1
        return output

    def _encoded_attribute(self, module: nn.Module, source: Source) -> Tensor:
        assert source.left is not None
        child, _, name = source.left
        return encoded(getattr(module.get_submodule(child), name, ABSENT), self._device)

    @contextmanager
    def _watching(self, trace: Trace, sources: Sequence[Source], outermost: str) -> Iterator[None]:
        """Keep the tensors that a module, and modules inside of it, give to their hooks."""
        names = {one.module for one in sources}

        def watch(name: str, child: nn.Module, args: Any, output: Any) -> None:
            for source in sources:
                if source.module == name and source.call == trace.times[name]:
                    _keep(trace, source, tree_leaves(output))
            trace.times[name] += name != outermost

        handles = [
            self._root.get_submodule(name).register_forward_hook(partial(watch, name), prepend=True) for name in names
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _stand_in(
        self, module: nn.Module, trace: Trace, *, place: PlacedModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return fakes for the outputs of a module of this chunk, and note the sources that it needs."""
        assert trace.origins is not None
        leaves = tree_leaves((args, kwargs))
        if place.block == trace.start and not trace.swaps:
            trace.on_start()
            trace.swaps = {id(leaf): (leaf, version_of(leaf), leaf) for leaf in leaves if is_fake(leaf)}
        trace.origins.need([leaf for leaf in leaves if id(leaf) not in trace.swaps])
        trace.origins.need([value for space in attribute_spaces(module).values() for value in space.values()])
        num_shown = len(self._fakes.shown)
        trace.is_inside = True
        try:
            output, outcome = self._fakes.described(module, args, kwargs)
        finally:
            trace.is_inside = False
        if outcome is not None:
            trace.outcomes[place.name, trace.calls[place.name]] = outcome
        trace.calls[place.name] += 1
        known = set(map(id, leaves))
        filled = [leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) not in known]
        trace.origins.mark_own((output, self._fakes.shown[num_shown:], filled))
        return output

    def _execute(
        self, module: nn.Module, trace: Trace, *, place: PlacedModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward of a module on fakes, in a run whose operations are recorded."""
        assert trace.operations is not None
        trace.is_inside = True
        try:
            with trace.operations.inside(place.name, is_recorded=place.chunk == trace.operations.chunk):
                output = self._fakes.executed(module, args, kwargs)
        finally:
            trace.is_inside = False
        trace.operations.note_outcome(place.name, module, output)
        return output

    def _fetched(self, trace: Trace, source: Source) -> Tensor | None:
        """Return a source that this chunk has been sent, else None."""
        if not any(message.leaf == source for message in trace.expected):
            return None
        received = self._received(trace)[source]
        if source.is_number:
            return received
        tensor = received.clone()  # the program may write into it
        if trace.notes_calls:
            trace.copies[id(tensor)] = tensor, received
        trace.gradients.mark(tensor, source)
        return tensor

    def _received(self, trace: Trace) -> dict[int | Source, Tensor]:
        if trace.received is None:
            tensors = trace.receive()
            trace.received = {message.leaf: one for message, one in zip(trace.expected, tensors, strict=True)}
        return trace.received

    def _computes(self, trace: Trace, place: PlacedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not trace.computes:
            return False
        if place.block is None:
            return self._computes_outside(trace, place)
        return self._computes_block(trace, place, block=place.block, args=args, kwargs=kwargs)

    def _pass_over(
        self,
        module: nn.Module,
        trace: Trace,
        *,
        place: PlacedModule,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        behind: RandomState | None,
    ) -> Any:
        if trace.computes and trace.origins is None and (self.noted is None or place.name in self.noted):
            self._fakes.attributes.note_reached(module)
        if trace.computes and (_is_transforming() or _has_tangent(args, kwargs)):
            raise self._of_transform(place)
        trace.is_inside = True
        num_shown = len(self._fakes.shown)
        operations = trace.operations
        unrecorded = nullcontext() if operations is None else operations.inside(place.name, is_recorded=False)
        try:
            with unrecorded:
                if trace.computes:
                    output = self._fakes.outputs(module, args, kwargs)
                else:
                    output = self._surveyed(module, place, args, kwargs)
        finally:
            trace.is_inside = False
        if operations is not None:
            operations.note_outcome(place.name, module, output)
        trace.own.note_given((args, kwargs))
        trace.own.note_received((output, self._fakes.shown[num_shown:]))
        if behind is not None:
            if len(self._fakes.shown) > num_shown:
                raise PipelineError(
                    f"`{place.name}` of another pipeline stage leaves tensors in its attributes, and is called inside"
                    " of `torch.utils.checkpoint`: the backward, which runs the code again, does not have them. Return"
                    " them, or use `ZeroStrategy(activation_checkpointing=...)`."
                )
            received = {key: tensor for key, (_, tensor) in trace.copies.items()}
            trace.note(NotedCall(place.name, behind, output=NotedOutput.of(output, (args, kwargs), received)))
            trace.copies.clear()
        return output

    def _surveyed(self, module: nn.Module, place: PlacedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return zeros for the outputs of a module in a survey, which is broken off at a loss inside of it."""
        with uncounting():
            output = self._fakes.zeros(module, args, kwargs)
        if place.block is None and isinstance(output, Tensor) and output.ndim == 0:
            # A criterion with parameters: its loss is seen by the function mode of the survey.
            state = ModuleState(module.modules())  # it takes zeros for hidden states
            with (
                suppress(RuntimeError, TypeError, ValueError),
                put_back(module.modules()),
                state.shown(),
                self._unnoticed(),
            ):
                module.forward(*args, **kwargs)
        return output

    def _computes_outside(self, trace: Trace, place: PlacedModule) -> bool:
        is_before = trace.reached < trace.start
        if place.chunk == 0:
            if not is_before and trace.chunk > 0:
                if place.name in trace.seen:
                    self._refuse_second_call(place)
                self._refuse_place(place, "after the first block of a later stage", "first", "last")
            trace.seen.add(place.name)
            return trace.chunk == 0 and trace.stop > 0
        if is_before and trace.passed >= 0:
            raise PipelineError(
                f"`{place.name}` is called between `{self._block_name(trace.passed)}` and"
                f" `{self._block_name(trace.start)}`, the first block of a pipeline stage. A module that is no block of"
                f" `{self._split.blocks}` and is used after the first one lies on the last stage, which has no values"
                " there. Keep the hidden states and call the module after the last block (`heads` of deep supervision),"
                " or make it a part of the block that it follows (adapters). If blocks are skipped: a pipeline needs"
                " every block to be called in every step, in order."
            )
        if is_before:
            self._refuse_place(place, "before the blocks", "last", "first")
        return True

    def _computes_block(
        self, trace: Trace, place: PlacedModule, *, block: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        if block == trace.stop:
            end = BrokenOff(args, kwargs)
            if trace.send is not None:
                found: dict[int | Source, Any] = dict(trace.received or {})
                found.update(trace.computed.items())
                found.update(enumerate(end.leaves))
                self._fakes.require_unwritten()
                trace.send(found)
            if trace.operations is not None:
                trace.operations.stop()
            trace.end = end
            raise end
        if block < trace.start and trace.reached < 0:
            trace.passed = block
            return False
        if block <= trace.reached or block > trace.stop or (trace.reached < trace.start < block):
            raise PipelineError(
                f"`{place.name}` is called out of turn (the last block was {trace.reached}). A pipeline needs the"
                f" blocks of `{self._split.blocks}` to be called once and in order."
            )
        trace.reached = block
        return True

    def _with_received(
        self, trace: Trace, place: PlacedModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves, spec = tree_flatten((args, kwargs))
        if trace.expected and place.block == trace.start and not trace.swaps:
            for position, tensor in self._received(trace).items():
                if isinstance(position, int):
                    arrived = writable(tensor)
                    fake = leaves[position]
                    trace.own.note_given(fake)
                    trace.own.note_received(arrived)
                    trace.swaps[id(fake)] = (fake, version_of(fake), arrived)
        given, leaves = leaves, [self._swapped(trace, place, leaf) for leaf in leaves]
        if any(is_fake(leaf) for leaf in leaves):
            raise PipelineError(
                trace.hidden
                or f"`{place.name}` is given a value that an earlier pipeline stage computes, but not as an argument of"
                f" `{self._block_name(trace.start)}`, and it could not be told before the step that it is needed. Pass"
                " the value to every block, cut the list elsewhere (`Pipeline(partition=[...])`), or write"
                f" `pipeline_step` and `pipeline_loss`.{self._fakes.advice}"
            )
        if all(mine is leaf for mine, leaf in zip(given, leaves, strict=True)):
            return args, kwargs  # a module may fill lists and dictionaries
        args, kwargs = tree_unflatten(leaves, spec)
        return args, kwargs

    def _swapped(self, trace: Trace, place: PlacedModule, leaf: Any) -> Any:
        """Return the received tensor for a fake argument, and other arguments as they are."""
        if id(leaf) not in trace.swaps:
            return leaf
        fake, version, received = trace.swaps[id(leaf)]
        if version_of(fake) != version:
            raise PipelineError(
                f"The step writes into an argument of `{self._block_name(trace.start)}`, which an earlier pipeline"
                f" stage computes, and gives it to `{place.name}` as well, which would not see the write. Compute a"
                " new tensor."
            )
        return received

    @staticmethod
    def _of_transform(place: PlacedModule) -> PipelineError:
        return PipelineError(
            f"`{place.name}` is called inside of a transform (`torch.func`: `vmap`, `jvp`, `grad`; forward-mode"
            " differentiation), whose tensors a pipeline stage cannot send to the next one. Apply the transform inside"
            " of the blocks, or train without `pipeline`."
        )

    def _refuse_second_call(self, place: PlacedModule) -> NoReturn:
        raise PipelineError(
            f"`{place.name}` is called before the blocks of `{self._split.blocks}`, and again after them. If the"
            " step runs the model twice (a second forward, `generate`): stages run one forward in a step, so join the"
            " batches of both, and use a Trainer without `pipeline` for `generate`. If both sides use the module, give"
            " both one of their own."
        )

    def _refuse_place(self, place: PlacedModule, where: str, side: str, other: str) -> NoReturn:
        raise PipelineError(
            f"`{place.name}` is called {where}, but lies {'before' if side == 'first' else 'after'} the blocks"
            f" of `{self._split.blocks}` by the source of `forward` or in the order of registration. Name it:"
            f" `Pipeline({other}=[{place.name!r}])`, or, if both sides use it, give both a module of their own. If the"
            " blocks of another list are to be cut, name that: `Pipeline(module=...)`."
        )

    def _block_name(self, block: int) -> str:
        return next((place.name for place in self._split.places if place.block == block), f"block {block}")


@contextmanager
def _ends_suppressed() -> Iterator[None]:
    """Suppress errors of a run that computes nothing, and the end of the process where the program itself asks for it.

    A flag that is guessed may lead to ``sys.exit``. A signal of the user ends the process as ever.
    """
    try:
        yield
    except Exception:
        pass
    except (SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and not is_raised_by_program(error):
            raise


def _is_empty(value: Any) -> bool:
    """Say whether a value is a container that may get numbers."""
    return isinstance(value, (list, tuple, dict, set, deque)) and not value


def _words_of_read(error: Exception) -> str:
    """Return the operation that reads a value, as the program writes it where that is known."""
    if "_local_scalar_dense" in str(error) or "_is_any_true" in str(error):
        return f"it reads a number (`{error}`), as `.item()`, `float(...)`, `if tensor:` and `assert tensor` do"
    return str(error)


def _is_transforming() -> bool:
    return torch._C._functorch.maybe_current_level() is not None


def _has_tangent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether an argument has a tangent of forward-mode differentiation."""
    if forward_ad._current_level < 0:
        return False
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return any(
        forward_ad.unpack_dual(one).tangent is not None  # type: ignore[no-untyped-call]
        for one in tensors
    )


def _hidden(name: str, arguments: Any) -> str:
    """Return advice on an argument that hides tensors of another stage, which nobody sends; else an empty text."""
    for leaf in tree_leaves(arguments):
        hidden = [] if isinstance(leaf, (Tensor, nn.Module)) else getattr(leaf, "__dict__", {}).values()
        if any(map(is_fake, hidden)):
            cls = type(leaf).__name__
            return (
                f"`{name}` is given a `{cls}` with tensors of an earlier pipeline stage. Only tensors in tuples, lists,"
                " dictionaries, named tuples and registered classes are sent. If it is a dataclass, call"
                f" `torch.export.register_dataclass({cls})` once, or give the block its tensors."
            )
    return ""


def _keep(trace: Trace, source: Source, leaves: Sequence[Any]) -> None:
    """Keep a copy of a source: the program may write into a module's outputs."""
    if source.leaf < len(leaves) and isinstance(leaves[source.leaf], Tensor):
        trace.computed[source] = leaves[source.leaf].clone()


def _free_parameters(module: nn.Module, split: Split) -> list[nn.Parameter]:
    """Return the parameters that lie in no module of the split."""
    inside = {id(param) for place in split.places for param in module.get_submodule(place.name).parameters()}
    return [param for param in module.parameters() if id(param) not in inside]
