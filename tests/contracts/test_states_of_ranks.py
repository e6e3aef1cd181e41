"""A resumed rank goes on with its own data and callbacks, not with rank 0's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from lightning_zero.config import Pipeline
from lightning_zero.lightning.rank_states import LOADERS, differing_paths, digests_of, kept_states
from lightning_zero.lightning.strategy import ZeroStrategy
from tests.lightning_programs import WORLD, Net, seeded, trainer
from tests.worlds import run

STEPS = 6  # of an epoch


class _Loader:
    """Yields this rank's numbers, each once per epoch; has torchdata's protocol."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position, self.epoch = rank, 0, 0

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.position == STEPS:
            self.position, self.epoch = 0, self.epoch + 1
        while self.position < STEPS:
            self.position += 1
            yield _batch(self.rank, self.epoch * STEPS + self.position)

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


class _Endless:
    """A loader that cannot say how long it is, and hands out its live state."""

    def __init__(self, rank: int) -> None:
        self._loader = _Loader(rank)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._loader)

    def state_dict(self) -> dict[str, int]:
        return vars(self._loader)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._loader.load_state_dict(state)


class _Stream(IterableDataset[Any]):
    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.position < 2 * STEPS:
            self.position += 1
            x, y = _batch(self.rank, self.position)
            yield x[0], y[0]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def _batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    return torch.full((2, 4), rank + number / 100), torch.zeros(2, 3)


