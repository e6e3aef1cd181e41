"""``make gpu``: its rows exist and fit into 25 minutes; what fails is seen, and what is there is not run again."""

from __future__ import annotations

import contextlib
import csv
import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import device_step, gpu, ops, table
from benchmarks.gpu import Task
from tests.sampling import sample
from tests.simulated_device import SimulatedDevice

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _own_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    monkeypatch.setattr(table, "commit", lambda: "abcdef")


def _task(name: str, code: str = "", **options: int) -> Task:
    return Task(name=name, arguments=("-c", code), **{"estimate_s": 30, **options})


def _written() -> list[tuple[str, str]]:
    with (table.RESULTS / "gpu.csv").open(newline="") as file:
        return [(row["variant"], row["verdict"]) for row in csv.DictReader(file)]


# -- The rows ----------------------------------------------------------------------------------------------------------


def test_the_estimates_fit_into_the_budget() -> None:
    assert gpu.BUDGET_S == 25 * 60
    assert sum(task.estimate_s for task in gpu.tasks()) <= gpu.BUDGET_S
    assert len({task.name for task in gpu.tasks()}) == len(gpu.tasks())


@pytest.mark.slow  # collects all tests
def test_all_tests_of_a_gpu_are_rows() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--collect-only", "tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = set(re.findall(r"^(tests/[\w/]+\.py)::", found.stdout, flags=re.MULTILINE))
    assert files
    assert files == {task.arguments[-1] for task in gpu.tasks() if task.name.startswith("tests/")}


