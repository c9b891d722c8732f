"""What lies at the path of a checkpoint, or of a directory of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from dcp_datastates.errors import ConfigurationError, StorageError
from dcp_datastates.storage import attempts, local_store, operations, presence, store_index
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.object_path import Location, ObjectPath, stored
from dcp_datastates.storage.object_store import StoredObject

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
    place = stored(root)
    listing = place.store.list(place.key)
    if not (listing.folders or listing.objects or listing.links):
        if not place.is_local:
            presence.check_answers(place.store, place.key)
        elif presence.is_file(str(place)):
            raise ConfigurationError(
                f"root={str(root)!r} is a file; pass the directory that the checkpoints are saved in"
            )
    names = [*listing.folders, *listing.links]
    return [name for name in names if name not in (_LOST, store_index.INDEX_NAME)]


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


def attempts_at(path: Location) -> list[Attempt]:
    """The attempts at a checkpoint's path, oldest first. Raises :class:`StorageError`."""
    return attempts.present(stored(path))


def has_rest(path: Location) -> bool:
    """Whether an interrupted deletion has left anything at ``path`` but attempts. Raises :class:`StorageError`."""
    place = stored(path)
    return place.is_local and local_store.has_unfinished(place.key)


def is_committed(path: Location) -> bool:
    """Whether a checkpoint is committed at ``path``, of this package or, in a file system, of another program. Raises
    :class:`StorageError` if that cannot be told.
    """
    return attempts.is_taken(stored(path))


def may_be_committed(path: Location) -> bool:
    """:func:`is_committed`, or that cannot be told: who opens the checkpoint learns why. Sends no request to a store:
    there, any prefix but an attempt's may be a checkpoint.
    """
    if not stored(path).is_local:
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


def newest_possible(paths: Iterable[Location]) -> list[tuple[Attempt, Location]]:
    """Each of ``paths`` with an attempt that no attempt committed there exceeds, from the names on storage alone.

    The paths in one store's root are looked up in its index, by one request, whose failure is raised.
    """
    indexes: dict[ObjectPath, Mapping[str, Attempt]] = {}
    found: list[tuple[Attempt, Location]] = []
    for path in paths:
        place = stored(path)
        if place.is_local:
            found.append((newest_attempt(path), path))
            continue
        root = place.parent
        if root not in indexes:
            # The first entry of a name is its newest.
            entries = reversed(store_index.entries(root))
            indexes[root] = {entry.name: entry.attempt for entry in entries}
        # Other tools copy checkpoints without an entry in the index.
        found.append((indexes[root].get(path.name, _NEWEST), path))
    return found


def newest_attempt(path: Location) -> Attempt:
    """An attempt that none committed at ``path`` exceeds, as far as the names there tell: the greatest of all if there
    are none, or they cannot be read.
    """
    try:
        return max(attempts_at(path), default=_NEWEST)
    except StorageError:
        return _NEWEST


def remove_all(path: Location, first: Iterable[str]) -> None:
    """Remove another program's checkpoint, with all that lies in it; the files ``first`` before all others, so that the
    rest is no checkpoint if this is interrupted. Raises OSError.
    """
    place = stored(path)
    with operations.during("delete", place.folder):
        place.store.delete([(place / name).key for name in first])
    if place.folder is not None:
        operations.remove_tree(place.folder)
    else:
        attempts.delete_objects(place, _all_below(place))


def _all_below(place: ObjectPath) -> Iterator[StoredObject]:
    listing = place.store.list(place.key)
    yield from listing.objects
    for name in listing.folders:
        yield from _all_below(place / name)
