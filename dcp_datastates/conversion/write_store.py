"""Writes a checkpoint of this package into an object store, as a save of one rank would: its files are streamed, and it
appears by its commit, in place of the checkpoint that was there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from dcp_datastates.commit.place import Place
from dcp_datastates.commit.round import DurablePart, Round
from dcp_datastates.conversion.output_file import Contents, Limits, OutputFile
from dcp_datastates.conversion.source import Source
from dcp_datastates.conversion.write_datastates import datastates_files
from dcp_datastates.errors import CommitOutcomeUnknown, DataStatesError
from dcp_datastates.process.work import Done, Progress, work
from dcp_datastates.storage.claims import Neighbours
from dcp_datastates.storage.object_path import ObjectPath
from dcp_datastates.storage.object_store import put_pieces

__all__ = ["write_to_store"]

_PARTS_IN_FLIGHT: Final = 2
"""Of each file. With the piece that is read and the one that becomes a part, a file holds four: twice the memory of a
thread that writes to a file system.
"""


def write_to_store(
    source: Source, target: ObjectPath, limits: Limits, overwrite: bool, progress: Progress | None
) -> int:
    """Write ``source`` as the checkpoint at ``target``; returns the number of its files.

    If this fails, what was there is still there. Raises :class:`ConfigurationError` for names that the format cannot
    store, :class:`CheckpointExistsError`, :class:`CommitOutcomeUnknown` and :class:`StorageError`.
    """
    place = Place(target)
    claim = place.claim(Neighbours(), overwrite)
    outputs, document = datastates_files(
        source, target, claim.attempt, claim.after, limits.shard_bytes
    )
    save = Round(
        *(0, claim.attempt, target, DurablePart()),
        timeout=0.0,
        path=target,
        claim=claim,
        overwrite=overwrite,
    )
    try:
        _put_all(outputs, source, limits, progress)
    except BaseException:
        place.tidy_after_failure(save, 0, 1)
        raise
    superseded = place.find_older(save)
    try:
        place.publish(save, lambda meta, claim: document)
    except CommitOutcomeUnknown:
        raise
    except DataStatesError:
        place.tidy_after_failure(save, 0, 1)
        raise
    place.tidy_after_commit(save, superseded, 0, 1)
    return len(outputs)


def _put_all(
    outputs: list[OutputFile], source: Source, limits: Limits, progress: Progress | None
) -> None:
    total = sum(info.nbytes for info in source.tensors.values())
    units = (partial(_put, Contents(output, source), limits.piece_bytes) for output in outputs)
    work(units, total, max(1, limits.threads // 2), progress)


def _put(contents: Contents, piece_bytes: int, done: Done) -> None:
    path = contents.output.path
    assert isinstance(path, ObjectPath)
    pieces = _pieces(contents, piece_bytes, done)
    put_pieces(path.store, path.key, contents.output.nbytes, pieces, _PARTS_IN_FLIGHT)


def _pieces(contents: Contents, piece_bytes: int, done: Done) -> Iterator[memoryview]:
    for begin in range(0, contents.end, piece_bytes):
        piece = contents.piece(begin, min(begin + piece_bytes, contents.end))
        yield piece.data
        done(piece.tensor_bytes)
    if contents.output.table_offset is not None:
        yield contents.table()
