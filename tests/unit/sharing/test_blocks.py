"""The blocks that a plan needs are those with bytes of its items: no more, and no fewer."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_datastates.format.metadata import FileRecord
from dcp_datastates.sharing import blocks as blocks_module
from dcp_datastates.sharing.blocks import Blocks, needed_blocks

BLOCK = 16
FILES = {name: FileRecord(name, 400, 390) for name in ("b", "a", "c")}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", BLOCK)


def _item(name: str, at: tuple[int, ...], offsets=(), lengths=(), kind=LoadItemType.TENSOR):
    index = MetadataIndex(name, torch.Size(at) if kind == LoadItemType.TENSOR else None)
    sizes = torch.Size(offsets), torch.Size(lengths)
    return ReadItem(kind, index, torch.Size(at), index, *sizes)


@st.composite
def slices(draw):
    """A chunk's shape, and a part of it."""
    shape = draw(st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple))
    while math.prod(shape) > 180:
        shape = shape[:-1]
    begins = [draw(st.integers(0, size)) for size in shape]
    return (
        shape,
        begins,
        [draw(st.integers(0, size - b)) for size, b in zip(shape, begins, strict=True)],
    )


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), slices()), max_size=4))
def test_the_blocks_are_those_with_bytes_of_an_item(parts):
    metadata, expected, items = Metadata({}, storage_data={}), set(), []
    blocks = Blocks(FILES)
    for number, (file, offset, (shape, begins, lengths)) in enumerate(parts):
        name, at = f"t{number}", tuple(3 for _ in shape)
        chunk = ChunkStorageMetadata(torch.Size(at), torch.Size(shape))
        properties = TensorProperties(torch.int16)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(
            properties, torch.Size(9 for _ in shape), [chunk]
        )
        item = _item(name, at, begins, lengths)
        info = _StorageInfo(file, offset, 2 * math.prod(shape))
        metadata.storage_data[item.storage_index] = info
        items.append(item)
        elements = np.arange(math.prod(shape)).reshape(shape)
        chosen = elements[tuple(slice(b, b + n) for b, n in zip(begins, lengths, strict=True))]
        first = blocks.files[file].first
        for element in chosen.ravel().tolist():
            for byte in (offset + 2 * element, offset + 2 * element + 1):
                expected.add(first + byte // BLOCK)
    runs = needed_blocks(items, metadata, blocks).tolist()
    assert {block for begin, end in runs for block in range(begin, end)} == expected
    assert all(begin < end for begin, end in runs)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(runs))


def test_blocks_have_the_same_numbers_on_all_ranks_and_none_lies_in_two_files():
    blocks = Blocks(FILES)
    assert Blocks(dict(sorted(FILES.items()))).files == blocks.files
    assert [each.first for _, each in sorted(blocks.files.items())] == [0, 26, 52]
    for name, file in blocks.files.items():
        assert blocks.file_of(file.first).name == name
        assert blocks.file_of(file.first + 24).name == name


def test_objects_have_the_blocks_of_their_bytes_and_what_is_not_placed_has_none():
    metadata = Metadata({"o": BytesStorageMetadata(), "e": BytesStorageMetadata()}, storage_data={})
    found, empty, missing = (_item(n, (), kind=LoadItemType.BYTE_IO) for n in ("o", "e", "m"))
    metadata.storage_data[found.storage_index] = _StorageInfo("a", 15, 2)
    metadata.storage_data[empty.storage_index] = _StorageInfo("a", 160, 0)
    runs = needed_blocks([found, empty, missing], metadata, Blocks(FILES))
    assert runs.tolist() == [[0, 2]]


def test_places_outside_a_file_make_no_blocks_of_another():
    metadata = Metadata({"o": BytesStorageMetadata()}, storage_data={})
    item = _item("o", (), kind=LoadItemType.BYTE_IO)
    metadata.storage_data[item.storage_index] = _StorageInfo("a", 380, 1 << 40)
    assert needed_blocks([item], metadata, Blocks(FILES)).tolist() == [[23, 25]]
