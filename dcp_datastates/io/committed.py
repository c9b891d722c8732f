"""Opens the checkpoint committed at a path, and its files; if there is none, the error says what is there instead."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import pickletools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from typing_extensions import Buffer

from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    DataStatesError,
    ForeignCheckpointError,
    StorageError,
)
from dcp_datastates.format import metadata
from dcp_datastates.format.metadata_table import FileRecord, MetadataTable, Note
from dcp_datastates.io.streams import ReadRange
from dcp_datastates.storage import attempts, decisions, presence
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.decisions import State
from dcp_datastates.storage.local import METADATA_NAME
from dcp_datastates.storage.object_path import Location, ObjectPath, leave_copy, stored
from dcp_datastates.storage.object_store import Listing, ObjectMissingError

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
    while True:
        path, data = read(stored(directory))
        try:
            if presence.is_page(data):
                raise presence.web_page(path)
            return Committed(directory, metadata.decode(data, path.location), data)
        except DataStatesError as error:
            if not leave_copy(path, error):
                raise


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


# ---- its data files ------------------------------------------------------------------------------


def sizes(directory: Location, relative_paths: Collection[str]) -> dict[str, int | OSError]:
    """The sizes of data files by their paths below ``directory``, a checkpoint's; FileNotFoundError for one that is not
    there; in a file system, the :class:`StorageError` of one that cannot be looked at. In a store, this is one LIST for
    each 1,000 objects beside them, or one HEAD for a single file, and raises :class:`StorageError`.
    """
    place = stored(directory)
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def look(relative_path: str) -> int | OSError:
        try:
            return place.store.size((place / relative_path).key)
        except ObjectMissingError:
            return missing
        except StorageError as error:
            if not place.is_local:
                raise
            return error

    if len(relative_paths) > 1 and not place.is_local:
        found: dict[str, int] = {}
        for folder in {relative_path.rpartition("/")[0] for relative_path in relative_paths}:
            prefix = place / folder if folder else place
            for each in place.store.list(prefix.key).objects:
                found[f"{folder}/{each.name}" if folder else each.name] = each.nbytes
        return {
            relative_path: found.get(relative_path, missing) for relative_path in relative_paths
        }
    return dict(zip(relative_paths, presence.look_at_each(look, relative_paths), strict=True))


def range_reader(paths: Iterable[Location]) -> ReadRange:
    """Reads ranges of the files or objects at ``paths``, by the text of these. It raises
    :class:`CheckpointNotFoundError` for one that is missing, and :class:`StorageError`.
    """
    places = {str(path): stored(path) for path in paths}

    def read_range(name: str, begin: int, end: int) -> Buffer:
        place = places[name]
        try:
            return place.store.get_range(place.key, begin, end)
        except ObjectMissingError:
            missing = errno.ENOENT
            raise CheckpointNotFoundError(
                missing, f"open {name}: {os.strerror(missing)}", name
            ) from None

    return read_range


# ---- where the metadata are ----------------------------------------------------------------------


_COPIES: Final = "dcp-datastates copy, from where the checkpoint was, makes it one here"


def read(directory: ObjectPath) -> tuple[ObjectPath, bytes]:
    """Where the metadata of the checkpoint at ``directory`` lie, and their bytes. Usually one LIST and one GET.

    Raises :class:`CheckpointNotFoundError` (:class:`ForeignCheckpointError` for one of stock DCP),
    :class:`CheckpointCorruptError` if another program's ``.metadata`` are there, and :class:`StorageError`.
    """
    found = attempts.newest_committed(directory)
    if found is None:
        listing = directory.store.list(directory.key)
        if not (directory.is_local or listing.folders or listing.objects):
            presence.check_answers(directory.store, directory.key)
        data = _metadata_object(directory, listing)
        if data is not None:
            _refuse_foreign(directory, listing, data)
        raise CheckpointNotFoundError(
            f"no committed checkpoint at {str(directory)!r}: {_what_is_there(directory, listing, data)}"
        )
    attempt, data = found
    return decisions.decision_path(directory, attempt), data


def _refuse_foreign(directory: ObjectPath, listing: Listing, data: bytes) -> None:
    if directory.is_local and metadata.is_ours(data):
        return
    reader = "FileSystemReader" if directory.is_local else "FsspecReader"
    if is_stock(data) and (not attempts.attempts_in(listing.folders) or is_complete_pickle(data)):
        raise ForeignCheckpointError(
            f"{str(directory)!r} holds a stock DCP checkpoint, not one of dcp_datastates; it has no checksums; "
            f"torch.distributed.checkpoint.{reader} loads it, and dcp_datastates.convert converts it"
        )
    if directory.is_local:
        metadata.decode(data, directory / METADATA_NAME)  # raises: it is damaged, or a later format


def _what_is_there(directory: ObjectPath, listing: Listing, data: bytes | None) -> str:
    there = attempts.attempts_in(listing.folders)
    states = {attempt: decisions.state_of(directory, attempt) for attempt in there}
    copied = None if data is None else _attempt_in(data, directory / METADATA_NAME)
    if copied is not None and states.get(copied) is None:
        return (
            "it has .metadata, but no decision that they are committed, so another tool has copied it there, perhaps "
            f"not all of it; {_COPIES}"
        )
    if there:
        return _uncommitted(there[-1], states[there[-1]])
    if attempts.INDEX_NAME in listing.folders and (entries := attempts.entries(directory)):
        return f"but there are checkpoints below it, such as {entries[0].name!r}"
    if not (names := listing.names):
        return _of_the_key_itself(directory)
    if directory.is_local and (steps := [each for each in names if _holds(directory / each)]):
        return f"but there are checkpoints below it, such as {max(steps)!r}"
    for pattern, what in _KINDS_OF_FOLDERS.items():
        if any(fnmatchcase(name, pattern) for name in names):
            return f"it is {what}"
    return f"there are {len(names)} other entries, such as {min(names)!r}"


def _holds(path: ObjectPath) -> bool:
    try:
        return bool(attempts.present(path)) or presence.is_there(str(path / METADATA_NAME))
    except StorageError:  # lost+found, say
        return False


def _uncommitted(attempt: Attempt, state: State | None) -> str:
    match state:
        case State.DELETED:
            return "it was deleted, and not all of it is gone yet: dcp_datastates.delete removes the rest"
        case State.WITHDRAWN:
            return f"a save failed, and its attempt {attempt.name} cannot be committed any more"
        case _:
            return f"a save was begun and not committed ({attempt.name}); it is still running, or failed"


def _of_the_key_itself(directory: ObjectPath) -> str:
    if directory.is_local:
        path = Path(str(directory))
        if presence.is_directory(path):
            return "the directory is empty"
        if not presence.is_there(path):
            return "the directory does not exist"
        return f"it is {_KINDS_OF_FILES.get(directory.suffix, 'a file')}"
    if directory.key:
        try:
            directory.store.size(directory.key)
            return f"it is {_KINDS_OF_FILES.get(directory.suffix, 'a file')}"
        except ObjectMissingError:
            pass
        except StorageError as error:
            if error.errno != errno.EACCES:  # of a policy that grants the list of one prefix alone
                raise
    return "there is nothing"


_LARGE: Final = 64 << 20
_BEGIN_BYTES: Final = 1 << 20
_END_BYTES: Final = 1 << 10


def _metadata_object(directory: ObjectPath, listing: Listing) -> bytes | None:
    """The bytes of ``.metadata``; of a large file of another program, only the beginning and the end."""
    path = directory / METADATA_NAME
    sizes = [each.nbytes for each in listing.objects if each.key == path.key]
    if not sizes:
        return None
    try:
        if sizes[0] > _LARGE:
            end = bytes(path.store.get_range(path.key, sizes[0] - _END_BYTES, sizes[0]))
            if not metadata.is_ours(end):
                return bytes(path.store.get_range(path.key, 0, _BEGIN_BYTES)) + end
        return path.store.get(path.key)
    except ObjectMissingError:
        return None
    except StorageError as error:
        if error.errno == errno.EFBIG:
            raise CheckpointCorruptError(str(error)) from error
        raise


def _attempt_in(data: bytes, path: ObjectPath) -> Attempt | None:
    """The attempt that the ``.metadata`` at ``path`` name: a copy of a decision, which is not trusted here."""
    try:
        return metadata.decode(data, path).note.attempt
    except CheckpointCorruptError:
        return None


# ---- what is no checkpoint of this package -------------------------------------------------------


_CONVERTS: Final = "dcp-datastates convert makes a checkpoint of this package of it"

_KINDS_OF_FILES: Final = {
    ".safetensors": f"a safetensors file; {_CONVERTS}",
    ".pt": f"a file, perhaps of torch.save; {_CONVERTS}",
    ".pth": f"a file, perhaps of torch.save; {_CONVERTS}",
    ".ckpt": f"a file, perhaps of Lightning; {_CONVERTS}",
}
_KINDS_OF_FOLDERS: Final = {
    "adapter_config.json": "a folder of PEFT, with an adapter",
    "*.safetensors": f"a folder of safetensors files, such as Hugging Face's; {_CONVERTS}",
    "pytorch_model*.bin*": "a Hugging Face folder with files of torch.save, which save_pretrained() converts",
    "global_step*": "a directory of DeepSpeed's; its tags are below it",
    "zero_pp_rank_*": "a tag that DeepSpeed itself has saved",
    "*_model_states.pt": "a tag that DeepSpeed itself has saved",
}
"""By the ending of a file's name, and by the names in a folder: what it is, and what to do."""


def is_stock(data: bytes) -> bool:
    """Whether a ``.metadata`` that ``decode`` refuses is most likely stock DCP's, rather than a damaged one of this
    package. (:func:`is_complete_pickle` is certain, and slow.)
    """
    return (
        data.endswith(pickle.STOP)
        and b"torch.distributed.checkpoint.metadata" in data
        and b"dcp_datastates" not in data  # begins every .metadata of this package
    )


def is_complete_pickle(data: bytes) -> bool:
    """Whether ``data`` is exactly one complete pickle. Slow; runs no code from it."""
    try:
        *_, (_, _, last) = pickletools.genops(data)
    except ValueError:
        return False
    return last is not None and last + 1 == len(data)
