from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_zero.moe import MoE
from tests.moe.reference import capacity, expert_modules, reference

H, E, T = 8, 4, 22


class SwiGLU(nn.Module):
    """The experts of today's models: three matrices, and functions between them."""

    def __init__(self, hidden: int = H, width: int = 12) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Scaled(SwiGLU):
    """Has a parameter of its own, so it runs in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(H))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


EXPERTS = {"grouped": SwiGLU, "loop": Scaled}


def _experts(kind: str = "grouped", num: int = E) -> list[nn.Module]:
    return [EXPERTS[kind]() for _ in range(num)]


def _layer(kind: str = "grouped", **options: Any) -> MoE:
    return MoE(H, _experts(kind), E, **options)


def _tensors(moe: MoE) -> dict[str, Tensor]:
    return {name.removeprefix("experts."): p for name, p in moe.named_parameters() if name.startswith("experts.")}


def _compare(moe: MoE, x: Tensor, bound: float = 1e-6, used_token: Tensor | None = None, **options: Any) -> None:
    """Compare forward and gradients with the reference in fp64; errors are relative to the largest element."""
    grad = torch.randn(x.shape)
    x = x.detach().requires_grad_()
    out, aux, counts = moe(x, used_token)
    ((out * grad.to(out)).sum() + 3 * aux).backward()
    wide = {name: p.detach().double().requires_grad_() for name, p in moe.named_parameters()}
    leaf = x.detach().double().requires_grad_()
    template = EXPERTS["loop" if "experts.scale" in wide else "grouped"]().double()
    experts = {name.removeprefix("experts."): p for name, p in wide.items() if name.startswith("experts.")}
    used = None if used_token is None else used_token.nonzero().flatten().tolist()
    expected, aux_expected, counts_expected = reference(
        leaf.view(-1, H), wide["router.weight"], expert_modules(template, experts), k=moe.k, used=used, **options
    )
    if moe.mlp is not None:
        mlp = {name.removeprefix("mlp."): p for name, p in wide.items() if name.startswith("mlp.")}
        flat = leaf.view(-1, H)
        shares = F.linear(flat, wide["coefficient.weight"], wide["coefficient.bias"]).softmax(-1)
        dense = torch.func.functional_call(template, mlp, (flat,))
        expected = expected * shares[:, :1] + dense * shares[:, 1:]
    expected = expected.view(x.shape)
    ((expected * grad.double()).sum() + 3 * aux_expected).backward()
    assert counts.tolist() == counts_expected.tolist()
    pairs = {"output": (out, expected), "loss": (aux, aux_expected), "input": (x.grad, leaf.grad)}
    pairs |= {name: (p.grad, wide[name].grad) for name, p in moe.named_parameters()}
    for name, (mine, theirs) in pairs.items():
        assert mine is not None, name
        theirs = torch.zeros_like(mine).double() if theirs is None else theirs
        error = (mine.double() - theirs).abs().max().item()
        assert error <= bound * max(theirs.abs().max().item(), 1.0), (name, error)


# -- Against the reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_layer_is_its_formula(k: int, kind: str) -> None:
    moe = _layer(kind, k=k)
    assert moe.experts._is_grouped == (kind == "grouped")
    _compare(moe, torch.randn(2, T // 2, H))


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_tokens_above_the_capacity_are_dropped_as_in_deepspeed(k: int, factor: float, kind: str) -> None:
    moe = _layer(kind, k=k, capacity_factor=factor, drop_tokens=True, use_rts=False, min_capacity=2)
    _compare(moe, torch.randn(T, H), capacity=capacity(T, E, k, factor, 2))


def test_evaluation_has_a_capacity_of_its_own() -> None:
    moe = _layer(k=2, capacity_factor=9.0, eval_capacity_factor=0.5, drop_tokens=True, min_capacity=0).eval()
    _compare(moe, torch.randn(T, H), capacity=capacity(T, E, 2, 0.5, 0))


def test_no_expert_has_less_than_the_least_capacity() -> None:
    moe = _layer(capacity_factor=0.01, drop_tokens=True, use_rts=False, min_capacity=3)
    _compare(moe, torch.randn(T, H), capacity=3)


def test_nothing_is_drawn_for_tokens_that_are_not_dropped() -> None:
    """The default mixture of one choice was refused where random numbers are, for numbers that decided nothing."""
    moe, x = _layer(k=1), torch.randn(T, H)
    state = torch.get_rng_state()
    moe(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert not moe.router.is_random
    assert _layer(k=1, drop_tokens=True).router.is_random


def test_random_tokens_are_kept_by_their_draw() -> None:
    moe = _layer(capacity_factor=0.7, drop_tokens=True, min_capacity=0)
    torch.manual_seed(3)
    priority = torch.rand(T)
    _compare_seeded(moe, torch.randn(T, H), 3, priority=priority, capacity=capacity(T, E, 1, 0.7, 0))


def _compare_seeded(moe: MoE, x: Tensor, seed: int, **options: Any) -> None:
    """Compare, with the layer's draws from a seed."""
    forward = moe.forward

    def seeded(*args: Any) -> Any:
        torch.manual_seed(seed)
        return forward(*args)

    moe.forward = seeded  # type: ignore[method-assign]
    _compare(moe, x, **options)


