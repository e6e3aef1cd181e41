"""Moments of AdamW and Adam of one byte: int8 codes of this rank's segment beside their scales (ADR 0024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_zero.engine.optim.step_rules import ADAM, adam_options
from lightning_zero_ops import adamw_int8
from lightning_zero_ops.registry import cdiv

__all__ = ["ADAM_INT8", "decode"]

_CODES = {
    "exp_avg": (adamw_int8.encode_exp_avg, adamw_int8.decode_exp_avg),
    "exp_avg_sq": (adamw_int8.encode_exp_avg_sq, adamw_int8.decode_exp_avg_sq),
}


def decode(state: Mapping[str, Any], key: str) -> Tensor:
    """Return a moment in fp32."""
    return _CODES[key][1](state[key], state[f"{key}_scales"])


def _make_codes(state: dict[str, Any], segment: Tensor) -> None:
    """Make the moments of a parameter int8: zeros at first, else the loaded ones, quantized.

    Args:
        state: The parameter's state, changed.
        segment: The parameter's segment of the master.
    """
    for key, (encode, _) in _CODES.items():
        present, scales = state.get(key), f"{key}_scales"
        if present is None:
            num_blocks = cdiv(segment.numel(), adamw_int8.BLOCK)
            state[key] = torch.zeros_like(segment, dtype=torch.int8)
            state[scales] = torch.zeros(num_blocks, dtype=torch.float32, device=segment.device)
        elif present.dtype != torch.int8:
            state[key], state[scales] = encode(present.detach())


def _step(
    group: Mapping[str, Any], number: int, *, param: Tensor, moments: list[Tensor], grad: Tensor, **options: Any
) -> None:
    del options["tails"]  # nobody promises bits
    m, v, m_scales, v_scales = moments
    adamw_int8.pytorch_step_(param, m, m_scales, v, v_scales, grad=grad, step=number, **adam_options(group), **options)


ADAM_INT8 = replace(
    ADAM, step=_step, launch=None, scales=("exp_avg_scales", "exp_avg_sq_scales"), make_state=_make_codes
)
