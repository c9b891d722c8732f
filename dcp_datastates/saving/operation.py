"""One save on this rank, from the call to its outcome.

A save passes through these phases (:class:`Phase`), in order, and never goes back::

    STAGED ─► PLANNING ─► AGREED ─► COMMITTING

Two more events happen to a save, each once, in any phase: its *outcome* becomes known (``committed`` is done), and its
*part before the commit* ends, with or without success: no thread plans or reads it any more. The save is over after
both. A save that has failed on this rank may still owe the other ranks a vote, so the outcome is not a phase.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeVar

from dcp_datastates._native import SaveJob
from dcp_datastates.commit.group import CommitGroup, commit_group
from dcp_datastates.commit.place import EndedPart, Part, Round
from dcp_datastates.config import WriterConfig
from dcp_datastates.errors import (
    CommitOutcomeUnknown,
    ConfigurationError,
    RankLostError,
    SaveAbandonedError,
)
from dcp_datastates.format import save_trace
from dcp_datastates.format.metadata_table import Compose
from dcp_datastates.io.engine import orders
from dcp_datastates.process.futures import SharedFuture, when_done
from dcp_datastates.process.waiting import Wait
from dcp_datastates.ranks.failure_detector import Loss
from dcp_datastates.ranks.rank_set import ALONE
from dcp_datastates.results import SaveRecord, SaveStats
from dcp_datastates.saving.outcome import SaveOrigin, conclude, note_failure, record_of
from dcp_datastates.staging import step_gate
from dcp_datastates.staging.deferred_reads import DeferredReads
from dcp_datastates.storage import claims, local
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.bounded import bounded, check_not_hung
from dcp_datastates.storage.claims import Claim
from dcp_datastates.storage.object_path import Location, resolved

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_SECONDS: Final = 0.1

LEFT_OUT: Final = "earlier saves are late: all ranks skip this one (skip)"


@dataclass(frozen=True)
class Ticket:
    """The coordinator's choices for a save, which every rank must know."""

    attempt: Attempt
    number: int
    """Of the commit round. Newer saves of a group have greater numbers."""


