"""One thread that runs functions in order."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
from collections.abc import Callable
from typing import Final

from dcp_datastates.process.forks import enter

logger = logging.getLogger(__name__)

ENDING: Final = "the process is ending"


class Worker:
    """A thread that starts with the first function posted and ends with :meth:`close`.

    A daemon thread rather than a ``ThreadPoolExecutor``: while the interpreter joins DCP's threads at exit, these may
    still post work, which an executor would refuse. The owner closes it at exit.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # guards _thread, and that no thread starts after _closed
        self._thread: threading.Thread | None = None
        self._closed = False
        self._ended = False
        """The thread runs no more than what is in the queue now."""
        self._refusal = ENDING
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()

    def post(self, work: Callable[[], object]) -> bool:
        """Run ``work`` after all earlier posts. Returns False after :meth:`close`, or if the thread cannot start:
        :attr:`refusal` then says which. Any thread may call it.
        """
        enter(f"work for {self._name}")
        if self._closed or not (self._thread is not None or self._start()):
            return False
        # Without the lock: a signal handler that comes now may wait for what another thread posts here.
        self._work.put(work)
        if self._ended:  # a close has come in between, and the thread may be gone
            self._run_rest()
        return True

    @property
    def refusal(self) -> str:
        """Why :meth:`post` returned False, in words."""
        return ENDING if self._closed else self._refusal

    def _start(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except (RuntimeError, MemoryError) as error:
                    logger.warning("%s cannot start: %s", self._name, error)
                    if not sys.is_finalizing() and "shutdown" not in str(error):
                        self._refusal = (
                            f"the system starts no more threads ({error}): raise the limit on processes "
                            f"(ulimit -u, or pids.max of the container), or start fewer threads"
                        )
                    return False
                self._thread = thread
        return True

    def finish(self) -> None:
        """Accept no more work. The thread ends when all posted work is done. Idempotent; does not wait."""
        with self._lock:
            self._closed = True
        self._work.put(None)

    def close(self, seconds: float | None = None) -> bool:
        """Call :meth:`finish`, and wait until the thread has ended, or for ``seconds``. Returns whether it has ended.
        Idempotent.
        """
        self.finish()
        thread = self._thread
        if thread is None:
            return True
        thread.join(seconds)
        return not thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._call(work)
            del work  # release what it holds while waiting for the next
        self._ended = True
        self._run_rest()

    def _run_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (work := self._work.get_nowait()) is not None:
                    self._call(work)
                del work

    def _call(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException:
            logger.exception("unexpected error in %s", self._name)
        finally:
            del work  # an error that a program keeps may keep this frame
