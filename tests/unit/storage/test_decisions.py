"""Decisions in an object store: committed or withdrawn, once and for all, whatever becomes of a request."""

import pytest
from support.simulated.object_stores import Fate

from dcp_datastates.errors import CheckpointSupersededError, StorageError
from dcp_datastates.storage import decisions
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.decisions import State

ATTEMPT = Attempt(16, 1)
METADATA = b"\x80metadata" * 20


def _next(store, *fates):
    """The fates of the next requests that create an object."""
    coming = list(fates)

    def fate(request):
        return coming.pop(0) if coming and request.kind == "put_if_absent" else Fate.DONE

    store.on_request = fate


@pytest.mark.parametrize("fate", [Fate.LOST, Fate.RETRIED])
def test_a_commit_whose_reply_is_lost_is_a_commit(path, store, fate):
    _next(store, fate)
    assert decisions.decide(path, ATTEMPT, METADATA) is State.COMMITTED
    assert decisions.state_of(path, ATTEMPT) is State.COMMITTED


def test_a_commit_that_may_come_late_is_withdrawn_before_it_is_told(path, store):
    _next(store, Fate.LATE)
    assert decisions.decide(path, ATTEMPT, METADATA) is State.WITHDRAWN
    store.late.pop()()
    assert decisions.state_of(path, ATTEMPT) is State.WITHDRAWN


@pytest.mark.parametrize("fate", [Fate.LOST, Fate.RETRIED])
def test_a_withdrawal_whose_reply_is_lost_is_one(path, store, fate):
    _next(store, fate)
    assert decisions.withdraw(path, ATTEMPT) is State.WITHDRAWN


def test_a_deletion_is_final(path, store):
    _next(store, Fate.TWICE)
    decisions.decide(path, ATTEMPT, METADATA)
    decisions.mark_deleted(path, ATTEMPT)
    store.late.pop()()
    assert decisions.state_of(path, ATTEMPT) is State.DELETED
    assert decisions.withdraw(path, ATTEMPT) is State.DELETED


def test_two_processes_with_one_number_are_told_apart(path):
    decisions.decide(path, ATTEMPT, METADATA)
    with pytest.raises(CheckpointSupersededError, match="the same attempt"):
        decisions.decide(path, ATTEMPT, METADATA + b"another's")


def test_an_unguarded_decision_is_looked_up_first(path, store):
    assert decisions.decide_alone(path, ATTEMPT, METADATA, creates_once=False) is State.COMMITTED
    assert "put_if_absent" not in store.counts
    other = Attempt(16, 2)
    decisions.withdraw(path, other)
    assert decisions.decide_alone(path, other, METADATA, creates_once=False) is State.WITHDRAWN


def test_an_unguarded_decision_whose_reply_is_lost_is_read_back(path, store):
    store.on_request = lambda request: Fate.LOST if request.kind == "put" else Fate.DONE
    assert decisions.decide_alone(path, ATTEMPT, METADATA, creates_once=False) is State.COMMITTED
    store.on_request = lambda request: Fate.REFUSED if request.kind == "put" else Fate.DONE
    with pytest.raises(StorageError):
        decisions.decide_alone(path, Attempt(16, 2), METADATA, creates_once=False)


def test_marks_are_shorter_than_any_metadata(path, store):
    decisions.withdraw(path, ATTEMPT)
    decisions.mark_deleted(path, Attempt(16, 2))
    assert all(len(each.data) <= decisions.LONGEST_MARK for each in store.objects.values())
