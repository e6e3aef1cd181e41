"""Pipeline stages on a GPU: generators of the device, logged values, attributes that hooks set, loss scales.

Two stages share one device and talk over gloo. All cases but those of device memory run on a CPU, too.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_zero.config import Pipeline
from lightning_zero.lightning.precision import LossScale
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.pipeline.schedule.microbatches import _weighted_sum, batch_digest
from lightning_zero.parallel.pipeline.stages.specs import LayerSpec
from lightning_zero.parallel.pipeline.stages.written_tensors import Held, unwritten
from tests import worlds
from tests.lightning_programs import Ranks

WIDTH, VOCAB, LENGTH, BATCH, STEPS = 8, 11, 4, 4, 4
TIMEOUT_S = 200.0  # the first use of a device by a process takes seconds

devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)


class _Node(Ranks):
    """Every rank of the pool is a node with one device, and all of them share it."""

    def node_rank(self) -> int:
        return self._rank

    def local_rank(self) -> int:
        return 0


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class _Program(LightningModule):
    block: type[nn.Module] = _Block

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def logits(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(hidden)
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.logits(self.embedding(batch)).flatten(0, 1).float(), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(rank: int, module: LightningModule, device: str, *, scale: LossScale | None = None, **options: Any) -> Trainer:
    """Fit on two stages, with two micro-batches per batch."""
    warnings.filterwarnings("ignore")
    strategy = ZeroStrategy(pipeline=Pipeline(stages=2, microbatches=2), loss_scale=scale)
    ids = torch.randint(0, VOCAB, (BATCH * STEPS, LENGTH), generator=torch.Generator().manual_seed(7))
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        num_nodes=2,
        plugins=[_Node(rank, 2)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(module, DataLoader(list(ids), batch_size=BATCH))
    return trainer


def _values(trainer: Trainer) -> dict[str, Tensor]:
    strategy: Any = trainer.strategy
    return {name: strategy.full_param(param).cpu() for name, param in trainer.lightning_module.named_parameters()}


# -- Generators --------------------------------------------------------------------------------------------------------


class _Noisy(_Program):
    """Draws noise on the device in front of the blocks, and uses it there and in the loss."""

    draws = False  # in a hook of this rank alone

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.draws:
            torch.rand(3, device=self.device)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        noise = torch.rand(*batch.shape, 1, device=batch.device)
        return (self.logits(self.embedding(batch) + noise) * noise).pow(2).mean()


def _noisy(rank: int, world: int, device: str) -> bool:
    """Say whether a drift of one rank's generator changes nothing."""
    found = []
    for draws in (False, True):
        worlds.seed()
        module = _Noisy()
        module.draws = draws and rank == 1  # rank 0 says how a copy goes on
        found.append(_values(_fit(rank, module, device)))
    return all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@devices
def test_stages_draw_the_same_noise_if_the_generator_of_one_rank_has_moved(device: str) -> None:
    assert worlds.run(_noisy, 2, device, timeout_s=TIMEOUT_S) == [True, True]


def _specified(rank: int, world: int, device: str) -> None:
    worlds.seed()
    torch.zeros((), device=device)  # the device is in use
    first, second = (LayerSpec(nn.Linear, 3, 3, device=device) for _ in range(2))
    values = [one.build().weight for one in (first, second)]
    torch.rand(5, device=device)
    before = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    again = [one.build().weight for one in (second, first)]
    behind = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(before, behind)
    assert torch.equal(values[0], again[1])
    assert torch.equal(values[1], again[0])
    assert not torch.equal(values[0], values[1])


@devices
def test_a_specified_layer_has_the_same_values_whatever_is_built_besides(device: str) -> None:
    worlds.run(_specified, 1, device, timeout_s=TIMEOUT_S)


# -- Values ------------------------------------------------------------------------------------------------------------


class _Logging(_Program):
    """Logs a number in every second micro-batch, and a tensor in the others."""

    num_steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_steps += 1
        value = 0.0 if self.num_steps % 2 else torch.ones((), device=batch.device)
        for reduce_fx in ("mean", "max"):
            self.log(reduce_fx, value, reduce_fx=reduce_fx, batch_size=1)
        return super().training_step(batch, batch_idx)


def _logged(rank: int, world: int, device: str) -> dict[str, float]:
    worlds.seed()
    return {name: float(value) for name, value in _fit(rank, _Logging(), device).callback_metrics.items()}


@devices
def test_a_number_in_one_micro_batch_and_a_tensor_in_another_are_logged(device: str) -> None:
    assert worlds.run(_logged, 2, device, timeout_s=TIMEOUT_S) == [{"mean": 0.5, "max": 1.0}] * 2


