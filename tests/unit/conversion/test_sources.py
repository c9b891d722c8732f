"""Sources: recognized by their content, and refused where they are damaged, unsafe or not clear. And the
groups in which their tensors are read.
"""

import itertools
import json
import os
import pickle
import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.state.checkpoints import assert_same, save
from support.state.files import data_files, flip_bit, read_file
from support.state.states import Opinion, filled

import dcp_datastates
from dcp_datastates import convert
from dcp_datastates.conversion.source import as_bytes
from dcp_datastates.conversion.torch_file import torch_source
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    ForeignCheckpointError,
    IncompatibleStateError,
    UnsafeObjectError,
)

from .conftest import SMALL, refused, save_stock

MIB = 1 << 20


# --- damage ---------------------------------------------------------------------------------------


def test_every_byte_of_ours_is_verified(tmp_path):
    state = {"a": filled((700_000,), torch.float32, 1), "b": filled((3 * MIB,), torch.uint8, 2)}
    save(state, tmp_path / "in")
    (file,) = data_files(tmp_path / "in")
    begin, _ = read_file(file).span("b")
    flip_bit(file, begin + 2 * MIB)
    refused(tmp_path / "in", CheckpointCorruptError, "'b'", tmp_path)
    convert(tmp_path / "in", tmp_path / "out", "safetensors", only="a", **SMALL)
    assert_same(load_file(tmp_path / "out"), {"a": state["a"]})


@pytest.mark.parametrize(
    ("make", "file", "kind", "words"),
    [
        (save, "*/*.safetensors", CheckpointCorruptError, "lacks a data file"),
        (save_stock, "__0_0.distcp", CheckpointNotFoundError, "__0_0"),
    ],
)
def test_a_data_file_that_is_missing(make, file, kind, words, tmp_path):
    make({"a": torch.ones(3)}, tmp_path / "in")
    next((tmp_path / "in").glob(file)).unlink()
    for to in ("dcp", "hf"):
        refused(tmp_path / "in", kind, words, tmp_path, to)


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_a_file_that_is_cut_short(kind, tmp_path):
    state = {"a": filled((MIB,), torch.uint8), "b": torch.ones(2)}
    if kind == "dcp":
        save_stock(state, tmp_path / "in")
        file = tmp_path / "in" / "__0_0.distcp"
    else:
        file = tmp_path / "in"
        save_file(state, file) if kind == "safetensors" else torch.save(state, file)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 2000)
    refused(tmp_path / "in", CheckpointCorruptError, "in", tmp_path)


# --- objects ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ours", "stock"])
@pytest.mark.parametrize("to", ["datastates", "dcp"])
def test_objects_are_copied_without_unpickling(kind, to, tmp_path):
    """Of a class that no safe reader knows."""
    state = {"a": torch.ones(3), "opinion": Opinion("x")}
    (save if kind == "ours" else save_stock)(state, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", to, **SMALL)
    convert(tmp_path / "out", tmp_path / "back", "torch", allow_objects=True, **SMALL)
    assert torch.load(tmp_path / "back", weights_only=False)["opinion"] == Opinion("x")


def test_objects_for_a_torch_file_must_be_safe_or_trusted(tmp_path):
    save({"a": torch.ones(3), "opinion": Opinion("x")}, tmp_path / "in")
    refused(tmp_path / "in", UnsafeObjectError, "'opinion'.*Opinion", tmp_path, "torch")


def test_an_object_with_tensors_in_it_is_not_emptied(tmp_path):
    save({"a": torch.ones(3), "opinion": Opinion(torch.arange(3.0))}, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", "torch", allow_objects=True, **SMALL)
    found = torch.load(tmp_path / "out", weights_only=False)
    assert_same(found["opinion"].name, torch.arange(3.0))


# --- objects that safetensors cannot hold -------------------------------------------------------------


def test_objects_are_left_out_with_one_warning(sources, tmp_path, caplog):
    done = convert(sources["datastates"], tmp_path / "out", "hf", only="*", **SMALL)
    record, _no_configuration = caplog.records
    assert record.levelname == "WARNING"
    assert "4 Python objects" in record.message
    assert "--part model" in record.message
    assert len(done.skipped) == 4
    assert "step" in done.skipped
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == 12


def test_strict_refuses_to_leave_objects_out(sources, tmp_path):
    refused(
        sources["dcp"], IncompatibleStateError, "4 Python objects", tmp_path, only="*", strict=True
    )


# --- Hugging Face folders ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    save_file({"a": torch.ones(3), "old": torch.ones(1)}, path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(2)}, path / "model-00002-of-00002.safetensors")
    weights = {name: f"model-0000{n}-of-00002.safetensors" for name, n in (("a", 1), ("b", 2))}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return path


def test_the_index_says_which_tensors_count(folder, tmp_path):
    convert(folder, tmp_path / "out", "safetensors", **SMALL)
    assert_same(load_file(tmp_path / "out"), {"a": torch.ones(3), "b": torch.zeros(2)})


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (
            '{"weight_map": {"c": "model-00002-of-00002.safetensors"}}',
            CheckpointCorruptError,
            "'c'",
        ),
        ('{"weight_map": {"a": "model-3.safetensors"}}', CheckpointNotFoundError, "model-3"),
        *(
            (f'{{"weight_map": {{"a": "{name}"}}}}', CheckpointCorruptError, "no file beside it")
            for name in ("../secret.safetensors", "/etc/passwd", "..")
        ),
        *(
            (text, CheckpointCorruptError, r"index\.json")
            for text in ("", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}')
        ),
    ],
)
def test_an_index_that_is_wrong(text, kind, words, folder, tmp_path):
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, kind, words, tmp_path)


