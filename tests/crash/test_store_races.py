"""Commits that race with ranks that settle them, over HTTP, at a server of its own: one outcome each."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.stores.server import BUCKET, strict_endpoint, variables
from support.tiers import tries

from dcp_datastates import CheckpointSupersededError, StorageError
from dcp_datastates.commit.places import place_of
from dcp_datastates.commit.round import FailedPart, Round
from dcp_datastates.storage import decisions, stores
from dcp_datastates.storage.claims import Neighbours
from dcp_datastates.storage.decisions import State
from dcp_datastates.storage.object_path import ObjectPath

obstore_adapter = pytest.importorskip("dcp_datastates.storage.obstore_adapter")

SETTLERS = 2

METADATA = b"\x80" + b"metadata" * 20


class Racing(obstore_adapter.ObstoreStore):
    """One process's store: it creates objects at the same time as the others'."""

    def __init__(self, together: threading.Barrier) -> None:
        super().__init__(f"s3://{BUCKET}")
        self.together = together
        self.races = False

    def put_if_absent(self, key, data):
        if self.races:
            self.races = False
            self.together.wait()
        return super().put_if_absent(key, data)


@pytest.fixture
def path(monkeypatch):
    """A path whose store is a separate one for each thread."""
    for name, value in variables(strict_endpoint()).items():
        monkeypatch.setenv(name, value)
    mine, together = threading.local(), threading.Barrier(1 + SETTLERS)

    def store_of(root, options=None):
        if not hasattr(mine, "store"):
            mine.store = Racing(together)
        return mine.store

    monkeypatch.setattr(stores, "store_of", store_of)
    return ObjectPath(f"s3://{BUCKET}", "run")


def _commit(path, round_):
    path.store.races = True
    try:
        place_of(path).publish(round_, lambda meta, claim: METADATA, lambda: None)
    except CheckpointSupersededError:
        return False
    return True


def _settle(path, attempt):
    path.store.races = True
    return place_of(path).settle(attempt)


@pytest.mark.parametrize("races", tries(30, 1_000))
def test_a_commit_that_races_with_ranks_that_settle_it_has_one_outcome(races, path):
    counts: Counter[bool] = Counter()
    part = FailedPart(StorageError(errno.EIO, ""))
    with ThreadPoolExecutor(1 + SETTLERS) as threads:
        for number in range(races):
            step = path / f"root-{number // 50}" / f"step-{number}"
            claim = place_of(step).claim(Neighbours(), overwrite=True)
            file = step / claim.attempt.name / "r00000-0.safetensors"
            file.store.put(file.key, b"data")
            round_ = Round(0, claim.attempt, step, part, path=step, claim=claim, timeout=60)
            outcomes = [
                threads.submit(_commit, step, round_),
                *(threads.submit(_settle, step, claim.attempt) for _ in range(SETTLERS)),
            ]
            found = {outcome.result() for outcome in outcomes}
            assert len(found) == 1, f"race {number}: told {found}"
            (committed,) = found
            expected = State.COMMITTED if committed else State.WITHDRAWN
            assert decisions.state_of(step, claim.attempt) is expected
            counts[committed] += 1
    print(f"{races} races: {counts[True]} commits, {counts[False]} withdrawn")
    assert counts[True]
    assert counts[False]
