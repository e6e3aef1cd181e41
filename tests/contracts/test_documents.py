"""The documents are true: what they name exists, what they show runs, what they list is complete."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

import lightning_zero
from lightning_zero import config

ROOT = Path(__file__).parents[2]
PACKAGES = ("lightning_zero", "lightning_zero_ops")
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))

# What the README calls the reader's own.
YOURS = """
import torch
from torch import nn
import lightning as L

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

module, loader = Module(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
batches = [(torch.ones(2, 4), torch.ones(2, 1))] * 2
x = torch.ones(2, 4)
"""


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def run_program(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, on the CPU, and return what it printed."""
    (folder / "program.py").write_text(source)
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )


def _blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def _section(path: Path, title: str) -> str:
    return re.split(r"^## ", path.read_text().split(f"\n## {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


# -- README ------------------------------------------------------------------------------------------------------------


@pytest.mark.always
def test_python_of_the_readme_runs_on_one_rank(tmp_path: Path) -> None:
    done = run_program(tmp_path, YOURS + "\n".join(_blocks(ROOT / "README.md", "python")))
    assert done.returncode == 0, done.stdout
    assert "ZeRO stage 3 on 1 rank" in done.stdout


def test_yaml_of_the_readme_makes_a_strategy() -> None:
    (text,) = _blocks(ROOT / "README.md", "yaml")
    trainer = yaml.safe_load(text)["trainer"]
    for item in (trainer["strategy"], *trainer["callbacks"]):
        module, _, name = item["class_path"].rpartition(".")
        assert module == "lightning_zero"
        getattr(lightning_zero, name)(**item.get("init_args", {}))


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "CONVENTIONS.md"], ids=_name)
def test_make_targets_in_documents_exist(path: Path) -> None:
    code = " ".join([*re.findall(r"`([^`\n]+)`", path.read_text()), *_blocks(path, "bash")])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", code)) <= targets


def test_tests_that_the_promises_name_exist() -> None:
    commands = re.findall(r"`pytest ([\w/.]+)(?: -k (\w+))?`", (ROOT / "docs" / "promises.md").read_text())
    assert len(commands) > 20
    for file, keyword in commands:
        names = re.findall(r"^def test_(\w+)", (ROOT / file).read_text(), flags=re.MULTILINE)
        assert any(keyword in name for name in names), (file, keyword)


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)", path.read_text()):
        file = path.parent / target if target else path
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
            assert anchor[1:] in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


# -- docs --------------------------------------------------------------------------------------------------------------


def test_every_file_is_in_the_table_of_the_architecture_once() -> None:
    rows = re.findall(r"^\| \d+ \| `([^`]+)` \|", _section(ROOT / "docs" / "architecture.md", "Files"), re.MULTILINE)
    rooms = {"lightning_zero/__init__.py", "lightning_zero_ops/__init__.py"}
    files = {_name(path) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert Counter(rows) == Counter({name: 1 for name in files if name in rooms or not name.endswith("__init__.py")})


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_files_that_documents_name_exist(path: Path) -> None:
    named = re.findall(
        r"`((?:lightning_zero|lightning_zero_ops|tests|docs|examples|benchmarks)/[\w/.]+)`", path.read_text()
    )
    assert [file for file in named if not (ROOT / file).exists()] == []


OPTIONS: dict[str, Any] = {
    name: getattr(lightning_zero, name)
    for name in (
        "ZeroStrategy",
        "Sharding",
        "Communication",
        "Offload",
        "ActivationCheckpointing",
        "LossScale",
        "ZeroMonitor",
        "FlopsProfile",
        "ExportSafetensors",
        "ZeroEngine",
        "MixedPrecision",
        "Pipeline",
        "TensorParallel",
    )
}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_every_option_is_listed_with_its_default(name: str) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", _section(ROOT / "docs" / "options.md", name), re.MULTILINE))
    parameters = inspect.signature(OPTIONS[name]).parameters.values()
    expected = {parameter.name: parameter.default for parameter in parameters}
    assert list(rows) == list(expected)
    assert {option: repr(default).replace("'", '"') for option, default in expected.items()} == rows
    if dataclasses.is_dataclass(OPTIONS[name]):
        assert {field.name for field in dataclasses.fields(OPTIONS[name])} == set(rows)


def test_tables_of_all_classes_with_options_are_checked() -> None:
    titles = set(re.findall(r"^## (\w+)$", (ROOT / "docs" / "options.md").read_text(), flags=re.MULTILINE))
    assert titles & set(lightning_zero.__all__) == set(OPTIONS)
    fields = {name for name, cls in vars(config).items() if dataclasses.is_dataclass(cls)}
    assert fields <= set(OPTIONS)


def test_what_the_limits_call_missing_is_no_value_of_an_option() -> None:
    missing = set(re.findall(r"`(\w+)`", _section(ROOT / "docs" / "limits.md", "Features that do not exist")))
    for owner in OPTIONS.values():
        hints = get_type_hints(owner if dataclasses.is_dataclass(owner) else owner.__init__)
        parts = [part for hint in hints.values() for part in (hint, *get_args(hint))]
        assert not missing & {word for part in parts for word in get_args(part) if isinstance(word, str)}


def test_public_names_are_in_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert [name for name in lightning_zero.__all__ if f"`{name}`" not in text] == []


# -- Decisions ---------------------------------------------------------------------------------------------------------


def test_every_decision_is_listed_with_its_title() -> None:
    rows = re.findall(
        r"^\* \[(\d{4})\]\(decisions/([\w.-]+)\) (.*)$", (ROOT / "docs" / "decisions.md").read_text(), re.M
    )
    assert [(name, f"# {number} {title}") for number, name, title in rows] == [
        (path.name, path.read_text().splitlines()[0]) for path in DECISIONS
    ]


def test_numbers_of_decisions_are_unique() -> None:
    assert Counter(path.name[:4] for path in DECISIONS).most_common(1)[0][1] == 1


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_says_why_in_one_page(path: Path) -> None:
    text = path.read_text()
    assert text.startswith(f"# {path.name[:4]} ")
    assert re.search(r"^Date: \d{4}-\d{2}-\d{2}$", text, flags=re.MULTILINE)
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == ["Context", "Choice", "Rejected", "Consequence"]
    assert len(text.splitlines()) <= 60


def test_decisions_that_code_and_documents_refer_to_exist() -> None:
    files = [*DOCUMENTS, *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))]
    named = {number for path in files for number in re.findall(r"\bADR (\d{4})", path.read_text())}
    assert named <= {path.name[:4] for path in DECISIONS}


# -- Words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_documents_speak_of_the_project_alone(path: Path) -> None:
    foreign = r"(?<![\w.])/(?:work|tmp|home|root)\b|\b(?:session|helper)s?\b"
    assert re.findall(foreign, path.read_text(), flags=re.IGNORECASE) == []


def test_the_version_is_said_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "lightning_zero.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", lightning_zero.__version__)


def test_the_readme_names_the_oldest_releases_that_are_taken() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = dict(re.findall(r"(\w+)>=([\d.]+)", " ".join(dependencies)))
    assert f"torch {oldest['torch']}, lightning {oldest['lightning']}, or newer" in (ROOT / "README.md").read_text()
