from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_zero import FlopsProfile, Pipeline, ZeroStrategy
from lightning_zero.lightning import flops
from lightning_zero.lightning.flops import FlopCount, StepFlops, peak_flops
from tests.contracts.test_pipeline_models import InParts
from tests.contracts.test_pipeline_models import _loader as samples
from tests.lightning_programs import Net, loader, trainer
from tests.worlds import run

WIDTH, ROWS = 8, 4
PRODUCT = 2 * ROWS * WIDTH * WIDTH


class Two(nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.recomputes:
            return checkpoint(self._rest, x, use_reentrant=False)
        return self._rest(x)

    def _rest(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x))


def test_operations_are_those_of_pytorch_by_module() -> None:
    module, x = Two(), torch.ones(ROWS, WIDTH)
    with FlopCounterMode(display=False) as expected:
        module(x).sum().backward()
    with FlopCount() as count:
        module(x).sum().backward()
    assert (count.forward, count.backward, count.recomputed) == (2 * PRODUCT, 3 * PRODUCT, 0)
    assert count.model == expected.get_total_flops()
    assert count.by_module == {module: 2 * PRODUCT, module.first: PRODUCT, module.second: PRODUCT}


def test_recomputation_is_apart_and_pauses_count_nothing() -> None:
    module, x = Two(recomputes=True), torch.ones(ROWS, WIDTH)
    with FlopCount() as count:
        module(x).sum().backward()
        count.is_paused = True
        module(x)
        count.is_paused = False
    assert (count.forward, count.backward, count.recomputed) == (2 * PRODUCT, 3 * PRODUCT, PRODUCT)
    with pytest.raises(RuntimeError), FlopCount():
        module(torch.ones(ROWS, WIDTH + 1))
    assert len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()) == 0


def _profiled(rank: int, world: int, stage: int, options: dict[str, Any], more: dict[str, Any]) -> Any:
    shown: list[str] = []
    flops.rank_zero_info = shown.append  # type: ignore[assignment]
    profile = FlopsProfile(**options)
    fit = trainer(rank, world, ZeroStrategy(stage=stage, **more), max_epochs=1, callbacks=[profile])
    fit.fit(Net(), loader(rank, world), loader(rank, world))
    assert profile.count is not None
    return shown, profile.count.forward, profile.count.backward, profile.count.recomputed


def _net_flops(batch: int = 4) -> int:
    return 2 * batch * (4 * 6 + 2 * 6 * 6 + 6 * 3)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_is_printed_once(stage: int) -> None:
    for shown, forward, backward, recomputed in run(_profiled, 2, stage, {"step": 2}, {}):
        assert (forward, recomputed) == (_net_flops(), 0)
        assert backward == 2 * forward - 2 * 4 * 4 * 6  # the first layer has no gradient of its input
        (text,) = shown
        head, columns, *rows = text.splitlines()
        assert head.startswith("GFLOP of a training step of this rank: forward ")
        assert columns.split() == ["module", "class", "parameters", "forward", "GFLOP", "share"]
        assert [row.split()[:3] for row in rows[:2]] == [["(all)", "Net", "159"], ["first", "Linear", "30"]]
        assert [row.split()[-1] for row in rows][0] == "100.0%"


def test_recomputed_blocks_and_levels() -> None:
    for shown, forward, _, recomputed in run(_profiled, 2, 3, {"depth": 1}, {"activation_checkpointing": True}):
        assert forward == _net_flops()
        assert recomputed == 2 * 4 * 2 * 6 * 6
        assert "recomputed" in shown[0]
        assert "blocks.0" not in shown[0]


@pytest.mark.parametrize("option", ["step", "depth"])
def test_bad_options_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"`{option}=0` must be 1 or more"):
        FlopsProfile(**{option: 0})
    with pytest.raises(TypeError, match="Use a number"):
        FlopsProfile(**{option: "all"})  # type: ignore[arg-type]


def test_products_of_optimizers_are_none_of_the_model() -> None:
    x = torch.ones(ROWS, WIDTH)
    with FlopCount() as count:
        with torch.no_grad():
            x @ torch.ones(WIDTH, WIDTH)  # as Muon's
            Two()(x)  # a frozen teacher
        x @ torch.ones(WIDTH, WIDTH)
    assert (count.forward, count.other, count.backward) == (3 * PRODUCT, PRODUCT, 0)


