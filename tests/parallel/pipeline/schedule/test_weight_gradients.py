"""Backwards in two halves: bits, what is deferred, and what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.engine.runtime.accumulation_hooks import has_hooks_of_program
from lightning_zero.parallel.pipeline.schedule.weight_gradients import WeightGradients

KEY = (0, 0)


class Net(nn.Module):
    """Every product that is known, in several layouts, and code besides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 12)
        self.second = nn.Linear(12, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.matrix = nn.Parameter(0.3 * torch.randn(8, 8))
        self.transposed = nn.Parameter(0.3 * torch.randn(8, 8).t())
        self.batched = nn.Parameter(0.3 * torch.randn(8, 8))
        self.shift = nn.Parameter(torch.randn(8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.column = nn.Linear(8, 1)
        self.row = nn.Linear(1, 8)

    def products(self, x: Tensor) -> Tensor:
        x = x + self.second(F.gelu(self.first(self.norm(x))))
        x = x + (x @ self.matrix).tanh_()
        x = x + torch.addmm(self.shift, x.reshape(-1, 8), self.transposed).view_as(x)
        x = x + torch.mm(x.flatten(0, 1), self.matrix).reshape(x.shape).relu_()
        x = x + F.linear(x.transpose(0, 1), self.batched, self.shift).transpose(0, 1)  # PyTorch may batch this one
        return x + self.row(self.column(x))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.products(self.embedding(ids))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return F.linear(self.products(x), self.embedding.weight)


class Checkpointed(Net):
    reentrant = False

    def products(self, x: Tensor) -> Tensor:
        return checkpoint(super().products, x, use_reentrant=self.reentrant, preserve_rng_state=False)


class Reentrant(Checkpointed):
    reentrant = True


def gradients_of(net: nn.Module) -> dict[str, Tensor | None]:
    found = {name: param.grad for name, param in net.named_parameters()}
    net.zero_grad()
    return found


def loss_of(net: nn.Module, autocast: bool = False) -> Tensor:
    ids = torch.arange(10).reshape(2, 5)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return net(ids).float().square().mean()


@pytest.fixture
def weights() -> Iterator[WeightGradients]:
    gradients = WeightGradients(torch.device("cpu"), has_hooks_of_program)
    yield gradients
    assert not gradients._waiting


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16-mixed"])
@pytest.mark.parametrize("make", [Net, Checkpointed, Reentrant])
def test_two_halves_have_the_bits_of_one(make: Callable[[], nn.Module], autocast: bool, weights: Any) -> None:
    torch.manual_seed(0)
    net = make()
    if autocast:  # as the engine has them
        net.first.bfloat16()
        net.second.bfloat16()
    whole = loss_of(net, autocast)
    whole.backward()
    expected = gradients_of(net)
    with weights.split(net):
        loss = loss_of(net, autocast)
    assert torch.equal(loss, whole)
    with weights.deferring(KEY, [loss]):
        torch.autograd.backward([loss])
    is_reentrant = isinstance(net, Reentrant)  # a backward inside of the first half, which does both
    assert (net.second.weight.grad is None) != is_reentrant
    assert net.norm.weight.grad is not None
    weights.bring(KEY)
    for name, value in gradients_of(net).items():
        tied = name == "embedding.weight"  # used by an embedding, too, which autograd does in the first half
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6 if tied else 0, msg=name)


def test_gradients_that_are_asked_for_are_there_at_once(weights: WeightGradients) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(3, 4, requires_grad=True)

    def penalty() -> Tensor:
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (of_weight,) = torch.autograd.grad(net(x).sum(), net[0].weight, create_graph=True)
        return slope.square().sum() + of_weight.square().sum()

    penalty().backward()
    expected, slope = gradients_of(net), x.grad
    x.grad = None
    with weights.split(net):
        loss = penalty()
    with weights.deferring(KEY, [loss]):
        torch.autograd.backward([loss])
    weights.bring(KEY)
    for name, value in gradients_of(net).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad, slope, rtol=1e-6, atol=1e-6)


def test_hooks_run_once_and_have_whole_gradients(weights: WeightGradients) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen: list[Any] = []
    x = torch.randn(3, 4)
    net[0].weight.register_hook(lambda grad: seen.append(grad.clone()))
    net[1].weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    with weights.split(net):
        hidden = net[0](x)
        hidden.register_hook(lambda grad: seen.append("hidden"))
        loss = net[1](hidden).square().sum()
    with weights.deferring(KEY, [loss]):
        torch.autograd.backward([loss])
    weights.bring(KEY)
    second, hidden_seen, first = seen
    assert hidden_seen == "hidden"
    grads = gradients_of(net)
    loss_again = net[1](net[0](x)).square().sum()
    expected = torch.autograd.grad(loss_again, [net[0].weight, net[1].weight])
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])
    assert torch.equal(grads["0.weight"], expected[0])
    assert torch.equal(grads["1.weight"], expected[1])


def test_frozen_weights_stay_without_gradient(weights: WeightGradients) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].requires_grad_(False)
    with weights.split(net):
        loss = net(torch.randn(3, 4)).sum()
    with weights.deferring(KEY, [loss]):
        torch.autograd.backward([loss])
    weights.bring(KEY)
    assert net[0].weight.grad is not None
    assert net[1].weight.grad is None


