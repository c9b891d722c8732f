"""One save on this rank: its deferred reads, its turn, its ticket, its round, and the futures that tell of it.

A save is made by ``stage()``, or by DCP's first call if it is synchronous; it ends when its outcome is known
and DCP has nothing more to do with it. Calls come from DCP's thread, in DCP's order.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from dcp_datastates.commit.beats import Loss
from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.groups import commit_group
from dcp_datastates.commit.rank_set import ALONE
from dcp_datastates.commit.round import Consolidated, FailedPart, Part, Round
from dcp_datastates.errors import (
    CheckpointSkipped,
    CommitOutcomeUnknown,
    ConfigurationError,
    DataStatesError,
    RankLostError,
    SaveAbandonedError,
)
from dcp_datastates.planning.exchange import Session
from dcp_datastates.planning.plan_cache import PlannedMetadata
from dcp_datastates.process.forks import ProcessLock
from dcp_datastates.process.futures import AskedFuture
from dcp_datastates.process.progress import Progress
from dcp_datastates.process.waiting import WaitLog
from dcp_datastates.saving.admission import LEFT_OUT
from dcp_datastates.saving.document import document
from dcp_datastates.saving.turns import Turn
from dcp_datastates.staging import step_gate
from dcp_datastates.staging.deferred_reads import DeferredReads
from dcp_datastates.stats import SaveStats
from dcp_datastates.storage import local
from dcp_datastates.storage.attempt import Ticket, take
from dcp_datastates.storage.claims import Claim, claim

__all__ = ["Save"]

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1


class Save:
    """See the module.

    Args:
        group: the ranks that the writer commits with.
        path: the checkpoint's directory; None until DCP names it.
        order: sequence number in this process.
        asynchronous: whether training goes on meanwhile.
        own: whether this package runs it, and not DCP.
        background: whether DCP's future may resolve before the commit.
        overwrite: whether a checkpoint may be replaced.
        timeout: seconds without progress after which a rank is given up.
        reading: seconds that this rank's reads may wait for their window.
        exit_timeout: seconds that the end of the process waits for it.
    """

    def __init__(
        self,
        group: CommitGroup,
        path: Path | None,
        *,
        stats: SaveStats,
        order: int,
        asynchronous: bool,
        own: bool,
        background: bool,
        overwrite: bool,
        timeout: float,
        reading: float,
        exit_timeout: float,
    ) -> None:
        self.group = group
        self.path = path
        self.working_directory: str | None = None  # at the call, if that was in another thread
        self.in_callers_thread = False  # asynchronous, and run by the thread that made the call
        self.own: Final = own
        self.timeout: Final = timeout
        self.exit_timeout = exit_timeout
        self.doing = "waiting for its turn"
        """What it waits for, in words."""
        self._began = time.monotonic()
        self.asynchronous: Final = asynchronous
        self._missed = 0 if own else group.missed
        self.reads: DeferredReads | None = None  # these two of an asynchronous save
        self.turn: Turn | None = None
        self.stats = stats
        self.order = order
        self.rank = 0
        self.is_coordinator = False
        self.error: BaseException | None = None
        self.committed = AskedFuture(step_gate.open_windows)
        self._store = (
            group.rank_set.store
        )  # where the ranks meet, should the job destroy its group meanwhile
        self.background = background
        self._overwrite = overwrite
        self.progress = Progress(reading)
        self._place: Path | None = None
        self._ticket: Ticket | None = None
        self._round: Round | None = None
        self._claim: Claim | None = None
        self._lock = ProcessLock()  # guards _ended, _quick, _round, _begun, left_out
        self._ended = False
        self._quick = False
        self._begun = False
        self.left_out = 0
        """Why this rank leaves it out, a key of :data:`~dcp_datastates.saving.admission.LEFT_OUT`; 0 if it does not."""
        self.session: Session | None = None  # with a DataStatesSavePlanner
        self.ahead: Any = None  # what is read before it is planned
        self.committed.add_done_callback(self._tell)

    # ---- in the order of DCP's calls ----------------------------------------------------------

    def begin(self) -> None:
        """It is this save's turn: DCP's collectives for it begin."""
        with self._lock:
            self._begun = True
        self.doing = "planning"
        if self.group.detector is not None:
            with self._lock:
                self._quick = True
            self.group.detector.quicken()
            self.group.detector.listen(self._lost)

    def directory(self) -> Path:
        """Where to. Raises :class:`ConfigurationError` if no path was given."""
        if self.path is None:
            raise ConfigurationError(
                "no path to save to: construct DataStatesWriter(path), or pass checkpoint_id"
            )
        return self.path

    def place(self) -> Path:
        """The directory itself, for all of this save: links are followed once, and may point elsewhere later."""
        if self._place is None:
            self._place = Path(os.path.realpath(self.directory()))
        return self._place

    def deliver(self, ticket: Ticket) -> None:
        """Take the coordinator's choice; stale ones are left, see :class:`TicketCarrier`."""
        if self._ticket is None and take(ticket):
            self._ticket = ticket

    def claim(self, world: int) -> Ticket:
        """Coordinator: claim an attempt at the path, for a save of ``world`` ranks.

        Raises :class:`ConfigurationError` if these are not the ranks that commit together.
        """
        group = self._group_of(world)
        if not group.is_coordinator:
            raise ConfigurationError(
                f"DCP's coordinator is rank {group.rank_set.rank} of those that commit; it must be the first: "
                f"leave coordinator_rank=0"
            )
        directory = self.place()
        local.make_directories(directory)
        self._claim = claim(directory, group.neighbours)
        self._ticket = Ticket(self._claim.attempt, group.draw(), world, group.first)
        take(self._ticket)  # so that a later save knows it for stale
        return self._ticket

    def ticket(self) -> Ticket:
        """What the coordinator chose. Raises if it has not reached this rank."""
        if self._ticket is None:
            raise DataStatesError(
                "the plan carries no ticket: prepare_global_plan was not called, or its plans not used"
            )
        if (error := self.committed.peek()) is not None:
            raise error  # it was given up meanwhile
        group = self._group_of(self._ticket.world)
        if group.rank_set.rank != self.rank:
            raise ConfigurationError(
                f"this is rank {self.rank} of the process group that DCP saves with, and rank "
                f"{group.rank_set.rank} of the writer's; pass the same process_group= to both"
            )
        if self._round is None:
            group.reading(self.progress)
        return self._ticket

    def submit(self, part: Part) -> None:
        """This rank's part is on its way, or has failed: from here on it is the commit thread's.

        The first part counts; another one is cancelled.
        """
        ticket = self._ticket
        with self._lock:
            if ticket is None or self._round is not None:
                round_ = None
            else:
                claimed, self._claim = self._claim, None
                self._round = round_ = Round(
                    ticket.number,
                    ticket.attempt,
                    self._place or self.path,
                    part,
                    path=self.path,
                    claim=claimed,
                    overwrite=self._overwrite,
                    first=ticket.first,
                    timeout=self.timeout,
                    missed=self._missed,
                )
        if ticket is None or round_ is None:
            part.cancel()
            return
        group = self._group_of(ticket.world, checked=False)
        group.reading(None)
        round_.committed.add_done_callback(self._decided)
        self.doing = "committing"
        group.submit(round_)

    def consolidate(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Coordinator: all ranks' results are here. Returns with the outcome unless ``background``."""
        assert self._round is not None, "write_data() comes first"
        # The commit thread completes its own copy: DCP's thread may be pickling this one meanwhile.
        mine = metadata if isinstance(metadata, PlannedMetadata) else copy.copy(metadata)
        self._round.provide(Consolidated(lambda meta, claim: document(meta, claim, mine, results)))
        if not self.background:
            self._round.committed.result()
            vars(metadata).update(vars(mine))

    def abandon(self, error: BaseException) -> None:
        """Coordinator: nothing comes of the results. Changes nothing once they were handed over."""
        if self._round is not None:
            self._round.abandon(error)

    def ended(self) -> None:
        """Planning is over for this save, whatever came of it. Idempotent; never waits."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        error = self.error or SaveAbandonedError("DCP ended this save before its data were written")
        if self.reads is not None:
            self.reads.fail(error)
        if self.session is not None:
            self.session.close()
        if self._round is None:
            self.submit(FailedPart(error))
        if self._round is not None:
            self._round.abandon(
                SaveAbandonedError("DCP ended this save before it had gathered all ranks' results")
            )
        elif not self.own:
            self.fail(error)
        if self.turn is not None:
            self.turn.end()
        self._slow()

    def fail(self, error: BaseException) -> None:
        """This is the outcome on this rank, if none is known yet."""
        self._decide(error)

    @property
    def has_ended(self) -> bool:
        """Whether planning is over for it."""
        return self._ended

    @property
    def has_round(self) -> bool:
        """Whether the commit group decides about this save."""
        return self._round is not None

    @property
    def is_known(self) -> bool:
        """Whether its outcome is known."""
        return self.committed.done()

    @property
    def over(self) -> bool:
        """Whether DCP is done with it, and its outcome is known."""
        return self.committed.done() and (self.turn is None or self.turn.ended)

    def wait(self) -> None:
        """Return when it is :attr:`over`; does not raise. Starts the reads of all saves in flight."""
        log = WaitLog(logger, f"who waits for the save to {str(self.path)!r}")
        while not self.over:
            self.wait_briefly(_POLL_SECONDS)
            log.look(self.doing)

    def wait_briefly(self, seconds: float) -> None:
        """:meth:`wait`, for at most ``seconds``."""
        done = self.committed.wait(seconds)
        if self.turn is not None and self.turn.join(seconds if done else 0.0):
            self.ended()  # or no thread ever came for it

    def give_up(self, why: str) -> None:
        """It is over here; what the other ranks and storage make of it is not waited for."""
        if self._round is None:
            self.fail(SaveAbandonedError(why))
        else:
            self.fail(CommitOutcomeUnknown(f"{why}. It may have been committed: latest() tells"))
        if self.turn is not None:
            self.turn.end()

    # ---- for saving/admission.py ----------------------------------------------------------------------------

    def leave_out(self, why: int) -> bool:
        """Leave it out, if its planning has not begun: nothing is read, its memory is free. Whether that is so.

        The thread that plans it tells the other ranks, and its future.
        """
        with self._lock:
            if self._begun:
                return False
            self.left_out = why
        self.error = CheckpointSkipped(LEFT_OUT[why])
        if self.reads is not None:
            self.reads.fail(self.error)
        return True

    # ---- within ------------------------------------------------------------------------------------

    def _decided(self, outcome: Future[None]) -> None:
        self._decide(outcome.exception())

    def _decide(self, error: BaseException | None) -> None:
        with (
            self._lock
        ):  # the commit thread, the failure detector's and the planning thread may come at once
            if self.committed.done():
                return
            self._store = None
        with contextlib.suppress(InvalidStateError):
            if error is None:
                self.committed.set_result(None)
            else:
                self.committed.set_exception(error)

    def _tell(self, committed: Future[None]) -> None:
        """The one line of the log that every save ends in."""
        seconds = time.monotonic() - self._began
        error = self.committed.peek()
        self.doing = "over"
        if error is None:
            level = logging.INFO if self.group.is_coordinator else logging.DEBUG
            logger.log(level, "%s", self._said_of_commit(seconds))
            return
        text = str(error) or type(error).__name__
        if not text.startswith("the save to "):
            text = f"the save to {str(self.path)!r} failed: {text}"
        level = logging.WARNING if isinstance(error, CheckpointSkipped) else logging.ERROR
        logger.log(level, "%s (%s, %.1f s after the call)", text, type(error).__name__, seconds)

    def _said_of_commit(self, seconds: float) -> str:
        stats = self.stats
        nbytes = stats.bytes_written
        rate = nbytes / stats.total_seconds / 1e9 if stats.total_seconds else 0.0
        of = f" of {self.group.rank_set.world} ranks" if self.group.rank_set.world > 1 else ""
        stall = 1e3 * (stats.stage_seconds + stats.gate_seconds)
        waited = f", training waited {stall:.1f} ms" if self.asynchronous else ""
        return (
            f"committed {str(self.path)!r}{of} in {seconds:.2f} s; this rank wrote {nbytes / 2**20:.1f} MiB "
            f"({rate:.2f} GB/s){waited}"
        )

    def _slow(self) -> None:
        with self._lock:
            quick, self._quick = self._quick, False
        if quick and self.group.detector is not None:
            self.group.detector.slow()
            self.group.detector.forget(self._lost)

    def _lost(self, losses: list[Loss]) -> None:
        """In the failure detector's thread: ranks are lost, and DCP may wait for them until its group times out.

        From the ticket on, all ranks have a round, and what it decides is the outcome: this rank votes against it.
        """
        if self._ticket is not None and self._ticket.world == 1:
            return  # it is saved without the other ranks
        if self._round is None and not self.committed.done():
            error = RankLostError("; ".join(map(str, losses[:3])))
            self.error = error
            if self._ticket is None:
                self.fail(error)
            else:
                self.submit(FailedPart(error))
            if self.reads is not None:
                # In a thread of its own, as it waits for reads, behind which a device may have the very
                # collective that hangs: a failure detector that waits is a lost one.
                threading.Thread(
                    target=self.reads.fail, args=(error,), name="dcp_datastates-give-up"
                ).start()

    def _group_of(self, world: int, *, checked: bool = True) -> CommitGroup:
        if world == 1:
            return commit_group(ALONE)  # no_dist=True, or a group of one
        rank_set = self.group.rank_set
        if checked and world != rank_set.world:
            raise ConfigurationError(
                f"DCP saves with {world} ranks, the writer commits with {rank_set.world} "
                f"({'all' if rank_set.world > 1 else 'this process alone'}): pass the process_group= that is "
                f"given to dcp.save or dcp.async_save to DataStatesWriter too"
            )
        return self.group

    def __repr__(self) -> str:
        return f"Save({self.order}, {self.path}, {self._ticket and self._ticket.attempt.name})"
