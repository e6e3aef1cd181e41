"""``ActivationCheckpointing(policy="partition")``: a rank keeps its piece of an input; training has the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import ActivationCheckpointing
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.parallel.activation import partition
from lightning_zero.parallel.activation.checkpointing import checkpoint_activations
from lightning_zero.parallel.activation.partition import PartitionedInputs, ReplicatedInputs
from lightning_zero.parallel.tensor.collectives import ProcessGroupRanks
from tests.contracts.test_tensor_parallel import Program, loaders
from tests.lightning_programs import trainer, weights
from tests.parallel.tensor.families import WIDTH
from tests.worlds import run, seed

PIECES: list[int] = []  # elements that this rank has kept


def _counted(monkeypatch: Any) -> None:
    made = partition._Piece.__init__

    def init(piece: Any, tensor: Tensor, ranks: Any) -> None:
        made(piece, tensor, ranks)
        PIECES.append(piece.elements.untyped_storage().nbytes() // piece.elements.itemsize)

    monkeypatch.setattr(partition._Piece, "__init__", init)


# -- Through the Trainer -----------------------------------------------------------------------------------------------


def _fitted(rank: int, world: int, options: dict[str, Any], family: str, more: dict[str, Any]) -> dict[str, Tensor]:
    strategy = ZeroStrategy(**options)
    module = Program(family)
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.1  # the recomputation draws the same masks
    fitted = trainer(rank, world, strategy, max_steps=4, limit_val_batches=0, **more)
    slice_ = strategy.distributed_sampler_kwargs
    seed(3)
    fitted.fit(module, loaders(family, slice_["num_replicas"], slice_["rank"])["train_dataloaders"])
    return {name: value for name, value in weights(fitted).items() if not name.startswith(("mean", "count"))}


def _compare(rank: int, world: int, options: dict[str, Any], family: str, more: dict[str, Any]) -> list[int]:
    outcomes = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        PIECES.clear()
        _counted(monkeypatch)
        for policy in ("full", "partition"):
            given = {**options, "activation_checkpointing": {"policy": policy}}
            outcomes.append(_fitted(rank, world, given, family, more))
    for name, value in outcomes[0].items():
        assert torch.equal(value, outcomes[1][name]), name
    return list(PIECES)


TWO_STAGES = {"stages": 2, "microbatches": 2}
CASES: list[Any] = [
    (2, {"stage": 1, "tensor_parallel": 2}, "hand-separate", {}),
    (4, {"stage": 3, "tensor_parallel": 2}, "hand-separate", {"accumulate_grad_batches": 2}),
    (4, {"stage": 2, "tensor_parallel": 4}, "hand-separate", {}),
    (2, {"stage": 3, "tensor_parallel": 2, "offload": "cpu"}, "llama", {}),
    (2, {"stage": 1, "tensor_parallel": 2}, "t5", {}),
    (4, {"stage": 1, "tensor_parallel": 2, "pipeline": TWO_STAGES}, "hand-separate", {}),
    (4, {"stage": 1, "tensor_parallel": 2, "pipeline": {**TWO_STAGES, "schedule": "zb_h1"}}, "hand-separate", {}),
]


def _sampled(cases: list[Any], *kept: int) -> list[Any]:
    """Return cases as parameters; others than those ``kept`` are marked slow."""
    return [pytest.param(*case, marks=() if number in kept else pytest.mark.slow) for number, case in enumerate(cases)]


@pytest.mark.parametrize(("world", "options", "family", "more"), _sampled(CASES, 0, 1, 5), ids=str)
def test_trained_weights_have_the_bits_of_full(
    world: int, options: dict[str, Any], family: str, more: dict[str, Any]
) -> None:
    for pieces in run(_compare, world, options, family, more):
        assert pieces


def test_a_rank_keeps_its_piece_of_the_input_of_every_call() -> None:
    batch, length, steps, blocks = 4, 12, 4, 2
    for pieces in run(_compare, 2, {"stage": 1, "tensor_parallel": 2}, "hand-separate", {}):
        assert pieces == [batch * length * WIDTH // 2] * (steps * blocks)


def test_one_tensor_rank_keeps_as_much_as_full() -> None:
    assert run(_compare, 1, {"stage": 1, "tensor_parallel": 1}, "hand-separate", {}) == [[]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "divides the inputs of blocks over tensor ranks, and there are none. Use it with `tensor_parallel=...`"),
        ({"tensor_parallel": {"size": 2, "sequence": True}}, "each has its own part of the sequence already"),
    ],
    ids=str,
)
def test_it_is_refused_without_inputs_that_all_ranks_have(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ZeroStrategy(activation_checkpointing={"policy": "partition"}, **options)


# -- Inputs ------------------------------------------------------------------------------------------------------------


class Doubling(nn.Module):
    """Multiplies its first argument by a weight and adds the others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 2.0))

    def forward(self, x: Any, *more: Tensor, shift: Any = None) -> Tensor:
        x = x["x"] if isinstance(x, dict) else x
        for one in (*more, *([] if shift is None else [shift])):
            x = x + one
        return (x * self.weight).tanh()


