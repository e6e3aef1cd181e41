"""The scalars, histograms and the layout of layers with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from lightning_zero.lightning.expert_scalars import ExpertScalars
from lightning_zero.moe import MoE

WIDTH, EXPERTS = 4, 4


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moe = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), EXPERTS, k=1)

    def forward(self, x: Tensor) -> Any:
        return self.moe(x)


def _trainer(*loggers: Any) -> Any:
    strategy = Mock(root_device=torch.device("cpu"), reduce=lambda tensor, group, reduce_op: tensor)
    return Mock(strategy=strategy, loggers=list(loggers), is_global_zero=True)


def test_a_row_has_the_scalars_of_each_layer_and_tensorboard_a_histogram(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger, module = TensorBoardLogger(str(tmp_path)), Module()
    scalars = ExpertScalars(_trainer(logger, Mock()), module, has_stages=False)
    counts = []
    for step in range(2):
        scalars.count(True)
        counts.append(module(torch.randn(12, WIDTH))[2])
        scalars.count(False)
        module(torch.randn(12, WIDTH))
        row = scalars.row(step)
        names = {f"moe/moe/{name}" for name in ("load_max_over_mean", "dropped", "router_entropy", "aux_loss")}
        assert row.keys() == names
        assert row["moe/moe/load_max_over_mean"] == pytest.approx(float(counts[-1].max()) / 3)
        assert row["moe/moe/dropped"] == 0.0
    assert scalars.row(2) == {}
    scalars.stop()
    logger.save()
    events = accumulator.EventAccumulator(logger.log_dir, {"tensors": 0, "histograms": 0}).Reload()
    histograms = events.Histograms("moe/moe/load")
    for one, count in zip(histograms, counts, strict=True):
        # TensorBoard's buckets with nothing in a row are one.
        value = one.histogram_value
        limits = dict(zip(value.bucket_limit, value.bucket, strict=True))
        found = [limits.get(number + 0.5, 0.0) for number in range(EXPERTS)]
        assert found == pytest.approx((count / 3).tolist())
    assert "custom_scalars__config__" in events.Tags()["tensors"]
    assert len(events.Tensors("custom_scalars__config__")) == 1
