"""Curves against formulas written anew here, and against numbers worked out by hand."""

from __future__ import annotations

import copy
import math
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, CosineAnnealingLR, SequentialLR

from lightning_zero import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from lightning_zero.schedules import Schedule

Make = Callable[[Optimizer], Schedule]


def optimizer(*rates: float | torch.Tensor, make: Any = AdamW, **options: Any) -> Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates or (0.1,)]
    return make(groups, **options)


def rates_of(schedule: Schedule) -> list[float]:
    return [float(group["lr"]) for group in schedule.optimizer.param_groups]


def curve(schedule: Schedule, steps: int, read: Callable[[Schedule], Any] = lambda one: rates_of(one)[0]) -> list[Any]:
    """Return a value per step of the optimizer, as it is during that step."""
    values = []
    for _ in range(steps):
        values.append(read(schedule))
        schedule.optimizer.step()
        schedule.step()
    return values


# -- Numbers -----------------------------------------------------------------------------------------------------------

NUMBERS: dict[str, tuple[Make, list[float]]] = {
    # DeepSpeed's tutorial: from 0.0001, a rate of 5 every 200 steps, here every 2.
    "range": (
        lambda o: LRRangeTest(o, 0.0001, lr_range_test_step_size=2, lr_range_test_step_rate=5),
        [0.0001, 0.00035, 0.0006, 0.00085, 0.0011],
    ),
    "range-stairs": (
        lambda o: LRRangeTest(o, 0.0001, 2, 5.0, lr_range_test_staircase=True),
        [0.0001, 0.0001, 0.0006, 0.0006, 0.0011],
    ),
    "cycle": (
        lambda o: OneCycle(o, 0.1, 0.5, cycle_first_step_size=4, decay_lr_rate=1.0, decay_step_size=2),
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1 / 1.5, 0.05, 0.04],
    ),
    "cycle-no-decay": (
        lambda o: OneCycle(o, 0.1, 0.5, cycle_first_step_size=2, cycle_second_step_size=1, decay_lr_rate=1.0),
        [0.1, 0.3, 0.5, 0.1, 0.1, 0.1],
    ),
    "cycle-stairs": (
        lambda o: OneCycle(o, 0.1, 0.5, cycle_first_step_size=4, cycle_first_stair_count=2),
        [0.1, 0.1, 0.3, 0.3, 0.5, 0.3, 0.3, 0.1, 0.1],
    ),
    "cycle-stairs-back": (
        lambda o: OneCycle(o, 0.1, 0.5, cycle_first_step_size=2, cycle_second_step_size=4, cycle_second_stair_count=2),
        [0.1, 0.3, 0.5, 0.3, 0.3, 0.1, 0.1],
    ),
    "cycle-without-a-way-back": (
        lambda o: OneCycle(o, 0.1, 0.5, cycle_first_step_size=2, cycle_second_step_size=0),
        [0.1, 0.3, 0.5, 0.1],
    ),
    "warmup": (
        lambda o: WarmupLR(o, 0.1, 0.2, warmup_num_steps=4),
        [0.1, 0.1, 0.15, 0.1 + 0.1 * 0.792481250360578, 0.2, 0.2],
    ),
    "warmup-linear": (
        lambda o: WarmupLR(o, 0.1, 0.2, 4, "linear"),
        [0.1, 0.1, 0.125, 0.15, 0.175, 0.2, 0.2],
    ),
    "warmup-own-rate": (lambda o: WarmupLR(o, warmup_num_steps=1), [0.0, 0.0, 0.1, 0.1]),
    "decay": (
        lambda o: WarmupDecayLR(o, 8, 0.1, 0.5, 4, "linear"),
        [0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1],
    ),
    "cosine": (
        lambda o: WarmupCosineLR(o, 8, 0.5, 4, 0.1, "linear"),
        [
            0.0,
            0.05,
            0.0625,
            0.075,
            0.0875,
            0.1 * (0.1 + 0.9 * (2 + 2**0.5) / 4),
            0.1 * 0.55,
            0.1 * (0.1 + 0.9 * (2 - 2**0.5) / 4),
            0.01,
            0.01,
        ],
    ),
    "cosine-all-warmup": (lambda o: WarmupCosineLR(o, 2, 0.0, 2, 0.1, "linear"), [0.0, 0.0, 0.05, 0.01, 0.01]),
}


