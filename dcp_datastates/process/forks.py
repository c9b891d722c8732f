"""Forks: the parent's threads do not exist in a forked child, and may have held any lock.

Every module takes its locks from here, and resets its other state in a child by :func:`after_fork`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

__all__ = ["ProcessLock", "after_fork", "handled"]

_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()
_handled: set[str] = set()


class ProcessLock:
    """A lock that is free in a forked child, whichever thread of the parent held it.

    It is re-entrant, because a signal handler or a garbage collection may run in the thread that holds it, and may use
    this package. For the same reason hold it for a few statements only, and never wait while holding it: a signal
    handler may wait for threads that need the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


def after_fork(reset: Callable[[], None]) -> Callable[[], None]:
    """A decorator: calls ``reset`` in a forked child, after every :class:`ProcessLock` has been freed.

    ``reset`` must not wait, nor use or destroy objects that belong to the parent's threads.
    """
    _handled.add(reset.__module__)
    os.register_at_fork(after_in_child=reset)
    return reset


def handled() -> frozenset[str]:
    """The names of the modules that have used :func:`after_fork`."""
    return frozenset(_handled)


def _free_locks() -> None:
    for lock in list(_locks):
        lock._lock = threading.RLock()


os.register_at_fork(after_in_child=_free_locks)  # registered first: resets may take locks