@pytest.mark.parametrize("k", [1, 2])
def test_noise_of_a_seed_chooses_experts(k: int) -> None:
    torch.manual_seed(5)
    noise = -torch.empty(T, E).exponential_().log()
    moe = _layer(k=k, noisy_gate_policy="RSample")
    _compare_seeded(moe, torch.randn(T, H), 5, noise=noise.double())
    _compare(_layer(k=k, noisy_gate_policy="RSample").eval(), torch.randn(T, H))


def test_the_second_expert_is_drawn() -> None:
    moe, x = _layer(k=2, top2_2nd_expert_sampling=True), torch.randn(200, H)
    first = [moe.router(x).experts for _ in range(2)]
    assert torch.equal(first[0][:, 0], first[1][:, 0])
    assert not torch.equal(first[0][:, 1], first[1][:, 1])
    assert (first[0][:, 0] != first[0][:, 1]).all()
    _compare(moe.eval(), x[:T])


def test_jitter_moves_the_input_of_the_router_alone() -> None:
    torch.manual_seed(7)
    factors = torch.empty(T, H).uniform_(0.99, 1.01)
    moe, x = _layer(noisy_gate_policy="Jitter"), torch.randn(T, H)
    torch.manual_seed(7)
    routing = moe.router(x)
    scores = ((x * factors) @ moe.router.weight.T).softmax(1)
    torch.testing.assert_close(routing.scores, scores.gather(1, routing.experts))
    _compare(moe.eval(), x)


