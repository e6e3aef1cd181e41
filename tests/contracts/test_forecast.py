"""Forecasts of memory against runs: live bytes of every storage, counted at every operation of a second step."""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_zero import ActivationCheckpointing, Communication, MixedPrecision, Offload, ZeroEngine, ZeroStrategy
from lightning_zero.engine.units import capacity
from lightning_zero.forecast.live_bytes import LiveBytes, replaced
from lightning_zero.forecast.rehearsal import host_apart
from lightning_zero.forecast.settings import SettingForecast
from lightning_zero.lightning.estimate import estimate_memory
from lightning_zero.parallel.activation.checkpointing import checkpoint_activations, forecast_of
from lightning_zero.storage.disk import DiskStore
from tests import worlds
from tests.contracts.test_memory_formula import _live_bytes
from tests.lightning_programs import trainer

PEAK, PERSISTENT = 0.05, 0.005
TRUE = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
AUTO_BYTES = 9 * 2**20  # for `Offload(fraction="auto")`
SCALARS = 1024  # bytes: counters of optimizers


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (one.view(batch, length, 4, width // 4).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, width: int = 96, depth: int = 4, vocabulary: int = 500) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


class Stage(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 3, padding=1)
        self.stages = nn.Sequential(*[Stage(48) for _ in range(4)])
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(self.stages(self.stem(images)), 2)
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), torch.zeros(len(images), dtype=torch.long))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=500, hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


MODELS: dict[str, tuple[type[nn.Module], Any]] = {
    "gpt": (GPT, lambda: torch.zeros(4, 48, dtype=torch.long)),
    "llama": (Llama, lambda: torch.zeros(4, 48, dtype=torch.long)),
    "conv": (ConvNet, lambda: torch.zeros(4, 3, 24, 24)),
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}

OFFLOADS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "auto": {"fraction": "auto"},
    "disk": {"optimizer": "nvme"},
    "half-disk": {"optimizer": "nvme", "fraction": 0.5},
    "all-disk": {"optimizer": "nvme", "params": "nvme"},
    "params-disk": {"params": "nvme"},
    "host-and-disk": {"optimizer": "nvme", "params": "cpu"},
}


@dataclass(frozen=True)
class Case:
    """One setting of one model."""

    model: str
    stage: int
    world: int
    offload: str | None = None
    checkpointing: str | int | None = None  # a number: the budget of "auto"
    precision: str = "32-true"
    optimizer: str = "adamw"

    def __str__(self) -> str:
        checkpointing = f"auto{self.checkpointing}" if isinstance(self.checkpointing, int) else self.checkpointing
        words = (self.model, f"stage{self.stage}", f"w{self.world}", self.offload, checkpointing, self.precision)
        return "-".join(word for word in (*words, self.optimizer) if word not in (None, "32-true", "adamw"))

    @property
    def policy(self) -> ActivationCheckpointing | None:
        if isinstance(self.checkpointing, int):
            return ActivationCheckpointing(policy="auto", budget_bytes=self.checkpointing)
        return None if self.checkpointing is None else ActivationCheckpointing(policy=self.checkpointing)  # type: ignore[arg-type]


def offload_to(path: Path, name: str | None) -> Offload | None:
    """Return an option of ``OFFLOADS``."""
    if name is None:
        return None
    return Offload(**OFFLOADS[name], path=path if "nvme" in OFFLOADS[name].values() else None)


def _away(engine: ZeroEngine) -> Callable[[], tuple[int, ...]]:
    """Return a function of the bytes in host memory, which a CPU has in the same memory as its own."""
    _, host = engine.internals.steps.accounts()
    states = engine.stats().host["optimizer"] - host.live("optimizer")
    kinds: tuple[Any, ...] = ("parameters", "gradients", "optimizer", "gathered")
    return lambda: (states + sum(map(host.live, kinds)),)


