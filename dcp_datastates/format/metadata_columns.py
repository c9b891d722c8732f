"""Makes the table of columns from a ``Metadata`` object of any planner."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_datastates.format import values
from dcp_datastates.format.chunk_table import Catalog, Ints, Placement
from dcp_datastates.format.fields import unknown_fields
from dcp_datastates.format.metadata import refused
from dcp_datastates.format.metadata_check import MetadataError, described
from dcp_datastates.format.metadata_document import fields_to_json, warn_of_loss
from dcp_datastates.format.metadata_table import CARRIED, Further, MetadataTable, Note

__all__ = ["table_of"]


@dataclass
class _Lists:
    """The columns of a table under construction."""

    names: list[str]
    entries: list[STORAGE_TYPES]
    properties: list[int]
    ndims: list[int]
    shapes: list[int]
    counts: list[int]
    offsets: list[int]
    sizes: list[int]
    chunks: list[ChunkStorageMetadata]
    chunk_places: list[tuple[MetadataIndex, _StorageInfo]]
    object_places: list[tuple[MetadataIndex, _StorageInfo]]


def table_of(metadata: Metadata, note: Note) -> MetadataTable:
    """The columns of any planner's ``metadata``.

    Raises :class:`ConfigurationError` for objects that DCP's readers could not use.
    """
    try:
        return _table_of(metadata, note)
    except (MetadataError, values.ValueRefused, TypeError, ValueError, OverflowError) as error:
        raise refused(error) from error


def _table_of(metadata: Metadata, note: Note) -> MetadataTable:
    lists = _Lists([], [], [], [], [], [], [], [], [], [], [])
    properties = _PropertyTable()
    places = {index: (index, info) for index, info in metadata.storage_data.items()}
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str:
            raise MetadataError(f"a name in state_dict_metadata is {described(name)}")
        lists.names.append(name)
        lists.entries.append(entry)
        if isinstance(entry, TensorStorageMetadata):
            lists.properties.append(properties.place(entry.properties))
            _add_tensor(lists, name, entry, places)
        elif isinstance(entry, BytesStorageMetadata):
            lists.properties.append(-1)
            lists.ndims.append(0)
            lists.counts.append(0)
            lists.object_places.append(_place(places, MetadataIndex(name)))
        else:
            raise MetadataError(
                f"{described(name)} is {described(entry)}, neither tensor nor object"
            )
    catalog = Catalog(
        names=tuple(lists.names),
        table=tuple(properties.table),
        mappings=metadata.planner_data,
        **{
            name: np.array(getattr(lists, name), np.int64)
            for name in ("properties", "ndims", "shapes", "counts", "offsets", "sizes")
        },
    )
    paths = {path: number for number, path in enumerate(note.files)}
    placement = Placement(
        tuple(paths), *_located(lists.chunk_places, paths), *_located(lists.object_places, paths)
    )
    return MetadataTable(
        catalog,
        placement,
        note,
        metadata.storage_meta,
        metadata.version,
        tuple(_further(metadata, lists)),
    )


_Known = dict[MetadataIndex, tuple[MetadataIndex, _StorageInfo]]


def _add_tensor(lists: _Lists, name: str, entry: TensorStorageMetadata, places: _Known) -> None:
    ndim = len(entry.size)
    lists.ndims.append(ndim)
    lists.counts.append(len(entry.chunks))
    lists.shapes += torch.Size(entry.size)
    for chunk in entry.chunks:
        if len(chunk.offsets) != ndim or len(chunk.sizes) != ndim:
            raise MetadataError(
                f"a chunk of {name!r} has another number of dimensions than its tensor"
            )
        lists.offsets += torch.Size(chunk.offsets)
        lists.sizes += torch.Size(chunk.sizes)
        lists.chunk_places.append(_place(places, MetadataIndex(name, chunk.offsets)))
    lists.chunks += entry.chunks


def _place(places: _Known, index: MetadataIndex) -> tuple[MetadataIndex, _StorageInfo]:
    found = places.get(index)
    if found is None:
        raise MetadataError(
            f"{index.fqn!r} at {index.offset} is in the metadata, but no rank has written it"
        )
    if not isinstance(found[1], _StorageInfo):
        raise MetadataError(f"the place of {index.fqn!r} is {described(found[1])}")
    return found


def _located(
    places: Sequence[tuple[MetadataIndex, _StorageInfo]], paths: dict[str, int]
) -> tuple[Ints, Ints, Ints]:
    """Files, offsets and lengths."""
    for _, info in places:
        if info.relative_path not in paths:
            raise MetadataError(f"data file {described(info.relative_path)} is not described")
    rows = [(paths[info.relative_path], info.offset, info.length) for _, info in places]
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    files, offsets, lengths = (np.ascontiguousarray(column) for column in columns)
    return files, offsets, lengths


class _PropertyTable:
    """Distinct properties of tensors; stock planners make an object per tensor."""

    def __init__(self) -> None:
        self.table: list[TensorProperties] = []
        self._places: dict[str, int] = {}

    def place(self, properties: object) -> int:
        if not isinstance(properties, TensorProperties):
            raise MetadataError(f"the properties of a tensor are {described(properties)}")
        place = self._places.setdefault(json.dumps(fields_to_json(properties)), len(self.table))
        if place == len(self.table):
            self.table.append(properties)
        return place


def _further(metadata: Metadata, lists: _Lists) -> Iterator[Further]:
    """The fields of this torch that the columns cannot represent."""
    places = [*lists.chunk_places, *lists.object_places]
    instances: dict[str, Callable[[], list[Any]]] = {
        "Metadata": lambda: [metadata],
        "TensorStorageMetadata": lambda: lists.entries,
        "BytesStorageMetadata": lambda: lists.entries,
        "ChunkStorageMetadata": lambda: lists.chunks,
        "MetadataIndex": lambda: [index for index, _ in places],
        "_StorageInfo": lambda: [info for _, info in places],
    }
    for kind in CARRIED.values():
        for field in unknown_fields(kind):
            yield _column(kind, field, instances[kind.__name__]())


def _column(kind: type, field: str, instances: list[Any]) -> Further:
    found: dict[str, int] = {}
    different: list[Any] = []
    rows = np.full(len(instances), -1, np.int64)
    for row, instance in enumerate(instances):
        if not isinstance(instance, kind) or not hasattr(instance, field):
            continue
        value = getattr(instance, field)
        try:
            packed = json.dumps(values.to_json(value))
        except values.ValueRefused as error:
            warn_of_loss(kind.__name__, field, str(error))
            continue
        rows[row] = found.setdefault(packed, len(different))
        if rows[row] == len(different):
            different.append(value)
    return Further(kind.__name__, field, tuple(different), rows)
