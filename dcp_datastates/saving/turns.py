"""DCP's bookkeeping takes turns: one save's collectives at a time, in the order of the saves.

Two threads that run collectives on one process group at once mix up each other's messages. DCP starts a
thread per asynchronous save and has no order among them, so this package gives each a turn.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from dcp_datastates.process.forks import ProcessLock, after_fork

__all__ = ["Turn", "await_all"]

_POLL_SECONDS: Final = 0.1
_BEGIN_SECONDS: Final = 60.0

_lock = ProcessLock()  # guards _last
_last: Turn | None = None


class Turn:
    """A place in the order of this process's saves, taken when it is made.

    The turn lasts from the end of the one before it until :meth:`end`. A thread that dies without
    ending its turn, or that does not come for it within a minute, does not block the ones behind.

    Args:
        expected: whether a thread of DCP's comes for it at once; else this package ends it for certain.
    """

    def __init__(self, *, expected: bool = True) -> None:
        global _last
        self._expected = expected
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._work: Any = None  # the future of what DCP has its thread do
        self._made = time.monotonic()
        with _lock:
            self._previous, _last = _last, self

    def come(self, work: Any = None) -> None:
        """The calling thread becomes its thread: what it does before :meth:`wait` may take its time.

        ``work`` is the future of what it works on, which the thread may outlive.
        """
        self._thread = threading.current_thread()
        self._work = self._work if work is None else work

    def wait(self) -> None:
        """Block, without the GIL, until it is this turn; the calling thread becomes its thread."""
        self.come()
        _await(self._previous)
        self._previous = None

    def end(self) -> None:
        """Let the next one go. Idempotent, any thread."""
        self._ended.set()

    @property
    def ended(self) -> bool:
        """Whether this save's collectives are over."""
        return self._ended.is_set()

    def join(self, seconds: float) -> bool:
        """Whether this turn has ended within ``seconds``, for which it blocks without the GIL."""
        return _await(self, seconds)

    def _gone(self) -> bool:
        if self._thread is None:
            return self._expected and time.monotonic() - self._made > _BEGIN_SECONDS
        return not self._thread.is_alive() or (self._work is not None and self._work.done())


def await_all(look: Callable[[], None] = lambda: None) -> None:
    """Block until every turn taken so far has ended (for a save that runs in the caller's thread).

    Calls ``look`` now and then; what it raises ends the wait.
    """
    with _lock:
        last = _last
    _await(last, look=look)


def _await(
    turn: Turn | None, seconds: float = math.inf, look: Callable[[], None] = lambda: None
) -> bool:
    if turn is None or turn._thread is threading.current_thread():
        return True
    until = time.monotonic() + seconds
    previous = turn._previous
    if previous is not None and turn._thread is None and not _await(previous, seconds, look):
        return False
    while not turn._ended.wait(max(0.0, min(_POLL_SECONDS, until - time.monotonic()))):
        if turn._gone():
            turn.end()
        elif time.monotonic() >= until:
            return False
        look()
    return True


@after_fork
def _forget_in_child() -> None:
    global _last
    _last = None
