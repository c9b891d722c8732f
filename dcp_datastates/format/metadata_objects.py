"""Makes DCP's ``Metadata`` object from a table of columns, and a table from the ``Metadata`` of any planner.

A job of a thousand ranks has a million chunks, which take seconds to make as objects. So the entries of a ``Metadata``
from a file are made when they are looked up. When its mappings are copied, pickled or changed, they become plain dicts.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping
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
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_datastates.errors import DataStatesError
from dcp_datastates.format.key_paths import as_dcp_has_them
from dcp_datastates.format.metadata import DCP_VERSION, TRANSFORM_DESCRIPTORS, refusing
from dcp_datastates.format.metadata_table import CATALOG, Catalog, MetadataTable, Note, Placement
from dcp_datastates.format.stored_names import wrappers
from dcp_datastates.format.values import ValueRefused, described, properties_to_json
from dcp_datastates.process.garbage import collection_paused

_TABLE: Final = "dcp_datastates"
"""The attribute with the :class:`MetadataTable` of a ``Metadata`` from a file of this package."""

_MANY: Final = 200
"""Chunks of one tensor: to make so many at once may have a garbage collection fall due."""

Key = TypeVar("Key")
Value = TypeVar("Value")


def metadata_of(table: MetadataTable) -> Metadata:
    """The ``Metadata`` for DCP's planners, whose entries are made when they are looked up."""
    metadata = Metadata(
        state_dict_metadata=_entries(table.catalog),  # type: ignore[arg-type]  # it does all that a dict is asked for
        planner_data=as_dcp_has_them(table.catalog.mappings),
        storage_data=_places(table.catalog, table.placement),
        storage_meta=StorageMeta(save_id=table.note.attempt.name),
        version=DCP_VERSION,
    )
    vars(metadata)[_TABLE] = table
    return metadata


def opened_from(metadata: Metadata) -> MetadataTable:
    """What :func:`metadata_of` was called with; raises :class:`DataStatesError` for any other object."""
    table = vars(metadata).get(_TABLE)
    if not isinstance(table, MetadataTable):
        raise DataStatesError(
            "these metadata do not come from DataStatesReader.read_metadata(), which says what belongs to them"
        )
    return table


def catalog_metadata(catalog: Catalog) -> Metadata:
    """The catalog as plain objects, as stock planners make them, for other writers."""
    mappings = None if catalog.mappings is None else dict(catalog.mappings)
    return Metadata(dict(_entries(catalog)), planner_data=mappings)


class _Lazy(MutableMapping[Key, Value], Generic[Key, Value]):
    """A dict whose values are made when they are looked up. A change makes all of them.

    Args:
        count: how many there are.
        keys: gives the keys, in order.
        make: gives the value of a key; KeyError if there is none.
    """

    def __init__(
        self, count: int, keys: Callable[[], Iterator[Key]], make: Callable[[Key], Value]
    ) -> None:
        self._count, self._keys, self._make = count, keys, make
        self._all: dict[Key, Value] | None = None

    def _plain(self) -> dict[Key, Value]:
        if self._all is None:
            self._all = {key: self._make(key) for key in self._keys()}
        return self._all

    def __getitem__(self, key: Key) -> Value:
        return self._make(key) if self._all is None else self._all[key]

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


def _entries(catalog: Catalog) -> _Lazy[str, STORAGE_TYPES]:
    """``Metadata.state_dict_metadata``.

    A lookup finds a wrapper subclass, too, of which only the parts are stored: DCP plans an object for it, and the
    reader reads its parts instead.
    """
    split = functools.cache(lambda: wrappers(catalog.names))

    @functools.cache  # DCP looks the same entry up repeatedly
    def make(name: str) -> STORAGE_TYPES:
        number = catalog.number.get(name)
        if number is None and name not in split():
            raise KeyError(name)
        if number is None or catalog.properties[number] < 0:
            return BytesStorageMetadata()
        offsets, sizes = (
            map(torch.Size, catalog.of_chunks(column, number).tolist())
            for column in (catalog.offsets, catalog.sizes)
        )
        with collection_paused() if catalog.counts[number] > _MANY else contextlib.nullcontext():
            chunks = list(map(ChunkStorageMetadata, offsets, sizes))
        properties = catalog.table[int(catalog.properties[number])]
        return TensorStorageMetadata(properties, catalog.shape(number), chunks)

    return _Lazy(len(catalog.names), lambda: iter(catalog.names), make)


