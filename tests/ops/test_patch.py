from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
import pickle
import pkgutil
from collections.abc import Iterator
from functools import partial, partialmethod, wraps
from typing import Any

import pytest
import torch
import transformers.models
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PixtralVisionConfig,
    PixtralVisionModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    activations,
)
from transformers.loss import loss_utils
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.t5 import modeling_t5
from transformers.utils import deprecation

from lightning_zero import ZeroEngine
from lightning_zero_ops import patch_model, unpatch_model
from lightning_zero_ops.patch import _essence, _template
from tests import worlds
from tests.sampling import sample

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SIZES: dict[str, Any] = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
DROPLESS: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
LLAMA_OPS = {"rms_norm": 5, "swiglu": 2, "rotary": 2, "cross_entropy": 2}
GEMMA_OPS = {"rms_norm": 5, "geglu": 2, "rotary": 2, "cross_entropy": 2}

MODELS: dict[str, tuple[type, Any, dict[str, int]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES), LLAMA_OPS),
    "llama-tied": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True), LLAMA_OPS),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES), LLAMA_OPS),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES), {**LLAMA_OPS, "rms_norm": 9}),
    "gemma": (GemmaForCausalLM, GemmaConfig(**SIZES), GEMMA_OPS),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**SIZES), {**GEMMA_OPS, "rms_norm": 9}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**SIZES, final_logit_softcapping=5.0),
        {**GEMMA_OPS, "rms_norm": 13},
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**SIZES), {**LLAMA_OPS, "rms_norm": 9}),
    "phi3": (
        Phi3ForCausalLM,
        Phi3Config(**SIZES, partial_rotary_factor=0.5),
        {"rms_norm": 5, "rotary": 2, "cross_entropy": 2},
    ),
    "gpt2": (GPT2LMHeadModel, GPT2Config(**GPT2_SIZES, **DROPLESS), {"layer_norm": 5, "cross_entropy": 2}),
}
names = pytest.mark.parametrize("name", MODELS)


def _model(name: str) -> Any:
    kind, config, _ = MODELS[name]
    torch.manual_seed(0)
    return kind(copy.deepcopy(config)).train()


