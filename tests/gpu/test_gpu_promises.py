"""The promises of the contracts on an accelerator.

Two ranks share one device and talk over gloo, which stages exchanges in host memory; one rank has NCCL. Where a promise
does not need the device it is tested on the CPU too, so that these lines run everywhere.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import lightning.pytorch.loops.utilities as lightning_loops
import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_zero.config import Communication, MixedPrecision
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.lightning_programs import Ranks
from tests.references import Block, TinyGPT, difference, tokens, train, train_reference, train_zero
from tests.sampling import sample

STAGES = (0, 1, 2, 3)
TIMEOUT_S = 240.0  # the first use of a device by a process takes seconds

stages = pytest.mark.parametrize("stage", sample(STAGES, 3))
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
ranks = pytest.mark.parametrize("world", sample([1, 2], 2))


@contextmanager
def _alone(device: str) -> Iterator[None]:
    """Be a world of one rank on the backend of the device."""
    dist.destroy_process_group()
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield


@pytest.mark.gpu
def test_a_module_whose_forward_is_a_graph_is_refused() -> None:
    """Its graph read the weights where they had been before ``shard``, and the module did not train."""
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
    torch.cuda.make_graphed_callables(module[2], (torch.randn(4, 8, device="cuda"),))
    with pytest.raises(ValueError, match="Module `2` went through `make_graphed_callables`"):
        ZeroEngine(1).shard(module)


# -- One rank is a plain loop ------------------------------------------------------------------------------------------


def _loss(module: nn.Module, rank: int, step: int) -> Tensor:
    ids = tokens(rank, step).to(next(iter(module.parameters())).device)
    return F.cross_entropy(module(ids).flatten(0, 1).float(), ids.flatten())


def _plain_loop(device: str, stage: int | None, dtype: torch.dtype | None) -> tuple[list[float], list[Tensor]]:
    """Train 20 steps, without an engine if ``stage`` is None; return losses and weights."""
    worlds.seed()
    module: nn.Module = TinyGPT().to(device)
    engine = None
    if stage is not None:
        engine = ZeroEngine(stage, units=[Block], precision=MixedPrecision(compute_dtype=dtype))
        module = engine.shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)
    if engine is not None:
        engine.attach(optimizer)
    losses = []
    for step in range(20):
        with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = _loss(module, 0, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    values = [param.detach() if engine is None else engine.full_param(param) for param in module.parameters()]
    return losses, [value.cpu() for value in values]


def _one_rank(rank: int, world: int, device: str, dtype: torch.dtype | None) -> None:
    with _alone(device):
        losses, weights = _plain_loop(device, None, dtype)
        for stage in STAGES:
            found_losses, found_weights = _plain_loop(device, stage, dtype)
            if dtype is None:
                assert found_losses == losses, stage
                assert all(torch.equal(a, b) for a, b in zip(found_weights, weights, strict=True)), stage
            assert found_losses == pytest.approx(losses, rel=0.01), stage


@devices
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16-mixed"])
def test_one_rank_trains_as_a_plain_loop(device: str, dtype: torch.dtype | None) -> None:
    worlds.run(_one_rank, 1, device, dtype, timeout_s=TIMEOUT_S)


# -- Two ranks on one device -------------------------------------------------------------------------------------------


def _two_ranks(rank: int, world: int, device: str, stage: int) -> str:
    def build() -> nn.Module:
        return TinyGPT().to(device)

    def program(trainer: Any) -> None:
        train(trainer, loss=_loss, steps=5, micro_batches=2)

    expected = train_reference(build, program, rank, world, average="once" if stage < 2 else "each")
    communication = Communication(backend="gloo")
    return difference(
        train_zero(build, program, rank, world, stage=stage, units=[Block], communication=communication), expected
    )


@devices
@stages
def test_two_ranks_that_share_a_device_train_as_the_reference(device: str, stage: int) -> None:
    assert worlds.run(_two_ranks, 2, device, stage, timeout_s=TIMEOUT_S) == ["", ""]


def _compiled(rank: int, world: int, device: str, stage: int) -> str:
    inductor.compile_threads = 1  # a worker has no workers
    backend = "inductor" if device == "cuda" else "aot_eager"

    def build() -> nn.Module:
        torch.compiler.reset()
        return TinyGPT(blocks=[torch.compile(Block(), backend=backend) for _ in range(2)]).to(device)  # type: ignore[misc]

    def program(trainer: Any) -> None:
        train(trainer, loss=_loss, steps=3)

    expected = train_reference(build, program, rank, world)
    return difference(train_zero(build, program, rank, world, stage=stage, units=["Block"]), expected, 1e-5)


@devices
@pytest.mark.parametrize("stage", sample([1, 3], 3))
def test_compiled_blocks_train_as_the_reference(device: str, stage: int) -> None:
    assert worlds.run(_compiled, 2, device, stage, timeout_s=TIMEOUT_S) == ["", ""]


# -- Memory ------------------------------------------------------------------------------------------------------------

WIDTH = 2048
DEPTH = 8


def _backward_of_layers(module: nn.Module) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        loss = module(torch.ones(1, WIDTH, device="cuda")).float().square().mean()
    loss.backward()


def _layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(DEPTH)])


def _allocated(rank: int, world: int, stage: int) -> int:
    """Return the bytes that the allocator has given out for training, at the end of the second backward."""
    _backward_of_layers(_layers())  # what libraries keep for themselves
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine = ZeroEngine(stage, units=[nn.Linear], precision=MixedPrecision(compute_dtype=torch.bfloat16))
    module = engine.shard(_layers())
    optimizer = engine.attach(torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True))
    _backward_of_layers(module)
    optimizer.step()
    optimizer.zero_grad()
    _backward_of_layers(module)
    gc.collect()
    torch.cuda.synchronize()
    found = torch.cuda.memory_allocated() - before
    engine.close()
    return found


@pytest.mark.gpu
@stages
def test_allocated_bytes_follow_the_formula(stage: int) -> None:
    world = 2
    bytes_per_parameter = {
        0: 2 + 4 + 12, 1: 2 + 4 + 12 / world, 2: 2 + (4 + 12) / world, 3: (2 + 4 + 12) / world,
    }[stage]  # fmt: skip
    for found in worlds.run(_allocated, world, stage, timeout_s=TIMEOUT_S):
        assert found == pytest.approx(bytes_per_parameter * DEPTH * WIDTH**2, rel=0.02)


# -- Lightning ---------------------------------------------------------------------------------------------------------


class _Node(Ranks):
    """Every rank of the pool is a node with one device; on one machine the device is shared."""

    def node_rank(self) -> int:
        return self._rank

    def local_rank(self) -> int:
        return 0


class _Net(LightningModule):
    """Fits random targets; notes what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.last = nn.Linear(6, 3)
        self.losses: list[float] = []
        self.scales: list[float] = []
        self.without_gradient: set[str] = set()
        self.saw_inference_mode = False
        self.overflow_at = -1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x).float(), y)
        self.losses.append(loss.item())
        return loss * float("inf") if self.global_rank == 0 and self.trainer.global_step == self.overflow_at else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.saw_inference_mode |= torch.is_inference_mode_enabled()
        self(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.without_gradient |= {name for name, param in self.named_parameters() if param.grad is None}

    def on_train_batch_end(self, *args: Any) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self.scales.append(scaler.get_scale())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def _fit(rank: int, world: int, device: str, strategy: Any, **options: Any) -> tuple[_Net, dict[str, Tensor]]:
    """Fit 50 batches, validate before if told to; return the module and its weights."""
    warnings.filterwarnings("ignore")
    module = options.pop("module", None) or _net()
    validates_before = options.pop("validates_before", False)
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(400, 4, generator=generator), torch.randn(400, 3, generator=generator))
    loader = DataLoader(data, batch_size=8 // world, sampler=DistributedSampler(data, world, rank, shuffle=False))
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        num_nodes=world,
        plugins=[_Node(rank, world), *options.pop("plugins", [])],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{"num_sanity_val_steps": 0, **options},
    )
    if validates_before:
        trainer.validate(module, loader, verbose=False)
    trainer.fit(module, loader, loader)
    if isinstance(trainer.strategy, ZeroStrategy):
        values = {name: trainer.strategy.full_param(param) for name, param in module.named_parameters()}
    else:
        values = {name: param.detach() for name, param in module.named_parameters()}
    return module, {name: value.cpu().clone() for name, value in values.items()}


