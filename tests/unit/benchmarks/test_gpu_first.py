"""The first half hour on a GPU, as far as a machine without one gets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiers import sampled
from support.waiting import await_that

from gpu_first import __main__ as runner
from gpu_first.page import page
from gpu_first.step import spread
from gpu_first.steps import MOST_SECONDS, STEPS, Step

WELL = """
import json, sys
from pathlib import Path
Path(sys.argv[sys.argv.index("--into") + 1]).write_text(json.dumps({"at": "end"}))
"""
HANGING = """
import faulthandler, json, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(sys.argv[sys.argv.index("--into") + 1]).write_text(json.dumps({"child": child.pid}))
faulthandler.dump_traceback()
time.sleep(600)
"""


def is_running(process):
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().split(")")[-1].split()[0]
    except OSError:
        return False


def test_a_step_that_hangs_is_killed_and_the_next_runs(tmp_path, monkeypatch):
    (tmp_path / "well.py").write_text(WELL)
    (tmp_path / "hanging.py").write_text(HANGING)
    monkeypatch.setattr(runner, "_HERE", tmp_path)
    monkeypatch.setattr(runner, "_DYING_SECONDS", 2.0)
    hung = runner.run(Step("hanging", 1.0, "hanging"), tmp_path)
    assert not hung["passed"]
    assert any("hanging.py" in line for line in hung["last_lines"])
    await_that(lambda: not is_running(hung["found"]["child"]), 10)
    well = runner.run(Step("well", 20, "well"), tmp_path)
    assert well["passed"]
    assert well["found"] == {"at": "end"}
    assert not runner.run(Step("none", 20, "no_such_module"), tmp_path)["passed"]


def test_all_steps_have_ten_minutes():
    assert sum(step.limit for step in STEPS) <= MOST_SECONDS
    assert len({step.name for step in STEPS}) == len(STEPS)


def gpu_first(*arguments):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", "gpu_first", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_without_a_gpu_it_refuses_before_anything_is_written(tmp_path):
    ended = gpu_first("--results", str(tmp_path / "results"))
    assert ended.returncode == 2
    assert "there is no GPU" in ended.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("step", sampled([step.name for step in STEPS], keep=["facts", "launches"]))
def test_smoke(tmp_path, step):
    ended = gpu_first("--smoke", "--results", str(tmp_path), "--only", step)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    document = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert document["smoke"]
    assert document["steps"][0]["found"] or document["steps"][0]["module"] == "pytest"
    assert next(tmp_path.glob("*.txt")).read_text().startswith("SMOKE")


def test_the_page_has_figures_by_module_and_what_tests_say():
    ended = {"passed": True, "exit_code": 0, "seconds": 3.2, "limit": 30, "last_lines": []}
    saves = {**ended, "module": "saves"}
    tests = ["a_test PASSED", "FAILED test_b", "SKIPPED [1] x: one GPU only", "= 1 passed in 3s ="]
    steps = [
        {**saves, "name": "ours", "found": {"first": {"call ms": 1.25}, "load": 0.5}},
        {**saves, "name": "stock", "found": {"first": {"error": "no"}}, "passed": False},
        {**ended, "name": "tests", "module": "pytest", "found": {}, "last_lines": tests},
    ]
    text = page({"date": "today", "torch": "2.13.0", "smoke": False, "steps": steps})
    lines = [line.split() for line in text.splitlines()]
    assert ["stock", "FAILED", "(0)", "3", "s", "30", "s"] in lines
    assert ["call", "ms", "error"] in lines
    assert ["ours", "first", "1.2"] in lines
    assert ["stock", "first", "no"] in lines
    assert ["ours", "load:", "0.5"] in lines
    assert text.splitlines()[-3:] == tests[1:]


def test_spread():
    found = spread([n / 1e6 for n in range(1, 101)])
    assert {name: round(value) for name, value in found.items()} == {
        "count": 100,
        "p50 µs": 50,
        "p99 µs": 99,
        "max µs": 100,
    }
