"""Experts of any class as one module with stacked parameters.

Note [Stacked parameters]
    A parameter of an expert is a slice of a parameter ``[E, ...]`` that has its name, so experts are one unit, one
    optimizer state and one tensor in a checkpoint each, on any number of ranks (ADR 0053). The user's module itself is
    a template without values: it is called with slices by ``torch.func.functional_call``.

Note [One pass or a loop]
    Where every parameter belongs to an ``nn.Linear`` and every token is computed by itself, the template runs once on
    all tokens, and its linear layers are grouped products. Whether tokens are computed by themselves is tried with the
    first expert, with random parameters if it has no values, on a few random tokens: inputs of linear layers and the
    result must be those of each token alone. All other experts run one after the other on their rows, and so do those
    of which a hook sees the linear layers.

Note [Divided experts]
    With expert parallelism a rank has some of the experts: parameters of ``E / ranks`` rows, under the same names. The
    rows of all experts come in and go out all the same, because ``forward`` sends them to the ranks of their experts.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_zero.moe.alike import are_alike
from lightning_zero.moe.exchange import ExpertRanks, send_rows
from lightning_zero_ops import grouped_linear

__all__ = ["Experts", "StackedLinear", "StackedParameters"]

_NUM_TRIED = 3  # tokens
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes of every module
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # of rounding; 16 bits: 0.05


class StackedParameters(nn.Module):
    """Stacked parameters and buffers of one module of the experts; holds them under its name."""


class StackedLinear(StackedParameters):
    """Those of an ``nn.Linear``: its matrices go only into matrix products."""


class Experts(nn.Module):
    """``E`` modules of one structure, whose parameters are stacked under the names of the first one's.

    Args:
        modules: The experts, with their initial values.
        hidden_size: H, size of a token and of a result.

    Attributes:
        num_experts: E, on all ranks together.
        ranks: Over which they are divided; None: every rank has all of them.

    Raises:
        ValueError: The modules differ in more than values, or a result has another size than a token.
    """

    def __init__(self, modules: Sequence[nn.Module], hidden_size: int) -> None:
        super().__init__()
        self.num_experts = len(modules)
        self.ranks: ExpertRanks | None = None
        self._number = 0  # of the layer, among those that are divided
        self._hidden_size = hidden_size
        # Name in the template, and name here: another one for parameters that the template shares.
        self._names = _stack(self, modules)
        is_grouped = _has_linear_parameters_only(modules[0]) and _computes_rows_alone(modules[0], hidden_size)
        template = copy.deepcopy(modules[0]).to("meta")
        _check_size(template, hidden_size)
        # In a tuple, so that they are no submodules, whose parameters have no values.
        self._hidden = (_grouped(template) if is_grouped else template,)
        self._is_grouped = is_grouped

    def extra_repr(self) -> str:
        """Show number and class."""
        ranks = "" if self.ranks is None else f" over {self.ranks.size} ranks"
        return f"{self.num_experts} x {type(self._hidden[0]).__name__}{ranks}, is_grouped={self._is_grouped}"

    def divide(self, ranks: ExpertRanks, number: int) -> None:
        """Compute with those experts alone whose parameters this rank has kept.

        Args:
            ranks: Have as many experts each, in order.
            number: Of the layer in its module, the same on all ranks.
        """
        self.ranks = ranks
        self._number = number

    def forward(
        self,
        rows: Tensor,
        offsets: Tensor,
        *,
        room: int | None = None,
        meanwhile: Callable[[Tensor], Sequence[Tensor]] | None = None,
        beside: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute each row by its expert.

        Args:
            rows: (M, H), sorted by expert.
            offsets: (E,) int32: where the rows of each expert end.
            room: With divided experts: rows that a rank sends to each expert; see ``send_rows``.
            meanwhile: Runs on ``beside`` while rows are on their way to other ranks.
            beside: An input as ``rows`` is: a checkpoint of this module detaches it from what came before.

        Returns:
            (M, H); rows from ``offsets[-1]`` on mean nothing. With ``meanwhile`` a tuple of this and its results.
        """
        sent = None
        if self.ranks is not None:
            sent = send_rows(rows, offsets, ranks=self.ranks, layer=self._number, room=room)
        found = None
        if meanwhile is not None:
            assert beside is not None
            found = meanwhile(beside)
        results = self._compute(rows, offsets) if sent is None else sent.compute(self._compute)
        return results if found is None else (results, *found)

    def _compute(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Compute each row by its expert, of those that this rank has."""
        template = self._hidden[0]
        if template.training != self.training:
            template.train(self.training)
        values = {name: self.get_parameter_or_buffer(mine) for name, mine in self._names.items()}
        run = self._run_at_once if self._is_grouped else self._run_in_turn
        return run(template, values, rows, offsets)

    def get_parameter_or_buffer(self, name: str) -> Tensor:
        """Return a stacked tensor by its name."""
        path, _, key = name.rpartition(".")
        found: Tensor = getattr(self.get_submodule(path), key)
        return found

    def _run_at_once(self, template: nn.Module, values: dict[str, Tensor], rows: Tensor, offsets: Tensor) -> Tensor:
        layers = [one for one in template.modules() if isinstance(one, _GroupedLinear)]
        for one in layers:
            one.offsets = offsets
        try:
            return self._checked(functional_call(template, values, (rows,), tie_weights=False), rows)
        finally:
            for one in layers:
                one.offsets = None

    def _run_in_turn(self, template: nn.Module, values: dict[str, Tensor], rows: Tensor, offsets: Tensor) -> Tensor:
        slices = {name: stacked.unbind() for name, stacked in values.items()}
        results, start = [], 0
        for expert, stop in enumerate(offsets.tolist()):
            # One expert runs on no rows where none has any, so that all parameters have gradients.
            if stop > start or (expert == 0 and int(offsets[-1]) == 0):
                mine = {name: parts[expert] for name, parts in slices.items()}
                part = functional_call(template, mine, (rows[start:stop],), tie_weights=False)
                results.append(self._checked(part, rows[start:stop]))
            start = stop
        results.append(results[0].new_zeros(len(rows) - start, self._hidden_size))
        return torch.cat(results)

    def _checked(self, result: Any, rows: Tensor) -> Tensor:
        """Return the tensor of a result, which may be a tuple as in DeepSpeed, where a bias follows."""
        tensor: Tensor = result[0] if isinstance(result, tuple) else result
        if tensor.shape != rows.shape:
            raise ValueError(_wrong_size(self._hidden[0], tuple(rows.shape), tensor))
        return tensor


# -- Stacking ----------------------------------------------------------------------------------------------------------


def _stack(owner: nn.Module, modules: Sequence[nn.Module]) -> dict[str, str]:
    """Register the stacked tensors of modules below ``owner``; return the name of each by that in the template."""
    tensors = [_tensors(one) for one in modules]
    names: dict[str, str] = {}
    known: dict[int, str] = {}
    for name, first in tensors[0].items():
        if id(first) in known:
            names[name] = known[id(first)]
            continue
        parts = [_matching(index, one, name, first) for index, one in enumerate(tensors)]
        names[name] = known[id(first)] = name
        path, _, key = name.rpartition(".")
        holder = _holder(owner, path, modules[0])
        stacked = torch.stack([part.detach() for part in parts])
        if isinstance(first, nn.Parameter):
            holder.register_parameter(key, nn.Parameter(stacked, requires_grad=first.requires_grad))
        else:
            holder.register_buffer(key, stacked)
    _check_structure(modules)
    return names


def _check_structure(modules: Sequence[nn.Module]) -> None:
    """Refuse modules of which the first does not stand for all.

    Raises:
        ValueError: Classes, attributes, frozen parameters, ties or numbers of hooks differ, or modules share a
            parameter.
    """
    first, first_attributes = _structure(modules[0]), _attributes(modules[0])
    owners: dict[nn.Parameter, nn.Module] = {}
    for index, one in enumerate(modules):
        found, attributes = _structure(one), _attributes(one)
        for part in [*first, *found]:
            if first.get(part) != found.get(part):
                raise ValueError(
                    f"`expert` has modules that differ: {part} is {first.get(part)} in the first one, and"
                    f" {found.get(part)} in the one at {index}. Give all experts one structure; only values may differ."
                )
        for name in [*first_attributes, *attributes]:
            mine, other = first_attributes.get(name), attributes.get(name)
            if not are_alike(mine, other):
                raise ValueError(
                    f"`expert` has modules that differ: `{name}` is {mine!r:.80} in the first one, and"
                    f" {other!r:.80} in the one at {index}. All experts run as the first one, with tensors of"
                    " their own. Delete an attribute that `forward` does not need (the number or the name of an"
                    " expert), or make it a tensor: `self.register_buffer(name, torch.tensor(value))`."
                )
        for name, param in one.named_parameters():
            if owners.setdefault(param, one) is not one:
                raise ValueError(
                    f"`expert` has modules that share the parameter `{name}` with others: the one at {index} does. Give"
                    " every expert its own, for example by `copy.deepcopy`, or use `shared_expert`."
                )


def _structure(module: nn.Module) -> dict[str, Any]:
    """Return classes, numbers of hooks, frozen parameters and ties, by the name of a module or parameter."""
    found: dict[str, Any] = {}
    for name, one in module.named_modules():
        hooks = sum(len(vars(one)[key]) for key in _OF_MODULES if key.endswith("_hooks"))
        kind = f"{type(one).__module__}.{type(one).__qualname__}"
        mode = "training" if one.training else "evaluation"
        found[f"`{name or 'the module'}`"] = f"{kind}({one.extra_repr()}) in {mode} with {hooks} hooks"
    known: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        tied = known.setdefault(id(param), name)
        found[f"`{name}`"] = ("trained" if param.requires_grad else "frozen") + (f", `{tied}`" if tied != name else "")
    return found


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module and its submodules that are no tensors or modules of their own, by name."""
    return {
        f"{name}{'.' * bool(name)}{key}": value
        for name, one in module.named_modules()
        for key, value in vars(one).items()
        if key not in _OF_MODULES
    }


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _matching(index: int, tensors: dict[str, Tensor], name: str, first: Tensor) -> Tensor:
    found = tensors.get(name)
    if found is None or (found.shape, found.dtype) != (first.shape, first.dtype):
        other = "no such parameter" if found is None else f"{found.dtype} of {tuple(found.shape)}"
        raise ValueError(
            f"`expert` has modules that differ: `{name}` is {first.dtype} of {tuple(first.shape)} in the first one, and"
            f" {other} in the one at {index}. Give all experts one structure; only values may differ."
        )
    return found


def _holder(owner: nn.Module, path: str, template: nn.Module) -> nn.Module:
    """Return the module below ``owner`` that holds the tensors of a submodule; make those on the way."""
    holder = owner
    names = path.split(".") if path else []
    for depth, name in enumerate(names):
        if name not in holder._modules:
            is_linear = type(template.get_submodule(".".join(names[: depth + 1]))) is nn.Linear
            holder.add_module(name, StackedLinear() if is_linear else StackedParameters())
        holder = holder._modules[name]  # type: ignore[assignment]
    return holder


# -- One pass ----------------------------------------------------------------------------------------------------------


class _GroupedLinear(nn.Module):
    """A linear layer whose weight is that of the expert of each row. Runs between tensors of ``functional_call``.

    Args:
        layer: Of the template; shows what is stacked.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.weight = layer.weight
        self.bias = layer.bias
        self.offsets: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        assert self.offsets is not None, "called outside of `Experts`"
        weight, bias = self.weight, self.bias
        device = rows.device.type
        if not rows.is_meta and torch.is_autocast_enabled(device):  # the meta device has no autocast
            dtype = torch.get_autocast_dtype(device)
            lowered = None if bias is None else bias.to(dtype)
            return grouped_linear(rows.to(dtype), weight.to(dtype), lowered, self.offsets)
        return grouped_linear(rows, weight, bias, self.offsets)


def _grouped(template: nn.Module) -> nn.Module:
    """Put grouped layers in the place of the linear layers of a template."""
    if type(template) is nn.Linear:
        return _GroupedLinear(template)
    layers: dict[nn.Module, _GroupedLinear] = {}
    for parent in list(template.modules()):
        for name, child in parent._modules.items():
            if type(child) is nn.Linear:
                parent._modules[name] = layers.setdefault(child, _GroupedLinear(child))
    return template


def _has_linear_parameters_only(module: nn.Module) -> bool:
    """Whether all tensors are those of linear layers that nothing watches."""
    layers = [one for one in module.modules() if type(one) is nn.Linear]
    owned = sum(len(one._parameters) for one in layers)
    total = sum(len(one._parameters) + len(one._buffers) for one in module.modules())
    return owned == total and not any(_has_hooks(one) or "forward" in vars(one) for one in layers)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


@torch.no_grad()
def _computes_rows_alone(module: nn.Module, hidden_size: int) -> bool:
    """Try whether each token is computed by itself, also inside; False for one that cannot be tried."""
    first = next(module.parameters(), None)
    if first is None:
        return False
    device = torch.device("cpu") if first.is_meta else first.device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(_NUM_TRIED, hidden_size, generator=generator, device="cpu").to(device, first.dtype)
    values = _random_values(module, generator)
    state = [one.training for one in module.modules()]
    devices = [first.device] if first.is_cuda else []
    module.eval()
    try:
        with torch.random.fork_rng(devices), device:
            together = _watched(module, values, tokens)
            alone = [_watched(module, values, tokens[index : index + 1]) for index in range(_NUM_TRIED)]
    except Exception:  # of the user's forward, which has its own ways with so few tokens
        return False
    finally:
        for one, was in zip(module.modules(), state, strict=True):
            one.training = was
    joined = [torch.cat(parts) for parts in zip(*alone, strict=False)]
    return len(joined) == len(together) and all(map(_agree, joined, together))


def _random_values(module: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Return values for the parameters without, one name for each layer that has them."""
    values: dict[nn.Parameter, Tensor] = {}
    names: dict[str, Tensor] = {}
    for path, layer in module.named_modules():
        for key, param in layer.named_parameters(recurse=False):
            if param.is_meta:
                random = torch.randn(param.shape, generator=generator, device="cpu").to(param.dtype)
                names[f"{path}.{key}".lstrip(".")] = values.setdefault(param, random / param.shape[-1] ** 0.5)
    return names


def _watched(module: nn.Module, values: dict[str, Tensor], tokens: Tensor) -> list[Tensor]:
    """Return the inputs of linear layers in the order of calls, and the result."""
    seen: list[Tensor] = []

    def watch(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].clone())

    with contextlib.ExitStack() as stack:
        for one in module.modules():
            if type(one) is nn.Linear:
                stack.callback(one.register_forward_pre_hook(watch).remove)
        result = functional_call(module, values, (tokens,), tie_weights=False)
    return [*seen, result[0] if isinstance(result, tuple) else result]


