"""Every snippet of the documents runs, on one rank of a CPU (the README's: ``test_documents.py``)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import lightning_zero
from tests.contracts.test_documents import YOURS, run_program

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))

# The readers' own beside `YOURS`, where a page has more of it.
MORE: dict[str, str] = {
    "failures": """
import json
import os
os.environ.update(SLURM_NODEID="0", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NTASKS="1")
""",
    "forecast": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

module.layer = nn.Sequential(Block(), Block())
""",
    "migrating": "from lightning_zero import Offload, ZeroEngine, ZeroStrategy",
    "offload": "import os; os.mkdir('scratch'); Module.forward = lambda self, x: self.layer(x)",
    "options": "from lightning_zero import *",
    "tensor": """
import torch.distributed as dist
from lightning_zero import Cut, TensorPlan
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor_group = data_group = None
hidden, weight_rows, labels = torch.ones(4, 8, requires_grad=True), torch.ones(5, 8), torch.zeros(4, dtype=torch.long)
plan = TensorPlan(rules={"0": "column", "2": "row"})
""",
}
COMMON = "from lightning_zero import Communication, MixedPrecision, Offload, Sharding, ZeroStrategy\n"

RUNNER = """
import json, traceback
import torch.distributed as dist
for page, source in json.load(open("pages.json")).items():
    try:
        exec(compile(source, page, "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        print("FAILED", page)
    else:
        print("RAN", page)
    if dist.is_initialized():
        dist.destroy_process_group()
"""


def _blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def _on_one_rank(source: str) -> str:
    source = re.sub(r'\n *accelerator="gpu",', "", source)
    source = re.sub(r"num_nodes=\d+", "num_nodes=1", source)
    return re.sub(r"devices=[2-9]\d*", 'devices=1, accelerator="cpu"', source)


@pytest.mark.always
def test_python_of_every_page_runs(tmp_path: Path) -> None:
    pages = {
        path.stem: YOURS + COMMON + MORE.get(path.stem, "") + "\n" + _on_one_rank("\n".join(_blocks(path, "python")))
        for path in PAGES
        if _blocks(path, "python")
    }
    (tmp_path / "pages.json").write_text(json.dumps(pages))
    done = run_program(tmp_path, RUNNER)
    ran = re.findall(r"^RAN (\w+)$", done.stdout, flags=re.MULTILINE)
    assert ran == list(pages), done.stdout


def _made(value: Any) -> Any:
    """Return what YAML with ``class_path`` and ``init_args`` names; classes of the reader are left as they are."""
    if not isinstance(value, dict):
        return value
    if "class_path" not in value:
        return {key: _made(item) for key, item in value.items()}
    module, _, name = value["class_path"].rpartition(".")
    if module != "lightning_zero":
        return value
    arguments = {key: _made(item) for key, item in value.get("init_args", {}).items()}
    if name.startswith(("Warmup", "OneCycle", "LRRange")):
        arguments["optimizer"] = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    return getattr(lightning_zero, name)(**arguments)


@pytest.mark.parametrize("path", [path for path in PAGES if _blocks(path, "yaml")], ids=lambda path: path.stem)
def test_yaml_of_a_page_makes_its_objects(path: Path) -> None:
    for block in _blocks(path, "yaml"):
        _made(yaml.safe_load(block))


CALLS = r"`((?:ZeroStrategy|Offload|Sharding|Communication|TensorParallel|LossScale|ZeroMonitor)\([^`]*\))`"


def test_options_in_the_text_are_taken() -> None:
    names = {name: getattr(lightning_zero, name) for name in lightning_zero.__all__}
    calls = {call for path in [ROOT / "README.md", *PAGES] for call in re.findall(CALLS, path.read_text())}
    whole = [call for call in calls if "..." not in call.replace("path=...", "") and "=N" not in call]
    for call in whole:
        if ("path" in call) == ("nvme" in call):  # the text says one without the other
            eval(call.replace("path=...", "path='scratch'"), {**names, "power": 16})
    assert len(whole) > 15
