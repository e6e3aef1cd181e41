"""The gradient of a parameter in the step window: this rank's segment, which never passes for the whole.

Element-wise operations act on the segment, norms are finished over the ranks, everything else raises an error that
names ``full_grad``. So ``torch.nn.utils.clip_grad_norm_`` and Lightning's ``grad_norm`` are right without knowing.
Whole tensors beside a gradient (masks) are cut, and so are random numbers, which are drawn for the whole: ranks that
are seeded alike draw those of one process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from lightning_zero.boxes import Part
from lightning_zero.comm.communicator import Communicator
from lightning_zero.engine.buffers.exact_norms import norm_over_ranks_exactly
from lightning_zero.engine.buffers.parameter import name_of, operation_of, source_of
from lightning_zero.errors import PipelineError, ShardedGradientError
from lightning_zero.storage.residence import lazily_read_class
from lightning_zero.trees import tree_map_only
from lightning_zero_ops.flat import sq_norm
from lightning_zero_ops.selfcheck import kernels_agree

__all__ = [
    "RANDOM",
    "Cut",
    "ShardedGradient",
    "StageGradient",
    "answer_for_whole",
    "asks_for_shape",
    "cut_all",
    "draw",
    "is_elementwise",
    "kept_part",
    "mark_of_stage",
    "norm_of_norms",
    "norm_over_ranks",
    "require_same_part",
    "norm_in_double",
    "norms_of",
    "sharded_gradient_class",
]

_ELEMENTWISE = frozenset([
    "clone", "detach", "detach_", "copy_", "zero_", "fill_", "to", "float", "double", "half", "bfloat16", "type",
    "cpu", "cuda", "contiguous", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "requires_grad_", "masked_fill", "masked_fill_", "type_as", "bernoulli_", "normal_", "uniform_", "numel",
    "nelement", "dim", "size", "stride", "element_size", "is_floating_point", "is_complex", "is_contiguous",
    "get_device", "data_ptr", "__hash__", "__repr__", "is_inference", "untyped_storage", "record_stream", "clip",
    "clip_", "nan_to_num", "nan_to_num_", "__invert__", "__len__", "fill", "float_power", "hardswish",
    "isclose", "isreal", "log_sigmoid", "log_sigmoid_forward", "softsign", "tanhshrink",
])  # fmt: skip
_NORM_NUMEL = 2**22  # of one piece: 32 MiB in float64
_NORMS = frozenset(["vector_norm", "linalg_vector_norm", "linalg_norm", "norm", "_foreach_norm"])
RANDOM = frozenset([
    "rand_like", "randn_like", "randint_like", "bernoulli_", "normal_", "uniform_", "random_", "exponential_",
    "cauchy_", "geometric_", "log_normal_", "bernoulli", "dropout", "dropout_", "alpha_dropout",
    "alpha_dropout_", "normal",
])  # fmt: skip
_VIEWS = frozenset(["view", "view_as", "reshape", "reshape_as", "expand", "expand_as"])
_QUESTIONS = frozenset(["to", "type", "type_as"])  # other arguments give their dtype only
_OF_WHOLE = frozenset([".T", ".mT", ".H", ".mH", ".__cuda_array_interface__"])  # attributes
_EXTREMA = frozenset(["max", "min"])  # element-wise with a second tensor only
_OPERATORS = {
    "truediv": "div", "floordiv": "div", "or": "bitwise_or", "and": "bitwise_and", "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}  # fmt: skip
_ALIASES = {
    "_threshold": "threshold", "absolute": "abs", "arctan2": "atan2", "divide": "div", "expit": "sigmoid",
    "fix": "trunc", "floor_divide": "div", "gammaln": "lgamma", "greater": "gt", "greater_equal": "ge", "less": "lt",
    "less_equal": "le", "multiply": "mul", "negative": "neg", "not_equal": "ne", "psi": "digamma", "rsub": "sub",
    "subtract": "sub", "true_divide": "div",
    **{f"arc{name}": f"a{name}" for name in ("cos", "sin", "tan", "cosh", "sinh", "tanh")},
}  # fmt: skip


class Cut(NamedTuple):
    """Elements ``[start, stop)`` of a parameter, or of a part of it: those that this rank holds.

    Attributes:
        name: Of the parameter.
        shape: Of the whole parameter.
        start: The first of the elements, in row-major order.
        stop: Behind the last one.
        part: That the ranks of this one's group have, if it is not all of the parameter.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    part: Part | None = None

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return them: (stop - start,)."""
        return self.of_part(whole if self.part is None else self.part.read(whole))

    def of_part(self, values: torch.Tensor) -> torch.Tensor:
        """Return them of a tensor of the part's shape: (stop - start,)."""
        return values.reshape(-1)[self.start : self.stop]

    def spread(self, segment: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the whole shape with the elements in their places, and zeros."""
        local = torch.zeros(
            self.shape if self.part is None else self.part.shape, dtype=segment.dtype, device=segment.device
        )
        self.of_part(local).copy_(segment)
        if self.part is None:
            return local
        whole = torch.zeros(self.shape, dtype=segment.dtype, device=segment.device)
        self.part.write(whole, local)
        return whole


_SHAPE_QUESTIONS = frozenset([
    "numel", "nelement", "__len__", "dim", "ndimension", "size", "stride", "is_same_size", ".shape", ".ndim", ".nbytes",
])  # fmt: skip


def _keeps_shape(tensor: torch.Tensor, *shape: Any) -> bool:
    """Say whether a view has the shape that the program sees."""
    first = shape[0] if shape else None
    wanted = first.shape if isinstance(first, torch.Tensor) else first if isinstance(first, (tuple, list)) else shape
    return tuple(wanted) == tuple(tensor.shape)


def asks_for_shape(func: Callable[..., Any]) -> bool:
    """Say whether a function's answer follows from a tensor's shape."""
    return operation_of(func) in _SHAPE_QUESTIONS


def answer_for_whole(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Answer a question about shapes for the whole parameters that tensors are segments of."""
    with torch._C.DisableTorchFunctionSubclass():
        args, kwargs = tree_map_only(torch.Tensor, _outline, (args, kwargs or {}))
        return func(*args, **kwargs)


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    cut = getattr(type(tensor), "whole", None)
    return torch.empty(cut.shape, dtype=tensor.dtype, device="meta") if isinstance(cut, Cut) else tensor


class ShardedGradient(torch.Tensor):
    """This rank's segment of a reduced gradient: (segment numel,), 1-D."""

    communicator: ClassVar[Communicator]
    cut: ClassVar[Cut | None] = None
    whole: ClassVar[Cut | None] = None  # the same, unless the shape is asked for in a method of an optimizer
    is_of_stage: ClassVar[bool] = False  # of a pipeline: others have the gradients of other parameters
    in_methods: ClassVar[type[ShardedGradient]]  # the class that answers with the segment's shape
    noun: ClassVar[str] = "gradient"
    reader: ClassVar[str] = "full_grad"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run element-wise operations, finish norms over the ranks, refuse the rest.

        Gradients of several units have a class each; lists of them (``_foreach_mul_``) are no conflict.
        """
        kwargs = dict(kwargs or {})
        name = operation_of(func)
        if name in _NORMS:
            return cls._norm(name, args, kwargs)
        if asks_for_shape(func):
            return answer_for_whole(func, args, kwargs)
        if name == "_amp_foreach_non_finite_check_and_unscale_":  # torch.amp.GradScaler
            return cls._unscale(func, *args)
        if name == "__setitem__" and isinstance(args[0], ShardedGradient) and type(args[0]).cut is not None:
            return _set_items(args[0], *args[1:])
        if name in _VIEWS and not kwargs and isinstance(args[0], ShardedGradient) and _keeps_shape(*args):
            return args[0]
        if name in RANDOM and cls.is_of_stage and not _is_fresh(kwargs.get("generator")):
            _refuse_noise(name)
        source = _drawn_for(name, args, kwargs) if name in RANDOM else None
        if source is not None and type(source).cut is not None:
            return draw(func, source, args, kwargs)
        if is_elementwise(func, args, kwargs):
            if name not in _QUESTIONS and not name.startswith("."):
                args, kwargs = cut_all(name, args, kwargs)
            sleeping = lazily_read_class(types)
            if sleeping is not None:
                in_memory = sleeping.__torch_function__(func, types, args, kwargs)
                return tree_map_only(torch.Tensor, cls._own, in_memory)
            result = super().__torch_function__(func, (cls,), args, kwargs)  # type: ignore[no-untyped-call]
            is_list = name.startswith("_foreach_") and args and result is not None
            return _as_those(args[0], result) if is_list else result
        raise ShardedGradientError(
            f"`{name}` needs a whole {cls.noun}, but this rank holds one segment of it. {cls.remedy()}; element-wise"
            " operations and norms work on the segment."
        )

    @classmethod
    def remedy(cls) -> str:
        """Return where a whole tensor is, as the begin of a sentence."""
        return f"Use `strategy.{cls.reader}(param)` (`engine.{cls.reader}(param)`) on every rank"

    @classmethod
    def _own(cls, result: torch.Tensor) -> torch.Tensor:
        return result.as_subclass(cls) if type(result) is torch.Tensor else result

    @classmethod
    def _unscale(
        cls, func: Callable[..., Any], grads: Sequence[torch.Tensor], found: torch.Tensor, factor: torch.Tensor
    ) -> None:
        """Multiply gradients; all ranks learn whether one of them is not finite on some rank. Collective: all ranks."""
        func([grad.detach().as_subclass(torch.Tensor) for grad in grads], found, factor)
        on_some_rank = cls.communicator.all_reduce(
            found.to(cls.communicator.device, torch.float64, copy=True), "agreement on overflow", dist.ReduceOp.MAX
        )
        found.copy_(on_some_rank)

    @classmethod
    def _norm(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if cls.is_of_stage:
            _refuse_norm(name)
        names = ("input", "self", "x", "A", "tensors")
        tensors = args[0] if args else next(kwargs[key] for key in names if key in kwargs)
        order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2.0))
        options = [*args[2:], *(kwargs.get(key) for key in ("dim", "keepdim", "out", "dtype"))]
        given = [option for option in options if option is not None and option is not False]
        if any(isinstance(option, torch.Tensor) for option in given):
            raise ShardedGradientError(
                f"`{name}` of a {cls.noun} is finished over the ranks, and does not write to `out`. Use its result."
            )
        dtype = next((option for option in given if isinstance(option, torch.dtype)), None)
        if len(given) > (dtype is not None):
            raise ShardedGradientError(f"`{name}` over a dimension needs a whole {cls.noun}. {cls.remedy()}.")
        is_matrix = cls.cut is not None and len(cls.cut.shape) == 2
        if order == "nuc" or (name == "linalg_norm" and is_matrix and order not in (None, "fro")):
            raise ShardedGradientError(
                f"`{name}` of order {order!r} is the norm of a matrix, which needs a whole {cls.noun}."
                f" {cls.remedy()}; or take `torch.linalg.vector_norm`."
            )
        order = 2.0 if order in (None, "fro") else float(order)
        if name == "_foreach_norm":
            return [_finished(tensor, order, cls.communicator, dtype) for tensor in tensors]
        return _finished(tensors, order, cls.communicator, dtype)


class StageGradient(torch.Tensor):
    """A whole gradient on a pipeline stage, whose norm would be added up to that of the stage alone."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse norms and noise, and run everything else."""
        name = operation_of(func)
        if name in _NORMS:
            _refuse_norm(name)
        if name in RANDOM and not _is_fresh((kwargs or {}).get("generator")):
            _refuse_noise(name)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def mark_of_stage(grad: torch.Tensor | None) -> None:
    """Let a gradient that is shown on a pipeline stage refuse norms."""
    if isinstance(grad, ShardedGradient):
        type(grad).is_of_stage = True
    elif type(grad) is torch.Tensor:
        grad.__class__ = StageGradient


def _refuse_norm(name: str) -> NoReturn:
    """Refuse the norm of a gradient on a pipeline stage.

    Raises:
        PipelineError: Always.
    """
    raise PipelineError(
        f"`{name}` of a gradient on a pipeline stage: a norm over the module's gradients (`clip_grad_norm_`,"
        " `get_total_norm`, Lightning's `grad_norm`) would be that of this stage's parameters alone, and every stage"
        " would clip by another factor. Use `Trainer(gradient_clip_val=...)` or `self.clip_gradients(...)` to clip,"
        " and `strategy.grad_norm()` on every rank, or `ZeroMonitor(grad_norm=True)`, for the norm over all stages."
    )


def _is_fresh(generator: torch.Generator | None) -> bool:
    """Say whether nothing was drawn from a generator: one for several parameters is drawn from on each stage anew."""
    if generator is None:
        return False
    unused = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return torch.equal(generator.get_state(), unused.get_state())


def _refuse_noise(name: str) -> NoReturn:
    """Refuse to draw numbers for a gradient on a pipeline stage.

    Raises:
        PipelineError: Always.
    """
    raise PipelineError(
        f"`{name}` of a gradient on a pipeline stage: all stages would draw the same numbers for their own parameters."
        " Draw with a new generator for each parameter, `torch.empty_like(p.grad).normal_(generator=generator)`, which"
        " its place among `named_parameters` and the step seed."
    )


def sharded_gradient_class(communicator: Communicator, cut: Cut | None = None) -> type[ShardedGradient]:
    """Return a class of gradients of one parameter whose norms are finished over ``communicator``."""
    body = {"communicator": communicator, "cut": cut, "whole": cut}
    made: type[ShardedGradient] = type("ShardedGradient", (ShardedGradient,), body)
    made.in_methods = type("ShardedGradient", (made,), {"whole": None})
    return made


def cut_all(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cut whole tensors that an element-wise operation gets beside gradients."""
    names = [*range(len(args)), *kwargs]
    written = {0} if re.fullmatch(r"(?!__).*_|__i(?!nvert).*__", name) else {"out"}
    values = [*args, *kwargs.values()]
    if name.startswith("_foreach_"):
        lists = [value for value in values if isinstance(value, (list, tuple))]
        grads = [_first_gradient(row) for row in zip(*lists, strict=False)]
        values = [
            [_cut_beside(grad, one, name, where in written) for grad, one in zip(grads, value, strict=False)]
            if isinstance(value, (list, tuple))
            else value
            for where, value in zip(names, values, strict=True)
        ]
    else:
        grad = _first_gradient(values)
        values = [_cut_beside(grad, value, name, where in written) for where, value in zip(names, values, strict=True)]
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def _first_gradient(values: Iterable[Any]) -> ShardedGradient | None:
    return next((value for value in values if isinstance(value, ShardedGradient)), None)


def _cut_beside(grad: ShardedGradient | None, value: Any, name: str, is_written: bool) -> Any:
    """Return the part of a tensor that belongs to a gradient's segment; it is whole, or has the segment's shape.

    Raises:
        ShardedGradientError: It has another shape, or is whole and written to.
    """
    if grad is None or not isinstance(value, torch.Tensor):
        return value
    cut = type(grad).cut
    if isinstance(value, ShardedGradient):
        require_same_part(cut, type(value).cut, name)
        return value
    local = kept_part(cut, value, name)
    if local is not None and cut is not None and not is_written:
        return cut.of_part(local)
    with torch._C.DisableTorchFunctionSubclass():
        shape, other = grad.shape, value.shape
    if cut is None or other == shape or (other.numel() == 1 and len(other) < 2 and not is_written):
        return value
    if other == cut.shape and (not is_written or _is_data_of(cut, value, grad)):
        return cut.of(value)
    raise ShardedGradientError(
        f"`{name}` got the {grad.noun} of `{cut.name}`, of which this rank holds {_range_of(cut)},"
        f" {'writes to' if is_written else 'and'} a tensor of shape {tuple(other)}. Give it one of the whole"
        f" parameter's shape, {tuple(cut.shape)}, which is cut, or of the segment's, {tuple(shape)}, as its result has."
        f" {grad.remedy()}." + (" If it is `p.data`, read `p.grad` first (`grad = p.grad`)." if is_written else "")
    )


def _is_data_of(cut: Cut, value: torch.Tensor, grad: torch.Tensor) -> bool:
    """Say whether a tensor is ``data`` of a gradient's parameter, read before the gradient: its segment is written."""
    source = source_of(value) if value.dtype == grad.dtype else None
    return source is not None and name_of(source) == cut.name


def require_same_part(mine: Cut | None, other: Cut | None, name: str) -> None:
    """Refuse segments that are not of the same elements of their parameters.

    Raises:
        ShardedGradientError: They are not.
    """
    if (
        mine is None
        or other is None
        or mine[1:] == other[1:]
        or mine.start - mine.stop == other.start - other.stop == 0
    ):
        return
    raise ShardedGradientError(
        f"`{name}` got segments of `{mine.name}` and `{other.name}`, of which this rank holds {_range_of(mine)} and"
        f" {_range_of(other)}: they are not"
        " of the same elements. Use whole ones, `strategy.full_grad(param)` (`engine.full_grad(param)`) on every rank."
    )


def kept_part(cut: Cut | None, value: torch.Tensor, name: str) -> torch.Tensor | None:
    """Return values of the part of a parameter that a program has made outside of the step window; None: of none.

    Raises:
        ShardedGradientError: They are of another part.
    """
    face = getattr(value, "face", None)
    if face is None:
        return None
    if cut is None or face.part != cut.part:
        raise ShardedGradientError(
            f"`{name}` got a segment and values of `{face.name}`, of which this rank has other elements. Use whole"
            " ones, `strategy.full_param(param)` and `strategy.full_grad(param)`, on every rank."
        )
    return value.as_subclass(torch.Tensor)


def _range_of(cut: Cut) -> str:
    part = "" if cut.part is None else f"a part of shape {cut.part.shape} of "
    return f"elements {cut.start} to {cut.stop} of {part}{tuple(cut.shape)}"


def _as_those(grads: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Give results of an operation on a list of gradients the class of each of them."""
    for grad, result in zip(grads, results, strict=True):
        if isinstance(grad, ShardedGradient) and isinstance(result, ShardedGradient):
            result.__class__ = type(grad)
    return list(results)


def _drawn_for(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ShardedGradient | None:
    """Return the gradient that a drawing function writes, or whose values it uses."""
    if "out" in kwargs:
        return None
    return _first_gradient(args[:1] if name.endswith("_") else [*args, *kwargs.values()])


def draw(func: Callable[..., Any], grad: ShardedGradient, args: Any, kwargs: Any) -> torch.Tensor:
    """Draw numbers for the whole gradient, and return this rank's, or write them into the segment ``grad``."""
    cut, is_in_place = type(grad).cut, func.__name__.endswith("_") or kwargs.get("inplace", False)
    assert cut is not None
    args, kwargs = tree_map_only(ShardedGradient, lambda one: _spread(cut, one, func.__name__), (args, kwargs))
    drawn = cut.of(func(*args, **kwargs))
    if not is_in_place:
        return drawn.clone().as_subclass(type(grad))
    with torch.no_grad():
        grad.detach().as_subclass(torch.Tensor).copy_(drawn)
    return grad


def _spread(cut: Cut, grad: ShardedGradient, name: str) -> torch.Tensor:
    """Return a tensor of a whole gradient's shape with this rank's segment in its place, and zeros."""
    require_same_part(cut, type(grad).cut, name)
    return cut.spread(grad.detach().as_subclass(torch.Tensor))


def _set_items(grad: ShardedGradient, index: Any, value: Any) -> None:
    """Write elements that are named by an index into the whole gradient, or by a mask made of gradients."""
    cut = type(grad).cut
    assert cut is not None
    segment = grad.detach().as_subclass(torch.Tensor)
    if isinstance(value, ShardedGradient) and _is_everything(index):
        grad.copy_(value)
        return
    if isinstance(index, ShardedGradient):
        segment[index.detach().as_subclass(torch.Tensor)] = value
        return
    with torch.no_grad():
        chosen = torch.zeros(cut.shape, dtype=torch.bool, device=segment.device)
        values = torch.zeros(cut.shape, dtype=segment.dtype, device=segment.device)
        chosen[index] = True
        values[index] = value
        segment.copy_(torch.where(cut.of(chosen), cut.of(values), segment))


def _is_everything(index: Any) -> bool:
    """Say whether an index is a slice of everything, or several of them."""
    return all(one is ... or one == slice(None) for one in (index if isinstance(index, tuple) else (index,)))


def norm_over_ranks(segments: Sequence[torch.Tensor], order: float, communicator: Communicator | None) -> torch.Tensor:
    """Return the norm of the vector whose pieces are ``segments`` on every rank: () float64.

    Collective: all ranks, unless ``communicator`` is None because this rank holds everything. Sums are float64, so that
    how a vector is cut does not show after rounding.
    """
    return norm_of_norms(norms_of(segments, order), order, communicator)


def norm_in_double(values: torch.Tensor, order: float = 2.0) -> torch.Tensor:
    """Return the norm of real or complex values, added in float64: () float64.

    PyTorch makes a copy in float64 of its operands, so it is given pieces; a kernel on a GPU needs none.
    """
    if order == 2.0 and values.is_cuda and _is_flat(values) and kernels_agree(values.device):
        return sq_norm(values).sqrt()
    dtype = torch.complex128 if values.is_complex() else torch.float64
    if values.numel() <= _NORM_NUMEL:
        norm: torch.Tensor = torch.linalg.vector_norm(values, order, dtype=dtype)
        return norm
    pieces = torch.split(values.reshape(-1), _NORM_NUMEL)
    if values.requires_grad:
        return norm_of_norms([norm_in_double(piece, order) for piece in pieces], order)
    scratch = torch.empty(_NORM_NUMEL, dtype=dtype, device=values.device)  # one for all: allocators may not reuse them
    doubles = (scratch[: piece.numel()].copy_(piece) for piece in pieces)
    return norm_of_norms([torch.linalg.vector_norm(double, order) for double in doubles], order)


def _is_flat(values: torch.Tensor) -> bool:
    is_plain = values.dim() == 1 and values.is_contiguous() and not values.requires_grad
    return is_plain and values.dtype in (torch.float32, torch.bfloat16, torch.float16)


def norms_of(segments: Iterable[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the norm of every tensor that has elements: () float64 each."""
    return [norm_in_double(segment, order) for segment in segments if segment.numel()]


def norm_of_norms(
    norms: Sequence[torch.Tensor], order: float, communicator: Communicator | None = None
) -> torch.Tensor:
    """Return the norm of the vector whose pieces have the norms ``norms`` on every rank; see ``norm_over_ranks``."""

    def over_ranks(total: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        return total if communicator is None else communicator.all_reduce(total, "a norm", op)

    device = communicator.device if communicator is not None else None
    if norms:  # some gradients may be in host memory
        norms = [norm.to(device or norms[0].device) for norm in norms]
    local = torch.stack(list(norms)) if norms else torch.zeros(1, dtype=torch.float64, device=device)
    if math.isinf(order) and order > 0:
        return over_ranks(local.max(), dist.ReduceOp.MAX)
    if math.isinf(order):
        return over_ranks(local.min() if norms else torch.full_like(local[0], math.inf), dist.ReduceOp.MIN)
    if order == 0:
        return over_ranks(local.sum())
    return over_ranks(local.pow(order).sum()).pow(1.0 / order)


def _finished(
    gradient: torch.Tensor, order: float, communicator: Communicator, dtype: torch.dtype | None
) -> torch.Tensor:
    values = gradient.detach().as_subclass(torch.Tensor)
    result = values.dtype.to_real()
    if dtype is not None:  # PyTorch says which it gives, and refuses narrower ones
        result = torch.linalg.vector_norm(torch.empty(1, dtype=values.dtype, device="meta"), dtype=dtype).dtype
    over = communicator if isinstance(gradient, ShardedGradient) else None  # beside segments, one assigned as a whole
    if order == 2.0 and result == torch.float64:
        return norm_over_ranks_exactly([values], over, communicator.device)
    return norm_over_ranks([values], order, over).to(result)


def is_elementwise(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Say whether a function works on each element alone, or is an attribute, so that it is right on a segment."""
    name = operation_of(func)
    if name.removeprefix("_foreach_") in _EXTREMA:
        return torch.is_tensor(args[1] if len(args) > 1 else kwargs.get("other"))
    if name == "where" and len(args) + len(kwargs) == 1:  # `nonzero`
        return False
    return _is_elementwise(name)


@cache
def _is_elementwise(name: str) -> bool:
    if name.startswith("."):
        return name not in _OF_WHOLE
    if name == "equal":  # PyTorch marks it as point-wise, and its result is one for the whole
        return False
    operator = re.fullmatch(r"__(i|r(?!shift))?(\w+?)__", name)
    if name in _ELEMENTWISE:
        return True
    if operator is not None:
        return _is_pointwise(_OPERATORS.get(operator[2], operator[2]))
    name = name.removeprefix("_foreach_")
    if name in _ELEMENTWISE or name.removesuffix("_") in _ELEMENTWISE:
        return True
    bases = (name.removesuffix("_"), name.removesuffix("_").removeprefix("special_"))
    return any(_is_pointwise(_ALIASES.get(base, base)) for base in bases)


def _is_pointwise(name: str) -> bool:
    packet: Any = getattr(torch.ops.aten, name, None)
    if not hasattr(packet, "overloads"):
        return False
    tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags  # noise is one for the whole
