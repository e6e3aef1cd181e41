"""Losses that are means over as many elements as a batch happens to have, exact over micro-batches.

Note [Denominators]
    The mean over micro-batches of means over their tokens is the mean over the batch only if all have as many tokens.
    So the number of tokens of every micro-batch is found out before the first of them is run: the step runs without its
    model (whose modules return zeros) to the first loss of PyTorch's that is a mean, and is broken off there. While a
    micro-batch is run that loss is its sum, divided by the tokens of the batch and by the micro-batch's share of the
    samples, so that the mean over the samples of all micro-batches is exact. Nothing is changed where every sample has
    as many. Other means whose numbers differ, and functions that are not linear in such a loss, are refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

import lightning_zero_ops  # noqa: F401 (defines the op)
from lightning_zero.errors import PipelineError

__all__ = ["Denominators", "count_elements", "uncounting", "unwatched"]


class Denominators:
    """The numbers of elements of one batch's losses.

    Args:
        counts: Of the first loss of every micro-batch; None where they are not known before.
        sizes: Samples of every micro-batch.
    """

    def __init__(self, counts: Sequence[float] | None, sizes: Sequence[int]) -> None:
        self._counts = counts
        self._sizes = sizes
        self._seen: list[list[tuple[str, Tensor]]] = []  # by micro-batch

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Run a micro-batch to its loss."""
        seen: list[tuple[str, Tensor]] = []
        with _Weighing(self._factor(index), seen):
            yield
        self._seen.append(seen)
        if self._counts is not None and seen:
            seen[0] = (seen[0][0], torch.where(seen[0][1] == self._counts[index], 0.0, torch.nan))

    def _factor(self, index: int) -> float | None:
        """Return the factor of the sum of a micro-batch's first loss; None if its mean is right."""
        if self._counts is None or not sum(self._counts) > 0:
            return None
        if all(self._is_in_proportion(count, size) for count, size in zip(self._counts, self._sizes, strict=True)):
            return None
        return sum(self._sizes) / self._sizes[index] / sum(self._counts)

    def _is_in_proportion(self, count: float, size: int) -> bool:
        """Say whether a micro-batch has as many elements for each of its samples as the first one."""
        assert self._counts is not None
        return count * self._sizes[0] == self._counts[0] * size

    def check(self) -> None:
        """Raise where a loss of the batch is not exact.

        Raises:
            PipelineError: Its number of elements differs between micro-batches, or is not the counted number.
        """
        sizes = torch.tensor(self._sizes, dtype=torch.float64)
        for losses in zip(*self._seen, strict=False):
            counts = torch.stack([count.double() for _, count in losses]).cpu()
            if not bool((counts * sizes[0] == counts[0] * sizes).all()):
                self._refuse(losses[0][0], counts)

    def _refuse(self, name: str, counts: Tensor) -> NoReturn:
        found = "" if counts.isnan().any() else f" ({_listed(counts.tolist())})"
        if len(set(self._sizes)) == 1:
            how = f"a number of elements that differs from one micro-batch to the next{found}"
            divides = ""
        else:
            how = f"a number of elements{found} that is not in proportion to the samples ({_listed(self._sizes)})"
            divides = " use batches that `microbatches` divides (`drop_last=True` in the DataLoader),"
        raise PipelineError(
            f"`{name}` is a mean over {how}, and it could not be told before the model ran. The mean over the"
            " micro-batches is then not that of the batch. Use `reduction='sum'` and divide by a number that is the"
            " same for all, make it the first loss of the step and draw its mask before the model,"
            f"{divides} or use `Pipeline(microbatches=1)`."
        )


def count_elements(run: Callable[[], Any]) -> Tensor | None:
    """Run a step up to its first loss that is a mean, and return over how many elements: () float; None without one."""
    try:
        with _Counting():
            run()
    except _Counted as found:
        return found.count
    except Exception:  # a step on zeros may fail; the real run shows its own errors
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


@contextmanager
def uncounting() -> Iterator[None]:
    """Run a module on fakes in a survey: a loss in it has no labels that could be counted."""
    with _pop_mode_temporarily() if _is_counting() else nullcontext():
        yield


def _is_counting() -> bool:
    return isinstance(_get_current_function_mode(), _Counting)  # type: ignore[no-untyped-call]


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
        factor: Factor of the sum; None leaves the mean.
        seen: Names and counts are added to it.
    """

    def __init__(self, factor: float | None, seen: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._factor = factor
        self._seen = seen
        self._weighed: dict[int, Tensor] = {}  # the loss, and tensors that are linear in it, by `id`

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        loss = _mean_of(func, args, kwargs)
        if loss is not None:
            self._seen.append((loss.name, loss.count()))
        if self._weighed:
            return self._followed(func, args, kwargs)
        if loss is None or self._factor is None or len(self._seen) > 1:
            return func(*args, **kwargs)
        result = loss.sum(self._factor)
        self._watch(result[0] if isinstance(result, tuple) else result)
        return result

    def _watch(self, result: Any) -> None:
        self._weighed.update({id(tensor): tensor for tensor in _tensors(result)})

    def _followed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function; refuse it if it is given the loss and not known to be linear in it."""
        places = [place for place, arg in enumerate((*args, *kwargs.values())) for tensor in _tensors(arg)
                  if id(tensor) in self._weighed]  # fmt: skip
        result = func(*args, **kwargs)
        if not places:
            return result
        name = getattr(func, "__name__", "").split(".")[0]
        is_computed = next(_tensors(result), None) is not None
        if is_computed and name not in _SAME and not _is_linear(name.strip("_"), places):
            raise PipelineError(
                f"`{name.strip('_')}` of a loss that is a mean over a number of elements that differs from one"
                " micro-batch to the next: its mean over the micro-batches is not its value for the batch. Return and"
                " log sums of losses and their products with values that do not depend on them, or use"
                " `Pipeline(microbatches=1)`."
            )
        if name not in _SAME:
            self._watch(args[0] if name in _WRITES else result)
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _is_linear(name: str, places: Sequence[int]) -> bool:
    """Say whether a function is linear in its arguments at some places."""
    if name in _PRODUCTS:
        return len(places) == 1
    return name in _LINEAR or (name in _LINEAR_IN and set(places) <= _LINEAR_IN[name])


