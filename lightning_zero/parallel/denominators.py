"""Losses that are means over as many elements as a batch happens to have, exact over micro-batches.

Note [Denominators]
    The mean over micro-batches of means over their tokens is the mean over the batch only if all have as many tokens.
    So the number of tokens of every micro-batch is found out before the first of them is run: the step runs without its
    model (whose modules return zeros) to the first loss of PyTorch's that is a mean, and is broken off there. While a
    micro-batch is run that loss is its sum, divided by the tokens of the batch and times the number of micro-batches,
    so that the mean over these is exact. Nothing is changed where all have as many. Other means whose numbers differ,
    and what is not linear in such a loss, are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

import lightning_zero_ops  # noqa: F401 (defines the op)
from lightning_zero.errors import PipelineError

__all__ = ["Denominators", "count_elements", "unwatched"]


class Denominators:
    """The numbers of elements of one batch's losses.

    Args:
        counts: Of the first loss of every micro-batch; None where they are not known before.
    """

    def __init__(self, counts: Sequence[float] | None) -> None:
        self._counts = counts
        self._seen: list[list[tuple[str, Tensor]]] = []  # by micro-batch

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Run a micro-batch to its loss."""
        seen: list[tuple[str, Tensor]] = []
        with _Weighing(self._factor, seen):
            yield
        self._seen.append(seen)
        if self._counts is not None and seen:
            seen[0] = (seen[0][0], torch.where(seen[0][1] == self._counts[index], 0.0, torch.nan))

    @property
    def _factor(self) -> float | None:
        """What the sum of the first loss is multiplied by; None if its mean is right."""
        if self._counts is None or len(set(self._counts)) == 1 or not sum(self._counts) > 0:
            return None
        return len(self._counts) / sum(self._counts)

    def check(self) -> None:
        """Raise where a loss of the batch is not exact.

        Raises:
            PipelineError: Its number of elements differs from one micro-batch to the next, or is not what it should be.
        """
        for losses in zip(*self._seen, strict=False):
            counts = torch.stack([count.double() for _, count in losses]).cpu()
            if not bool((counts == counts[0]).all()):
                found = "" if counts.isnan().any() else f" ({', '.join(f'{count:g}' for count in counts.tolist())})"
                raise PipelineError(
                    f"`{losses[0][0]}` is a mean over a number of elements that differs from one micro-batch to the"
                    f" next{found}, and it could not be told before the model ran. The mean over the micro-batches is"
                    " then not that of the batch. Use `reduction='sum'` and divide by a number that is the same for"
                    " all, make it the first loss of the step and draw its mask in front of the model, or use"
                    " `Pipeline(microbatches=1)`."
                )


def count_elements(run: Callable[[], Any]) -> Tensor | None:
    """Run a step up to its first loss that is a mean, and return over how many elements: () float; None without one."""
    try:
        with _Counting():
            run()
    except _Counted as found:
        return found.count
    except Exception:  # what the step does with zeros may fail; the real run tells
        return None
    return None


@contextmanager
def unwatched() -> Iterator[None]:
    """Run code that computes no loss as if nothing watched: compiled code does not see a mode then."""
    current = _get_current_function_mode()  # type: ignore[no-untyped-call]
    if isinstance(current, _Weighing):
        with _pop_mode_temporarily():
            yield
    else:
        yield


class _Counted(Exception):
    def __init__(self, count: Tensor) -> None:
        super().__init__()
        self.count = count


