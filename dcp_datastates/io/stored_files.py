"""The data files of a checkpoint: their sizes, and ranges of their bytes."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from typing_extensions import Buffer

from dcp_datastates.errors import CheckpointNotFoundError, StorageError
from dcp_datastates.io.streams import ReadRange
from dcp_datastates.storage import presence
from dcp_datastates.storage.object_path import Location, ObjectPath, stored
from dcp_datastates.storage.object_store import ObjectMissingError
from dcp_datastates.storage.readable import ReadableFile


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
    """Reads ranges of the files or objects at ``paths``, by the text of these. A file stays open as long as the result
    lives. It raises :class:`CheckpointNotFoundError` for one that is missing, and :class:`StorageError`.
    """
    by_name = {str(path): path for path in paths}
    opened = functools.cache(ReadableFile)

    def read_range(name: str, begin: int, end: int) -> Buffer:
        path = by_name[name]
        if not isinstance(path, ObjectPath):
            return _range_of_file(path, begin, end, opened)
        try:
            return path.store.get_range(path.key, begin, end)
        except ObjectMissingError:
            raise CheckpointNotFoundError(f"there is no object {path}") from None

    return read_range


def _range_of_file(
    path: Path, begin: int, end: int, opened: Callable[[Path], ReadableFile]
) -> Buffer:
    data = memoryview(bytearray(end - begin))
    try:
        nbytes = opened(path).read_at(begin, data)
    except StorageError:
        raise
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            error.errno, f"open {path}: {error.strerror}", str(path)
        ) from error
    except OSError as error:
        raise StorageError(error.errno, f"read {path}: {error.strerror}", str(path)) from error
    return data[:nbytes]
