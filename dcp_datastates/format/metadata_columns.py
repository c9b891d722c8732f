"""Makes the table of columns from a ``Metadata`` object of any planner."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_datastates.format.fields import fields_to_json
from dcp_datastates.format.key_paths import with_types
from dcp_datastates.format.metadata import refused
from dcp_datastates.format.metadata_table import CATALOG, Catalog, MetadataTable, Note, Placement
from dcp_datastates.format.values import ValueRefused, described


def table_of(metadata: Metadata, note: Note) -> MetadataTable:
    """The columns of any planner's ``metadata``.

    Raises :class:`ConfigurationError` for objects that DCP's readers could not use.
    """
    try:
        return _table_of(metadata, note)
    except (TypeError, ValueError, OverflowError) as error:
        raise refused(error) from error


def _table_of(metadata: Metadata, note: Note) -> MetadataTable:
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
    return MetadataTable(catalog, placement, note, metadata.storage_meta)


def catalog_of(metadata: Metadata) -> Catalog:
    """The names, tensors and chunks of any planner's ``metadata``, in columns.

    Raises :class:`ValueRefused`, TypeError, ValueError or OverflowError for objects that DCP's readers could not use.
    """
    names: list[str] = []
    numbers: dict[
        str, int
    ] = {}  # of different properties: stock planners make an object per tensor
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
            content = json.dumps(fields_to_json(entry.properties))
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
        mappings=with_types(metadata.planner_data),
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
