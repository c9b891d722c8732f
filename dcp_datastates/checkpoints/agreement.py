"""Whether the parts of a checkpoint agree: the metadata with themselves, each file's header with the metadata.

Pure functions of bytes and metadata; what they find are :class:`Damage` values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from dcp_datastates._native import BLOCK_BYTES
from dcp_datastates.checkpoints.header import read_header
from dcp_datastates.damage import Contents, Damage
from dcp_datastates.errors import CheckpointCorruptError
from dcp_datastates.format.metadata import FileRecord, Note
from dcp_datastates.layout import MAX_HEADER_BYTES, entry_key, is_bookkeeping, is_table, stored_form
from dcp_datastates.storage.local import METADATA_NAME

__all__ = ["Agreement", "impossible_size"]


@dataclass(frozen=True)
class _Entry:
    """One entry of a safetensors header; ``begin`` and ``end`` are offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} at [{self.begin}, {self.end})"


class Agreement:
    """What the metadata of a checkpoint say, indexed for comparing."""

    def __init__(self, metadata: Metadata, note: Note, contents: Contents) -> None:
        self._metadata = metadata
        self._note = note
        self._contents = contents
        self._chunks: dict[tuple[str, tuple[int, ...]], ChunkStorageMetadata] = {
            (name, tuple(chunk.offsets)): chunk
            for name, saved in metadata.state_dict_metadata.items()
            if isinstance(saved, TensorStorageMetadata)
            for chunk in saved.chunks
        }

    # --- the metadata with themselves ---------------------------------------------------------

    def of_metadata(self) -> Iterator[Damage]:
        """What in the metadata cannot be. Linear in the number of chunks.

        That the chunks of a tensor cover it is checked by their bounds and their number of elements:
        an overlap that is as large as a gap goes unseen.
        """
        for record in self._note.files.values():
            if problem := impossible_size(record):
                yield _in_metadata(problem, *self._contents.all_names(record.relative_path))
        stored: dict[str, int] = {}
        for index, info in self._metadata.storage_data.items():
            problem = self._misplaced(index, info)
            if problem is None:
                stored[index.fqn] = stored.get(index.fqn, 0) + 1
            else:
                yield _in_metadata(problem, index.fqn)
        for name, saved in self._metadata.state_dict_metadata.items():
            if isinstance(saved, TensorStorageMetadata):
                problem = _uncovered(saved)
                expected = len(saved.chunks)
            else:
                problem, expected = None, 1
            if problem is None and stored.get(name, 0) < expected:
                problem = f"{stored.get(name, 0)} of its {expected} chunks have a place in a file"
            if problem is not None:
                yield _in_metadata(f"{name!r}: {problem}", name)

    def _misplaced(self, index: MetadataIndex, info: object) -> str | None:
        if not isinstance(info, _StorageInfo):
            return f"{index.fqn!r}: its place is a {type(info).__name__}"
        record = self._note.files.get(info.relative_path)
        if record is None:
            return f"{index.fqn!r} lies in {info.relative_path!r}, a file that they do not describe"
        if info.offset < 0 or info.length < 0 or info.offset + info.length > record.table_offset:
            return (
                f"{index.fqn!r} lies at [{info.offset}, {info.offset + info.length}) of "
                f"{info.relative_path}, whose data end at {record.table_offset}"
            )
        saved = self._metadata.state_dict_metadata.get(index.fqn)
        if saved is None:
            return f"{index.fqn!r} has a place in a file, but no description"
        if isinstance(saved, TensorStorageMetadata):
            chunk = self._chunks.get((index.fqn, tuple(index.offset or ())))
            if chunk is None:
                return f"{index.fqn!r}: no chunk begins at {index.offset}"
            nbytes = math.prod(chunk.sizes) * saved.properties.dtype.itemsize
            if nbytes != info.length:
                return f"{index.fqn!r}: a chunk of {nbytes} bytes has {info.length} in its file"
        return None

    # --- a file's header with the metadata ------------------------------------------------------

    def header_bytes(self, record: FileRecord) -> int:
        """Where the data of a file begin, by the metadata, and so its header ends."""
        entries = self._contents.entries(record.relative_path)
        begin = min((info.offset for _, info in entries), default=record.table_offset)
        return max(8, min(begin, record.table_offset, MAX_HEADER_BYTES))

    def of_header(self, record: FileRecord, header: bytes) -> Iterator[Damage]:
        """Where ``header``, the first bytes of a file up to its data, differs from the metadata."""
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
        """Name, key and entry of all that the metadata place in the file (and describe soundly)."""
        for index, info in self._contents.entries(record.relative_path):
            saved = self._metadata.state_dict_metadata.get(index.fqn)
            if isinstance(saved, TensorStorageMetadata):
                chunk = self._chunks.get((index.fqn, tuple(index.offset or ())))
                if chunk is None:
                    continue
                dtype, shape, _ = stored_form(saved.properties.dtype, chunk.sizes, chunk.offsets)
            else:
                dtype, shape = "U8", [info.length]
            yield (
                index.fqn,
                entry_key(index.fqn),
                _Entry(dtype, tuple(shape), info.offset, info.offset + info.length),
            )


def _in_metadata(problem: str, *names: str) -> Damage:
    return Damage(
        METADATA_NAME, None, None, f"the metadata contradict themselves: {problem}", names
    )


def impossible_size(record: FileRecord) -> str | None:
    """Why no data file can have the sizes that the metadata note for this one; None if it can."""
    table = record.table_offset
    expected = table + 4 * (-(-table // BLOCK_BYTES) + 1)
    if table <= 0 or table % 4 or record.nbytes != expected:
        return f"{record.relative_path} has {record.nbytes} bytes with its checksums at {table}"
    return None


def _uncovered(saved: TensorStorageMetadata) -> str | None:
    """How the chunks fail to cover the tensor, each element once, as far as counting shows it."""
    whole: torch.Size = saved.size
    elements = 0
    for chunk in saved.chunks:
        fits = len(chunk.offsets) == len(chunk.sizes) == len(whole) and all(
            offset >= 0 and size >= 0 and offset + size <= length
            for offset, size, length in zip(chunk.offsets, chunk.sizes, whole, strict=True)
        )
        if not fits:
            return (
                f"a chunk of {list(chunk.sizes)} at {list(chunk.offsets)} lies outside of its shape "
                f"{list(whole)}"
            )
        elements += math.prod(chunk.sizes)
    if elements == math.prod(whole):
        return None
    how = "leave gaps" if elements < math.prod(whole) else "overlap"
    return f"its chunks {how}: they have {elements} elements, and the tensor {math.prod(whole)}"


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
