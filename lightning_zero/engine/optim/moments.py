"""Moments of AdamW and Adam in fewer bytes than fp32, as ``optimizer.state`` holds them (ADR 0024).

A parameter's state has ``exp_avg`` and ``exp_avg_sq`` in bf16, or codes of this rank's segment and their scales under
keys of their own. Nobody but the step sees them: checkpoints, ``state_dict`` and an optimizer that is detached have
PyTorch's keys in the dtype that is stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zero.config import Moments
from lightning_zero.engine.optim import int8_moments
from lightning_zero.engine.optim.step_rules import ADAM, StepRule
from lightning_zero_ops import adamw_int8

__all__ = ["MOMENT_FORMATS", "MomentFormat"]

_KEYS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class MomentFormat:
    """The format of moments between steps.

    Args:
        name: The value of the option ``moments``.
        dtype: Of the moments or their codes.
        adam: The step of AdamW and Adam on them.
        decode: Returns a moment as a float, given the parameter's state and the key.
    """

    name: str
    dtype: torch.dtype
    adam: StepRule = ADAM
    decode: Callable[[Mapping[str, Any], str], Tensor] = lambda state, key: state[key]

    @property
    def is_pytorchs(self) -> bool:
        """Whether moments are in the dtype that is stepped, as PyTorch's own step keeps them."""
        return self.name == "fp32"

    @property
    def itemsize(self) -> int:
        """Bytes per element of both moments."""
        return 2 * self.dtype.itemsize

    @property
    def bytes_per_element(self) -> float:
        """Bytes of both moments and their scales per element."""
        return self.itemsize + len(self.adam.scales) * torch.float32.itemsize / adamw_int8.BLOCK

    def dtype_for(self, stepped: torch.dtype) -> torch.dtype:
        """Return the dtype of moments of values in ``stepped``."""
        return stepped if self.is_pytorchs else self.dtype

    def widened(self, state: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        """Return a parameter's state under PyTorch's keys, with moments in ``dtype``, the one that is stepped.

        Args:
            state: The parameter's state; returned as it is with fp32 moments.
            dtype: Of the result.
        """
        if self.is_pytorchs:
            return state
        wide = {key: value for key, value in state.items() if key not in self.adam.scales}
        with torch.inference_mode(False), torch.no_grad():
            for key in _KEYS:
                moment = state.get(key)
                if isinstance(moment, Tensor):  # in ``dtype`` between loading and the next step
                    wide[key] = (self.decode(state, key) if moment.dtype == self.dtype else moment).to(dtype)
        return wide


MOMENT_FORMATS: dict[Moments, MomentFormat] = {
    "fp32": MomentFormat("fp32", torch.float32),
    "bf16": MomentFormat("bf16", torch.bfloat16),
    "int8": MomentFormat("int8", torch.int8, int8_moments.ADAM_INT8, int8_moments.decode),
}