@pytest.mark.parametrize("name", list(NUMBERS))
def test_a_curve_has_these_numbers(name: str) -> None:
    make, expected = NUMBERS[name]
    assert curve(make(optimizer()), len(expected)) == pytest.approx(expected, rel=1e-12)


# -- Formulas ----------------------------------------------------------------------------------------------------------


def warmed_up(batch: int, steps: int, kind: str) -> float:
    if batch < 0:
        return 0.0
    return min(1.0, math.log(batch + 1, steps) if kind == "log" else batch / steps)


def decay(batch: int, steps: int, total: int, kind: str) -> float:
    return warmed_up(batch, steps, kind) if batch < steps else max(0.0, (total - batch) / (total - steps))


def cosine(batch: int, steps: int, total: int, kind: str) -> float:
    if batch < 0:
        return 0.0
    if batch < steps:
        return 0.2 + 0.8 * warmed_up(batch, steps, kind)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, (batch - steps + 1) / (total - steps))))


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize(("steps", "total"), [(10, 20), (15, 100), (33, 34), (2, 50)])
def test_warmups_follow_their_formulas(steps: int, total: int, kind: Any) -> None:
    warmup = WarmupLR(optimizer(), 0.1, 0.7, steps, kind)
    down = WarmupDecayLR(optimizer(), total, 0.1, 0.7, steps, kind)
    wave = WarmupCosineLR(optimizer(), total, 0.2, steps, 0.1, kind)
    batches = range(-1, total + 5)
    assert curve(warmup, len(batches)) == pytest.approx([0.1 + 0.6 * warmed_up(b, steps, kind) for b in batches])
    assert curve(down, len(batches)) == pytest.approx([0.1 + 0.6 * decay(b, steps, total, kind) for b in batches])
    assert curve(wave, len(batches)) == pytest.approx([0.1 * cosine(b, steps, total, kind) for b in batches])


@pytest.mark.parametrize("stairs", [0, 3])
@pytest.mark.parametrize(("up", "down"), [(10, 10), (10, 21), (7, 1)])
def test_a_cycle_follows_its_formula(up: int, down: int, stairs: int) -> None:
    def expected(step: int) -> float:
        if step > up + down:
            return 0.01 / (1 + 0.3 * (step - up - down) / 4)
        height = step / up if step <= up else (up + down - step) / down
        return 0.01 + 0.09 * (math.floor(height * stairs + 1e-9) / stairs if stairs else height)

    schedule = OneCycle(
        optimizer(),
        0.01,
        0.1,
        cycle_first_step_size=up,
        cycle_second_step_size=down,
        cycle_first_stair_count=stairs,
        decay_lr_rate=0.3,
        decay_step_size=4,
    )
    assert curve(schedule, up + down + 9) == pytest.approx([expected(step) for step in range(up + down + 9)])


@pytest.mark.parametrize("staircase", [False, True])
def test_a_range_test_follows_its_formula(staircase: bool) -> None:
    schedule = LRRangeTest(optimizer(), 1e-3, 19, 2.5, staircase)
    intervals = [math.floor(step / 19) if staircase else step / 19 for step in range(60)]
    assert curve(schedule, 60) == pytest.approx([1e-3 * (1 + 2.5 * one) for one in intervals])


# -- Momentum ----------------------------------------------------------------------------------------------------------

MOMENTA = [0.9, 0.85, 0.8, 0.85, 0.9, 0.9 * 1.025, 0.9 * 1.05]


