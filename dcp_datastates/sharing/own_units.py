"""The units that this rank owns: each is read from storage once, and kept until its readers have it, within bounds."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Final

from typing_extensions import Buffer

from dcp_datastates._native import BLOCK_BYTES
from dcp_datastates.sharing.assignment import Unit


class _Kept:
    """One unit: its bytes, when they are read (None: they could not be), and how many of them are still to be taken."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes: Final = nbytes
        self.data: Final[Future[memoryview | None]] = Future()
        self.taken = 0
        self.in_use = 0  # by so many readers now


class OwnUnits:
    """``count`` units, which are read by ``read``; at most ``most_bytes`` of them are kept. Any thread.

    A unit goes when all of its readers have taken it, when a reader needs the room, or if it could not be read. It does
    not come back: a reader that still needs it reads storage.
    """

    def __init__(self, read: Callable[[Unit], Buffer], count: int, most_bytes: int) -> None:
        self.are_gone: Final = threading.Event()
        """Whether all have been read, and are kept no more."""
        self._read = read
        self._count = count
        self._lock = threading.RLock()  # guards what follows
        self._room: float = most_bytes
        self._kept: dict[int, _Kept] = {}  # by their first blocks, the oldest first
        self._gone: set[int] = set()
        if not count:
            self.are_gone.set()

    def read_ahead(self, unit: Unit) -> bool:
        """Read the unit, unless that was done before. False: there is no room now."""
        with self._lock:
            if unit.begin in self._kept or unit.begin in self._gone:
                return True
            new = self._new(unit)
        if new is not None:
            self._fill(unit, new)
        return new is not None

    @contextlib.contextmanager
    def taken(self, unit: Unit, begin: int, end: int) -> Iterator[memoryview | None]:
        """The bytes [begin, end) of the unit, which count as taken by one reader after the block: kept, or read now, if
        need be in the place of the oldest that nobody uses. None: it has gone, all of the room is in use, or there are
        no such bytes. Waits for a read that has begun.
        """
        with self._lock:
            kept, new = self._kept.get(unit.begin), None
            if kept is None and unit.begin not in self._gone:
                self._make_room(unit)
                kept = new = self._new(unit)
            if kept is not None:
                kept.in_use += 1
        data = whole = None
        try:
            if new is not None:
                self._fill(unit, new)
            whole = None if kept is None else kept.data.result()
            if whole is not None and 0 <= begin < end <= whole.nbytes:
                data = whole[begin:end]
            yield data
        finally:
            if kept is not None:
                with self._lock:
                    kept.in_use -= 1
                    if data is not None and whole is not None:
                        kept.taken += data.nbytes
                        if kept.taken >= unit.readers * whole.nbytes:
                            self._drop(unit.begin)

    def close(self) -> None:
        """Keep nothing any more."""
        with self._lock:
            self._room = -math.inf
            for begin in list(self._kept):
                self._drop(begin)

    def _new(self, unit: Unit) -> _Kept | None:
        nbytes = (unit.end - unit.begin) * BLOCK_BYTES
        if nbytes > self._room:
            return None
        new = self._kept[unit.begin] = _Kept(nbytes)
        self._room -= nbytes
        return new

    def _make_room(self, unit: Unit) -> None:
        for begin, each in list(self._kept.items()):
            if (unit.end - unit.begin) * BLOCK_BYTES <= self._room:
                return
            if each.data.done() and not each.in_use:
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
            self._room += kept.nbytes
        self._gone.add(begin)
        if len(self._gone) >= self._count:
            self.are_gone.set()
