"""Every axis and placement trains on a GPU as on a CPU: pipeline stages, tensor and expert ranks, offload, checkpoints.

Two ranks share one device and talk over gloo, which stages exchanges in host memory; one rank has NCCL.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from lightning_zero import FlopsProfile, ZeroMonitor
from lightning_zero.config import ActivationCheckpointing, Offload, Pipeline
from lightning_zero.lightning.flops import peak_flops
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.moe import MoE
from tests import worlds
from tests.lightning_programs import Ranks
from tests.parallel.activation import test_kept_products

WIDTH, VOCAB, LENGTH, STEPS = 32, 48, 8, 4
TIMEOUT_S = 200.0  # the first use of a device by a process takes seconds
BOUND = 1e-4  # of weights in fp32: both devices sum in an order of their own
BOUND_16 = 2e-2

pytestmark = pytest.mark.gpu


class _Node(Ranks):
    """Every rank of the pool is a node with one device, and all of them share it."""

    def node_rank(self) -> int:
        return self._rank

    def local_rank(self) -> int:
        return 0


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class _Block(nn.Module):
    def __init__(self, dropout: float, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # the gradient of a key's bias is noise
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        # Copies of one expert have equal outputs, and the gradients of their router are noise.
        self.mlp = MoE(WIDTH, [_mlp() for _ in range(experts)], experts, k=2) if experts else _mlp()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        x = x + self.dropout(
            self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        )
        found = self.mlp(x)
        return x + self.dropout(found[0] if isinstance(found, tuple) else found)


class _GPT(nn.Module):
    def __init__(self, dropout: float = 0.0, experts: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([_Block(dropout, experts) for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


_SIZES = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "gpt": _GPT,
    "dropout": lambda: _GPT(dropout=0.2),
    "moe": lambda: _GPT(experts=4),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2)),
}


class _Program(LightningModule):
    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = MODELS[model]()
        self.losses: list[Tensor] = []

    def _loss(self, batch: Any) -> Tensor:
        (ids,) = batch
        out = self.model(ids)
        logits = getattr(out, "logits", out)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.003)


@contextmanager
def _alone(device: str, world: int) -> Iterator[None]:
    """Let one rank have the backend of the device."""
    if world == 1:
        dist.destroy_process_group()
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield


def _fit(rank: int, world: int, device: str, model: str, options: dict[str, Any], **more: Any) -> Any:
    """Fit a few steps and validate; return losses, logged values and whole weights."""
    warnings.filterwarnings("ignore")
    torch.backends.cuda.matmul.allow_tf32 = False
    worlds.seed()
    module = _Program(model)
    ids = torch.randint(0, VOCAB, (64, LENGTH), generator=torch.Generator().manual_seed(7))
    data = TensorDataset(ids)
    copies = world // 2 ** len({"pipeline", "tensor_parallel"} & options.keys())  # every axis has two ranks
    data_rank = rank // 2 if "tensor_parallel" in options else rank  # tensor ranks are neighbours
    sampler: Any = DistributedSampler(data, copies, data_rank % copies, shuffle=False)
    loader = DataLoader(data, batch_size=8 // copies, sampler=sampler)
    trainer = Trainer(
        strategy=ZeroStrategy(**options),
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        num_nodes=world,
        plugins=[_Node(rank, world)],
        max_steps=more.pop("max_steps", STEPS),
        max_epochs=-1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=2,
        val_check_interval=2,
        **{"gradient_clip_val": 0.5, "logger": False, **more.pop("trainer", {})},
    )
    saves, resumes = more.pop("saves", None), more.pop("resumes", None)
    trainer.fit(module, loader, loader, ckpt_path=resumes)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    values = {name: trainer.strategy.full_param(p).float().cpu() for name, p in module.named_parameters()}
    if saves:
        trainer.save_checkpoint(saves)
        trainer.strategy.wait_for_save()
    return [loss.item() for loss in module.losses], metrics, values


def _compare(rank: int, world: int, model: str, options: dict[str, Any], trainer: dict[str, Any]) -> list[str]:
    """Return how a fit on the GPU differs from the same one on the CPU."""
    rounds = "precision" in trainer or options.get("moments") == "int8"  # by the bits of numbers
    bound = BOUND_16 if rounds else BOUND
    with _alone("cuda", world):
        losses, metrics, values = _fit(rank, world, "cuda", model, options, trainer=trainer)
    if getattr(options.get("offload"), "step_device", None):
        options = {**options, "offload": "cpu"}
    with _alone("cpu", world):
        expected = _fit(rank, world, "cpu", model, options, trainer=trainer)
    found = []
    if losses != pytest.approx(expected[0], rel=bound, abs=bound):
        found.append(f"losses {losses}, not {expected[0]}")
    for name, value in expected[1].items():
        if metrics.get(name) != pytest.approx(value, rel=bound, abs=bound):
            found.append(f"{name}: {metrics.get(name)}, not {value}")
    for name, value in expected[2].items():
        difference = (values[name] - value).abs().max().item()
        if not difference <= bound:
            found.append(f"{name}: {difference}")
    return found


ACCUMULATION = {"accumulate_grad_batches": 2}
HALF = {"precision": "bf16-mixed"}
CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "one-rank": (1, "gpt", {"stage": 3}, {}),
    "one-rank-offload": (1, "gpt", {"stage": 2, "offload": "cpu"}, ACCUMULATION),
    "one-rank-moe": (1, "moe", {"stage": 3}, {}),
    "one-rank-mixtral": (1, "mixtral", {"stage": 2}, {}),
    "one-rank-moe-bf16": (1, "moe", {"stage": 3}, HALF),
    "one-rank-mixtral-bf16": (1, "mixtral", {"stage": 3}, HALF),
    "stage0": (2, "llama", {"stage": 0}, {}),
    "stage1": (2, "llama", {"stage": 1}, ACCUMULATION),
    "stage2": (2, "llama", {"stage": 2}, {}),
    "stage3": (2, "llama", {"stage": 3}, ACCUMULATION),
    "stage3-bf16": (2, "llama", {"stage": 3}, HALF),
    "offload-optimizer": (2, "gpt", {"stage": 3, "offload": "cpu"}, ACCUMULATION),
    "offload-params": (2, "gpt", {"stage": 3, "offload": Offload(optimizer="cpu", params="cpu")}, HALF),
    "offload-streamed": (2, "gpt", {"stage": 3, "offload": Offload(optimizer="cpu", step_device="cuda")}, {}),
    "offload-partly": (2, "gpt", {"stage": 2, "offload": Offload(optimizer="cpu", fraction=0.5)}, {}),
    "step-in-backward": (2, "gpt", {"stage": 3, "step": "backward"}, {"gradient_clip_val": None}),
    "step-deferred": (2, "gpt", {"stage": 3, "step": "deferred"}, {}),
    "int8-moments": (2, "gpt", {"stage": 3, "moments": "int8"}, {}),
    "bf16-moments": (2, "gpt", {"stage": 3, "moments": "bf16"}, {}),
    "checkpointing": (2, "llama", {"stage": 3, "activation_checkpointing": True}, {}),
    "selective": (2, "gpt", {"stage": 3, "activation_checkpointing": {"policy": "selective"}}, HALF),
    "activations-on-host": (2, "gpt", {"stage": 3, "activation_checkpointing": {"policy": "offload"}}, {}),
    "pipeline": (2, "gpt", {"stage": 1, "pipeline": 2}, {}),
    "pipeline-stage3": (2, "gpt", {"stage": 3, "pipeline": Pipeline(stages=2, schedule="interleaved_1f1b")}, {}),
    "pipeline-zero-bubble": (2, "gpt", {"stage": 1, "pipeline": Pipeline(stages=2, schedule="zb_h1")}, {}),
    "pipeline-llama-bf16": (2, "llama", {"stage": 2, "pipeline": 2}, HALF),
    "pipeline-checkpointing": (2, "gpt", {"stage": 1, "pipeline": 2, "activation_checkpointing": True}, ACCUMULATION),
    "pipeline-offload": (2, "gpt", {"stage": 1, "pipeline": 2, "offload": "cpu"}, {}),
    "tensor": (2, "llama", {"stage": 1, "tensor_parallel": 2}, {}),
    "tensor-stage3-bf16": (2, "llama", {"stage": 3, "tensor_parallel": 2}, HALF),
    "tensor-sequence": (2, "llama", {"stage": 2, "tensor_parallel": {"size": 2, "sequence": True}}, {}),
    "tensor-gpt": (2, "gpt", {"stage": 2, "tensor_parallel": 2}, ACCUMULATION),
    "experts": (2, "moe", {"stage": 2, "expert_parallel": 2}, {}),
    "experts-stage3": (2, "moe", {"stage": 3, "expert_parallel": 2}, ACCUMULATION),
    "experts-mixtral": (2, "mixtral", {"stage": 2, "expert_parallel": 2}, {}),
    "experts-mixtral-bf16": (2, "mixtral", {"stage": 3, "expert_parallel": 2}, HALF),
    "experts-tensor": (4, "mixtral", {"stage": 2, "expert_parallel": 2, "tensor_parallel": 2}, {}),
    "experts-pipeline": (4, "moe", {"stage": 3, "expert_parallel": 2, "pipeline": 2}, {}),
    "tensor-pipeline": (4, "llama", {"stage": 3, "tensor_parallel": 2, "pipeline": 2}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_trains_as_a_cpu(name: str) -> None:
    world, model, options, trainer = CASES[name]
    for found in worlds.run(_compare, world, model, options, trainer, timeout_s=TIMEOUT_S):
        assert found == []


def _on_disks(rank: int, world: int, path: str) -> list[str]:
    offload = Offload(optimizer="nvme", params="nvme", path=path)
    return _compare(rank, world, "gpt", {"stage": 3, "offload": offload}, {})


@pytest.mark.parametrize("world", [1, 2])
def test_disks_hold_the_states_of_a_gpu(world: int, tmp_path: Path) -> None:
    for found in worlds.run(_on_disks, world, str(tmp_path), timeout_s=TIMEOUT_S):
        assert found == []


def _twice(rank: int, world: int, first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Say whether two fits on the GPU have the same bits."""
    found = [_fit(rank, world, "cuda", "dropout", options) for options in (first, second)]
    return found[0][0] == found[1][0] and all(
        torch.equal(found[0][2][name], value) for name, value in found[1][2].items()
    )


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recomputed": ({"stage": 3}, {"stage": 3, "activation_checkpointing": True}),
    "selective": ({"stage": 3}, {"stage": 3, "activation_checkpointing": ActivationCheckpointing(policy="selective")}),
    "on-host": ({"stage": 3}, {"stage": 3, "activation_checkpointing": ActivationCheckpointing(policy="offload")}),
    "stages": ({"stage": 2}, {"stage": 3}),
    "offloaded-params": ({"stage": 3}, {"stage": 3, "offload": Offload(optimizer=None, params="cpu")}),
    "pipeline-recomputed": ({"stage": 1, "pipeline": 2}, {"stage": 1, "pipeline": 2, "activation_checkpointing": True}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_options_have_the_same_bits_with_dropout(name: str) -> None:
    assert worlds.run(_twice, 2, *PAIRS[name], timeout_s=TIMEOUT_S) == [True, True]


def _resumed(rank: int, world: int, options: dict[str, Any], other: dict[str, Any], path: str) -> list[str]:
    epochs = {"limit_train_batches": 2}
    _fit(rank, world, "cuda", "gpt", options, max_steps=2, saves=path, trainer=epochs)
    resumed = _fit(rank, world, "cuda", "gpt", other, max_steps=4, resumes=path, trainer=epochs)
    expected = _fit(rank, world, "cuda", "gpt", options, max_steps=4, trainer=epochs)
    found = [] if resumed[1] == pytest.approx(expected[1], rel=1e-5) else [f"{resumed[1]}, not {expected[1]}"]
    for name, value in expected[2].items():
        if not torch.allclose(resumed[2][name], value, rtol=1e-4, atol=1e-5):
            found.append(name)
    return found


RESUMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "file": ({"stage": 2, "state_dict_type": "full"}, {"stage": 3}),
    "directory": ({"stage": 3}, {"stage": 1}),
    "in-background": ({"stage": 3, "async_save": True}, {"stage": 3, "offload": "cpu"}),
    "to-stages": ({"stage": 1}, {"stage": 1, "pipeline": 2}),
}


