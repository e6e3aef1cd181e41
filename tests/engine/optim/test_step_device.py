"""Where an offloaded unit is stepped: chosen once, by rates, and with the bits of the processor that steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.comm.communicator import Communicator
from lightning_zero.config import Communication, Moments, Offload, StepTime
from lightning_zero.engine.buffers.home import Home
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.optim import step_device
from lightning_zero.engine.optim.moments import MOMENT_FORMATS
from lightning_zero.engine.optim.step_device import Rates, StepDevices, choose_step_device, measure_rates
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.storage.copies import Copies, Landing
from tests import worlds
from tests.contracts.test_offload import PRECISIONS, _loss, _trained, adamw
from tests.lightning_programs import Net, loader, seeded, trainer
from tests.references import TinyGPT, difference, token_loss, train, train_zero
from tests.sampling import sample

GB = 1e9
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("host_step", "up", "down", "expected"),
    [
        # 16 bytes of an element up (fp32 gradient, master, moments) and 12 down
        (1 * GB, 55 * GB, 55 * GB, "cuda"),  # 0.29 ns against 1 ns
        (4 * GB, 55 * GB, 55 * GB, "cpu"),  # against 0.25 ns
        (3 * GB, 55 * GB, 55 * GB, "cuda"),
        (3 * GB, 55 * GB, 20 * GB, "cpu"),  # the way down is slower
        (3 * GB, 20 * GB, 55 * GB, "cpu"),
        (1 * GB, 16 * GB, 100 * GB, "cpu"),  # as fast: no reason to stream
        (0.1 * GB, 3 * GB, 3 * GB, "cuda"),
    ],
)
def test_a_unit_is_stepped_where_it_is_sooner_done(host_step: float, up: float, down: float, expected: str) -> None:
    rates = Rates(host_step=host_step, up=up, down=down)
    for numel in (1, 1000, 10**9):
        assert choose_step_device(numel, 16 * numel, 12 * numel, rates) == expected


def test_rates_are_positive() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_zero.engine.optim.step_device._SAMPLE_NUMEL", 1000)
        rates = measure_rates(torch.device("cpu"))
    assert min(rates.host_step, rates.up, rates.down) > 0


# -- The choice --------------------------------------------------------------------------------------------------------


def _choices(rank: int, world: int, moments: Moments, host_step: float) -> tuple[dict[str, str], list[str]]:
    """Choose as on a CUDA device; rank 0 is twice as fast."""
    engine = ZeroEngine(2, units=["Block"], offload=Offload(fraction=0.6), moments=moments)
    engine.shard(TinyGPT())
    devices = StepDevices(engine.internals.fits.units, CUDA, MOMENT_FORMATS[moments])

    def measure(device: torch.device, meet: Callable[[], object]) -> Rates:
        assert device == CUDA
        meet()
        return Rates(host_step=host_step * (2 - rank), up=55 * GB, down=55 * GB)

    devices.choose(None, Communicator(Communication(), torch.device("cpu")), measure)
    return devices.chosen, devices.plan()


@pytest.mark.parametrize(("moments", "host_step", "expected"),
                         [("fp32", 1 * GB, "cuda"), ("fp32", 4 * GB, "cpu"), ("int8", 4 * GB, "cuda")])  # fmt: skip
def test_all_ranks_choose_by_the_rates_of_the_slowest(moments: Moments, host_step: float, expected: str) -> None:
    answers = worlds.run(_choices, 2, moments, host_step)
    for chosen, plan in answers:
        assert set(chosen.values()) == {expected}
        assert "(root)" not in chosen  # the first units stay on the device
        (line,) = plan
        assert f"{len(chosen)} on {expected} (measured: host {host_step / 1e9:.2f}e9 elements/s, up 55.0 GB/s" in line


def _measured_together(rank: int, world: int) -> tuple[list[int], list[str]]:
    """Measure; return how many ranks had begun each measured call when this one did, and the order of both."""
    communicator = Communicator(Communication(), torch.device("cpu"))
    begun: list[int] = []
    order: list[str] = []

    def meet(error: Exception | None = None) -> None:
        assert error is None
        order.append("meet")
        begun.append(sum(communicator.gather_objects(1, "ranks that begin")))

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (order.append("call"), call(*args, **kwargs))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_zero.engine.optim.step_device._SAMPLE_NUMEL", 1000)
        patch.setattr(step_device.adamw, "pytorch_step_", noted(step_device.adamw.pytorch_step_))
        for name in ("up", "down"):
            patch.setattr(Copies, name, noted(getattr(Copies, name)))
        measure_rates(torch.device("cpu"), meet)
    return begun, order


def test_ranks_begin_each_measured_call_together() -> None:
    assert worlds.run(_measured_together, 2) == [([2] * 9, ["meet", "call"] * 9)] * 2


def _one_cannot_measure(rank: int, world: int) -> str:
    engine = ZeroEngine(2, units=["Block"], offload="cpu")
    engine.shard(TinyGPT())

    def measure(device: torch.device, meet: Callable[..., object]) -> Rates:
        meet(MemoryError("no memory is left") if rank == 1 else None)
        raise AssertionError

    with pytest.raises(RuntimeError) as raised:
        StepDevices(engine.internals.fits.units, CUDA, MOMENT_FORMATS["fp32"]).choose(
            None, engine.internals.communicator, measure
        )
    return str(raised.value)


def test_a_rank_that_cannot_measure_ends_all_with_its_error() -> None:
    """The others waited for it until the timeout."""
    for text in worlds.run(_one_cannot_measure, 2):
        assert "on rank 1: no memory is left. Name the device: `Offload(step_device='cpu')`" in text


def _kept(rank: int, world: int, folder: str) -> None:
    path = f"{folder}/one.ckpt"
    first = trainer(rank, world, ZeroStrategy(stage=2, offload="cpu"), max_epochs=1)
    first.fit(seeded(Net), loader(rank, world))
    first.save_checkpoint(path)
    units = set(first.strategy.engine.internals.checkpoints.step_devices)  # type: ignore[attr-defined]
    assert units
    saved = torch.load(path, weights_only=True)["step_devices"]
    assert saved == dict.fromkeys(units, "cpu")
    used: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepDevices, "use", lambda self, chosen: used.append(chosen))
        again = trainer(rank, world, ZeroStrategy(stage=2, offload="cpu"), max_epochs=1)
        again.fit(seeded(Net), loader(rank, world), ckpt_path=path)
        assert used == [saved]
        used.clear()
        fixed = ZeroStrategy(stage=2, offload=Offload(step_device="cpu"))
        trainer(rank, world, fixed, max_epochs=1).fit(seeded(Net), loader(rank, world), ckpt_path=path)
        assert used == [dict.fromkeys(units, "cpu")]  # the option's, and not the checkpoint's


def test_the_choice_is_kept_in_checkpoints_and_used_again(tmp_path: Path) -> None:
    worlds.run(_kept, 2, str(tmp_path))


def _refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="`Offload.step_device='cuda'.` needs a model on a CUDA device, got `cpu`"):
        ZeroEngine(2, offload=Offload(step_device="cuda")).shard(nn.Linear(2, 2))
    engine = ZeroEngine(2, offload="cpu")
    engine.shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="`'tpu'` is not a device for the steps of unit"):
        engine.internals.checkpoints.use_step_devices(dict.fromkeys(engine.internals.checkpoints.step_devices, "tpu"))  # type: ignore[arg-type]
    assert engine.module is not None
    engine.attach(torch.optim.RMSprop(engine.module.parameters()))
    with pytest.raises(ValueError, match="`Offload.step_device='cuda'.` is for `torch.optim.AdamW`.*got `RMSprop`"):
        next(iter(engine._state.attached)).checks.require_runs("Offload(step_device='cuda')")


def test_devices_that_are_not_there_are_refused() -> None:
    worlds.run(_refused, 1)
    with pytest.raises(ValueError, match="`Offload.step_device='gpu'.` is not known"):
        Offload(step_device="gpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`optimizer=None` offloads none"):
        Offload(optimizer=None, params="cpu", step_device="cpu")


# -- Streaming ---------------------------------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {"offload": "cpu"},
    {"offload": "cpu", "step": "now"},
    {"offload": Offload(optimizer="cpu", params="cpu")},
]


def _streamed(rank: int, world: int, precision: str, streams: bool, moments: Moments) -> list[str]:
    """Step through the copies that a CUDA device needs, on a device that is the CPU."""
    expected = _trained(rank, world, 3, precision, "adamw", moments=moments)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if streams:
            patch.setattr(StepDevices, "choose", _choose_all)
        else:  # what the step rounds goes through memory on its way to the device
            patch.setattr(Home, "_can_round_in_place", lambda *args: False)
        for case in CASES:
            actual = _trained(rank, world, 3, precision, "adamw", moments=moments, **case)
            found.append(difference(actual, expected))
    return found


class _Late(Landing):
    """A copy that is made when somebody waits for it, and no earlier."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        super().__init__()
        self._copy: tuple[torch.Tensor, torch.Tensor] | None = (target, source)
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock, torch.inference_mode(False), torch.no_grad():
            copy, self._copy = self._copy, None
            if copy is not None:
                copy[0].copy_(copy[1])

    finish = wait


