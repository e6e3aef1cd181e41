"""The dtype in which parameters compute: 16 bits, or their own.

Note [Two dtypes of a parameter]
    A parameter that computes in 16 bits does so for the time of a step, of a forward under autocast, and of the
    backward behind it. A forward without autocast outside a step, such as one in a Trainer's hook, uses the master's
    values in their own dtype, as all other code does (ADR 0041). All ranks begin a scope alike, so whoever takes part
    in a gather knows its dtype. A graph in the own dtype keeps the weights that it needs, so its backward may run in
    any state of the parameters. A graph under autocast keeps them at stage 3 only: at other stages autograd keeps the
    parameter itself, so parameters are in the compute dtype again when a backward begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_zero.engine.units.unit import Unit

__all__ = ["ComputeDtypes"]


class ComputeDtypes:
    """The dtype of the scope that is open, and of the graphs that wait for their backward.

    Args:
        units: All units.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        lowered = [unit for unit in units if unit.computes_lower]
        self._has_lowered = bool(lowered)
        self._lowered = [unit for unit in lowered if not unit.is_sharded_between_uses]
        devices = (buffer.whole.flat.device for unit in units for buffer in unit.buffers)
        self._device_type = next(devices, torch.device("cpu")).type
        self.in_original = False  # forwards of the scope use parameters in their own dtype
        self.graphs_in_original = False  # those of the last scope with gradients, for the next backward
        self._has_lowered_graphs = False  # since the last backward there was a scope with gradients under autocast

    @property
    def has_lowered_outside(self) -> bool:
        """Whether parameters that are whole between uses show another dtype while they compute."""
        return bool(self._lowered)

    @property
    def is_exact(self) -> bool:
        """Whether a forward outside a step uses parameters in their own dtype."""
        return self._has_lowered and not torch.is_autocast_enabled(self._device_type)

    def choose(self, *, in_original: bool) -> None:
        """Let the parameters of a scope compute in 16 bits, or in their own dtype."""
        self.in_original = in_original
        if torch.is_grad_enabled():
            self._has_lowered_graphs |= not in_original
            self.graphs_in_original = not self._has_lowered_graphs
        if in_original:
            self.end_computing()
        else:
            self._begin_computing()

    def _begin_computing(self) -> None:
        for unit in self._lowered:
            unit.begin_computing()

    def end_computing(self) -> None:
        """Let parameters have their own dtype again."""
        for unit in self._lowered:
            unit.end_computing()

    def begin_backward(self) -> None:
        """Show parameters as in the forwards whose graphs run."""
        if not self.graphs_in_original:
            self._begin_computing()

    def end_backward(self) -> None:
        """Let parameters have their own dtype again: no graph waits any more."""
        self._has_lowered_graphs = False
        self.end_computing()

    def explain(self, error: BaseException) -> None:
        """Raise an error with the remedy if a layer computes in 16 bits and its input does not.

        Raises:
            RuntimeError: That may be so.
        """
        if self._has_lowered and isinstance(error, RuntimeError) and _is_of_dtypes(str(error)):
            raise RuntimeError(
                f"{error}. In a step, and in the backward of a forward under autocast, the weights of linear layers,"
                " convolutions and attention are in 16 bits. Where autocast is off there (`torch.autocast(...,"
                " enabled=False)`), cast the input to `layer.weight.dtype`, or give the layer a class of its own with"
                " its own `forward`, whose weights stay in fp32."
            ) from error


def _is_of_dtypes(message: str) -> bool:
    """Say whether PyTorch has refused operands of two dtypes."""
    return "same dtype" in message or ("weight type" in message and "should be the same" in message)