@pytest.mark.parametrize(
    ("make", "options", "read"),
    [
        (AdamW, {"betas": (0.5, 0.95)}, lambda one: one.optimizer.param_groups[0]["betas"][0]),
        (SGD, {"momentum": 0.5}, lambda one: one.optimizer.param_groups[0]["momentum"]),
    ],
    ids=["betas", "momentum"],
)
def test_momentum_goes_the_other_way(make: Any, options: Any, read: Any) -> None:
    schedule = OneCycle(
        optimizer(make=make, **options), 0.1, 0.2, cycle_first_step_size=2, decay_mom_rate=0.05, decay_step_size=2
    )
    assert curve(schedule, len(MOMENTA), read) == pytest.approx(MOMENTA)
    if make is AdamW:
        assert schedule.optimizer.param_groups[0]["betas"][1] == 0.95


def test_momentum_stays_where_it_is_not_cycled() -> None:
    schedule = OneCycle(optimizer(betas=(0.7, 0.95)), 0.1, 0.2, cycle_first_step_size=2, cycle_momentum=False)
    read = lambda one: one.optimizer.param_groups[0]["betas"]  # noqa: E731
    assert set(curve(schedule, 6, read)) == {(0.7, 0.95)}
    OneCycle(optimizer(make=Adagrad), 0.1, 0.2, cycle_momentum=False)


def test_momentum_as_in_deepspeed_begins_at_its_lowest_and_sets_the_second_beta() -> None:
    schedule = OneCycle(
        optimizer(betas=(0.5, 0.95)), 0.1, 0.2, cycle_first_step_size=2, cycle_momentum="deepspeed", cycle_max_mom=0.9
    )
    read = lambda one: one.optimizer.param_groups[0]["betas"]  # noqa: E731
    assert curve(schedule, 4, read) == [(pytest.approx(momentum), 0.99) for momentum in (0.8, *MOMENTA[1:4])]
    schedule.load_state_dict({"last_batch_iteration": 0})
    assert read(schedule) == (pytest.approx(0.85), 0.99)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}], ids=["plain", "momentum"])
def test_momentum_as_in_deepspeed_stays_without_betas(options: Any) -> None:
    sgd = optimizer(make=SGD, **options)
    with pytest.warns(UserWarning, match=r"cycles `betas`, which `SGD` does not have: its momentum stays"):
        schedule = OneCycle(sgd, 0.1, 0.2, cycle_first_step_size=2, cycle_momentum="deepspeed")
    momenta = curve(schedule, 4, lambda one: one.optimizer.param_groups[0]["momentum"])
    assert set(momenta) == {options.get("momentum", 0)}


def test_momentum_that_grows_to_one_is_an_error() -> None:
    schedule = OneCycle(optimizer(), 0.1, 0.2, cycle_first_step_size=1, decay_mom_rate=0.1, decay_step_size=1)
    with pytest.raises(ValueError, match=r"^`decay_mom_rate=0.1` has raised a momentum to 1.08 after 4 steps"):
        curve(schedule, 9)


# -- Groups ------------------------------------------------------------------------------------------------------------


def test_each_group_has_its_own_values() -> None:
    schedule = OneCycle(
        optimizer(0.1, 0.2),
        [0.001, 0.002],
        [0.01, 0.02],
        cycle_min_mom=[0.8, 0.85],
        cycle_max_mom=[0.9, 0.95],
        cycle_first_step_size=5,
    )
    assert rates_of(schedule) == [0.001, 0.002]
    curve(schedule, 5)
    assert rates_of(schedule) == pytest.approx([0.01, 0.02])
    assert [group["betas"][0] for group in schedule.optimizer.param_groups] == pytest.approx([0.8, 0.85])
    for make in (
        lambda: LRRangeTest(optimizer(0.1, 0.2), [0.3, 0.4]),
        lambda: WarmupLR(optimizer(0.1, 0.2), [0.3, 0.4], 0.5),
        lambda: WarmupDecayLR(optimizer(0.1, 0.2), 10, (0.3, 0.4), 0.5),
    ):
        assert rates_of(make()) == [0.3, 0.4]


