"""Hooks are put in once, copied by nobody, and taken out."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from lightning_zero.config import MixedPrecision
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.runtime.hooks import _ModuleHook
from tests.references import TinyGPT, token_loss


def _engine(module: nn.Module, stage: int = 3, **options: Any) -> ZeroEngine:
    engine = ZeroEngine(stage, units=options.pop("units", ["Block"]), **options)
    engine.shard(module)
    return engine


def test_a_copy_of_a_hook_does_nothing() -> None:
    calls: list[int] = []
    hook = _ModuleHook(lambda: calls.append(1))
    hook()
    copy.deepcopy(hook)()
    pickle.loads(pickle.dumps(hook))()
    assert calls == [1]


def _hooks_of(module: nn.Module) -> int:
    count = sum(len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules())
    return count + sum(len(param._post_accumulate_grad_hooks or ()) for param in module.parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_closed_engine_takes_its_hooks_along(stage: int) -> None:
    module = TinyGPT()
    engine = _engine(module, stage)
    assert _hooks_of(module) > 0
    engine.close()
    assert _hooks_of(module) == 0
    engine.close()
    token_loss(module, 0, 0).backward()
    assert all(param.grad is not None for param in module.parameters())


def test_a_paused_engine_leaves_the_module_alone() -> None:
    module = TinyGPT()
    engine = _engine(module, 1)
    engine.internals.fits.pause()
    token_loss(module, 0, 0).backward()
    assert module.head.weight.grad is not None
    module.zero_grad()
    engine.internals.fits.resume()
    engine.internals.fits.resume()
    token_loss(module, 0, 0).backward()
    assert engine.grad_norm() > 0
    engine.close()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_resumed_engine_shows_gradients_of_a_part_that_another_engine_has_trained(stage: int) -> None:
    """They were None: the other engine, or none, was asked for them."""
    module = TinyGPT()
    engine = _engine(module, stage)
    engine.internals.fits.pause()
    part = _engine(module.blocks[0], stage, units=[nn.Linear])
    part.internals.fits.pause()
    engine.internals.fits.make_equal()
    engine.internals.fits.resume()
    token_loss(module, 0, 0).backward()
    norm = engine.grad_norm()
    assert all(param.grad is not None for param in module.parameters())
    assert torch.allclose(torch.nn.utils.get_total_norm([param.grad for param in module.parameters()]), norm)
    module.zero_grad()
    assert engine.grad_norm() == 0
    part.close()
    engine.close()


def test_an_embedding_that_computes_lower_gives_fp32() -> None:
    seen: list[torch.dtype] = []
    module = TinyGPT()
    engine = _engine(module, 2, precision=MixedPrecision(compute_dtype=torch.bfloat16))
    module.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        module.embedding.register_forward_hook(lambda embedding, *_: seen.append(embedding.weight.dtype))
        module(torch.zeros(1, 2, dtype=torch.long))
    assert seen == [torch.bfloat16, torch.float32]
    engine.close()
