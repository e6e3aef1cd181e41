"""Fused operations: a Triton kernel for GPUs and a PyTorch implementation for CPUs each.

On flat tensors (the engine's, optimizers', and collectives'), and on the tensors of models, with gradients.
"""

from __future__ import annotations

import lightning_zero_ops.selfcheck  # noqa: F401  # ops ask it before they launch kernels
from lightning_zero_ops.adamw import adamw_step_
from lightning_zero_ops.attention import causal_attention
from lightning_zero_ops.cross_entropy import linear_cross_entropy
from lightning_zero_ops.flat import accumulate_, clip_value_, sq_norm_and_finite
from lightning_zero_ops.gated import geglu, swiglu
from lightning_zero_ops.grouped import grouped_linear
from lightning_zero_ops.lion import lion_step_
from lightning_zero_ops.norms import layer_norm, rms_norm
from lightning_zero_ops.patch import Change, Patch, patch_model, unpatch_model
from lightning_zero_ops.permute import permute_tokens, unpermute_tokens
from lightning_zero_ops.quantize import dequantize_blockwise, dequantize_reduce, quantize_blockwise
from lightning_zero_ops.rotary import apply_rotary
from lightning_zero_ops.rounding import round_stochastic
from lightning_zero_ops.sgd import sgd_step_

__all__ = [
    "Change",
    "Patch",
    "accumulate_",
    "adamw_step_",
    "apply_rotary",
    "causal_attention",
    "clip_value_",
    "dequantize_blockwise",
    "dequantize_reduce",
    "geglu",
    "grouped_linear",
    "layer_norm",
    "linear_cross_entropy",
    "lion_step_",
    "patch_model",
    "permute_tokens",
    "quantize_blockwise",
    "rms_norm",
    "round_stochastic",
    "sgd_step_",
    "sq_norm_and_finite",
    "swiglu",
    "unpatch_model",
    "unpermute_tokens",
]