def test_several_files_without_an_index(folder, tmp_path):
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, ConfigurationError, "several files", tmp_path)


def test_configuration_is_copied_with_the_weights(folder, tmp_path):
    for name in ("config.json", "tokenizer.model", "model.bin", "other.safetensors.index.json"):
        (folder / name).write_text(name)
    convert(folder, tmp_path / "hf", "hf", **SMALL)
    assert sorted(each.name for each in (tmp_path / "hf").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.model",
    ]
    save({"a": torch.ones(3)}, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "out", "hf", config_from=folder, **SMALL)
    assert (tmp_path / "out" / "config.json").read_text() == "config.json"


# --- what is none -------------------------------------------------------------------------------------


def test_a_data_file_of_ours_is_no_source(tmp_path):
    save({"a": torch.ones(3)}, tmp_path / "in")
    (file,) = data_files(tmp_path / "in")
    refused(file, ConfigurationError, "pass the checkpoint's directory", tmp_path)


@pytest.mark.parametrize(
    ("name", "offset"), [("in", 3), ("shard-00001-model-00001-of-00001.safetensors", 0)]
)
def test_shards_of_tensors_are_no_weights(name, offset, tmp_path):
    """Neither is the first one of a rank, which begins where its tensors do."""
    places = json.dumps({"a": {"saved_offsets": [offset, 0]}})
    save_file({"a": torch.ones(3, 2)}, tmp_path / name, {"DCP_SHARDING_INFO": places})
    refused(tmp_path / name, ConfigurationError, "'a'.*consolidate", tmp_path)


def test_sources_that_are_none(tmp_path):
    refused(tmp_path / "nowhere", CheckpointNotFoundError, "nowhere", tmp_path)
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", CheckpointNotFoundError, "empty", tmp_path)
    (tmp_path / "text").write_text("text")
    refused(tmp_path / "text", ForeignCheckpointError, "neither", tmp_path)
    (tmp_path / "pickle").write_bytes(pickle.dumps({"a": 1}, protocol=4))
    refused(tmp_path / "pickle", ForeignCheckpointError, "neither", tmp_path)
    (tmp_path / "older").write_bytes(pickle.dumps({"a": 1}, protocol=2))
    refused(tmp_path / "older", CheckpointCorruptError, "torch cannot read it", tmp_path)
    torch.save(torch.ones(3), tmp_path / "one")
    refused(tmp_path / "one", IncompatibleStateError, "holds a Tensor", tmp_path)
    save({"a": torch.ones(3)}, tmp_path / "root" / "step-1")
    refused(tmp_path / "root", CheckpointNotFoundError, "step-1", tmp_path)


def test_a_source_is_found_through_a_link(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "blob")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").symlink_to(tmp_path / "blob")
    convert(tmp_path / "folder", tmp_path / "out", **SMALL)
    assert_same(dcp_datastates.load(tmp_path / "out"), {"a": torch.ones(3)})


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    save_file({"a": torch.zeros(1)}, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    dcp_datastates.convert(folder, tmp_path / "out", "torch")
    assert torch.load(tmp_path / "out")["a"] == 1


def test_more_files_than_may_be_open(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    state = {f"t{number}": torch.full((4,), float(number)) for number in range(100)}
    for number in range(100):
        save_file({f"t{number}": state[f"t{number}"]}, folder / f"model-{number}.safetensors")
    index = {"weight_map": {f"t{number}": f"model-{number}.safetensors" for number in range(100)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, limits[1]))
    try:
        dcp_datastates.convert(folder, tmp_path / "out", "torch", **SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    found = torch.load(tmp_path / "out")
    assert all(torch.equal(found[name], state[name]) for name in state)


# --- groups ---------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 500))
def test_groups_are_all_tensors_in_order_and_bounded(tmp_path_factory, lengths, most):
    state = {f"t{number}": torch.arange(length) for number, length in enumerate(lengths)}
    path = tmp_path_factory.mktemp("groups") / "in"
    torch.save(state, path)
    source = torch_source(path, False)
    groups = source.groups(state, most)
    assert list(itertools.chain.from_iterable(groups)) == list(state)
    for names in groups:
        found = source.read(names)
        assert [as_bytes(each) for each in found] == [as_bytes(state[name]) for name in names]
        sizes = [each.nbytes for each in found if each.nbytes]
        assert sum(sizes) <= most or len(sizes) == 1
