"""Batches in pieces."""

from __future__ import annotations

from collections import UserDict, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils import ModelOutput

from lightning_zero.parallel.pipeline.schedule.microbatches import (
    _weighted_sum,
    batch_digest,
    copy_of,
    list_of_samples,
    num_samples,
    shapes_of,
    split_batch,
    weighted_mean,
)
from tests.simulated_device import SimulatedDevice

Pair = namedtuple("Pair", "x y")
X = torch.zeros(4)


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    names: list[str]


def test_tensors_are_cut_in_every_container() -> None:
    x = torch.arange(8).view(4, 2)
    batch = {"x": x, "pair": Pair(x, [x]), "sample": Sample(x, list("abcd")), "rate": 0.5, "one": torch.tensor(3)}
    first, second = split_batch(batch, 2)
    assert torch.equal(first["x"], x[:2])
    assert torch.equal(second["pair"].y[0], x[2:])
    assert second["sample"].names == ["c", "d"]
    assert (first["rate"], first["one"]) == (0.5, torch.tensor(3))


@pytest.mark.parametrize(
    ("size", "number", "expected"), [(7, 3, [3, 2, 2]), (2, 3, [1, 1]), (6, 3, [2, 2, 2]), (0, 3, [0])]
)
def test_sizes_differ_by_one_at_most(size: int, number: int, expected: list[int]) -> None:
    x = torch.arange(size)
    pieces = split_batch({"x": x, "names": list(range(size))}, number)
    assert [num_samples(piece) for piece in pieces] == expected
    assert [piece["x"].tolist() for piece in pieces] == [piece["names"] for piece in pieces]
    assert torch.cat([piece["x"] for piece in pieces]).tolist() == x.tolist()


def test_means_are_those_of_the_samples() -> None:
    x = torch.arange(14.0).view(7, 2)
    pieces = split_batch(x, 3)
    mean = weighted_mean([piece.mean(0) for piece in pieces], [3, 2, 2])
    assert torch.allclose(mean, x.mean(0))
    assert weighted_mean([torch.tensor(1), torch.tensor(2)], [2, 2]) == 1.5


def test_user_dicts_keep_their_class() -> None:
    batch = UserDict(ids=torch.arange(4))
    pieces = split_batch(batch, 2)
    assert type(pieces[1]) is UserDict
    assert pieces[1]["ids"].tolist() == [2, 3]
    assert batch["ids"].tolist() == [0, 1, 2, 3]


class Attributes(dict[str, Any]):
    """A dictionary whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


@dataclass
class Output(ModelOutput):
    x: Any = None
    y: Any = None


@pytest.mark.parametrize("kind", [Attributes, Output])
def test_dictionaries_with_attributes_are_cut_in_both(kind: Any) -> None:
    x = torch.arange(4)
    second = split_batch(kind(x=x, y=x), 2)[1]
    assert type(second) is kind
    assert (second["x"].tolist(), second.x.tolist()) == ([2, 3], [2, 3])
    copied = copy_of(second)
    assert copied.x is copied["x"] is not second.x


def test_arrays_are_cut_like_tensors() -> None:
    batch = {"x": torch.zeros(4), "w": numpy.arange(4), "names": numpy.array(list("abcd"), dtype=object),
             "mean": numpy.zeros(3), "scale": numpy.array(2.0)}  # fmt: skip
    second = split_batch(batch, 2)[1]
    assert (second["w"].tolist(), second["names"].tolist()) == ([2, 3], ["c", "d"])
    assert (second["mean"].shape, second["scale"].shape) == ((3,), ())
    for name, other in (("w", numpy.ones(4)), ("names", numpy.array(list("abce"), dtype=object))):
        assert batch_digest({**batch, name: other}) != batch_digest(batch)
    assert shapes_of({**batch, "mean": numpy.zeros(4)}) != shapes_of(batch)


@pytest.mark.parametrize("x", [torch.zeros(4, 2), torch.zeros(1, 2).expand(4, 2), torch.zeros(())])
def test_a_write_into_a_piece_is_none_into_another(x: torch.Tensor) -> None:
    batch = {"x": x, "y": torch.zeros(4)}
    pieces = split_batch(batch, 4)
    pieces[0]["x"].add_(1)
    assert [piece["x"].sum().item() > 0 for piece in pieces] == [True, False, False, False]
    assert [piece["x"]._version for piece in pieces] == [1, 0, 0, 0]
    assert batch["x"][:1].sum() > 0 if x.is_contiguous() and x.ndim > 0 else x.sum() == 0


class Slotted:
    __slots__ = ("x",)


class Box:
    """An object of the program, which holds itself."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.slotted = Slotted()
        self.slotted.x = x
        self.me = self


