"""Who publishes late: a job that was stopped, a coordinator taken for dead, storage that answers late.

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

from dcp_datastates import delete, latest, retain
from dcp_datastates.commit import group as groups
from dcp_datastates.commit.place import EndedPart, Place, Round
from dcp_datastates.dcp.object_planning import document
from dcp_datastates.errors import (
    CheckpointSupersededError,
    CommitOutcomeUnknown,
    DataStatesError,
    StorageError,
)
from dcp_datastates.storage import attempt, attempts, claims, decisions, operations
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.object_path import stored

STEPS = [
    f"publish.{name}.{when}"
    for name in ("decide", "create", "write", "sync_file", "link", "sync_directory")
    for when in ("before", "after")
]
DATA = "r00000-0.safetensors"


@pytest.fixture
def at(monkeypatch):
    """Have a function called once, at a step."""

    def arrange(step, do):
        todo = [do]

        def hit(name):
            if name == step and todo:
                todo.pop()()

        monkeypatch.setattr(decisions, "hit", hit)
        monkeypatch.setattr(operations, "hit", hit)
        return todo

    return arrange


def _begun(path):
    """A save at ``path`` whose bytes are durable."""
    claim = claims.claim(path, claims.Neighbours(), True)
    (path / claim.attempt.name / DATA).write_text(claim.attempt.name)
    error = StorageError(errno.EIO, "")
    return Round(0, claim.attempt, path, EndedPart(error), path=path, claim=claim, timeout=5)


def _commit(round_):
    """As a job of one rank does. Raises what a user is told."""
    place = Place(round_.path)
    place.publish(round_, document(round_.claim, Metadata({}), [], {}))


def _publish(round_):
    """Why it failed; None for a commit."""
    try:
        _commit(round_)
    except DataStatesError as error:
        return error
    return None


def _tidy(round_, error):
    place = Place(round_.path)
    if error is None:
        place.tidy_after_commit(round_)
    elif not isinstance(error, CommitOutcomeUnknown):
        place.tidy_after_failure(round_, 0, 2)


def _end(round_):
    error = _publish(round_)
    _tidy(round_, error)
    return error


def _settle(path, attempt):
    return Place(path).settle(attempt)


def _there(path):
    found = attempts.newest_committed(stored(path))
    return None if found is None else found[0]


def _assert_whole(path, among):
    there = _there(path)
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
    kinds = (CheckpointSupersededError, CommitOutcomeUnknown)
    for error in ends.values():
        assert error is None or isinstance(error, kinds)


@pytest.mark.parametrize("step", [*STEPS, None])
def test_survivors_settle_while_the_coordinator_publishes(step, at, tmp_path):
    """Whatever they find is so for good: it may be a zombie, or stopped, or on the other side of a cut."""
    old = _begun(tmp_path)
    assert _end(old) is None
    new = _begun(tmp_path)
    (tmp_path / new.attempt.name / "r00001-0.safetensors").write_text("")
    found = []

    def settle():
        found.extend(_settle(tmp_path, new.attempt) for _ in range(2))

    at(step, settle)
    error = _end(new)
    settle()
    assert set(found) == {error is None}
    assert error is None or isinstance(error, CheckpointSupersededError)
    _assert_whole(tmp_path, [old if error else new])


def test_what_another_job_has_replaced_has_failed_or_is_not_known(tmp_path):
    """With its files, it is known: it was withdrawn. Without them, it may have been committed before."""
    mine, other = _begun(tmp_path), _begun(tmp_path)
    assert _publish(other) is None
    assert _settle(tmp_path, mine.attempt) is False
    _tidy(other, None)
    assert _settle(tmp_path, mine.attempt) is None


@pytest.mark.parametrize("step", ["delete.sync_directory.before", "delete.rmdir.after"])
def test_what_was_deleted_is_not_known_to_have_failed(step, at, tmp_path):
    mine = _begun(tmp_path)
    assert _end(mine) is None
    found = []
    todo = at(step, lambda: found.append(_settle(tmp_path, mine.attempt)))
    delete(tmp_path)
    assert not todo, f"{step} was not passed"
    assert found == [True if step == "delete.sync_directory.before" else None]


@pytest.mark.parametrize("number", ["EIO", "ETIMEDOUT", "EEXIST", "ESTALE"])
def test_a_link_that_is_carried_out_and_answered_with_an_error_commits(number, tmp_path):
    """A server was replaced, a mount gave up, or a reply was lost and the request repeated: what is there is read."""
    assert _end(_begun(tmp_path)) is None
    new = _begun(tmp_path)
    with armed(f"publish.link.after@1=error:{number}"):
        assert _end(new) is None
    _assert_whole(tmp_path, [new])


def test_a_claim_whose_directory_another_process_makes_takes_another_number(monkeypatch, tmp_path):
    first = _begun(tmp_path)
    numbers = [first.attempt, Attempt(first.attempt.incarnation, first.attempt.sequence + 1)]
    monkeypatch.setattr(claims, "next_attempt", lambda after: numbers.pop(0))
    assert claims.claim(tmp_path, claims.Neighbours(), True).attempt > first.attempt
    assert numbers == []


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
    monkeypatch.setattr(claims.Neighbours, "note", lambda self, attempt: None)
    _in_a_job(monkeypatch, 1_000, tmp_path, 100)
    assert retain(tmp_path, keep=1) == []
    assert "in doubt" in caplog.text
    monkeypatch.undo()
    _in_a_job(monkeypatch, 5, tmp_path, 300)
    assert retain(tmp_path, keep=1) == [tmp_path / "step-100", tmp_path / "step-200"]


def test_a_root_that_cannot_be_listed_does_not_keep_one_from_saving(monkeypatch, tmp_path):
    real = os.scandir

    def refuse(path):
        if path == str(tmp_path):
            raise PermissionError(errno.EACCES, "no", str(path))
        return real(path)

    monkeypatch.setattr(claims.os, "scandir", refuse)
    save({"step": 1}, tmp_path / "step-1")
    assert _there(tmp_path / "step-1") is not None


def test_what_is_known_of_neighbours_does_not_grow_with_the_job(monkeypatch, tmp_path):
    neighbours = claims.Neighbours()
    for step in range(30):
        path = tmp_path / f"step-{step}"
        path.mkdir()
        claims.claim(path, neighbours, True)
        neighbours.look(stored(tmp_path))
        shutil.rmtree(path)
    assert len(neighbours._known) <= 2


def test_what_was_deleted_but_for_a_file_is_not_known_to_have_failed(tmp_path):
    mine = _begun(tmp_path)
    (tmp_path / mine.attempt.name / ".nfs0001").write_text("somebody has it open")
    assert _end(mine) is None
    delete(tmp_path)
    assert _settle(tmp_path, mine.attempt) is None
