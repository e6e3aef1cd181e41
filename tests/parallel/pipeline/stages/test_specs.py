"""Layers that are built where they are computed."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_zero.config import Pipeline
from lightning_zero.parallel.pipeline.stages.specs import LayerSpec, SpecifiedLayers, TiedLayerSpec
from lightning_zero.parallel.pipeline.stages.split import split_module

WIDTH, VOCAB = 4, 7


def as_head(layer: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, layer.weight)


def specified() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        TiedLayerSpec("embedding", nn.Embedding, VOCAB, WIDTH),
        *(LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(2)),
        TiedLayerSpec("embedding", nn.Embedding, VOCAB, WIDTH, forward_fn=as_head),
    )


def built(stage: int | None = None) -> nn.Sequential:
    module = specified()
    layers = SpecifiedLayers(module)
    assert layers
    if stage is None:
        layers.build(None)
        return module
    layers.outline()
    layers.build(split_module(module, Pipeline(stages=2, partition="uniform")), stage)
    return module


def test_a_stage_builds_its_own_layers_with_the_values_of_the_whole_model() -> None:
    whole = built()
    for stage in (0, 1):
        part = built(stage)
        assert part.state_dict().keys() == whole.state_dict().keys()
        for index in (1, 2):
            here = part[index].weight
            assert here.is_meta == (index != stage + 1)
            assert here.is_meta or torch.equal(here, whole[index].weight)


def test_tied_layers_share_their_parameter_on_every_stage() -> None:
    for module in (built(), built(0), built(1)):
        assert module[0].weight is module[3].weight
        assert not module[0].weight.is_meta
    ids = torch.arange(5)
    module = built()
    assert torch.equal(module(ids), module[2](module[1](module[0](ids))) @ module[0].weight.T)


def test_values_do_not_depend_on_what_is_built_besides() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    spec = LayerSpec(nn.Linear, 3, 3)
    one, other = spec.build(), spec.build()
    assert torch.equal(one.weight, other.weight)  # type: ignore[arg-type]
    assert not torch.equal(torch.rand(3), expected)  # a spec draws one number


def _drawn_with_numpy() -> nn.Module:
    layer = nn.Module()
    layer.register_buffer("drawn", torch.from_numpy(numpy.random.rand(4)))
    return layer


def test_values_that_are_drawn_with_numpy_are_those_of_the_layer() -> None:
    torch.manual_seed(0)
    specs = [LayerSpec(_drawn_with_numpy) for _ in range(2)]
    before = numpy.random.get_state()[1].tolist()  # type: ignore[union-attr, index]
    first, second, again = (spec.build().drawn for spec in (*specs, specs[0]))
    assert numpy.random.get_state()[1].tolist() == before  # type: ignore[union-attr, index]
    numpy.random.rand()
    assert torch.equal(first, again)
    assert torch.equal(first, specs[0].build().drawn)
    assert not torch.equal(first, second)


def test_specs_in_specs_are_built() -> None:
    module = nn.Sequential(LayerSpec(lambda: nn.Sequential(LayerSpec(nn.Linear, 2, 2), nn.ReLU())), nn.ReLU())
    SpecifiedLayers(module).build(None)
    assert [name for name, _ in module.named_parameters()] == ["0.0.weight", "0.0.bias"]
    assert not SpecifiedLayers(module)


def _reads() -> nn.Module:
    raise RuntimeError(f"{torch.linspace(0, 1, 3).tolist()}")


def test_wrong_specs_are_refused() -> None:
    with pytest.raises(RuntimeError, match="This `LayerSpec` is not built"):
        specified()[1](torch.ones(1, WIDTH))
    with pytest.raises(ValueError, match=re.escape("is to share `bias`, which is no parameter of it")):
        TiedLayerSpec("key", nn.Linear, 2, 2, bias=False, tied_weight_attr="bias").build()
    unlike = nn.Sequential(TiedLayerSpec("key", nn.Linear, 2, 2), TiedLayerSpec("key", nn.Linear, 3, 2))
    with pytest.raises(ValueError, match=re.escape("share `weight`, and differ: `0` (2, 2), `1` (2, 3)")):
        SpecifiedLayers(unlike).build(None)
    with pytest.raises(ValueError, match=re.escape("`0` (_reads) could not be built without memory")):
        SpecifiedLayers(nn.Sequential(LayerSpec(_reads))).outline()
