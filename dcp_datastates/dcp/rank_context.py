"""The rank context: one per rank set, with the thread that plans this rank's saves in the order of the calls.

``async_save`` submits a save and returns. When all earlier saves are planned, the planning thread begins to plan it,
meets the other ranks (``process_group.py``), makes DCP's calls and hands over to the commit group. So the training
thread never waits for another rank or the network.

**One call is one save.** The k-th call on one rank belongs to the k-th call on each other rank. A call that raises
counts, too, and fails the save on all ranks. If a rank leaves a call out, the ranks meet with different paths: that
save fails on all ranks. Each rank then skips its later calls for the paths that the others had in that meeting, so that
the ranks are in step again.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.round import Compose
from dcp_datastates.commit.vote import Decision, Outcome, Reason
from dcp_datastates.dcp.planner import DataStatesSavePlanner
from dcp_datastates.dcp.process_group import Collectives
from dcp_datastates.dcp.steps import Planned, plan_together
from dcp_datastates.dcp.writer import DataStatesWriter
from dcp_datastates.errors import (
    CheckpointSkipped,
    DataStatesError,
    RankLostError,
    SaveAbandonedError,
    SaveFailedError,
    release_frames,
)
from dcp_datastates.planning.rank_plan_cache import SharesPlanner
from dcp_datastates.process.futures import AskedFuture
from dcp_datastates.process.waiting import WaitLog
from dcp_datastates.process.worker import Worker
from dcp_datastates.ranks.failure_detector import FailureDetector
from dcp_datastates.saving.admission import await_reads
from dcp_datastates.saving.call import LEFT_OUT
from dcp_datastates.saving.document import composer, encode_results
from dcp_datastates.saving.last_saves import finish_saves
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.phase import Phase
from dcp_datastates.saving.start import begin_planning
from dcp_datastates.saving.write import Writing, fail_write

__all__ = ["RankContext", "context_of"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_REFUSING_SECONDS: Final = 300.0
"""How long a rank whose call failed waits for the other ranks, to tell them."""

_LAST_SECONDS: Final = 3.0
"""How long the end of the process lets a rank wait for others in vain. Saves in flight have been waited for before."""

_CLOSE_SECONDS: Final = 10.0
"""How long :meth:`RankContext.close` waits for each of its threads."""


class DifferentSavesError(SaveFailedError):
    """The ranks met with calls for different paths: one of them left a call out."""

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message, names)
        self.names = names

    def __str__(self) -> str:
        return str(self.args[0])


class RankContext:
    """Plans the saves of one rank set, and waits until they are read. Any thread may call :meth:`submit` and
    :meth:`run`, one call at a time; the others run in the planning thread or the reading thread.
    """

    def __init__(self, group: CommitGroup) -> None:
        self.group: Final = group
        self.planner: Final = DataStatesSavePlanner()
        """For saves without a planner of the caller's."""
        self._worker = Worker("dcp_datastates-planning")
        self._reader = Worker("dcp_datastates-reading")
        self._collectives: Collectives | None = None
        if group.detector is not None:
            self._collectives = Collectives(group.rank_set, group.detector, finish_saves)
        self._closed_at: float | None = None
        self._entries = 0  # number of the latest meeting
        self._stray: set[str] = set()  # other ranks' paths in a meeting with different calls

    # ---- any thread --------------------------------------------------------------------------

    def submit(self, save: SaveOperation, writer: DataStatesWriter, planner: SavePlanner) -> None:
        """Plan ``save`` after all saves submitted before. Returns at once."""
        self.group.count_call()
        # Not a lambda: a traceback would retain its frame, and thereby the arguments.
        if not self._worker.post(functools.partial(self._save, save, writer, planner)):
            error = SaveAbandonedError("the process was ending when this save was called for")
            save.fail(save.record_error(error))
            save.end_planning()

    def refuse(self, path: object, error: BaseException) -> None:
        """Tell the other ranks, which wait for this rank, that its call failed."""
        if self._collectives is None:
            return

        def tell() -> None:
            def fail() -> Any:
                raise error

            watch = _PeerWatch(self, f"the save to {str(path)!r}", _REFUSING_SECONDS)
            with self._meet(watch) as ranks:
                ranks.reduce_scatter("plan", fail, lambda _: [])

        def run() -> None:
            try:
                tell()
            except CheckpointException:
                pass  # expected: this is how the ranks learn of it
            except Exception as failed:
                logger.warning("the other ranks could not be told that a call failed: %s", failed)

        self.group.count_call()
        self._worker.post(run)

    def run(self, what: str, timeout: float, work: Callable[[_DistWrapper], T]) -> T:
        """Meet the other ranks and run ``work`` in the planning thread; return its result or raise its error."""
        ended: Future[T] = Future()

        def run() -> None:
            try:
                with self._meet(_PeerWatch(self, what, timeout)) as ranks:
                    done = work(ranks)
                ended.set_result(done)
            except BaseException as error:
                ended.set_exception(error)

        self.group.count_call()
        if not self._worker.post(run):
            raise SaveAbandonedError(f"the process is ending: {what} comes too late")
        return ended.result()

    def close(self) -> None:
        """End the thread when all submitted work is done, and wait for it, within a bound: Python before 3.14 aborts if
        it ends while a thread is in torch's code. Idempotent.
        """
        self._closed_at = time.monotonic()
        if self._collectives is not None:
            self._worker.post(self._collectives.close)
        self._worker.close(_CLOSE_SECONDS)
        self._reader.close(_CLOSE_SECONDS)

    def check_open(self) -> None:
        """Raise :class:`SaveAbandonedError` if the process is ending, and has waited long enough."""
        if self._closed_at is not None and time.monotonic() - self._closed_at > _LAST_SECONDS:
            raise SaveAbandonedError("the process is ending")

    # ---- the planning thread -----------------------------------------------------------------

    def _save(self, save: SaveOperation, writer: DataStatesWriter, planner: SavePlanner) -> None:
        try:
            if save.call.config.when_behind != "wait":
                await_reads(save)  # until then it can be left out
            planned = self._plan(save, writer, planner)
            writing = _begin_write(save, planned.plan, writer, planner)
            read = functools.partial(self._read, save, writing, planned.metadata)
            del writing  # a traceback may retain this frame
            assert save.turn is not None
            save.turn.end()
            save.doing = "reading"
            if not self._reader.post(read):
                raise SaveAbandonedError("the process was ending when this save was read")
        except BaseException as error:
            self._give_up(save, error)
        finally:
            self.group.tell_planning("")
            del writer, planner

    def _give_up(self, save: SaveOperation, error: BaseException) -> None:
        save.record_error(_cause_here(error, self.group.rank_set.rank))
        self._failed(save, error)
        save.end_planning()

    def _plan(self, save: SaveOperation, writer: DataStatesWriter, planner: SavePlanner) -> Planned:
        name = save.directory().name
        if name in self._stray:
            self._stray.discard(name)
            raise SaveFailedError(
                f"the other ranks made their call for {name!r} before, when this rank came with one for another "
                f"path: they are in step again from here on"
            )
        planning = begin_planning(save, planner if isinstance(planner, SharesPlanner) else None)
        timeout = save.call.config.commit_timeout
        watch = _PeerWatch(self, f"the save to {str(save.path)!r}", timeout, save)
        with self._meet(watch, save.left_out) as ranks:
            writer.run(planning)
            planned = plan_together(planning.state, name, writer, planner, ranks, self._agree)
        self._stray.clear()
        return planned

    # ---- the reading thread ------------------------------------------------------------------

    def _read(self, save: SaveOperation, writing: Writing, metadata: Metadata | None) -> None:
        """Wait until the data of the save are read; then its files are for the commit thread."""
        try:
            results, part = writing.settle()
            save.submit(part, encode_results(results), self._composer(save, metadata))
        except BaseException as error:
            fail_write(save, error)
            self._give_up(save, error)
        else:
            save.end_planning()
        finally:
            del writing  # a traceback may retain this frame

    def _composer(self, save: SaveOperation, metadata: Metadata | None) -> Compose | None:
        if metadata is None:
            return None
        attempt = save.ticket(self.group.rank_set.rank).attempt.name
        return composer(metadata, str(save.resolved_path()), attempt, save.call.metrics)

    # ---- the planning thread -----------------------------------------------------------------

    def _meet(self, watch: _PeerWatch, left_out: int = 0) -> AbstractContextManager[_DistWrapper]:
        if self._collectives is None:
            _leave_out(left_out)
            return nullcontext(_DistWrapper(None, False, 0))
        self._entries += 1
        watch.expect(self._entries)
        return self._collectives.entry(self._entries, watch.look, left_out, _leave_out)

    @staticmethod
    def _agree(names: Sequence[str]) -> None:
        if len(set(names)) > 1:
            other = next(rank for rank, name in enumerate(names) if name != names[0])
            raise DifferentSavesError(
                f"rank 0 saves to {names[0]!r} and rank {other} to {names[other]!r}: one of them has left out a call "
                f"of async_save (every rank must make the same calls, in the same order)",
                tuple(names),
            )

    def _failed(self, save: SaveOperation, error: BaseException) -> None:
        """Set ``error`` as the outcome, unless the commit group decides it."""
        release_frames(error)
        save.committed.add_done_callback(_release_outcome)
        world = self.group.rank_set.world
        if isinstance(error, CheckpointException):
            causes = {rank: failure[0] for rank, failure in error.failures.items()}
            for cause in causes.values():
                release_frames(cause)
                if isinstance(cause, DifferentSavesError):
                    self._stray = set(cause.names) - {save.directory().name}
            if world == 1 and len(causes) == 1:
                save.fail(causes[0])
                return
            reasons = {rank: Reason.of(cause) for rank, cause in causes.items()}
            told = Decision(Outcome.FAILED, reasons).error(repr(str(save.path)), world)
            assert told is not None
            told.__cause__ = error
            save.fail(told)
            return
        if save.phase is Phase.COMMITTING:
            return
        if isinstance(error, CheckpointSkipped):
            save.fail(error)
        elif world == 1 or isinstance(error, DataStatesError):
            save.fail(self._named(error, save))
        else:  # a connection broke; the failure detector finds the cause within seconds
            self.group.explain(error, lambda cause: save.fail(self._named(cause, save)))

    def _named(self, error: BaseException, save: SaveOperation) -> BaseException:
        if self.group.rank_set.world == 1 or str(error).startswith("the save to "):
            return error
        rank = -1 if isinstance(error, RankLostError) else self.group.rank_set.rank
        told = Decision.failed(rank, error).error(repr(str(save.path)), self.group.rank_set.world)
        assert told is not None
        told.__cause__ = error
        return told