def _gradients(make: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]], rank: int, ranks: Any) -> list[Tensor]:
    """Return the gradients of a checkpointed call's inputs and weight, and whether its input is alive meanwhile."""
    module = nn.Sequential(Doubling())
    policy = "full" if ranks is None else "partition"
    checkpoint_activations(module, ActivationCheckpointing(modules=[Doubling], policy=policy), ranks)  # type: ignore[arg-type]
    args, kwargs = make(rank)
    found = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.requires_grad]
    found += [one["x"] for one in args if isinstance(one, dict)]
    module[0](*[_computed(one) for one in args], **kwargs).sum().backward()
    return [*(one.grad for one in found if one.is_leaf), module[0].weight.grad]


def _computed(one: Any) -> Any:
    return one * 1.0 if isinstance(one, Tensor) and one.requires_grad else one


def _leaf(*shape: int, rank: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=dtype).requires_grad_()


INPUTS: dict[str, Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "even": lambda rank: ((_leaf(4, 6),), {}),
    "uneven": lambda rank: ((_leaf(3, 3, 3),), {}),
    "fewer than ranks": lambda rank: ((_leaf(1),), {}),
    "bf16": lambda rank: ((_leaf(5, 3, dtype=torch.bfloat16),), {}),
    "complex": lambda rank: ((_leaf(3, dtype=torch.complex64).abs().detach().requires_grad_(),), {}),
    "transposed": lambda rank: ((_leaf(3, 5).detach().t().requires_grad_(),), {}),
    "expanded": lambda rank: ((_leaf(1, 5).detach().expand(4, 5).requires_grad_(), _leaf(4, 5)), {}),
    "by name": lambda rank: ((_leaf(4),), {"shift": _leaf(4)}),
    "in a dictionary": lambda rank: (({"x": _leaf(4, 2)},), {}),
    "a mask": lambda rank: ((_leaf(4), torch.tensor([1.0, 0.0, 1.0, 1.0])), {}),
    "empty": lambda rank: ((_leaf(0, 3),), {}),
    "its own on each rank": lambda rank: ((_leaf(4, 4), _leaf(4, 4, rank=rank)), {}),
}


def _both(rank: int, world: int, kind: str) -> None:
    make = INPUTS[kind]
    expected = _gradients(make, rank, None)
    for one, other in zip(_gradients(make, rank, ProcessGroupRanks()), expected, strict=True):
        assert torch.equal(one, other), kind


@pytest.mark.parametrize("kind", INPUTS)
def test_gradients_have_the_bits_of_full(kind: str) -> None:
    run(_both, 3, kind)


