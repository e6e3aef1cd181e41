from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.checkpoint import directory, state
from lightning_zero.checkpoint.flat import PARAMETER_NAMES
from lightning_zero.checkpoint.planner import Segment
from lightning_zero.checkpoint.ranks import Ranks
from lightning_zero.checkpoint.stored import StoredTensor
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.errors import ReleasedParameterError
from tests import worlds
from tests.checkpoint import programs
from tests.engine.optimizers import Momentum
from tests.sampling import sample

# -- The model ---------------------------------------------------------------------------------------------------------


def _names(rank: int, world: int, stage: int) -> tuple[list[str], list[type]]:
    engine, model, _ = programs.make(stage, 0)
    values = state.model_state(engine, model)
    assert values["head.weight"] is values["embedding.weight"]
    assert all(param is engine.records()[index].parameter for index, param in enumerate(model.parameters()))
    return list(values), [type(value) for value in values.values()]


@pytest.mark.parametrize("stage", [0, 3])
def test_the_state_has_the_names_of_the_module_in_its_order(stage: int) -> None:
    names, types = worlds.run(_names, 2, stage)[1]
    plain = programs.Model().state_dict()
    assert names == list(plain)
    parameters = dict(programs.Model().named_parameters(remove_duplicate=False))
    assert types == [Segment if name in parameters else type(plain[name]) for name in names]


class Renamed(programs.Model):
    """Saves one name less, and reads an older name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self._rename)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict(*args, **kwargs).items() if key != "unused"}

    def _rename(self, module: nn.Module, values: dict[str, Any], *args: Any) -> None:
        if "old_scale" in values:
            values["scale"] = values.pop("old_scale")


def _rename(rank: int, world: int, path: str) -> None:
    worlds.seed()
    model = Renamed()
    engine = ZeroEngine(3)
    engine.shard(model)
    values = state.model_state(engine, model)
    assert "unused" not in values
    values["old_scale"] = values.pop("scale")
    directory.save(engine, {"state_dict": values}, path, full=False)
    loaded = directory.load(engine, path)["state_dict"]
    loaded["old_scale"] = torch.tensor(9.0)
    with pytest.raises(RuntimeError, match='Missing key.*"unused"'):
        state.load_model_state(engine, model, loaded)
    loaded["unused"] = loaded["unknown"] = torch.full((7,), 4.0)
    with pytest.raises(RuntimeError, match='Unexpected key.*"unknown"'):
        state.load_model_state(engine, model, loaded)
    state.load_model_state(engine, model, loaded, strict=False)
    assert engine.full_param(model.scale) == 9.0
    assert torch.equal(engine.full_param(model.unused), loaded["unused"])
    assert model.note == "new"


def test_hooks_and_overrides_of_the_module_choose_the_names(tmp_path: Path) -> None:
    worlds.run(_rename, 2, str(tmp_path / "saved"))


def _misfit(rank: int, world: int) -> None:
    engine, model, _ = programs.make(3, 0)
    params = list(model.parameters())
    values = state.model_state(engine, model)
    values["blocks.0.linear.weight"] = torch.zeros(6, 5)
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks.0.linear.weight.*\[6, 5\].*\[6, 6\]"):
        state.load_model_state(engine, model, values)
    assert all(mine is param for mine, param in zip(model.parameters(), params, strict=True))


def test_another_shape_is_refused_as_by_any_module() -> None:
    worlds.run(_misfit, 2)


class _Assigns(programs.Model):
    """Puts the tensors of a state in place of its own, as ``assign=True`` does, or part of one."""

    is_cut = False

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = True) -> Any:
        keys = super().load_state_dict(state_dict, strict, assign=True)
        self.scale = nn.Parameter(state_dict["scale"].detach())
        if self.is_cut:
            self.unused = nn.Parameter(state_dict["unused"][:3])
        return keys


def _assign(rank: int, world: int, path: str) -> None:
    worlds.seed(0)
    source = programs.Model()
    source.batch_norm.running_mean.fill_(3.0)
    if rank == 0:
        torch.save(source.state_dict(), path)
    torch.distributed.barrier()
    worlds.seed(1)
    model = _Assigns()
    engine = ZeroEngine(3)
    engine.shard(model)
    params = list(model.parameters())
    values = torch.load(path)
    state.load_model_state(engine, model, values)
    assert all(mine is param for mine, param in zip(model.parameters(), params, strict=True))
    for (name, param), expected in zip(model.named_parameters(), source.parameters(), strict=True):
        assert torch.equal(engine.full_param(param), expected), name
    assert torch.equal(model.batch_norm.running_mean, source.batch_norm.running_mean)
    model.is_cut = True
    with pytest.raises(ValueError, match=r"put a tensor of shape \(3,\) in the place of `unused`.* is \(7,\)"):
        state.load_model_state(engine, model, values)


def test_tensors_that_a_module_assigns_while_it_loads_are_loaded(tmp_path: Path) -> None:
    """They were put aside again, so the parameters kept their values."""
    worlds.run(_assign, 2, str(tmp_path / "values.pt"))


class Halved(programs.Model):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {key: value.half() for key, value in super().state_dict(*args, **kwargs).items()}


def _halve(rank: int, world: int) -> None:
    model = Halved()
    engine = ZeroEngine(3)
    engine.shard(model)
    with pytest.raises(ReleasedParameterError, match="`half` needs the values of parameter `scale`"):
        state.model_state(engine, model)


def test_state_dict_code_that_computes_is_refused_by_name() -> None:
    worlds.run(_halve, 2)


class _Keeps(nn.Linear):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.extra, self.scale = torch.ones(3), torch.ones(3)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.scale = state_dict.pop(f"{prefix}scale")
        super()._load_from_state_dict(state_dict, prefix, *args)


class _KeepsByHooks(_Keeps):
    """Keeps it in hooks, the values of a parameter too."""

    _load_from_state_dict = nn.Linear._load_from_state_dict

    def __init__(self) -> None:
        super().__init__()
        self.start = torch.zeros(3)
        self.register_load_state_dict_pre_hook(self._take)

    def _take(self, module: nn.Module, state_dict: Any, prefix: str, *args: Any) -> None:
        self.scale, self.start = state_dict.pop(f"{prefix}scale"), state_dict[f"{prefix}bias"]
        self.scale.add_(1)


class _KeepsAll(nn.Sequential):
    """Keeps something for itself, and something for another module."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), _Keeps(), _KeepsByHooks())
        self.anchor, self.old = torch.ones(3), {}

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {**super().state_dict(*args, **options), "anchor": self.anchor}

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        self.old = {name: value for name, value in state_dict.items() if name.startswith("0.")}
        self.anchor = state_dict.pop("anchor")
        return super().load_state_dict(state_dict, *args, **options)


