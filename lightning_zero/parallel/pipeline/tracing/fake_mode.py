"""PyTorch's ``FakeTensorMode`` with the rules of a pipeline for writes, random numbers and guesses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

from lightning_zero.errors import PipelineError
from lightning_zero.parallel.pipeline.stages.sources import Origins, Shape, describe_tensor, is_fake
from lightning_zero.parallel.pipeline.tracing.escapes import Escapes
from lightning_zero.trees import tree_leaves, tree_map
from lightning_zero_ops.grouped import empty_grouped_mm

__all__ = ["VALUES_NEEDED", "Mode", "empty_like", "written_by"]

_MOST_READS = 1000  # that are guessed in a run: a loop may wait for a value (`while error.item() > 1e-3`)

# Errors of operations that need values of a fake.
VALUES_NEEDED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Refuses operations that would write nothing: of a fake into a tensor with values, and any while imagining.

    In a run on fakes they are taken note of, and results that depend on values are guessed; see the note.
    """

    origins: Origins | None = None  # of a run on fakes
    escapes: Escapes | None = None  # of a forward that is imagined
    note_hook: Callable[[int, Any], None] | None = None  # called with number and arguments of hooks of the program
    has_guessed = False  # a result, since this was set
    guess: bool | None = None  # in a run on fakes, the value of flags that it reads; None: values are not read
    guesses_all = False  # and not only those that the chunk computes
    lost: list[Tensor]  # tensors with values, once for each fake that was written into them
    num_reads = 0  # values that were guessed, since this was set
    refusal: Exception | None = None  # the last error of an operation between modules, whoever has caught it
    is_dispatching = False  # an operation is running
    _is_imagining = False
    _is_drawn = False  # an operation is running whose random numbers have been drawn

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lost = []

    def own_references(self) -> set[int]:
        """Return the ``id`` of each weak reference to a fake that PyTorch keeps."""
        converter: Any = self.fake_tensor_converter
        constants = [one for alike in converter.constant_storage_mapping.values() for one in alike]
        return {id(one) for one in [*converter.meta_converter.tensor_memo.valuerefs(), *constants]}

    @contextmanager
    def imagining(self) -> Iterator[None]:
        """Run code that computes with fakes only."""
        self._is_imagining = True
        try:
            with self:
                yield
        finally:
            self._is_imagining = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run code of the program while imagining."""
        was, self._is_imagining = self._is_imagining, False
        try:
            with unset_fake_temporarily():
                yield
        finally:
            self._is_imagining = was

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, was_dispatching, self.is_dispatching = self.refusal, self.is_dispatching, True
        try:
            result = self._dispatched(func, types, args, kwargs or {})
        except (PipelineError, *VALUES_NEEDED) as error:
            if not self._is_imagining:
                self.refusal = error
            raise
        finally:
            self.is_dispatching = was_dispatching
        self.refusal = before  # an operation that this one is made of may have failed
        return result

    def _dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        lost = self._lost_writes(func, args, kwargs)
        if lost and self.origins is None:
            raise PipelineError(
                f"`{func}` writes a value of an earlier pipeline stage into a tensor of shape {tuple(lost[0].shape)}"
                " that is not of that stage, as in `loss += block.aux_loss`, and it could not be told before the step"
                " that it is needed. Add it to the values that go from block to block, or write `pipeline_step` and"
                " `pipeline_loss`."
            )
        if lost and self.origins is not None:
            self.origins.need((args, kwargs))
            self.lost += lost
            return lost[0]
        if not (self._is_imagining or self._is_drawn) and torch.Tag.nondeterministic_seeded in getattr(
            func, "tags", ()
        ):
            _draw(func, args, kwargs)
            self._is_drawn = True  # also where PyTorch makes it of other random operations
            try:
                return self.__torch_dispatch__(func, types, args, kwargs)
            finally:
                self._is_drawn = False
        if func is torch.ops.aten._grouped_mm.default:
            with self:
                result: Any = empty_grouped_mm(*args, **kwargs)
            if self.origins is not None and not self._is_imagining:
                self.origins.derive(result, (args, kwargs))
            return result
        try:
            result = super().__torch_dispatch__(func, types, *self._with_fakes_of_parameters(args, kwargs))
        except VALUES_NEEDED as error:
            reads = isinstance(error, DataDependentOutputException)  # a value may be read to be shown, or to compute
            if reads and self.guesses((args, kwargs)):
                return self._guessed_read(func, args)
            if reads or func._schema.is_mutable or not (self._is_imagining or self.origins is not None):
                raise
            result = self._guess(func, args, kwargs)
        if self.escapes is not None and self._is_imagining:
            self.escapes.note(result, (args, kwargs))
        if self.origins is not None and not self._is_imagining:
            self.origins.derive(result, (args, kwargs))
        return result

    @contextmanager
    def guessing(self, flags: bool, *, of_all: bool = False) -> Iterator[None]:
        """Guess values of fakes that the program reads: of those that the chunk computes, or of all.

        Args:
            flags: The value of flags.
            of_all: Of all fakes.
        """
        self.guess, self.guesses_all, self.num_reads = flags, of_all, 0
        try:
            yield
        finally:
            self.guess, self.guesses_all = None, False

    def guesses(self, value: Any) -> bool:
        """Say whether a value that is read is guessed: in some runs on fakes those that the chunk computes are."""
        is_own = self.origins is not None and self.origins.is_own(value)
        is_guessed = self.guess is not None and (self.guesses_all or is_own) and not self._is_imagining
        self.num_reads += is_guessed
        return is_guessed and self.num_reads <= _MOST_READS

    def _guessed_read(self, func: Any, args: Sequence[Any]) -> Any:
        """Guess a number that the program reads: one, or ``guess`` for a flag."""
        if func is not torch.ops.aten._local_scalar_dense.default or args[0].dtype is torch.bool:
            return self.guess
        return torch.ones((), dtype=args[0].dtype).item()

    def _with_fakes_of_parameters(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments with fakes for parameters that PyTorch converts in no version, or not in 2.11."""
        if not any(map(_is_unconverted_parameter, tree_leaves((args, kwargs)))):
            return args, kwargs

        def fake(leaf: Any) -> Any:
            if not _is_unconverted_parameter(leaf):
                return leaf
            with self:
                return empty_like(describe_tensor(leaf))

        return tree_map(fake, args), tree_map(fake, kwargs)

    def _lost_writes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors with values that an operation would write fakes into."""
        lost = [leaf for leaf in written_by(func, args, kwargs) if not is_fake(leaf)]
        if lost and self._is_imagining:
            raise PipelineError(
                f"it writes into a tensor of shape {tuple(lost[0].shape)} (`{func}`) that is not its own and that"
                " code after it may need. Let it compute a new tensor, or write into a copy (`tensor.clone()`)"
            )
        return lost if any(map(is_fake, tree_leaves((args, kwargs)))) else []

    def _guess(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Guess the result of an operation that needs values: run it on ones, and zeros where they may be indices."""
        self.has_guessed = True
        with torch.no_grad(), unset_fake_temporarily():
            result = func(*tree_map(_filled, args), **tree_map(_filled, kwargs))

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            with self:
                return empty_like(describe_tensor(leaf))

        return tree_map(fake, result)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation writes into."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = {**dict(zip((one.name for one in schema.arguments), args, strict=False)), **kwargs}
    written = [
        given.get(one.name) for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]