def _places(catalog: Catalog, placement: Placement) -> _Lazy[MetadataIndex, _StorageInfo]:
    """``Metadata.storage_data``: first all chunks, then all objects. Each lookup makes a new object."""

    def keys() -> Iterator[MetadataIndex]:
        for number, name in enumerate(catalog.names):
            for place, begin in enumerate(catalog.of_chunks(catalog.offsets, number).tolist()):
                yield MetadataIndex(name, begin, place)
        for number in catalog.object_rows:
            yield MetadataIndex(catalog.names[number])

    def make(key: MetadataIndex) -> _StorageInfo:
        row = catalog.row(key)
        path = placement.paths[placement.files.item(row)]
        begin, length = placement.begins.item(row), placement.lengths.item(row)
        return _StorageInfo(path, begin, length, TRANSFORM_DESCRIPTORS)

    return _Lazy(len(placement.files), keys, make)


# ---- columns of objects --------------------------------------------------------------------------


@refusing()
def table_of(metadata: Metadata, note: Note) -> MetadataTable:
    """The columns of any planner's ``metadata``.

    Raises :class:`ConfigurationError` for objects that DCP's readers could not use.
    """
    catalog = catalog_of(metadata)
    entries = metadata.state_dict_metadata.items()
    indices = [
        MetadataIndex(name, chunk.offsets)
        for name, entry in entries
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    ]
    indices += [
        MetadataIndex(name) for name, entry in entries if isinstance(entry, BytesStorageMetadata)
    ]
    paths = {path: number for number, path in enumerate(note.files)}
    rows = [_row(index, metadata.storage_data.get(index), paths) for index in indices]
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    placement = Placement(tuple(paths), *map(np.ascontiguousarray, columns))
    return MetadataTable(catalog, placement, note)


def catalog_of(metadata: Metadata) -> Catalog:
    """The names, tensors and chunks of any planner's ``metadata``, in columns.

    Raises :class:`ValueRefused`, TypeError, ValueError or OverflowError for objects that DCP's readers could not use.
    """
    names: list[str] = []
    numbers: dict[str, int] = {}  # of different properties: stock makes an object for each tensor
    table: list[TensorProperties] = []
    columns: dict[str, list[int]] = {name: [] for name in CATALOG}
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str:
            raise ValueRefused(f"a name in state_dict_metadata is {described(name)}")
        names.append(name)
        properties, size, chunks = -1, torch.Size(()), list[ChunkStorageMetadata]()
        if isinstance(entry, TensorStorageMetadata):
            if not isinstance(entry.properties, TensorProperties):
                raise ValueRefused(f"the properties of a tensor are {described(entry.properties)}")
            content = json.dumps(properties_to_json(entry.properties))
            properties = numbers.setdefault(content, len(table))
            if properties == len(table):
                table.append(entry.properties)
            size, chunks = torch.Size(entry.size), entry.chunks
        elif not isinstance(entry, BytesStorageMetadata):
            raise ValueRefused(
                f"{described(name)} is {described(entry)}, neither tensor nor object"
            )
        columns["properties"].append(properties)
        columns["ndims"].append(len(size))
        columns["shapes"] += size
        columns["counts"].append(len(chunks))
        for chunk in chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == len(size):
                raise ValueRefused(
                    f"a chunk of {name!r} has another number of dimensions than its tensor"
                )
            columns["offsets"] += torch.Size(chunk.offsets)
            columns["sizes"] += torch.Size(chunk.sizes)
    return Catalog(
        names=tuple(names),
        table=tuple(table),
        mappings=metadata.planner_data,
        **{name: np.array(column, np.int64) for name, column in columns.items()},
    )


def _row(index: MetadataIndex, info: Any, paths: Mapping[str, int]) -> tuple[int, int, int]:
    """A row of :class:`Placement`."""
    if info is None:
        raise ValueRefused(
            f"{index.fqn!r} at {index.offset} is in the metadata, but no rank has written it"
        )
    if not isinstance(info, _StorageInfo):
        raise ValueRefused(f"the place of {index.fqn!r} is {described(info)}")
    if info.relative_path not in paths:
        raise ValueRefused(f"data file {described(info.relative_path)} is not described")
    return paths[info.relative_path], info.offset, info.length
