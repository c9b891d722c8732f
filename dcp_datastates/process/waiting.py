"""Long waits: a log line says what they wait for, and a wait without progress is given up."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable
from typing import Final

from dcp_datastates.errors import SaveStalledError
from dcp_datastates.process.ending import Phase, patience_is_over

FIRST_LINE_SECONDS = 5.0
"""A wait is logged after this time, and again each time its length doubles."""

_SHORT_SECONDS: Final = 1.0
"""A wait that has made progress so recently goes on, though the process ends."""


class Wait:
    """One wait. For the waiting thread.

    Args:
        who: the waiter, which begins the line of the log.
        limit: seconds without progress after which the wait is given up.
        first: seconds until the first line, if not :data:`FIRST_LINE_SECONDS`.
        patience: seconds at the beginning that count as progress.
    """

    def __init__(
        self,
        logger: logging.Logger,
        who: str,
        limit: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        *,
        first: float | None = None,
        patience: float = 0.0,
    ) -> None:
        self._logger = logger
        self._who = who
        self._limit = limit
        self._clock = clock
        self._began = clock()
        self._next = FIRST_LINE_SECONDS if first is None else first
        self._moved = patience
        self._progress: Hashable = None

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return self._clock() - self._began

    def look(self, what: str, progress: Hashable = None, *, storage: bool = False) -> None:
        """Call this repeatedly while waiting for ``what``: it is cheap. ``progress`` is a value that changes while
        there is progress. ``storage``: without progress, storage holds it up.

        Raises :class:`SaveStalledError` when ``progress`` has not changed for the limit, or, if it waits for
        ``storage``, when the process ends and has waited long enough.
        """
        waited = self._clock() - self._began
        if progress != self._progress:
            self._progress, self._moved = progress, max(waited, self._moved)
        idle = waited - self._moved
        ends = storage and idle >= _SHORT_SECONDS
        ends = ends and patience_is_over(time.monotonic() - idle, Phase.GIVE_UP)
        if ends or idle >= self._limit:
            limit = "the process ends" if ends else f"commit_timeout={self._limit:g}"
            raise SaveStalledError(
                f"{self._who} has waited for {waited:.0f} s, the last {idle:.0f} s without any progress "
                f"({limit}): {what}"
            )
        if waited >= self._next:
            self._next = 2 * waited
            self._logger.warning("%s has waited for %.0f s: %s", self._who, waited, what)
