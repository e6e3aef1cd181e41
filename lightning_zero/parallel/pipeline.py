"""Run the user's steps in pipeline stages: the plan's actions, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.mail import Letter, Mailbox
from lightning_zero.comm.mesh import Mesh
from lightning_zero.config import Pipeline
from lightning_zero.errors import PipelineError
from lightning_zero.parallel.gates import Message
from lightning_zero.parallel.module_state import GeneratorState, HookState, ModuleState, put_back
from lightning_zero.parallel.plan import Action, compute_order, evaluation_order, simulate
from lightning_zero.parallel.sources import Source, is_fake
from lightning_zero.parallel.split import Split, modules_around
from lightning_zero.parallel.streams import RandomStreams

__all__ = ["PipelineRunner", "PipelineStage", "Route", "Stepper", "Timing"]

_State = ModuleState | HookState | GeneratorState
Step = TypeVar("Step", contravariant=True)
T = TypeVar("T")


class Stepper(Protocol):
    """What a pipeline needs of the engine that holds this stage's parameters."""

    @property
    def communicator(self) -> Communicator:
        """Collectives of the ranks that hold the same stage."""
        ...

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Run code that may use any parameter of this stage."""
        ...

    def microbatch(
        self, last: bool, has_more_backwards: bool = False, keeps_gradients: bool = False
    ) -> AbstractContextManager[None]:
        """Run a micro-batch; the last one reduces."""
        ...

    def backward_scope(self) -> AbstractContextManager[None]:
        """Run a backward."""
        ...

    def asleep(self) -> AbstractContextManager[None]:
        """Let forwards that compute nothing go unnoticed."""
        ...


@dataclass(frozen=True)
class PipelineStage:
    """This rank's part of a model, and who is asked about it.

    Attributes:
        module: The root; parameters of other stages have no values.
        split: What lies where.
        mesh: The ranks.
        device: Device of this rank.
        engine: Holds the parameters of this stage.
        streams: Random numbers of the chunks.
    """

    module: nn.Module
    split: Split
    mesh: Mesh
    device: torch.device
    engine: Stepper
    streams: RandomStreams

    def apart(self, run: Callable[[], T], modules: Iterable[nn.Module]) -> T:
        """Run something that leaves no trace in the generators, and in the state of modules."""
        found = list(modules)
        with put_back(found), ModuleState(found).shown(), HookState(self.module).shown(), GeneratorState(found).shown():
            result: T = self.streams.apart(run)
        return result

    def any_copy(self, flag: bool, what: str) -> bool:
        """Say whether a flag is set on some rank of this stage. Collective: all of them."""
        return self.engine.communicator.any_is(flag, what)


class Route(Protocol[Step]):
    """How a step gets from chunk to chunk."""

    def is_new(self, step: Step, kind: Hashable) -> bool:
        """Say whether a kind of step is new to this rank."""
        ...

    def messages(self, step: Step, kind: Hashable, *, is_new: bool) -> dict[int, tuple[Message, ...]]:
        """Return what goes into every chunk this rank sends to or receives from.

        Collective: all ranks of this stage; where the kind of step is new to one of them, all ranks.
        """
        ...

    def survey(self, step: Step, index: int) -> None:
        """Run a micro-batch's code without the model, on the last stage. Collective: all ranks of this stage."""
        ...

    @property
    def modules_in_survey(self) -> Iterable[nn.Module]:
        """The modules whose state a survey may change."""
        ...

    def run(
        self,
        step: Step,
        index: int,
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
            expected: What comes from the chunk before.
            receive: Waits for it and returns it; called once, at the chunk's first block.
            send: Called with what goes to the next chunk, by leaf of its message, as soon as it is there.

        Returns:
            Whether the step came to its end, and what it returned.
        """
        ...


@dataclass
class Timing:
    """Seconds of this stage, on the host.

    Attributes:
        busy_s: In forwards and backwards.
        total_s: In steps.
    """

    busy_s: float = 0.0
    total_s: float = 0.0


class PipelineRunner(Generic[Step]):
    """Runs steps of a module that is cut into stages.

    Args:
        stage: What this rank computes, and with whom.
        pipeline: Schedule and number of micro-batches.
        route: How steps get from chunk to chunk.
        mail: To the other stages.
        keeps_gradients: Whether stage 3 reduces once per batch.
    """

    def __init__(
        self,
        stage: PipelineStage,
        pipeline: Pipeline,
        *,
        route: Route[Step],
        mail: Mailbox,
        keeps_gradients: bool,
    ) -> None:
        # - What runs where
        self.split = stage.split
        self.mesh = stage.mesh
        self.num_microbatches = pipeline.num_microbatches
        chunks, stages = self.split.num_chunks, self.mesh.stages
        orders = compute_order(pipeline.schedule, stages, chunks, self.num_microbatches)
        self._actions = simulate(orders, chunks)[0][self.mesh.stage]
        self._evaluation = simulate(evaluation_order(stages, chunks), chunks)[0][self.mesh.stage]
        # A backward reduces all units of the stage, also those of its other chunks.
        self._keeps_gradients = keeps_gradients or chunks > stages
        # - How it runs
        self._stage = stage
        self._module = stage.module
        self._engine = stage.engine
        self._route = route
        self._streams = stage.streams
        self._mail = mail
        self.timing = Timing()
        # - The step that is running
        self._messages: dict[int, tuple[Message, ...]] = {}  # into every chunk
        self._states: dict[int, tuple[_State, ...]] = {}  # around the model, by chunk
        self._letters: dict[Action, list[Letter]] = {}
        self._inputs: dict[tuple[int, int], list[torch.Tensor]] = {}  # received, waiting for their gradient
        self._outputs: dict[tuple[int, int], list[torch.Tensor]] = {}  # sent, waiting for their gradient
        self._results: dict[int, Any] = {}  # of the last chunk, by micro-batch

    @property
    def is_last(self) -> bool:
        """Whether steps come to their end on this rank."""
        return self.mesh.stage == self.last_stage

    @property
    def last_stage(self) -> int:
        """The stage on which steps come to their end."""
        return (self.split.num_chunks - 1) % self.mesh.stages

    # -- Steps ---------------------------------------------------------------------------------------------------------

    def is_new(self, step: Step, name: str, kind: Hashable) -> bool:
        """Say whether a kind of step is new to this rank."""
        return self._route.is_new(step, (name, kind, self._trained))

    def prepare(self, step: Step, name: str, kind: Hashable, *, is_new: bool) -> None:
        """Find out what goes from chunk to chunk in the steps that follow, and leave no trace.

        Collective: all ranks of this stage; where the kind of step is new to one of them, all ranks.

        Args:
            step: The user's step.
            name: Of its method.
            kind: Differs where shapes of tensors between stages may differ.
            is_new: ``is_new`` of some rank of the copy.
        """
        self._messages = self._route.messages(step, (name, kind, self._trained), is_new=is_new)

    @property
    def _trained(self) -> int:
        return hash(tuple(param.requires_grad for param in self._module.parameters()))

    def train(self, step: Step, loss_of: Callable[[Any], torch.Tensor], *, reduces: bool) -> list[Any]:
        """Run forwards and backwards of all micro-batches, after ``prepare``.

        Collective: all ranks of a copy; with ``reduces`` and at ZeRO stages 2 and 3 all ranks.

        Args:
            step: The user's step.
            loss_of: Returns what is to be differentiated of what the step returned.
            reduces: The gradients of these micro-batches are the last before the optimizer's step.

        Returns:
            What the step returned, by micro-batch, on the last stage; elsewhere nothing.
        """
        started = time.perf_counter()
        backwards = [action for action in self._actions if action.kind == "backward"]
        self._streams.begin()
        try:
            for action in self._actions:
                if action.kind == "forward":
                    self._forward(action, step, "training_step")
                elif action.kind == "backward":
                    is_final = action == backwards[-1]
                    self._backward(action, loss_of, reduces=reduces and is_final, has_more=not is_final)
                elif action.kind in ("recv_input", "recv_gradient"):
                    self._receive(action)
            self._mail.flush()
            self._streams.end()
            self.timing.total_s += time.perf_counter() - started
            return [self._results[index] for index in sorted(self._results)]
        finally:
            self._forget()

    def survey(self, step: Step, look: Callable[[Callable[[], None]], None]) -> None:
        """Run all micro-batches without the model, after ``prepare``, and leave no trace.

        Collective: all ranks of the last stage, before they ``train``.

        Args:
            step: The step.
            look: Given what runs a micro-batch.
        """

        def run() -> None:
            self._streams.begin()
            with self._engine.scope("survey"), torch.no_grad():
                for index in range(self.num_microbatches):
                    self._streams.enter(self.split.num_chunks - 1, index)
                    look(partial(self._route.survey, step, index))
                    self._streams.leave_common()

        self._stage.apart(run, self._route.modules_in_survey)

    def evaluate(self, step: Step, name: str) -> Any:
        """Run the forward of one batch, after ``prepare``; return what the step returned on the last stage, else None.

        Collective: all ranks of a copy.
        """
        self._streams.begin()
        try:
            for action in self._evaluation:
                if action.kind == "forward":
                    self._forward(action, step, name)
                elif action.kind in ("recv_input", "recv_gradient"):
                    self._receive(action)
            self._mail.flush()
            self._streams.end()
            return self._results.get(0)
        finally:
            self._forget()

    def _forget(self) -> None:
        self._letters.clear()
        self._inputs.clear()
        self._outputs.clear()
        self._results.clear()
        self._states.clear()

    def _forward(self, action: Action, step: Step, name: str) -> None:
        chunk, index = action.chunk, action.microbatch
        expected = self._messages.get(chunk, ())
        received: list[torch.Tensor] = []

        def receive() -> Sequence[torch.Tensor]:
            received.extend(letter.wait() for letter in self._letters.pop(Action("recv_input", chunk, index), []))
            for message, tensor in zip(expected, received, strict=True):
                tensor.requires_grad_(message.requires_grad)
            return received

        def send(leaves: Mapping[int | Source, Any]) -> None:
            outputs = self._checked(leaves, chunk + 1, self._messages[chunk + 1])
            for tensor in outputs:
                # The next micro-batch may change a module buffer in place before the message has left.
                sent = tensor if tensor.requires_grad else tensor.clone()
                self._mail.send((chunk + 1) % self.mesh.stages, sent, _words_of("output", action))
            if is_training:
                self._outputs[chunk, index] = outputs

        is_training = torch.is_grad_enabled()
        with self._working():
            self._streams.enter(chunk, index)
            with self._state_of(chunk), self._engine.scope(name):
                finished, result = self._route.run(step, index, chunk, expected, receive, send)
            self._streams.leave()
        if is_training:
            self._inputs[chunk, index] = received
        if finished:
            self._results[index] = result

    @contextmanager
    def _state_of(self, chunk: int) -> Iterator[None]:
        """Let the code around the model, which runs once per chunk of this stage, find the state that it left in it.

        What it leaves for good is what it left in the last one.
        """
        if chunk + self.mesh.stages >= self.split.num_chunks:
            yield
            return
        modules = list(modules_around(self._module, self.split))

        def states() -> tuple[_State, ...]:
            return ModuleState(modules), HookState(self._module), GeneratorState(modules)

        with ExitStack() as stack:
            for state in self._states.get(chunk) or states():
                stack.enter_context(state.shown())
            yield
            self._states[chunk] = states()

    def _checked(
        self, leaves: Mapping[int | Source, Any], chunk: int, messages: Sequence[Message]
    ) -> list[torch.Tensor]:
        """Return what is sent into a chunk, after comparing it with what is expected there."""
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
            if not is_right:
                raise PipelineError(
                    f"Pipeline chunk {chunk} expects a tensor of shape {message.shape}, {message.dtype}, requires_grad="
                    f"{message.requires_grad}, and chunk {chunk - 1} has {_words(tensor)}. Every micro-batch must have"
                    " the same shapes, and modules must return what the shapes of their arguments tell."
                )
            assert tensor is not None
            outputs.append(tensor)
        return outputs

    def _backward(
        self,
        action: Action,
        loss_of: Callable[[Any], torch.Tensor],
        *,
        reduces: bool,
        has_more: bool,
    ) -> None:
        chunk, index = action.chunk, action.microbatch
        if chunk == self.split.num_chunks - 1:
            roots = [loss_of(self._results[index])]
        else:
            roots = self._outputs.pop((chunk, index))
        roots = [root for root in roots if root.requires_grad]
        keeps = self._keeps_gradients
        with self._working(), self._engine.microbatch(reduces, has_more, keeps), self._engine.backward_scope():
            seeds = [letter.wait() for letter in self._letters.pop(Action("recv_gradient", chunk, index), [])]
            if roots:
                torch.autograd.backward(roots, seeds or None)
            self._send_gradients(action)  # before the reductions are finished

    def _send_gradients(self, action: Action) -> None:
        for tensor in self._inputs.pop((action.chunk, action.microbatch)):
            if tensor.requires_grad:
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                self._mail.send((action.chunk - 1) % self.mesh.stages, gradient, _words_of("gradient", action))

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count the time as work, but for what is waited for messages."""
        started, waited = time.perf_counter(), self._mail.wait_s
        yield
        self.timing.busy_s += time.perf_counter() - started - (self._mail.wait_s - waited)

    def _receive(self, action: Action) -> None:
        """Start receiving. What is sent is sent where it is computed, which is where the plan has it."""
        is_input = action.kind == "recv_input"
        into, sender = (action.chunk, action.chunk - 1) if is_input else (action.chunk + 1, action.chunk + 1)
        wanted = [one for one in self._messages[into] if is_input or one.requires_grad]
        what = _words_of("input" if is_input else "gradient of the output", action)
        self._letters[action] = [
            self._mail.receive(sender % self.mesh.stages, one.shape, one.dtype, what) for one in wanted
        ]


def _words_of(what: str, action: Action) -> str:
    return f"{what} of chunk {action.chunk}, micro-batch {action.microbatch}"


def _words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)}, {value.dtype}, requires_grad={value.requires_grad}"
