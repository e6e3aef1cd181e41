from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import WarmupDecayLR, WarmupLR
from lightning_zero.compat.deepspeed_sections import optimizer_of, schedule_of


def nothing(name: str) -> Any:
    return None


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("kind", "given", "cls", "args"),
    [
        ("Adam", {}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ("adam", {"adam_w_mode": False, "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, {}),
        (
            "Adam",
            {"lr": 1e-3, "betas": [0.8, 0.9]},
            torch.optim.AdamW,
            {"lr": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.0},
        ),
        (
            "AdamW",
            {"betas": "auto", "eps": "auto", "weight_decay": "auto"},
            torch.optim.AdamW,
            {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
        ),
        ("Adagrad", {"lr": 0.1}, torch.optim.Adagrad, {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ("RMSprop", {"lr": 0.1, "alpha": 0.9}, torch.optim.RMSprop, {"lr": 0.1, "alpha": 0.9}),
    ],
)
def test_optimizers_of_a_configuration(kind: str, given: Any, cls: type, args: dict[str, Any]) -> None:
    made = optimizer_of(kind, given)
    assert (made.cls, dict(made.args)) == (cls, args)
    assert set(given) <= set(made.notes)
    optimizer = made.make(params(), nothing)
    assert type(optimizer) is cls
    assert args.items() <= optimizer.param_groups[0].items()
    assert made.class_path == f"torch.optim.{cls.__name__}"


@pytest.mark.parametrize("kind", ["Lamb", "Lion", "Muon", "OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
def test_optimizers_that_do_not_exist_are_errors_where_they_are_used(kind: str) -> None:
    made = optimizer_of(kind, {"lr": 0.1})
    assert made.notes["lr"][0] == "not yet"
    with pytest.raises(
        ValueError, match=rf"^`optimizer.type='{kind}'` does not exist here yet. Make it in `configure_"
    ):
        made.make(params(), nothing)


def test_adam_without_correction_is_an_error_where_it_is_used() -> None:
    with pytest.raises(
        ValueError, match=r"^`optimizer.params.bias_correction=False` does not exist in PyTorch's Adam."
    ):
        optimizer_of("Adam", {"bias_correction": False}).make(params(), nothing)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("AdamWW", {}, "`optimizer.type='AdamWW'` is not known. Did you mean `AdamW`"),
        (None, {}, "`optimizer.type=None` must be the name of a class, for example 'AdamW'"),
        ("Adam", {"lrr": 1}, "`optimizer.params.lrr` is no parameter of `AdamW`. Did you mean `lr`"),
        (
            "Adam",
            {"max_grad_norm": 1},
            "`optimizer.params.max_grad_norm` is no parameter of an optimizer. Use `gradient_",
        ),
        ("Optimizer", {}, "`optimizer.type='Optimizer'` is not known."),
    ],
)
def test_a_wrong_optimizer_is_an_error_that_names_it(kind: Any, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        optimizer_of(kind, given)


def test_auto_is_a_number_of_the_module() -> None:
    made = optimizer_of("AdamW", {"lr": "auto"})
    found = {"learning_rate": 0.25}
    assert made.make(params(), found.get).param_groups[0]["lr"] == 0.25
    with pytest.raises(
        ValueError, match=r"^`optimizer.params.lr='auto'`: the Trainer does not know it, and the module has"
    ):
        made.make(params(), nothing)


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("given", [0, 0.0, "auto"])
def test_a_warm_up_of_no_steps_has_the_curve_of_deepspeed(kind: str, given: Any) -> None:
    """It was refused, and is the default of the module's `warmup_steps` in Hugging Face's arguments."""
    rest = {} if kind == "WarmupLR" else {"total_num_steps": 10}
    made = schedule_of(kind, {"warmup_num_steps": given, **rest}, highest=None)
    schedule = made.make(torch.optim.AdamW(params(), lr=0.1), {"warmup_steps": 0}.get)
    assert schedule.warmup_num_steps == 2
    if given != "auto":
        assert made.notes["warmup_num_steps"] == ("translated", "`warmup_num_steps=2`, the fewest of DeepSpeed")
        assert made.args["warmup_num_steps"] == 2  # also in YAML


def test_schedules_of_a_configuration() -> None:
    optimizer = torch.optim.AdamW(params(), lr=0.1)
    made = schedule_of("WarmupDecayLR", {"total_num_steps": "auto", "warmup_num_steps": 1e1}, highest=None)
    assert dict(made.args) == {"total_num_steps": "auto", "warmup_num_steps": 10, "warmup_max_lr": 0.001}
    assert made.class_path == "lightning_zero.WarmupDecayLR"
    assert isinstance(made.make(optimizer, nothing), WarmupDecayLR)

    made = schedule_of(
        "WarmupLR",
        {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "cosine"},
        highest=None,
    )
    assert made.notes["warmup_type"] == (
        "translated",
        "`warmup_type='log'`, as in DeepSpeed, for a word that is not known",
    )
    schedule = made.make(optimizer, {"num_warmup_steps": 7}.get)
    assert isinstance(schedule, WarmupLR)
    assert (schedule.warmup_num_steps, schedule.warmup_type, schedule.min_lrs) == (7, "log", [0.0])

    made = schedule_of("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}, highest=None)
    with pytest.warns(UserWarning, match="its momentum stays"):
        made.make(torch.optim.SGD(params(), lr=0.1), nothing)
    made.make(optimizer, nothing)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    is_off = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_momentum": False}
    assert dict(schedule_of("OneCycle", is_off, highest=None).args) == is_off

    made = schedule_of("StepLR", {"step_size": 2}, highest=None)
    assert isinstance(made.make(optimizer, nothing), torch.optim.lr_scheduler.StepLR)
    assert made.class_path == "torch.optim.lr_scheduler.StepLR"
    with pytest.raises(ValueError, match=r"^`scheduler.type='WarmUpLR'` is not known. Did you mean `WarmupLR`"):
        schedule_of("WarmUpLR", {}, highest=None)
    with pytest.raises(
        ValueError, match=r"^`scheduler.params.max_lr` is no parameter of `WarmupLR`. Did you mean `warmup_m"
    ):
        schedule_of("WarmupLR", {"max_lr": 1}, highest=None)
