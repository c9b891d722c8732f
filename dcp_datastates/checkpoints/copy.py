"""Copies a checkpoint, byte for byte: between directories and object stores, verified, and resumable.

A data file is read piece by piece, and each piece is compared with its checksum before it is written. The copy is
published when all files are durable, in the way of the place where it lies: so it is there whole, or not at all. It has
the attempt of the original.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dcp_datastates.checkpoints.copy_target import (
    CopyTarget,
    checked_pieces,
    committed_at,
    is_whole,
    same_size,
)
from dcp_datastates.errors import CheckpointCorruptError, CheckpointExistsError, ConfigurationError
from dcp_datastates.format.metadata import FileRecord
from dcp_datastates.io.committed import Committed, open_committed, replacement
from dcp_datastates.process.forks import enter
from dcp_datastates.process.work import Done, Progress, Unit, thread_count, work
from dcp_datastates.storage.object_path import Location, ObjectPath, locate

__all__ = ["copy"]


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
        StorageError: it cannot be read or written.
        ConfigurationError: an argument cannot work.
    """
    enter("copy()")
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
    place = CopyTarget(there, attempt)
    place.claim()
    records = list(committed.note.files.values())
    left = same_size(there, records)
    units = [
        _unit(committed, place, record, there if record.relative_path in left else None)
        for record in records
    ]
    try:
        work(units, sum(record.nbytes for record in records), threads, progress)
    except (CheckpointCorruptError, FileNotFoundError):
        if (replaced := replacement(here, attempt, "copy")) is not None:
            raise replaced from None
        raise
    place.publish(committed.data)
    return there


def _unit(
    committed: Committed, place: CopyTarget, record: FileRecord, left_in: Location | None
) -> Unit:
    """``left_in``: where an earlier call has left the file, with its size."""

    def run(done: Done) -> None:
        if left_in is not None and is_whole(left_in, record):
            done(record.nbytes)
        else:
            place.write(record, checked_pieces(committed.directory, record, done))

    return run
