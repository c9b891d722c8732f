"""Claims in an object store: a number newer than all that its job could have seen, and no object."""

from __future__ import annotations

import os

import pytest
from support.simulated.object_stores import MemoryStore, installed

from dcp_datastates import CheckpointExistsError, StorageError
from dcp_datastates.storage import attempt, decisions, store_index
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.claims import Neighbours
from dcp_datastates.storage.store_claims import claim

FUTURE = Attempt(2**62, 7)  # of a job whose clock is ahead


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def path(monkeypatch, store):
    monkeypatch.setattr(attempt, "_incarnation", attempt._incarnation)  # put back after the test
    return installed(monkeypatch, store)


def test_a_claim_writes_nothing_and_lists_once(path, store):
    claimed = claim(path, Neighbours(), overwrite=True)
    assert (claimed.after, claimed.older, claimed.alone) == (None, (), True)
    assert store.objects == {}
    assert store.counts == {"list": 1}


def test_a_claim_is_newer_than_a_neighbour_from_the_future(path, store):
    store_index.register(path.parent / "step-0", FUTURE)
    claimed = claim(path, Neighbours(), overwrite=True)
    assert claimed.attempt > FUTURE
    assert claimed.after == FUTURE
    assert store.counts["list"] == 1


def test_a_claim_is_newer_than_an_attempt_at_its_path_that_has_no_entry(path, store):
    store_index.register(path, Attempt(1, 1))
    store.put(f"{path.key}/{FUTURE.name}/r00000-0.safetensors", b"")
    claimed = claim(path, Neighbours(), overwrite=True)
    assert claimed.attempt > FUTURE
    assert claimed.older == (FUTURE,)
    assert not claimed.alone


def test_what_was_seen_and_has_gone_still_counts(path, store):
    neighbours = Neighbours()
    store_index.register(path.parent / "step-0", FUTURE)
    claim(path, neighbours, overwrite=True)
    store_index.forget(path.parent / "step-0", [FUTURE])
    claimed = claim(path.parent / "step-2", neighbours, overwrite=True)
    assert claimed.after is not None
    assert claimed.after > FUTURE


def test_an_absurd_neighbour_is_passed_over_and_an_absurd_attempt_at_the_path_is_refused(
    path, store
):
    absurd = Attempt(0xE << 60, 1)
    store_index.register(path.parent / "step-0", absurd)
    assert claim(path, Neighbours(), overwrite=True).attempt < absurd
    store_index.register(path, Attempt(1, 1))
    store.put(f"{path.key}/{absurd.name}/r00000-0.safetensors", b"")
    with pytest.raises(StorageError, match="the year 2481"):
        claim(path, Neighbours(), overwrite=True)


def test_overwrite_false_refuses_a_committed_attempt_with_or_without_an_entry(path):
    decisions.withdraw(path, Attempt(16, 1))
    claim(path, Neighbours(), overwrite=False)
    decisions.decide(path, Attempt(16, 2), b"\x80metadata")
    with pytest.raises(CheckpointExistsError, match="overwrite=False"):
        claim(path, Neighbours(), overwrite=False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_draws_other_numbers(path):
    before = attempt.next_attempt(None).incarnation
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(attempt.next_attempt(None).incarnation).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(read, 99)) != before
