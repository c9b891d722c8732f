"""Whether a store lets only one creation succeed is tried once for each store."""

from __future__ import annotations

import errno
import logging
import threading

import pytest
from support.simulated.object_stores import Fate, MemoryStore, installed

from dcp_datastates import StorageError
from dcp_datastates.storage.store_probe import creates_once


class Racing(MemoryStore):
    """Looks for the object, then stores it: two at once both succeed."""

    def __init__(self) -> None:
        super().__init__()
        self.together = threading.Barrier(2)
        self.raced = iter([True, True])

    def put_if_absent(self, key, data):
        if next(self.raced, False):
            missing = key not in self.objects
            self.together.wait()
            if missing:
                self._store(key, data)
            return missing
        return super().put_if_absent(key, data)


def test_a_good_store_is_tried_once_and_left_as_it_was(monkeypatch):
    store = MemoryStore()
    root = installed(monkeypatch, store, "run")
    assert creates_once(root)
    assert store.objects == {}
    store.counts.clear()
    assert creates_once(root)
    assert store.requests() == 0


@pytest.mark.parametrize("store", [MemoryStore(create_only=False), Racing()])
def test_a_store_with_two_winners_is_found_and_said_once(monkeypatch, caplog, store):
    root = installed(monkeypatch, store, "run")
    with caplog.at_level(logging.WARNING):
        assert not creates_once(root)
        assert not creates_once(root)
    assert len(caplog.records) == 1
    assert "docs/stores.md" in caplog.text


def test_a_store_that_cannot_create_only_is_no_error(monkeypatch):
    class Plain(MemoryStore):
        def put_if_absent(self, key, data):
            raise StorageError(errno.EOPNOTSUPP, "not supported", key)

    assert not creates_once(installed(monkeypatch, Plain(), "run"))


def test_lost_replies_do_not_condemn_a_store(monkeypatch):
    store = MemoryStore(
        lambda request: Fate.RETRIED if request.kind == "put_if_absent" else Fate.DONE
    )
    assert creates_once(installed(monkeypatch, store, "run"))


def test_a_store_that_does_not_answer_is_tried_again(monkeypatch):
    store = MemoryStore(lambda request: Fate.REFUSED)
    root = installed(monkeypatch, store, "run")
    with pytest.raises(StorageError):
        creates_once(root)
    store.on_request = lambda request: Fate.DONE
    assert creates_once(root)
