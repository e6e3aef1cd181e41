"""A CUDA device that is simulated in host memory: everything that is asked of it runs as late as a real one may run it.

Note [How]
    Inside ``SimulatedDevice`` tensors that are made on ``cuda`` (or moved there) lie in host memory and say that they
    are on ``cuda:0``. An operation on them is put into the queue of the current stream; its results are not a number
    until it runs. A queue runs when the host waits for it (``item``, blocking copies, ``synchronize``) or when an
    operation in another queue waits for an event in it, and only so far. Memory that is given back becomes not a number
    in the order of the stream in which it is used again. So a wait that is missing shows as a wrong number, and each
    wait of the host is counted under the line that asked for it. Whichever thread waits runs the queue, with as many
    threads of PyTorch as the one that entered: sums (of a layer norm's gradients) have the bits of their number.

Note [Schedules]
    What runs late in one schedule hides what must not run early: ``eager`` names streams whose operations run at once.

Note [What never runs]
    A collective that has failed stands in its stream, and with it all that is behind it and what waits for that, as on
    a real device. A host that waits for it would wait for ever; here it gets ``Stuck``.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zero.storage import host
from tests.simulated_transport import Stuck, Transports

__all__ = ["SimulatedDevice"]

_NAN_BYTE = 255  # four of them, or two, are not a number in every floating dtype
_CUDA = torch.device("cuda", 0)
_aten = torch.ops.aten
_READ_BY_HOST = {
    _aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default, _aten.nonzero.default,
    _aten.masked_select.default, _aten._unique2.default,
}  # fmt: skip
_ALLOCATES = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros",
              "new_ones", "new_full", "new_empty_strided"}  # fmt: skip
_SHARES = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.set_.source_Storage_storage_offset,
    _aten.lift_fresh.default,
}
_PASSED_ON = ("storage/copies.py", "comm/communicator.py", "comm/p2p.py finish")  # files, and single functions
_tensor_class: Any = Tensor
_PLAIN = (_tensor_class.__torch_function__, torch.nn.Parameter.__torch_function__)
_DEVICE_OF = _tensor_class.device.__get__
_IS_CUDA = _tensor_class.is_cuda.__get__
_IS_CPU = _tensor_class.is_cpu.__get__


class _Stream:
    """Operations in order; those before ``num_done`` have run."""

    def __init__(self, simulation: SimulatedDevice, name: str, is_eager: bool) -> None:
        self.name = name
        self.device = _CUDA
        self._simulation = simulation
        self._is_eager = is_eager
        self._queue: deque[Callable[[], None]] = deque()
        self._is_idle = threading.Condition()
        self._runner: int | None = None
        self.is_stuck = False
        self.num_asked = 0
        self.num_started = 0
        self.num_done = 0

    def push(self, operation: Callable[[], None]) -> None:
        with self._simulation.lock:
            self._queue.append(operation)
            self.num_asked += 1
        if self._is_eager:
            self.run_to(self.num_asked)

    def run_to(self, number: int) -> None:
        me = threading.get_ident()
        while self.num_done < number:
            with self._is_idle:
                self._is_idle.wait_for(lambda: self._runner in (None, me) or self.num_done >= number or self.is_stuck)
                if self.is_stuck and self.num_done < number:
                    raise Stuck
                if self._runner == me and self.num_started >= number or self.num_done >= number:
                    return
                operation = self._queue.popleft()
                self.num_started += 1
                self._runner = me
            try:
                with self._simulation.bare(), _computing_with(self._simulation.num_threads):
                    operation()
            except Stuck:
                with self._is_idle:
                    self.is_stuck = True
                    self._is_idle.notify_all()
                raise
            with self._is_idle:
                self._runner = None
                self.num_done = self.num_started
                self._is_idle.notify_all()

    # -- As of ``torch.cuda.Stream`` ---------------------------------------------------------------------------------

    def record_event(self) -> _Event:
        return _Event(self, self.num_asked)

    def wait_event(self, event: _Event) -> None:
        if self._simulation.is_heard("wait_event"):
            self.push(event.run)

    def wait_stream(self, other: _Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class _Event:
    """A place in a stream."""

    def __init__(self, stream: _Stream, number: int) -> None:
        self._stream = stream
        self._number = number
        self._is_asked = False

    def run(self) -> None:
        self._stream.run_to(self._number)

    @property
    def is_done(self) -> bool:
        return self._stream.num_done >= self._number

    def synchronize(self) -> None:
        if not self._stream._simulation.is_heard("synchronize"):
            return
        if not self.is_done:
            self._stream._simulation.count("wait")
        self.run()

    def query(self) -> bool:
        """Say whether it is done; somebody who asks for the second time has waited long enough."""
        if self._is_asked:
            self.run()
        self._is_asked = True
        return self.is_done


class _TimedEvent:
    """A place in a stream, and when the device came to it. Asking for it makes nothing run."""

    def __init__(self, simulation: SimulatedDevice) -> None:
        self._simulation = simulation
        self._passed_s: float | None = None

    def record(self, stream: _Stream | None = None) -> None:
        self._passed_s = None
        (stream or self._simulation.current()).push(self._pass)

    def _pass(self) -> None:
        self._passed_s = time.perf_counter()

    def query(self) -> bool:
        return self._passed_s is not None

    def elapsed_time(self, end: _TimedEvent) -> float:
        assert self._passed_s is not None
        assert end._passed_s is not None
        return 1e3 * (end._passed_s - self._passed_s)


class _Block:
    """Device memory: a storage, the stream in which it was allocated, and others that use it."""

    def __init__(self, storage: Any, stream: _Stream) -> None:
        self.storage = storage
        self.stream = stream
        self.users: set[_Stream] = set()
        self.nbytes = int(storage.nbytes())
        self.num_queued = 0  # aliases of it in queues
        self.is_empty = False  # resized to nothing; the memory stays


class _Driver:
    """The part of ``torch.cuda.cudart()`` that locks host memory."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.most_bytes = 2**60  # that may be locked
        self.last_error = 0  # the next kernel that is launched reports it

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if any(start < address + nbytes and address < start + size for start, size in self.locked.items()):
            self.last_error = 712
            return 712
        if sum(self.locked.values()) + nbytes > self.most_bytes:
            self.last_error = 2
            return 2
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if self.locked.pop(address, None) is None:
            self.last_error = 713
            return 713
        return 0

    def launch(self) -> None:
        code, self.last_error = self.last_error, 0
        if code:
            raise RuntimeError(f"CUDA error {code} of an earlier call")

    def holds(self, address: int) -> bool:
        return any(start <= address < start + size for start, size in self.locked.items())


