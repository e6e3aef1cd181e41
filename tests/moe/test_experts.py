from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.moe import MoE
from lightning_zero.moe.experts import Experts, StackedLinear, _computes_rows_alone

H, E = 6, 3


class Mixing(nn.Module):
    """Subtracts the mean of all tokens, so that a token depends on the others of its expert."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x - x.mean(0, keepdim=True))
        return y


class Reordering(nn.Module):
    """Computes tokens in another order, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.flip(0)).flip(0)
        return y


class Tied(nn.Module):
    """Has one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(H, H)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh())
        return y


class WithBias(nn.Module):
    """Returns a tuple, as experts of Megatron do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(H, H)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer.bias


class Hooked(nn.Module):
    """Has a layer whose output a hook changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(H, H)
        self.layer.register_forward_hook(lambda module, inputs, output: 2 * output)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def _normed() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(H), nn.Linear(H, H))


def _batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(H, H), nn.BatchNorm1d(H))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(H, 2 * H), nn.GELU(), nn.Dropout(0.0), nn.Linear(2 * H, H, bias=False))


def _linear() -> nn.Module:
    return nn.Linear(H, H)


GROUPED = {"linear": _linear, "mlp": _mlp, "tied": Tied, "with-bias": WithBias}
LOOPED = {
    "mixing": Mixing, "reordering": Reordering, "hooked": Hooked, "normed": _normed, "batch-norm": _batch_norm,
}  # fmt: skip
ALL = {**GROUPED, **LOOPED}
ENDS = torch.tensor([4, 4, 9]).int()


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("kind", ALL)
def test_experts_of_any_class_compute_their_rows(kind: str) -> None:
    modules = [ALL[kind]() for _ in range(E)]
    experts, rows = Experts(modules, H), torch.randn(9, H, requires_grad=True)
    assert experts._is_grouped == (kind in GROUPED)
    found, expected = experts(rows, ENDS), torch.cat([_first(modules[0](rows[:4])), _first(modules[2](rows[4:]))])
    torch.testing.assert_close(found, expected)
    grad = torch.randn(9, H)
    mine = torch.autograd.grad(found, [rows, *experts.parameters()], grad)
    expected.backward(grad)
    torch.testing.assert_close(mine[0], rows.grad)
    assert rows.grad is not None
    for (name, _), stacked in zip(experts.named_parameters(), mine[1:], strict=True):
        for part, module in zip(stacked, modules, strict=True):
            theirs = module.get_parameter(name).grad
            torch.testing.assert_close(part, torch.zeros_like(part) if theirs is None else theirs, atol=1e-5, rtol=1e-5)


def test_buffers_are_those_of_each_expert() -> None:
    modules = [_batch_norm() for _ in range(E)]
    experts = Experts(modules, H)
    rows = torch.randn(9, H)
    experts(rows, ENDS)
    modules[0](rows[:4])
    assert experts.get_buffer("1.num_batches_tracked").tolist() == [1, 0, 1]
    torch.testing.assert_close(experts.get_buffer("1.running_mean")[0], modules[0].get_buffer("1.running_mean"))


def test_names_are_those_of_the_expert() -> None:
    moe = MoE(H, _mlp(), E)
    shapes = {name: tuple(one.shape) for name, one in moe.state_dict().items()}
    assert shapes == {
        "router.weight": (E, H),
        "experts.0.weight": (E, 2 * H, H),
        "experts.0.bias": (E, 2 * H),
        "experts.3.weight": (E, H, 2 * H),
    }
    assert isinstance(moe.experts.get_submodule("0"), StackedLinear)
    assert [name for name, _ in Experts([Tied()] * E, H).named_parameters()] == ["first.weight", "first.bias"]


def test_one_module_is_copied_and_several_keep_their_values() -> None:
    module = _linear()
    copies = Experts([module] * E, H).get_parameter("weight")
    assert all(torch.equal(copies[index], module.get_parameter("weight")) for index in range(E))
    modules = [_linear() for _ in range(E)]
    stacked = MoE(H, modules, E).experts.get_parameter("weight")
    assert all(torch.equal(part, one.get_parameter("weight")) for part, one in zip(stacked, modules, strict=True))


def test_frozen_parameters_stay_frozen() -> None:
    module = _mlp()
    module.get_parameter("0.weight").requires_grad_(False)
    experts = Experts([module] * E, H)
    experts(torch.randn(9, H), ENDS).sum().backward()
    assert [one.requires_grad for one in experts.parameters()] == [False, True, True]
    assert [one.grad is None for one in experts.parameters()] == [True, False, False]


def _differing(kind: str) -> list[nn.Module]:
    modules: list[nn.Module] = [nn.Sequential(nn.Linear(H, H), nn.GELU(), nn.Linear(H, H)) for _ in range(E)]
    last = modules[-1]
    assert isinstance(last, nn.Sequential)
    if kind == "frozen":
        last[0].weight.requires_grad_(False)
    elif kind == "activation":
        last[1] = nn.ReLU()
    elif kind == "option":
        last[1] = nn.GELU("tanh")
    elif kind == "attribute":
        for number, module in enumerate(modules):
            vars(module)["scale"] = 1.0 if number < E - 1 else 0.5
    elif kind == "function":
        for number, module in enumerate(modules):
            vars(module)["_act"] = F.gelu if number < E - 1 else torch.tanh
    elif kind == "number":
        for number, module in enumerate(modules):
            vars(module)["expert_idx"] = number
    elif kind == "hook":
        last[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    elif kind == "tie":
        last[2].weight = last[0].weight
    else:
        last[2].bias = modules[0].get_parameter("2.bias")
    return modules


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("frozen", "`0.weight` is trained in the first one, and frozen in the one at"),
        ("activation", r"`1` is .*GELU\(.*\) in training with 0 hooks in the first one, and .*ReLU"),
        ("option", "approximate='tanh'"),
        ("attribute", "`scale` is 1.0 in the first one, and 0.5 in"),
        ("function", "`_act` is <built-in function gelu> in the first one, and <built-in .* tanh"),
        ("number", r"`expert_idx` is 0 in the first one, and 1 in .*`self.register_buffer\(name"),
        ("hook", "and .* with 1 hooks in"), ("tie", "and trained, `0.weight` in"),
        ("shared", "share the parameter `2.bias`"),
    ],
)  # fmt: skip
def test_modules_that_differ_in_more_than_values_are_refused(kind: str, message: str) -> None:
    """The first one stood for all: frozen parameters were trained, and activations were its own."""
    with pytest.raises(ValueError, match=message):
        Experts(_differing(kind), H)


class Numbered(nn.Module):
    """Has a function of its own, a number, and an attribute with the name of hooks."""

    def __init__(self, number: int, size: int = H) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.num_hooks = 3
        self.act = lambda x: torch.tanh(x) * size
        self.register_buffer("number", torch.tensor(number))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x)) + self.number


def test_experts_of_one_code_may_have_numbers_in_buffers() -> None:
    modules = [Numbered(number) for number in range(E)]
    experts, rows = Experts(modules, H), torch.randn(9, H)
    torch.testing.assert_close(experts(rows, ENDS), torch.cat([modules[0](rows[:4]), modules[2](rows[4:])]))


def test_the_given_module_is_left_alone() -> None:
    module = _batch_norm()
    before = copy.deepcopy(module.state_dict())
    state = torch.get_rng_state()
    Experts([module] * E, H)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training
    assert all(torch.equal(before[name], one) for name, one in module.state_dict().items())
    assert not any(one.is_meta for one in module.parameters())


def test_dropout_follows_the_mode() -> None:
    experts, rows = Experts([nn.Sequential(nn.Linear(H, H), nn.Dropout(0.9))] * E, H), torch.ones(9, H)
    assert experts._is_grouped
    assert (experts(rows, ENDS) == 0).any()
    assert torch.equal(experts.eval()(rows, ENDS), experts(rows, ENDS))


def test_experts_without_values_are_made_real_later() -> None:
    with torch.device("meta"):
        moe = MoE(H, _mlp(), E, k=2)
    assert all(one.is_meta for one in moe.parameters())
    moe.to_empty(device="cpu")
    for parameter in moe.parameters():
        nn.init.normal_(parameter)
    assert moe(torch.randn(5, H))[0].shape == (5, H)


@pytest.mark.parametrize("kind", ALL)
def test_experts_without_values_are_tried_as_those_with_values(kind: str) -> None:
    """Those that mix tokens ran in one pass, over the tokens of all experts."""
    with torch.device("meta"):
        experts = Experts([ALL[kind]() for _ in range(E)], H)
    assert experts._is_grouped == (kind in GROUPED)


def test_layers_are_copied_pickled_and_saved() -> None:
    moe, x = MoE(H, [_mlp() for _ in range(E)], E, k=2), torch.randn(5, H)
    expected = moe(x)[0]
    for one in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
        assert torch.equal(one(x)[0], expected)
    file = io.BytesIO()
    torch.save(moe.state_dict(), file)
    file.seek(0)
    other = MoE(H, _mlp(), E, k=2)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(x)[0], expected)


def test_a_result_of_another_size_is_refused_in_the_forward_too() -> None:
    class Late(nn.Module):
        """Asks for a value, so that it does not run without values."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(H, 2 * H)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x * float(self.layer.bias.sum() > -1e9))
            return y

    experts = Experts([Late()] * E, H)
    with pytest.raises(ValueError, match=r"`Late`\) must return the shape of its input"):
        experts(torch.randn(9, H), ENDS)


def test_experts_are_tried_inside_of_a_context_of_another_device() -> None:
    """``Trainer.init_module`` on a GPU is one: the generator of the tried tokens is on the CPU, and PyTorch raised."""
    modules = [nn.Linear(H, H), Mixing()]
    with torch.device("meta"):
        assert [_computes_rows_alone(one, H) for one in modules] == [True, False]
