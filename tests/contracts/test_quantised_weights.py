"""Frozen weights of real quantisation packages, with trained adapters beside them, train as on a replica."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.checkpoint import directory
from lightning_zero.checkpoint.state import load_model_state, model_state
from lightning_zero.config import MixedPrecision
from lightning_zero.engine.buffers.parameter import ReleasedParameter, has_class
from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.references import Case, train
from tests.sampling import sample

WIDTH = 64  # a block of 4-bit weights


def _bnb() -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes

    return bitsandbytes.nn


def _base(kind: str, bias: bool = True) -> nn.Module:
    """Return a frozen linear layer of one kind."""
    if kind == "none":
        return nn.Linear(WIDTH, WIDTH, bias).requires_grad_(False)
    if kind == "int8":
        layer: nn.Module = _bnb().Linear8bitLt(WIDTH, WIDTH, bias, has_fp16_weights=False)
    else:
        layer = _bnb().Linear4bit(
            WIDTH,
            WIDTH,
            bias,
            quant_type="fp4" if kind == "fp4" else "nf4",
            compute_dtype=torch.float32,
            compress_statistics=kind == "nf4-double",
        )
    return layer.requires_grad_(False)


class Lora(nn.Module):
    """A frozen layer with a trained product of two small matrices beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.up(self.down(x))
        return y


class Block(nn.Module):
    def __init__(self, kind: str, checkpointed: bool, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = Lora(_base(kind, bias))
        self.second = Lora(_base(kind, bias))
        self._checkpointed = checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(F.gelu(self.first(self.norm(x))))
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._checkpointed:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)


class Model(nn.Module):
    """Blocks between layers that the root unit holds, quantised ones too."""

    def __init__(self, kind: str, checkpointed: bool, bias: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, checkpointed, bias) for _ in range(2))
        self.last = _base(kind, bias)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(self.last(x))
        return y


class _Build:
    def __init__(self, kind: str, checkpointed: bool = False, quantised: bool = True, bias: bool = True) -> None:
        self.arguments = kind, checkpointed, quantised, bias

    def __call__(self) -> nn.Module:
        kind, checkpointed, quantised, bias = self.arguments
        model = Model(kind, checkpointed, bias)
        return model.to("cpu") if quantised else model


def _loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    loss: torch.Tensor = module(torch.randn(4, 3, generator=generator)).square().mean()
    return loss


