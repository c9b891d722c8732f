"""One thread that does what it is given, in order."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

__all__ = ["Worker"]

logger = logging.getLogger(__name__)


class Worker:
    """A thread that starts with the first piece of work and ends with :meth:`close`.

    A daemon, and not a ``ThreadPoolExecutor``: while the interpreter joins DCP's threads at exit, they may still
    bring work, which an executor would refuse by then. Whoever makes a worker closes it at exit.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # guards _thread and _closed
        self._thread: threading.Thread | None = None
        self._closed = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def post(self, work: Callable[[], None]) -> bool:
        """Have ``work`` done after all that was posted before; False after :meth:`close`. Any thread."""
        with self._lock:
            if self._closed:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._work.put(work)
        return True

    def close(self) -> None:
        """Return when all that was posted is done and the thread has ended. Idempotent."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._work.put(None)
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException:
                logger.exception("unexpected error in %s", self._name)
            del work  # or what it holds would live until the next comes
