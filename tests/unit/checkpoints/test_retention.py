"""``retain`` deletes the older checkpoints, and never one that may be needed."""

import errno
import logging
import os
import shutil
import threading

import pytest
from support.crashes.failing import armed
from support.jobs.scripts import run_program
from support.state.checkpoints import committed, raises, save
from support.state.files import data_files, flip_bit
from support.state.roots import (
    NEWER,
    OLDER,
    STRUCTURAL,
    another_version,
    committed_names,
    save_stock,
    state_of,
    uncommitted,
)

from dcp_datastates import Keep, latest, retain, verify
from dcp_datastates.checkpoints import listing
from dcp_datastates.checkpoints.retention import Deletions, retain_here
from dcp_datastates.errors import ConfigurationError, StorageError
from dcp_datastates.storage import operations


def test_the_newest_are_kept_and_the_rest_is_gone_without_a_trace(root):
    assert retain(root, keep=3) == [], "they are as many"
    assert retain(root, keep=2) == [root / "step-9"]
    assert retain(root, keep=2) == [], "again"
    assert not (root / "step-9").exists()
    assert committed_names(root) == ["step-10", "step-11"]
    assert (root / "logs" / "events.txt").exists()
    assert (root / "notes.txt").exists()
    for name in committed_names(root):
        assert verify(root / name).whole


@pytest.mark.parametrize(
    ("keep", "opened"),
    [(4, 0), (1, 1), (Keep(last=1, every=1), 1), (Keep(last=2, every=1), 2)],
)
def test_only_checkpoints_that_may_have_to_go_are_opened(keep, opened, root, monkeypatch):
    if keep == 1:
        retain(root, keep=1)
    paths = []
    open_found = listing.open_found
    monkeypatch.setattr(
        listing, "open_found", lambda path: (paths.append(path), open_found(path))[1]
    )
    assert retain(root, keep=keep) == []
    assert len(paths) == opened


def test_no_root_is_nothing_to_delete_and_a_checkpoint_is_refused(root):
    assert retain(root / "nowhere", keep=1) == []
    with raises(ConfigurationError, "itself a checkpoint"):
        retain(root / "step-9", keep=1)
    assert committed(root / "step-9")


@pytest.mark.parametrize("damage", STRUCTURAL, ids=lambda damage: damage.__name__)
def test_a_damaged_newest_does_not_count_and_the_last_good_one_stays(damage, root, caplog):
    damage(root / "step-11")
    damage(root / "step-10")
    assert retain(root, keep=1) == []
    assert committed(root / "step-9")
    assert latest(root) == root / "step-9"
    assert "step-11" in caplog.text


def test_a_flipped_bit_does_not_cost_the_last_sound_one_if_every_byte_is_verified(root):
    for name in ("step-10", "step-11"):
        (file,) = data_files(root / name)
        flip_bit(file, file.stat().st_size // 2)
    assert retain(root, keep=1, verify="full") == []
    assert committed_names(root) == ["step-10", "step-11", "step-9"]
    save(state_of(12), root / "step-12")
    deleted = retain(root, keep=1, verify="full")
    assert deleted == [root / "step-11", root / "step-10", root / "step-9"]
    with pytest.raises(ConfigurationError, match="verify='bytes'"):
        retain(root, keep=1, verify="bytes")


@pytest.mark.parametrize("damage", STRUCTURAL[:5], ids=lambda damage: damage.__name__)
def test_a_damaged_one_goes_once_enough_good_ones_are_newer(damage, root):
    damage(root / "step-9")
    assert retain(root, keep=3) == [], "only two good ones are newer"
    assert (root / "step-9").exists()
    assert retain(root, keep=2) == [root / "step-9"]
    assert not (root / "step-9").exists()


def test_one_of_another_format_is_never_deleted(root, caplog):
    another_version(root / "step-9")
    assert retain(root, keep=1) == [root / "step-10"]
    assert committed(root / "step-9")
    assert "step-9" in caplog.text


def test_stock_checkpoints_are_neither_counted_nor_deleted(root):
    save_stock(root / "step-12")
    save_stock(root / "step-1")
    uncommitted(root / "step-1", OLDER)  # a save is about to replace it
    assert retain(root, keep=2) == [root / "step-9"]
    assert (root / "step-12" / ".metadata").exists()
    assert (root / "step-1" / ".metadata").exists()


def test_links_are_neither_counted_nor_followed(root, tmp_path):
    save(state_of(1), tmp_path / "elsewhere")
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "current").symlink_to("step-11")
    assert retain(root, keep=2) == [root / "step-9"]
    assert committed(tmp_path / "elsewhere")
    assert os.path.islink(root / "current")