def test_a_write_into_what_is_not_cut_is_none_into_another_piece() -> None:
    batch = {"x": torch.zeros(4), "mean": numpy.zeros(3), "box": Box(torch.zeros(3)), "set": {1}}
    first, second = split_batch(batch, 2)
    first["mean"] += 1
    first["box"].x += 1
    first["box"].new = 1
    first["set"].add(2)
    for other in (second, batch):
        assert (other["mean"].sum(), other["box"].x.sum(), other["set"]) == (0, 0, {1})
        assert not hasattr(other["box"], "new")


def test_a_copy_has_nothing_that_a_write_would_change() -> None:
    x = torch.zeros(4)
    batch = {"x": x, "view": x[2:], "box": Box(x), "list": [{"x": x}], "sample": Sample(x, ["a"]), "set": {1},
             "array": numpy.zeros(4), "graph": x.clone().requires_grad_() * 2, "iterator": iter("ab")}  # fmt: skip
    copied = copy_of(batch)
    copied["view"].add_(1)
    assert copied["x"].tolist() == copied["box"].x.tolist() == copied["list"][0]["x"].tolist() == [0, 0, 1, 1]
    copied["array"] += 1
    copied["sample"].names.append("b")
    copied["set"].add(2)
    copied["list"].append(1)
    copied["box"].slotted.x = copied["box"].new = 1
    assert copied["box"].me is copied["box"]
    assert copied["graph"].grad_fn is not None
    assert copied["iterator"] is batch["iterator"]
    assert x.sum() == 0
    assert (batch["array"].sum(), batch["set"], len(batch["list"])) == (0, {1}, 1)
    assert batch["sample"].names == ["a"]
    assert batch["box"].slotted.x is x
    assert not hasattr(batch["box"], "new")


@dataclass
class Cached:
    x: torch.Tensor

    def __post_init__(self) -> None:
        self.cache: dict[str, Any] = {"seen": 0}


class Key:
    """An object that is equal to itself alone."""

    seen = 0


def test_copies_and_pieces_are_deep_in_sets_deques_and_attributes_that_are_no_fields() -> None:
    """A step that wrote into them counted descriptions too."""
    key = Key()
    batch = {
        "x": torch.zeros(4),
        "set": {key},
        "deque": deque([[0], torch.zeros(())], maxlen=3),
        "record": Cached(torch.zeros(4)),
    }
    for copied in (copy_of(batch), *split_batch(batch, 2)):
        next(iter(copied["set"])).seen += 1
        copied["deque"][0][0] += 1
        copied["deque"][1].add_(1)
        copied["record"].cache["seen"] += 1
        assert copied["deque"].maxlen == 3
        assert next(iter(copied["set"])).seen == copied["deque"][0][0] == copied["record"].cache["seen"] == 1
    assert (key.seen, batch["deque"][0], batch["deque"][1].item(), batch["record"].cache) == (0, [0], 0, {"seen": 0})


def _cached(values: torch.Tensor) -> Cached:
    record = Cached(torch.zeros(4))
    record.cache["y"] = values
    return record


UNCUT = [
    ({"x": X, "o": SimpleNamespace(w=X)}, r"`batch\['o'\].w`, which is as long as"),
    ({"x": X, "o": deque([SimpleNamespace(w=[X])])}, r"`batch\['o'\]\[0\].w\[0\]`, which is as long as"),
    ({"x": X, "o": [_cached(X)]}, r"`batch\['o'\]\[0\].cache\['y'\]`, which is as long as"),
    ({"x": X, "s": torch.eye(4).to_sparse()}, r"`batch\['s'\]` is a tensor of the layout sparse_coo"),
]


