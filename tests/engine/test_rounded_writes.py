"""A write in 16 bits, inside a step, into a parameter that has more is said once."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from lightning_zero.config import MixedPrecision
from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.references import TinyGPT, token_loss


def _writes(rank: int, world: int, stage: int, how: str, between: bool = False) -> list[str]:
    """Return the warnings of three steps, each with a write as ``how`` says."""
    online: Any = TinyGPT()
    target = copy.deepcopy(online).requires_grad_(False)
    module = torch.nn.ModuleList([online, target])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        engine = ZeroEngine(stage, precision=MixedPrecision(compute_dtype=torch.bfloat16))
        engine.shard(module)
        optimizer = engine.attach(torch.optim.AdamW(online.parameters(), lr=1e-2))
        for step in range(3):
            with engine.scope("step"), torch.autocast("cpu", torch.bfloat16):
                (token_loss(online, rank, step) * (float("nan") if how == "nan" else 1.0)).backward()
                if not between:
                    _write(online, target, how)
            optimizer.step()
            optimizer.zero_grad()
            if between:
                _write(online, target, how)
            engine.records()
            if how == "pause":
                engine.show_masters()
                engine.internals.fits.pause()
                engine.internals.fits.resume()
            if how == "gathered":
                with engine.gathered(module, write="all"):
                    _write(online, target, "average")
        engine.close()
    return [str(one.message) for one in found if issubclass(one.category, RuntimeWarning)]


def _write(online: Any, target: Any, how: str) -> None:
    with torch.no_grad():
        if how == "clamp":
            online.head.weight.clamp_(-0.01, 0.01)
        elif how == "data":
            online.head.weight.data.clamp_(-0.01, 0.01)
        elif how in ("average", "average-data"):
            for one, other in zip(target.parameters(), online.parameters(), strict=True):
                (one.data if how == "average-data" else one).lerp_(other.data, 0.5)


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        (0, "clamp"),
        (1, "clamp"),
        (3, "clamp"),
        (1, "average"),
        (2, "average-data"),
        (1, "data"),
        (0, "data"),
        (3, "data"),
    ],
)
def test_a_write_that_is_rounded_is_said_once(stage: int, how: str) -> None:
    told, *others = worlds.run(_writes, 2, stage, how)
    if how.endswith("data"):  # seen where values have changed
        told = told or others[0]
    else:
        assert others == [[]]
    assert len(told) == 1
    assert "computes in 16 bits" in told[0]
    assert "write='all'" in told[0]


@pytest.mark.parametrize(("stage", "how"), [(0, "clamp"), (1, "average"), (2, "average-data"), (1, "data")])
def test_a_write_between_steps_is_not_rounded(stage: int, how: str) -> None:
    assert worlds.run(_writes, 2, stage, how, True) == [[], []]


@pytest.mark.parametrize("how", ["train", "nan", "pause", "gathered"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_the_engine_writes_is_not_said(stage: int, how: str) -> None:
    assert worlds.run(_writes, 2, stage, how) == [[], []]
