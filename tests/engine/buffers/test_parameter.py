"""What a released parameter answers, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.engine.buffers.parameter import (
    LoweredParameter,
    PendingParameter,
    ReducedParameter,
    ReleasedParameter,
    call_program,
    own,
    owner_of,
    raw_grad,
    set_raw_grad,
)
from lightning_zero.errors import ReleasedParameterError


class _Owner:
    """Knows one parameter; gathers it if it may."""

    is_elsewhere = False

    def __init__(self, values: torch.Tensor | None = None) -> None:
        self.values = values
        self.dtype = torch.float32  # the parameter's own
        self.shown: list[nn.Parameter] = []
        self.written: list[nn.Parameter] = []

    def param_name(self, param: nn.Parameter) -> str:
        return "blocks.0.weight"

    def touch(self, param: nn.Parameter) -> bool:
        if self.values is None:
            return False
        param.__class__ = nn.Parameter
        param.data = self.values
        return True

    def own_dtype(self, param: nn.Parameter) -> torch.dtype:
        return self.dtype

    def show_original(self, param: nn.Parameter) -> None:
        param.__class__ = nn.Parameter
        assert self.values is not None
        param.data = self.values

    def show_gradient(self, param: nn.Parameter) -> None:
        self.shown.append(param)
        set_raw_grad(param, torch.full(param.shape, 7.0))

    def write_gradient(self, param: nn.Parameter, grad: torch.Tensor | None) -> None:
        self.written.append(param)
        set_raw_grad(param, grad)


def _released(owner: _Owner, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    param = nn.Parameter(torch.full((), float("nan"), dtype=dtype).expand(4, 3))
    own(param, owner)
    param.__class__ = ReleasedParameter
    return param


def test_metadata_are_those_of_the_whole_parameter() -> None:
    owner = _Owner()
    param = _released(owner, torch.bfloat16)
    assert (param.shape, param.ndim, param.dim(), param.numel(), param.nelement()) == ((4, 3), 2, 2, 12, 12)
    assert (param.size(0), len(param)) == (4, 4)
    assert (param.device.type, param.layout) == ("cpu", torch.strided)
    assert (param.is_leaf, param.requires_grad, param.is_floating_point()) == (True, True, True)
    assert isinstance(param, nn.Parameter)
    assert {param: 1}[param] == 1
    param.requires_grad_(False)
    assert not param.requires_grad
    param.requires_grad = True
    assert param.requires_grad


@pytest.mark.parametrize("cls", [ReleasedParameter, PendingParameter, LoweredParameter])
def test_the_dtype_is_the_users_and_not_that_of_the_computation(cls: type[nn.Parameter]) -> None:
    owner = _Owner()
    param = _released(owner, torch.bfloat16)
    param.__class__ = cls
    assert (param.dtype, param.itemsize, param.element_size(), param.nbytes) == (torch.float32, 4, 4, 48)
    assert param.is_floating_point()


def test_a_touch_of_a_lowered_parameter_shows_it_in_its_own_dtype() -> None:
    owner = _Owner(torch.ones(4, 3))
    param = _released(owner, torch.bfloat16)
    for use in (lambda: param + 1, lambda: copy.deepcopy(param), lambda: repr(param), lambda: param.data):
        param.data = torch.zeros(4, 3, dtype=torch.bfloat16)
        param.__class__ = LoweredParameter
        use()
        assert type(param) is nn.Parameter
        assert param.dtype == torch.float32
    param.__class__ = LoweredParameter
    assert param.grad is not None
    assert type(param) is LoweredParameter


def test_a_lowered_parameter_without_its_engine_says_so() -> None:
    param = _released(_Owner(), torch.bfloat16)
    param.__class__ = LoweredParameter
    with pytest.raises(RuntimeError, match="the engine that has its master is gone"):
        param + 1


def test_printing_says_the_name_and_no_values() -> None:
    owner = _Owner()
    param = _released(owner)
    for text in (repr(param), str(param), f"{param}"):
        assert "ReleasedParameter('blocks.0.weight', shape=(4, 3)" in text
        assert "nan" not in text


VALUES: dict[str, Callable[[nn.Parameter], Any]] = {
    "operator": lambda p: p + 1,
    "function": lambda p: nn.functional.linear(torch.ones(3), p),
    "nested": lambda p: torch.cat([torch.ones(4, 3), p]),
    "keyword": lambda p: torch.add(input=torch.ones(4, 3), other=p),
    "item": lambda p: p[0, 0].item(),
    "sum": lambda p: p.sum(),
    "in-place": lambda p: p.data.mul_(2),
    "init": lambda p: nn.init.zeros_(p),
    "detach": lambda p: p.detach(),
    "numpy": lambda p: p.detach().numpy(),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "clone": lambda p: p.clone(),
    "cast": lambda p: p.to(torch.float64),
    "equal": lambda p: torch.equal(p, p),
    "contains": lambda p: 1.0 in p,
    "rand_like": lambda p: torch.rand_like(p),
    "new_zeros": lambda p: p.new_zeros(p.shape),
}


@pytest.mark.parametrize("name", list(VALUES))
def test_values_are_refused_with_the_name_and_the_remedy(name: str) -> None:
    owner = _Owner()
    param = _released(owner)
    with (
        pytest.raises(ReleasedParameterError, match=r"`blocks\.0\.weight`.*gathered\(param_or_module\)"),
        torch.no_grad(),
    ):
        VALUES[name](param)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, copy.copy, pickle.dumps], ids=["deepcopy", "copy", "pickle"])
def test_copies_are_refused(copy_of: Callable[[Any], Any]) -> None:
    owner = _Owner()
    param = _released(owner)
    with pytest.raises(ReleasedParameterError, match=r"blocks\.0\.weight"):
        copy_of(param)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_copies_of_what_holds_it_are_refused(copy_of: Callable[[Any], Any]) -> None:
    owner = _Owner()
    module = nn.Linear(3, 4)
    module.weight = _released(owner)
    with pytest.raises(ReleasedParameterError, match=r"blocks\.0\.weight"):
        copy_of({"key": [module]})


def test_an_operation_gathers_where_that_is_allowed() -> None:
    owner = _Owner(torch.ones(4, 3))
    param = _released(owner)
    assert (param * 2).sum().item() == 24
    assert type(param) is nn.Parameter


FILLS: dict[str, Callable[..., torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "full": partial(torch.full_like, fill_value=0.1),
}


@pytest.mark.parametrize("name", FILLS)
def test_a_tensor_made_in_the_shape_of_a_released_parameter_has_memory_and_its_options(name: str) -> None:
    param, make = _released(_Owner()), FILLS[name]
    made = make(param, dtype=torch.float64, requires_grad=True)
    assert torch.equal(made, make(torch.ones(4, 3, dtype=torch.float64)))
    assert (made.requires_grad, type(made)) == (True, torch.Tensor)
    assert not make(param).requires_grad
    assert make(param).is_contiguous()
    row = make(param)
    row[3] = 7.0
    assert torch.equal(row[:3], make(torch.ones(3, 3)))
    assert torch.empty_like(param, device="meta").device.type == "meta"


class _Sized(torch.optim.SGD):
    """Makes states in its constructor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.made = {name: make(self.param_groups[0]["params"][0]) for name, make in FILLS.items()}


