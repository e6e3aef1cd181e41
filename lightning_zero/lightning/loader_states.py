"""States of dataloaders as of the batch that is trained on, not of the one that is fetched already.

Note [One batch ahead]
    Of a loader without a length the Trainer fetches one batch more than it trains on, to know which is the last one. A
    state that is saved then is behind that batch, and a resumed run would leave it out. So the states are noted before
    every batch is fetched, and those are saved while a fetched batch waits.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, cast

from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.utilities.combined_loader import CombinedLoader

__all__ = ["note_loader_states", "remake_loaders"]


class _NotedLoader(CombinedLoader):
    """Knows the states before the last batch was fetched. See Note [One batch ahead]."""

    _fit_loop: weakref.ref[_FitLoop]
    _before: list[dict[str, Any]]

    def __next__(self) -> Any:
        fetcher = self._fetcher
        if fetcher is not None and fetcher.length is None:
            self._before = copy.deepcopy(super()._state_dicts())
        return super().__next__()

    def _state_dicts(self) -> list[dict[str, Any]]:
        return self._before if getattr(self._fetcher, "batches", None) else super()._state_dicts()

    @property
    def _fetcher(self) -> _DataFetcher | None:
        fit_loop = self._fit_loop()
        return None if fit_loop is None else fit_loop._data_fetcher


def note_loader_states(fit_loop: _FitLoop) -> None:
    """Let the loop save states of loaders without a length as of the batch that it trains on."""
    known = weakref.ref(fit_loop)

    def load_and_note() -> None:
        loop = known()
        assert loop is not None
        type(loop)._load_combined_loader_states(loop)
        loader = loop._combined_loader
        assert loader is not None
        if type(loader) in (CombinedLoader, _NotedLoader) and any(
            isinstance(one, _Stateful) for one in loader.flattened
        ):
            loader.__class__ = _NotedLoader
            cast(_NotedLoader, loader)._fit_loop = known

    # called when the loaders are made, before the first batch is fetched
    vars(fit_loop)["_load_combined_loader_states"] = load_and_note


def remake_loaders(fit_loop: _FitLoop) -> None:
    """Let loaders be made again that ``estimated_stepping_batches`` has made before their states were restored."""
    if fit_loop._combined_loader_states_to_load:
        fit_loop._combined_loader = None
