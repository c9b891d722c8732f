"""Copies a checkpoint, byte for byte: between directories and object stores, verified, and resumable.

A data file is read piece by piece, and each piece is compared with its checksum before it is written. A file appears
whole at the target, and the commit comes last, in the way of the place where the copy lies: so it is there whole, or
not at all. It has the attempt of the original, so any process may commit it, any number of times; none withdraws it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from dcp_datastates._native import BLOCK_BYTES
from dcp_datastates.commit.place import Place
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSupersededError,
    ConfigurationError,
)
from dcp_datastates.format.layout import ChecksumTable, blocks
from dcp_datastates.format.metadata_table import FileRecord
from dcp_datastates.io.committed import Committed, open_committed, replacement, sizes
from dcp_datastates.process.forks import public
from dcp_datastates.process.work import Done, Progress, Unit, thread_count, work
from dcp_datastates.storage import attempts, decisions, local, local_store, operations
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.decisions import State
from dcp_datastates.storage.object_path import AnyPath, Location, leave_copy, locate, stored
from dcp_datastates.storage.object_store import put_pieces
from dcp_datastates.storage.readable import ReadableFile

_PIECE_BYTES: Final = 8 * BLOCK_BYTES
_PARTS_IN_FLIGHT: Final = 4
_PHASE: Final = "copy"


@public("copy()")
def copy(
    source: AnyPath,
    target: AnyPath,
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
        StorageError: it cannot be read or written.
        ConfigurationError: an argument cannot work.
    """
    threads = thread_count(threads)
    here, there = locate(source, options=source_options), locate(target, options=target_options)
    if here == there:
        raise ConfigurationError(f"source and target are both {str(here)!r}; name another target")
    committed = open_committed(here)
    attempt = committed.note.attempt
    there_before = committed_at(there)
    if there_before == attempt:
        return there
    if there_before is not None:
        raise CheckpointExistsError(
            f"another checkpoint, attempt {there_before.name}, is committed at {str(there)!r}; delete it, or copy to "
            f"another path"
        )
    make_place(there, attempt)
    records = list(committed.note.files.values())
    units = copies(committed, there, records)
    try:
        work(units, sum(record.nbytes for record in records), threads, progress)
    except (CheckpointCorruptError, FileNotFoundError) as error:
        if (replaced := replacement(here, attempt, "copy")) is not None:
            raise replaced from None
        raise CheckpointCorruptError(str(error)) from error
    publish(there, attempt, committed.data)
    return there


def copies(committed: Committed, target: Location, records: Sequence[FileRecord]) -> list[Unit]:
    """One unit of work for each of ``records``: it writes the file, and makes it durable, unless an earlier call has
    left it whole. Any thread. Two copies write the same.
    """
    found = sizes(target, [record.relative_path for record in records])

    def unit(record: FileRecord, done: Done) -> None:
        # A file appears when all of it is written.
        is_there = found[record.relative_path] == record.nbytes
        if is_there and _is_whole(target, record):
            done(record.nbytes)
            return
        path = stored(target) / record.relative_path
        while True:
            pieces = checked_pieces(committed.directory, record, done)
            try:
                with operations.during(_PHASE):
                    put_pieces(path.store, path.key, record.nbytes, pieces, _PARTS_IN_FLIGHT)
                return
            except CheckpointCorruptError as error:
                if not leave_copy(committed.directory / record.relative_path, error):
                    raise

    return [partial(unit, record) for record in records]


def checked_pieces(
    directory: Location, record: FileRecord, done: Callable[[int], object]
) -> Iterator[memoryview]:
    """The bytes of a data file in ``directory``, in pieces, each compared with its checksums; last the table of these.

    Raises :class:`CheckpointCorruptError`, or OSError.
    """
    with contextlib.closing(ReadableFile(directory / record.relative_path)) as file:
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
    # Its own memory: a store's library may hold it until it is sent.
    into = memoryview(bytearray(end - begin))
    if file.read_at(begin, into) < len(into):
        raise CheckpointCorruptError(f"{record.relative_path} is cut short, before byte {end}")
    return into


def committed_at(target: Location) -> Attempt | None:
    """The attempt committed at ``target``, or None. Raises :class:`CheckpointExistsError` for another program's."""
    try:
        return open_committed(target).note.attempt
    except CheckpointNotFoundError:
        if attempts.is_taken(target):  # of stock DCP
            raise CheckpointExistsError(
                f"another program's checkpoint is at {str(target)!r}; copy to another path"
            ) from None
        return None


def _is_whole(target: Location, record: FileRecord) -> bool:
    """Whether the bytes at ``target`` are right: a crash, or the way there, may have changed them."""
    try:
        for _ in checked_pieces(target, record, id):
            pass
    except CheckpointCorruptError:
        return False
    return True


# ---- where the copy goes ---------------------------------------------------------------------------


def make_place(target: Location, attempt: Attempt) -> None:
    """Make the place for the files of a copy at ``target``. Any process, any number of times."""
    place = stored(target)
    if place.is_local:
        local_store.make_folder((place / attempt.name).key, _PHASE)


def publish(target: Location, attempt: Attempt, data: bytes) -> None:
    """Commit the copy at ``target``, with the bytes of the decision. All files are there."""
    place = stored(target)
    if place.is_local:
        folder = Path(str(place / attempt.name))
        with local.explained("making the copy durable", folder):
            for parent in local.sync_directories(folder):
                operations.sync_directory(parent, _PHASE)
    attempts.register(place, attempt)
    if decisions.decide_alone(place, attempt, data) is not State.COMMITTED:
        raise CheckpointSupersededError(
            f"attempt {attempt.name} at {str(place)!r} was withdrawn or deleted there before; copy to another path"
        )
    with contextlib.suppress(OSError):  # no loader needs it
        Place(target).show(attempt, data)


def remove_older(target: Location, attempt: Attempt) -> None:
    """Remove what older attempts have left at ``target``. The copy is committed."""
    if older := [other for other in attempts.present(target) if other < attempt]:
        Place(target).remove(older)
