"""Long waits: a log line says what they wait for, and a wait without progress is given up."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Hashable

from dcp_datastates.errors import SaveStalledError
from dcp_datastates.process.ending import Phase, patience_is_over

FIRST_LINE_SECONDS = 5.0
"""A wait is logged after this time, and again each time its length doubles."""


class WaitLog:
    """Logs, now and then, what one wait waits for. For the waiting thread.

    Args:
        who: the waiter, which begins the line.
        first: seconds until the first line, if not :data:`FIRST_LINE_SECONDS`.
    """

    def __init__(
        self,
        logger: logging.Logger,
        who: str,
        first: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._who = who
        self._clock = clock
        self._began = clock()
        self._next = FIRST_LINE_SECONDS if first is None else first

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    def look(self, what: str) -> None:
        """Call this repeatedly while waiting for ``what``. It is cheap: it reads the clock."""
        waited = self.seconds
        if waited >= self._next:
            self._next = 2 * waited
            self._logger.warning("%s has waited for %.0f s: %s", self._who, waited, what)


class Stall:
    """A wait that is given up after some time without progress. For the waiting thread.

    Args:
        who: the waiter, which begins the line.
        limit: seconds without progress.
        patience: seconds at the beginning that count as progress.
    """

    def __init__(
        self,
        logger: logging.Logger,
        who: str,
        limit: float,
        clock: Callable[[], float] = time.monotonic,
        patience: float = 0.0,
    ) -> None:
        self._log = WaitLog(logger, who, clock=clock)
        self._who = who
        self._limit = limit
        self._moved = patience
        self._progress: Hashable = None

    def look(self, progress: Hashable, what: str, *, storage: bool = False) -> None:
        """Call this repeatedly while waiting for ``what``; ``progress`` is a value that changes while there is
        progress. ``storage``: without progress, storage holds it up.

        Raises :class:`SaveStalledError` when ``progress`` has not changed for the limit, or, if it waits for
        ``storage``, when the process ends and has waited long enough.
        """
        waited = self._log.seconds
        if progress != self._progress:
            self._progress, self._moved = progress, max(waited, self._moved)
        idle = waited - self._moved
        ends = storage and patience_is_over(time.monotonic() - idle, Phase.GIVE_UP)
        if ends or idle >= self._limit:
            limit = "the process ends" if ends else f"commit_timeout={self._limit:g}"
            raise SaveStalledError(
                f"{self._who} has waited for {waited:.0f} s, the last {idle:.0f} s without any progress "
                f"({limit}): {what}"
            )
        self._log.look(what)


class Latch:
    """Wakes threads that poll. Unlike ``threading.Event``, it has no lock that the frame interrupted by a signal
    handler could hold.
    """

    def __init__(self) -> None:
        self._set: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Wake the threads that wait now or later."""
        self._set.put(None)

    def wait(self, seconds: float) -> None:
        """Return after :meth:`set` (it may miss one, so callers must poll), or after ``seconds``."""
        with contextlib.suppress(queue.Empty):
            self._set.get(timeout=seconds)
            self._set.put(None)  # for the other waiting threads
