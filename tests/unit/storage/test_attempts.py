"""Attempts below a prefix in an object store: the newest committed one is the checkpoint."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulated.object_stores import Fate, installed

from dcp_datastates.errors import StorageError
from dcp_datastates.storage import attempts, decisions
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.attempts import Entry

OLD, MIDDLE, NEW = Attempt(16, 1), Attempt(16, 2), Attempt(17, 1)
METADATA = b"\x80metadata" * 20


def _upload(path, attempt, ranks=2):
    for rank in range(ranks):
        file = path / attempt.name / f"r{rank:05d}-0.safetensors"
        file.store.put(file.key, b"data")


def _commit(path, attempt):
    _upload(path, attempt)
    decisions.decide(path, attempt, METADATA + attempt.name.encode())


def _committed(path):
    found = attempts.newest_committed(path)
    return None if found is None else found[0]


def test_whether_one_is_committed_is_told_without_reading_its_metadata(path, store):
    _commit(path, OLD)
    _commit(path, NEW)
    store.counts.clear()
    assert attempts.committed_attempt(path) == NEW
    assert attempts.is_taken(path)
    assert "get" not in store.counts, "the metadata of 16,384 ranks have a GiB"


def test_withdrawn_and_deleted_attempts_are_passed_over(path):
    _commit(path, OLD)
    _upload(path, MIDDLE)
    decisions.withdraw(path, MIDDLE)
    _commit(path, NEW)
    decisions.mark_deleted(path, NEW)
    assert _committed(path) == OLD


def test_a_reader_that_is_overtaken_by_a_save_looks_again(path, store):
    _commit(path, OLD)
    _upload(path, NEW)

    def overtake(request):
        # The new attempt was looked at before it is committed, the old one after it is removed.
        if request.kind == "get" and OLD.name in request.key:
            store.on_request = lambda request: Fate.DONE
            decisions.decide(path, NEW, METADATA)
            store.delete([key for key in store.objects if OLD.name in key])
        return Fate.DONE

    store.on_request = overtake
    assert _committed(path) == NEW


def test_an_error_is_not_an_answer(path, store):
    _commit(path, OLD)
    store.on_request = lambda request: Fate.REFUSED
    with pytest.raises(StorageError):
        attempts.newest_committed(path)


def test_a_survey_shows_what_each_attempt_consists_of(path, store):
    _commit(path, OLD)
    _upload(path, NEW, ranks=3)
    decisions.withdraw(path, NEW)
    store.put(f"{path.key}/{NEW.name}/deleting", b"")
    store.put(f"{path.key}/.metadata", b"")
    store.put(f"{path.key}/notes/readme.txt", b"")
    found = attempts.survey(path)
    assert set(found) == {OLD, NEW}
    assert found[OLD].is_committed
    assert not found[NEW].is_committed
    assert (len(found[OLD].data), len(found[NEW].data)) == (2, 3)
    assert [each.key for each in found[NEW].others] == [f"{path.key}/{NEW.name}/deleting"]


# ---- the index of a directory of checkpoints ------------------------------------------------------


@pytest.fixture
def root(monkeypatch, store):
    return installed(monkeypatch, store, "run")


def test_entries_are_listed_newest_first(root):
    made = [Attempt(16, 2), Attempt(17, 1), Attempt(16, 1)]
    for number, attempt in enumerate(made):
        attempts.register(root / f"step-{number}", attempt)
    found = attempts.entries(root)
    assert found == [
        Entry(Attempt(17, 1), "step-1"),
        Entry(Attempt(16, 2), "step-0"),
        Entry(Attempt(16, 1), "step-2"),
    ]


def test_forgetting_takes_only_the_path_s_own(root):
    for name in ("step-1", "step-2"):
        attempts.register(root / name, Attempt(16, 1))
    attempts.forget(root / "step-1", [Attempt(16, 1), Attempt(99, 1)])
    attempts.forget(root / "step-1", [])
    assert attempts.entries(root) == [Entry(Attempt(16, 1), "step-2")]


def test_what_is_no_entry_is_passed_over(root, store):
    for name in ("probe.abc", "readme", "0" * 16 + "-" + "0" * 16 + ".step-1", "x-y.step-1"):
        store.put(f"run/.attempts/{name}", b"")
    assert attempts.entries(root) == []


@given(
    st.lists(
        st.builds(Attempt, st.integers(0, (2 << 60) - 1), st.integers(0, (1 << 64) - 1)),
        min_size=2,
        max_size=2,
    ),
    st.text(st.characters(exclude_characters="/"), min_size=0),
)
def test_keys_sort_as_attempts_do_and_can_be_read_back(two, name):
    older, newer = sorted(two)
    assert Entry(newer, name).key <= Entry(older, name).key
    for attempt in two:
        assert Entry.parse(Entry(attempt, name).key) == Entry(attempt, name)
