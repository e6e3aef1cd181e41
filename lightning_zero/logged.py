"""What a step logs where only one stage of a pipeline runs it to its end: recorded there, replayed on all ranks.

Note [Metrics]
    Metric objects are updated on the last stage, micro-batch by micro-batch. Afterwards their states go to the other
    stages, so every rank computes them, over the ranks of its own stage: one per copy of the model. The value of a step
    is that of all its micro-batches together: the metric starts a step empty, is computed at its end, and is merged
    with what it held. A metric whose states cannot be merged is right at the end of an epoch, and refused in a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.sources import is_fake

__all__ = ["LoggedValue", "Logs", "MetricStates"]


@dataclass
class LoggedValue:
    """One call of ``self.log`` in a step.

    Attributes:
        name: Under which it is logged.
        value: The mean over the micro-batches; None of a metric object, and where another stage computes it.
        metric: Name of a metric object in the module, instead of a value.
        options: Of the call.
    """

    name: str
    value: Any
    metric: str | None
    options: dict[str, Any]

    @property
    def is_elsewhere(self) -> bool:
        """Whether another stage of the pipeline computes the value."""
        return self.value is None and self.metric is None

    @property
    def key(self) -> str:
        """What tells it from the other calls of a step."""
        return f"{self.name}/{self.options.get('on_step')}/{self.options.get('on_epoch')}"


class Logs:
    """Records calls of a module's ``log`` and makes them later."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._calls: list[tuple[str, Any, dict[str, Any]]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record instead of logging."""
        self._calls = []

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
            if isinstance(value, Tensor):  # as it is now, without the graph, which would hold its micro-batch
                value = value.detach().clone()
            self._calls.append((name, value, {**dict(zip(names, args, strict=False)), **options}))

        vars(self._module)["log"] = log
        try:
            yield
        finally:
            del vars(self._module)["log"]

    def merged(self) -> list[LoggedValue]:
        """Return the recorded calls, one per name and options, values averaged over the micro-batches."""
        metrics = {id(child): name for name, child in self._module.named_modules() if isinstance(child, Metric)}
        merged: dict[str, list[tuple[Any, dict[str, Any]]]] = {}
        for name, value, options in self._calls:
            key = f"{name}/{options.get('on_step')}/{options.get('on_epoch')}"
            merged.setdefault(key, []).append((value, {**options, "name": name}))
        return [self._merge(calls, metrics) for calls in merged.values()]

    def _merge(self, calls: Sequence[tuple[Any, dict[str, Any]]], metrics: dict[int, str]) -> LoggedValue:
        value, options = calls[0]
        options = dict(options)
        name = options.pop("name")
        if isinstance(value, Metric):
            if id(value) not in metrics:
                raise PipelineError(
                    f"The metric logged as {name!r} is no submodule of the LightningModule. Make it one."
                )
            return LoggedValue(name, None, metrics[id(value)], options)
        if options.get("batch_size") is not None:
            options["batch_size"] = sum(one["batch_size"] for _, one in calls)
        if isinstance(value, dict):
            raise PipelineError(f"`self.log({name!r}, ...)` logs a dictionary. Use `self.log_dict` in a pipeline.")
        computed = [one for one, _ in calls if not is_fake(one)]
        if not computed:
            return LoggedValue(name, None, None, options)
        values = [one if isinstance(one, Tensor) else torch.tensor(float(one)) for one in computed]
        mean = values[0] if len(values) == 1 else torch.stack([one.float() for one in values]).mean(0)
        return LoggedValue(name, mean.cpu(), None, options)

    def replay(self, logged: Sequence[LoggedValue], sync_group: Any, device: torch.device) -> None:
        """Log on this rank; what is averaged over ranks is averaged over the copies of the model. Collective then."""
        for one in logged:
            options = dict(one.options)
            if options.get("sync_dist") and options.get("sync_dist_group") is None:
                options["sync_dist_group"] = sync_group
            value = self._module.get_submodule(one.metric) if one.metric is not None else one.value.to(device)
            self._module.log(one.name, value, **options)