def _batch() -> dict[str, Tensor]:
    tokens = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[:, :3] = -100
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def _losses(model: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**_batch(), **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _assert_same(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """In fp32 within rounding: sums are in another order."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        error = (found[1][name] - grad).norm() / grad.norm()
        assert error < 1e-5, (name, error.item())


# -- Numbers -----------------------------------------------------------------------------------------------------------


@names
def test_patched_model_has_the_loss_and_the_gradients_of_the_model(name: str) -> None:
    model = _model(name)
    expected = _losses(model)
    patch = patch_model(model)
    found = {op: sum(change.op == op for change in patch.changes) for op in {change.op for change in patch.changes}}
    assert found == MODELS[name][2]
    _assert_same(_losses(model), expected)


# Families with copies of what is known; those above are among the fast ones.
FAMILIES = (
    *("mixtral", "qwen2", "qwen3_moe", "olmo", "olmo3", "granite", "smollm3"),
    *("glm4", "stablelm", "starcoder2", "cohere", "exaone4", "ernie4_5", "seed_oss"),
    *("helium", "arcee", "phi", "bitnet", "apertus", "hunyuan_v1_dense"),
)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("family", sample(FAMILIES, "qwen2"))
def test_families_with_copies_of_known_modules_are_patched(family: str, dtype: str) -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes)).train()
    model = model.bfloat16() if dtype == "bf16" else model
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    results = []
    for patched in (False, True):
        if patched:
            print(patch_model(model))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "autocast"):
            torch.manual_seed(1)
            results.append(_losses(model))
    if dtype == "fp32":
        _assert_same(results[1], results[0])
        return
    torch.testing.assert_close(results[1][0], results[0][0], rtol=2**-6, atol=0)
    assert {name: grad.dtype for name, grad in results[1][1].items()} == {
        name: grad.dtype for name, grad in results[0][1].items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_t5_is_patched(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=97,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval().to(dtype)
    batch = {**_batch(), "labels": _batch()["labels"].clamp(min=0)}
    expected = model(**batch)
    found = {change.class_name for change in patch_model(model).changes}
    assert found == {"T5LayerNorm", "T5DenseGatedActDense"}
    outputs = model(**batch)
    eps = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=eps, atol=0)
    assert outputs.logits.dtype == expected.logits.dtype


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_return_the_dtype_of_the_model(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """A norm kept in fp32 made the next Linear of a bf16 model fail."""
    x = torch.randn(2, 32).to(dtype)
    kinds = (
        *(nn.LayerNorm, nn.RMSNorm, modeling_llama.LlamaRMSNorm, modeling_gemma.GemmaRMSNorm),
        *(modeling_olmo2.Olmo2RMSNorm, modeling_t5.T5LayerNorm),
    )
    for kind in kinds:
        norm = kind(32).to(weight_dtype)
        try:
            expected = norm(x)
        except RuntimeError:  # PyTorch's layer norm takes no 16-bit weight for other inputs
            continue
        assert patch_model(norm).changes
        assert norm(x).dtype == expected.dtype, kind
        torch.testing.assert_close(norm(x), expected, rtol=2**-6, atol=2**-6)


def test_a_model_without_known_modules_says_so() -> None:
    with pytest.warns(UserWarning, match="`patch_model` knows no module of Sequential, and changed nothing"):
        patch_model(nn.Sequential(nn.Linear(2, 2)))


@names
def test_undo_gives_the_bits_of_the_model_back(name: str) -> None:
    model = _model(name)
    expected = _losses(model)
    patch = patch_model(model)
    patch.undo()
    patch.undo()
    found = _losses(model)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][key], grad) for key, grad in expected[1].items())
    assert not any("forward" in vars(module) for module in model.modules())


@names
def test_logits_without_labels_and_in_evaluation_are_those_of_the_model(name: str) -> None:
    model, batch = _model(name), _batch()
    tokens = {"input_ids": batch["input_ids"]}
    expected = model(**tokens).logits
    patch_model(model)
    torch.testing.assert_close(model(**tokens).logits, expected, rtol=1e-4, atol=1e-5)
    model.eval()
    assert model(**batch).logits is not None


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generation_and_its_cache_work(name: str) -> None:
    model, tokens = _model(name).eval(), _batch()["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(tokens)}
    expected = model.generate(tokens, **options)
    patch_model(model)
    assert torch.equal(model.generate(tokens, **options), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_options_of_the_loss_are_honoured(name: str) -> None:
    model, batch = _model(name), _batch()
    shifted = batch["labels"].roll(-1, 1)
    cases: list[dict[str, Any]] = [
        {"num_items_in_batch": torch.tensor(40)},
        {"num_items_in_batch": 7},
        {"ignore_index": 5},
        {"shift_labels": shifted},
    ]
    batch["labels"] = batch["labels"].clamp(min=0)
    expected = [model(**batch, **case).loss for case in cases]
    patch_model(model, ["cross_entropy"])
    for case, loss in zip(cases, expected, strict=True):
        torch.testing.assert_close(model(**batch, **case).loss, loss)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_output_has_what_the_model_returns_but_no_logits(name: str) -> None:
    model, batch = _model(name), _batch()
    expected = model(**batch, output_hidden_states=True)
    patch_model(model)
    found = model(**batch, output_hidden_states=True)
    assert type(found) is type(expected)
    assert found.logits is None
    assert found.past_key_values is not None
    torch.testing.assert_close(found.hidden_states[-1], expected.hidden_states[-1], rtol=1e-4, atol=1e-4)
    assert torch.equal(model(**batch, return_dict=False)[0], found.loss)
    positional = model(batch["input_ids"], labels=batch["labels"])
    torch.testing.assert_close(positional.loss, found.loss)


def test_a_vision_tower_without_a_batch_of_angles_runs() -> None:
    """Pixtral's has one row of angles per patch and its heads before them: the first forward crashed."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = PixtralVisionModel(PixtralVisionConfig(**sizes, image_size=32, patch_size=8)).eval()
    images = {"pixel_values": torch.randn(1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])}
    expected = model(**images).last_hidden_state
    patch_model(model)
    torch.testing.assert_close(model(**images).last_hidden_state, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["no batch of angles", "angles that learn", "queries without heads", "heads last"])
def test_rotations_that_the_op_does_not_take_are_those_of_the_family(case: str) -> None:
    model = _model("llama")
    patch_model(model, ["rotary"])
    attention = vars(model.model.layers[0].self_attn)["forward"]
    rotate = attention._function.__globals__["apply_rotary_pos_emb"]
    q, k, cos, sin = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    options = {}
    if case == "no batch of angles":
        cos, sin, options = cos[0], sin[0], {"unsqueeze_dim": 0}
    elif case == "angles that learn":
        cos.requires_grad_()
    elif case == "queries without heads":
        q, k, cos, sin = q[:, 0], k[:, 0], cos[:1], sin[:1]
    else:
        q, k, options = q.transpose(1, 2), k.transpose(1, 2), {"unsqueeze_dim": 2}
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, **options)
    torch.testing.assert_close(rotate(q, k, cos, sin, **options), expected)


