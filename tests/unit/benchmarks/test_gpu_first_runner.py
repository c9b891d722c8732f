"""The runner of the first half hour on a GPU, and its steps as far as a machine without one gets."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tiers import sampled
from support.waiting import await_that

from gpu_first import runner
from gpu_first.device_tests import FIRST, TESTS, in_order, outcome_of
from gpu_first.facts import smi_fields
from gpu_first.step import NO_GPU, REFUSED, spread
from gpu_first.steps import MOST_SECONDS, STEPS, Step

BENCHMARKS = Path(runner.__file__).parents[1]

WELL = """
import json, sys
from pathlib import Path
Path(sys.argv[sys.argv.index("--into") + 1]).write_text(json.dumps({"at": "end"}))
print("done")
"""
HANGING = """
import faulthandler, json, signal, subprocess, sys, time
from pathlib import Path
faulthandler.register(signal.SIGUSR1)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(sys.argv[sys.argv.index("--into") + 1]).write_text(json.dumps({"child": child.pid}))
time.sleep(600)
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with steps of these tests."""
    package = tmp_path / "gpu_first"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "well.py").write_text(WELL)
    (package / "hanging.py").write_text(HANGING)
    monkeypatch.setattr(runner, "_HERE", tmp_path)
    monkeypatch.setattr(runner, "_STACKS_SECONDS", 0.3)
    monkeypatch.setenv("PYTHONPATH", "")
    return tmp_path


def is_running(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().split(")")[-1].split()[0]
    except OSError:
        return False


def test_a_step_that_hangs_is_killed_at_its_limit_and_the_next_runs(made: Path) -> None:
    hung = runner.run(Step("hanging", "hanging", 1.0), directory=made)
    assert hung.killed
    assert not hung.passed
    assert 1.0 <= hung.seconds < 10
    assert any("hanging.py" in line for line in hung.last_lines), "it says where it was"
    await_that(lambda: not is_running(hung.found["child"]), 10)
    well = runner.run(Step("well", "well", 20), directory=made)
    assert well.passed
    assert (well.found, well.last_lines) == ({"at": "end"}, ["done"])
    assert sorted(path.name for path in made.iterdir()) == ["gpu_first"], "nothing is left"


def test_a_step_that_cannot_be_killed_does_not_stop_the_others(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a call of a driver that hangs."""
    monkeypatch.setattr(runner, "_DYING_SECONDS", 0.3)
    with monkeypatch.context() as patched:
        patched.setattr(runner.os, "killpg", lambda *_: None)
        hung = runner.run(Step("hanging", "hanging", 1.0), directory=made)
    try:
        assert hung.killed
        assert hung.exit_code is None
    finally:
        os.killpg(os.getpgid(hung.found["child"]), signal.SIGKILL)


def test_a_step_that_fails_is_recorded(made: Path) -> None:
    record = runner.run(Step("none", "no_such_module", 20))
    assert record.exit_code == 1
    assert not record.passed
    assert "no_such_module" in record.last_lines[-1]


def test_all_steps_have_ten_minutes() -> None:
    assert sum(step.limit for step in STEPS) <= MOST_SECONDS
    assert len({step.name for step in STEPS}) == len(STEPS)


def gpu_first(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", "gpu_first", *arguments]
    return subprocess.run(
        command, cwd=BENCHMARKS, env=environment, capture_output=True, text=True, timeout=120
    )


def test_without_a_gpu_it_refuses_before_anything_is_written(tmp_path: Path) -> None:
    ended = gpu_first("--results", str(tmp_path / "results"))
    assert ended.returncode == REFUSED
    assert ended.stdout.startswith(NO_GPU)
    assert not (tmp_path / "results").exists()


def test_a_step_refuses_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(entry for entry in sys.path if entry))
    record = runner.run(Step("copies", "copies", 30))
    assert record.exit_code == REFUSED
    assert record.last_lines[-1].startswith(NO_GPU)


def test_a_smoke_never_writes_where_results_are(tmp_path: Path) -> None:
    ended = gpu_first("--smoke", "--results", str(tmp_path))
    assert ended.returncode == 2
    assert "not allowed with" in ended.stderr


@pytest.mark.parametrize(
    "step", sampled([step.name for step in STEPS], keep=["facts", "copies", "launches"])
)
def test_smoke(step: str) -> None:
    ended = gpu_first("--smoke", "--only", step)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "all steps passed" in ended.stdout
    written = Path(ended.stdout.split()[-1])
    document: dict[str, Any] = json.loads(written.read_text())
    assert document["smoke"]
    assert document["steps"][0]["found"]
    assert written.with_suffix(".txt").read_text().startswith("SMOKE")
    shutil.rmtree(written.parent)


def test_the_gpu_tests_that_come_first_are_there() -> None:
    names = in_order(TESTS.read_text())
    assert tuple(names[: len(FIRST)]) == FIRST
    assert len(names) > len(FIRST)


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("../test_gpu.py::test_a[x-1] PASSED      [  4%]", ("test_a[x-1]", "passed")),
        ("test_gpu.py::test_a SKIPPED (no GPU) [ 4%]", ("test_a", "skipped")),
        ("FAILED test_gpu.py::test_a - AssertionError", None),
        ("collected 24 items", None),
    ],
)
def test_outcomes_of_pytest(line: str, outcome: tuple[str, str] | None) -> None:
    assert outcome_of(line) == outcome


def test_what_nvidia_smi_says() -> None:
    said = "NVIDIA H200, 580.159.03, 143771 MiB, 00000000:18:00.0, 5, 5, 16, 16\nanother\n"
    found = smi_fields(said)
    assert found["driver_version"] == "580.159.03"
    assert found["pci.bus_id"].lower()[-12:] == "0000:18:00.0"
    assert found["pcie.link.width.max"] == "16"


def test_spread() -> None:
    assert spread([]) == {"count": 0}
    assert spread([n / 1e6 for n in range(1, 101)]) == {
        "count": 100,
        "p50": 50.0,
        "p99": 99.0,
        "max": 100.0,
    }
