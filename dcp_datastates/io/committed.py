"""Opens the checkpoint committed at a path; if there is none, the error says what is there instead."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    DataStatesError,
)
from dcp_datastates.format.metadata import decode
from dcp_datastates.format.metadata_table import FileRecord, MetadataTable, Note
from dcp_datastates.storage import presence
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.object_path import Location, stored

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Committed:
    """A committed checkpoint, as its metadata describe it."""

    directory: Location
    table: MetadataTable
    data: bytes = field(repr=False)
    """The bytes of the decision."""

    @property
    def note(self) -> Note:
        """This package's note in the metadata."""
        return self.table.note

    @property
    def committed_at(self) -> float:
        """The time of publication, in seconds since the epoch. (That of the file is another one after a copy.)"""
        return self.note.published_at

    @property
    def nbytes(self) -> int:
        """Bytes on storage, according to the metadata."""
        return len(self.data) + sum(record.nbytes for record in self.note.files.values())


def open_committed(directory: Location) -> Committed:
    """Open the checkpoint committed at ``directory``. Does not access its data files. One LIST and one GET.

    Raises :class:`CheckpointNotFoundError` (:class:`ForeignCheckpointError` for a stock DCP checkpoint),
    :class:`CheckpointCorruptError` or :class:`StorageError`.
    """
    path, data = read(stored(directory))
    if presence.is_page(data):
        raise presence.web_page(path)
    return Committed(directory, decode(data, path.location), data)


def open_nearest(places: Sequence[Location]) -> Committed:
    """:func:`open_committed` of the first of ``places`` that has the checkpoint, undamaged.

    Raises the error of the first place if none has.
    """
    failure: DataStatesError | None = None
    for place in places:
        try:
            return open_committed(place)
        except DataStatesError as error:
            if failure is None:
                failure = error
            if len(places) > 1:
                logger.warning("%s; looking at the next place", error)
    assert failure is not None
    raise failure


def replacement(directory: Location, was: Attempt, verb: str) -> CheckpointReplacedError | None:
    """The error if ``was`` is no longer the attempt committed at ``directory``; ``verb``: what is to be done again."""
    try:
        now = open_committed(directory).note.attempt
    except CheckpointNotFoundError:
        return CheckpointReplacedError(
            f"{directory}: attempt {was.name} was removed meanwhile, by retain or delete, perhaps; {verb} another "
            f"checkpoint"
        )
    except DataStatesError:
        return None
    if now == was:
        return None
    return CheckpointReplacedError(
        f"{directory}: attempt {was.name} was replaced by {now.name} meanwhile; {verb} again"
    )


def explain_missing(
    directory: Location, note: Note, error: CheckpointNotFoundError
) -> DataStatesError:
    """The error for a data file of the checkpoint ``note`` that is not there: damage, or another save's doing."""
    return replacement(directory, note.attempt, "load") or CheckpointCorruptError(
        f"{error}; the committed checkpoint lacks a data file"
    )


def wrong_size(record: FileRecord, nbytes: int) -> str | None:
    """The problem of a data file with ``nbytes`` bytes, in words; None if that is its recorded size."""
    if nbytes == record.nbytes:
        return None
    if nbytes < record.nbytes:
        return f"cut short: it has {nbytes} of {record.nbytes} bytes"
    return f"too long: it has {nbytes} bytes instead of {record.nbytes}"