class _KeepsSlots(torch.optim.AdamW):
    """Takes a moment out of what it loads."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.slots: list[Any] = []
        self.register_load_state_dict_pre_hook(
            lambda _, loaded: self.slots.extend(slots.pop("exp_avg_sq") for slots in loaded["state"].values())
        )


def _keep(rank: int, world: int, path: str) -> None:
    engine, model = ZeroEngine(3), _KeepsAll()
    engine.shard(model)
    optimizer = engine.attach(_KeepsSlots(model.parameters()))
    with engine.scope("training_step"):
        loss = model(torch.ones(2, 3)).sum()
    with engine.backward_scope():
        loss.backward()
    optimizer.step()
    whole = engine.full_param(model[2].bias), engine.full_param(model[0].weight)
    directory.save(engine, programs.snapshot(engine, model, optimizer), path, full=False)
    for keeps in (model[1], model[2]):
        keeps.extra, keeps.scale = torch.zeros(3), torch.zeros(3)
    checkpoint = programs.restore(engine, model, optimizer, path)
    assert isinstance(checkpoint["state_dict"]["anchor"], StoredTensor)  # the caller's are left as they are
    Ranks(engine).meet("Removing")
    if rank == 0:
        shutil.rmtree(path)
    Ranks(engine).meet("Removing")
    for keeps in (model[1], model[2]):
        assert torch.equal(keeps.extra.mul_(2), torch.full((3,), 2.0))
    assert torch.equal(model[1].scale.mul_(2), torch.full((3,), 2.0))
    assert torch.equal(model[2].scale.mul_(2), torch.full((3,), 4.0))
    assert torch.equal(model.anchor.mul_(2), torch.full((3,), 2.0))
    assert torch.equal(model[2].start.add_(0), whole[0])
    assert torch.equal(model.old["0.weight"].add_(0), whole[1])
    kept = [model.anchor, model[2].start, *model.old.values(), *optimizer.slots]
    assert {type(value) for value in kept} == {torch.Tensor}
    assert [tuple(slot.shape) for slot in optimizer.slots] == [(3, 3), (3,)] * 3


def test_what_a_module_keeps_of_a_checkpoint_outlives_it_and_may_be_written(tmp_path: Path) -> None:
    worlds.run(_keep, 2, str(tmp_path / "saved"))


# -- Optimizers --------------------------------------------------------------------------------------------------------


class _NamesOfCounters(Momentum):
    """Has states by element under the names of PyTorch's counters."""

    def direction(self, group: dict[str, Any], param: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        for name in ("mu", "eta", "step", "mu_product"):
            state.setdefault(name, torch.zeros_like(param)).mul_(0.9).add_(param.grad)
        return average + state["mu"] + state["eta"] + state["step"] + state["mu_product"]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params),
    "nadam": lambda params: torch.optim.NAdam(params),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, centered=True),
    "rprop": lambda params: torch.optim.Rprop(params),
    "names of counters": _NamesOfCounters,
}


