from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_zero.__main__ import main
from lightning_zero.lightning import simulate_command
from tests.lightning.test_estimate_command import HERE as MODULES
from tests.lightning.test_estimate_command import _config


def test_the_calls_of_a_rank_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", _config(tmp_path), "--world=64", "--rank=11"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("rank 11 of 64, 8 per node, precision bf16-mixed\n")
    assert "reduce-scatter of gradients of unit" in shown
    assert main(["simulate", _config(tmp_path), "--calls=false"]) == 0
    assert "reduce-scatter of" not in capsys.readouterr().out


def test_json_and_pictures_and_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate_command, "step_rates", lambda: {"tflops": 7.0, "memory": 8.0})
    picture = tmp_path / "memory.png"
    rates = ["--measure=true", "--memory=9", "--latency_us=0"]
    assert main(["simulate", _config(tmp_path), "--world=2", "--json=true", f"--plot={picture}", *rates]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rates"]["tflops"], found["rates"]["memory"], found["rates"]["latency_us"]) == (7.0, 9.0, 0.0)
    assert picture.exists()


def test_the_memory_of_a_gpu_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    auto = "{class_path: lightning_zero.ZeroStrategy, init_args: {offload: {fraction: auto}}}"
    found = []
    for memory in ([], ["--device_memory=1KiB"]):
        assert main(["simulate", _config(tmp_path, auto), "--world=2", "--json=true", *memory]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [sum(one["host"].values()) > 0 for one in found] == [False, True]
    assert [len(one["notes"]) for one in found] == [1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "`simulate` needs a model: give `--config=run.yaml` or `--module=package.module:name`"),
        ([f"--module={MODULES}:Described", "--rank=1"], "`rank=1` must be one of the ranks 0 to 0"),
        ([f"--module={MODULES}:Described", "--link=0"], "`link=0.0` must be a number above 0"),
        ([f"--module={MODULES}:Described", "--device_memory=much"], "`--device_memory=much` is not a size"),
        ([f"--module={MODULES}:Program"], "A simulation needs a batch of `Program`"),
        ([f"--module={MODULES}:not_a_module"], "gives a `int`"),
    ],
)
def test_errors_end_with_status_1_and_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "arguments", "message"),
    [
        (", sync_batchnorm: true", [], "`sync_batchnorm: true` is not simulated yet"),
        (", gradient_clip_val: 1.0, gradient_clip_algorithm: value", [], ""),
        ("", ["--plot=missing/a.png"], "the folder `missing` does not exist"),
        ("", ["--plot=memory.txt"], "`--plot memory.txt` must end with a format of pictures: "),
    ],
)
def test_options_of_the_trainer(
    more: str, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", _config(tmp_path, f"zero_2{more}"), "--world=2", *arguments]) == (1 if message else 0)
    shown = capsys.readouterr()
    assert message in shown.err
    assert "all-reduce of a norm" not in shown.out