class SimulatedDevice:
    """Lets ``cuda`` be simulated while it is entered; see the notes of the module.

    Args:
        eager: Names of streams whose operations run at once: ``"compute"`` and, in the order in which they are made,
            ``"stream1"``, ``"stream2"``, ...; ``"others"`` are all of the latter.
        deaf_to: A kind and place of ``orders`` that is ignored.

    Attributes:
        waits: How often the host has waited for what had not run yet, by the place in the package that asked for it.
        orders: How often the package asked that something runs behind something else, by kind and place.
    """

    def __init__(self, eager: Sequence[str] = (), deaf_to: str | None = None) -> None:
        self._eager = set(eager)
        self._deaf_to = deaf_to
        self.num_threads = torch.get_num_threads()  # in which every operation is computed
        self.orders: Counter[str] = Counter()
        self.lock = threading.RLock()
        self.waits: Counter[str] = Counter()
        self.driver = _Driver()
        self._local = threading.local()
        self._blocks: dict[int, _Block] = {}
        self._num_streams = 0
        self._streams: list[_Stream] = []
        self._host_queued: Counter[int] = Counter()  # aliases of host memory in queues, by storage
        self.compute = self.new_stream()
        self._pinned: dict[int, Any] = {}
        self._stack = contextlib.ExitStack()
        self.most_bytes = 0

    # -- Streams -----------------------------------------------------------------------------------------------------

    def new_stream(self, device: Any = None, priority: int = 0) -> _Stream:
        name = f"stream{self._num_streams}" if self._num_streams else "compute"
        self._num_streams += 1
        is_eager = name in self._eager or (name != "compute" and "others" in self._eager)
        self._streams.append(_Stream(self, name, is_eager))
        return self._streams[-1]

    def current(self, device: Any = None) -> _Stream:
        if threading.current_thread().name.startswith("lightning_zero"):
            assert getattr(self._local, "is_set", False), "a thread of the package is on the first device of the node"
        return getattr(self._local, "stream", self.compute)

    def _raw_stream(self, index: int) -> int:
        return id(self.current())

    @contextlib.contextmanager
    def in_stream(self, stream: _Stream) -> Iterator[None]:
        before = self.current()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def keep_streams(self, output: Tensor, stream: _Stream) -> None:
        """Run the backward of an output in a stream, down to leaves and nodes that have been kept, as PyTorch does.

        Call it behind a forward in the stream. ``compute`` waits for each node but the leaves.
        """
        caller, nodes = self.compute, [output.grad_fn]
        while nodes:
            node: Any = nodes.pop()
            if node is None or node.metadata.setdefault("stream", stream) is not stream:
                continue
            nodes += [below for below, _ in node.next_functions]
            is_leaf = not node.next_functions

            def enter(grads: Any) -> None:
                stream.wait_stream(caller)
                self._keep(grads, stream)
                self._local.stream = stream

            def leave(grads: Any, _: Any, is_leaf: bool = is_leaf) -> None:
                self._local.stream = caller
                if not is_leaf:
                    caller.wait_stream(stream)
                    self._keep(grads, caller)

            node.register_prehook(enter)
            node.register_hook(leave)

    def _keep(self, tensors: Sequence[Tensor | None], stream: _Stream) -> None:
        for one in tensors:
            if one is not None:
                self.record_stream(one, stream)

    def wait_at_end(self, loss: Tensor, stream: _Stream) -> None:
        """Let a backward end behind the gradients in a stream, as PyTorch does."""
        end = torch.autograd.Variable._execution_engine.queue_callback
        loss.register_hook(lambda _: end(lambda: self.compute.wait_stream(stream)))  # type: ignore[no-untyped-call]

    def _new_event(self, *, enable_timing: bool) -> _TimedEvent:
        assert enable_timing, "other events are recorded by their stream"
        return _TimedEvent(self)

    def synchronize(self, device: Any = None) -> None:
        """Run everything that was asked for."""
        self.compute.synchronize()

    def count(self, why: str) -> None:
        """Note that the host waits."""
        place = _place() or "program"
        if not threading.current_thread().name.startswith("lightning_zero-disk"):  # nobody waits for these
            self.waits[f"{why}: {place}"] += 1

    def is_heard(self, what: str) -> bool:
        """Note that the package asks for order, and say whether it gets it."""
        place = _place(_PASSED_ON)
        if place is None:
            return True
        self.orders[f"{what}: {place}"] += 1
        return f"{what}: {place}" != self._deaf_to

    # -- Memory ------------------------------------------------------------------------------------------------------

    def block_of(self, tensor: Tensor) -> _Block | None:
        try:
            return self._blocks.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # no storage: sparse, fake
            return None

    def take(self, tensor: Tensor) -> Tensor:
        """Let the memory of a tensor be the device's."""
        storage = tensor.untyped_storage()
        with self.lock:
            if storage._cdata not in self._blocks:
                self._blocks[storage._cdata] = _Block(storage, self.current())
                self.most_bytes = max(self.most_bytes, self.num_bytes)
        return tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that are in use."""
        return sum(0 if block.is_empty else block.nbytes for block in self._blocks.values())

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor over the same memory with the shape as it is now."""
        with self.bare():
            return torch.empty(0, dtype=tensor.dtype).set_(
                tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            )

    def sweep(self) -> None:
        """Give back blocks that nobody sees any more: what comes into them next comes in the order of their stream."""
        with self.lock:
            dead = [key for key, block in self._blocks.items() if _use_count(key) - block.num_queued == 1]
            blocks = [self._blocks.pop(key) for key in dead]
        for block in blocks:
            self._spoil(block)

    def _spoil(self, block: _Block) -> None:
        """Let memory be written by somebody else, behind what was asked of the stream that it was taken in."""
        events = [stream.record_event() for stream in block.users]
        block.users = set()
        if any(not event.is_done for event in events):
            return  # as long as these run it is nobody else's; it stays as it is
        with self.lock, self.bare():
            whole = [torch.empty(0, dtype=torch.uint8).set_(block.storage)]
            self._queue([block], 1)

        def spoil() -> None:
            whole[0].fill_(_NAN_BYTE)
            with self.lock:
                whole.clear()
                self._queue([block], -1)

        block.stream.push(spoil)

    def _queue(self, blocks: Sequence[_Block | None], number: int) -> None:
        """Count aliases of blocks in queues."""
        with self.lock:
            for block in blocks:
                if block is not None:
                    block.num_queued += number

    def push(self, tensors: Sequence[Tensor], call: Callable[[list[Tensor]], None]) -> None:
        """Put an operation on tensors into the queue of the current stream."""
        blocks = [self.block_of(tensor) for tensor in tensors]
        on_host = [tensor.untyped_storage()._cdata for tensor, block in zip(tensors, blocks, strict=True) if not block]
        with self.lock:
            aliases = [self.alias(tensor) for tensor in tensors]
            self._queue(blocks, 1)
            self._host_queued.update(on_host)

        def operation() -> None:
            call(aliases)
            with self.lock:
                aliases.clear()
                self._queue(blocks, -1)
                self._host_queued.subtract(on_host)

        self.current().push(operation)

    @contextlib.contextmanager
    def bare(self) -> Iterator[None]:
        """Compute as without the simulation."""
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
            yield

    def record_stream(self, tensor: Tensor, stream: _Stream) -> None:
        """Let memory be used again only when a stream has done what was asked of it by then."""
        block = self.block_of(tensor)
        if block is not None and stream is not block.stream and self.is_heard("record_stream"):
            block.users.add(stream)

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned or self.driver.holds(tensor.data_ptr())

    def _set_device(self, device: torch.device | str | int) -> None:
        if not isinstance(device, int) and torch.device(device).index is None:
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got: {device}")
        self._local.is_set = True

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    # -- Being installed ---------------------------------------------------------------------------------------------

    def patch(self, name: str, value: Any) -> None:
        """Replace a function of ``torch.cuda`` until the device is left."""
        self._stack.enter_context(mock.patch.object(torch.cuda, name, value))

    def __enter__(self) -> SimulatedDevice:
        stack = self._stack
        cuda: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "is_bf16_supported": lambda including_emulation=True: True,
            "current_device": lambda: 0,
            "set_device": self._set_device,
            "current_stream": self.current,
            "default_stream": lambda device=None: self.compute,
            "stream": self.in_stream,
            "Stream": self.new_stream,
            "Event": self._new_event,
            "synchronize": self.synchronize,
            "cudart": lambda: self.driver,
            "mem_get_info": lambda device=None: (2**40, 2**40),
            "memory_allocated": lambda device=None: self.num_bytes,
            "max_memory_allocated": lambda device=None: self.most_bytes,
            "memory_reserved": lambda device=None: self.num_bytes,
            "device": lambda device: contextlib.nullcontext(),
            "get_rng_state": lambda device="cuda": torch.get_rng_state(),
            "set_rng_state": lambda state, device="cuda": None,
            "_lazy_init": lambda: None,
            "is_current_stream_capturing": lambda: False,
        }
        stack.enter_context(mock.patch.object(host, "_FREED", []))  # memory that this driver has locked
        raw = self._raw_stream
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", raw, create=True))
        stack.enter_context(mock.patch.object(torch.accelerator, "is_available", return_value=False))
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(
            mock.patch.object(torch.UntypedStorage, "resize_", self._resize(torch.UntypedStorage.resize_))
        )
        stack.enter_context(
            mock.patch.object(torch.UntypedStorage, "nbytes", self._nbytes(torch.UntypedStorage.nbytes))
        )
        stack.enter_context(mock.patch.object(torch._C, "_storage_Use_Count", self._use_count))
        # It compares devices, which hooks for saved tensors see as they are.
        checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
        stack.enter_context(mock.patch.dict(checks, default=checks["none"]))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", lambda *args: self.record_stream(*args)))
        for name in ("is_autocast_enabled", "get_autocast_dtype", "autocast"):
            stack.enter_context(mock.patch.object(torch, name, _on_host(getattr(torch, name))))
        stack.enter_context(mock.patch.object(threading.Thread, "run", self._run_thread(threading.Thread.run)))
        stack.enter_context(
            mock.patch.object(
                torch.autograd, "_engine_run_backward", self._run_backward(torch.autograd._engine_run_backward)
            )
        )
        stack.enter_context(mock.patch.object(Transports, "current", Transports(self)))
        stack.enter_context(self.modes())
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        transports = Transports.current
        self._stack.close()
        if kind is not None:
            return
        for stream in self._streams:
            with contextlib.suppress(Stuck):
                stream.run_to(stream.num_asked)
        assert transports is not None
        transports.close()

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        with _Operations(self), _Calls(self):
            yield

    def _run_thread(self, run: Any) -> Any:
        def running(thread: threading.Thread) -> None:
            with self.modes():
                run(thread)

        return running

    def _run_backward(self, run: Any) -> Any:
        def running(*args: Any, **kwargs: Any) -> Any:
            # Left by `Tensor.backward`, not by `torch.autograd.backward`; hooks need it, once.
            is_entered = any(isinstance(mode, _Calls) for mode in _get_current_function_mode_stack())
            with contextlib.nullcontext() if is_entered else _Calls(self):
                return run(*args, **kwargs)

        return running

    def _resize(self, original: Any) -> Any:
        def resize_(storage: Any, size: int) -> Any:
            block = self._blocks.get(storage._cdata)
            if block is None:
                return original(storage, size)
            assert size in (0, block.nbytes), "the simulation gives memory back whole, and takes as much again"
            if size == 0 and not block.is_empty:
                self._spoil(block)
            block.is_empty = size == 0
            if not block.is_empty:
                block.stream = self.current()
            return storage

        return resize_

    def _nbytes(self, original: Any) -> Any:
        def nbytes(storage: Any) -> int:
            block = self._blocks.get(storage._cdata)
            return 0 if block is not None and block.is_empty else int(original(storage))

        return nbytes

    def _use_count(self, cdata: int) -> int:
        with self.lock:
            block = self._blocks.get(cdata)
            num_queued = self._host_queued[cdata] if block is None else block.num_queued
            return _use_count(cdata) - num_queued


