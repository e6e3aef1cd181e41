"""Models that must train exactly as under DistributedDataParallel, at every stage on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.config import MixedPrecision
from tests import worlds
from tests.references import VOCAB, WIDTH, Block, Case, TinyGPT, token_loss, tokens, train
from tests.sampling import highest_stages

Loss = Callable[[nn.Module, int, int], Tensor]


def case(build: Callable[[], nn.Module], loss: Loss = token_loss, /, *, training: Any = None, **options: Any) -> Case:
    """Return a case whose program is the usual loop."""
    return Case(build=build, program=lambda trainer: train(trainer, loss=loss, **(training or {})), **options)


# -- Tied, bare, nested ------------------------------------------------------------------------------------------------


class TiedBlock(Block):
    """Two layers of one unit share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight


class SharedBetweenBlocks(TinyGPT):
    """A weight of the first block is also one of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class BareParameter(TinyGPT):
    """A parameter that belongs to the root module itself, with and without elements or dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.gain = nn.Parameter(torch.tensor(1.5))

    def body(self, x: Tensor) -> Tensor:
        return super().body(x * self.scale) * self.gain


class Outer(nn.Module):
    """A unit with units inside and parameters of its own before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.first = Block()
        self.second = Block()
        self.after = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.before(x)) * self.after) + self.after


class CalledSeveralTimes(TinyGPT):
    def body(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = super().body(x)
        return self.blocks[0](x)


class OtherMethods(TinyGPT):
    """Calls methods of a unit other than its forward."""

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = x + self.blocks[1].inner(x)
        return self.blocks[2].down(self.blocks[2].up(x)) + x


def _used_outside(module: nn.Module, rank: int, step: int) -> Tensor:
    ids = tokens(rank, step)
    hidden = module(ids)
    again = F.linear(F.embedding(ids, module.embedding.weight), module.head.weight)
    penalty = sum(block.up.weight.square().mean() for block in module.blocks)
    return F.cross_entropy((hidden + again).flatten(0, 1), ids.flatten()) + 0.1 * penalty


class WeightAsArgument(TinyGPT):
    """Hands a parameter of one unit to another."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + F.linear(block.norm(x), self.blocks[1].up.weight)[..., :WIDTH]
        return x


class BigHead(TinyGPT):
    def __init__(self) -> None:
        super().__init__(tied=True)


# -- What forwards return ----------------------------------------------------------------------------------------------


@dataclass
class Output:
    hidden: Tensor
    extra: dict[str, Any]


class Holder:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Wrapped(Block):
    """Returns its result wrapped in something."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        if self.kind == "tuple":
            return None, (y, [y.detach()]), "text"
        if self.kind == "dict":
            return {"hidden": {"deep": y}, "number": 3}
        if self.kind == "dataclass":
            return Output(y, {"nothing": None})
        if self.kind == "object":
            return Holder(y)
        self.side = y
        return None


def unwrap(value: Any, block: nn.Module) -> Tensor:
    if isinstance(value, tuple):
        return value[1][0]
    if isinstance(value, dict):
        return value["hidden"]["deep"]
    return block.side if value is None else value.hidden


class WrappedGPT(TinyGPT):
    def __init__(self, kind: str) -> None:
        super().__init__(blocks=[Wrapped(kind) for _ in range(3)])

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = unwrap(block(x), block)
        return x


class SideBlock(Block):
    """Leaves a loss behind that does not pass through its output."""

    def forward(self, x: Tensor) -> Tensor:
        self.side = self.up(x.detach()).square().mean()
        return super().forward(x)


class KeywordBlock(Block):
    def forward(self, *, x: Tensor, flag: bool | None = None) -> Tensor:
        return super().forward(x)


class KeywordGPT(TinyGPT):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x=x, flag=None)
        return x


class InPlaceGPT(TinyGPT):
    """Changes a unit's output in place."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return x


def _side_loss(module: nn.Module, rank: int, step: int) -> Tensor:
    loss = token_loss(module, rank, step)
    return loss + sum(block.side for block in module.blocks)


# -- Frozen and adapted ------------------------------------------------------------------------------------------------


def _frozen(choose: Callable[[str], bool], **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = TinyGPT(**options)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not choose(name))
        return module

    return build


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank correction."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def _adapters() -> nn.Module:
    module = TinyGPT().requires_grad_(False)
    for block in module.blocks:
        block.up = Adapted(block.up)
    return module


def _trained_only(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1, fused=True)


# -- Recurrent, convolutional, buffers ---------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.rnn = kind(WIDTH, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(ids))[0])


