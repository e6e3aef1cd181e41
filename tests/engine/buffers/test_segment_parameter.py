"""Code that looks at parameters in the step window has what it would have of whole ones, or is told."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.errors import ShardedGradientError
from tests import worlds
from tests.references import TinyGPT, adamw, token_loss, tokens

WINDOWS = pytest.mark.parametrize("stage", [1, 2, 3])


def _in_the_window(rank: int, stage: int) -> tuple[ZeroEngine, nn.Module, nn.Module]:
    """Return an engine whose window is open, its module and the same module without it."""
    worlds.seed()
    plain = TinyGPT()
    module = copy.deepcopy(plain)
    engine = ZeroEngine(stage=stage)
    engine.shard(module)
    optimizer = adamw(module)
    engine.attach(optimizer)
    token_loss(module, rank, 0).backward()
    for param in module.parameters():
        assert param.grad is not None
    return engine, module, plain


NORMS: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "data.norm": lambda p: p.data.norm(),
    "detach.norm": lambda p: p.detach().norm(),
    "linalg": lambda p: torch.linalg.vector_norm(p.data, 1),
    "infinity": lambda p: p.data.norm(float("inf")),
    "scaled": lambda p: (p.data * 2).norm(),
    "difference": lambda p: (p.detach() - p.detach() * 0.5).norm(),
    "foreach": lambda p: torch._foreach_norm([p.data])[0],
    "total": lambda p: torch.nn.utils.get_total_norm([p.data]),
}


def _norms(rank: int, world: int, stage: int) -> list[str]:
    engine, module, plain = _in_the_window(rank, stage)
    found = []
    for name, norm in NORMS.items():
        for own, whole in zip(module.parameters(), plain.parameters(), strict=True):
            with torch.no_grad():
                if not torch.allclose(norm(own).as_subclass(torch.Tensor), norm(whole), rtol=1e-6):
                    found.append(name)
    engine.close()
    return found


@WINDOWS
def test_norms_of_values_in_the_window_are_those_of_the_whole_parameter(stage: int) -> None:
    assert worlds.run(_norms, 2, stage) == [[], []]


REFUSED: dict[str, Callable[[nn.Parameter], Any]] = {
    "data.sum": lambda p: p.data.sum(),
    "data.max": lambda p: p.data.max(),
    "abs.max": lambda p: p.abs().max(),
    "square.mean": lambda p: (p**2).mean(),
    "max": lambda p: p.max(),
    "flatten": lambda p: p.flatten(),
    "cat": lambda p: torch.cat([p, p]),
    "topk": lambda p: p.detach().topk(1),
    "amax": lambda p: torch.amax(p),
    "numpy": lambda p: p.detach().cpu().numpy(),
    "row": lambda p: p.data[0],
    "total norm": lambda p: torch.nn.utils.get_total_norm([p]),
    "norm with a gradient": lambda p: (p * 2).norm(),
    "deepcopy": copy.deepcopy,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "save of detached": lambda p: torch.save(p.detach(), io.BytesIO()),
    "transposed": lambda p: p.T,
    "transposed data": lambda p: p.data.T,
    "transposed, detached": lambda p: p.detach().mT,
}


def _refusals(rank: int, world: int, stage: int) -> list[str]:
    engine, module, _ = _in_the_window(rank, stage)
    param = next(iter(module.parameters()))
    found = []
    for name, use in REFUSED.items():
        try:
            use(param)
        except ShardedGradientError as error:
            if "full_param" not in str(error):
                found.append(f"{name}: {error}")
        else:
            found.append(name)
    engine.close()
    return found


@WINDOWS
def test_what_needs_a_whole_parameter_in_the_window_names_full_param(stage: int) -> None:
    assert worlds.run(_refusals, 2, stage) == [[], []]


def _copies(rank: int, world: int, stage: int) -> str:
    engine, module, _ = _in_the_window(rank, stage)
    with pytest.raises(ShardedGradientError) as caught:
        copy.deepcopy(module)
    engine.close()
    return str(caught.value)


def test_a_copy_of_the_module_in_the_window_is_no_copy_of_segments() -> None:
    assert "full_param" in worlds.run(_copies, 2, 2)[0]


def _writes(rank: int, world: int, stage: int) -> list[str]:
    engine, module, plain = _in_the_window(rank, stage)
    ours, theirs = dict(module.named_parameters()), dict(plain.named_parameters())
    name, other, third = [one for one, param in theirs.items() if param.dim() == 2][:3]
    mask = torch.rand(theirs[other].shape, generator=torch.Generator().manual_seed(7)) < 0.5
    with torch.no_grad():
        for params in (ours, theirs):
            params[name].data[0] = 0.0  # the row of a padding token
            params[other].data.mul_(mask)
            params[other].data.add_(mask.float())
            torch.manual_seed(3)
            nn.init.normal_(params[third], std=0.02)
            params[third].data.add_(torch.randn_like(params[third]))
    module.zero_grad()
    found = [key for key in theirs if not torch.equal(engine.full_param(ours[key]), theirs[key])]
    engine.close()
    return found


@WINDOWS
def test_rows_masks_and_noise_written_into_values_in_the_window_are_those_of_the_whole(stage: int) -> None:
    assert worlds.run(_writes, 2, stage) == [[], []]


def _counted(rank: int, world: int, stage: int) -> list[str]:
    engine, module, plain = _in_the_window(rank, stage)
    found = []
    for own, whole in zip(module.parameters(), plain.parameters(), strict=True):
        expected = [ask(whole) for ask in SHAPES]
        for name, one in (("param", own), ("data", own.data), ("detach", own.detach()), ("grad", own.grad)):
            found += [f"{name}: {ask(one)}" for ask, answer in zip(SHAPES, expected, strict=True) if ask(one) != answer]
    engine.close()
    return found


SHAPES: list[Callable[[torch.Tensor], Any]] = [
    lambda p: p.shape,
    lambda p: p.ndim,
    lambda p: p.dim(),
    lambda p: p.ndimension(),
    lambda p: p.size(),
    lambda p: (p.size(0), p.size(dim=-1)),
    lambda p: p.stride(),
    lambda p: p.nbytes,
    lambda p: (p.numel(), torch.numel(p), p.nelement(), len(p)),
    lambda p: p.is_same_size(torch.empty(96, 32)),
    lambda p: torch.is_same_size(p, p.clone()),
]


@WINDOWS
def test_shapes_in_the_window_are_those_of_the_whole(stage: int) -> None:
    assert worlds.run(_counted, 2, stage) == [[], []]


def _masked_itself(rank: int, world: int, stage: int) -> list[bool]:
    engine, module, plain = _in_the_window(rank, stage)
    with torch.no_grad():
        for own, whole in zip(module.parameters(), plain.parameters(), strict=True):
            mask = (torch.arange(whole.numel()).view(whole.shape) % 2).float()
            own.mul_(mask)
            torch._foreach_add_([own], [mask])
            whole.mul_(mask).add_(mask)
    module(tokens(rank, 0))
    same = [torch.equal(engine.full_param(own), whole)
            for own, whole in zip(module.parameters(), plain.parameters(), strict=True)]  # fmt: skip
    engine.close()
    return same


@WINDOWS
def test_masks_of_the_whole_are_cut_beside_parameters(stage: int) -> None:
    assert all(all(same) for same in worlds.run(_masked_itself, 2, stage))


def _matrix_norms(rank: int, world: int, stage: int) -> list[str]:
    engine, module, _ = _in_the_window(rank, stage)
    weight = module.blocks[0].up.weight
    found = []
    for order in (1, 2, float("inf"), "nuc"):
        for values in (weight.grad, weight.data):
            with pytest.raises(ShardedGradientError) as error:
                torch.linalg.norm(values, order)
            found.append(str(error.value))
    with pytest.raises(ShardedGradientError):
        weight.grad.norm(p="nuc")
    engine.close()
    return found


@WINDOWS
def test_norms_of_matrices_are_refused_by_name(stage: int) -> None:
    for found in worlds.run(_matrix_norms, 2, stage):
        assert all("is the norm of a matrix" in one for one in found)
