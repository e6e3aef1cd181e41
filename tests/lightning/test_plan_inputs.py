from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero.config import Pipeline
from lightning_zero.forecast.rehearsal import pretended_world
from lightning_zero.lightning.layer_costs import layer_costs
from lightning_zero.lightning.plan_inputs import call_for_plan, without_collectives


class Numbers(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(12.0).view(4, 3)


class Program(LightningModule):
    """Uses its Trainer in a step, and notes its batches."""

    def __init__(self, example: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.example_input_array = example
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.seen.append(x)
        return self.linear(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch).mean()
        self.log("loss", loss, sync_dist=True)
        self.trainer.strategy.barrier()
        assert self.trainer.strategy.reduce(loss) is loss
        assert self.trainer.strategy.broadcast(3) == 3
        assert self.trainer.world_size == 1
        assert self.all_gather(loss).shape == (1,)
        return loss


def _seen(module: Program, data: Any) -> Tensor:
    _fit(module, data)
    call_for_plan(module)(module)
    (batch,) = module.seen
    return batch


def _fit(module: Program, data: Any) -> None:
    """Give a module a Trainer that is about to fit it."""
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_steps=1)
    module.trainer = trainer
    trainer.state.fn = "fit"  # type: ignore[assignment]
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, train_dataloaders=data)


def test_two_samples_of_a_data_set_are_the_batch() -> None:
    rows = torch.arange(12.0).view(4, 3)
    loader = DataLoader(rows, batch_size=1, shuffle=True)  # type: ignore[arg-type]
    assert torch.equal(_seen(Program(), loader), rows[:2])


def test_the_first_batch_of_a_stream_is_taken() -> None:
    assert torch.equal(_seen(Program(), DataLoader(Numbers(), batch_size=3)), torch.arange(9.0).view(3, 3))


class WithoutNumber(Program):
    def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        loss: Tensor = self(batch).mean()
        return loss


def test_a_step_may_take_no_number_of_its_batch() -> None:
    assert torch.equal(_seen(WithoutNumber(), DataLoader(torch.ones(6, 3), batch_size=2)), torch.ones(2, 3))  # type: ignore[arg-type]


def test_layers_are_costed_with_a_step_that_takes_no_number_of_its_batch() -> None:
    module = WithoutNumber()
    module.linear = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))  # type: ignore[assignment]
    _fit(module, DataLoader(torch.ones(4, 3), batch_size=4))  # type: ignore[arg-type]
    pipeline = Pipeline(stages=2, module="linear", microbatches=2, partition="flops")
    with pretended_world(2):
        costs = layer_costs(module, pipeline, torch.device("cpu"), nullcontext)
    assert costs == {"linear.0": 2 * 2 * 9, "linear.1": 2 * 2 * 9}


def test_an_example_goes_before_data() -> None:
    example = torch.ones(2, 3)
    assert _seen(Program((example,)), None) is example


def test_steps_run_behind_an_example() -> None:
    """They may read parameters that would be cut."""
    rows = torch.arange(12.0).view(4, 3)
    module = Program((torch.ones(2, 3),))
    with pytest.raises(ValueError, match="too many values"):
        _seen(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    assert torch.equal(module.seen[1], rows[:2])


class Manual(Program):
    """Reads and sets options of two optimizers, of which there are none yet."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first, second = self.optimizers()  # type: ignore[attr-defined]
        loss: Tensor = self(batch).mean()
        group = first.param_groups[0]
        assert f"{group['lr']:.2e}"
        group["lr"] = 0.5 * group["lr"] if group["lr"] > 0 else 0.1
        self.manual_backward(loss * group["lr"] + group["weight_decay"] * loss)
        for one in (first, second):
            one.step()
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step(self.trainer.callback_metrics.get("loss", 0))
            self.seen.append(batch)
        del group["momentum"]
        return loss


def test_options_of_optimizers_are_numbers_before_there_are_any() -> None:
    rows = torch.arange(12.0).view(4, 3)
    with pytest.raises(ValueError, match="too many values"):  # the forward, and the loop over schedulers
        _seen(module := Manual(), DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    assert len(module.seen) == 2


def test_metrics_and_collectives_meet_no_other_rank() -> None:
    with without_collectives():
        assert not dist.is_initialized()
        with pytest.raises(RuntimeError, match="calls a collective"):
            dist.all_reduce(torch.ones(1))
    assert dist.all_reduce is not None


def test_an_iterator_is_not_touched_and_the_error_names_the_remedy() -> None:
    batches = iter(DataLoader(Numbers(), batch_size=3))
    with pytest.raises(ValueError, match="its first batch would be lost.*example_input_array"):
        _seen(Program(), batches)
    assert len(list(batches)) == 2


class Stream(IterableDataset[Tensor]):
    """Goes on where it was."""

    def __init__(self) -> None:
        self.rows = iter(torch.arange(12.0).view(4, 3))

    def __iter__(self) -> Iterator[Tensor]:
        return self.rows


class Again:
    """A loader that goes on where it was."""

    def __init__(self) -> None:
        self.rows = iter(torch.arange(12.0).view(4, 1, 3))

    def __iter__(self) -> Iterator[Tensor]:
        return self.rows


@pytest.mark.parametrize("make", [lambda: DataLoader(Stream(), batch_size=2), Again])
def test_data_that_is_read_once_keeps_its_first_batch(make: Any) -> None:
    data = make()
    with pytest.raises(ValueError, match=r"its first batch would be lost\). Set its `example_input_array`"):
        _seen(Program(), data)
    assert torch.equal(next(iter(data))[0], torch.arange(3.0))
