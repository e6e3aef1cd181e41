"""Module buffers, such as the running means of batch norm: every rank has them whole.

Note [One message]
    Rank 0's buffers travel in one message, whose length is that of the last layout (names, dtypes, shapes) that the
    ranks have agreed on, so that it never differs between them. It starts with a digest of rank 0's layout. A rank
    whose layout has changed (a queue that grows, a buffer that was assigned), or that sees that rank 0's has, compares
    it with the others' first. On a CPU every rank looks at the digest; elsewhere that would make the device wait, and
    only ranks whose own layout has changed do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_zero.comm.agreement import digest_of, first_difference, require_same
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.peers import is_pretended
from lightning_zero.engine.units.partition import make_buffers_real
from lightning_zero.engine.units.shardable import check_new_buffers

__all__ = ["ModuleBuffers", "buffer_facts"]

_WHAT = "module buffers"
_REMEDY = "Register, assign and delete module buffers on every rank alike, each with one shape and dtype."
_HEADER_BYTES = 8


class ModuleBuffers:
    """Moves the buffers of a module to a device and keeps them equal.

    Args:
        module: The module.
        device: Where the buffers go.
        communicator: Over the ranks that share the model, all with the same ``buffer_facts``.

    Raises:
        ValueError: A buffer is of a kind that cannot be sent.
    """

    def __init__(self, module: nn.Module, device: torch.device, communicator: Communicator) -> None:
        self._communicator = communicator
        self._device = device
        self._module = module
        self._modules: list[tuple[str, nn.Module]] = []  # by prefix of their buffers' names
        self.is_on = True  # else `broadcast` does nothing
        self._is_due = True
        self._find()
        # - Facts that the ranks have agreed on
        self._layout: tuple[object, ...] = ()
        self._facts: dict[str, str] = {}
        self._nbytes = 0
        self._header = torch.empty(0, device="cpu")
        if communicator.world_size > 1:
            self._accept(self._collect())

    def _find(self) -> None:
        """Find the modules and move their buffers to the device."""
        self._modules = [(f"{name}." if name else "", child) for name, child in self._module.named_modules()]
        for _, child in self._modules:
            for key, buffer in child._buffers.items():
                if buffer is not None:
                    # Modules of other parts of the model were not made real.
                    is_meta = buffer.is_meta
                    child._buffers[key] = (
                        torch.zeros_like(buffer, device=self._device) if is_meta else buffer.to(self._device)
                    )

    def admit(self) -> None:
        """Check the buffers of modules that the program has added, and give those on the meta device values.

        No collective. Parameters show their values.

        Raises:
            ValueError: A buffer shares memory with a parameter, or nothing gives it values.
        """
        known = {id(child) for _, child in self._modules}
        added = [(name, child) for name, child in self._module.named_modules() if id(child) not in known]
        check_new_buffers(self._module, added)
        for name, child in added:
            make_buffers_real(child, name, self._device)

    def broadcast(self, is_due_again: bool = True) -> None:
        """Give all ranks rank 0's module buffers, if that is due. Collective: all ranks.

        Args:
            is_due_again: Whether to do so at the next call, too; as under DistributedDataParallel not behind a
                micro-batch that keeps its gradients, nor behind an evaluation.

        Raises:
            ValueError: The ranks have different buffers; names the first difference.
        """
        if not self.is_on:
            return
        is_due, self._is_due = self._is_due, is_due_again
        buffers = self._collect()
        if self._communicator.world_size == 1 or not is_due or not (buffers or self._facts):
            return
        with torch.inference_mode(False), torch.no_grad():
            is_changed = _layout(buffers) != self._layout
            message = self._send(buffers, is_changed)
            if is_changed or (message.is_cpu and not torch.equal(message[:_HEADER_BYTES], self._header)):
                self._agree(buffers, message)
                message = self._send(buffers, is_changed=False)
            if self._communicator.rank > 0:
                _overwrite(buffers, message[_HEADER_BYTES:])

    def make_equal(self) -> None:
        """Give all ranks rank 0's module buffers now, and when the next step begins. Collective: all ranks.

        Those that the program has moved come back to the device, and those of modules that it has replaced count too.

        Raises:
            ValueError: The ranks have different buffers; names the first difference.
        """
        self._find()
        self.is_on = self._is_due = True
        if self._communicator.world_size > 1:
            buffers = self._collect()
            require_same(self._communicator, _facts(buffers), _WHAT, _REMEDY)
            self._accept(buffers)
        self.broadcast()

    def _collect(self) -> dict[str, Tensor]:
        """Return the buffers by name, each once; those that cannot be written make room for copies that can."""
        found: dict[int, tuple[str, Tensor]] = {}
        for prefix, child in self._modules:
            for key, buffer in child._buffers.items():
                if buffer is None:
                    continue
                if buffer.is_inference() or _is_expanded(buffer):
                    with torch.inference_mode(False), torch.no_grad():
                        child._buffers[key] = buffer = buffer.clone(memory_format=torch.contiguous_format)
                found.setdefault(id(buffer), (f"{prefix}{key}", buffer))
        return dict(found.values())

    def _accept(self, buffers: Mapping[str, Tensor]) -> None:
        """Keep the layout and digest of module buffers on which all ranks agreed."""
        self._layout = _layout(buffers)
        self._facts = _facts(buffers)
        self._nbytes = sum(part.nbytes for name, buffer in buffers.items() for part in _parts(name, buffer))
        self._header = self._header_of(self._facts)

    def _header_of(self, facts: Mapping[str, str]) -> Tensor:
        return torch.tensor([digest_of(facts)], device="cpu").view(torch.uint8).to(self._device)

    def _send(self, buffers: Mapping[str, Tensor], is_changed: bool) -> Tensor:
        """Return rank 0's message, in which there are no values if its layout has changed."""
        message = torch.empty(_HEADER_BYTES + self._nbytes, dtype=torch.uint8, device=self._device)
        is_source = self._communicator.rank == 0 or is_pretended()
        if is_source and is_changed:
            message[:_HEADER_BYTES].copy_(self._header_of(_facts(buffers)))
        elif is_source:
            parts = [_bytes_of(part) for name, buffer in buffers.items() for part in _parts(name, buffer)]
            message = torch.cat([self._header, *(part.to(self._device) for part in parts)])
        self._communicator.broadcast(message, _WHAT)
        return message

    def _agree(self, buffers: Mapping[str, Tensor], message: Tensor) -> None:
        """Make a changed layout the one of the messages. Collective: all ranks, unless rank 0's has not changed."""
        facts, rank = _facts(buffers), self._communicator.rank
        if rank > 0 and torch.equal(message[:_HEADER_BYTES], self._header):
            difference = first_difference({0: self._facts, rank: facts})
            raise ValueError(f"The ranks have different {_WHAT}: {difference}. {_REMEDY}")
        require_same(self._communicator, facts, _WHAT, _REMEDY)
        self._accept(buffers)


