"""Makes DCP's ``Metadata`` object from a table of columns, and a table from the ``Metadata`` of any planner.

A job of a thousand ranks has a million chunks, which take seconds to make as objects. So the entries of a ``Metadata``
from a file are made when they are looked up. When its mapping is copied, pickled or changed, it becomes a plain dict.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any, Final

import numpy as np
import torch
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

from dcp_datastates.format.key_paths import as_dcp_has_them
from dcp_datastates.format.metadata import DCP_VERSION, refusing
from dcp_datastates.format.metadata_table import CATALOG, Catalog, MetadataTable, Note, Placement
from dcp_datastates.format.stored_names import wrappers
from dcp_datastates.format.values import ValueRefused, described, properties_to_json
from dcp_datastates.process.garbage import collection_paused

_MANY: Final = 200
"""Chunks of one tensor: to make so many at once may have a garbage collection fall due."""


def metadata_of(table: MetadataTable) -> Metadata:
    """The ``Metadata`` for DCP's planners, whose entries are made when they are looked up. They do not say where bytes
    are stored: the reader keeps the ``table``.
    """
    return Metadata(
        state_dict_metadata=Entries(table.catalog),  # type: ignore[arg-type]  # it does all that a dict is asked for
        planner_data=as_dcp_has_them(table.catalog.mappings),
        storage_meta=StorageMeta(save_id=table.note.attempt.name),
        version=DCP_VERSION,
    )


class Entries(MutableMapping[str, STORAGE_TYPES]):
    """``Metadata.state_dict_metadata``: a dict whose values are made when they are looked up. A change makes all.

    A lookup finds a wrapper subclass, too, of which only the parts are stored: DCP plans an object for it, and the
    reader reads its parts instead.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._made: dict[str, STORAGE_TYPES] = {}  # DCP looks the same entry up repeatedly
        self._all: dict[str, STORAGE_TYPES] | None = None

    def __getitem__(self, name: str) -> STORAGE_TYPES:
        if self._all is not None:
            return self._all[name]
        if name not in self._made:
            self._made[name] = self._entry(name)
        return self._made[name]

    def _entry(self, name: str) -> STORAGE_TYPES:
        catalog = self._catalog
        number = catalog.number.get(name)
        if number is None and name not in self._wrappers:
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

    @functools.cached_property
    def _wrappers(self) -> Collection[str]:
        return wrappers(self._catalog.names)

    def _plain(self) -> dict[str, STORAGE_TYPES]:
        if self._all is None:
            self._all = {name: self[name] for name in self._catalog.names}
        return self._all

    def __setitem__(self, name: str, entry: STORAGE_TYPES) -> None:
        self._plain()[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._plain()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._catalog.names if self._all is None else self._all)

    def __len__(self) -> int:
        return len(self._catalog.names if self._all is None else self._all)

    def __repr__(self) -> str:
        return repr(self._plain())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._plain(),)


# ---- columns of objects --------------------------------------------------------------------------


Place = tuple[int, int, int]
"""The number of a data file; the offset and the length of a chunk or an object in it, in bytes."""


@refusing()
def table_of(
    metadata: Metadata, places: Mapping[MetadataIndex, Place], note: Note
) -> MetadataTable:
    """The columns of any planner's ``metadata``, whose chunks and objects lie at ``places``. Data files have the order
    of the ``note``.

    Raises :class:`ConfigurationError` for objects that DCP's readers could not use.
    """
    catalog = catalog_of(metadata)
    chunks: list[MetadataIndex] = []
    objects: list[MetadataIndex] = []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks += [MetadataIndex(name, chunk.offsets) for chunk in entry.chunks]
        else:
            objects.append(MetadataIndex(name))
    for index in (*chunks, *objects):
        if index not in places:
            raise ValueRefused(
                f"{index.fqn!r} at {index.offset} is in the metadata, but no rank has written it"
            )
    rows = [places[index] for index in (*chunks, *objects)]
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    placement = Placement(tuple(note.files), *map(np.ascontiguousarray, columns))
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
