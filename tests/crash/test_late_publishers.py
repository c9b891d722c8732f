"""Who publishes late: a job that was stopped, a coordinator taken for dead, storage that answers late. Without locks.

Two jobs meet at one path in every interleaving of two publications whose steps are file operations: at one step of
one job's publication, the other job publishes whole and tidies. What was committed and is named must be there.
"""

from __future__ import annotations

import errno
import os
import shutil

import pytest
from support.crashes.failing import armed
from support.state.checkpoints import save
from torch.distributed.checkpoint.metadata import Metadata

from dcp_datastates import (
    CheckpointSupersededError,
    CommitOutcomeUnknown,
    DataStatesError,
    StorageError,
    delete,
    latest,
    retain,
)
from dcp_datastates.commit import groups, publish
from dcp_datastates.commit.round import FailedPart, Round
from dcp_datastates.saving.document import document
from dcp_datastates.storage import attempt, attempts, claims, local, lock, operations

STEPS = [
    f"publish.{name}.{when}"
    for name in ("lock", "create", "write", "sync_file", "rename", "sync_directory")
    for when in ("before", "after")
]
DATA = "r00000-0.safetensors"


@pytest.fixture(autouse=True)
def unlocked(monkeypatch):
    """No lock reaches the other job, and it is another process's."""
    monkeypatch.setattr(lock, "_try", lambda descriptor, how: None)
    monkeypatch.setattr(publish, "_remember", lambda directory, mine: None)


@pytest.fixture
def at(monkeypatch):
    """Have a function called once, at a step."""

    def arrange(step, do):
        todo = [do]

        def hit(name):
            if name == step and todo:
                todo.pop()()

        monkeypatch.setattr(publish, "hit", hit)
        monkeypatch.setattr(operations, "hit", hit)
        return todo

    return arrange


_older = {}  # by round: what it found before it was published


def _begun(path):
    """A save at ``path`` whose bytes are durable."""
    claim = claims.claim(path, claims.Neighbours())
    (path / claim.attempt.name / DATA).write_text(claim.attempt.name)
    error = StorageError(errno.EIO, "")
    return Round(0, claim.attempt, path, FailedPart(error), path=path, claim=claim, timeout=5)


def _publish(round_):
    """As a job of one rank does. Why it failed; None for a commit."""
    _older[round_] = publish.find_older(round_)
    try:
        publish.publish(round_, lambda meta, claim: document(meta, claim, Metadata({}), [], {}))
    except CommitOutcomeUnknown:
        raise
    except DataStatesError as error:
        return error
    return None


def _tidy(round_, error):
    if error:
        publish.tidy_after_failure(round_, 0, 1)
    else:
        publish.tidy_after_commit(round_, _older[round_], 0, 1)


def _end(round_):
    error = _publish(round_)
    _tidy(round_, error)
    return error


def _assert_whole(path, among):
    there = publish.published_attempt(path)
    assert there in [round_.attempt for round_ in among]
    assert (path / there.name / DATA).read_text() == there.name, "named, and removed"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("late", ["older", "newer"])
@pytest.mark.parametrize("tidies", ["at once", "last"])
@pytest.mark.parametrize("replaces", [True, False])
def test_two_jobs_at_one_path(step, late, tidies, replaces, at, tmp_path):
    if replaces:
        assert _end(_begun(tmp_path)) is None
    older, newer = _begun(tmp_path), _begun(tmp_path)
    first, second = (older, newer) if late == "older" else (newer, older)
    ends = {}

    def meet():
        ends[second] = _publish(second)
        if ends[second] is None:
            _assert_whole(tmp_path, [second])
        if tidies == "at once":
            _tidy(second, ends[second])

    todo = at(step, meet)
    ends[first] = _end(first)
    assert not todo, f"{step} was not passed"
    if tidies == "last":
        _tidy(second, ends[second])
    told = [round_ for round_, error in ends.items() if error is None]
    assert told, "one of them must succeed"
    _assert_whole(tmp_path, told)
    for error in ends.values():
        assert error is None or isinstance(error, CheckpointSupersededError)


@pytest.mark.parametrize("step", [*STEPS, None])
def test_survivors_settle_while_the_coordinator_publishes(step, at, tmp_path):
    """Whatever they find is so for good: it may be a zombie, or stopped, or on the other side of a cut."""
    old = _begun(tmp_path)
    assert _end(old) is None
    new = _begun(tmp_path)
    (tmp_path / new.attempt.name / "a survivor's").write_text("")
    found = []

    def settle():
        found.extend(publish.settle(tmp_path, new.attempt) for _ in range(2))

    at(step, settle)
    error = _end(new)
    settle()
    assert set(found) == {error is None}
    assert error is None or isinstance(error, CheckpointSupersededError)
    _assert_whole(tmp_path, [old if error else new])


def test_what_another_job_has_replaced_is_not_known(tmp_path):
    """It may have been committed before."""
    mine, other = _begun(tmp_path), _begun(tmp_path)
    assert _end(other) is None
    assert publish.settle(tmp_path, mine.attempt) is None


