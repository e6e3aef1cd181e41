"""Which optimizers are right on segments."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_zero.engine.optim import elementwise
from lightning_zero.engine.optim.elementwise import ElementwiseTrial, Obstacle, Stepped, cut_down
from tests.engine.optimizers import RIGHT as OTHERS_RIGHT
from tests.engine.optimizers import WRONG as OTHERS_WRONG
from tests.engine.optimizers import Clipped, Lamb, Momentum, Prodigy, ProdigyOpt, SometimesFactored

SHAPES = ((300, 200), (5, 4), (3, 2, 3, 3), (7,), (), (0, 3))

RIGHT: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, weight_decay=0.1),
    "AdamW-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW-foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW-capturable": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.1),
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.9),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    **OTHERS_RIGHT,
}
WRONG: dict[str, tuple[Callable[[list[nn.Parameter]], Optimizer], str]] = {
    "LBFGS": (torch.optim.LBFGS, "other numbers"),
    "Adafactor": (lambda params: torch.optim.Adafactor(params[:4]), "other numbers"),
    "Muon": (
        lambda params: torch.optim.Muon(params[:2]),
        "on shards .* raised ValueError: Param gradient must be a 2D",
    ),
    "SparseAdam": (torch.optim.SparseAdam, "could not be tried.*SparseAdam does not support dense gradients"),
    **OTHERS_WRONG,
}


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "_KNOWN", frozenset())


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes or SHAPES]
    params[0].use_muon = True  # type: ignore[attr-defined]
    return params


def stepped(param: Any) -> Stepped:
    return Stepped(tuple(param.shape), param.dtype, param.device)


def tried(optimizer: Optimizer) -> Obstacle | None:
    return ElementwiseTrial(optimizer, stepped).find_obstacle()


@pytest.mark.parametrize("name", list(RIGHT))
def test_elementwise_optimizers_are_recognised(name: str) -> None:
    assert tried(RIGHT[name](parameters())) is None


@pytest.mark.parametrize("name", list(WRONG))
def test_optimizers_that_need_whole_parameters_are_recognised(name: str) -> None:
    make, reason = WRONG[name]
    found = tried(make(parameters()))
    assert found is not None
    pytest.raises(ValueError, _raise, found.reason).match(reason)


def _raise(message: str) -> None:
    raise ValueError(message)


@pytest.mark.parametrize("make", [Prodigy, ProdigyOpt, Clipped])
def test_optimizers_that_need_all_parameters_are_recognised_on_whole_ones(make: Any) -> None:
    found = ElementwiseTrial(make(parameters()), stepped, cuts_parameters=False).find_obstacle()
    assert found is not None
    assert "needs the parameters of all pipeline stages" in found.reason


@pytest.mark.parametrize("name", ["Momentum", "Lion", "Adan", "Lookahead", "ScheduleFree", "AdamW", "Several", "Rprop"])
def test_elementwise_optimizers_are_recognised_on_whole_parameters(name: str) -> None:
    assert ElementwiseTrial(RIGHT[name](parameters()), stepped, cuts_parameters=False).find_obstacle() is None


@pytest.mark.parametrize("make", [Momentum, Lamb, torch.optim.Adam])
def test_complex_parameters_are_tried(make: Any) -> None:
    params = [nn.Parameter(torch.ones(5, 4, dtype=torch.complex64))]
    assert (tried(make(params)) is None) == (make is not Lamb)


def test_every_group_is_tried() -> None:
    first, second = parameters((4, 3), (4, 3))
    groups = [{"params": [first], "factored": False}, {"params": [second], "least": 2}]
    assert tried(SometimesFactored(groups)) is not None
    assert tried(SometimesFactored([groups[0], {**groups[1], "least": 100}])) is None


def test_a_trial_is_due_when_an_option_changes_its_kind() -> None:
    optimizer = SometimesFactored(parameters(), factored=False)
    trial = ElementwiseTrial(optimizer, stepped)
    assert trial.is_due
    assert trial.find_obstacle() is None
    group = optimizer.param_groups[0]
    group.update(lr=0.0, momentum=0.5)
    assert not trial.is_due
    group["momentum"] = 0.0
    assert trial.is_due
    assert trial.find_obstacle() is None
    group["factored"] = True
    assert trial.is_due
    assert trial.find_obstacle() is not None


def test_a_switch_that_a_step_sets_is_tried_with_what_it_switches() -> None:
    class Late(SometimesFactored):
        def step(self, closure: Any = None) -> Any:
            group = self.param_groups[0]
            group["calls"] += 1
            group["factored"] = group["calls"] > 20
            return super().step(closure)

    params = parameters()
    optimizer = Late(params, factored=False, calls=0)
    trial = ElementwiseTrial(optimizer, stepped)
    assert trial.find_obstacle() is None
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(20):
        trial.begin_step()
        optimizer.step()
        trial.end_step()
        assert not trial.is_due
    trial.begin_step()
    optimizer.step()
    trial.end_step()
    assert trial.is_due
    assert trial.find_obstacle() is not None


@pytest.mark.parametrize("name", ["ScheduleFree", "CountsCalls"])
def test_options_that_the_optimizer_changes_itself_need_no_trial(name: str) -> None:
    params = parameters()
    optimizer: Any = OTHERS_RIGHT[name](params)
    trial = ElementwiseTrial(optimizer, stepped)
    assert trial.find_obstacle() is None
    for param in params:
        param.grad = torch.ones_like(param)
    if name == "ScheduleFree":
        optimizer.train()
    for _ in range(3):
        optimizer.step()
        assert not trial.is_due


def test_the_error_of_a_trial_is_shown() -> None:
    class Fails(Momentum):
        def direction(self, *args: Any) -> Any:
            raise KeyError("learning_rate")

    found = tried(Fails(parameters()))
    assert found is not None
    assert found.reason == "could not be tried, because its step raised KeyError: 'learning_rate'"
    assert isinstance(found.error, KeyError)


def test_the_trial_leaves_the_optimizer_as_it_was() -> None:
    param = nn.Parameter(torch.ones(4, 3))
    optimizer = torch.optim.Adagrad([param], lr=0.5)
    before = copy.deepcopy(optimizer.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert tried(optimizer) is None
    assert torch.equal(param, torch.ones(4, 3))
    after = optimizer.state_dict()
    assert before["param_groups"][0]["lr"] == after["param_groups"][0]["lr"]
    assert torch.equal(before["state"][0]["sum"], after["state"][0]["sum"])
    assert before["state"][0]["step"] == after["state"][0]["step"]
    assert scheduler.last_epoch == 0


def test_the_trial_leaves_wrapped_optimizers_and_their_counters_as_they_were() -> None:
    optimizer: Any = OTHERS_RIGHT["Lookahead"](parameters())
    assert tried(optimizer) is None
    assert (optimizer.number, len(optimizer.state), len(optimizer.base.state)) == (0, 0, 0)
    counts: Any = OTHERS_RIGHT["CountsCalls"](parameters())
    assert tried(counts) is None
    assert counts.calls == [0]


def test_the_trial_draws_no_random_numbers() -> None:
    states = torch.get_rng_state(), random.getstate()
    assert tried(OTHERS_WRONG["Langevin"][0](parameters())) is not None
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_trial_on_the_host_leaves_the_generators_of_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seed: int) -> None:
        raise AssertionError("a generator that nobody restores was seeded")

    for name in ("manual_seed", "manual_seed_all"):  # with a GPU `torch.manual_seed` calls them
        monkeypatch.setattr(torch.cuda, name, refuse)
    assert tried(torch.optim.Adagrad(parameters())) is None


def test_a_trial_on_a_device_seeds_the_generator_of_that_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[str] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: seeded.append(str(device)) or contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: seeded.append(str(seed)))
    with torch.random.fork_rng([]):
        elementwise._seed([torch.device("cpu"), torch.device("cuda", 1)])
        assert (seeded, torch.default_generator.initial_seed()) == (["cuda:1", "0"], 0)


def test_states_of_numbers_that_the_constructor_has_made_are_cut() -> None:
    class Eager(torch.optim.Adagrad):  # as in PyTorch 2.11, whose step makes no state
        def step(self, closure: Any = None) -> Any:
            if any("sum" not in self.state[param] for group in self.param_groups for param in group["params"]):
                raise KeyError("sum")
            return super().step(closure)

    assert tried(Eager(parameters())) is None
    assert tried(Eager([nn.Parameter(torch.ones(()))])) is None


def test_the_trial_calls_no_hooks_of_the_user() -> None:
    called = []
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(4, 3))])
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    everywhere = register_optimizer_step_pre_hook(lambda *_: called.append("everywhere"))
    assert tried(optimizer) is None
    everywhere.remove()
    assert not called


def test_classes_of_pytorch_need_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not ElementwiseTrial(torch.optim.AdamW(parameters(), lr=0.0), stepped).is_due
    assert ElementwiseTrial(type("Own", (torch.optim.AdamW,), {})(parameters()), stepped).is_due
    assert ElementwiseTrial(Lamb(parameters()), stepped).is_due


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), ()),
        ((0, 3), (0, 3)),
        ((50_000, 4096), (256, 256)),
        ((100_000, 16), (4096, 16)),
        ((9, 8, 3, 3), (9, 8, 3, 3)),
    ],
)
def test_shapes_are_cut_down_evenly(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert cut_down(shape) == expected


def test_options_that_are_numbers_of_numpy_are_numbers() -> None:
    rates = [numpy.float32(one) for one in (0.0, 0.1)]  # a warm-up, as `LambdaLR` takes it from an array
    optimizer = Momentum(parameters(), lr=rates[0])
    optimizer.param_groups[0]["period"] = numpy.int64(5)
    trial = ElementwiseTrial(optimizer, stepped)
    assert trial.find_obstacle() is None
    optimizer.param_groups[0].update(lr=rates[1], momentum=numpy.float32(0.8), period=numpy.int64(5))
    assert not trial.is_due
    optimizer.param_groups[0]["period"] = 6
    assert trial.is_due


def test_an_object_in_an_option_is_another_one_than_its_successor() -> None:
    optimizer = Momentum(parameters())
    optimizer.param_groups[0]["rule"] = object()
    trial = ElementwiseTrial(optimizer, stepped)
    assert trial.find_obstacle() is None
    assert not trial.is_due
    optimizer.param_groups[0]["rule"] = None
    optimizer.param_groups[0]["rule"] = object()  # it may have the `id` of the one before
    assert trial.is_due
