"""Loads of experts and values of their routers, summed over forwards on the device.

Note [Counted once]
    Hooks on routers and experts add to sums while ``is_counting``. They leave out forwards inside of a backward, which
    activation checkpointing repeats, and those on fakes, by which pipelines learn a step. All values are ratios of
    sums over all ranks, so it does not matter that the ranks of a tensor group see the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_zero.moe.layer import MoE
from lightning_zero.moe.routed import RoutedExperts
from lightning_zero.moe.routing import Router, Routing, count_choices

__all__ = ["ExpertLoads", "LayerLoad"]

_Hook = TypeVar("_Hook", bound=Callable[..., None])

_IN_COMPILED = "`ZeroMonitor` counts choices of experts there. Leave out the callback, or `fullgraph=True`"
_NUM_VALUES = 5  # behind the loads: choices that were kept, tokens, their entropy, forwards, their auxiliary losses


def _outside_of_graphs(hook: _Hook) -> _Hook:
    """Return a hook that ``torch.compile`` does not compile."""
    found: _Hook = torch.compiler.disable(hook, reason=_IN_COMPILED)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class LayerLoad:
    """The choices of one layer's router, over all ranks.

    Args:
        load: Choices of each expert by their mean, 1 for an even load.
        dropped: Share of the choices that experts have dropped; None for experts of unmodified models.
        router_entropy: Mean over tokens of the entropy of the scores, in nats; likewise.
        aux_loss: Mean over forwards; likewise.
    """

    load: Sequence[float]
    dropped: float | None = None
    router_entropy: float | None = None
    aux_loss: float | None = None

    @staticmethod
    def of(sums: Sequence[float]) -> LayerLoad | None:
        """Return the values of summed counts; None if nothing was chosen."""
        load, (kept, tokens, entropy, forwards, aux_loss) = sums[:-_NUM_VALUES], sums[-_NUM_VALUES:]
        choices = sum(load)
        if not choices:
            return None
        relative = [len(load) * one / choices for one in load]
        if not tokens:
            return LayerLoad(relative)
        return LayerLoad(relative, 1.0 - kept / choices, entropy / tokens, aux_loss / forwards)

    @property
    def max_over_mean(self) -> float:
        """Load of the most popular expert, by the mean."""
        return max(self.load)


class ExpertLoads:
    """Counts the choices of all mixtures below a module: of ``MoE``, and of experts of unmodified models.

    Call protocol:
        1. ``is_counting`` is set around the forwards that count.
        2. ``read`` after any number of them: values since the last ``read``.
        3. ``remove``.

    Args:
        module: Has the layers; those of other pipeline stages may be missing.
        gather: Returns the objects of ranks that have different layers. Called once, on all of them.

    Attributes:
        is_counting: Whether forwards count.
        sizes: Number of experts of each layer of all ranks, by the layer's name.
    """

    def __init__(self, module: nn.Module, gather: Callable[[Any], Sequence[Any]]) -> None:
        self.is_counting = False
        self._layers: dict[str, _Layer] = {}
        for name, child in module.named_modules():
            self._watch(name.replace("_orig_mod.", ""), child)
        mine = {name: layer.num_experts for name, layer in self._layers.items()}
        self.sizes: Mapping[str, int] = {name: size for found in gather(mine) for name, size in found.items()}

    def _watch(self, name: str, child: nn.Module) -> None:
        if isinstance(child, MoE):
            layer = _Layer(self, child.num_experts)
            layer.handles += [
                child.router.register_forward_hook(layer.count_routing),
                child.experts.register_forward_pre_hook(layer.count_kept),
            ]
            self._layers[name] = layer
        elif (routed := RoutedExperts.of(child)) is not None:
            layer = _Layer(self, routed.num_experts)
            layer.handles.append(child.register_forward_pre_hook(layer.count_choices, with_kwargs=True))
            self._layers[name] = layer

    def read(self, add: Callable[[Tensor], Tensor], device: torch.device) -> dict[str, LayerLoad]:
        """Return the values of each layer that has chosen experts since the last call. Waits for the device.

        Args:
            add: Returns the sum of a tensor over all ranks; a collective, called if there are layers.
            device: Of the tensor.
        """
        if not self.sizes:
            return {}
        sums = [self._take(name, size + _NUM_VALUES, device) for name, size in self.sizes.items()]
        rows = torch.split(add(torch.cat(sums)).cpu(), [len(one) for one in sums])
        found = {name: LayerLoad.of(row.tolist()) for name, row in zip(self.sizes, rows, strict=True)}
        return {name: one for name, one in found.items() if one is not None}

    def _take(self, name: str, size: int, device: torch.device) -> Tensor:
        layer = self._layers.get(name)
        if layer is None or layer.sums is None:
            return torch.zeros(size, dtype=torch.float64, device=device)
        sums, layer.sums = layer.sums, None
        return sums.to(device)

    def remove(self) -> None:
        """Count nothing any more."""
        for layer in self._layers.values():
            for handle in layer.handles:
                handle.remove()
        self._layers.clear()


class _Layer:
    """Sums of one layer on this rank.

    Args:
        loads: Knows whether forwards count.
        num_experts: E.
    """

    def __init__(self, loads: ExpertLoads, num_experts: int) -> None:
        self.num_experts = num_experts
        self.handles: list[Any] = []
        self.sums: Tensor | None = None  # (E + _NUM_VALUES,) fp64, since they were taken
        self._loads = loads

    @_outside_of_graphs
    @torch.no_grad()
    def count_routing(self, router: Router, args: Any, routing: Routing) -> None:
        """Add the choices and values of a router; its forward hook."""
        if not self._counts(routing.counts):
            return
        is_used = routing.experts[:, 0] < self.num_experts
        entropy = torch.special.entr(routing.shares).sum(1).masked_fill(~is_used, 0.0)
        values = [is_used.sum(), entropy.sum(), torch.ones_like(routing.aux_loss), routing.aux_loss]
        self._add(routing.counts, torch.stack([torch.zeros_like(routing.aux_loss), *values]))

    @_outside_of_graphs
    @torch.no_grad()
    def count_kept(self, experts: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Add the choices that experts compute; a hook before their forward."""
        offsets = args[1]
        if self._counts(offsets) and self.sums is not None:
            self.sums[self.num_experts] += offsets[-1]

    @_outside_of_graphs
    @torch.no_grad()
    def count_choices(self, experts: nn.Module, args: Any, kwargs: Any) -> None:
        """Add the choices that unmodified experts are called with; a hook before their forward."""
        choices = RoutedExperts.choices(experts, args, kwargs)
        if self._counts(choices):
            counts = count_choices(choices.reshape(-1, choices.shape[-1]), self.num_experts).sum(0)
            self._add(counts, torch.zeros(_NUM_VALUES, device=counts.device))

    def _counts(self, tensor: Tensor) -> bool:
        """Say whether a forward counts; see Note [Counted once]."""
        is_repeated = torch._C._current_graph_task_id() != -1
        return self._loads.is_counting and not is_repeated and not isinstance(tensor, FakeTensor)

    def _add(self, counts: Tensor, values: Tensor) -> None:
        new = torch.cat([counts.double(), values.double()])
        self.sums = new if self.sums is None else self.sums + new