ROTATION_OF_TRANSFORMERS_4 = """
def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
"""


@pytest.fixture
def transformers_4(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Llama's attention as transformers 4.56 and 4.57 have it."""
    attention, rename = modeling_llama.LlamaAttention, deprecation.deprecate_kwarg
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", None)
    exec(ROTATION_OF_TRANSFORMERS_4, vars(modeling_llama))  # in the module: its code is compared only then
    wrapped = rename("past_key_value", new_name="past_key_values", version="99")(attention.forward)
    monkeypatch.setattr(attention, "forward", wrapped)
    _template.cache_clear()
    yield
    _template.cache_clear()


@pytest.mark.filterwarnings("ignore:.*past_key_value")
@pytest.mark.usefixtures("transformers_4")
def test_rotary_of_transformers_4_is_patched() -> None:
    """Its rotation takes positions, and its attention renames arguments: neither was matched."""
    model = _model("llama")
    expected = _losses(model)
    assert [change.op for change in patch_model(model, ["rotary"]).changes] == ["rotary"] * 2
    _assert_same(_losses(model), expected)
    forward = vars(model.model.layers[0].self_attn)["forward"]
    rotate = inspect.unwrap(forward._function).__globals__["apply_rotary_pos_emb"]
    q, k, angles = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 1, 8), torch.randn(2, 5, 8)
    expected_turned = modeling_llama.apply_rotary_pos_emb(q, k, angles, angles, None, 2)
    torch.testing.assert_close(rotate(q, k, angles, angles, None, 2), expected_turned)
    hidden, cache = torch.randn(1, 3, 32), DynamicCache()
    forward(hidden, (torch.ones(1, 3, 8), torch.zeros(1, 3, 8)), attention_mask=None, past_key_value=cache)
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_logits_that_are_asked_for_are_returned(name: str) -> None:
    model, batch = _model(name), _batch()
    batch["labels"] = batch["labels"][:, -3:]
    expected = model(**batch, logits_to_keep=3)
    patch_model(model)
    found = model(**batch, logits_to_keep=3)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss)


def test_bf16_model_keeps_its_dtypes() -> None:
    model = _model("llama").bfloat16()
    expected = _losses(model)
    patch_model(model)
    found = _losses(model)
    assert {grad.dtype for grad in found[1].values()} == {torch.bfloat16}
    torch.testing.assert_close(found[0], expected[0], rtol=2**-7, atol=0)


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    model = _model("llama")
    expected = _losses(model)
    patch_model(model)
    model.gradient_checkpointing_enable()
    _assert_same(_losses(model), expected)


