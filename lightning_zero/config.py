"""The options of the engine as frozen dataclasses, and the checks between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

__all__ = ["Communication", "MixedPrecision", "ReduceDtype", "Sharding"]

ReduceDtype = Literal["fp32", "bf16", "fp16"]

_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Sharding:
    """A ZeRO stage as three answers: which of the three is kept sharded? (arXiv:1910.02054, section 5)."""

    params: bool
    grads: bool
    optim: bool

    @classmethod
    def from_stage(cls, stage: int) -> Sharding:
        """Return the answers of a stage.

        Raises:
            ValueError: ``stage`` is not 0, 1, 2 or 3.
        """
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            raise ValueError(f"`stage={stage!r}` is not a ZeRO stage. Use 0, 1, 2 or 3.")
        return cls(params=stage >= 3, grads=stage >= 2, optim=stage >= 1)

    @property
    def stage(self) -> int:
        """The ZeRO stage with these answers."""
        return int(self.params) + int(self.grads) + int(self.optim)


@dataclass(frozen=True, kw_only=True)
class Communication:
    """How ranks exchange parameters and gradients.

    Args:
        reduce_dtype: Dtype in which gradients are accumulated, reduced and kept until the step. The default is fp32,
            and fp64 for fp64 parameters. ``"bf16"`` halves the bytes and the memory of gradients and rounds them.
        prefetch: How many units are gathered ahead of their use at stage 3. 0 gathers a unit when it is needed.
        timeout_s: Seconds after which a collective that its peers do not join fails with an error.
        backend: Backend of the engine's process groups; the default is the backend of the default group.
    """

    reduce_dtype: ReduceDtype | None = None
    prefetch: int = 1
    timeout_s: float = 1800.0
    backend: str | None = None

    def __post_init__(self) -> None:
        if self.reduce_dtype is not None and self.reduce_dtype not in get_args(ReduceDtype):
            raise ValueError(
                f"`reduce_dtype={self.reduce_dtype!r}` is not known. Use 'fp32', 'bf16', 'fp16' or None (fp32)."
            )
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ValueError(f"`prefetch={self.prefetch!r}` must be a number of units, 0 or more.")
        if not self.timeout_s > 0:
            raise ValueError(f"`timeout_s={self.timeout_s!r}` must be a positive number of seconds.")

    def gradient_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of parameters with ``compute_dtype`` are reduced."""
        if self.reduce_dtype is not None:
            return _DTYPES[self.reduce_dtype]
        return torch.float64 if compute_dtype == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """In which dtype parameters compute and in which they are stepped.

    Args:
        compute_dtype: ``None``: parameters compute in the dtype they have. A 16-bit dtype: parameters with two or more
            dimensions outside normalisation modules compute in it, the others stay as they are (ADR 0014).
        masters: Keep fp32 masters of 16-bit parameters. Without them the optimizer steps the 16-bit values.
    """

    compute_dtype: torch.dtype | None = None
    masters: bool = True

    def __post_init__(self) -> None:
        if self.compute_dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"`compute_dtype={self.compute_dtype}` must be torch.bfloat16, torch.float16 or None.")

    def master_dtype(self, original: torch.dtype, compute: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter that arrived as ``original`` and computes in ``compute`` is stepped."""
        if original.itemsize > compute.itemsize:
            return original
        return torch.float32 if self.masters and compute.itemsize < 4 else compute
