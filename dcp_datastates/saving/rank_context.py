"""The rank context: one per rank set, with the thread that plans this rank's saves in the order of the calls.

``async_save`` submits a save and returns. When all earlier saves are planned, the planning thread begins to plan it,
agrees on it with the other ranks (``agreement.py``), begins to read and write this rank's part, and goes on with the
next save. The reading thread waits until the part is read, and hands it over to the commit group. So the training
thread never waits for another rank or the network.

**One call is one save.** The k-th call on one rank belongs to the k-th call on each other rank. A call that raises
counts, too, and fails the save on all ranks. If a rank leaves a call out, the ranks meet with different paths: that
save fails on all ranks. Each rank then skips its later calls for the paths that the others had in that meeting, so that
the ranks are in step again. If the others' save of this number had another path, and has failed before this rank came,
this rank's call goes on to the next number.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.joint_steps import Answer, alone, together
from dcp_datastates.commit.vote import Decision, Reason
from dcp_datastates.errors import (
    CheckpointSkipped,
    ConfigurationError,
    RankLostError,
    SaveAbandonedError,
    SaveFailedError,
    release_frames,
)
from dcp_datastates.io.destroy_hook import DestroyHook
from dcp_datastates.planning.plan_cache import PlanCache
from dcp_datastates.planning.save_planning import SavePlanning
from dcp_datastates.process.futures import SharedFuture, Worker, when_done
from dcp_datastates.ranks.meetings import GivenUp, Meetings, Met
from dcp_datastates.saving.agreement import (
    GATE_SECONDS,
    GATE_SECONDS_AFTER_A_MISS,
    PeerWatch,
    Proposal,
    agree,
)
from dcp_datastates.saving.operation import Phase, SaveOperation
from dcp_datastates.saving.start import check_path, finish_saves
from dcp_datastates.saving.write import begin_write

logger = logging.getLogger(__name__)

_REFUSING_SECONDS: Final = 300.0
"""How long a rank whose call failed waits for the other ranks, to tell them."""

_LAST_SECONDS: Final = 3.0
"""How long the end of the process lets a rank wait for others in vain. Saves in flight have been waited for before."""

_CLOSE_SECONDS: Final = 10.0
"""How long :meth:`RankContext.close` waits for each of its threads."""


class RankContext:
    """Plans the saves of one rank set, and waits until they are read. Any thread may call :meth:`submit`, :meth:`hold`
    and :meth:`run`, one call at a time; the others run in the planning thread or the reading thread.
    """

    def __init__(self, group: CommitGroup) -> None:
        self.group: Final = group
        self.planner: Final = PlanCache()
        """For saves without a planner of the caller's."""
        self._worker = Worker("dcp_datastates-planning")
        self._reader = Worker("dcp_datastates-reading")
        self._meetings: Meetings | None = None
        self._hook: DestroyHook | None = None
        if group.detector is not None:
            self._meetings = Meetings(group.rank_set, "saves")
            # Register now, in the thread of the call: torch names some groups by the number of existing groups.
            self._hook = DestroyHook(f"dcp_datastates/{group.rank_set.digest}", finish_saves)
        self._closed_at: float | None = None
        self._entries = 0  # number of the latest meeting
        self._gate_seconds = GATE_SECONDS
        self._moved_on = 0  # how many entries more than calls this rank has come to
        self._dcp_lock = threading.RLock()  # held while the ranks agree on a save that DCP runs
        self._dcp_thread: threading.Thread | None = None  # that holds it
        self._dcp_meetings: Meetings | None = None  # made when first needed
        self._dcp_entries = 0  # number of the latest of these meetings
        self._stray: set[str] = set()  # other ranks' paths in a meeting with different calls

    # ---- any thread --------------------------------------------------------------------------

    def submit(self, save: SaveOperation, make: Callable[[SaveOperation], SavePlanning]) -> None:
        """Plan ``save`` after all saves submitted before. Returns immediately. ``make`` makes its planning."""
        # Not a lambda: a traceback would retain its frame, and thereby the arguments.
        if not self._worker.post(functools.partial(self._save, save, make)):
            error = SaveAbandonedError(f"this save was not begun: {self._worker.refusal}")
            save.fail(save.record_error(error))
            save.end()

    def hold(self, work: Callable[[], None]) -> bool:
        """Call ``work`` when all saves submitted before are planned; later ones wait until it returns.

        Returns False if the process is ending, or no thread can start.
        """
        return self._worker.post(work)

    def refuse(self, path: object, error: BaseException) -> None:
        """Tell the other ranks, which wait for this rank, that its call failed."""
        number = self.group.count_call()
        if self._meetings is None:
            return
        name, why = _last_part(path), Reason.of(error)

        def run() -> None:
            try:
                watch = self._watch(f"the save to {str(path)!r}", _REFUSING_SECONDS, number)
                together(functools.partial(self._meet, watch, name), lambda: why, list)
            except Exception as failed:
                logger.warning("the other ranks could not be told that a call failed: %s", failed)

        self._worker.post(run)

    def close(self) -> None:
        """End the threads after all submitted work, within a bound: Python before 3.14 aborts if they are in torch."""
        self._closed_at = time.monotonic()
        self._worker.close(_CLOSE_SECONDS)
        self._reader.close(_CLOSE_SECONDS)
        if self._hook is not None:
            self._hook.close()

    def check_open(self) -> None:
        """Raise :class:`SaveAbandonedError` if the process is ending, and has waited long enough."""
        if self._closed_at is not None and time.monotonic() - self._closed_at > _LAST_SECONDS:
            raise SaveAbandonedError("the process is ending")

    # ---- the planning thread, or the thread of a save that DCP runs -------------------------------

    def plan(self, save: SaveOperation, planning: SavePlanning | None) -> Callable[[], None]:
        """Agree on ``save`` with the other ranks, then begin to read and write this rank's part.

        ``planning`` is None if the save has failed on this rank. Returns as :func:`begin_write`. If this raises, the
        caller must call :meth:`SaveOperation.fail_part`.
        """
        group, name = save.group, save.directory().name
        what, timeout = f"the save to {str(save.path)!r}", save.config.commit_timeout
        watch = self._watch(what, timeout, save.number, save)
        meet = functools.partial(self._meet if save.own else self._meet_in_dcp, watch, name)
        propose = functools.partial(_propose, save, planning)
        try:
            assignment, end = agree(meet, planning, propose, save.draw_ticket)
            if end.failed is None:
                save.agree(assignment.ticket)
        finally:
            self._gate_seconds = (
                GATE_SECONDS_AFTER_A_MISS if watch.let_training_go else GATE_SECONDS
            )
            group.planning = ""
        if save.own:
            self._stray = set(assignment.paths) - {name}
        try:
            if end.failed is not None:
                if end.own is not None:
                    save.record_error(end.own)
                raise end.failed.error(repr(str(save.path)), group.rank_set.world, end.own)
            assert planning is not None
            planning.take(assignment.plan)
            if end.late is not None:
                raise end.late
        finally:
            del end  # a traceback retains this frame
        return begin_write(save, planning)

    # ---- the planning thread -----------------------------------------------------------------

    def _save(self, save: SaveOperation, make: Callable[[SaveOperation], SavePlanning]) -> None:
        try:
            finish = self._plan(save, make)
            read = functools.partial(self._read, save, finish)
            del finish  # a traceback may retain this frame
            save.doing = "reading"
            if not self._reader.post(read):
                raise SaveAbandonedError(f"this save was not read: {self._reader.refusal}")
        except BaseException as error:
            self._give_up(save, error)
        finally:
            del make

    def _plan(
        self, save: SaveOperation, make: Callable[[SaveOperation], SavePlanning]
    ) -> Callable[[], None]:
        name = save.directory().name
        if name in self._stray:
            self._stray.discard(name)
            raise SaveFailedError(
                f"the other ranks made their call for {name!r} before, when this rank came with one for another "
                f"path: they are in step again from here on"
            )
        planning: SavePlanning | None = None
        try:
            if save.error is not None:
                raise save.error
            save.reads.begin()
            planning = make(save)
        except Exception as error:
            failure = save.record_error(error)
            save.reads.fail(failure)  # frees its memory immediately
        save.begin()
        return self.plan(save, planning)

    def _meet(self, watch: PeerWatch, name: str, message: bytes, answer: Answer) -> Met:
        """Meet the other ranks for the next entry, or the one after those that they have given up for other saves."""
        if self._meetings is None:
            return alone(message, answer)
        while True:
            self._entries += 1
            try:
                return watch.meet(self._meetings, self._entries, name, message, answer)
            except GivenUp as stop:
                if not (name and stop.name) or stop.name == name:
                    raise RankLostError(stop.why) from None
                logger.warning(
                    "the other ranks have made one call more than this one, for another path, and it has failed "
                    "(%s): this rank's call for %r counts as their next one",
                    stop.why,
                    name,
                )
                self._moved_on += 1
                self.group.count_call()
                watch.move_on()

    def _meet_in_dcp(self, watch: PeerWatch, name: str, message: bytes, answer: Answer) -> Met:
        """Meet the ranks whose calls DCP has paired, apart from the meetings for calls of this package.

        DCP pairs the calls, and the ranks number those that come so far. If one comes no further (in ``finish_plan``),
        the others give the meeting up: it is another save's, and this rank's is the next.
        """
        if self.group.detector is None:
            return alone(message, answer)
        if self._dcp_thread is threading.current_thread():
            raise SaveFailedError(
                "a signal handler cannot call dcp.save() or dcp.async_save() while it interrupts a save that the ranks "
                "agree on; it can call dcp_datastates.async_save()"
            )
        with self._dcp_lock:
            self._dcp_thread = threading.current_thread()
            try:
                if self._dcp_meetings is None:
                    self._dcp_meetings = Meetings(self.group.rank_set, "saves that DCP runs")
                while True:
                    self._dcp_entries += 1
                    try:
                        return watch.meet(
                            self._dcp_meetings, self._dcp_entries, name, message, answer
                        )
                    except GivenUp as stop:
                        if not stop.early:
                            raise RankLostError(stop.why) from None
            finally:
                self._dcp_thread = None

    def _watch(
        self, what: str, timeout: float, number: int, save: SaveOperation | None = None
    ) -> PeerWatch:
        if save is None or save.own:
            number += self._moved_on
        return PeerWatch(
            self.group, what, timeout, number, self.check_open, save, self._gate_seconds
        )

    # ---- the reading thread ------------------------------------------------------------------

    def _read(self, save: SaveOperation, finish: Callable[[], None]) -> None:
        try:
            finish()
        except BaseException as error:
            self._give_up(save, error)
        else:
            save.end()
        finally:
            del finish  # a traceback may retain this frame

    # ---- both ----------------------------------------------------------------------------------

    def _give_up(self, save: SaveOperation, error: BaseException) -> None:
        """End ``save`` with ``error`` as its outcome, unless the commit group decides that."""
        save.record_error(error)
        release_frames(error)
        when_done(save.committed, _release_outcome)
        save.fail_part(error)
        if save.phase is not Phase.COMMITTING:
            save.fail(self._named(error, save))
        save.end()

    def _named(self, error: BaseException, save: SaveOperation) -> BaseException:
        if str(error).startswith("the save to ") or isinstance(error, CheckpointSkipped):
            return error
        ranks = self.group.rank_set
        told = Decision.failed(-1 if isinstance(error, RankLostError) else ranks.rank, error)
        return told.error(repr(str(save.path)), ranks.world, error)