class _Numbers(Dataset[Any]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = _batch(self.rank, index)
        return x[0], y[0]


def _torchdata(rank: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(rank)
    return StatefulDataLoader(_Numbers(rank), batch_size=2, shuffle=True, generator=generator)


def _torchdata_stream(rank: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(_Stream(rank), batch_size=2)


class _Data(LightningDataModule):
    def __init__(self, rank: int, make: Any) -> None:
        super().__init__()
        self.rank, self.make = rank, make

    def train_dataloader(self) -> Any:
        return self.make(self.rank)

    def state_dict(self) -> dict[str, Any]:
        return {"of": self.rank}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict["of"]


class _Sees(Callback):
    """Keeps what this rank was given; rank 1 alone counts too."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.seen: list[float] = []
        self.count = torch.zeros(())

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(round(float(batch[0].sum()), 3))
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"of": self.rank, "count": self.count} if self.rank else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert self.rank == state_dict["of"], "another rank's"
        self.count = state_dict["count"]


class _Saves(Callback):
    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class _OwnIO(TorchCheckpointIO):
    """A plugin that somebody wrote."""


def _fit(
    rank: int, world: int, make: Any, kind: str, ckpt_path: str | None = None, save: tuple[int, str] = (0, "")
) -> Any:
    sees, data = _Sees(rank), _Data(rank, make)
    stage = 3 if kind == "sharded" else 1
    plugins = [_OwnIO()] if kind == "plugin" else []
    fitted = trainer(rank, world, stage, callbacks=[sees, _Saves(*save)], max_epochs=2, plugins=plugins)
    fitted.fit(seeded(Net), datamodule=data, ckpt_path=ckpt_path)
    assert ckpt_path is None or getattr(data, "loaded", None) == rank
    return fitted, sees


def _resume(rank: int, world: int, make: Any, kind: str, steps: int, path: str, until: int | None = None) -> None:
    _, whole = _fit(rank, world, make, kind, save=(steps, path))
    _, resumed = _fit(rank, world, make, kind, path)
    assert len(whole.seen) == 2 * STEPS
    until = until or len(whole.seen)
    assert resumed.seen[: until - steps] == whole.seen[steps:until]
    assert int(resumed.count) == (len(whole.seen) if rank else len(resumed.seen))


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("steps", [4, STEPS + 2])
@pytest.mark.parametrize("make", [_Loader, _Endless], ids=["sized", "without a length"])
def test_a_rank_resumes_with_its_own_place_in_its_own_data(make: Any, steps: int, kind: str, tmp_path: Path) -> None:
    run(_resume, WORLD, make, kind, steps, str(tmp_path / "saved.ckpt"))


@pytest.mark.parametrize("kind", ["plugin", "protocol"])
def test_states_of_ranks_come_back_from_a_file_that_a_plugin_or_a_protocol_reads(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    run(_resume, WORLD, _Loader, kind, 4, path.as_uri() if kind == "protocol" else str(path))


@pytest.mark.parametrize("make", [_torchdata, _torchdata_stream], ids=["shuffled", "stream"])
def test_ranks_resume_with_the_stateful_dataloader_of_torchdata(make: Any, tmp_path: Path) -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    run(_resume, WORLD, make, "sharded", 4, str(tmp_path / "saved.ckpt"), STEPS)  # it shuffles the next epoch anew


def _save(rank: int, world: int, path: str) -> None:
    _fit(rank, world, _Loader, "sharded", save=(4, path))


def _resume_alone(rank: int, world: int, path: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(rank, world, _Loader, "sharded", path)
    return [str(warning.message) for warning in caught]


def test_another_number_of_ranks_is_told_whose_states_it_takes(tmp_path: Path) -> None:
    run(_save, 2, str(tmp_path / "saved.ckpt"))
    said = [text for text in run(_resume_alone, 1, str(tmp_path / "saved.ckpt"))[0] if "rank 0's state of" in text]
    assert len(said) == 1
    assert "saved on 2 ranks and is resumed on 1: every rank takes rank 0's state of the train dataloaders" in said[0]
    assert "`_Data`" in said[0]
    assert "`_Sees`" in said[0]


@pytest.mark.parametrize("other", [torch.ones(2), torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_states_of_callbacks_that_differ_in_a_tensor_alone_are_kept(other: Tensor) -> None:
    path = ("callbacks", "mine")
    states = [{path: {"sum": torch.zeros(2), "step": 3}}, {path: {"sum": other, "step": 3}}]
    assert kept_states(states) == states
    assert kept_states([states[0], states[0]]) == []


# -- Pipeline stages have the data of their copy -----------------------------------------------------------------------


def _fit_stages(rank: int, world: int, stages: int, path: str, resume: bool) -> tuple[list[float], list[str]]:
    pipeline = Pipeline(stages=stages, microbatches=2) if stages > 1 else None
    sees = _Sees(0)
    callbacks = [sees] if resume else [sees, _Saves(3, path)]
    made = trainer(rank, world, ZeroStrategy(stage=1, pipeline=pipeline), max_epochs=1, callbacks=callbacks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.fit(seeded(Net), _Loader(rank % (world // stages)), ckpt_path=path if resume else None)
    return sees.seen, [str(warning.message) for warning in caught if "was saved on" in str(warning.message)]


LAYOUTS = [  # ranks and stages that save and that resume, and what is said
    ((2, 1), (2, 2), "saved on 2 ranks and is resumed on 2 (2 pipeline stages)"),
    ((2, 2), (2, 1), "saved on 2 ranks (2 pipeline stages) and is resumed on 2"),
    ((2, 2), (1, 1), None),
    pytest.param((4, 2), (2, 1), None, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("saved", "resumed", "said"), LAYOUTS)
def test_states_of_data_are_those_of_a_copy_of_the_model(saved: Any, resumed: Any, said: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    whole = run(_fit_stages, saved[0], saved[1], path, False)
    copies = resumed[0] // resumed[1]
    for rank, (seen, warned) in enumerate(run(_fit_stages, resumed[0], resumed[1], path, True)):
        of = 0 if said else rank % copies  # whose data it goes on with
        assert seen == whole[of][0][3:]
        about_loaders = [text for text in warned if "the train dataloaders" in text]
        assert len(about_loaders) == (rank == 0 and said is not None)
        assert all(said in text and "every rank takes rank 0's state" in text for text in about_loaders)
        assert len([text for text in warned if "random number" in text]) == (rank == 0)


def test_equal_states_are_told_by_their_digests() -> None:
    path, other = ("callbacks", "one"), ("callbacks", "other")

    def made(last: float, dtype: torch.dtype = torch.float32) -> dict[tuple[str, ...], Any]:
        values = torch.arange(6.0).view(2, 3).to(dtype)
        return {path: {"values": values, "names": ["a"], "number": torch.tensor(1)}, other: last, LOADERS: [1]}

    same, otherwise, lowered = digests_of(made(1.0)), digests_of(made(2.0)), digests_of(made(1.0, torch.bfloat16))
    assert differing_paths([same, digests_of(made(1.0))]) == [LOADERS]
    assert differing_paths([same, same, otherwise]) == [other, LOADERS]
    assert differing_paths([same, lowered]) == [path, LOADERS]
    assert differing_paths([same, {path: same[path]}]) == [other, LOADERS]
    turned = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert digests_of({path: turned}) == digests_of({path: turned.resolve_conj()})
