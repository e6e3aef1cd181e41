"""What an optimizer's own ``state_dict`` and its hooks add is resumed as under DDP, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.checkpoint import directory, state
from tests.checkpoint import programs
from tests.engine.optimizers import Momentum
from tests.lightning_programs import STAGES, WORLD, Net, assert_equal, loader, seeded, trainer, weights
from tests.worlds import run


class Counting(Momentum):
    """Halves its steps after the fourth; keeps the number of steps beside the states."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.steps += 1
        return loss

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        return average * (0.5 if self.steps >= 4 else 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": {"steps": self.steps}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.steps = state_dict["own"]["steps"]


class CountingInState(Counting):
    """Keeps it in ``state``, under a key that is no parameter."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.state["steps"] = self.state.get("steps", 0) + 1
        return loss

    def direction(self, group: dict[str, Any], param: Tensor, average: Tensor) -> Tensor:
        return average * (0.5 if self.state.get("steps", 0) >= 4 else 1.0)

    state_dict = Momentum.state_dict
    load_state_dict = Momentum.load_state_dict


class CountingInGroups(Counting):
    """Keeps it in its groups, so that ``state_dict`` is PyTorch's; ``load_state_dict`` reads it there."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.param_groups[0]["count"] = self.steps
        return loss

    state_dict = Momentum.state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        Momentum.load_state_dict(self, state_dict)
        self.steps = self.param_groups[0]["count"]


def hooked(params: Any) -> Optimizer:
    def loaded(optimizer: Any) -> None:
        optimizer.steps = optimizer.param_groups[0]["count"]

    class Plain(Counting):
        state_dict = Momentum.state_dict
        load_state_dict = Momentum.load_state_dict

    optimizer = Plain(params)

    def keep(optimizer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["kept"] = optimizer.steps

    def rename(optimizer: Any, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            group["count"] = state_dict["kept"]

    optimizer.register_state_dict_post_hook(keep)
    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.register_load_state_dict_post_hook(loaded)
    return optimizer


OPTIMIZERS: dict[str, Any] = {
    "override": Counting,
    "key": CountingInState,
    "groups": CountingInGroups,
    "hooks": hooked,
}


class Wrapping(Momentum):
    """Keeps slow weights in a dictionary of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.slow: dict[Tensor, Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    slow = self.slow.setdefault(param, param.clone())
                    slow.lerp_(param, 0.5)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow_weights": list(self.slow.values())}


class Pair:
    """An object with two tensors."""

    __slots__ = ("values",)

    def __init__(self, values: dict[float, Tensor]) -> None:
        self.values = tuple(values.values())


class Aggregated(Momentum):
    """Keeps a dictionary of averages for each parameter, as AggMo does, and where ``kept_as`` puts them."""

    kept_as: Any = dict

    def _average(self, group: dict[str, Any], param: Tensor) -> Tensor:
        averages = {beta: torch.zeros_like(param) for beta in (0.5, 0.9)}
        self.state[param]["averages"] = self.kept_as(averages)
        return sum((average.mul_(beta).add_(param.grad) for beta, average in averages.items()), torch.tensor(0.0))


class Linked(Momentum):
    """Links an optimizer that it wraps to its states and groups, and reads both, as SAM does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base = Momentum(self.param_groups)
        self.base.state, self.base.param_groups = self.state, self.param_groups
        self.num_averages = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base.state, self.base.param_groups = self.state, self.param_groups
        for group in self.param_groups:
            self.num_averages += sum(torch.is_tensor(self.state[param]["average"]) for param in group["params"])


class Delegating(Optimizer):
    """Has the states and groups of an optimizer that it wraps and lets it step, save and load, as timm's Lookahead."""

    def __init__(self, params: Any) -> None:
        self.base = Momentum(params)
        super().__init__(self.base.param_groups, {})
        self.state, self.param_groups = self.base.state, self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self.state, self.param_groups = self.base.state, self.base.param_groups
        for group in self.param_groups:
            assert all("average" in self.state[param] for param in group["params"])
            group["is_loaded"] = True


class Listing(Momentum):
    """Saves its states under another key too, and reads them there."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "averages": [state["average"] for state in self.state.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for slots, average in zip(self.state.values(), state_dict["averages"], strict=True):
            slots["average"] = average


class Program(Net):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self) -> Any:
        return {**OPTIMIZERS, "wrapping": Wrapping}[self.name](self.parameters())


def _fit(rank: int, world: int, strategy: Any, name: str, folder: str, resume: str | None = None) -> dict[str, Tensor]:
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    options: dict[str, Any] = {"limit_train_batches": 3, "enable_checkpointing": True, "callbacks": [saver]}
    fitted = trainer(rank, world, strategy, max_epochs=2, **options)
    fitted.fit(seeded(lambda: Program(name)), loader(rank, world), ckpt_path=resume)
    return weights(fitted)


def _resume(rank: int, world: int, name: str, stages: tuple[int, ...], folder: str) -> None:
    _fit(rank, world, "ddp", name, f"{folder}/ddp")
    expected = _fit(rank, world, "ddp", name, f"{folder}/again", f"{folder}/ddp/epoch=0.ckpt")
    for stage in stages:
        assert_equal(_fit(rank, world, stage, name, f"{folder}/{stage}"), expected, 1e-6, stage)
        resumed = _fit(rank, world, 3 - stage, name, f"{folder}/{stage}-again", f"{folder}/{stage}/epoch=0.ckpt")
        assert_equal(resumed, expected, 1e-6, f"resumed from stage {stage}")


@pytest.mark.parametrize("stages", [(3,), pytest.param((0, 1, 2), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_values_of_an_own_state_dict_are_resumed_as_under_ddp(
    name: str, stages: tuple[int, ...], tmp_path: Path
) -> None:
    run(_resume, WORLD, name, stages, str(tmp_path), timeout_s=300)


def _exchange(rank: int, world: int, path: str) -> None:
    plain = programs.Model()
    theirs = CountingInState([param for param in plain.parameters() if param.requires_grad])
    engine, model, _ = programs.make(3, 0)
    ours = engine.attach(CountingInState([param for param in model.parameters() if param.requires_grad]))
    for number in range(2):
        programs.step(engine, model, ours, number)
    directory.save(engine, programs.snapshot(engine, model, ours), path, full=True)
    (saved,) = torch.load(path)["optimizer_states"]
    theirs.load_state_dict(saved)
    assert theirs.state["steps"] == 2
    theirs.state["steps"] = 5
    state.load_optimizer_state(engine, [ours], states=[theirs.state_dict()])
    assert ours.state["steps"] == 5


def test_entries_of_no_parameter_go_from_and_to_files_of_other_strategies(tmp_path: Path) -> None:
    run(_exchange, 1, str(tmp_path / "saved"))


def _refuse(rank: int, world: int, stages: tuple[int, ...], folder: str) -> None:
    for stage in stages:
        with pytest.raises(
            ValueError, match=r"`Wrapping.state_dict\(\)` has `slow_weights`, which a resumed run would"
        ):
            _fit(rank, world, stage, "wrapping", f"{folder}/{stage}")


def test_slow_weights_beside_the_states_are_refused_at_save(tmp_path: Path) -> None:
    run(_refuse, WORLD, STAGES, str(tmp_path), timeout_s=300)


def _make(optimizer: type[Optimizer], stage: int = 3) -> tuple[Any, Any, Any]:
    engine, model, _ = programs.make(stage, 0)
    used = [param for name, param in model.named_parameters() if param.requires_grad and name != "unused"]
    return engine, model, engine.attach(optimizer(used))


def _link(rank: int, world: int, path: str) -> None:
    for optimizer in (Linked, Delegating, Listing):
        engine, model, ours = _make(optimizer)
        programs.step(engine, model, ours, 0)
        directory.save(engine, programs.snapshot(engine, model, ours), f"{path}-{optimizer.__name__}", full=False)
    for optimizer in (Linked, Delegating):
        engine, model, ours = _make(optimizer)
        groups = [ours.param_groups, ours.base.param_groups]
        programs.restore(engine, model, ours, f"{path}-{optimizer.__name__}")
        assert [id(ours.param_groups), id(ours.base.param_groups)] == [id(one) for one in groups]
        assert ours.base.param_groups[0] is ours.param_groups[0]
        assert ours.base.state is ours.state
        assert len(ours.state) > 0
        assert ours.num_averages == len(ours.state) if optimizer is Linked else ours.param_groups[0]["is_loaded"]
    engine, model, ours = _make(Listing)
    with pytest.raises(ValueError, match=r"`Listing.load_state_dict` was called without .*KeyError: 'averages'"):
        programs.restore(engine, model, ours, f"{path}-Listing")


def test_a_wrapped_optimizer_is_linked_to_the_loaded_states_and_groups(tmp_path: Path) -> None:
    run(_link, 1, str(tmp_path / "saved"))


def _aggregate(rank: int, world: int) -> None:
    for kept_as in (dict, lambda averages: set(averages.values()), Pair):
        Aggregated.kept_as = staticmethod(kept_as)
        engine, model, ours = _make(Aggregated, stage=0)
        programs.step(engine, model, ours, 0)
        kept = state.optimizer_state(engine, ours)
        engine, model, ours = _make(Aggregated, stage=2)
        refused = r"The optimizer state `averages` of `.*` is a (dict|set|Pair) of tensors, which cannot be divided"
        with pytest.raises(ValueError, match=refused):
            state.load_optimizer_state(engine, [ours], states=[kept])
        programs.step(engine, model, ours, 0)
        with pytest.raises(ValueError, match=refused + ".* such as statistics, keep numbers or tensors without"):
            state.optimizer_state(engine, ours)
    Aggregated.kept_as = staticmethod(lambda averages: [one.sum() for one in averages.values()])
    engine, model, ours = _make(Aggregated, stage=2)
    programs.step(engine, model, ours, 0)
    state.load_optimizer_state(engine, [ours], states=[state.optimizer_state(engine, ours)])


def test_containers_of_tensors_are_refused_where_each_rank_has_its_segments() -> None:
    run(_aggregate, 2)
