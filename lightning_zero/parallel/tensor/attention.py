"""The forward of ``nn.MultiheadAttention`` with a part of the heads.

PyTorch's reads the weight of ``out_proj`` directly and takes the packed projection for one of all features, so neither
a row layer nor a column layer would be seen: this forward stands in for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_zero.parallel.tensor.collectives import Ranks, copy_to_ranks, gather_from_ranks, reduce_from_ranks
from lightning_zero.parallel.tensor.forwards import Divided
from lightning_zero.parallel.tensor.generators import Region

__all__ = ["AttentionForward"]


class AttentionForward(Divided):
    """Multi-head attention over this rank's heads, with the signature of ``nn.MultiheadAttention.forward``.

    Shapes: B batch, L and S lengths of queries and keys, H this rank's heads, D features of a head.
    """

    module: nn.MultiheadAttention

    def __init__(self, module: nn.MultiheadAttention, ranks: Ranks, region: Region) -> None:
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError(
                "`nn.MultiheadAttention` with `add_bias_kv` or `add_zero_attn` cannot be cut by tensor parallelism."
                " Leave it out of the plan."
            )
        if module.num_heads % ranks.size:
            raise ValueError(
                f"`nn.MultiheadAttention` has {module.num_heads} heads, which {ranks.size} ranks do not divide. Use"
                " another size of tensor parallelism, or leave it out of the plan."
            )
        super().__init__(module, ranks, region)
        module.num_heads //= ranks.size
        # a hook, because layers around it compute without it where they see none (``TransformerEncoderLayer``)
        module.register_forward_pre_hook(_do_nothing)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention's result and, if asked for, its weights."""
        module, is_batched = self.module, query.dim() == 3
        if not is_batched:
            query, key, value = (one.unsqueeze(0 if module.batch_first else 1) for one in (query, key, value))
        q, k, v = self._project(query, key, value)
        if not module.batch_first:
            q, k, v = (one.transpose(0, 1) for one in (q, k, v))
        q, k, v = (one.reshape(*one.shape[:2], module.num_heads, module.head_dim).transpose(1, 2) for one in (q, k, v))
        mask = self._mask(attn_mask, key_padding_mask, q, k.shape[2])
        self.region.enter(q, module.training)
        result, weights = self._attend(q, k, v, mask, with_weights=need_weights)
        self.region.leave(q, module.training)
        result = result.transpose(1, 2).flatten(2)
        result = reduce_from_ranks(functional.linear(result, module.out_proj.weight), self.ranks)
        if module.out_proj.bias is not None:
            result = result + module.out_proj.bias
        if not module.batch_first:
            result = result.transpose(0, 1)
        if weights is not None:
            weights = self._shown(weights, average_attn_weights)
        if not is_batched:
            result = result.squeeze(0 if module.batch_first else 1)
            weights = None if weights is None else weights.squeeze(0)
        return result, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's queries, keys and values."""
        module = self.module
        same = query is key and key is value
        query = copy_to_ranks(query, self.ranks)
        key, value = (query, query) if same else (copy_to_ranks(one, self.ranks) for one in (key, value))
        if module._qkv_same_embed_dim:
            weights: Any = module.in_proj_weight.chunk(3)
        else:
            weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        return tuple(
            functional.linear(one, weight, bias)
            for one, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )

    def _mask(self, mask: Tensor | None, padding: Tensor | None, q: Tensor, length: int) -> Tensor | None:
        """Return both masks as one that is added to the scores."""
        if mask is not None:
            if mask.dim() == 3:  # (B * all heads, L, S)
                mask = mask.view(q.shape[0], -1, *mask.shape[1:]).chunk(self.ranks.size, 1)[self.ranks.rank]
            mask = _additive(mask, q)
        if padding is not None:
            padding = _additive(padding.view(q.shape[0] if padding.dim() == 2 else 1, 1, 1, length), q)
            mask = padding if mask is None else mask + padding
        return mask

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        dropout = self.module.dropout if self.module.training else 0.0
        if not with_weights:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout), None
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = functional.dropout(weights, dropout, training=dropout > 0)
        return weights @ v, weights

    def _shown(self, weights: Tensor, average: bool) -> Tensor:
        """Return the weights as users see them: of all heads, or their mean."""
        if average:
            return reduce_from_ranks(weights.mean(1), self.ranks) / self.ranks.size
        return gather_from_ranks(weights, self.ranks, 1)


def _additive(mask: Tensor, scores: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(scores.dtype)
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(mask, float("-inf"))


def _do_nothing(module: nn.Module, args: Any) -> None:
    """Be a hook."""
