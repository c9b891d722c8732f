"""The commit group: the ranks of a save agree on its outcome, one save after another.

A :class:`CommitGroup` has private gloo connections, never the training job's, one thread that runs the rounds, and a
:class:`FailureDetector`, which finds lost ranks. ``protocol.py`` decides what a rank does in a round, and ``voter.py``
does it. A rank alone runs the same code.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, TypeVar, cast

from dcp_datastates.commit.place import Place, Round
from dcp_datastates.commit.vote import Decision, DecisionLog, Outcome
from dcp_datastates.commit.voter import Voter
from dcp_datastates.errors import SaveFailedError, release_frames
from dcp_datastates.process.ending import at_exit
from dcp_datastates.process.futures import Worker
from dcp_datastates.ranks.connection import end_requests
from dcp_datastates.ranks.failure_detector import Beat, FailureDetector
from dcp_datastates.ranks.rank_set import ALONE, RankSet, is_current
from dcp_datastates.storage.bounded import finished_within, is_hung
from dcp_datastates.storage.claims import Neighbours
from dcp_datastates.storage.failpoints import hit

logger = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 15.0
"""How long :meth:`CommitGroup.close` waits for the rounds in progress."""

_TIDY_SECONDS: Final = 10.0
"""How long the outcome waits for the cleanup. If that takes longer, it goes on by itself."""

_CANCEL_SECONDS: Final = 10.0
"""How long the commit thread waits for a failed save's writes to end before it reports the outcome anyway."""


class AttachedContext(Protocol):
    """Belongs to a group, which has one of each kind."""

    def close(self) -> None:
        """End it when what was submitted is over, and return when its threads have ended, or after some seconds."""


class Progress(Protocol):
    """The progress of a save that a rank reads, or of a load."""

    @property
    def value(self) -> int:
        """A number that changes while there is progress. Any thread."""

    @property
    def doing(self) -> str:
        """The present phase. Any thread."""


C = TypeVar("C", bound=AttachedContext)


