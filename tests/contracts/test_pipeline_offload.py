"""A pipeline whose stages offload, or defer their steps, makes the steps of one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zero.config import Offload, Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.contracts.test_pipeline_programs import Frozen, Functional, _loader
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run

PLACES: dict[str, dict[str, Any]] = {
    "optimizer": {"offload": "cpu"},
    "at-once": {"offload": "cpu", "step": "now"},
    "deferred": {"step": "deferred"},
    "params": {"offload": Offload(params="cpu")},
    "half": {"offload": Offload(fraction=0.5)},
}


def _fit(
    rank: int, world: int, make: Any, zero: int, precision: Any, options: Any, save: str | None, load: str | None
) -> Any:
    shared = ["net.embedding.weight"] if make is Functional else None
    pipeline = Pipeline(stages=2, microbatches=4, schedule="interleaved_1f1b", shared=shared)
    strategy = ZeroStrategy(stage=zero, pipeline=pipeline, **options)
    lightning = trainer(
        rank,
        world,
        strategy,
        precision=precision,
        max_epochs=2 if load is None else 3,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
    )
    module = seeded(make)
    lightning.fit(module, _loader(world // 2, rank % (world // 2), 8, 24 * world), ckpt_path=load)
    if save is not None:
        lightning.save_checkpoint(save)
    return {name: strategy.full_param(param) for name, param in module.named_parameters()}


CASES = [
    (make, zero, precision, places)
    for make in (Functional, Frozen)
    for zero in (0, 1, 2, 3)
    for precision in ("32-true", "16-true")
    for places in PLACES
    if (zero == 3 or places != "params") and (make is Functional or places == "optimizer")
]
KEPT = (Functional, 2, "16-true", "optimizer")


@pytest.mark.parametrize(
    "case", sample(CASES), ids=lambda case: f"{case[0].__name__}-zero{case[1]}-{case[2]}-{case[3]}"
)
def test_an_offloaded_pipeline_has_the_bits_of_one_that_is_not(case: Any, tmp_path: Path) -> None:
    make, zero, precision, places = case
    path = str(tmp_path / "offloaded.ckpt")
    expected = run(_fit, 4, make, zero, precision, {"step": "now"}, None, None)[0]
    for weights in run(_fit, 4, make, zero, precision, PLACES[places], path, None):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
    if case != KEPT:
        return
    resumed = run(_fit, 4, make, zero, precision, {"step": "now"}, None, path)[0]
    again = run(_fit, 4, make, zero, precision, PLACES[places], None, path)[0]
    assert all(torch.equal(again[name], value) for name, value in resumed.items())
