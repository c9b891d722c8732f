"""Commits that race with ranks that settle them, over HTTP, at a server of its own: one outcome each."""

from __future__ import annotations

import contextlib
import errno
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.tiers import tries
from support.waiting import await_that

from dcp_datastates import CheckpointSupersededError, StorageError
from dcp_datastates.commit.places import place_of
from dcp_datastates.commit.round import FailedPart, Round
from dcp_datastates.storage import decisions, stores
from dcp_datastates.storage.claims import Neighbours
from dcp_datastates.storage.decisions import State
from dcp_datastates.storage.object_path import ObjectPath

obstore_adapter = pytest.importorskip("dcp_datastates.storage.obstore_adapter")

SETTLERS = 2

SERVER = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=False)
"""
"""One request at a time: moto looks whether an object is there, and stores it later, so that two creations at once may
both succeed (about once in a thousand races, with its server of many threads)."""

METADATA = b"\x80" + b"metadata" * 20


class Racing(obstore_adapter.ObstoreStore):
    """One process's store: it creates objects at the same time as the others'."""

    def __init__(self, together: threading.Barrier) -> None:
        super().__init__("s3://races")
        self.together = together
        self.races = False

    def put_if_absent(self, key, data):
        if self.races:
            self.races = False
            self.together.wait()
        return super().put_if_absent(key, data)


@pytest.fixture(scope="module")
def server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await_that(lambda: _answers(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _answers(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.fixture
def path(server, monkeypatch):
    """A path whose store is a separate one for each thread."""
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
    }.items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"{server}/races", method="PUT"))
    mine, together = threading.local(), threading.Barrier(1 + SETTLERS)

    def store_of(root, options=None):
        if not hasattr(mine, "store"):
            mine.store = Racing(together)
        return mine.store

    monkeypatch.setattr(stores, "store_of", store_of)
    return ObjectPath("s3://races", "run")


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
