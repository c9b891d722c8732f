"""How a directory of checkpoints stands: what is in flight, and what failed last."""

import json
import os
import time

import pytest
import torch
from support.commands import run_cli
from support.crashes.failing import armed
from support.crashes.mounts import fill, mounted
from support.simulated.object_stores import MemoryStore, installed
from support.state.checkpoints import CACHE
from support.state.roots import NEWER, uncommitted

import dcp_datastates
from dcp_datastates import CheckpointManager, Keep, inspect
from dcp_datastates.errors import DataStatesError
from dcp_datastates.process.futures import finish_callbacks
from dcp_datastates.storage.job_notes import Note, leave
from dcp_datastates_cli.describe import next_commit, screen

STATE = {"w": torch.ones(1000)}


def save(path, **options):
    dcp_datastates.save(STATE, path, host_cache_size=CACHE, **options)


def fails(path):
    with armed("publish.write.before=error:EIO"), pytest.raises(DataStatesError):
        save(path)
    assert finish_callbacks(60)


def job(root, steps, **options):
    """A training loop with a manager, which has saved at ``steps``."""
    with CheckpointManager(
        root, every=1, save_last=False, host_cache_size=CACHE, **options
    ) as manager:
        for step in steps:
            manager.save(step, STATE, {"loss": abs(step - 4)})
            manager.wait()


def test_a_failure_lies_beside_the_checkpoints_until_a_later_commit_marks_it(tmp_path):
    fails(tmp_path / "step-1")
    found = inspect(tmp_path)  # although no checkpoint is there
    assert (found.latest, found.failure.checkpoint) == (None, "step-1")
    assert "Input/output error" in found.failure.error
    assert not found.failure_is_past
    save(tmp_path / "step-2")
    assert inspect(tmp_path).failure_is_past
    fails(tmp_path / "step-3")
    assert not inspect(tmp_path).failure_is_past


def test_a_store_shows_the_same_and_a_call_that_raises_is_noted_too(monkeypatch):
    installed(monkeypatch, MemoryStore())
    save("mem://bucket/run/step-1")
    with pytest.raises(FileExistsError):
        save("mem://bucket/run/step-1", overwrite=False)
    assert finish_callbacks(60)
    found = inspect("mem://bucket/run")
    assert (found.latest, found.failure.checkpoint, found.free_nbytes) == ("step-1", "step-1", None)
    assert "overwrite=False" in found.failure.error


def test_saves_in_flight_show_with_their_last_write_and_not_those_that_have_failed(tmp_path):
    save(tmp_path / "step-1")
    uncommitted(tmp_path / "step-1")  # a save that replaces it
    folder = uncommitted(tmp_path / "step-2")
    os.utime(folder / "r00000-0.safetensors", (1e9, 1e9))
    found = inspect(tmp_path)
    open_saves = [(each.name, each.attempt) for each in found.checkpoints if each.in_flight]
    assert open_saves == [("step-1", NEWER), ("step-2", NEWER)]
    text = screen(found, 1e9 + 7200.0)
    assert "step-2, abandoned, it seems: last write 2 h ago" in text.replace("\n" + " " * 16, " ")
    leave(tmp_path, Note(error="E: why", attempt=NEWER))
    text = screen(inspect(tmp_path), 0.0)
    assert "in flight     nothing" in text
    assert "not committed" not in text


def test_an_ordinary_root_fits_on_one_screen(tmp_path):
    with mounted("tmpfs", tmp_path) as root:
        job(root, range(20), keep=Keep(3, every=2))
        fails(root / f"step-{'9' * 30}")
        fill(root, 10 * inspect(root / "step-19").nbytes)
        uncommitted(root / "step-20", size=1)
        shown = run_cli("inspect", root)
        assert shown.returncode == 0, shown.stderr
        lines = shown.stdout.splitlines()
        assert len(lines) <= 23
        assert max(map(len, lines)) <= 80
        said = " ".join(shown.stdout.split())
        for words in (
            "newest step-19, age ",
            "in flight step-20, in flight or abandoned: last write ",
            "last failure step-999",
            "StorageError: [Errno 5]",
            "saves like the newest",
            "step-18 18",
            "more",
        ):
            assert words in said, words
        document = json.loads(run_cli("inspect", "--json", root).stdout)
        assert document["free_saves"] in (8, 9)
        assert document["failure"]["error"].startswith("StorageError: [Errno 5]")
        assert len(document["checkpoints"]) == 13
        every = run_cli("inspect", "--all", root).stdout
        assert all(f"  step-{step} " in every for step in range(0, 20, 2))


def test_a_long_error_of_a_stranger_takes_no_more_than_its_lines(tmp_path):
    save(tmp_path / "step-1")
    leave(tmp_path, Note(error="\x1b[2J word\n" * 500, checkpoint="x" * 900))
    text = screen(inspect(tmp_path), time.time())
    assert "\x1b" not in text
    assert len(text.splitlines()) <= 23


def test_the_screen_has_the_age_and_when_the_next_commit_is_due(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}")
    found = inspect(tmp_path)
    committed = found.checkpoints
    assert [each.name for each in committed] == ["step-3", "step-2", "step-1"]
    times = [each.committed_at or 0.0 for each in committed]
    assert next_commit(committed[:2]) == pytest.approx(times[0] + times[0] - times[1])
    assert next_commit(committed[:1]) is None
    due = next_commit(committed)
    text = screen(found, due - 3600.0)
    assert "next commit   in 1 h, if" in text
    assert "step-3" in text
    assert "next commit   1 h late, if" in screen(found, due + 3600.0)
    assert "newest        step-3, age 1 h, committed 2" in screen(found, times[0] + 3600.0)
