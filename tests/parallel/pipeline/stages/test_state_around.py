"""Attributes around the blocks that stages keep alike."""

from __future__ import annotations

import collections
import enum
import types
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import lightning
import numpy
import pytest
import torch
from torch import nn

from lightning_zero.config import Pipeline
from lightning_zero.parallel.pipeline.stages.split import split_module
from lightning_zero.parallel.pipeline.stages.state_around import StateAround
from lightning_zero.parallel.pipeline.stages.state_values import Node


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.count = 0
        self.losses: list[Any]
        self.seen: list[int]


@pytest.mark.parametrize(
    ("name", "is_kept"), [("count", True), ("_metric_attributes", False), ("prepare_data_per_node", False)]
)
def test_what_the_trainer_keeps_in_a_module_is_of_one_process(name: str, is_kept: bool) -> None:
    """Lightning finds logged metrics by their ``id``."""
    module = Net()
    around = StateAround(module, split_module(module, Pipeline(stages=2)), 1, torch.device("cpu"), is_repeated=True)
    assert any(key == ("", name) for key, _, _ in around._kept.items()) == is_kept


def _around(module: Net) -> StateAround:
    return StateAround(module, split_module(module, Pipeline(stages=2)), 1, torch.device("cpu"), is_repeated=True)


def test_of_a_list_that_grows_the_new_items_are_sent() -> None:
    """As Lightning's users collect losses for the end of an epoch."""
    last, first = Net(), Net()
    behind, front = _around(last), _around(first)
    for module in (last, first):
        module.losses = []

    def batch(change: Callable[[], object]) -> int:
        """Return how many items were sent."""
        behind.begin("training_step", is_new=False)
        front.begin("training_step", is_new=False)
        change()
        (told,) = behind.changes()
        front.take([told])
        assert first.losses == last.losses
        assert isinstance(told.value, Node)
        return len(told.value.items)

    assert batch(lambda: last.losses.append(torch.tensor(0.5))) == 1
    for number in range(300):
        assert batch(lambda number=number: last.losses.append(torch.tensor(float(number)))) == 1
    assert batch(lambda: last.losses.clear()) == 0
    assert batch(lambda: last.losses.extend([1.0, 2.0, 3.0])) == 3
    assert batch(lambda: last.losses.insert(0, 4.0)) == 4
    assert batch(lambda: last.losses.extend([5.0, 6.0])) == 2


def test_items_that_all_stages_have_added_are_not_added_twice() -> None:
    last, first = Net(), Net()
    behind, front = _around(last), _around(first)
    for module in (last, first):
        module.seen = [0]
    behind.begin("training_step", is_new=False)
    front.begin("training_step", is_new=False)
    first.seen.append(1)
    last.seen.extend([1, 2])
    front.take(behind.changes())
    assert first.seen == last.seen == [0, 1, 2]


# -- Two stages: what code behind the blocks changes, and how the stage in front finds it ------------------------------


class Phase(enum.Enum):
    A = 1
    B = 2


class Sums(list):  # type: ignore[type-arg]
    pass


class Counts(dict):  # type: ignore[type-arg]
    pass


Loss = collections.namedtuple("Loss", ["count", "value"])


def _moved(begin: Callable[[Any], object], behind: Callable[[Any], object], front: Callable[[Any], object]) -> Any:
    """Return the module of the first stage behind two batches, and the keys of old values."""
    modules = Net(), Net()
    for module in modules:
        begin(module)
    last, first = map(_around, modules)
    for _ in range(2):
        for around in (last, first):
            around.begin("training_step", is_new=False)
        for module in modules:
            front(module)
        behind(modules[0])
        first.take(last.changes())
    return modules[1], {name for _, name in first._stale}


