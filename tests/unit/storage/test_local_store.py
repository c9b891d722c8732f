"""A directory as a store: what is created once, also on a full file system, and on one without hard links."""

import errno
import os

import pytest
from support.crashes.failing import armed

from dcp_datastates.errors import StorageError
from dcp_datastates.storage import decisions, operations
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.decisions import State
from dcp_datastates.storage.local_store import make_folder
from dcp_datastates.storage.object_path import stored
from dcp_datastates.storage.object_store import NotDurableError, NotStoredError

ATTEMPT = Attempt(16, 1)
METADATA = b"\x80metadata" * 20


@pytest.fixture
def path(tmp_path):
    path = stored(tmp_path / "step-1")
    make_folder((path / ATTEMPT.name).key, "plan")
    return path


@pytest.fixture(params=["create", "write"])
def full(request, path):
    """The file system has no room for a file, or for its bytes. The folder may be held, as during a deletion."""
    with armed(f"delete.{request.param}.before=error:ENOSPC"):
        yield


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("held", [False, True])
def test_on_a_full_file_system_an_attempt_is_withdrawn_once_and_not_after_its_commit(held, path):
    other = Attempt(16, 2)
    make_folder((path / other.name).key, "plan")
    decisions.decide(path, ATTEMPT, METADATA)
    with operations.during("delete", path.folder if held else None):
        assert decisions.withdraw(path, ATTEMPT) is State.COMMITTED
        decisions.mark_deleted(path, ATTEMPT)
        assert decisions.withdraw(path, ATTEMPT) is State.DELETED
        for _ in range(2):
            assert decisions.withdraw(path, other) is State.WITHDRAWN
    assert decisions.state_of(path, ATTEMPT) is State.DELETED
    assert decisions.state_of(path, other) is State.WITHDRAWN
    assert decisions.decide(path, other, METADATA) is State.WITHDRAWN


@pytest.mark.usefixtures("full")
def test_where_not_even_a_link_has_room_nothing_is_stored(path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "symlink", refuse)
    with operations.during("delete"):
        with pytest.raises(NotStoredError):
            path.store.put((path / ATTEMPT.name / "deleting").key, b"now")
        with pytest.raises(NotStoredError):
            decisions.withdraw(path, ATTEMPT)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_without_hard_links_an_object_is_created_once(path, number):
    with armed(f"store.link.before=error:{errno.errorcode[number]}"):
        assert decisions.decide(path, ATTEMPT, METADATA) is State.COMMITTED
        assert decisions.withdraw(path, ATTEMPT) is State.COMMITTED
    assert decisions.committed_metadata(path, ATTEMPT) == METADATA
    assert os.listdir(str(path / ATTEMPT.name)) == ["decision"]


def test_a_file_system_that_creates_nothing_once_says_so(path):
    missing = "store.link.before=error:EPERM;store.rename.before=error:EINVAL"
    with armed(missing), pytest.raises(StorageError, match="no renames that replace nothing"):
        path.store.put_if_absent((path / "a").key, b"")
    assert path.store.list(path.key).objects == ()


@pytest.mark.parametrize("decide", [decisions.decide, decisions.decide_alone])
def test_a_decision_that_a_crash_may_undo_is_an_error(decide, path):
    with armed("store.sync_directory.before=error:EIO"), pytest.raises(NotDurableError):
        decide(path, ATTEMPT, METADATA)
