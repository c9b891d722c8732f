"""``trace``: a picture and a table, or a trace for Perfetto; and what there is none of."""

from __future__ import annotations

import json

import pytest
import torch
from support.commands import run_cli
from support.state.checkpoints import save
from support.state.files import flip_bit
from support.state.metadata import decision_of, rewritten

from dcp_datastates.stats import PHASES


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save({"w": torch.ones(1000)}, tmp_path / "step-9")
    return tmp_path / "step-9"


def test_it_draws_a_picture_and_says_which_phase_took_how_long(checkpoint, tmp_path):
    ended = run_cli("trace", checkpoint)
    assert (ended.returncode, ended.stderr) == (0, "")
    first, _header, *rows, last = ended.stdout.splitlines()
    assert first.startswith(f"{checkpoint}: 1 rank, ")
    assert [row.split("  ")[1] for row in rows] == [*list(PHASES)[:8], "stall of training"]
    assert last == "drawn to step-9-trace.png"
    assert (tmp_path / "step-9-trace.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_a_trace_for_perfetto_and_draws_only_where_it_is_told(checkpoint, tmp_path):
    ended = run_cli("trace", "--json", checkpoint)
    assert ended.returncode == 0
    events = json.loads(ended.stdout)["traceEvents"]
    assert {each["ph"] for each in events} == {"M", "X"}
    assert not list(tmp_path.glob("*.png"))
    ended = run_cli("trace", "--json", checkpoint, "--png", tmp_path / "t.png")
    assert json.loads(ended.stdout)["traceEvents"] == events
    assert (tmp_path / "t.png").exists()


def test_what_is_not_there_is_said_with_status_2(checkpoint, tmp_path):
    for arguments, words in (
        ([tmp_path / "no"], "no committed checkpoint"),
        ([checkpoint, "--png", tmp_path / "no" / "t.png"], "No such file"),
    ):
        ended = run_cli("trace", *arguments)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert words in ended.stderr
        assert "Traceback" not in ended.stderr
    rewritten(checkpoint, lambda parts: parts.document.pop("trace"))
    ended = run_cli("trace", checkpoint)
    assert ended.returncode == 2
    assert "has no trace" in ended.stderr


def test_damaged_metadata_have_status_1(checkpoint):
    flip_bit(decision_of(checkpoint), 5)
    assert run_cli("trace", checkpoint).returncode == 1
