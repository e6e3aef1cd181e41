from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from lightning_zero.dtensors import equal_options, refuse_dtensors
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.dtensor_programs import Mlp, Plain, TwoAxes, batches
from tests.lightning_programs import assert_equal, seeded, trainer, weights

RULES = {"tokens": "vocab", "blocks.*.up": "column", "blocks.*.down": "row", "head": "column_gather"}


def _refused(rank: int, world: int, data_ranks: int) -> str:
    computed: list[str] = []

    class Watched(TwoAxes):
        def forward(self, ids: Tensor) -> Tensor:
            computed.append("forward")
            return super().forward(ids)

    module = seeded(Watched)
    tensor_ranks = world // data_ranks
    fitted = trainer(rank, world, ZeroStrategy(stage=2, tensor_parallel=tensor_ranks))
    with pytest.raises(ValueError, match="is a DTensor") as error:
        fitted.fit(module, batches(rank // tensor_ranks, data_ranks))
    assert not computed
    return str(error.value)


def _theirs(rank: int, world: int, data_ranks: int) -> dict[str, Tensor]:
    tensor_ranks = world // data_ranks
    strategy = ModelParallelStrategy(data_parallel_size=data_ranks, tensor_parallel_size=tensor_ranks)
    fitted = trainer(rank, world, strategy, max_epochs=1)
    fitted.fit(seeded(TwoAxes), batches(rank // tensor_ranks, data_ranks))
    whole = {}
    for name, param in fitted.lightning_module.named_parameters():
        whole[name] = (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().clone()
    return whole


def _ours(rank: int, world: int, options: dict[str, Any]) -> dict[str, Tensor]:
    data_ranks = world // options["size"]
    fitted = trainer(rank, world, ZeroStrategy(stage=3, tensor_parallel=options), max_epochs=1)
    fitted.fit(seeded(Plain), batches(rank // options["size"], data_ranks))
    return weights(fitted)


@pytest.mark.parametrize(("data_ranks", "tensor_ranks"), [(1, 2), (2, 2)], ids=["1x2", "2x2"])
def test_the_printed_option_trains_as_parallelize_module_did(data_ranks: int, tensor_ranks: int) -> None:
    world = data_ranks * tensor_ranks
    (message,) = set(worlds.run(_refused, world, data_ranks))
    assert "Parameter `tokens.weight` is a DTensor" in message
    assert ("`ZeroStrategy(stage=3)`" in message) == (data_ranks > 1)
    found = re.search(r"\n    tensor_parallel=(.*)\n", message)
    assert found is not None
    options = ast.literal_eval(found[1])
    assert options == {"size": tensor_ranks, "plan": RULES}
    # The ranks add in another order than DTensors.
    assert_equal(worlds.run(_ours, world, options)[0], worlds.run(_theirs, world, data_ranks)[0], atol=1e-6)


def _kinds(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    module = Plain()
    parallelize_module(module, mesh, {"blocks.0.up": ColwiseParallel(), "blocks.0.down": RowwiseParallel()})
    assert equal_options(module) == {"size": 2, "plan": {"blocks.0.up": "column", "blocks.0.down": "row"}}

    module = Plain()
    rows = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(module, mesh, {"blocks.*.norm": SequenceParallel(), "blocks.*.down": rows})
    assert equal_options(module) == {"size": 2, "plan": {"blocks.*.down": "row_split"}, "sequence": True}

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)
            self.up = nn.Parameter(torch.ones(3, 8, 4))
            self.rows = nn.Embedding(4, 8)
            self.other = nn.Linear(2, 2)

    experts: Any = Experts()
    experts.up = nn.Parameter(distribute_tensor(experts.up.data, mesh, [Shard(2)]))
    weight = experts.attention.in_proj_weight
    experts.attention.in_proj_weight = nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(0)]))
    experts.rows.weight = nn.Parameter(distribute_tensor(experts.rows.weight.data, mesh, [Shard(1)]))
    assert equal_options(experts) == {"size": 2, "plan": {"attention": "attention", "up": {"cut": 2}}}


def test_a_placement_is_the_word_of_a_plan() -> None:
    worlds.run(_kinds, 2)


def _without_tensor_ranks(rank: int, world: int) -> None:
    module = Mlp()
    fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    assert equal_options(module) is None
    refusal = (
        r"Parameter `norm.weight` is a DTensor.*and so are 5 more.*`fully_shard` does is `ZeroStrategy\(stage=3\)`"
    )
    with pytest.raises(ValueError, match=refusal):
        ZeroEngine(3).shard(module)
    module = Mlp()
    module.up.weight = nn.Parameter(distribute_tensor(module.up.weight.data, init_device_mesh("cpu", (world,))))
    assert equal_options(module) is None
    with pytest.raises(ValueError, match=r"Parameter `up.weight` is a DTensor.*before `parallelize_module`"):
        ZeroEngine(1).shard(module)


def test_parameters_of_fully_shard_are_cut_over_data_ranks() -> None:
    worlds.run(_without_tensor_ranks, 2)


def test_plain_parameters_pass() -> None:
    refuse_dtensors(Plain())
