"""The files of a checkpoint that is copied to another place: each file appears there whole, and the commit comes last.

The copy has the attempt of the original, so it is the same checkpoint: whichever process commits it, and however often,
the outcome is the same. That is why no process withdraws it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from dcp_datastates._native import BLOCK_BYTES
from dcp_datastates.checkpoints.inventory import is_committed
from dcp_datastates.commit.place import Place
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSupersededError,
)
from dcp_datastates.format.checksums import ChecksumTable, blocks
from dcp_datastates.format.metadata import FileRecord
from dcp_datastates.io.committed import open_committed
from dcp_datastates.io.stored_files import sizes
from dcp_datastates.storage import (
    attempts,
    decisions,
    local,
    local_store,
    operations,
    readme,
    store_index,
)
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.decisions import State
from dcp_datastates.storage.object_path import Location, stored
from dcp_datastates.storage.object_store import put_pieces
from dcp_datastates.storage.readable import ReadableFile, open_readable

__all__ = [
    "CopyTarget",
    "checked_pieces",
    "committed_at",
    "is_whole",
    "same_size",
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
    expected = {record.relative_path: record.nbytes for record in records}
    found = sizes(target, expected.keys())
    return {file for file, nbytes in expected.items() if found[file] == nbytes}


def is_whole(target: Location, record: FileRecord) -> bool:
    """Whether the bytes at ``target`` are right: a crash, or the way there, may have changed them."""
    try:
        for _ in checked_pieces(target, record, id):
            pass
    except CheckpointCorruptError:
        return False
    return True


class CopyTarget:
    """Where the copy goes."""

    def __init__(self, location: Location, attempt: Attempt) -> None:
        """Asks no storage."""
        self._directory, self._attempt = stored(location), attempt

    def claim(self) -> None:
        """Make the place for the files. Any process, any number of times."""
        if self._directory.is_local:
            local_store.make_folder((self._directory / self._attempt.name).key, _PHASE)

    def write(self, record: FileRecord, pieces: Iterator[memoryview]) -> None:
        """Write a file, and make it durable. Any thread. Two copies write the same."""
        path = self._directory / record.relative_path
        with operations.during(_PHASE):
            put_pieces(path.store, path.key, record.nbytes, pieces, _PARTS_IN_FLIGHT)

    def publish(self, data: bytes) -> None:
        """Commit the copy, with the bytes of the decision. All files are there."""
        directory, attempt = self._directory, self._attempt
        if directory.is_local:
            folder = Path(str(directory / attempt.name))
            with local.explained("making the copy durable", folder):
                for parent in local.sync_directories(folder):
                    operations.sync_directory(parent, _PHASE)
        store_index.register(directory, attempt)
        if decisions.decide_alone(directory, attempt, data) is not State.COMMITTED:
            raise CheckpointSupersededError(
                f"attempt {attempt.name} at {str(directory)!r} was withdrawn or deleted there before; copy to another "
                f"path"
            )
        path = directory / local.METADATA_NAME
        with contextlib.suppress(OSError):  # no loader needs it
            path.store.put(path.key, data)
        if directory.is_local:
            readme.write(Path(str(directory)))

    def remove_older(self) -> None:
        """Remove what older attempts have left there. The copy is committed."""
        there = attempts.present(self._directory)
        older = [other for other in there if other < self._attempt]
        if older:
            Place(self._directory).remove(older)
