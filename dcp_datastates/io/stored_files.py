"""The data files of a checkpoint: their sizes in an object store, and ranges of their bytes."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final

from typing_extensions import Buffer

from dcp_datastates.errors import CheckpointNotFoundError, StorageError
from dcp_datastates.io.download import ReadRange
from dcp_datastates.storage import local
from dcp_datastates.storage.object_path import Location, ObjectPath
from dcp_datastates.storage.object_store import ObjectMissingError

__all__ = ["range_reader", "sizes"]


def sizes(directory: ObjectPath, relative_paths: Collection[str]) -> dict[str, int]:
    """The sizes of data files, by their paths below ``directory``: one LIST for each 1,000 objects beside them, or one
    HEAD for a single file.

    Raises :class:`CheckpointNotFoundError` if one is missing, and :class:`StorageError`.
    """
    store, found = directory.store, {}
    if len(relative_paths) == 1:
        for relative_path in relative_paths:
            path = directory / relative_path
            try:
                return {relative_path: store.size(path.key)}
            except ObjectMissingError:
                raise _missing(path) from None
    for folder in {relative_path.rpartition("/")[0] for relative_path in relative_paths}:
        prefix = directory / folder if folder else directory
        for each in store.walk(prefix.key):
            found[f"{folder}/{each.key.rpartition('/')[2]}" if folder else each.key] = each.nbytes
    for relative_path in relative_paths:
        if relative_path not in found:
            raise _missing(directory / relative_path)
    return {relative_path: found[relative_path] for relative_path in relative_paths}


def range_reader(paths: Iterable[Location]) -> ReadRange:
    """Reads ranges of the files or objects at ``paths``, by the text of these. A file stays open as long as the result
    lives. It raises
    :class:`CheckpointNotFoundError` for one that is missing, and :class:`StorageError`.
    """
    by_name = {str(path): path for path in paths}
    opened = functools.cache(_File)

    def read_range(name: str, begin: int, end: int) -> Buffer:
        path = by_name[name]
        if not isinstance(path, ObjectPath):
            return _range_of_file(path, begin, end, opened)
        try:
            return path.store.get_range(path.key, begin, end)
        except ObjectMissingError:
            raise _missing(path) from None

    return read_range


class _File:
    """An open file; it is closed when nothing refers to this any more."""

    def __init__(self, path: Path) -> None:
        self.descriptor: Final = local.open_regular(path)
        weakref.finalize(self, os.close, self.descriptor)


def _range_of_file(path: Path, begin: int, end: int, opened: Callable[[Path], _File]) -> Buffer:
    data = bytearray(end - begin)
    try:
        file = opened(path)
        nbytes = local.read_at(file.descriptor, begin, memoryview(data))
    except StorageError:
        raise
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            error.errno, f"open {path}: {error.strerror}", str(path)
        ) from error
    except OSError as error:
        raise StorageError(error.errno, f"read {path}: {error.strerror}", str(path)) from error
    return memoryview(data)[:nbytes]


def _missing(path: ObjectPath) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"there is no object {path}")
