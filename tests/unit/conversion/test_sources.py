"""Sources: recognized by their content, and refused where they are damaged, unsafe or not clear."""

import argparse
import dataclasses
import io
import json
import os
import pickle
import re
import resource
import zipfile
from pathlib import PosixPath

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import run_cli
from support.state.checkpoints import assert_same, raises, save
from support.state.files import data_files, flip_bit, read_file
from support.state.states import Opinion, filled
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)

import dcp_datastates
from dcp_datastates import convert
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    DataStatesError,
    ForeignCheckpointError,
    IncompatibleStateError,
    StorageError,
    UnsafeObjectError,
    UnsupportedTensorError,
)

from .conftest import SMALL, save_stock

MIB = 1 << 20


class Ran(Exception):
    """Code from a file has run."""


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return _spring, ()


def _spring():
    raise Ran


def _refused(source, kind, words, tmp_path, to="safetensors", **options):
    with pytest.raises(kind, match=words) as caught:
        convert(source, tmp_path / "out", to, **SMALL, **options)
    left = [each.name for each in tmp_path.iterdir() if "out" in each.name]
    assert left == [], "a conversion that fails leaves nothing"
    return caught.value


# --- damage ---------------------------------------------------------------------------------------


def test_every_byte_of_ours_is_verified(tmp_path):
    state = {"a": filled((700_000,), torch.float32, 1), "b": filled((3 * MIB,), torch.uint8, 2)}
    save(state, tmp_path / "in")
    (file,) = data_files(tmp_path / "in")
    begin, _ = read_file(file).span("b")
    flip_bit(file, begin + 2 * MIB)
    _refused(tmp_path / "in", CheckpointCorruptError, "'b'", tmp_path)
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
        _refused(tmp_path / "in", kind, words, tmp_path, to)


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
    _refused(tmp_path / "in", CheckpointCorruptError, "in", tmp_path)


def _stock_with(change, tmp_path):
    state = {"a": torch.ones(3, 3), "b": torch.ones(4), "one": torch.ones(1)}
    save_stock(state, tmp_path / "in")
    path = tmp_path / "in" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return tmp_path / "in"


def _entry(**changed):
    return lambda metadata: vars(metadata.state_dict_metadata["a"]).update(changed)


def _chunk(**changed):
    return lambda metadata: vars(metadata.state_dict_metadata["a"].chunks[0]).update(changed)


def _places(**changed):
    return lambda metadata: [vars(each).update(changed) for each in metadata.storage_data.values()]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (_chunk(sizes=torch.Size([2, 3])), IncompatibleStateError, "6 of 9 elements"),
        (_chunk(sizes=torch.Size([3])), CheckpointCorruptError, "malformed"),
        (_chunk(offsets=("x", 0)), CheckpointCorruptError, "malformed"),
        (_entry(size=None), CheckpointCorruptError, "malformed"),
        (_entry(size=torch.Size([1 << 62, 3])), CheckpointCorruptError, "malformed"),
        (_entry(properties=None), CheckpointCorruptError, "malformed"),
        (_entry(properties=TensorProperties(dtype=torch.int32)), CheckpointCorruptError, "float32"),
        (_places(relative_path="../elsewhere"), CheckpointCorruptError, "outside"),
        *((_places(length=n), CheckpointCorruptError, "cut short") for n in (2**50, -1, "7")),
        (
            lambda metadata: vars(metadata).pop("state_dict_metadata"),
            CheckpointCorruptError,
            "not the metadata of DCP",
        ),
        (
            lambda metadata: vars(metadata).update(planner_data=Trap()),
            UnsafeObjectError,
            "allow_objects",
        ),
    ],
)
def test_stock_metadata_that_are_wrong_or_run_code(change, kind, words, tmp_path):
    _refused(_stock_with(change, tmp_path), kind, words, tmp_path)


def test_stock_metadata_with_overlapping_chunks(tmp_path):
    """They have as many elements as the tensor, and one element is in none of them."""

    def change(metadata):
        places = metadata.storage_data
        chunks = [
            ChunkStorageMetadata(torch.Size([0]), torch.Size([4])),
            ChunkStorageMetadata(torch.Size([3]), torch.Size([1])),
        ]
        entry = metadata.state_dict_metadata["b"]
        metadata.state_dict_metadata["c"] = dataclasses.replace(
            entry, size=torch.Size([5]), chunks=chunks
        )
        places[MetadataIndex("c", [0])] = places[MetadataIndex("b", [0])]
        places[MetadataIndex("c", [3])] = places[MetadataIndex("one", [0])]

    _refused(_stock_with(change, tmp_path), CheckpointCorruptError, "'?c'?.* overlap", tmp_path)