def _set(name: str, make: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda module: setattr(module, name, make())


def _nothing(module: Any) -> None:
    pass


def _write_item(module: Any) -> None:
    module.kept[3] += 1.5


def _slide(module: Any) -> None:
    module.kept.append(module.kept[-1] + 1.0)
    module.kept.pop(0)


def _set_and_append(module: Any) -> None:
    module.kept[3] += 1.5
    module.kept.append(2.0)


def _write_data(module: Any) -> None:
    module.kept.data.add_(1.5)


def _bind_data(module: Any) -> None:
    module.kept.data = module.kept + 1.5


def _write_attribute(module: Any) -> None:
    module.kept.total = getattr(module.kept, "total", 0.0) + 1.5


def _write_module(module: Any) -> None:
    module.kept[0].mean.add_(1.0)
    module.kept[0].calls += 1


def _module_in_a_list() -> list[nn.Module]:
    held: Any = nn.Module()
    held.register_buffer("mean", torch.zeros(2))
    held.calls = 0
    return [held]


_EQUAL_CHANGES: dict[
    str, tuple[Callable[[], Any], Callable[[Any], Any]]
] = {  # before the batch, and code before the blocks
    "tuple": (lambda: (1,), lambda old: (*old, 2)),
    "frozenset": (lambda: frozenset([1]), lambda old: old | {2}),
    "set": (lambda: {1}, lambda old: old.add(2) or old),
    "new set": (lambda: {1}, lambda old: {*old, 2}),
    "list": (lambda: [1], lambda old: old.append(2) or old),
    "new list": (lambda: [1], lambda old: [*old, 2]),
    "dict": (lambda: {"a": 1}, lambda old: old.update(b=2) or old),
    "new dict": (lambda: {"a": 1}, lambda old: {**old, "b": 2}),
    "deque": (lambda: collections.deque([1], 2), lambda old: old.append(2) or old),
    "new deque": (lambda: collections.deque([1], 2), lambda old: collections.deque([*old, 2], 2)),
    "named tuple": (lambda: _Pair(1, 2), lambda old: old._replace(right=3)),
    "set in a dict": (lambda: {"a": {1}}, lambda old: old["a"].add(2) or old),
    "tuple in a dict": (lambda: {"a": (1,)}, lambda old: old.update(a=(1, 2)) or old),
}


class _Pair(NamedTuple):
    left: int
    right: int


@pytest.mark.parametrize("name", _EQUAL_CHANGES)
def test_a_change_that_all_stages_make_is_none_of_code_after_the_blocks(name: str) -> None:
    make, change = _EQUAL_CHANGES[name]
    last, first = Net(), Net()
    behind, front = _around(last), _around(first)
    for module, around in ((last, behind), (first, front)):
        module.seen = make()
        around.begin("training_step", is_new=False)
        module.seen = change(module.seen)
    kept = first.seen
    front.take(behind.changes())
    assert not set().union(*front._behind["training_step"].values())
    assert first.seen is kept
    assert first.seen == last.seen


def test_attributes_and_buffers_of_modules_in_plain_lists_are_sent() -> None:
    module, stale = _moved(_set("kept", _module_in_a_list), _write_module, _nothing)
    assert not stale
    assert (module.kept[0].mean.tolist(), module.kept[0].calls) == ([2.0, 2.0], 2)


WRITES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "long-list": (lambda: [0.0] * 300, _write_item),
    "long-dictionary": (lambda: dict.fromkeys(range(300), 0.0), _write_item),
    "full-deque": (lambda: collections.deque([0.0] * 300, maxlen=300), lambda m: m.kept.append(m.kept[-1] + 1.0)),
    "sliding-window": (lambda: [0.0] * 300, _slide),
    "list-that-grows": (lambda: [0.0] * 300, _set_and_append),
    "data": (lambda: torch.zeros(3), _write_data),
    "bound-data": (lambda: torch.zeros(3), _bind_data),
    "list-subclass": (lambda: Sums([0.0] * 5), _write_item),
    "attribute-of-a-dictionary": (Counts, _write_attribute),
    "set-in-an-object": (lambda: types.SimpleNamespace(seen=set()), lambda m: m.kept.seen.add(len(m.kept.seen))),
}  # fmt: skip