def test_groups_keep_their_own_rates_where_no_highest_is_given() -> None:
    for make in (WarmupLR, lambda o, **k: WarmupDecayLR(o, 100, **k), lambda o, **k: WarmupCosineLR(o, 100, **k)):
        schedule = make(optimizer(0.1, 0.2), warmup_num_steps=10)
        curve(schedule, 2)
        assert rates_of(schedule) == pytest.approx([0.1 * math.log(2, 10), 0.2 * math.log(2, 10)])


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    for make, _ in NUMBERS.values():
        rate = torch.tensor(0.1, dtype=torch.float64)
        schedule = make(optimizer(rate, make=SGD, momentum=0.9, foreach=False))
        expected = make(optimizer(0.1, make=SGD, momentum=0.9))
        assert schedule.optimizer.param_groups[0]["lr"] is rate
        assert curve(schedule, 7) == pytest.approx(curve(expected, 7))
        schedule.load_state_dict(schedule.state_dict())
        assert schedule.optimizer.param_groups[0]["lr"] is rate


# -- In the middle -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(NUMBERS))
@pytest.mark.parametrize("place", [0, 1, 3, 6])
def test_a_resumed_schedule_goes_on_as_uninterrupted(name: str, place: int) -> None:
    make, _ = NUMBERS[name]
    whole = curve(make(optimizer()), 14, lambda one: (rates_of(one), one.optimizer.param_groups[0]["betas"]))
    first = make(optimizer())
    curve(first, place)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = make(optimizer())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert second.get_last_lr() == first.get_last_lr()
    assert (
        curve(second, 14 - place, lambda one: (rates_of(one), one.optimizer.param_groups[0]["betas"])) == whole[place:]
    )


def test_a_state_of_deepspeed_sets_the_rates_by_itself() -> None:
    first, second = (OneCycle(optimizer(), 0.1, 0.5, cycle_first_step_size=4) for _ in range(2))
    curve(first, 3)
    second.load_state_dict({"last_batch_iteration": first.last_batch_iteration})
    assert rates_of(second) == rates_of(first) == pytest.approx([0.4])
    assert second.optimizer.param_groups[0]["betas"] == first.optimizer.param_groups[0]["betas"]


def in_sequence(*makes: Any) -> Any:
    return lambda o: SequentialLR(o, [make(o) for make in makes], milestones=[4])


COMBINED: dict[str, Any] = {
    "sequence": in_sequence(lambda o: WarmupLR(o, 0.01, 0.1, 4), lambda o: CosineAnnealingLR(o, 8)),
    "sequence-second": in_sequence(lambda o: ConstantLR(o, 0.5), lambda o: WarmupDecayLR(o, 8, 0.01, 0.1, 3)),
    "sequence-cycles": in_sequence(
        lambda o: OneCycle(o, 0.01, 0.1, cycle_first_step_size=2), lambda o: OneCycle(o, 0.1, 0.2, 0.0, 3)
    ),
    "chain": lambda o: ChainedScheduler([WarmupLR(o, 0.01, 0.1, 4), ConstantLR(o, 0.5, total_iters=100)], o),
}


@pytest.mark.parametrize("name", COMBINED)
@pytest.mark.parametrize("place", [0, 2, 4, 5, 7])
def test_schedules_in_others_are_resumed_as_uninterrupted(name: str, place: int) -> None:
    """The first part of a sequence set its own rate, and a part that had not begun was refused."""

    def read(schedule: Schedule) -> Any:
        return rates_of(schedule), schedule.optimizer.param_groups[0]["betas"], schedule.get_last_lr()

    make = COMBINED[name]
    whole = curve(make(optimizer()), 12, read)
    first, second = make(optimizer()), make(optimizer())
    curve(first, place)
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert curve(second, 12 - place, read) == whole[place:]


def test_a_state_of_deepspeed_is_taken() -> None:
    schedule = WarmupDecayLR(optimizer(), 8, 0.1, 0.5, 4, "linear")
    schedule.load_state_dict({"last_batch_iteration": 5})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert curve(schedule, 3) == pytest.approx([0.4, 0.3, 0.2])


