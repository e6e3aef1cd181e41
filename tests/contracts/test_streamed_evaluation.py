"""A model that is only evaluated streams its parameters from where they sleep, unit by unit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.config import Offload
from lightning_zero.lightning.strategy import ZeroStrategy
from lightning_zero.sharding import Sharding
from tests import worlds
from tests.lightning_programs import Block, Net, assert_equal, loader, nodes, seeded, trainer, weights

WIDTH, DEPTH = 16, 6


class Deep(Net):
    """Enough blocks to tell two of them from all."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(DEPTH)])


def _evaluated(rank: int, world: int, verb: str, **options: Any) -> tuple[Any, Any, Any]:
    """Run a loop without an optimizer; return what it gave, the engine's statistics and its units' bytes."""
    strategy = ZeroStrategy(stage=3, units=["Block"], **options.pop("strategy", {}))
    run = trainer(rank, world, strategy, **options)
    result = getattr(run, verb)(seeded(Deep), loader(rank, world))
    sizes = [sum(buffer.whole.flat.nbytes for buffer in unit.buffers) for unit in strategy.engine.internals.fits.units]
    return result, strategy.engine.stats(), sizes


def _compare(rank: int, world: int) -> None:
    on_disk = Offload(optimizer="nvme", path=tempfile.gettempdir(), direct=False)
    on_host = Offload(optimizer=None, params="cpu")
    for verb, precisions, offloads in (
        ("predict", ("32-true", "bf16-true"), ("cpu", on_host, on_disk)),
        ("validate", ("32-true",), ("cpu",)),
        ("test", ("32-true",), ("cpu",)),
    ):
        for precision in precisions:
            expected, *_ = _evaluated(rank, world, verb, precision=precision)
            for offload in offloads:
                found, stats, sizes = _evaluated(rank, world, verb, precision=precision, strategy={"offload": offload})
                if verb == "predict":
                    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
                else:
                    assert found == expected
                assert stats.memory["parameters"] == stats.memory["optimizer"] == stats.host["optimizer"] == 0
                assert stats.host["parameters"] == (0 if offload is on_disk else sum(sizes) // world)
                assert stats.peak_gathered <= sizes[0] + 2 * max(sizes[1:])  # root, one in use, one ahead


def test_evaluation_streams_parameters_through_two_units_of_memory() -> None:
    for world in (1, 2):
        worlds.run(_compare, world)


def _evaluate_file(rank: int, world: int, path: str) -> None:
    saved = trainer(rank, world, ZeroStrategy(stage=3), precision="bf16-true", max_steps=1)
    saved.fit(seeded(Deep), loader(rank, world))
    saved.save_checkpoint(path)
    for offload in ("cpu", Offload(optimizer=None, params="cpu")):
        strategy = ZeroStrategy(stage=3, units=["Block"], offload=offload)
        run = trainer(rank, world, strategy, precision="bf16-true")
        run.validate(seeded(Deep), loader(rank, world), ckpt_path=path, verbose=False)
        stats = strategy.engine.stats()
        assert stats.memory["parameters"] == stats.memory["optimizer"] == stats.host["optimizer"] == 0


def test_evaluation_of_a_checkpoint_makes_no_masters(tmp_path: Path) -> None:
    worlds.run(_evaluate_file, 2, str(tmp_path / "saved.ckpt"))


def _train_after(rank: int, world: int) -> None:
    plain = trainer(rank, world, ZeroStrategy(stage=3, units=["Block"]), precision="bf16-mixed")
    plain.fit(seeded(Deep), loader(rank, world))
    strategy = ZeroStrategy(stage=3, units=["Block"], offload="cpu")
    module = seeded(Deep)
    run = trainer(rank, world, strategy, precision="bf16-mixed")
    run.validate(module, loader(rank, world), verbose=False)
    assert strategy.engine.stats().memory["parameters"] == 0
    engine = strategy.engine
    run.fit(module, loader(rank, world))
    assert strategy.engine is engine  # nothing was gathered to start anew
    assert strategy.engine.stats().memory["parameters"] > 0
    assert_equal(weights(run), weights(plain))


def test_a_fit_after_a_validation_has_its_parameters_on_the_device() -> None:
    for world in (1, 2):
        worlds.run(_train_after, world)


def _evaluate_nodes(rank: int, world: int, node: int, offload: Any) -> list[Any]:
    found = []
    for option in (None, offload):
        strategy = ZeroStrategy(stage=Sharding(params="node", grads="node"), offload=option)
        run = trainer(rank, world, strategy, **nodes(rank, world, node))
        module = seeded(Net)
        found.append(run.validate(module, loader(rank, world), verbose=False))
        run.fit(module, loader(rank, world))
    return found


@pytest.mark.parametrize(("node", "target"), [(1, "cpu"), (2, "nvme")], ids=["nodes-of-one", "disks"])
def test_a_model_of_nodes_is_evaluated_with_the_offload_that_a_fit_accepts(node: int, target: str) -> None:
    """It was refused because of `Offload(params=...)`, which nobody had given."""
    path = tempfile.gettempdir() if target == "nvme" else None
    offload = Offload(optimizer=target, path=path, direct=path is None)
    for plain, offloaded in worlds.run(_evaluate_nodes, 2, node, offload):
        assert plain == offloaded
