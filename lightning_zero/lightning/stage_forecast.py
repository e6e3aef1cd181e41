"""Forecasts for strategies with a pipeline: a setting is a simulated fit of all stages, and counts by the worst."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning_zero.forecast.settings import PERSISTENT, Setting, SettingForecast
from lightning_zero.forecast.simulation import Simulation
from lightning_zero.lightning.fitted_forecast import require_node, sent_bytes, with_setting
from lightning_zero.lightning.simulate import simulate_copy
from lightning_zero.lightning.strategy import ZeroStrategy

__all__ = ["forecast_stages"]

Fit = Callable[..., dict[int, Simulation]]  # given the strategy and the number of batches


def forecast_stages(
    module: Any,
    strategy: ZeroStrategy,
    settings: Sequence[Setting],
    *,
    world_size: int,
    ranks_per_node: int | None,
    accumulate_grad_batches: int,
    **options: Any,
) -> list[SettingForecast]:
    """Return the forecast of each setting that a pipeline can have: that of the stage with the highest peak.

    Args:
        module: The module, or a function that makes it.
        strategy: The options that all settings share.
        settings: Those that are compared.
        world_size: Number of ranks.
        ranks_per_node: Ranks of a node; None: not known.
        accumulate_grad_batches: As in the Trainer.
        options: Further ones of ``simulate_step``.

    Raises:
        ValueError: A scope is a node, and nobody has said how many ranks it has; see also ``simulate_step``.
    """
    own = (strategy.sharding, strategy.offload, strategy.activation_checkpointing)
    fit = partial(simulate_copy, module, world_size=world_size, ranks_per_node=ranks_per_node, plans=[], **options)
    rows = []
    for setting in settings:
        is_own = own == (setting.sharding, setting.offload, setting.activation_checkpointing)
        require_node(setting, ranks_per_node)
        if is_own or _is_for_stages(setting, strategy):
            of_setting = partial(fit, with_setting(strategy, setting))
            rows.append(_forecast(setting, of_setting, accumulate_grad_batches, is_own=is_own, node=ranks_per_node))
    return rows


def _is_for_stages(setting: Setting, strategy: ZeroStrategy) -> bool:
    """Say whether a pipeline can have a setting."""
    assert strategy.pipeline is not None
    try:
        strategy.pipeline.check(setting.sharding.stage)
    except ValueError:
        return False
    return True


def _forecast(setting: Setting, fit: Fit, num_batches: int, *, is_own: bool, node: int | None) -> SettingForecast:
    # The second batch finds gradients of the one before, as all further ones do.
    stages = list(fit(accumulate_grad_batches=min(num_batches, 2)).values())
    peaks = [one.peak_bytes for one in stages]
    worst = peaks.index(max(peaks))
    one = stages[worst]
    sent, across = sent_bytes(one, node)
    if num_batches > 2:  # each further one sends as much as the second
        once = list(fit(accumulate_grad_batches=1).values())[worst]
        once_sent, once_across = sent_bytes(once, node)
        sent += (num_batches - 2) * (sent - once_sent)
        across += (num_batches - 2) * (across - once_across)
    return SettingForecast(
        setting=setting,
        is_own=is_own,
        device={kind: one.device[kind] for kind in PERSISTENT} | {"buffers": one.at_peak["buffers"]},
        host={kind: one.host[kind] for kind in (*PERSISTENT, "windows", "activations")},
        disk={kind: one.disk[kind] for kind in PERSISTENT},
        peak_bytes=one.peak_bytes,
        at_peak=dict(one.at_peak),
        phase=one.phase,
        module=one.module,
        sent_bytes=sent,
        sent_across_nodes=None if node is None else across,
        pipeline_stage=worst,
        peak_by_stage=peaks,
        persistent_by_stage=[
            {kind: stage.device[kind] for kind in PERSISTENT}
            | {f"host_{kind}": stage.host[kind] for kind in PERSISTENT}
            for stage in stages
        ],
    )
