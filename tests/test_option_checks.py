"""Options that are misspelt or of another type are refused by name, with what is allowed."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

from lightning_zero.config import ActivationCheckpointing, Communication, MixedPrecision, Offload, Pipeline
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.lightning.callbacks import ExportSafetensors, ZeroMonitor
from lightning_zero.lightning.precision import LossScale
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.option_checks import checked_arguments, checked_fields

Make = Callable[..., Any]
FIELDS = [
    (cls, field.name)
    for cls in (ActivationCheckpointing, Communication, LossScale, MixedPrecision, Offload, Pipeline)
    for field in dataclasses.fields(cls)
]
ARGUMENTS = [
    (cls, name)
    for cls in (ZeroStrategy, ZeroEngine, ZeroMonitor, ExportSafetensors)
    for name in inspect.signature(cls).parameters
]


# -- Every option ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "name"), FIELDS + ARGUMENTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_value_of_another_type_is_refused_by_name(make: Make, name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"{name}=<object.*(is an `object`|is not a ZeRO stage). .*\.$"):
        make(**{name: object()})


def _fields_of(*kinds: Any) -> list[Any]:
    return [(cls, name) for cls, name in FIELDS if get_type_hints(cls)[name] in kinds]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("make", "name"), [*_fields_of(float, float | None), (ZeroStrategy, "timeout")])
def test_numbers_are_finite(make: Make, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}.* is not a finite number"):
        make(**{name: value})


@pytest.mark.parametrize("value", [True, 1.0, "1", np.int64(1), np.bool_(True)], ids=repr)
@pytest.mark.parametrize(("make", "name"), _fields_of(int, int | None))
def test_whole_numbers_are_of_python(make: Make, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{name}=.*` is an? `(bool|float|str|numpy.*)`. Use a whole number"):
        make(**{name: value})


@pytest.mark.parametrize("value", [1, "no", np.bool_(True)], ids=repr)
@pytest.mark.parametrize(("make", "name"), [*_fields_of(bool), (ZeroStrategy, "async_save"), (ZeroStrategy, "masters")])
def test_answers_are_true_or_false(make: Make, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}=.* Use True or False"):
        make(**{name: value})


@pytest.mark.parametrize(("make", "name"), _fields_of(int, int | None, float | None))
def test_numbers_that_count_are_not_negative(make: Make, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=-1"):
        make(**{name: -1})


# -- What people write -------------------------------------------------------------------------------------------------

WRITTEN: list[tuple[Make, dict[str, Any], str]] = [
    (ZeroStrategy, {"communication": "bf16"}, "is a `str`. Use .*`Communication.reduce_dtype='bf16'.`"),
    (ZeroStrategy, {"timeout": "30m"}, "`timeout='30m'` is a `str`. Use seconds, for example `timeout=1800`"),
    (ZeroStrategy, {"timeout": -5}, "`timeout=-5` must be a positive number of seconds"),
    (ZeroStrategy, {"timeout": timedelta(0)}, "`timeout=0.0` must be a positive number of seconds"),
    (ZeroStrategy, {"async_save": "no"}, "`async_save='no'` is a `str`. Use True or False"),
    (ZeroStrategy, {"stage": 3.0}, "`stage=3.0` is not a ZeRO stage. Use 0, 1, 2 or 3"),
    (ZeroStrategy, {"stage": np.int64(3)}, "is not a ZeRO stage. Use 0, 1, 2 or 3"),
    (ZeroStrategy, {"units": [nn.Linear(2, 2)]}, "is a list with a `Linear` in it. Use classes or names"),
    (ZeroEngine, {"units": [nn.Linear(2, 2)]}, "is a list with a `Linear` in it. Use classes or names"),
    (ZeroStrategy, {"units": nn.Linear(2, 2)}, "is a `Linear`. Use classes or names of classes, for example `units="),
    (ZeroStrategy, {"units": int}, "is a class. Use classes or names"),
    (ZeroStrategy, {"units": 3.5}, "`units=3.5` is a `float`. Use classes"),
    (ZeroStrategy, {"activation_checkpointing": "selective"}, "`ActivationCheckpointing.policy='selective'.`"),
    (ZeroStrategy, {"activation_checkpointing": "full"}, "The policy is one of the fields"),
    (ZeroStrategy, {"offload": True}, "`offload=True` is a `bool`. Use 'cpu', `Offload"),
    (ZeroStrategy, {"offload": "disk"}, "`offload='disk'` is not known. Use 'cpu', `Offload"),
    (ZeroEngine, {"offload": "disk"}, "`offload='disk'` is not known. Use 'cpu', `Offload"),
    (ZeroStrategy, {"moments": 8}, "`moments=8` is an `int`. Use 'fp32', 'bf16' or 'int8'"),
    (ZeroStrategy, {"step": "later"}, "`step='later'` is not known. Use 'auto', 'now', 'deferred' or 'backward'"),
    (ZeroEngine, {"step": True}, "`step=True` is a `bool`. Use 'auto', 'now', 'deferred' or 'backward'"),
    (ZeroStrategy, {"masters": "yes"}, "`masters='yes'` is a `str`. Use True or False"),
    (ZeroStrategy, {"loss_scale": 1024}, "`loss_scale=1024` is an `int`. .*`LossScale.static=1024.`"),
    (ZeroStrategy, {"pipeline": "4"}, "`pipeline='4'` is a `str`. Use a number of stages, for example `pipeline=4`"),
    (ZeroStrategy, {"pipeline": True}, "`pipeline=True` is a `bool`. Use a number of stages"),
    (ZeroStrategy, {"pipeline": 0}, "`Pipeline.stages=0.` must be a whole number, 1 or more"),
    (ZeroStrategy, {"accelerator": "cpu"}, "Leave it out, and use `Trainer.accelerator="),
    (ZeroEngine, {"precision": "bf16-mixed"}, "`precision='bf16-mixed'` is a `str`. Use `MixedPrecision"),
    (ZeroEngine, {"precision": torch.bfloat16}, "is a `torch.dtype`. Use `MixedPrecision"),
    (ZeroEngine, {"communication": {"prefetch": 2}}, "is a `dict`. Use `Communication"),
    (ZeroStrategy, {"communication": {"prefetch": "two"}}, "`Communication.prefetch='two'.` is a `str`"),
    (Offload, {"path": 3}, "is an `int`. Use a string, a `pathlib.Path`, a list"),
    (Pipeline, {"partition": [1.5]}, "is a list with a `float` in it. Use 'parameters', 'uniform'"),
    (Pipeline, {"partition": "flop"}, "`Pipeline.partition='flop'.` is not known. Did you mean `flops`"),
    (Pipeline, {"first": "embed"}, r"is a `str`. Use a list \(each element a string\) or None"),
    (Pipeline, {"schedule": "zb"}, "is not known.* Use 'gpipe', '1f1b', 'interleaved_1f1b' or 'zb_h1'"),
    (MixedPrecision, {"compute_dtype": "bf16"}, "is a `str`. Use torch.bfloat16, torch.float16 or None"),
]


@pytest.mark.parametrize(("make", "options", "message"), WRITTEN, ids=lambda value: str(value)[:40])
def test_what_people_write_is_refused_with_what_is_allowed(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(**options)


def test_a_module_of_many_lines_is_not_printed() -> None:
    with pytest.raises(TypeError, match=r"^`units=list\(...\)` is a list with a `Sequential` in it"):
        ZeroStrategy(units=[nn.Sequential(*[nn.Linear(2, 2)] * 20)])  # type: ignore[list-item]


MISSPELT: list[tuple[Make, dict[str, Any], str]] = [
    (ZeroStrategy, {"stge": 3}, "`ZeroStrategy` has no option `stge`. Did you mean `stage`"),
    (ZeroStrategy, {"ofload": "cpu"}, "`ZeroStrategy` has no option `ofload`. Did you mean `offload`?"),
    (ZeroEngine, {"unit": ["Block"]}, "`ZeroEngine` has no option `unit`. Did you mean `units`?"),
    (ZeroStrategy, {"xyz": 1}, "`ZeroStrategy` has no option `xyz`. The options are stage, units, "),
    (Communication, {"prefetch_count": 2}, "`Communication` has no option `prefetch_count`. Did you mean `prefetch`?"),
    (ZeroStrategy, {"communication": {"prefetch_count": 2}}, "Did you mean `prefetch`?"),
    (ZeroStrategy, {"offload": {"optimiser": "cpu"}}, "`Offload` has no option `optimiser`. Did you mean `optimizer`?"),
    (ZeroStrategy, {"pipeline": {"micro_batches": 4}}, "Did you mean `microbatches`?"),
    (ZeroStrategy, {"loss_scale": {"initial_scale": 4.0}}, "Did you mean `init_scale`"),
    (ZeroStrategy, {"activation_checkpointing": {"polcy": "full"}}, "Did you mean `policy`?"),
]


@pytest.mark.parametrize(("make", "options", "message"), MISSPELT, ids=lambda value: str(value)[:40])
def test_a_misspelt_option_gets_the_nearest_name(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make(**options)


# -- What is taken -----------------------------------------------------------------------------------------------------


def test_what_was_right_is_taken(tmp_path: Path) -> None:
    assert ZeroStrategy(units=("Block", nn.Linear)).units == ("Block", nn.Linear)
    assert (ZeroStrategy(units="Block").units, ZeroEngine(units=nn.Linear).stage) == ("Block", 3)
    assert ZeroStrategy(activation_checkpointing=nn.Linear).activation_checkpointing == ActivationCheckpointing(
        modules=[nn.Linear]
    )
    assert Communication(timeout_s=60).timeout_s == 60
    assert Offload(optimizer="nvme", path=tmp_path).paths == [tmp_path]
    assert Offload(optimizer="nvme", path=[str(tmp_path), tmp_path]).paths == [tmp_path] * 2
    assert Offload(optimizer="nvme", path="~/states").paths == [Path.home() / "states"]
    assert Offload.of("cpu") == Offload.of({"optimizer": "cpu"}) == Offload()
    assert Pipeline(partition=[1]).partition == [1]
    assert ZeroEngine(device="cpu").stage == 3


# -- The mechanism -----------------------------------------------------------------------------------------------------


@checked_fields()
@dataclass(frozen=True)
class Sample:
    count: int
    words: Sequence[Literal["a", "b"]] = ()
    kind: type[nn.Module] = nn.Module


class Adder:
    @checked_arguments(unchecked=["first"], foreign={"plus": "Use `second`."})
    def __init__(self, first: int, second: int = 2, *rest: int) -> None:
        """Add."""
        self.sum = first + second


def test_signatures_stay_visible() -> None:
    assert str(inspect.signature(Adder)) == "(first: 'int', second: 'int' = 2, *rest: 'int') -> 'None'"
    assert list(inspect.signature(Sample).parameters) == ["count", "words", "kind"]
    assert Adder.__init__.__doc__ == "Add."


def test_positional_arguments_are_checked_too() -> None:
    assert Adder(1, 3).sum == 4
    with pytest.raises(TypeError, match="`second='3'` is a `str`. Use a whole number"):
        Adder(1, "3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'first'"):
        Adder()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="`Adder` has no option `plus`. Use `second`"):
        Adder(1, plus=3)  # type: ignore[call-arg]


def test_elements_of_lists_are_checked() -> None:
    assert Sample(1, ["a", "b"], nn.Linear).words == ["a", "b"]
    with pytest.raises(TypeError, match=r"words=.*` is a list with a `str` in it. Use a list .each element 'a'"):
        Sample(1, ["c"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="is a class. Use a subclass of `Module`"):
        Sample(1, kind=int)  # type: ignore[arg-type]


def test_a_subclass_has_options_of_its_own() -> None:
    class Mine(ZeroStrategy):
        def __init__(self, mine: int, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.mine = mine

    assert (Mine(4, stage=2).mine, Mine(4, stage=2).stage) == (4, 2)
    with pytest.raises(TypeError, match="has no option `stge`"):
        Mine(4, stge=2)
