"""Run the user's steps in pipeline stages: the plan's actions, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

import torch
from torch import nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.mesh import Mesh
from lightning_zero.comm.p2p import P2P
from lightning_zero.config import Pipeline
from lightning_zero.errors import PipelineError
from lightning_zero.microbatch import Microbatch
from lightning_zero.parallel.module_state import AttributeState, HookState, ModuleState, put_back
from lightning_zero.parallel.pipeline.mail import Letter, Mail
from lightning_zero.parallel.pipeline.schedule.plan import Action, compute_order, evaluation_order, simulate
from lightning_zero.parallel.pipeline.schedule.streams import RandomStreams
from lightning_zero.parallel.pipeline.schedule.weight_gradients import WeightGradients
from lightning_zero.parallel.pipeline.stages.attributes import Written
from lightning_zero.parallel.pipeline.stages.backward_attributes import BackwardAttributes
from lightning_zero.parallel.pipeline.stages.generators import Draws, GeneratorState, generators_of
from lightning_zero.parallel.pipeline.stages.parameter_hooks import ParameterHooks
from lightning_zero.parallel.pipeline.stages.placed_attributes import PlacedAttributes
from lightning_zero.parallel.pipeline.stages.sources import Source, is_fake
from lightning_zero.parallel.pipeline.stages.split import Split, modules_around
from lightning_zero.parallel.pipeline.stages.state_around import StateAround
from lightning_zero.parallel.pipeline.stages.written_tensors import Held, unwritten
from lightning_zero.parallel.pipeline.tracing.traces import Logging, Message

__all__ = ["MOST_KINDS", "PipelineRunner", "PipelineStage", "Route", "Stepper", "Timing"]

MOST_KINDS = 256  # of micro-batches that are known at a time
_State = ModuleState | AttributeState | HookState | GeneratorState
Step = TypeVar("Step", contravariant=True)
T = TypeVar("T")


class Stepper(Protocol):
    """The parts of the engine that a pipeline uses; it holds this stage's parameters."""

    @property
    def communicator(self) -> Communicator:
        """Collectives of the ranks that hold the same stage."""
        ...

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Run code that may use any parameter of this stage."""
        ...

    def part(self, name: str) -> AbstractContextManager[None]:
        """Run scopes and backwards of a part of this stage, which has an order of collectives of its own."""
        ...

    def microbatch(self, microbatch: Microbatch) -> AbstractContextManager[None]:
        """Run a micro-batch; the last one reduces."""
        ...

    def backward_scope(self, *, shows_gradients: bool) -> AbstractContextManager[None]:
        """Run a backward, in which code of the program may use gradients or none runs."""
        ...

    def has_hooks_of_program(self, param: nn.Parameter) -> bool:
        """Say whether the program has hooks on a parameter's gradient."""
        ...

    def ignore_forwards(self) -> AbstractContextManager[None]:
        """Ignore forwards of units: they run on fake tensors."""
        ...

    def num_writes(self) -> dict[str, int]:
        """Return how often the program has written each parameter, by name."""
        ...


class CallLog(Logging, Protocol):
    """The calls of ``self.log`` in a step, some of values that other stages have."""

    def elsewhere(self) -> AbstractContextManager[None]:
        """Note calls whose values another stage has."""
        ...

    def backward(self, chunk: int, index: int) -> AbstractContextManager[None]:
        """Note calls in the backward of a micro-batch."""
        ...


