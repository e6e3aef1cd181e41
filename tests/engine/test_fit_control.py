"""An engine between runs: conversions of the module, and other engines that have its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.config import MixedPrecision
from lightning_zero.engine.engine import ZeroEngine
from tests import worlds
from tests.references import Block, TinyGPT, token_loss

_BF16 = MixedPrecision(compute_dtype=torch.bfloat16)
shared = pytest.mark.parametrize("stage", [0, 1, 2])


def _trained(module: nn.Module, stage: int, rank: int, **options: Any) -> ZeroEngine:
    """Return an engine that has made a step, as a run leaves it."""
    engine = ZeroEngine(stage, units=[Block], **options)
    engine.shard(module)
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=1e-3))
    token_loss(module, rank, 0).backward()
    optimizer.step()
    return engine


def _masters(engine: ZeroEngine, module: nn.Module) -> list[torch.Tensor]:
    return [engine.full_param(param) for param in module.parameters()]


def _end_by_an_error(engine: ZeroEngine) -> None:
    """End a run on one rank's account: no collective, so masters of others cannot be shown."""
    engine.internals.fits.detach()
    engine.internals.fits.pause()


# -- Conversions -------------------------------------------------------------------------------------------------------

CONVERSIONS = {"float": (nn.Module.float, torch.float32), "double": (nn.Module.double, torch.float64)}


def _digits(number: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values that no 16 bits hold."""
    return torch.linspace(1 / 3, 1 / 7, number, dtype=dtype)


def _converted_behind_an_error(rank: int, world: int, stage: int, name: str, touch: str) -> None:
    convert, dtype = CONVERSIONS[name]
    module = TinyGPT()
    engine = _trained(module, stage, rank, precision=_BF16)
    masters = _masters(engine, module)
    _end_by_an_error(engine)
    assert module.head.weight.dtype == (torch.float32 if stage == 0 else torch.bfloat16)
    convert(module)
    if touch == "loaded":
        module.head.weight.data.view(-1).copy_(_digits(module.head.weight.numel(), dtype))
        masters[-1] = module.head.weight.detach().clone()
    elif touch == "gathered":
        with engine.gathered(module):
            for param, master in zip(module.parameters(), masters, strict=True):
                assert param.dtype == dtype
                assert torch.equal(param, master.to(dtype))
    elif touch == "shown":
        engine.show_masters()
    engine.internals.fits.make_equal()
    engine.unshard()
    for param, master in zip(module.parameters(), masters, strict=True):
        assert param.dtype == dtype
        assert torch.equal(param, master.to(dtype))


@pytest.mark.parametrize("touch", ["nothing", "loaded", "gathered", "shown"])
@pytest.mark.parametrize("name", CONVERSIONS)
@shared
def test_a_module_that_shows_rounded_values_is_converted_with_those_of_the_masters(
    stage: int, name: str, touch: str
) -> None:
    """The masters got the rounded values: a run that had ended by an error lost 16 bits of every parameter."""
    worlds.run(_converted_behind_an_error, 2, stage, name, touch)


def _complex(rank: int, world: int, stage: int) -> None:
    module = nn.ParameterList([nn.Parameter(torch.arange(6.0).to(torch.complex64) * (1 + 2j))])
    engine = ZeroEngine(stage)
    engine.shard(module)
    engine.show_masters()
    engine.internals.fits.pause()
    module.to(torch.complex128)
    with engine.gathered(module):
        assert module[0].dtype == torch.complex128
    engine.unshard()
    assert torch.equal(module[0], torch.arange(6.0).to(torch.complex128) * (1 + 2j))


@shared
def test_complex_parameters_are_converted_between_two_runs(stage: int) -> None:
    worlds.run(_complex, 2, stage)


def _read(engine: ZeroEngine, module: nn.Module) -> None:
    _masters(engine, module)


def _gather(engine: ZeroEngine, module: nn.Module) -> None:
    with engine.gathered(module):
        assert {param.dtype for param in module.parameters()} == {torch.float64}


def _write(engine: ZeroEngine, module: nn.Module) -> None:
    with engine.gathered(module, write="all"), torch.no_grad():
        for param in module.parameters():
            param.mul_(1.5)


def _write_digits(engine: ZeroEngine, module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.add_(1e-12)
    _gather(engine, module)


TOUCHES: dict[str, Callable[[ZeroEngine, nn.Module], None]] = {
    "read": _read, "gathered": _gather, "written": _write, "digits": _write_digits
}  # fmt: skip


def _touched(rank: int, world: int, stage: int, name: str, precision: MixedPrecision | None) -> None:
    module = TinyGPT()
    engine = _trained(module, stage, rank, **({} if precision is None else {"precision": precision}))
    engine.internals.fits.detach()
    engine.show_masters()
    engine.internals.fits.pause()
    plain = copy.deepcopy(module).double()
    module.double()
    for _ in range(2):
        TOUCHES[name](engine, module)
        with torch.no_grad():
            for param in plain.parameters():
                param.copy_({"written": param * 1.5, "digits": param + 1e-12}.get(name, param))
        assert engine.internals.fits.any_is_converted()
        for param, expected in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(param, expected)
    engine.unshard()
    for param, expected in zip(module.parameters(), plain.parameters(), strict=True):
        assert param.dtype == torch.float64
        assert torch.equal(param, expected)


@pytest.mark.parametrize("precision", [None, _BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", TOUCHES)
@shared
def test_a_conversion_between_two_runs_lasts_whatever_reads_the_engine(
    stage: int, name: str, precision: MixedPrecision | None
) -> None:
    """A save, `gathered` or `full_param` copied the values back into the former dtype."""
    worlds.run(_touched, 2, stage, name, precision)


# -- Several engines ---------------------------------------------------------------------------------------------------


def _of_another(rank: int, world: int, stages: tuple[int, int], is_part_first: bool) -> None:
    module = TinyGPT()
    first, second = (module.blocks[0], module) if is_part_first else (module, module.blocks[0])
    kept = ZeroEngine(stages[0])
    kept.shard(first)
    kept.show_masters()
    kept.internals.fits.pause()
    other = ZeroEngine(stages[1], precision=_BF16)
    other.shard(second)
    other.internals.fits.pause()  # as behind an error
    values = _masters(other, second)
    if stages[1] < 3:  # as a move to another device does
        second._apply(torch.clone)
    fresh = ZeroEngine(stages[0])
    for use in (kept.unshard, kept.internals.fits.refuse_held, lambda: fresh.shard(nn.Sequential(first))):
        with pytest.raises(RuntimeError, match="has values that the engine of another run|is sharded by another"):
            use()
    other.unshard()
    kept.internals.fits.refuse_held()
    kept.internals.fits.make_equal()
    kept.internals.fits.resume()
    kept.unshard()
    for param, value in zip(second.parameters(), values, strict=True):
        assert torch.equal(param, value)


@pytest.mark.parametrize("is_part_first", [True, False], ids=["part-first", "part-last"])
@pytest.mark.parametrize("stages", [(2, 3), (0, 3), (1, 1), (0, 2)], ids=str)
def test_an_engine_does_not_take_placeholders_or_rounded_values_of_another_one(
    stages: tuple[int, int], is_part_first: bool
) -> None:
    """They went into its masters: NaN from stage 3, and 16 bits less from a run that an error had ended."""
    worlds.run(_of_another, 2, stages, is_part_first)