def test_stock_metadata_of_more_than_there_is_memory_for(tmp_path):
    def change(metadata):
        entry, half = metadata.state_dict_metadata["b"], torch.Size([1 << 58])
        entry.size = torch.Size([2 * half[0]])
        entry.chunks = [ChunkStorageMetadata(torch.Size([at]), half) for at in (0, half[0])]

    _refused(_stock_with(change, tmp_path), StorageError, "no memory for 'b'", tmp_path)


def test_a_stock_chunk_that_is_larger_than_its_bytes(tmp_path):
    buffer = io.BytesIO()
    torch.save(torch.zeros(1).expand(1 << 50), buffer)

    def change(metadata):
        entry, (info, *_) = metadata.state_dict_metadata["b"], metadata.storage_data.values()
        entry.size = entry.chunks[0].sizes = torch.Size([1 << 50])
        for each in metadata.storage_data.values():
            vars(each).update(offset=0, length=len(buffer.getvalue()))
        (tmp_path / "in" / info.relative_path).write_bytes(buffer.getvalue())

    _refused(
        _stock_with(change, tmp_path), CheckpointCorruptError, "are stored", tmp_path, only="b"
    )


def test_stock_chunks_of_columns_are_read_once(tmp_path, monkeypatch):
    whole = filled((3000, 1000), torch.float32)
    save_stock({"a": whole[:, :300].clone(), "b": whole[:, 300:].clone()}, tmp_path / "in")
    path = tmp_path / "in" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    places, entry = metadata.storage_data, metadata.state_dict_metadata["a"]
    places[MetadataIndex("a", [0, 300])] = places[MetadataIndex("b", [0, 0])]
    entry.size = whole.shape
    entry.chunks.append(ChunkStorageMetadata(torch.Size([0, 300]), torch.Size([3000, 700])))
    path.write_bytes(pickle.dumps(metadata))
    loads, load = [], torch.load
    monkeypatch.setattr(
        torch, "load", lambda *args, **options: loads.append(1) or load(*args, **options)
    )
    convert(tmp_path / "in", tmp_path / "out", "safetensors", only="a", **SMALL)
    assert len(loads) == 2
    assert_same(load_file(tmp_path / "out"), {"a": whole})


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_torch_file_that_another_program_has_packed(packing, tmp_path):
    """Its tensors lie elsewhere than in a file of torch, which reads it; compressed, they cannot be mapped."""
    torch.save({"a": torch.arange(100.0), "b": torch.ones(9)}, tmp_path / "first")
    with (
        zipfile.ZipFile(tmp_path / "first") as old,
        zipfile.ZipFile(tmp_path / "in", "w", packing) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    expected = {"a": torch.arange(100.0), "b": torch.ones(9)}
    assert_same(torch.load(tmp_path / "in"), expected)
    if packing == zipfile.ZIP_STORED:
        convert(tmp_path / "in", tmp_path / "out", "safetensors", **SMALL)
        assert_same(load_file(tmp_path / "out"), expected)
        return
    _refused(tmp_path / "in", IncompatibleStateError, "another program has packed", tmp_path)
    assert run_cli("convert", tmp_path / "in", tmp_path / "out").returncode == 2, (
        "it is not damaged"
    )


def _script(path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


def _quantized(path):
    torch.save(
        {"a": torch.ones(3), "q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)},
        path,
    )


def _enum(path):
    torch.save({"a": torch.ones(3), "flags": re.IGNORECASE}, path)


def _nameless(path):
    torch.save({"a": torch.ones(3), "": torch.ones(1)}, path)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (_script, ForeignCheckpointError, r"TorchScript.*torch\.jit\.load"),
        (_quantized, UnsupportedTensorError, r"quantized.*dequantize\(\)"),
        (_enum, UnsafeObjectError, r"make its values plain.*allow_objects=True"),
        (_nameless, IncompatibleStateError, "empty key"),
    ],
)
def test_a_whole_torch_file_is_not_called_damaged(make, kind, words, tmp_path):
    make(tmp_path / "in")
    _refused(tmp_path / "in", kind, words, tmp_path)
    assert run_cli("convert", tmp_path / "in", tmp_path / "out").returncode == 2


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, dtype=torch.complex64).conj().imag,
        torch.ones(3).to_sparse(),
        torch.zeros(1).expand(1 << 50),
    ],
    ids=["conj", "neg", "sparse", "expanded"],
)
def test_a_tensor_that_cannot_be_converted_can_be_excluded(value, tmp_path):
    torch.save({"a": torch.arange(3.0), "b": value}, tmp_path / "in")
    _refused(tmp_path / "in", UnsupportedTensorError, "exclude='b'", tmp_path)
    convert(tmp_path / "in", tmp_path / "out", "torch", exclude="b", **SMALL)
    assert_same(torch.load(tmp_path / "out"), {"a": torch.arange(3.0)})