def _train(rank: int, world: int, patched: bool) -> tuple[float, dict[str, Tensor]]:
    model = _model("llama")
    if patched:
        patch_model(model)
    engine = ZeroEngine(stage=3, units=["LlamaDecoderLayer"])
    engine.shard(model)
    optimizer = engine.attach(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _ in range(3):
        loss = model(**_batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    values = {name: engine.full_param(parameter) for name, parameter in model.named_parameters()}
    engine.close()
    return loss.item(), values


@pytest.mark.slow
@pytest.mark.world(2)
def test_patched_model_trains_at_stage_3() -> None:
    expected, found = (worlds.run(_train, 2, patched)[0] for patched in (False, True))
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-3)


# -- Edited after it was patched ---------------------------------------------------------------------------------------


def _assert_unpatched_path(model: Any, expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """The model computes logits, and the same loss and gradients."""
    assert model(**_batch()).logits is not None
    _assert_same(_losses(model), expected)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "global"])
def test_a_hook_on_the_head_sees_logits(kind: str) -> None:
    model = _model("llama")
    expected, seen = _losses(model), []
    patch_model(model)
    if kind == "global":
        handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    elif kind == "forward_pre":
        handle = model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    else:
        register = getattr(model.lm_head, f"register_{kind}_hook")
        handle = register(lambda module, _, output: seen.append((output[0] if kind != "forward" else output).shape))
    with handle:
        _assert_unpatched_path(model, expected)
        assert {"forward": (2, 11, 97), "forward_pre": (2, 11, 32), "full_backward": (2, 11, 97)}.get(kind) in (
            None,
            *(tuple(shape) for shape in seen if isinstance(shape, torch.Size)),
        )
    assert model(**_batch()).logits is None


def test_a_hook_of_the_engine_keeps_the_fused_loss() -> None:
    model = _model("llama")
    patch_model(model)

    def gather(module: nn.Module, args: Any) -> None:
        calls.append(args[0].shape)

    calls: list[Any] = []
    gather.__module__ = "lightning_zero.engine.runtime.hooks"
    model.lm_head.register_forward_pre_hook(gather)
    assert model(**_batch()).logits is None
    assert calls == [(2, 11, 32)]


def test_a_loss_function_that_is_set_after_the_patch_is_used() -> None:
    model = _model("llama")
    patch_model(model)
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().mean()
    outputs = model(**_batch())
    torch.testing.assert_close(outputs.loss, outputs.logits.square().mean())


