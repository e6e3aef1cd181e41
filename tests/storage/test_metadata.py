"""What tensors answer whose values are not there, whatever the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.engine.buffers.disk_parameter import DiskParameter
from lightning_zero.engine.buffers.parameter import (
    PendingParameter,
    ReleasedParameter,
    own,
    set_raw_grad,
)
from lightning_zero.storage.disk_tensor import DiskTensor, register
from lightning_zero.storage.metadata import QUESTION_FUNCTIONS, QUESTIONS

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "is_same_size": (torch.ones(4, 3),),
    "register_hook": (lambda grad: None,),
    "register_post_accumulate_grad_hook": (lambda param: None,),
    "result_type": (2.5,),
}
ORDINARY = nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))


class _Silent:
    """Has a tensor and gives no values away."""

    name = "blocks.0.weight"

    def param_name(self, param: nn.Parameter) -> str:
        return self.name

    def touch(self, param: nn.Parameter) -> bool:
        raise AssertionError("asked for values")

    def own_dtype(self, param: nn.Parameter) -> torch.dtype:
        return ORDINARY.dtype

    def show_original(self, param: nn.Parameter) -> None:
        raise AssertionError("asked for values")

    def show_gradient(self, param: nn.Parameter) -> None:
        set_raw_grad(param, None)

    def write_gradient(self, param: nn.Parameter, grad: torch.Tensor | None) -> None:
        raise AssertionError("wrote a gradient")

    def in_memory(self, others: Sequence[Any], written: Sequence[Any]) -> AbstractContextManager[None]:
        raise AssertionError("asked for values")


def _parameter(cls: type[nn.Parameter], owner: _Silent) -> torch.Tensor:
    param = nn.Parameter(ORDINARY.detach().clone())
    own(param, owner)
    if cls is DiskParameter:
        register(param.detach(), owner)
    param.__class__ = cls
    return param


def _sleeping(owner: _Silent) -> torch.Tensor:
    return register(ORDINARY.detach().clone(), owner).requires_grad_(True)


TENSORS: dict[str, Callable[[_Silent], torch.Tensor]] = {
    DiskTensor.__name__: _sleeping,
    **{
        cls.__name__: lambda owner, cls=cls: _parameter(cls, owner)
        for cls in (ReleasedParameter, PendingParameter, DiskParameter)
    },
}


def _spellings(name: str) -> list[Callable[..., Any]]:
    spaces = (vars(torch), {name: getattr(torch.Tensor, name, None)})
    return [space[name] for space in spaces if space.get(name) is not None]


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("name", sorted(QUESTIONS))
def test_questions_are_answered_without_values(name: str, tensor: str) -> None:
    if not _spellings(name):
        pytest.skip("this PyTorch has no such function")
    for ask in _spellings(name):
        owner = _Silent()
        asked = TENSORS[tensor](owner)
        found, expected = (ask(one, *ARGUMENTS.get(name, ())) for one in (asked, ORDINARY))
        if name.startswith(("register", "require", "__hash__")):
            assert type(found) is type(expected) or found is asked
        else:
            assert found == expected


@pytest.mark.parametrize("tensor", ["DiskTensor", "DiskParameter"])
def test_states_in_the_shape_of_offloaded_values_are_made_without_values(tensor: str) -> None:
    owner = _Silent()
    asked = TENSORS[tensor](owner)
    for state in (torch.zeros_like(asked), torch.full_like(asked, 0.0), asked.new_zeros(4, 3)):
        assert type(state) is torch.Tensor
        assert torch.equal(state, torch.zeros(4, 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("tensor", TENSORS)
def test_values_are_asked_for_everywhere_else(tensor: str) -> None:
    owner = _Silent()
    asked = TENSORS[tensor](owner)
    for use in (torch.sum, torch.Tensor.clone, torch.Tensor.tolist):
        with pytest.raises(AssertionError, match="asked for values"):
            use(asked)


def test_functions_are_the_questions_in_all_their_spellings() -> None:
    assert {ask for name in QUESTIONS for ask in _spellings(name)} == QUESTION_FUNCTIONS