@contextlib.contextmanager
def _computing_with(num_threads: int) -> Iterator[None]:
    """Let PyTorch compute with a number of threads in this one."""
    before = torch.get_num_threads()
    if before == num_threads:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_use_count = torch._C._storage_Use_Count


def _place(passed_on: Sequence[str] = ()) -> str | None:
    """Return the innermost place in the package, but for files and functions that pass on what others ask for."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        _, package, path = frame.f_code.co_filename.rpartition("/lightning_zero/")
        place = f"{path} {frame.f_code.co_name}"
        if package and path not in passed_on and place not in passed_on:
            return place
        frame = frame.f_back
    return None


def _on_host(function: Any) -> Any:
    """Return a function of a device type that answers for the host in the place of the device."""

    def answer(device_type: str = "cuda", *args: Any, **kwargs: Any) -> Any:
        return function("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return answer


class _Calls(TorchFunctionMode):
    """Lets tensors say where they are, and takes devices out of calls."""

    def __init__(self, simulation: SimulatedDevice) -> None:
        super().__init__()
        self._simulation = simulation

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        simulation = self._simulation
        is_enabled = torch._C._is_torch_function_enabled()  # type: ignore[attr-defined]
        for one in types if is_enabled else ():  # what a class does of its own asks for devices, too
            if one.__torch_function__ not in _PLAIN:
                with _Calls(simulation):
                    return one.__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        if func in (_DEVICE_OF, _IS_CUDA, _IS_CPU):
            with torch._C.DisableTorchFunction():
                is_there = simulation.block_of(args[0]) is not None
                return func(args[0]) if not is_there else _CUDA if func == _DEVICE_OF else func == _IS_CUDA
        if name in ("to", "cuda", "cpu", "type_as") and isinstance(args[0], Tensor):
            return self._move(name, func, args, kwargs)
        if name == "get_device":
            return 0 if simulation.block_of(args[0]) is not None else -1
        if name == "is_pinned":
            return simulation.is_pinned(args[0])
        if name == "pin_memory":
            return simulation.pin(args[0].clone())
        if name in ("tolist", "numpy", "__array__", "__repr__", "__format__") and simulation.block_of(args[0]):
            simulation.count(name)
            simulation.current().run_to(simulation.current().num_asked)
        is_pinned = kwargs.pop("pin_memory", False)
        target = kwargs.get("device")
        if target is not None and torch.device(target).type != "meta":
            kwargs["device"] = "cpu"
            simulation._local.target = torch.device(target).type
        try:
            result = func(*args, **kwargs)
        finally:
            simulation._local.target = None
        return simulation.pin(result) if is_pinned and isinstance(result, Tensor) else result

    def _move(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, *rest = args
        is_there = self._simulation.block_of(tensor) is not None
        devices = [one for one in [*rest, kwargs.get("device")] if isinstance(one, (torch.device, str))]
        others = [one for one in rest if isinstance(one, Tensor)]
        if others:
            goes_there = self._simulation.block_of(others[0]) is not None
            rest = [others[0].dtype]
        elif name in ("cuda", "cpu"):
            goes_there, rest = name == "cuda", []
        else:
            goes_there = torch.device(devices[0]).type == "cuda" if devices else is_there
            rest = [one for one in rest if not isinstance(one, (torch.device, str))]
        kwargs.pop("device", None)
        dtype = next((one for one in [*rest, kwargs.get("dtype")] if isinstance(one, torch.dtype)), tensor.dtype)
        kwargs.pop("dtype", None)
        bools = [one for one in rest if isinstance(one, bool)]
        if goes_there == is_there:
            return _tensor_class.to(tensor, dtype, *bools, **kwargs) if name != "cuda" else tensor
        non_blocking = kwargs.get("non_blocking", bools[0] if bools else False)
        return _Move.apply(tensor, self._simulation, goes_there, dtype, non_blocking)


class _Move(torch.autograd.Function):
    """A copy to or from the device."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, simulation: Any, goes_there: bool, dtype: Any, non_blocking: bool) -> Tensor:
        ctx.simulation, ctx.goes_there, ctx.dtype = simulation, goes_there, tensor.dtype
        with simulation.bare():
            moved = torch.full(tensor.shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype)
        if goes_there:
            simulation.take(moved)
        moved.copy_(tensor, non_blocking=non_blocking)
        return moved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Move.apply(grads[0], ctx.simulation, not ctx.goes_there, ctx.dtype, False), None, None, None, None


