"""Random numbers and recomputation where every rank has a part of the sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.errors import PartialParameterError
from lightning_zero.parallel.tensor.collectives import ProcessGroupRanks
from lightning_zero.parallel.tensor.plan import TensorPlan
from lightning_zero.parallel.tensor.transform import cut_module
from tests.worlds import run

PLAN = TensorPlan(
    {"layers.*.up": "column", "layers.*.down": "row"},
    sequence={"layers.*": {0: "scatter"}, "layers.*.up": {0: "gather"}},
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.5)
        self.lengths: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.lengths.append(x.shape[1])
        dropped: Tensor = self.drop(self.down(self.up(self.norm(x)).relu()))
        return x + dropped


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])

    def forward(self, x: Tensor, recomputed: bool) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        return x


def _run(rank: int, world: int, recomputed: bool) -> tuple[Tensor, Tensor, Tensor, list[int], Tensor]:
    torch.manual_seed(1)
    model = Model()
    cut_module(model, PLAN, ProcessGroupRanks())
    torch.manual_seed(5)
    x = torch.randn(2, 6, 4, requires_grad=True)
    y = model(x, recomputed)
    y.square().sum().backward()
    assert x.grad is not None
    lengths = [length for layer in model.layers for length in layer.lengths]
    return y.detach(), x.grad, model(x, False).detach(), lengths, torch.rand(2)


def test_ranks_agree_behind_the_last_block_and_recompute_what_they_computed() -> None:
    (one, other), again = run(_run, 2, False), run(_run, 2, True)
    for number in (0, 1, 2, 4):  # results, gradients, the step after, the random numbers behind it
        assert torch.equal(one[number], other[number])
        assert torch.equal(one[number], again[0][number])
        assert torch.equal(one[number], again[1][number])
    assert set(one[3]) == {3}


def test_masks_of_parts_of_the_sequence_differ() -> None:
    result = run(_run, 2, False)[0][0]
    torch.manual_seed(5)
    changed = (result - torch.randn(2, 6, 4)).abs() > 1e-6
    assert not torch.equal(changed[:, :3], changed[:, 3:])


def _left_out(rank: int, world: int, compiled: tuple[int, ...]) -> None:
    model = Model()
    for number in compiled:
        layer = model.layers[number]
        layer._compiled_call_impl = layer._call_impl  # as `compile` leaves it, whose code is not run but traced once
    cut_module(model, PLAN, ProcessGroupRanks())
    first, middle, last = model.layers
    x = torch.randn(2, 6, 4)
    with pytest.raises(PartialParameterError, match="`Layer` .* first one did not run.*layerdrop=0.0"):
        last(middle(x))
    middle(first(x))
    with pytest.raises(PartialParameterError, match="last block of its list did not run in the forward before"):
        first(x)
    model(x.requires_grad_(), True).sum().backward()
    with pytest.raises(RuntimeError, match="normalized_shape"):
        middle(first(x)[..., :3])
    model(x, False)
    first._compiled_call_impl = first._call_impl  # compiled too late
    last(middle(x))


@pytest.mark.parametrize("compiled", [(), (0,), (0, 1, 2)], ids=["none", "first", "all"])
def test_blocks_that_are_left_out_at_the_ends_of_a_divided_sequence_are_an_error(compiled: tuple[int, ...]) -> None:
    """LayerDrop: the loss was that of a part of the sequence. Nobody noticed where a block was compiled."""
    run(_left_out, 2, compiled)