def _run(rank: int, world: int, case: Case, path: Path) -> dict[str, int]:
    """Train some steps as a loop does; return the bytes at the end of the last backward and at its highest."""
    make, batch = MODELS[case.model]
    gc.collect()
    before = _live_bytes()
    counter = LiveBytes()
    memory = replaced(capacity, "free_bytes", lambda *_: (AUTO_BYTES, 0))
    with memory, most_awake() as awake, host_apart(counter) as activations, counter:
        module = make()
        inputs = batch().clone()
        if case.precision in TRUE:
            module.to(TRUE[case.precision])
            inputs = inputs.to(TRUE[case.precision]) if inputs.is_floating_point() else inputs
        checkpoint_activations(module, case.policy, None)
        choice = forecast_of(module)
        engine = ZeroEngine(
            case.stage,
            offload=offload_to(path, case.offload),
            precision=MixedPrecision(compute_dtype=MIXED.get(case.precision)),
        )
        engine.shard(module)
        optimizer = engine.attach(OPTIMIZERS[case.optimizer](module.parameters()))
        for step in range(2 if choice is None else 3):
            if step:
                gc.collect()
                gc.disable()  # tensors in cycles are alive for as long as they may be
                counter.parts, counter.num_away = _away(engine), 1
                counter.reset_peak()
            autocast = torch.autocast("cpu", MIXED.get(case.precision), enabled=case.precision in MIXED)
            scale = 2.0 if case.precision.startswith("16") else 1.0
            with engine.scope("training_step"), autocast:
                loss = module(inputs)
            optimizer.zero_grad()
            with engine.internals.steps.scaled(scale), engine.backward_scope():
                (loss * scale if scale != 1.0 else loss).backward()
            stats = engine.stats()
            del loss
            gc.collect()
            alive = _live_bytes() - before
            if scale != 1.0:
                assert not engine.internals.steps.unscale(optimizer, scale).has_overflowed
            optimizer.step()
            if choice is not None:
                choice.settle(int)
        gc.enable()
        peak = counter.peak.nbytes
        counter.parts = tuple
        engine.close()
    buffers = sum(one.nbytes for one in module.buffers())
    kept = sum(stats.memory[kind] for kind in ("parameters", "gradients", "optimizer")) + buffers
    away = sum(stats.host.values())
    return {
        "peak": peak,
        "persistent": kept,
        "host": away,
        "activations": activations.most,
        "disk": sum(stats.disk.values()),
        "awake": awake[0],
        "alive": alive - inputs.nbytes,
    }


@contextmanager
def most_awake() -> Iterator[list[int]]:
    """Yield a list whose value is the most bytes in memory so far of tensors on disks."""
    most, begin = [0], DiskStore.begin_hold

    def begin_hold(store: DiskStore, *args: Any, **options: Any) -> None:
        begin(store, *args, **options)
        most[0] = max(most[0], store.awake_bytes)

    with replaced(DiskStore, "begin_hold", begin_hold):
        yield most


def _forecast(case: Case, path: Path, **options: Any) -> SettingForecast:
    make, batch = MODELS[case.model]
    strategy = ZeroStrategy(
        stage=case.stage,
        offload=offload_to(path, case.offload),
        activation_checkpointing=case.policy,
        communication=Communication(),
    )
    found = estimate_memory(
        make,
        strategy,
        world_size=case.world,
        batch=batch(),
        optimizer=OPTIMIZERS[case.optimizer],
        precision=case.precision,
        # A CPU has no such autocast in Lightning, and no memory of its own to decide by.
        accelerator="gpu" if case.precision == "16-mixed" or case.offload == "auto" else "cpu",
        memory=AUTO_BYTES,
        side_by_side=False,
        **options,
    )
    return found.own


