"""Nodes of a ``ram://`` store fail: connections break, bytes change, memory is full, a node is silent."""

import errno
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.state.loops import manager
from support.stores.harm import HarmProxy, cut_after, flipped_at, held_after
from support.stores.nodes import Cluster
from support.waiting import await_that

import dcp_datastates
from dcp_datastates.errors import StorageError
from dcp_datastates.storage import object_path
from dcp_datastates.storage.object_store import ObjectMissingError
from dcp_datastates.tiers import node_store
from dcp_datastates.tiers.node import OtherNode
from dcp_datastates.wire import line

DATA = "step-1/x/r00000-0.safetensors"
NEXT = "step-2/x/r00000-0.safetensors"
OTHER = "step-1/x/decision"
PIECE = os.urandom(3 << 20)


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path, 3)
    yield made
    made.close()


@pytest.fixture
def proxied(cluster):
    """A store on node ``a``, and the proxy through which it reaches ``b``."""
    proxy = HarmProxy(cluster.address("b").port)
    address = cluster.address("b")._replace(port=proxy.port)
    yield cluster.store("a", addresses={"b": [address]}), proxy
    proxy.close()


def put(store, key=DATA, count=3):
    store.put_stream(key, iter([PIECE] * count), part_bytes=len(PIECE), parts_in_flight=2)


def assert_clean(cluster):
    await_that(lambda: not cluster.rests(), otherwise="rests stay")


def test_a_data_file_lies_on_two_nodes_and_all_else_on_all(cluster):
    for own, nodes in (("a", ["a", "b"]), ("b", ["b", "c"]), ("c", ["a", "c"])):
        put(cluster.store(own), f"{own}/r00000-0.safetensors")
        cluster.store(own).put(f"{own}/r00000-1.safetensors", b"small")
        cluster.store(own).put(f"{own}/decision", b"")
        assert cluster.has(f"{own}/r00000-0.safetensors") == nodes
        assert cluster.has(f"{own}/r00000-1.safetensors") == nodes
        assert cluster.has(f"{own}/decision") == ["a", "b", "c"]


def test_every_node_reads_what_one_has(cluster):
    put(cluster.store("a"))
    for own in "abc":
        store = cluster.store(own)
        assert store.get(DATA) == PIECE * 3
        assert bytes(store.get_range(DATA, 5, 9)) == PIECE[5:9]
        assert store.size(DATA) == 3 * len(PIECE)
        assert store.list(DATA.rpartition("/")[0]) == cluster.store("a").list(
            DATA.rpartition("/")[0]
        )


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        *((cut_after(nbytes), "") for nbytes in (0, 100, 1 << 20, 5 << 20)),
        *((flipped_at(offset), "checksum differs") for offset in (300, 5000, 4 << 20)),
    ],
)
def test_an_object_on_all_nodes_that_one_does_not_get_is_an_error_and_leaves_nothing(
    cluster, proxied, harm, said
):
    store, proxy = proxied
    proxy.up = harm
    with pytest.raises(StorageError, match=rf"node b .*{said}") as raised:
        put(store, OTHER)
    assert raised.value.filename == f"ram://run/{OTHER}"
    assert cluster.has(OTHER) == []
    assert_clean(cluster)
    proxy.up = None
    put(store, OTHER)
    assert cluster.has(OTHER) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut_after(1 << 20), "node b"),
        (flipped_at(4 << 20), "checksum differs"),
        (held_after(1 << 20), "does not answer"),
    ],
)
def test_a_copy_of_a_data_file_that_fails_is_named_and_the_file_is_stored(
    cluster, proxied, harm, said, caplog, monkeypatch
):
    monkeypatch.setattr(line, "PROGRESS_SECONDS", 0.3)
    store, proxy = proxied
    lost = []
    store.on_loss = lost.append
    proxy.up = harm
    put(store)
    assert cluster.has(DATA) == ["a"]
    assert lost == [DATA]
    (line_of_log,) = caplog.messages
    assert f"ram://run/{DATA}: the copy on node b has failed" in line_of_log
    assert said in line_of_log
    assert_clean(cluster)
    proxy.up = held_after(0)
    put(store, NEXT)  # does not wait for a node that has just failed
    assert cluster.has(NEXT) == ["a"]
    assert lost == [DATA, NEXT]


