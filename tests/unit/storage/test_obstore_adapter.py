"""Servers and networks that fail, behind obstore: moto, through a proxy that makes the faults."""

import contextlib
import errno
import itertools
import logging
import os
import threading

import pytest
from support.stores import proxy as faults
from support.stores.proxy import Answer, Proxy, answered
from support.stores.server import Bucket, client, endpoint, use
from support.waiting import await_that

import dcp_datastates
from dcp_datastates.errors import StorageError
from dcp_datastates.storage import obstore_adapter
from dcp_datastates.storage.bounded import HungError, bounded, is_hung
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


def _page(exchange):
    exchange.reply(Answer(200, [("Content-Type", "text/html")], b"<html>Please log in</html>"))


@pytest.mark.parametrize(
    "ask",
    [
        dcp_datastates.latest,
        lambda root: dcp_datastates.retain(root, keep=1),
        lambda root: dcp_datastates.load(f"{root}/step-1"),
        lambda root: dcp_datastates.inspect(f"{root}/step-1"),
    ],
    ids=["latest", "retain", "load", "inspect"],
)
def test_a_proxy_that_answers_with_a_page_is_no_empty_store(ask, proxy, store):
    """To a library, its list is empty."""
    assert dcp_datastates.latest(f"{store.url}/run") is None
    for method in ("GET", "HEAD"):
        proxy.inject(_page, method, times=1000)
    with pytest.raises(StorageError, match="web page"):
        ask(f"{store.url}/run")


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


@pytest.mark.parametrize("aborts", [True, False])
def test_pieces_that_fail_leave_no_upload_and_an_abort_that_fails_does_not_hide_why(
    aborts, store, bucket, proxy
):
    def pieces():
        yield from PIECES
        raise OSError("the engine's own")

    refused = answered(404, "NoSuchUpload")
    injected = proxy.inject(refused, "DELETE", "uploadId", times=0 if aborts else 9)
    with pytest.raises(OSError, match="the engine's own"):
        stream(store, pieces())
    assert bucket.keys() == []
    if aborts:
        assert bucket.uploads() == []
    else:
        assert injected.seen


@pytest.mark.parametrize(
    ("fault", "is_there"),
    [
        (faults.lost_answer, True),
        (faults.duplicated, True),
        (answered(412, "PreconditionFailed"), False),
        (answered(400, "InvalidRequest"), False),
    ],
    ids=["lost answer", "duplicated", "precondition", "refused"],
)
def test_a_creation_in_doubt_is_never_said_to_be_done(store, bucket, proxy, fault, is_there):
    injected = proxy.inject(fault, "PUT", "a$")
    with contextlib.suppress(StorageError):
        assert not store.put_if_absent("a", b"mine")
    assert injected.seen == 1
    assert (bucket.keys() == ["a"]) == is_there


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
def test_a_conflict_decides_nothing(store, bucket, proxy, code):
    injected = proxy.inject(answered(409, code), "PUT", "a$", times=2)
    assert store.put_if_absent("a", b"first")
    assert injected.seen == 2
    proxy.inject(answered(409, code), "PUT", "a$")
    assert not store.put_if_absent("a", b"third")


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
        assert store.get("a") == b"here"
    finally:
        over.set()


@pytest.mark.parametrize("status", [400, 405, 501])
def test_objects_are_deleted_one_by_one_where_the_server_cannot_delete_many(
    store, bucket, proxy, caplog, status
):
    refused = proxy.inject(answered(status, "NotImplemented"), "POST", "delete", times=99)
    for _ in range(2):
        for name in ("a", "b", "c"):
            bucket.put(name, b"")
        with caplog.at_level(logging.INFO):
            store.delete(["a", "missing", "b"])
        assert bucket.keys() == ["c"]
    assert refused.seen <= 3
    assert caplog.text.count("one of its own") == 1


def test_a_busy_server_is_not_taken_for_one_that_cannot_delete_many(store, bucket, proxy):
    proxy.inject(answered(503, "SlowDown"), "POST", "delete", times=3)
    store.delete(["a", "b"])
    proxy.requests.clear()
    store.delete(["a", "b"])
    assert proxy.counts() == {"POST": 1}


def test_one_request_deletes_a_thousand_objects(store, proxy):
    store.delete(["missing"])
    proxy.requests.clear()
    store.delete([f"r{number:05d}" for number in range(1_001)])
    assert proxy.counts() == {"POST": 2}


