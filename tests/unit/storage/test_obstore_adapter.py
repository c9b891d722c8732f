"""Servers and networks that fail, behind obstore: moto, through a proxy that makes the faults."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading

import pytest
from support.stores import proxy as faults
from support.stores.proxy import Proxy, answered
from support.stores.server import Bucket, client, endpoint, use
from support.waiting import await_that

from dcp_datastates import StorageError
from dcp_datastates.storage import obstore_adapter
from dcp_datastates.storage.obstore_adapter import ObstoreStore

PART = 5 << 20
PIECES = [b"a" * PART, b"b" * PART, b"c"]
WHOLE = b"".join(PIECES)

_numbers = itertools.count(1)


@pytest.fixture
def proxy():
    proxy = Proxy(endpoint())
    yield proxy
    proxy.close()


@pytest.fixture
def bucket():
    name = f"adapter-{os.getpid()}-{next(_numbers)}"
    client().create_bucket(Bucket=name)
    return Bucket(endpoint(), name)


@pytest.fixture
def store(proxy, bucket):
    use(proxy.url)
    return ObstoreStore(f"s3://{bucket.name}")


def stream(store, pieces=PIECES):
    store.put_stream("a", iter(pieces), part_bytes=PART, parts_in_flight=2)


@pytest.mark.parametrize(
    "fault",
    [
        answered(503, "SlowDown"),
        answered(500, "InternalError"),
        faults.cut_request(100_000),
        faults.lost_answer,
        faults.duplicated,
    ],
    ids=["slow down", "internal error", "cut request", "lost answer", "duplicated"],
)
def test_a_part_that_fails_is_sent_again(store, bucket, proxy, fault):
    injected = proxy.inject(fault, "PUT", "partNumber=2", times=2)
    stream(store)
    assert injected.seen >= 1
    assert bucket.get("a") == WHOLE
    assert bucket.uploads() == []


@pytest.mark.parametrize(
    "method_and_path", [("PUT", "partNumber=1"), ("PUT", "partNumber=3"), ("POST", "uploadId")]
)
def test_an_upload_that_fails_leaves_nothing(store, bucket, proxy, method_and_path):
    injected = proxy.inject(answered(400, "InvalidRequest"), *method_and_path)
    with pytest.raises(StorageError, match="InvalidRequest"):
        stream(store)
    assert injected.seen == 1
    assert bucket.keys() == []
    assert bucket.uploads() == []


def test_pieces_that_fail_leave_no_upload(store, bucket):
    def pieces():
        yield from PIECES
        raise OSError("the engine's own")

    with pytest.raises(OSError, match="the engine's own"):
        stream(store, pieces())
    assert bucket.keys() == []
    assert bucket.uploads() == []


@pytest.mark.parametrize(
    ("fault", "is_there"),
    [
        (faults.lost_answer, True),
        (faults.duplicated, True),
        (answered(409, "ConditionalRequestConflict"), False),
        (answered(412, "PreconditionFailed"), False),
        (answered(400, "InvalidRequest"), False),
    ],
    ids=["lost answer", "duplicated", "conflict", "precondition", "refused"],
)
def test_a_creation_in_doubt_is_never_said_to_be_done(store, bucket, proxy, fault, is_there):
    injected = proxy.inject(fault, "PUT", "a$")
    with contextlib.suppress(StorageError):
        assert not store.put_if_absent("a", b"mine")
    assert injected.seen == 1
    assert (bucket.keys() == ["a"]) == is_there


def test_a_creation_waits_for_a_busy_server(store, bucket, proxy):
    proxy.inject(answered(503, "SlowDown"), "PUT", "a$", times=3)
    assert store.put_if_absent("a", b"mine")
    assert bucket.get("a") == b"mine"


def test_a_range_that_is_cut_off_is_read_on(store, bucket, proxy):
    bucket.put("a", WHOLE)
    injected = proxy.inject(faults.cut_answer(PART // 2), "GET", "a$")
    assert bytes(store.get_range("a", 10, PART + 10)) == WHOLE[10 : PART + 10]
    assert injected.seen == 1


def test_the_whole_object_in_place_of_a_range_is_refused(store, bucket, proxy):
    bucket.put("a", b"0123456789")
    proxy.inject(faults.whole_for_range, "GET", "a$")
    with pytest.raises(StorageError, match="206"):
        store.get_range("a", 2, 5)


def test_a_server_that_stalls_is_asked_again(monkeypatch, proxy, bucket):
    monkeypatch.setattr(obstore_adapter, "_TIMEOUT", obstore_adapter._TIMEOUT / 100)
    use(proxy.url)
    store = ObstoreStore(f"s3://{bucket.name}")
    bucket.put("a", b"here")
    over = threading.Event()
    try:
        proxy.inject(faults.stalled(over), "GET", "a$")
        assert store.get("a")[0] == b"here"
    finally:
        over.set()


def test_an_outage_is_waited_for(store, bucket, proxy):
    proxy.down = True
    upload = threading.Thread(target=stream, args=(store,))
    upload.start()
    await_that(lambda: len(proxy.requests) >= 4)
    proxy.down = False
    upload.join()
    assert bucket.get("a") == WHOLE


SECRETS = ("very-secret-key", "very-secret-session", "AKIAVERYSECRET")


@pytest.mark.parametrize("code", ["ExpiredToken", "SignatureDoesNotMatch"])
@pytest.mark.parametrize("call", ["put", "get", "list", "stream", "create"])
def test_refused_credentials_are_named_and_not_shown(monkeypatch, proxy, bucket, code, call):
    use(proxy.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAVERYSECRET")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-key")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "very-secret-session")
    store = ObstoreStore(f"s3://{bucket.name}")
    details = (
        "no</Message><Token-0>very-secret-session</Token-0><AWSAccessKeyId>AKIAVERYSECRET</AWSAccessKeyId>"
        "<CanonicalRequest>PUT /a x-amz-security-token:very-secret-session</CanonicalRequest><Message>"
    )
    for method in ("PUT", "GET", "POST"):
        proxy.inject(answered(403, code, details), method, times=9)
    calls = {
        "put": lambda: store.put("a", b""),
        "get": lambda: store.get("a"),
        "list": lambda: store.list(""),
        "stream": lambda: stream(store),
        "create": lambda: store.put_if_absent("a", b""),
    }
    with pytest.raises(StorageError, match=code) as raised:
        calls[call]()
    for secret in SECRETS:
        assert secret not in str(raised.value) + repr(raised.value) + repr(raised.value.args)
        assert secret not in repr(store)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
