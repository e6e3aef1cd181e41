from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_zero import ActivationCheckpointing, Offload, Sharding, ZeroStrategy
from lightning_zero.forecast.settings import MemoryForecast, Setting, SettingForecast


def made(setting: Setting, peak: int, is_own: bool = False) -> SettingForecast:
    kinds = {"parameters": peak // 2, "gradients": 0, "optimizer": 0}
    return SettingForecast(
        setting=setting,
        is_own=is_own,
        device={**kinds, "buffers": 0},
        host=kinds,
        peak_bytes=peak,
        at_peak={**kinds, "gathered": 0, "buffers": 0, "activations": peak - peak // 2},
        phase="backward",
        module="blocks.1",
        sent_bytes=10,
        sent_across_nodes=None,
    )


def setting(stage: Any, offload: bool = False, checkpointing: bool = False) -> Setting:
    return Setting(
        sharding=Sharding.of(stage),
        offload=Offload(optimizer="cpu") if offload else None,
        activation_checkpointing=ActivationCheckpointing() if checkpointing else None,
    )


def forecast() -> MemoryForecast:
    rows = [
        made(setting(0), 100),
        made(setting(3), 60, is_own=True),
        made(setting(1, checkpointing=True), 50),
        made(setting(1, offload=True), 40),
        made(setting(3, offload=True, checkpointing=True), 20),
    ]
    return MemoryForecast(world_size=8, precision="bf16-mixed", settings=rows, base={"units": ["Block"]})


@pytest.mark.parametrize(
    ("memory", "expected"),
    [(100, "stage 0"), (99, "stage 3"), (59, "stage 1, checkpointing"), (49, "stage 1, offload cpu"), (19, None)],
)
def test_the_fastest_that_fits_does_the_least_besides(memory: int, expected: str | None) -> None:
    found = forecast().fastest(memory)
    assert (found and str(found.setting)) == expected


@pytest.mark.parametrize(
    "own",
    [
        Setting(sharding=Sharding.of(1), offload=Offload(optimizer="cpu", fraction="auto")),
        Setting(sharding=Sharding.of(2), offload=Offload(optimizer="cpu", fraction=0.5)),
        Setting(sharding=Sharding(params="node", grads="node", optim="world")),
    ],
    ids=str,
)
def test_the_own_setting_comes_before_one_that_needs_less_memory_and_is_not_faster(own: Setting) -> None:
    """The lower peak decided, so that an offload of everything came before one of a half."""
    other = setting(1, offload=True) if own.offload else setting(3)
    rows = [made(other, 40), made(own, 60, is_own=True)]
    found = MemoryForecast(world_size=8, precision="bf16-mixed", settings=rows).fastest(60)
    assert found is rows[1]


def test_an_offload_of_parameters_comes_after_one_without() -> None:
    """The own setting was named, which moves more."""
    own = Setting(sharding=Sharding.of(3), offload=Offload(optimizer="cpu", params="cpu"))
    rows = [made(setting(3, offload=True), 60), made(own, 40, is_own=True)]
    found = MemoryForecast(world_size=8, precision="bf16-mixed", settings=rows)
    assert found.fastest(60) is rows[0]
    assert found.fastest(59) is rows[1]


def test_yaml_makes_the_strategy() -> None:
    rows = forecast()
    content = yaml.safe_load(rows.yaml(rows.settings[-1]))
    assert content["trainer"]["precision"] == "bf16-mixed"
    options = content["trainer"]["strategy"]["init_args"]
    assert options == {"units": ["Block"], "stage": 3, "offload": "cpu", "activation_checkpointing": True}
    assert ZeroStrategy(**options).offload == Offload(optimizer="cpu")


def test_options_with_fields_are_dicts_of_those_that_are_set() -> None:
    one = Setting(
        sharding=Sharding(params="node", grads="node"),
        offload=Offload(optimizer="cpu", params=None, fraction=0.5),
        activation_checkpointing=ActivationCheckpointing(every=2),
    )
    assert one.options["offload"] == {"fraction": 0.5}
    assert one.options["activation_checkpointing"] == {"every": 2}
    assert Sharding.of(one.options["stage"]) == one.sharding
    assert str(one) == "stage params=node grads=node, offload fraction=0.5, checkpointing every=2"


def test_disks_are_the_last_resort() -> None:
    disks = Setting(sharding=Sharding.of(0), offload=Offload(optimizer="nvme", path=Path("a")))
    assert disks.options["offload"] == {"optimizer": "nvme", "path": "a"}
    assert setting(3, offload=True, checkpointing=True).cost < disks.cost


def test_the_own_setting_is_found() -> None:
    assert forecast().own.peak_bytes == 60
    assert forecast().own.persistent_bytes == 30
    assert forecast().as_dict()["settings"][1]["is_own"]
