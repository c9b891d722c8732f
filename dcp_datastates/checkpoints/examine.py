"""Reads every byte of a checkpoint's data files, and compares it with its checksum.

Files are cut into pieces of a few blocks. Threads take the pieces in order; each thread reuses one buffer. So memory is
bounded by the number of threads (plus tables of 4 bytes per MiB for the few files that are open at a time, and one
header). The files' pages are dropped from the page cache before and after reading, so the bytes come from storage, and
the machine's other cached data stay.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from dcp_datastates._native import BLOCK_BYTES
from dcp_datastates.errors import CheckpointCorruptError, StorageError
from dcp_datastates.format.contents import Contents, Damage
from dcp_datastates.format.layout import (
    MAX_HEADER_BYTES,
    ChecksumTable,
    blocks,
    entry_key,
    is_bookkeeping,
    is_table,
    stored_form,
)
from dcp_datastates.format.metadata_check import elements
from dcp_datastates.format.metadata_table import FileRecord, MetadataTable
from dcp_datastates.format.ragged import starts_of
from dcp_datastates.format.safetensors_header import HeaderEntry, read_header
from dcp_datastates.io.committed import Committed, wrong_size
from dcp_datastates.process.work import Done, Progress, Unit, work
from dcp_datastates.storage import presence
from dcp_datastates.storage.local import METADATA_NAME
from dcp_datastates.storage.object_path import Location, copies_elsewhere, leave_copy
from dcp_datastates.storage.object_store import ObjectStore
from dcp_datastates.storage.readable import ReadableFile, open_readable

_PIECE_BYTES: Final = 8 * BLOCK_BYTES

_MISSING: Final = "missing"

_MEDIA_ERRORS: Final = (errno.EIO, errno.EREMOTEIO, errno.EBADMSG, errno.EUCLEAN)
"""Errors for stored bytes that can no longer be read: they count as damage, not as a failure of the check."""


@dataclass(frozen=True)
class _Bad:
    begin: int
    end: int
    problem: str


@dataclass
class _File:
    """A data file under examination; the examination's lock guards ``pieces_left`` and ``bad``."""

    record: FileRecord
    path: Location
    source: ReadableFile
    table: ChecksumTable
    pieces_left: int
    bad: list[_Bad] = field(default_factory=list)


def examine(
    directory: Location, committed: Committed, threads: int, progress: Progress | None
) -> list[Damage]:
    """As :meth:`Examination.run`. If a store has several copies of a file, it is damaged if all are."""
    while True:
        damages = Examination(directory, committed).run(threads, progress)
        left = {each.file: each for each in damages if each.file in committed.note.files}
        if not [file for file in left if leave_copy(directory / file, left[file].problem)]:
            return damages


def examine_copies(directory: Location, committed: Committed, threads: int) -> None:
    """Read the further copies of all data files, after :func:`examine` has found no damage. A damaged one is named in
    the log, and replaced. Raises :class:`StorageError`.
    """
    for node, store in copies_elsewhere(directory).items():
        damages = Examination(directory, committed, store).run(threads, None)
        for file, problem in {each.file: each.problem for each in damages}.items():
            if problem != _MISSING:
                leave_copy(directory / file, problem, node)


