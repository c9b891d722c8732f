"""Does units of work in several threads, and tells the progress."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Final

from dcp_datastates.config import check_count

_MOST_THREADS: Final = 8

_PROGRESS_SECONDS: Final = 0.1

Progress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes."""

Done = Callable[[int], None]
"""Called by a unit with the bytes that it has done since the last call. Raises if the work is to stop."""

Unit = Callable[[Done], None]
"""A part of the work, which any thread may do."""


def thread_count(threads: int | None) -> int:
    """The number of threads; None means one per core, at most 8. Raises :class:`ConfigurationError`."""
    if threads is None:
        return min(_MOST_THREADS, os.cpu_count() or 1)
    return check_count("threads", threads)


class _Stopped(BaseException):
    """Another unit failed, or the user interrupts."""


def work(units: Iterable[Unit], total: int, threads: int, progress: Progress | None) -> None:
    """Do all ``units``, which together are ``total`` bytes; raises the error of the first that fails.

    Threads take the units in order. ``progress`` is called in the calling thread, about ten times per second and at the
    end.
    """
    waiting = iter(units)
    lock = threading.Lock()  # guards waiting and done
    stopped = threading.Event()
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
        if stopped.is_set():
            raise _Stopped

    def run() -> None:
        while not stopped.is_set():
            with lock:
                unit = next(waiting, None)
            if unit is None:
                return
            unit(count)

    with ThreadPoolExecutor(threads, thread_name_prefix="dcp_datastates-work") as executor:
        running = {executor.submit(run) for _ in range(threads)}
        try:
            while running:
                if progress is not None:
                    progress(done, total)
                ended, running = wait(running, _PROGRESS_SECONDS, FIRST_EXCEPTION)
                for worker in ended:
                    worker.result()
        finally:
            stopped.set()
    if progress is not None:
        progress(done, total)