@dataclass(frozen=True)
class PipelineStage:
    """This rank's part of a model, and who is asked about it.

    Attributes:
        module: The root; parameters of other stages have no values.
        split: The cut of the module.
        mesh: The ranks.
        device: Device of this rank.
        engine: Holds the parameters of this stage.
        streams: Random numbers of the chunks.
        draws: Draws of code around the blocks from generators of the program.
        placed: Attributes of modules in chunks that code around the blocks may change.
        attributes: Those that forwards change, for the backwards of their micro-batches.
        logging: Notes what a step logs.
    """

    module: nn.Module
    split: Split
    mesh: Mesh
    device: torch.device
    engine: Stepper
    streams: RandomStreams
    draws: Draws
    placed: PlacedAttributes
    attributes: BackwardAttributes
    logging: CallLog

    def apart(self, run: Callable[[], T], modules: Iterable[nn.Module]) -> T:
        """Run something that leaves no trace in the generators, and in the state of modules."""
        found = list(modules)
        generators = GeneratorState(generators_of(found).values())
        with (
            self.placed.put_back(),
            put_back(found),
            ModuleState(found).shown(),
            HookState(self.module).shown(),
            generators.shown(),
        ):
            result: T = self.streams.apart(run)
        return result

    def held(self, put_back: Iterable[nn.Module], lost: list[torch.Tensor] | None = None) -> Held:
        """Return the tensors that ``apart`` does not put back.

        Args:
            put_back: The modules whose state it puts back.
            lost: See ``Held``.
        """
        without = set(map(id, put_back))
        buffers = [
            (f"{name}.{key}", buffer)
            for name, child in self.module.named_modules()
            if id(child) not in without
            for key, buffer in child._buffers.items()
            if buffer is not None
        ]
        return Held(list(self.module.named_parameters()), buffers, self.engine.num_writes, [] if lost is None else lost)

    def any_copy(self, flag: bool, what: str) -> bool:
        """Say whether a flag is set on some rank of this stage. Collective: all of them."""
        return self.engine.communicator.any_is(flag, what)


