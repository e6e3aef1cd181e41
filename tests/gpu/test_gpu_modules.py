"""Recomputed blocks, experts, plans of tensor parallelism and measured layers on a GPU.

Two ranks share one device and talk over gloo, which stages exchanges in host memory.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_zero.config import ActivationCheckpointing, Pipeline
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.moe import MoE
from lightning_zero.moe.loads import ExpertLoads
from lightning_zero.parallel.activation.checkpointing import checkpoint_activations
from lightning_zero.parallel.tensor.plan import TensorParallel
from lightning_zero.parallel.tensor.planning import plan_model
from lightning_zero_ops import grouped
from tests import worlds
from tests.lightning_programs import Ranks
from tests.parallel.tensor.families import make

WIDTH, VOCAB, LENGTH, STEPS = 32, 48, 8, 3
TIMEOUT_S = 200.0  # the first use of a device by a process takes seconds
BOUND = 1e-4  # of weights in fp32: parts sum in an order of their own

pytestmark = pytest.mark.gpu


# -- Recomputed blocks -------------------------------------------------------------------------------------------------


class _Named(nn.Module):
    """Drops elements of an input that it takes by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, hidden_states: Tensor) -> Tensor:
        return hidden_states + F.dropout(self.linear(hidden_states).tanh(), 0.5, self.training)


class _OneRank:
    """A tensor group of one rank."""

    rank, size = 0, 1

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


def _gradients(policy: Any) -> list[Tensor]:
    torch.manual_seed(0)
    blocks = nn.ModuleList([_Named() for _ in range(3)]).cuda()
    if policy is not None:
        options = ActivationCheckpointing(modules=[_Named], policy=policy)
        checkpoint_activations(blocks, options, _OneRank() if policy == "partition" else None)
    x = torch.randn(4, WIDTH, device="cuda", requires_grad=True)
    hidden = x * 1.0
    for block in blocks:
        hidden = block(hidden_states=hidden)
    hidden.square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(param.grad for param in blocks.parameters() if param.grad is not None)]


@pytest.mark.parametrize("policy", ["full", "selective", "offload", "partition"])
def test_blocks_called_by_name_drop_the_same_elements_again(policy: str) -> None:
    """They drew another mask in the recomputation, because PyTorch restored the random state of the CPU alone."""
    for found, expected in zip(_gradients(policy), _gradients(None), strict=True):
        assert torch.equal(found, expected)


# -- Experts -----------------------------------------------------------------------------------------------------------


def test_experts_are_made_on_the_device() -> None:
    """As in ``configure_model``: their trial raised "Expected a 'cuda' device type for generator"."""
    with torch.device("cuda"):
        layer = MoE(WIDTH, nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)), 4, k=2)
        result = layer(torch.randn(12, WIDTH))[0]
    result.sum().backward()
    assert result.is_cuda
    assert all(param.is_cuda for param in layer.parameters())


