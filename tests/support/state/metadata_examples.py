"""Checkpoints made up: the same in objects, as stock DCP has them, and in columns, as this package does."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_datastates.format.metadata_table import Catalog, FileRecord, Note, Placement
from dcp_datastates.storage.attempt import Attempt

ATTEMPT = Attempt(7, 1)


@dataclasses.dataclass(frozen=True)
class Chunk:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: tuple[int, int, int]  # which file, offset, length


@dataclasses.dataclass(frozen=True)
class Tensor:
    properties: int
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclasses.dataclass(frozen=True)
class Object:
    place: tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Example:
    entries: dict[str, Tensor | Object]
    table: tuple[TensorProperties, ...]
    paths: tuple[str, ...]
    mappings: dict[str, tuple[Any, ...]] | None

    def columns(self) -> tuple[Catalog, Placement]:
        entries = self.entries.values()
        tensors = [entry for entry in entries if isinstance(entry, Tensor)]
        chunks = [chunk for tensor in tensors for chunk in tensor.chunks]
        objects = [entry for entry in entries if isinstance(entry, Object)]
        placed, kept = _ints3(chunk.place for chunk in chunks), _ints3(o.place for o in objects)
        catalog = Catalog(
            names=tuple(self.entries),
            table=self.table,
            properties=_ints(e.properties if isinstance(e, Tensor) else -1 for e in entries),
            ndims=_ints(len(e.shape) if isinstance(e, Tensor) else 0 for e in entries),
            shapes=_ints(n for tensor in tensors for n in tensor.shape),
            counts=_ints(len(e.chunks) if isinstance(e, Tensor) else 0 for e in entries),
            offsets=_ints(n for chunk in chunks for n in chunk.offsets),
            sizes=_ints(n for chunk in chunks for n in chunk.sizes),
            mappings=self.mappings,
        )
        return catalog, Placement(self.paths, *map(np.concatenate, zip(placed, kept, strict=True)))

    def metadata(self) -> Metadata:
        state: dict[str, Any] = {}
        for name, entry in self.entries.items():
            if isinstance(entry, Object):
                state[name] = BytesStorageMetadata()
                continue
            chunks = [
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                for chunk in entry.chunks
            ]
            state[name] = TensorStorageMetadata(
                self.table[entry.properties], torch.Size(entry.shape), chunks
            )
        save = StorageMeta(save_id=ATTEMPT.name)
        return Metadata(state, self.mappings, storage_meta=save, version="1.0.0")

    def places(self) -> dict[MetadataIndex, tuple[int, int, int]]:
        places: dict[MetadataIndex, tuple[int, int, int]] = {}
        for name, entry in self.entries.items():
            if isinstance(entry, Object):
                places[MetadataIndex(name)] = entry.place
                continue
            for chunk in entry.chunks:
                places[MetadataIndex(name, torch.Size(chunk.offsets))] = chunk.place
        return places


def _ints(values: Any) -> Any:
    return np.array(list(values), np.int64)


def _ints3(places: Any) -> list[Any]:
    return list(np.array(list(places), np.int64).reshape(-1, 3).T.copy())


def assert_identical(found: Any, expected: Metadata) -> None:
    """More than ``==`` sees: the order of dicts, the types, the attributes."""
    assert found == expected
    assert list(vars(found))[:5] == [field.name for field in dataclasses.fields(Metadata)]
    assert list(found.state_dict_metadata) == list(expected.state_dict_metadata)
    for name, entry in expected.state_dict_metadata.items():
        other = found.state_dict_metadata[name]
        assert vars(other).keys() == vars(entry).keys()
        for chunk in getattr(other, "chunks", ()):
            assert [type(chunk.offsets), type(chunk.sizes)] == [torch.Size] * 2


PROPERTIES = st.builds(
    TensorProperties,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    layout=st.sampled_from([torch.strided, torch.sparse_coo]),
    requires_grad=st.booleans(),
    memory_format=st.sampled_from(
        [torch.contiguous_format, torch.channels_last, torch.preserve_format]
    ),
    pin_memory=st.booleans(),
)

# Words of the pickle itself among them: they are memoized before.
NAMES = st.text(max_size=20) | st.sampled_from(["size", "offset", "state_dict_metadata", "ü" * 300])

NUMBERS = st.integers(0, 300) | st.sampled_from([0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 1 << 40])
SIZES = st.integers(0, 5) | NUMBERS
PATHS = ("__0_0.distcp", "attempt/ü.distcp", *(f"{i}.distcp" for i in range(300)))


@st.composite
def places(draw: Any, length: int | None = None) -> tuple[int, int, int]:
    file = draw(st.integers(0, len(PATHS) - 1))
    return file, draw(NUMBERS), draw(NUMBERS) if length is None else length


@st.composite
def tensors(draw: Any, table: int) -> Tensor:
    shape = draw(st.lists(SIZES, max_size=6).map(tuple) | st.just((1,) * 64))
    if not shape:
        chunks = [Chunk((), (), draw(places()))] * draw(st.integers(0, 1))
        return Tensor(draw(st.integers(0, table - 1)), shape, tuple(chunks))
    cuts = sorted(draw(st.sets(st.integers(0, shape[0]), max_size=5)) | {0, shape[0]})
    rows = list(pairwise(cuts)) or [(0, 0)]
    chunks = [
        Chunk((a, *(0 for _ in shape[1:])), (b - a, *shape[1:]), draw(places())) for a, b in rows
    ]
    return Tensor(draw(st.integers(0, table - 1)), shape, tuple(chunks))


@st.composite
def examples(draw: Any) -> Example:
    table = tuple(draw(st.lists(PROPERTIES, min_size=1, max_size=4)))
    entry = tensors(len(table)) | st.builds(Object, places())
    entries = draw(st.dictionaries(NAMES, entry, max_size=8))
    path = st.lists(st.text(max_size=5) | st.integers(0, 3), max_size=3).map(tuple)
    mappings = draw(st.none() | st.fixed_dictionaries(dict.fromkeys(entries, path)))
    return Example(entries, table, PATHS, mappings)


def sharded(ranks: int, tensors: int) -> Example:
    def chunk(rank: int) -> Chunk:
        return Chunk((3 * rank, 0), (3, 7), (rank % len(PATHS), 84 * rank, 84))

    tensor = Tensor(0, (3 * ranks, 7), tuple(map(chunk, range(ranks))))
    entries = {f"w{i}": tensor for i in range(tensors)}
    return Example(dict(entries), (TensorProperties(),), PATHS, None)


def _note(case: Example, nbytes: dict[str, int]) -> Note:
    records = {}
    for path in case.paths:
        table_offset = -(-nbytes.get(path, 0) // 4) * 4 + 4
        words = -(-table_offset // (1 << 20)) + 1
        records[path] = FileRecord(path, table_offset + 4 * words, table_offset)
    return Note(ATTEMPT, records, None, {}, 1e9, None)


def packed_example(case: Example) -> tuple[Example, Note]:
    """The example with places that do not overlap, and are as long as what is in them."""
    ends: dict[str, int] = {}

    def place(at: tuple[int, int, int], length: int) -> tuple[int, int, int]:
        offset = ends.get(case.paths[at[0]], 0)
        ends[case.paths[at[0]]] = offset + length
        return at[0], offset, length

    entries: dict[str, Tensor | Object] = {}
    for name, entry in case.entries.items():
        if isinstance(entry, Object):
            entries[name] = Object(place(entry.place, 10))
            continue
        itemsize = case.table[entry.properties].dtype.itemsize
        chunks = [
            dataclasses.replace(c, place=place(c.place, prod(c.sizes) * itemsize))
            for c in entry.chunks
        ]
        entries[name] = dataclasses.replace(entry, chunks=tuple(chunks))
    packed = dataclasses.replace(case, entries=entries)
    return packed, _note(packed, ends)


def storable(case: Example) -> bool:
    return all(
        isinstance(entry, Object) or (entry.chunks and prod(entry.shape) < 1 << 40)
        for entry in case.entries.values()
    )
