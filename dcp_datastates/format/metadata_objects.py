"""Makes DCP's ``Metadata`` object from a table of columns.

A job of a thousand ranks has a million chunks, which take seconds to make as objects. So the entries of a ``Metadata``
from a file are made when they are looked up. When its mappings are copied, pickled or changed, they become plain dicts.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from dcp_datastates.errors import DataStatesError
from dcp_datastates.format.chunk_table import Catalog, Ints, Placement
from dcp_datastates.format.metadata_table import MISSING, MetadataTable, Note
from dcp_datastates.format.ragged import starts_of
from dcp_datastates.format.refusal import TRANSFORM_DESCRIPTORS
from dcp_datastates.format.stored_names import wrappers
from dcp_datastates.process.garbage import collection_paused

__all__ = ["catalog_metadata", "metadata_of", "note_of"]

_NOTE: Final = "dcp_datastates"
"""The attribute with the :class:`Note` of a ``Metadata`` from a file of this package."""

_Further = Mapping[tuple[str, str], Sequence[Any]]

Key = TypeVar("Key")
Value = TypeVar("Value")


def metadata_of(table: MetadataTable) -> Metadata:
    """The ``Metadata`` for DCP's planners, whose entries are made when they are looked up."""
    columns = _Columns(table.catalog, table.further)
    metadata = Metadata(
        state_dict_metadata=_Entries(columns),  # type: ignore[arg-type]  # it does all that a dict is asked for
        planner_data=table.catalog.mappings,
        storage_data=_Places(columns, table.placement),
        storage_meta=table.storage_meta,
        version=table.version,
    )
    _carry(metadata, table.further, 0)
    vars(metadata)[_NOTE] = table.note
    return metadata


def note_of(metadata: Metadata) -> Note:
    """The note in the result of :func:`metadata_of`; raises :class:`DataStatesError` for any other object."""
    note = vars(metadata).get(_NOTE)
    if not isinstance(note, Note):
        raise DataStatesError(
            "these metadata do not come from DataStatesReader.read_metadata(), which says what belongs to them"
        )
    return note


def catalog_metadata(catalog: Catalog) -> Metadata:
    """The catalog as plain objects, as stock planners make them, for other writers."""
    mappings = None if catalog.mappings is None else dict(catalog.mappings)
    return Metadata(dict(_Entries(_Columns(catalog, {}))), planner_data=mappings)


class _Lazy(MutableMapping[Key, Value], Generic[Key, Value]):
    """A dict whose values are made when they are looked up. A change makes all of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._all: dict[Key, Value] | None = None

    def _made(self, key: Key) -> Value:
        """The value; KeyError if there is none."""
        raise NotImplementedError

    def _keys(self) -> Iterator[Key]:
        raise NotImplementedError

    def _plain(self) -> dict[Key, Value]:
        if self._all is None:
            self._all = {key: self._made(key) for key in self._keys()}
        return self._all

    def __getitem__(self, key: Key) -> Value:
        return self._made(key) if self._all is None else self._all[key]

    def __setitem__(self, key: Key, value: Value) -> None:
        self._plain()[key] = value

    def __delitem__(self, key: Key) -> None:
        del self._plain()[key]

    def __iter__(self) -> Iterator[Key]:
        return self._keys() if self._all is None else iter(self._all)

    def __len__(self) -> int:
        return self._count if self._all is None else len(self._all)

    def __repr__(self) -> str:
        return repr(self._plain())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._plain(),)


class _Columns:
    """A catalog, with the start of each name's part in the columns."""

    def __init__(self, catalog: Catalog, further: _Further) -> None:
        self.catalog = catalog
        self.further = further
        self.number = {name: number for number, name in enumerate(catalog.names)}
        self.shapes = catalog.tensor_shapes()
        self.first_chunk = starts_of(catalog.counts).tolist()
        self._first_value = starts_of(catalog.ndims * catalog.counts).tolist()

    def rows(self, column: Ints, number: int) -> Ints:
        """(chunks, dimensions): the part of ``catalog.offsets`` or ``catalog.sizes`` for a tensor's chunks."""
        count, ndim = int(self.catalog.counts[number]), int(self.catalog.ndims[number])
        begin = self._first_value[number]
        return column[begin : begin + count * ndim].reshape(count, ndim)