def _loss_without_forward(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Use the parts one by one, as a ``training_step`` does."""
    generator = torch.Generator().manual_seed(10 * rank + step)
    model: Any = module
    x = model.enter(torch.randn(4, 3, generator=generator))
    for block in model.blocks:
        x = block(x)
    return model.head(model.last(x)).square().mean()  # type: ignore[no-any-return]


def _mixed(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return _loss(module, rank, step)


LOSSES = {"forward": _loss, "parts": _loss_without_forward, "mixed": _mixed}


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in module.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-4, fused=True)


def _train_case(rank: int, world: int, build: _Build, loss: str, stages: Any, options: Any, tolerance: float) -> Any:
    def program(trainer: Any) -> None:
        train(trainer, loss=LOSSES[loss], optimizer=_adamw)
        train(trainer, loss=LOSSES[loss], optimizer=_adamw, micro_batches=2, steps=1)

    case = Case(build=build, program=program, units=("Block",), stages=stages, options=options, tolerance=tolerance)
    return case.check(rank, world)


KINDS = ["nf4", "nf4-double", "fp4", "int8"]


@pytest.mark.parametrize("world", sample([1, 2, 3], 2))
@pytest.mark.parametrize("kind", sample(KINDS, "nf4-double", "int8"))
def test_adapters_beside_quantised_weights_train_as_on_a_replica(kind: str, world: int) -> None:
    found = worlds.run(_train_case, world, _Build(kind), "forward", (0, 1, 2, 3), {}, 0.0 if world < 3 else 1e-6)
    assert found == [{}] * world


@pytest.mark.parametrize("kind", sample(KINDS, "nf4"))
def test_layers_that_no_forward_is_around_are_whole_in_backward(kind: str) -> None:
    assert worlds.run(_train_case, 2, _Build(kind), "parts", (3,), {}, 0.0) == [{}] * 2


@pytest.mark.parametrize("kind", sample(KINDS, "int8"))
def test_quantised_blocks_are_checkpointed(kind: str) -> None:
    assert worlds.run(_train_case, 2, _Build(kind, checkpointed=True), "forward", (3,), {}, 0.0) == [{}] * 2


@pytest.mark.parametrize("kind", sample(KINDS, "nf4"))
@pytest.mark.parametrize("where", sample(["cpu", "nvme"], "nvme"))
def test_quantised_weights_are_offloaded(kind: str, where: str, tmp_path: Path) -> None:
    offload = {"optimizer": where, "params": where, **({"path": str(tmp_path)} if where == "nvme" else {})}
    assert worlds.run(_train_case, 2, _Build(kind), "forward", (3,), {"offload": offload}, 1e-6) == [{}] * 2


@pytest.mark.parametrize("kind", sample(KINDS, "nf4"))
def test_quantised_weights_train_in_mixed_precision(kind: str) -> None:
    options = {"precision": MixedPrecision(compute_dtype=torch.bfloat16)}
    build = _Build(kind, bias=False)  # the package casts a bias to 16 bits for good
    assert worlds.run(_train_case, 2, build, "mixed", (3,), options, 1e-6) == [{}] * 2


@pytest.mark.parametrize("kind", sample(KINDS, "nf4"))
def test_weights_are_quantised_when_the_module_is_sharded(kind: str) -> None:
    assert worlds.run(_quantised_late, 2, kind) == [None] * 2


def _quantised_late(rank: int, world: int, kind: str) -> None:
    plain = _Build(kind)()
    worlds.seed()
    module = _Build(kind, quantised=False)()
    engine = ZeroEngine(3, units=("Block",))
    engine.shard(module)
    for param, expected in zip(module.parameters(), plain.parameters(), strict=True):
        assert param.dtype == expected.dtype
    _loss(module, rank, 0).backward()
    engine.unshard()
    for param, expected in zip(module.parameters(), plain.parameters(), strict=True):
        assert type(param) is type(expected)


def _on_meta(rank: int, world: int, kind: str) -> None:
    bnb = _bnb()
    with torch.device("meta"):
        module: Any = nn.Sequential(_base(kind), _base(kind))
    real = _base(kind).to("cpu")
    module.append(real)
    expected = real.weight.data.clone()
    engine = ZeroEngine(3, units=(nn.Linear,))
    engine.shard(module)
    module(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
    engine.unshard()
    assert {type(layer.weight) for layer in module} == {bnb.Int8Params if kind == "int8" else bnb.Params4bit}
    assert {layer.weight.dtype for layer in module} == {torch.int8 if kind == "int8" else torch.uint8}
    assert torch.equal(real.weight.data, expected)


@pytest.mark.parametrize("kind", sample(KINDS, "int8"))
def test_quantised_layers_on_the_meta_device_stand_beside_real_ones(kind: str) -> None:
    worlds.run(_on_meta, 2, kind)


def _torchao(unwrapped: bool, bits: int) -> nn.Module:
    quantization, unwrap = _ao()
    config = quantization.Int8WeightOnlyConfig() if bits == 8 else quantization.IntxWeightOnlyConfig(torch.int4)
    module = Model("none", checkpointed=False, bias=True)
    for name, layer in module.named_modules():
        if name.endswith("base"):
            quantization.quantize_(layer, config)
            layer.requires_grad_(False)
    return unwrap(module) if unwrapped else module  # type: ignore[no-any-return]


def _ao() -> tuple[Any, Any]:
    logging.getLogger("torchao").setLevel(logging.ERROR)
    from torchao import quantization
    from torchao.utils import unwrap_tensor_subclass

    return quantization, unwrap_tensor_subclass


class _Unwrapped:
    def __init__(self, bits: int) -> None:
        self.bits = bits

    def __call__(self) -> nn.Module:
        return _torchao(True, self.bits)


@pytest.mark.parametrize("bits", sample([8, 4], 8))
def test_torchao_weights_train_unwrapped_and_are_refused_by_name_before(bits: int) -> None:
    with pytest.raises(ValueError, match=r"`blocks.0.first.base.weight` is a .*unwrap_tensor_subclass"):
        ZeroEngine(3).shard(_torchao(False, bits))
    assert worlds.run(_train_case, 2, _Unwrapped(bits), "forward", (3,), {}, 0.0) == [{}] * 2


def _evaluates(rank: int, world: int) -> None:
    module: Any = _Build("nf4")()
    for layer in module.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    plain = copy.deepcopy(module)
    engine = ZeroEngine(3, units=("Block",))
    engine.shard(module)
    for one in (module, plain):
        one.eval()
    with torch.no_grad():
        assert torch.equal(_loss(module, rank, 0), _loss(plain, rank, 0))
    module.train()
    _loss(module, rank, 1).backward()
    engine.close()


def test_4_bit_weights_are_evaluated_between_steps() -> None:
    worlds.run(_evaluates, 2)


def _repacks(rank: int, world: int) -> None:
    module: Any = nn.Sequential(_base("nf4"))
    engine = ZeroEngine(3, units=("Linear4bit",))
    engine.shard(module)

    def repack(layer: Any, _: Any) -> None:
        layer.weight.data = layer.weight.data.view(-1, 32).clone()

    module[0].register_forward_pre_hook(repack)
    with pytest.raises(RuntimeError, match=r"`.data` of parameter `0.weight` is now a torch.uint8 tensor of shape"):
        module(torch.randn(2, WIDTH, requires_grad=True) * 1)
    with pytest.raises(
        RuntimeError, match=r"`.data` of parameter `0.weight` is now"
    ):  # it still is, when all is closed
        engine.close()


def test_data_of_another_shape_is_refused_by_name() -> None:
    worlds.run(_repacks, 2)


def _lives(rank: int, world: int, stage: int, kind: str, folder: str) -> None:
    bnb = _bnb()
    worlds.seed()
    module: Any = _Build(kind)()
    plain = copy.deepcopy(module)
    quantised = bnb.Int8Params if kind == "int8" else bnb.Params4bit
    engine = ZeroEngine(stage, units=("Block",))
    engine.shard(module)
    weight = module.blocks[0].first.base.weight
    assert isinstance(weight, quantised)
    _loss(module, rank, 0).backward()
    if stage == 3:
        assert has_class(weight, ReleasedParameter)
        assert kind != "int8" or module.blocks[0].first.base.state.CB is weight  # no rank keeps the whole matrix
    with engine.gathered(module):
        assert type(weight) is quantised
        assert torch.equal(weight.data, plain.blocks[0].first.base.weight.data)
        _expect_same_outputs(copy.deepcopy(module), plain)
        _expect_same_outputs(module, plain)
        whole = {name: value.clone() for name, value in module.state_dict().items()}
    saved = model_state(engine, module)
    assert saved.keys() == whole.keys() == plain.state_dict().keys()
    directory.save(engine, {"state_dict": saved}, f"{folder}/saved", full=False)
    loaded = directory.load(engine, f"{folder}/saved")["state_dict"]
    engine.unshard()
    assert type(weight) is quantised
    assert torch.equal(weight.data, plain.blocks[0].first.base.weight.data)
    _expect_same_outputs(module, plain)
    worlds.seed()
    fresh: Any = _Build(kind)()  # 8-bit layers load before their first forward only
    fresh.blocks[0].first.base.weight.data.zero_()
    engine = ZeroEngine(stage, units=("Block",))
    engine.shard(fresh)
    load_model_state(engine, fresh, loaded, strict=False)
    _loss(fresh, rank, 0)
    engine.unshard()
    _expect_same_outputs(fresh, plain)


def _expect_same_outputs(module: nn.Module, plain: nn.Module) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    assert torch.equal(module(x), plain(x))


@pytest.mark.parametrize("stage", sample([0, 1, 2, 3], 3))
@pytest.mark.parametrize("kind", sample(KINDS, "nf4-double", "int8"))
def test_quantised_weights_are_copied_saved_loaded_and_given_back(kind: str, stage: int, tmp_path: Path) -> None:
    worlds.run(_lives, 2, stage, kind, str(tmp_path))