def _make(stage: int, name: str, seed: int) -> tuple[ZeroEngine, programs.Model, torch.optim.Optimizer]:
    engine, model, _ = programs.make(stage, seed)
    return engine, model, engine.attach(OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad]))


def _continue(rank: int, world: int, name: str, path: str, full: bool) -> None:
    engine, model, optimizer = _make(2, name, 0)
    for number in range(2):
        programs.step(engine, model, optimizer, number)
    directory.save(engine, programs.snapshot(engine, model, optimizer), path, full=full)
    other, copy, resumed = _make(3, name, 1)
    programs.restore(other, copy, resumed, path)
    for number in range(2, 4):
        programs.step(engine, model, optimizer, number)
        programs.step(other, copy, resumed, number)
    for mine, theirs in zip(engine.records(), other.records(), strict=True):
        assert torch.equal(mine.master(), theirs.master()), mine.name
        expected, actual = mine.state(optimizer), theirs.state(resumed)
        assert expected.keys() == actual.keys()
        for slot, value in expected.items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, actual[slot]), (mine.name, slot)


@pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])
@pytest.mark.parametrize("name", sample(OPTIMIZERS, "momentum", "amsgrad", "fused", "names of counters"))
def test_training_goes_on_as_if_it_had_not_stopped(name: str, full: bool, tmp_path: Path) -> None:
    worlds.run(_continue, 2, name, str(tmp_path / "saved"), full)


def _continue_whole(rank: int, world: int, full: bool, path: str) -> None:
    runs = []
    for seed in (0, 1):
        engine, model, _ = programs.make(0, seed)
        trained = [param for param in model.parameters() if param.requires_grad and param.numel()]
        runs.append((engine, model, engine.attach(torch.optim.Adafactor(trained, lr=0.1))))
    (engine, model, optimizer), (other, copy, resumed) = runs
    for number in range(2):
        programs.step(engine, model, optimizer, number)
    directory.save(engine, programs.snapshot(engine, model, optimizer), path, full=full)
    programs.restore(other, copy, resumed, path)
    programs.step(engine, model, optimizer, 2)
    programs.step(other, copy, resumed, 2)
    for mine, theirs in zip(model.parameters(), copy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        expected, actual = optimizer.state[mine], resumed.state[theirs]
        assert {slot: value.shape for slot, value in expected.items()} == {s: v.shape for s, v in actual.items()}


@pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])
def test_states_of_other_shapes_than_the_parameter_resume_at_stage_0(full: bool, tmp_path: Path) -> None:
    worlds.run(_continue_whole, 2, full, str(tmp_path / "saved"))


def _load_lists(rank: int, world: int) -> None:
    model = nn.Linear(2, 3)
    engine = ZeroEngine(0)
    engine.shard(model)
    optimizer = engine.attach(torch.optim.LBFGS(model.parameters()))
    saved = state.optimizer_state(engine, optimizer)
    directions = torch.arange(3, dtype=torch.float64)
    saved["state"]["weight"] = {"old_dirs": [directions], "al": [None, directions], "n_iter": 2}
    state.load_optimizer_state(engine, [optimizer], states=[saved])
    found = optimizer.state[model.weight]
    master = next(record for record in engine.records() if record.name == "weight").master()
    for loaded in (found["old_dirs"][0], found["al"][1]):
        assert (loaded.dtype, loaded.device) == (master.dtype, master.device)
        assert torch.equal(loaded.double(), directions)
    assert (found["al"][0], found["n_iter"]) == (None, 2)