class Examination:
    """One examination of a checkpoint's data files, in ``store``, if not in the directory's own."""

    def __init__(
        self, directory: Location, committed: Committed, store: ObjectStore | None = None
    ) -> None:
        self._directory, self._store = directory, store
        self._contents = Contents(committed.table)
        self._consistency_check = ConsistencyCheck(committed.table, self._contents)
        self._files = list(committed.note.files.values())
        self._buffers = threading.local()
        self._header_lock = threading.Lock()  # held while a header is in memory
        self._lock = threading.Lock()  # guards all below
        self._open: set[ReadableFile] = set()
        self._damages = list(self._consistency_check.of_metadata())

    def run(self, threads: int, progress: Progress | None) -> list[Damage]:
        """Read all files; returns all damages, those of the metadata too, in order. Raises :class:`StorageError`."""
        try:
            work(self._units(), sum(record.nbytes for record in self._files), threads, progress)
        except OSError as error:
            raise StorageError(
                error.errno, f"verifying failed: {error.strerror}", str(error.filename)
            ) from error
        finally:
            for source in self._open:
                source.close()
        return sorted(self._damages, key=_place)

    # --- opening, one file after another: work() takes one unit at a time -----------------------

    def _units(self) -> Iterator[Unit]:
        """The pieces of all files, in order. Opens each file when its first piece is taken."""
        for record in self._files:
            path = self._directory / record.relative_path
            file = None
            try:
                source = presence.asked(partial(open_readable, path, self._store))
                file = self._start(record, path, source)
            except presence.NotAFileError as error:
                self._condemn(record, str(error.strerror))
            except OSError as error:
                if not presence.is_missing(error, str(path)):
                    raise OSError(error.errno, error.strerror, str(path)) from error
                self._condemn(record, _MISSING)
            if file is None:
                yield partial(_skip, record)
                continue
            for begin in range(0, record.table_offset, _PIECE_BYTES):
                end = min(begin + _PIECE_BYTES, record.table_offset)
                yield partial(self._examine, file, begin, end)

    def _start(self, record: FileRecord, path: Location, source: ReadableFile) -> _File | None:
        """Begin with the open file; None if its checksums cannot be read. Raises OSError."""
        with self._lock:
            self._open.add(source)
        nbytes = source.nbytes
        problem = wrong_size(record, nbytes)
        words = bytearray(record.nbytes - record.table_offset)
        source.drop_cached()
        unreadable = None
        try:
            read = source.read_at(record.table_offset, memoryview(words))
        except OSError as error:
            if error.errno not in _MEDIA_ERRORS:
                raise
            read, unreadable = 0, f"its checksums cannot be read: {error.strerror}"
        if nbytes < record.nbytes or read < len(words):
            with self._lock:
                self._close(source)
            lost = (
                f"{problem or 'cut short'}; the rest has lost its checksums, which stood at the end"
            )
            self._condemn(record, unreadable or lost, nbytes, record.nbytes)
            return None
        if problem is not None:
            self._condemn(record, problem, record.nbytes, nbytes)
        table = ChecksumTable(bytes(words))
        if not table.is_sound:
            problem = "the checksum table does not match its own checksum"
            self._condemn(record, problem, record.table_offset, record.nbytes)
        pieces = -(-record.table_offset // _PIECE_BYTES)
        return _File(record, path, source, table, pieces)

    def _condemn(
        self, record: FileRecord, problem: str, begin: int | None = None, end: int | None = None
    ) -> None:
        nbytes = None if begin is None or end is None else end - begin
        names = self._contents.all_names(record.relative_path)
        with self._lock:
            self._damages.append(Damage(record.relative_path, begin, nbytes, problem, names))

    def _close(self, source: ReadableFile) -> None:
        self._open.discard(source)
        source.close()

    # --- reading ------------------------------------------------------------------------------

    def _examine(self, file: _File, begin: int, end: int, done: Done) -> None:
        if not hasattr(self._buffers, "own"):
            self._buffers.own = memoryview(bytearray(_PIECE_BYTES))
        bad = _merged(_damaged(file, begin, end, self._buffers.own))
        with self._lock:
            file.bad += bad
            file.pieces_left -= 1
            is_last = not file.pieces_left
        if is_last:
            damages = list(self._damages_of(file))
            with self._lock:
                self._damages += damages
                self._close(file.source)
        done((file.record.nbytes if end == file.record.table_offset else end) - begin)

    def _damages_of(self, file: _File) -> Iterator[Damage]:
        path = file.record.relative_path
        header_end = self._consistency_check.header_bytes(file.record)
        parts = _merged(sorted(file.bad, key=lambda part: part.begin))
        for part in parts:
            # A load does not read the header, but other readers need it for every entry.
            names = self._contents.names(path, part.begin, part.end)
            where = " (the file's header is in it)" if part.begin < header_end else ""
            yield Damage(path, part.begin, part.end - part.begin, part.problem + where, names)
        if not any(part.begin < header_end for part in parts):
            with self._header_lock:
                header = bytearray(header_end)
                file.source.read_at(0, memoryview(header))
                yield from self._consistency_check.of_header(file.record, bytes(header))
        file.source.drop_cached()


def _place(damage: Damage) -> tuple[str, int]:
    return damage.file, -1 if damage.offset is None else damage.offset


def _skip(record: FileRecord, done: Done) -> None:
    done(record.nbytes)


def _damaged(file: _File, begin: int, end: int, buffer: memoryview) -> Iterator[_Bad]:
    view = buffer[: end - begin]
    try:
        read = file.source.read_at(begin, view)
    except OSError as error:
        if error.errno not in _MEDIA_ERRORS:
            raise OSError(error.errno, error.strerror, str(file.path)) from error
        if end - begin <= BLOCK_BYTES:
            yield _Bad(begin, end, f"cannot be read: {error.strerror}")
            return
        for block in blocks(begin, end):  # find the damaged blocks
            yield from _damaged(file, *block, buffer)
        return
    for low, high in blocks(begin, end):
        if high - begin > read:
            yield _Bad(low, high, "the file was cut short while it was being read")
        elif not file.table.matches(low, view[low - begin : high - begin]):
            doubt = "" if file.table.is_sound else ", which may itself be what is damaged"
            yield _Bad(low, high, f"does not match its checksum{doubt}")
    file.source.drop_cached(begin, read)


def _merged(parts: Iterable[_Bad]) -> list[_Bad]:
    merged: list[_Bad] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last is not None and (last.end, last.problem) == (part.begin, part.problem):
            merged[-1] = replace(last, end=part.end)
        else:
            merged.append(part)
    return merged


# ---- whether metadata and files agree ------------------------------------------------------------


class ConsistencyCheck:
    """The contents of a checkpoint's metadata, indexed for comparison."""

    def __init__(self, table: MetadataTable, contents: Contents) -> None:
        self._table = table
        self._contents = contents
        self._owners = table.catalog.owners()
        self._chunks = table.catalog.chunks
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
        """Name and entry of all that the metadata place in the file, whose data begin at ``start``."""
        catalog, places = self._table.catalog, self._table.placement
        for row in self._contents.rows(record.relative_path).tolist():
            columns = (self._owners, places.begins, places.lengths)
            number, begin, length = (int(each[row]) for each in columns)
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
