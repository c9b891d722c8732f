"""The files of a checkpoint that is copied to another place: each file appears there whole, and the commit comes last.

The copy has the attempt of the original, so it is the same checkpoint: whichever process commits it, and however often,
the outcome is the same. That is why no process withdraws it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, Protocol

from dcp_datastates._native import BLOCK_BYTES
from dcp_datastates.checkpoints.inventory import is_committed, sizes_of
from dcp_datastates.commit.store_place import StorePlace
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSupersededError,
)
from dcp_datastates.format.checksums import ChecksumTable, blocks
from dcp_datastates.format.metadata import FileRecord
from dcp_datastates.io.committed import open_committed
from dcp_datastates.storage import (
    attempts,
    decisions,
    local,
    operations,
    readme,
    store_attempts,
    store_index,
)
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.decisions import State
from dcp_datastates.storage.lock import Hold
from dcp_datastates.storage.object_path import Location, ObjectPath
from dcp_datastates.storage.object_store import put_pieces
from dcp_datastates.storage.readable import ReadableFile, open_readable

__all__ = [
    "CopyTarget",
    "checked_pieces",
    "committed_at",
    "is_whole",
    "same_size",
    "target_of",
]

_PIECE_BYTES: Final = 8 * BLOCK_BYTES
_PARTS_IN_FLIGHT: Final = 4
_PHASE: Final = "copy"

Count = Callable[[int], object]
"""Called with the bytes that were read since the last call. Raises if the copying is to stop."""


def checked_pieces(directory: Location, record: FileRecord, count: Count) -> Iterator[memoryview]:
    """The bytes of a data file in ``directory``, in pieces, each compared with its checksums; last the table of these.

    Raises :class:`CheckpointCorruptError`, or OSError.
    """
    with contextlib.closing(open_readable(directory / record.relative_path)) as file:
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
            count(end - begin)
        yield words
        count(len(words))


def _read(file: ReadableFile, record: FileRecord, begin: int, end: int) -> memoryview:
    into = memoryview(
        bytearray(end - begin)
    )  # its own: a store's library may hold it until it is sent
    if file.read_at(begin, into) < len(into):
        raise CheckpointCorruptError(f"{record.relative_path} is cut short, before byte {end}")
    return into


def committed_at(target: Location) -> Attempt | None:
    """The attempt that is committed at ``target``; None if there is none.

    Raises :class:`CheckpointExistsError` if another program's checkpoint is there.
    """
    try:
        return open_committed(target).note.attempt
    except CheckpointNotFoundError:
        if is_committed(target):  # of stock DCP
            raise CheckpointExistsError(
                f"another program's checkpoint is at {str(target)!r}; copy to another path"
            ) from None
        return None


def same_size(target: Location, records: Iterable[FileRecord]) -> set[str]:
    """The paths of those of ``records`` that are at ``target``. A file appears there when all of it is written."""
    sizes = sizes_of(target, records)
    return {record.relative_path for record, found in sizes if found == record.nbytes}


def is_whole(target: Location, record: FileRecord) -> bool:
    """Whether the bytes at ``target`` are right: a crash, or the way there, may have changed them."""
    try:
        for _ in checked_pieces(target, record, id):
            pass
    except CheckpointCorruptError:
        return False
    return True


class CopyTarget(Protocol):
    """Where the copy goes."""

    def claim(self) -> None:
        """Make the place for the files. Any process, any number of times."""

    def held(self) -> contextlib.AbstractContextManager[object]:
        """While the copy is made: no deletion takes it for abandoned. Raises :class:`StorageError` if another process
        makes it.
        """

    def write(self, record: FileRecord, pieces: Iterator[memoryview]) -> None:
        """Write a file, and make it durable. Any thread."""

    def publish(self, data: bytes) -> None:
        """Commit the copy, with the bytes of ``.metadata``. All files are there. Older attempts can no longer be
        committed there.
        """

    def remove_older(self) -> None:
        """Remove what older attempts have left there. The copy is committed."""


def target_of(location: Location, attempt: Attempt) -> CopyTarget:
    """The target at ``location``. Asks no storage."""
    if isinstance(location, ObjectPath):
        return _Store(location, attempt)
    return _Directory(location, attempt)


class _Directory:
    def __init__(self, directory: Path, attempt: Attempt) -> None:
        self._directory, self._attempt = directory, attempt
        self._folder = directory / attempt.name

    def claim(self) -> None:
        local.make_directories(self._directory, _PHASE)
        attempts.claim(self._directory, self._attempt)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with local.explained("copying", self._directory):
            hold = Hold.on(self._folder)
        try:
            yield
        finally:
            if hold is not None:
                hold.release()

    def write(self, record: FileRecord, pieces: Iterator[memoryview]) -> None:
        path = self._directory / record.relative_path
        unfinished = path.with_name(path.name + ".part")
        with local.explained("writing", path, record.nbytes):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            descriptor = os.open(unfinished, flags, 0o644)
            try:
                for piece in pieces:
                    left = piece
                    while left:
                        left = left[os.write(descriptor, left) :]
                os.fdatasync(descriptor)
                local.drop_cached(descriptor)
            finally:
                os.close(descriptor)
            operations.rename(unfinished, path, _PHASE)

    def publish(self, data: bytes) -> None:
        with local.explained("making the copy durable", self._folder):
            for directory in local.sync_directories(self._folder):
                operations.sync_directory(directory, _PHASE)
            for older in self._older():
                attempts.withdraw(self._directory, older)
        attempts.publish(self._directory, self._attempt, data)
        readme.write(self._directory)

    def remove_older(self) -> None:
        for older in self._older():
            attempts.remove_files(self._directory, older, 0, 1)

    def _older(self) -> list[Attempt]:
        return [other for other in attempts.present(self._directory) if other < self._attempt]


class _Store:
    def __init__(self, directory: ObjectPath, attempt: Attempt) -> None:
        self._directory, self._attempt = directory, attempt

    def claim(self) -> None:
        """A store has no directories."""

    def held(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()  # two copies write the same objects, and one decision

    def write(self, record: FileRecord, pieces: Iterator[memoryview]) -> None:
        path = self._directory / record.relative_path
        put_pieces(path.store, path.key, record.nbytes, pieces, _PARTS_IN_FLIGHT)

    def publish(self, data: bytes) -> None:
        store_index.register(self._directory, self._attempt)
        if decisions.repeat(self._directory, self._attempt, data) is not State.COMMITTED:
            raise CheckpointSupersededError(
                f"attempt {self._attempt.name} at {str(self._directory)!r} was withdrawn or deleted there before; "
                f"copy to another path"
            )
        path = self._directory / local.METADATA_NAME
        with contextlib.suppress(OSError):  # no loader needs it
            path.store.put(path.key, data)

    def remove_older(self) -> None:
        there = store_attempts.present(self._directory)
        older = [other for other in there if other < self._attempt]
        if older:
            StorePlace(self._directory).remove(older)
