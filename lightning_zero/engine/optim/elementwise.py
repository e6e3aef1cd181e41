"""Find out, by a trial, whether an optimizer gives the same numbers on segments as on whole parameters (ADR 0035).

Note [The trial]
    An optimizer of an unknown class is tried. A copy steps whole sample parameters; three more copies step the pieces
    that three ranks would have of them: the pieces of every sample before and after a cut, and none. The copies have
    all distinct groups at once, so that sums over parameters are seen, and a fixed learning rate, so that a warm-up
    hides nothing. Samples have the shapes of the parameters, cut down to ``_MOST_NUMEL`` elements, and stand for all
    parameters of their kind, also in attributes of the optimizer. An operation that needs whole values is an obstacle
    even if its result makes no difference (``whole_operations.py``), and so is a use of the module's own parameters.
    Where ranks have whole parameters, but not the same ones (stage 0 in a pipeline), two copies step every second
    sample.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from numbers import Integral, Real
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from lightning_zero.engine.buffers.parameter import WatchedParameter, name_of, owner_of, swap_class, unwatch, watch
from lightning_zero.engine.optim.methods import may_use_closure
from lightning_zero.engine.optim.whole_operations import WholeOperations

__all__ = ["ElementwiseTrial", "Obstacle", "Stepped"]

_KNOWN: frozenset[type[Optimizer]] = frozenset(
    {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop}
)
_NUM_STEPS = 8  # RAdam's variants begin to move in the sixth, Lookahead's synchronise in the fifth or sixth
_SCALES = (1.0, 100.0, 0.01)  # of the gradients, in turns: limits on norms are met
_MOST_NUMEL = 2**16
_LR = 0.1
_LATER_OPTIONS = ("lr", "initial_lr", "params", "param_names")  # no part of a group's kind

_Cut = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Stepped:
    """The tensor that an optimizer steps for a parameter, before it is cut into segments."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Obstacle:
    """Why an optimizer cannot step segments, as the end of a sentence about it, and the exception that showed it."""

    reason: str
    error: Exception | None = None


