"""Requests to the job's store: what an error leaves behind."""

import gc
import weakref

import pytest
from support.waiting import await_that

from dcp_datastates.ranks.connection import Client, Connection


class Store:
    """A store that answers nothing."""

    def set(self, name, value):
        raise RuntimeError("the file was removed")


def test_a_request_that_fails_keeps_no_store_without_garbage_collection():
    """A file store's file goes with the last store that uses it: the next job at the same file needs it gone."""
    store = Store()
    there = weakref.ref(store)
    connection = Connection(Client(lambda kept=store: kept), lambda: "test")
    del store
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="was removed") as raised:
            connection.set("key", "value")
        del raised, connection
        await_that(lambda: there() is None, 10)
        assert there() is None
    finally:
        gc.enable()
