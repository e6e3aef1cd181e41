"""Models of transformers, as they are and with their default flags, train in pipeline stages as without them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero.config import Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run

transformers = pytest.importorskip("transformers")

VOCAB = 64
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "vocab_size": VOCAB, "max_position_embeddings": 64,
}  # fmt: skip
DECODER: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {**DECODER, "num_experts_per_tok": 2, "output_router_logits": True}
LATENT: dict[str, Any] = {
    **SMALL, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_nope_head_dim": 8,
}  # fmt: skip
GPT2 = {
    "n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {  # class, configuration and its arguments
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER),
    "phi": ("PhiForCausalLM", "PhiConfig", DECODER),
    "falcon": ("FalconForCausalLM", "FalconConfig", SMALL),
    "bloom": ("BloomForCausalLM", "BloomConfig", {
        "hidden_size": 32, "n_layer": 4, "n_head": 4, "vocab_size": VOCAB,
    }),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, "head_dim": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**DECODER, "head_dim": 8}),
    "bert": ("BertForMaskedLM", "BertConfig", {**SMALL, **NO_DROPOUT}),
    "mamba": ("MambaForCausalLM", "MambaConfig", {
        "hidden_size": 32, "num_hidden_layers": 4, "vocab_size": VOCAB, "state_size": 4,
    }),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**EXPERTS, "num_local_experts": 4}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {
        **EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    }),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {
        **EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8,
    }),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {**EXPERTS, "num_experts": 4}),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {**EXPERTS, "num_local_experts": 4, "head_dim": 8}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {
        **LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    }),
    "granite-moe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {**EXPERTS, "num_local_experts": 4}),
    "opt": ("OPTForCausalLM", "OPTConfig", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "bart": ("BartForConditionalGeneration", "BartConfig", {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 4, "encoder_attention_heads": 4, "vocab_size": VOCAB,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0,
    }),
    "t5": ("T5ForConditionalGeneration", "T5Config", {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 4, "num_heads": 4,
        "vocab_size": VOCAB, "dropout_rate": 0.0, "decoder_start_token_id": 0,
    }),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", {
        **EXPERTS, "num_experts_per_tok": 1, "num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 48,
    }),
}  # fmt: skip
POLICIES = ("full", "selective", "offload")  # of `activation_checkpointing`, on padded batches
USES = ("padded", "hidden-states", "recomputed", *POLICIES)


class Family(LightningModule):
    """Fine-tunes a model; adds a loss on all hidden states if it is used so."""

    def __init__(self, family: str, use: str) -> None:
        super().__init__()
        model, config, arguments = FAMILIES[family]
        self.model = getattr(transformers, model)(getattr(transformers, config)(**arguments))
        self.use = use
        if use == "recomputed":
            self.model.gradient_checkpointing_enable()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, mask = batch
        given = {"attention_mask": mask} if self.use in ("padded", *POLICIES) else {}
        if self.use == "hidden-states":
            given["output_hidden_states"] = True
        output = self.model(input_ids=ids, labels=ids, **given)
        loss: Tensor = output.loss
        if self.use == "hidden-states":
            states = output.decoder_hidden_states if "decoder_hidden_states" in output else output.hidden_states
            loss = loss + 0.1 * sum(one.float().pow(2).mean() for one in states)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _fit(rank: int, world: int, family: str, use: str, options: dict[str, Any], batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, mask = torch.randint(3, VOCAB, (16, 8), generator=generator), torch.ones(16, 8, dtype=torch.long)
    mask[::2, :2] = 0
    strategy = ZeroStrategy(**options)
    lightning = trainer(rank, world, strategy, max_epochs=1, accumulate_grad_batches=8 // batch)
    module = seeded(lambda: Family(family, use))
    lightning.fit(module, DataLoader(TensorDataset(ids, mask), batch_size=batch))
    return {name: strategy.full_param(param) for name, param in module.named_parameters()}


CASES = [(family, use, stages) for family in FAMILIES for use in USES for stages in (2, 4)]


@pytest.mark.always
@pytest.mark.parametrize(
    "case",
    sample(CASES, ("mixtral", "hidden-states", 2), ("llama", "padded", 2)),
    ids=lambda case: "{}-{}-pp{}".format(*case),
)
def test_models_of_transformers_train_as_without_a_pipeline(case: tuple[str, str, int]) -> None:
    """The same micro-batches one by one, because auxiliary losses are means over a micro-batch."""
    family, use, stages = case
    expected = run(_fit, 1, family, use, {"stage": 0}, 2)[0]
    options: dict[str, Any] = {"stage": 1, "pipeline": Pipeline(stages=stages, microbatches=4)}
    if use in POLICIES:
        options["activation_checkpointing"] = {"policy": use}
    for weights in run(_fit, stages, family, use, options, 8, timeout_s=120.0):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


class Census(Callback):
    """Counts objects, and bytes of tensors, behind some batches."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (19, 49):
            gc.collect()
            objects = gc.get_objects()
            tensors = {one.untyped_storage().data_ptr(): one.nbytes for one in objects if type(one) is Tensor}
            self.found.append((len(objects), sum(tensors.values())))


def _memory(rank: int, world: int, family: str, use: str) -> list[tuple[int, int]]:
    census = Census()
    strategy = ZeroStrategy(stage=1, pipeline=Pipeline(stages=2, microbatches=2))
    ids = torch.randint(3, VOCAB, (100, 8), generator=torch.Generator().manual_seed(3))
    lightning = trainer(rank, world, strategy, max_epochs=1, callbacks=[census])
    lightning.fit(
        seeded(lambda: Family(family, use)), DataLoader(TensorDataset(ids, torch.ones_like(ids)), batch_size=2)
    )
    return census.found


@pytest.mark.slow
@pytest.mark.parametrize("use", ["padded", "hidden-states", "recomputed"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3", "t5"])
def test_memory_does_not_grow_over_fifty_steps(family: str, use: str) -> None:
    for (objects, nbytes), (objects_later, nbytes_later) in run(_memory, 2, family, use, timeout_s=180.0):
        assert nbytes_later <= nbytes
        assert objects_later <= objects + 100  # of Lightning's own records, less than one per micro-batch


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "schedule"), [(1, "1f1b"), (3, "1f1b"), (3, "interleaved_1f1b")])
def test_bert_trains_with_two_copies_of_each_stage(zero: int, schedule: str) -> None:
    """Module buffers that copies make equal may be saved for a backward."""
    expected = run(_fit, 1, "bert", "padded", {"stage": 0}, 2)[0]
    options = {"stage": zero, "pipeline": Pipeline(stages=2, microbatches=4, schedule=schedule)}  # type: ignore[arg-type]
    for weights in run(_fit, 4, "bert", "padded", options, 8, timeout_s=120.0):  # both copies have the same data
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)
