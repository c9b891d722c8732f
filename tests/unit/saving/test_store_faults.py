"""A store that is slow, away, full of rests, or refuses: what becomes of a save, and of the training beside it."""

import threading
import time

import pytest
import torch
from support.simulated.object_stores import MemoryStore, installed
from support.state.checkpoints import CACHE, assert_same
from support.stores.proxy import Proxy, answered, stalled
from support.stores.server import Bucket, bucket_behind, endpoint, use
from support.tiers import sampled
from support.waiting import await_that

import dcp_datastates
from dcp_datastates import latest, load
from dcp_datastates.errors import DataStatesError
from dcp_datastates.storage import attempts
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.object_path import locate

ELEMENTS = 3 << 20
"""12 MiB in float32: a file of two parts."""

OLD = {"w": torch.zeros(ELEMENTS)}
NEW = {"w": torch.ones(ELEMENTS)}
PARTS = ("PUT", "partNumber=")


@pytest.fixture
def proxy():
    proxy = Proxy(endpoint())
    yield proxy
    proxy.close()
    use(endpoint())


@pytest.fixture
def root(proxy):
    return bucket_behind(proxy.url)


def save(state, path, **options):
    dcp_datastates.save(state, path, host_cache_size=CACHE, **options)


def _bucket(root):
    return Bucket(endpoint(), root.removeprefix("s3://"))


def _only_old_is_there(root):
    assert str(latest(root)) == f"{root}/step-1"
    assert_same(load(f"{root}/step-1"), OLD)
    # What was sent before the save failed may come to be an object later, and is removed.
    bucket = _bucket(root)
    await_that(lambda: len([key for key in bucket.keys("") if "safetensors" in key]) == 1)


# ---- refused -----------------------------------------------------------------------------------


def test_credentials_that_expire_in_an_upload_fail_it_by_name_and_nothing_is_seen(proxy, root):
    save(OLD, f"{root}/step-1")
    expired = proxy.inject(answered(403, "ExpiredToken"), *PARTS, times=99, skip=1)
    for path in (f"{root}/step-1", f"{root}/step-2"):
        began = time.monotonic()
        with pytest.raises(DataStatesError, match=r"ExpiredToken.*\.safetensors"):
            save(NEW, path)
        assert time.monotonic() - began < 20
        _only_old_is_there(root)
    expired.left = 0
    save(NEW, f"{root}/step-2")
    assert_same(load(f"{root}/step-2"), NEW)
    assert _bucket(root).uploads() == []


# ---- away --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def leaves_no_upload():
    """The store's library may try on for a while; the next test would see its thread, and the memory that it holds."""
    yield
    _await_uploads()


def _await_uploads():
    await_that(lambda: all(t.name != "dcp_datastates-upload" for t in threading.enumerate()))


@pytest.mark.parametrize("how", sampled(["away", "stalled", "busy"], keep=["stalled", "busy"]))
def test_a_store_that_does_not_come_back_fails_the_save_within_its_timeout(how, proxy, root):
    save(OLD, f"{root}/step-1")
    over, busy, said = threading.Event(), [], ""
    try:
        if how == "stalled":
            proxy.inject(stalled(over), *PARTS, times=99, skip=1)
        elif how == "busy":
            said = r".*the store: .*503 Service Unavailable: SlowDown"
            fault = answered(503, "SlowDown")
            busy = [proxy.inject(fault, method, times=9999) for method in ("PUT", "POST")]
        else:
            proxy.inject(lambda exchange: (setattr(proxy, "down", True), exchange.cut()), *PARTS)
        began = time.monotonic()
        idle = r"without any progress \(commit_timeout=2\)"
        with pytest.raises(DataStatesError, match=idle + said):
            save(NEW, f"{root}/step-1", commit_timeout=2.0)
        assert time.monotonic() - began < 30
    finally:
        over.set()
        proxy.down = False
        for each in busy:
            each.left = 0
    _only_old_is_there(root)
    save(NEW, f"{root}/step-1")
    assert_same(load(f"{root}/step-1"), NEW)


# ---- full --------------------------------------------------------------------------------------


def test_a_path_full_of_an_older_attempts_objects_is_saved_to_and_cleared(monkeypatch):
    store = MemoryStore()
    path = str(installed(monkeypatch, store))
    older = Attempt(1 << 60, 0)
    for number in range(2500):
        store.put(f"run/step-1/{older.name}/r{number:05}-0.safetensors", b"rest")
    attempts.register(locate(path), older)  # it was about to be committed
    store.counts.clear()
    save({"w": torch.ones(3)}, path)
    assert_same(load(path), {"w": torch.ones(3)})
    assert [key for key in store.objects if older.name in key] == [
        f"run/step-1/{older.name}/decision"
    ], "its withdrawal stays"
    assert store.counts["delete"] < 10
    assert len(attempts.present(locate(path))) == 2


def test_a_bucket_with_dots_in_its_name(proxy):
    root = bucket_behind(proxy.url, name="with.dots.in.it")
    save(NEW, f"{root}/run/step-1")
    assert str(latest(f"{root}/run")) == f"{root}/run/step-1"
    assert_same(load(f"{root}/run/step-1"), NEW)
    dcp_datastates.delete(f"{root}/run/step-1")
    assert _bucket(root).keys() == []
