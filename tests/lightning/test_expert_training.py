from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.errors import PartialParameterError
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.moe import MoE
from tests.lightning_programs import trainer
from tests.worlds import run

H = 4


class Program(LightningModule):
    """A mixture; its hooks look at the parameters of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(H, nn.Linear(H, H), 4, k=2)
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output, aux_loss, _ = self.moe(batch)
        return output.square().mean() + aux_loss

    def on_train_batch_end(self, *args: Any) -> None:
        weight = self.moe.experts.weight
        self.seen = {"shape": tuple(weight.shape), "ndim": weight.ndim}
        with pytest.raises(PartialParameterError, match=r"with `expert_parallel` this rank has a part of shape \(2, 4"):
            weight.norm()

    def configure_optimizers(self) -> Any:
        matrices = [param for param in self.parameters() if param.shape == (4, H, H)]
        assert len(matrices) == 1
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _loader() -> DataLoader[Any]:
    return DataLoader(torch.randn(4, H), batch_size=2)  # type: ignore[arg-type]


def _fit(module: LightningModule, rank: int, world: int, size: int | None) -> Any:
    fitted = trainer(rank, world, ZeroStrategy(stage=2, expert_parallel=size), max_epochs=1)
    fitted.fit(module, _loader())
    return fitted


def _faces(rank: int, world: int) -> dict[str, Any]:
    module = Program()
    _fit(module, rank, world, 2)
    return module.seen


def test_parameters_of_experts_look_whole_to_the_program() -> None:
    assert run(_faces, 2) == [{"shape": (4, H, H), "ndim": 3}] * 2


def _in_turn(rank: int, world: int) -> list[str]:
    module = Program()
    before = _fit(module, rank, world, 2).strategy.full_param(module.moe.experts.weight)
    after = _fit(module, rank, world, 2).strategy.full_param(module.moe.experts.weight)
    assert before.shape == after.shape == (4, H, H)
    assert not torch.equal(before, after)
    with pytest.raises(PartialParameterError, match=r"by an earlier Trainer with `expert_parallel=2`"):
        module.training_step(torch.randn(2, H), 0)
    messages = []
    for size in (None, 4):
        with pytest.raises(ValueError, match="expert") as caught:
            _fit(module, rank, world, size)
        messages.append(str(caught.value))
    return messages


def test_a_module_is_fitted_again_with_the_same_number_of_ranks_alone() -> None:
    for messages in run(_in_turn, 4):
        start = "The experts of `Program` are divided over 2 ranks by an earlier Trainer with `expert_parallel=2`, and"
        assert messages[0].startswith(f"{start} this strategy does not divide them.")
        assert messages[1].startswith(f"{start} `expert_parallel=4` would divide them otherwise.")


def _plan(rank: int, world: int) -> list[str]:
    fitted = _fit(Program(), rank, world, 2)
    return fitted.strategy._experts.lines(fitted.lightning_module)  # type: ignore[no-any-return]


def test_the_plan_names_the_groups() -> None:
    line = "experts of 1 layers: divided over 2 neighbouring ranks, 2 of a layer on each; sharded over 2 ranks"
    assert run(_plan, 4) == [[line]] * 4


class Leaving(Program):
    """Ends its first fit with a transfer that nobody has waited for; with ``fails`` rank 1 has not started it."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def on_train_end(self) -> None:
        if self.trainer.max_epochs == 1:
            if not self.fails or self.global_rank == 0:
                self.moe.experts.ranks.start(torch.ones(2, H), [1, 1], [1, 1])  # type: ignore[union-attr]
            if self.fails:
                raise ArithmeticError("the end")


def _left(rank: int, world: int, fails: bool) -> bool:
    module = Leaving(fails)
    with pytest.raises(ArithmeticError) if fails else nullcontext():
        _fit(module, rank, world, 2)
    last = module.moe.experts.ranks._last  # type: ignore[union-attr]
    is_left = bool(last._works)  # type: ignore[union-attr]
    fitted = trainer(rank, world, ZeroStrategy(stage=2, expert_parallel=2), max_epochs=2)
    fitted.fit(module, _loader())
    return is_left


@pytest.mark.parametrize("fails", [False, True])
def test_a_fit_waits_for_what_is_on_its_way_unless_it_has_failed(fails: bool) -> None:
    assert run(_left, 2, fails)[0] == fails
