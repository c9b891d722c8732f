"""Carries one checkpoint to another tier: each rank its own files, and the first rank commits the copy.

A rank's files are those of the ranks whose numbers, modulo the number of ranks, are its own: after a restart with fewer
ranks, all files have one. The copy has the attempt of the original, so every step can be repeated, by any process.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from dcp_datastates.checkpoints.copy import (
    CopyTarget,
    checked_pieces,
    committed_at,
    is_whole,
    same_size,
)
from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.vote import Decision, DecisionLog, Outcome, Reason
from dcp_datastates.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CheckpointSupersededError,
    DataStatesError,
    SaveAbandonedError,
    StorageError,
)
from dcp_datastates.format.metadata_table import FileRecord
from dcp_datastates.io.committed import Committed, open_committed
from dcp_datastates.process.waiting import WaitLog
from dcp_datastates.ranks.failure_detector import Loss
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.storage import attempts
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import Location

logger = logging.getLogger(__name__)

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
"""Between two tries, if storage fails. In seconds."""

_LOOK_SECONDS: Final = 0.2
"""Between two looks for news of the other ranks; longer with many ranks (``_LOOK_SECONDS_PER_RANK``)."""
_LOOK_SECONDS_PER_RANK: Final = 1e-3

_OF_THE_CHECKPOINT: Final = (CheckpointExistsError, CheckpointNotFoundError)
"""The OSErrors that another try does not mend."""

_ASK_SECONDS: Final = 15.0
"""Between two questions to the slow tier whether the copy is committed."""


T = TypeVar("T")


class Carrier:
    """Carries checkpoints, one after another, in one thread."""

    def __init__(self, group: CommitGroup, number: int) -> None:
        self._rank, self._world = group.rank_set.rank, group.rank_set.world
        self._detector = group.detector
        self._votes = ArchiveVotes(group.rank_set, number) if self._world > 1 else None
        self._pause = max(_LOOK_SECONDS, _LOOK_SECONDS_PER_RANK * self._world)
        self.closing: Final = threading.Event()
        """Whether to give up: the process ends."""
        self.rate = 0.0
        """Bytes per second of this rank; 0: no limit."""
        self._next = 0.0  # when the next piece may be written
        self._decided = False  # whether the other ranks know the outcome of the present checkpoint

    def carry(self, source: Location, attempt: Attempt, target: Location) -> None:
        """Carry the checkpoint that ``attempt`` has committed at ``source``. Returns when the copy is committed.

        Tries again, without end, what storage refuses.

        Raises:
            SaveAbandonedError: the process ends.
            RankLostError: another rank has ended.
            DataStatesError: the checkpoint was replaced or is damaged, or another one is at ``target``; of the same
                type on every rank.
        """
        self._decided = False
        vote = None if self._votes is None else self._votes.on(attempt)
        place = CopyTarget(target, attempt)
        try:
            committed = self.until_done(lambda: self._write(source, attempt, target, place), target)
            if vote is not None:
                vote.finished()
            if self._rank != 0:
                self._hear(vote, attempt, target)
                return
            self._await_files(vote, committed, target)
            self.until_done(lambda: self._commit(committed, target, place), target)
        except BaseException as error:
            if vote is not None and not self._decided:
                self._tell_failure(vote, error)
            raise
        if vote is not None:
            vote.decide(Decision(Outcome.COMMITTED))

    def _write(
        self, source: Location, attempt: Attempt, target: Location, place: CopyTarget
    ) -> Committed:
        """Write this rank's files that are not there yet."""
        committed = open_committed(source)
        now = committed.note.attempt
        if now != attempt:
            raise CheckpointReplacedError(
                f"{source}: attempt {attempt.name} was replaced by {now.name} before it was archived"
            )
        if _is_carried(target, attempt):
            return committed
        mine = [record for record in committed.note.files.values() if self._is_mine(record)]
        place.claim()
        left = same_size(target, mine)
        for record in mine:
            if record.relative_path in left and is_whole(target, record):
                continue
            hit("archive.write.before")
            place.write(record, self._slowed(checked_pieces(source, record, id)))
            hit("archive.write.after")
        return committed

    def _is_mine(self, record: FileRecord) -> bool:
        rank = attempts.rank_of(record.relative_path.rpartition("/")[2])
        return (rank or 0) % self._world == self._rank

    def _slowed(self, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            if self.rate:
                self._next = max(self._next, time.monotonic()) + piece.nbytes / self.rate
                self._wait(self._next - time.monotonic())
            self._wait(0)
            yield piece

    def _await_files(
        self, vote: ArchiveVote | None, committed: Committed, target: Location
    ) -> None:
        """Return when the files of all ranks are there. Raises the error of a rank that has failed."""
        files = committed.note.files
        log = WaitLog(logger, f"archiving to {target}", 60.0)
        while True:
            asks = vote is None or vote.may_be_complete()
            if asks and self.until_done(
                lambda: files.keys() <= same_size(target, files.values()), target
            ):
                return
            decision = None if vote is None else vote.failures()
            if vote is not None and decision is not None:
                vote.decide(decision)
                raise self._error(decision, target)
            log.look("the files of the other ranks")
            self._check_losses()
            self._wait(_FIRST_PAUSE if asks else self._pause)

    def _commit(self, committed: Committed, target: Location, place: CopyTarget) -> None:
        if not _is_carried(target, committed.note.attempt):
            hit("archive.commit.before")
            place.publish(committed.data)
            hit("archive.commit.after")
        place.remove_older()

    def _hear(self, vote: ArchiveVote | None, attempt: Attempt, target: Location) -> None:
        assert vote is not None
        asked = time.monotonic()
        while True:
            decision = vote.decision()
            if decision is not None:
                if decision.outcome is not Outcome.COMMITTED:
                    raise self._error(decision, target)
                return
            lost = self._losses()
            if lost or time.monotonic() - asked > _ASK_SECONDS:
                with contextlib.suppress(StorageError):
                    if _is_carried(target, attempt):
                        return
                asked = time.monotonic()
                self._check_losses()
            self._wait(self._pause)

    def _error(self, decision: Decision, target: Location) -> DataStatesError:
        self._decided = True
        error = decision.error(repr(str(target)), self._world)
        assert error is not None
        return error

    def _tell_failure(self, vote: ArchiveVote, error: BaseException) -> None:
        if self._rank == 0:
            vote.decide(Decision.failed(0, error))
        else:
            vote.failed(error)

    def _losses(self) -> list[Loss]:
        return [] if self._detector is None else self._detector.losses()

    def _check_losses(self) -> None:
        lost = self._losses()
        if lost:
            raise Loss.error_of(lost)

    def until_done(self, work: Callable[[], T], target: Location) -> T:
        """The result of ``work``, which is tried again for as long as storage fails."""
        pause = _FIRST_PAUSE
        while True:
            try:
                return work()
            except OSError as error:
                if isinstance(error, _OF_THE_CHECKPOINT):
                    raise
                logger.warning(
                    "archiving to %s fails on rank %d, and is tried again in %g s: %s",
                    target,
                    self._rank,
                    pause,
                    error,
                )
            self._wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _wait(self, seconds: float) -> None:
        if self.closing.wait(max(0.0, seconds)):
            raise SaveAbandonedError("the process was ending; the next start goes on")


def _is_carried(target: Location, attempt: Attempt) -> bool:
    """Whether the copy is committed. An older checkpoint at ``target`` is to be replaced.

    Raises :class:`CheckpointSupersededError` if a newer one is there, and :class:`CheckpointExistsError` if another
    program's is.
    """
    there = committed_at(target)
    if there is not None and there > attempt:
        raise CheckpointSupersededError(
            f"a newer checkpoint, attempt {there.name}, is in the archive at {str(target)!r}; it stands"
        )
    return there == attempt


# ---- the vote ------------------------------------------------------------------------------------


_KEPT: Final = 16
"""How many decisions stay in the store, for ranks that are behind. One that is further behind asks the archive."""


class ArchiveVotes:
    """The votes of one archive, one after another. One thread uses them."""

    def __init__(self, rank_set: RankSet, archive: int) -> None:
        self._rank_set = rank_set
        store = rank_set.connect(f"archive{archive}")
        self.store: Final = store
        self.log: Final = DecisionLog(store)
        self._old: list[int] = []

    def on(self, attempt: Attempt) -> ArchiveVote:
        """The vote on the archived copy of ``attempt``."""
        return ArchiveVote(self, self._rank_set, (attempt.incarnation << 64) + attempt.sequence)

    def forget_old(self, number: int) -> None:
        """Coordinator: the vote with this number is decided."""
        self._old.append(number)
        while len(self._old) > _KEPT:
            old = self._old.pop(0)
            self.store.delete_key(_finished(old))
            self.log.forget(old)


class ArchiveVote:
    """One vote. No method raises: if the job's store does not answer, there is no news."""

    def __init__(self, votes: ArchiveVotes, rank_set: RankSet, number: int) -> None:
        self._votes = votes
        self._rank_set = rank_set
        self._number = number

    def finished(self) -> None:
        """Tell the coordinator that this rank's files are in the archive."""
        with contextlib.suppress(RuntimeError):
            self._votes.store.add(_finished(self._number), 1)

    def failed(self, error: BaseException) -> None:
        """Tell the coordinator why this rank's files cannot come to be there."""
        with contextlib.suppress(RuntimeError):
            self._votes.log.explain(self._number, self._rank_set.rank, Reason.of(error))

    def may_be_complete(self) -> bool:
        """Coordinator: whether it is worth asking the archive. (A count may be too high, if a request was repeated.)"""
        try:
            return self._votes.store.add(_finished(self._number), 0) >= self._rank_set.world
        except RuntimeError:
            return True

    def failures(self) -> Decision | None:
        """Coordinator: the decision if ranks have failed; None if none has said so."""
        with contextlib.suppress(RuntimeError):
            return self._votes.log.failures(self._number)
        return None

    def decide(self, decision: Decision) -> None:
        """Coordinator: tell the other ranks."""
        with contextlib.suppress(RuntimeError):
            self._votes.log.note(self._number, decision)
            self._votes.forget_old(self._number)

    def decision(self) -> Decision | None:
        """Another rank: what the coordinator has decided; None if it has not, or if that is not known."""
        with contextlib.suppress(RuntimeError):
            return self._votes.log.find(self._number)
        return None


def _finished(number: int) -> str:
    return f"finished/{number}"
