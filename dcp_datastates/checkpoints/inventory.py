"""What lies at the path of a checkpoint, or of a directory of checkpoints: in a file system or in an object store.

The other modules of this room ask here, and know neither.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from dcp_datastates.errors import ConfigurationError, StorageError
from dcp_datastates.format.metadata import FileRecord
from dcp_datastates.storage import (
    attempts,
    decisions,
    local,
    lock,
    presence,
    store_attempts,
    store_index,
)
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.object_path import Location, ObjectPath

__all__ = [
    "attempts_at",
    "committed_among",
    "data_sizes",
    "folders_in",
    "in_flight",
    "is_committed",
    "is_committed_at_root",
    "is_directory",
    "is_fenced",
    "is_link",
    "may_be_committed",
    "names_at",
    "newest_attempt",
    "newest_possible",
    "remove_all",
    "saves_at",
    "sizes_of",
]

_STAT_THREADS: Final = 8
"""Threads that stat files: a shared file system takes a millisecond per file."""

_NEWEST: Final = Attempt(2**64, 0)
"""Greater than every attempt's."""

_LOST: Final = "lost+found"
"""A directory of the file system's own, at its root, which only the superuser may read."""


def folders_in(root: Location) -> list[str]:
    """The names of the directories in ``root``, symbolic links to directories too. Empty if ``root`` does not exist.

    Raises :class:`ConfigurationError` if ``root`` is not a directory, :class:`StorageError` if it cannot be read.
    """
    if isinstance(root, ObjectPath):
        listing = root.store.list(root.key)
        if not (listing.folders or listing.objects):
            presence.check_answers(root.store, root.key)
        return [name for name in listing.folders if name != store_index.INDEX_NAME]
    entries = presence.entries_in(root)
    if not entries and presence.is_file(root):
        raise ConfigurationError(
            f"root={str(root)!r} is a file; pass the directory that the checkpoints are saved in"
        )
    return [each.name for each in entries if each.name != _LOST and local.is_directory(each)]


def is_directory(path: Location) -> bool:
    """Whether ``path`` is a directory, or a prefix with objects below it. Raises :class:`StorageError` for a store."""
    return presence.is_directory(path) if isinstance(path, Path) else bool(names_at(path))


def is_link(path: Location) -> bool:
    """Whether ``path`` is a symbolic link. Raises :class:`StorageError`."""
    return isinstance(path, Path) and presence.is_link(path)


def names_at(path: Location) -> list[str]:
    """The names of all that lies directly at ``path``; none if nothing does. Raises :class:`StorageError`."""
    if isinstance(path, ObjectPath):
        listing = path.store.list(path.key)
        return [*listing.folders, *(each.key.rpartition("/")[2] for each in listing.objects)]
    return presence.names_in(path)


def attempts_at(path: Location) -> list[Attempt]:
    """The attempts at a checkpoint's path, oldest first. Raises :class:`StorageError`."""
    return store_attempts.present(path) if isinstance(path, ObjectPath) else attempts.present(path)


def saves_at(path: Location, there: Iterable[Attempt]) -> list[Attempt]:
    """Those of the attempts ``there`` that may yet be committed: no deletion, nor the rest of one."""
    if isinstance(path, ObjectPath):
        return [attempt for attempt in there if decisions.state_of(path, attempt) is None]
    return [attempt for attempt in there if not attempts.is_rest(path, attempt)]


def is_fenced(path: Location) -> bool:
    """Whether a save at ``path`` that is withdrawn cannot be committed late, wherever it runs, so that no lock and no
    order has to prove that it is abandoned.
    """
    return isinstance(path, ObjectPath)


def is_committed(path: Location) -> bool:
    """Whether a checkpoint is committed at ``path``, of this package or, in a file system, of another program. Raises
    :class:`StorageError` if that cannot be told.
    """
    if isinstance(path, ObjectPath):
        return store_attempts.newest_committed(path) is not None
    return presence.is_there(path / local.METADATA_NAME)


def may_be_committed(path: Location) -> bool:
    """:func:`is_committed`, or that cannot be told: who opens the checkpoint learns why. Sends no request to a store:
    there, any prefix but an attempt's may be a checkpoint.
    """
    if isinstance(path, ObjectPath):
        return Attempt.parse(path.name) is None
    try:
        return is_committed(path)
    except StorageError:
        return True