# Names without the underscores around them, so `add` is also `add_` and `__add__`.
_LINEAR = {
    "add", "radd", "iadd", "sub", "rsub", "isub", "subtract", "neg", "negative", "pos", "positive", "sum", "mean",
    "cumsum", "stack", "cat", "concat", "concatenate", "hstack", "vstack", "detach", "clone", "copy", "deepcopy",
    "alias", "to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda", "contiguous", "reshape",
    "reshape_as", "view", "view_as", "squeeze", "unsqueeze", "flatten", "ravel", "expand", "expand_as", "broadcast_to",
    "broadcast_tensors", "atleast_1d", "repeat", "permute", "transpose", "t", "select", "narrow", "split", "chunk",
    "unbind", "iter", "tensor", "as_tensor", "asarray", "nan_to_num", "fill", "requires_grad", "get", "set",
    "diagonal", "trace",
}  # fmt: skip
_PRODUCTS = {
    "mul", "rmul", "imul", "multiply", "dot", "vdot", "inner", "matmul", "rmatmul", "mv", "einsum", "tensordot",
}  # fmt: skip
_LINEAR_IN: dict[str, set[int]] = {  # by place
    "div": {0}, "divide": {0}, "true_divide": {0}, "truediv": {0}, "itruediv": {0}, "getitem": {0}, "setitem": {0, 2},
    "index_select": {0}, "gather": {0}, "masked_select": {0}, "masked_fill": {0, 2}, "where": {1, 2}, "lerp": {0, 1},
}  # fmt: skip
_SAME = {"isnan", "isfinite", "isinf", "full_like", "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like",
         "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}  # for any factor of the loss  # fmt: skip
_WRITES = {"__setitem__", "__set__"}  # into the first argument


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


# -- Means -------------------------------------------------------------------------------------------------------------


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
    if func not in _COUNTS:
        return None
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    is_mean = given["reduction"] == "mean" or (func is F.kl_div and given["reduction"] == "batchmean")
    if not is_mean or given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    if func in _BY_WEIGHT and given.get("weight") is not None:
        return None

    def total(factor: float) -> Tensor:
        result: Tensor = func(**{**given, "reduction": "sum"}) * factor
        return result

    return _Mean(func.__name__, lambda: _COUNTS[func](given), total)


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
    if given["reduction"] == "batchmean":
        return torch.tensor(float(given["input"].shape[0]))
    return _numel(given["input"].shape, given["target"].shape)


def _targets(given: dict[str, Any]) -> Tensor:
    return _numel(given["target"].shape)


def _rows(given: dict[str, Any]) -> Tensor:
    return _numel(given["input"].shape[:-1])


def _pairs(given: dict[str, Any]) -> Tensor:
    return _numel(given["input1"].shape, given["input2"].shape, given["target"].shape)


def _vectors(given: dict[str, Any]) -> Tensor:
    shapes = [
        given[name].shape[:-1] for name in ("input1", "input2", "anchor", "positive", "negative") if name in given
    ]
    return _numel(*shapes, *([given["target"].shape] if "target" in given else []))


def _numel(*shapes: Sequence[int]) -> Tensor:
    return torch.tensor(float(math.prod(torch.broadcast_shapes(*shapes))))  # type: ignore[no-untyped-call]


def _mean_of_projected(func: Any, args: tuple[Any, ...]) -> _Mean | None:
    target, ignored, is_mean = args[2], args[4], args[8]
    if not is_mean:
        return None

    def total(factor: float) -> Any:
        loss, *rest = func(*args[:8], False, *args[9:])
        return (loss * factor, *rest)

    return _Mean("linear_cross_entropy", lambda: (target != ignored).sum().double(), total)


_COUNTS: dict[Any, Callable[[dict[str, Any]], Tensor]] = {
    **dict.fromkeys((F.cross_entropy, F.nll_loss), _labels),
    **dict.fromkeys((F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
                     F.binary_cross_entropy_with_logits, F.kl_div, F.gaussian_nll_loss, F.poisson_nll_loss,
                     F.soft_margin_loss, F.hinge_embedding_loss), _elements),
    **dict.fromkeys((F.multilabel_margin_loss, F.multilabel_soft_margin_loss), _rows),
    **dict.fromkeys((F.cosine_embedding_loss, F.triplet_margin_loss), _vectors),
    F.multi_margin_loss: _targets,
    F.margin_ranking_loss: _pairs,
}  # fmt: skip
_BY_WEIGHT: set[Any] = {F.mse_loss, F.l1_loss, F.huber_loss}  # with weights their means are over these