class ElementwiseTrial:
    """Decides whether an optimizer gives the same numbers on segments; see Note [The trial].

    The answer is the same on all ranks where their groups are.

    Args:
        optimizer: The optimizer; nothing of it is changed.
        stepped: Returns the shape, dtype and device in which a parameter is stepped.
        cuts_parameters: Ranks have pieces of parameters; else some of them, whole.
        module_params: Parameters that no copy of the optimizer may reach.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        stepped: Callable[[Tensor], Stepped],
        *,
        cuts_parameters: bool = True,
        module_params: Iterable[nn.Parameter] = (),
    ) -> None:
        self._optimizer = optimizer
        self._class = type(optimizer)
        self._stepped = stepped
        self._cuts_parameters = cuts_parameters
        self._watch = _Watch(module_params)
        self._own_options: set[str] = set()  # options that the optimizer itself changes
        self._tried: set[Any] = set()  # kinds of the groups that were tried together
        self._before: list[dict[str, Any]] = []  # kinds of the options in front of a step

    @property
    def may_be_due(self) -> bool:
        """Whether options of some kind need a trial; the same on all pipeline stages."""
        return self._class not in _KNOWN

    @property
    def is_due(self) -> bool:
        """Whether the options of a group are of a kind that was not tried."""
        return self.may_be_due and self._kinds() not in self._tried

    def find_obstacle(self) -> Obstacle | None:
        """Try the optimizer with its groups as they are; return its obstacle to stepping segments, or None."""
        groups = self._sample_groups()
        is_idle = not groups  # a pipeline stage without parameters of the optimizer
        if is_idle:  # it is due when the others are: it learns which options the steps change
            groups = [_SampleGroup(group, [_stand_in()]) for group in self._optimizer.param_groups]
        with _undisturbed(sample.device for group in groups for sample in group.samples), self._watch.watching():
            obstacle = self._try(groups) if groups else None
        obstacle = None if is_idle else self._watch.obstacle() or obstacle
        if obstacle is None:
            self._tried.add(self._kinds())
        return obstacle

    def begin_step(self) -> None:
        """Take note of the options in front of a step."""
        if self.may_be_due:
            self._before = [_kinds_of_options(group) for group in self._optimizer.param_groups]

    def end_step(self) -> None:
        """Learn which options the step has changed: the trial of a rank without parameters does not show it.

        Not switches (bool, str), which select other code: with their new values the optimizer is tried.
        """
        groups = self._optimizer.param_groups
        changed = _changed_options(self._before, groups) if self._before else set()
        changed = {key for key in changed if not any(isinstance(group.get(key), bool | str) for group in groups)}
        if not changed <= self._own_options:
            self._own_options |= changed
            self._tried.add(self._kinds(self._before))

    def _kinds(self, kinds: Sequence[Mapping[str, Any]] = ()) -> Any:
        """Return the kinds of the groups with their present options, or with options of the given kinds."""
        groups = self._optimizer.param_groups
        of_groups = kinds or [_kinds_of_options(group) for group in groups]
        return tuple(
            (_without(of_group, self._own_options), len(group["params"]))
            for of_group, group in zip(of_groups, groups, strict=False)
        )

    # -- Samples -------------------------------------------------------------------------------------------------------

    def _sample_groups(self) -> list[_SampleGroup]:
        """Return one group of each kind, with samples of all kinds of its parameters."""
        chosen: dict[Any, tuple[dict[str, Any], dict[Any, _Sample]]] = {}
        for group in self._optimizer.param_groups:
            _, samples = chosen.setdefault(_without(_kinds_of_options(group), ()), (group, {}))
            for position, param in enumerate(group["params"]):
                stepped = self._stepped(param)
                if stepped.dtype.is_floating_point or stepped.dtype.is_complex:
                    kind = (cut_down(stepped.shape), stepped.dtype, stepped.device, _tags(param))
                    sample = samples.setdefault(kind, _Sample(param, _name_of(group, position), *kind[:3]))
                    sample.stands_for.append(param)
        found = [_SampleGroup(group, _extremes(samples.values())) for group, samples in chosen.values() if samples]
        if not self._cuts_parameters:  # one of each kind for either rank
            turns = itertools.cycle((0, 1))
            for one in found:
                one.samples = [half for sample in one.samples for half in sample.halves(turns)]
        return found

    # -- Steps ---------------------------------------------------------------------------------------------------------

    def _try(self, groups: Sequence[_SampleGroup]) -> Obstacle | None:
        generator = torch.Generator().manual_seed(0)
        for sample in (sample for group in groups for sample in group.samples):
            sample.fill(generator)
        errors: list[Exception] = []
        idle: Obstacle | None = None
        has_moved = False
        for has_closure in (False, True):  # a step may do something else with one
            tried = self._run_whole(groups, has_closure=has_closure, errors=errors)
            if tried is None:
                continue
            attempt, whole = tried
            self._own_options |= attempt.changed_options
            unmoved = _moves_nothing(groups, whole[0])
            idle, has_moved = idle or unmoved, has_moved or unmoved is None
            obstacle = None if unmoved else self._compare(groups, attempt, whole)
            if obstacle is not None or not may_use_closure(self._optimizer):
                return obstacle or unmoved
        if has_moved or idle is not None:
            return None if has_moved else idle
        error = errors[len(errors) // 2 - 1]  # with its states, without a closure
        return Obstacle(f"could not be tried, because its step raised {_describe(error)}", error)

    def _run_whole(
        self, groups: Sequence[_SampleGroup], *, has_closure: bool, errors: list[Exception]
    ) -> tuple[_Attempt, list[list[Tensor]]] | None:
        """Step whole samples from fresh states, or else from states like its own; add errors to ``errors``."""
        for has_state in (False, True) if self._optimizer.state else (False,):
            attempt = _Attempt(
                self._optimizer, self._class, groups, has_state=has_state, has_closure=has_closure, watch=self._watch
            )
            try:
                return attempt, attempt.run(lambda tensor: tensor)
            except Exception as raised:  # an unknown optimizer may raise anything
                errors.append(raised)
        return None

    def _compare(
        self, groups: Sequence[_SampleGroup], attempt: _Attempt, whole: Sequence[Sequence[Tensor]]
    ) -> Obstacle | None:
        if not self._cuts_parameters:
            return self._compare_halves(groups, attempt, whole) or self._compare_steadily(groups, attempt)
        try:
            ranks = [attempt.run(cut) for cut in (_in_front, _behind)]
        except Exception as error:
            return Obstacle(
                f"is not element-wise: on shards of the parameters its step raised {_describe(error)}", error
            )
        samples = [sample for group in groups for sample in group.samples]
        for number, values in enumerate(whole):
            for index, (sample, value) in enumerate(zip(samples, values, strict=True)):
                pieces = torch.cat([rank[number][index].reshape(-1) for rank in ranks])
                if not _is_close(pieces, value.reshape(-1), sample.start.reshape(-1)):
                    return Obstacle(
                        "is not element-wise: it gives other numbers on the shards of a parameter than on the"
                        f" parameter, here one of shape {tuple(sample.start.shape)}"
                    )
        try:
            attempt.run(_nothing)
        except Exception as error:
            return Obstacle(
                f"has no step for a rank without elements of a parameter: it raised {_describe(error)}", error
            )
        return self._judge(attempt)

    def _judge(self, attempt: _Attempt) -> Obstacle | None:
        """Refuse operations on whole values, of which ranks have pieces."""
        operations = WholeOperations()
        with torch.compiler.set_stance("force_eager"):  # compiled functions show no operations
            try:
                attempt.run(lambda tensor: tensor, operations=operations)
            except Exception:  # the step was right before, but cannot be looked at
                return None
        if operations.found is None:
            return None
        return Obstacle(
            f"is not element-wise: its step computes `{operations.found}` of a parameter, of a gradient or of values"
            " made of them, and ranks have pieces of these"
        )

    def _compare_halves(
        self, groups: Sequence[_SampleGroup], attempt: _Attempt, whole: Sequence[Sequence[Tensor]]
    ) -> Obstacle | None:
        samples = [sample for group in groups for sample in group.samples]
        for half in (0, 1):
            try:
                found = attempt.run(lambda tensor: tensor, samples[half::2])
            except Exception as error:
                return Obstacle(
                    f"needs the parameters of all pipeline stages: its step raised {_describe(error)}", error
                )
            for values, expected in zip(found, whole, strict=True):
                for sample, value, other in zip(samples[half::2], values, expected[half::2], strict=True):
                    if not _is_close(value.reshape(-1), other.reshape(-1), sample.start.reshape(-1)):
                        return Obstacle(
                            "needs the parameters of all pipeline stages: without them it gives other numbers, here"
                            f" for a parameter of shape {tuple(sample.start.shape)}"
                        )
        return None

    def _compare_steadily(self, groups: Sequence[_SampleGroup], attempt: _Attempt) -> Obstacle | None:
        """Compare again with gradients and a learning rate by which estimates over all parameters grow (Prodigy)."""
        steady = [
            _SampleGroup(group.group, [replace(sample) for sample in group.samples], is_steady=True) for group in groups
        ]
        generator = torch.Generator().manual_seed(0)
        for sample in (sample for group in steady for sample in group.samples):
            sample.fill_steadily(generator)
        again = attempt.with_groups(steady)
        try:
            whole = again.run(lambda tensor: tensor)
        except Exception:  # it may refuse this rate
            return None
        is_finite = all(bool(value.isfinite().all()) for values in whole for value in values)
        return self._compare_halves(steady, again, whole) if is_finite else None


@dataclass
class _Sample:
    """A parameter that stands for others of its kind."""

    param: nn.Parameter
    name: str | None  # in the group's ``param_names``
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stands_for: list[nn.Parameter] = field(default_factory=list)  # also ``param``

    def halves(self, turns: Iterator[int]) -> tuple[_Sample, _Sample]:
        """Return two samples of the kind; they stand for parameters in turns."""
        pair = replace(self, stands_for=[]), replace(self, stands_for=[])
        for param, turn in zip(self.stands_for, turns, strict=False):
            pair[turn].stands_for.append(param)
        return pair

    def fill(self, generator: torch.Generator) -> None:
        """Draw values and gradients. Rows differ in size, so that no part of a gradient has the whole's statistics."""
        dtype = torch.complex64 if self.dtype.is_complex else torch.float32
        draw = torch.randn(self.shape, generator=generator, dtype=dtype, device="cpu")
        self.start = draw.to(self.device, self.dtype)
        rows = torch.randn((*self.shape[:1], *[1] * (len(self.shape) - 1)), generator=generator, device="cpu").exp()
        grads = [torch.randn(self.shape, generator=generator, dtype=dtype, device="cpu") * rows for _ in _SCALES]
        self.grads = [(grad * scale).to(self.device, self.dtype) for grad, scale in zip(grads, _SCALES, strict=True)]

    def fill_steadily(self, generator: torch.Generator) -> None:
        """Draw gradients that keep their direction; they grow in some samples and shrink in others."""
        self.fill(generator)
        self.start.zero_()
        growth = float(torch.randn((), generator=generator, device="cpu"))
        self.grads = [self.grads[0] * (number + 1) ** growth for number in range(_NUM_STEPS)]