# --- code in files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_archive", [True, False])
def test_a_torch_file_runs_no_code(is_archive, tmp_path):
    state = {"a": torch.ones(3), "trap": Trap()}
    torch.save(state, tmp_path / "in", _use_new_zipfile_serialization=is_archive)
    error = _refused(tmp_path / "in", UnsafeObjectError, "--allow-objects", tmp_path, "torch")
    assert "_spring" in str(error)


def test_objects_of_a_torch_file_that_is_trusted(tmp_path):
    torch.save({"a": torch.ones(3), "args": argparse.Namespace(x=1)}, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", allow_objects=True, **SMALL)
    found = dcp_datastates.load(tmp_path / "out", allow_objects=True)
    assert_same(found, {"a": torch.ones(3), "args": argparse.Namespace(x=1)})


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
    _refused(tmp_path / "in", UnsafeObjectError, "'opinion'.*Opinion", tmp_path, "torch")


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
    _refused(
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
    _refused(folder, kind, words, tmp_path)


def test_several_files_without_an_index(folder, tmp_path):
    (folder / "model.safetensors.index.json").unlink()
    _refused(folder, ConfigurationError, "several files", tmp_path)


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
    _refused(file, ConfigurationError, "pass the checkpoint's directory", tmp_path)


@pytest.mark.parametrize(
    ("name", "offset"), [("in", 3), ("shard-00001-model-00001-of-00001.safetensors", 0)]
)
def test_shards_of_tensors_are_no_weights(name, offset, tmp_path):
    """Neither is the first one of a rank, which begins where its tensors do."""
    places = json.dumps({"a": {"saved_offsets": [offset, 0]}})
    save_file({"a": torch.ones(3, 2)}, tmp_path / name, {"DCP_SHARDING_INFO": places})
    _refused(tmp_path / name, ConfigurationError, "'a'.*consolidate", tmp_path)


def test_sources_that_are_none(tmp_path):
    _refused(tmp_path / "nowhere", CheckpointNotFoundError, "nowhere", tmp_path)
    (tmp_path / "empty").mkdir()
    _refused(tmp_path / "empty", CheckpointNotFoundError, "empty", tmp_path)
    (tmp_path / "text").write_text("text")
    _refused(tmp_path / "text", ForeignCheckpointError, "neither", tmp_path)
    (tmp_path / "pickle").write_bytes(pickle.dumps({"a": 1}, protocol=4))
    _refused(tmp_path / "pickle", ForeignCheckpointError, "neither", tmp_path)
    (tmp_path / "older").write_bytes(pickle.dumps({"a": 1}, protocol=2))
    _refused(tmp_path / "older", CheckpointCorruptError, "torch cannot read it", tmp_path)
    torch.save(torch.ones(3), tmp_path / "one")
    _refused(tmp_path / "one", IncompatibleStateError, "holds a Tensor", tmp_path)
    save({"a": torch.ones(3)}, tmp_path / "root" / "step-1")
    _refused(tmp_path / "root", CheckpointNotFoundError, "step-1", tmp_path)


def test_a_source_is_found_through_a_link(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "blob")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").symlink_to(tmp_path / "blob")
    convert(tmp_path / "folder", tmp_path / "out", **SMALL)
    assert_same(dcp_datastates.load(tmp_path / "out"), {"a": torch.ones(3)})


def test_a_torch_file_of_another_byte_order_is_read(tmp_path):
    plain, other = tmp_path / "plain", tmp_path / "other"
    torch.save({"w": torch.arange(3)}, plain)
    with zipfile.ZipFile(plain) as archive, zipfile.ZipFile(other, "w") as changed:
        for name in archive.namelist():
            data = b"big" if name.endswith("/byteorder") else archive.read(name)
            if "/data/" in name:
                data = np.frombuffer(data, np.int64).byteswap().tobytes()
            changed.writestr(name, data)
    dcp_datastates.convert(other, tmp_path / "out", "safetensors")
    assert_same(load_file(tmp_path / "out"), {"w": torch.arange(3)})


def test_a_torch_file_of_before_torch_1_6_is_read(tmp_path):
    state = {"a": torch.arange(5.0), "nested": {"b": torch.ones(2, dtype=torch.bfloat16)}, "n": 3}
    torch.save(state, tmp_path / "in", _use_new_zipfile_serialization=False)
    convert(tmp_path / "in", tmp_path / "out", **SMALL)
    assert_same(dcp_datastates.load(tmp_path / "out"), state)


def test_a_part_of_a_tensor_does_not_bring_all_of_it(tmp_path):
    base = filled((1 << 16,), torch.float32)
    torch.save({"all": base, "few": base[5:9]}, tmp_path / "in")
    for to in ("torch", "dcp"):
        convert(tmp_path / "in", tmp_path / to, to, only="few", **SMALL)
        assert dcp_datastates.diff(tmp_path / "in", tmp_path / to, only="few").same
    assert (tmp_path / "torch").stat().st_size < 10_000
    assert (tmp_path / "dcp" / "__0_0.distcp").stat().st_size < 10_000


def test_stock_metadata_change_no_class(tmp_path):
    """The C unpickler sets attributes of any class that it is given."""
    save_stock({"w": torch.ones(3)}, tmp_path / "in")
    hostile = b"\x80\x02cpathlib\nPosixPath\nN}X\x06\x00\x00\x00parentK\x01s\x86b."
    (tmp_path / "in" / ".metadata").write_bytes(hostile)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PosixPath, "parent", PosixPath.parent)  # and put back, whatever happens
        parent = PosixPath.parent
        with raises(DataStatesError, "changes a class"):
            dcp_datastates.convert(tmp_path / "in", tmp_path / "out", "safetensors")
        assert PosixPath.parent is parent


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    save_file({"a": torch.zeros(1)}, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    dcp_datastates.convert(folder, tmp_path / "out", "torch")
    assert torch.load(tmp_path / "out")["a"] == 1


@pytest.mark.parametrize("command", ["convert", "diff"])
def test_stock_metadata_that_nest_deeply_do_not_end_the_process(command, tmp_path):
    """A tuple as a key is hashed by recursion in C: a megabyte of pickle would be a segmentation fault."""
    (tmp_path / "in").mkdir()
    hostile = b"\x80\x02}()" + b"\x85" * 1_000_000 + b"K\x01u."
    (tmp_path / "in" / ".metadata").write_bytes(hostile)
    ended = run_cli(command, tmp_path / "in", tmp_path / "out")
    assert ended.returncode in (1, 2), ended.stderr
    assert "too deeply" in ended.stderr


@pytest.mark.parametrize(
    "body",
    [b"()" + b"\x85" * 1_000_000 + b"K\x01u.", b"K\x01" + b"]" * 99_999 + b"a" * 99_998 + b"u."],
)
@pytest.mark.parametrize("is_archive", [True, False])
def test_a_torch_file_that_nests_deeply_does_not_end_the_process(body, is_archive, tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "in", _use_new_zipfile_serialization=is_archive)
    data = (tmp_path / "in").read_bytes()
    hostile = b"\x80\x02}" + (body if body[:1] == b"(" else b"(" + body)
    if is_archive:
        with (
            zipfile.ZipFile(io.BytesIO(data)) as good,
            zipfile.ZipFile(tmp_path / "in", "w") as bad,
        ):
            for name in good.namelist():
                bad.writestr(name, hostile if name.endswith("/data.pkl") else good.read(name))
    else:
        at = data.index(b"\x80\x02}q\x00X\x01\x00\x00\x00w")
        (tmp_path / "in").write_bytes(data[:at] + hostile + pickle.dumps([], 2))
    ended = run_cli("convert", tmp_path / "in", tmp_path / "out")
    assert ended.returncode in (1, 2), ended.stderr
    assert "too deeply" in ended.stderr


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


def test_a_torch_file_with_a_name_that_is_no_text(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "in")
    data = (tmp_path / "in").read_bytes()
    (tmp_path / "in").write_bytes(data.replace(b"/byteorder", b"/\xff\xfeteorder"))
    _refused(tmp_path / "in", CheckpointCorruptError, "torch cannot read it", tmp_path)
