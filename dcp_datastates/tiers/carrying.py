"""Carries one checkpoint to another tier: each rank its own files, and the first rank commits the copy.

A rank's files are those of the ranks whose numbers, modulo the number of ranks, are its own: after a restart with fewer
ranks, all files have one. The copy has the attempt of the original, so every step can be repeated, by any process.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from dcp_datastates.checkpoints import copy
from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.joint_work import JointWork
from dcp_datastates.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CheckpointSupersededError,
    DataStatesError,
    StorageError,
)
from dcp_datastates.format.metadata_table import FileRecord
from dcp_datastates.io.committed import Committed, open_committed
from dcp_datastates.storage import attempts
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import Location
from dcp_datastates.tiers.pace import Pace

logger = logging.getLogger(__name__)

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
"""Between two tries, if storage fails. In seconds."""

T = TypeVar("T")


class Carrier:
    """Carries checkpoints, one after another, in one thread."""

    def __init__(self, group: CommitGroup, number: int) -> None:
        self._work = JointWork(group, f"archive{number}")
        self.pace: Final = Pace()

    def close(self) -> None:
        """Give up: the process ends. Any thread."""
        self._work.closing.set()

    def carry(self, source: Location, attempt: Attempt, target: Location) -> None:
        """Carry the checkpoint that ``attempt`` has committed at ``source``. Returns when the copy is committed.

        Tries again, without end, what storage refuses. The ranks meet when their files are there; the first one then
        commits the copy, unless a rank has failed.

        Raises:
            SaveAbandonedError: the process ends.
            RankLostError: another rank has ended.
            DataStatesError: on every rank: the checkpoint was replaced or is damaged, or another one is at ``target``.
        """
        number = (attempt.incarnation << 64) + attempt.sequence
        committed: Committed

        def write() -> bytes:
            nonlocal committed
            committed = self.until_done(lambda: self._write(source, attempt, target), target)
            return b""

        def commit(_: Sequence[bytes]) -> bytes:
            self.until_done(lambda: _commit(committed, target), target)
            return b""

        try:
            self._work.do(number, write, commit, "archiving to", target)
        except DataStatesError:
            with contextlib.suppress(StorageError):
                if self._work.world > 1 and _is_carried(target, attempt):
                    return  # the first rank has ended since
            raise

    def _write(self, source: Location, attempt: Attempt, target: Location) -> Committed:
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
        copy.make_place(target, attempt)
        for write in copy.copies(committed, target, mine):
            hit("archive.write.before")
            write(lambda nbytes: self._work.wait(self.pace.delay(nbytes)))
            hit("archive.write.after")
        return committed

    def _is_mine(self, record: FileRecord) -> bool:
        return (attempts.rank_of(record.relative_path) or 0) % self._work.world == self._work.rank

    def until_done(self, work: Callable[[], T], target: Location) -> T:
        """The result of ``work``, which is tried again for as long as storage fails."""
        pause = _FIRST_PAUSE
        while True:
            try:
                return work()
            except (CheckpointExistsError, CheckpointNotFoundError):  # another try mends neither
                raise
            except OSError as error:
                logger.warning(
                    "archiving to %s fails on rank %d, and is tried again in %g s: %s",
                    *(target, self._work.rank, pause, error),
                )
            self._work.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _commit(committed: Committed, target: Location) -> None:
    attempt = committed.note.attempt
    if not _is_carried(target, attempt):
        hit("archive.commit.before")
        copy.publish(target, attempt, committed.data)
        hit("archive.commit.after")
    copy.remove_older(target, attempt)


def _is_carried(target: Location, attempt: Attempt) -> bool:
    """Whether the copy is committed. An older checkpoint at ``target`` is to be replaced.

    Raises :class:`CheckpointSupersededError` if a newer one is there, and :class:`CheckpointExistsError` if another
    program's is.
    """
    there = copy.committed_at(target)
    if there is not None and there > attempt:
        raise CheckpointSupersededError(
            f"a newer checkpoint, attempt {there.name}, is in the archive at {str(target)!r}; it stands"
        )
    return there == attempt
