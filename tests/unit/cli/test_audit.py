"""``audit``: starts the job's own command, says whether its resume is exact, and changes nothing."""

from __future__ import annotations

import json
import sys

import pytest
from support.commands import run_cli
from support.jobs.scripts import environment_of_python
from support.state.resumed import train

PROGRAM = """
import sys
from pathlib import Path
from support.state.resumed import train
train(Path(sys.argv[1]), 1000, seed=5, defect=sys.argv[2], keep=1, fresh="replace")
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", environment_of_python()["PYTHONPATH"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _content(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def _audit(root, defect, *options):
    command = [sys.executable, "-c", PROGRAM, root, defect]
    before = _content(root)
    ended = run_cli("audit", root, "--json", *options, "--", *command)
    assert _content(root) == before
    return ended.returncode, json.loads(ended.stdout)


def test_an_exact_resume_and_one_with_a_defect(tmp_path):
    train(tmp_path, 44)
    status, found = _audit(tmp_path, "", "--steps", "9")
    assert (status, found["result"], found["command_status"]) == (0, "equal", 0)
    (rank,) = found["ranks"]
    assert (rank["after"], rank["steps"], rank["last"]) == (15, 9, 24)
    status, found = _audit(tmp_path, "no generator")
    assert (status, found["result"]) == (1, "different")
    assert "add RngState()" in found["ranks"][0]["cause"]


def test_what_cannot_be_compared(tmp_path):
    train(tmp_path / "one", 10)  # one checkpoint
    status, found = _audit(tmp_path / "one", "")
    assert (status, found["result"], found["ranks"]) == (2, "not compared", [])
    train(tmp_path / "none", 44, journal=False)
    status, found = _audit(tmp_path / "none", "")
    assert (status, found["result"]) == (2, "not compared")
    assert "no steps after 15" in found["ranks"][0]["text"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["s3://bucket/run", "--", "true"], "there is no directory"),
        (["{root}/missing", "--", "true"], "there is no directory"),
        (["{root}", "--steps", "0", "--", "true"], "--steps 0 must be 1 or more"),
        (["{root}", "--", "no-such-command"], "cannot be started"),
        (["{root}", "--", "false"], "the command ended with status 1"),
    ],
)
def test_wrong_usage_is_explained(arguments, said, tmp_path):
    ended = run_cli("audit", *(each.format(root=tmp_path) for each in arguments))
    assert ended.returncode == 2
    assert said in ended.stdout + ended.stderr
