"""Verifies a committed checkpoint: every stored byte, and that the metadata do not contradict themselves.

Files are cut into pieces of a few blocks. Threads take the pieces in order; each thread reuses one buffer. So memory is
bounded by the number of threads (plus tables of 4 bytes per MiB for the few files that are open at a time). The files'
pages are dropped from the page cache before and after reading, so the bytes come from storage, and the machine's other
cached data stay.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from dcp_datastates._native import BLOCK_BYTES
from dcp_datastates.errors import CheckpointCorruptError, StorageError
from dcp_datastates.format.contents import Contents, Damage
from dcp_datastates.format.layout import ChecksumTable, blocks
from dcp_datastates.format.metadata_check import elements
from dcp_datastates.format.metadata_table import FileRecord
from dcp_datastates.io.committed import Committed, open_committed, replacement, sizes, wrong_size
from dcp_datastates.process.forks import public
from dcp_datastates.process.work import Done, Progress, Unit, thread_count, work
from dcp_datastates.storage import attempts, local, presence
from dcp_datastates.storage.object_path import (
    AnyPath,
    Location,
    copies_elsewhere,
    leave_copy,
    locate,
)
from dcp_datastates.storage.readable import ReadableFile
from dcp_datastates.text import count, size

_PIECE_BYTES: Final = 8 * BLOCK_BYTES

_MEDIA_ERRORS: Final = (errno.EIO, errno.EREMOTEIO, errno.EBADMSG, errno.EUCLEAN)
"""Errors for stored bytes that can no longer be read: they count as damage, not as a failure of the check."""


@dataclass(frozen=True)
class Report:
    """The result of :func:`verify`. Sizes are bytes."""

    path: Location
    attempt: str | None
    """The committed attempt; None if the metadata are damaged."""
    files: int
    nbytes: int
    """The expected size of ``.metadata`` and all data files."""
    tensors: int
    objects: int
    seconds: float
    damages: tuple[Damage, ...]
    """All damages, by file and offset; neighbouring blocks form one damage."""

    @property
    def whole(self) -> bool:
        return not self.damages

    def __repr__(self) -> str:
        return f"Report({str(self).splitlines()[0]})"

    def __str__(self) -> str:
        """The verdict, the extent of the check, and each damage, one line each."""
        verdict = "whole" if self.whole else f"damaged in {count(len(self.damages), 'place')}"
        lines = [f"{self.path}: {verdict}"]
        if self.attempt is not None:
            lines.append(
                f"  {count(self.files, 'file')}, {count(self.tensors, 'tensor')}, "
                f"{count(self.objects, 'object')}: {size(self.nbytes)} in {self.seconds:.1f} s"
            )
            if self.whole and self.seconds > 0:
                lines[-1] += f" ({size(self.nbytes / self.seconds)}/s)"
        return "\n".join([*lines, *(f"  {damage}" for damage in self.damages)])


@public("verify()")
def verify(
    path: AnyPath,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
    """Check every stored byte of the checkpoint committed at ``path``, and that its metadata are sound.

    Args:
        path: Directory of the checkpoint, or its URL.
        threads: How many threads read and compute checksums; None for one per core, at most 8.
        progress: Called in the calling thread, about ten times per second and once at the end, with the bytes done and
            the total bytes.
        storage_options: fsspec's options for a URL.

    Returns:
        A report with all damage. Damage does not raise. On nodes (``node://``, ``ram://``), every copy of each file is
        read. Damage that another copy mends is in the log, and not in the report.

    Raises:
        CheckpointNotFoundError: no checkpoint is there (:class:`ForeignCheckpointError`: one of stock DCP is).
        StorageError: it cannot be read, for example without permission.
        CheckpointReplacedError: another save committed there meanwhile.
        ConfigurationError: an argument cannot work.
    """
    directory = locate(path, options=storage_options)
    threads = thread_count(threads)
    began = time.monotonic()
    try:
        committed = open_committed(directory)
    except CheckpointCorruptError as error:
        return _unopened(directory, error, time.monotonic() - began)
    damages = examine(directory, committed, threads, progress)
    if damages and (replaced := replacement(directory, committed.note.attempt, "verify")):
        raise replaced  # the damage seen is not real
    if not damages:
        examine_copies(directory, committed, threads)
    tensors = int((committed.table.catalog.properties >= 0).sum())
    return Report(
        path=directory,
        attempt=committed.note.attempt.name,
        files=len(committed.note.files),
        nbytes=committed.nbytes,
        tensors=tensors,
        objects=len(committed.table.catalog.names) - tensors,
        seconds=time.monotonic() - began,
        damages=tuple(damages),
    )


def _unopened(directory: Location, error: CheckpointCorruptError, seconds: float) -> Report:
    problem = f"{error}; which data files belong to the checkpoint is unknown, so none was checked"
    damage = Damage(local.METADATA_NAME, None, None, problem, ())
    nbytes = 0
    with contextlib.suppress(OSError):
        if found := attempts.newest_committed(directory):
            nbytes = len(found[1])
    return Report(directory, None, 0, nbytes, 0, 0, seconds, (damage,))


# ---- the data files ------------------------------------------------------------------------------


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
    for node, there in copies_elsewhere(directory).items():
        found = sizes(there, committed.note.files)
        files = [file for file, nbytes in found.items() if isinstance(nbytes, int)]
        damages = Examination(there, committed, files).run(threads, None)
        for file, problem in {each.file: each.problem for each in damages}.items():
            leave_copy(directory / file, problem, node)


class _Bad(NamedTuple):
    begin: int
    end: int
    problem: str


class _File(NamedTuple):
    """A data file that is open. It is closed when no piece of it is left."""

    record: FileRecord
    source: ReadableFile
    table: ChecksumTable


class Examination:
    """One examination of a checkpoint's data files, of all or of ``files``."""

    def __init__(
        self, directory: Location, committed: Committed, files: Iterable[str] | None = None
    ) -> None:
        self._directory = directory
        self._table, self._contents = committed.table, Contents(committed.table)
        records = committed.note.files
        self._files = [records[file] for file in (records if files is None else files)]
        self._buffers = threading.local()
        self._lock = threading.Lock()  # guards what follows
        self._bad: dict[str, list[_Bad]] = defaultdict(list)  # by file
        self._damages = list(self._gaps())

    def run(self, threads: int, progress: Progress | None) -> list[Damage]:
        """Read all files; returns all damages, those of the metadata too, in order. Raises :class:`StorageError`."""
        try:
            work(self._units(), sum(record.nbytes for record in self._files), threads, progress)
        except OSError as error:
            raise StorageError(
                error.errno, f"verifying failed: {error.strerror}", str(error.filename)
            ) from error
        for path, parts in self._bad.items():
            data_begin = self._contents.begin(path)
            for begin, end, problem in _merged(parts):
                if data_begin is None or begin < data_begin:  # a load does not read it; others do
                    problem += " (the file's header is in it)"
                names = self._contents.names(path, begin, end)
                self._damages.append(Damage(path, begin, end - begin, problem, names))
        return sorted(self._damages, key=lambda each: (each.file, each.offset or 0))

    def _condemn(
        self, record: FileRecord, problem: str, begin: int | None = None, end: int | None = None
    ) -> None:
        nbytes = None if begin is None or end is None else end - begin
        names = self._contents.all_names(record.relative_path)
        with self._lock:
            self._damages.append(Damage(record.relative_path, begin, nbytes, problem, names))

    def _gaps(self) -> Iterator[Damage]:
        """Incomplete tensors. (Opening has checked that chunks lie within their tensors and do not overlap.)"""
        catalog = self._table.catalog
        whole, stored = elements(catalog)
        for number in np.flatnonzero((stored != whole) & (catalog.properties >= 0)).tolist():
            name = catalog.names[number]
            problem = (
                f"the metadata contradict themselves: {name!r}: its chunks leave gaps: they have {stored[number]} "
                f"elements, and the tensor {whole[number]}"
            )
            yield Damage(local.METADATA_NAME, None, None, problem, (name,))

    # --- opening, one file after another: work() takes one unit at a time -----------------------

    def _units(self) -> Iterator[Unit]:
        """The pieces of all files, in order. Opens each file when its first piece is taken."""
        for record in self._files:
            file = self._opened(record)
            if file is None:
                yield partial(_skip, record.nbytes)
                continue
            for begin in range(0, record.table_offset, _PIECE_BYTES):
                end = min(begin + _PIECE_BYTES, record.table_offset)
                yield partial(self._examine, file, begin, end)

    def _opened(self, record: FileRecord) -> _File | None:
        """The open file; None if it is missing, or its checksums cannot be read. Raises OSError."""
        path = self._directory / record.relative_path
        try:
            source = ReadableFile(path)
        except presence.NotAFileError as error:
            self._condemn(record, str(error.strerror))
            return None
        except FileNotFoundError:
            self._condemn(record, "missing")
            return None
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        nbytes, words = source.nbytes, bytearray(record.nbytes - record.table_offset)
        problem = wrong_size(record, nbytes)
        source.drop_cached()
        lost = f"{problem or 'cut short'}; the rest has lost its checksums, which stood at the end"
        try:
            read = source.read_at(record.table_offset, memoryview(words))
        except OSError as error:
            if error.errno not in _MEDIA_ERRORS:
                raise OSError(error.errno, error.strerror, str(path)) from error
            read, lost = 0, f"its checksums cannot be read: {error.strerror}"
        if nbytes < record.nbytes or read < len(words):
            self._condemn(record, lost, nbytes, record.nbytes)
            return None
        if problem is not None:
            self._condemn(record, problem, record.nbytes, nbytes)
        table = ChecksumTable(bytes(words))
        if not table.is_sound:
            problem = "the checksum table does not match its own checksum"
            self._condemn(record, problem, record.table_offset, record.nbytes)
        return _File(record, source, table)

    # --- reading ------------------------------------------------------------------------------

    def _examine(self, file: _File, begin: int, end: int, done: Done) -> None:
        if not hasattr(self._buffers, "own"):
            self._buffers.own = memoryview(bytearray(_PIECE_BYTES))
        view = self._buffers.own[: end - begin]
        try:
            bad = list(_damaged(file, begin, view))
        except OSError as error:
            path = self._directory / file.record.relative_path
            raise OSError(error.errno, error.strerror, str(path)) from error
        with self._lock:
            self._bad[file.record.relative_path] += bad
        done((file.record.nbytes if end == file.record.table_offset else end) - begin)


def _skip(nbytes: int, done: Done) -> None:
    done(nbytes)


def _damaged(file: _File, begin: int, view: memoryview) -> Iterator[_Bad]:
    """Reads a piece into ``view``; what is damaged of it. Raises OSError."""
    end = begin + len(view)
    try:
        read = file.source.read_at(begin, view)
    except OSError as error:
        if error.errno not in _MEDIA_ERRORS:
            raise
        if len(view) <= BLOCK_BYTES:
            yield _Bad(begin, end, f"cannot be read: {error.strerror}")
            return
        for low, high in blocks(begin, end):  # find the damaged blocks
            yield from _damaged(file, low, view[low - begin : high - begin])
        return
    for low, high in blocks(begin, end):
        if high - begin > read:
            yield _Bad(low, high, "the file was cut short while it was being read")
        elif not file.table.matches(low, view[low - begin : high - begin]):
            doubt = "" if file.table.is_sound else ", which may itself be what is damaged"
            yield _Bad(low, high, f"does not match its checksum{doubt}")
    file.source.drop_cached(begin, read)


def _merged(parts: Iterable[_Bad]) -> list[_Bad]:
    """The ``parts`` of a file in order, neighbours with the same problem as one."""
    merged: list[_Bad] = []
    for part in sorted(parts):
        last = merged[-1] if merged else None
        if last is not None and (last.end, last.problem) == (part.begin, part.problem):
            merged[-1] = last._replace(end=part.end)
        else:
            merged.append(part)
    return merged