def test_compiled_code_runs_as_it_is_and_stays_compiled() -> None:
    calls: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph(*args)

        return run

    module = torch.compile(Two(), backend=backend)
    x = torch.ones(ROWS, WIDTH)
    with FlopCount() as count:
        module(x)
    assert (count.forward, calls) == (2 * PRODUCT, [])
    module(x)
    assert calls == [1]


def test_callbacks_that_count_the_same_step_end_in_any_order() -> None:
    flags = torch.utils._python_dispatch._is_in_torch_dispatch_mode
    first, second = StepFlops(), StepFlops()
    first.begin(0)
    second.begin(0)
    assert first.count is second.count
    Two()(torch.ones(ROWS, WIDTH))
    assert first.end(1)
    assert second.end(1)
    assert not second.end(2)
    assert first.count is not None
    assert first.count.forward == 2 * PRODUCT
    assert torch.utils._python_dispatch._is_in_torch_dispatch_mode == flags
    assert len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()) == 0


def test_a_step_that_was_not_made_is_said() -> None:
    profile = FlopsProfile(step=99)
    with pytest.warns(UserWarning, match=r"`FlopsProfile\(step=99\)` has counted nothing: the fit made 8 step"):
        trainer(0, 1, "auto", devices=1, max_epochs=1, callbacks=[profile]).fit(Net(), loader(0, 1))


class Fails(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            raise KeyError("labels")
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_nothing_is_counted_behind_an_error() -> None:
    with pytest.raises(KeyError):
        trainer(0, 1, "auto", devices=1, callbacks=[FlopsProfile()]).fit(Fails(), loader(0, 1))
    assert len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()) == 0


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_flops(torch.device("cpu"), "bf16-mixed") is None


@pytest.mark.parametrize("name", ["NVIDIA L40S", "NVIDIA H100 NVL", "NVIDIA GeForce RTX 3090", "NVIDIA RTX A6000"])
def test_peaks_that_the_table_has_wrong_are_not_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (torch.cuda, torch.get_device_module("cuda")):
        monkeypatch.setattr(room, "get_device_name", lambda device=None: name)
    with pytest.warns(UserWarning, match=rf"the peak of `{name}` .* is not known. Give it"):
        assert peak_flops(torch.device("cuda"), "bf16-mixed") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
    assert peak_flops(torch.device("cuda"), "bf16-mixed") == 989.4e12


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H200", 989.5e12), ("NVIDIA H200 NVL", 835.5e12)])
def test_the_peak_of_an_h200_is_that_without_sparsity(name: str, peak: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    assert peak_flops(torch.device("cuda"), "bf16-mixed") == peak
    assert peak_flops(torch.device("cuda"), "32-true") == (67e12 if name == "NVIDIA H200" else 60e12)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 494.7e12),
        ("NVIDIA H200 NVL", 417.5e12),
        ("NVIDIA A100-SXM4-80GB", 156e12),
        ("Tesla V100-SXM2-16GB", 15.7e12),
    ],
)
def test_the_peak_is_that_of_tf32_where_the_program_allows_it(
    name: str, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.get_float32_matmul_precision`, which Lightning calls, fails with the newer setting."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7 if "V100" in name else 8, 0))
    before, torch.backends.cuda.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision, "tf32"
    try:
        assert peak_flops(torch.device("cuda"), "32-true") == peak
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert torch.get_float32_matmul_precision() == "highest"


def _staged(rank: int, world: int, step: int, schedule: Any = "1f1b") -> tuple[int, int, int]:
    profile = FlopsProfile(step=step)
    strategy = ZeroStrategy(stage=1, pipeline=Pipeline(stages=2, microbatches=2, schedule=schedule))
    fit = trainer(rank, world, strategy, max_epochs=2, callbacks=[profile])
    fit.fit(InParts(), samples(1, 0, 8))
    assert profile.count is not None
    return profile.count.forward, profile.count.backward, profile.count.other


def test_a_step_in_a_pipeline_is_counted_without_its_description() -> None:
    """The first step of a kind runs once more, with values, where it is written in parts."""
    first, second = run(_staged, 2, 1), run(_staged, 2, 2)
    assert first[0] == second[0]
    assert first[0][0] > 0


def test_gradients_of_weights_that_are_computed_later_are_those_of_the_backward() -> None:
    """They counted as the optimizer's, and the rate of the model was a third too low."""
    assert run(_staged, 2, 1, "zb_h1") == run(_staged, 2, 1, "1f1b")