def _late(rank: int, world: int, stage: int, early: bool) -> list[str]:
    """Train with copies that are as late as they may be: who does not wait sees what was there before."""
    program = partial(train, loss=partial(_loss, True), optimizer=adamw, steps=4, max_norm=None if early else 0.5)
    run = partial(train_zero, TinyGPT, program, rank, world, stage=stage, units=["Block"])
    options: dict[str, Any] = {"precision": PRECISIONS["bf16-mixed"]}
    steps: list[StepTime] = ["backward"] if early else ["deferred", "now"]
    expected = run(**options, step="backward" if early else "now")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Home, "_can_round_in_place", lambda *args: False)
        patch.setattr(Copies, "down", lambda copies, host, tensor: _Late(host, tensor))
        patch.setattr(Copies, "up", lambda copies, tensor, host, behind=None: _Late(tensor, host))
        for step in steps:
            found.append(difference(run(offload="cpu", step=step, **options), expected))
    return found


@pytest.mark.parametrize("early", [False, True], ids=["behind", "in-the-backward"])
@pytest.mark.parametrize("stage", sample((1, 2, 3), 2), ids="stage{}".format)
def test_whoever_uses_a_copy_waits_for_it(stage: int, early: bool) -> None:
    for found in worlds.run(_late, 2, stage, early):
        assert not any(found), found


