from __future__ import annotations

import copy
import weakref
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.errors import PartialParameterError
from lightning_zero.moe import MoE
from lightning_zero.parallel.tensor.collectives import ProcessGroupRanks
from lightning_zero.parallel.tensor.generators import Region, dropout_rates, stop_drawing
from lightning_zero.parallel.tensor.loss import cut_cross_entropy
from lightning_zero.parallel.tensor.plan import TensorPlan
from lightning_zero.parallel.tensor.threads import ThreadRanks
from lightning_zero.parallel.tensor.transform import cut_module
from tests.worlds import run


class Layer(nn.Module):
    """Dropout inside of a region and outside of it."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.up, self.inner = nn.Linear(8, 16), nn.Dropout(rate)
        self.down, self.outer = nn.Linear(16, 8), nn.Dropout(rate)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(torch.ones_like(self.up(x)) + 0 * self.up(x))
        self.masks.append((y == 0).detach())
        result: Tensor = x + self.outer(self.down(y))
        return result


PLAN = TensorPlan({"*.up": "column", "*.down": "row"})


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Layer(), Layer())


def _run_dropout(rank: int, world: int) -> tuple[Tensor, list[Tensor], Tensor]:
    model = _model()
    cut_module(model, PLAN, ProcessGroupRanks())
    torch.manual_seed(5)
    result = model(torch.ones(4, 8))
    return result.detach(), [mask for layer in model for mask in layer.masks], torch.rand(3)


def test_masks_differ_inside_of_regions_and_agree_outside() -> None:
    (result, masks, draw), (other_result, other_masks, other_draw) = run(_run_dropout, 2)
    assert torch.equal(result, other_result)
    assert torch.equal(draw, other_draw)
    assert not any(torch.equal(one, other) for one, other in zip(masks, other_masks, strict=True))
    assert not torch.equal(masks[0], masks[1])
    assert all(0.2 < mask.float().mean() < 0.8 for mask in (*masks, *other_masks))


def _run_recomputed(rank: int, world: int, recomputed: bool) -> tuple[Tensor, Tensor, Tensor]:
    model = _model()
    cut_module(model, PLAN, ProcessGroupRanks())
    torch.manual_seed(5)
    x = torch.ones(4, 8, requires_grad=True)
    y = x
    for layer in model:
        y = checkpoint(layer, y, use_reentrant=False) if recomputed else layer(y)
    y.square().sum().backward()
    assert x.grad is not None
    second = model(x)  # the step after: the recomputation has left the generator as it was
    return y.detach(), x.grad, second.detach()


def test_recomputation_draws_the_masks_of_the_forward() -> None:
    expected = run(_run_recomputed, 2, False)
    for found, wanted in zip(run(_run_recomputed, 2, True), expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)


@cache
def _state() -> Tensor:
    torch.manual_seed(3)
    return torch.get_rng_state()


def test_nothing_is_drawn_without_dropout_and_in_evaluation() -> None:
    for region, training in (
        (Region(Layer(0.0), ThreadRanks.group(2)[0]), True),
        (Region(Layer(), ThreadRanks.group(2)[0]), False),
    ):
        torch.set_rng_state(_state())
        region.enter(torch.ones(1), training)
        region.leave(torch.ones(1), training)
        assert torch.equal(torch.get_rng_state(), _state())


def test_the_same_state_gives_the_same_seeds() -> None:
    draws = []
    for _ in range(2):
        region = Region(Layer(), ThreadRanks.group(2)[1])
        torch.set_rng_state(_state())
        region.enter(torch.ones(1), True)
        inside = torch.rand(2)
        region.leave(torch.ones(1), True)
        draws.append((inside, torch.rand(2)))
    assert torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])


def test_whole_tensors_that_were_drawn_inside_of_a_region_are_refused() -> None:
    """Behind a dropout of an adapter every rank had another tensor, which its cut layers took for the same."""
    ranks = ThreadRanks.group(2)[0]
    region = Region(Layer(), ranks)
    torch.set_rng_state(_state())
    x, before = (torch.ones(3, requires_grad=True) * 1 for _ in range(2))
    region.copied(x, _Counted())
    region.enter(x * 1, True)
    other = torch.ones(3, requires_grad=True) * 1
    region.copied(other, _Counted())  # nothing was drawn
    region.copied(x, _Counted())
    torch.rand(2)
    region.copied(x, _Counted())  # the input of the region
    region.copied(before, _Counted())  # as a context that queries attend to
    region.copied(torch.ones(3), _Counted())
    with pytest.raises(PartialParameterError, match=r"shape \(3,\), and random numbers .*lora_dropout"):
        region.copied(other, _Counted())
    region.leave(x, True)
    region.copied(other, _Counted())


def test_rates_are_found_in_modules_and_in_attributes() -> None:
    layer = copy.deepcopy(Layer(0.25))
    layer.attention_dropout = 0.125
    assert sorted(rate for _, _, rate in dropout_rates(layer)) == [0.125, 0.25, 0.25]


def _mixture(rate: float = 0.5, **options: Any) -> MoE:
    return MoE(8, nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)), 4, k=2, **options)


def test_nothing_draws_in_a_module_that_is_told_so() -> None:
    layers = [_mixture(noisy_gate_policy="RSample"), _mixture(0.0, top2_2nd_expert_sampling=True)]
    layers.append(MoE(8, nn.Linear(8, 8), 4, k=1, drop_tokens=True, capacity_factor=0.5, min_capacity=0))
    x = torch.randn(16, 8)
    for layer in layers:
        other = copy.deepcopy(layer)
        assert not torch.equal(layer(x)[0], layer(x)[0])
        stop_drawing(layer)
        assert torch.equal(layer(x)[0], layer(x)[0])
        assert not torch.equal(other(x)[0], other(x)[0])  # a copy has rates of its own


@pytest.mark.parametrize(
    ("layer", "is_switched"),
    [
        (_mixture(), True),
        (_mixture(0.0, noisy_gate_policy="Jitter"), True),
        (_mixture(0.0), False),
    ],
)
def test_noise_of_routers_and_experts_is_a_ranks_own_in_a_part_of_a_sequence_only(
    layer: nn.Module, is_switched: bool
) -> None:
    for in_sequence in (False, True):
        region = Region(layer, ThreadRanks.group(2)[1], in_sequence=in_sequence)
        before = torch.get_rng_state()
        region.enter(torch.ones(1), True)
        assert torch.equal(before, torch.get_rng_state()) != (is_switched and in_sequence)
        region.end()


class _Counted:
    """One rank that counts the sums."""

    rank, size, sums = 0, 1, 0

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> Tensor:
        self.sums += 1
        return tensor.clone()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.clone()


def test_layers_with_the_same_input_share_one_sum_of_gradients() -> None:
    ranks = _Counted()
    region = Region(nn.Dropout(0.0), ThreadRanks.group(2)[0])
    x = torch.randn(3, requires_grad=True)
    copies = [region.copied(x, ranks) for _ in range(3)]
    sum((number * copy).sum() for number, copy in enumerate(copies, 1)).backward()  # type: ignore[union-attr]
    assert ranks.sums == 1
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 6.0))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.query(x) + self.key(x) * self.value(x))
        return result


def test_layers_on_batches_of_sequences_share_one_sum_and_keep_nothing() -> None:
    # A linear layer saves a flat view of such an input, so that nothing else holds the copy.
    ranks, module = _Counted(), _Attention()
    cut_module(module, TensorPlan({"query": "column", "key": "column", "value": "column", "out": "row"}), ranks)
    x = torch.randn(2, 3, 4, requires_grad=True) * 1.0
    result, of_input = module(x), weakref.ref(x)
    ranks.sums = 0
    result.sum().backward()
    assert ranks.sums == 1
    del x, result
    assert of_input() is None


def test_a_changed_input_is_copied_again() -> None:
    ranks = _Counted()
    region = Region(nn.Dropout(0.0), ThreadRanks.group(2)[0])
    x = torch.randn(3, requires_grad=True) * 1.0
    copy = region.copied(x, ranks)
    assert region.copied(x, ranks) is copy
    with torch.no_grad():
        assert region.copied(x, ranks) is not copy
    copy = region.copied(x, ranks)
    x.mul_(2.0)
    changed = region.copied(x, ranks)
    assert changed is not copy
    assert torch.equal(changed, x)
    assert region.copied(x.view(3), ranks) is not region.copied(x, ranks)


def _run_column_alone(rank: int, world: int) -> list[Tensor]:
    """Return the masks in front of a column layer, step by step."""
    torch.manual_seed(1)
    dropout, head = nn.Dropout(0.5), nn.Linear(8, 4)
    model, ranks = nn.Sequential(dropout, head), ProcessGroupRanks()
    cut_module(model, TensorPlan({"1": "column"}), ranks)
    masks: list[Tensor] = []
    dropout.register_forward_hook(lambda *call: masks.append(call[-1] == 0))
    torch.manual_seed(5)
    for _ in range(3):
        cut_cross_entropy(model(torch.ones(4, 8)), torch.arange(4), ranks).backward()
    return masks


def test_a_loss_of_a_column_layer_ends_its_region() -> None:
    first, second = run(_run_column_alone, 2)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])


class Parallel(nn.Module):
    """A mixture between a column layer and its row layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)
        self.moe = MoE(8, nn.Linear(8, 8), 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.inner(self.up(x))
        mixed = self.moe(x)[0]
        result: Tensor = self.down(inside) + mixed
        return result


def _run_between(rank: int, world: int) -> None:
    x = torch.ones(4, 8)
    for options in ({"k": 2, "noisy_gate_policy": "RSample"}, {"k": 1, "drop_tokens": True}):
        model = nn.Sequential(Parallel(**options))
        cut_module(model, PLAN, ProcessGroupRanks())
        with pytest.raises(PartialParameterError, match="draws random numbers for whole tokens between a layer that"):
            model(x)
        model.eval()(x)
    model = nn.Sequential(Parallel(k=2))
    cut_module(model, PLAN, ProcessGroupRanks())
    model(x)


def test_routers_that_draw_inside_of_a_region_are_refused() -> None:
    run(_run_between, 2)


class Between(nn.Module):
    """Calls a module between a column layer and its row layer, on the block's input or on the column layer's result."""

    def __init__(self, inner: nn.Module, of: str) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)
        self.inner, self.of = inner, of

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.up(x))
        if self.of == "result":
            y = self.inner(y)
        if self.of == "input":
            x = self.inner(x)
        result: Tensor = x + self.down(y)
        return result