def test_a_directory_with_foreign_files_is_not_deleted_again_and_again(root):
    (root / "step-9" / "config.json").write_text("{}")
    (data_files(root / "step-10")[0].parent / "mine.bin").write_bytes(b"x")
    assert retain(root, keep=1) == [root / "step-10", root / "step-9"]
    assert os.listdir(root / "step-9") == ["config.json"]
    assert retain(root, keep=1) == []


def test_a_frameworks_directories_go_with_all_that_is_in_them(root):
    """They are the framework's own: its callbacks write there."""
    (root / "step-9" / "export").mkdir()
    (root / "step-9" / "export" / "model.bin").write_text("a callback's")
    (root / "step-9" / "link").symlink_to(root / "notes.txt")
    uncommitted(root / "step-8", OLDER)  # of a save that was killed
    (root / "step-8" / "note").write_text("a callback's")
    (root / "other-1").mkdir()
    retained = retain_here(
        root, keep=2, whole=True, among=lambda path: path.name.startswith("step-")
    )
    assert sorted(retained.deleted) == [root / "step-8", root / "step-9"]
    assert not (root / "step-9").exists()
    assert not (root / "step-8").exists()
    assert (root / "notes.txt").exists()
    assert (root / "other-1").exists()


def test_a_checkpoint_with_a_newer_attempt_stays_and_an_older_attempt_goes_with_it(root):
    uncommitted(root / "step-9", NEWER)
    uncommitted(root / "step-10", OLDER)
    assert retain(root, keep=1) == [root / "step-10"]
    assert not (root / "step-10").exists()
    assert committed(root / "step-9")
    assert os.listdir(root / "step-9" / NEWER) == ["r00000-0.safetensors"]


def test_an_attempt_that_is_older_than_those_kept_was_abandoned(root):
    (kept,) = (each for each in (root / "step-11").iterdir() if each.is_dir())
    incarnation, _, sequence = kept.name.partition("-")
    uncommitted(root / "step-9", f"{incarnation}-{int(sequence) - 1:08d}")
    assert retain(root, keep=1) == [root / "step-10", root / "step-9"]
    assert not (root / "step-9").exists()


def test_uncommitted_checkpoints_that_are_newer_stay(root):
    uncommitted(root / "step-8", OLDER)
    uncommitted(root / "step-12", NEWER)
    retain(root, keep=1)
    assert not (root / "step-8").exists()
    assert (root / "step-12" / NEWER / "r00000-0.safetensors").exists()


@pytest.mark.parametrize("name", ["write_new_file", "rename"])
def test_what_the_system_refuses_is_an_error_that_names_the_checkpoint(name, root, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(operations, name, refuse)
    with raises(StorageError, "step-9", "Permission denied"):
        retain(root, keep=2)
    assert verify(root / "step-9").whole


def test_old_checkpoints_go_on_a_full_file_system(root):
    """No byte can be written there."""
    with armed("delete.write.before=error:ENOSPC"):
        assert retain(root, keep=1) == [root / "step-10", root / "step-9"]
    assert not (root / "step-9").exists()


def test_what_is_replaced_while_checkpoints_are_listed_stays(root, monkeypatch):
    """Its directory was looked at before, and seemed to be the oldest."""
    real = listing.open_found

    def open_found(path):
        monkeypatch.setattr(listing, "open_found", real)
        save(state_of(12), root / "step-9")
        return real(path)

    monkeypatch.setattr(listing, "open_found", open_found)
    retain(root, keep=1)
    assert latest(root) == root / "step-9"


def test_another_process_that_deletes_it_too_is_no_error(root, monkeypatch):
    real = operations.rename

    def rename(path, target, *phase):
        if "decision" in path.name:
            shutil.rmtree(path.parent)
        real(path, target, *phase)

    monkeypatch.setattr(operations, "rename", rename)
    retain(root, keep=1)
    assert committed_names(root) == ["step-11"]


# ---- the thread that deletes: whatever a deletion raises, and whether or not a thread can start --------


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
            patch.setattr("dcp_datastates.checkpoints.retention.logger.exception", fail)
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
    done: list[int] = []
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
from dcp_datastates.checkpoints import retention
retention._AT_END_SECONDS = float(sys.argv[1])
path = Path(sys.argv[2])
begun, ends = threading.Event(), threading.Event()
wait = retention.Deletions.wait
retention.Deletions.wait = lambda *given: (ends.set(), wait(*given))[1]
def delete():
    begun.set()
    ends.wait()
    if float(sys.argv[1]) < 1:
        threading.Event().wait()  # for ever
    path.touch()
old = retention.Deletions()
old.request(delete)
begun.wait()
"""
    path = tmp_path / "deleted"
    ended = run_program(code, tmp_path, [str(seconds), str(path)], 600)
    assert ended.returncode == 0, ended.stderr
    assert path.exists() != hangs
    assert ("a deletion of old checkpoints has not" in ended.stderr) == hangs
