"""Experts of unmodified models: one module that is called with tokens, the experts of each token, and their weights.

In transformers 5 the experts of Mixtral, Qwen, DeepSeek, gpt-oss and others are such modules, with parameters that have
a row for each expert. When they are divided, a forward of ours stands in for theirs: it sorts the tokens by expert,
sends them to the ranks of their experts, calls the module's own forward there, with the numbers that experts have among
those of the rank and weights of one, and adds up the weighted results.

Note [Verified]
    That is right for experts whose result is the sum of the results of single experts times their weights, and which
    read no more of their parameters than the rows of these. So a module is tried with random parameters of two experts:
    together, and each alone as the only one, in training and in evaluation. Modules for which both differ are refused.

Note [Choices of nothing]
    Routers choose -1 or E for padded tokens where experts leave such choices out. Others give an error, or take -1 for
    the last expert. So both numbers are tried too: those that the module leaves out are left out, others are an error.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from lightning_zero.moe.dispatch import sort_by_expert
from lightning_zero.moe.exchange import ExpertRanks, compute_on_ranks
from lightning_zero.moe.routing import Routing, count_choices
from lightning_zero_ops import permute_tokens, unpermute_tokens

__all__ = ["RoutedExperts"]

_ARGUMENTS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
_NUM_TRIED = 5  # tokens
_DROPOUTS = frozenset([torch.dropout, functional.dropout, functional.dropout1d, functional.alpha_dropout])
_TOLERANCE = 1e-4  # of rounding in fp32; wrong results are far from it


class RoutedExperts:
    """The experts of one module, and the forward that stands in for the module's own when they are divided.

    Args:
        module: Its parameters have one row for each expert.

    Attributes:
        num_experts: E, on all ranks together.
        ranks: Over which they are divided; None: every rank has all of them.
        left_out: Whether choices below 0, and those from E on, are left out; see Note [Choices of nothing].
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.num_experts = len(next(module.parameters()))
        self.ranks: ExpertRanks | None = None
        self.left_out = (False, False)
        self._dtypes: dict[Hashable, torch.dtype] = {}  # of results, by the dtypes of a call
        self._number = 0  # of the layer, among those that are divided
        self._forward = module.__dict__.get("forward")  # which it stands in for; None: that of the class

    @staticmethod
    def of(module: nn.Module) -> RoutedExperts | None:
        """Return the experts of a module; None for a module that is not called with experts and weights."""
        if _argument_names(module)[1:] not in _ARGUMENTS or not module._parameters:
            return None
        forward = module.__dict__.get("forward")
        while forward is not None and not isinstance(forward, RoutedExperts):
            forward = getattr(forward, "stands_in_for", None)
        return RoutedExperts(module) if forward is None else forward

    @staticmethod
    def choices(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the experts of each token of a call: (T, k)."""
        found: Tensor = _given(module, args, kwargs)[1]
        return found

    def divide(self, ranks: ExpertRanks, number: int) -> None:
        """Compute with those experts alone whose parameters this rank has kept.

        Args:
            ranks: Have as many experts each, in order.
            number: Of the layer in its module, the same on all ranks.
        """
        self.ranks = ranks
        self._number = number
        self.module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute tokens on the ranks of their experts. Collective: all ranks of the engine.

        Args:
            *args: (T, H) tokens; (T, k) their experts; (T, k) weights.
            **kwargs: The same by name.

        Returns:
            (T, H) in the dtype of the tokens.

        Raises:
            RuntimeError: There is a choice that is no expert, and the module does not leave such choices out.
        """
        assert self.ranks is not None
        hidden_states, experts, weights = _given(self.module, args, kwargs)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        experts, weights = (one.reshape(len(tokens), one.shape[-1]) for one in (experts, weights))
        experts = self._with_nothing(experts)
        counts = count_choices(experts, self.num_experts).sum(0)
        routing = Routing(experts, weights, priority=None, aux_loss=weights.new_zeros(()), counts=counts)
        order = sort_by_expert(routing, capacity=None)
        rows = permute_tokens(tokens, order.slots, order.rows)
        compute = partial(self._compute, weights.dtype)
        results = compute_on_ranks(rows, order.offsets, compute=compute, ranks=self.ranks, layer=self._number)
        total: Tensor = unpermute_tokens(results, weights, order.slots, order.rows)
        return total.to(hidden_states.dtype).view_as(hidden_states)

    def _with_nothing(self, experts: Tensor) -> Tensor:
        """Return choices with E for those that the module leaves out."""
        below, above = experts < 0, experts >= self.num_experts
        are_below_left_out, are_above_left_out = self.left_out
        if not (are_below_left_out and are_above_left_out):
            wrong = above if are_below_left_out else below if are_above_left_out else below | above
            torch._assert_async(
                ~wrong.any(),
                f"`{type(self.module).__name__}` is given a choice that is none of its experts 0 to"
                f" {self.num_experts - 1}, and does not leave such choices out. With `expert_parallel` the router has"
                " to choose experts alone: give padded tokens an expert, and the weight 0.",
            )
        return experts.masked_fill(below | above, self.num_experts)

    def _compute(self, dtype: torch.dtype, rows: Tensor, offsets: Tensor) -> Tensor:
        """Compute each row by its expert, of those that this rank has."""
        if not len(rows):  # no rows are in the graph as any others, and parameters have gradients of zeros
            nothing = [param.reshape(-1)[:0].sum().to(rows.dtype) for param in self.module.parameters()]
            return (rows + torch.stack(nothing).sum()).to(self._dtype_of_results(dtype, rows, len(offsets)))
        numbers = torch.arange(len(offsets), device=rows.device)
        counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
        experts = numbers.repeat_interleave(counts, output_size=len(rows)).unsqueeze(1)
        weights = torch.ones(len(rows), 1, dtype=dtype, device=rows.device)
        with _having(self.module, len(offsets)):
            result: Tensor = self._call(rows, experts, weights)
        return result

    def _dtype_of_results(self, dtype: torch.dtype, rows: Tensor, num_experts: int) -> torch.dtype:
        """Return the dtype that ranks with rows send: that of the result for one row."""
        device = rows.device.type
        is_narrowed, narrow = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        key = (dtype, rows.dtype, is_narrowed, narrow)
        if key not in self._dtypes:
            row, weight = rows.new_zeros(1, *rows.shape[1:]), torch.ones(1, 1, dtype=dtype, device=rows.device)
            random = torch.random.fork_rng([rows.device] if rows.is_cuda else [])
            # Casts without a graph must not be there for a call that needs gradients.
            casts = torch.autocast(device, narrow, is_narrowed, cache_enabled=False)
            # Selective checkpointing would keep the products of this call, which a recomputation does not make.
            modes = nullcontext() if isinstance(rows, FakeTensor) else _disable_current_modes()
            with torch.no_grad(), random, casts, modes, _having(self.module, num_experts):
                self._dtypes[key] = self._call(
                    row, torch.zeros(1, 1, dtype=torch.long, device=row.device), weight
                ).dtype
        return self._dtypes[key]

    def _call(self, *args: Tensor) -> Any:
        return self._forward(*args) if self._forward is not None else type(self.module).forward(self.module, *args)

    # -- Verification --------------------------------------------------------------------------------------------------

    def verify(self, name: str) -> None:
        """Try the module as the notes say. No collective.

        Args:
            name: Of the module, for errors.

        Raises:
            ValueError: It does not run, or its results are others.
        """
        with torch.device("cpu"):  # also where the program makes tensors on another device by default
            found = _tried(self.module)
        if isinstance(found, str):
            raise ValueError(
                f"`expert_parallel` cannot divide `{name}` (`{type(self.module).__name__}`): {found}. Leave the option"
                " out, or use `lightning_zero.moe.MoE`."
            )
        self.left_out = found


def _argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the arguments of the forward of a module's class; none where Python does not know them."""
    try:
        return tuple(inspect.signature(type(module).forward).parameters)
    except (AttributeError, TypeError, ValueError):  # of a module of `torch.jit`, or of other compilers
        return ()


def _given(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the tokens, experts and weights of a call."""
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    return list(given.values())[1:]


@contextmanager
def _having(module: nn.Module, number: int) -> Iterator[None]:
    """Let a module read a number of experts as ``num_experts``, if it has that attribute."""
    was = module.__dict__.get("num_experts")
    if was is None:
        yield
        return
    module.num_experts = number  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_experts = was


def _tried(module: nn.Module) -> str | tuple[bool, bool]:
    """Return which choices of nothing a module leaves out, or why its experts cannot be divided."""
    found, in_training = (_tried_in_mode(module, is_training) for is_training in (False, True))
    if isinstance(found, str) or found == in_training:
        return found
    reason = in_training if isinstance(in_training, str) else "it leaves out other choices that are no expert"
    return f"{reason}, in training and not in evaluation"


@torch.no_grad()
def _tried_in_mode(module: nn.Module, is_training: bool) -> str | tuple[bool, bool]:
    """Return the same for training or for evaluation."""
    generator = torch.Generator().manual_seed(0)
    values = {
        key: torch.randn(2, *param.shape[1:], generator=generator) / math.sqrt(max(param.shape[-1], 1))
        for key, param in module.named_parameters()
    }
    experts = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [0, 1]])
    weights = torch.rand(_NUM_TRIED, 2, generator=generator)
    errors = []
    for size in sorted({size for value in values.values() for size in value.shape[1:]}):
        tokens = torch.randn(_NUM_TRIED, size, generator=generator)
        try:
            together = _run(module, values, (tokens, experts, weights), is_training)
            if together.shape != tokens.shape:
                continue
            alone = [_alone(module, values, tokens, expert=one, is_training=is_training) for one in range(2)]
        except Exception as error:  # of a size that is not that of a token, or of the module
            errors.append(str(error))
            continue
        if not _is_sum(together, alone, experts, weights):
            return "its result is not the sum of the results of single experts times their weights"
        left_out = [False, False]
        for place, number in enumerate((-1, 2)):
            some = experts.clone()
            some[0, 0] = some[1, 1] = number
            with suppress(Exception), _unwritten_is_nan():  # such choices are an error, or rows that nobody writes
                found = _run(module, values, (tokens, some, weights), is_training)
                left_out[place] = _is_sum(found, alone, some, weights)
        return left_out[0], left_out[1]
    return f"it could not be tried with random tokens ({errors[-1] if errors else 'no size fits'})"


@contextmanager
def _unwritten_is_nan() -> Iterator[None]:
    """Fill new memory with NaN, so that its content decides nothing."""
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warns)


def _is_sum(together: Tensor, alone: Sequence[Tensor], experts: Tensor, weights: Tensor) -> bool:
    """Say whether a result is the sum of those of single experts times their weights."""
    products = [result * (weights * (experts == one)).sum(1, keepdim=True) for one, result in enumerate(alone)]
    expected = torch.stack(products).sum(0)
    scale = float(expected.square().mean().sqrt()) or 1.0
    return float((together - expected).abs().max()) <= _TOLERANCE * scale


class _WithoutDropout(TorchFunctionMode):
    """Leaves dropout out, which would be another one each time."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        return function(*args, **kwargs)


def _run(module: nn.Module, values: dict[str, Tensor], args: tuple[Tensor, ...], is_training: bool) -> Tensor:
    """Call a module without its dropout."""
    number = len(next(iter(values.values())))
    state = {one: one.training for one in module.modules()}
    module.train(is_training)
    try:
        with _having(module, number), _WithoutDropout(), torch.random.fork_rng([]):
            result: Tensor = functional_call(module, values, args)
    finally:
        for one, was in state.items():
            one.training = was
    return result


def _alone(module: nn.Module, values: dict[str, Tensor], tokens: Tensor, *, expert: int, is_training: bool) -> Tensor:
    """Return the results of an expert that is the only one."""
    own = {key: value[expert : expert + 1] for key, value in values.items()}
    experts = torch.zeros(len(tokens), 1, dtype=torch.int64)
    return _run(module, own, (tokens, experts, torch.ones(len(tokens), 1)), is_training)
