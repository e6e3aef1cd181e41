"""Recomputation finds the module's state as the forward found it, and leaves it as the forward left it."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import spectral_norm as parametrized_spectral_norm

from lightning_zero.config import ActivationCheckpointing
from lightning_zero.errors import PipelineError
from lightning_zero.parallel import module_state
from lightning_zero.parallel.activation.checkpointing import checkpoint_activations
from lightning_zero.parallel.module_state import ModuleState, put_back, unregistered_modules, without_caches
from tests import worlds
from tests.references import Outcome, difference, train, train_zero
from tests.sampling import sample

WIDTH = 6
POLICIES = ("full", "selective", "offload", "auto")


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.linear(x)))


class Averages(BatchNorm):
    """Normalises by an average that it has itself, written in place before and assigned after its use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.ones(WIDTH))
        self.register_buffer("assigned", torch.ones(WIDTH))
        self.register_buffer("alias", self.in_place[:2])
        self.register_buffer("late", None)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x)
        self.in_place.mul_(0.5).add_(y.detach().abs().mean(0))
        self.alias.add_(0.01)
        y = y / self.in_place.clone() + y * self.assigned * self.calls
        self.assigned = 0.9 * self.assigned + 0.1 * y.detach().mean(0)
        self.late = y.detach().mean() if self.late is None else 0.5 * self.late
        return x + torch.tanh(y * self.late)


class Queue(BatchNorm):
    """A large buffer that each forward reads, then writes a row of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.ones(4096, WIDTH))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y = y * (y @ self.queue[:5].clone().T).mean()
        self.queue[int(self.place) % 5] = y.detach().mean(0)
        self.place += 1
        return x + torch.tanh(y)


class Spectral(BatchNorm):
    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrized_spectral_norm(self.linear)


class OldSpectral(BatchNorm):
    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(self.linear)


BLOCKS = {block.__name__: block for block in (BatchNorm, Averages, Queue, Spectral, OldSpectral)}


def _model(block: Callable[[], nn.Module], policy: str | None) -> nn.Module:
    worlds.seed(3)
    blocks = [block() for _ in range(3)]
    model = nn.Sequential(nn.Linear(4, WIDTH), *blocks, nn.Linear(WIDTH, 1))
    options = ActivationCheckpointing(modules=[block], policy=policy) if policy else None  # type: ignore[arg-type, list-item]
    checkpoint_activations(model, options)
    return model


def _state(model: nn.Module) -> dict[str, Any]:
    calls = {name: child.calls for name, child in model.named_modules() if hasattr(child, "calls")}
    return {**{name: value.clone() for name, value in model.state_dict().items()}, **calls}


def _trained(block: Callable[[], nn.Module], policy: str | None, backwards: int = 1) -> dict[str, Any]:
    """Two views of a batch in one loss, as in contrastive learning, so that two calls wait for the backward."""
    model = _model(block, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        worlds.seed(step)
        loss = model(torch.randn(5, 4)).square().mean() + model(torch.randn(5, 4)).mean()
        for number in reversed(range(backwards)):
            loss.backward(retain_graph=number > 0)
        optimizer.step()
        optimizer.zero_grad()
    return _state(model)


def _assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(actual[name], value) if isinstance(value, Tensor) else actual[name] == value
        assert same, f"{name} is {actual[name]}, and {value} without checkpointing"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block", BLOCKS)
def test_checkpointed_batch_norm_counts_every_batch_once(block: str, policy: str) -> None:
    _assert_same(_trained(BLOCKS[block], policy), _trained(BLOCKS[block], None))


@pytest.mark.parametrize("block", BLOCKS)
def test_a_second_backward_of_one_forward_changes_nothing_either(block: str) -> None:
    _assert_same(_trained(BLOCKS[block], "full", 2), _trained(BLOCKS[block], None, 2))


# -- What is copied ----------------------------------------------------------------------------------------------------


class Large(nn.Module):
    """A large buffer that forwards read, and write from the second one on if they are asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(4096, WIDTH))
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.table[:5].clone()
        if self.writes:
            self.table += 1
        return y


