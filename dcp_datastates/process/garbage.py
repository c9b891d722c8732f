"""Keeps Python's garbage collector from running in the middle of what makes many objects at once."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

from dcp_datastates.process.forks import in_child

_lock = threading.RLock()  # guards what follows
_pausing = 0  # how many threads are within
_resume = False  # the collector was on before the first came


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Turn the collector off for the whole process, for some milliseconds. Any threads, also at the same time.

    The new objects form no cycles, but a collection is due after every thousand of them. It searches all objects of
    the process for cycles, while no other thread runs Python: a third of a second if a program has loaded torch.
    """
    global _pausing, _resume
    with _lock:
        if _pausing == 0:
            _resume = gc.isenabled()
            gc.disable()
        _pausing += 1
    try:
        yield
    finally:
        if not in_child():
            with _lock:
                _pausing -= 1
                if _pausing == 0 and _resume:
                    gc.enable()


# A child's own program runs with the collector, and no thread of the parent ends the pause there.
os.register_at_fork(after_in_child=lambda: gc.enable() if _pausing and _resume else None)
