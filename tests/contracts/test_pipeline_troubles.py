"""A stage that fails or is killed, at any point of a batch, ends every rank soon and with the cause."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_zero.config import Pipeline, Schedule
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.pipeline.pipeline import PipelineRunner
from lightning_zero.parallel.pipeline.schedule.plan import compute_order, simulate
from tests.contracts.test_pipeline_programs import ON_ONE_STAGE, Program, _loader
from tests.contracts.test_pipeline_programs import _name as name_of_program
from tests.lightning_programs import trainer
from tests.sampling import sample

BOUND_S = 10.0
STAGES = MICROBATCHES = 2
CHUNKS: dict[Schedule, int] = {"gpipe": 2, "1f1b": 2, "interleaved_1f1b": 4, "zb_h1": 2}
DOINGS = {"forward": "_forward", "backward": "_backward", "backward_input": "_backward", "backward_weight": "_backward",
          "recv_input": "_receive", "recv_gradient": "_receive"}  # fmt: skip


def _actions(schedule: Schedule, stage: int) -> list[Any]:
    orders = compute_order(schedule, STAGES, CHUNKS[schedule], MICROBATCHES)
    return [one for one in simulate(orders, CHUNKS[schedule])[0][stage] if one.kind in DOINGS]


def _fail(folder: str, how: str) -> NoReturn:
    Path(folder, "failed").write_text(str(time.time()))
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("the error of the stage")


def _run(rank: int, schedule: Schedule, stage: int, number: int, how: str, folder: str) -> None:
    """Fit; one stage fails at an action of its second batch."""
    store = dist.FileStore(f"{folder}/store", STAGES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=STAGES, timeout=timedelta(seconds=60))
    pipeline = Pipeline(stages=STAGES, microbatches=MICROBATCHES, schedule=schedule)
    strategy = ZeroStrategy(stage=3, pipeline=pipeline, timeout=60)
    left = len(_actions(schedule, stage)) + number

    def failing(method: Any) -> Any:
        def call(runner: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if rank == stage:
                if left == 0:
                    _fail(folder, how)
                left -= 1
            return method(runner, *args, **kwargs)

        return call

    try:
        names = set(DOINGS.values())
        with mock.patch.multiple(PipelineRunner, **{name: failing(getattr(PipelineRunner, name)) for name in names}):
            trainer(rank, STAGES, strategy, max_epochs=4).fit(Program(), _loader(1, 0))
        text = "no error"
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
    Path(folder, f"end{rank}").write_text(text)
    os._exit(1)


def _ends(folder: Path, target: Callable[..., None], *args: Any) -> tuple[list[str], float]:
    """Return what the ranks ended with, and how long after the failure the last did."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "lightning_zero", "tests.worlds"])
    processes = [context.Process(target=target, args=(rank, *args, str(folder))) for rank in range(STAGES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    ended = time.time()
    for process in processes:
        process.kill()
    ends = [folder / f"end{rank}" for rank in range(STAGES)]
    return [path.read_text() if path.exists() else "" for path in ends], ended - float((folder / "failed").read_text())


CASES = [
    (schedule, stage, number, how)
    for schedule in CHUNKS
    for stage in range(STAGES)
    for number in range(len(_actions(schedule, stage)))
    for how in ("raises", "killed")
]


def _name(case: Any) -> str:
    schedule, stage, number, how = case
    action = _actions(schedule, stage)[number]
    return f"{schedule}-stage{stage}-{action.kind}-chunk{action.chunk}-{action.microbatch}-{how}"


@pytest.mark.parametrize("case", sample(CASES, ("1f1b", 1, 1, "raises"), ("zb_h1", 0, 3, "killed")), ids=_name)
def test_every_rank_ends_soon_with_the_cause(case: Any, tmp_path: Path) -> None:
    _, stage, _, how = case
    ends, lasted = _ends(tmp_path, _run, *case)
    assert lasted < BOUND_S
    other = ends[1 - stage]
    if how == "killed":
        assert f"rank {stage}" in other
        assert "ended from outside (killed, out of memory)" in other
    else:
        assert "ValueError: the error of the stage" in ends[stage]
        assert f"first error was on rank {stage}: ValueError: the error of the stage" in other
    assert "gloo" not in other.partition("The transport says: ")[0]


# -- Refusals of one stage ---------------------------------------------------------------------------------------------


class RaisesInBackward(Program):
    """Raises in the last backward of its second batch, while the last stage waits to sum the gradient of both."""

    def __init__(self) -> None:
        super().__init__()
        self.net.head.weight = self.net.embedding.weight
        self.calls = 0
        self.net.blocks[0].up.weight.register_hook(self._raise)

    def _raise(self, grad: Tensor) -> None:
        self.calls += 1
        if self.calls == 2 * MICROBATCHES:
            raise ValueError("the error of a hook")


class _Notes(Callback):
    """Notes when the first rank fails."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, "failed")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if not self._path.exists():
            self._path.write_text(str(time.time()))


def _fit_refused(rank: int, make: Any, zero: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", STAGES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=STAGES, timeout=timedelta(seconds=60))
    strategy = ZeroStrategy(stage=zero, pipeline=Pipeline(stages=STAGES), timeout=60)  # type: ignore[arg-type]
    try:
        trainer(rank, STAGES, strategy, max_epochs=1, callbacks=[_Notes(folder)]).fit(make(), _loader(1, 0))
        text = "no error"
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
    Path(folder, f"end{rank}").write_text(text)
    os._exit(1)


REFUSALS = [*ON_ONE_STAGE, (RaisesInBackward, "the error of a hook")]


@pytest.mark.parametrize("zero", sample((1, 3), 3))
@pytest.mark.parametrize("case", sample(REFUSALS, ON_ONE_STAGE[0], REFUSALS[-1]), ids=name_of_program)
def test_every_rank_ends_with_what_one_stage_refuses(case: tuple[Any, str], zero: int, tmp_path: Path) -> None:
    make, message = case
    ends, lasted = _ends(tmp_path, _fit_refused, make, zero)
    assert lasted < BOUND_S
    has_raised = [re.search(r"(?m)^lightning_zero\.errors\.PipelineError: |^ValueError: ", text) for text in ends]
    assert any(has_raised)
    for text, own in zip(ends, has_raised, strict=True):
        assert message in text
        assert own or re.search(r"first error was on rank \d: (PipelineError|ValueError): ", text)
        assert not re.search("gloo|Connection closed|Connection reset", text)
