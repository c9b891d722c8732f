"""Metadata written from columns are what stock DCP would have pickled from objects, and come back as columns."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import pickletools
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.checkpoints import raises
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.format import metadata_check, trailer
from dcp_datastates.format.chunk_table import Catalog, FileRecord, Placement
from dcp_datastates.format.metadata import MetadataTable, Note, decode, encode
from dcp_datastates.format.metadata_columns import table_of
from dcp_datastates.format.metadata_objects import metadata_of, note_of
from dcp_datastates.format.metadata_pickle import emit
from dcp_datastates.format.refusal import TRANSFORM_DESCRIPTORS
from dcp_datastates.storage.attempt import Attempt

META = StorageMeta(checkpoint_id="a checkpoint", save_id="a save")


# --- a checkpoint in objects and in columns -----------------------------------------------------------


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
        return catalog, Placement(self.paths, *placed, *kept)

    def metadata(self) -> Metadata:
        state: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
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
            for i, chunk in enumerate(entry.chunks):
                places[MetadataIndex(name, chunk.offsets, i)] = self._info(chunk.place)
        for name, entry in self.entries.items():
            if isinstance(entry, Object):
                places[MetadataIndex(name)] = self._info(entry.place)
        return Metadata(state, self.mappings, places, META, "1.0.0")

    def _info(self, place: tuple[int, int, int]) -> _StorageInfo:
        return _StorageInfo(self.paths[place[0]], *place[1:], TRANSFORM_DESCRIPTORS)


def _ints(values: Any) -> Any:
    return np.array(list(values), np.int64)


def _ints3(places: Any) -> list[Any]:
    return list(np.array(list(places), np.int64).reshape(-1, 3).T.copy())


def _identical(found: Any, expected: Metadata) -> None:
    """More than ``==`` sees: the order of dicts, the indices of keys, the types, the attributes."""
    assert found == expected
    assert list(vars(found))[:5] == [field.name for field in dataclasses.fields(Metadata)]
    assert list(found.state_dict_metadata) == list(expected.state_dict_metadata)
    for name, entry in expected.state_dict_metadata.items():
        other = found.state_dict_metadata[name]
        assert vars(other).keys() == vars(entry).keys()
        for chunk in getattr(other, "chunks", ()):
            assert [type(chunk.offsets), type(chunk.sizes)] == [torch.Size] * 2
    keys, others = list(expected.storage_data), list(found.storage_data)
    assert [(k.fqn, k.offset, k.index) for k in keys] == [
        (k.fqn, k.offset, k.index) for k in others
    ]
    assert [type(k.offset) for k in keys] == [type(k.offset) for k in others]
    for info in found.storage_data.values():
        assert info.transform_descriptors == TRANSFORM_DESCRIPTORS


# --- strategies ---------------------------------------------------------------------------------------

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


def _sharded(ranks: int, tensors: int) -> Example:
    def chunk(rank: int) -> Chunk:
        return Chunk((3 * rank, 0), (3, 7), (rank % len(PATHS), 84 * rank, 84))

    tensor = Tensor(0, (3 * ranks, 7), tuple(map(chunk, range(ranks))))
    entries = {f"w{i}": tensor for i in range(tensors)}
    return Example(dict(entries), (TensorProperties(),), PATHS, None)


# --- what comes out -----------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(examples())
@example(Example({}, (), (), None))
@example(Example({}, (), (), {}))
@example(_sharded(1000, 2))  # as many chunks as a batch takes
@example(_sharded(1001, 3))  # and one more; several frames
@example(_sharded(1, 1001))
def test_emitted_is_what_objects_would_be(case: Example) -> None:
    data = emit(*case.columns(), META, "1.0.0")
    found = pickle.loads(data)
    _identical(found, case.metadata())
    assert list(vars(found)) == [field.name for field in dataclasses.fields(Metadata)]
    _identical(pickle._loads(data), case.metadata())  # frames and all, in Python's own words


def test_many_different_sizes() -> None:
    """More than the writer remembers; the memo outgrows two bytes."""
    chunks = [Chunk((i * i, i), (2 * i + 1, 1), (0, i, 1)) for i in range(70_000)]
    tensor = Tensor(0, (70_000 * 70_000, 70_000), tuple(chunks))
    case = Example({"w": tensor, "again": tensor}, (TensorProperties(),), ("f",), None)
    _identical(pickle.loads(emit(*case.columns(), META, "1.0.0")), case.metadata())


def test_equal_sizes_are_one_object() -> None:
    found = pickle.loads(emit(*_sharded(4, 2).columns(), META, "1.0.0"))
    first, second = found.state_dict_metadata.values()
    assert first.chunks[1].sizes is second.chunks[3].sizes
    assert first.chunks[1].offsets is second.chunks[1].offsets
    assert first.chunks[1].offsets is list(found.storage_data)[1].offset


def test_frames_hold_all_and_end_between_items() -> None:
    data = emit(*_sharded(1001, 3).columns(), META, "1.0.0")
    opcodes = [(op.name, arg, at) for op, arg, at in pickletools.genops(data)]
    frames = [(at + 9, at + 9 + length) for name, length, at in opcodes if name == "FRAME"]
    assert frames[0][0] == 2 + 9
    assert [end for _, end in frames] == [*(begin - 9 for begin, _ in frames[1:]), len(data)]
    assert all(1 << 16 <= end - begin < (1 << 16) + 200 for begin, end in frames[1:-1])


def test_the_file_is_smaller_than_stock() -> None:
    case = _sharded(1000, 10)
    assert len(emit(*case.columns(), META, "1.0.0")) < len(pickle.dumps(case.metadata()))


# --- as a file ----------------------------------------------------------------------------------------


def _note(case: Example, nbytes: dict[str, int]) -> Note:
    records = {}
    for path in case.paths:
        table_offset = -(-nbytes.get(path, 0) // 4) * 4 + 4
        words = -(-table_offset // (1 << 20)) + 1
        records[path] = FileRecord(path, table_offset + 4 * words, table_offset)
    return Note(Attempt(7, 1), records)


def _packed(case: Example) -> tuple[Example, Note]:
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


def _storable(case: Example) -> bool:
    return all(
        isinstance(entry, Object) or (entry.chunks and prod(entry.shape) < 1 << 40)
        for entry in case.entries.values()
    )


@settings(max_examples=150, deadline=None)
@given(examples().filter(_storable))
@example(_sharded(1001, 2))
def test_file_is_accepted_as_one_made_of_objects(case: Example) -> None:
    packed, note = _packed(case)
    table = MetadataTable(*packed.columns(), note, META, "1.0.0")
    found = decode(encode(table), Path("c"))
    same = decode(encode(table_of(packed.metadata(), note)), Path("c"))
    for each in (found, same):
        assert (each.note, each.storage_meta, each.version) == (note, META, "1.0.0")
        assert each.catalog.names == table.catalog.names
        assert each.placement.paths == table.placement.paths
        assert each.catalog.mappings == packed.mappings
        for name in trailer.CATALOG[1:]:
            assert np.array_equal(getattr(each.catalog, name), getattr(table.catalog, name))
        for name in trailer.PLACEMENT:
            assert np.array_equal(getattr(each.placement, name), getattr(table.placement, name))
        _identical(metadata_of(each), packed.metadata())
        assert note_of(metadata_of(each)) == note


@settings(max_examples=100, deadline=None)
@given(examples().filter(_storable), st.randoms())
def test_entries_that_are_made_when_they_are_looked_up_are_a_dict_to_all_who_look(
    case: Example, chance: Any
) -> None:
    packed, note = _packed(case)
    table = MetadataTable(*packed.columns(), note, META, "1.0.0")
    expected = packed.metadata()
    for look in (
        metadata_of,
        lambda table: pickle.loads(pickle.dumps(metadata_of(table))),
        lambda table: copy.deepcopy(metadata_of(table)),
        lambda table: dataclasses.replace(metadata_of(table)),
    ):
        found = look(table)
        for mine, theirs in (
            (found.state_dict_metadata, expected.state_dict_metadata),
            (found.storage_data, expected.storage_data),
        ):
            keys = list(theirs)
            chance.shuffle(keys)
            assert [mine[key] for key in keys] == [theirs[key] for key in keys]
            assert all(key in mine for key in keys)
            assert len(mine) == len(theirs)
            assert list(mine) == list(theirs)
            assert mine.get("not there") is None
    for index, info in expected.storage_data.items():
        for hint in (None, 0, 10**9, -1):
            assert found.storage_data[MetadataIndex(index.fqn, index.offset, hint)] == info
        wrong = None if index.offset is not None else torch.Size([0])
        assert MetadataIndex(index.fqn, wrong) not in metadata_of(table).storage_data


def test_entries_can_be_changed() -> None:
    packed, note = _packed(_sharded(3, 2))
    found = metadata_of(MetadataTable(*packed.columns(), note, META, "1.0.0"))
    kept = found.state_dict_metadata["w1"]
    found.state_dict_metadata["more"] = kept
    assert found.state_dict_metadata.pop("w0").chunks
    assert list(found.state_dict_metadata) == ["w1", "more"]
    assert found.state_dict_metadata["w1"] is kept
    del found.storage_data[MetadataIndex("w0", (3, 0))]
    assert len(found.storage_data) == 5


def _refusal(make: Any, *arguments: Any) -> str | None:
    """What the file is refused with before it is committed, which says all that reading it would."""
    try:
        data = encode(make(*arguments))
    except ConfigurationError as error:
        return str(error)
    decode(data, Path("c"))
    return None


def _one(shape: tuple[int, ...], path: tuple[Any, ...] = ("w",)) -> Example:
    """A tensor of which a rank that saves alone has nothing."""
    entries: dict[str, Tensor | Object] = {"w": Tensor(0, shape, ()), "n": Object((0, 0, 9))}
    return Example(entries, (TensorProperties(),), ("f",), {"w": path, "n": ("n",)})


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (_one((1 << 18,)), None),  # 1 MiB, and the files have 16 bytes: 65,536 times as much
        (_one(((1 << 18) + 1,)), "'w' has 1048580"),
        (_one((1 << 61,)), "larger than any tensor"),
        (_one((1 << 40, 1 << 40)), "larger than any tensor"),
        (_one((1 << 40, 1 << 40, 0)), None),
        (_one((1,), ("w", 1 << 20)), None),
        (_one((1,), ("w", 1 << 25)), "longer than what is in them"),
        (_one((1,), ("w", -1)), "negative index"),
        (_sharded(3, 2), None),
    ],
)
def test_what_could_not_be_read_again_is_not_written(case: Example, words: str | None) -> None:
    packed, note = _packed(case)
    expected = _refusal(table_of, packed.metadata(), note)
    assert expected is None if words is None else words in (expected or "")
    for _ in range(2):
        assert _refusal(MetadataTable, *packed.columns(), note, META) == expected


def test_a_catalog_is_looked_through_once() -> None:
    packed, note = _packed(_sharded(3, 2))
    catalog, placement = packed.columns()
    encode(MetadataTable(catalog, placement, note))
    with mock.patch.object(metadata_check, "_check_catalog", side_effect=AssertionError):
        encode(MetadataTable(catalog, placement, note))
        moved = dataclasses.replace(placement, chunk_offsets=0 * placement.chunk_offsets)
        with raises(ConfigurationError):
            encode(MetadataTable(catalog, moved, note))


def test_stock_reader_loads_the_file(tmp_path: Path) -> None:
    packed, note = _packed(_sharded(1001, 2))
    data = encode(MetadataTable(*packed.columns(), note, META, "1.0.0"))
    (tmp_path / ".metadata").write_bytes(data)
    found = FileSystemReader(tmp_path).read_metadata()
    found.storage_meta.load_id = None
    _identical(found, packed.metadata())


# --- what is refused ----------------------------------------------------------------------------------

ARRAYS = [
    *((0, name) for name in ("properties", "ndims", "shapes", "counts", "offsets", "sizes")),
    *((1, name) for name in ("chunk_files", "chunk_offsets", "chunk_lengths")),
    *((1, name) for name in ("object_files", "object_offsets", "object_lengths")),
]

SMALL = Example(
    {
        "w": Tensor(
            0, (4, 3), (Chunk((0, 0), (1, 3), (0, 0, 9)), Chunk((1, 0), (3, 3), (1, 0, 9)))
        ),
        "o": Object((0, 9, 9)),
        "scalar": Tensor(1, (), (Chunk((), (), (1, 9, 4)),)),
    },
    (TensorProperties(), TensorProperties(torch.int8)),
    ("a", "b"),
    None,
)


def _with(which: int, name: str, value: Any) -> tuple[Catalog, Placement]:
    columns: list[Any] = list(SMALL.columns())
    columns[which] = dataclasses.replace(columns[which], **{name: value})
    return tuple(columns)


def _emit(columns: tuple[Catalog, Placement]) -> bytes:
    return emit(*columns, META, "1.0.0")


@pytest.mark.parametrize(("which", "name"), ARRAYS)
def test_wrong_lengths_and_types_are_refused(which: int, name: str) -> None:
    array = getattr(SMALL.columns()[which], name)
    for wrong in (array[:-1], np.append(array, 0), np.append(array, array)):
        with raises(ValueError, "values"):
            _emit(_with(which, name, wrong))
    strided = np.stack([array, array], axis=1)
    unaligned = np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:].view(np.int64)
    for wrong in (
        array.astype(np.int32),
        array.astype(np.float64),
        array.astype(np.uint64),
        array.astype(">i8"),
        strided,
        strided[:, 0] if len(array) > 1 else strided,
        unaligned,
        array.tolist(),
        None,
    ):
        with raises(ValueError, name, "is no C-contiguous one-dimensional array of int64"):
            _emit(_with(which, name, wrong))


@pytest.mark.parametrize(("which", "name"), ARRAYS)
@pytest.mark.parametrize("wrong", [-1, -2, -(1 << 63), (1 << 63) - 1])
def test_impossible_values_are_refused(which: int, name: str, wrong: int) -> None:
    array = getattr(SMALL.columns()[which], name)
    for i in range(len(array)):
        changed = array.copy()
        changed[i] = wrong
        if np.array_equal(changed, array) or (name == "shapes" and wrong > 0):
            continue
        with pytest.raises(ValueError, match=r"\[|values"):
            _emit(_with(which, name, changed))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("names", ("w", "o"), ["properties has 3 values where 2 are needed"]),
        ("table", (TensorProperties(),), ["properties[2]=1 is not below 1"]),
        ("offsets", np.array([0, 0, 2, 0]), ["offsets[2]=2", "outside"]),
        ("ndims", np.array([65, 0, 0]), ["ndims[0]=65"]),
    ],
)
def test_malformed_catalogs_are_refused(name: str, value: Any, words: list[str]) -> None:
    with raises(ValueError, *words):
        _emit(_with(0, name, value))


def test_paths_that_are_not_there_are_refused() -> None:
    with raises(ValueError, "chunk_files[1]=1 is not below 1"):
        _emit(_with(1, "paths", ("a",)))


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_whatever_the_columns_hold_it_is_refused_or_loads(data: Any) -> None:
    columns: list[Any] = list(SMALL.columns())
    for which, name in data.draw(st.lists(st.sampled_from(ARRAYS), min_size=1, max_size=4)):
        array = getattr(columns[which], name).tolist()
        edits = st.tuples(st.integers(0, len(array)), st.integers(-2, 5) | NUMBERS)
        for at, value in data.draw(st.lists(edits, max_size=3)):
            array[at : at + data.draw(st.integers(0, 2))] = [value]
        changed = np.array(array, np.int64)
        columns[which] = dataclasses.replace(columns[which], **{name: changed})
    try:
        pickled = _emit(tuple(columns))
    except ValueError:
        return
    catalog = columns[0]
    found = pickle.loads(pickled)
    starts = [0, *accumulate(catalog.counts.tolist())]
    chunks = [len(getattr(e, "chunks", ())) for e in found.state_dict_metadata.values()]
    assert [0, *accumulate(chunks)] == starts
