"""Checkpoints of stock DCP as sources: read, or refused where their metadata are damaged or unsafe."""

import dataclasses
import io
import pickle
from pathlib import PosixPath

import pytest
import torch
from safetensors.torch import load_file
from support.commands import run_cli
from support.state.checkpoints import assert_same, raises
from support.state.states import filled
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)

import dcp_datastates
from dcp_datastates import convert
from dcp_datastates.errors import (
    CheckpointCorruptError,
    DataStatesError,
    IncompatibleStateError,
    StorageError,
    UnsafeObjectError,
)

from .conftest import SMALL, Trap, refused, save_stock


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
    refused(_stock_with(change, tmp_path), kind, words, tmp_path)


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

    refused(_stock_with(change, tmp_path), CheckpointCorruptError, "'?c'?.* overlap", tmp_path)


def test_stock_metadata_of_more_than_there_is_memory_for(tmp_path):
    def change(metadata):
        entry, half = metadata.state_dict_metadata["b"], torch.Size([1 << 58])
        entry.size = torch.Size([2 * half[0]])
        entry.chunks = [ChunkStorageMetadata(torch.Size([at]), half) for at in (0, half[0])]

    refused(_stock_with(change, tmp_path), StorageError, "no memory for 'b'", tmp_path)


def test_a_stock_chunk_that_is_larger_than_its_bytes(tmp_path):
    buffer = io.BytesIO()
    torch.save(torch.zeros(1).expand(1 << 50), buffer)

    def change(metadata):
        entry, (info, *_) = metadata.state_dict_metadata["b"], metadata.storage_data.values()
        entry.size = entry.chunks[0].sizes = torch.Size([1 << 50])
        for each in metadata.storage_data.values():
            vars(each).update(offset=0, length=len(buffer.getvalue()))
        (tmp_path / "in" / info.relative_path).write_bytes(buffer.getvalue())

    refused(_stock_with(change, tmp_path), CheckpointCorruptError, "are stored", tmp_path, only="b")


def test_conjugate_and_negative_views_in_stock_chunks(tmp_path):
    lazy = torch.tensor([1 + 2j, 3 - 4j]).conj()
    save_stock({"conj": lazy, "neg": lazy.imag}, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", "safetensors", **SMALL)
    assert_same(
        load_file(tmp_path / "out"), {"conj": lazy.resolve_conj(), "neg": torch.tensor([-2.0, 4.0])}
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


@pytest.mark.parametrize("command", ["convert", "diff"])
def test_stock_metadata_that_nest_deeply_do_not_end_the_process(command, tmp_path):
    """A tuple as a key is hashed by recursion in C: a megabyte of pickle would be a segmentation fault."""
    (tmp_path / "in").mkdir()
    hostile = b"\x80\x02}()" + b"\x85" * 1_000_000 + b"K\x01u."
    (tmp_path / "in" / ".metadata").write_bytes(hostile)
    ended = run_cli(command, tmp_path / "in", tmp_path / "out")
    assert ended.returncode in (1, 2), ended.stderr
    assert "too deeply" in ended.stderr