class SaveOperation:
    """One save on this rank. The methods are grouped by the threads that call them, in the order of a save's life.

    Args:
        group: the ranks of the call.
        path: the checkpoint's directory; None until DCP names it.
        stats: made when the call began.
        metrics: the numbers by which the user compares checkpoints.
        left_out: whether this rank leaves the save out.
    """

    def __init__(
        self,
        group: CommitGroup,
        config: WriterConfig,
        origin: SaveOrigin,
        path: Location | None,
        stats: SaveStats,
        metrics: Mapping[str, float],
        *,
        left_out: bool = False,
    ) -> None:
        self.group_of_call: Final = group
        self.group = group
        """The ranks that save together: those of the call, or this process alone (:meth:`save_alone`)."""
        self.config: Final = config
        self.origin: Final = origin
        self.stats: Final = stats
        self.metrics: Final = metrics
        self.own: Final = origin is SaveOrigin.PACKAGE
        """Whether this package runs the save, rather than DCP."""
        self.asynchronous: Final = origin is not SaveOrigin.DCP
        """Whether the call returns before the save is committed."""
        self.working_directory: Final = None if self.own else local.working_directory()
        """The process's, at the call, for a path that DCP passes later."""
        self.order: Final = next(orders)
        self.unused_writers: Final = 0 if self.own else group.unused_writers
        """For a save that DCP runs: how many writers the program had made and not used."""
        self.number: Final = group.count_call(self.own)
        """Of this save, among the saves of these ranks in this process that this package (:attr:`own`) or DCP runs."""
        self.reads: Final = DeferredReads(self.order, stats, config.commit_timeout)
        """Of the staged state; of no state if the planner resolves its data in place."""
        self.left_out: Final = left_out
        self.committed: Final = SharedFuture(step_gate.open_windows)
        self.archived: SharedFuture | None = None
        """Done when the checkpoint is in the archive; None if there is none."""
        self._until = time.monotonic() + config.read_deadline
        """Until then, waiting for the read window counts as progress."""
        self._steps = 0
        self.job: SaveJob | None = None
        """The native job, from its start on: its progress counts as the save's."""
        self.doing = "waiting for its turn"
        """What the save is waiting for, in words."""
        self.path = path
        """The checkpoint's directory, as the user named it; None until DCP passes it."""
        self._resolved_path: Location | None = None
        # Keeps the store alive if the job destroys its process group meanwhile.
        self._store = group.rank_set.store
        self._lock = threading.RLock()  # guards what follows
        self.phase = Phase.STAGED
        self.error: BaseException | None = None
        """The error with which planning fails on this rank; None if there is none so far."""
        self._listens = False  # whether the failure detector calls _lost()
        self._ended = threading.Event()  # the part before the commit
        self._given_up = False
        self._ticket: Ticket | None = None
        self._claim: Claim | None = None
        self._record: SaveRecord | None = None
        when_done(self.committed, self._told)

    # ---- any thread ----------------------------------------------------------------------------------

    @property
    def attempt(self) -> Attempt | None:
        """The coordinator's choice; None before this rank knows it."""
        return None if self._ticket is None else self._ticket.attempt

    @property
    def value(self) -> int:
        """A number that changes while this rank makes progress in reading its part, for the other ranks to see."""
        job = self.job
        moved = 0 if job is None else job.bytes_read + job.bytes_written
        return self._steps + moved + int(10 * min(time.monotonic(), self._until))

    @property
    def record(self) -> SaveRecord | None:
        """What came of the save; None until the outcome is known."""
        if not self.committed.done():
            return None
        with self._lock:
            if self._record is None:
                self.stats.timeline.end()
                made = self._recorded(self.committed.peek())
                self._record = self._record or made  # a signal handler may have come in between
            return self._record

    @property
    def over(self) -> bool:
        """Whether the outcome is known, and the part before the commit has ended."""
        return self.committed.done() and self.has_ended

    def record_error(self, error: BaseException) -> BaseException:
        """Let planning fail with ``error`` on this rank, unless it has failed; returns the error that counts."""
        with self._lock:
            self.error = self.error or error
            return self.error

    def fail(self, error: BaseException) -> None:
        """Set ``error`` as the outcome on this rank, if none is known yet."""
        self.committed.settle(error)

    def wait(self) -> None:
        """Wait until the save is :attr:`over`; does not raise. Starts the reads of all saves in flight."""
        log = Wait(logger, f"the wait for the save to {str(self.path)!r}")
        while not self.over:
            self.wait_briefly(_POLL_SECONDS)
            log.look(self.doing)

    def wait_briefly(self, seconds: float) -> None:
        """Like :meth:`wait`, for at most ``seconds``."""
        if self.committed.wait(seconds):
            self._ended.wait(seconds)

    @property
    def has_ended(self) -> bool:
        """Whether the part before the commit has ended, or was given up."""
        return self._ended.is_set() or self._given_up

    def await_end(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until the save :attr:`has_ended`; return whether it has."""
        return self._ended.wait(seconds) or self._given_up

    def give_up(self, why: str) -> None:
        """End the save here, without waiting for the other ranks or storage."""
        if self.phase < Phase.COMMITTING:
            self.fail(SaveAbandonedError(why))
        else:
            self.fail(CommitOutcomeUnknown(f"{why}. It may have been committed: latest() tells"))
        self._given_up = True

    # ---- the thread that plans it --------------------------------------------------------------------

    def begin(self) -> None:
        """Start planning: all saves before it are planned."""
        detector = self.group.detector
        with self._lock:
            self.phase = Phase.PLANNING
            if self._ended.is_set():  # its thread came too late
                return
            self._listens = detector is not None
        self.doing = "planning"
        self.stats.timeline.begin("planning")
        if detector is not None:
            detector.save_started(self._lost)

    def directory(self) -> Location:
        """The checkpoint's directory. Raises :class:`ConfigurationError` if no path was given."""
        if self.path is None:
            raise ConfigurationError(
                "no path to save to: construct DataStatesWriter(path), or pass checkpoint_id"
            )
        return self.path

    def resolved_path(self) -> Location:
        """The directory with symbolic links resolved, once for the whole save: links may point elsewhere later."""
        if self._resolved_path is None:
            resolve = functools.partial(resolved, self.directory())
            self._resolved_path = self.on_storage("resolving", resolve)
        return self._resolved_path

    def on_storage(self, what: str, function: Callable[[], T]) -> T:
        """Run ``function``, which operates on the directory, within ``commit_timeout``."""
        path = self._resolved_path or self.directory()
        check_not_hung(path)
        return bounded(what, path, self.config.commit_timeout, function)

    def step(self) -> None:
        """Count one more resolved item as progress."""
        self._steps += 1

    def save_alone(self) -> None:
        """Save with this process alone, whatever the group of the call."""
        self.group.count_call(self.own, -1)  # other ranks need not make such a call
        self.group = commit_group(ALONE)

    def draw_ticket(self) -> Ticket:
        """Coordinator: claim an attempt at the path."""
        path, group = self.resolved_path(), self.group
        claimed = self.on_storage(
            "claiming", lambda: claims.claim(path, group.neighbours, self.config.overwrite)
        )
        ticket = Ticket(claimed.attempt, group.draw())
        self.agree(ticket, claimed)
        return ticket

    def agree(self, ticket: Ticket, claimed: Claim | None = None) -> None:
        """Take the coordinator's ticket: from now on every rank has a round. No effect on the coordinator."""
        with self._lock:
            if self._ticket is not None:
                return
            # It may have ended, by a save that a signal handler made meanwhile, say.
            if not self._ended.is_set():
                self.group.announce(ticket.number)  # first: another thread may vote immediately
                self.phase, self._ticket, self._claim = Phase.AGREED, ticket, claimed

    def ticket(self) -> Ticket:
        """The coordinator's ticket. Raises if the save was given up before it came."""
        if (error := self.committed.peek()) is not None:
            raise error
        if self._ticket is None:
            raise self.error or SaveAbandonedError("this save was given up before it was planned")
        with self._lock:
            if self.phase < Phase.COMMITTING:
                self.group.reading(self, True)
        return self._ticket

    def submit(
        self, part: Part, report: Callable[[], bytes] = bytes, compose: Compose | None = None
    ) -> None:
        """Hand this rank's part, in progress or failed, to the commit thread. Any thread.

        The first part counts; any further part is cancelled. ``report`` and ``compose`` as in :class:`Round`.
        """
        with self._lock:
            ticket = self._ticket if self.phase is Phase.AGREED else None
            if ticket is not None:
                self.phase, claim, self._claim = Phase.COMMITTING, self._claim, None
        if ticket is None:
            part.cancel()
            return
        round_ = Round(
            ticket.number,
            ticket.attempt,
            self._resolved_path or self.path,
            part,
            timeout=self.config.commit_timeout,
            path=self.path,
            claim=claim,
            overwrite=self.config.overwrite,
            report=report,
            compose=compose,
            archives=self.archived is not None,
            timeline=self.stats.timeline,
            trace=lambda: save_trace.pack(self._recorded(None)),
            committed=self.committed,
        )
        self.group.reading(self, False)
        self.doing = "committing"
        self.group.submit(round_)

    def await_decision(self) -> None:
        """Coordinator: return when the save is committed, or raise why it is not."""
        Future.result(self.committed)  # without starting the reads of later saves

    def end(self) -> None:
        """End this save's part before the commit, with or without success. Idempotent; never waits. Any thread."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            listens, self._listens = self._listens, False
        if self.phase is not Phase.COMMITTING or not self.reads.captured.done():
            early = "DCP ended this save before its data were written"
            error = self.error or SaveAbandonedError(early)
            self.fail_part(error)
            if self.phase is not Phase.COMMITTING and not self.own:
                self.fail(error)
        if listens and self.group_of_call.detector is not None:
            self.group_of_call.detector.save_ended(self._lost)

    def fail_part(self, error: BaseException) -> None:
        """Free the save's memory, and vote against it: the vote decides the outcome on all ranks. Idempotent."""
        self.reads.fail(error)
        self.submit_failure(error)

    def submit_failure(self, error: BaseException) -> None:
        """Vote against the save, unless this rank's part is submitted. Any thread."""
        self.submit(EndedPart(error))

    # ---- within ------------------------------------------------------------------------------------

    def _told(self, committed: Future[None]) -> None:
        self._store = None
        error = self.committed.peek()
        self.doing = "committed" if error is None else f"failed: {type(error).__name__}: {error}"
        if error is not None:
            self.submit_failure(error)  # later rounds wait for this save's
        if (record := self.record) is not None:
            conclude(record, error)
            if error is not None:
                note_failure(record, self.path, self.group.detector)

    def _recorded(self, error: BaseException | None) -> SaveRecord:
        ranks, name = self.group.rank_set, None if self.attempt is None else self.attempt.name
        return record_of(self.origin, ranks, self.path, name, self.stats, error)

    def _lost(self, losses: list[Loss]) -> None:
        """Called by the failure detector's thread: ranks are lost, and DCP may wait for them until its process group
        times out.

        Once the ticket is here, all ranks have a round, which decides the outcome: this rank votes against the save.
        """
        if self.group is not self.group_of_call:
            return  # this process saves alone
        if self.phase is Phase.COMMITTING or self.committed.done():
            return
        error = RankLostError("; ".join(map(str, losses[:3])))
        with self._lock:
            self.error = error
            agreed = self.phase >= Phase.AGREED
        if agreed:
            self.submit_failure(error)
        else:
            self.fail(error)
        # In a separate thread: this waits for reads, and on the device these may wait behind the very collective that
        # hangs. The heartbeat thread must never block.
        give_up = functools.partial(self.reads.fail, error)
        threading.Thread(target=give_up, name="dcp_datastates-give-up").start()

    def __repr__(self) -> str:
        return f"SaveOperation({self.order}, {self.path}, {self.phase.name})"


class Phase(IntEnum):
    """The phases of a save on this rank."""

    STAGED = 0
    """The call has returned; the save waits for its turn to be planned."""
    PLANNING = 1
    """The ranks are planning the save."""
    AGREED = 2
    """The coordinator's ticket has arrived: all ranks will vote on the save."""
    COMMITTING = 3
    """The commit thread has this rank's part: its files, or the reason why it failed."""