class _PeerWatch:
    """Watches, for a thread that waits, whether the other ranks come to a save and make progress.

    Args:
        what: the purpose of the wait, for the log.
        timeout: seconds without progress after which the wait fails.
        save: a save whose ``doing`` is updated.
    """

    def __init__(
        self, context: RankContext, what: str, timeout: float, save: SaveOperation | None = None
    ) -> None:
        self._context = context
        self._group = context.group
        self._timeout = timeout
        self._save = save
        self._log = WaitLog(logger, what)
        self._entry = 0

    def expect(self, entry: int) -> None:
        """Set the ``entry`` to which the ranks must come."""
        self._entry = entry

    def look(self) -> None:
        """Called repeatedly while waiting. Raises :class:`RankLostError` after ``timeout`` seconds."""
        self._context.check_open()
        waited = self._log.seconds
        if waited < 1:
            return
        detector = self._group.detector
        assert detector is not None
        what = self._waited_for(detector)
        self._group.tell_planning(what)
        if self._save is not None:
            self._save.doing = what
        self._log.look(what)
        if waited < self._timeout:
            return
        if detector.absent(self._entry):
            raise RankLostError(f"{what} for {waited:.0f} s")
        if slow := detector.standing_still(self._timeout):
            raise RankLostError("; ".join(map(str, slow[:3])))

    def _waited_for(self, detector: FailureDetector[Any]) -> str:
        absent = detector.absent(self._entry)
        if absent:
            named = ", ".join(map(str, absent[:3])) + (", …" if len(absent) > 3 else "")
            some = (
                f"rank {named} has" if len(absent) == 1 else f"{len(absent)} ranks ({named}) have"
            )
            return f"{some} not called async_save"
        if said := detector.said_by_coordinator:
            return f"waiting for rank 0 ({said})"
        return "waiting for the other ranks to plan"


def _begin_write(
    save: SaveOperation, plan: SavePlan, writer: DataStatesWriter, planner: SavePlanner
) -> Writing:
    try:
        return writer.begin_write(planner.finish_plan(plan), planner)
    except BaseException as error:
        fail_write(save, error)
        raise


def _leave_out(why: int) -> None:
    """Raise on all ranks if any rank leaves the save out."""
    if why:
        raise CheckpointSkipped(LEFT_OUT[why])


def _cause_here(error: BaseException, rank: int) -> BaseException:
    """The error with which this rank's part of the save fails: its own, if it had one."""
    if isinstance(error, CheckpointException):
        failure = error.failures.get(rank)
        return SaveAbandonedError("another rank failed") if failure is None else failure[0]
    return error


def _release_outcome(committed: Future[None]) -> None:
    """Release the frames of the outcome's error: when the outcome was set, DCP's frames may still have been running."""
    assert isinstance(committed, AskedFuture)
    if (error := committed.peek()) is not None:
        release_frames(error)


def context_of(group: CommitGroup) -> RankContext:
    """The rank context of ``group``."""
    return group.attached(RankContext)
