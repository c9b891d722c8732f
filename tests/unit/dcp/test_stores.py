"""Saving to a store and loading from it: what a URL may be, overwriting, errors, and what is reported."""

import pytest
import torch
from support.simulated.object_stores import Fate, installed
from support.state.checkpoints import (
    CACHE,
    assert_same,
    async_save,
    load,
    load_everything,
    raises,
    save,
    writer,
    zeros,
)
from support.state.states import filled
from support.stores.kinds import new_store, objects_below
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_datastates
from dcp_datastates import DataStatesReader, DataStatesWriter
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    ConfigurationError,
    ForeignCheckpointError,
    StorageError,
)

STATE = {"w": filled((700_000,), torch.float32, 1), "step": 3}
OTHER = {"w": filled((700_000,), torch.float32, 2), "step": 4}
LARGE = {"w": filled((5_000_000,), torch.float32, 3)}
"""Of three parts."""


@pytest.fixture
def path(store, monkeypatch):
    return installed(monkeypatch, store)


def _data_key(store):
    (key,) = [key for key in store.objects if key.endswith(".safetensors")]
    return key


def _replace(store, key, data):
    store.delete([key])
    store.put(key, data)


# ---- ways to save and to load ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "moto", "azurite"])
def test_a_checkpoint_is_saved_replaced_found_loaded_and_deleted_in_stores_of_each_kind(kind):
    store = new_store(kind)
    run = f"{store.url}/run"
    for step, state in ((1, LARGE), (2, STATE), (2, OTHER)):
        dcp_datastates.save(state, f"{run}/step-{step}", host_cache_size=CACHE)
    assert str(dcp_datastates.latest(run)) == f"{run}/step-2"
    assert_same(dcp_datastates.load(f"{run}/step-2"), OTHER)
    assert_same(dcp_datastates.load(f"{run}/step-1"), LARGE)
    dcp_datastates.verify(f"{run}/step-2")
    dcp_datastates.delete(f"{run}/step-2")
    assert str(dcp_datastates.latest(run)) == f"{run}/step-1"
    dcp_datastates.delete(f"{run}/step-1")
    assert dcp_datastates.latest(run) is None
    assert objects_below(store) == []
    with pytest.raises(CheckpointNotFoundError):
        dcp_datastates.load(f"{run}/step-1")


def test_all_ways_to_save_make_the_same_checkpoint(path):
    by = writer(path)
    async_save(STATE, None, by=by).result(60)
    by.wait()
    assert_same(load_everything(path), STATE)
    save(OTHER, path, planner=DefaultSavePlanner())
    assert_same(load_everything(path), OTHER)
    stats = dcp_datastates.save(STATE, path, host_cache_size=CACHE)
    assert_same(dcp_datastates.load(path), STATE)
    assert stats.written_bytes is not None
    assert stats.written_bytes > 2_800_000
    assert stats.direct is None, "the engine has written no file"


def test_later_saves_with_the_same_plan_are_read_before_they_are_planned(path):
    for seed in range(3):
        state = {"w": filled((3_000_000,), torch.float32, seed)}
        stats = dcp_datastates.save(state, path, host_cache_size=CACHE)
        assert_same(dcp_datastates.load(path), state)
    assert stats.steady


def test_a_file_of_several_parts_and_one_of_a_single_part_come_back(path, store):
    save(LARGE, path)
    assert store.counts["put_stream"] == 1
    assert_same(load(zeros(LARGE), path), LARGE)
    before = store.counts["put_stream"]
    save({"w": torch.ones(100)}, path)
    assert store.counts["put_stream"] == before, "one plain request is enough"
    assert_same(load_everything(path), {"w": torch.ones(100)})


def test_only_what_is_asked_for_is_fetched(path, store):
    state = {f"w{n}": filled((1_000_000,), torch.float32, n) for n in range(8)}
    save(state, path)
    copy = path.parent / "copy"  # where this process has not saved, and looks for no other job
    for key in list(store.objects):
        store.put(key.replace(path.key, copy.key), store.data(key))
    before = store.counts.copy()
    assert_same(dcp_datastates.load(copy, only="w3"), {"w3": state["w3"]})
    asked = store.counts - before
    # The attempts, the decision; the size of the file, its checksums, and the blocks of one tensor.
    assert asked == {"list": 1, "get": 1, "size": 1, "get_range": 2}


def test_writers_and_readers_take_a_url_as_checkpoint_id(path, monkeypatch, store):
    by = writer()
    async_save(STATE, None, by=by, checkpoint_id="mem://bucket/run/step-7").result(60)
    reader = DataStatesReader()
    reader.reset("mem://bucket/run/step-7")
    assert_same(load_everything(path.parent / "step-7", reader), STATE)
    assert by.checkpoint_id == ""
    assert reader.checkpoint_id == "mem://bucket/run/step-7"


# ---- what is there -----------------------------------------------------------------------------


