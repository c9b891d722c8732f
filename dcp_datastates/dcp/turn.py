"""The order of saves that DCP runs.

DCP starts a thread for each asynchronous save, and does not order them. If two threads run collectives on one process
group together, their messages get mixed up. So each save takes a *turn*, which ends with the save's part before the
commit. It begins when all asynchronous saves before it are over. The planning thread of its ranks plans no other save
until this one is planned, or has failed.

DCP tells the writer of no early end (another rank's planner failed, say), so a thread of this module looks whether
DCP's threads are still there.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from dcp_datastates.errors import RankLostError
from dcp_datastates.process.futures import when_done
from dcp_datastates.saving.agreement import GATE_SECONDS
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.rank_context import context_of
from dcp_datastates.saving.start import end_here, here

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1
_BEGIN_SECONDS: Final = 60.0
"""How long DCP's thread may take to come."""

_LEAVE_SECONDS: Final = 60.0
"""How long DCP's thread may live on after the outcome of its save, before the next save begins."""

_lock = threading.RLock()  # guards _turns and _is_watched
_turns: list[Turn] = []  # in order, those that are not over
_is_watched = False


class Turn:
    """The turn of ``save``; constructing it takes the place. A synchronous save is the calling thread's. For another
    one, DCP is about to start a thread.
    """

    def __init__(self, save: SaveOperation) -> None:
        global _is_watched
        self.save: Final = save
        self.thread: threading.Thread | None = None
        """The thread that runs the save."""
        self.have_all_come = False
        """Whether DCP's own planning is over, so that all ranks have come."""
        self._made = time.monotonic()
        self._until = math.inf
        self._has_begun = threading.Event()
        self._is_planned = threading.Event()
        if not save.asynchronous:
            self.come()
        with _lock:
            _turns.append(self)
            if not _is_watched:
                threading.Thread(target=_watch, name="dcp_datastates-watch", daemon=True).start()
                _is_watched = True
        when_done(save.committed, self._told)
        if not context_of(save.group_of_call).hold(self._hold):  # the process is ending
            self._has_begun.set()

    def come(self) -> None:
        """Make the calling thread the save's, and no other save's any more. It may then work for any time before
        :meth:`wait`.
        """
        end_here()
        here.save = self.save
        self.thread = threading.current_thread()

    def wait(self, look: Callable[[], None] = lambda: None) -> None:
        """Block, without the GIL, until the turn begins. Calls ``look`` now and then."""
        while not self._has_begun.wait(_POLL_SECONDS):
            # A save that has failed still meets the other ranks in DCP's collectives, to tell them.
            if self.save.has_ended or (self.save.committed.done() and self._before() is None):
                return
            look()

    def planned(self) -> None:
        """Let the planning thread go on: the save is planned, or has failed."""
        self._is_planned.set()

    @property
    def is_pending(self) -> bool:
        """Whether later saves wait for its end: DCP waits itself for a synchronous one."""
        return self.save.asynchronous and not self.save.has_ended

    @property
    def is_left(self) -> bool:
        """Whether DCP is done with the save: its thread has ended, or waits in vain for a lost rank."""
        now = time.monotonic()
        if self.thread is None:
            return now - self._made > _BEGIN_SECONDS
        return now > self._until or not self.thread.is_alive()

    def await_thread(self, seconds: float) -> None:
        """Wait up to ``seconds`` until the thread of an asynchronous save has ended, or the save has."""
        if self.thread is None or not self.save.asynchronous:  # Python may not have made its thread
            self.save.await_end(seconds)
        else:
            self.thread.join(seconds)

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
        """Hold the planning thread until the save is planned, or has failed. A synchronous save may hang in DCP's
        collectives: it holds the thread for ``commit_timeout`` at most.
        """
        save = self.save
        while not (self._has_begun.is_set() or self._has_failed):
            if (first := self._before()) is None:
                self._has_begun.set()
            else:
                first.save.await_end(_POLL_SECONDS)
        until = math.inf if save.asynchronous else time.monotonic() + save.config.commit_timeout
        while not (self._has_failed or time.monotonic() > until):
            if self._is_planned.wait(_POLL_SECONDS):
                return

    @property
    def _has_failed(self) -> bool:
        return self.save.committed.done() or self.save.has_ended

    def _before(self) -> Turn | None:
        """The first turn that this one waits for; also one of other ranks, as they may share the planner."""
        with _lock:
            earlier = itertools.takewhile(lambda each: each is not self, _turns)
            return next((each for each in earlier if each.is_pending), None)


def _release_gates() -> None:
    """Give up saves that hold training at the step gate, and cannot be planned: a rank has not made the call, or DCP's
    thread of the present turn waits for a rank in vain. (A turn that takes long is no reason.)
    """
    with _lock:
        turns = [turn for turn in _turns if turn.is_pending]
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


def _watch() -> None:
    """End saves that DCP has left, until all are over."""
    global _is_watched
    while True:
        with _lock:
            _turns[:] = [turn for turn in _turns if not turn.save.has_ended]
            turns = list(_turns)
            if not turns:
                _is_watched = False
                return
        turns[0].await_thread(_POLL_SECONDS)
        for turn in turns:
            if turn.is_left:
                try:
                    turn.save.end()
                except Exception:  # from a callback of a future, say
                    logger.exception("a save could not be ended")
        _release_gates()
