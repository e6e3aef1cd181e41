"""A checkpoint of any number of pipeline stages is read by any other, to the bit."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_zero.config import Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.checkpoint import programs
from tests.contracts.test_pipeline_parity import BATCH, LanguageModel, loader
from tests.contracts.test_pipeline_programs import Dropout, _loader
from tests.lightning_programs import seeded, trainer
from tests.sampling import sample
from tests.worlds import run

STEPS = 3  # of an epoch


class Held(Callback):
    """Remembers what the ranks hold when training begins."""

    def __init__(self) -> None:
        self.values: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.values = held(trainer)


def held(lightning: Any) -> Any:
    return programs.held(lightning.strategy.engine, lightning.optimizers[0])


class WithBuffer(LanguageModel):
    """Counts its steps in a buffer of the last block, which the last stage alone computes."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__("adamw", tied=tied)
        block = self.net.blocks[-1]
        block.register_buffer("calls", torch.zeros(()))
        block.register_forward_hook(_count)


def _count(module: nn.Module, args: Any, output: Any) -> None:
    module.calls.add_(1.0)


def _fit(
    rank: int,
    world: int,
    stages: int,
    zero: int,
    kind: str,
    epochs: int,
    tied: bool,
    save: str | None,
    load: str | None,
) -> Any:
    pipeline = Pipeline(stages=stages, microbatches=4, schedule="interleaved_1f1b" if stages == 2 else "1f1b")
    strategy = ZeroStrategy(stage=zero, pipeline=pipeline, state_dict_type=kind)
    copies = world // stages
    module = seeded(lambda: WithBuffer(tied=tied)) if load is None else WithBuffer(tied=tied)
    found = Held()
    lightning = trainer(rank, world, strategy, max_epochs=epochs, accumulate_grad_batches=2, callbacks=[found])
    train = loader(copies, rank % copies, 2 * STEPS * BATCH * 2, 2 * BATCH // copies)
    lightning.fit(module, train, ckpt_path=load)
    now = held(lightning)
    if save is not None:
        lightning.save_checkpoint(save)
    weights = {name: strategy.full_param(param) for name, param in module.named_parameters()}
    has_block = rank // copies == stages - 1
    return found.values, now, weights, float(module.net.blocks[-1].calls) if has_block else None


PATHS = [(2, 4, 1), (4, 2, 1), (1, 2, 4), (2, 1, 4)]


@pytest.mark.parametrize("kind", sample(("sharded", "full"), "sharded"))
@pytest.mark.parametrize("zero", sample((1, 2, 3), 1))
@pytest.mark.parametrize("copies", sample((1, 2), 1))
@pytest.mark.parametrize("stages", sample(PATHS, (2, 4, 1)), ids=lambda stages: "to".join(map(str, stages)))
def test_resume_at_another_number_of_stages_is_exact(
    kind: str, zero: int, copies: int, stages: tuple[int, ...], tmp_path: Path
) -> None:
    path, tied = None, True
    expected: Any = None
    for number, count in enumerate(stages):
        if count * copies > 4 and len(stages) > 3:
            continue
        to = str(tmp_path / f"{number}.ckpt")
        outcomes = run(_fit, count * copies, count, zero, kind, number + 1, tied, to, path, timeout_s=120.0)
        found = programs.whole([start for start, _, _, _ in outcomes])
        if expected is not None:
            assert found.keys() == expected.keys()
            for name, slots in expected.items():
                assert found[name].keys() == slots.keys(), name
                assert all(torch.equal(found[name][slot], value) for slot, value in slots.items()), name
        expected = programs.whole([end for _, end, _, _ in outcomes])
        path = to
    if copies == 1 and len(stages) == 3:
        assert outcomes[-1][3] == 2 * STEPS * (4 + 4 + 1)  # calls of the last block in three epochs
    plain = run(_fit, copies, 1, zero, kind, len(stages), tied, None, None, timeout_s=120.0)
    for name, value in plain[0][2].items():
        torch.testing.assert_close(outcomes[0][2][name], value, rtol=0, atol=1e-6, msg=name)


def _warn(rank: int, world: int, path: str) -> None:
    message = r"with 2 pipeline stages \(4 chunks\) and is resumed with 2 pipeline stages \(2 chunks\)"
    with pytest.warns(UserWarning, match=message) if rank == 0 else nullcontext():
        _fit_dropout(rank, world, "1f1b", 2, None, path)


def _fit_dropout(rank: int, world: int, schedule: Any, epochs: int, save: str | None, load: str | None) -> Any:
    pipeline = Pipeline(stages=2, microbatches=4, schedule=schedule)
    strategy = ZeroStrategy(stage=2, pipeline=pipeline)
    lightning = trainer(rank, world, strategy, max_epochs=epochs)
    module = seeded(Dropout)
    lightning.fit(module, _loader(1, 0), ckpt_path=load)
    if save is not None:
        lightning.save_checkpoint(save)
    return {name: strategy.full_param(param) for name, param in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"])
def test_dropout_goes_on_where_it_was(schedule: str, tmp_path: Path) -> None:
    path = str(tmp_path / "dropout.ckpt")
    whole = run(_fit_dropout, 2, schedule, 2, None, None)[0]
    half = run(_fit_dropout, 2, schedule, 1, path, None)[0]
    resumed = run(_fit_dropout, 2, schedule, 2, None, path)[0]
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    assert not any(torch.equal(half[name], value) for name, value in whole.items() if "weight" in name)
    if schedule == "interleaved_1f1b":
        run(_warn, 2, path)
