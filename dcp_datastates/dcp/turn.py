"""Saves that DCP runs: their order, and what DCP's calls for each have said so far.

DCP starts a thread for each asynchronous save, and does not order them. If two threads run collectives on one process
group together, their messages get mixed up. So each save takes a *turn*, which ends with the save's part before the
commit. It begins when all asynchronous saves before it are over. The planning thread of its ranks plans no other save
until this one is planned, or has failed.

DCP tells the writer of no early end (another rank's planner failed, say), so a thread of this module looks whether
DCP's threads are still there.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from dcp_datastates.dcp.object_planning import ObjectPlanning
from dcp_datastates.dcp.planner import NO_PLAN, options_in_columns, plan_in_columns, planned_state
from dcp_datastates.errors import ConfigurationError, RankLostError, SaveAbandonedError
from dcp_datastates.planning.column_planning import StateToPlan
from dcp_datastates.planning.save_planning import SavePlanning
from dcp_datastates.process.futures import when_done
from dcp_datastates.saving.agreement import GATE_SECONDS
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.rank_context import context_of
from dcp_datastates.saving.start import end_here, here, stage_in_place
from dcp_datastates.storage.object_path import Location

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1
_BEGIN_SECONDS: Final = 60.0
"""How long DCP's thread may take to come."""

_LEAVE_SECONDS: Final = 60.0
"""How long DCP's thread may live on after the outcome of its save, before the next save begins."""

_lock = threading.RLock()  # guards _turns and _is_watched
_turns: list[DcpSave] = []  # in order, those that are not over
_is_watched = False


class DcpSave:
    """A save that DCP runs, in one thread, and its turn; constructing it takes the place. A synchronous ``save`` is the
    calling thread's. For another one, DCP is about to start a thread.
    """

    def __init__(self, save: SaveOperation) -> None:
        global _is_watched
        self.save: Final = save
        self.rank = 0
        """This process's rank for DCP."""
        self.is_coordinator = False
        """Whether it is DCP's coordinator."""
        self.thread: threading.Thread | None = None
        """The thread that runs the save."""
        self.state: dict[Any, Any] | None = None
        """The state that DCP has got from ``stage()``, until it is planned; None if it has the program's own."""
        self._plan: SavePlan | None = None  # this rank's, of its planner
        self._have_all_come = False  # DCP's own planning is over
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

    def _before(self) -> DcpSave | None:
        """The first turn that this one waits for; also one of other ranks, as they may share the planner."""
        with _lock:
            earlier = itertools.takewhile(lambda each: each is not self, _turns)
            return next((each for each in earlier if each.is_pending), None)

    # ---- DCP's calls ---------------------------------------------------------------------------------

    def keep(self, plan: SavePlan) -> SavePlan:
        """Keep this rank's ``plan``; return the empty one that DCP is shown."""
        self._plan = plan
        forget_cached_plans()
        return dataclasses.replace(plan, items=[], planner_data={})

    def set_world(self, world: int) -> None:
        """Note, on DCP's coordinator, with how many ranks DCP saves."""
        rank_set = self.save.group.rank_set
        if world == 1 != rank_set.world:  # no_dist=True, or a group of one
            self.save.save_alone()
        elif world != rank_set.world:
            raise ConfigurationError(
                f"DCP saves with {world} ranks, the writer commits with {rank_set.world} "
                f"({'all' if rank_set.world > 1 else 'this process alone'}): pass the process_group= that is "
                f"given to dcp.save or dcp.async_save to DataStatesWriter too"
            )

    def write(self, planner: SavePlanner) -> None:
        """Plan the save with this package's pipeline; write this rank's part; return when all its data are read. If it
        raises, the save has failed.
        """
        save = self.save
        forget_cached_plans()
        self._have_all_come = True
        try:
            try:
                finish = context_of(save.group).plan(save, self._planning(planner))
            finally:
                self._is_planned.set()
            finish()
        except BaseException as error:
            save.record_error(error)
            save.fail_part(error)
            self._end()
            raise
        if not self.is_coordinator:
            self._end()

    def _planning(self, planner: SavePlanner) -> SavePlanning | None:
        """How the save is planned; None if it has failed on this rank."""
        save, plan, self._plan = self.save, self._plan, None
        try:
            self._check(planner, plan)
            if save.error is not None or plan is None:
                return None
            if options_in_columns(planner) is None:
                staged = save.reads.staged if save.asynchronous else None
                return ObjectPlanning(planner, lambda _: plan, staged)
            assert isinstance(planner, DefaultSavePlanner)
            state, paths = planned_state(planner)
            if not save.asynchronous:
                stage_in_place(save, state)
                state_of_call = StateToPlan(save.reads.staged, save.reads.state, paths)
            else:  # it was staged at the call, as the program has it
                built, self.state = self.state, None
                assert built is not None, "DCP has read it"
                state_of_call = StateToPlan(save.reads.staged, lambda: built)
            return plan_in_columns(planner, context_of(save.group).planner, state_of_call)
        except Exception as error:
            save.record_error(error)  # the ranks agree first: others wait for this one
            return None

    def finish(self) -> tuple[Location, str]:
        """Coordinator: return when the save is committed: where, and as which attempt; or raise why not."""
        save = self.save
        try:
            attempt = save.ticket().attempt.name
            save.await_decision()
            return save.resolved_path(), attempt
        finally:
            self._end()

    def _check(self, planner: SavePlanner, plan: SavePlan | None) -> None:
        if self.save.has_ended:
            raise SaveAbandonedError("DCP has come to this save too late: later saves have begun")
        plans_nothing = plan is not None and plan.planner_data == NO_PLAN.planner_data
        if plans_nothing and options_in_columns(planner) is None:
            raise ConfigurationError(
                f"a {type(planner).__name__} that uses a DataStatesSavePlanner cannot plan for a DataStatesWriter: "
                f"pass the DataStatesSavePlanner itself, or derive from it"
            )
        rank_set = self.save.group.rank_set
        if rank_set.rank != self.rank:
            raise ConfigurationError(
                f"this is rank {self.rank} of the process group that DCP saves with, and rank "
                f"{rank_set.rank} of the writer's; pass the same process_group= to both"
            )
        if self.is_coordinator != (self.rank == 0):
            raise ConfigurationError(
                "DCP's coordinator must be the first rank: leave coordinator_rank=0"
            )

    def _end(self) -> None:
        """Note that the writer's last call is over. The thread of an asynchronous save ends after it; until then it may
        be in DCP's collectives. Alone, there are none.
        """
        save = self.save
        if not save.asynchronous or save.group_of_call.rank_set.world == 1:
            end_here()


def forget_cached_plans() -> None:
    """Make DCP's planners plan their next save anew. With ``enable_plan_caching=True`` they keep plans, of which some
    are the empty ones that they were shown, and would take these for a later save's, also by another writer.
    """
    getattr(SavePlanner, "_cached_save_plan", {}).clear()


def _release_gates() -> None:
    """Give up saves that hold training at the step gate, and cannot be planned: a rank has not made the call, or DCP's
    thread of the present turn waits for a rank in vain. (A turn that takes long is no reason.)
    """
    with _lock:
        turns = [turn for turn in _turns if turn.is_pending]
    for turn in turns:
        save, present = turn.save, turns[0].save
        if turn._have_all_come or save.reads.gate_waits < GATE_SECONDS:
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
