"""Who comes from another strategy with its options is told what they are called here."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightning_zero
from lightning_zero import LossScale, ZeroEngine, ZeroStrategy
from lightning_zero.foreign_options import FOREIGN_OPTIONS, FOREIGN_TO_ENGINE

OURS = set(inspect.signature(ZeroStrategy).parameters)
NO_OPTIONS = {"self", "kwargs", "module", "dim", "output_device", "device_ids"}
THEIRS = [DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, FullyShardedDataParallel]


@pytest.mark.parametrize("theirs", [*THEIRS], ids=lambda theirs: theirs.__name__)
def test_every_option_of_another_strategy_is_ours_or_has_a_sentence(theirs: Any) -> None:
    names = set(inspect.signature(theirs.__init__).parameters) - NO_OPTIONS
    assert names <= OURS | set(FOREIGN_OPTIONS)


def test_options_of_the_functions_behind_them_are_known_too() -> None:
    known = OURS | set(FOREIGN_OPTIONS)
    ddp = set(inspect.signature(DistributedDataParallel.__init__).parameters) - NO_OPTIONS
    assert {"find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb"} <= ddp & known
    assert {"reshard_after_forward", "mp_policy", "offload_policy", "mesh"} <= (
        set(inspect.signature(fully_shard).parameters) & known
    )


@pytest.mark.parametrize("name", list(FOREIGN_OPTIONS))
def test_the_strategy_says_what_to_use(name: str) -> None:
    assert name not in OURS
    with pytest.raises(TypeError, match=f"^`ZeroStrategy` has no option `{name}`. " + re.escape(FOREIGN_OPTIONS[name])):
        ZeroStrategy(**{name: 1})


@pytest.mark.parametrize("name", sorted(set(FOREIGN_TO_ENGINE) - set(inspect.signature(ZeroEngine).parameters)))
def test_the_engine_says_what_to_use(name: str) -> None:
    with pytest.raises(TypeError, match=f"^`ZeroEngine` has no option `{name}`. " + re.escape(FOREIGN_TO_ENGINE[name])):
        ZeroEngine(**{name: 1})


@pytest.mark.parametrize("sentence", [*FOREIGN_OPTIONS.values(), *FOREIGN_TO_ENGINE.values()])
def test_what_a_sentence_names_exists(sentence: str) -> None:
    assert sentence.endswith(".")
    assert not re.search(r"\.\.(?!\.)|  ", sentence.replace("...", ""))
    for cls, options in re.findall(r"(\w+)\(((?:\w+=[^()]*)?)\)", sentence):
        given = re.findall(r"(\w+)=", options)
        if cls in ("Trainer", "ZeroEngine") or not callable(getattr(lightning_zero, cls, None)):
            continue
        made = getattr(lightning_zero, cls)
        assert set(given) <= set(inspect.signature(made).parameters), sentence
    for field in re.findall(r"`LossScale\(...\)` with `(\w+)", sentence):
        assert field in {option.name for option in dataclasses.fields(LossScale)}