@dataclass
class _SampleGroup:
    """A group of the optimizer, with samples of its parameters."""

    group: dict[str, Any]
    samples: list[_Sample]
    is_steady: bool = False  # its learning rate is that of the optimizer, or 1

    def options(self, chosen: Container[int] | None = None) -> dict[str, Any]:
        """Return the options with a fixed learning rate, and with the names of the samples, or of those ``chosen``."""
        options = {key: _copied(value, {}) for key, value in self.group.items() if key not in ("params", "param_names")}
        own = float(self.group.get("initial_lr", self.group.get("lr", 1.0))) if self.is_steady else _LR
        for key in ("lr", "initial_lr"):
            if isinstance(options.get(key), Real):
                options[key] = own or 1.0
            elif isinstance(options.get(key), Tensor):
                options[key] = torch.full_like(options[key], own or 1.0, device=self.samples[0].device)
        if "param_names" in self.group:
            samples = [sample for sample in self.samples if chosen is None or id(sample) in chosen]
            options["param_names"] = [sample.name for sample in samples]
        return options


class _Attempt:
    """A way to try an optimizer.

    Args:
        optimizer: The optimizer.
        of_class: Its class without the engine's methods.
        groups: The samples.
        has_state: Start from states like those that it has, which its constructor may have made.
        has_closure: Give its step a closure.
        watch: Told when its steps run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        of_class: type[Optimizer],
        groups: Sequence[_SampleGroup],
        *,
        has_state: bool,
        has_closure: bool,
        watch: _Watch,
    ) -> None:
        self._optimizer = optimizer
        self._class = of_class
        self._groups = groups
        self._has_state = has_state
        self._has_closure = has_closure
        self._watch = watch
        self.changed_options: set[str] = set()  # by the steps

    def with_groups(self, groups: Sequence[_SampleGroup]) -> _Attempt:
        """Return the same way with other samples."""
        return _Attempt(
            self._optimizer,
            self._class,
            groups,
            has_state=self._has_state,
            has_closure=self._has_closure,
            watch=self._watch,
        )

    def run(
        self, cut: _Cut, chosen: Sequence[_Sample] | None = None, *, operations: WholeOperations | None = None
    ) -> list[list[Tensor]]:
        """Step the samples, or chosen ones, cut by ``cut``; return them after it, and for evaluation if they differ.

        Args:
            cut: Returns a rank's piece of a tensor.
            chosen: Samples, by default all.
            operations: Looks at the operations.
        """
        samples = [sample for group in self._groups for sample in group.samples] if chosen is None else chosen
        _seed({sample.device for sample in samples})
        params = {id(sample): _tagged(nn.Parameter(cut(sample.start).clone()), sample.param) for sample in samples}
        groups = [
            {**group.options(set(params)), "params": [params[id(one)] for one in group.samples if id(one) in params]}
            for group in self._groups
        ]
        before = [_kinds_of_options(group) for group in groups]
        probe = self._probe(groups, [(sample, params[id(sample)]) for sample in samples])
        follow = (lambda tensors: None) if operations is None else operations.follow
        follow(params.values())

        def values() -> list[Tensor]:
            return [params[id(sample)].detach().clone() for sample in samples]

        def closure_of(number: int) -> Callable[[], Tensor]:
            def closure() -> Tensor:
                for sample in samples:
                    params[id(sample)].grad = grad = cut(sample.grads[number % len(sample.grads)]).clone()
                    follow([grad])
                return torch.ones((), device=samples[0].device)

            return closure

        with self._watch.stepping(), operations or nullcontext():
            found = [self._step(probe, closure_of, values)]
            self.changed_options |= _changed_options(before, groups)
            if _has_modes(probe):
                probe.eval()
                found.append(values())
        return found

    def _step(
        self, probe: Any, closure_of: Callable[[int], Callable[[], Tensor]], values: Callable[[], list[Tensor]]
    ) -> list[Tensor]:
        if callable(getattr(probe, "train", None)):
            probe.train()
        step: Any = self._class.step
        step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step  # without hooks
        for number in range(_NUM_STEPS):
            closure = closure_of(number)
            closure()
            step(probe, closure) if self._has_closure else step(probe)
        return values()

    def _probe(self, groups: list[dict[str, Any]], params: Sequence[tuple[_Sample, nn.Parameter]]) -> Any:
        """Return a copy of the optimizer that has ``groups``, and states of its own."""
        optimizer = self._optimizer
        state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        if self._has_state:
            for sample, param in params:
                state[param] = _state_like(optimizer.state, sample.param, param, is_number=not sample.shape)
        memo: dict[int, Any] = {id(optimizer.param_groups): groups, id(optimizer.state): state}
        stand_ins = {id(sample): param for sample, param in params}
        for sample in (sample for group in self._groups for sample in group.samples):
            stand_in = stand_ins[id(sample)] if id(sample) in stand_ins else nn.Parameter(sample.start.clone())
            memo.update({id(param): stand_in for param in sample.stands_for})
        for mine, theirs in zip(self._groups, groups, strict=True):
            memo.update({id(mine.group): theirs, id(mine.group["params"]): theirs["params"]})
        return _copy_of_optimizer(optimizer, self._class, memo)


def _copy_of_optimizer(optimizer: Optimizer, of_class: type[Optimizer], memo: dict[int, Any]) -> Any:
    """Return a copy without hooks; ``memo`` gives replacements by ``id``, also inside wrapped optimizers."""
    probe = memo[id(optimizer)] = _bare(of_class)
    for key, value in vars(optimizer).items():
        if key.endswith("_hooks"):
            vars(probe)[key] = OrderedDict()
        elif key != "step":  # a scheduler's, which counts
            vars(probe)[key] = _copied(value, memo)
    return probe


def _bare(of_class: type) -> Any:
    """Return an object without attributes; the resources that a ``__del__`` would free are those of the original."""
    if hasattr(of_class, "__del__"):
        body = {"__del__": lambda self: None, "__module__": of_class.__module__}
        of_class = type(of_class.__name__, (of_class,), body)
    return object.__new__(of_class)


def _copy_of_module(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Return a copy without hooks that has the parameters of the module, for the watch, and shares other objects.

    Containers, dataclasses, tensors and modules in its attributes are copied: a method may write them.
    """
    made = memo[id(module)] = _bare(type(module))
    for key, value in vars(module).items():
        if key.endswith("_hooks"):
            vars(made)[key] = OrderedDict()
        elif key == "_parameters":
            vars(made)[key] = dict(value)
        else:
            vars(made)[key] = _copied(value, memo, _shared)
    return made


