"""Forwards of sequence parallelism: between regions every rank has a part of the sequence (arXiv:2205.05198).

The first block of a list divides the hidden states along the sequence, the last one gathers them. A region gathers its
hidden states on entering, and its row layer returns this rank's part of the sum; so column layers copy nothing. All
parameters outside of the cut layers see a part of the sequence, and have partial gradients. Hidden states are
``(batch, sequence, features)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.errors import PartialParameterError
from lightning_zero.parallel.tensor.collectives import (
    Ranks,
    copy_to_ranks,
    gather_from_ranks,
    gather_sequence,
    reduce_scatter_sequence,
    scatter_to_ranks,
)
from lightning_zero.parallel.tensor.forwards import Divided, RowForward
from lightning_zero.parallel.tensor.generators import Region
from lightning_zero.parallel.tensor.plan import SequenceWord

__all__ = ["DividedSequence", "SequenceBlockForward", "SequenceEnds", "SequenceRegionForward", "SequenceRowForward"]

_SEQUENCE = 1  # the dimension of hidden states


def _sequence_dim(tensor: Tensor) -> int:
    """Return the dimension of tokens; layers on single tokens may be given ``(batch * sequence, features)``."""
    return max(tensor.dim() - 2, 0)


@dataclass
class DividedSequence:
    """Whether a forward is between the first and the last block of a list, so that the sequence is divided.

    Attributes:
        blocks: The blocks of the list.
        is_divided: The answer; not kept where a block was compiled after it was cut.
    """

    blocks: Sequence[nn.Module] = ()
    is_divided: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether all blocks can tell that they run."""
        return all(_is_told(one) for one in self.blocks)


@dataclass(frozen=True)
class SequenceEnds:
    """Whether a block is the first of its list, which divides the sequence, and the last, which gathers it."""

    is_first: bool
    is_last: bool
    sequence: DividedSequence = field(default_factory=DividedSequence)  # that of the list


class _CompiledCall:
    """The compiled call of a block, which tells that it runs: its forward cannot, because it is traced once.

    Args:
        call: Made by ``compile``.
        forward: Of the block.
    """

    def __init__(self, call: Callable[..., Any], forward: SequenceBlockForward) -> None:
        self._call = call
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        return self._forward.run_in_order(self._call, args, kwargs)


def _is_told(block: nn.Module) -> bool:
    return block._compiled_call_impl is None or isinstance(block._compiled_call_impl, _CompiledCall)


class SequenceRowForward(RowForward):
    """A row layer whose result is this rank's part of the sequence."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the part of the sum of the ranks' results."""
        (features,) = (*args, *kwargs.values())
        result = self.product(features)
        return self.with_bias(reduce_scatter_sequence(result, self.ranks, _sequence_dim(result)))


class SequenceRegionForward(Divided):
    """A module with column layers inside, or a column layer, that computes with the whole sequence.

    Args:
        words: By name or position of an argument, whether it is gathered or copied.
    """

    def __init__(
        self, module: nn.Module, ranks: Ranks, region: Region, words: Mapping[str | int, SequenceWord]
    ) -> None:
        super().__init__(module, ranks, region)
        self._words = words

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        args = tuple(self._enter(position, value) for position, value in enumerate(args))
        return self.run(*args, **{name: self._enter(name, value) for name, value in kwargs.items()})

    def _enter(self, key: str | int, value: Any) -> Any:
        word = self._words.get(key)
        if word is None or not isinstance(value, Tensor):
            return value
        if word == "copy":
            return copy_to_ranks(value, self.ranks)
        return gather_sequence(value, self.ranks, _sequence_dim(value))


class SequenceBlockForward(Divided):
    """A block between whose regions every rank has a part of the sequence.

    Random numbers are this rank's own from the first block to the last.

    Args:
        words: By name or position of an argument, whether it is the hidden states.
        ends: The block's place in its list.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks,
        *,
        region: Region,
        words: Mapping[str | int, SequenceWord],
        ends: SequenceEnds,
    ) -> None:
        super().__init__(module, ranks, region)
        self._keys = [key for key, word in words.items() if word == "scatter"]
        self._ends = ends
        if module._compiled_call_impl is not None:
            module._compiled_call_impl = _CompiledCall(module._compiled_call_impl, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; see ``run_in_order``."""
        if torch.compiler.is_compiling() or self.module._compiled_call_impl is not None:
            return self._run_block(*args, **kwargs)
        return self.run_in_order(self._run_block, args, kwargs)

    def run_in_order(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the block by its forward, or by its compiled call.

        Raises:
            PartialParameterError: The first or the last block of the list did not run.
        """
        if not self.ranks.runs_all_blocks or torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return run(*args, **kwargs)  # a backward computes some blocks again, in any order
        sequence = self._ends.sequence
        if not sequence.is_kept:
            return run(*args, **kwargs)
        if sequence.is_divided == self._ends.is_first:
            self._refuse_order()
        sequence.is_divided = False  # if an error leaves the block
        result = run(*args, **kwargs)
        sequence.is_divided = not self._ends.is_last
        return result

    def _refuse_order(self) -> None:
        was_divided, self._ends.sequence.is_divided = self._ends.sequence.is_divided, False
        missing = "last block of its list did not run in the forward before" if was_divided else "first one did not run"
        raise PartialParameterError(
            f"A `{type(self.module).__name__}` of a list of blocks is called, and the {missing}. With"
            " `TensorParallel(sequence=True)` the first block divides the sequence, and the last one gathers it, so"
            " both have to run in every forward. Turn off LayerDrop (`layerdrop=0.0`) and all else that leaves blocks"
            " out, or leave `sequence` out."
        )

    def _run_block(self, *args: Any, **kwargs: Any) -> Any:
        if self._ends.is_first:
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            for key in self._keys:
                given[key] = scatter_to_ranks(given[key], self.ranks, _SEQUENCE)
                self.region.enter(given[key], self.module.training)
            args = tuple(given[position] for position in range(len(args)))
            kwargs = {name: given[name] for name in kwargs}
        result = self.run(*args, **kwargs)
        return self._gathered(result) if self._ends.is_last else result

    def _gathered(self, result: Any) -> Any:
        """Return the block's result with its hidden states, which come first, gathered."""
        if isinstance(result, Tensor):
            self.region.leave(result, self.module.training)
            return gather_from_ranks(result, self.ranks, _SEQUENCE)
        hidden, *rest = result
        return type(result)([self._gathered(hidden), *rest])