def test_loads_of_experts_are_counted_without_a_wait() -> None:
    experts = [nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in range(4)]
    model = nn.ModuleDict({"layer": MoE(WIDTH, experts, 4, k=2)}).cuda().bfloat16()
    x = torch.randn(12, WIDTH, device="cuda", dtype=torch.bfloat16)
    model["layer"](x)  # tuned
    loads = ExpertLoads(model, lambda mine: [mine])
    loads.is_counting = True
    torch.cuda.set_sync_debug_mode("error")
    try:
        counts = sum(model["layer"](x)[2] for _ in range(2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (found,) = loads.read(lambda total: total, x.device).values()
    assert list(found.load) == pytest.approx((counts / 12).tolist())


@pytest.mark.parametrize("rows_of_nobody", [0, 2])
def test_experts_without_rows_have_gradients_of_zeros(rows_of_nobody: int) -> None:
    """On a B200 they were other values of the memory (https://github.com/pytorch/pytorch/issues/172439)."""
    counts = [0, 24, 0, 40, 0]
    offsets = torch.tensor(counts, device="cuda").cumsum(0).int()
    x = torch.randn(sum(counts) + rows_of_nobody, WIDTH, device="cuda").bfloat16()
    grad = torch.randn(len(x), 2 * WIDTH, device="cuda").bfloat16()
    grad[sum(counts) :] = 0.0
    weight = torch.randn(len(counts), 2 * WIDTH, WIDTH, device="cuda").bfloat16()
    saved = (grad, x, weight, offsets, True, True, True)
    expected = grouped._backward_reference(*saved)
    garbage = [torch.full_like(weight, 7.0) for _ in range(8)]  # which the allocator gives out again
    del garbage
    found = grouped._launch_backward(*saved)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[: sum(counts)], other[: sum(counts)], rtol=2e-2, atol=0.1)
    for one in found[1:]:
        assert not one[[0, 2, 4]].any()


# -- Plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_of_a_model_on_the_device_is_that_of_one_on_the_cpu() -> None:
    model, call = make("hand-fixed")
    expected = plan_model(model, TensorParallel(size=2), call)
    model = model.cuda()
    model.pos = {"table": torch.arange(4, device="cuda")}
    seen: list[str] = []

    def watched(one: Any) -> Any:
        seen.append(one.pos["table"].device.type)
        return call(one)

    with torch.device("cuda"):  # as of `torch.set_default_device("cuda")`
        found = plan_model(model, TensorParallel(size=2), watched)
    assert found.lines() == expected.lines()
    assert set(seen) == {"cpu"}
    assert model.pos["table"].is_cuda


class _Node(Ranks):
    """Every rank of the pool is a node with one device, and all of them share it."""

    def node_rank(self) -> int:
        return self._rank

    def local_rank(self) -> int:
        return 0


class _Step(LightningModule):
    def _loss(self, logits: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        return self._loss(self(ids), ids)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Llama(_Step):
    """Is made on the device, with a table that is no buffer."""

    def __init__(self, has_example: bool) -> None:
        super().__init__()
        self.has_example = has_example

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=WIDTH,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=LENGTH,
            )
        )
        self.pos = torch.arange(LENGTH)
        if self.has_example:
            self.example_input_array = torch.zeros(2, LENGTH, dtype=torch.int64)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, position_ids=self.pos[: ids.shape[1]].unsqueeze(0)).logits
        return logits


def _fit(rank: int, world: int, module: LightningModule, **options: Any) -> dict[str, Tensor]:
    """Fit a few steps, in which all ranks have the same batches, and return whole weights."""
    warnings.filterwarnings("ignore")
    torch.backends.cuda.matmul.allow_tf32 = False
    ids = torch.randint(0, VOCAB, (8 * STEPS, LENGTH), generator=torch.Generator().manual_seed(7))
    trainer = Trainer(
        strategy=ZeroStrategy(**options),
        accelerator="gpu",
        devices=1,
        num_nodes=world,
        plugins=[_Node(rank, world)],
        max_steps=STEPS,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    worlds.seed()  # of the parameters that `configure_model` makes
    trainer.fit(module, DataLoader(TensorDataset(ids), batch_size=8))
    strategy: Any = trainer.strategy
    return {name: strategy.full_param(param).cpu() for name, param in module.named_parameters()}


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=BOUND, msg=name)


def _cut(rank: int, world: int, has_example: bool) -> None:
    module = _Llama(has_example)
    found = _fit(rank, world, module, stage=1, tensor_parallel=2)
    assert module.pos.is_cuda
    _assert_close(found, _fit(rank, world, _Llama(has_example), stage=1))


@pytest.mark.parametrize("has_example", [False, True], ids=["batch", "example"])
def test_a_model_that_is_made_on_the_device_with_tensors_in_attributes_is_cut(has_example: bool) -> None:
    """The plan was refused: it runs copies on the CPU, and the attributes were on the device."""
    worlds.run(_cut, 2, has_example, timeout_s=TIMEOUT_S)


# -- Measured layers ---------------------------------------------------------------------------------------------------


class _Positions(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1], device=self.device))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class _Placed(_Step):
    """Makes tensors where it says that it is, as does a module that it makes late."""

    def __init__(self) -> None:
        super().__init__()
        worlds.seed()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([_Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def configure_model(self) -> None:
        if not hasattr(self, "positions"):
            self.positions = _Positions()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.positions(self.embed(ids))
        x = x + torch.arange(LENGTH, device=self.device).unsqueeze(-1) / LENGTH
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def _measured(rank: int, world: int, partition: str) -> None:
    def fit(partition: str) -> dict[str, Tensor]:
        pipeline = Pipeline(stages=2, microbatches=2, module="blocks", partition=partition)  # type: ignore[arg-type]
        return _fit(rank, world, _Placed(), stage=1, pipeline=pipeline)

    _assert_close(fit(partition), fit("uniform"))


@pytest.mark.parametrize("partition", ["measured", "flops"])
def test_layers_are_measured_where_the_module_says_that_it_is(partition: str) -> None:
    worlds.run(_measured, 2, partition, timeout_s=TIMEOUT_S)
