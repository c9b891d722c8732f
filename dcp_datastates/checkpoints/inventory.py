"""What lies at the path of a checkpoint, of this package or another program."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Final

from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ForeignCheckpointError,
    StorageError,
)
from dcp_datastates.io.committed import open_committed
from dcp_datastates.storage import attempts, local_store, operations, presence
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.object_path import AnyPath, Location, ObjectPath, locate, stored
from dcp_datastates.storage.object_store import StoredObject
from dcp_datastates.storage.presence import NotAFileError


def is_directory(path: Location) -> bool:
    """Whether ``path`` is a directory, or a prefix with objects below it. Raises :class:`StorageError` for a store."""
    place = stored(path)
    return presence.is_directory(str(place)) if place.is_local else bool(names_at(place))


def is_link(path: Location) -> bool:
    """Whether ``path`` is a symbolic link. Raises :class:`StorageError`."""
    place = stored(path)
    return place.is_local and presence.is_link(str(place))


def names_at(path: Location) -> list[str]:
    """The names of all that lies directly at ``path``; none if nothing does. Raises :class:`StorageError`."""
    place = stored(path)
    if place.is_local:
        return presence.names_in(str(place))
    return place.store.list(place.key).names


def has_rest(path: Location) -> bool:
    """Whether an interrupted deletion has left anything at ``path`` but attempts. Raises :class:`StorageError`."""
    place = stored(path)
    return place.is_local and local_store.has_unfinished(place.key)


def may_be_committed(path: Location) -> bool:
    """Whether a checkpoint is there, or that cannot be told. A store is not asked: any prefix but an attempt's may be
    one.
    """
    if not stored(path).is_local:
        return Attempt.parse(path.name) is None
    try:
        return attempts.is_taken(path)
    except StorageError:
        return True


def remove_all(path: Location, first: Iterable[str]) -> None:
    """Remove another program's checkpoint; the files ``first``, without which it is none, before all others."""
    place = stored(path)
    with operations.during("delete", place.folder):
        place.store.delete([(place / name).key for name in first])
    if place.folder is not None:
        operations.remove_tree(place.folder)
    else:
        place.store.delete(each.key for each in _all_below(place))


def _all_below(place: ObjectPath) -> Iterator[StoredObject]:
    listing = place.store.list(place.key)
    yield from listing.objects
    for name in listing.folders:
        yield from _all_below(place / name)


# ---- whose checkpoint it is ------------------------------------------------------------------------


HUGGING_FACE_INDEX: Final = "model.safetensors.index.json"


class Format(enum.Enum):
    """The format of the checkpoint committed at a path."""

    DATASTATES = "dcp_datastates"
    STOCK = "stock DCP"
    HUGGING_FACE = "Hugging Face safetensors"
    UNKNOWN = "unknown"
    """There are metadata, but neither this package's nor readable as stock DCP's."""
    NONE = "none"


def format_of(path: AnyPath) -> Format:
    """The format of the checkpoint at ``path``, from its metadata, without running any code from them.

    Raises :class:`CheckpointNotFoundError` for an uncommitted save of this package, :class:`CheckpointCorruptError` if
    its metadata are damaged, and :class:`StorageError` if they cannot be read.
    """
    directory = locate(path)
    try:
        open_committed(directory)
    except ForeignCheckpointError:
        return Format.STOCK
    except CheckpointNotFoundError:
        if attempts.present(directory):
            raise
        return Format.HUGGING_FACE if HUGGING_FACE_INDEX in names_at(directory) else Format.NONE
    except (CheckpointCorruptError, NotAFileError):
        if attempts.present(directory):
            raise
        return Format.UNKNOWN
    return Format.DATASTATES
