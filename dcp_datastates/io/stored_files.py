"""The data files of a checkpoint in an object store: their sizes, and ranges of their bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from typing_extensions import Buffer

from dcp_datastates.errors import CheckpointNotFoundError
from dcp_datastates.io.download import ReadRange
from dcp_datastates.storage.object_path import ObjectPath
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


def range_reader(paths: Iterable[ObjectPath]) -> ReadRange:
    """Reads ranges of the objects at ``paths``, by their URLs. It raises :class:`CheckpointNotFoundError` for one that
    is missing, and :class:`StorageError`.
    """
    by_url = {str(path): path for path in paths}

    def read_range(url: str, begin: int, end: int) -> Buffer:
        path = by_url[url]
        try:
            return path.store.get_range(path.key, begin, end)
        except ObjectMissingError:
            raise _missing(path) from None

    return read_range


def _missing(path: ObjectPath) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"there is no object {path}")