@pytest.mark.parametrize(
    "harm", [held_after(0), held_after(1 << 20), lambda _, data: time.sleep(0.05) or data]
)
def test_a_slow_copy_holds_up_one_save_for_seconds_and_none_until_its_node_answers(
    cluster, proxied, harm, caplog, monkeypatch
):
    monkeypatch.setattr(node_store, "_COPY_SECONDS", 0.3)
    monkeypatch.setattr(node_store, "_FAILING_SECONDS", 0.0)
    store, proxy = proxied
    proxy.up = harm
    put(store)
    assert "the copy on node b has failed" in caplog.text
    assert "does not answer within 0." in caplog.text
    proxy.up = None
    put(store, NEXT)
    assert cluster.has(NEXT) == ["a"]
    lacking = store.copies_of(DATA, 3 * len(PIECE), store.held(DATA))[1]
    assert [node.name for node in lacking] == ["b"]
    put(store, NEXT)
    assert cluster.has(NEXT) == ["a", "b"]


def only_on_b(cluster):
    """An object that a process of node ``a`` must fetch."""
    put(cluster.store("b"))
    shutil.rmtree(cluster.folders["c"] / "run")


def test_a_get_whose_connection_is_cut_or_changed_is_an_error_and_then_works(cluster, proxied):
    store, proxy = proxied
    only_on_b(cluster)
    for harm, said in ((cut_after(1 << 20), "ended"), (flipped_at(1 << 20), "checksum differs")):
        proxy.down = harm
        with pytest.raises(StorageError, match=f"node b .*{said}") as raised:
            store.get(DATA)
        assert not isinstance(raised.value, ObjectMissingError)
    proxy.down = None
    assert store.get(DATA) == PIECE * 3


def test_a_get_goes_on_with_another_node(cluster, proxied):
    store, proxy = proxied
    put(cluster.store("b"))
    proxy.down = cut_after(1 << 20)
    assert store.get(DATA) == PIECE * 3


def test_a_node_that_is_gone_is_never_a_missing_object(cluster):
    store = cluster.store("a")
    cluster.store("a").put(OTHER, b"here")
    cluster.servers["b"].close()
    assert store.get(OTHER) == b"here"
    calls = [
        lambda: store.get("missing"),
        lambda: store.size("missing"),
        lambda: store.list("step-1"),
        lambda: store.delete([OTHER]),
        lambda: store.put(OTHER, b"new"),
        lambda: store.put_if_absent("new", b""),
    ]
    for call in calls:
        with pytest.raises(StorageError, match=r"node b \(127.0.0.1:\d+\)") as raised:
            call()
        assert not isinstance(raised.value, ObjectMissingError)
    assert cluster.has("new") == []


def test_a_node_that_is_silent_is_named(cluster, proxied, monkeypatch):
    store, proxy = proxied
    monkeypatch.setattr(line, "PROGRESS_SECONDS", 0.3)
    for way, nbytes in (("up", 0), ("up", 1 << 20), ("down", 0), ("down", 13)):
        setattr(proxy, way, held_after(nbytes))
        with pytest.raises(
            StorageError, match=rf"node b \(127.0.0.1:{proxy.port}\): it does not answer"
        ):
            put(store, OTHER)
        setattr(proxy, way, None)
        assert cluster.has(OTHER) == []
    assert_clean(cluster)


def test_another_process_of_the_node_answers_for_one_that_has_ended(cluster):
    ended = cluster.address("b")._replace(port=1)
    store = cluster.store("a", addresses={"b": [ended, cluster.address("b")]})
    put(store)
    assert cluster.has(DATA) == ["a", "b"]


@pytest.mark.parametrize("key", ["../outside", "/etc/x", "run/../../x", ".unfinished/x", "a//b"])
def test_a_server_serves_only_what_lies_below_its_directory(cluster, key):
    node = cluster.other("b")
    for ask in (node.find, node.list, lambda key: node.delete([key]), node.unpublished):
        with pytest.raises(OSError, match="is no key"):
            ask(key)


