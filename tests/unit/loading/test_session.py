"""The record of a load: what it says, who is told, and the bar meanwhile."""

import dataclasses
import logging
import sys

import pytest
import torch
from support.commands import Terminal
from support.state.checkpoints import raises, save
from support.waiting import await_that

import dcp_datastates as ds
from dcp_datastates.loading import session

STATE = {"w": torch.arange(1_000_000.0), "step": 7}
NBYTES = 4_000_000


@pytest.fixture
def records():
    found = []
    stop = ds.on_load(found.append)
    yield found
    stop()


def _into():
    return {"w": torch.zeros(1_000_000), "step": 0}


def _restored(root):
    with ds.CheckpointManager(root, every=1) as manager:
        assert manager.restore_latest(_into()) == 7


LOADS = {
    "load() into a state": lambda root: ds.load(root / "step-7", _into()),
    "load() of a dict": lambda root: ds.load(root / "step-7"),
    "restore_latest()": _restored,
}


@pytest.mark.parametrize("load", LOADS)
def test_a_load_has_a_record_and_a_line_in_the_log(load, tmp_path, records, caplog):
    caplog.set_level(logging.INFO)
    save(STATE, tmp_path / "step-7")
    LOADS[load](tmp_path)
    await_that(lambda: records)
    (found,) = records
    assert (found.path, found.step) == (str(tmp_path / "step-7"), 7)
    assert (found.rank, found.world, found.api) == (0, 1, load.split()[0])
    assert found.attempt in {path.name for path in (tmp_path / "step-7").iterdir()}
    assert (found.outcome, found.error, found.wait_seconds) == ("loaded", None, 0)
    assert NBYTES <= found.read_bytes < 2 * NBYTES
    assert found.read_rate == pytest.approx(found.read_bytes / found.phases["read"])
    assert list(found.phases) == ["open", "fit", "read", "apply"]
    assert sum(found.phases.values()) == pytest.approx(found.seconds)
    (line,) = (each for each in caplog.records if hasattr(each, "load_record"))
    assert (line.levelno, line.load_record) == (logging.INFO, found)
    assert f"{found.path} in {found.seconds:.2f} s" in line.getMessage()
    assert "GB/s" in line.getMessage()


def test_a_load_that_fails_has_a_record_too(tmp_path, records, caplog):
    caplog.set_level(logging.INFO)
    save(STATE, tmp_path / "step-7")
    with raises(ds.errors.IncompatibleStateError, "other"):
        ds.load(tmp_path / "step-7", {"other": torch.zeros(3)})
    with raises(ds.errors.CheckpointNotFoundError, "step-8"):
        ds.load(tmp_path / "step-8", _into())
    await_that(lambda: len(records) == 2)
    unfit, missing = records
    assert unfit.outcome == missing.outcome == "failed"
    assert unfit.error is not None
    assert unfit.error.startswith("IncompatibleStateError: ")
    assert list(unfit.phases) == ["open", "fit"]
    assert missing.attempt is None
    assert not any(hasattr(each, "load_record") for each in caplog.records), "the caller has it"
    assert dataclasses.asdict(missing)["read_bytes"] == 0


@pytest.mark.parametrize(
    ("seconds", "quiet", "shows"), [(0, "", True), (60, "", False), (0, "1", False)]
)
def test_a_long_load_shows_a_bar_on_a_terminal(seconds, quiet, shows, tmp_path, monkeypatch):
    save(STATE, tmp_path / "step-7")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(session, "_BAR_SECONDS", seconds)
    monkeypatch.setenv(session._NO_BAR, quiet)
    ds.load(tmp_path / "step-7", _into())
    assert ("loading step-7" in terminal.getvalue()) == shows


def test_a_terminal_that_is_gone_fails_no_load(tmp_path, monkeypatch):
    save(STATE, tmp_path / "step-7")
    terminal = Terminal()
    terminal.close()  # to write to it is an error
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(session, "_BAR_SECONDS", 0)
    state = _into()
    ds.load(tmp_path / "step-7", state)
    assert torch.equal(state["w"], STATE["w"])
