"""The ``.metadata`` file: a pickle for DCP's own tools, and a table with the same contents for this package.

The pickle is a ``Metadata`` with names, shapes and dtypes (:mod:`dcp_datastates.format.dcp_stub`). A table of columns
follows it (:mod:`dcp_datastates.format.trailer`). This package reads only the table: it never unpickles metadata, and
the table names no class or function to call.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from dcp_datastates.errors import (
    CheckpointCorruptError,
    ConfigurationError,
    UnreadableMetadataError,
)
from dcp_datastates.format import trailer, values
from dcp_datastates.format.chunk_table import FileRecord
from dcp_datastates.format.dcp_stub import stub_of
from dcp_datastates.format.metadata_check import MetadataError, check
from dcp_datastates.format.metadata_document import read_document, write_document
from dcp_datastates.format.metadata_table import MetadataTable, Note
from dcp_datastates.process.garbage import CollectionPaused
from dcp_datastates.storage.local import open_regular
from dcp_datastates.storage.object_path import Location

__all__ = [
    "DCP_VERSION",
    "FileRecord",
    "MetadataTable",
    "Note",
    "decode",
    "encode",
    "read",
    "refused",
]

DCP_VERSION: Final = "1.0.0"
"""The value that stock DCP of torch 2.11 to 2.13 writes as ``Metadata.version``."""


def encode(table: MetadataTable) -> bytes:
    """The bytes of a ``.metadata`` file.

    Raises :class:`ConfigurationError` if :func:`decode` would refuse the bytes, or if a planner's data cannot be
    stored: a checkpoint that cannot be opened must not be committed.
    """
    try:
        check(table.catalog, table.placement, table.note.files)
        document = write_document(table)
    except (MetadataError, values.ValueRefused, TypeError) as error:
        raise refused(error) from error
    stub = stub_of(table.catalog, table.version)
    return trailer.append(stub, document, table.catalog, table.placement)


_LARGE: Final = 64 << 20
_MOST: Final = 4 << 30
"""Bytes of the largest ``.metadata`` that is read. Those of 16,384 ranks with 900 tensors each have 1 GiB."""


def read(path: Path) -> tuple[bytes, float]:
    """The bytes of the ``.metadata`` file at ``path``, and the time of its publication in seconds since the epoch.

    Of a large file of another program, only the beginning and the end: it may be endless. Raises OSError
    (:class:`StorageError` if it is no file), or :class:`CheckpointCorruptError` if it is too large.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_size <= _LARGE:
            return file.read(), status.st_mtime
        file.seek(-trailer.END_BYTES, os.SEEK_END)
        end = file.read()
        file.seek(0)
        if not trailer.is_end(end):
            return file.read(1 << 20) + end, status.st_mtime
        if status.st_size > _MOST:
            raise CheckpointCorruptError(
                f"{path}: it has {status.st_size} bytes, more than the metadata of any checkpoint"
            )
        return file.read(), status.st_mtime


def decode(data: bytes, path: Location) -> MetadataTable:
    """The table in the bytes of the ``.metadata`` file at ``path``, checked for everything that DCP and this package
    rely on.

    Raises :class:`CheckpointCorruptError` if the bytes are damaged, :class:`UnreadableMetadataError` if they are not
    metadata of a format that this release knows. Time and memory are linear in the length.
    """
    document, columns = trailer.parse(data, path)
    try:
        with CollectionPaused():
            table = read_document(document, columns)
        check(table.catalog, table.placement, table.note.files)
    except (MetadataError, values.ValueRefused) as error:
        raise UnreadableMetadataError(f"{path}: not checkpoint metadata: {error}") from error
    return table


def refused(error: Exception) -> ConfigurationError:
    """The error for metadata that must not be written."""
    return ConfigurationError(
        f"the checkpoint's metadata could not be opened again: {error}; a planner must keep its planner_data to "
        f"plain dicts with strings as keys, lists, tuples, strings and numbers, and the ranks that hold a tensor "
        f"must save together"
    )
