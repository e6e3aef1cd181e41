"""Values logged by a step that only the last stage runs to its end: recorded there, replayed on all ranks.

Note [Metrics]
    Metric objects are updated on the last stage, micro-batch by micro-batch. Afterwards their states go to the other
    stages, so every rank computes them, over the ranks of its own stage: one per copy of the model. The value of a step
    is that of all its micro-batches together: the states of the metric's calls are collected, and computed at the end.
    A metric whose states cannot be merged is right at the end of an epoch, and refused in a step of several
    micro-batches.
    Wrappers of torchmetrics count no updates. The metrics inside of them are treated like any other, and the numbers
    and tensors of a wrapper's own (the window of a running mean) go to the other stages as they are.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, MetricTracker
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_zero.errors import PipelineError
from lightning_zero.lightning.rank_zero_calls import RankZeroCalls, replaced
from lightning_zero.parallel.pipeline.schedule.microbatches import weighted_mean
from lightning_zero.parallel.pipeline.stages.sources import is_fake

__all__ = ["LoggedValue", "Logs", "MetricStates", "in_order"]


@dataclass
class LoggedValue:
    """One call of ``self.log`` in a step.

    Attributes:
        key: Tells it from the other calls of a step.
        name: Under which it is logged.
        value: The mean over the micro-batches, by their samples, or the sum, largest or smallest value where
            ``reduce_fx`` says so; None of a metric object, and where another stage computes it.
        metric: Name of a metric object in the module, instead of a value.
        options: Of the call.
    """

    key: str
    name: str
    value: Any
    metric: str | None
    options: dict[str, Any]

    @property
    def is_elsewhere(self) -> bool:
        """Whether another stage of the pipeline computes the value."""
        return self.value is None and self.metric is None

    @property
    def is_of_block(self) -> bool:
        """Whether a module with a place in the pipeline logs it, in its forward."""
        return bool(self.key.partition(f"{self.name}/")[0]) and not self.key.startswith(_BACKWARD)


_BACKWARD = "backward of chunk"


def in_order(logged: Iterable[LoggedValue]) -> list[LoggedValue]:
    """Return values in the order of a step without a pipeline: those of backwards come last, the last chunk first."""

    def place(one: LoggedValue) -> tuple[bool, int]:
        is_late = one.key.startswith(_BACKWARD)
        return is_late, -int(one.key.removeprefix(_BACKWARD).partition(":")[0]) if is_late else 0

    return sorted(logged, key=place)


_ELSEWHERE = object()  # a value of a module that another stage computes


@dataclass(frozen=True)
class _Call:
    """A call of ``self.log`` in a micro-batch of ``size`` samples."""

    name: str
    value: Any
    options: dict[str, Any]
    size: int

    @property
    def is_elsewhere(self) -> bool:
        """Whether another stage of the pipeline computes the value."""
        return self.value is _ELSEWHERE or is_fake(self.value)

    @property
    def weight(self) -> int:
        """The number of samples or tokens for which the value counts."""
        return self.options.get("batch_size") or self.size


class Logs:
    """Records calls of a module's ``log``, and of methods for rank 0, and makes them later.

    A name that a micro-batch logs several times is logged as often: Lightning shows the last value of a step, and the
    mean of all behind an epoch.

    Attributes:
        given: Values that were logged between the modules while the step ran to be described. The stages that compute
            them send them, if they are logged on a later stage.
        are_elsewhere: Other stages than the last one have logged values alone.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.given: list[Any] = []
        self.are_elsewhere = False
        self.on_rank_zero = RankZeroCalls(module, partial(_Metrics, self._note_read))
        self._calls: dict[str, dict[int, _Call]] = {}  # by key, by micro-batch
        self._sizes: dict[int, int] = {}  # samples of the micro-batches that have run
        self._read: set[str] = set()  # names whose values later micro-batches have read of the Trainer
        # - The run that is recorded
        self._index = 0  # of its micro-batch
        self._numbers: Counter[str] = Counter()  # of its calls
        self._names: set[str] = set()  # under which it has logged
        self._is_describing = False
        self._num_calls = 0
        self._place = ""  # the module that is running
        self._is_elsewhere = False  # a module of another stage is running on fakes

    @contextmanager
    def microbatch(self, index: int, size: int) -> Iterator[None]:
        """Record calls of a run of a micro-batch with a number of samples, by which values are averaged."""
        self._index, self._sizes[index] = index, size
        self._numbers.clear()
        self._names.clear()
        self.on_rank_zero.begin(index)
        yield

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record instead of logging, also calls of a ``self.log`` that was bound before."""
        self._calls, self._sizes, self._read = {}, {}, set()
        results = getattr(getattr(self._module, "_trainer", None), "_results", None)
        with ExitStack() as stack:
            stack.enter_context(self.on_rank_zero.recording())
            stack.enter_context(replaced(self._module, "log", self._record))
            if results is not None:
                stack.enter_context(replaced(results, "log", self._record_bound))
            yield

    @contextmanager
    def describing(self) -> Iterator[None]:
        """Record calls of a step that runs to be described."""
        self._is_describing = True
        try:
            with self.recording():
                yield
        finally:
            self._is_describing = False
            self.given.clear()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Note calls whose values another stage has."""
        before, self._is_elsewhere = self._is_elsewhere, True
        try:
            yield
        finally:
            self._is_elsewhere = before

    @contextmanager
    def inside(self, place: str) -> Iterator[None]:
        """Count calls in a module by themselves: not every stage runs it."""
        before, self._place = self._place, f"{place}:"
        try:
            yield
        finally:
            self._place = before

    @contextmanager
    def backward(self, chunk: int, index: int) -> Iterator[None]:
        """Count calls in the backward of a micro-batch, by hooks on gradients, by themselves."""
        before, self._place, self._index = (self._place, self._index), f"{_BACKWARD} {chunk}:", index
        for key in [key for key in self._numbers if key.startswith(self._place)]:
            del self._numbers[key]
        try:
            yield
        finally:
            self._place, self._index = before

    def num_calls(self) -> int:
        """Return how many calls were made."""
        return self._num_calls

    def _record(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        self._num_calls += 1
        if self._is_elsewhere:
            value = value if isinstance(value, Metric) else _ELSEWHERE
        elif self._is_describing:
            self.given.append(value)
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
        if isinstance(value, Tensor):  # as it is now, without the graph, which would hold its micro-batch
            value = value.detach().clone()
        options = {**dict(zip(names, args, strict=False)), **options}
        key = f"{self._place}{name}/{options.get('on_step')}/{options.get('on_epoch')}"
        self._numbers[key] += 1
        self._names.add(name)
        of_key = self._calls.setdefault(f"{key}/{self._numbers[key]}", {})
        call = _Call(name, value, options, self._sizes.get(self._index, 1))
        if not (self._index in of_key and call.is_elsewhere):  # another chunk of this stage has computed it
            of_key[self._index] = call

    def _record_bound(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Record a call that has gone through Lightning's ``log``."""
        self._record(name, value, **{key: one for key, one in options.items() if key not in _OF_RESULTS})

    def merged(self) -> list[LoggedValue]:
        """Return the recorded calls, the n-th ones of a name and options as one, averaged over the micro-batches."""
        metrics = {id(child): name for name, child in self._module.named_modules() if isinstance(child, Metric)}
        return [
            self._merge(key, [calls[index] for index in sorted(calls)], metrics) for key, calls in self._calls.items()
        ]

    def _merge(self, key: str, calls: Sequence[_Call], metrics: dict[int, str]) -> LoggedValue:
        name, value, options = calls[0].name, calls[0].value, dict(calls[0].options)
        if isinstance(value, Metric):
            if id(value) not in metrics:
                raise PipelineError(
                    f"The metric logged as {name!r} is no submodule of the LightningModule. Make it one."
                )
            return LoggedValue(key, name, None, metrics[id(value)], options)
        if isinstance(value, dict):
            raise PipelineError(f"`self.log({name!r}, ...)` logs a dictionary. Use `self.log_dict` in a pipeline.")
        is_given = any(one.options.get("batch_size") is not None for one in calls)
        if is_given or (len(self._sizes) > 1 and len(calls) < len(self._sizes)):
            options["batch_size"] = sum(one.weight for one in calls)
        computed = [one for one in calls if not one.is_elsewhere]
        if not computed:
            return LoggedValue(key, name, None, None, options)
        values = _as_tensors([one.value for one in computed])
        reduced = _reduced(values, [one.weight for one in computed], options.get("reduce_fx", "mean"))
        return LoggedValue(key, name, reduced.cpu(), None, options)

    def _note_read(self, key: str) -> None:
        """Refuse a read of a logged value that this step has logged: the Trainer has that of the batch before."""
        name = key.removesuffix("_step").removesuffix("_epoch")
        earlier = (call.name for calls in self._calls.values() for index, call in calls.items() if index < self._index)
        if {key, name} & self._names.union(earlier):
            raise _is_read(key)
        if self._index > 0:
            self._read |= {key, name}

    def replay(self, logged: Sequence[LoggedValue], sync_group: Any, device: torch.device) -> None:
        """Log on this rank; values averaged over ranks are averaged over the copies of the model. Collective then.

        Raises:
            PipelineError: A micro-batch has read a value that an earlier one logs.
        """
        for name in sorted(self._read & {one.name for one in logged}):
            raise _is_read(name)
        for one in logged:
            options = dict(one.options)
            if options.get("sync_dist") and options.get("sync_dist_group") is None:
                options["sync_dist_group"] = sync_group
            value = self._module.get_submodule(one.metric) if one.metric is not None else one.value.to(device)
            self._module.log(one.name, value, **options)


def _is_read(name: str) -> PipelineError:
    return PipelineError(
        f"A step reads {name!r} of the Trainer's logged values (`trainer.callback_metrics`) and logs it itself. Stages"
        " of a pipeline log after the batch, so that the value would be that of the batch before. Keep the value in a"
        " variable or an attribute, or read it in `on_train_batch_end`."
    )


class _Metrics(dict[str, Any]):
    """A dictionary of the Trainer's logged values that notes which ones are read."""

    def __init__(self, note: Callable[[str], None], values: dict[str, Any]) -> None:
        super().__init__(values)
        self._note = note

    def __getitem__(self, name: str) -> Any:
        self._note(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value."""
        self._note(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self._note(str(name))
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            self._note(name)
            yield name

    def keys(self) -> Any:
        """Return the names."""
        return dict(self._noted()).keys()

    def values(self) -> Any:
        """Return the values."""
        return dict(self._noted()).values()

    def items(self) -> Any:
        """Return names and values."""
        return dict(self._noted()).items()

    def _noted(self) -> Iterator[tuple[str, Any]]:
        for name, value in super().items():
            self._note(name)
            yield name, value


_OF_RESULTS = ("sync_dist_fn", "metric_attribute")  # options that Lightning makes of those of a call


class MetricStates:
    """The metric objects of a module over a step of several micro-batches, and their way to the other stages.

    Call protocol:
        1. ``begin`` before the micro-batches, which run in ``recording``.
        2. ``collect`` behind them, on the last stage.
        3. ``apply`` on the other stages.

    Args:
        module: The root.
        group: The ranks over which metrics are computed.

    Attributes:
        given: Arguments of calls that did nothing, because the step ran to be described. The stages that compute them
            send them, if the last one does not have them.
    """

    def __init__(self, module: nn.Module, group: Any) -> None:
        self._module = module
        self._group = group
        self.given: list[Any] = []  # arguments of calls that did nothing
        # - Of the step that is running
        self._metrics: dict[str, Metric] = {}
        self._wrappers: dict[str, WrapperMetric] = {}
        self._held: dict[str, tuple[int, dict[str, Any]]] = {}  # states before the step
        self._of_forwards: dict[str, dict[str, Any]] = {}  # states of its calls, of metrics that can be merged
        self._attributes: dict[str, dict[str, Any]] = {}  # of the wrappers before the step
        self._caches: dict[str, Any] = {}  # of the wrappers before the step

    def _found(self) -> dict[str, Metric]:
        """Return all metrics and wrappers: a tracker gets new ones during a fit."""
        trackers = [child for child in self._module.modules() if isinstance(child, MetricTracker)]
        bases = {id(base) for tracker in trackers for base in tracker._base_metric.modules()}  # only copied
        modules = self._module.named_modules()
        return {name: child for name, child in modules if isinstance(child, Metric) and id(child) not in bases}

    def _collections(self) -> list[MetricCollection]:
        return [child for child in self._module.modules() if isinstance(child, MetricCollection)]

    def _share_in_groups(self) -> None:
        """Give all metrics of a collection's group the states of the first one, which alone is updated."""
        for collection in self._collections():
            if collection._enable_compute_groups and collection._groups_checked:
                collection._state_is_copy = False
                collection._compute_groups_create_state_ref()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Let calls of the metrics do nothing."""
        metrics, collections = self._found(), self._collections()
        groups = [copy.deepcopy({key: vars(one)[key] for key in _GROUPS}) for one in collections]
        before = {name: {key: vars(metric).get(key) for key in _CALLS} for name, metric in metrics.items()}
        for metric in metrics.values():
            vars(metric).update(dict.fromkeys(_CALLS, self._do_nothing))
        try:
            yield
        finally:
            self.given.clear()
            for collection, group in zip(collections, groups, strict=True):
                vars(collection).update(group)
            for name, metric in metrics.items():
                for key, value in before[name].items():
                    vars(metric).pop(key)
                    vars(metric).update({} if value is None else {key: value})

    def _do_nothing(self, *args: Any, **kwargs: Any) -> Tensor:
        self.given.append((args, kwargs))
        return torch.zeros(())

    def begin(self) -> None:
        """Store the states of the metrics."""
        self._share_in_groups()
        found = self._found()
        self._wrappers = {name: one for name, one in found.items() if isinstance(one, WrapperMetric)}
        self._metrics = {name: one for name, one in found.items() if name not in self._wrappers}
        self._attributes = {name: _attributes(wrapper) for name, wrapper in self._wrappers.items()}
        self._caches = {name: vars(wrapper).get("_forward_cache") for name, wrapper in self._wrappers.items()}
        self._held, self._of_forwards = {}, {}
        for name, metric in self._metrics.items():
            metric.process_group = metric.process_group or self._group
            states = {key: _copy(value) for key, value in metric.metric_state.items()}
            self._held[name] = (metric._update_count, states)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Collect the states of calls of metrics, which give a step's value."""
        metrics = {name: one for name, one in self._metrics.items() if _is_mergeable(one)}
        for name, metric in metrics.items():
            vars(metric)["_reduce_states"] = partial(self._reduce, name, metric)
        try:
            yield
        finally:
            for metric in metrics.values():
                vars(metric).pop("_reduce_states", None)

    def _reduce(self, name: str, metric: Metric, before: dict[str, Any]) -> None:
        """Merge the states of a call, which a metric has, with those before it."""
        reduce: Any = type(metric)._reduce_states
        of_call = {key: _copy(value) for key, value in metric.metric_state.items()}
        if name in self._of_forwards:
            reduce(metric, self._of_forwards[name])
            self._of_forwards[name] = {key: _copy(value) for key, value in metric.metric_state.items()}
            _bind(metric, of_call)
        else:
            self._of_forwards[name] = of_call
        reduce(metric, before)

    def collect(self, logged: Sequence[LoggedValue], num_microbatches: int) -> dict[str, Any]:
        """Finish the step on the last stage and return its metric states for the others, in host memory."""
        in_step = {one.metric for one in logged if one.metric and one.options.get("on_step", True) is not False}
        self._require_known()
        self._share_in_groups()
        message: dict[str, Any] = {name: changed for name in self._wrappers if (changed := self._changed(name))}
        for name, metric in self._metrics.items():
            held, states = self._held[name]
            now = metric.metric_state
            if metric._update_count == held and all(_is_same(states[key], value) for key, value in now.items()):
                continue
            if num_microbatches > 1 and metric._forward_cache is not None:
                if name in self._of_forwards:
                    metric._forward_cache = _computed_of(metric, self._of_forwards[name])
                elif name in in_step and not _is_mergeable(metric):
                    raise PipelineError(
                        f"The value of `{name}` in a step cannot be told from its micro-batches, because"
                        f" `{type(metric).__name__}` cannot merge states. Log it with `on_step=False, on_epoch=True`,"
                        " or use `Pipeline(microbatches=1)`."
                    )
            lists = {key: (kept := _num_same(states[key], value), _to(value[kept:], "cpu"))
                     for key, value in now.items() if isinstance(value, list)}  # fmt: skip
            tensors = {key: value for key, value in now.items() if not isinstance(value, list)}
            message[name] = (metric._update_count, _to(tensors, "cpu"), lists, _to(metric._forward_cache, "cpu"))
        return message

    def _require_known(self) -> None:
        """Refuse changes of metrics in a step that the other stages cannot be told."""
        for name, metric in self._found().items():
            if name not in self._held and name not in self._wrappers:
                raise PipelineError(
                    f"The metric `{name}` came into the module during a step of a pipeline. Make it before, for example"
                    " call `increment` of a `MetricTracker` in `on_train_epoch_start` or `on_validation_epoch_start`."
                )
            if name in self._wrappers and vars(metric).get("_forward_cache") is not self._caches[name]:
                raise PipelineError(
                    f"`{name}(...)` of a `{type(metric).__name__}` resets the metrics inside of it, and a pipeline"
                    f" cannot merge them. Call `{name}.update(...)` in a step, and `{name}.compute()` after it."
                )

    def _changed(self, name: str) -> dict[str, Any]:
        """Return the numbers and tensors of a wrapper that the step has changed, in host memory."""
        before, now = self._attributes[name], _attributes(self._wrappers[name])
        changed = [key for key, mark in now.items() if before.get(key) != mark]
        return {key: _to(vars(self._wrappers[name])[key], "cpu") for key in changed}

    def apply(self, message: dict[str, Any]) -> None:
        """Take over the states of the last stage."""
        for name, wrapper in self._wrappers.items():
            vars(wrapper).update(_to(message.get(name, {}), wrapper.device))
        for name, metric in self._metrics.items():
            held, states = self._held[name]
            if name not in message:
                _set(metric, held, states)
                continue
            count, tensors, lists, cache = message[name]
            whole = {key: states[key][:kept] + _to(tail, metric.device) for key, (kept, tail) in lists.items()}
            _set(metric, count, {**_to(tensors, metric.device), **whole})
            metric._forward_cache = _to(cache, metric.device)


_CALLS = ("update", "forward", "compute")
_GROUPS = ("_groups", "_groups_checked", "_state_is_copy")
_COMPUTED = ("_computed", "_forward_cache", "_cache")


def _as_tensors(values: Sequence[Any]) -> list[Tensor]:
    """Return numbers and tensors as tensors on the device of the first tensor."""
    device = next((one.device for one in values if isinstance(one, Tensor)), None)
    return [(one if isinstance(one, Tensor) else torch.tensor(float(one))).to(device) for one in values]


def _reduced(values: Sequence[Tensor], sizes: Sequence[int], reduce_fx: Any) -> Tensor:
    """Reduce the values of a batch's micro-batches as Lightning reduces those of an epoch's steps."""
    if len(values) == 1:
        return values[0]
    name = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if name not in _REDUCTIONS:
        return weighted_mean(values, sizes)
    return _REDUCTIONS[name](torch.stack(list(values)))


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda values: values.sum(0), "max": lambda values: values.amax(0), "min": lambda values: values.amin(0)
}  # fmt: skip


def _is_mergeable(metric: Metric) -> bool:
    reductions = [getattr(one, "__name__", None) for one in metric._reductions.values()]
    return (
        metric.full_state_update is False
        and not metric.dist_sync_on_step
        and all(name in ("dim_zero_sum", "dim_zero_cat", "dim_zero_max", "dim_zero_min") for name in reductions)
    )


def _attributes(wrapper: WrapperMetric) -> dict[str, list[Any]]:
    """Return marks of a wrapper's own numbers, tensors and lists of tensors, by which a change is seen."""
    marks = {}
    for key, value in vars(wrapper).items():
        items = value if isinstance(value, list) else [value]
        if key not in _COMPUTED and all(isinstance(item, (Tensor, bool, int, float)) for item in items):
            marks[key] = [_Mark(item, item._version) if isinstance(item, Tensor) else item for item in items]
    return marks


@dataclass(frozen=True, eq=False)
class _Mark:
    """A tensor as it was; equal to another one of the same tensor if nothing wrote into it in between."""

    tensor: Tensor
    version: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mark) and self.tensor is other.tensor and self.version == other.version

    __hash__ = None  # type: ignore[assignment]


def _set(metric: Metric, count: int, states: dict[str, Any]) -> None:
    _bind(metric, states)
    metric._update_count = count
    metric._computed = None


def _bind(metric: Metric, states: dict[str, Any]) -> None:
    for key, value in states.items():
        setattr(metric, key, value)


def _computed_of(metric: Metric, states: dict[str, Any]) -> Any:
    """Compute a metric of other states, on this rank alone."""
    now, computed = metric.metric_state, metric._computed
    metric._to_sync, metric._should_unsync, metric._computed = False, False, None
    try:
        _bind(metric, states)
        return metric.compute()
    finally:
        metric._to_sync, metric._should_unsync, metric._computed = metric.sync_on_compute, True, computed
        _bind(metric, now)


def _num_same(before: list[Any], now: list[Any]) -> int:
    """Return with how many of its earlier items a list begins: all of them, or none."""
    is_grown = len(now) >= len(before) and all(one is two for one, two in zip(before, now, strict=False))
    return len(before) if is_grown else 0


def _is_same(before: Any, now: Any) -> bool:
    """Say whether a state has the values of its copy."""
    if isinstance(now, list):
        return isinstance(before, list) and len(before) == len(now) == _num_same(before, now)
    return isinstance(before, Tensor) and before.dtype == now.dtype and torch.equal(before, now)


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