def test_a_deletion_that_is_not_allowed_is_said_to_be(store, bucket, proxy):
    proxy.inject(answered(403, "AccessDenied"), "POST", "delete")
    proxy.inject(answered(403, "AccessDenied"), "DELETE")
    bucket.put("a", b"")
    with pytest.raises(StorageError, match="AccessDenied") as raised:
        store.delete(["a"])
    assert raised.value.errno == errno.EACCES


def test_a_call_that_is_given_up_says_what_the_server_answers(store, proxy):
    proxy.inject(answered(503, "SlowDown", "reduce your rate"), "PUT", "a$", times=999)
    with pytest.raises(
        HungError, match=r"not returned for [1-9] s: storing failed: 503 .*reduce your"
    ):
        bounded("claiming", "a place", 1.0, lambda: store.put("a", b""))
    await_that(lambda: not is_hung("a place"))  # it asks no more


def test_a_server_that_stays_busy_is_an_error_that_says_for_how_long(monkeypatch, store, proxy):
    monkeypatch.setattr(obstore_adapter, "_WRITE_SECONDS", 1.0)
    proxy.inject(answered(503, "SlowDown", "reduce your rate"), "PUT", "a$", times=999)
    with pytest.raises(StorageError, match=r"503 .*SlowDown: reduce your rate \(for \d s\)"):
        store.put("a", b"")


def test_an_outage_is_waited_for(store, bucket, proxy):
    proxy.down = True
    upload = threading.Thread(target=stream, args=(store,))
    upload.start()
    await_that(lambda: len(proxy.requests) >= 4)
    proxy.down = False
    upload.join()
    assert bucket.get("a") == WHOLE


def expired_unless(key):
    """The server takes requests that are signed with ``key``, and says of others that their token has expired."""
    refuse = answered(400, "ExpiredToken", "The provided token has expired.")

    def fault(exchange):
        if f"Credential={key}/" in exchange.headers.get("authorization", ""):
            exchange.reply(exchange.forward())
        else:
            refuse(exchange)

    return fault


def from_environment(monkeypatch, tmp_path, key):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)


def from_file(monkeypatch, tmp_path, key):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    file = tmp_path / "credentials"
    file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))


CALLS = {
    "put": lambda store: store.put("a", b"new"),
    "create": lambda store: store.put_if_absent("b", b"new"),
    "get": lambda store: store.get("a"),
    "range": lambda store: store.get_range("a", 0, 2),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete(["a"]),
}


@pytest.mark.parametrize("give", [from_environment, from_file])
@pytest.mark.parametrize("call", CALLS)
def test_credentials_that_have_expired_are_read_again(
    monkeypatch, tmp_path, proxy, bucket, call, give
):
    use(proxy.url)
    give(monkeypatch, tmp_path, "old")
    store = ObstoreStore(f"s3://{bucket.name}")
    store.put("a", b"old")
    for method in ("PUT", "GET", "POST", "DELETE"):
        proxy.inject(expired_unless("new"), method, times=99)
    with pytest.raises(StorageError, match=r"ExpiredToken.*credentials were read again"):
        CALLS[call](store)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "gone")
    give(monkeypatch, tmp_path, "new")
    CALLS[call](store)


def test_the_upload_after_one_that_met_expired_credentials_succeeds(
    monkeypatch, tmp_path, proxy, bucket
):
    use(proxy.url)
    from_environment(monkeypatch, tmp_path, "old")
    store = ObstoreStore(f"s3://{bucket.name}")
    for method in ("PUT", "POST", "DELETE"):
        proxy.inject(expired_unless("new"), method, times=99)
    from_environment(monkeypatch, tmp_path, "new")
    with pytest.raises(StorageError, match="ExpiredToken"):
        stream(store)
    stream(store)
    assert bucket.get("a") == WHOLE


SECRETS = ("very-secret-key", "very-secret-session", "AKIAVERYSECRET")


@pytest.mark.parametrize("code", ["ExpiredToken", "SignatureDoesNotMatch"])
@pytest.mark.parametrize("call", [*CALLS, "stream"])
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
    for method in ("PUT", "GET", "POST", "DELETE"):
        proxy.inject(answered(403, code, details), method, times=9)
    with pytest.raises(StorageError, match=code) as raised:
        CALLS.get(call, stream)(store)
    for secret in SECRETS:
        assert secret not in str(raised.value) + repr(raised.value) + repr(raised.value.args)
        assert secret not in repr(store)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
