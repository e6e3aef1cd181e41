"""How the package is installed, checked and released."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in _jobs(path).values() for step in job["steps"]]


def _jobs(path: Path) -> dict[str, Any]:
    """Return the jobs that have steps of their own."""
    return {name: job for name, job in yaml.safe_load(path.read_text())["jobs"].items() if "steps" in job}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_hash_with_their_version(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if "uses:" in line and "uses: ./" not in line]
    assert len(lines) == sum("uses" in step for step in _steps(path))
    assert [line for line in lines if not re.search(r"uses: [\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_that_exist_and_may_write_nothing(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in _jobs(path).values())
    commands = " ".join(step.get("run", "") for step in _steps(path))
    assert set(re.findall(r"\bmake ([a-z-]+)", commands)) <= targets
    for job in _jobs(path).values():
        assert set(job.get("strategy", {}).get("matrix", {}).get("target", [])) <= targets


def test_nothing_is_released_without_the_checks() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    assert jobs["checks"]["uses"] == "./.github/workflows/checks.yml"
    assert jobs["build"]["needs"] == "checks"
    assert jobs["publish"]["needs"] == "build"


def test_the_checks_of_a_push_are_those_of_the_local_ones() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())["jobs"]
    (local,) = re.findall(r"^for target in (.*); do$", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    assert jobs["checks"]["strategy"]["matrix"]["target"] == local.split()


def test_the_lowest_releases_that_are_taken_are_checked() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())["jobs"]
    lowest, *_ = jobs["versions"]["strategy"]["matrix"]["include"]
    required = dict(re.findall(r"([a-z]+)(?:\[\w+\])?>=([\d.]+)", " ".join(PROJECT["dependencies"])))
    pins = dict(re.findall(r"(\w+)==([\d.]+?)(?:\.\*)?(?= |$)", lowest["pins"]))
    assert PROJECT["requires-python"] == f">={lowest['python']}"
    assert pins == {name: version for name, version in required.items() if name in pins}
    assert set(required) - set(pins) <= {"pyyaml"}


def test_a_machine_without_a_gpu_needs_no_triton() -> None:
    assert not [requirement for requirement in PROJECT["dependencies"] if requirement.startswith("triton")]
    (kernels,) = PROJECT["optional-dependencies"]["kernels"]
    assert kernels.startswith("triton")
    assert "Linux" in kernels


def test_the_command_is_the_one_of_the_module() -> None:
    module, _, name = PROJECT["scripts"]["lightning-zero"].partition(":")
    assert (module, name) == ("lightning_zero.__main__", "main")


def test_issues_ask_for_the_report() -> None:
    (field,) = [
        item
        for item in yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())["body"]
        if item["id"] == "report"
    ]
    assert "python -m lightning_zero report" in field["attributes"]["label"]
    assert field["validations"]["required"]


def test_hooks_before_a_commit_use_the_installed_tools() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    assert all(hook["entry"].startswith(".venv/bin/python -m ") for hook in repo["hooks"])


def test_the_repository_has_no_downloads() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=False, capture_output=True, text=True).stdout
    files = [ROOT / name for name in listed.splitlines()]
    assert not [file for file in files if file.stat().st_size > 2**20 or file.suffix in (".whl", ".gz", ".zip")]
