"""A directory as a store: what is created once, also on a full file system."""

from __future__ import annotations

import pytest
from support.crashes.failing import armed

from dcp_datastates.storage import decisions, operations
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.decisions import State
from dcp_datastates.storage.local_store import make_folder
from dcp_datastates.storage.object_path import stored

ATTEMPT = Attempt(16, 1)
METADATA = b"\x80metadata" * 20


@pytest.fixture
def path(tmp_path):
    path = stored(tmp_path / "step-1")
    make_folder((path / ATTEMPT.name).key, "plan")
    return path


def test_on_a_full_file_system_what_is_committed_cannot_be_withdrawn(path):
    decisions.decide(path, ATTEMPT, METADATA)
    with armed("settle.write.before=error:ENOSPC"), operations.during("settle"):
        assert decisions.withdraw(path, ATTEMPT) is State.COMMITTED


def test_on_a_full_file_system_an_attempt_is_withdrawn_once(path):
    with armed("settle.write.before=error:ENOSPC"), operations.during("settle"):
        assert decisions.withdraw(path, ATTEMPT) is State.WITHDRAWN
        assert decisions.withdraw(path, ATTEMPT) is State.WITHDRAWN
    assert decisions.decide(path, ATTEMPT, METADATA) is State.WITHDRAWN