@pytest.mark.parametrize("name", RESUMES)
def test_fits_resume_on_a_gpu(name: str, tmp_path: Path) -> None:
    for found in worlds.run(_resumed, 2, *RESUMES[name], str(tmp_path / "saved"), timeout_s=TIMEOUT_S):
        assert found == []


def _watched(rank: int, world: int, folder: str) -> int:
    """Return the operations of the forward that the table has."""
    profile = FlopsProfile(step=2)
    trainer = {
        "callbacks": [ZeroMonitor(grad_norm="units", flops=True), profile],
        "logger": CSVLogger(folder),
        "log_every_n_steps": 1,
        **HALF,
    }
    with _alone("cuda", world):
        _fit(rank, world, "cuda", "gpt", {"stage": 3}, trainer=trainer)
    assert profile.count is not None
    return profile.count.forward


def test_a_monitor_knows_what_a_gpu_reaches(tmp_path: Path) -> None:
    (forward,) = worlds.run(_watched, 1, str(tmp_path), timeout_s=TIMEOUT_S)
    tokens, attended = 8 * LENGTH, 2 * 2 * 8 * LENGTH**2 * WIDTH
    assert forward == 4 * (2 * tokens * WIDTH * WIDTH * (3 + 1 + 4) + attended) + 2 * tokens * WIDTH * VOCAB
    (file,) = tmp_path.rglob("metrics.csv")
    rows = [row for row in csv.DictReader(file.open()) if row["throughput/mfu"]]
    assert rows
    for row in rows:
        peak = float(row["throughput/model_TFLOP_per_s"]) / float(row["throughput/mfu"])
        assert peak == pytest.approx(peak_flops(torch.device("cuda"), "bf16-mixed") / 1e12, rel=1e-4)


def _written_in_place(rank: int, world: int, name: str) -> bool:
    """Say whether a gradient behind selective checkpointing has the bits of one without it."""
    with torch.device("cuda"):
        test_kept_products.test_results_that_are_written_in_place_go_backward_as_without_checkpointing(
            getattr(test_kept_products, name)
        )
    return True


@pytest.mark.parametrize("name", ["_adds", "_adds_behind_a_use", "_writes_a_view", "_writes_out"])
def test_kept_products_are_copied_on_a_gpu(name: str) -> None:
    assert worlds.run(_written_in_place, 1, name, timeout_s=TIMEOUT_S) == [True]
