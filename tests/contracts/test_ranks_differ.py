"""Ranks with different models, options, optimizers or calls get an error each that names the first difference."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.config import Communication, MixedPrecision, Offload
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.errors import CollectiveError
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.lightning_programs import WORLD, Net, loader, trainer
from tests.sampling import sample

Make = Callable[[int], tuple[nn.Module, dict[str, Any]]]


def _net(width: int = 4, layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def _with(change: Callable[[nn.Sequential], object]) -> Make:
    def make(rank: int) -> tuple[nn.Module, dict[str, Any]]:
        net = _net()
        if rank == 1:
            change(net)
        return net, {}

    return make


def _option(name: str, value: Any) -> Make:
    return lambda rank: (_net(), {name: value} if rank == 1 else {})


CASES: dict[str, tuple[Make, str]] = {
    "width": (lambda rank: (_net(4 + rank), {}), r"parameter `0.weight` is \(4, 4\) float32 trained on rank 0, \(5"),
    "layers": (lambda rank: (_net(layers=2 + rank % 2), {}), r"`2.weight` is missing on ranks 0, 2, \(4, 4\)"),
    "dtype": (_with(lambda net: net.double()), r"`0.weight` is .* float32 .*, .* float64 trained on rank 1"),
    "frozen": (_with(lambda net: net[1].bias.requires_grad_(False)), r"`1.bias` is .* trained on ranks 0, 2, .*frozen"),
    "tied": (_with(lambda net: setattr(net[1], "weight", net[0].weight)), r"`1.weight` is .*, tied to `0.weight` on"),
    "buffer": (_with(lambda net: net.register_buffer("b", torch.ones(2))), r"buffer `b` is missing .*, \(2,\) float32"),
    "order": (
        lambda rank: (nn.ModuleDict({key: nn.Linear(2, 2) for key in ("ab" if rank == 0 else "ba")}), {}),
        r"number \d+ is parameter `a.weight` on rank 0, parameter `b.weight` on ranks 1, 2",
    ),
    "stage": (lambda rank: (_net(), {"stage": 3 if rank == 1 else 2}), r"`stage` is 2 on ranks 0, 2, 3 on rank 1"),
    "units": (_option("units", ["Linear"]), r"`units` is None on ranks 0, 2, \['Linear'\] on rank 1"),
    "prefetch": (_option("communication", Communication(prefetch=3)), r"`communication.prefetch` is 1 .*, 3 on rank 1"),
    "reduce": (_option("communication", Communication(reduce_dtype="bf16")), r"reduce_dtype` is None .*, 'bf16'"),
    "precision": (_option("precision", MixedPrecision(compute_dtype=torch.bfloat16)), r"`precision` is .*bfloat16"),
    "offload": (_option("offload", Offload(optimizer="cpu")), r"`offload.optimizer` is None .*, 'cpu' on rank 1"),
    "moments": (_option("moments", "bf16"), r"`moments` is 'fp32' on ranks 0, 2, 'bf16' on rank 1"),
    "step": (_option("step", "deferred"), r"`step` is 'auto' on ranks 0, 2, 'deferred' on rank 1"),
}  # fmt: skip


def _shard(rank: int, world: int, name: str) -> str:
    module, options = CASES[name][0](rank)
    with pytest.raises(ValueError, match="The ranks have different models or options") as caught:
        ZeroEngine(**{"stage": 3, **options}).shard(module)
    return str(caught.value)


@pytest.mark.parametrize("name", sample(CASES, "width", "layers", "order", "stage", "buffer"))
def test_ranks_with_different_models_or_options_say_so_instead_of_aborting(name: str) -> None:
    said = worlds.run(_shard, 3, name)
    assert len(set(said)) == 1
    assert re.search(CASES[name][1], said[0]), said[0]


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module, int], list[torch.optim.Optimizer]], str]] = {
    "class": (
        lambda net, rank: [(torch.optim.SGD if rank else torch.optim.Adam)(net.parameters(), lr=0.1)],
        "optimizer 0 is Adam on rank 0, SGD on rank 1",
    ),
    "number": (
        lambda net, rank: [torch.optim.SGD(net[index].parameters(), lr=0.1) for index in range(2 - rank)],
        "optimizer 1 is SGD on rank 0, missing on rank 1",
    ),
    "parameters": (
        lambda net, rank: [torch.optim.SGD(list(net.parameters())[rank:], lr=0.1)],
        "`params` of group 0 of optimizer 0 is 0.weight, .* on rank 0, 0.bias, .* on rank 1",
    ),
    "rate": (
        lambda net, rank: [torch.optim.SGD(net.parameters(), lr=0.1 + rank)],
        "`lr` of group 0 of optimizer 0 is 0.1 on rank 0, 1.1 on rank 1",
    ),
}


def _attach(rank: int, world: int, name: str) -> str:
    engine = ZeroEngine(stage=3)
    module = engine.shard(_net())
    with pytest.raises(ValueError, match="The ranks have different optimizers") as caught:
        engine.attach(*OPTIMIZERS[name][0](module, rank))
    engine.close()
    return str(caught.value)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_with_different_optimizers_say_so(name: str) -> None:
    said = worlds.run(_attach, 2, name)
    assert len(set(said)) == 1
    assert re.search(OPTIMIZERS[name][1], said[0]), said[0]


# -- Calls of one rank -------------------------------------------------------------------------------------------------


class Alone(Net):
    """Runs a forward, or reads a parameter, in one hook of rank 0."""

    def __init__(self, hook: str, reads: bool) -> None:
        super().__init__()
        setattr(self, hook, self._go)
        self._reads = reads

    def _go(self, *_: Any) -> None:
        if self.global_rank == 0 and self._reads:
            self.trainer.strategy.full_param(next(self.parameters()))
        elif self.global_rank == 0:
            self(torch.randn(2, 4))


def _alone(rank: int, world: int, hook: str, reads: bool, precision: str) -> str:
    fitted = trainer(
        rank, world, ZeroStrategy(stage=3, timeout=8), max_epochs=1, precision=precision, gradient_clip_val=1.0
    )
    module = Alone(hook, reads)
    with pytest.raises(CollectiveError) as raised:
        fitted.fit(module, loader(rank, world), loader(rank, world))
    return str(raised.value)


@pytest.mark.parametrize("reads", sample([False, True], False), ids=["forward", "full_param"])
@pytest.mark.parametrize(
    "hook",
    sample(
        ["on_train_start", "on_train_batch_end", "on_train_epoch_end", "on_validation_epoch_end"], "on_train_batch_end"
    ),
)
def test_what_one_rank_does_alone_in_a_hook_is_an_error_on_both_that_names_it(hook: str, reads: bool) -> None:
    first, second = worlds.run(_alone, WORLD, hook, reads, "32-true", timeout_s=40)
    own = "reading of parameter `" if reads else "agreement on the next collective (unit `"
    assert f"the {own}" in first
    assert "rank 1 came for the agreement on signals" in first
    assert f"rank 0 came for the {own}" in second
    assert "inside `lightning_zero.gathered(module)`" in second


@pytest.mark.slow
@pytest.mark.parametrize("reads", [False, True], ids=["forward", "full_param"])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"])
def test_what_one_rank_does_alone_inside_a_step_crashes_no_interpreter(hook: str, precision: str, reads: bool) -> None:
    for text in worlds.run(_alone, WORLD, hook, reads, precision, timeout_s=60):
        assert "Every rank must make the same calls" in text