class _Counting(TorchFunctionMode):
    """Breaks a step off at its first mean."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        loss = _mean_of(func, args, kwargs or {})
        if loss is not None:
            raise _Counted(loss.count())
        return func(*args, **(kwargs or {}))


class _Weighing(TorchFunctionMode):
    """Makes the first mean of a step that of the batch, and notes all.

    Args:
        factor: What the sum is multiplied by; None leaves the mean.
        seen: Names and counts are added to it.
    """

    def __init__(self, factor: float | None, seen: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._factor = factor
        self._seen = seen
        self._weighed: list[Tensor] = []  # the loss, and what is linear in it

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        loss = _mean_of(func, args, kwargs)
        if loss is None:
            return self._followed(func, args, kwargs) if self._weighed else func(*args, **kwargs)
        self._seen.append((loss.name, loss.count()))
        if self._factor is None or len(self._seen) > 1:
            return func(*args, **kwargs)
        result = loss.sum(self._factor)
        self._weighed.append(result[0] if isinstance(result, tuple) else result)
        return result

    def _followed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function; refuse it if it is given the loss and not linear in it."""
        is_given = any(arg is one for arg in args for one in self._weighed)
        name = getattr(func, "__name__", "")
        if is_given and name in _NOT_LINEAR:
            raise PipelineError(
                f"`{name}` of a loss that is a mean over a number of elements that differs from one micro-batch to the"
                " next: its mean over the micro-batches is not its value for the batch. Log the loss itself, or use"
                " `Pipeline(microbatches=1)`."
            )
        result = func(*args, **kwargs)
        if is_given and isinstance(result, Tensor) and result.ndim == 0:
            self._weighed.append(result)
        return result


_NOT_LINEAR = {"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "square", "pow", "__pow__",
               "reciprocal", "sigmoid", "tanh", "clamp", "clip", "minimum", "maximum"}  # fmt: skip


# -- What is a mean ----------------------------------------------------------------------------------------------------


class _Mean:
    """A call of a loss that is a mean.

    Args:
        name: Of the function.
        count: Returns over how many elements, or the sum of their weights: ().
        sum: Returns its sum times a factor.
    """

    def __init__(self, name: str, count: Callable[[], Tensor], sum: Callable[[float], Any]) -> None:
        self.name = name
        self.count = count
        self.sum = sum


def _mean_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Mean | None:
    if func is torch.ops.lightning_zero.linear_cross_entropy.default or (
        func is torch.ops.lightning_zero.linear_cross_entropy
    ):
        return _mean_of_projected(func, args)
    if func not in _BY_LABEL and func not in _BY_ELEMENT:
        return None
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given["reduction"] != "mean" or given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    if func in _BY_WEIGHT and given.get("weight") is not None:
        return None

    def total(factor: float) -> Tensor:
        result: Tensor = func(**{**given, "reduction": "sum"}) * factor
        return result

    count = _labels if func in _BY_LABEL else _elements
    return _Mean(func.__name__, lambda: count(given), total)


def _labels(given: dict[str, Any]) -> Tensor:
    """Return how many labels count, or the sum of the weights of their classes: ()."""
    target, weight = given["target"], given["weight"]
    with torch.no_grad():
        if target.is_floating_point():  # of every class
            return torch.tensor(target.numel() / target.shape[1 if target.ndim > 1 else 0])
        counted = target != given["ignore_index"]
        weights: Tensor = counted if weight is None else weight[target.where(counted, 0)] * counted
        return weights.sum().double()


def _elements(given: dict[str, Any]) -> Tensor:
    shapes = given["input"].shape, given["target"].shape
    return torch.tensor(float(torch.broadcast_shapes(*shapes).numel()))  # type: ignore[no-untyped-call]


def _mean_of_projected(func: Any, args: tuple[Any, ...]) -> _Mean | None:
    target, ignored, is_mean = args[2], args[4], args[8]
    if not is_mean:
        return None

    def total(factor: float) -> Any:
        loss, *rest = func(*args[:8], False, *args[9:])
        return (loss * factor, *rest)

    return _Mean("linear_cross_entropy", lambda: (target != ignored).sum().double(), total)


_BY_LABEL: set[Any] = {F.cross_entropy, F.nll_loss}
_BY_ELEMENT: set[Any] = {
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.kl_div,
}  # fmt: skip
_BY_WEIGHT: set[Any] = {F.mse_loss, F.l1_loss, F.huber_loss}  # with weights their means are over these