def test_tensors_in_lists_of_an_optimizer_get_dtype_and_device_of_the_master() -> None:
    """LBFGS resumed on a GPU had its directions on the CPU."""
    worlds.run(_load_lists, 1)


def _continue_shared(rank: int, world: int, full: bool, path: str) -> None:
    runs = []
    for seed in (0, 1):
        engine, model, _ = programs.make(1, seed)
        shared, (first, second) = list(model.conv.parameters()), model.blocks
        optimizers = [torch.optim.Adam([*shared, *own.parameters()]) for own in (first, second)]
        engine.attach(*optimizers)
        runs.append((engine, model, optimizers))
    (engine, model, optimizers), (other, copy, resumed) = runs
    for number, optimizer in enumerate(optimizers):
        programs.step(engine, model, optimizer, number)
    optimizers[0].zero_grad()
    directory.save(engine, programs.snapshot(engine, model, *optimizers), path, full=full)
    checkpoint = directory.load(other, path)
    state.load_model_state(other, copy, checkpoint["state_dict"])
    names, stored = checkpoint.get(PARAMETER_NAMES, ()), state.identities(checkpoint["state_dict"])
    state.load_optimizer_state(other, resumed, states=checkpoint["optimizer_states"], names=names, stored=stored)
    for number in range(2):
        programs.step(engine, model, optimizers[number], 2 + number)
        programs.step(other, copy, resumed[number], 2 + number)
    for mine, theirs in zip(engine.records(), other.records(), strict=True):
        assert torch.equal(mine.master(), theirs.master()), mine.name


@pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])
def test_a_parameter_that_two_optimizers_step_resumes_with_both_states(full: bool, tmp_path: Path) -> None:
    worlds.run(_continue_shared, 2, full, str(tmp_path / "saved"))


def _change(checkpoint: dict[str, Any], what: str) -> None:
    optimizer = checkpoint["optimizer_states"][0]
    first, second = optimizer["param_groups"]
    if what == "count":
        checkpoint["optimizer_states"].append(optimizer)
    elif what == "groups":
        optimizer["param_groups"] = [first]
    elif what == "missing":
        second["params"].remove("scale")
    elif what == "unknown":
        second["params"].append("blocks.0.linear.bia")
    elif what == "shape":
        optimizer["state"]["scale"]["exp_avg"] = torch.zeros(4)


def _refuse(rank: int, world: int, path: str, what: str, message: str) -> None:
    engine, model, optimizer = programs.make(1, 0)
    programs.step(engine, model, optimizer, 0)
    directory.save(engine, programs.snapshot(engine, model, optimizer), path, full=False)
    checkpoint = directory.load(engine, path)
    _change(checkpoint, what)
    with pytest.raises(ValueError, match=message):
        state.load_optimizer_state(engine, [optimizer], states=checkpoint["optimizer_states"])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("count", "the states of 2 optimizers, and there are 1 now"),
        ("groups", "optimizer 0 has 2 parameter groups, and 1 in the checkpoint"),
        ("missing", "optimizer 0 steps `scale`, of which the checkpoint has no state"),
        ("unknown", "has the state of `blocks.0.linear.bia`.* Did you mean `blocks.0.linear.bias`"),
        ("shape", r"`exp_avg` of `scale` has the shape \(4,\) in the checkpoint, and the parameter has \(\)"),
    ],
)
def test_another_program_is_refused_by_name(what: str, message: str, tmp_path: Path) -> None:
    worlds.run(_refuse, 2, str(tmp_path / "saved"), what, message)


# -- Groups in another order -------------------------------------------------------------------------------------------


def _grouped(stage: int, seed: int, order: str) -> tuple[ZeroEngine, programs.Model, torch.optim.Optimizer]:
    engine, model, _ = programs.make(stage, seed)
    trained = [param for param in model.parameters() if param.requires_grad]
    matrices, others = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    if order == "split otherwise":
        matrices, others = matrices[:1], matrices[1:] + others
    groups = [
        {"params": matrices, "weight_decay": 0.3, "lr": 0.01},
        {"params": [], "weight_decay": 0.2},
        {"params": others, "weight_decay": 0.0, "lr": 0.02},
    ]
    if order == "other":
        groups = [groups[2], groups[0], groups[1]]
        groups[0]["params"] = others[::-1]
    names = {id(param): name for name, param in model.named_parameters()}
    optimizer = engine.attach(torch.optim.AdamW(groups))
    for group in optimizer.param_groups:
        group["param_names"] = [names[id(param)] for param in group["params"]]
    return engine, model, optimizer