def test_a_large_buffer_that_is_only_read_is_copied_in_the_first_forward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    original = module_state.copies_of

    def spy(tensors: Any) -> Any:
        copied.append(sum(tensor.nbytes for tensor in tensors.values()))
        return original(tensors)

    monkeypatch.setattr(module_state, "copies_of", spy)
    block = Large()
    model = nn.Sequential(block)
    checkpoint_activations(model, ActivationCheckpointing(modules=[Large]))
    for _ in range(2):
        model(torch.ones(5, WIDTH, requires_grad=True)).sum().backward()
    assert copied == [block.table.nbytes, 0, 0, 0]  # forward, recomputation, twice


def test_a_large_buffer_that_is_written_later_is_an_error_that_names_it() -> None:
    block = Large()
    model = nn.Sequential(block)
    checkpoint_activations(model, ActivationCheckpointing(modules=[Large]))
    model(torch.ones(5, WIDTH)).sum().backward()
    block.writes = True
    with pytest.raises(RuntimeError, match="`table` of a `Large` was changed in place by a forward, and was not in"):
        model(torch.ones(5, WIDTH))
    _, table = model(torch.ones(5, WIDTH)).sum().backward(), block.table
    assert float(table[0, 0]) == 3.0  # from now on there are copies


# -- Under the engine --------------------------------------------------------------------------------------------------


def _loss(module: nn.Module, rank: int, step: int) -> Tensor:
    worlds.seed(100 * rank + step)
    loss: Tensor = module(torch.randn(5, 4)).square().mean()
    return loss


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05)


def _compare(rank: int, world: int, stage: int, block: str) -> list[str]:
    def trained(policy: str | None) -> Outcome:
        program = partial(train, loss=_loss, optimizer=_sgd, steps=3)
        return train_zero(
            partial(_model, BLOCKS[block], policy), program, rank, world, stage=stage, units=[BLOCKS[block]]
        )

    expected = trained(None)
    return [difference(trained(policy), expected) for policy in POLICIES]


@pytest.mark.parametrize("stage", sample((0, 1, 2, 3), 3), ids="stage{}".format)
@pytest.mark.parametrize("block", sample(BLOCKS, "BatchNorm", "Spectral"))
def test_the_engine_trains_checkpointed_blocks_with_the_same_bits(stage: int, block: str) -> None:
    for found in worlds.run(_compare, 2, stage, block):
        assert not any(found), found


def test_an_attribute_that_becomes_plain_while_a_state_is_shown_comes_back() -> None:
    module: Any = nn.Linear(2, 2)
    module.kept = kept = [1]
    with ModuleState(module.modules()).shown():
        module.kept = None
    assert module.kept is kept


def test_what_is_put_back_is_what_was_there() -> None:
    module: Any = nn.Linear(2, 2)
    module.listed, module.named, module.values, module.rebound = [1], {"a": 1}, torch.zeros(2), (1,)
    listed = module.listed
    with put_back(module.modules()):
        module.listed.append(2)
        module.named["b"] = 2
        module.values += 1.0
        module.rebound = (1, 2)
        module.new = 3
    assert module.listed is listed
    assert (listed, module.named, module.values.tolist(), module.rebound) == ([1], {"a": 1}, [0.0, 0.0], (1,))
    assert not hasattr(module, "new")


def test_writes_that_pytorch_does_not_count_are_put_back() -> None:
    """Counters in front of a pipeline's blocks counted descriptions and surveys too."""
    module: Any = nn.Linear(2, 2)
    module.counted, module.rebound, module.seen = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    module.alias = module.rebound[:1]
    module.config = PretrainedConfig()
    module.config.calls, module.config.inner = 0, {"calls": 0}
    product = (torch.ones(2, requires_grad=True) * module.counted).sum()
    with put_back(module.modules()):
        module.counted.data += 1
        module.rebound.data = torch.ones(3)
        module.seen.numpy()[0] += 1
        module.config.calls += 1
        module.config.inner["calls"] += 1
    assert [one.tolist() for one in (module.counted, module.rebound, module.seen)] == [[0.0, 0.0]] * 3
    assert (module.config.calls, module.config.inner) == (0, {"calls": 0})
    module.rebound += 1
    assert module.alias.item() == 1
    product.backward()  # what is put back is no write


