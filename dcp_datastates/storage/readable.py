"""Files and objects that are open for reading at any place."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Protocol

from dcp_datastates.storage import local
from dcp_datastates.storage.object_path import Location, ObjectPath
from dcp_datastates.storage.object_store import ObjectStore


class ReadableFile(Protocol):
    """A file or an object. Any thread may read."""

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""

    def read_at(self, offset: int, into: memoryview) -> int:
        """Fill ``into`` from byte ``offset``; returns how many bytes there are: fewer at the end. Raises OSError."""

    def drop_cached(self, offset: int = 0, nbytes: int = 0) -> None:
        """Have the bytes read from storage next time, and leave the page cache to others (0: all from ``offset``)."""

    def close(self) -> None:
        """Close it. No thread reads. Idempotent. A file that nothing refers to is closed, too."""


def open_readable(location: Location, store: ObjectStore | None = None) -> ReadableFile:
    """Open the file or the object at ``location``; an object in ``store``, if not in its own. Raises OSError."""
    if isinstance(location, ObjectPath):
        return _Object(store or location.store, location.key)
    return _File(location)


class _File:
    def __init__(self, path: Path) -> None:
        self._descriptor = local.open_regular(path)
        # Closes it once, however often it is called, and when nothing refers to this any more.
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self.nbytes = os.fstat(self._descriptor).st_size

    def read_at(self, offset: int, into: memoryview) -> int:
        return local.read_at(self._descriptor, offset, into)

    def drop_cached(self, offset: int = 0, nbytes: int = 0) -> None:
        local.drop_cached(self._descriptor, offset, nbytes)

    def close(self) -> None:
        self._close()


class _Object:
    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store, self._key = store, key
        self.nbytes = store.size(key)

    def read_at(self, offset: int, into: memoryview) -> int:
        end = min(offset + len(into), self.nbytes)
        if end <= offset:
            return 0
        data = memoryview(self._store.get_range(self._key, offset, end)).cast("B")
        into[: len(data)] = data
        return len(data)

    def drop_cached(self, offset: int = 0, nbytes: int = 0) -> None:
        """A store has no cache of ours."""

    def close(self) -> None:
        """Nothing is open."""
