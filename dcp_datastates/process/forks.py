"""What a forked child must make anew: threads of its parent do not exist there, and may have held any lock.

Every module that has a lock or other state takes its locks from here, and says by :func:`after_fork` what else
a child must forget.
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
    """A lock of one process: a forked child finds it free, whichever thread of the parent held it.

    It is re-entrant, because a signal handler or a garbage collection may run in the thread that holds it, and may
    use this package. For the same reason hold it for a few statements only, and never wait with it held: a
    signal handler waits for other threads, and those may want it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


def after_fork(reset: Callable[[], None]) -> Callable[[], None]:
    """Call ``reset`` in a forked child, where all :class:`ProcessLock` are free by then. A decorator.

    It must neither wait, nor use or destroy what belongs to threads of the parent's.
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


os.register_at_fork(after_in_child=_free_locks)  # the first: resets may take locks
