"""A checkpoint as a load reads it, and the error for what could not be read of it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from dcp_datastates._native import BLOCK_BYTES, Fault
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    DataStatesError,
    DeviceError,
    StorageError,
)
from dcp_datastates.format.contents import Contents, some_of
from dcp_datastates.format.metadata_table import FileRecord, MetadataTable, Note
from dcp_datastates.io.download import ReadRange
from dcp_datastates.io.requests import Request
from dcp_datastates.storage.object_path import Location


@dataclass(frozen=True, eq=False)
class StoredCheckpoint:
    """A committed checkpoint, to read from."""

    table: MetadataTable
    places: Sequence[Location]
    """Its directories, the nearest first; usually one. A file that fails in one is read from the next."""
    sharing: Sharing | None = None
    """Reads the files in the nearest place, if this rank reads for others, and they for it."""

    @property
    def note(self) -> Note:
        return self.table.note


class Sharing(Protocol):
    """Reads files together with other ranks (:class:`dcp_datastates.sharing.shared_reads.SharedReads`)."""

    def reading(self, requests: Iterable[Request]) -> AbstractContextManager[ReadRange]:
        """What reads ranges of files, for a restore of ``requests``."""

    def leave(self, files: Collection[str]) -> bool:
        """Share the reads of ``files`` no more; returns whether that is new."""


def read_error(
    fault: Fault,
    asked: Iterable[Request],
    source: StoredCheckpoint,
    place: Location,
) -> DataStatesError:
    """The error for ``fault`` in a restore of what was ``asked`` for, from ``place``."""
    if fault.kind == "corrupt":
        return CheckpointCorruptError(f"{fault.message} {_affected(fault, asked, source, place)}")
    if fault.kind == "io" and fault.errno == 2:
        return CheckpointNotFoundError(fault.errno, fault.message, fault.path)
    if fault.kind == "io":
        return StorageError(fault.errno or None, fault.message, fault.path)
    if fault.kind == "device":
        return DeviceError(fault.message)
    return DataStatesError(fault.message)


def _affected(
    fault: Fault,
    asked: Iterable[Request],
    source: StoredCheckpoint,
    place: Location,
) -> str:
    """The tensors with bytes in the damaged block, the requested ones first."""
    relative_path = fault.path.removeprefix(f"{place}/")
    requested = Contents.of_places((e.name, e.file, e.begin, e.stored) for e in asked)
    record: FileRecord | None = source.note.files.get(relative_path)
    whole = fault.operation == "fstat"  # a wrong size
    if whole or (record is not None and fault.offset >= record.table_offset):
        names = requested.names(relative_path, 0, sys.maxsize)
        return f"(the file's checksums or size; {some_of(names)} cannot be verified)"
    block = (relative_path, fault.offset, fault.offset + BLOCK_BYTES)
    others = Contents.of_table(source.table)
    names = requested.names(*block) + others.names(*block)
    return f"(bytes of {some_of(tuple(dict.fromkeys(names)))})" if names else "(the file's header)"