def test_an_input_that_is_changed_between_the_halves_is_an_error(weights: WeightGradients) -> None:
    net = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    with weights.split(net):
        loss = net(x).sum()
    with weights.deferring(KEY, [loss]):
        torch.autograd.backward([loss])
    x.zero_()
    with pytest.raises(RuntimeError, match="The input of a product with a weight of shape .4, 4. was changed in place"):
        weights.bring(KEY)


def halves(weights: WeightGradients, net: nn.Module, program: Callable[[], Tensor]) -> None:
    """Run a program and both halves of its backward."""
    with weights.split(net):
        loss = program()
    with weights.deferring(KEY, [loss]):
        torch.autograd.backward([loss])
    weights.bring(KEY)


def test_attention_in_eval_mode_keeps_its_fast_path(weights: WeightGradients) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    frozen = nn.TransformerEncoder(layer, 1).eval().requires_grad_(False)
    net = nn.ModuleDict({"frozen": frozen, "head": nn.Linear(8, 4)})
    net.head.train()
    x, mask = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, False, False]])
    expected = frozen(x, src_key_padding_mask=mask)
    assert not expected[0, 2].any()
    with weights.split(net):
        assert torch.equal(frozen(x, src_key_padding_mask=mask), expected)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


def test_undefined_gradients_stay_undefined(weights: WeightGradients) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    halves(weights, net, lambda: NoGradient.apply(net[0](x)).sum() + net[1](x).sum())
    assert net[0].weight.grad is None
    assert net[0].bias.grad is None
    assert net[1].weight.grad is not None


class Nested(torch.autograd.Function):
    """Has a backward of its own inside of its backward, and looks at the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: Tensor, look: Callable[[], None]) -> Tensor:
        ctx.inner, ctx.look = inner, look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        torch.autograd.backward([ctx.inner])
        ctx.look()
        return grads[0], None, None


def test_backwards_inside_of_the_first_half_are_whole(weights: WeightGradients) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, seen = torch.randn(3, 4), []

    def program() -> Tensor:
        inner = net[1](x).sum()
        return Nested.apply(net[0](x), inner, lambda: seen.append(net[1].weight.grad is not None)).sum()

    halves(weights, net, program)
    assert seen == [True]
    assert net[0].weight.grad is not None


@pytest.mark.parametrize("write", [lambda grad: grad.data.mul_(2), lambda grad: grad.mul_(2)], ids=["data", "in-place"])
def test_writes_to_a_shared_gradient_come_too_late(write: Callable[[Tensor], Any], weights: WeightGradients) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    x, other = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)

    def program() -> Tensor:
        early = other.exp()
        early.register_hook(lambda grad: (write(grad), None)[1])
        return (early + net(x)).square().sum()

    program().backward()
    expected = gradients_of(net)
    other.grad = None
    halves(weights, net, program)
    assert torch.equal(net.weight.grad, expected["weight"])


def test_hooks_that_come_behind_the_product_have_their_gradient_in_the_first_half(weights: WeightGradients) -> None:
    net = nn.Linear(4, 4)
    with weights.split(net):
        loss = net(torch.randn(3, 4)).sum()
    net.weight.register_hook(lambda grad: 2 * grad)
    with weights.deferring(KEY, [loss]):
        torch.autograd.backward([loss])
    assert net.weight.grad is not None
    weights.bring(KEY)


def test_a_weight_that_is_frozen_between_the_halves_is_an_error(weights: WeightGradients) -> None:
    net = nn.Linear(4, 4)
    with weights.split(net):
        loss = net(torch.randn(3, 4)).sum()
    with weights.deferring(KEY, [loss]):
        torch.autograd.backward([loss])
    net.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="A weight of shape .4, 4. was frozen"):
        weights.bring(KEY)


def is_split(weights: WeightGradients, net: nn.Module, program: Callable[[], Tensor]) -> bool:
    with weights.split(net):
        out = program()  # lives as long as its graph is walked
    names, nodes = set(), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes += [below for below, _ in node.next_functions if below is not None]
    return "_SplitBackward" in names


def test_inputs_that_are_not_activations_are_not_split(weights: WeightGradients) -> None:
    net = nn.Linear(4, 4)
    half = nn.Linear(4, 4).bfloat16()
    leaf = torch.randn(3, 4, requires_grad=True)
    param = nn.Parameter(torch.randn(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_split(weights, half, lambda: half(leaf))
    assert is_split(weights, net, lambda: net(leaf))
    assert not is_split(weights, net, lambda: net(param[:2]))
    ragged = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    assert not is_split(weights, net, lambda: net(ragged))


def test_products_of_no_features_are_those_of_pytorch(weights: WeightGradients) -> None:
    net = nn.Linear(0, 4)
    x = torch.randn(2, 3, 0)
    halves(weights, net, lambda: net(x).sum())
    assert net.weight.grad.shape == (4, 0)
    assert torch.equal(net.bias.grad, torch.full((4,), 6.0))


def test_traced_code_is_not_split(weights: WeightGradients) -> None:
    net = nn.Linear(4, 4)
    with weights.split(net):
        traced = torch.jit.trace(net, torch.randn(3, 4), check_trace=False)
    assert "_Split" not in str(traced.inlined_graph)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_has_its_gradients(backend: str, weights: WeightGradients) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    net(x).sum().backward()
    expected = gradients_of(net)
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    with weights.split(net):
        loss = compiled(x).sum()
    with weights.deferring(KEY, [loss]):
        torch.autograd.backward([loss])
    weights.bring(KEY)
    for name, value in gradients_of(net).items():
        torch.testing.assert_close(value, expected[name], msg=name)
