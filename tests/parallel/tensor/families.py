"""Small models of many families, unmodified, and a call of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["FAMILIES", "Family", "make"]

WIDTH, HEADS, WIDE, VOCAB = 64, 8, 96, 128

Family = tuple[nn.Module, Callable[[nn.Module], Any]]

COMMON: dict[str, Any] = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2, "vocab_size": VOCAB,
    "intermediate_size": WIDE,
}  # fmt: skip
GROUPED: dict[str, Any] = {**COMMON, "num_key_value_heads": 4}
GPT: dict[str, Any] = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": 2, "vocab_size": VOCAB, "n_positions": 64}
FALCON: dict[str, Any] = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2, "vocab_size": VOCAB, "alibi": False,
}  # fmt: skip
ENCODER_DECODER: dict[str, Any] = {
    "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS, "vocab_size": VOCAB,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": WIDE, "decoder_ffn_dim": WIDE,
}  # fmt: skip
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {  # class, configuration and its arguments
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 6}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 8, "sliding_window": 6}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "head_dim": 8, "sliding_window": 6}),
    "phi": ("PhiForCausalLM", "PhiConfig", COMMON),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GROUPED, "pad_token_id": 0}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", COMMON),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "gpt-neo": ("GPTNeoForCausalLM", "GPTNeoConfig", {
        "hidden_size": WIDTH, "num_heads": HEADS, "num_layers": 2, "attention_types": [[["global", "local"], 1]],
        "vocab_size": VOCAB, "max_position_embeddings": 64,
    }),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 4}),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**GPT, "rotary_dim": 4, "n_ctx": 64}),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT),
    "bloom": ("BloomForCausalLM", "BloomConfig", {
        "hidden_size": WIDTH, "n_head": HEADS, "n_layer": 2, "vocab_size": VOCAB,
    }),
    "opt": ("OPTForCausalLM", "OPTConfig", {
        "hidden_size": WIDTH, "ffn_dim": WIDE, "num_attention_heads": HEADS, "num_hidden_layers": 2,
        "vocab_size": VOCAB, "word_embed_proj_dim": WIDTH, "max_position_embeddings": 64,
    }),
    "mpt": ("MptForCausalLM", "MptConfig", {
        "d_model": WIDTH, "n_heads": HEADS, "n_layers": 2, "vocab_size": VOCAB, "max_seq_len": 64,
    }),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**FALCON, "num_kv_heads": 4, "new_decoder_architecture": True}),
    "falcon-mqa": ("FalconForCausalLM", "FalconConfig", {**FALCON, "multi_query": True, "parallel_attn": True}),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", GROUPED),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {**COMMON, "num_key_value_heads": 8}),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**GROUPED, "use_qk_norm": True, "pad_token_id": 0}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", GROUPED),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", GROUPED),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {**GROUPED, "head_dim": 8, "pad_token_id": 0}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", GROUPED),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {
        **COMMON, "num_key_value_heads": 8, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2,
    }),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {
        **GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
    }),
    "mamba": ("MambaForCausalLM", "MambaConfig", {
        "hidden_size": WIDTH, "num_hidden_layers": 2, "vocab_size": VOCAB, "state_size": 8,
    }),
    "bert": ("BertForMaskedLM", "BertConfig", {**COMMON, "max_position_embeddings": 64}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**COMMON, "max_position_embeddings": 64}),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", {
        "dim": WIDTH, "n_heads": HEADS, "n_layers": 2, "hidden_dim": WIDE, "vocab_size": VOCAB,
    }),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**COMMON, "embedding_size": WIDTH}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**COMMON, "embedding_size": 32}),
    "deberta-v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", {
        **COMMON, "relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"],
    }),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {**COMMON, "pad_token_id": 0}),
    "vit": ("ViTModel", "ViTConfig", {
        "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": WIDE,
        "image_size": 16, "patch_size": 4,
    }),
    "t5": ("T5ForConditionalGeneration", "T5Config", {
        "d_model": WIDTH, "d_kv": 8, "d_ff": WIDE, "num_layers": 2, "num_heads": HEADS, "vocab_size": VOCAB,
        "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
    }),
    "bart": ("BartForConditionalGeneration", "BartConfig", {**ENCODER_DECODER, "max_position_embeddings": 64}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {
        **ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    }),
}  # fmt: skip
EAGER = ("gemma2", "bloom", "mpt", "codegen", "deberta-v2", "gpt-oss")


class PackedAttention(nn.Module):
    """Queries, keys and values of one matrix; counts its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads = HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.n_heads, -1).transpose(1, 2)

    def _qkv(self, x: Tensor) -> Any:
        return self.qkv(x).chunk(3, -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(one) for one in self._qkv(x))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.drop(self.proj(y.transpose(1, 2).flatten(2)))
        return result


