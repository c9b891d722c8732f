"""Saving again to the same path: the old checkpoint loads until the new one is committed."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time

import pytest
import torch
from support.jobs.scripts import run_script
from support.state.checkpoints import (
    async_save,
    attempts,
    causes,
    committed,
    load_everything,
    raises,
    save,
    writer,
)
from support.state.planners import FailingPlanner, PlannerRefusal
from torch.distributed.checkpoint.api import CheckpointException

import dcp_datastates
from dcp_datastates import DataStatesError, track
from dcp_datastates.storage import lock


def _state(number):
    return {"w": torch.full((300_000,), float(number)), "object": {"n": number}}


def _number(path):
    found = load_everything(path)
    assert found["w"].eq(found["object"]["n"]).all(), "a blend of two checkpoints"
    return found["object"]["n"]


def _held_back(number, path):
    """A save in flight whose reads wait for ``step()`` of the optimizer returned with it."""
    parameter = torch.nn.Parameter(torch.full((300_000,), float(number)))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    track(optimizer)
    future = async_save({"w": parameter, "object": {"n": number}}, path, read_deadline=120)
    return future, optimizer


def test_overwrite_keeps_the_old_until_commit(tmp_path):
    save(_state(1), tmp_path)
    future, optimizer = _held_back(2, tmp_path)
    for _ in range(5):
        assert not future.done()
        assert _number(tmp_path) == 1
        time.sleep(0.05)
    optimizer.step()
    future.result(60)
    assert _number(tmp_path) == 2


def test_overwrite_never_touches_a_byte_of_the_old(tmp_path):
    save(_state(1), tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    future, optimizer = _held_back(2, tmp_path)
    time.sleep(0.2)
    assert {file: file.read_bytes() for file in before} == before
    optimizer.step()
    future.result(60)


def test_the_old_attempt_is_removed_after_the_commit(tmp_path):
    names = []
    for number in range(4):
        save(_state(number), tmp_path)
        (attempt,) = attempts(tmp_path)
        names.append(attempt.name)
        assert set(os.listdir(tmp_path)) == {".metadata", attempt.name, "README"}
    assert names == sorted(set(names)), "attempts must be ordered and never reused"


def test_a_failed_overwrite_leaves_the_old_and_the_next_cleans_up(tmp_path):
    save(_state(1), tmp_path)
    with raises(PlannerRefusal):
        save(_state(2), tmp_path, planner=FailingPlanner("resolve_data"))
    assert _number(tmp_path) == 1
    save(_state(3), tmp_path)
    assert _number(tmp_path) == 3
    assert len(attempts(tmp_path)) == 1


def test_what_an_interrupted_save_left_is_no_obstacle(tmp_path):
    save(_state(1), tmp_path)
    (attempt,) = attempts(tmp_path)
    (tmp_path / ".metadata").unlink()
    slot = attempt / "publishing"
    slot.mkdir()
    (slot / ".metadata").write_bytes(b"half")
    claim_cut_off = tmp_path / f".{'1' * 16}-00000001"
    (claim_cut_off / "publishing").mkdir(parents=True)
    save(_state(2), tmp_path)
    assert _number(tmp_path) == 2
    (attempt,) = attempts(tmp_path)
    assert set(os.listdir(tmp_path)) == {".metadata", attempt.name, "README"}
    assert os.listdir(attempt) == ["r00000-0.safetensors"]


def test_foreign_files_are_left_alone(tmp_path):
    foreign = {
        "notes.txt": b"mine",
        "model.safetensors": b"somebody's weights",
        "best/keep.bin": b"\0",
        "0000-1/x": b"looks a little like an attempt",
        ".hidden": b"",
        ".metadata.backup": b"old",
        "latest.tmp": b"t",
    }
    for name, data in foreign.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    for number in range(3):
        save(_state(number), tmp_path)
    for name, data in foreign.items():
        assert (tmp_path / name).read_bytes() == data
    assert _number(tmp_path) == 2


def test_attempts_of_a_clock_in_the_future_are_still_superseded(tmp_path):
    save(_state(1), tmp_path)
    (old,) = attempts(tmp_path)
    future_name = f"{'7' * 16}-{old.name.split('-')[1]}"
    (tmp_path / future_name).mkdir()
    save(_state(2), tmp_path)
    assert _number(tmp_path) == 2
    assert dcp_datastates.inspect(tmp_path).attempt > future_name


def test_overlapping_saves_to_one_path_end_with_the_newest(tmp_path):
    ours = writer(tmp_path, read_window="immediate")
    futures = [async_save(_state(number), tmp_path, by=ours) for number in range(8)]
    for future in futures:
        future.result(60)
    assert _number(tmp_path) == 7
    save(_state(8), tmp_path)
    assert _number(tmp_path) == 8
    assert len(attempts(tmp_path)) == 1


def test_overlapping_saves_by_separate_writers_end_with_the_newest(tmp_path):
    futures = [async_save(_state(number), tmp_path, read_window="immediate") for number in range(8)]
    for future in futures:
        future.result(60)
    assert _number(tmp_path) == 7


@pytest.mark.parametrize("rounds", [12])
def test_a_reader_during_overwrites_sees_one_checkpoint_or_an_error_never_a_blend(rounds, tmp_path):
    save(_state(0), tmp_path)
    ours = writer(tmp_path, read_window="immediate")
    seen, errors = [], []
    for number in range(1, rounds):
        future = async_save(_state(number), tmp_path, by=ours)
        while not future.done():
            try:
                seen.append(_number(tmp_path))
            except CheckpointException as replaced:  # while it was being read: said, not hidden
                errors += causes(replaced)
        future.result(60)
    assert seen
    assert all(isinstance(error, DataStatesError) for error in errors), errors
    assert seen == sorted(seen), "an older checkpoint came back after a newer one"
    assert committed(tmp_path)


# --- another job at the path ----------------------------------------------------------------------------


def _save_by_another_job(path):
    """What a process of its own saves there; the name of its attempt."""
    run_script(
        """
        state = {"w": torch.full((300_000,), 7.0), "object": {"n": 7}}
        dcp.save(state, storage_writer=writer(), no_dist=True)
        """,
        path,
    ).assert_clean()
    (attempt,) = attempts(path)
    return attempt.name


def _replaced(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "another process" in record.getMessage()
    ]


@pytest.mark.parametrize("finds", ["a save over it", "a save elsewhere", "a load"])
def test_a_job_whose_checkpoint_was_replaced_says_so_once(finds, tmp_path, caplog):
    path = tmp_path / "step-1"
    save(_state(1), path)
    (mine,) = attempts(path)
    theirs = _save_by_another_job(path)
    assert theirs != mine.name
    if finds == "a load":
        link = tmp_path / "link"
        link.symlink_to(path)
        assert _number(link) == 7
    elif finds == "a save elsewhere":
        save(_state(2), tmp_path / "step-2")
    else:
        save(_state(2), path)
        assert _number(path) == 2
    (said,) = _replaced(caplog)
    for word in (str(path), mine.name, theirs):
        assert word in said
    save(_state(3), path)
    save(_state(4), tmp_path / "step-4")
    assert _number(path) == 3
    assert len(_replaced(caplog)) == 1


def test_a_job_that_replaces_its_own_or_an_older_jobs_checkpoint_says_nothing(tmp_path, caplog):
    _save_by_another_job(tmp_path / "c")
    for number in (1, 2):
        save(_state(number), tmp_path / "c")
        assert _number(tmp_path / "c") == number
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    shutil.rmtree(tmp_path / "c")
    save(_state(3), tmp_path / "d")  # the one before is gone, which is no news
    (tmp_path / "copy").rename(tmp_path / "c")  # the same attempt in other files
    save(_state(4), tmp_path / "c")
    assert _replaced(caplog) == []


def test_whoever_may_read_a_directory_cannot_keep_saves_out(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lock, "_FREE_SECONDS", 0.1)
    path = tmp_path / "c"
    save({"step": 1}, path)
    other = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_SH)
        save({"step": 2}, path)
    finally:
        os.close(other)
    assert load_everything(path)["step"] == 2
    assert "publishing without it" in caplog.text