class Noise:
    """An object that is called like a function."""

    def __init__(self) -> None:
        self.calls = 0
        self.recent: deque[int] = deque([0], maxlen=2)
        self.seen = np.zeros(2)

    def __call__(self) -> None:
        self.calls += 1
        self.recent.append(self.calls)
        self.seen += 1


class Slots:
    __slots__ = ("__private", "calls", "late")

    def __init__(self) -> None:
        self.calls = self.__private = 0

    def change(self) -> None:
        self.calls += 1
        self.__private += 1
        self.late = 1

    def state(self) -> tuple[int, int, bool]:
        return self.calls, self.__private, hasattr(self, "late")


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.calls, self.state = 0, torch.zeros(())

    def forward(self) -> None:
        self.mean += 1
        self.calls += 1
        self.state = self.state + 1


def _state_of_all(module: Any) -> Any:
    noise, hidden = module.noise["a"][0], module.hidden["a"]
    return (
        *(noise.calls, list(noise.recent), noise.seen.tolist(), module.table.tolist(), module.objects[0]),
        *(dict(module.default), dict(module.counter), list(module.ordered.items()), sorted(module.names)),
        *(module.raw, module.slots.state(), hidden.mean.item(), hidden.calls, hidden.state.item()),
    )


def test_callable_objects_arrays_and_containers_are_put_back() -> None:
    module: Any = nn.Linear(2, 2)
    noise, hidden, module.slots = Noise(), Running(), Slots()
    module.noise, module.hidden, module.partial = {"a": [noise]}, {"a": hidden}, partial(print, noise)
    module.table, module.objects = np.zeros((2, 2)), np.array([[1], None], dtype=object)
    module.default, module.counter = defaultdict(list, {"a": [1]}), Counter(a=1)
    module.ordered, module.names, module.raw = OrderedDict(a=1, b=2), {"a"}, bytearray(b"a")
    arrays, before = (noise.seen, module.table), copy.deepcopy(_state_of_all(module))
    with put_back(module.modules()):
        noise()
        hidden()
        module.slots.change()
        module.table[0] += 1
        module.objects[0].append(2)
        module.default["a"].append(2)
        module.default["b"].append(2)
        module.counter["a"] += 1
        module.ordered["c"] = module.ordered.pop("a")
        module.names.add("b")
        module.raw += b"b"
        assert all(now != old for now, old in zip(_state_of_all(module), before, strict=True))
    assert _state_of_all(module) == before
    assert noise.seen is arrays[0]
    assert module.table is arrays[1]


def test_a_write_into_an_array_that_is_too_large_for_a_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_state, "_MOST_OF_ARRAY", 16)
    module: Any = nn.Linear(2, 2)
    module.table = np.zeros(3)
    module.view = module.table[:]
    refused = pytest.raises(PipelineError, match=r"array of more than 16 bytes, of `Linear.table` \(24 bytes\)")
    with refused, put_back(module.modules()):
        module.table[0] += 1
    assert module.table.tolist() == [0.0] * 3
    assert module.table.flags.writeable
    assert module.view.flags.writeable


def test_a_registered_module_in_a_list_is_left_alone() -> None:
    module: Any = nn.Sequential(Running(), Running())
    module.listed, hidden = [module[0]], Running()
    module.first = AnObject(hidden)
    with put_back([module]):
        module[0]()
    assert module[0].calls == 1
    assert [(name, one) for name, one in unregistered_modules(module)] == [("Sequential.first", hidden)]


@dataclasses.dataclass
class AnObject:
    held: Any


@dataclasses.dataclass(frozen=True)
class Config:
    use_cache: bool = True


class PretrainedConfig:
    use_cache = True
    calls: int
    inner: dict[str, int]


PretrainedConfig.__module__ = "transformers.configuration_utils"


def test_caches_of_hugging_face_are_turned_off_and_no_other_option_of_the_name() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.config, module[0].config = PretrainedConfig(), Config()
    with without_caches(module):
        assert module.config.use_cache is False
        assert module[0].config.use_cache
    assert module.config.use_cache is True