class SeparateAttention(PackedAttention):
    """Three matrices."""

    def __init__(self) -> None:
        super().__init__()
        del self.qkv
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def _qkv(self, x: Tensor) -> Any:
        return self.q(x), self.k(x), self.v(x)


class FixedAttention(PackedAttention):
    """Views that know the whole width, so that heads cannot be divided."""

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2)


class Layer(nn.Module):
    """A block of a hand-written model."""

    def __init__(self, attention: type[PackedAttention]) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(WIDTH), attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        result: Tensor = x + self.mlp(self.ln2(x))
        return result


class HandWritten(nn.Module):
    """A decoder as many people write it."""

    def __init__(self, attention: type[PackedAttention], tied: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(*(Layer(attention) for _ in range(2)))
        self.head = None if tied else nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.emb(ids))
        return functional.linear(x, self.emb.weight) if self.head is None else self.head(x)


HAND_WRITTEN: dict[str, Callable[[], nn.Module]] = {
    "hand-packed": lambda: HandWritten(PackedAttention),
    "hand-separate": lambda: HandWritten(SeparateAttention),
    "hand-fixed": lambda: HandWritten(FixedAttention),
    "hand-tied": lambda: HandWritten(PackedAttention, tied=True),
    "torch-encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, WIDE, batch_first=True), 2),
    "torch-transformer": lambda: nn.Transformer(WIDTH, HEADS, 2, 2, WIDE),
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH)),
}
FAMILIES = [*TRANSFORMERS, *HAND_WRITTEN]


def make(name: str, **changes: Any) -> Family:
    """Return a model with seeded values, and a function that calls it, or a copy, with a batch of two."""
    torch.manual_seed(0)
    if name in HAND_WRITTEN:
        model, call = HAND_WRITTEN[name](), _hand_written_call(name)
    else:
        import transformers

        model_class, config_class, arguments = TRANSFORMERS[name]
        config = getattr(transformers, config_class)(**{**arguments, **changes})
        if name in EAGER:
            config._attn_implementation = "eager"
        if name == "mixtral":
            config._experts_implementation = "batched_mm"  # its loop over experts asks for values
        model, call = getattr(transformers, model_class)(config), _transformers_call(name)
    return model.train(), call


def _ids() -> Tensor:
    return torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))


def _hand_written_call(name: str) -> Callable[[nn.Module], Any]:
    x = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    if name == "torch-transformer":
        return lambda model: model(x, x)
    return lambda model: model(_ids() if name.startswith("hand") else x)


def _transformers_call(name: str) -> Callable[[nn.Module], Any]:
    ids, mask = _ids(), torch.ones(2, 12, dtype=torch.long)
    mask[0, -3:] = 0
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=generator)
        return lambda model: model(pixel_values=pixels)
    if name == "whisper":
        features = torch.randn(2, 8, 20, generator=generator)
        return lambda model: model(input_features=features, decoder_input_ids=ids[:, :8])
    if name in ("t5", "bart"):
        return lambda model: model(input_ids=ids, decoder_input_ids=ids[:, :8])
    if name == "mamba":
        return lambda model: model(input_ids=ids)
    return lambda model: model(input_ids=ids, attention_mask=mask)
