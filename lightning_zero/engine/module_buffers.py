"""Module buffers, such as the running means of batch norm: every rank has them whole."""

from __future__ import annotations

import torch
from torch import nn

from lightning_zero.comm.communicator import Communicator

__all__ = ["ModuleBuffers"]


class ModuleBuffers:
    """Moves the buffers of a module to a device and keeps them equal.

    Args:
        module: The module.
        device: Where the buffers go.
        communicator: Over the ranks that share the model.
    """

    def __init__(self, module: nn.Module, device: torch.device, communicator: Communicator) -> None:
        self._communicator = communicator
        self._places: list[tuple[nn.Module, str]] = []
        for child in module.modules():
            for key, buffer in child._buffers.items():
                if buffer is None:
                    continue
                # Modules of other parts of the model were not made real.
                child._buffers[key] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                self._places.append((child, key))

    def broadcast(self) -> None:
        """Give all ranks rank 0's module buffers, in one message. Collective: all ranks."""
        if self._communicator.world_size == 1 or not self._places:
            return
        buffers = [buffer for child, key in self._places if (buffer := child._buffers.get(key)) is not None]
        with torch.inference_mode(False), torch.no_grad():
            message = torch.cat([buffer.reshape(-1).contiguous().view(torch.uint8) for buffer in buffers])
            self._communicator.broadcast(message, "module buffers")
            if self._communicator.rank == 0:
                return
            pieces = torch.split(message, [buffer.nbytes for buffer in buffers])
            for buffer, piece in zip(buffers, pieces, strict=True):
                buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))