def test_state_that_an_optimizer_makes_in_the_shape_of_a_released_parameter_takes_one_element() -> None:
    optimizer = _Sized([_released(_Owner())])
    for name, state in optimizer.made.items():
        assert (state.shape, state.dtype, state.untyped_storage().nbytes()) == ((4, 3), torch.float32, 4)
        assert torch.equal(state, FILLS[name](torch.ones(4, 3)))


class _Masked(torch.nn.Module):
    """Makes a mask in the shape of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = _released(_Owner())

    def forward(self) -> torch.Tensor:
        return _first_row(self.weight)


def _first_row(param: nn.Parameter) -> torch.Tensor:
    mask = torch.zeros_like(param)
    mask[0] = 1.0
    return mask


class _Stepping(torch.optim.SGD):
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        return closure()


def test_a_tensor_that_a_closure_of_a_step_makes_in_the_shape_of_a_released_parameter_has_memory() -> None:
    module = _Masked()
    optimizer = _Stepping([module.weight], lr=0.1)
    for closure in (module, lambda: call_program(lambda: _first_row(module.weight))):
        assert optimizer.step(closure).sum() == 3
    assert optimizer.step(lambda: torch.zeros_like(module.weight)).untyped_storage().nbytes() == 4


def _mask_of(optimizer: torch.optim.Optimizer, *_: Any) -> torch.Tensor:
    return _first_row(optimizer.param_groups[0]["params"][0])


class _Repeating(_Stepping):
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        return super().step(closure)


def test_a_tensor_that_a_function_or_hook_makes_of_an_optimizers_released_parameter_has_memory() -> None:
    optimizer = _Repeating([_released(_Owner())], lr=0.1)
    sums = [_mask_of(optimizer).sum()]
    hook = lambda optimizer, *_: sums.append(_mask_of(optimizer).sum())  # noqa: E731
    optimizer.register_step_pre_hook(hook)
    optimizer.register_step_post_hook(hook)
    optimizer.register_state_dict_pre_hook(hook)
    optimizer.step(lambda: None)
    optimizer.state_dict()
    assert sums == [3.0] * 6


def test_a_read_of_the_gradient_brings_it() -> None:
    owner = _Owner()
    for cls in (ReducedParameter, ReleasedParameter):
        param = nn.Parameter(torch.ones(4, 3))
        own(param, owner)
        param.__class__ = cls
        grad = param.grad
        assert grad is not None
        assert grad[0, 0].item() == 7.0
        assert owner.shown.pop() is param
        assert not owner.shown


@pytest.mark.parametrize("write", [lambda p: setattr(p, "grad", None), lambda p: delattr(p, "grad")])
def test_a_gradient_that_is_set_to_none_is_forgotten(write: Callable[[nn.Parameter], None]) -> None:
    owner = _Owner()
    param = nn.Parameter(torch.ones(2))
    own(param, owner)
    param.__class__ = ReducedParameter
    write(param)
    assert owner.written[0] is param
    assert raw_grad(param) is None


def test_a_gradient_that_is_assigned_is_kept() -> None:
    owner = _Owner()
    param = nn.Parameter(torch.ones(2))
    own(param, owner)
    param.__class__ = ReducedParameter
    param.grad = torch.tensor([1.0, 2.0])
    assert owner.written[0] is param
    assert not owner.shown
    grad = raw_grad(param)
    assert grad is not None
    assert grad.tolist() == [1.0, 2.0]


def test_gradients_are_read_and_set_underneath_without_a_word() -> None:
    owner = _Owner()
    param = _released(owner)
    assert raw_grad(param) is None
    set_raw_grad(param, torch.ones(4, 3))
    assert raw_grad(param) is not None
    assert not owner.shown


def test_a_parameter_without_an_owner_is_refused_as_well() -> None:
    param = nn.Parameter(torch.ones(2))
    param.__class__ = ReleasedParameter
    with pytest.raises(ReleasedParameterError, match=r"parameter `\?`"):
        param + 1


def test_an_owner_that_is_gone_answers_no_more() -> None:
    owner = _Owner()
    param = _released(owner)
    assert owner_of(param) is owner
    del owner
    assert owner_of(param) is None