class FlattensAgain(Recurrent):
    """Rebuilds the recurrent layer's list of weights before each use."""

    def forward(self, ids: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        return super().forward(ids)


class ConvUnit(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(ConvUnit(1, 3), ConvUnit(3, 5))
        self.head = nn.Linear(5, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean((2, 3)))


def _image_loss(module: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    images = torch.randn(4, 1, 6, 6, generator=generator)
    return F.cross_entropy(module(images).float(), torch.randint(0, 4, (4,), generator=generator))


def _autocast(loss: Loss) -> Loss:
    def mixed(module: nn.Module, rank: int, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(module, rank, step)

    return mixed


class MixedInputs(nn.Module):
    """Layers that are fed fp32 by what comes before them."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.raw = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inputs(x)
        for block in self.blocks:
            h = block(h.float())
        return self.encoder(h) @ self.raw


class MixedBilinear(nn.Module):
    """A layer that autocast leaves alone: its operands must agree by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(3, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


def _regression_loss(module: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return module(torch.randn(2, 4, 3, generator=generator)).float().square().mean()


# -- Odd sizes ---------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters with no element, with one, and with fewer than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.three = nn.Parameter(torch.randn(3))
        self.blocks = nn.ModuleList([Block(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x * self.three, self.empty]) * self.one * self.scalar
        return self.blocks[0](x[..., :2])


class OnlyOne(nn.Module):
    """One element in all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.5]]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _row_loss(columns: int) -> Loss:
    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * rank + step)
        return (module(torch.randn(4, columns, generator=generator)) - 1.0).square().mean()

    return loss


# -- Activation checkpointing and compilation --------------------------------------------------------------------------


class CheckpointedInside(Block):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


class CheckpointedAround(TinyGPT):
    """Checkpoints ``span`` units together."""

    def __init__(self, reentrant: bool, span: int = 1) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.span = span

    def body(self, x: Tensor) -> Tensor:
        for start in range(0, len(self.blocks), self.span):
            segment = nn.Sequential(*self.blocks[start : start + self.span])
            x = checkpoint(segment, x, use_reentrant=self.reentrant)
        return x


def _compiled() -> nn.Module:
    module = TinyGPT()
    for block in module.blocks:
        block.compile(backend="aot_eager")
    return module


def _compiled_inside() -> nn.Module:
    module = TinyGPT()
    for block in module.blocks:
        block.up = torch.compile(block.up, backend="aot_eager")
    return module


_BF16 = {"precision": MixedPrecision(compute_dtype=torch.bfloat16)}

CASES: dict[str, Case] = {
    "plain": case(TinyGPT),
    "no-units": case(TinyGPT, units=None),
    "every-leaf-a-unit": case(TinyGPT, units=(nn.Linear, nn.LayerNorm, nn.Embedding)),
    "units-by-class": case(TinyGPT, units=(Block,)),
    "tied-in-a-unit": case(lambda: TinyGPT(blocks=[TiedBlock() for _ in range(3)]), units=("TiedBlock",)),
    "tied-root": case(BigHead),
    "tied-units": case(BigHead, units=("Block", "Embedding", "Linear")),
    "tied-blocks": case(SharedBetweenBlocks),
    "bare-root-parameter": case(BareParameter),
    "nested-units": case(lambda: TinyGPT(blocks=[Outer(), Outer()]), units=("Outer", "Block")),
    "called-several-times": case(CalledSeveralTimes),
    "other-methods": case(OtherMethods),
    "used-outside": case(TinyGPT, _used_outside),
    "weight-as-argument": case(WeightAsArgument),
    "keyword-only": case(lambda: KeywordGPT(blocks=[KeywordBlock() for _ in range(3)]), units=("KeywordBlock",)),
    "in-place-on-output": case(InPlaceGPT),
    **{f"returns-{kind}": case(lambda kind=kind: WrappedGPT(kind), units=("Wrapped",)) for kind in
       ("tuple", "dict", "dataclass", "object", "none")},
    "side-loss": case(lambda: TinyGPT(blocks=[SideBlock() for _ in range(3)]), _side_loss, units=("SideBlock",)),
    "frozen-some": case(_frozen(lambda name: "up" in name), training={"optimizer": _trained_only}),
    "frozen-unit": case(_frozen(lambda name: "blocks.1" in name or "embedding" in name)),
    "frozen-in-optimizer": case(_frozen(lambda name: "norm" in name)),
    "adapters": case(_adapters, training={"optimizer": _trained_only}),
    "lstm": case(lambda: Recurrent(nn.LSTM), units=("LSTM",)),
    "gru-in-root": case(lambda: Recurrent(nn.GRU), units=None),
    "lstm-flattened-again": case(lambda: FlattensAgain(nn.LSTM), units=("LSTM",)),
    "batch-norm": case(ConvNet, _image_loss, units=("ConvUnit",)),
    "zero-and-one-element": case(Odd, _row_loss(3)),
    "more-ranks-than-elements": case(OnlyOne, _row_loss(1), units=None),
    "checkpoint-inside": case(lambda: TinyGPT(blocks=[CheckpointedInside(False) for _ in range(3)]),
                              units=("CheckpointedInside",)),
    "checkpoint-inside-reentrant": case(lambda: TinyGPT(blocks=[CheckpointedInside(True) for _ in range(3)]),
                                        units=("CheckpointedInside",)),
    "checkpoint-around": case(lambda: CheckpointedAround(False)),
    "checkpoint-around-reentrant": case(lambda: CheckpointedAround(True)),
    "checkpoint-around-two": case(lambda: CheckpointedAround(False, 2)),
    "checkpoint-around-two-reentrant": case(lambda: CheckpointedAround(True, 2)),
    "compiled-units": case(_compiled),
    "compiled-inside": case(_compiled_inside),
    # The same 16-bit products and sums as under autocast: parameters are rounded once per step instead of per forward.
    "bf16-conv-batch-norm": case(ConvNet, _autocast(_image_loss), units=("ConvUnit",), options=_BF16),
    "bf16-fp32-inputs": case(MixedInputs, _autocast(_regression_loss), options=_BF16),
    "bf16-bilinear": case(MixedBilinear, _autocast(_regression_loss), options=_BF16, units=None),
}  # fmt: skip


def _check(rank: int, world: int, name: str, stages: tuple[int, ...]) -> dict[str, str]:
    return replace(CASES[name], stages=stages).check(rank, world)


@pytest.mark.parametrize(("name", "stages"), highest_stages(CASES))
def test_two_ranks_train_as_the_reference(name: str, stages: tuple[int, ...]) -> None:
    assert worlds.run(_check, 2, name, stages) == [{}, {}]


@pytest.mark.parametrize("name", ["plain", "tied-root", "batch-norm", "frozen-some", "nested-units"])
def test_one_rank_trains_as_the_reference(name: str) -> None:
    assert worlds.run(_check, 1, name, CASES[name].stages) == [{}]
