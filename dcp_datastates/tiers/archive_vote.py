"""How the ranks that carry a checkpoint to an archive learn what the others have done: through the job's store.

Storage alone tells whether the checkpoint is complete, and committed: a file appears in the archive whole, and the
commit can be repeated. So what the ranks tell each other is only news: it makes an error known on all ranks at once,
with its rank, and spares requests to the archive. Where the job's store is gone, the ranks ask the archive.
"""

from __future__ import annotations

import contextlib
from typing import Final

from dcp_datastates.commit.decision_log import DecisionLog
from dcp_datastates.commit.vote import Decision, Outcome, Reason
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.storage.attempt import Attempt

__all__ = ["ArchiveVote", "ArchiveVotes"]

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
        try:
            collected = self._votes.log.collect(self._number)
        except RuntimeError:
            return None
        if not collected.reasons:
            return None
        return Decision(Outcome.FAILED, collected.reasons, more=collected.more)

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
