"""A save is committed at its place, or is not; the place is a prefix in an object store, or a directory."""

import errno
import logging
import shutil
from pathlib import Path

import pytest
from support.simulated.object_stores import Fate, installed

from dcp_datastates.commit.place import EndedPart, Place, Round
from dcp_datastates.errors import (
    CheckpointExistsError,
    CheckpointSupersededError,
    CommitOutcomeUnknown,
    StorageError,
)
from dcp_datastates.storage import attempts, claims, decisions, operations
from dcp_datastates.storage.claims import Neighbours
from dcp_datastates.storage.decisions import State
from dcp_datastates.storage.object_path import stored

WORLD = 2


@pytest.fixture
def path(monkeypatch, store):
    path = installed(monkeypatch, store)
    claims.claim(path.parent / "step-0", Neighbours(), overwrite=True)  # tries the store
    store.counts.clear()
    return path


def _metadata(attempt):
    return b"\x80" + attempt.name.encode() * 4


def _begun(path, overwrite=True):
    """A save whose files are in the store."""
    claim = claims.claim(path, Neighbours(), overwrite)
    for rank in range(WORLD):
        file = path / claim.attempt.name / f"r{rank:05d}-0.safetensors"
        file.store.put(file.key, b"data")
    part = EndedPart(StorageError(errno.EIO, ""))
    return Round(
        0, claim.attempt, path, part, path=path, claim=claim, timeout=5, overwrite=overwrite
    )


def _publish(round_):
    Place(round_.path).publish(round_, _metadata(round_.attempt))


def _tidy(round_):
    Place(round_.path).tidy_after_commit(round_)


def _save(path, **more):
    round_ = _begun(path, **more)
    _publish(round_)
    _tidy(round_)
    return round_


def _committed(path):
    found = attempts.newest_committed(path)
    return None if found is None else found[0]


def _on(store, kind, fate):
    store.on_request = lambda request: fate if request.kind == kind else Fate.DONE


def test_a_save_to_a_new_path_needs_four_requests_besides_its_data(path, store):
    round_ = _save(path)
    store.counts["put"] -= WORLD
    assert store.counts == {"list": 1, "put": 2, "put_if_absent": 1}
    assert _committed(path) == round_.attempt
    assert store.data(f"{path.key}/.metadata") == _metadata(round_.attempt)
    assert [each.name for each in attempts.entries(path.parent)] == ["step-1"]


def test_a_save_replaces_the_one_before_and_leaves_nothing_of_it(path, store):
    _save(path)
    new = _save(path)
    assert _committed(path) == new.attempt
    assert set(attempts.survey(path)) == {new.attempt}
    assert [each.attempt for each in attempts.entries(path.parent)] == [new.attempt]
    assert store.data(f"{path.key}/.metadata") == _metadata(new.attempt)


def test_an_older_save_that_comes_late_is_withdrawn_and_stays_so(path):
    _save(path)
    older, newer = _begun(path), _begun(path)
    _publish(newer)
    _tidy(newer)
    with pytest.raises(CheckpointSupersededError, match="it stands"):
        _publish(older)
    assert decisions.state_of(path, older.attempt) is State.WITHDRAWN
    assert _committed(path) == newer.attempt


def test_an_older_save_that_nothing_told_of_is_never_loaded(path):
    older, newer = _begun(path), _begun(path)  # neither has an entry yet
    _publish(newer)
    _publish(older)
    assert _committed(path) == newer.attempt
    third = _save(path)
    assert set(attempts.survey(path)) == {third.attempt}


def test_overwrite_false(path):
    first, second = _begun(path, overwrite=False), _begun(path, overwrite=False)
    _publish(first)
    with pytest.raises(CheckpointExistsError):
        _publish(second)
    with pytest.raises(CheckpointExistsError):
        claims.check_absent(path)
    with pytest.raises(CheckpointExistsError):
        _begun(path, overwrite=False)


def test_a_failed_save_removes_each_rank_s_files(path, store):
    round_ = _begun(path)
    Place(path).tidy_after_failure(round_, 1, WORLD)
    assert attempts.has_data(path, round_.attempt)
    Place(path).tidy_after_failure(round_, 0, WORLD)
    assert store.objects == {}


def test_what_is_settled_cannot_be_published(path):
    round_ = _begun(path)
    assert Place(path).settle(round_.attempt) is False
    assert Place(path).settle(round_.attempt) is False
    with pytest.raises(CheckpointSupersededError, match="was withdrawn"):
        _publish(round_)
    assert _committed(path) is None