def _resume_permuted(rank: int, world: int, full: bool, path: str) -> None:
    engine, model, optimizer = _grouped(1, 0, "as saved")
    programs.step(engine, model, optimizer, 0)
    directory.save(engine, programs.snapshot(engine, model, optimizer), path, full=full)
    other, copy, resumed = _grouped(3, 1, "other")
    programs.restore(other, copy, resumed, path)
    assert [group["weight_decay"] for group in resumed.param_groups] == [0.0, 0.3, 0.2]
    assert [group["lr"] for group in resumed.param_groups] == [0.02, 0.01, 1e-3]
    names = {id(param): name for name, param in copy.named_parameters()}
    for group in resumed.param_groups:
        assert group["param_names"] == [names[id(param)] for param in group["params"]]
    for number in (1, 2):
        programs.step(engine, model, optimizer, number)
        programs.step(other, copy, resumed, number)
    expected, actual = ({r.name: e.full_param(r.parameter) for r in e.records()} for e in (engine, other))
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])
def test_groups_in_another_order_resume_with_their_own_options(full: bool, tmp_path: Path) -> None:
    worlds.run(_resume_permuted, 2, full, str(tmp_path / "saved"))


def _resume_split_otherwise(rank: int, world: int, full: bool, path: str) -> None:
    engine, model, optimizer = _grouped(1, 0, "as saved")
    programs.step(engine, model, optimizer, 0)
    directory.save(engine, programs.snapshot(engine, model, optimizer), path, full=full)
    other, copy, resumed = _grouped(3, 1, "split otherwise")
    said = "`nothing` and `embedding.weight` are in one parameter group of optimizer 0 in the checkpoint, and in two"
    with pytest.raises(ValueError, match=said):
        programs.restore(other, copy, resumed, path)


@pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])
def test_groups_of_other_parameters_are_refused_by_name(full: bool, tmp_path: Path) -> None:
    worlds.run(_resume_split_otherwise, 2, full, str(tmp_path / "saved"))


# -- Names that a file has beside the numbers --------------------------------------------------------------------------


def _of_blocks(seed: int, kind: str) -> tuple[ZeroEngine, programs.Model, list[torch.optim.Optimizer]]:
    worlds.seed(seed)
    model = programs.Model()
    first, second = model.blocks
    if "renamed" in kind:
        second.layer = second.linear
        del second.linear
        second.forward = lambda x: x + torch.tanh(second.layer(second.norm(x)))
    if "tied" in kind:
        first.tied = first.linear
    if "moved" in kind:
        del first.linear
    if "another" in kind:
        first.another = first.tied
    engine = ZeroEngine(1)
    engine.shard(model)
    groups: list[dict[str, Any]] = [
        {"params": list(first.parameters()), "lr": 0.1},
        {"params": list(second.parameters()), "lr": 0.01},
    ]
    groups = groups[::-1] if "swapped" in kind else groups
    if "only" in kind:
        trained = kind.split()[-1]
        groups = [{"params": [param for name, param in model.named_parameters() if name.startswith(trained)]}]
    of_optimizers = [[group] for group in groups] if "optimizers" in kind else [groups]
    optimizers = [torch.optim.AdamW(own) for own in of_optimizers]
    engine.attach(*optimizers)
    return engine, model, optimizers


def _resume_blocks(rank: int, world: int, full: bool, saved: str, kind: str, message: str, path: str) -> None:
    engine, model, optimizers = _of_blocks(0, saved)
    programs.step(engine, model, optimizers[0], 0)
    directory.save(engine, programs.snapshot(engine, model, *optimizers), path, full=full)
    other, _, resumed = _of_blocks(1, kind)
    checkpoint = directory.load(other, path)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        names, stored = checkpoint.get(PARAMETER_NAMES, ()), state.identities(checkpoint["state_dict"])
        state.load_optimizer_state(other, resumed, states=checkpoint["optimizer_states"], names=names, stored=stored)
        assert [group["lr"] for one in resumed for group in one.param_groups] == [0.1, 0.01]


@pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])
def test_swapped_optimizers_do_not_take_the_states_of_each_other(full: bool, tmp_path: Path) -> None:
    message = "state of `blocks.0.norm.weight` in optimizer 0, and optimizer 1 steps it now.*in the order"
    path = str(tmp_path / "saved")
    worlds.run(_resume_blocks, 2, full, "optimizers", "swapped optimizers", message, path)