def _compare(case: Case, path: Path) -> None:
    forecast = _forecast(case, path / "forecast")
    host = dict(forecast.host)
    windows, activations = host.pop("windows"), host.pop("activations")
    assert not (path / "forecast").exists()
    for run in worlds.run(_run, case.world, case, path):
        assert abs(forecast.peak_bytes - run["peak"]) <= PEAK * run["peak"], (forecast, run)
        places = {"persistent": forecast.device, "host": host, "disk": forecast.disk}
        for found, mine in ((name, sum(held.values())) for name, held in places.items()):
            assert abs(mine - run[found]) <= PERSISTENT * run[found] + SCALARS, (found, forecast, run)
        assert activations == run["activations"]
        if run["disk"]:
            assert 0 < run["awake"] <= windows, (forecast, run)
            continue  # Python sees the addresses of what is on disks
        kept = forecast.persistent_bytes + sum(host.values())
        assert abs(kept - run["alive"]) <= PERSISTENT * run["alive"] + 8 * SCALARS, (forecast, run)  # as Python sees it


def _matrix() -> Iterator[Case]:
    for model, stage, world, offload, policy in itertools.product(
        MODELS, (0, 1, 2, 3), (1, 2), (None, "cpu"), (None, "full")
    ):
        yield Case(model, stage, world, offload, policy)
    for model, stage, precision in itertools.product(MODELS, (1, 3), ("bf16-mixed", "bf16-true")):
        yield Case(model, stage, 2, None, "full", precision)
    for model, stage in itertools.product(("gpt", "conv"), (1, 3)):
        yield Case(model, stage, 2, None, "full", "16-true")
        yield Case(model, stage, 1, "cpu", None, "16-mixed")
    yield Case("gpt", 2, 2, "disk", None, "16-true")
    for model, stage in itertools.product(("gpt", "llama"), (0, 3)):
        yield Case(model, stage, 1, "auto")
    for model, stage in itertools.product(MODELS, (0, 2)):
        yield Case(model, stage, 2, None, "full", "64-true")
    for optimizer, offload in itertools.product(("adam", "sgd"), (None, "cpu")):
        yield Case("gpt", 2, 2, offload, None, "32-true", optimizer)
    for model, stage, world, offload in itertools.product(MODELS, (0, 1, 2, 3), (1, 2), ("disk", "half-disk")):
        yield Case(model, stage, world, offload)
    on_disks = ("all-disk", "params-disk", "host-and-disk")
    for model, offload, world in itertools.product(("gpt", "conv"), on_disks, (1, 2)):
        yield Case(model, 3, world, offload, "full", "bf16-mixed")
    yield Case("gpt", 3, 2, None, "selective")
    for model, offload, policy in itertools.product(MODELS, (None, "cpu"), ("offload", 0, 2**18, 2**21, 2**30)):
        yield Case(model, 2, 2, offload, policy)
    yield Case("llama", 3, 4)


QUICK = [
    Case("gpt", 3, 2),
    Case("gpt", 1, 2, "cpu", "full"),
    Case("llama", 3, 2, None, "full", "bf16-mixed"),
    Case("conv", 2, 2, "cpu"),
    Case("conv", 3, 2, "cpu", None, "64-true"),
    Case("gpt", 3, 2, None, "offload"),
    Case("gpt", 2, 1, "auto"),
    Case("llama", 1, 2, None, 2**22),
    Case("conv", 0, 1),
    Case("gpt", 2, 2, "disk"),
    Case("conv", 3, 2, "all-disk", "full", "bf16-mixed"),
]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_forecasts_are_those_of_a_run(case: Case, tmp_path: Path) -> None:
    _compare(case, tmp_path)


# -- Lightning ---------------------------------------------------------------------------------------------------------


class Program(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = GPT()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.zeros(16, 48, dtype=torch.long), batch_size=4)  # type: ignore[arg-type]


class FromStep(pl.Callback):
    """Measures the peak from a step on, by default the second."""

    def __init__(self, counter: LiveBytes, step: int = 1) -> None:
        self.counter = counter
        self.step = step
        self.has_begun = False

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if (
            trainer.global_step == self.step and not self.has_begun
        ):  # its further batches find what the first one leaves
            self.has_begun = True
            engine = trainer.strategy.engine  # type: ignore[attr-defined]
            self.counter.parts, self.counter.num_away = _away(engine), 1
            gc.collect()
            gc.disable()
            self.counter.reset_peak()