def buffer_facts(module: nn.Module) -> dict[str, str]:
    """Return the facts that must agree on all ranks about module buffers: kind, dtype and shape, by name."""
    return _facts(dict(module.named_buffers()))


def _facts(buffers: Mapping[str, Tensor]) -> dict[str, str]:
    return {f"module buffer `{name}`": _describe(name, buffer) for name, buffer in buffers.items()}


def _describe(name: str, buffer: Tensor) -> str:
    text = f"{tuple(buffer.shape)} {str(buffer.dtype).removeprefix('torch.')}"
    if type(buffer) in (Tensor, nn.Buffer) and buffer.layout is torch.strided:
        return text
    parts = ", ".join(f"{tuple(part.shape)} {part.dtype}" for part in _parts(name, buffer))
    return f"{text} {type(buffer).__name__} {str(buffer.layout).removeprefix('torch.')} of {parts}"


def _layout(buffers: Mapping[str, Tensor]) -> tuple[object, ...]:
    """Return a key that is equal where ``_facts`` is, faster."""
    return tuple(
        (name, buffer.dtype, buffer.shape)
        if buffer.layout is torch.strided and type(buffer) in (Tensor, nn.Buffer)
        else (name, _describe(name, buffer))
        for name, buffer in buffers.items()
    )


def _parts(name: str, buffer: Tensor) -> list[Tensor]:
    """Return the ordinary tensors that a buffer consists of; writing into them writes the buffer.

    Raises:
        ValueError: It is of a kind of which that is not known.
    """
    if is_traceable_wrapper_subclass(buffer):
        keys, _ = buffer.__tensor_flatten__()
        return [part for key in keys for part in _parts(name, getattr(buffer, key))]
    if buffer.layout is torch.sparse_coo:
        return [buffer._indices(), buffer._values()]
    if buffer.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [buffer.crow_indices(), buffer.col_indices(), buffer.values()]
    if buffer.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [buffer.ccol_indices(), buffer.row_indices(), buffer.values()]
    if buffer.layout is not torch.strided or buffer.is_quantized:
        raise ValueError(
            f"The module buffer `{name}` ({type(buffer).__name__}, {buffer.dtype}, {buffer.layout}) cannot be sent to"
            " the other ranks. Keep it as a plain attribute, which every rank sets by itself, or as a plain tensor."
        )
    return [buffer]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _overwrite(buffers: Mapping[str, Tensor], values: Tensor) -> None:
    parts = [part for name, buffer in buffers.items() for part in _parts(name, buffer)]
    pieces = torch.split(values, [part.nbytes for part in parts])
    # A forward that waits for its backward may have saved them; as under DistributedDataParallel that is no error.
    with _unsafe_preserve_version_counter(tuple(parts)):
        for part, piece in zip(parts, pieces, strict=True):
            part.detach().copy_(piece.clone().view(part.dtype).view(part.shape))


def _is_expanded(buffer: Tensor) -> bool:
    """Say whether elements of a buffer share their memory, so that they cannot be written one by one."""
    if buffer.layout is not torch.strided or is_traceable_wrapper_subclass(buffer):
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
