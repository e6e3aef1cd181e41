"""Which calls, functions and backwards of PyTorch are running."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.runtime import call_stack
from lightning_zero.engine.runtime.call_stack import ModuleCall


class _Asks(nn.Module):
    """Asks while its forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[ModuleCall | None] = []
        self.was_running: list[bool] = []
        self.register_forward_pre_hook(lambda *_: self.calls.append(ModuleCall.of_now()))

    def forward(self, x: Tensor) -> Tensor:
        call = self.calls[-1]
        assert call is not None
        self.was_running.append(call.is_running)
        return x


def test_a_call_of_a_module_runs_until_it_ends() -> None:
    module = _Asks()
    assert ModuleCall.of_now() is None
    module(torch.ones(1))
    call = module.calls[0]
    assert call is not None
    assert module.was_running == [True]
    assert not call.is_running
    found: list[bool] = []
    other = threading.Thread(target=lambda: found.append(call.is_running))
    other.start()
    other.join()
    assert found == [True]  # of other threads it is not known


def test_an_error_that_was_being_handled_before_is_none_of_a_call() -> None:
    assert not call_stack.is_raising(call_stack.handled_error())
    try:
        raise KeyError
    except KeyError:
        handled = call_stack.handled_error()
        assert not call_stack.is_raising(handled)
        assert call_stack.is_raising(None)


def test_a_hook_knows_that_it_is_called_by_compiled_code() -> None:
    found = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def hook(*_: Any) -> None:
        found.append(call_stack.in_compiled_code())

    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(hook)
    module(torch.ones(1, 2))
    torch.compile(module, backend="eager")(torch.ones(1, 2))
    module.compile(backend="eager")
    module(torch.ones(1, 2))
    assert found == [False, True, True]


class _Outer(torch.autograd.Function):
    """Notes the functions around, and runs a backward in its own."""

    seen: list[Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _Outer.seen = [call_stack.in_function()]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        leaf = torch.ones(1, requires_grad=True)
        with torch.enable_grad():
            product = 2 * leaf
            product.register_hook(lambda _: _Outer.seen.append(call_stack.enclosing_function() is ctx))
            product.sum().backward()
        return grad


def test_a_backward_inside_a_function_knows_the_function() -> None:
    leaf = torch.ones(1, requires_grad=True)
    found: list[Any] = []
    result = _Outer.apply(leaf)
    result.register_hook(lambda _: found.append((call_stack.in_backward(), call_stack.enclosing_function())))
    result.sum().backward()
    assert _Outer.seen == [True, True]
    assert found == [(True, None)]
    assert not call_stack.in_backward()
    assert not call_stack.in_function()


class _WithoutContext(torch.autograd.Function):
    seen: bool

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        _WithoutContext.seen = call_stack.in_function()
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


class _Module(torch.nn.Module):
    def forward(self, x: Tensor) -> bool:
        return call_stack.in_function()


def test_a_forward_without_a_context_is_one_of_a_function_and_that_of_a_module_is_not() -> None:
    _WithoutContext.apply(torch.ones(1))
    assert _WithoutContext.seen
    assert not _Module()(torch.ones(1))


def test_a_backward_of_some_tensors_does_not_run_the_whole_graph() -> None:
    leaf = torch.ones(1, requires_grad=True)
    found: list[bool] = []
    result = 2 * leaf
    result.register_hook(lambda _: found.append(call_stack.runs_whole_graph()))
    result.sum().backward(retain_graph=True)
    torch.autograd.grad(result.sum(), leaf)
    assert found == [True, False]