class _Entries(_Lazy[str, STORAGE_TYPES]):
    """``Metadata.state_dict_metadata``. Caches entries: DCP looks the same entry up repeatedly.

    A lookup finds a wrapper subclass, too, of which only the parts are stored: DCP plans an object for it, and the
    reader reads its parts instead.
    """

    def __init__(self, columns: _Columns) -> None:
        super().__init__(len(columns.catalog.names))
        self._columns = columns
        self._kept: dict[str, STORAGE_TYPES] = {}

    def _keys(self) -> Iterator[str]:
        return iter(self._columns.catalog.names)

    def _made(self, key: str) -> STORAGE_TYPES:
        entry = self._kept.get(key)
        if entry is None:
            number = self._columns.number.get(key)
            if number is not None:
                entry = self._make(number)
            elif key in self._wrappers:
                entry = BytesStorageMetadata()
            else:
                raise KeyError(key)
            self._kept[key] = entry
        return entry

    @functools.cached_property
    def _wrappers(self) -> Container[str]:
        return wrappers(self._columns.catalog.names)

    def _make(self, number: int) -> STORAGE_TYPES:
        columns, catalog = self._columns, self._columns.catalog
        if catalog.properties[number] < 0:
            return _carry(BytesStorageMetadata(), columns.further, number)
        with collection_paused():
            sizes: dict[tuple[int, ...], torch.Size] = {}  # most chunks have equal sizes
            chunks = [
                ChunkStorageMetadata(
                    torch.Size(begin), sizes.get(size) or sizes.setdefault(size, torch.Size(size))
                )
                for begin, size in zip(
                    _tuples(columns.rows(catalog.offsets, number)),
                    _tuples(columns.rows(catalog.sizes, number)),
                    strict=True,
                )
            ]
        if columns.further:
            for row, chunk in enumerate(chunks, columns.first_chunk[number]):
                _carry(chunk, columns.further, row)
        properties = catalog.table[int(catalog.properties[number])]
        entry = TensorStorageMetadata(properties, torch.Size(columns.shapes[number]), chunks)
        return _carry(entry, columns.further, number)


def _tuples(rows: Ints) -> Iterable[tuple[int, ...]]:
    """The rows as tuples, made lazily."""
    count, ndim = rows.shape
    return zip(*[iter(rows.ravel().tolist())] * ndim, strict=True) if ndim else [()] * count


class _Places(_Lazy[MetadataIndex, _StorageInfo]):
    """``Metadata.storage_data``: first all chunks, then all objects. Each lookup makes a new object."""

    def __init__(self, columns: _Columns, placement: Placement) -> None:
        self._rows = placement.rows()
        super().__init__(len(self._rows[0]))
        self._columns = columns
        self._paths = placement.paths
        objects = np.flatnonzero(columns.catalog.properties < 0).tolist()
        self._chunks = len(placement.chunk_files)
        self._objects = {number: row for row, number in enumerate(objects, self._chunks)}

    def _keys(self) -> Iterator[MetadataIndex]:
        columns, names = self._columns, self._columns.catalog.names
        for number, name in enumerate(names):
            for place, begin in enumerate(columns.rows(columns.catalog.offsets, number).tolist()):
                row = columns.first_chunk[number] + place
                yield _carry(MetadataIndex(name, begin, place), columns.further, row)
        for number, row in self._objects.items():
            yield _carry(MetadataIndex(names[number]), columns.further, row)

    def _made(self, key: MetadataIndex) -> _StorageInfo:
        row = self._row(key)
        file, offset, length = (int(column[row]) for column in self._rows)
        info = _StorageInfo(self._paths[file], offset, length, TRANSFORM_DESCRIPTORS)
        return _carry(info, self._columns.further, row)

    def _row(self, key: MetadataIndex) -> int:
        if not isinstance(key, MetadataIndex):
            raise KeyError(key)
        number = self._columns.number[key.fqn]
        if (key.offset is None) != (number in self._objects):
            raise KeyError(key)
        if key.offset is None:
            return self._objects[number]
        begins = self._columns.rows(self._columns.catalog.offsets, number)
        wanted, hint = list(key.offset), key.index
        if hint is None or not 0 <= hint < len(begins) or begins[hint].tolist() != wanted:
            try:
                hint = begins.tolist().index(wanted)
            except ValueError:
                raise KeyError(key) from None
        return int(self._columns.first_chunk[number] + hint)


_Instance = TypeVar("_Instance")


def _carry(instance: _Instance, further: _Further, row: int) -> _Instance:
    """The instance, with the fields that another torch has added."""
    for (kind, field), column in further.items():
        if kind == type(instance).__name__ and column[row] is not MISSING:
            vars(instance)[field] = column[row]
    return instance