def _choose_all(devices: StepDevices, *args: Any) -> None:
    for unit in devices._units:
        for buffer in unit.buffers:
            buffer.home.steps_on = torch.device("cpu")


@pytest.mark.parametrize("moments", sample(["fp32", "int8"], "int8"))
@pytest.mark.parametrize("streams", sample([True, False], True), ids=["streamed", "staged"])
def test_steps_that_are_streamed_or_staged_have_the_same_bits(streams: bool, moments: Moments) -> None:
    for found in worlds.run(_streamed, 2, "bf16-mixed", streams, moments):
        assert not any(found), found


# -- With a GPU --------------------------------------------------------------------------------------------------------


def _on_gpu(rank: int, world: int, stage: int, lowered: bool, options: dict[str, Any]) -> list[Any]:
    worlds.seed()
    precision = PRECISIONS["bf16-mixed" if lowered else "fp32"]
    engine = ZeroEngine(stage, units=["Block"], device="cuda", precision=precision, **options)
    module = engine.shard(TinyGPT(depth=6))
    optimizer = engine.attach(adamw(module))
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=lowered), engine.scope("training_step"):
            loss = token_loss(_OnGpu(module), rank, step)
        loss.backward()
        if options.get("step") != "backward":
            engine.clip_grad_norm(optimizer, 0.5)
        optimizer.step()
    values = [engine.full_param(param).cpu() for param in module.parameters()]
    engine.close()
    return values


class _OnGpu(nn.Module):
    """Moves tokens to the device, and logits back."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = (module,)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner[0](ids.cuda())
        return logits.cpu()


def _compare_on_gpu(rank: int, world: int, stage: int, lowered: bool) -> list[str]:
    run = partial(_on_gpu, rank, world, stage, lowered)
    both: list[dict[str, Any]] = [{}, {"params": "cpu"}] if stage == 3 else [{}]
    wrong = []
    on_host = run({"offload": Offload(step_device="cpu"), "step": "now"})
    in_memory = run({})
    for params in both:
        for step in ("deferred", "now"):
            for device, expected in (("cpu", on_host), ("cuda", in_memory)):
                offload = Offload(step_device=device, **params)  # type: ignore[arg-type]
                found = run({"offload": offload, "step": step})
                if not all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True)):
                    wrong.append(f"{offload} step={step}")
    early = [run({"step": "backward", "offload": offload}) for offload in (None, Offload(step_device="cuda"))]
    if not all(torch.equal(mine, theirs) for mine, theirs in zip(*early, strict=True)):
        wrong.append("backward")
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("lowered", [True, False], ids=["bf16-mixed", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3], ids="stage{}".format)
@pytest.mark.parametrize("world", [1, 2])
def test_on_a_gpu_offloaded_steps_have_the_bits_of_their_processor(world: int, stage: int, lowered: bool) -> None:
    for wrong in worlds.run(_compare_on_gpu, world, stage, lowered, timeout_s=240.0):
        assert not wrong
