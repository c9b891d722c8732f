"""The thread that deletes old checkpoints: whatever a deletion raises, and whether or not a thread can start."""

import errno
import logging
import threading

import pytest
from support.jobs.scripts import run_program

from dcp_datastates.checkpoints.deletions import Deletions
from dcp_datastates.errors import StorageError


class Untellable(RuntimeError):
    """Not even a line of the log can tell of it."""


@pytest.mark.parametrize(
    "error",
    [
        StorageError(errno.EIO, "broken", "path"),
        OSError(errno.EIO, "broken"),
        MemoryError("one bad moment"),
        RuntimeError("broken"),
        SystemExit(1),
        KeyboardInterrupt(),
        Untellable(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_deletion_that_fails_is_logged_if_it_can_be_and_the_next_one_runs(
    error, monkeypatch, caplog
):
    deletions, done = Deletions(), []

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        if isinstance(error, Untellable):
            patch.setattr("dcp_datastates.checkpoints.deletions.logger.exception", fail)
        deletions.request(fail)
        deletions.wait()
    deletions.request(lambda: done.append(1))
    deletions.wait()
    assert done == [1]
    if isinstance(error, Untellable):
        return
    (line,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert "not deleted" in line.getMessage()
    assert str(error) in line.getMessage() or line.exc_info[1] is error


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_what_no_thread_can_do_now_is_done_later(error, monkeypatch, caplog):
    deletions, done = Deletions(), []

    def refuse(thread):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        deletions.request(lambda: done.append(1))
        assert done == []
        deletions.request(lambda: done.append(2))
        deletions.wait()
        assert done == [1, 2], "the waiting thread does it"
    assert "deleted later" in caplog.text
    deletions.request(lambda: done.append(3))
    deletions.wait()
    assert done == [1, 2, 3]


def test_an_interrupt_while_the_thread_starts_loses_nothing(monkeypatch):
    done = []
    real = threading.Thread.start

    def interrupted(thread):
        if len(done) == 1:
            real(thread)
        raise KeyboardInterrupt

    for _ in range(2):
        deletions = Deletions()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                deletions.request(lambda: done.append(1))
        deletions.wait()
    assert done == [1, 1]


def test_requests_that_wait_are_combined():
    deletions, done, go = Deletions(), [], threading.Event()
    deletions.request(lambda: go.wait(60))
    for _ in range(5):
        deletions.request(done.clear)
        deletions.request(lambda: done.append(1))
    go.set()
    deletions.wait()
    assert done == [1] * 5


@pytest.mark.parametrize(("seconds", "hangs"), [(600, False), (0.1, True)])
def test_the_end_of_the_process_waits_for_deletions_but_not_for_ever(seconds, hangs, tmp_path):
    code = """
import sys, threading
from pathlib import Path
from dcp_datastates.checkpoints import deletions
deletions._AT_END_SECONDS = float(sys.argv[1])
path = Path(sys.argv[2])
begun, ends = threading.Event(), threading.Event()
wait = deletions.Deletions.wait
deletions.Deletions.wait = lambda *given: (ends.set(), wait(*given))[1]
def delete():
    begun.set()
    ends.wait()
    if float(sys.argv[1]) < 1:
        threading.Event().wait()  # for ever
    path.touch()
old = deletions.Deletions()
old.request(delete)
begun.wait()
"""
    path = tmp_path / "deleted"
    ended = run_program(code, tmp_path, [str(seconds), str(path)], 600)
    assert ended.returncode == 0, ended.stderr
    assert path.exists() != hangs
    assert ("a deletion of old checkpoints has not" in ended.stderr) == hangs
