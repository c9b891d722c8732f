"""Opens the checkpoint committed at a path; if there is none, the error says what is there instead."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    DataStatesError,
    ForeignCheckpointError,
    StorageError,
)
from dcp_datastates.format.metadata import FileRecord, MetadataTable, Note, decode, read
from dcp_datastates.io import stored_metadata
from dcp_datastates.io.foreign import is_complete_pickle, is_stock, kind_of_file, kind_of_folder
from dcp_datastates.storage import attempts, local, presence
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.object_path import Location, ObjectPath

__all__ = ["Committed", "open_committed", "open_nearest", "replacement", "wrong_size"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Committed:
    """A committed checkpoint, as its ``.metadata`` describes it."""

    directory: Location
    table: MetadataTable
    data: bytes = field(repr=False)
    """The bytes of the ``.metadata`` file; in a store, of the decision."""
    committed_at: float
    """The time of publication, in seconds since the epoch. (That of the file is another one after a copy.)"""

    @property
    def note(self) -> Note:
        """This package's note in the metadata."""
        return self.table.note

    @property
    def nbytes(self) -> int:
        """Bytes on storage, according to the metadata."""
        return len(self.data) + sum(record.nbytes for record in self.note.files.values())


def open_committed(directory: Location) -> Committed:
    """Open the checkpoint committed at ``directory``. Does not access its data files. In a store: one LIST and one GET.

    Raises :class:`CheckpointNotFoundError` (:class:`ForeignCheckpointError` for a stock DCP checkpoint),
    :class:`CheckpointCorruptError` or :class:`StorageError`.
    """
    if isinstance(directory, ObjectPath):
        path, data, written_at = stored_metadata.read(directory)
        _check_no_page(data, path)
        table = decode(data, path)
    else:
        data, written_at = _read(directory)
        _check_no_page(data, directory / local.METADATA_NAME)
        table = _decode(data, directory)
    published_at = table.note.published_at
    return Committed(directory, table, data, written_at if published_at is None else published_at)


def _check_no_page(data: bytes, path: Location) -> None:
    if presence.is_page(data):
        raise presence.web_page(path)


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


def wrong_size(record: FileRecord, nbytes: int) -> str | None:
    """The problem of a data file with ``nbytes`` bytes, in words; None if that is its recorded size."""
    if nbytes == record.nbytes:
        return None
    if nbytes < record.nbytes:
        return f"cut short: it has {nbytes} of {record.nbytes} bytes"
    return f"too long: it has {nbytes} bytes instead of {record.nbytes}"


def _read(directory: Path) -> tuple[bytes, float]:
    path = directory / local.METADATA_NAME
    try:
        return presence.asked(lambda: read(path))
    except DataStatesError:
        raise
    except OSError as error:
        if not presence.is_missing(error, path):
            raise presence.unjudged(error, path) from error
        raise CheckpointNotFoundError(
            f"no committed checkpoint at {str(directory)!r}: {_what_is_there(directory)}"
        ) from None


def _decode(data: bytes, directory: Path) -> MetadataTable:
    path = directory / local.METADATA_NAME
    try:
        return decode(data, path)
    except CheckpointCorruptError:
        if _is_stock(data, directory):
            raise ForeignCheckpointError(
                f"{str(directory)!r} holds a stock DCP checkpoint, not one of dcp_datastates; it has no "
                f"checksums; torch.distributed.checkpoint.FileSystemReader loads it, and dcp_datastates.convert "
                f"converts it"
            ) from None
        raise


def _is_stock(data: bytes, directory: Path) -> bool:
    return is_stock(data) and (not attempts.present(directory) or is_complete_pickle(data))


def _what_is_there(directory: Path) -> str:
    if not presence.is_there(directory):
        if (old := local.moved_away(directory)) is not None:
            return (
                f"a conversion to it was killed, which had moved it to {str(old)!r}; move it back"
            )
        return "the directory does not exist"
    if not presence.is_directory(directory):
        return f"it is {kind_of_file(directory.suffix)}"
    uncommitted = attempts.present(directory)
    if uncommitted and attempts.is_rest(directory, uncommitted[-1]):
        return (
            "it was deleted, and not all of it is gone yet: dcp_datastates.delete removes the rest"
        )
    if uncommitted:
        return f"a save was begun and not committed ({uncommitted[-1].name}); it is still running, or failed"
    inside = sorted(presence.names_in(directory))
    if not inside:
        return "the directory is empty"
    steps = [name for name in inside if _may_be_checkpoint(directory / name)]
    if steps:
        return f"but there are checkpoints below it, such as {steps[-1]!r}"
    if (what := kind_of_folder(inside)) is not None:
        return f"it is {what}"
    return f"the directory holds {len(inside)} other entries, such as {inside[0]!r}"


def _may_be_checkpoint(path: Path) -> bool:
    try:
        return presence.is_there(path / local.METADATA_NAME)
    except StorageError:  # lost+found, say
        return False
