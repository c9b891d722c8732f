"""The order of saves that DCP runs.

DCP starts a thread for each asynchronous save, and does not order them. If two threads run collectives on one process
group at once, their messages get mixed up. So an asynchronous save takes a *turn* among its ranks' saves: while the
turn lasts, the planning thread waits, and plans no other save.

The turn ends when DCP is done with the save. DCP tells the writer of no early end (another rank's planner failed, say),
so the planning thread looks whether DCP's thread is still there.
"""

from __future__ import annotations

import atexit
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from dcp_datastates.errors import RankLostError
from dcp_datastates.process.forks import ProcessLock, after_fork
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.rank_context import context_of

__all__ = ["Turn", "await_turns", "bind", "end_here"]

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1

_BEGIN_SECONDS: Final = 60.0
"""How long DCP's thread may take to come."""

_LEAVE_SECONDS: Final = 60.0
"""How long DCP's thread may live on after the outcome of its save, before the next save begins."""

_GATE_SECONDS: Final = 10.0
"""How long the step gate holds training for a save that cannot be planned."""

_lock = ProcessLock()  # guards _turns
_turns: list[Turn] = []  # that are not over


class Turn:
    """The turn of ``save``; constructing it takes the place. DCP is about to start the save's thread."""

    def __init__(self, save: SaveOperation) -> None:
        self._save = save
        self._thread: threading.Thread | None = None
        self._made = time.monotonic()
        self._until = math.inf
        self._has_begun = threading.Event()
        self.is_planned = False
        """DCP's own planning is over: all ranks have come."""
        self.is_over = False
        with _lock:
            _turns.append(self)
        save.committed.add_done_callback(self._told)
        if not context_of(save.call.group).hold(self._last):  # the process is ending
            self._has_begun.set()

    def come(self) -> None:
        """Make the calling thread the save's. It may then work for any time before :meth:`wait`."""
        end_here()
        _here.save = self._save
        self._thread = threading.current_thread()

    def wait(self, look: Callable[[], None] = lambda: None) -> None:
        """Block, without the GIL, until the turn begins. Calls ``look`` now and then."""
        while not self._has_begun.wait(_POLL_SECONDS):
            if self._save.over:
                return
            look()

    def _told(self, outcome: Future[None]) -> None:
        # After a commit, DCP's last collective takes a moment. After a failure, it may wait for a lost rank.
        failed = self._save.committed.peek() is not None
        patience = self._save.call.config.commit_timeout if failed else 0.0
        self._until = time.monotonic() + max(_LEAVE_SECONDS, patience)

    # ---- the planning thread -----------------------------------------------------------------

    def _last(self) -> None:
        """Return when the turn is over."""
        while _before(self):  # of other ranks: they may have the same planner
            time.sleep(_POLL_SECONDS)
        self._has_begun.set()
        try:
            while not self._save.await_end(_POLL_SECONDS):
                if self._is_left():
                    _end(self._save)
                _release_gates(self)
        finally:
            self.is_over = True
            with _lock:
                _turns.remove(self)

    def _is_left(self) -> bool:
        now = time.monotonic()
        if self._thread is None:
            return now - self._made > _BEGIN_SECONDS or self._save.over
        return now > self._until or not self._thread.is_alive()

    def _fail(self, why: str) -> None:
        error = self._save.record_error(
            RankLostError(f"{why}, and training waits no longer for it")
        )
        logger.error("the save to %r is given up: %s", str(self._save.path), error)
        self._save.fail(error)
        assert self._save.reads is not None
        self._save.reads.fail(error)


def _end(save: SaveOperation) -> None:
    try:
        save.end()
    except Exception:  # from a callback of a future, say
        logger.exception("a save could not be ended")


def _before(turn: Turn | None) -> bool:
    """Whether there are earlier turns (None: any)."""
    with _lock:
        return bool(_turns) and _turns[0] is not turn


def await_turns(look: Callable[[], None]) -> None:
    """Return when all turns are over, or in the thread of one of them. Calls ``look`` now and then."""
    while _before(None):
        with _lock:
            if any(turn._thread is threading.current_thread() for turn in _turns):
                return
        time.sleep(_POLL_SECONDS)
        look()


def _release_gates(present: Turn) -> None:
    """Give up saves that hold training at the step gate, and cannot be planned: a rank has not made the call, or DCP's
    thread of the ``present`` turn waits for a rank in vain. (A turn that takes long is no reason.)
    """
    with _lock:
        turns = list(_turns)
    for turn in turns:
        save = turn._save
        if turn.is_planned or save.reads is None or save.reads.gate_waits < _GATE_SECONDS:
            continue
        detector, call = save.call.group.detector, save.call
        if detector is not None and (absent := detector.absent(call.number)):
            ranks = ", ".join(map(str, absent[:3]))
            turn._fail(f"rank {ranks} has not called dcp.async_save as often as this one")
        elif (
            turn is not present
            and present._save.call.group is call.group
            and present._save.committed.peek() is not None
        ):
            turn._fail("DCP still waits for other ranks in a save that has failed")


class _Here(threading.local):
    save: SaveOperation | None = None


_here = _Here()


def bind(save: SaveOperation) -> None:
    """Note that the calling thread runs the synchronous ``save``, and no other any more. It ends with the thread."""
    global _watch
    end_here()
    _here.save = save
    with _lock:
        if _watch is None:
            _watch = _Watch()
    _watch.add(save)


class _Watch:
    """Ends synchronous saves whose threads have ended. Its own thread is a daemon."""

    def __init__(self) -> None:
        self._arriving: queue.SimpleQueue[tuple[threading.Thread, SaveOperation]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="dcp_datastates-watch", daemon=True).start()

    def add(self, save: SaveOperation) -> None:
        """Watch the calling thread until ``save`` has ended."""
        self._arriving.put((threading.current_thread(), save))

    def _run(self) -> None:
        watched: list[tuple[threading.Thread, SaveOperation]] = []
        while True:
            if not watched:
                watched.append(self._arriving.get())
            while not self._arriving.empty():
                watched.append(self._arriving.get())
            watched[0][1].await_end(_POLL_SECONDS)
            for thread, save in watched:
                if not thread.is_alive():
                    _end(save)
            watched = [each for each in watched if not each[1].await_end(0.0)]


_watch: _Watch | None = None


def end_here(*, asynchronous: bool = True) -> None:
    """End the part before the commit of the calling thread's save, when the thread makes another call or ends.

    ``asynchronous=False`` spares asynchronous saves: a destructor may make the call while such a save is running.
    """
    save = _here.save
    if save is not None and (asynchronous or not save.call.asynchronous):
        _here.save = None
        save.end()


@after_fork
def _forget_in_child() -> None:
    global _watch
    _watch = None
    _turns.clear()
    _here.save = None


atexit.register(end_here)  # else the process would wait for an interrupted synchronous save