class CommitGroup:
    """This rank's side of the ranks that commit together. :func:`~dcp_datastates.commit.group.commit_group` makes one
    per rank set.

    Its thread, ``dcp_datastates-commit``, starts with the first round and ends with :meth:`close`, which runs at
    interpreter exit and lets the submitted rounds end first.
    """

    def __init__(self, rank_set: RankSet) -> None:
        self.rank_set: Final = rank_set
        self.is_coordinator: Final = rank_set.rank == 0
        """Whether this rank decides and publishes."""
        self.neighbours: Final = Neighbours()  # for the coordinator's planning thread
        self._lock = threading.RLock()  # guards what follows, and the order of posts
        self._attached: dict[object, AttachedContext] = {}
        self.unused_writers = 0
        """Writers of this rank's program that were not used yet: see ``Proposal``."""
        self._calls = {True: 0, False: 0}  # by ``own``: see count_call
        self.planning = ""
        """What the planning thread is doing, for this rank's beat; empty if it is idle."""
        self.name: Final = f"{next(_names)}/{rank_set.digest}"
        """Identifies the group: unique within the process."""
        self._numbers = itertools.count()  # of rounds
        self._worker = Worker("dcp_datastates-commit")
        self._expected = 0  # the next round; commit thread only
        # Of the saves that this rank reads; the list is replaced, never changed.
        self._reading: list[Progress] = []
        self._rounds: dict[int, Round | None] = {}  # announced, or waiting for an earlier one
        self._decisions: DecisionLog | None = None  # as the detector, None for a rank alone
        self.detector: FailureDetector | None = None
        if rank_set.world > 1:
            # The n-th group of these ranks belongs to the n-th one of each other rank.
            store = rank_set.connect(f"commit/{rank_set.incarnation.count('commit')}")
            self._decisions = DecisionLog(store)
            self.detector = FailureDetector(rank_set, store, self._status)
        self._voter = Voter(rank_set, self.detector, self._decisions)

    # ---- any thread --------------------------------------------------------------------------

    def attached(self, make: Callable[[CommitGroup], C]) -> C:
        """What ``make`` has made for this group: at the first call now, later the same."""
        with self._lock:
            if make not in self._attached:
                self._attached[make] = make(self)
            return cast("C", self._attached[make])

    def draw(self) -> int:
        """Coordinator: take the number of the next round."""
        return next(self._numbers)

    def count_unused(self, more: int) -> None:
        """Count a writer that was made, or (-1) is used for the first time."""
        with self._lock:
            self.unused_writers += more

    def count_call(self, own: bool = True, more: int = 1) -> int:
        """Count a call of this package's save functions, or (not ``own``) a save that DCP runs. Returns the count,
        which the next beat tells the other ranks. ``more=-1``: the call was for this process alone.
        """
        with self._lock:
            self._calls[own] += more
            return self._calls[own]

    def reading(self, progress: Progress, active: bool) -> None:
        """Let the ``progress`` of a save that this rank reads, or of a load, count in its beat while it is
        ``active``.
        """
        with self._lock:
            others = [each for each in self._reading if each is not progress]
            self._reading = [*others, progress] if active else others

    def announce(self, number: int) -> None:
        """Say that the round with this number will be submitted: rounds with greater numbers wait for it."""
        with self._lock:
            self._rounds[number] = None

    def submit(self, round_: Round) -> None:
        """Run the round after all earlier ones; ``round_.committed`` resolves with its outcome.

        Rounds may come in another order than that of their numbers: a save may fail while an earlier one is read.
        """
        refused = []
        with self._lock:
            self._rounds[round_.number] = round_
            while self._rounds and (first := self._rounds[min(self._rounds)]) is not None:
                del self._rounds[first.number]
                if not self._worker.post(partial(self._run, first)):
                    refused.append(first)
        for each in refused:
            each.part.cancel()
            why = f"this save was not committed: {self._worker.refusal}"
            each.committed.settle(SaveFailedError(why))

    def close(self) -> None:
        """Finish the submitted rounds and end the threads, the attached context's first. Idempotent.

        A round that storage delays for long is abandoned: the process has already waited for its save.
        """
        with self._lock:
            attached, self._attached = self._attached, {}
        for each in attached.values():
            each.close()
        self._worker.close(_CLOSE_SECONDS)
        if self.detector is not None:
            self.detector.close()
        self._voter.close()

    def _status(self) -> Beat:
        voter, reading = self._voter, self._reading
        round_, progress, doing = voter.round, voter.progress, voter.doing
        if reading:
            progress, doing = progress + sum(each.value for each in reading), reading[-1].doing
        elif self.planning and round_ is None:
            doing = self.planning
        return Beat(
            voted=voter.voted,
            progress=progress if round_ is None else progress + round_.part.progress,
            doing=doing,
            calls=self._calls[True],
            dcp_calls=self._calls[False],
            ended=voter.ended,
            gave_up=voter.gave_up,
            generation=voter.tree.generation,
        )

    # ---- the commit thread -------------------------------------------------------------------

    def _run(self, round_: Round) -> None:
        try:
            while self.rank_set.world > 1 and self._expected < round_.number:
                self._finish(Round.missing(self._expected, round_.timeout))
            self._finish(round_)
        except BaseException as error:  # a defect; still, no caller may wait forever
            logger.exception("a commit round ended unexpectedly")
            round_.committed.settle(error)

    def _finish(self, round_: Round) -> None:
        self._expected = round_.number + 1
        decision = self._voter.agree(round_)
        round_.timeline.begin("ending")
        if self.is_coordinator and self._decisions is not None:
            with contextlib.suppress(RuntimeError):
                self._decisions.forget_before(round_.number)
        try:
            self._tidy(round_, decision.outcome)
        except Exception:  # the next commit removes the rest; the outcome stands
            logger.exception("could not tidy up after %s", round_)
        failed = decision.outcome is not Outcome.COMMITTED
        round_.committed.settle(self._error(round_, decision) if failed else None)

    def _error(self, round_: Round, decision: Decision) -> BaseException:
        where = "an unknown path" if round_.path is None else repr(str(round_.path))
        cause = round_.failure or round_.part.error  # a save that stalls is cancelled
        if cause is not None:
            release_frames(cause)
        return decision.error(where, self.rank_set.world, cause)

    def _tidy(self, round_: Round, outcome: Outcome) -> None:  # 12
        removes = outcome is Outcome.FAILED
        if removes:
            round_.part.cancel()
            # Storage may be stuck. Then the files stay until the next commit removes them.
            removes = round_.part.wait(_CANCEL_SECONDS)

        place = None if round_.directory is None else Place(round_.directory)

        def tidy() -> None:
            hit("cleanup.before")
            if place is not None and outcome is Outcome.COMMITTED and self.is_coordinator:
                place.tidy_after_commit(round_)
            elif place is not None and removes:
                place.tidy_after_failure(round_, self.rank_set.rank, self.rank_set.world)
            hit("cleanup.after")

        hung = round_.directory is not None and is_hung(round_.directory)
        if not finished_within(0.0 if hung else _TIDY_SECONDS, tidy):
            logger.warning("the cleanup after the save to %s goes on", round_.path)


_names = itertools.count()

_groups_lock = threading.RLock()  # guards _groups
_groups: dict[tuple[int, ...], CommitGroup] = {}


def commit_group(rank_set: RankSet) -> CommitGroup:
    """The process's commit group for these ranks. Closes groups whose store is gone.

    Does not wait for the other ranks: ranks connect in the first round.
    """
    key = () if rank_set is ALONE else rank_set.ranks
    with _groups_lock:
        stale = [
            ranks
            for ranks, group in _groups.items()
            if group.rank_set is not ALONE and not is_current(group.rank_set)
        ]
        closing = [_groups.pop(ranks) for ranks in stale]
        found = _groups.get(key)
        if found is None:
            found = _groups[key] = CommitGroup(rank_set)
    # In a separate thread: an operation in progress may take long to fail.
    for group in closing:
        threading.Thread(target=group.close, name="dcp_datastates-close", daemon=True).start()
    return found


def _close_all() -> None:
    with _groups_lock:
        groups = list(_groups.values())
        _groups.clear()
    for group in groups:
        group.close()


at_exit(end_requests)  # the last one runs first
at_exit(_close_all)