class _Watched(_Block):
    """Keeps the norm of the gradient of its output."""

    as_number = True
    norm: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.norm = 0.0 if self.as_number else torch.zeros((), device=x.device)
        if x.requires_grad:
            x.register_hook(self.keep)
        return x

    def keep(self, grad: Tensor) -> None:
        self.norm = grad.norm().item() if self.as_number else grad.norm()


class _Watching(_Program):
    """Begins with a head of zeros, so that the first gradients of the blocks are zeros."""

    block = _Watched

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)


def _watched(rank: int, world: int, device: str, as_number: bool) -> float:
    worlds.seed()
    module: Any = _Watching()
    for block in module.blocks:
        block.as_number = as_number
    _fit(rank, module, device)
    return float(module.blocks[rank].norm)


@devices
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_hook_keeps_a_norm_that_is_zero_at_first(device: str, kind: str) -> None:
    assert all(value > 0 for value in worlds.run(_watched, 2, device, kind == "number", timeout_s=TIMEOUT_S))


# -- Loss scales -------------------------------------------------------------------------------------------------------


class _Unfreezing(_Program):
    """Trains the second stage alone in the first epoch, with a loss that overflows at the largest scale of 16-true."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return 64.0 * super().training_step(batch, batch_idx)

    def on_train_epoch_start(self) -> None:
        for part in (self.embedding, self.blocks[0]):
            part.requires_grad_(self.current_epoch > 0)


def _scaled(rank: int, world: int, device: str, precision: Any) -> dict[str, Any]:
    worlds.seed()
    scale = LossScale(init_scale=2.0**18, hysteresis=1, window=3)
    trainer = _fit(rank, _Unfreezing(), device, scale=scale, precision=precision, max_epochs=3)
    plugin: Any = trainer.precision_plugin
    assert all(value.isfinite().all() for value in _values(trainer).values())
    return plugin.state_dict()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        pytest.param("cpu", "16-true", marks=pytest.mark.slow),
        pytest.param("cuda", "16-true", marks=pytest.mark.gpu),
        pytest.param("cuda", "16-mixed", marks=pytest.mark.gpu),
    ],
)
def test_stages_have_one_loss_scale_in_gradual_unfreezing(device: str, precision: str) -> None:
    first, last = worlds.run(_scaled, 2, device, precision, timeout_s=TIMEOUT_S)
    assert first == last
    assert first["steps"] == 3 * STEPS
    assert first["skipped"] > 0 or precision == "16-mixed"


# -- Memory ------------------------------------------------------------------------------------------------------------


def _digested(rank: int, world: int) -> tuple[int, list[bool]]:
    """Return the bytes that a digest takes beside its tensor, and whether digests are those of the values."""
    torch.cuda.init()
    values = torch.randint(0, 256, (2**26,), dtype=torch.uint8, device="cuda")
    batch_digest(values[:100])  # what the first use takes
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    digest = batch_digest(values)
    nbytes = torch.cuda.max_memory_allocated() - before
    small = values[: 5 * 8191 + 4]
    checks = [
        digest == batch_digest(values.clone()),
        digest != batch_digest(values.flip(0)),
        batch_digest(values[:-3]) == batch_digest(torch.cat([values[:1], values[:-3]])[1:]),
        int(_weighted_sum(small)) == int(_weighted_sum(small.cpu())),
        batch_digest(small.float()) != batch_digest(small.float().flip(0)),
    ]
    return nbytes, checks


@pytest.mark.gpu
def test_the_digest_of_a_batch_takes_little_memory_beside_it() -> None:
    ((nbytes, checks),) = worlds.run(_digested, 1, timeout_s=TIMEOUT_S)
    assert nbytes <= 48 * 2**20
    assert checks == [True] * 5


def _copied(rank: int, world: int) -> tuple[int, bool]:
    """Return the bytes of device memory that a run takes beside parameters it may write, and whether it is undone."""
    param = nn.Parameter(torch.ones(2**22, device="cuda"))
    held = Held([("param", param)], (), lambda: {"param": param._version}, [])
    before = torch.cuda.memory_allocated()
    with unwritten(held, may_write={"param"}):
        nbytes = torch.cuda.memory_allocated() - before
        param.data.mul_(2)
    return nbytes, bool(param.eq(1).all())


@pytest.mark.gpu
def test_copies_of_parameters_that_a_run_may_write_lie_in_host_memory() -> None:
    """A second copy of all parameters of a stage had no room on its device."""
    assert worlds.run(_copied, 1, timeout_s=TIMEOUT_S) == [(0, True)]