def _is_unconverted_parameter(leaf: Any) -> bool:
    """Say whether a tensor is a view of a parameter (its ``grad`` would be compared), or a parameter of a subclass."""
    if not isinstance(leaf, Tensor) or is_fake(leaf):
        return False
    return isinstance(leaf._base, nn.Parameter) or (isinstance(leaf, nn.Parameter) and type(leaf) is not nn.Parameter)


def _filled(leaf: Any) -> Any:
    if not is_fake(leaf):
        return leaf
    value = 1 if leaf.dtype.is_floating_point or leaf.dtype is torch.bool else 0
    return torch.full(leaf.shape, value, dtype=leaf.dtype, device=leaf.device)


_DRAWN_BY_VALUES = ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")


def _draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Draw as many random numbers as the stage that has the values: all stages draw the same ones behind it."""
    if func._schema.name.rpartition("::")[2] in _DRAWN_BY_VALUES:
        raise PipelineError(
            f"`{func}` draws random numbers for a value of an earlier pipeline stage, as many as its values tell, so"
            " that this stage would draw others from here on. Move it into a block."
        )

    def ones(leaf: Any) -> Any:
        return torch.ones_like(empty_like(describe_tensor(leaf)), requires_grad=False) if is_fake(leaf) else leaf

    with torch.no_grad():
        func(*tree_map(ones, args), **tree_map(ones, kwargs))


def empty_like(known: Shape) -> Tensor:
    """Return a tensor of a description; a fake, if the mode is on."""
    tensor = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device=known.device)
    return tensor.requires_grad_(known.requires_grad)