class Jittered(nn.Module):
    """A router's input of an unmodified model."""

    jitter_noise = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).uniform_(1.0 - self.jitter_noise, 1.0 + self.jitter_noise)


@pytest.mark.parametrize(
    ("inner", "of", "message"),
    [
        (
            nn.Dropout(0.5),
            "input",
            r"The dropout `0.inner` is given a tensor of shape \(4, 8\) that was comp",
        ),
        (nn.Dropout(0.5), "result", ""),
        (nn.Dropout(0.0), "input", ""),
        (Jittered(), "input", ""),
        (Jittered(), "jittered", "`0.inner` draws random numbers for whole tokens .* `noisy_gate_policy=None`"),
    ],
    ids=["dropout of the input", "dropout of the result", "no dropout", "no jitter", "jitter"],
)
def test_draws_for_whole_tensors_inside_of_a_region_are_refused(inner: nn.Module, of: str, message: str) -> None:
    """Every rank dropped other elements of a residual, and had other inputs of a router."""
    if of == "jittered":
        inner.jitter_noise, of = 0.1, "input"  # type: ignore[assignment]
    model = nn.Sequential(Between(inner, of))
    cut_module(model, PLAN, _Counted())
    x = torch.ones(4, 8, requires_grad=True) * 1.0
    with pytest.raises(PartialParameterError, match=message) if message else nullcontext():
        model(x)
    model.eval()(x)