def test_swapped_groups_do_not_take_the_options_of_each_other_where_a_name_is_new(tmp_path: Path) -> None:
    message = "state of `blocks.1.linear.weight`, which optimizer 0 does not step.*`blocks.1.layer.weight`"
    worlds.run(_resume_blocks, 2, True, "groups", "swapped renamed", message, str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("saved", "kind"),
    [("groups", "renamed"), ("tied groups", "tied moved"), ("tied groups", "tied moved another")],
    ids=["renamed", "first name lost", "first name renamed"],
)
def test_renamed_parameters_resume_from_a_file_by_their_place(saved: str, kind: str, tmp_path: Path) -> None:
    worlds.run(_resume_blocks, 2, True, saved, kind, "", str(tmp_path / "saved"))


@pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])
@pytest.mark.parametrize(
    ("saved", "kind", "first"),
    [
        ("only blocks.0", "only blocks.1", "blocks.0.norm"),
        ("renamed only blocks.1.layer", "only blocks.0.linear", "blocks.1.layer"),
        ("renamed only blocks.1.layer", "tied only blocks.0.linear", "blocks.1.layer"),
    ],
    ids=["frozen now", "frozen then", "frozen then and tied now"],
)
def test_states_do_not_go_to_parameters_that_were_not_trained(
    saved: str, kind: str, first: str, full: bool, tmp_path: Path
) -> None:
    message = f"the state of `{first}.weight`, which optimizer 0 does not step.*load the weights alone: .*load_pre"
    worlds.run(_resume_blocks, 2, full, saved, kind, message, str(tmp_path / "saved"))


def _resume_tied(rank: int, world: int, full: bool, stage: int, path: str) -> None:
    def untie(model: programs.Model) -> None:
        model.head.weight = nn.Parameter(model.head.weight.detach() + 1)

    runs = []
    for change in (untie, lambda model: None):
        worlds.seed(0)
        model, engine = programs.Model(), ZeroEngine(stage)
        change(model)
        engine.shard(model)
        trained = [param for param in model.parameters() if param.requires_grad]
        runs.append((engine, model, engine.attach(torch.optim.AdamW(trained))))
    engine, model, optimizer = runs[0]
    programs.step(engine, model, optimizer, 0)
    directory.save(engine, programs.snapshot(engine, model, optimizer), path, full=full)
    message = "`embedding.weight` and `head.weight` are two parameters in the checkpoint and one here"
    with pytest.raises(ValueError, match=message):
        programs.restore(*runs[1], path)


@pytest.mark.parametrize("full", [False, True], ids=["directory", "file"])
@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_saved_untied_and_resumed_tied_do_not_lose_one_of_two_states(
    stage: int, full: bool, tmp_path: Path
) -> None:
    worlds.run(_resume_tied, 2, full, stage, str(tmp_path / "saved"))


def _copied(rank: int, world: int) -> None:
    engine, model, optimizer = programs.make(2, 0)
    programs.step(engine, model, optimizer, 0)
    values = state.model_state(engine, model)
    kept = {
        key: Segment(v.local.clone(), v.start, v.shape) if isinstance(v, Segment) else v for key, v in values.items()
    }
    before = engine.full_param(model.scale)
    programs.step(engine, model, optimizer, 1)
    assert engine.full_param(model.scale) != before
    state.load_model_state(engine, model, kept)
    assert engine.full_param(model.scale) == before
    whole, other, _ = programs.make(0, 1)
    with pytest.raises(ValueError, match="is of an engine with another stage"):
        state.load_model_state(whole, other, kept)


def test_segments_in_memory_are_taken_back_by_their_engine() -> None:
    worlds.run(_copied, 2)


class _Renames(nn.Module):
    """Saves its parameters under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        self.tied = self.inner[0]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {key.replace("inner.", "net."): value for key, value in super().state_dict(*args, **kwargs).items()}


def _whole_of_renamed(rank: int, world: int) -> None:
    for stage in (1, 3):
        worlds.seed()
        module = _Renames()
        expected = {key: value.clone() for key, value in module.state_dict().items()}
        engine = ZeroEngine(stage)
        values = state.whole_model_state(engine, engine.shard(module))
        assert list(values) == list(expected)
        for key, value in expected.items():
            assert torch.equal(values[key], value), key


def test_whole_values_have_the_names_that_the_module_gives_them() -> None:
    """They were found by name, and a module that renames them lost the weights of a fit in processes of its own."""
    worlds.run(_whole_of_renamed, 2)