@pytest.mark.parametrize(("batch", "message"), UNCUT)
def test_tensors_that_are_not_cut_are_refused(batch: Any, message: str) -> None:
    """Every micro-batch had all samples, without an error."""
    with pytest.raises(ValueError, match=message):
        split_batch(batch, 2)
    assert split_batch(batch, 1) == [batch]
    assert len(split_batch({"x": torch.zeros(5), "o": SimpleNamespace(w=X)}, 2)) == 2


@pytest.mark.parametrize("layout", ["sparse_coo", "csr", "csc", "nested", "jagged"])
def test_digests_tell_sparse_and_nested_batches_apart(layout: str) -> None:
    def make(value: float) -> torch.Tensor:
        dense = torch.tensor([[1.0, 0.0], [0.0, value]])
        if layout in ("nested", "jagged"):
            return torch.nested.nested_tensor(
                [dense[0], dense[1][:1]] if value == 2 else [dense[0], dense[1]],
                layout=torch.jagged if layout == "jagged" else torch.strided,
            )
        return {"sparse_coo": dense.to_sparse, "csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc}[layout]()

    assert batch_digest([make(1.0)]) == batch_digest([make(1.0)])
    assert batch_digest([make(1.0)]) != batch_digest([make(2.0)])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(4), "y": torch.zeros(2)}, r"`batch\['x'\]` has 4, `batch\['y'\]` has 2"),
        ({"rate": 3}, "this one has none"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_batch(batch, 4)


def test_digest_and_shapes_tell_batches_apart() -> None:
    x = torch.arange(6.0).view(3, 2)
    assert batch_digest([x]) == batch_digest((x.clone(),))
    assert batch_digest(x) != batch_digest(x.flip(0))
    assert shapes_of({"x": x}) == shapes_of({"x": x + 1})
    assert shapes_of({"x": x}) != shapes_of({"x": x[:2]})


def _device_digest(tensor: torch.Tensor) -> int:
    with SimulatedDevice():
        return batch_digest(tensor.to("cuda"))


def test_digests_of_tensors_on_a_device_depend_on_values_and_their_order() -> None:
    values = torch.arange(3 * 8191 + 5)
    for dtype in (torch.float32, torch.int64, torch.uint8, torch.bfloat16, torch.bool):
        x = (values[:2501] % 3).to(dtype)
        assert _device_digest(x) == _device_digest(torch.cat([x[:1], x])[1:])  # wherever it lies in its storage
        assert _device_digest(x) != _device_digest(x.flip(0))
    for first, second in ((0, 1), (3, 8190), (1, 2 * 8191), (8192, 3 * 8191 + 4)):
        other = values.float()
        other[[first, second]] = other[[second, first]]
        assert _device_digest(other) != _device_digest(values.float())
    assert _device_digest(torch.zeros(0)) != _device_digest(torch.ones(1))


class _NewBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the memory that operations take."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {one.untyped_storage().data_ptr() for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
        out = func(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in before:
            self.total += out.nbytes
        return out


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_digest_on_a_device_takes_little_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2**22, dtype=dtype)
    with _NewBytes() as new:
        _weighted_sum(tensor)
    assert new.total < 2**20  # beside int64 copies of pieces, inside of one operation


FOUR = [torch.zeros(5)] * 4


@pytest.mark.parametrize(
    ("batch", "size", "found"),
    [
        (FOUR, 4, ("batch", 4, 5)),
        ({"ids": FOUR, "labels": FOUR}, 4, ("batch['ids']", 4, 5)),
        ({"ids": FOUR, "labels": FOUR}, None, ("batch['ids']", 4, 5)),
        ([FOUR, FOUR], None, ("batch[0]", 4, 5)),
        (FOUR, None, None),  # four tensors of five samples
        (FOUR, 5, None),
        (FOUR[:2], 20, None),
        ([FOUR, torch.zeros(5)], None, None),  # the labels of five samples
        ({"ids": FOUR[:3], "labels": FOUR}, None, None),
        ([torch.zeros(4)] * 4, 4, None),
        ({"ids": torch.zeros(4, 5)}, 4, None),
    ],
)
def test_a_list_with_a_tensor_for_each_sample_is_found(batch: Any, size: Any, found: Any) -> None:
    assert list_of_samples(batch, size) == found
