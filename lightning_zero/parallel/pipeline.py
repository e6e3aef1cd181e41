"""Run the user's steps in pipeline stages: the plan's actions, one after the other."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.comm.mail import Letter, Mailbox
from lightning_zero.comm.mesh import Mesh
from lightning_zero.config import Pipeline
from lightning_zero.errors import PipelineError
from lightning_zero.parallel.gates import Gates, Message, is_fake
from lightning_zero.parallel.plan import Action, compute_order, evaluation_order, simulate
from lightning_zero.parallel.split import Split
from lightning_zero.parallel.streams import RandomStreams

__all__ = ["PipelineRunner", "Stepper", "Timing"]


class Stepper(Protocol):
    """What the runner needs of the engine that holds this stage's parameters."""

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


@dataclass
class Timing:
    """Seconds of this stage, on the host.

    Attributes:
        busy_s: In forwards and backwards.
        total_s: In steps.
    """

    busy_s: float = 0.0
    total_s: float = 0.0

    @property
    def bubble_share(self) -> float:
        """Part of the time in which the stage did not compute."""
        return 1.0 - self.busy_s / self.total_s if self.total_s else 0.0


class PipelineRunner:
    """Runs steps of a module that is cut into stages.

    Args:
        module: The root; parameters of other stages have no values.
        split: What lies where.
        pipeline: Schedule and number of micro-batches.
        mesh: The ranks.
        engine: Holds the parameters of this stage.
        device: Device of this rank.
    """

    def __init__(
        self, module: nn.Module, split: Split, pipeline: Pipeline, mesh: Mesh, engine: Stepper, device: torch.device
    ) -> None:
        # - What runs where
        self.split = split
        self.mesh = mesh
        self.num_microbatches = pipeline.num_microbatches
        self._engine = engine
        chunks, stages = split.num_chunks, mesh.stages
        orders = compute_order(pipeline.schedule, stages, chunks, self.num_microbatches)
        self._actions = simulate(orders, chunks)[0][mesh.stage]
        self._evaluation = simulate(evaluation_order(stages, chunks), chunks)[0][mesh.stage]
        self._own_chunks = range(mesh.stage, chunks, stages)
        # - How it runs
        self._module = module
        self._streams = RandomStreams(device)
        self._gates = Gates(module, split, self._streams.leave_common)
        self._mail = Mailbox(mesh.message_group, device)
        self._messages: dict[Hashable, dict[int, tuple[Message, ...]]] = {}  # into every chunk, by kind of step
        self.timing = Timing()
        # - The step that is running
        self._letters: dict[Action, list[Letter]] = {}
        self._inputs: dict[tuple[int, int], list[torch.Tensor]] = {}  # received, waiting for their gradient
        self._outputs: dict[tuple[int, int], list[torch.Tensor]] = {}  # sent, waiting for their gradient
        self._results: dict[int, Any] = {}  # of the last chunk, by micro-batch

    @property
    def is_last(self) -> bool:
        """Whether steps come to their end on this rank."""
        return self.mesh.stage == (self.split.num_chunks - 1) % self.mesh.stages

    @property
    def last_stage(self) -> int:
        """The stage on which steps come to their end."""
        return (self.split.num_chunks - 1) % self.mesh.stages

    # -- Steps ---------------------------------------------------------------------------------------------------------

    def train(
        self, step: Callable[[int], Any], loss_of: Callable[[Any], torch.Tensor], kind: Hashable, *, reduces: bool
    ) -> list[Any]:
        """Run forwards and backwards of all micro-batches.

        Collective: all ranks of a copy; with ``reduces`` and at ZeRO stages 2 and 3 all ranks.

        Args:
            step: Runs the user's step on a micro-batch.
            loss_of: Returns what is to be differentiated of what ``step`` returned.
            kind: Differs where shapes of tensors between stages may differ.
            reduces: The gradients of these micro-batches are the last before the optimizer's step.

        Returns:
            What ``step`` returned, by micro-batch, on the last stage; elsewhere nothing.
        """
        started = time.perf_counter()
        messages = self._agreed_messages(("train", kind, self._trained()), step)
        backwards = [action for action in self._actions if action.kind == "backward"]
        self._streams.begin()
        try:
            for action in self._actions:
                if action.kind == "forward":
                    self._forward(action, step, messages, "training_step")
                elif action.kind == "backward":
                    is_final = action == backwards[-1]
                    self._backward(action, loss_of, messages, reduces=reduces and is_final, has_more=not is_final)
                else:
                    self._pass_message(action, messages)
            self._mail.flush()
            self._streams.end()
            self.timing.total_s += time.perf_counter() - started
            return [self._results[index] for index in sorted(self._results)]
        finally:
            self._forget()

    def evaluate(self, step: Callable[[int], Any], name: str, kind: Hashable) -> Any:
        """Run the forward of one batch and return what ``step`` returned on the last stage, elsewhere None.

        Collective: all ranks of a copy.
        """
        messages = self._agreed_messages((name, kind), step)
        self._streams.begin()
        try:
            for action in self._evaluation:
                if action.kind == "forward":
                    self._forward(action, step, messages, name)
                else:
                    self._pass_message(action, messages)
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

    def _forward(
        self, action: Action, step: Callable[[int], Any], messages: dict[int, tuple[Message, ...]], name: str
    ) -> None:
        chunk, index = action.chunk, action.microbatch
        expected = messages.get(chunk, ())
        received = [letter.wait() for letter in self._letters.pop(Action("recv_input", chunk, index), [])]
        for message, tensor in zip(expected, received, strict=True):
            tensor.requires_grad_(message.requires_grad)
        started = time.perf_counter()
        self._streams.enter(chunk, index)
        with self._engine.scope(name):
            finished, result = self._gates.run(lambda: step(index), chunk, expected, received)
        self._streams.leave(chunk)
        self.timing.busy_s += time.perf_counter() - started
        if torch.is_grad_enabled():
            self._inputs[chunk, index] = received
        if finished:
            self._results[index] = result
        else:
            self._outputs[chunk, index] = self._checked(result, chunk + 1, messages[chunk + 1])

    def _checked(self, leaves: Sequence[Any], chunk: int, messages: Sequence[Message]) -> list[torch.Tensor]:
        """Return what is sent into a chunk, after comparing it with what is expected there."""
        outputs = []
        for message in messages:
            tensor = leaves[message.leaf] if message.leaf < len(leaves) else None
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
        messages: dict[int, tuple[Message, ...]],
        *,
        reduces: bool,
        has_more: bool,
    ) -> None:
        chunk, index = action.chunk, action.microbatch
        gradients = [letter.wait() for letter in self._letters.pop(Action("recv_gradient", chunk, index), [])]
        started = time.perf_counter()
        if chunk == self.split.num_chunks - 1:
            roots, seeds = [loss_of(self._results[index])], None
        else:
            roots = [tensor for tensor in self._outputs.pop((chunk, index)) if tensor.requires_grad]
            seeds = gradients
        # A backward reduces all units of the stage, also those of its other chunks.
        keeps = len(self._own_chunks) > 1
        with self._engine.microbatch(reduces, has_more, keeps), self._engine.backward_scope():
            roots = [root for root in roots if root.requires_grad]
            if roots:
                torch.autograd.backward(roots, seeds)
        self.timing.busy_s += time.perf_counter() - started

    def _trained(self) -> int:
        """Return a number that differs where other parameters are trained."""
        return hash(tuple(param.requires_grad for param in self._module.parameters()))

    # -- Messages ------------------------------------------------------------------------------------------------------

    def _pass_message(self, action: Action, messages: dict[int, tuple[Message, ...]]) -> None:
        chunk, stages = action.chunk, self.mesh.stages
        into = chunk if action.kind in ("recv_input", "send_gradient") else chunk + 1
        lies_at = (into if into != chunk else chunk - 1) % stages  # the other end
        what = f"{action.kind.replace('_', ' ')} of chunk {chunk}, micro-batch {action.microbatch}"
        if action.kind == "send_output":
            for tensor in self._sendable(chunk, action.microbatch):
                self._mail.send(lies_at, tensor, what)
        elif action.kind == "send_gradient":
            for tensor in self._inputs.pop((chunk, action.microbatch)):
                if tensor.requires_grad:
                    self._mail.send(lies_at, torch.zeros_like(tensor) if tensor.grad is None else tensor.grad, what)
        else:
            wanted = [one for one in messages[into] if action.kind == "recv_input" or one.requires_grad]
            self._letters[action] = [self._mail.receive(lies_at, one.shape, one.dtype, what) for one in wanted]

    def _sendable(self, chunk: int, index: int) -> list[torch.Tensor]:
        if torch.is_grad_enabled():
            return self._outputs[chunk, index]
        return self._outputs.pop((chunk, index))

    def _agreed_messages(self, kind: Hashable, step: Callable[[int], Any]) -> dict[int, tuple[Message, ...]]:
        """Return which leaves go into every chunk this rank sends to or receives from.

        Both ends run the step as the receiving chunk does, without computing, and compare: what is fake there is sent,
        and so is what differs between them, for example a mask that is drawn inside the model.
        Collective where the kind of step is new: all ranks of a copy.
        """
        if kind not in self._messages:
            mine = {
                (chunk, acting): self._description(step, chunk, acting)
                for acting in self._own_chunks
                for chunk in (acting, acting + 1)
                if 0 < chunk < self.split.num_chunks
            }
            everyone: list[Any] = [None] * self.mesh.stages
            dist.all_gather_object(everyone, mine, group=self.mesh.host_group)
            table = {key: value for one in everyone for key, value in one.items()}
            self._messages[kind] = {
                chunk: _needed(chunk, table[chunk, chunk], table[chunk, chunk - 1])
                for chunk in range(1, self.split.num_chunks)
            }
        return self._messages[kind]

    def _description(self, step: Callable[[int], Any], chunk: int, acting: int) -> list[Any]:
        """Describe the arguments of a chunk's first block as ``acting`` would find them."""

        def look() -> list[Any]:
            self._streams.begin()
            self._streams.enter(acting, 0)
            with self._engine.scope("arguments"):
                return [_describe(leaf) for leaf in self._gates.arguments(lambda: step(0), chunk)]

        description: list[Any] = self._streams.apart(look)
        return description


def _describe(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf) if isinstance(leaf, (int, float, str, bool)) or leaf is None else type(leaf).__name__
    values = None if is_fake(leaf) else _checksum(leaf)
    return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad, values)


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _needed(chunk: int, here: Sequence[Any], there: Sequence[Any]) -> tuple[Message, ...]:
    """Return what must be sent into a chunk, given what both ends have."""
    if len(here) != len(there):
        raise PipelineError(f"Pipeline stages call the first block of chunk {chunk} with different arguments.")
    messages = []
    for index, (mine, theirs) in enumerate(zip(here, there, strict=True)):
        if isinstance(mine, tuple) and (mine[3] is None or mine != theirs):
            messages.append(Message(index, *mine[:3]))
        elif mine != theirs:
            raise PipelineError(
                f"The first block of pipeline chunk {chunk} is called with {mine} on its stage and {theirs} on the one"
                " before. Values that are no tensors must not depend on random numbers drawn inside the model."
            )
    return tuple(messages)


def _words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)}, {value.dtype}, requires_grad={value.requires_grad}"