def _net() -> _Net:
    torch.manual_seed(0)
    return _Net()


def _validates_first(rank: int, world: int, device: str, stage: Any) -> None:
    if world == 1:
        with _alone(device):
            _compare_validation(rank, world, device, stage)
        return
    with patch.object(lightning_loops, "_distributed_is_initialized", return_value=False):  # as if it were not gloo
        _compare_validation(rank, world, device, stage)


def _compare_validation(rank: int, world: int, device: str, stage: Any) -> None:
    options = {"limit_train_batches": 5, "limit_val_batches": 2}
    module, weights = _fit(
        rank, world, device, ZeroStrategy(stage), validates_before=True, num_sanity_val_steps=2, **options
    )
    assert module.saw_inference_mode or (world, device) == (1, "cpu")
    assert not module.without_gradient
    assert not any(param.is_inference() for param in module.parameters())
    other, expected = _fit(rank, world, device, ZeroStrategy(stage), limit_train_batches=5, limit_val_batches=0)
    assert module.losses == other.losses
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@devices
@ranks
@stages
def test_a_validation_before_the_fit_changes_nothing(world: int, device: str, stage: int) -> None:
    worlds.run(_validates_first, world, device, stage, timeout_s=TIMEOUT_S)


SCALE = 1024.0


def _half(device: str) -> list[Any]:
    return [LightningMixedPrecision("16-mixed", device, torch.amp.GradScaler(device, init_scale=SCALE))]


