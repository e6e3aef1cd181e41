"""Entries beside the loss."""

from __future__ import annotations

import torch

from lightning_zero.lightning.step_outputs import joined_outputs, nbytes_of


def test_entries_of_micro_batches_are_those_of_the_batch() -> None:
    outputs = [
        {"loss": 0, "mean": torch.tensor(3.0), "number": 3.0, "samples": torch.zeros(2, 1), "items": ["a", "b"],
         "count": 2, "other": torch.zeros(3), "some": 1.0},
        {"loss": 0, "mean": torch.tensor(0.0), "number": 0.0, "samples": torch.ones(1, 1), "items": ["c"],
         "count": 1, "other": torch.zeros(3)},
    ]  # fmt: skip
    found, left_out = joined_outputs(outputs, [2, 1])
    assert (found["mean"].item(), found["number"], found["items"]) == (2.0, 2.0, ["a", "b", "c"])
    assert found["samples"].tolist() == [[0.0], [0.0], [1.0]]
    assert left_out == ["count", "other", "some"]


def test_entries_of_one_micro_batch_are_as_they_are() -> None:
    output = {"loss": 0, "count": 2, "nested": {"x": torch.zeros(3)}}
    assert joined_outputs([output], [1]) == ({"count": 2, "nested": output["nested"]}, [])
    assert nbytes_of(output["nested"]) == 12
