"""The ``.metadata`` file: a pickle for DCP's own tools, and a table with the same contents for this package.

The pickle is a ``Metadata`` with names, shapes and dtypes. A table of columns follows it
(:mod:`dcp_datastates.format.trailer`). This package reads only the table: it never unpickles metadata, and the table
names no class or function to call.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
from pathlib import Path
from typing import Any, Final

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

from dcp_datastates.errors import (
    CheckpointCorruptError,
    ConfigurationError,
    UnreadableMetadataError,
)
from dcp_datastates.format import trailer, values
from dcp_datastates.format.metadata_check import check
from dcp_datastates.format.metadata_document import read_document, write_document
from dcp_datastates.format.metadata_table import Catalog, MetadataTable, once
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.storage.local import METADATA_NAME, open_regular
from dcp_datastates.storage.object_path import Location

DCP_VERSION: Final = "1.0.0"
"""The value that stock DCP of torch 2.11 to 2.13 writes as ``Metadata.version``."""

TRANSFORM_DESCRIPTORS: Final = (
    (
        "this is a checkpoint of dcp_datastates: load it with dcp_datastates.load(path), or with "
        "storage_reader=dcp_datastates.DataStatesReader(path); `dcp-datastates convert PATH OUT --to dcp` makes one of "
        "stock DCP"
    ),
)
"""The sentence by which a stock reader refuses a checkpoint of this package. ``FileSystemReader`` expects files of
``torch.save``, and would advise to switch ``weights_only`` off. But first it looks up the extensions that the metadata
name for each piece of data (``_StorageInfo.transform_descriptors``), and raises ``ValueError: Unknown extension
name='...'`` for an unknown one. So the extension's name is this sentence. It contains no slash: text after a slash is a
version, and is not printed. This package's reader ignores it, and reads checkpoints without it.
"""


@collection_paused()
def encode(table: MetadataTable) -> bytes:
    """The bytes of a ``.metadata`` file.

    Raises :class:`ConfigurationError` if :func:`decode` would refuse the bytes, or if a planner's data cannot be
    stored: a checkpoint that cannot be opened must not be committed.
    """
    try:
        check(table.catalog, table.placement, table.note.files)
        document = write_document(table)
        columns = trailer.columns_of(table.catalog, table.placement)
        data = trailer.append(stub_of(table.catalog), document, columns)
        values.check_memory(len(data), document, sum(map(len, columns)))
        return data
    except (values.ValueRefused, TypeError) as error:
        raise refused(error) from error


_LARGE: Final = 64 << 20
_MOST: Final = 4 << 30
"""Bytes of the largest ``.metadata`` that is read. Those of 16,384 ranks with 900 tensors each have 1 GiB."""


def read(path: Path) -> bytes:
    """The bytes of the ``.metadata`` file at ``path``.

    Of a large file of another program, only the beginning and the end: it may be endless. Raises OSError
    (:class:`StorageError` if it is no file), or :class:`CheckpointCorruptError` if it is too large.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_size <= _LARGE:
            return file.read()
        file.seek(-trailer.END_BYTES, os.SEEK_END)
        end = file.read()
        file.seek(0)
        if not trailer.is_end(end):
            return file.read(1 << 20) + end
        if status.st_size > _MOST:
            raise CheckpointCorruptError(
                f"{path}: it has {status.st_size} bytes, more than the metadata of any checkpoint"
            )
        return file.read()


@collection_paused()
def decode(data: bytes, path: Location) -> MetadataTable:
    """The table in the bytes of the ``.metadata`` file at ``path``, checked for everything that DCP and this package
    rely on.

    Raises :class:`CheckpointCorruptError` if the bytes are damaged, :class:`UnreadableMetadataError` if they are not
    metadata of a format that this release knows. Time and memory are linear in the length.
    """
    document, columns = trailer.parse(data, path)
    try:
        values.check_memory(len(data), document, sum(map(len, columns.values())))
        widened = {name: column.astype(np.int64) for name, column in columns.items()}
        table = read_document(document, widened)
        check(table.catalog, table.placement, table.note.files)
    except values.ValueRefused as error:
        raise UnreadableMetadataError(f"{path}: not checkpoint metadata: {error}") from error
    return table


def refused(error: Exception) -> ConfigurationError:
    """The error for metadata that must not be written."""
    return ConfigurationError(
        f"the checkpoint's metadata could not be opened again: {error}; a planner must keep its planner_data to "
        f"plain dicts with strings as keys, lists, tuples, strings and numbers, and the ranks that hold a tensor "
        f"must save together"
    )


# ---- the pickle for DCP's own tools --------------------------------------------------------------


_PROTOCOL: Final = 4

_NOWHERE: Final = _StorageInfo(METADATA_NAME, 0, 0, TRANSFORM_DESCRIPTORS)
"""A file that exists: stock DCP opens it before it refuses the entry."""


@once
def stub_of(catalog: Catalog) -> bytes:
    """The pickle for a catalog that ``metadata_check`` has accepted. The same torch gives the same bytes."""
    return _pickled(_stub(catalog))


def _stub(catalog: Catalog) -> Metadata:
    entries: dict[str, STORAGE_TYPES] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    # Few are different, and the pickle has each once. An entry is its tensor's own: programs change its size.
    alike: dict[tuple[int, ...], tuple[torch.Size, ChunkStorageMetadata]] = {}
    columns = (catalog.names, catalog.properties.tolist(), catalog.tensor_shapes())
    for name, kind, shape in zip(*columns, strict=True):
        if kind < 0:
            entries[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _NOWHERE
            continue
        if shape not in alike:
            size, begin = torch.Size(shape), torch.Size([0] * len(shape))
            alike[shape] = size, ChunkStorageMetadata(begin, size)
        size, chunk = alike[shape]
        entries[name] = TensorStorageMetadata(catalog.table[kind], size, [chunk])
        places[MetadataIndex(name, chunk.offsets)] = _NOWHERE
    return Metadata(entries, storage_data=places, version=DCP_VERSION)


def _pickled(metadata: Metadata) -> bytes:
    written = io.BytesIO()
    pickler = pickle.Pickler(written, _PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: _for_every_torch}
    pickler.dump(metadata)
    return written.getvalue()


def _for_every_torch(properties: TensorProperties) -> tuple[Any, ...]:
    """Releases before 2.15 read a tuple of five fields only, later ones read it, too."""
    own = properties.__getstate__()  # type: ignore[no-untyped-call]
    return copyreg.__newobj__, (TensorProperties,), own[:5] if type(own) is tuple else own  # type: ignore[attr-defined]
