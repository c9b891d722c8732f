"""The order of saves that DCP runs.

DCP starts a thread for each asynchronous save, and does not order them. If two threads run collectives on one process
group at once, their messages get mixed up. So each asynchronous save takes a *turn*, which ends with the save's part
before the commit. The planning thread of its ranks plans no other save until this one is planned, or has failed.

DCP tells the writer of no early end (another rank's planner failed, say), so a thread of this module looks whether
DCP's threads are still there.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from dcp_datastates.errors import RankLostError
from dcp_datastates.process.ending import at_exit
from dcp_datastates.process.futures import when_done
from dcp_datastates.saving.agreement import GATE_SECONDS
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.rank_context import context_of

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1

_BEGIN_SECONDS: Final = 60.0
"""How long DCP's thread may take to come."""

_LEAVE_SECONDS: Final = 60.0
"""How long DCP's thread may live on after the outcome of its save, before the next save begins."""

_lock = threading.RLock()  # guards _turns and _watch
_turns: list[Turn] = []  # in order


class Turn:
    """The turn of ``save``; constructing it takes the place. DCP is about to start the save's thread."""

    def __init__(self, save: SaveOperation) -> None:
        self.save: Final = save
        self.thread: threading.Thread | None = None
        """DCP's thread."""
        self.have_all_come = False
        """Whether DCP's own planning is over, so that all ranks have come."""
        self._made = time.monotonic()
        self._until = math.inf
        self._has_begun = threading.Event()
        self._is_planned = threading.Event()
        with _lock:
            _turns.append(self)
        when_done(save.committed, self._told)
        if not context_of(save.group_of_call).hold(self._hold):  # the process is ending
            self._has_begun.set()
        _watch_until_ended(self)

    def come(self) -> None:
        """Make the calling thread the save's. It may then work for any time before :meth:`wait`."""
        end_here()
        _here.save = self.save
        self.thread = threading.current_thread()

    def wait(self, look: Callable[[], None] = lambda: None) -> None:
        """Block, without the GIL, until the turn begins. Calls ``look`` now and then."""
        while not self._has_begun.wait(_POLL_SECONDS):
            # A save that has failed still meets the other ranks in DCP's collectives, to tell them.
            if self.save.has_ended or (self.save.committed.done() and _before(self) is None):
                return
            look()

    def planned(self) -> None:
        """Let the planning thread go on: the save is planned, or has failed."""
        self._is_planned.set()

    @property
    def is_left(self) -> bool:
        """Whether DCP is done with the save: its thread has ended, or waits in vain for a lost rank."""
        now = time.monotonic()
        if self.thread is None:
            return now - self._made > _BEGIN_SECONDS
        return now > self._until or not self.thread.is_alive()

    def await_end(self, seconds: float) -> None:
        """Wait up to ``seconds`` until DCP is done with the save, and end it then."""
        if self.thread is None:
            self.save.await_end(seconds)
        else:
            self.thread.join(seconds)
        if self.is_left:
            _end(self.save)

    def give_up(self, why: str) -> None:
        """Fail the save, and let training go on."""
        error = self.save.record_error(RankLostError(f"{why}, and training waits no longer for it"))
        logger.error("the save to %r is given up: %s", str(self.save.path), error)
        self.save.fail(error)
        self.save.reads.fail(error)

    def _told(self, outcome: Future[None]) -> None:
        # After a commit, DCP's last collective takes a moment. After a failure, it may wait for a lost rank.
        failed = self.save.committed.peek() is not None
        patience = self.save.config.commit_timeout if failed else 0.0
        self._until = time.monotonic() + max(_LEAVE_SECONDS, patience)

    def _hold(self) -> None:
        """Hold the planning thread until the save is planned, or has failed."""
        save = self.save
        while not (save.committed.done() or save.has_ended):
            first = _before(self)  # of other ranks, too: they may share the planner
            if first is not None:
                first.await_end(_POLL_SECONDS)
                continue
            self._has_begun.set()
            if self._is_planned.wait(_POLL_SECONDS):
                return


