"""Saves take turns at planning: one save's collectives at a time, in the order of the saves.

If two threads run collectives on one process group at once, their messages get mixed up. DCP starts a thread per
asynchronous save and does not order them, so this package gives each save a turn.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Final

from dcp_datastates.process.forks import ProcessLock, after_fork

__all__ = ["Turn", "await_all"]

_POLL_SECONDS: Final = 0.1
_BEGIN_SECONDS: Final = 60.0

_lock = ProcessLock()  # guards _last
_last: Turn | None = None


class Turn:
    """A save's place in the order of this process's saves; constructing it takes the place.

    The turn lasts from the end of the previous turn until :meth:`end`. It also ends if its thread dies, if no thread
    comes for it within a minute, or if the thread still lives some time after the outcome was told: DCP's last
    collective is over by then.

    Args:
        expected: whether a DCP thread comes for it at once. If not, this package always ends the turn itself.
    """

    def __init__(self, *, expected: bool = True) -> None:
        global _last
        self._expected = expected
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._made = time.monotonic()
        self._until = math.inf
        with _lock:
            self._previous, _last = _last, self

    def come(self) -> None:
        """Make the calling thread the turn's thread. It may then work for any time before :meth:`wait`."""
        self._thread = threading.current_thread()

    def wait(self, look: Callable[[], None] = lambda: None) -> None:
        """Block, without the GIL, until this turn begins; makes the calling thread the turn's thread.

        Calls ``look`` now and then.
        """
        self.come()
        _await(self._previous, look=look)
        self._previous = None

    def told(self, seconds: float) -> None:
        """Note that the save's outcome is known: the thread has ``seconds`` to end. Any thread."""
        self._until = time.monotonic() + seconds

    def end(self) -> None:
        """End the turn; the next may begin. Idempotent. Any thread."""
        self._ended.set()

    @property
    def ended(self) -> bool:
        """Whether this save's collectives are over."""
        return self._ended.is_set()

    def join(self, seconds: float) -> bool:
        """Block, without the GIL, up to ``seconds`` until this turn has ended; return whether it has."""
        return _await(self, seconds)

    def _gone(self) -> bool:
        now = time.monotonic()
        if self._thread is None:
            return self._expected and now - self._made > _BEGIN_SECONDS
        return now > self._until or not self._thread.is_alive()


def await_all(look: Callable[[], None] = lambda: None) -> None:
    """Block until every turn taken so far has ended (for a save that runs in the caller's thread).

    Calls ``look`` now and then; an error that it raises ends the wait.
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
