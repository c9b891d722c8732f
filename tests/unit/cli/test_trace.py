"""``trace``: a table, or a trace for Perfetto; and what there is none of."""

import json

import pytest
import torch
from support.commands import run_cli
from support.state.checkpoints import save
from support.state.files import flip_bit
from support.state.metadata import decision_of, rewritten

from dcp_datastates.results import PHASES


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save({"w": torch.ones(1000)}, tmp_path / "step-9")
    return tmp_path / "step-9"


def test_it_says_which_phase_took_how_long(checkpoint):
    ended = run_cli("trace", checkpoint)
    assert (ended.returncode, ended.stderr) == (0, "")
    first, _header, *rows = ended.stdout.splitlines()
    assert first.startswith(f"{checkpoint}: 1 rank, ")
    assert [row.split("  ")[1] for row in rows] == [*list(PHASES)[:8], "stall of training"]


def test_json_is_a_trace_for_perfetto(checkpoint):
    ended = run_cli("trace", "--json", checkpoint)
    assert ended.returncode == 0
    events = json.loads(ended.stdout)["traceEvents"]
    assert {each["ph"] for each in events} == {"M", "X"}


def test_what_is_not_there_is_said_with_status_2_and_damage_with_1(checkpoint, tmp_path):
    ended = run_cli("trace", tmp_path / "no")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "no committed checkpoint" in ended.stderr
    assert "Traceback" not in ended.stderr
    rewritten(checkpoint, lambda parts: parts.document.pop("trace"))
    ended = run_cli("trace", checkpoint)
    assert ended.returncode == 2
    assert "has no trace" in ended.stderr
    flip_bit(decision_of(checkpoint), 5)
    assert run_cli("trace", checkpoint).returncode == 1
