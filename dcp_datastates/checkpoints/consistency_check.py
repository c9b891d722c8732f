"""Checks that the parts of a checkpoint agree: the metadata with themselves, and each file's header with the metadata.

Pure functions of bytes and metadata, which yield :class:`Damage` values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dcp_datastates.errors import CheckpointCorruptError
from dcp_datastates.format.contents import Contents, Damage
from dcp_datastates.format.layout import (
    MAX_HEADER_BYTES,
    entry_key,
    is_bookkeeping,
    is_table,
    stored_form,
)
from dcp_datastates.format.metadata import FileRecord, MetadataTable
from dcp_datastates.format.ragged import starts_of, sums, volumes
from dcp_datastates.format.safetensors_header import read_header
from dcp_datastates.storage.local import METADATA_NAME

__all__ = ["ConsistencyCheck"]


@dataclass(frozen=True)
class _Entry:
    """One entry of a safetensors header; ``begin`` and ``end`` are offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} at [{self.begin}, {self.end})"


class ConsistencyCheck:
    """The contents of a checkpoint's metadata, indexed for comparison."""

    def __init__(self, table: MetadataTable, contents: Contents) -> None:
        self._table = table
        self._contents = contents
        self._owners = table.catalog.owners()
        self._places = table.placement.rows()
        self._chunks = len(table.placement.chunk_files)
        self._dimensions = table.catalog.ndims[self._owners[: self._chunks]]
        self._first_value = starts_of(self._dimensions)

    # --- the metadata with themselves ---------------------------------------------------------

    def of_metadata(self) -> Iterator[Damage]:
        """Incomplete tensors. (Opening has checked that chunks lie within their tensors and do not overlap.)"""
        catalog = self._table.catalog
        stored = sums(catalog.counts, volumes(self._dimensions, catalog.sizes))
        whole = volumes(catalog.ndims, catalog.shapes)
        for number in np.flatnonzero((stored != whole) & (catalog.properties >= 0)).tolist():
            name = catalog.names[number]
            problem = (
                f"the metadata contradict themselves: {name!r}: its chunks leave gaps: they have {stored[number]} "
                f"elements, and the tensor {whole[number]}"
            )
            yield Damage(METADATA_NAME, None, None, problem, (name,))

    # --- a file's header with the metadata ------------------------------------------------------

    def header_bytes(self, record: FileRecord) -> int:
        """The end of a file's header: the offset of its data, according to the metadata."""
        begin = self._contents.begin(record.relative_path)
        end = record.table_offset if begin is None else min(begin, record.table_offset)
        return max(8, min(end, MAX_HEADER_BYTES))

    def of_header(self, record: FileRecord, header: bytes) -> Iterator[Damage]:
        """The differences between ``header``, the bytes of a file before its data, and the metadata."""
        try:
            entries = _entries(header, record.nbytes)
        except CheckpointCorruptError as error:
            yield self._in_header(
                record, header, f"the header is not that of a safetensors file: {error}"
            )
            return
        if problem := _table(entries, record):
            yield self._in_header(record, header, problem)
        unexpected = {key for key in entries if not is_bookkeeping(key)}
        for name, key, expected in self._expected(record):
            unexpected.discard(key)
            found = entries.get(key)
            if found is None:
                yield self._in_header(
                    record, header, f"the header lacks {key!r}, which the metadata have", name
                )
            elif found != expected:
                yield self._in_header(
                    record,
                    header,
                    f"{key!r} is {found} in the header, {expected} in the metadata",
                    name,
                )
        for key in sorted(unexpected):
            yield self._in_header(
                record, header, f"the header has {key!r}, which the metadata lack"
            )

    def _in_header(
        self, record: FileRecord, header: bytes, problem: str, name: str | None = None
    ) -> Damage:
        names = self._contents.all_names(record.relative_path) if name is None else (name,)
        return Damage(record.relative_path, 0, len(header), problem, names)

    def _expected(self, record: FileRecord) -> Iterator[tuple[str, str, _Entry]]:
        """Name, key and entry of every tensor and object that the metadata place in the file."""
        catalog = self._table.catalog
        _, offsets, lengths = self._places
        for row in self._contents.rows(record.relative_path).tolist():
            number, begin, length = (int(each[row]) for each in (self._owners, offsets, lengths))
            dtype, shape = "U8", [length]
            if row < self._chunks:
                first = int(self._first_value[row])
                values = slice(first, first + int(self._dimensions[row]))
                dtype, shape, _ = stored_form(
                    catalog.table[catalog.properties[number]].dtype,
                    catalog.sizes[values].tolist(),
                    catalog.offsets[values].tolist(),
                )
            name = catalog.names[number]
            yield name, entry_key(name), _Entry(dtype, tuple(shape), begin, begin + length)


def _entries(header: bytes, file_bytes: int) -> Mapping[str, _Entry]:
    found = read_header(header, file_bytes)
    if found.data_start != len(header):
        raise CheckpointCorruptError(
            f"it says that data begin at byte {found.data_start}, the metadata {len(header)}"
        )
    return {
        entry.name: _Entry(
            entry.dtype,
            entry.shape,
            found.data_start + entry.data_offsets[0],
            found.data_start + entry.data_offsets[1],
        )
        for entry in found.entries
    }


def _table(entries: Mapping[str, _Entry], record: FileRecord) -> str | None:
    tables = [entry for key, entry in entries.items() if is_table(key)]
    words = (record.nbytes - record.table_offset) // 4
    expected = _Entry("U32", (words,), record.table_offset, record.nbytes)
    return None if tables == [expected] else "the header does not name the checksum table"
