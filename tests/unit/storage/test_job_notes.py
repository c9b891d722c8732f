"""Notes beside the checkpoints: bounded, without secrets; and a stranger's file in place of one harms nothing."""

import json
import os
import threading
import time

import pytest
from support.crashes.mounts import fill, mounted
from support.simulated.object_stores import Fate, MemoryStore, installed
from support.waiting import little_work

from dcp_datastates.storage import job_notes
from dcp_datastates.storage.job_notes import FAILURE_NAME, Note, leave, note_in
from dcp_datastates.storage.local_store import LocalStore
from dcp_datastates.storage.object_path import locate


def test_a_note_comes_back_bounded_and_without_secrets(tmp_path):
    note = Note(error="E: s3://user:hunter2@b?X-Amz-Signature=hunter2\udc80 " + "ü" * 9000)
    with little_work(2):  # not 6 s, as if time grew with the square of a word's length
        leave(tmp_path, note)
    assert os.listdir(tmp_path) == [FAILURE_NAME]
    data = (tmp_path / FAILURE_NAME).read_bytes()
    assert b"hunter2" not in data
    assert len(data) < 5000
    found = note_in(tmp_path)
    assert found.error.startswith("E: s3://…@b?")
    assert (found.at, found.by) == (note.at, note.by)
    assert f"process {os.getpid()} on " in found.by


def test_a_store_has_notes_too_and_its_refusal_is_no_error(monkeypatch):
    refuses = False
    store = MemoryStore(lambda request: Fate.REFUSED if refuses else Fate.DONE)
    installed(monkeypatch, store)
    root = locate("mem://bucket/run")
    assert note_in(root) is None
    leave(root, Note(error="E: why", checkpoint="step-3"))
    assert note_in(root).checkpoint == "step-3"
    refuses = True
    leave(root, Note(error="E: other"))
    assert "cannot be read" in note_in(root).error


@pytest.mark.parametrize(
    "content",
    [b"", b'{"error"', b"[" * 9000, b"[]", b"\xff", b"9" * 9000, b" " * (16 << 10) + b"{}"],
)
def test_what_is_no_note_is_said(content, tmp_path):
    (tmp_path / FAILURE_NAME).write_bytes(content)
    assert str(tmp_path / FAILURE_NAME) in note_in(tmp_path).error


def test_no_reader_waits_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / FAILURE_NAME)
    assert "a pipe" in note_in(tmp_path).error


def test_fields_that_are_not_as_a_job_writes_them_are_unknown(tmp_path):
    strange = {"at": 1e300, "by": 3, "error": ["E"], "checkpoint": {}, "more": 1}
    (tmp_path / FAILURE_NAME).write_text(json.dumps(strange))
    assert note_in(tmp_path) == Note(None, None)
    for at in ("NaN", "-1", "1e999"):
        (tmp_path / FAILURE_NAME).write_text(f'{{"at": {at}}}')
        assert note_in(tmp_path) == Note(None, None)


def test_on_a_full_file_system_a_failure_has_its_time(tmp_path):
    with mounted("tmpfs", tmp_path) as root:
        fill(root, 0)
        leave(root, Note(error="E: " + "x" * 100, checkpoint="step-1200"))
        found = note_in(root)
        assert found == Note(found.at, None)
        assert abs(found.at - time.time()) < 60


def test_storage_that_hangs_holds_a_note_up_once_and_for_seconds(tmp_path, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(LocalStore, "put", lambda store, key, data: answers.wait())
    monkeypatch.setattr(job_notes, "_SECONDS", 0.2)
    leave(tmp_path, Note(error="E: one"))
    monkeypatch.setattr(job_notes, "_SECONDS", 3600.0)
    leave(tmp_path, Note(error="E: another"))  # returns immediately
    answers.set()