class Route(Protocol[Step]):
    """How a step gets from chunk to chunk."""

    def is_new(self, kind: Hashable) -> bool:
        """Say whether a kind of micro-batch is new to this rank."""
        ...

    def forget(self, kinds: Collection[Hashable]) -> None:
        """Forget all kinds but some, if there are very many."""
        ...

    def describe(self, step: Step, index: int, kind: Hashable) -> None:
        """Run a micro-batch to describe the messages between chunks in those of its kind. Collective: all ranks."""
        ...

    def messages(self, kinds: Sequence[Hashable]) -> list[dict[int, tuple[Message, ...]]]:
        """Return the messages into every chunk this rank sends to or receives from, by micro-batch.

        Args:
            kinds: Of the micro-batches of the step that follows; all are described.
        """
        ...

    def survey(self, step: Step, index: int) -> None:
        """Run a micro-batch's code without the model, on the last stage. Collective: all ranks of this stage."""
        ...

    def showing(self, chunk: int, index: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context in which modules of other chunks have the attributes that the forward has found in them.

        Args:
            chunk: The chunk.
            index: The micro-batch.
            is_last: No backward of the micro-batch in this chunk follows.
        """
        ...

    def note_written(self, places: Collection[str] | None) -> None:
        """Note in the step that follows which attributes of other chunks' modules change behind their calls.

        Args:
            places: Names of these modules; None for all.
        """
        ...

    def take_written(self) -> Written | None:
        """Return these attributes; None if all changes count."""
        ...

    def end_batch(self) -> None:
        """Forget the micro-batches that have run."""
        ...

    @property
    def modules_in_survey(self) -> Iterable[nn.Module]:
        """The modules whose state a survey may change."""
        ...

    def run(
        self,
        step: Step,
        index: int,
        *,
        chunk: int,
        expected: Sequence[Message],
        receive: Callable[[], Sequence[torch.Tensor]],
        send: Callable[[Mapping[int | Source, Any]], None],
    ) -> tuple[bool, Any]:
        """Run a micro-batch through a chunk.

        Args:
            step: The step.
            index: The micro-batch.
            chunk: The chunk.
            expected: The messages from the chunk before.
            receive: Waits for it and returns it; called once, at the chunk's first block.
            send: Called with each tensor for the next chunk, by leaf of its message, as soon as it is there.

        Returns:
            Whether the step came to its end, and its result.
        """
        ...


@dataclass
class Timing:
    """Seconds of this stage in training, on the host.

    Attributes:
        busy_s: In forwards and backwards.
        total_s: In steps.
    """

    busy_s: float = 0.0
    total_s: float = 0.0


class PipelineRunner(Generic[Step]):
    """Runs steps of a module that is cut into stages.

    Args:
        stage: This rank's part of the model, and its mesh.
        pipeline: Schedule and number of micro-batches.
        route: How steps get from chunk to chunk.
        around: The state that they leave around the blocks.
        p2p: Sends and receives tensors between stages.
        keeps_gradients: Whether stage 3 reduces once per batch.

    Attributes:
        hooks: Refuses hooks of the program on gradients of parameters of several chunks.
    """

    def __init__(
        self,
        stage: PipelineStage,
        pipeline: Pipeline,
        *,
        route: Route[Step],
        around: StateAround,
        p2p: P2P,
        keeps_gradients: bool,
    ) -> None:
        # - The cut, the mesh, the plan
        self.split = stage.split
        self.mesh = stage.mesh
        self._schedule = pipeline.schedule
        self._plans: dict[int, list[Action]] = {}  # of this stage, by number of micro-batches
        chunks, stages = self.split.num_chunks, self.mesh.stages
        self._evaluation = simulate(evaluation_order(stages, chunks), chunks)[0][self.mesh.stage]
        # A backward reduces all units of the stage, also those of its other chunks.
        sums = keeps_gradients or pipeline.reduces_once
        self._in_flight = Microbatch.IN_FLIGHT_SUMMED if sums else Microbatch.IN_FLIGHT  # but for the last backward
        # - How it runs
        self._stage = stage
        self._module = stage.module
        self._engine = stage.engine
        self._route = route
        self.around = around
        self._streams = stage.streams
        self._p2p = p2p
        self._mail = Mail(p2p, self.mesh.stages)
        self._weights = (
            WeightGradients(stage.device, stage.engine.has_hooks_of_program) if pipeline.splits_backward else None
        )
        self.hooks = ParameterHooks(stage.module, stage.split, pipeline.shared or (), stage.engine.has_hooks_of_program)
        self.timing = Timing()
        # - The step that is running
        self._name = ""  # of its method
        self._is_new = False  # some rank has run none of this kind
        self._messages: list[dict[int, tuple[Message, ...]]] = []  # into every chunk, by micro-batch
        self._states: dict[int, tuple[_State, ...]] = {}  # around the model, by chunk
        self._letters: dict[Action, Letter] = {}
        self._inputs: dict[tuple[int, int], list[torch.Tensor]] = {}  # received, waiting for their gradient
        self._outputs: dict[tuple[int, int], list[torch.Tensor]] = {}  # sent, waiting for their gradient
        self._results: dict[int, Any] = {}  # of the last chunk, by micro-batch

    @property
    def is_last(self) -> bool:
        """Whether steps come to their end on this rank."""
        return self.mesh.stage == self.last_stage

    @property
    def is_new(self) -> bool:
        """Whether the step that is running is one of a new kind, on some rank."""
        return self._is_new

    @property
    def lets_device_wait(self) -> bool:
        """Whether the device waits for messages, and the host goes on."""
        return self._p2p.lets_device_wait

    @property
    def last_stage(self) -> int:
        """The stage on which steps come to their end."""
        return (self.split.num_chunks - 1) % self.mesh.stages

    # -- Steps ---------------------------------------------------------------------------------------------------------

    def num_new(self, name: str, kinds: Sequence[Hashable]) -> int:
        """Return how many kinds ``prepare`` has to describe: all of a step, if one of them is new to this rank."""
        kinds = self._kinds(name, kinds)
        return len(set(kinds)) if any(map(self._route.is_new, kinds)) else 0

    def prepare(self, step: Step, name: str, kinds: Sequence[Hashable], *, num_described: int) -> None:
        """Describe the messages from chunk to chunk in the step that follows, and leave no trace.

        Collective: all ranks, if anything is described.

        Args:
            step: The user's step.
            name: Of its method.
            kinds: Of its micro-batches; they differ where shapes of tensors between stages may differ.
            num_described: The largest ``num_new`` of all ranks, because describing is collective.
        """
        self._name, self._is_new = name, num_described > 0
        self.around.end_between_steps()
        kinds = self._kinds(name, kinds)
        self._route.forget(kinds)
        first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
        for index in islice(cycle(sorted(first.values())), num_described):
            self._route.describe(step, index, kinds[index])
        self._messages = self._route.messages(kinds)
        self._mail.forget(self._route.is_new)
        self._mail.begin(kinds, is_new=self._is_new)

    def _kinds(self, name: str, kinds: Sequence[Hashable]) -> list[Hashable]:
        trained = hash(tuple(param.requires_grad for param in self._module.parameters()))
        return [(name, kind, trained) for kind in kinds]

    def _plan(self, number: int) -> list[Action]:
        """Return this stage's actions in a step of a number of micro-batches."""
        if number not in self._plans:
            chunks = self.split.num_chunks
            orders = compute_order(self._schedule, self.mesh.stages, chunks, number)
            self._plans[number] = simulate(orders, chunks)[0][self.mesh.stage]
        return self._plans[number]

    def _is_in_order(self, number: int) -> bool:
        """Say whether the last stage runs each backward before the next forward, in a step of ``number`` micro-batches.

        Only the last stage's answer counts: it alone runs code behind the blocks.
        """
        if number == 1:
            return True
        last, stages = self.split.num_chunks - 1, self.mesh.stages
        orders = compute_order(self._schedule, stages, self.split.num_chunks, number)
        kinds = [action.kind for action in orders[last % stages] if action.chunk == last]
        per_microbatch = len(kinds) // number
        return all(kinds[start] == "forward" for start in range(0, len(kinds), per_microbatch))

    def train(self, step: Step, loss_of: Callable[[Any, int], torch.Tensor], *, reduces: bool) -> list[Any]:
        """Run forwards and backwards of all micro-batches, after ``prepare``.

        Collective: all ranks of a copy; with ``reduces`` and at ZeRO stages 2 and 3 all ranks.

        Args:
            step: The user's step.
            loss_of: Returns the loss in the step's result for a micro-batch.
            reduces: The gradients of these micro-batches are the last before the optimizer's step.

        Returns:
            The step's results, by micro-batch, on the last stage; elsewhere nothing.
        """
        started = time.perf_counter()
        actions = self._plan(len(self._messages))
        forwards = [action for action in actions if action.kind == "forward"]
        backwards = [action for action in actions if action.is_backward]
        self.around.begin(self._name, is_new=self._is_new)
        self._route.note_written(None if self._is_new else self.around.places_changed)
        self._stage.draws.begin()
        self._streams.begin()
        try:
            for action in actions:
                if action.kind == "forward":
                    # Module buffers are made equal where the next batch begins, not in between.
                    with self._engine.microbatch(_position(reduces and action == forwards[-1])):
                        self._forward(action, step, "training_step")
                elif action.is_backward:
                    is_final = action == backwards[-1]
                    self._backward(action, loss_of, _position(reduces) if is_final else self._in_flight)
                elif action.kind in ("recv_input", "recv_gradient"):
                    self._receive(action)
            self._p2p.flush()
            self._streams.end()
            self.around.written = self._route.take_written()
            self.timing.total_s += time.perf_counter() - started
            if self._is_new:
                self.around.compare(self._of_all_stages, is_in_order=self._is_in_order(len(self._messages)))
            return [self._results[index] for index in sorted(self._results)]
        finally:
            self._forget()

    def survey(self, step: Step, look: Callable[[Callable[[], None]], None]) -> None:
        """Run all micro-batches without the model, after ``prepare``, and leave no trace.

        Collective: all ranks of the last stage, before they ``train``.

        Args:
            step: The step.
            look: Given a function that runs a micro-batch.
        """

        def run() -> None:
            self._streams.begin()
            kept = unwritten(self._stage.held(self._route.modules_in_survey), compares_values=self._is_new)
            with self._engine.scope("survey"), torch.no_grad(), kept:
                for index in range(len(self._messages)):
                    self._streams.enter(self.split.num_chunks - 1, index)
                    look(partial(self._route.survey, step, index))
                    self._streams.leave_common()

        self._stage.apart(run, self._route.modules_in_survey)

    def evaluate(self, step: Step, name: str) -> Any:
        """Run the forward of one batch, after ``prepare``; return the step's result on the last stage, else None.

        Collective: all ranks of a copy.
        """
        self.around.begin(self._name, is_new=self._is_new)
        self._route.note_written(None if self._is_new else self.around.places_changed)
        self._stage.draws.begin()
        self._streams.begin()
        try:
            for action in self._evaluation:
                if action.kind == "forward":
                    self._forward(action, step, name)
                elif action.kind in ("recv_input", "recv_gradient"):
                    self._receive(action)
            self._p2p.flush()
            self._streams.end()
            self.around.written = self._route.take_written()
            if self._is_new:
                self.around.compare(self._of_all_stages)
            return self._results.get(0)
        finally:
            self._forget()

    def _of_all_stages(self, mine: T) -> list[T]:
        return self.mesh.gather(mine, "the comparison of state around the blocks")

    def _forget(self) -> None:
        self._letters.clear()
        self._inputs.clear()
        self._outputs.clear()
        self._results.clear()
        self._states.clear()
        self._stage.attributes.forget()
        self._route.end_batch()
        if self._weights is not None:
            self._weights.forget()

    def _forward(self, action: Action, step: Step, name: str) -> None:
        chunk, index = action.chunk, action.microbatch
        messages = self._messages[index]
        expected = messages.get(chunk, ())
        received: list[torch.Tensor] = []

        def receive() -> Sequence[torch.Tensor]:
            letter = self._letters.pop(Action("recv_input", chunk, index), None)
            if letter is not None:
                received.extend(self._mail.tensors(letter, _sizes(expected), chunk, index))
            for message, tensor in zip(expected, received, strict=True):
                tensor.requires_grad_(message.requires_grad)
            return received

        def send(leaves: Mapping[int | Source, Any]) -> None:
            outputs = self._checked(leaves, chunk + 1, messages[chunk + 1])
            # The next micro-batch may change a module buffer in place before the message has left.
            sent = [tensor if tensor.requires_grad else tensor.clone() for tensor in outputs]
            self._mail.send(sent, chunk + 1, index, what=_words_of("output", action))
            if is_training:
                self._outputs[chunk, index] = outputs

        is_training = torch.is_grad_enabled()
        with self._working() if is_training else nullcontext():
            self._streams.enter(chunk, index)
            state, draws = self._state_of(chunk), self._stage.draws.watched(chunk, index)
            around, scope = self.around.watched(chunk, index), self._engine.scope(name)
            part = self._engine.part(f"chunk {chunk}")
            kept = self._keeping(action) if is_training else nullcontext()
            with state, draws, around, part, scope, self._splitting(is_training), kept:
                finished, result = self._route.run(
                    step, index, chunk=chunk, expected=expected, receive=receive, send=send
                )
            self._streams.leave()
        if is_training:
            self._inputs[chunk, index] = received
        if finished:
            self._results[index] = result

    def _keeping(self, action: Action) -> AbstractContextManager[None]:
        """Return a context for a forward, whose backward finds the attributes that it leaves."""
        looks_inside = self._is_new or action.microbatch == 0
        return self._stage.attributes.forward(action.chunk, action.microbatch, looks_inside=looks_inside)

    @contextmanager
    def _state_of(self, chunk: int) -> Iterator[None]:
        """Let the code around the model, which runs once per chunk of this stage, find the state that it left in it.

        The state after the stage's last chunk is kept.
        """
        if chunk + self.mesh.stages >= self.split.num_chunks:
            yield
            return
        modules = list(modules_around(self._module, self.split))

        def states() -> tuple[_State, ...]:
            generators = GeneratorState(generators_of(modules).values())
            return ModuleState(modules), AttributeState(modules), HookState(self._module), generators

        with ExitStack() as stack:
            for state in self._states.get(chunk) or states():
                stack.enter_context(state.shown())
            yield
            self._states[chunk] = states()

    def _checked(
        self, leaves: Mapping[int | Source, Any], chunk: int, messages: Sequence[Message]
    ) -> list[torch.Tensor]:
        """Return the tensors to send into a chunk, after comparing them with its messages."""
        outputs = []
        for message in messages:
            tensor = leaves.get(message.leaf)
            is_right = (
                isinstance(tensor, torch.Tensor)
                and not is_fake(tensor)
                and (tuple(tensor.shape), tensor.dtype) == (message.shape, message.dtype)
                and (tensor.requires_grad or not message.requires_grad)
                and not (tensor.requires_grad and not message.requires_grad and torch.is_grad_enabled())
            )
            if _differs_in_graph(tensor, message):
                raise PipelineError(
                    f"A tensor of shape {message.shape} that pipeline chunk {chunk - 1} sends to chunk {chunk}"
                    f" {'has a' if tensor.requires_grad else 'has no'} graph in this batch, unlike in the first one of"
                    " its kind: the step detaches it (`detach`, `no_grad`) in some batches alone. Let it have one in"
                    " all of them: `x.detach() + 0.0 * x` in place of `x.detach()`, or freeze parameters with"
                    " `requires_grad_(False)`."
                )
            if not is_right:
                raise PipelineError(
                    f"Pipeline chunk {chunk} expects a tensor of shape {message.shape}, {message.dtype}, requires_grad="
                    f"{message.requires_grad}, and chunk {chunk - 1} has {_words(tensor)}. Micro-batches with as"
                    " many samples must have the same shapes, and the shapes that modules return must follow"
                    " from those of their arguments."
                )
            assert tensor is not None
            outputs.append(tensor)
        return outputs

    def _backward(
        self,
        action: Action,
        loss_of: Callable[[Any, int], torch.Tensor],
        microbatch: Microbatch,
    ) -> None:
        chunk, index, is_last = action.chunk, action.microbatch, action.kind != "backward_input"
        with (
            self._working(),
            self.hooks.watched(chunk),
            self.around.watched_backward(chunk),
            self._route.showing(chunk, index, is_last=is_last),
            self._stage.attributes.backward(chunk, index, is_last=is_last),
            self._stage.logging.backward(chunk, index),
            self._engine.part(f"chunk {chunk}, {action.kind}"),  # one half of a backward meets, the other does not
            self._engine.microbatch(microbatch),
            self._engine.backward_scope(shows_gradients=False),
        ):
            if action.kind == "backward_weight":
                assert self._weights is not None
                self._weights.bring((chunk, index))
                return
            self._backward_of_roots(action, loss_of)
            self._send_gradients(action)  # before the reductions are finished

    def _backward_of_roots(self, action: Action, loss_of: Callable[[Any, int], torch.Tensor]) -> None:
        chunk, index = action.chunk, action.microbatch
        if chunk == self.split.num_chunks - 1:
            roots = [loss_of(self._results[index], index)]
        else:
            roots = self._outputs.pop((chunk, index))
        roots = [root for root in roots if root.requires_grad]
        letter = self._letters.pop(Action("recv_gradient", chunk, index), None)
        seeds: list[torch.Tensor] | None = None
        if letter is not None:
            gradients = self._mail.gradients(letter, chunk + 1, index)
            wanted = [(root, seed) for root, seed in zip(roots, gradients, strict=True) if seed is not None]
            roots, seeds = [root for root, _ in wanted], [seed for _, seed in wanted]
        with self._deferring(action, roots):
            if roots:
                torch.autograd.backward(roots, seeds)

    def _splitting(self, is_training: bool) -> AbstractContextManager[Any]:
        """Return a context for a forward, whose backward may be one in two halves."""
        return self._weights.split(self._module) if is_training and self._weights is not None else nullcontext()

    def _deferring(self, action: Action, roots: list[torch.Tensor]) -> AbstractContextManager[None]:
        """Return a context for a backward, which may be the first half of one."""
        if self._weights is None or action.kind != "backward_input":
            return nullcontext()
        return self._weights.deferring((action.chunk, action.microbatch), roots)

    def _send_gradients(self, action: Action) -> None:
        received = self._inputs.pop((action.chunk, action.microbatch))
        wanted = [tensor for tensor in received if tensor.requires_grad]
        self._mail.send_gradients(wanted, action.chunk, action.microbatch, what=_words_of("gradient", action))

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count the time as work, without the time spent waiting for messages."""
        started, waited = time.perf_counter(), self._p2p.wait_s
        yield
        self.timing.busy_s += time.perf_counter() - started - (self._p2p.wait_s - waited)

    def _receive(self, action: Action) -> None:
        """Start receiving an input or gradients. Sending starts where they are computed, as the plan has it."""
        chunk, index = action.chunk, action.microbatch
        if action.kind == "recv_input":
            sizes = _sizes(self._messages[index][chunk])
            self._letters[action] = self._mail.expect(sizes, chunk, what=_words_of("input", action))
            return
        sizes = _sizes(one for one in self._messages[index][chunk + 1] if one.requires_grad)
        what = _words_of("gradient of the output", action)
        self._letters[action] = self._mail.expect_gradients(sizes, chunk + 1, index, what=what)


def _sizes(messages: Iterable[Message]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(one.shape, one.dtype) for one in messages]


def _differs_in_graph(tensor: Any, message: Message) -> TypeGuard[torch.Tensor]:
    """Say whether a tensor differs from its description in having a graph alone."""
    return (
        isinstance(tensor, torch.Tensor)
        and not is_fake(tensor)
        and (tuple(tensor.shape), tensor.dtype) == (message.shape, message.dtype)
        and torch.is_grad_enabled()
        and tensor.requires_grad != message.requires_grad
    )


def _position(is_last: bool) -> Microbatch:
    return Microbatch.LAST if is_last else Microbatch.EARLIER


def _words_of(what: str, action: Action) -> str:
    return f"{what} of chunk {action.chunk}, micro-batch {action.microbatch}"


def _words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    if is_fake(value):
        return f"its shape alone, {tuple(value.shape)}: it is computed from values of an earlier stage"
    return f"{tuple(value.shape)}, {value.dtype}, requires_grad={value.requires_grad}"
