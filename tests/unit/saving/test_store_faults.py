"""A store that is slow, away, full of rests, or refuses: what becomes of a save, and of the training beside it."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from support.simulated.object_stores import MemoryStore, installed
from support.state.checkpoints import CACHE, assert_same
from support.state.states import filled
from support.stores.proxy import Proxy, answered, corrupted, stalled
from support.stores.server import Bucket, bucket_behind, client, endpoint, moto, start, use
from support.tiers import sampled
from support.waiting import await_that

import dcp_datastates
from dcp_datastates import latest, load, retain, verify
from dcp_datastates.errors import CheckpointCorruptError, DataStatesError
from dcp_datastates.storage import attempts
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.object_path import locate

ELEMENTS = 6 << 20
"""24 MiB in float32: a file of four parts."""

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


def _bucket(root) -> Bucket:
    return Bucket(endpoint(), root.removeprefix("s3://"))


def _only_old_is_there(root) -> None:
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


def test_a_busy_store_is_waited_for(proxy, root):
    busy = proxy.inject(answered(503, "SlowDown"), *PARTS, times=6)
    save(NEW, f"{root}/step-1")
    assert busy.seen == 6
    assert_same(load(f"{root}/step-1"), NEW)


# ---- slow, and away ----------------------------------------------------------------------------


def test_training_does_not_wait_for_a_slow_store_that_goes_away_and_comes_back(root, proxy):
    """24 MiB take 2.5 seconds at 10 MB/s; for two more the store is gone."""
    save(OLD, f"{root}/step-0")
    proxy.bytes_per_second = 10e6
    parameter = torch.nn.Parameter(filled((ELEMENTS,), torch.float32).nan_to_num(0.0))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    expected = parameter.detach().clone()
    before = len(proxy.requests)
    handle = dcp_datastates.async_save({"w": parameter}, f"{root}/step-1", host_cache_size=CACHE)
    optimizer.step()  # waits until the state is in the host cache
    assert not [path for method, path in proxy.requests[before:] if "partNumber=4" in path]
    await_that(lambda: [path for _, path in proxy.requests[before:] if "partNumber=1" in path])
    proxy.down = True
    for _ in range(10):
        optimizer.step()
    assert not handle.committed.done()
    away = time.monotonic()
    await_that(lambda: time.monotonic() - away > 2)
    proxy.down = False
    handle.result(60)
    assert_same(load(f"{root}/step-1"), {"w": expected})


@pytest.fixture(autouse=True)
def leaves_no_upload():
    """The store's library may try on for a while; the next test would see its thread, and the memory that it holds."""
    yield
    _await_uploads()


def _await_uploads() -> None:
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


@pytest.mark.parametrize("then", sampled(["dead", "restarted"], keep=["restarted"]))
def test_a_server_that_dies_in_an_upload_fails_the_save_by_name(then):
    """Restarted, moto has forgotten the upload, and answers its parts with status 500."""
    server = start(moto, "/moto-api/")
    proxy = Proxy(server.url)
    root = bucket_behind(proxy.url, server.url)
    again = []

    def die(exchange) -> None:
        server.kill()
        exchange.cut()

    try:
        save(OLD, f"{root}/step-0")
        death = proxy.inject(die, *PARTS, skip=2)
        handle = dcp_datastates.async_save(
            NEW, f"{root}/step-1", host_cache_size=CACHE, commit_timeout=5.0
        )
        await_that(lambda: death.seen)
        if then == "restarted":
            again.append(start(moto, "/moto-api/", port=server.port))
            client(server.url).create_bucket(Bucket=root.removeprefix("s3://"))
        began = time.monotonic()
        with pytest.raises(DataStatesError) as raised:
            handle.result(60)
        assert time.monotonic() - began < 30
        said = str(raised.value)
        # Restarted, moto has no bucket for a moment, and never the upload.
        assert "(commit_timeout=5)" in said or "NoSuch" in said
        if then == "restarted":
            assert latest(root) is None
            save(NEW, f"{root}/step-1")
            assert_same(load(f"{root}/step-1"), NEW)
        for method in ("PUT", "POST", "DELETE"):  # what the library still tries is not tried again
            proxy.inject(answered(403, "AccessDenied"), method, times=99)
        _await_uploads()
    finally:
        proxy.close()
        use(endpoint())
        for each in (server, *again):
            each.kill()


# ---- damaged, and full -------------------------------------------------------------------------


def test_what_was_damaged_on_its_way_is_found_and_not_counted(proxy, root, monkeypatch):
    """The store believes what arrives: over http, without a signature of the parts, nobody notices."""
    save(OLD, f"{root}/step-1")
    damage = proxy.inject(corrupted(1 << 20), "PUT", "partNumber=2")
    save(NEW, f"{root}/step-2")
    assert damage.seen == 1
    with pytest.raises(CheckpointCorruptError, match=r"'w'"):
        load(f"{root}/step-2")
    assert not verify(f"{root}/step-2").whole
    assert str(latest(root, verify="full")) == f"{root}/step-1"
    with pytest.raises(CheckpointCorruptError):
        dcp_datastates.copy(f"{root}/step-2", f"{root}/copy")
    retain(root, keep=1, verify="full")
    assert_same(load(f"{root}/step-1"), OLD)


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
