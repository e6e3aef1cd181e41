"""Layers that are built where they are computed: models that are too large to build whole.

A spec stands in the place of a layer in a ``ModuleList`` or ``Sequential``. When the strategy knows which stage it lies
on it is replaced by the layer there, and elsewhere by one without memory, so that all names are those of the whole
model. A spec draws one random number when it is made, and its layer starts from this number: values do not depend on
which layers are built besides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_zero.parallel.pipeline.schedule.streams import RandomState, seed_generators
from lightning_zero.parallel.pipeline.stages.split import Split

__all__ = ["LayerSpec", "SpecifiedLayers", "TiedLayerSpec"]


class LayerSpec(nn.Module):
    """Says how a layer is built, and is replaced by it.

    Args:
        cls: The class of the layer, or a function that returns it.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(self, cls: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        if not callable(cls):
            raise TypeError(
                f"`{type(self).__name__}` takes a class, or a function that returns a layer, and its arguments;"
                f" got a `{type(cls).__name__}`. For example `LayerSpec(nn.Linear, 4, 2)`."
            )
        self._cls = cls
        self._args = args
        self._kwargs = kwargs
        self._seed = int(torch.randint(2**62, (), device="cpu").item())

    def build(self) -> nn.Module:
        """Return the layer; every call returns another one with the same values."""
        device = _device_in_use()
        before = RandomState(device)
        seed_generators(self._seed, device)
        try:
            return self._cls(*self._args, **self._kwargs)
        finally:
            before.restore()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: a spec computes nothing."""
        raise RuntimeError(
            f"This `{type(self).__name__}` is not built. `ZeroStrategy` builds it when training starts; elsewhere put"
            " `spec.build()` in its place."
        )

    def extra_repr(self) -> str:
        """Return the name of the class."""
        return getattr(self._cls, "__name__", repr(self._cls))


class TiedLayerSpec(LayerSpec):
    """A layer that shares parameters with the other ones of its key, on whichever stages they lie.

    Args:
        key: Name of the tie.
        cls: As of ``LayerSpec``.
        args: As of ``LayerSpec``.
        forward_fn: Called with the layer and its inputs, instead of its ``forward``: an embedding as the head.
        tied_weight_attr: Name of the parameter that is shared, or several.
        kwargs: As of ``LayerSpec``.
    """

    def __init__(
        self,
        key: str,
        cls: Callable[..., nn.Module],
        *args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **kwargs: Any,
    ) -> None:
        super().__init__(cls, *args, **kwargs)
        if forward_fn is not None and not callable(forward_fn):
            raise TypeError(
                f"`forward_fn={forward_fn!r}` is a `{type(forward_fn).__name__}`. Use a function of the layer and its"
                " inputs, or None."
            )
        self.key = key
        self.tied = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        self._forward_fn = forward_fn

    def build(self) -> nn.Module:
        """Return the layer, with parameters of its own."""
        layer = super().build()
        for name in self.tied:
            if name not in dict(layer.named_parameters()):
                raise ValueError(
                    f"`TiedLayerSpec({self.key!r}, {self.extra_repr()})` is to share `{name}`, which is no parameter of"
                    " it. Name one with `tied_weight_attr`."
                )
        if self._forward_fn is not None:
            vars(layer)["forward"] = MethodType(self._forward_fn, layer)
        return layer


@dataclass
class _Spot:
    """The place of a spec in the module."""

    parent: nn.Module
    key: str
    name: str
    spec: LayerSpec


class SpecifiedLayers:
    """The specs of a module, replaced by layers.

    Call protocol:
        1. ``outline``, where the module is cut: layers without memory, to be looked at.
        2. ``build``: the layers that are computed here.

    Args:
        module: The root.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._spots = _spots(module)

    def __bool__(self) -> bool:
        return bool(self._spots)

    def outline(self) -> None:
        """Replace all specs by layers on the meta device.

        Raises:
            ValueError: A layer cannot be built there.
        """
        made: dict[int, nn.Module] = {}
        for spot in self._spots:
            if id(spot.spec) not in made:
                made[id(spot.spec)] = _outlined(spot)
            spot.parent._modules[spot.key] = made[id(spot.spec)]
        self._tie()

    def build(self, split: Split | None, stage: int = 0) -> None:
        """Replace this stage's specified layers, or all of them, by layers with values."""
        made: dict[int, nn.Module] = {}
        for spot in self._spots:
            if split is not None and not _lies_on(spot.name, split, stage):
                continue
            if id(spot.spec) not in made:
                made[id(spot.spec)] = spot.spec.build()
                SpecifiedLayers(made[id(spot.spec)]).build(None)
            spot.parent._modules[spot.key] = made[id(spot.spec)]
        self._tie()

    def _tie(self) -> None:
        """Let the layers of a key share parameters: the first one's with values."""
        groups: dict[tuple[str, str], list[_Spot]] = defaultdict(list)
        for spot in self._spots:
            if isinstance(spot.spec, TiedLayerSpec):
                for name in spot.spec.tied:
                    groups[spot.spec.key, name].append(spot)
        for (key, name), spots in groups.items():
            params = [spot.parent.get_submodule(spot.key).get_parameter(name) for spot in spots]
            if len({param.shape for param in params}) > 1:
                found = ", ".join(
                    f"`{spot.name}` {tuple(param.shape)}" for spot, param in zip(spots, params, strict=True)
                )
                raise ValueError(f"The layers of `TiedLayerSpec({key!r}, ...)` share `{name}`, and differ: {found}.")
            shared = next((param for param in params if not param.is_meta), params[0])
            for spot in spots:
                path, _, last = name.rpartition(".")
                spot.parent.get_submodule(spot.key).get_submodule(path).register_parameter(last, shared)


def _device_in_use() -> torch.device:
    """Return the device on which layers may be built: the default GPU or the current one, if this process uses one."""
    cuda, default = torch.get_device_module("cuda"), torch.get_default_device()
    if default.type == "cuda" and default.index is not None:
        return default
    is_used = cuda.is_initialized() or default.type == "cuda"
    return torch.device("cuda", cuda.current_device()) if is_used else torch.device("cpu")


def _spots(module: nn.Module) -> list[_Spot]:
    spots = []
    for prefix, parent in module.named_modules():
        for key, child in parent._modules.items():
            if isinstance(child, LayerSpec):
                spots.append(_Spot(parent, key, f"{prefix}.{key}" if prefix else key, child))
    return spots


def _outlined(spot: _Spot) -> nn.Module:
    try:
        with torch.device("meta"):
            layer = spot.spec.build()
            SpecifiedLayers(layer).build(None)
    except Exception as error:
        raise ValueError(
            f"`{spot.name}` ({spot.spec.extra_repr()}) could not be built without memory (`torch.device('meta')`), as"
            f" stages build the layers of others: {error}. Build it without reading values of tensors."
        ) from error
    return layer.to("meta")


def _lies_on(name: str, split: Split, stage: int) -> bool:
    """Say whether a layer is computed on a stage; one that is in no chunk is on all of them."""
    place = next((place for place in split.places if f"{name}.".startswith(f"{place.name}.")), None)
    return place is None or place.chunk % split.stages == stage