def test_what_lacks_copies_is_found_by_one_question_to_each_node(cluster, monkeypatch):
    store, asked = cluster.store("a"), []
    for number in range(5):
        put(store, f"step-1/x/r0000{number}-0.safetensors", 1)
    shutil.rmtree(cluster.folders["b"] / "run")
    ask = OtherNode._asked
    monkeypatch.setattr(OtherNode, "_asked", lambda *args: asked.append(args) or ask(*args))
    nbytes = len(PIECE)
    for name, held in store.held_below("step-1/x").items():
        whole, lacking = store.copies_of(f"step-1/x/{name}", nbytes, held)
        assert [node.name for node in whole] == ["a"]
        assert len(lacking) == 1
    assert len(asked) == 2


@pytest.mark.parametrize("damaged", [lambda data: data[:-9], lambda data: bytes(len(data))])
def test_a_checkpoint_is_copied_from_the_nodes_that_have_it_whole(
    damaged, cluster, tmp_path, monkeypatch
):
    store = cluster.store("a")
    monkeypatch.setitem(object_path._openers, "ram", lambda root, key: store)
    with manager("ram://run") as saves:
        saves.save(1, {"w": torch.arange(9)})
    for file in cluster.folders["a"].rglob("r00000-0*"):
        file.write_bytes(damaged(file.read_bytes()))
    copied = dcp_datastates.copy("ram://run/step-1", tmp_path / "copy")
    assert dcp_datastates.verify(copied).whole


def test_a_full_node_fails_the_put_with_enospc(tmp_path):
    cluster = Cluster(tmp_path, 2, most_bytes=10 << 20)
    store = cluster.store("a")
    put(store, "r00000-0.safetensors", 2)
    with pytest.raises(StorageError, match="10485760 bytes") as raised:
        put(store, "r00001-0.safetensors", 2)
    assert raised.value.errno == errno.ENOSPC
    assert cluster.has("r00001-0.safetensors") == []
    assert_clean(cluster)
    store.delete(["r00000-0.safetensors"])
    put(store, "r00001-0.safetensors", 2)
    cluster.close()


def test_one_of_the_processes_that_create_an_object_wins(cluster):
    stores = [cluster.store(own) for own in "abcabc"]
    for number in range(20):
        begin = threading.Barrier(len(stores))

        def create(at, key=f"race-{number}", begin=begin):
            begin.wait()
            return stores[at].put_if_absent(key, str(at).encode())

        with ThreadPoolExecutor(len(stores)) as pool:
            won = list(pool.map(create, range(len(stores))))
        assert sum(won) == 1
        expected = str(won.index(True)).encode()
        assert [cluster.store(own).get(f"race-{number}") for own in "abc"] == [expected] * 3


@pytest.mark.parametrize("lost", "abc")
def test_an_object_is_created_once_although_a_node_was_lost(cluster, lost):
    cluster.store("b").put_if_absent(OTHER, b"first")
    shutil.rmtree(cluster.folders[lost])
    cluster.folders[lost].mkdir()
    for own in "abc":
        assert not cluster.store(own).put_if_absent(OTHER, b"second")
    assert cluster.has(OTHER) == ["a", "b", "c"], "it lies on all nodes again"
    assert [cluster.store(own).get(OTHER) for own in "abc"] == [b"first"] * 3


def test_a_creation_that_a_node_did_not_see_is_found(cluster, proxied):
    store, proxy = proxied
    store.put_if_absent("before", b"")
    # The first node, a, has created it when the request to b breaks.
    proxy.up = cut_after(0)
    with pytest.raises(StorageError, match="node b"):
        store.put_if_absent(OTHER, b"first")
    proxy.up = None
    found = cluster.has(OTHER)
    assert cluster.store("b").put_if_absent(OTHER, b"second") == (not found)


def test_what_a_killed_process_was_writing_is_removed_at_the_next_start(tmp_path):
    cluster = Cluster(tmp_path, 1)
    (cluster.folders["a"] / "run").mkdir()
    (cluster.folders["a"] / "run" / ".left.0123456789abcdef~").write_bytes(b"x")
    living = cluster.files["a"].unpublished("run/a")
    Cluster(tmp_path, 1).close()
    assert len(cluster.rests()) == 1, "what a living process writes stays"
    living.close()
    cluster.close()
