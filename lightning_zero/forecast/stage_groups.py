"""Process groups between the stages of a simulated pipeline, each of which is a process of its own.

Note [What is sent]
    Objects, and tensors that a dry run computes, have their values: shapes that stages tell one another, agreements,
    losses. Tensors that it never writes have none, and are not sent. Each message says at which modelled time it
    arrives, so the clock of a stage waits for the others as the stage would. A post box has the messages: a key of a
    store for each. Sending never blocks.

Note [Other copies]
    The default group, and the groups of ranks with the same stage, are pretended as ever: every copy of the model does
    what this one does.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_zero.comm.mesh import _MeshGroups
from lightning_zero.forecast.clock import SimulatedCall
from lightning_zero.forecast.live_bytes import replaced

__all__ = ["BACKEND", "PostBox", "StageGroup", "between_stages"]

BACKEND = "stages"  # of groups between the stages of a copy


class PostBox:
    """Messages between the stages of one pipeline, which all have the store.

    Args:
        store: Of the processes.
        last_call: Returns the call that the simulated step has made last; None outside of it.
        is_blank: Says whether a tensor is one that is never written.
    """

    def __init__(
        self,
        store: Any,
        last_call: Callable[[], SimulatedCall | None] = lambda: None,
        is_blank: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        self.last_call = last_call
        self._is_blank = is_blank
        self._store = store
        self._groups = 0

    def name_group(self) -> str:
        """Return the name of another group; all stages make theirs in one order."""
        self._groups += 1
        return str(self._groups)

    def post(self, key: str, at_s: float, tensor: Tensor) -> None:
        """Send the values of a tensor, if it has any; ``at_s`` is when they arrive."""
        values = None if self._is_blank(tensor) else _values_of(tensor)
        self._store.set(key, pickle.dumps((at_s, values)))

    def collect(self, key: str, num_readers: int = 1) -> tuple[float, bytes | None]:
        """Wait for a message; the last of its readers removes it."""
        found: tuple[float, bytes | None] = pickle.loads(self._store.get(key))
        counted = f"{key}/readers"
        if num_readers == 1:
            self._store.delete_key(key)
        elif self._store.add(counted, 1) == num_readers:
            self._store.delete_key(key)
            self._store.delete_key(counted)
        return found


_boxes: list[PostBox] = []  # that groups use which are made now


class _Work:
    """A call that was made; ``wait`` finishes it."""

    def __init__(self, finish: Callable[[], None] = lambda: None) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: Any = None) -> bool:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            with _disable_current_modes(), torch.no_grad():
                finish()
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return []


class StageGroup(dist.ProcessGroup):
    """The stages of one copy. Calls have the semantics of gloo's, as far as stages make them.

    Args:
        box: The messages.
        rank: The stage.
        size: Number of stages.
    """

    def __init__(self, box: PostBox, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._box = box
        self._name = box.name_group()
        self._num_calls = 0
        self._num_messages: Counter[tuple[int, int]] = Counter()  # by sender and receiver

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    # -- From one stage to another -------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        """Send a tensor; it arrives when the call ends."""
        call = self._box.last_call()
        self._box.post(self._key(self.rank(), peer), 0.0 if call is None else call.ended_s, tensors[0])
        return _Work()

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        """Receive a tensor."""
        call, key = self._box.last_call(), self._key(peer, self.rank())

        def finish() -> None:
            at_s, values = self._box.collect(key)
            _fill(tensors[0], values)
            _delay(call, at_s)

        return _Work(finish)

    def _key(self, sender: int, receiver: int) -> str:
        self._num_messages[sender, receiver] += 1
        return f"{self._name}/{sender}-{receiver}/{self._num_messages[sender, receiver]}"

    # -- All stages ----------------------------------------------------------------------------------------------------

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Fill tensors with those of all stages."""

        def fill(found: Sequence[bytes | None]) -> None:
            for output, values in zip(outputs[0], found, strict=True):
                _fill(output, values)

        return self._exchange(inputs[0], fill)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """Reduce a tensor over the stages, in place."""
        result = tensors[0]

        def reduce(found: Sequence[bytes | None]) -> None:
            if all(values is not None for values in found):
                every = [torch.empty_like(result) for _ in found]
                for one, values in zip(every, found, strict=True):
                    _fill(one, values)
                result.copy_(_reduced(torch.stack(every), opts.reduceOp))

        return self._exchange(result, reduce)

    def _exchange(self, mine: Tensor, use: Callable[[Sequence[bytes | None]], None]) -> Any:
        """Send a tensor to all stages; the call ends on all of them when the last one has made it."""
        call, key = self._box.last_call(), self._next_key()
        self._box.post(f"{key}/{self.rank()}", 0.0 if call is None else call.ended_s, mine)

        def finish() -> None:
            found = [self._box.collect(f"{key}/{rank}", self.size()) for rank in range(self.size())]
            use([values for _, values in found])
            _delay(call, max(at_s for at_s, _ in found))

        return _Work(finish)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """Overwrite a tensor with that of one stage."""
        call, key, source = self._box.last_call(), self._next_key(), opts.rootRank
        if self.rank() == source:
            self._box.post(key, 0.0 if call is None else call.ended_s, tensors[0])
            return _Work()

        def finish() -> None:
            at_s, values = self._box.collect(key, self.size() - 1)
            _fill(tensors[0], values)
            _delay(call, at_s)

        return _Work(finish)

    def _next_key(self) -> str:
        self._num_calls += 1
        return f"{self._name}/all/{self._num_calls}"


def _values_of(tensor: Tensor) -> bytes:
    with _disable_current_modes(), torch.no_grad():
        return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _fill(tensor: Tensor, values: bytes | None) -> None:
    """Write the bytes that a tensor was sent; one without values stays as it is."""
    if values:
        found = torch.frombuffer(bytearray(values), dtype=torch.uint8).view(tensor.dtype)
        tensor.copy_(found.view(tensor.shape))


def _delay(call: SimulatedCall | None, at_s: float) -> None:
    """Let a call end when its message is there."""
    if call is not None:
        call.ended_s = max(call.ended_s, at_s)


def _reduced(every: Tensor, op: Any) -> Tensor:
    if op == dist.ReduceOp.MAX:
        return every.amax(0)
    if op == dist.ReduceOp.MIN:
        return every.amin(0)
    assert op == dist.ReduceOp.SUM, op
    return every.sum(0, dtype=every.dtype)


def _make(store: Any, rank: int, size: int, timeout: Any) -> StageGroup:
    return StageGroup(_boxes[-1], rank, size)


dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])


@contextmanager
def between_stages(box: PostBox) -> Iterator[None]:
    """Let meshes that are made inside have groups between their stages that send, over ``box``."""
    between: Any = _MeshGroups._between

    def joined(groups: Any, copies: list[list[int]], backend: str | None = None) -> Any:
        return between(groups, copies, BACKEND)

    _boxes.append(box)
    try:
        with replaced(_MeshGroups, "_between", joined):
            yield
    finally:
        _boxes.pop()
