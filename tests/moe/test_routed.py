from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.moe.division import divide_experts
from lightning_zero.moe.exchange import ExpertRanks
from lightning_zero.moe.routed import RoutedExperts, _tried
from lightning_zero.parallel.activation.kept_products import keep_products
from tests.worlds import run, seed

H, E, K = 6, 4, 2


class Plain(nn.Module):
    """Experts as transformers writes them; in ``bend`` subclasses go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.up = nn.Parameter(torch.randn(E, 5, H))
        self.down = nn.Parameter(torch.randn(E, H, 5))

    def bend(self, total: Tensor, weights: Tensor) -> Tensor:
        return total

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            if len(token):
                inner = (hidden_states[token] @ self.up[expert].T).relu() @ self.down[expert].T
                total.index_add_(0, token, inner * top_k_weights[token, choice, None])
        return self.bend(total, top_k_weights)


class Normed(Plain):
    def bend(self, total: Tensor, weights: Tensor) -> Tensor:
        return nn.functional.normalize(total)


class Squared(Plain):
    def bend(self, total: Tensor, weights: Tensor) -> Tensor:
        return total * weights.sum(1, keepdim=True)


class Mixing(Plain):
    """An expert reads the rows of another one."""

    def bend(self, total: Tensor, weights: Tensor) -> Tensor:
        return total + self.up.sum()


class Dropping(Plain):
    def bend(self, total: Tensor, weights: Tensor) -> Tensor:
        return nn.functional.dropout(total, 0.5, self.training)


class Rescaling(Plain):
    """Divides by a mean over all experts, in training alone."""

    def bend(self, total: Tensor, weights: Tensor) -> Tensor:
        return total / total.abs().mean() if self.training else total


class Indexing(Plain):
    """Takes -1 for the last expert, and cannot take E."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        inner = torch.einsum("nh,nkoh->nko", hidden_states, self.up[top_k_index]).relu()
        return torch.einsum("nko,nkho,nk->nh", inner, self.down[top_k_index], top_k_weights)


class Failing(Plain):
    def bend(self, total: Tensor, weights: Tensor) -> Tensor:
        raise RuntimeError("no kernel")


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, H, H))

    def forward(self, hidden_states: Tensor, experts: Tensor) -> Tensor:
        return hidden_states


def test_experts_of_unmodified_models_are_found_and_verified() -> None:
    experts = RoutedExperts.of(module := Plain())
    assert experts is not None
    experts.verify("experts")
    assert (experts.num_experts, module.num_experts) == (E, E)
    assert RoutedExperts.of(Other()) is None
    assert RoutedExperts.of(nn.Linear(2, 2)) is None


def test_experts_with_dropout_are_verified_without() -> None:
    experts = RoutedExperts.of(module := Dropping())
    assert experts is not None
    experts.verify("experts")
    assert module.training


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Normed, "its result is not the sum of the results of single experts"),
        (Squared, "its result is not the sum of the results of single experts"),
        (Mixing, "its result is not the sum of the results of single experts"),
        (Rescaling, "its result is not the sum .* times their weights, in training and not in evaluation"),
        (Failing, "it could not be tried with random tokens .no kernel."),
    ],
)
def test_experts_that_are_no_weighted_sums_are_refused(kind: type[Plain], message: str) -> None:
    experts = RoutedExperts.of(kind())
    assert experts is not None
    with pytest.raises(ValueError, match=f"cannot divide `a.experts` .`{kind.__name__}`.: {message}"):
        experts.verify("a.experts")


