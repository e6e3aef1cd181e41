"""What layers cost."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import Pipeline
from lightning_zero.parallel.pipeline.schedule.costs import count_flops, measure_time
from lightning_zero.parallel.pipeline.stages.split import costed_layers, split_module
from tests.references import VOCAB, WIDTH, TinyGPT

CPU = torch.device("cpu")


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1.0)
        time.sleep(self.seconds)
        return self.linear(x)  # type: ignore[no-any-return]


def model(*blocks: nn.Module) -> tuple[nn.Module, list[str], Any]:
    module = TinyGPT(blocks=blocks)
    ids = torch.arange(6).view(2, 3) % VOCAB
    return module, costed_layers(module, Pipeline(stages=2, module="blocks")), lambda: module(ids)


@pytest.mark.alone
def test_a_slow_block_costs_what_it_takes() -> None:
    module, names, run = model(Slow(0.0), Slow(0.0), Slow(0.02))
    costs = dict(zip(names, measure_time(module, names, run, CPU), strict=True))
    assert names == ["embedding", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    assert costs["blocks.2"] > 20_000_000
    assert sum(costs.values()) < 2 * costs["blocks.2"]
    split = split_module(module, Pipeline(stages=2, module="blocks", partition="measured"), costs)
    assert split.bounds == (0, 2, 3)


def test_operations_are_those_of_the_matrix_products() -> None:
    module, names, run = model(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))
    costs = dict(zip(names, count_flops(module, names, run, CPU), strict=True))
    linear = 2 * 6 * WIDTH * WIDTH
    assert costs == {
        "embedding": 0,
        "blocks.0": linear,
        "blocks.1": 3 * linear,
        "norm": 0,
        "head": 2 * 6 * WIDTH * VOCAB,
    }


def test_measuring_leaves_no_trace() -> None:
    module, names, run = model(Slow(0.0), nn.Dropout(0.5), Slow(0.0))
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    measure_time(module, names, run, CPU)
    count_flops(module, names, run, CPU)
    assert torch.equal(torch.rand(3), expected)
    assert all(not buffer.any() for buffer in module.buffers())
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    assert all(param.grad is None for param in module.parameters())


def test_what_cannot_be_measured_is_refused() -> None:
    module, names, run = model(Slow(0.0), Slow(0.0))
    with pytest.raises(ValueError, match="`embedding` is not called in a step"):
        measure_time(module, names, lambda: None, CPU)
    with pytest.raises(ValueError, match="`embedding.weight` is on the meta device"):
        count_flops(module.to("meta"), names, run, CPU)
