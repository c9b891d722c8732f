"""How a directory of checkpoints stands: what is in flight, and how much fits."""

import json
import os

import pytest
import torch
from support.commands import run_cli
from support.crashes.mounts import fill, mounted
from support.simulated.object_stores import MemoryStore, installed
from support.state.checkpoints import CACHE
from support.state.roots import NEWER, uncommitted

import dcp_datastates
from dcp_datastates import CheckpointManager, Keep, inspect
from dcp_datastates_cli.describe import next_commit, screen

STATE = {"w": torch.ones(1000)}


def save(path):
    dcp_datastates.save(STATE, path, host_cache_size=CACHE)


def job(root, steps, **options):
    """A training loop with a manager, which has saved at ``steps``."""
    with CheckpointManager(
        root, every=1, save_last=False, host_cache_size=CACHE, **options
    ) as manager:
        for step in steps:
            manager.save(step, STATE, {"loss": abs(step - 4)})
            manager.wait()


def test_a_store_does_not_tell_how_much_fits(monkeypatch):
    installed(monkeypatch, MemoryStore())
    save("mem://bucket/run/step-1")
    found = inspect("mem://bucket/run")
    assert (found.latest, found.free_nbytes) == ("step-1", None)


def test_saves_in_flight_show_with_their_last_write(tmp_path):
    save(tmp_path / "step-1")
    uncommitted(tmp_path / "step-1")  # a save that replaces it
    folder = uncommitted(tmp_path / "step-2")
    os.utime(folder / "r00000-0.safetensors", (1e9, 1e9))
    found = inspect(tmp_path)
    open_saves = [(each.name, each.attempt) for each in found.checkpoints if each.in_flight]
    assert open_saves == [("step-1", NEWER), ("step-2", NEWER)]
    text = screen(found, 1e9 + 7200.0)
    assert "step-2, abandoned, it seems: last write 2 h ago" in text.replace("\n" + " " * 16, " ")


def test_an_ordinary_root_fits_on_one_screen(tmp_path):
    with mounted("tmpfs", tmp_path) as root:
        job(root, range(32), keep=Keep(3, every=2))
        fill(root, 10 * inspect(root / "step-31").nbytes)
        uncommitted(root / "step-32", size=1)
        shown = run_cli("inspect", root)
        assert shown.returncode == 0, shown.stderr
        lines = shown.stdout.splitlines()
        assert len(lines) <= 23
        assert max(map(len, lines)) <= 80
        said = " ".join(shown.stdout.split())
        for words in (
            "newest step-31, age ",
            "in flight step-32, in flight or abandoned: last write ",
            "saves like the newest",
            "step-30 30",
            "more",
        ):
            assert words in said, words
        document = json.loads(run_cli("inspect", "--json", root).stdout)
        assert document["free_saves"] in (8, 9)
        assert len(document["checkpoints"]) == 19
        every = run_cli("inspect", "--all", root).stdout
        assert all(f"  step-{step} " in every for step in range(0, 32, 2))


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
