"""Parameters that cannot be sharded are refused by name; what only looks like them is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor, init_device_mesh

from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.units.shardable import check_shardable
from tests import worlds
from tests.references import Case, train
from tests.sampling import highest_stages


def _linears() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def _lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))


def _lazy_buffer() -> nn.Module:
    return nn.Sequential(nn.LazyBatchNorm1d(affine=False))


def _tied_by_memory() -> nn.Module:
    module = _linears()
    module[2].weight.data = module[0].weight.data
    return module  # type: ignore[no-any-return]


def _view_of_another() -> nn.Module:
    module = _linears()
    module[2].bias.data = module[0].weight.data[1]
    return module  # type: ignore[no-any-return]


def _columns_of_another() -> nn.Module:
    module = _linears()
    module[2].weight = nn.Parameter(module[0].weight.data[:, 1:3])
    return module  # type: ignore[no-any-return]


def _buffer_of_parameter() -> nn.Module:
    module = _linears()
    module.register_buffer("shadow", module[0].weight.data)
    return module  # type: ignore[no-any-return]


def _sparse() -> nn.Module:
    module = _linears()
    module.adjacency = nn.Parameter(torch.eye(3).to_sparse())
    return module  # type: ignore[no-any-return]


def _expanded() -> nn.Module:
    module = _linears()
    module.scale = nn.Parameter(torch.ones(1).expand(4))
    return module  # type: ignore[no-any-return]


def _of_inference() -> nn.Module:
    with torch.inference_mode():
        return _linears()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Lazy modules", "ignore:.*quantized")
def _quantised() -> nn.Module:
    module = _linears()
    module.codes = nn.Parameter(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), requires_grad=False)
    return module  # type: ignore[no-any-return]


class _Closed(nn.Parameter):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        if cls.__qualname__ != "_Closed":
            raise TypeError("no subclasses")


def _closed() -> nn.Module:
    module = _linears()
    module.closed = _Closed(torch.ones(3))
    return module  # type: ignore[no-any-return]


def _graphed() -> nn.Module:
    """Return a module with a part whose forward is as ``torch.cuda.make_graphed_callables`` leaves it."""
    module = _linears()
    for child in (module[0], module[1]):

        def new_fwd(*args: Any, forward: Any = child.forward) -> Any:
            return forward(*args)

        new_fwd.__module__ = "torch.cuda.graphs"
        child.forward = new_fwd
    return module  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (_lazy, "Parameter `1.weight` has no shape.*Run one forward"),
    "lazy-buffer": (_lazy_buffer, "Buffer `0.running_mean` has no shape.*Run one forward"),
    "tied-by-memory": (_tied_by_memory, "`0.weight` and `2.weight`.*drift apart.*one object"),
    "view": (_view_of_another, "`0.weight` and `2.bias`"),
    "columns": (_columns_of_another, "`0.weight` and `2.weight`"),
    "buffer": (_buffer_of_parameter, "A buffer and a parameter.*`0.weight` and `shadow`.*clone"),
    "sparse": (_sparse, "`adjacency` has the layout torch.sparse_coo.*to_dense"),
    "expanded": (_expanded, "`scale` was expanded.*clone"),
    "inference": (_of_inference, "`0.weight` was made in inference mode"),
    "quantised": (_quantised, "`codes` is of PyTorch's quantised dtype torch.qint8.*int_repr"),
    "closed": (_closed, "`closed` is of class `_Closed`.*no subclasses"),
    "graphed": (_graphed, "Module `0` went through `make_graphed_callables`.*Leave that call out"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_a_parameter_that_cannot_be_sharded_is_refused_by_name(name: str) -> None:
    build, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        ZeroEngine(3).shard(build())


def test_a_graph_of_a_module_without_parameters_stays() -> None:
    module = _graphed()
    del module[0].forward
    check_shardable(module)


def _distributed(rank: int, world: int) -> None:
    module = _linears()
    mesh = init_device_mesh("cpu", (world,))
    module[0].weight = nn.Parameter(distribute_tensor(module[0].weight.data, mesh))
    with pytest.raises(ValueError, match=r"Parameter `0.weight` is a DTensor.*before `parallelize_module`"):
        ZeroEngine(3).shard(module)
    dist.barrier()


def test_a_distributed_tensor_is_refused_by_name() -> None:
    worlds.run(_distributed, 2)


def test_tensors_beside_one_another_in_one_storage_share_nothing() -> None:
    module = _linears()
    both = torch.randn(4, 8)
    module[0].weight.data, module[2].weight.data = both[:, ::2], both[:, 1::2]
    check_shardable(module)
    whole = torch.randn(32)
    module[0].weight.data, module[2].weight.data = whole[:16].view(4, 4), whole[16:].view(4, 4)
    check_shardable(module)
    module[0].weight = module[2].weight
    check_shardable(module)


# -- What trains as on a replica ---------------------------------------------------------------------------------------


class _Hooked(nn.Module):
    """Has hooks on its parameters from before it is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norms: list[torch.Tensor] = []
        self.inner.weight.register_hook(lambda grad: grad * 0.5)
        self.inner.weight.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, param: nn.Parameter) -> None:
        assert param.grad is not None
        self.norms.append(param.grad.norm())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(4, 4, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x[:, None])[0][:, 0]
        return y


class _Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList([nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4))])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(4)), "b": nn.ParameterList([torch.randn(4)])})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = (x * self.items[0]) @ self.items[1] + self.named["a"] * self.named["b"][0]
        return y


def _old_weight_norm() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(4, 4))


def _old_spectral_norm() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(4, 4))


def _weight_norm() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


def _after_lazy() -> nn.Module:
    layer = nn.LazyLinear(4)
    layer(torch.zeros(1, 4))
    return layer


MODELS: dict[str, Callable[[], nn.Module]] = {
    "hooked": _Hooked,
    "recurrent": _Recurrent,
    "containers": _Containers,
    "old-weight-norm": _old_weight_norm,
    "old-spectral-norm": _old_spectral_norm,
    "weight-norm": _weight_norm,
    "after-lazy": _after_lazy,
}


class _Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = MODELS[name]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


def _loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + step)
    loss: torch.Tensor = module(torch.randn(3, 4, generator=generator)).square().mean()
    return loss


CASES = {
    name: Case(
        build=lambda name=name: nn.Sequential(_Block(name), _Block(name)),  # type: ignore[misc]
        program=lambda trainer: train(trainer, loss=_loss),
        units=("_Block",),
        tolerance=1e-6,
    )
    for name in MODELS
}


def _check(rank: int, world: int, name: str, stages: tuple[int, ...]) -> dict[str, str]:
    return dataclasses.replace(CASES[name], stages=stages).check(rank, world)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "stages"), highest_stages(CASES))
def test_parameters_that_modules_treat_in_their_own_way_train_as_on_a_replica(
    name: str, stages: tuple[int, ...]
) -> None:
    assert worlds.run(_check, 2, name, stages) == [{}] * 2
