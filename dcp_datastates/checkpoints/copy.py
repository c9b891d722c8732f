"""Copies a checkpoint, byte for byte: between directories and object stores, verified, and resumable.

A data file is read piece by piece, and each piece is compared with its checksum before it is written. The copy is
published when all files are durable, in the way of the place where it lies: so it is there whole, or not at all. It has
the attempt of the original.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from dcp_datastates._native import BLOCK_BYTES
from dcp_datastates.checkpoints.inventory import is_committed, sizes_of
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSupersededError,
    ConfigurationError,
    StorageError,
)
from dcp_datastates.format.checksums import ChecksumTable, blocks
from dcp_datastates.format.metadata import FileRecord
from dcp_datastates.io.committed import Committed, open_committed, replacement
from dcp_datastates.process.work import Done, Progress, Unit, thread_count, work
from dcp_datastates.storage import attempts, decisions, local, operations, readme, store_index
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.decisions import State
from dcp_datastates.storage.lock import Hold
from dcp_datastates.storage.object_path import Location, ObjectPath, locate
from dcp_datastates.storage.object_store import put_pieces
from dcp_datastates.storage.readable import ReadableFile, open_readable

__all__ = ["copy"]

_PIECE_BYTES: Final = 8 * BLOCK_BYTES
_PARTS_IN_FLIGHT: Final = 4
_PHASE: Final = "copy"


def copy(
    source: str | os.PathLike[str] | ObjectPath,
    target: str | os.PathLike[str] | ObjectPath,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> Location:
    """Copy the checkpoint committed at ``source`` to ``target``; returns where the copy is.

    Every byte is compared with its checksum on the way. If the call is interrupted, the same call goes on: files that
    are there, whole, are not copied again. If the copy is there already, nothing is done. One process calls this, not
    every rank.

    Args:
        source: Directory of the checkpoint, or its URL.
        target: Directory that the copy becomes, or its URL.
        threads: How many files are copied at a time; None for one per core, at most 8.
        progress: Called in the calling thread, about ten times per second and once at the end, with the bytes done and
            the total bytes.
        source_options: fsspec's options, if ``source`` is a URL.
        target_options: The same of ``target``.

    Raises:
        CheckpointNotFoundError: no checkpoint is at ``source``.
        CheckpointCorruptError: a byte of it is damaged; nothing is committed at ``target``.
        CheckpointExistsError: another checkpoint is committed at ``target``.
        CheckpointReplacedError: ``source`` was replaced or deleted meanwhile.
        StorageError: it cannot be read or written; or another process copies there.
        ConfigurationError: an argument cannot work.
    """
    threads = thread_count(threads)
    here, there = locate(source, options=source_options), locate(target, options=target_options)
    if here == there:
        raise ConfigurationError(f"source and target are both {str(here)!r}; name another target")
    committed = open_committed(here)
    attempt = committed.note.attempt
    if _is_done(there, attempt):
        return there
    place: _Target = (
        _Store(there, attempt) if isinstance(there, ObjectPath) else _Directory(there, attempt)
    )
    with place.held():
        records = list(committed.note.files.values())
        units: list[Unit] = [
            partial(_copy_file, committed, place, record, there if size == record.nbytes else None)
            for record, size in sizes_of(there, records)
        ]
        try:
            work(units, sum(record.nbytes for record in records), threads, progress)
        except (CheckpointCorruptError, FileNotFoundError):
            if (replaced := replacement(here, attempt, "copy")) is not None:
                raise replaced from None
            raise
        place.publish(committed.data)
    return there


def _is_done(target: Location, attempt: Attempt) -> bool:
    try:
        found = open_committed(target).note.attempt
    except CheckpointNotFoundError:
        if is_committed(target):  # of stock DCP
            raise CheckpointExistsError(
                f"another program's checkpoint is at {str(target)!r}; copy to another path"
            ) from None
        return False
    if found != attempt:
        raise CheckpointExistsError(
            f"another checkpoint, attempt {found.name}, is committed at {str(target)!r}; delete it, or copy to "
            f"another path"
        )
    return True


def _copy_file(
    committed: Committed,
    target: _Target,
    record: FileRecord,
    copied_to: Location | None,
    done: Done,
) -> None:
    """``copied_to``: where an earlier call has left the file, with its size."""
    if copied_to is not None and _is_whole(copied_to / record.relative_path, record):
        done(record.nbytes)
        return
    with contextlib.closing(open_readable(committed.directory / record.relative_path)) as file:
        target.write(record, _checked(file, record, done))


def _is_whole(copied: Location, record: FileRecord) -> bool:
    """A crash, or the way to a store, may have left a file with its size, and without its bytes."""
    with contextlib.closing(open_readable(copied)) as file:
        try:
            for _ in _checked(file, record, lambda nbytes: None):
                pass
        except CheckpointCorruptError:
            return False
    return True


def _checked(file: ReadableFile, record: FileRecord, done: Done) -> Iterator[memoryview]:
    """The bytes of a data file, in pieces, each compared with its checksums; last the table of these."""
    words = _read(file, record, record.table_offset, record.nbytes)
    table = ChecksumTable(bytes(words))
    if file.nbytes != record.nbytes or not table.is_sound:
        raise CheckpointCorruptError(
            f"{record.relative_path}: its size or its checksums are damaged; dcp-datastates verify says more"
        )
    for begin in range(0, record.table_offset, _PIECE_BYTES):
        end = min(begin + _PIECE_BYTES, record.table_offset)
        piece = _read(file, record, begin, end)
        for low, high in blocks(begin, end):
            if not table.matches(low, piece[low - begin : high - begin]):
                raise CheckpointCorruptError(
                    f"{record.relative_path}: bytes {low} to {high} do not match their checksum"
                )
        yield piece
        done(end - begin)
    yield words
    done(len(words))


def _read(file: ReadableFile, record: FileRecord, begin: int, end: int) -> memoryview:
    into = memoryview(
        bytearray(end - begin)
    )  # its own: a store's library may hold it until it is sent
    if file.read_at(begin, into) < len(into):
        raise CheckpointCorruptError(f"{record.relative_path} is cut short, before byte {end}")
    return into


class _Target(Protocol):
    """Where the copy goes."""

    def held(self) -> contextlib.AbstractContextManager[object]:
        """While the copy is made. Raises :class:`StorageError` if another process makes it."""

    def write(self, record: FileRecord, pieces: Iterator[memoryview]) -> None:
        """Write a file, and make it durable. Any thread."""

    def publish(self, data: bytes) -> None:
        """Commit the copy, with the bytes of ``.metadata``."""


class _Directory:
    def __init__(self, directory: Path, attempt: Attempt) -> None:
        self._directory, self._attempt = directory, attempt
        self._folder = directory / attempt.name

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        local.make_directories(self._directory, _PHASE)
        attempts.claim(self._directory, self._attempt)
        with local.explained("copying", self._directory):
            hold = Hold.on(self._folder)
        try:
            yield
        finally:
            if hold is not None:
                hold.release()

    def write(self, record: FileRecord, pieces: Iterator[memoryview]) -> None:
        path = self._directory / record.relative_path
        with local.explained("writing", path, record.nbytes):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                for piece in pieces:
                    left = piece
                    while left:
                        left = left[os.write(descriptor, left) :]
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    def publish(self, data: bytes) -> None:
        with local.explained("making the copy durable", self._folder):
            for directory in local.sync_directories(self._folder):
                operations.sync_directory(directory, _PHASE)
        attempts.publish(self._directory, self._attempt, data)
        readme.write(self._directory)


class _Store:
    def __init__(self, directory: ObjectPath, attempt: Attempt) -> None:
        self._directory, self._attempt = directory, attempt

    def held(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()  # two copies write the same objects, and one decision

    def write(self, record: FileRecord, pieces: Iterator[memoryview]) -> None:
        path = self._directory / record.relative_path
        put_pieces(path.store, path.key, record.nbytes, pieces, _PARTS_IN_FLIGHT)

    def publish(self, data: bytes) -> None:
        store_index.register(self._directory, self._attempt)
        if decisions.decide(self._directory, self._attempt, data) is not State.COMMITTED:
            raise CheckpointSupersededError(
                f"attempt {self._attempt.name} at {str(self._directory)!r} was withdrawn or deleted there before; "
                f"copy to another path"
            )
        path = self._directory / local.METADATA_NAME
        with contextlib.suppress(StorageError):  # no loader needs it
            path.store.put(path.key, data)