def _fit(rank: int, world: int, options: dict[str, Any], more: dict[str, Any]) -> int:
    """Return the highest bytes of a fit of three steps."""
    counter = LiveBytes()
    with host_apart(counter), counter:
        fit = trainer(rank, world, ZeroStrategy(**options), max_steps=3, callbacks=[FromStep(counter)], **more)
        fit.fit(Program())
        gc.enable()
        counter.parts = tuple
    return counter.peak.nbytes


@pytest.mark.parametrize(
    ("options", "more", "world"),
    [
        ({"stage": 3, "activation_checkpointing": True}, {"precision": "bf16-mixed"}, 2),
        pytest.param({"stage": 2, "offload": "cpu"}, {"gradient_clip_val": 1.0}, 2, marks=pytest.mark.slow),
        pytest.param({"stage": 1}, {"accumulate_grad_batches": 2, "precision": "bf16-true"}, 2, marks=pytest.mark.slow),
        pytest.param({"stage": 2, "step": "backward"}, {}, 2, marks=pytest.mark.slow),
        pytest.param({"stage": 3}, {"precision": "64-true"}, 2, marks=pytest.mark.slow),
        pytest.param({"stage": 0, "moments": "int8"}, {}, 1, marks=pytest.mark.slow),
    ],
)
def test_forecasts_are_those_of_a_fit(options: dict[str, Any], more: dict[str, Any], world: int) -> None:
    given = {"precision": more.get("precision"), "clips": "gradient_clip_val" in more}
    forecast = estimate_memory(
        Program(),
        ZeroStrategy(**options),
        world_size=world,
        batch=torch.zeros(4, 48, dtype=torch.long),
        accelerator="cpu",
        accumulate_grad_batches=more.get("accumulate_grad_batches", 1),
        side_by_side=False,
        **given,
    ).own
    for peak in worlds.run(_fit, world, options, more):
        assert abs(forecast.peak_bytes - peak) <= PEAK * peak, (forecast, peak)


# -- Every setting -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in _matrix() if case not in QUICK], ids=str)
def test_forecasts_are_those_of_a_run_in_every_setting(case: Case, tmp_path: Path) -> None:
    _compare(case, tmp_path)


# -- A large model -----------------------------------------------------------------------------------------------------


class Llama70B(pl.LightningModule):
    """A Llama of 70 billion parameters, without values."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
            num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
        )  # fmt: skip
        with torch.device("meta"):
            self.model = LlamaForCausalLM(config)
        self.example_input_array = torch.zeros(1, 4096, dtype=torch.long)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


_COMMAND = """
import json, resource, sys, time
from lightning_zero.__main__ import main
began = time.process_time()
status = main(sys.argv[1:])
print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.slow
def test_a_model_of_70_billion_parameters_takes_a_minute_and_4_gib(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    strategy = "{class_path: lightning_zero.ZeroStrategy, init_args: {stage: 3, activation_checkpointing: true}}"
    config.write_text(
        f"trainer: {{precision: bf16-mixed, strategy: {strategy}}}\nmodel: {{class_path: {__name__}.Llama70B}}\n"
    )
    options = ["estimate", f"--config={config}", "--world=64", "--json=true"]
    done = subprocess.run([sys.executable, "-c", _COMMAND, *options], capture_output=True, text=True, check=True)
    seconds, kib = map(float, done.stderr.splitlines()[-1].split())
    assert seconds < 60
    assert kib < 4 * 2**20
    rows = json.loads(done.stdout)["settings"]
    assert len(rows) == 16
    (row,) = [one for one in rows if one["is_own"]]
    numel = 70_553_706_496
    assert abs(row["device"]["parameters"] - 2 * numel / 64) <= PERSISTENT * row["device"]["parameters"]
    assert abs(row["device"]["optimizer"] - 12 * numel / 64) <= PERSISTENT * row["device"]["optimizer"]
