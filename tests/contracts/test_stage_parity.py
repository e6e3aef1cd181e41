"""Every stage trains as DistributedDataParallel does."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests import references, worlds
from tests.references import Case, Replica, TinyGPT, difference, token_loss, train, train_reference, train_zero
from tests.sampling import sample

OPTIMIZERS: dict[str, Any] = {
    "adamw": references.adamw,
    "adamw-for-loop": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4, fused=False),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1, fused=True),
    "adamw-foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
    "adam-amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, fused=True),
    "sgd-for-loop": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=False),
    "sgd-nesterov": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True
    ),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=1e-2),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=1e-2),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
}


class _Distributed(Replica):
    """torch's own DistributedDataParallel behind the interface of a trainer."""

    def __init__(self, module: nn.Module, rank: int, world: int) -> None:
        self.module = module
        self.rank = rank
        self.world = world
        self.losses = []
        self._ddp = DistributedDataParallel(module)
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def microbatch(self, last: bool):  # type: ignore[no-untyped-def]
        with contextlib.nullcontext() if last else self._ddp.no_sync():
            yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.losses.append(loss.detach().clone())
        loss.backward(**kwargs)


def _train_ddp(rank: int, world: int, program: Any) -> references.Outcome:
    worlds.seed()
    trainer = _Distributed(TinyGPT(), rank, world)
    bare = trainer.module
    trainer.module = trainer._ddp
    program(trainer)
    trainer.module = bare
    return references.outcome(trainer)


def _program(optimizer: str, **options: Any) -> Any:
    def program(trainer: Any) -> None:
        train(trainer, loss=token_loss, optimizer=OPTIMIZERS[optimizer], **options)

    return program


def _reference_against_ddp(rank: int, world: int, options: dict[str, Any]) -> str:
    program = _program("adamw", **options)
    reference = train_reference(TinyGPT, program, rank, world, average="once")
    return difference(reference, _train_ddp(rank, world, program), 0.0 if world == 2 else 1e-6)


def _engine_against_ddp(rank: int, world: int, optimizer: str, options: dict[str, Any]) -> dict[str, str]:
    program = _program(optimizer, **options)
    expected = _train_ddp(rank, world, program)
    tolerance = 0.0 if world == 2 and "max_norm" not in options else 1e-6
    found = {}
    for stage in (0, 1, 2, 3):
        actual = train_zero(TinyGPT, program, rank, world, stage=stage, units=("Block",))
        found[stage] = difference(actual, expected, tolerance)
    return {f"stage {stage}": text for stage, text in found.items() if text}


def _engine_against_reference(rank: int, world: int, options: dict[str, Any]) -> dict[str, str]:
    case = Case(build=TinyGPT, program=_program("adamw", **options), tolerance=0.0 if world < 3 else 1e-6)
    return case.check(rank, world)


@pytest.mark.parametrize("world", sample([2, 3], 2))
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=["plain", "accumulated"])
def test_reference_is_ddp(world: int, options: dict[str, Any]) -> None:
    assert worlds.run(_reference_against_ddp, world, options) == [""] * world


@pytest.mark.parametrize("optimizer", sample(OPTIMIZERS, "adamw", "adamw-for-loop", "sgd-nesterov"))
def test_two_ranks_train_as_ddp_to_the_last_bit(optimizer: str) -> None:
    assert worlds.run(_engine_against_ddp, 2, optimizer, {"steps": 4}) == [{}, {}]


@pytest.mark.parametrize("world", sample([3, 4], 3))
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_more_ranks_train_as_ddp_within_1e_6(world: int, optimizer: str) -> None:
    assert worlds.run(_engine_against_ddp, world, optimizer, {}) == [{}] * world


def test_clipped_norms_train_as_ddp_within_1e_6() -> None:
    assert worlds.run(_engine_against_ddp, 2, "adamw", {"max_norm": 0.1}) == [{}, {}]


@pytest.mark.parametrize("world", [1, 2])
def test_accumulated_micro_batches_are_averaged_in_the_order_of_the_stage(world: int) -> None:
    assert worlds.run(_engine_against_reference, world, {"micro_batches": 3}) == [{}] * world


# -- Stages among themselves -------------------------------------------------------------------------------------------

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16-mixed": {"precision": {"compute_dtype": torch.bfloat16}},
    "fp16-mixed": {"precision": {"compute_dtype": torch.float16}},
    "bf16-reduced": {"precision": {"compute_dtype": torch.bfloat16}, "communication": {"reduce_dtype": "bf16"}},
    "bf16-true": {"dtype": torch.bfloat16},
    "bf16-true-without-masters": {"dtype": torch.bfloat16, "precision": {"masters": False}},
    "fp64": {"dtype": torch.float64},
}
UNITS: dict[str, Any] = {"blocks": ("Block",), "root": None, "leaves": (nn.Linear, nn.LayerNorm, nn.Embedding)}


def _mixed_loss(compute_dtype: torch.dtype | None) -> Any:
    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        if compute_dtype is None:
            return token_loss(module, rank, step)
        with torch.autocast("cpu", compute_dtype):
            return token_loss(module, rank, step)

    return loss


def _among_themselves(rank: int, world: int, precision: str, max_norm: float | None) -> list[str]:
    from lightning_zero.config import Communication, MixedPrecision

    settings = PRECISIONS[precision]
    mixed = settings.get("precision", {})

    def program(trainer: Any) -> None:
        train(trainer, loss=_mixed_loss(mixed.get("compute_dtype")), max_norm=max_norm, steps=3)

    def build() -> nn.Module:
        return TinyGPT().to(settings.get("dtype", torch.float32))

    expected, found = None, []
    for stage in (1, 2, 3):
        for units in UNITS:
            for prefetch in (0, 1, 2) if stage == 3 else (1,):
                communication = Communication(prefetch=prefetch, **settings.get("communication", {}))
                actual = train_zero(
                    build, program, rank, world, stage=stage, units=UNITS[units], communication=communication,
                    precision=MixedPrecision(**mixed),
                )  # fmt: skip
                expected = expected or actual
                found.append((f"stage {stage}, units {units}, prefetch {prefetch}", difference(actual, expected)))
    return [": ".join(pair) for pair in found if pair[1]]


@pytest.mark.parametrize("world", sample([2, 3], 2))
@pytest.mark.parametrize("precision", sample(PRECISIONS, "bf16-mixed"))
def test_sharded_stages_units_and_prefetch_give_the_same_bits(precision: str, world: int) -> None:
    assert worlds.run(_among_themselves, world, precision, 0.5) == [[]] * world
