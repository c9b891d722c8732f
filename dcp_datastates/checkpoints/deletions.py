"""Deletes old checkpoints while training continues."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

from dcp_datastates.errors import DataStatesError
from dcp_datastates.process.ending import Phase, at_end
from dcp_datastates.process.forks import enter
from dcp_datastates.process.futures import Worker

logger = logging.getLogger(__name__)


_AT_END_SECONDS: Final = 600.0
"""How long the end of the process waits, after the last save: storage may hang."""

_all: weakref.WeakSet[Deletions] = weakref.WeakSet()


class Deletions:
    """Calls functions that delete, in order, in a thread of its own. The process waits ten minutes for it at its end.

    Any thread may call the methods. What a deletion raises is logged, with its traceback if it is not an error of
    storage, and the next one runs. If the thread cannot start, the next call tries again.
    """

    def __init__(self) -> None:
        self._running = threading.RLock()  # held by the thread that carries deletions out
        self._lock = threading.RLock()  # guards _due
        self._due: deque[Callable[[], object]] = deque()
        self._worker = Worker("dcp_datastates-delete")
        weakref.finalize(self, self._worker.finish).atexit = False
        _all.add(self)

    def request(self, delete: Callable[[], object]) -> None:
        """Have ``delete`` called; never waits. An equal function that still waits does the work of both."""
        with self._lock:
            if delete not in self._due:
                self._due.append(delete)
        if not self._worker.post(self._run):
            logger.warning("old checkpoints are deleted later: %s", self._worker.refusal)

    def wait(self, seconds: float | None = None) -> bool:
        """Return True when all that was requested is done (in this thread, if need be), or False after ``seconds``."""
        enter("waiting for deletions")
        done = threading.Event()

        def run() -> None:
            try:
                self._run()
            finally:
                done.set()

        if self._worker.post(run):
            return done.wait(seconds)
        self._run()
        return True

    def _run(self) -> None:
        with self._running:
            while True:
                with self._lock:
                    if not self._due:
                        return
                    delete = self._due.popleft()
                try:
                    delete()
                except (DataStatesError, OSError) as error:
                    logger.warning("old checkpoints were not deleted: %s", error)
                except BaseException:
                    logger.exception("old checkpoints were not deleted, for an unexpected reason")
                del delete  # what it holds


def _finish_at_end() -> None:
    deadline = time.monotonic() + _AT_END_SECONDS
    for each in list(_all):
        if not each.wait(max(0.0, deadline - time.monotonic())):
            logger.error("the process ends, and a deletion of old checkpoints has not")


at_end(_finish_at_end, Phase.GIVE_UP)
