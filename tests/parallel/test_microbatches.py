"""Batches in pieces."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_zero.parallel.microbatches import batch_digest, shapes_of, split_batch

Pair = namedtuple("Pair", "x y")


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


def test_user_dicts_keep_their_class() -> None:
    batch = UserDict(ids=torch.arange(4))
    pieces = split_batch(batch, 2)
    assert type(pieces[1]) is UserDict
    assert pieces[1]["ids"].tolist() == [2, 3]
    assert batch["ids"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(6, 2), r"`microbatches=4` does not divide a batch of 6 samples.*drop_last=True"),
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
