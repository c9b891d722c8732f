"""One save on this rank: its snapshot, its turn, its ticket, its round, and the futures that tell of it.

A save is made by ``stage()``, or by DCP's first call if it is synchronous; it ends when its outcome is known
and DCP has nothing more to do with it. Calls come from DCP's thread, in DCP's order.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from dcp_datastates.attempt import Attempt, Ticket, next_attempt
from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.groups import commit_group
from dcp_datastates.commit.heart import Loss
from dcp_datastates.commit.peers import ALONE
from dcp_datastates.commit.progress import Progress
from dcp_datastates.commit.round import Consolidated, FailedPart, Part, Round
from dcp_datastates.dcp.turns import Turn
from dcp_datastates.errors import (
    CheckpointSkipped,
    ConfigurationError,
    DataStatesError,
    RankLostError,
    SaveAbandonedError,
    StorageError,
)
from dcp_datastates.lazy.snapshot import Snapshot
from dcp_datastates.planning.session import Session
from dcp_datastates.planning.whole import PlannedMetadata
from dcp_datastates.stats import SaveStats
from dcp_datastates.storage import local
from dcp_datastates.storage.lock import Hold

__all__ = ["OutcomeFuture", "Save"]

logger = logging.getLogger(__name__)

_CLAIMS: Final = 100


class OutcomeFuture(Future[None]):
    """A future that knows whether anybody has asked it."""

    asked = False

    def result(self, timeout: float | None = None) -> None:
        self.asked = True
        super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.asked = True
        return super().exception(timeout)

    def peek(self) -> BaseException | None:
        """The error, if it is known and there is one; this does not count as asking."""
        return super().exception(0) if self.done() else None


class Save:
    """See the module.

    Args:
        group: the ranks that the writer commits with.
        path: the checkpoint's directory; None until DCP names it.
        order: sequence number in this process.
        background: whether DCP's future may resolve before the commit.
        overwrite: whether a checkpoint may be replaced.
        timeout: seconds without progress after which a rank is given up.
        reading: seconds that this rank's reads may wait for their window.
    """

    def __init__(
        self,
        group: CommitGroup,
        path: Path | None,
        *,
        stats: SaveStats,
        order: int,
        background: bool,
        overwrite: bool,
        timeout: float,
        reading: float,
    ) -> None:
        self.group = group
        self.path = path
        self.snapshot: Snapshot | None = None  # these two of an asynchronous save
        self.turn: Turn | None = None
        self.stats = stats
        self.order = order
        self.rank = 0
        self.is_coordinator = False
        self.error: BaseException | None = None
        self.committed = OutcomeFuture()
        self.committed.set_running_or_notify_cancel()
        self.background = background
        self._overwrite = overwrite
        self._timeout = timeout
        self.progress = Progress(reading)
        self._ticket: Ticket | None = None
        self._round: Round | None = None
        self._seen: local.Signature | None = None
        self._hold: Hold | None = None
        self._lock = threading.Lock()  # guards _ended, _quick
        self._ended = False
        self._quick = False
        self._begun = False
        self.left_out = False
        self.session: Session | None = None  # with a DataStatesSavePlanner
        self.ahead: Any = None  # what is read before it is planned
        self.dcp_tells = False  # whether somebody passes on what DCP's future raises
        self._decision = (
            threading.Event()
        )  # set when nobody is asking whether to leave this save out
        self._decision.set()

    # ---- in the order of DCP's calls ----------------------------------------------------------

    def begin(self) -> None:
        """It is this save's turn: DCP's collectives for it begin."""
        self._decision.wait(self._timeout)
        self._begun = True
        if self.group.heart is not None:
            with self._lock:
                self._quick = True
            self.group.heart.quicken()
            self.group.heart.listen(self._lost)

    def directory(self) -> Path:
        """Where to. Raises :class:`ConfigurationError` if nobody has said."""
        if self.path is None:
            raise ConfigurationError(
                "no path to save to: construct DataStatesWriter(path), or pass checkpoint_id"
            )
        return self.path

    def deliver(self, ticket: Ticket) -> None:
        """Take the coordinator's choice; the newest counts, see :class:`TicketCarrier`."""
        if self._ticket is None or ticket.attempt > self._ticket.attempt:
            self._ticket = ticket

    def claim(self, world: int) -> Ticket:
        """Coordinator: claim an attempt at the path, for a save of ``world`` ranks.

        Raises :class:`ConfigurationError` if these are not the ranks that commit together.
        """
        group = self._group_of(world)
        if not group.is_coordinator:
            raise ConfigurationError(
                f"DCP's coordinator is rank {group.peers.rank} of those that commit; it must be the first: "
                f"leave coordinator_rank=0"
            )
        directory = self.directory()
        local.make_directories(directory)
        self._seen = local.signature(directory)
        attempt, self._hold = self._claim(directory)
        ticket = Ticket(attempt, group.draw(), world, group.first)
        self.deliver(ticket)
        return ticket

    @staticmethod
    def _claim(directory: Path) -> tuple[Attempt, Hold]:
        for _ in range(_CLAIMS):
            attempt = next_attempt(local.attempts(directory))
            if not local.claim(directory, attempt):  # another job's
                continue
            # A job that commits in between takes what nobody holds for left over, and removes it.
            if hold := Hold.on(directory / attempt.name):
                return attempt, hold
        raise StorageError(
            None,
            "other jobs keep taking away the directory of this save; are several saving to one path?",
            str(directory),
        )

    def ticket(self) -> Ticket:
        """What the coordinator chose. Raises if it has not reached this rank."""
        if self._ticket is None:
            raise DataStatesError(
                "the plan carries no ticket: prepare_global_plan was not called, or its plans not used"
            )
        if (error := self.committed.peek()) is not None:
            raise error  # it was given up meanwhile
        group = self._group_of(self._ticket.world)
        if group.peers.rank != self.rank:
            raise ConfigurationError(
                f"this is rank {self.rank} of the process group that DCP saves with, and rank "
                f"{group.peers.rank} of the writer's; pass the same process_group= to both"
            )
        group.reading(self.progress)
        return self._ticket

    def submit(self, part: Part) -> None:
        """This rank's part is on its way, or has failed: from here on it is the commit thread's."""
        ticket = self._ticket
        if ticket is None or self._round is not None:
            return
        group = self._group_of(ticket.world, checked=False)
        group.reading(None)
        hold, self._hold = self._hold, None
        self._round = Round(
            ticket.number,
            ticket.attempt,
            self.path,
            part,
            seen=self._seen,
            overwrite=self._overwrite,
            hold=hold,
            first=ticket.first,
            timeout=self._timeout,
        )
        self._round.committed.add_done_callback(self._decided)
        group.submit(self._round)

    def consolidate(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Coordinator: all ranks' results are here. Returns with the outcome unless ``background``."""
        assert self._round is not None, "write_data() comes first"
        # The commit thread completes its own copy: DCP's thread may be pickling this one meanwhile.
        mine = metadata if isinstance(metadata, PlannedMetadata) else copy.copy(metadata)
        self._round.provide(Consolidated(mine, results))
        if not self.background:
            self._round.committed.result()
            vars(metadata).update(vars(mine))

    def ended(self) -> None:
        """DCP is done with this save, whatever came of it. Idempotent; never waits."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        error = SaveAbandonedError("DCP ended this save before its data were written")
        if self.snapshot is not None:
            self.snapshot.fail(error)
        if self.session is not None:
            self.session.close()
        if self._round is None:
            self.submit(FailedPart(error))
        if self._round is not None:
            self._round.abandon(
                SaveAbandonedError("DCP ended this save before it had gathered all ranks' results")
            )
        elif not self.dcp_tells:
            self.fail(self.error or error)
        if self.turn is not None:
            self.turn.end()
        self._slow()

    def fail(self, error: BaseException) -> None:
        """Nothing will be committed, and no round tells. The first outcome counts."""
        if not self.committed.done():
            self.committed.set_exception(error)

    @property
    def has_round(self) -> bool:
        """Whether the commit group decides about this save."""
        return self._round is not None

    @property
    def over(self) -> bool:
        """Whether DCP is done with it, and its outcome is known."""
        return self.committed.done() and (self.turn is None or self.turn.ended)

    def wait(self) -> None:
        """Return when it is :attr:`over`; does not raise."""
        if self.turn is not None:
            self.turn.join()
            self.ended()  # or no thread ever came for it
        Future.exception(self.committed)

    # ---- for commit/behind.py ----------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether DCP has begun to plan it, or it was left out."""
        return self._begun or self.left_out

    def undecided(self) -> None:
        """All ranks will be asked whether to leave this save out; :meth:`decided` follows."""
        self._decision.clear()

    def decided(self) -> None:
        """Let DCP's thread go on. Idempotent."""
        self._decision.set()

    def skip(self, error: CheckpointSkipped) -> None:
        """Leave it out: nothing is read, its memory is free. DCP's thread tells its future."""
        self.left_out = True
        self.error = error
        if self.snapshot is not None:
            self.snapshot.fail(error)

    # ---- within ------------------------------------------------------------------------------------

    def _decided(self, outcome: Future[None]) -> None:
        error = outcome.exception()
        if self.committed.done():
            return
        if error is None:
            self.committed.set_result(None)
        else:
            self.committed.set_exception(error)

    def _slow(self) -> None:
        with self._lock:
            quick, self._quick = self._quick, False
        if quick and self.group.heart is not None:
            self.group.heart.slow()
            self.group.heart.forget(self._lost)

    def _lost(self, losses: list[Loss]) -> None:
        """In the heart's thread: ranks are lost, and DCP may wait for them until its group times out.

        Once there is a round, the commit group decides.
        """
        if self._round is None and not self.committed.done():
            error = RankLostError("; ".join(map(str, losses[:3])))
            self.error = error
            self.fail(error)
            if self.snapshot is not None:
                # In a thread of its own, as it waits for reads, behind which a device may have the very
                # collective that hangs: a heart that waits is a lost one.
                threading.Thread(
                    target=self.snapshot.fail, args=(error,), name="dcp_datastates-give-up"
                ).start()

    def _group_of(self, world: int, *, checked: bool = True) -> CommitGroup:
        if world == 1:
            return commit_group(ALONE)  # no_dist=True, or a group of one
        peers = self.group.peers
        if checked and world != peers.world:
            raise ConfigurationError(
                f"DCP saves with {world} ranks, the writer commits with {peers.world} "
                f"({'all' if peers.world > 1 else 'this process alone'}): pass the process_group= that is "
                f"given to dcp.save or dcp.async_save to DataStatesWriter too"
            )
        return self.group

    def __repr__(self) -> str:
        return f"Save({self.order}, {self.path}, {self._ticket and self._ticket.attempt.name})"
