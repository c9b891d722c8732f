"""What all ranks do together in the background, outside of saves: archive a checkpoint, publish its weights."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Final

from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.joint_steps import Answer, alone, together
from dcp_datastates.errors import RankLostError, SaveAbandonedError
from dcp_datastates.process.waiting import Wait
from dcp_datastates.ranks.failure_detector import Loss
from dcp_datastates.ranks.meetings import Meetings, Met
from dcp_datastates.storage.object_path import Location

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.2
"""Between two looks for news of the other ranks; longer with many ranks (``_LOOK_SECONDS_PER_RANK``)."""
_LOOK_SECONDS_PER_RANK: Final = 1e-3
_SAID_EVERY: Final = 60.0


class JointWork:
    """Steps of one kind, for the ranks of ``group``. One thread of each rank calls the methods, alike.

    ``name``: of the kind, for the job's store. ``patience``: how long a rank waits for the slowest other one, in
    seconds.
    """

    def __init__(self, group: CommitGroup, name: str, patience: float = math.inf) -> None:
        self.rank: Final = group.rank_set.rank
        self.world: Final = group.rank_set.world
        self.closing: Final = threading.Event()
        """Whether to give up: the process ends."""
        self._detector = group.detector
        self._meetings = Meetings(group.rank_set, name) if self.world > 1 else None
        self._pause = max(_LOOK_SECONDS, _LOOK_SECONDS_PER_RANK * self.world)
        self._patience = patience

    def do(
        self,
        number: int,
        work: Callable[[], bytes],
        answer: Callable[[Sequence[bytes]], bytes],
        doing: str,
        where: Location,
    ) -> bytes:
        """Do the step with this number. Returns what ``answer`` makes of all ranks' notes on the first rank.

        ``doing`` and ``where``: the work, for the log and errors. Raises this rank's own error; the error that another
        rank tells, as one of its type; :class:`RankLostError`; and what :meth:`wait` raises.
        """

        def meet(message: bytes, answers: Answer) -> Met:
            if self._meetings is None:
                return alone(message, answers)
            log = Wait(logger, f"{doing} {where}", first=_SAID_EVERY)
            return self._meetings.meet(number, message, answers, lambda: self._look(log))

        end = together(meet, work, lambda notes: [answer(notes)] * len(notes))
        if end.failed is None:
            return end.answer
        try:
            raise end.own or end.failed.error(repr(str(where)), self.world)
        finally:
            del end  # a traceback retains this frame

    def wait(self, seconds: float = 0.0) -> None:
        """Wait for so long. Raises :class:`SaveAbandonedError` if the process ends."""
        if self.closing.wait(max(0.0, seconds)):
            raise SaveAbandonedError(f"the process of rank {self.rank} was ending")

    def _look(self, log: Wait) -> None:
        log.look("the other ranks")
        self.wait(self._pause)
        if log.seconds > self._patience:
            raise RankLostError(f"a rank has not come within {log.seconds:.0f} s")
        if lost := [] if self._detector is None else self._detector.losses():
            raise Loss.error_of(lost)
