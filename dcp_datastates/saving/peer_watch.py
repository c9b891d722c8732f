"""Waiting for the other ranks to come to a save, and to plan it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.errors import RankLostError
from dcp_datastates.process.waiting import WaitLog
from dcp_datastates.ranks.failure_detector import FailureDetector, LossWatch
from dcp_datastates.saving.operation import SaveOperation

__all__ = ["GATE_SECONDS", "GATE_SECONDS_AFTER_A_MISS", "PeerWatch"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

GATE_SECONDS: Final = 10.0
"""How long the step gate holds training for a save to which a rank has not come."""

GATE_SECONDS_AFTER_A_MISS: Final = 5.0
"""The same, if the save before has been given up so. Beats, which tell of calls, come every four seconds or sooner."""

COME_SECONDS: Final = 30.0
"""How long the ranks wait for one another in a save that DCP runs: when one has come, DCP's planning is over on all. A
rank whose planner fails then, in ``finish_plan``, never comes, and DCP tells no other rank.
"""

_BEAT_SECONDS: Final = 8.0
"""How long it takes until every rank knows that all have come."""

_ALL_ARE_HERE: Final = "planning for all ranks"


class PeerWatch:
    """Watches, for a thread that waits, whether the other ranks come to a save and make progress.

    Args:
        what: the purpose of the wait, for the log.
        timeout: seconds without progress after which the wait fails.
        number: the number of the call that the ranks must make.
        check_open: raises if this process is ending.
        gate_seconds: how long the step gate may hold training for a rank that has not called.
        save: a save whose ``doing`` is updated.
    """

    def __init__(
        self,
        group: CommitGroup,
        what: str,
        timeout: float,
        number: int,
        check_open: Callable[[], None],
        save: SaveOperation | None = None,
        gate_seconds: float = GATE_SECONDS,
    ) -> None:
        self._gate_seconds = gate_seconds
        self.let_training_go = False
        """Whether it has failed a wait for which the step gate held training."""
        self._all_are_here = False
        self._group = group
        self._losses = None if group.detector is None else LossWatch(group.detector)
        self._timeout = timeout
        self._number = number
        self._own = save is None or save.call.own
        self._check_open = check_open
        self._save = save
        self._log = WaitLog(logger, what)

    def move_on(self) -> None:
        """The save belongs to the ranks' next call."""
        self._number += 1

    def told_of(self, answer: Callable[[T], R]) -> Callable[[T], R]:
        """The first rank's ``answer``, which notes that all ranks have come."""

        def answering(messages: T) -> R:
            self._all_are_here = True
            self._group.tell_planning(_ALL_ARE_HERE)
            return answer(messages)

        return answering

    def look(self) -> None:
        """Called repeatedly while waiting. Raises :class:`RankLostError` if a rank is lost, and after ``timeout``
        seconds; for a rank that has not called, after the step gate has held training for ``gate_seconds``.
        """
        self._check_open()
        if self._losses is not None:
            self._losses.look()
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
        absent = detector.absent(self._number, self._own)
        if absent and self._own and self._gate_waits > self._gate_seconds:
            self.let_training_go = True
            raise RankLostError(f"{what} for {waited:.0f} s, and training waits no longer for it")
        if not self._own and self._misses_ranks(waited, detector):
            raise RankLostError(
                f"some ranks have not come from DCP's planning within {waited:.0f} s: DCP's error tells if the "
                f"finish_plan() of a planner has failed"
            )
        if waited < self._timeout:
            return
        if absent:
            raise RankLostError(f"{what} for {waited:.0f} s")
        if slow := detector.standing_still(self._timeout):
            raise RankLostError("; ".join(map(str, slow[:3])))

    def _misses_ranks(self, waited: float, detector: FailureDetector[Any]) -> bool:
        if self._group.rank_set.rank == 0:
            return waited > COME_SECONDS and not self._all_are_here
        return (
            waited > COME_SECONDS + _BEAT_SECONDS and detector.said_by_coordinator != _ALL_ARE_HERE
        )

    @property
    def _gate_waits(self) -> float:
        reads = None if self._save is None else self._save.reads
        return 0.0 if reads is None else reads.gate_waits

    def _waited_for(self, detector: FailureDetector[Any]) -> str:
        absent = detector.absent(self._number, self._own)
        if self._all_are_here:
            return _ALL_ARE_HERE
        if absent:
            named = ", ".join(map(str, absent[:3])) + (", …" if len(absent) > 3 else "")
            some = (
                f"rank {named} has" if len(absent) == 1 else f"{len(absent)} ranks ({named}) have"
            )
            return f"{some} not called {'' if self._own else 'dcp.'}async_save"
        if said := detector.said_by_coordinator:
            return f"waiting for rank 0 ({said})"
        return "waiting for the other ranks to plan"
