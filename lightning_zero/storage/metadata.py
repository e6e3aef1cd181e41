"""Functions that read a tensor's metadata: they need none of its values.

Tensors whose values are not there (offloaded to a disk, sharded over ranks, before their step) answer all of them.
Beyond these, each of their classes has its own answers: views, attributes, new tensors of the same shape.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["QUESTIONS", "QUESTION_FUNCTIONS"]

QUESTIONS = frozenset([
    "numel", "nelement", "dim", "ndimension", "size", "stride", "element_size", "__len__", "__hash__", "get_device",
    "storage_offset", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_contiguous",
    "is_inference", "is_shared", "is_pinned", "is_same_size", "has_names", "dense_dim", "sparse_dim", "result_type",
    "requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook",
])  # fmt: skip

_METHODS = {getattr(torch.Tensor, name) for name in QUESTIONS if hasattr(torch.Tensor, name)}
QUESTION_FUNCTIONS: frozenset[Any] = frozenset(
    _METHODS | {vars(torch)[name] for name in QUESTIONS & vars(torch).keys()}
)