@pytest.mark.parametrize(
    "step", ["delete.mkdir.after", "delete.unlink.after", "delete.rmdir.after"]
)
def test_what_was_deleted_is_not_known_to_have_failed(step, at, tmp_path):
    mine = _begun(tmp_path)
    assert _end(mine) is None
    found = []
    todo = at(step, lambda: found.append(publish.settle(tmp_path, mine.attempt)))
    delete(tmp_path)
    assert not todo, f"{step} was not passed"
    assert found == [True if step == "delete.mkdir.after" else None]


@pytest.mark.parametrize("number", ["EIO", "ETIMEDOUT"])
def test_a_rename_that_fails_and_has_not_happened(number, tmp_path):
    old = _begun(tmp_path)
    assert _end(old) is None
    with armed(f"publish.rename.before=error:{number}"):
        error = _end(_begun(tmp_path))
    assert isinstance(error, StorageError)
    assert error.errno == getattr(errno, number)
    _assert_whole(tmp_path, [old])


@pytest.mark.parametrize("number", ["EIO", "ETIMEDOUT", "ENOENT"])
def test_a_rename_that_fails_and_has_happened(number, tmp_path):
    new = _begun(tmp_path)
    with armed(f"publish.rename.after=error:{number}"):
        assert _end(new) is None
    _assert_whole(tmp_path, [new])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rename_of_which_storage_does_not_tell_is_unknown(when, tmp_path):
    new = _begun(tmp_path)
    entries = f"publish.rename.{when}=error:EIO;withdraw.rmdir.before=error:EIO"
    with armed(entries), pytest.raises(CommitOutcomeUnknown, match="storage fails"):
        publish.publish(new, lambda meta, claim: document(meta, claim, Metadata({}), [], {}))
    assert (tmp_path / new.attempt.name / DATA).exists()


def test_a_claim_that_comes_late_is_newer(monkeypatch, tmp_path):
    """It chose its number before another job's claim, and makes its directory after it."""
    real, claimed = attempts.claim, []

    def late(directory, mine, *, deletes):
        monkeypatch.setattr(attempts, "claim", real)
        monkeypatch.setattr(attempt, "_incarnation", 2**62)
        claimed.append(claims.claim(directory, claims.Neighbours()))
        return real(directory, mine, deletes=deletes)

    monkeypatch.setattr(attempts, "claim", late)
    mine = claims.claim(tmp_path, claims.Neighbours())
    assert mine.attempt > claimed[0].attempt
    assert attempts.present(tmp_path) == [claimed[0].attempt, mine.attempt]


# --- the order of checkpoints at different paths ----------------------------------------------------------------------


def _in_a_job(monkeypatch, started, root, step):
    """A job whose coordinator's process, by its clock, was ``started`` then, saves ``step``."""
    groups._close_all()
    monkeypatch.setattr(attempt, "_incarnation", started)
    save({"step": step}, root / f"step-{step}")


def test_what_is_saved_later_is_newer_whatever_the_clocks_say(monkeypatch, tmp_path):
    for step, started in ((100, 1_000), (200, 10), (300, 1_000), (400, 1)):
        _in_a_job(monkeypatch, started, tmp_path, step)
        assert latest(tmp_path) == tmp_path / f"step-{step}"
    assert retain(tmp_path, keep=1) == [tmp_path / f"step-{step}" for step in (300, 200, 100)]


def test_retain_deletes_nothing_whose_place_in_the_order_is_in_doubt(monkeypatch, tmp_path, caplog):
    """One job did not see the other's checkpoints, and their clocks may differ."""
    _in_a_job(monkeypatch, 10, tmp_path, 200)
    monkeypatch.setattr(claims.Neighbours, "newest", lambda self, root: None)
    _in_a_job(monkeypatch, 1_000, tmp_path, 100)
    assert retain(tmp_path, keep=1) == []
    assert "in doubt" in caplog.text
    monkeypatch.undo()
    _in_a_job(monkeypatch, 5, tmp_path, 300)
    assert retain(tmp_path, keep=1) == [tmp_path / "step-100", tmp_path / "step-200"]


def test_a_root_that_cannot_be_listed_does_not_keep_one_from_saving(monkeypatch, tmp_path):
    real = os.scandir

    def refuse(path):
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "no", str(path))
        return real(path)

    monkeypatch.setattr(claims.os, "scandir", refuse)
    save({"step": 1}, tmp_path / "step-1")
    assert local.signature(tmp_path / "step-1") is not None


def test_what_is_known_of_neighbours_does_not_grow_with_the_job(monkeypatch, tmp_path):
    neighbours = claims.Neighbours()
    for step in range(30):
        path = tmp_path / f"step-{step}"
        path.mkdir()
        claims.claim(path, neighbours)
        (path / ".metadata").touch()
        neighbours.newest(tmp_path)
        shutil.rmtree(path)
    assert len(neighbours._known) <= 2


def test_what_fails_after_the_commit_changes_nothing(monkeypatch, tmp_path):
    def fail(*_):
        raise OSError(errno.EIO, "")

    monkeypatch.setattr(operations, "tell", fail)
    mine = _begun(tmp_path)
    assert _end(mine) is None
    _assert_whole(tmp_path, [mine])


def test_what_was_deleted_but_for_a_file_is_not_known_to_have_failed(tmp_path):
    mine = _begun(tmp_path)
    (tmp_path / mine.attempt.name / ".nfs0001").write_text("somebody has it open")
    assert _end(mine) is None
    delete(tmp_path)
    assert publish.settle(tmp_path, mine.attempt) is None