def test_a_longer_training_is_decayed_over_its_own_steps() -> None:
    first = WarmupDecayLR(optimizer(), 8, 0.0, 1.0, 4)
    curve(first, 6)
    second = WarmupDecayLR(optimizer(), 16, 0.0, 1.0, 4)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    assert rates_of(second) == pytest.approx([(16 - 5) / 12])


@pytest.mark.parametrize("state", [{}, {"last_epoch": 3}, {"last_batch_iteration": "3"}])
def test_a_state_without_a_place_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="^The state of `WarmupLR` has `last_batch_iteration="):
        WarmupLR(optimizer()).load_state_dict(state)


@pytest.mark.parametrize("name", list(NUMBERS))
def test_last_batch_iteration_starts_in_the_middle(name: str) -> None:
    make, _ = NUMBERS[name]
    schedule = make(optimizer())
    whole = curve(schedule, 9)
    assert schedule.last_batch_iteration == 8
    Schedule.__init__(schedule, schedule.optimizer, 4)
    assert schedule.last_batch_iteration == 4
    assert rates_of(schedule) == whole[5:6]


def test_last_batch_iteration_is_an_option() -> None:
    assert rates_of(LRRangeTest(optimizer(), 0.1, 10, last_batch_iteration=4)) == pytest.approx([0.15])
    assert rates_of(OneCycle(optimizer(), 0.1, 0.2, cycle_first_step_size=10, last_batch_iteration=4)) == pytest.approx(
        [0.15]
    )
    assert rates_of(WarmupLR(optimizer(), 0.1, 0.2, 10, "linear", last_batch_iteration=5)) == pytest.approx([0.15])
    with pytest.raises(ValueError, match="`initial_lr`, which keeps it, is missing"):
        WarmupCosineLR(optimizer(), 100, last_batch_iteration=5)
    with pytest.raises(ValueError, match="`initial_lr`, which keeps it, is missing"):
        WarmupLR(optimizer(), last_batch_iteration=5)
    with pytest.raises(ValueError, match=r"^`last_batch_iteration=-2` must be -1"):
        LRRangeTest(optimizer(), last_batch_iteration=-2)


# -- The end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [WarmupDecayLR, WarmupCosineLR])
def test_an_end_that_nobody_has_filled_is_an_error(make: Any) -> None:
    schedule = make(optimizer(), "auto", warmup_num_steps=2)
    assert rates_of(schedule) == [0.0]
    schedule.optimizer.step()
    with pytest.raises(ValueError, match=rf"^`total_num_steps='auto'` of `{make.__name__}` .*estimated_stepping"):
        schedule.step()
    with pytest.raises(ValueError, match="has not been filled"):
        make(optimizer(), "auto", last_batch_iteration=3)
    schedule = make(optimizer(), "auto", warmup_num_steps=2)
    with pytest.raises(ValueError, match=r"has no end .* Use `Trainer\(max_steps"):
        schedule.fill_total_num_steps(math.inf)
    with pytest.raises(ValueError, match=r"has no end .* a training loader that has a length"):
        schedule.fill_total_num_steps(-1)
    schedule.fill_total_num_steps(10)
    schedule.fill_total_num_steps(20)  # the first one holds
    same = make(optimizer(), 10, warmup_num_steps=2)
    assert curve(schedule, 12) == curve(same, 12)