class SiLU(nn.Module):
    """A user's own, which learns its slope."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


def _edit_activations(model: Any, edit: str) -> None:
    for layer in model.model.layers:
        if edit == "class of that name":
            layer.mlp.act_fn = SiLU()
        elif edit == "forward on the instance":
            layer.mlp.act_fn.forward = torch.relu
        else:
            layer.mlp.act_fn.act = torch.relu


@pytest.mark.parametrize("first", ["patch", "edit"])
@pytest.mark.parametrize(
    ("name", "edit"),
    [("llama", "class of that name"), ("llama", "forward on the instance"), ("gemma", "function of the activation")],
)
def test_a_users_activation_is_that_of_the_model(name: str, edit: str, first: str) -> None:
    """A class `SiLU` of a user's was computed as PyTorch's, and its parameters had no gradients."""
    model, other = _model(name), _model(name)
    _edit_activations(other, edit)
    if first == "edit":
        _edit_activations(model, edit)
    patch_model(model)
    if first == "patch":
        _edit_activations(model, edit)
    _assert_same(_losses(model), _losses(other))


def _double(function: Any) -> Any:
    @wraps(function)
    def doubled(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        return (2 * results[0], *results[1:]) if isinstance(results, tuple) else 2 * results

    return doubled


REPLACED: dict[str, tuple[str, Any, str]] = {
    "forward of a norm": ("llama", modeling_llama.LlamaRMSNorm, "forward"),
    "method of a norm": ("gemma", modeling_gemma.GemmaRMSNorm, "_norm"),
    "forward of PyTorch's norm": ("gpt2", nn.LayerNorm, "forward"),
    "forward of an MLP": ("llama", modeling_llama.LlamaMLP, "forward"),
    "forward of an activation": ("llama", activations.SiLUActivation, "forward"),
    "rotation": ("llama", modeling_llama, "apply_rotary_pos_emb"),
    "rotation of halves": ("llama", modeling_llama, "rotate_half"),
    "attention": ("llama", modeling_llama, "eager_attention_forward"),
    "head": ("llama", nn.Linear, "forward"),
    "cross-entropy": ("llama", loss_utils, "fixed_cross_entropy"),
    "loss": ("llama", loss_utils.LOSS_MAPPING, "ForCausalLM"),
}


@pytest.mark.parametrize(
    ("what", "first"),
    [
        pytest.param(what, first, marks=[pytest.mark.slow] if first == "compile" and what != "loss" else [])
        for what in REPLACED
        for first in ("patch", "edit", "compile")
    ],
)
def test_a_function_that_is_replaced_is_used(what: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was used only where the patch came later, or not at all."""
    name, owner, key = REPLACED[what]
    model, other = _model(name), _model(name)
    for one in (model, other):
        one.set_attn_implementation("eager")
        one.config.use_cache = False
    function = owner[key] if isinstance(owner, dict) else getattr(owner, key)
    if first != "edit":
        patch_model(model)
    if isinstance(owner, dict):
        monkeypatch.setitem(owner, key, _double(function))
    else:
        monkeypatch.setattr(owner, key, _double(function))
    if first == "edit":
        patch_model(model)
    expected = _losses(other)
    if first == "compile":
        model.forward = torch.compile(model.forward, backend="eager")
    _assert_same(_losses(model), expected)


@pytest.mark.parametrize("first", ["patch", "edit"])
def test_a_method_on_the_instance_is_used(first: str) -> None:
    norm, x = modeling_gemma.GemmaRMSNorm(32), torch.randn(3, 32)
    if first == "patch":
        patch_model(norm)
    norm._norm = lambda hidden: 3 * hidden
    if first == "edit":
        with pytest.warns(UserWarning, match="changed nothing"):
            patch_model(norm)
    assert torch.equal(norm(x), 3 * x)


def test_a_norm_of_groups_is_left_alone() -> None:
    """Its forward is Gemma's, and the groups are in the method that this calls: it was computed over whole rows."""
    family = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    norm = family.Qwen4ExpTextRMSNorm(32, group_size=8)
    x = torch.randn(4, 32) * torch.tensor([1.0, 10.0, 100.0, 1000.0]).repeat_interleave(8)
    expected = norm(x)
    with pytest.warns(UserWarning, match="changed nothing"):
        patch_model(norm)
    assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("edit", ["weight", "shape"])
def test_a_norm_of_pytorchs_that_is_edited_computes_as_pytorch_does(kind: Any, edit: str) -> None:
    """Without a weight, or over two dimensions, its forward crashed."""
    x, results = torch.randn(3, 2, 8), []
    for patched in (False, True):
        norm = kind(8)
        if patched:
            patch_model(norm)
        if edit == "weight":
            norm.weight = None
        else:
            norm.normalized_shape, norm.weight, norm.bias = (2, 8), nn.Parameter(torch.ones(2, 8)), None
        results.append(norm(x))
    assert torch.equal(results[0], results[1])