def _end(save: SaveOperation) -> None:
    try:
        save.end()
    except Exception:  # from a callback of a future, say
        logger.exception("a save could not be ended")


def _before(turn: Turn | None) -> Turn | None:
    """The first turn that is not over, unless it is ``turn``."""
    with _lock:
        first = next((each for each in _turns if not each.save.has_ended), None)
    return None if first is turn else first


def await_turns(look: Callable[[], None]) -> None:
    """Return when all turns are over, or in the thread of one of them. Calls ``look`` now and then."""
    while (first := _before(None)) is not None:
        with _lock:
            running = [turn.thread for turn in _turns if not turn.save.has_ended]
        if threading.current_thread() in running:
            return
        first.await_end(_POLL_SECONDS)
        look()


def _release_gates() -> None:
    """Give up saves that hold training at the step gate, and cannot be planned: a rank has not made the call, or DCP's
    thread of the present turn waits for a rank in vain. (A turn that takes long is no reason.)
    """
    with _lock:
        turns = [turn for turn in _turns if not turn.save.has_ended]
    for turn in turns:
        save, present = turn.save, turns[0].save
        if turn.have_all_come or save.reads.gate_waits < GATE_SECONDS:
            continue
        detector = save.group_of_call.detector
        if detector is not None and (absent := detector.absent(save.number, own=False)):
            ranks = ", ".join(map(str, absent[:3]))
            turn.give_up(f"rank {ranks} has not called dcp.async_save as often as this one")
        elif (
            save is not present
            and present.group_of_call is save.group_of_call
            and present.committed.peek() is not None
        ):
            turn.give_up("DCP still waits for other ranks in a save that has failed")


class _Here(threading.local):
    save: SaveOperation | None = None


_here = _Here()


def bind(save: SaveOperation) -> None:
    """Note that the calling thread runs the synchronous ``save``, and no other any more. It ends with the thread."""
    end_here()
    _here.save = save
    _watch_until_ended(_Synchronous(save))


@dataclass(frozen=True, eq=False)
class _Synchronous:
    """A save in the thread of its call."""

    save: SaveOperation
    thread: threading.Thread = field(default_factory=threading.current_thread)

    @property
    def is_left(self) -> bool:
        return not self.thread.is_alive()


class _Watch:
    """Ends saves that DCP has left. Its own thread is a daemon."""

    def __init__(self) -> None:
        self._arriving: queue.SimpleQueue[Turn | _Synchronous] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="dcp_datastates-watch", daemon=True).start()

    def add(self, watched: Turn | _Synchronous) -> None:
        """Watch until the save has ended."""
        self._arriving.put(watched)

    def _run(self) -> None:
        watched: list[Turn | _Synchronous] = []
        while True:
            if not watched:
                watched.append(self._arriving.get())
            while not self._arriving.empty():
                watched.append(self._arriving.get())
            watched[0].save.await_end(_POLL_SECONDS)
            for each in watched:
                if each.is_left:
                    _end(each.save)
            _release_gates()
            watched = [each for each in watched if not each.save.has_ended]
            with _lock:
                _turns[:] = [turn for turn in _turns if not turn.save.has_ended]


_watch: _Watch | None = None


def _watch_until_ended(watched: Turn | _Synchronous) -> None:
    global _watch
    with _lock:
        if _watch is None:
            _watch = _Watch()
    _watch.add(watched)


def end_here(*, asynchronous: bool = True) -> None:
    """End the part before the commit of the calling thread's save, when the thread makes another call or ends.

    ``asynchronous=False`` spares asynchronous saves: a destructor may make the call while such a save is running.
    """
    save = _here.save
    if save is not None and (asynchronous or not save.asynchronous):
        _here.save = None
        save.end()


at_exit(end_here)  # else the process would wait for an interrupted synchronous save