class MetricStates:
    """The metric objects of a module over a step of several micro-batches, and their way to the other stages.

    Call protocol:
        1. ``begin`` before the micro-batches.
        2. ``collect`` behind them, on the last stage.
        3. ``apply`` on the other stages.

    Args:
        module: The root.
        group: The ranks over which metrics are computed.
    """

    def __init__(self, module: nn.Module, group: Any) -> None:
        self._metrics = {name: child for name, child in module.named_modules() if isinstance(child, Metric)}
        self._held: dict[str, tuple[int, dict[str, Any]]] = {}  # before the step
        for metric in self._metrics.values():
            metric.process_group = metric.process_group or group

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Let calls of the metrics do nothing."""
        before = {name: {key: vars(metric).get(key) for key in _CALLS} for name, metric in self._metrics.items()}
        for metric in self._metrics.values():
            vars(metric).update(dict.fromkeys(_CALLS, _do_nothing))
        try:
            yield
        finally:
            for name, metric in self._metrics.items():
                for key, value in before[name].items():
                    vars(metric).pop(key)
                    vars(metric).update({} if value is None else {key: value})

    def begin(self) -> None:
        """Set aside what the metrics hold."""
        self._held = {}
        for name, metric in self._metrics.items():
            states = {key: _copy(value) for key, value in metric.metric_state.items()}
            self._held[name] = (metric._update_count, states)
            if _is_mergeable(metric):
                metric.reset()

    def collect(self, logged: Sequence[LoggedValue]) -> dict[str, Any]:
        """Finish the step on the last stage and return what the others need, in host memory."""
        in_step = {one.metric for one in logged if one.metric and one.options.get("on_step", True) is not False}
        message = {}
        for name, metric in self._metrics.items():
            held, states = self._held[name]
            mergeable = _is_mergeable(metric)
            if metric._update_count == (0 if mergeable else held):
                _set(metric, held, states)
                continue
            if not mergeable and name in in_step and metric._forward_cache is not None:
                raise PipelineError(
                    f"The value of `{name}` in a step cannot be told from its micro-batches, because"
                    f" `{type(metric).__name__}` cannot merge states. Log it with `on_step=False, on_epoch=True`."
                )
            new = {key: value[0:] if isinstance(value, list) else value for key, value in metric.metric_state.items()}
            if mergeable:
                if metric._forward_cache is not None:
                    metric._forward_cache = _compute_here(metric)
                metric._update_count += held
                if held:
                    metric._reduce_states(states)
            lists = {key: new[key] if mergeable else new[key][len(states[key]) :] for key in new
                     if isinstance(new[key], list)}  # fmt: skip
            tensors = {key: value for key, value in metric.metric_state.items() if not isinstance(value, list)}
            message[name] = (metric._update_count, _to(tensors, "cpu"), _to(lists, "cpu"),
                             _to(metric._forward_cache, "cpu"))  # fmt: skip
        return message

    def apply(self, message: dict[str, Any]) -> None:
        """Take over the states of the last stage."""
        for name, metric in self._metrics.items():
            held, states = self._held[name]
            if name not in message:
                _set(metric, held, states)
                continue
            count, tensors, lists, cache = message[name]
            tails = {key: states[key] + _to(tail, metric.device) for key, tail in lists.items()}
            _set(metric, count, {**_to(tensors, metric.device), **tails})
            metric._forward_cache = _to(cache, metric.device)


_CALLS = ("update", "forward", "compute")


def _do_nothing(*args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros(())


def _is_mergeable(metric: Metric) -> bool:
    reductions = [getattr(one, "__name__", None) for one in metric._reductions.values()]
    return metric.full_state_update is False and all(
        name in ("dim_zero_sum", "dim_zero_cat", "dim_zero_max", "dim_zero_min") for name in reductions
    )


def _set(metric: Metric, count: int, states: dict[str, Any]) -> None:
    for key, value in states.items():
        setattr(metric, key, value)
    metric._update_count = count
    metric._computed = None


def _compute_here(metric: Metric) -> Any:
    """Compute a metric of this rank's states alone."""
    metric._to_sync, metric._should_unsync, metric._computed = False, False, None
    try:
        return metric.compute()
    finally:
        metric._to_sync, metric._should_unsync, metric._computed = metric.sync_on_compute, True, None


def _copy(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value.clone()


def _to(value: Any, device: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to(item, device) for item in value)
    return value