def _later(rank: int, world: int) -> str:
    module = nn.Sequential(Doubling())
    options = ActivationCheckpointing(modules=[Doubling], policy="partition")
    checkpoint_activations(module, options, ProcessGroupRanks())
    module[0](_leaf(4)).sum().backward()
    try:
        module[0](_leaf(4, rank=rank)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_input_that_differs_in_a_later_call_is_an_error() -> None:
    for text in run(_later, 2):
        assert "was the same on all ranks of the tensor group in its first call" in text


def _shared(rank: int, world: int) -> None:
    modules = nn.ModuleList([Doubling() for _ in range(3)])
    options = ActivationCheckpointing(modules=[Doubling], policy="partition")
    checkpoint_activations(modules, options, ProcessGroupRanks())
    x, memory = _leaf(4), _leaf(6) * 1.0
    with pytest.MonkeyPatch.context() as monkeypatch:
        PIECES.clear()
        _counted(monkeypatch)
        for module in modules:
            x = module(x, memory[:4] if module is modules[0] else memory.sum())
        first = len(PIECES)
        kept = memory * 2.0
        for module in modules:
            x = module(x, kept.sum() * 0.0, kept.mean())
        both = _leaf(4)
        total = modules[0](both, both)
        assert PIECES[-1] == 2
        assert len(PIECES) == first + 9 + 1  # an argument that is given twice is kept once
    (x.sum() + total.sum()).backward()
    assert both.grad is not None


def test_a_tensor_that_is_given_twice_is_kept_once() -> None:
    run(_shared, 2)


def _changed(rank: int, world: int) -> None:
    module = nn.Sequential(Doubling())
    options = ActivationCheckpointing(modules=[Doubling], policy="partition")
    checkpoint_activations(module, options, ProcessGroupRanks())
    x = _leaf(4)
    given = x * 1.0
    result = module[0](given)
    with torch.no_grad():
        given.zero_()  # the recomputation has the values of the forward
    result.sum().backward()
    (expected,) = torch.autograd.grad((x * module[0].weight).tanh().sum(), x)
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


def test_an_input_may_be_changed_behind_the_call() -> None:
    run(_changed, 2)


def _copied(rank: int, world: int) -> None:
    module = nn.Sequential(Doubling())
    checkpoint_activations(module, ActivationCheckpointing(modules=[Doubling], policy="partition"), ProcessGroupRanks())
    other = copy.deepcopy(module)
    with torch.no_grad():
        other[0].weight.zero_()
    assert not other[0](_leaf(3)).any()
    other[0](_leaf(3)).sum().backward()
    assert module[0].weight.grad is None


def test_a_copy_of_a_module_divides_its_own_inputs() -> None:
    run(_copied, 2)


def _compiled(rank: int, world: int, is_wrapped: bool) -> None:
    module = nn.Sequential(Doubling())
    if is_wrapped:
        module[0] = torch.compile(module[0], backend="eager")  # type: ignore[assignment]
    options = ActivationCheckpointing(modules=[Doubling], policy="partition")
    checkpoint_activations(module, options, ProcessGroupRanks())
    if not is_wrapped:
        module[0].compile(backend="eager")
    with pytest.MonkeyPatch.context() as monkeypatch:
        PIECES.clear()
        _counted(monkeypatch)
        x = _leaf(4)
        module[0](x * 1.0).sum().backward()
        assert PIECES == [2]
    (expected,) = torch.autograd.grad((x * module[0].weight).tanh().sum(), x)
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["compile()", "torch.compile"])
def test_compiled_blocks_divide_their_inputs(is_wrapped: bool) -> None:
    run(_compiled, 2, is_wrapped)


class Alone:
    """A tensor group whose other ranks have the same tensors."""

    rank, size = 1, 3

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor] * 3


def test_masks_and_gaps_are_kept_whole() -> None:
    wide = torch.randn(4, 6).requires_grad_()
    leaves = [wide, wide[:, :3], torch.ones(3), 5, wide.t()]
    assert ReplicatedInputs().among(leaves, Alone()) == {0, 4}


def test_a_piece_has_the_elements_of_its_rank_in_the_order_of_memory() -> None:
    tensor = torch.arange(7.0)
    assert partition._Piece(tensor, Alone()).elements.tolist() == [3.0, 4.0, 5.0]
    shared = PartitionedInputs(Alone())
    assert shared._piece(tensor) is not shared._piece(tensor.clone())


def test_the_message_of_an_input_that_differs_fits_into_an_assertion_on_a_gpu() -> None:
    assert len(partition._DIFFERENT.encode()) < 255