# No closure: the traceback of an error would keep what it has.
def _propose(save: SaveOperation, planning: SavePlanning | None) -> bytes:
    if save.error is not None:
        raise save.error  # also if this rank leaves the save out
    assert planning is not None
    check_path(save)
    planning.compare_replicas = save.config.compare_replicas or 0
    if planning.compare_replicas and not planning.can_compare:
        raise ConfigurationError(
            "compare_replicas cannot work with a planner of your own, which does not say what are replicas; leave one "
            "of the two out"
        )
    plan = planning.propose(save.group.name, save.group.rank_set.rank)
    name = save.directory().name
    return Proposal(name, planning.kind, save.unused_writers, plan).encode()


def _last_part(path: object) -> str:
    """The name of the directory at ``path``, which a user passed; empty if there is none."""
    try:
        return os.path.basename(str(os.fspath(path)).rstrip("/"))  # type: ignore[call-overload]
    except TypeError:
        return ""


def _release_outcome(committed: Future[None]) -> None:
    """Release the frames of the outcome's error: when the outcome was set, they may still have been running."""
    assert isinstance(committed, SharedFuture)
    if (error := committed.peek()) is not None:
        release_frames(error)


def context_of(group: CommitGroup) -> RankContext:
    """The rank context of ``group``."""
    return group.attached(RankContext)
