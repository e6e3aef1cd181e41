"""An engine is kept as long as parameters, and modules with parameters, are where they were."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchmetrics.classification import BinaryPrecisionRecallCurve

from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.lightning.places import (
    buffer_places_of,
    convert_buffers,
    keep_engine,
    let_engines_go,
    places_of,
)
from tests.lightning_programs import Net, loader, seeded, trainer
from tests.worlds import run


def _rename(module: nn.Sequential) -> None:
    module.encoder = module[0]
    del module[0]


def _swap(module: nn.Sequential) -> None:
    module[0].weight, module[1].weight = module[1].weight, module[0].weight


def _alias(module: nn.Sequential) -> None:
    module.again = module[0]


def _twin(layer: nn.Module) -> nn.Module:
    """Another module with the same parameters."""
    twin = nn.Linear(3, 3)
    twin.weight, twin.bias = layer.weight, layer.bias
    return twin


def _set(name: str, make: Callable[[], nn.Module]) -> Callable[[nn.Module], None]:
    return lambda module: module.add_module(name, make())


MOVES: dict[str, tuple[Callable[[nn.Sequential], None], bool]] = {
    "renamed": (_rename, False),
    "swapped": (_swap, False),
    "alias": (_alias, False),
    "replaced": (lambda module: module.__setitem__(1, _twin(module[1])), False),
    "buffers": (_set("2", lambda: nn.BatchNorm1d(3, affine=False)), True),
    "loss": (_set("2", nn.CrossEntropyLoss), True),
    "metric": (_set("2", lambda: BinaryPrecisionRecallCurve(thresholds=5)), True),
}


@pytest.mark.parametrize(("move", "is_kept"), MOVES.values(), ids=MOVES)
def test_places_are_those_of_modules_with_parameters(move: Callable[[nn.Module], None], is_kept: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = places_of(module)
    with torch.no_grad():
        module[0].weight.zero_()
    assert places_of(module) == before
    move(module)
    assert (places_of(module) == before) is is_kept


def test_modules_with_buffers_only_are_known_by_their_own_places() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.CrossEntropyLoss(weight=torch.ones(3)), nn.BatchNorm1d(3), nn.ReLU())
    before = buffer_places_of(module)
    module[1] = nn.CrossEntropyLoss(weight=torch.ones(3))
    assert [name for name, _ in before] == ["1"]
    assert buffer_places_of(module) != before


def test_buffers_of_all_modules_are_converted_and_parameters_are_not() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.register_buffer("weights", torch.ones(2), persistent=False)
    convert_buffers(module, lambda holder: holder.to(torch.bfloat16))
    assert [buffer.dtype for buffer in module.buffers()] == [torch.bfloat16] * 3 + [torch.int64]
    assert all(param.dtype == torch.float32 for param in module.parameters())
    assert "weights" not in module.state_dict()


def test_a_module_keeps_its_engine_and_copies_of_it_do_not() -> None:
    module, engine = nn.Sequential(nn.Linear(2, 2)), ZeroEngine()
    keep_engine(module, engine)
    assert [one for one in gc.get_referrers(engine) if type(one).__name__ == "_KeptEngine"]
    assert vars(copy.deepcopy(module))["_zero_engine"] is None
    assert vars(pickle.loads(pickle.dumps(module)))["_zero_engine"] is None
    let_engines_go(nn.Sequential(module))
    assert not [one for one in gc.get_referrers(engine) if type(one).__name__ == "_KeptEngine"]


@pytest.mark.parametrize("end", [ZeroEngine.unshard, ZeroEngine.close])
def test_an_engine_that_is_closed_is_not_kept(end: Callable[[ZeroEngine], object]) -> None:
    """Its masters, gradients and whole buffers stayed in memory as long as the module."""
    engine = ZeroEngine(stage=1)
    module = engine.shard(nn.Sequential(nn.Linear(2, 2)))
    engine.internals.fits.pause()
    keep_engine(module, engine)
    end(engine)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


def _fit_refused(rank: int, world: int) -> tuple[list[bool], bool]:
    module, other, one = seeded(Net), seeded(Net), trainer(rank, world, 1, max_epochs=1)
    one.fit(module, loader(rank, world))
    with pytest.raises(ValueError, match="best"):  # before the strategy knows the module
        one.fit(other, loader(rank, world), ckpt_path="best")
    kept = ["_zero_engine" in vars(net) for net in (module, other)]
    one.strategy.engine.unshard()
    with pytest.raises(ValueError, match="best"):
        one.fit(module, loader(rank, world), ckpt_path="best")
    return kept, "_zero_engine" in vars(module)


def test_a_run_that_is_refused_early_leaves_engines_as_they_are() -> None:
    """Its module kept the engine of another one, and its error behind ``unshard`` was that of a closed engine."""
    assert run(_fit_refused, 1) == [([True, False], False)]


class _Student(Net):
    def __init__(self, teacher: Net) -> None:
        super().__init__()
        self.teacher = teacher.requires_grad_(False)


def _fit_student(rank: int, world: int) -> bool:
    teacher, first = seeded(Net), trainer(rank, world, 1, max_epochs=1)
    first.fit(teacher, loader(rank, world))
    engine = weakref.ref(first.strategy.engine)
    del first
    student, second = _Student(teacher), trainer(rank, world, 1, max_epochs=1)
    gc.collect()
    assert engine() is not None  # the teacher keeps it
    gc.disable()
    try:
        second.fit(student, loader(rank, world))
        return engine() is None
    finally:
        gc.enable()


def test_a_fit_frees_the_engine_of_a_module_inside() -> None:
    """It stayed in device memory until a collection, because engines are in reference cycles."""
    assert run(_fit_student, 1) == [True]
