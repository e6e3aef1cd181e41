"""The examples run, at toy size."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[2]
GPT = ROOT / "examples" / "gpt"
FINETUNE = ROOT / "examples" / "finetune_offload"
MOE = ROOT / "examples" / "moe"

TOY = {
    "--trainer.max_steps": "4",
    "--trainer.val_check_interval": "2",
    "--trainer.limit_val_batches": "2",
    "--trainer.log_every_n_steps": "2",
    "--trainer.enable_progress_bar": "false",
    "--model.size.width": "16",
    "--model.size.depth": "2",
    "--model.size.heads": "2",
    "--data.max_bytes": "60000",
    "--data.context": "16",
    "--data.batch_size": "2",
    "--sample_bytes": "8",
}

SMALL = [
    "--trainer.max_steps=8",
    "--trainer.limit_val_batches=2",
    "--trainer.enable_progress_bar=false",
    "--data.max_bytes=20000",
    "--data.context=16",
    "--model.lr=0.03",
]


def start(*command: str | Path, cwd: Path) -> str:
    """Run a program of this interpreter to its end and return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"loss (\d+\.\d+)", output)]


@pytest.mark.world(2)
@pytest.mark.slow
def test_minimal_example_learns_alone_and_on_two_ranks(tmp_path: Path) -> None:
    script = ROOT / "examples" / "minimal.py"
    alone = losses(start(script, cwd=tmp_path))
    two = losses(start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, cwd=tmp_path))
    assert alone[-1] < 0.5 * alone[0]
    assert two[-1] < 0.5 * two[0]


@pytest.mark.always
@pytest.mark.world(2)
def test_gpt_example_trains_saves_and_shows_what_it_learned(tmp_path: Path) -> None:
    toy = [f"{option}={value}" for option, value in TOY.items()]
    output = start(GPT / "train.py", "fit", "--config", GPT / "cpu.yaml", *toy, cwd=tmp_path)
    for line in ("validation loss", "bigram entropy", "unigram entropy", "precision:"):
        assert line in output
    run = tmp_path / "runs" / "gpt-cpu" / "version_0"
    assert list((run / "checkpoints").iterdir())
    assert b"val/perplexity" in b"".join(events.read_bytes() for events in run.glob("events.*"))


@pytest.mark.world(2)
@pytest.mark.slow
def test_gpt_example_trains_in_pipeline_stages(tmp_path: Path) -> None:
    toy = [f"{option}={value}" for option, value in {**TOY, "--data.batch_size": "4"}.items()]
    output = start(GPT / "train.py", "fit", "--config", GPT / "pipeline.yaml", *toy, cwd=tmp_path)
    assert "pipeline stages (blocks of `model.blocks`): 0: 0-0, 1: 1-1" in output
    assert "validation loss" in output


@pytest.mark.parametrize(("name", "billions"), [("cpu", 0.001), ("gpu_125m", 0.127), ("gpu_1b", 1.0), ("gpu_8b", 8.05)])
def test_gpt_yaml_has_the_size_it_says(name: str, billions: float) -> None:
    model_file = runpy.run_path(str(GPT / "model.py"))
    config = yaml.safe_load((GPT / f"{name}.yaml").read_text())
    with torch.device("meta"):
        model = model_file["GPT"](model_file["GPTConfig"](**config["model"]["size"]))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.06)


@pytest.mark.slow
@pytest.mark.world(2)
def test_mixture_example_trains_both_models_and_draws_them(tmp_path: Path) -> None:
    toy = [f"{option}={value}" for option, value in TOY.items() if option != "--sample_bytes"]
    for name, total, active in (("dense", "14,416", "14,416"), ("sparse", "26,960", "14,672")):
        output = start(MOE / "train.py", "fit", "--config", MOE / f"{name}.yaml", *toy, cwd=tmp_path)
        assert f"parameters       {total}, of which a token uses {active}" in output
        assert "nats per byte after 4 steps" in output
    start(MOE / "curves.py", "runs/moe-dense", "runs/moe-sparse", "curves.png", cwd=tmp_path)
    assert (tmp_path / "curves.png").stat().st_size > 1000
    logged = next(tmp_path.glob("runs/moe-sparse/version_*/metrics.csv")).read_text()
    assert "moe/model.blocks.1.feed_forward/router_entropy" in logged


def test_mixture_example_has_two_models_of_the_same_cost() -> None:
    dense, sparse = (yaml.safe_load((MOE / f"{name}.yaml").read_text()) for name in ("dense", "sparse"))
    size = sparse["model"]["size"]
    assert (size.pop("experts"), size.pop("k")) == (8, 2)
    assert dense["model"]["size"].pop("experts") == 0
    assert sparse["model"].pop("aux_loss_factor") == 0.01
    assert sparse["trainer"]["strategy"]["init_args"].pop("expert_parallel") == 2
    for config in (dense, sparse):
        del config["trainer"]["logger"]
    assert dense == sparse


def finetuned(name: str, *options: str, cwd: Path) -> tuple[float, float]:
    """Run a YAML of the fine-tuning example; return the losses before and after."""
    output = start(FINETUNE / "train.py", "fit", "--config", FINETUNE / f"{name}.yaml", *SMALL, *options, cwd=cwd)
    (found,) = re.findall(r"validation loss (\d+\.\d+) before, (\d+\.\d+) after", output)
    return float(found[0]), float(found[1])


def exported(cwd: Path) -> dict[str, torch.Tensor]:
    (file,) = cwd.glob("runs/*/version_0/checkpoints/*-safetensors/*.safetensors")
    return load_file(file)


def test_finetuning_example_trains_adapters_beside_weights_of_a_folder(tmp_path: Path) -> None:
    size = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 32}
    config = LlamaConfig(**size, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    before, after = finetuned("adapters", f"--model.path={tmp_path / 'llama'}", cwd=tmp_path)
    assert after < before
    adapters = exported(tmp_path)
    assert len(adapters) == 2 * 2 * 2  # layers, projections, factors
    assert all(".adapter." in name and value.any() for name, value in adapters.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "nvme"])
def test_finetuning_example_trains_all_of_a_random_model(name: str, tmp_path: Path) -> None:
    before, after = finetuned(name, "--model.width=16", "--model.depth=2", cwd=tmp_path)
    assert after < before
    assert any(name.endswith("q_proj.weight") for name in exported(tmp_path))
    assert not list(tmp_path.glob("runs/nvme/*"))
