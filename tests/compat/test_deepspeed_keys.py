from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

from lightning_zero import ZeroStrategy
from lightning_zero.compat.deepspeed_config import plan_of
from lightning_zero.compat.deepspeed_keys import ALIASES, FEATURES, IGNORED, OBSERVERS, READ, SECTIONS, known_names


def test_a_key_is_in_one_table() -> None:
    counts = Counter([*SECTIONS, *ALIASES, *READ, *IGNORED, *OBSERVERS, *FEATURES])
    assert [path for path, count in counts.items() if count > 1] == []


def test_aliases_lead_to_keys() -> None:
    for path in ALIASES.values():
        assert path in {*SECTIONS, *READ, *IGNORED}, path


def test_keys_lie_in_sections() -> None:
    for path in {*ALIASES, *READ, *IGNORED, *OBSERVERS, *FEATURES}:
        section = path.rpartition(".")[0]
        assert section in {"", *SECTIONS}, path


@pytest.mark.parametrize("path", list(IGNORED))
def test_an_ignored_key_says_why(path: str) -> None:
    config: object = 1
    for key in reversed(path.split(".")):
        config = {key: config}
    assert isinstance(config, dict)
    rows = {row.key: row for row in plan_of(config).rows}
    assert (rows[path].status, rows[path].becomes) == ("ignored", IGNORED[path])
    assert not IGNORED[path].endswith(".")


def test_names_of_a_section_are_those_below_it() -> None:
    assert {"stage", "offload_optimizer", "overlap_comm", "cpu_offload_params"} <= set(known_names("zero_optimization"))
    assert not [name for name in known_names("") if "." in name]
    assert {"fp16", "zero_optimization", "train_batch_size", "tensorboard", "bfloat16"} <= set(known_names(""))


# -- The document ------------------------------------------------------------------------------------------------------

DOCUMENT = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text()


@pytest.mark.parametrize("path", [*ALIASES, *READ, *IGNORED, *OBSERVERS, *FEATURES])
def test_the_document_names_every_key(path: str) -> None:
    assert f"`{path}`" in DOCUMENT


@pytest.mark.parametrize(("path", "why"), [*IGNORED.items(), *OBSERVERS.items(), *FEATURES.items()])
def test_the_document_says_why_as_the_table_does(path: str, why: str) -> None:
    assert re.search(rf"^\| [^|]*`{re.escape(path)}`[^|]* \| {re.escape(why)} \|$", DOCUMENT, flags=re.MULTILINE)


def test_the_document_names_every_option() -> None:
    rows = re.findall(r"^\| `(\w+)(?:\.\w+)?` \|", DOCUMENT.split("## Options here")[1].split("\n## ")[0], flags=re.M)
    set_by_trainer = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
    others = {"start_method", "weights_only"} | set_by_trainer
    assert set(rows) == set(inspect.signature(ZeroStrategy).parameters) - others