def _deep(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # locks, files, other parameters than the samples stand for
        return value


def _shared(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, nn.Module):
        return _copy_of_module(value, memo)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_copied(one, memo, _shared) for one in value])
    if type(value) in (deque, set, defaultdict, OrderedDict, Counter):
        made = memo[id(value)] = copy.copy(value)  # with the default of a `defaultdict`, the length of a `deque`
        made.clear()
        if isinstance(made, dict):
            made.update({_copied(key, memo, _shared): _copied(one, memo, _shared) for key, one in value.items()})
        else:
            (made.extend if isinstance(made, deque) else made.update)(_copied(one, memo, _shared) for one in value)
        return made
    if is_dataclass(value) and not isinstance(value, type):
        made = memo[id(value)] = _bare(type(value))
        for key in {*getattr(value, "__dict__", ()), *(one.name for one in fields(value))}:
            if hasattr(value, key):
                object.__setattr__(made, key, _copied(getattr(value, key), memo, _shared))
        return made
    return _deep(value, memo) if torch.is_tensor(value) and not isinstance(value, nn.Parameter) else value


def _copied(value: Any, memo: dict[int, Any], leaf: Callable[[Any, dict[int, Any]], Any] = _deep) -> Any:
    """Return a copy of a value, of which ``leaf`` copies objects that are neither containers nor known here."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Optimizer):
        return _copy_of_optimizer(value, type(value), memo)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, MethodType) and _is_sharded(value.__self__):
        return MethodType(value.__func__, _copied(value.__self__, memo))
    if type(value) is partial:
        func, args, keywords = (_copied(one, memo, leaf) for one in (value.func, value.args, value.keywords))
        return partial(func, *args, **keywords)
    if _is_sharded(value):
        return _copy_of_module(value, memo)
    if type(value) is tuple:
        return tuple(_copied(one, memo, leaf) for one in value)
    if type(value) is list:
        made: list[Any] = memo.setdefault(id(value), [])
        made.extend(_copied(one, memo, leaf) for one in value)
        return made
    if type(value) is dict:
        items: dict[Any, Any] = memo.setdefault(id(value), {})
        items.update((_copied(key, memo, leaf), _copied(one, memo, leaf)) for key, one in value.items())
        return items
    return leaf(value, memo)


def _is_sharded(value: Any) -> bool:
    """Say whether a value is a module with parameters of an engine: the watch is there for them."""
    return isinstance(value, nn.Module) and any(owner_of(param) is not None for param in value.parameters())


def _has_modes(optimizer: Any) -> bool:
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


class _Watch:
    """Finds uses of the module's own parameters in the steps of copies."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._params = list(params)
        self._is_stepping = False
        self._used: str | None = None

    def obstacle(self) -> Obstacle | None:
        """Return the obstacle that was found, if there is one."""
        if self._used is None:
            return None
        return Obstacle(
            f"uses {self._used} past its `param_groups` (in a list, a module or a function that it keeps), where a rank"
            " has a piece of it"
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Refuse uses of the parameters' values and gradients inside."""
        self._used = None
        classes = [(param, type(param), watch(param, partial(self._refuse, param))) for param in self._params]
        for param, _, _ in classes:
            swap_class(param, WatchedParameter)
        try:
            yield
        finally:
            for param, cls, former in classes:
                if former is None:
                    unwatch(param)
                else:  # a method of the optimizer runs
                    watch(param, former)
                param.__class__ = cls

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Take note of uses inside; others are attempts to copy parameters."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def _refuse(self, param: nn.Parameter, uses_values: bool) -> None:
        if uses_values:
            if self._is_stepping:
                self._used = f"`{name_of(param)}`"
            raise RuntimeError(f"`{name_of(param)}` is used by a copy of the optimizer.")


def _stand_in() -> _Sample:
    """Return a sample for parameters that other ranks have."""
    param = nn.Parameter(torch.zeros(0, device="cpu"))
    return _Sample(param, "weight", (4, 4), torch.float32, torch.device("cpu"), [param])


def _tagged(param: nn.Parameter, like: nn.Parameter) -> nn.Parameter:
    vars(param).update(vars(like))
    return param


def _state_like(
    states: Mapping[Any, dict[str, Any]], original: nn.Parameter, param: nn.Parameter, *, is_number: bool
) -> dict[str, Any]:
    """Return a state like that of the original, or of any parameter, with one value everywhere.

    Args:
        states: Those of the optimizer.
        original: A parameter of it.
        param: The sample that stands for it, or a piece of that.
        is_number: The original has no dimensions, and neither has a state of its shape, which is cut with it.
    """
    found = [states.get(original, {}), *states.values()]
    state = next((state for state in found if state and _is_filled(state)), {})
    return {
        key: torch.zeros_like(param, dtype=value.dtype) + value.reshape(-1)[0]
        if torch.is_tensor(value) and (value.dim() or (is_number and key != "step"))
        else copy.deepcopy(value)
        for key, value in state.items()
    }


def _is_filled(state: dict[str, Any]) -> bool:
    return all(value.numel() for value in state.values() if torch.is_tensor(value))


# -- Comparison --------------------------------------------------------------------------------------------------------


def _place_of_cut(tensor: Tensor) -> int:
    return (tensor.numel() + 1) * 3 // 7  # not between two rows


def _in_front(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[: _place_of_cut(tensor)]


def _behind(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[_place_of_cut(tensor) :]


def _nothing(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[:0]


def _is_close(pieces: Tensor, whole: Tensor, start: Tensor) -> bool:
    """Say whether values agree, but for last bits, which depend on where a tensor is cut."""
    if not whole.numel():
        return True
    epsilon = 4 * torch.finfo(whole.dtype).eps
    moved = float((whole - start).abs().max())
    close = (pieces - whole).abs() <= 1e-4 * moved + epsilon * whole.abs()
    return bool(close.all())


def _moves_nothing(groups: Sequence[_SampleGroup], values: Iterable[Tensor]) -> Obstacle | None:
    values = iter(values)
    for group in groups:
        ends = [(sample.start, next(values)) for sample in group.samples]
        filled = [(start, end) for start, end in ends if start.numel()]
        if any(not bool(end.isfinite().all()) for _, end in filled):
            return Obstacle("could not be tried, because its steps gave values that are not finite")
        if filled and all(torch.equal(start, end) for start, end in filled):
            options = {key: value for key, value in group.options().items() if key != "param_names"}
            return Obstacle(f"could not be tried, because {_NUM_STEPS} steps moved nothing with the options {options}")
    return None


# -- Kinds -------------------------------------------------------------------------------------------------------------


def cut_down(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape of at most ``_MOST_NUMEL`` elements: dimensions above one limit become that limit."""
    low, high = 1, max([1, *shape])
    while low < high:
        limit = (low + high + 1) // 2
        numel = 1
        for size in shape:
            numel *= min(size, limit)
        low, high = (limit, high) if numel <= _MOST_NUMEL else (low, limit - 1)
    return tuple(min(size, low) for size in shape)


def _extremes(samples: Iterable[_Sample]) -> list[_Sample]:
    """Return the largest, the smallest and the one with the longest short side, for every number of dimensions.

    The largest stands for the others.
    """
    by_kind: dict[Any, list[_Sample]] = {}
    for sample in samples:
        kind = (len(sample.shape), 0 in sample.shape, sample.dtype, sample.device, _tags(sample.param))
        by_kind.setdefault(kind, []).append(sample)
    chosen: dict[int, _Sample] = {}
    for alike in by_kind.values():
        numels = [torch.Size(sample.shape).numel() for sample in alike]
        shortest = [min(sample.shape, default=0) for sample in alike]
        for index in (numels.index(max(numels)), numels.index(min(numels)), shortest.index(max(shortest))):
            chosen.setdefault(id(alike[index]), alike[index])
        largest = alike[numels.index(max(numels))]
        largest.stands_for += [param for one in alike if id(one) not in chosen for param in one.stands_for]
    return list(chosen.values())


def _tags(param: nn.Parameter) -> Any:
    """Return marks that users set for optimizers (`param.use_muon = True`)."""
    return tuple(sorted((key, value) for key, value in vars(param).items() if isinstance(value, bool)))


def _name_of(group: Mapping[str, Any], position: int) -> str | None:
    names = group.get("param_names")
    return None if names is None else names[position]


def _kinds_of_options(group: Mapping[str, Any]) -> dict[str, Any]:
    lr = group.get("lr")
    kind_of_lr = "number" if isinstance(lr, Real) else _kind(lr)
    return {"lr": kind_of_lr, **{key: _kind(value) for key, value in group.items() if key not in _LATER_OPTIONS}}


def _without(kinds: Mapping[str, Any], left_out: Container[str]) -> Any:
    return tuple((key, kind) for key, kind in sorted(kinds.items()) if key not in left_out)


def _changed_options(before: Iterable[Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the options of which a group has another kind than before."""
    return {
        key
        for kinds, group in zip(before, groups, strict=False)
        for key, kind in _kinds_of_options(group).items()
        if kinds.get(key) != kind
    }


class _Object:
    """An option of another type: equal to itself, and kept, so that no other object gets its ``id``."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def _kind(value: Any) -> Any:
    """Return a key that two values of an option share if one trial speaks for both; for numbers, whether it is 0."""
    if value is None or isinstance(value, bool | str):
        return type(value).__name__, value
    if isinstance(value, Integral):  # also those of NumPy
        return "int", int(value)
    if isinstance(value, Real):
        return float(value) != 0.0
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    if isinstance(value, dict):
        return tuple((str(key), _kind(item)) for key, item in value.items())
    return _Object(value)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _seed(devices: Iterable[torch.device]) -> None:
    """Start the generators anew that ``_undisturbed`` restores, and no other: ``torch.manual_seed`` seeds all GPUs."""
    torch.default_generator.manual_seed(0)
    for device in devices:
        if device.type != "cpu":
            with torch.get_device_module(device).device(device):
                torch.get_device_module(device).manual_seed(0)


@contextmanager
def _undisturbed(devices: Iterable[torch.device]) -> Iterator[None]:
    """Compute as a step does, and leave the random number generators as they were."""
    state = random.getstate()
    drawn = {device for device in devices if device.type != "cpu"}
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(drawn):
        try:
            yield
        finally:
            random.setstate(state)