def test_hooks_and_another_activation_of_an_mlp_are_honoured() -> None:
    model, seen = _model("llama"), []
    patch_model(model, ["swiglu"])
    with model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: seen.append(1)):
        model(**_batch())
    assert seen == [1]
    other = _model("llama")
    for one in (model, other):
        for layer in one.model.layers:
            layer.mlp.act_fn = nn.Tanh()
    _assert_same(_losses(model), _losses(other))


def test_a_rotary_function_that_is_replaced_later_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("llama")
    patch_model(model, ["rotary"])
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_, **__: (2 * q, k))
    found = _losses(model)
    patch = patch_model(other := _model("llama"), ["rms_norm"])
    patch.undo()
    _assert_same(found, _losses(other))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma"])
def test_forward_mode_derivatives_of_a_patched_model_are_those_of_the_model(name: str) -> None:
    """They were zero."""
    model = _model(name).eval()
    model.set_attn_implementation("eager")  # PyTorch's fused attention has no such derivatives
    x = torch.randn(1, 5, 32)

    def loss(x: Tensor) -> Tensor:
        return model(inputs_embeds=x, use_cache=False).logits.square().sum()

    expected = torch.func.jvp(loss, (x,), (torch.ones_like(x),))[1]
    patch_model(model)
    torch.testing.assert_close(torch.func.jvp(loss, (x,), (torch.ones_like(x),))[1], expected)
    torch.testing.assert_close(torch.func.grad(loss)(x).sum(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("edit", ["resize", "head", "bias"])
def test_a_head_that_is_replaced_computes_the_loss(edit: str) -> None:
    """The new head knew nothing of labels: TypeError in the first forward."""
    model, other = _model("llama"), _model("llama")
    patch = patch_model(model)
    for one in (model, other):
        torch.manual_seed(1)
        if edit == "resize":
            one.resize_token_embeddings(105, mean_resizing=False)
        else:
            one.lm_head = nn.Linear(32, 97, bias=edit == "bias")
    assert model(**_batch()).logits is None
    _assert_same(_losses(model), _losses(other))
    patch.undo()
    assert not any("forward" in vars(module) for module in model.modules())
    assert model(**_batch()).logits is not None


def test_a_new_head_of_a_class_with_a_replaced_forward_gives_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = _model("llama"), _model("llama")
    patch_model(model)
    monkeypatch.setattr(nn.Linear, "forward", _double(nn.Linear.forward))
    for one in (model, other):
        torch.manual_seed(1)
        one.lm_head = nn.Linear(32, 97)
    _assert_unpatched_path(model, _losses(other))


def test_a_head_of_another_kind_gives_logits() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 0.5 * super().forward(input)

    model, other = _model("llama"), _model("llama")
    patch_model(model)
    for one in (model, other):
        torch.manual_seed(1)
        one.lm_head = Scaled(32, 97)
    _assert_unpatched_path(model, _losses(other))


@pytest.mark.parametrize("first", ["patch", "lora"])
def test_lora_on_every_target_is_that_of_the_model(first: str) -> None:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    results = []
    for patched in (False, True):
        model = _model("llama")
        if patched and first == "patch":
            patch_model(model)
        torch.manual_seed(2)
        wrapped = peft.get_peft_model(
            model, peft.LoraConfig(target_modules=targets, init_lora_weights=False, lora_dropout=0.0)
        ).train()
        if patched and first == "lora":
            patch_model(wrapped)
        results.append(_losses(wrapped))
    _assert_same(results[1], results[0])
    unpatch_model(wrapped)
    assert not any("forward" in vars(module) for module in wrapped.modules())
    assert torch.equal(_losses(wrapped)[0], results[0][0])


def test_lora_that_is_merged_gives_the_fused_loss_back() -> None:
    peft = pytest.importorskip("peft")
    model = _model("llama")
    patch_model(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"]))
    assert wrapped(**_batch()).logits is not None
    assert wrapped.merge_and_unload()(**_batch()).logits is None


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_unpatched_for_themselves(how: str) -> None:
    model = _model("llama")
    expected = _losses(model)
    patch_model(model)
    model.resize_token_embeddings(97)
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    unpatch_model(other)
    unpatch_model(other)
    assert torch.equal(_losses(other)[0], expected[0])
    assert model(**_batch()).logits is None
    assert patch_model(other).changes


def test_a_forward_on_top_of_a_patched_one_is_named() -> None:
    model = _model("llama")
    patch = patch_model(model)
    norm = model.model.norm
    vars(norm)["forward"] = partial(vars(norm)["forward"])
    for take_back in (patch.undo, partial(unpatch_model, model)):
        with pytest.raises(
            RuntimeError, match=r"Another forward was put on top of the patched one of \['model.norm'\]"
        ):
            take_back()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", sample(["llama", "gpt2"], "llama"))
def test_patched_model_is_exported(name: str, strict: bool) -> None:
    model = _model(name).eval()
    model.config.use_cache = False
    tokens = {"input_ids": _batch()["input_ids"]}
    expected = model(**tokens).logits
    patch_model(model)
    program = torch.export.export(model, (), tokens, strict=strict)
    torch.testing.assert_close(program.module()(**tokens).logits, expected, rtol=1e-4, atol=1e-5)


# -- What is changed ---------------------------------------------------------------------------------------------------


def test_only_the_named_ops_of_this_instance_change() -> None:
    model, other = _model("llama"), _model("llama")
    patch = patch_model(model, ops=["rms_norm"])
    assert {change.op for change in patch.changes} == {"rms_norm"}
    assert {change.class_name for change in patch.changes} == {"LlamaRMSNorm"}
    assert patch.changes[0].module == "model.layers.0.input_layernorm"
    assert not any("forward" in vars(module) for module in other.modules())
    assert str(patch) == "rms_norm: 5 x LlamaRMSNorm (model.layers.0.input_layernorm, ...)"


def test_classes_names_and_state_stay() -> None:
    model = _model("llama")
    before = [(name, type(module)) for name, module in model.named_modules()], list(model.state_dict())
    patch_model(model)
    assert ([(name, type(module)) for name, module in model.named_modules()], list(model.state_dict())) == before


def test_a_model_of_torchs_own_norms_is_patched() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.RMSNorm(8), nn.LayerNorm(8, bias=False))
    x = torch.randn(3, 8)
    expected = model(x)
    assert len(patch_model(model).changes) == 3
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_an_rms_norm_without_eps_keeps_small_activations(eps: float | None, dtype: torch.dtype) -> None:
    """With the epsilon of bf16, 0.0078, activations of 1e-3 came out a hundred times too small."""
    norm = nn.RMSNorm(64, eps=eps, dtype=dtype)
    x = (1e-3 * torch.randn(8, 64)).to(dtype)
    expected = norm(x)
    patch_model(norm)
    torch.testing.assert_close(norm(x), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


def _norms(kind: type[nn.Module]) -> Iterator[nn.Module]:
    """Make norms of a class, also with every other integer of its arguments."""
    options = [{name: 8} for name, one in inspect.signature(kind).parameters.items() if "int" in str(one.annotation)]
    for given in ({}, *options):
        with contextlib.suppress(Exception):  # needs other arguments
            yield kind(32, **given)


def _classes_of_transformers() -> Iterator[type[nn.Module]]:
    for family in pkgutil.iter_modules(transformers.models.__path__):
        try:
            module = importlib.import_module(f"transformers.models.{family.name}.modeling_{family.name}")
        except (ImportError, RuntimeError):  # needs what is not installed
            continue
        for kind in vars(module).values():
            if inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == module.__name__:
                yield kind


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_norm_of_transformers_that_is_patched_computes_as_before() -> None:
    num_patched = 0
    for kind in _classes_of_transformers():
        if "Norm" not in kind.__name__:
            continue
        for norm in _norms(kind):
            changes = patch_model(norm).changes
            if not changes:
                continue
            unpatch_model(norm)
            num_patched += 1
            with torch.no_grad():
                for parameter in norm.parameters():
                    parameter.normal_()
            x = torch.randn(4, 32) * torch.tensor([1.0, 10.0, 100.0, 1000.0]).repeat_interleave(8)
            expected = norm(x)
            patch_model(norm)
            torch.testing.assert_close(norm(x), expected, msg=lambda text, kind=kind: f"{kind}: {text}")
    assert num_patched > 100


def test_functions_that_differ_by_a_name_or_a_default_are_two() -> None:
    functions = [lambda x, by=1: x.sin() * by, lambda x, by=1: x.cos() * by, lambda x, by=2: x.sin() * by]
    assert len({_essence(function)[:4] for function in functions}) == 3


def test_what_computes_something_else_is_left_alone() -> None:
    class LlamaRMSNorm(nn.LayerNorm):
        """The class of that name from elsewhere is another one."""

    model = nn.Sequential(LlamaRMSNorm(8), nn.LayerNorm((2, 8)), nn.LayerNorm(8, elementwise_affine=False))
    with pytest.warns(UserWarning, match="changed nothing"):
        patch = patch_model(model)
    assert not patch.changes
    assert str(patch) == "nothing"


@pytest.mark.parametrize("ops", [["rms_norms"], ["swiglu", "flash"]])
def test_unknown_ops_are_refused(ops: list[str]) -> None:
    with pytest.raises(ValueError, match=r"Known are rms_norm, layer_norm, swiglu, geglu, rotary, cross_entropy"):
        patch_model(_model("llama"), ops)


def test_ops_that_match_nothing_are_refused_and_nothing_changes() -> None:
    model = _model("gpt2")
    with pytest.raises(ValueError, match=r"`ops` contains \['rotary'\], which match no module of GPT2LMHeadModel"):
        patch_model(model, ["layer_norm", "rotary"])
    assert not any("forward" in vars(module) for module in model.modules())


def test_second_patch_is_refused_and_keeps_the_first() -> None:
    model = _model("llama")
    patch = patch_model(model, ["rms_norm"])
    with pytest.raises(ValueError, match=r"already have a forward of their own on the instance: \['model.layers.0"):
        patch_model(model)
    patch.undo()
    patch_model(model)


def test_copies_and_pickles_are_patched_and_independent() -> None:
    model = _model("llama")
    patch_model(model)
    expected = _losses(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    for other in copies:
        found = _losses(other)
        assert torch.equal(found[0], expected[0])
        assert other(**_batch()).logits is None


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("replacement", sample(["doubled", "a callable"], "doubled"))
@pytest.mark.parametrize("what", [what for what in REPLACED if what != "loss"])
def test_a_copy_uses_a_function_that_was_replaced_before(
    what: str, replacement: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy matched the replaced function as it was, and computed the op in its place."""
    name, owner, key = REPLACED[what]
    model, other = _model(name), _model(name)
    for one in (model, other):
        one.set_attn_implementation("eager")
    patch_model(model)
    function = _double(getattr(owner, key))
    if replacement == "a callable":
        function = partialmethod(function) if key in ("forward", "_norm") else partial(function)
    monkeypatch.setattr(owner, key, function)
    expected = _losses(other)
    made = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    _assert_same(_losses(made), expected)
    if how == "deepcopy":
        monkeypatch.undo()
        assert made(**_batch()).logits is None


@pytest.mark.parametrize("name", sample(["llama", "gpt2"], "gpt2"))
def test_patched_model_compiles_into_one_graph(name: str) -> None:
    model = _model(name)
    model.config.use_cache = False
    patch_model(model)
    batch = _batch()
    expected = model(**batch).loss
    compiled = torch.compile(lambda **inputs: model(**inputs).loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**batch), expected)
