"""The index of a directory of checkpoints in an object store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulated.object_stores import MemoryStore, installed

from dcp_datastates.storage import store_index
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.store_index import Entry


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def root(monkeypatch, store):
    return installed(monkeypatch, store, "run")


def test_entries_are_listed_newest_first(root):
    attempts = [Attempt(16, 2), Attempt(17, 1), Attempt(16, 1)]
    for number, attempt in enumerate(attempts):
        store_index.register(root / f"step-{number}", attempt)
    found = store_index.entries(root)
    assert found == [
        Entry(Attempt(17, 1), "step-1"),
        Entry(Attempt(16, 2), "step-0"),
        Entry(Attempt(16, 1), "step-2"),
    ]


def test_an_entry_is_one_empty_object_and_a_listing_one_request(root, store):
    store_index.register(root / "step-1", Attempt(16, 1))
    store_index.register(root / "step-1", Attempt(16, 1))
    assert [each.data for each in store.objects.values()] == [b""]
    store.counts.clear()
    store_index.entries(root)
    assert store.counts == {"list": 1}


def test_forgetting_takes_only_the_path_s_own(root):
    for name in ("step-1", "step-2"):
        store_index.register(root / name, Attempt(16, 1))
    store_index.forget(root / "step-1", [Attempt(16, 1), Attempt(99, 1)])
    store_index.forget(root / "step-1", [])
    assert store_index.entries(root) == [Entry(Attempt(16, 1), "step-2")]


def test_what_is_no_entry_is_passed_over(root, store):
    for name in ("probe.abc", "readme", "0" * 16 + "-" + "0" * 16 + ".step-1", "x-y.step-1"):
        store.put(f"run/.attempts/{name}", b"")
    assert store_index.entries(root) == []


@given(
    st.lists(
        st.builds(Attempt, st.integers(0, (2 << 60) - 1), st.integers(0, (1 << 64) - 1)),
        min_size=2,
        max_size=2,
    ),
    st.text(st.characters(exclude_characters="/"), min_size=0),
)
def test_keys_sort_as_attempts_do_and_can_be_read_back(attempts, name):
    older, newer = sorted(attempts)
    assert Entry(newer, name).key <= Entry(older, name).key
    for attempt in attempts:
        assert Entry.parse(Entry(attempt, name).key) == Entry(attempt, name)
