"""What every store promises, asked of each kind: in memory by fsspec; moto, rclone and azurite by obstore; ``ram://``."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.stores.kinds import KINDS, new_store, objects_below
from support.stores.server import Bucket, endpoint
from support.tiers import tries

from dcp_datastates.errors import StorageError
from dcp_datastates.storage.object_store import ObjectMissingError, part_bytes
from dcp_datastates.storage.store_calls import secrets_in, without_secrets

PART = 5 << 20  # the smallest that S3 takes


@pytest.fixture(params=KINDS)
def store(request):
    return new_store(request.param)


def stream(store, key, pieces, part=PART):
    store.put_stream(key, iter(pieces), part_bytes=part, parts_in_flight=2)


def keys(store, prefix=""):
    return [each.key for each in objects_below(store, prefix)]


def test_an_object_is_read_as_it_was_put(store):
    store.put("run/a", b"one")
    store.put("run/a", memoryview(b"other"))
    assert store.get("run/a") == b"other"
    assert store.size("run/a") == 5
    store.put("run/empty", b"")
    assert store.get("run/empty") == b""
    assert store.size("run/empty") == 0


@pytest.mark.parametrize("read", ["get", "size", "range"])
def test_a_missing_object_is_an_error_of_its_own(store, read):
    store.put("run/below/a", b"")
    calls = {"get": store.get, "size": store.size, "range": lambda key: store.get_range(key, 0, 3)}
    for key in ("run/missing", "run/below"):
        with pytest.raises(ObjectMissingError, match=key) as raised:
            calls[read](key)
        assert raised.value.filename == f"{store.url}/{key}"


@pytest.mark.parametrize(("begin", "end"), [(0, 3), (2, 7), (7, 10), (7, 30), (4, 4), (5, 2)])
def test_a_range_is_cut_at_the_end_of_the_object(store, begin, end, request):
    store.put("a", b"0123456789")
    # rclone answers with the range, and with status 200.
    if "rclone" in request.node.name and begin < end:
        with pytest.raises(StorageError, match="206"):
            store.get_range("a", begin, end)
        return
    assert bytes(store.get_range("a", begin, end)) == b"0123456789"[begin:end]


def test_listings_show_one_level(store):
    for key in ("run/1/a", "run/1/b/c", "run/2/a", "run/x", "running/a", "z"):
        store.put(key, key.encode())
    listing = store.list("run")
    assert listing.folders == ("1", "2")
    assert [(each.key, each.nbytes) for each in listing.objects] == [("run/x", 5)]
    assert store.list("").folders == ("run", "running")
    assert keys(store, "run") == ["run/1/a", "run/1/b/c", "run/2/a", "run/x"]
    assert store.list("nothing").folders == store.list("nothing").objects == ()


@pytest.mark.parametrize("count", tries(250, 2500))
def test_listings_have_many_pages(store, count):
    if store.url.startswith("az://"):
        count = min(count, 1100)  # it deletes 256 objects in half a minute if the machine is busy
    made = [f"many/{number:05}" for number in range(count)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), made))
    assert [each.key for each in store.list("many").objects] == made
    assert keys(store, "many") == made
    store.delete(made)
    assert keys(store, "many") == []


def test_what_is_deleted_is_gone_and_may_be_missing(store):
    store.put("a", b"")
    store.put("b/c", b"")
    store.delete(["a", "missing", "b/c"])
    store.delete([])
    assert keys(store) == []


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "a+b",
        "a=b,c",
        "ä€😀",
        "step=100",
        "a:b",
        "a&b",
        "(a)",
        "a@b",
        "a;b",
        "a'b",
        ".metadata",
    ],
)
def test_a_key_is_listed_as_it_was_put(store, name):
    store.put(f"{name}/{name}", b"here")
    assert store.get(f"{name}/{name}") == b"here"
    assert store.list("").folders == (name,)
    assert [each.key for each in store.list(name).objects] == [f"{name}/{name}"]
    store.delete([f"{name}/{name}"])
    assert keys(store) == []


def test_a_console_s_folder_is_no_object():
    store = new_store("moto")
    bucket = Bucket(endpoint(), store.url.removeprefix("s3://"))
    bucket.put("run/", b"")
    bucket.put("run/a", b"")
    assert [each.key for each in store.list("run").objects] == ["run/a"]
    assert keys(store, "run") == ["run/a"]
    assert store.list("").folders == ("run",)


def test_an_object_is_created_once(store, request):
    if "rclone" in request.node.name:
        pytest.skip("rclone ignores the condition; storage/self_test.py finds that out")
    assert store.put_if_absent("a", b"first")
    assert not store.put_if_absent("a", b"second")
    assert store.get("a") == b"first"


@given(
    sizes=st.lists(st.sampled_from([0, 1, 4095, PART - 1, PART, PART + 1]), max_size=5),
    cut=st.sampled_from([1, 2]),
)
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_of_any_size_become_one_object(store, sizes, cut):
    pieces = [bytes([65 + index]) * size for index, size in enumerate(sizes)]
    stream(store, "a", [memoryview(piece) for piece in pieces], PART * cut)
    assert store.get("a") == b"".join(pieces)


@pytest.mark.parametrize("before", [0, 1, PART, 3 * PART])
def test_pieces_that_fail_leave_no_object(store, before):
    class Failed(Exception):
        pass

    def pieces():
        yield b"a" * before
        raise Failed

    with pytest.raises(Failed):
        stream(store, "a", pieces())
    assert keys(store) == []


def test_streams_of_several_threads_do_not_mix(store):
    def put(name):
        stream(store, name, [name.encode() * PART, name.encode()])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(put, "abc"))
    for name in "abc":
        assert store.get(name) == name.encode() * (PART + 1)


@given(st.integers(0, 5 << 40))
def test_parts_are_whole_segments_and_few_enough(nbytes):
    part = part_bytes(nbytes)
    assert part % (8 << 20) == 0
    assert part >= 8 << 20
    assert part * 10_000 >= nbytes
    assert part == 8 << 20 or (part - (8 << 20)) * 10_000 < nbytes, "no larger than it must be"


SECRET = "SEKRIT0123"


@pytest.mark.parametrize(
    "message",
    [
        f"Authorization: Bearer {SECRET}",
        f"Proxy-Authorization: Basic {SECRET}",
        f"authorization: AWS4-HMAC-SHA256 Credential=A/2026, SignedHeaders=host, Signature={SECRET}",
        f"https://acc.blob.core.windows.net/c?sv=1&sig={SECRET}&se=1",
        f"DefaultEndpointsProtocol=https;AccountKey={SECRET}==;SharedAccessSignature={SECRET}",
        f"{{'key': 'AKIA', 'secret': '{SECRET}', 'client_kwargs': {{'aws_secret_access_key': '{SECRET}'}}}}",
        f'{{"private_key": "-----BEGIN PRIVATE KEY-----\\n{SECRET}\\n-----END"}}',
        f"s3://AKIA:{SECRET}@bucket/x by http://user:{SECRET}@proxy:3128/",
        f"X-Amz-Security-Token: {SECRET}, client_secret={SECRET}, passwd={SECRET}&pwd={SECRET}",
        f"token '{SECRET}' is invalid: invalid credentials {SECRET}, hf_token {SECRET}",
        f"account_key: Some({SECRET})",
        f"<Error><Code>X</Code><StringToSign>{SECRET}</StringToSign></Error>",
    ],
)
def test_messages_of_libraries_lose_their_secrets(message):
    assert SECRET not in without_secrets(message)


@pytest.mark.parametrize(
    "message",
    [
        "The provided token has expired.",
        "The specified key does not exist.",
        "no key objects/step-100/a1234567 there",
        "the request signature we calculated does not match",
        "Access token is invalid for bucket 'x'",
    ],
)
def test_messages_without_secrets_stay_as_they_are(message):
    assert without_secrets(message) == message


def test_a_secret_of_the_options_is_known_in_any_words():
    options = {"anon": False, "endpoint_url": "http://here", "kwargs": {"secret_key": SECRET}}
    assert list(secrets_in(options)) == [SECRET]
    assert (
        without_secrets(f"the words {SECRET} at http://here", [SECRET])
        == "the words … at http://here"
    )
