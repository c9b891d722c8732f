"""Checks that the parts of a checkpoint agree: the metadata with themselves, and each file's header with the metadata.

Pure functions of bytes and metadata, which yield :class:`Damage` values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
from dcp_datastates.format.ragged import starts_of
from dcp_datastates.format.safetensors_header import HeaderEntry, read_header
from dcp_datastates.format.validate import elements
from dcp_datastates.storage.local import METADATA_NAME

__all__ = ["ConsistencyCheck"]


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
        whole, stored = elements(catalog)
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
        for problem, name in self._problems(record, header):
            names = self._contents.all_names(record.relative_path) if name is None else (name,)
            yield Damage(record.relative_path, 0, len(header), problem, names)

    def _problems(self, record: FileRecord, header: bytes) -> Iterator[tuple[str, str | None]]:
        """Each with the name that it concerns; None: all names in the file."""
        start = len(header)
        try:
            entries = _entries(header, record.nbytes)
        except CheckpointCorruptError as error:
            yield f"the header is not that of a safetensors file: {error}", None
            return
        words = (record.nbytes - record.table_offset) // 4
        place = (record.table_offset - start, record.nbytes - start)
        tables = [
            (each.dtype, each.shape, each.data_offsets)
            for key, each in entries.items()
            if is_table(key)
        ]
        if tables != [("U32", (words,), place)]:
            yield "the header does not name the checksum table", None
        unexpected = {key for key in entries if not is_bookkeeping(key)}
        for name, expected in self._expected(record, start):
            key = expected.name
            unexpected.discard(key)
            found = entries.get(key)
            if found is None:
                yield f"the header lacks {key!r}, which the metadata have", name
            elif found != expected:
                said, meant = (_text(each, start) for each in (found, expected))
                yield f"{key!r} is {said} in the header, {meant} in the metadata", name
        for key in sorted(unexpected):
            yield f"the header has {key!r}, which the metadata lack", None

    def _expected(self, record: FileRecord, start: int) -> Iterator[tuple[str, HeaderEntry]]:
        """Name and entry of every tensor and object that the metadata place in the file, whose data begin at
        ``start``.
        """
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
            name, begin = catalog.names[number], begin - start
            yield name, HeaderEntry(entry_key(name), dtype, tuple(shape), (begin, begin + length))


def _entries(header: bytes, file_bytes: int) -> Mapping[str, HeaderEntry]:
    found = read_header(header, file_bytes)
    if found.data_start != len(header):
        raise CheckpointCorruptError(
            f"it says that data begin at byte {found.data_start}, the metadata {len(header)}"
        )
    return {entry.name: entry for entry in found.entries}


def _text(entry: HeaderEntry, start: int) -> str:
    begin, end = entry.data_offsets
    return f"{entry.dtype} {list(entry.shape)} at [{start + begin}, {start + end})"
