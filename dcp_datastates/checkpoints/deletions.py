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

__all__ = ["Deletions"]

logger = logging.getLogger(__name__)


_AT_END_SECONDS: Final = 600.0
"""How long the end of the process waits, after the last save: storage may hang."""

_all: weakref.WeakSet[Deletions] = weakref.WeakSet()


class Deletions:
    """Calls functions that delete, in order, in a thread that lives while there is work. The end of the process waits
    for it, for ten minutes at most.

    Any thread may call the methods. What a deletion raises is logged, with its traceback if it is not an error of
    storage, and the next one runs. If the thread cannot start, or has died, the next call starts another.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards _due, _thread
        self._due: deque[Callable[[], object]] = deque()
        self._thread: threading.Thread | None = None
        _all.add(self)

    def request(self, delete: Callable[[], object]) -> None:
        """Have ``delete`` called; never waits. An equal function that still waits does the work of both."""
        with self._lock:
            if delete not in self._due:
                self._due.append(delete)
            self._start()

    def wait(self, seconds: float | None = None) -> bool:
        """Return True when all that was requested is done, or False after ``seconds``. Does it in this thread if no
        other can start.
        """
        enter("waiting for deletions")
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            with self._lock:
                if self._due:
                    self._start()
                thread, is_done = self._thread, not self._due
            if thread is not None and thread.is_alive():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    return False
            elif is_done:
                return True
            else:
                self._run()

    def _start(self) -> None:
        thread = self._thread
        # One that has no identity yet is being started, by what a signal handler has interrupted.
        if thread is not None and (thread.is_alive() or thread.ident is None):
            return
        thread = threading.Thread(target=self._run, name="dcp_datastates-delete", daemon=True)
        try:
            self._thread = thread
            thread.start()
        except BaseException as error:
            if not thread.is_alive():
                self._thread = None
            if not isinstance(error, RuntimeError | MemoryError):
                raise  # an interrupt
            logger.warning("old checkpoints are deleted later, for no thread can start: %s", error)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    self._thread = None
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
        if not each.wait(deadline - time.monotonic()):
            logger.error("the process ends, and a deletion of old checkpoints has not")


at_end(_finish_at_end, Phase.GIVE_UP)
