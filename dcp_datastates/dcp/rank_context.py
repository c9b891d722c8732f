"""One for each set of ranks that save together: the thread that plans their saves, in the order of the calls.

``async_save`` leaves a save here and returns. The planning thread takes it up when those before it are planned, meets
the other ranks (``collectives.py``), makes DCP's calls and hands over to the commit group. So the training thread waits
for no other rank and for no network.

**One call is one save.** The k-th call on one rank belongs to the k-th on each other. A call that fails in
itself counts, too, and fails the save on all ranks. If a call is left out on one rank, the ranks meet with different
paths: that save fails on all of them. From then on each rank passes over calls for what the others saved then,
so that the ranks are in step again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from dcp_datastates.commit.decision import Decision, Outcome, Reason
from dcp_datastates.commit.failure_detector import FailureDetector
from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.worker import Worker
from dcp_datastates.dcp.planner import DataStatesSavePlanner
from dcp_datastates.dcp.process_group import Collectives
from dcp_datastates.dcp.steps import save_together
from dcp_datastates.dcp.writer import DataStatesWriter
from dcp_datastates.errors import (
    CheckpointSkipped,
    DataStatesError,
    RankLostError,
    SaveAbandonedError,
    SaveFailedError,
    release_frames,
)
from dcp_datastates.planning.rank_memory import SharesPlanner
from dcp_datastates.process.futures import AskedFuture
from dcp_datastates.process.waiting import WaitLog
from dcp_datastates.saving.call import LEFT_OUT
from dcp_datastates.saving.last_saves import finish_saves
from dcp_datastates.saving.operation import Phase, SaveOperation
from dcp_datastates.saving.start import take_up

__all__ = ["RankContext", "context_of"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_REFUSING_SECONDS: Final = 300.0
"""How long a rank whose call failed waits for the others to come and be told."""


class DifferentSavesError(SaveFailedError):
    """The ranks came with calls for different paths: one of them left a call out."""

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message, names)
        self.names = names

    def __str__(self) -> str:
        return str(self.args[0])


class RankContext:
    """See the module. :meth:`submit` and :meth:`run` are any thread's, one call at a time; the rest, the planning
    thread's.
    """

    def __init__(self, group: CommitGroup) -> None:
        self.group: Final = group
        self.planner: Final = DataStatesSavePlanner()
        """For saves that bring none of their own."""
        self._worker = Worker("dcp_datastates-planning")
        self._collectives: Collectives | None = None
        if group.detector is not None:
            self._collectives = Collectives(group.rank_set, group.detector, finish_saves)
        self._entries = 0  # how often the ranks have met here
        self._stray: set[str] = set()  # what others saved when the ranks came with different calls

    # ---- any thread --------------------------------------------------------------------------

    def submit(self, save: SaveOperation, writer: DataStatesWriter, planner: SavePlanner) -> None:
        """Have ``save`` planned after all that were submitted before. Returns at once."""
        self.group.count_call()
        # Not a lambda: an error that is kept keeps its frame, and with that what it was given.
        if not self._worker.post(functools.partial(self._save, save, writer, planner)):
            error = SaveAbandonedError("the process was ending when this save was called for")
            save.fail(save.blame(error))
            save.end_planning()

    def refuse(self, path: object, error: BaseException) -> None:
        """A call failed in itself on this rank: the others, which wait for it, are told."""
        if self._collectives is None:
            return

        def tell() -> None:
            def fail() -> Any:
                raise error

            presence = _Presence(self, f"the save to {str(path)!r}", _REFUSING_SECONDS)
            with self._meet(presence) as ranks:
                ranks.reduce_scatter("plan", fail, lambda _: [])

        def run() -> None:
            try:
                tell()
            except CheckpointException:
                pass  # as it should be
            except Exception as failed:
                logger.warning("the other ranks could not be told that a call failed: %s", failed)

        self.group.count_call()
        self._worker.post(run)

    def run(self, what: str, timeout: float, work: Callable[[_DistWrapper], T]) -> T:
        """What ``work`` returns or raises, in the planning thread, with all ranks there."""
        ended: Future[T] = Future()

        def run() -> None:
            try:
                with self._meet(_Presence(self, what, timeout)) as ranks:
                    done = work(ranks)
                ended.set_result(done)
            except BaseException as error:
                ended.set_exception(error)

        self.group.count_call()
        if not self._worker.post(run):
            raise SaveAbandonedError(f"the process is ending: {what} comes too late")
        return ended.result()

    def close(self) -> None:
        """End the thread when what was submitted is over. Idempotent; does not wait."""
        if self._collectives is not None:
            self._worker.post(self._collectives.close)
        self._worker.finish()

    # ---- the planning thread -----------------------------------------------------------------

    def _save(self, save: SaveOperation, writer: DataStatesWriter, planner: SavePlanner) -> None:
        try:
            self._plan(save, writer, planner)
        except BaseException as error:
            save.blame(_cause_here(error, self.group.rank_set.rank))
            self._failed(save, error)
        finally:
            save.end_planning()
            self.group.tell_planning("")
            del writer, planner  # this frame lives as long as an error that came through it

    def _plan(self, save: SaveOperation, writer: DataStatesWriter, planner: SavePlanner) -> None:
        name = save.directory().name
        if name in self._stray:
            self._stray.discard(name)
            raise SaveFailedError(
                f"the other ranks made their call for {name!r} before, when this rank came with one for another "
                f"path: they are in step again from here on"
            )
        taken = take_up(save, planner if isinstance(planner, SharesPlanner) else None)
        timeout = save.call.config.commit_timeout
        presence = _Presence(self, f"the save to {str(save.path)!r}", timeout, save)
        with self._meet(presence, save.left_out) as ranks:
            writer.run(taken)
            written = save_together(taken.state, name, writer, planner, ranks, self._agree)
        written.finish(writer)
        self._stray.clear()

    def _meet(self, presence: _Presence, left_out: int = 0) -> AbstractContextManager[_DistWrapper]:
        if self._collectives is None:
            _leave_out(left_out)
            return nullcontext(_DistWrapper(None, False, 0))
        self._entries += 1
        presence.expect(self._entries)
        return self._collectives.entry(self._entries, presence.look, left_out, _leave_out)

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
        """The outcome, unless the commit group decides."""
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
        else:  # a connection broke; the failure detector knows why within seconds
            self.group.explain(error, lambda cause: save.fail(self._named(cause, save)))

    def _named(self, error: BaseException, save: SaveOperation) -> BaseException:
        if self.group.rank_set.world == 1 or str(error).startswith("the save to "):
            return error
        rank = -1 if isinstance(error, RankLostError) else self.group.rank_set.rank
        told = Decision.failed(rank, error).error(repr(str(save.path)), self.group.rank_set.world)
        assert told is not None
        told.__cause__ = error
        return told


class _Presence:
    """Whether the other ranks come to a save, and go on with it. Of the thread that waits for them.

    Args:
        context: theirs.
        what: what they are waited for with.
        timeout: seconds after which it is given up.
        save: to say what it waits for.
    """

    def __init__(
        self, context: RankContext, what: str, timeout: float, save: SaveOperation | None = None
    ) -> None:
        self._group = context.group
        self._timeout = timeout
        self._save = save
        self._log = WaitLog(logger, what)
        self._entry = 0

    def expect(self, entry: int) -> None:
        """Wait for the ranks to come to this ``entry`` from now on."""
        self._entry = entry

    def look(self) -> None:
        """Called while waiting. Raises :class:`RankLostError` when it has taken too long."""
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

    def _waited_for(self, detector: FailureDetector) -> str:
        absent = detector.absent(self._entry)
        if absent:
            named = ", ".join(map(str, absent[:3])) + (", …" if len(absent) > 3 else "")
            some = (
                f"rank {named} has" if len(absent) == 1 else f"{len(absent)} ranks ({named}) have"
            )
            return f"{some} not called async_save"
        if said := detector.said_by_coordinator:
            return f"waiting for rank 0 ({said})"
        return "waiting for the other ranks to plan and read"


def _leave_out(why: int) -> None:
    """A save that any rank leaves out is left out by all."""
    if why:
        raise CheckpointSkipped(LEFT_OUT[why])


def _cause_here(error: BaseException, rank: int) -> BaseException:
    """What failed on this rank, if it did: what its part of the save fails with."""
    if isinstance(error, CheckpointException):
        failure = error.failures.get(rank)
        return SaveAbandonedError("another rank failed") if failure is None else failure[0]
    return error


def _release_outcome(committed: Future[None]) -> None:
    """What this rank failed with came through DCP's frames, which may have been running when the ranks were told."""
    assert isinstance(committed, AskedFuture)
    if (error := committed.peek()) is not None:
        release_frames(error)


def context_of(group: CommitGroup) -> RankContext:
    """That of the ranks that commit together as ``group``."""
    return group.companion(RankContext)
