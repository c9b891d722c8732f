"""The units that this rank owns: each is read from storage once, and kept until all of its readers have it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Final

from typing_extensions import Buffer

from dcp_datastates._native import BLOCK_BYTES
from dcp_datastates.sharing.assignment import Unit

__all__ = ["KeptUnits"]


class _Kept:
    """One unit: its bytes, when they are read (None: they could not be), and how many of them are still to be taken."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self.data: Final[Future[memoryview | None]] = Future()
        self.taken = 0
        self.lent = 0  # how many use the bytes now


class KeptUnits:
    """Reads units by ``read``, and keeps at most ``most_bytes`` of them. Any thread.

    A unit that has gone (all have it, it had to make room, or it could not be read) does not come back: who still needs
    it reads storage.
    """

    def __init__(self, read: Callable[[Unit], Buffer], most_bytes: int) -> None:
        self._read = read
        self._lock = threading.RLock()  # guards what follows
        self._most = most_bytes
        self._nbytes = 0
        self._kept: dict[int, _Kept] = {}  # by their first blocks, the oldest first
        self._gone: set[int] = set()

    @property
    def gone(self) -> int:
        """How many units have been read, and are kept no more."""
        return len(self._gone)

    def read_ahead(self, unit: Unit) -> bool:
        """Read the unit, unless that was done before. False: there is no room now."""
        with self._lock:
            if unit.begin in self._kept or unit.begin in self._gone:
                return True
            new = self._begin(unit)
        if new is not None:
            self._fill(unit, new)
        return new is not None

    @contextlib.contextmanager
    def lent(self, unit: Unit) -> Iterator[memoryview | None]:
        """The unit's bytes, for use within the block: kept, or read now, if need be in the place of the oldest that
        nobody uses. None: they have gone, or all of the room is in use. Waits for a read that has begun.
        """
        new = None
        with self._lock:
            kept = self._kept.get(unit.begin)
            if kept is None and unit.begin not in self._gone:
                self._make_room(unit)
                kept = new = self._begin(unit)
            if kept is not None:
                kept.lent += 1
        try:
            if new is not None:
                self._fill(unit, new)
            yield None if kept is None else kept.data.result()
        finally:
            if kept is not None:
                with self._lock:
                    kept.lent -= 1

    def take(self, unit: Unit, nbytes: int) -> None:
        """A reader has so many bytes of the unit. When all have all, it goes."""
        with self._lock:
            kept = self._kept.get(unit.begin)
            if kept is not None:
                kept.taken += nbytes
                data = kept.data.result() if kept.data.done() else None
                if data is not None and kept.taken >= unit.readers * data.nbytes:
                    self._drop(unit.begin)

    def clear(self) -> None:
        """Keep nothing any more."""
        with self._lock:
            self._most = 0
            for begin in list(self._kept):
                self._drop(begin)

    def _begin(self, unit: Unit) -> _Kept | None:
        nbytes = (unit.end - unit.begin) * BLOCK_BYTES
        if self._nbytes + nbytes > self._most:
            return None
        new = self._kept[unit.begin] = _Kept(nbytes)
        self._nbytes += nbytes
        return new

    def _make_room(self, unit: Unit) -> None:
        nbytes = (unit.end - unit.begin) * BLOCK_BYTES
        for begin, each in list(self._kept.items()):
            if self._nbytes + nbytes <= self._most:
                return
            if each.data.done() and not each.lent:
                self._drop(begin)

    def _fill(self, unit: Unit, new: _Kept) -> None:
        try:
            new.data.set_result(memoryview(self._read(unit)).cast("B"))
        except BaseException as error:
            with self._lock:
                self._drop(unit.begin)
            new.data.set_result(None)
            if not isinstance(error, Exception):
                raise

    def _drop(self, begin: int) -> None:
        kept = self._kept.pop(begin, None)
        if kept is not None:
            self._nbytes -= kept.nbytes
        self._gone.add(begin)