@pytest.mark.parametrize("kind", EXPERTS)
def test_residual_is_its_formula(kind: str) -> None:
    _compare(_layer(kind, k=2, use_residual=True), torch.randn(2, T // 2, H))


def test_a_shared_expert_is_added() -> None:
    shared = SwiGLU()
    moe, x = _layer(k=2), torch.randn(T, H)
    alone = moe(x)[0]
    moe.shared_expert = shared
    torch.testing.assert_close(moe(x)[0], alone + shared(x))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_bias_chooses_and_does_not_weigh(score: Any) -> None:
    moe = _layer(k=2, bias_balancing=True, score_function=score, z_loss_factor=0.1)
    assert moe.router.expert_bias is not None
    moe.router.expert_bias.copy_(torch.tensor([0.5, -0.3, 0.0, 0.2]))
    _compare(moe, torch.randn(T, H), bias=moe.router.expert_bias.double(), score=score, z_loss_factor=0.1)


def test_unused_tokens_reach_no_expert() -> None:
    used = torch.arange(T) % 3 != 0
    moe = _layer(k=2, capacity_factor=0.8, drop_tokens=True, min_capacity=0)
    _compare(moe, torch.randn(T, H), used_token=used, capacity=capacity(T, E, 2, 0.8, 0))


def test_16_bits_round_at_the_ends_of_products_alone() -> None:
    moe = _layer(k=2).bfloat16()
    _compare(moe, torch.randn(T, H).bfloat16(), bound=4 * torch.finfo(torch.bfloat16).eps)


def test_router_computes_in_fp32_under_autocast() -> None:
    moe, x = _layer(k=2), torch.randn(T, H)
    plain = moe.router(x)
    with torch.autocast("cpu", torch.bfloat16):
        out, aux, _ = moe(x)
        lowered = moe.router(x)
        rows = copy.deepcopy(moe.experts)
    assert torch.equal(lowered.scores, plain.scores)
    assert (out.dtype, aux.dtype) == (torch.bfloat16, torch.float32)
    assert rows._is_grouped
    torch.testing.assert_close(out.float(), moe(x)[0], rtol=0.05, atol=0.05)


# -- Tokens and experts that are not there -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("shape", [(0, H), (3, 0, H)], ids=str)
def test_no_tokens_give_gradients_of_zeros(shape: tuple[int, ...], kind: str) -> None:
    moe = _layer(kind, k=2, use_residual=True, drop_tokens=True, z_loss_factor=0.1)
    x = torch.zeros(shape, requires_grad=True)
    out, aux, counts = moe(x)
    assert (out.shape, aux.item(), counts.tolist()) == (shape, 0.0, [0] * E)
    (out.sum() + aux).backward()
    assert x.grad is not None
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_without_tokens_have_gradients_of_zeros(kind: str) -> None:
    moe = _layer(kind)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[2] = 1.0
    out, _, counts = moe(torch.rand(5, H))
    out.sum().backward()
    assert counts.tolist() == [0, 0, 5, 0]
    for name, parameter in _tensors(moe).items():
        assert parameter.grad is not None, name
        assert [bool(grad.any()) for grad in parameter.grad] == [False, False, True, False], name


def test_all_unused_tokens_are_fine() -> None:
    moe = _layer("loop")
    out, _, counts = moe(torch.rand(5, H), torch.zeros(5))
    out.sum().backward()
    assert not out.any()
    assert counts.tolist() == [0] * E
    assert all(parameter.grad is not None for parameter in _tensors(moe).values())


# -- Repeatable, recomputed, compiled ----------------------------------------------------------------------------------


def test_two_runs_have_the_same_bits() -> None:
    moe, x = _layer(k=3), torch.randn(500, H)
    results = []
    for _ in range(2):
        moe.zero_grad()
        moe(x)[0].square().sum().backward()
        results.append([parameter.grad for parameter in moe.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))  # type: ignore[arg-type]


def test_recomputation_has_the_same_gradients() -> None:
    moe, x = _layer(k=2, noisy_gate_policy="RSample"), torch.randn(T, H, requires_grad=True)
    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        out = checkpoint(lambda x: moe(x)[0], x, use_reentrant=False) if recomputes else moe(x)[0]
        found.append(torch.autograd.grad(out.square().sum(), [x, *moe.parameters()]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_second_derivatives_exist() -> None:
    moe = MoE(3, nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), 2, k=2).double()
    x = torch.randn(4, 3).double().requires_grad_()
    torch.autograd.gradcheck(lambda x: moe(x)[0], (x,))
    torch.autograd.gradgradcheck(lambda x: moe(x)[0], (x,))


def test_layer_compiles_into_one_graph() -> None:
    moe, x = _layer(k=2), torch.randn(T, H)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(x), moe(x), strict=True):
        torch.testing.assert_close(found, expected)


# -- Bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 5}, "`k=5` is out of range: a token uses 1 to `num_experts=4` experts"),
        ({"k": 0}, "`k=0` is out of range"),
        ({"num_experts": 0}, "`num_experts=0` must be 1 or more"),
        ({"ep_size": 3}, "`num_experts=4` does not divide by `ep_size=3`"),
        ({"ep_size": 2}, "`ep_size=2`: expert parallelism is an option of the strategy, .* Use `ep_size=1`"),
        ({"capacity_factor": 0.0}, "`capacity_factor=0.0` must be a number above 0. .* `drop_tokens=False`"),
        ({"eval_capacity_factor": float("inf")}, "`eval_capacity_factor=inf` must be"),
        ({"min_capacity": -1}, "`min_capacity=-1` must be 0 or more"),
        ({"noisy_gate_policy": "rsample"}, "`noisy_gate_policy='rsample'` is not known"),
        ({"score_function": "tanh"}, "`score_function='tanh'` is not known"),
        ({"z_loss_factor": -1.0}, "`z_loss_factor=-1.0` must be 0 or more"),
        ({"pad_to_tokens": 0, "drop_tokens": True}, "`pad_to_tokens=0` must be a number of tokens, 1 or more, or None"),
        ({"pad_to_tokens": 64}, "`pad_to_tokens=64` needs `drop_tokens=True`: .* Set a capacity, or leave"),
        ({"use_tutel": True}, "`use_tutel=True` does not exist here"),
        ({"enable_expert_tensor_parallelism": True}, "`enable_expert_tensor_parallelism=True` does not exist here"),
        ({"expert": nn.ModuleList([nn.Linear(H, H)] * 3)}, "`expert` has 3 modules for `num_experts=4`"),
        ({"expert": nn.Linear(H, H + 1)}, r"`expert` \(`Linear`\) must return the shape of its input, \(3, 8\)"),
        ({"expert": nn.Linear(H + 1, H)}, r"`expert` \(`Linear`\) does not take tokens of `hidden_size=8`"),
        ({"expert": [nn.Linear(H, H)] * 3 + [nn.Linear(H, H, bias=False)]}, "`bias` is .* no such parameter in the"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoE(**{"hidden_size": H, "expert": nn.Linear(H, H), "num_experts": E, **options})


@pytest.mark.parametrize("value", [64.0, "64", True])
def test_other_kinds_of_numbers_of_tokens_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="`pad_to_tokens=.*` must be a number of tokens, such as 4096, or None"):
        _layer(drop_tokens=True, pad_to_tokens=value)


def test_tokens_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`hidden_states` must have shape \(..., 8\) .* got \(3, 7\)"):
        _layer()(torch.ones(3, 7))