@pytest.mark.parametrize("name", [*WRITES])
def test_writes_into_long_values_and_through_data_are_sent(name: str) -> None:
    make, write = WRITES[name]
    expected = types.SimpleNamespace(kept=make())
    write(expected)
    write(expected)
    module, stale = _moved(_set("kept", make), write, _nothing)
    assert not stale
    assert type(module.kept) is type(expected.kept)
    assert torch.equal(module.kept, expected.kept) if name.endswith("data") else module.kept == expected.kept
    assert vars(module.kept) == vars(expected.kept) if name.startswith("attribute") else True


LARGE: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "array": (lambda: numpy.zeros(10_000), _write_item),
    "data": (lambda: torch.zeros(20_000), _write_data),
    "lists": (lambda: [[0.0] for _ in range(300)], lambda m: m.kept[3].append(1.0)),
    "new-object": (lambda: None, lambda m: setattr(m, "kept", types.SimpleNamespace(n=1))),
}


@pytest.mark.parametrize("name", [*LARGE])
def test_what_is_too_large_is_not_read_where_it_is_old(name: str) -> None:
    make, write = LARGE[name]
    _, stale = _moved(_set("kept", make), write, _nothing)
    assert stale == {"kept"}


VALUES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "enum": (lambda: Phase.A, lambda: Phase.B),
    "named-tuple": (lambda: Loss(1, 0.0), lambda: Loss(1, torch.tensor(2.0))),
    "decimal": (lambda: Decimal("0.1"), lambda: Decimal("0.2")),
    "dtype": (lambda: torch.float32, lambda: torch.float64),
}


@pytest.mark.parametrize("name", [*VALUES])
def test_values_of_one_class_that_code_on_both_sides_sets_are_told_apart(name: str) -> None:
    front, behind = VALUES[name]
    module, stale = _moved(_nothing, _set("kept", behind), _set("kept", front))
    assert not stale
    assert module.kept == behind()
    assert type(module.kept) is type(behind())


def test_objects_of_a_library_are_told_apart_by_their_pickles() -> None:
    def made(number: float) -> Callable[[Any], None]:
        return _set("kept", lambda: torch.distributions.Normal(torch.tensor(number), 1.0))

    assert _moved(_nothing, made(2.0), made(1.0))[1] == {"kept"}
    assert _moved(_nothing, _nothing, made(1.0))[1] == set()


def _alias_in_a_dictionary(module: Any) -> None:
    module.store = {"train": {"count": 0.0}}
    module.train_store = module.store["train"]


def _alias_of_a_buffer(module: Any) -> None:
    module.register_buffer("mean", torch.zeros(2))
    module.state = types.SimpleNamespace(mean=module.mean, first=module.mean[:1])


def _two_tensors(module: Any) -> None:
    module.best, module.now = torch.zeros(2), torch.zeros(2)


ALIASES: dict[str, tuple[Any, Any, Any]] = {  # made, changed behind the blocks, both objects
    "inner-dictionary": (
        _alias_in_a_dictionary,
        lambda m: m.train_store.update(loss=torch.tensor(1.0)),
        lambda m: (m.store["train"], m.train_store),
    ),
    "buffer-in-an-object": (
        _alias_of_a_buffer,
        lambda m: m.state.mean.mul_(0.5).add_(1.0),
        lambda m: (m.mean, m.state.mean),
    ),
    "bound-to-another": (_two_tensors, lambda m: setattr(m, "best", m.now), lambda m: (m.best, m.now)),
    "new-under-two-names": (
        _two_tensors,
        lambda m: (setattr(m, "now", torch.ones(2)), setattr(m, "best", m.now)),
        lambda m: (m.best, m.now),
    ),
}


@pytest.mark.parametrize("name", [*ALIASES])
def test_one_object_under_two_names_stays_one(name: str) -> None:
    make, behind, both = ALIASES[name]
    module, stale = _moved(make, behind, _nothing)
    assert not stale
    one, two = both(module)
    assert one is two


def test_a_view_in_an_object_stays_a_view() -> None:
    module, _ = _moved(_alias_of_a_buffer, lambda m: m.mean.add_(1.0), _nothing)
    module.mean.zero_()
    assert module.state.first.tolist() == [0.0]
