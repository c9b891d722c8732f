"""Files and objects that are open for reading at any place."""

from __future__ import annotations

import errno
import os
import weakref

from dcp_datastates.storage import local
from dcp_datastates.storage.object_path import Location, ObjectPath
from dcp_datastates.storage.presence import judged


class ReadableFile:
    """The file or the object at ``location``, open. Any thread may read.

    Raises OSError, as its methods do.
    """

    def __init__(self, location: Location) -> None:
        self._descriptor: int | None = None
        if isinstance(location, ObjectPath):
            self._store, self._key = location.store, location.key
            self.nbytes = self._store.size(self._key)
        else:
            self._descriptor = judged(local.open_regular, location)
            if self._descriptor is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(location))
            # Closes it once, however often it is called, and when nothing refers to this any more.
            self._close = weakref.finalize(self, os.close, self._descriptor)
            self.nbytes = os.fstat(self._descriptor).st_size
            """Its size when it was opened."""

    def read_at(self, offset: int, into: memoryview) -> int:
        """Fill ``into`` from byte ``offset``; returns how many bytes there are: fewer at the end."""
        if self._descriptor is not None:
            return local.read_at(self._descriptor, offset, into)
        end = min(offset + len(into), self.nbytes)
        if end <= offset:
            return 0
        data = memoryview(self._store.get_range(self._key, offset, end)).cast("B")
        into[: len(data)] = data
        return len(data)

    def drop_cached(self, offset: int = 0, nbytes: int = 0) -> None:
        """Have a file's bytes read from storage next time, and leave the page cache to others (0: all from
        ``offset``).
        """
        if self._descriptor is not None:
            local.drop_cached(self._descriptor, offset, nbytes)

    def close(self) -> None:
        """Close it. No thread reads. Idempotent."""
        if self._descriptor is not None:
            self._close()