class _Operations(TorchDispatchMode):
    """Puts operations on device tensors into the queue of the current stream."""

    def __init__(self, simulation: SimulatedDevice) -> None:
        super().__init__()
        self._simulation = simulation
        self._num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        simulation = self._simulation
        self._num_calls += 1
        if self._num_calls % 4 == 0:
            simulation.sweep()
        target = getattr(simulation._local, "target", None)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if active_fake_mode() is not None or any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)  # shapes, which nobody computes
        there = [tensor for tensor in tensors if simulation.block_of(tensor) is not None]
        if there or target == "cuda":
            simulation.driver.launch()
        allocates = func._schema.name.split("::")[1] in _ALLOCATES
        if not there:
            result = func(*args, **kwargs)
            if target == "cuda" and (not tensors or allocates):
                self._made_there(func, result)
            return result
        if allocates and target == "cpu":
            return func(*args, **kwargs)
        arguments = func._schema.arguments
        writes = any(one.alias_info is not None and one.alias_info.is_write for one in arguments)
        is_view = not writes and any(one.alias_info is not None for one in func._schema.returns)
        if is_view or func in _SHARES:
            return func(*args, **kwargs)
        self._refuse_mixed(func, tensors)
        if func in _READ_BY_HOST or (func is _aten.index.Tensor and _has_mask(args[1])):
            return self._read(func, args, kwargs)
        if func is _aten.copy_.default and simulation.block_of(args[1]) is None and args[1].dim() == 0:
            number = args[1].clone()  # numbers are handed over with the call
            args = (args[0], number, *args[2:])
        return self._write(func, args, kwargs) if writes else self._compute(func, args, kwargs)

    def _made_there(self, func: Any, result: Any) -> None:
        simulation = self._simulation
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                simulation.take(made)
                with simulation.bare():
                    values = made.clone()
                    made.view(-1).view(torch.uint8).fill_(_NAN_BYTE) if made.is_contiguous() and made.numel() else None
                if "empty" not in func._schema.name:
                    simulation.push([made], lambda aliases, values=values: aliases[0].copy_(values))

    def _refuse_mixed(self, func: Any, tensors: Sequence[Tensor]) -> None:
        if func in (_aten.copy_.default, _aten._to_copy.default):
            return
        host = [one for one in tensors if self._simulation.block_of(one) is None and one.dim() > 0]
        if host:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found cuda:0 and cpu as arguments of {func}"
            )

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        simulation = self._simulation
        stream = simulation.current()
        if stream.num_done < stream.num_asked:
            simulation.count(func._schema.name.split("::")[1])
        stream.run_to(stream.num_asked)
        with simulation.bare():
            result = func(*args, **kwargs)
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                simulation.take(made)
        return result

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        simulation = self._simulation
        flat = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = {id(tensor): number for number, tensor in enumerate(flat)}
        shape = tree_map_only(Tensor, lambda tensor: _Place(places[id(tensor)]), (args, kwargs))

        def call(aliases: list[Tensor]) -> None:
            found, named = tree_map_only(_Place, lambda place: aliases[place.number], shape)
            func(*found, **named)

        if torch.Tag.nondeterministic_seeded in func.tags:
            with simulation.bare():
                drawn = torch.empty_like(args[0])
                func(drawn, *args[1:], **kwargs)
            simulation.push([args[0]], lambda aliases: _ignore(aliases[0].copy_(drawn)))
        else:
            simulation.push(flat, call)
        if func is _aten.copy_.default:
            self._wait_for_copy(args, kwargs)
        written = [
            args[position] if position < len(args) else kwargs.get(argument.name)
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if not func._schema.returns:
            return None
        return written[0] if len(func._schema.returns) == 1 else tuple(written)

    def _wait_for_copy(self, args: Any, kwargs: Any) -> None:
        simulation = self._simulation
        host = [one for one in args[:2] if simulation.block_of(one) is None]
        if not host or host[0].numel() == 0 or (host[0].dim() == 0 and host[0] is args[1]):
            return
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        if not (non_blocking and simulation.is_pinned(host[0])):
            stream = simulation.current()
            simulation.count("copy" if not non_blocking else "pageable copy")
            stream.run_to(stream.num_asked)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        simulation = self._simulation
        flat = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = {id(tensor): number for number, tensor in enumerate(flat)}
        shape = tree_map_only(Tensor, lambda tensor: _Place(places[id(tensor)]), (args, kwargs))
        num_arguments = len(flat)  # the call must not hold the arguments: their memory could not be given back
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random:  # its mask or noise must be drawn once, from what the inputs will be
            simulation.current().run_to(simulation.current().num_asked)
        with simulation.bare():
            result = _result_of_now(func, args, kwargs)
            outs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        memory = {tensor.untyped_storage()._cdata for tensor in flat}
        if any(made.untyped_storage()._cdata in memory for made in outs):
            return result  # a view that does not say so
        for made in outs:
            simulation.take(made)
        if is_random:
            return result
        with simulation.bare():
            for made in outs:
                if made.is_floating_point():
                    made.fill_(float("nan"))

        def call(aliases: list[Tensor]) -> None:
            found, named = tree_map_only(_Place, lambda place: aliases[place.number], shape)
            computed = [leaf for leaf in tree_leaves(func(*found, **named)) if isinstance(leaf, Tensor)]
            for made, values in zip(aliases[num_arguments:], computed, strict=True):
                made.copy_(values)

        simulation.push([*flat, *outs], call)
        return result


def _result_of_now(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a result with the right shapes, of arguments that may not have their values yet."""
    try:
        return func(*args, **kwargs)
    except (IndexError, RuntimeError):  # an index that has not been computed is out of range
        found, named = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="cpu"), func(*found, **named))


class _Place:
    """Stands for a tensor among the arguments of a call that waits."""

    def __init__(self, number: int) -> None:
        self.number = number


def _has_mask(indices: Any) -> bool:
    return any(isinstance(one, Tensor) and one.dtype == torch.bool for one in indices)


def _ignore(value: object) -> None:
    del value
