"""Commits that race with ranks that settle them, at a server of its own and in the memory of nodes: one outcome."""

from __future__ import annotations

import errno
import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from support.stores.nodes import Cluster
from support.stores.server import BUCKET, strict_endpoint, variables
from support.tiers import tries

from dcp_datastates.commit.place import EndedPart, Place, Round
from dcp_datastates.errors import CheckpointSupersededError, StorageError
from dcp_datastates.storage import decisions, object_path
from dcp_datastates.storage.claims import Neighbours, claim
from dcp_datastates.storage.decisions import State
from dcp_datastates.storage.object_path import ObjectPath

obstore_adapter = pytest.importorskip("dcp_datastates.storage.obstore_adapter")

SETTLERS = 2

METADATA = b"\x80" + b"metadata" * 20


class Racing:
    """One process's store: it creates objects at the same time as the others'."""

    def __init__(self, store, together: threading.Barrier) -> None:
        self._store = store
        self.together = together
        self.races = False

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put_if_absent(self, key, data):
        if self.races:
            self.races = False
            self.together.wait()
        return self._store.put_if_absent(key, data)


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path, 3)
    yield made
    made.close()


@pytest.fixture(params=["s3", "ram"])
def path(request, monkeypatch, cluster):
    """A path whose store is a separate one for each thread."""
    if request.param == "s3":
        for name, value in variables(strict_endpoint()).items():
            monkeypatch.setenv(name, value)
        root = f"s3://{BUCKET}"
        open_store = partial(obstore_adapter.ObstoreStore, root)
    else:
        root, nodes = "ram://run", itertools.cycle("abc")

        def open_store():
            return cluster.store(next(nodes))

    mine, together = threading.local(), threading.Barrier(1 + SETTLERS)

    def store_of(root, options=None):
        if not hasattr(mine, "store"):
            mine.store = Racing(open_store(), together)
        return mine.store

    monkeypatch.setattr(object_path, "store_of", store_of)
    return ObjectPath(root, "run")


def _commit(path, round_):
    path.store.races = True
    try:
        Place(path).publish(round_, METADATA)
    except CheckpointSupersededError:
        return False
    return True


def _settle(path, attempt):
    path.store.races = True
    return Place(path).settle(attempt)


@pytest.mark.parametrize("races", tries(30, 300, "STORE_RACES"))
def test_a_commit_that_races_with_ranks_that_settle_it_has_one_outcome(races, path):
    counts: Counter[bool] = Counter()
    part = EndedPart(StorageError(errno.EIO, ""))
    with ThreadPoolExecutor(1 + SETTLERS) as threads:
        for number in itertools.count():
            if number >= races and (len(counts) == 2 or number >= 20 * races):
                break
            step = path / f"root-{number // 50}" / f"step-{number}"
            claimed = claim(step, Neighbours(), overwrite=True)
            file = step / claimed.attempt.name / "r00000-0.safetensors"
            file.store.put(file.key, b"data")
            round_ = Round(0, claimed.attempt, step, part, path=step, claim=claimed, timeout=60)
            outcomes = [
                threads.submit(_commit, step, round_),
                *(threads.submit(_settle, step, claimed.attempt) for _ in range(SETTLERS)),
            ]
            found = {outcome.result() for outcome in outcomes}
            assert len(found) == 1, f"race {number}: told {found}"
            (committed,) = found
            expected = State.COMMITTED if committed else State.WITHDRAWN
            assert decisions.state_of(step, claimed.attempt) is expected
            counts[committed] += 1
    print(f"{number} races: {counts[True]} commits, {counts[False]} withdrawn")
    assert counts.keys() == {True, False}
