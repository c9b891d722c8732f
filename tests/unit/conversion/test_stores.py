"""Conversions and comparisons of what lies in object stores."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.simulated.object_stores import Fate, MemoryStore, installed
from support.state.checkpoints import assert_same, load_everything, save
from support.state.states import filled
from support.stores.server import BUCKET, Bucket, endpoint

import dcp_datastates
from dcp_datastates import convert, copy, diff, latest, pin
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    DataStatesError,
)

from .conftest import SMALL, make_state

FORMATS = ("datastates", "hf", "safetensors", "dcp", "torch")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def path(store, monkeypatch) -> str:
    return str(installed(monkeypatch, store))


def _upload(store, local, url) -> None:
    """As any other tool does."""
    key = url.removeprefix("mem://bucket/")
    files = [local] if local.is_file() else [each for each in local.rglob("*") if each.is_file()]
    for file in files:
        name = "" if file == local else f"/{file.relative_to(local)}"
        store.put(key + name, file.read_bytes())


@pytest.fixture
def model(tmp_path):
    """A safetensors file, large enough for several pieces."""
    tensors = {
        "a": filled((5 << 20,), torch.float32, 1).nan_to_num(0),
        "b": filled((33, 7), torch.bfloat16, 2),
    }
    save_file(tensors, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


# ---- from a store ------------------------------------------------------------------------------


@pytest.mark.parametrize("to", FORMATS)
def test_ours_in_a_store_becomes_any_local_format(to, path, tmp_path):
    state = {"a": filled((3 << 20,), torch.float32, 1), "b": filled((5,), torch.int64, 2)}
    save(state, path)
    done = convert(path, tmp_path / "out", to, **SMALL)
    assert done.source_format == "dcp_datastates"
    assert diff(path, tmp_path / "out").same


@pytest.mark.parametrize("source", ["dcp", "torch"])
def test_another_programs_state_in_a_store_is_converted(source, sources, store, path, tmp_path):
    _upload(store, sources[source], path)
    convert(path, tmp_path / "out", "datastates", **SMALL)
    assert diff(sources["datastates"], tmp_path / "out").same
    assert diff(sources["datastates"], path).same


def test_a_hugging_face_folder_in_a_store_is_converted_with_its_companions(store, path, tmp_path):
    tensors = {f"w{n}": filled((2 << 18,), torch.float32, n).nan_to_num(0) for n in range(4)}
    save(tensors, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "hf", "hf", shard_size="4MiB", **SMALL)
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 2
    _upload(store, tmp_path / "hf", path)
    done = convert(path, tmp_path / "out", "hf", **SMALL)
    assert done.source_format == "Hugging Face"
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    other = tmp_path / "other"
    convert(tmp_path / "in", other, "hf", config_from=path, **SMALL)
    assert (other / "config.json").exists()


def test_a_safetensors_object_is_read_as_a_file_is(store, path, model, tmp_path):
    _upload(store, model, f"{path}.safetensors")
    done = convert(f"{path}.safetensors", tmp_path / "out", **SMALL)
    assert done.source_format == "safetensors"
    assert diff(f"{path}.safetensors", tmp_path / "out").same


def test_what_is_missing_or_no_checkpoint_is_named(store, path, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="mem://bucket/run/step-1"):
        convert(path, tmp_path / "out", "torch")
    store.put("run/step-1", b"text")
    with pytest.raises(
        dcp_datastates.errors.ForeignCheckpointError, match="mem://bucket/run/step-1"
    ):
        convert(path, tmp_path / "out", "torch")
    assert os.listdir(tmp_path) == []


def test_damage_in_a_store_is_found(store, path, tmp_path):
    save({"a": filled((300_000,), torch.float32, 1)}, path)
    (key,) = [each for each in store.objects if each.endswith(".safetensors")]
    data = bytearray(store.data(key))
    data[len(data) // 2] ^= 1
    store.put(key, data)
    with pytest.raises(CheckpointCorruptError, match="'a'"):
        convert(path, tmp_path / "out", "torch", **SMALL)


# ---- to a store --------------------------------------------------------------------------------


def _data_keys(store) -> list[str]:
    return [key for key in store.objects if key.endswith(".safetensors")]


@pytest.mark.parametrize("source", ["dcp", "torch", "datastates"])
def test_any_format_becomes_ours_in_a_store(source, sources, store, path):
    convert(sources[source], path, "datastates", shard_size="4KiB", **SMALL)
    assert len(_data_keys(store)) > 1
    assert dcp_datastates.verify(path).whole
    assert diff(sources["datastates"], path).same
    assert_same(load_everything(path)["model"], make_state()["model"])


def test_large_files_are_streamed_to_a_server(model, s3_root, tmp_path):
    convert(model, f"{s3_root}/step-1", **SMALL)
    assert diff(model, f"{s3_root}/step-1").same
    assert str(latest(s3_root)) == f"{s3_root}/step-1"
    assert Bucket(endpoint()).uploads(s3_root.removeprefix(f"s3://{BUCKET}/")) == []
    copy(f"{s3_root}/step-1", tmp_path / "down")
    assert diff(model, tmp_path / "down").same


@pytest.mark.parametrize("source", ["ours", "safetensors"])
def test_large_files_go_from_store_to_store(source, model, s3_root):
    """A library that asks for the next piece must not be asked for it within that call."""
    url = f"{s3_root}/in"
    if source == "ours":
        convert(model, url, **SMALL)
        copy(url, f"{s3_root}/copied")
        assert dcp_datastates.verify(f"{s3_root}/copied").whole
    else:
        Bucket(endpoint()).put(url.removeprefix(f"s3://{BUCKET}/"), model.read_bytes())
    convert(url, f"{s3_root}/out", "datastates", **SMALL)
    assert diff(model, f"{s3_root}/out").same


def test_what_is_there_is_replaced_only_on_demand(model, store, path):
    save({"old": torch.ones(3)}, path)
    with pytest.raises(CheckpointExistsError, match="--overwrite"):
        convert(model, path, **SMALL)
    assert_same(load_everything(path), {"old": torch.ones(3)})
    convert(model, path, overwrite=True, **SMALL)
    assert diff(model, path).same
    assert len(_data_keys(store)) == 1


def test_a_conversion_is_newer_than_what_was_saved_beside_it(model, path):
    save({"a": torch.ones(3)}, f"{path}0")
    convert(model, path, **SMALL)
    assert str(latest(path.rpartition("/")[0])) == path
    save({"a": torch.ones(3)}, f"{path}0")
    assert str(latest(path.rpartition("/")[0])) == f"{path}0"


@pytest.mark.parametrize("kind", ["put_stream", "put", "put_if_absent"])
def test_a_store_that_fails_keeps_the_old_one_and_no_data(kind, model, store, path):
    save({"old": torch.ones(3)}, path)
    before = _data_keys(store)
    store.on_request = lambda request: (
        Fate.REFUSED
        if request.kind == kind and not request.key.endswith(".metadata")
        else Fate.DONE
    )
    with pytest.raises(DataStatesError, match="503"):
        convert(model, path, overwrite=True, shard_size="1MiB", **SMALL)
    store.on_request = lambda request: Fate.DONE
    assert_same(load_everything(path), {"old": torch.ones(3)})
    if kind != "put_if_absent":  # the outcome of the commit is unknown: nothing may be removed
        assert _data_keys(store) == before
    convert(model, path, overwrite=True, shard_size="1MiB", **SMALL)
    assert diff(model, path).same
    assert len(_data_keys(store)) == 2


@pytest.mark.parametrize("to", [to for to in (*FORMATS, "peft") if to != "datastates"])
def test_formats_that_cannot_appear_at_once_are_refused_early(to, path, store, tmp_path):
    with pytest.raises(ConfigurationError, match=rf"mem://bucket.*to='{to}'.*local path"):
        convert(tmp_path / "there is none", path, to)
    assert not store.requests()


def test_prefixes_that_hold_something_else_are_refused(model, store, path):
    with pytest.raises(ConfigurationError, match="bucket: a checkpoint needs a prefix"):
        convert(model, "mem://bucket")
    store.put("run/step-1/config.json", b"{}")
    with pytest.raises(ConfigurationError, match=r"other objects.*config.json"):
        convert(model, path, overwrite=True, **SMALL)
    store.delete(["run/step-1/config.json"])
    save({"old": torch.ones(3)}, path)
    for inside in (path, "mem://bucket/run", f"{path}/below"):
        with pytest.raises(ConfigurationError, match="lie in each other"):
            convert(path, inside, "datastates", overwrite=True)
    pin(path, "eval")
    with pytest.raises(ConfigurationError, match="pinned"):
        convert(model, path, overwrite=True, **SMALL)


# ---- comparisons -------------------------------------------------------------------------------


def test_differences_between_a_store_and_a_directory_are_found(path, tmp_path):
    save({"a": torch.arange(9.0)}, path)
    save({"a": torch.arange(9.0)}, tmp_path / "same")
    save({"a": torch.arange(9.0) + 1}, tmp_path / "other")
    assert diff(path, tmp_path / "same").same
    found = diff(tmp_path / "other", path)
    assert [each.problem for each in found.differences] == ["values"]
    assert str(found).startswith(f"{tmp_path / 'other'} and {path}: ")
