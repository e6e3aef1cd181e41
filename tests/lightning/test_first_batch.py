from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.lightning.first_batch import first_batch, step_arguments
from lightning_zero.trees import tree_leaves


class Kept(LightningModule):
    """Keeps its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.batch: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batch = batch
        return self.layer(tree_leaves(batch)[0][:, None]).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _loader(start: int, batch_size: int = 2) -> DataLoader[Tensor]:
    return DataLoader(torch.arange(start, start + 4.0), batch_size=batch_size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: _loader(0),
        lambda: {"a": _loader(0), "b": [_loader(10), _loader(20, 1)]},
        lambda: [_loader(0), _loader(10)],
        lambda: CombinedLoader({"a": _loader(0), "b": _loader(10)}, "max_size"),
        lambda: CombinedLoader([_loader(0), _loader(10, 1)], "min_size"),
    ],
    ids=["loader", "dict", "list", "largest", "smallest"],
)
def test_the_first_batch_is_that_of_a_fit(make: Any) -> None:
    module = Kept()
    options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(accelerator="cpu", devices=1, max_steps=1, enable_model_summary=False, **options).fit(module, make())
        assert str(first_batch(make())) == str(module.batch)


def test_a_loader_without_a_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no batch"):
        first_batch(DataLoader([]))


class Steps(LightningModule):
    def plain(self, batch: Any) -> None: ...

    def indexed(self, batch: Any, number: int) -> None: ...

    def named(self, *, batch_idx: int = 0) -> None: ...

    def other(self, batch: Any, *rest: Any) -> None: ...


@pytest.mark.parametrize(("name", "expected"), [("plain", 1), ("indexed", 2), ("named", 1), ("other", 2)])
def test_a_step_gets_the_number_of_its_batch_if_it_takes_it(name: str, expected: int) -> None:
    assert step_arguments(getattr(Steps(), name), "batch") == ("batch", 0)[:expected]