def _tokens(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    number = 5 * (rank != 1)  # none on rank 1
    tokens = torch.randn(number, H, generator=generator).requires_grad_()
    choices = torch.stack([torch.randperm(2, generator=generator) for _ in range(number)] or [torch.empty(K)]).long()
    weights = torch.rand(number, K, generator=generator).requires_grad_()
    return tokens, choices[:number] + (rank == 0), weights  # no rank chooses the last expert


def _exchanged(rank: int, world: int) -> Any:
    seed(3)
    module = Plain()
    divide_experts(nn.ModuleList([module]), ExpertRanks())
    tokens, choices, weights = _tokens(rank)
    result = module(tokens, top_k_index=choices, top_k_weights=weights)
    grads = torch.autograd.grad(result.square().sum(), [tokens, weights, module.up, module.down])
    return result.detach(), *grads, module.num_experts


@pytest.mark.parametrize("world", [2, 4])
def test_the_stand_in_computes_as_the_module_does(world: int) -> None:
    seed(3)
    module = Plain()
    inputs = [_tokens(rank) for rank in range(world)]
    results = [module(*one) for one in inputs]
    loss = torch.stack([one.square().sum() for one in results]).sum()
    tensors = [one for tokens, _, weights in inputs for one in (tokens, weights)]
    *grads, up, down = torch.autograd.grad(loss, [*tensors, module.up, module.down], materialize_grads=True)
    for rank, (result, of_tokens, of_weights, of_up, of_down, num_experts) in enumerate(run(_exchanged, world)):
        own = slice(rank * E // world, (rank + 1) * E // world)
        assert torch.allclose(result, results[rank], atol=1e-5)
        assert torch.allclose(of_tokens, grads[2 * rank], atol=1e-4)
        assert torch.allclose(of_weights, grads[2 * rank + 1], atol=1e-4)
        assert torch.allclose(of_up, up[own], atol=1e-4)  # of the last expert zeros
        assert torch.allclose(of_down, down[own], atol=1e-4)
        assert num_experts == E


class Products(Plain):
    """Computes with products alone, so that under autocast its results have 16 bits where the weights have."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gates = top_k_weights.new_zeros(len(hidden_states), len(self.up)).scatter(1, top_k_index, top_k_weights)
        inner = torch.einsum("nh,eoh->neo", hidden_states, self.up).relu()
        return (torch.einsum("neo,eho->neh", inner, self.down) * gates.unsqueeze(-1)).sum(1)


def _without_some(rank: int, world: int) -> None:
    seed(3)
    module, whole = Plain(), Plain()
    whole.load_state_dict(module.state_dict())
    divide_experts(nn.ModuleList([module]), ExpertRanks())
    tokens, weights = torch.randn(5, H), torch.rand(5, K)
    for number in (-1, -100, E, E + 3):
        choices = torch.tensor([[number, 1], [0, number], [2, 3], [1, 0], [number, number]])
        assert torch.allclose(module(tokens, choices, weights), whole(tokens, choices, weights), atol=1e-5)


def test_choices_of_nothing_are_left_out_as_the_module_does() -> None:
    run(_without_some, 2)


class Unwritten(Plain):
    """Reads rows of no expert that nobody has written, as products over groups leave them."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = super().forward(hidden_states, top_k_index, top_k_weights)
        is_of_none = (top_k_index >= self.num_experts).any()
        return result + 0.0 * torch.empty_like(result) if is_of_none else result


def test_memory_that_nobody_has_written_does_not_decide_how_choices_of_nothing_are_taken() -> None:
    was = torch.are_deterministic_algorithms_enabled()
    assert _tried(Plain()) == (True, True)
    assert _tried(Unwritten()) == (True, False)
    assert torch.are_deterministic_algorithms_enabled() == was


def _not_left_out(rank: int, world: int) -> None:
    layers = nn.ModuleList([Indexing(), Indexing()])  # verified once
    divide_experts(layers, ExpertRanks())
    choices = torch.zeros(5, K, dtype=torch.long)
    for layer in layers:
        layer(torch.randn(5, H), choices, torch.rand(5, K))
        for number in (-1, E):
            with pytest.raises(RuntimeError, match="`Indexing` is given a choice that is none of its experts 0 to 3"):
                layer(torch.randn(5, H), choices.index_fill(0, torch.tensor(2), number), torch.rand(5, K))


def test_choices_of_nothing_that_the_module_does_not_leave_out_are_an_error() -> None:
    run(_not_left_out, 2)


def _narrow(rank: int, world: int) -> tuple[Tensor, Tensor]:
    seed(3)
    module, whole = Products(), Products()
    whole.load_state_dict(module.state_dict())
    divide_experts(nn.ModuleList([module]), ExpertRanks())
    tokens = torch.randn(5, H, generator=torch.Generator().manual_seed(rank))
    choices, weights = torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1).bfloat16()  # none for the second rank
    drawn = torch.random.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        result, expected = module(tokens, choices, weights), whole(tokens, choices, weights)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(torch.random.get_rng_state(), drawn)
    return result.detach(), expected.to(tokens.dtype).detach()


def test_a_rank_without_tokens_sends_results_in_the_dtype_of_the_others() -> None:
    for result, expected in run(_narrow, 2):
        assert torch.equal(result, expected)


def test_a_call_without_rows_leaves_no_casts_without_a_graph_to_the_next() -> None:
    module = Products()
    experts = RoutedExperts(module)
    rows, ends = torch.randn(5, H), torch.tensor([5, 5, 5, 5], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        experts._compute(torch.bfloat16, rows[:0], torch.zeros_like(ends))
        experts._compute(torch.bfloat16, rows, ends).sum().backward()
    for param in module.parameters():
        assert param.grad is not None
        assert param.grad.any()


def test_a_call_without_rows_leaves_the_products_of_a_selective_checkpoint_alone() -> None:
    experts, ends = RoutedExperts(Plain()), torch.zeros(E, dtype=torch.int32)
    weight, x = torch.randn(H, H, requires_grad=True), torch.randn(5, H)

    def block(x: Tensor) -> Tensor:
        nothing = experts._compute(x.dtype, x[:0], ends)
        return torch.cat([(x @ weight).tanh(), nothing]).square()

    checkpoint(block, x, use_reentrant=False, context_fn=keep_products).sum().backward()
    (expected,) = torch.autograd.grad(block(x).sum(), weight)
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)


def test_experts_are_verified_with_another_default_device() -> None:
    experts = RoutedExperts.of(Plain())
    assert experts is not None
    with torch.device("meta"):
        experts.verify("experts")