def test_the_error_says_what_is_there_instead(path, store):
    def there(*words, kind=CheckpointNotFoundError):
        with raises(kind, str(path), *words):
            dcp_datastates.load(path)

    there("there is nothing")
    save(STATE, path)
    (decision,) = [key for key in store.objects if key.endswith("/decision")]
    with raises(CheckpointNotFoundError, "checkpoints below it", "'step-1'"):
        dcp_datastates.load(path.parent)
    _replace(store, decision, b"deleted by 12\n")
    there("was deleted")
    _replace(store, decision, b"withdrawn by 12\n")
    there("cannot be committed any more")
    store.delete([decision])
    there("another tool has copied it", "dcp-datastates copy")
    store.delete([f"{path.key}/.metadata"])
    there("begun and not committed")
    store.delete(list(store.objects))
    store.put(f"{path.key}/model.safetensors", b"x")
    there("safetensors files")
    stock = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n."
    store.put(f"{path.key}/.metadata", stock)
    there("stock DCP", kind=ForeignCheckpointError)
    store.delete(list(store.objects))
    store.put(path.key, b"x")
    there("it is a file")


# ---- damage ------------------------------------------------------------------------------------


def test_a_flipped_bit_is_seen_by_file_and_tensor(path, store):
    save(LARGE, path)
    key = _data_key(store)
    data = bytearray(store.data(key))
    data[9_000_000] ^= 4
    _replace(store, key, bytes(data))
    with raises(CheckpointCorruptError, key, "'w'"):
        load_everything(path)
    assert not dcp_datastates.verify(path).whole
    with pytest.raises(CheckpointCorruptError):
        dcp_datastates.copy(path, path.parent / "copy")


@pytest.mark.parametrize("change", [-1, -5_000_000, 1, None])
def test_an_object_of_another_size_or_none_is_seen_by_file(change, path, store):
    save(LARGE, path)
    key = _data_key(store)
    data = store.data(key)
    store.delete([key])
    words = ()
    if change is not None:
        store.put(key, data[:change] if change < 0 else data + b"x")
        words = ("'w'", f"{len(data)}")
    with raises(CheckpointCorruptError, key, *words):
        load_everything(path)


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_not_taken_for_damage(
    path, monkeypatch
):
    save(LARGE, path)
    reader = DataStatesReader(path)
    metadata = reader.read_metadata()
    save(LARGE, path)
    monkeypatch.setattr(reader, "read_metadata", lambda *_, **__: metadata)
    with raises(CheckpointReplacedError, str(path)):
        load_everything(path, reader)


# ---- failed saves ------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [STATE, LARGE], ids=["one part", "several parts"])
def test_a_store_that_refuses_the_data_fails_the_save_and_the_next_one_works(state, path, store):
    save(OTHER, path)
    data = ("put", "put_stream")
    store.on_request = lambda asked: (
        Fate.REFUSED if asked.kind in data and asked.key.endswith(".safetensors") else Fate.DONE
    )
    with pytest.raises(StorageError, match=r"^\[Errno 5\] put\w* failed: 503: '\S+\.safetensors'$"):
        dcp_datastates.save(state, path, host_cache_size=CACHE)
    store.on_request = lambda asked: Fate.DONE
    assert_same(load_everything(path), OTHER)
    save(state, path)
    assert_same(load_everything(path), state)


def test_a_store_that_does_not_answer_the_claim_fails_the_save_by_name(path, store):
    store.on_request = lambda asked: Fate.REFUSED if asked.kind == "list" else Fate.DONE
    with raises(StorageError, "503", "mem://bucket"):
        save(STATE, path)


# ---- URLs and options --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DataStatesWriter, DataStatesReader])
@pytest.mark.parametrize(
    ("checkpoint_id", "valid"),
    [
        ("s3://bucket/run/step-1", True),
        ("gs://bucket/step-1", True),
        ("relative/step-1", True),
        ("/absolute", True),
        ("file:///absolute", True),
        ("s3:///no-bucket", False),
        ("s3://key:secret@bucket/step-1", False),
        ("", False),
    ],
)
def test_which_checkpoint_ids_are_valid(kind, checkpoint_id, valid):
    assert kind.validate_checkpoint_id(checkpoint_id) is valid


def test_a_bucket_is_no_checkpoint(path):
    with raises(ConfigurationError, "is a bucket"):
        writer("mem://bucket")


def test_options_of_a_store_are_for_urls_and_never_shown(tmp_path):
    options = {"key": "my-access-key", "secret": "my-secret"}
    for make in (
        lambda: writer(tmp_path, storage_options=options),
        lambda: DataStatesReader(tmp_path, storage_options=options),
        lambda: dcp_datastates.load(tmp_path, storage_options=options),
        lambda: dcp_datastates.save(STATE, tmp_path, storage_options=options),
        lambda: writer("s3://bucket/step-1", storage_options="my-secret"),
    ):
        with pytest.raises(ConfigurationError, match="storage_options") as caught:
            make()
        assert "my-" not in str(caught.value)


def test_a_store_whose_library_is_missing_is_refused_at_once(monkeypatch):
    from dcp_datastates.storage import object_path

    def missing(root, options=None):
        raise ConfigurationError(f"{root} needs the package obstore")

    monkeypatch.setattr(object_path, "store_of", missing)
    for make in (writer, DataStatesReader, dcp_datastates.load):
        with raises(ConfigurationError, "obstore"):
            make("s3://bucket/step-1")
