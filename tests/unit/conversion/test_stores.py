"""Conversions and comparisons of what lies in object stores."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.simulated.object_stores import installed
from support.state.checkpoints import assert_same, save
from support.state.states import filled

import dcp_datastates
from dcp_datastates import convert, diff
from dcp_datastates.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
)

from .conftest import SMALL

FORMATS = ("datastates", "hf", "safetensors", "dcp", "torch")


@pytest.fixture
def path(store, monkeypatch):
    return str(installed(monkeypatch, store))


def _upload(store, local, url):
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


# ---- to a store --------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [*FORMATS, "peft", None])
def test_a_store_is_no_target_and_the_way_there_is_said(to, path, store, tmp_path):
    way = r"dcp_datastates\.copy" if to in ("datastates", None) else "own tool"
    with pytest.raises(ConfigurationError, match=rf"mem://bucket.*local path.*{way}"):
        convert(tmp_path / "there is none", path, to)
    assert not store.requests()
