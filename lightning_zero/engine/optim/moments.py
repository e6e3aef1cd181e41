"""Moments of AdamW and Adam in fewer bytes than fp32, as ``optimizer.state`` holds them (ADR 0024).

A parameter's state has ``exp_avg`` and ``exp_avg_sq`` in bf16, or int8 codes of this rank's segment beside their scales
under ``exp_avg_scales`` and ``exp_avg_sq_scales``. Nobody but the step sees them: checkpoints, ``state_dict`` and an
optimizer that is detached have PyTorch's keys in the dtype that is stepped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_zero.config import Moments
from lightning_zero_ops import adamw_int8
from lightning_zero_ops.registry import cdiv

__all__ = ["CODE_KEYS", "DTYPES", "make_codes", "widened"]

DTYPES: dict[Moments, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
CODE_KEYS = ("exp_avg", "exp_avg_scales", "exp_avg_sq", "exp_avg_sq_scales")

_CODES = {
    "exp_avg": (adamw_int8.encode_exp_avg, adamw_int8.decode_exp_avg),
    "exp_avg_sq": (adamw_int8.encode_exp_avg_sq, adamw_int8.decode_exp_avg_sq),
}


def make_codes(state: dict[str, Any], segment: Tensor) -> None:
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


def widened(state: dict[str, Any], moments: Moments, dtype: torch.dtype) -> dict[str, Any]:
    """Return a parameter's state under PyTorch's keys, with moments in ``dtype``, the one that is stepped.

    Args:
        state: The parameter's state; returned as it is with fp32 moments.
        moments: How its moments are kept.
        dtype: Of the result.
    """
    if moments == "fp32":
        return state
    wide = {key: value for key, value in state.items() if key not in CODE_KEYS or key in _CODES}
    with torch.inference_mode(False), torch.no_grad():
        for key, (_, decode) in _CODES.items():
            moment = state.get(key)
            if isinstance(moment, Tensor):  # in ``dtype`` between loading and the next step
                is_code = moment.dtype == torch.int8
                wide[key] = decode(moment, state[f"{key}_scales"]) if is_code else moment.to(dtype)
    return wide
