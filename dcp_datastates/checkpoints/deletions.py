"""Deletes old checkpoints while training continues."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from dcp_datastates.errors import DataStatesError
from dcp_datastates.process.forks import ProcessLock

__all__ = ["Deletions"]

logger = logging.getLogger(__name__)


class Deletions:
    """Calls functions that delete, in order, in a thread that lives while there is work.

    Any thread may call the methods. What a deletion raises is logged, with its traceback if it is not an error of
    storage, and the next one runs. If the thread cannot start, or has died, the next call starts another.
    """

    def __init__(self) -> None:
        self._lock = ProcessLock()  # guards _due, _thread
        self._due: deque[Callable[[], object]] = deque()
        self._thread: threading.Thread | None = None

    def request(self, delete: Callable[[], object]) -> None:
        """Have ``delete`` called; never waits. An equal function that still waits does the work of both."""
        with self._lock:
            if delete not in self._due:
                self._due.append(delete)
            self._start()

    def wait(self) -> None:
        """Return when all that was requested is done. Does it in this thread if no other can start."""
        while True:
            with self._lock:
                if self._due:
                    self._start()
                thread, is_done = self._thread, not self._due
            if thread is not None and thread.is_alive():
                thread.join()
            elif is_done:
                return
            else:
                self._run()

    def _start(self) -> None:
        thread = self._thread
        # One that has no identity yet is being started, by what a signal handler has interrupted.
        if thread is not None and (thread.is_alive() or thread.ident is None):
            return
        thread = threading.Thread(target=self._run, name="dcp_datastates-delete")
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