def committed_among(paths: Iterable[Location]) -> list[Location]:
    """Those of ``paths`` with a committed checkpoint, in their order. Raises :class:`StorageError`."""
    with ThreadPoolExecutor(_STAT_THREADS) as executor:
        paths = list(paths)
        return [
            path for path, yes in zip(paths, executor.map(is_committed, paths), strict=True) if yes
        ]


def is_committed_at_root(root: Location, names: Iterable[str]) -> bool:
    """:func:`is_committed` of a directory in which the directories ``names`` are."""
    if isinstance(root, ObjectPath) and not any(map(Attempt.parse, names)):
        return False
    return is_committed(root)


def newest_possible(paths: Iterable[Location]) -> list[tuple[Attempt, Location]]:
    """Each of ``paths`` with an attempt that no attempt committed there exceeds, from the names on storage alone.

    The paths in one store's root are looked up in its index, by one request, whose failure is raised.
    """
    indexes: dict[ObjectPath, Mapping[str, Attempt]] = {}
    found: list[tuple[Attempt, Location]] = []
    for path in paths:
        if isinstance(path, ObjectPath):
            root = path.parent
            if root not in indexes:
                # The first entry of a name is its newest.
                entries = reversed(store_index.entries(root))
                indexes[root] = {entry.name: entry.attempt for entry in entries}
            # Other tools copy checkpoints without an entry in the index.
            found.append((indexes[root].get(path.name, _NEWEST), path))
        else:
            found.append((newest_attempt(path), path))
    return found


def newest_attempt(path: Location) -> Attempt:
    """An attempt that none committed at ``path`` exceeds, as far as the names there tell: the greatest of all if there
    are none, or they cannot be read.
    """
    # Without any directory, the committed attempt's is gone, or was never needed (the state was empty): only the
    # metadata tell.
    try:
        return max(attempts_at(path), default=_NEWEST)
    except StorageError:
        return _NEWEST


def sizes_of(
    directory: Location, records: Iterable[FileRecord]
) -> list[tuple[FileRecord, int | OSError]]:
    """The data files of a checkpoint, each with its size on storage, or FileNotFoundError, or the :class:`StorageError`
    of looking at it.
    """
    if isinstance(directory, ObjectPath):
        return _sizes_in_store(directory, list(records))

    def look(record: FileRecord) -> tuple[FileRecord, int | OSError]:
        try:
            status = presence.status_of(directory / record.relative_path)
        except StorageError as error:
            return record, error
        return record, FileNotFoundError(
            "there is no such file"
        ) if status is None else status.st_size

    with ThreadPoolExecutor(_STAT_THREADS) as executor:
        return list(executor.map(look, records))


def _sizes_in_store(
    directory: ObjectPath, records: list[FileRecord]
) -> list[tuple[FileRecord, int | OSError]]:
    folders = {os.path.dirname(record.relative_path) for record in records}
    sizes: dict[str, int] = {}
    for folder in folders:
        for each in (directory.store.list((directory / folder).key)).objects:
            sizes[f"{folder}/{each.key.rpartition('/')[2]}"] = each.nbytes
    missing = FileNotFoundError("there is no such object")
    return [(record, sizes.get(record.relative_path, missing)) for record in records]


def data_sizes(folder: Location) -> list[int]:
    """The sizes of the ranks' files in an attempt's directory, in bytes; none if it cannot be read."""
    if isinstance(folder, ObjectPath):
        objects = folder.store.list(folder.key).objects
        return [each.nbytes for each in objects if _is_data(each.key.rpartition("/")[2])]
    try:
        found = [presence.status_of(folder / name) for name in names_at(folder) if _is_data(name)]
    except StorageError:
        return []
    return [status.st_size for status in found if status is not None]


def _is_data(name: str) -> bool:
    return attempts.rank_of(name) is not None


def remove_all(path: Location, first: Iterable[str]) -> None:
    """Remove another program's checkpoint, with all that lies in it; the files ``first`` before all others, so that the
    rest is no checkpoint if this is interrupted. Raises OSError.
    """
    if isinstance(path, ObjectPath):
        path.store.delete([(path / name).key for name in first])
        store_attempts.delete_objects(path, path.store.walk(path.key))
        return
    for name in first:
        (path / name).unlink(missing_ok=True)
    shutil.rmtree(path)


def in_flight(folder: Location) -> bool | None:
    """Whether a live process holds the attempt in ``folder``; None if that is unknown, as in a store."""
    return None if isinstance(folder, ObjectPath) else lock.in_flight(folder)
