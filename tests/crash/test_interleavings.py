"""Jobs that save, take over, settle, delete and read below one root of an object store, or of a directory, in seeded
schedules.

Every request, or file operation, is one step; before it, a process may stop or die. A request may be refused, come
late, be carried out twice or lose its reply; a file operation may fail, whether it is carried out or not.
``INTERLEAVINGS=100000`` tries more schedules than ``make test-thorough``; ``INTERLEAVING=<seed>`` repeats one that
failed.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from support.simulated.store_world import play
from support.tiers import tries

from dcp_datastates.commit.place import Place
from dcp_datastates.errors import StorageError
from dcp_datastates.storage import attempts, decisions, local_store
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.claims import Neighbours
from dcp_datastates.storage.decisions import State

ONE = os.environ.get("INTERLEAVING")


@pytest.fixture(params=["store", "directory"])
def where(request, memory_path):
    """Keyword arguments of :func:`play`, anew for each seed."""

    def arguments(seed):
        if request.param == "store":
            return {}
        (memory_path / str(seed)).mkdir()
        return {"directory": memory_path / str(seed)}

    return arguments


@pytest.mark.parametrize("schedules", tries(12, 150, "INTERLEAVINGS"))
def test_whatever_comes_late_there_is_one_outcome_and_what_is_committed_is_whole(
    schedules, where, monkeypatch
):
    counts: Counter[str] = Counter()
    for seed in [int(ONE)] if ONE else range(schedules):
        with monkeypatch.context() as patch:
            counts.update(play(patch, seed, **where(seed)).counts)
    print(f"{schedules} schedules: {dict(counts)}")
    if not ONE:
        assert counts["committed"] > schedules
        assert counts["failed"] > schedules / 10
        assert counts["settled"] > schedules / 10
        assert counts["deleted"] > schedules / 4


# Each rule of the commit, left out.


def _plain_put(patch):
    """Two creations of one object both succeed."""
    patch.setattr(Place, "_creates_once", True)
    return {"create_only": False}


def _no_read_back(patch):
    """The store's reply is believed: an object that is there is another's, and an error means that there is none."""

    def decide(directory, attempt, data, *_):
        path = decisions.decision_path(directory, attempt)
        try:
            created = path.store.put_if_absent(path.key, data)
        except StorageError:
            created = False
        return State.COMMITTED if created else State.WITHDRAWN

    patch.setattr(decisions, "decide", decide)


def _settles_by_reading(patch):
    """A rank that misses the coordinator reads the decision, and does not withdraw the attempt."""
    patch.setattr(
        Place,
        "settle",
        lambda self, attempt: decisions.state_of(self._directory, attempt) is State.COMMITTED,
    )


def _settles_by_the_mark_alone(patch):
    """A rank that finds a withdrawal takes the save for failed, although a deletion may have removed the commit."""
    patch.setattr(
        Place,
        "settle",
        lambda self, attempt: decisions.withdraw(self._directory, attempt) is State.COMMITTED,
    )


def _cleans_marks_up(patch):
    """The cleanup removes withdrawals, too."""
    real = Place.remove

    def remove(self, superseded):
        real(self, superseded)
        keys = [decisions.decision_path(self._directory, each).key for each in superseded]
        self._directory.store.delete(keys)

    patch.setattr(Place, "remove", remove)


def _trusts_the_pointer(patch):
    """A reader takes what ``.metadata`` is a copy of for the newest attempt."""
    real = attempts.newest_committed

    def newest_committed(directory):
        found = real(directory)
        try:
            copied = directory.store.get((directory / ".metadata").key)
        except FileNotFoundError:
            return found
        attempt = Attempt.parse(copied[1:].rstrip(b".").decode())
        return found and (attempt, found[1])

    patch.setattr(attempts, "newest_committed", newest_committed)


def _latest_decision_wins(patch):
    """The attempt that was committed last counts, not the newest."""

    def newest_committed(directory):
        found = [
            (contents.decision.modified_at, attempt, data)
            for attempt, contents in attempts.survey(directory).items()
            if contents.decision is not None
            and (data := decisions.committed_metadata(directory, attempt)) is not None
        ]
        return max(found, key=lambda each: each[0])[1:] if found else None

    patch.setattr(attempts, "newest_committed", newest_committed)


def _looks_once(patch):
    """A reader that finds no committed attempt does not look again."""

    def newest_committed(directory):
        for attempt in reversed(attempts.present(directory)):
            if (data := decisions.committed_metadata(directory, attempt)) is not None:
                return attempt, data
        return None

    patch.setattr(attempts, "newest_committed", newest_committed)


def _leaves_older_ones_undecided(patch):
    """A save removes older attempts without withdrawing them first."""
    patch.setattr(Place, "_withdraw_older", lambda self, attempt, overwrite: None)


def _orders_by_clocks(patch):
    """A claim does not look at the checkpoints beside it."""
    patch.setattr(Neighbours, "look", lambda self, root: None)


def _does_not_register(patch):
    """An attempt is committed without an entry in the index."""
    patch.setattr(attempts, "register", lambda directory, attempt: None)


def _makes_folders_again(patch):
    """A decision makes the folder of its attempt, if it is gone."""
    real = local_store.LocalStore.put_if_absent

    def put_if_absent(self, key, data):
        Path(f"/{key}").parent.mkdir(exist_ok=True)
        return real(self, key, data)

    patch.setattr(local_store.LocalStore, "put_if_absent", put_if_absent)


# By the first seed that shows it, in a store and in a directory; None where it cannot be, or is seldom seen.
DEFECTS = {
    _plain_put: (0, None),
    _no_read_back: (33, 8),
    _settles_by_reading: (1, 0),
    _settles_by_the_mark_alone: (87, 28),
    _cleans_marks_up: (2, None),
    _trusts_the_pointer: (8, None),
    _latest_decision_wins: (1, None),
    _looks_once: (21, None),
    _leaves_older_ones_undecided: (10, 1),
    _orders_by_clocks: (75, 14),
    _does_not_register: (0, None),
    _makes_folders_again: (None, 1069),
}


@pytest.mark.parametrize(
    ("defect", "first", "where"),
    [
        pytest.param(defect, first, place, id=f"{defect.__name__.strip('_')}-{place}")
        for defect, firsts in DEFECTS.items()
        for place, first in zip(("store", "directory"), firsts, strict=True)
        if first is not None
    ],
    indirect=["where"],
)
def test_each_defect_is_found_when_it_is_put_back(defect, first, where, monkeypatch):
    def look():
        for seed in range(first, first + 300):
            with monkeypatch.context() as patch:
                play(patch, seed, **(defect(patch) or {}), **where(seed))

    with pytest.raises(AssertionError):
        look()