def _agree(one: Tensor, other: Tensor) -> bool:
    tolerance = _TOLERANCE.get(one.dtype, 0.05)
    is_matrix = one.dim() == 2 and len(one) == _NUM_TRIED
    return is_matrix and one.shape == other.shape and torch.allclose(one, other, rtol=tolerance, atol=tolerance)


def _check_size(template: nn.Module, hidden_size: int) -> None:
    """Run the template without values.

    Raises:
        ValueError: The result has another shape than the tokens.
    """
    dtype = next((one.dtype for one in template.parameters() if one.is_floating_point()), torch.get_default_dtype())
    tokens = torch.empty(_NUM_TRIED, hidden_size, dtype=dtype, device="meta")
    with torch.no_grad():
        try:
            result = template(tokens)
        except Exception as error:
            if _is_of_sizes(error):
                raise ValueError(
                    f"`expert` (`{type(template).__name__}`) does not take tokens of `hidden_size={hidden_size}`:"
                    f" {error}"
                ) from error
            return  # it needs values; its results are looked at in the forward
    tensor = result[0] if isinstance(result, tuple) else result
    if tensor.shape != tokens.shape:
        raise ValueError(_wrong_size(template, tuple(tokens.shape), tensor))


def _is_of_sizes(error: Exception) -> bool:
    """Whether an operation refused its sizes, and not tensors without values."""
    is_runtime = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
    return is_runtime and "meta" not in str(error)


def _wrong_size(template: nn.Module, shape: tuple[int, ...], result: Any) -> str:
    found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
    return (
        f"`expert` (`{type(template).__name__}`) must return the shape of its input, {shape}, because its results are"
        f" added per token, got {found}. Let its last layer have `hidden_size={shape[-1]}` features."
    )