def test_in_a_directory_what_another_has_withdrawn_has_failed_also_when_its_data_are_gone(tmp_path):
    """In a store, the reply to this process's own creation may have been lost."""
    path = stored(tmp_path / "step-1")
    round_ = _begun(path)
    assert Place(path).settle(round_.attempt) is False
    for each in attempts.survey(path)[round_.attempt].data:
        Path(f"/{each.key}").unlink()
    with pytest.raises(CheckpointSupersededError, match="was withdrawn"):
        _publish(round_)


def test_what_is_published_settles_as_committed(path):
    round_ = _save(path)
    assert Place(path).settle(round_.attempt) is True


def test_what_was_deleted_settles_as_unknown(path, store):
    round_ = _save(path)
    decisions.mark_deleted(path, round_.attempt)
    assert Place(path).settle(round_.attempt) is None
    store.objects.clear()
    assert Place(path).settle(round_.attempt) is None
    assert Place(path).settle(round_.attempt) is None  # the first one's withdrawal is there now


def test_a_store_that_fails_leaves_the_outcome_open(path, store):
    round_ = _begun(path)
    _on(store, "put_if_absent", Fate.REFUSED)
    with pytest.raises(CommitOutcomeUnknown, match="may yet come to be"):
        _publish(round_)
    with pytest.raises(StorageError):
        Place(path).settle(round_.attempt)


def test_a_save_that_cannot_withdraw_an_older_one_fails(path, store):
    _save(path)
    _begun(path)
    round_ = _begun(path)
    _on(store, "put_if_absent", Fate.REFUSED)
    with pytest.raises(StorageError):
        _publish(round_)
    store.on_request = lambda request: Fate.DONE
    assert decisions.state_of(path, round_.attempt) is None


def test_the_copy_is_written_for_a_publication_that_was_settled(path, store):
    round_ = _begun(path)
    _publish(round_)
    round_.published = None  # the thread that published has hung
    _tidy(round_)
    assert store.data(f"{path.key}/.metadata") == _metadata(round_.attempt)


def test_cleaning_up_never_raises(path, store, caplog):
    _save(path)
    round_ = _begun(path)
    _publish(round_)
    store.on_request = lambda request: Fate.REFUSED
    with caplog.at_level(logging.WARNING):
        _tidy(round_)
        Place(path).tidy_after_failure(round_, 0, WORLD)
    assert len(caplog.records) == 2


class TestOneWriter:
    """A store that lets two creations of an object succeed."""

    @pytest.fixture(autouse=True)
    def plain(self, monkeypatch):
        monkeypatch.setattr(Place, "_creates_once", False)

    def test_saves_follow_one_another(self, path, store):
        _save(path)
        newer = _save(path)
        assert _committed(path) == newer.attempt
        assert "put_if_absent" not in store.counts

    def test_a_rank_that_settles_writes_nothing(self, path, store):
        round_ = _begun(path)
        before = dict(store.objects)
        assert Place(path).settle(round_.attempt) is None
        assert store.objects == before
        _publish(round_)
        assert Place(path).settle(round_.attempt) is True

    def test_a_request_that_fails_leaves_the_outcome_open(self, path, store):
        round_ = _begun(path)
        decision = decisions.decision_path(path, round_.attempt).key
        store.on_request = lambda request: (
            Fate.LATE if request.kind == "put" and request.key == decision else Fate.DONE
        )
        with pytest.raises(CommitOutcomeUnknown):
            _publish(round_)


def test_of_a_failed_save_whose_directory_is_gone_nothing_stays(tmp_path, caplog):
    round_ = _begun(stored(tmp_path / "step-1"))
    shutil.rmtree(tmp_path / "step-1")
    Place(round_.path).tidy_after_failure(round_, 0, WORLD)
    assert caplog.text == ""


def test_what_others_have_deleted_before_its_name_was_durable_is_unknown(tmp_path, monkeypatch):
    """They may have read the decision, and told of it, before they deleted the checkpoint."""
    path = stored(tmp_path / "step-1")
    round_, real = _begun(path), operations.link

    def link(*arguments):
        real(*arguments)
        shutil.rmtree(tmp_path / "step-1")

    monkeypatch.setattr(operations, "link", link)
    with pytest.raises(CommitOutcomeUnknown, match="has removed its folder since"):
        _publish(round_)
    assert decisions.withdraw(path, _begun(path).attempt) is State.WITHDRAWN