@pytest.mark.parametrize("make", [WarmupDecayLR, WarmupCosineLR])
def test_a_warm_up_until_the_end_is_warned_of(make: Any) -> None:
    message = rf"^The warm-up of `{make.__name__}` .* `warmup_num_steps=10`, and `total_num_steps=10`. Lower"
    with pytest.warns(UserWarning, match=message):
        make(optimizer(), 10, warmup_num_steps=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(optimizer(), 11, warmup_num_steps=10)
        schedule = make(optimizer(), "auto", warmup_num_steps=10)
        schedule.fill_total_num_steps(10)
    with pytest.warns(UserWarning, match=message):
        schedule.warn_of_long_warmup()
    with pytest.warns(UserWarning, match="`warmup_num_steps=1`, which counts as 2, and `total_num_steps=2`"):
        make(optimizer(), 2, warmup_num_steps=1)


# -- Refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: LRRangeTest(o, lr_range_test_step_size=0), "`lr_range_test_step_size=0` must be a whole number of"),
        (lambda o: LRRangeTest(o, -1.0), "`lr_range_test_min_lr=-1.0` must be a finite number, 0 or more."),
        (lambda o: LRRangeTest(o, [0.1, 0.2]), "`lr_range_test_min_lr=[0.1, 0.2]` has 2 values, and the optimizer has"),
        (lambda o: LRRangeTest(o, lr_range_test_step_rate=-2.0), "`lr_range_test_step_rate=-2.0` must be a finite"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_first_step_size=0), "`cycle_first_step_size=0` must be a whole number"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_second_step_size=-1), "`cycle_second_step_size=-1` must be a whole"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_first_stair_count=-1), "`cycle_first_stair_count=-1` must be a whole"),
        (lambda o: OneCycle(o, 0.1, [0.2, 0.3]), "`cycle_max_lr=[0.2, 0.3]` has 2 values"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_max_mom=1.0), "`cycle_max_mom=1.0` must be a number from 0 to 1, and"),
        (lambda o: OneCycle(o, 0.1, 0.2, decay_lr_rate=-1.0), "`decay_lr_rate=-1.0` must be a finite number, 0 or"),
        (lambda o: OneCycle(o, 0.1, 0.2, decay_step_size=-1), "`decay_step_size=-1` must be a whole number, 0 or"),
        (lambda o: WarmupLR(o, warmup_num_steps=0), "`warmup_num_steps=0` must be a whole number of steps, 1 or more."),
        (lambda o: WarmupLR(o, warmup_num_steps=-5), "`warmup_num_steps=-5` must be a whole number of steps"),
        (lambda o: WarmupLR(o, warmup_type="cosine"), "`warmup_type='cosine'` is not known. Use 'log' or 'linear'."),
        (lambda o: WarmupLR(o, [0.1, 0.2]), "`warmup_min_lr=[0.1, 0.2]` has 2 values"),
        (lambda o: WarmupDecayLR(o, 0), "`total_num_steps=0` must be a whole number of steps, 1 or more."),
        (lambda o: WarmupDecayLR(o, "all"), "`total_num_steps='all'` is not known. Use the number of steps of the"),
        (lambda o: WarmupCosineLR(o, 10, 1.5), "`warmup_min_ratio=1.5` must be a number from 0 to 1."),
        (lambda o: WarmupCosineLR(o, 10, cos_min_ratio=-0.1), "`cos_min_ratio=-0.1` must be a number from 0 to 1."),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        make(optimizer())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: WarmupLR(o, warmup_num_steps=None), "`warmup_num_steps=None` is a `NoneType`. Use a whole number."),
        (lambda o: WarmupLR(o, warmup_num_steps=10.0), "`warmup_num_steps=10.0` is a `float`. Use a whole number."),
        (lambda o: WarmupLR(o, max_lr=1.0), "`WarmupLR` has no option `max_lr`. Did you mean `warmup_max_lr`"),
        (lambda o: OneCycle(o, "0.1", 0.2), "`cycle_min_lr='0.1'` is a `str`. Use a number or a list"),
        (lambda o: WarmupDecayLR(o, 10.5), "`total_num_steps=10.5` is a `float`. Use the number of steps"),
    ],
)
def test_a_wrong_type_is_an_error_that_names_it(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match="^" + re.escape(message)):
        make(optimizer())


def test_an_optimizer_without_momentum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^`cycle_momentum=True` cycles .* `Adagrad` has neither. Use `cycle_moment"):
        OneCycle(optimizer(make=Adagrad), 0.1, 0.2)