def _fp16(rank: int, world: int, device: str, stages: tuple[Any, ...]) -> list[float]:
    """Return the largest relative difference of a stage's losses to DDP's."""
    reference, _ = _fit(rank, world, device, "ddp", plugins=_half(device))
    found = []
    for stage in stages:
        module, _ = _fit(rank, world, device, ZeroStrategy(stage), plugins=_half(device))
        assert len(module.losses) == len(reference.losses) == 50
        found.append(max(abs(a - b) / b for a, b in zip(module.losses, reference.losses, strict=True)))
    return found


@pytest.mark.slow
@devices
@ranks
def test_fp16_mixed_trains_as_ddp_within_one_percent(world: int, device: str) -> None:
    for found in worlds.run(_fp16, world, device, STAGES, timeout_s=TIMEOUT_S):
        assert max(found) < 0.01


def _overflow(rank: int, world: int, device: str, stage: Any) -> tuple[list[float], bool]:
    module = _net()
    module.overflow_at = 20
    module, weights = _fit(
        rank, world, device, ZeroStrategy(stage), plugins=_half(device), module=module, limit_train_batches=21
    )
    before = _fit(rank, world, device, ZeroStrategy(stage), plugins=_half(device), limit_train_batches=20)[1]
    return module.scales, all(torch.equal(weights[name], before[name]) for name in before)


@devices
@ranks
@stages
def test_an_overflow_on_one_rank_halves_the_scale_and_skips_the_step_on_all(
    world: int, device: str, stage: int
) -> None:
    for scales, is_as_before in worlds.run(_overflow, world, device, stage, timeout_s=TIMEOUT_S):
        assert scales == [SCALE] * 20 + [SCALE / 2]
        assert is_as_before


def _moved_away(rank: int, world: int, device: str, stage: int) -> list[bool]:
    strategy = ZeroStrategy(stage)
    module, weights = _fit(rank, world, device, strategy, limit_train_batches=3)
    module.cpu()
    strategy = ZeroStrategy(stage)
    module, again = _fit(rank, world, device, strategy, module=module, limit_train_batches=3)
    tensors = [*module.parameters(), *module.buffers()]
    return [
        all(one.device.type == device for one in tensors),
        any(not torch.equal(weights[name], again[name]) for name in weights),
    ]


@devices
@ranks
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_module_that_was_moved_to_the_cpu_trains_on(world: int, device: str, stage: int) -> None:
    """The kept engine left parameters and buffers where they were, and the next forward failed."""
    for answers in worlds.run(_moved_away, world, device, stage, timeout_s=TIMEOUT_S):
        assert answers == [True, True]