@pytest.mark.parametrize(
    "task", [task for task in gpu.tasks() if "benchmarks" in task.arguments[1]], ids=lambda t: t.name
)
def test_commands_of_benchmarks_parse(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(ops, "device", lambda: "cuda")
    groups = {name: lambda *args, name=name: measured.append(name) or [] for name in ops.GROUPS["cuda"]}
    monkeypatch.setitem(ops.GROUPS, "cuda", groups)
    monkeypatch.setattr(device_step, "measure", lambda name, **_: measured.append(name) or [])
    flag, module, *arguments = task.arguments
    assert flag == "-m"
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with contextlib.suppress(SystemExit):
        {"benchmarks.ops": ops, "benchmarks.device_step": device_step}[module].main()
    assert measured == [task.name.partition("/")[2]]


def test_without_a_gpu_it_says_what_it_would_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    gpu.main()
    said = capsys.readouterr().out
    for task in gpu.tasks():
        assert re.search(rf"^{re.escape(task.name)} +{task.estimate_s} s  python -m ", said, flags=re.MULTILINE)
    assert f"{len(gpu.tasks())} rows, about" in said
    assert "Skipped, all of them: they need a GPU" in said
    assert not list(table.RESULTS.iterdir())


def test_a_name_of_no_row_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--only", "stpe/"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "`--only stpe/` is in the name of no row. The rows are: " in capsys.readouterr().err


# -- Running them ------------------------------------------------------------------------------------------------------


def test_a_row_that_fails_keeps_no_other_from_running() -> None:
    chosen = [_task("first"), _task("wrong", "raise SystemExit(3)"), _task("last")]
    assert not gpu.run(chosen, num_gpus=1, again=False)
    assert _written() == [("first", "ok"), ("wrong", "FAIL: exit status 3"), ("last", "ok")]


def test_rows_are_written_as_they_end() -> None:
    """The second row reads what the first one has left."""
    reads = f"assert 'first' in open({str(table.RESULTS / 'gpu.csv')!r}).read()"
    assert gpu.run([_task("first"), _task("second", reads)], num_gpus=1, again=False)


def test_a_row_that_is_there_is_not_run_again_unless_asked(tmp_path: Path) -> None:
    counts = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    chosen = [_task("counts", counts), _task("wrong", f"{counts}; raise SystemExit(1)")]
    for _ in range(2):
        assert not gpu.run(chosen, num_gpus=1, again=False)  # one that has failed still has
    assert (tmp_path / "count").read_text() == "xx"
    gpu.run(chosen, num_gpus=1, again=True)
    assert (tmp_path / "count").read_text() == "xxxx"


@pytest.mark.parametrize(
    "other", [{"commit": "fedcba"}, {"commit": "abcdef+"}, {"torch": "2.11"}, {"device": "another"}], ids=str
)
def test_rows_of_another_commit_or_machine_are_not_there(
    other: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.run([_task("one")], num_gpus=1, again=False)
    if "commit" in other:
        monkeypatch.setattr(table, "commit", lambda: other["commit"])
    elif "torch" in other:
        monkeypatch.setattr(torch, "__version__", other["torch"])
    else:
        monkeypatch.setattr(table, "device_name", lambda: other["device"])
    gpu.run([_task("one")], num_gpus=1, again=False)
    assert _written() == [("one", "ok")] * 2


def test_a_row_that_takes_too_long_is_ended_with_what_it_has_started() -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    assert not gpu.run([_task("long", code, estimate_s=1), _task("last")], num_gpus=1, again=False)
    assert _written() == [("long", "FAIL: longer than 2 s"), ("last", "ok")]


def test_rows_that_do_not_fit_run_at_the_next_start() -> None:
    chosen = [_task("long", estimate_s=100), _task("short")]
    assert not gpu.run(chosen, num_gpus=1, again=False, budget_s=60.0)
    assert gpu.run(chosen, num_gpus=1, again=False)
    assert _written() == [("long", "skipped: no time left"), ("short", "ok"), ("long", "ok")]


def test_a_row_that_needs_more_gpus_says_so() -> None:
    assert gpu.run([_task("two", "raise SystemExit(1)", num_gpus=2)], num_gpus=1, again=False)
    assert _written() == [("two", "skipped: needs 2 GPUs, has 1")]


@pytest.mark.parametrize(
    ("bodies", "verdict"),
    [
        (["pass"], "ok"),
        (["pytest.skip('no Triton')", "pytest.skip('other')"], "skipped: no Triton"),
        (["pass", "pytest.skip('no Triton')"], "ok, 1 of 2 skipped: no Triton"),
        (["assert False", "pytest.skip('no Triton')"], "FAIL: exit status 1"),
    ],
)
def test_tests_that_are_skipped_are_not_ok(tmp_path: Path, bodies: list[str], verdict: str) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("import pytest\n" + "".join(f"def test_{n}():\n    {body}\n" for n, body in enumerate(bodies)))
    task = Task(name="it", arguments=("-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)), estimate_s=60)
    gpu.run([task], num_gpus=1, again=False)
    assert _written() == [("it", verdict)]


def test_results_that_were_written_do_not_change_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(table, "_ROOT", tmp_path)
    assert table.commit() == "unknown"
    results = tmp_path / "benchmarks" / "results" / "gpu.csv"
    results.parent.mkdir(parents=True)
    for path in (results, tmp_path / "code.py"):
        path.write_text("")
    name = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for arguments in (["init", "-q"], ["add", "."], [*name, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    clean = table.commit()
    results.write_text("a row")
    assert table.commit() == clean
    (tmp_path / "code.py").write_text("1")
    assert table.commit() == f"{clean}+"


# -- Steps on a device -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sample(["stage3", "stage3-cpu"], "stage3"))
def test_steps_of_a_placement_have_a_row_beside_the_plain_loop(name: str) -> None:
    (row,) = device_step.measure(name, model="tiny", tokens=64, turns=2, device=torch.device("cpu"))
    assert row.variant == f"{name}/plain"
    assert float(row.ratio) > 0.0


def test_steps_with_other_losses_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_step._Engine, "step", lambda self, batch: torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="The loss of step 0 is 1.0, and .* in the plain loop"):
        device_step.measure("stage3", model="tiny", tokens=64, turns=2, device=torch.device("cpu"))


@pytest.mark.parametrize("name", sample(["stage3", "stage3-cpu"], "stage3"))
def test_on_a_device_host_waits_are_errors_unless_offloaded_and_bytes_are_those_of_the_accounts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str] = []
    monkeypatch.setattr(device_step, "MEMORY_EXTRA", 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "simulated")
    with SimulatedDevice(("compute", "others")) as device:

        def synchronize(_: torch.device) -> None:
            gc.collect()
            device.sweep()
            device.synchronize()

        device.patch("synchronize", synchronize)
        times, memory = device_step.measure(name, model="tiny", tokens=64, turns=2, device=torch.device("cuda"))
    assert modes == ["error", "default"] * (0 if "cpu" in name else 3)
    assert (times.verdict, memory.verdict, memory.ratio) == ("" if modes == [] else "no host waits", "ok", "1.000")


def test_waits_for_events_are_errors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    before = torch.cuda.Event.synchronize
    for wait in (lambda: torch.cuda.Event.synchronize(None), lambda: torch.cuda.synchronize()):
        with pytest.raises(RuntimeError, match="The host waits for the GPU"), device_step._no_waits(CUDA):
            wait()
    assert torch.cuda.Event.synchronize is before


@pytest.mark.parametrize(("found", "verdict"), [(0.9, "FAIL"), (1.0, "ok"), (1.1, "FAIL")])
def test_bytes_are_those_of_the_accounts_no_more_and_no_less(found: float, verdict: str) -> None:
    assert device_step._memory_row("stage3", "tiny", 64, int(found * 2**32), 2**32).verdict == verdict
