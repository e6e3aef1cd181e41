"""What autocast leaves in fp32 computes in fp32: modules with matrices of their own train as under DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from tests import worlds

WIDTH = 8
STEPS = 4


class Net(nn.Module):
    """A module between two layers that autocast lowers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.first(x).tanh())
        last: Tensor = self.last(y[0] if isinstance(y, tuple) else y)
        return last


class Of(nn.Module):
    """A bare matrix and what is done with it."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(*(shape or (WIDTH, WIDTH))) / WIDTH**0.5)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.w)


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, 2) / 3)
        self.b = nn.Parameter(torch.randn(2, WIDTH) / 3)

    def forward(self, w: Tensor) -> Tensor:
        return w + self.a @ self.b


class Fused(torch.autograd.Function):
    """A product that autocast does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        assert w.dtype == torch.float32
        with torch.autocast("cpu", enabled=False):
            return x.float() @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        grad = grad.float()
        return (grad @ w.T).to(x.dtype), x.float().flatten(0, -2).T @ grad.flatten(0, -2)


class StandardisedConv(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(self.weight, (1, 2), keepdim=True)
        weight = (self.weight - mean) / (var + 1e-5).sqrt()
        return F.conv1d(x.mT, weight, self.bias, padding=1).mT


class ConvForward(nn.Conv1d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, F.normalize(weight, dim=1), bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class Cell(nn.Module):
    def __init__(self, cell: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = cell(WIDTH, WIDTH)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        y = self.cell(x.flatten(0, -2).float())
        return (y[0] if isinstance(y, tuple) else y).view(x.shape)


class Queries(nn.Module):
    """Learned queries that attend to the input; keys have a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 3, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_bias_kv=True)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.expand(len(x), -1, -1)
        attended: Tensor = self.attention(queries, x, x)[0]
        return queries + attended


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(5, WIDTH, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        bag: Tensor = self.bag(torch.arange(4).view(2, 2) % 3, per_sample_weights=torch.full((2, 2), 0.3))
        return x + bag[:, None, :]


class BilinearOf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(x.float(), x.float())  # type: ignore[no-any-return]


class MaxNorm(nn.Module):
    """An embedding that writes into its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding(torch.arange(x.shape[1]) % 5)


def _symmetric(extra: nn.Module) -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", extra)
    return layer


def _patched() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)

    def forward(x: Tensor) -> Tensor:
        return F.linear(x, layer.weight / layer.weight.norm(), layer.bias)

    layer.forward = forward  # type: ignore[method-assign]
    return layer


CASES: dict[str, Callable[[], nn.Module]] = {
    "weight-norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "weight-norm-old": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral-norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral-norm-old": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    **{
        f"orthogonal-{kind}": lambda kind=kind: parametrizations.orthogonal(  # type: ignore[misc]
            nn.Linear(WIDTH, WIDTH), orthogonal_map=kind
        )
        for kind in ("matrix_exp", "cayley", "householder")
    },
    "symmetric": lambda: _symmetric(Symmetric()),
    "low-rank": lambda: _symmetric(LowRank()),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(WIDTH, WIDTH), "weight", 0.5),  # type: ignore[no-untyped-call]
    "forward-of-an-instance": _patched,
    "product": lambda: Of(lambda x, w: x @ w),
    "einsum": lambda: Of(lambda x, w: torch.einsum("bti,ij->btj", x, w)),
    "linalg": lambda: Of(lambda x, w: x @ torch.linalg.qr(w.float())[0].to(x.dtype)),
    "singular-values": lambda: Of(lambda x, w: x * torch.linalg.svdvals(w)),
    "element-wise": lambda: Of(lambda x, w: x * w, 1, WIDTH),
    "norm": lambda: Of(lambda x, w: x @ w / w.norm()),
    "index-select": lambda: Of(lambda x, w: x + w.index_select(0, torch.arange(x.shape[1]))),
    "custom-function": lambda: Of(lambda x, w: Fused.apply(x, w)),
    "positions": lambda: Of(lambda x, w: x + w[: x.shape[1]]),
    "queries": Queries,
    "standardised-conv": lambda: StandardisedConv(WIDTH, WIDTH, 3),
    "conv-forward": lambda: ConvForward(WIDTH, WIDTH, 3, padding=1),
    "bilinear": BilinearOf,
    **{kind.__name__: partial(Cell, kind) for kind in (nn.RNNCell, nn.GRUCell, nn.LSTMCell)},
    "gru": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "embedding-bag": Bag,
    "max-norm": MaxNorm,
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True),
}


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(_batch(rank, step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)


def _differences(rank: int, world: int, stage: int, names: list[str]) -> dict[str, str]:
    """Return what differs from DDP by more than fp32 does, by the name of the case."""
    from lightning_zero import MixedPrecision, ZeroEngine

    found = {}
    for name in names:
        worlds.seed()
        ddp = DistributedDataParallel(Net(CASES[name]()))
        expected = _losses(ddp, _adam(ddp), rank)
        worlds.seed()
        engine = ZeroEngine(stage, units=["Linear"], precision=MixedPrecision(compute_dtype=torch.bfloat16))
        module = engine.shard(Net(CASES[name]()))
        try:
            actual = _losses(module, engine.attach(_adam(module)), rank)
            values = [engine.full_param(param) for param in module.parameters()]
        except Exception as error:
            error.add_note(name)
            raise
        if not torch.allclose(torch.tensor(actual), torch.tensor(expected), rtol=1e-5, atol=1e-6):
            found[name] = f"losses {actual} instead of {expected}"
        for (key, param), value in zip(ddp.module.named_parameters(), values, strict=True):
            if not torch.allclose(value, param, rtol=1e-4, atol=1e-5):
                found[name] = f"{key} differs by {(value - param).abs().max():.2g}"
        engine.close()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_what_autocast_leaves_in_fp32_trains_as_under_ddp(stage: int) -> None:
    assert worlds.run(_differences, 2, stage, list(CASES)) == [{}, {}]


# -- Embeddings: lowered, although autocast leaves them ----------------------------------------------------------------


def _gradients_of_a_frequent_row(rank: int, world: int, stage: int) -> list[float]:
    from lightning_zero import MixedPrecision, ZeroEngine

    engine = ZeroEngine(stage, precision=MixedPrecision(compute_dtype=torch.bfloat16))
    module = engine.shard(nn.Sequential(nn.Embedding(4, 2, padding_idx=3), nn.Linear(2, 1)))
    assert engine.records()[0].dtype == torch.float32
    with engine.scope("training_step"):
        rows = module[0](input=torch.tensor([0] * 5000 + [1] + [3] * 10))
        assert rows.dtype == torch.float32
    rows.sum().backward()
    grad = engine.full_grad(module[0].weight)
    engine.close()
    assert grad is not None
    return [float(value) for value in grad[:, 0]]


@pytest.mark.parametrize("stage", [0, 3])
def test_the_gradient_of_a_token_that_is_looked_up_often_is_the_sum(stage: int) -> None:
    for gradients in worlds.run(_gradients_of_a_frequent_row, 2, stage):
        assert gradients == pytest.approx([5000.0, 1.0, 0.0, 0.0], rel=2**-8)


class Hooked(nn.Module):
    """An embedding whose result hooks change, one of them in front of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.seen: list[torch.dtype] = []
        self.embedding.register_forward_hook(self._scaled)

    def _scaled(self, _: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.seen.append(output.dtype)
        return output * 3.0 * self.scale

    def forward(self, ids: Tensor) -> Tensor:
        last: Tensor = self.last(self.embedding(ids))
        return last


def _gradients_through_hooks(rank: int, world: int, stage: int, is_late: bool) -> tuple[Any, ...]:
    from lightning_zero import MixedPrecision, ZeroEngine

    torch.manual_seed(0)
    module = Hooked()
    reference = copy.deepcopy(module)
    engine = ZeroEngine(stage, precision=MixedPrecision(compute_dtype=torch.bfloat16))
    engine.shard(module)
    found = []
    for one in (module, reference):
        if is_late:
            one.embedding.register_forward_hook(lambda _, args, output: output * 2.0, prepend=True)
        with torch.autocast("cpu", torch.bfloat16), engine.scope("training_step") if one is module else nullcontext():
            loss = one(torch.tensor([0, 1, 1])).sum()
        loss.backward()
        get = engine.full_grad if one is module else attrgetter("grad")
        found.append([get(one.embedding.weight).flatten().tolist(), float(get(one.scale))])
    engine.close()
    return (*found, module.seen)


@pytest.mark.parametrize("is_late", [False, True], ids=["first-hook", "behind-a-hook"])
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_of_an_embedding_go_through_its_hooks(stage: int, is_late: bool) -> None:
    for actual, expected, seen in worlds.run(_gradients_through_hooks, 2, stage, is_late):
        assert actual[0] == pytest.approx(expected[0], rel=2**-6)
        assert actual[1] == pytest.approx(expected[1], rel=2**-5)
        assert seen == [torch.float32]


# -- Models of Hugging Face --------------------------------------------------------------------------------------------

_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_TEXT = {**_SMALL, "vocab_size": 32, "max_position_embeddings": 32, "num_key_value_heads": 2}


def _image_model(name: str) -> nn.Module:
    import transformers

    if name == "ViT":
        return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **_SMALL))
    if name == "Swin":
        config = transformers.SwinConfig(
            image_size=16, patch_size=2, window_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2]
        )
        return transformers.SwinForImageClassification(config)
    config = transformers.PerceiverConfig(
        num_latents=4, d_latents=16, d_model=3, num_blocks=1, num_self_attends_per_block=1, image_size=8,
        num_self_attention_heads=2, num_cross_attention_heads=1,
    )  # fmt: skip
    return transformers.PerceiverModel(config)


def _text_model(name: str) -> nn.Module:
    import transformers

    if name == "T5":
        config = transformers.T5Config(
            d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=32, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config)
    if name == "Mamba":
        config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4)
        return transformers.MambaForCausalLM(config)
    if name == "GPT2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32))
    kind = {"Mixtral": "MixtralForCausalLM", "GptOss": "GptOssForCausalLM"}[name]
    config_of = {"Mixtral": transformers.MixtralConfig, "GptOss": transformers.GptOssConfig}[name]
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return getattr(transformers, kind)(config_of(**_TEXT, **experts))  # type: ignore[no-any-return]


def _loss_of(model: nn.Module, name: str, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    if name in ("ViT", "Swin"):
        size = 8 if name == "ViT" else 16
        logits: Tensor = model(pixel_values=torch.randn(2, 3, size, size, generator=generator)).logits
        return logits.float().square().mean()
    if name == "Perceiver":
        hidden: Tensor = model(inputs=torch.randn(2, 5, 3, generator=generator)).last_hidden_state
        return hidden.float().square().mean()
    ids = torch.randint(0, 32, (2, 6), generator=generator)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _family(rank: int, world: int, name: str) -> tuple[list[float], list[float], list[str]]:
    from lightning_zero import MixedPrecision, ZeroEngine

    build = _image_model if name in ("ViT", "Swin", "Perceiver") else _text_model
    losses: list[list[float]] = []
    bare: list[str] = []
    for side in ("ddp", "zero"):
        worlds.seed()
        model = build(name)
        if side == "ddp":
            trained: nn.Module = DistributedDataParallel(model, find_unused_parameters=True)
            optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, eps=1e-3)
        else:
            engine = ZeroEngine(3, precision=MixedPrecision(compute_dtype=torch.bfloat16))
            trained = engine.shard(model)
            exact = [buffer for buffer in engine._state.buffers if buffer.kind.compute == torch.float32]
            bare = [slot.name for buffer in exact for slot in buffer.layout.slots if len(slot.shape) > 1]
            optimizer = engine.attach(torch.optim.AdamW(trained.parameters(), lr=1e-3, eps=1e-3))
        losses.append([])
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = _loss_of(trained, name, rank, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    engine.close()
    return losses[0], losses[1], bare


_BARE = {
    "ViT": "cls_token", "Swin": "relative_position_bias_table", "Perceiver": "latents", "T5": "", "Mamba": "A_log",
    "GPT2": "", "Mixtral": "experts.gate_up_proj", "GptOss": "experts.gate_up_proj",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", _BARE)
def test_models_that_use_parameters_of_their_own_train_as_under_ddp(name: str) -> None:
    has_embeddings = name not in ("ViT", "Swin", "Perceiver")
    for expected, actual, bare in worlds.run(_family, 2, name, timeout_s=200):
        assert actual == pytest.approx(expected, rel=2**-8 if has_embeddings else 1e-5)
        assert any(key.endswith(_BARE[name]) for key in bare) if _BARE[name] else not bare


# -- What the user names -----------------------------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bti,eij->btj", x, self.up)


def _named(rank: int, world: int, lowered: Any) -> tuple[torch.dtype, str]:
    from lightning_zero import MixedPrecision, ZeroEngine

    engine = ZeroEngine(1, precision=MixedPrecision(compute_dtype=torch.bfloat16, lowered=lowered))
    module = engine.shard(Net(Experts()))
    with engine.scope("training_step"):
        dtype = module.inner.up.dtype  # type: ignore[union-attr]
    plan = "\n".join(engine.plan())
    _losses(module, engine.attach(_adam(module)), rank)
    engine.close()
    return dtype, plan


@pytest.mark.parametrize("lowered", [["Experts"], (Experts,)])
def test_matrices_of_classes_that_the_user_names_compute_in_16_bits(lowered: Any) -> None:
    ((dtype, plan),) = worlds.run(_named, 1, lowered)
    assert dtype == torch.bfloat16
    assert "matrices in fp32" not in plan


def test_the_plan_names_the_classes_whose_matrices_stay_in_fp32() -> None:
    ((dtype, plan),) = worlds.run(_named, 1, ())
    assert dtype == torch.float32
    assert "matrices in fp32: 192 parameters of `Experts`; `lowered=[...]` names classes" in plan


def test_a_class_in_lowered_that_the_module_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="`lowered` names `Expert`, but no module inside `Net` has that class. Did"):
        worlds.run(_named, 1, ["Expert"])


def test_lowered_without_a_16_bit_precision_is_refused() -> None:
    from lightning_zero import MixedPrecision

    with pytest.raises(ValueError, match=r"`lowered=\['Experts'\]` says which other matrices .* or leave it out"):
        MixedPrecision(lowered=["Experts"])
    with pytest.raises(TypeError, match="`MixedPrecision.lowered=.*Use a list of classes or names of classes"):
        MixedPrecision(compute_dtype=torch.bfloat16, lowered=[3])  # type: ignore[list-item]
