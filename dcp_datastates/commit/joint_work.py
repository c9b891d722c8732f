"""What all ranks do together in the background, outside of saves: archive a checkpoint, publish its weights.

Each rank does its part, and the ranks meet when all have done theirs. The first one then does what completes the work.
An error on any rank ends it on all of them, as the same error.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.vote import Decision
from dcp_datastates.errors import RankLostError, SaveAbandonedError
from dcp_datastates.process.waiting import Wait
from dcp_datastates.ranks.failure_detector import Loss
from dcp_datastates.ranks.meetings import GivenUp, Meetings
from dcp_datastates.storage.object_path import Location

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.2
"""Between two looks for news of the other ranks; longer with many ranks (``_LOOK_SECONDS_PER_RANK``)."""
_LOOK_SECONDS_PER_RANK: Final = 1e-3
_SAID_EVERY: Final = 60.0


class JointWork:
    """The joint work of one kind, for the ranks of ``group``. One thread of each rank calls the methods, alike.

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

    @contextlib.contextmanager
    def telling(self, number: int) -> Iterator[None]:
        """Tells the other ranks, which come to the meeting with this number, of an error in the block."""
        try:
            yield
        except BaseException as error:
            if self._meetings is not None:
                self._meetings.give_up(number, Decision.failed(self.rank, error).encode())
            raise

    def meet(
        self,
        number: int,
        message: bytes,
        answer: Callable[[Sequence[bytes]], bytes],
        doing: str,
        where: Location,
    ) -> bytes:
        """Wait until all ranks are here. Returns the first one's answer to all messages, which are in their order.

        ``doing`` and ``where``: the work, for the log and errors. Raises what ``answer`` raises on the first rank; the
        error that another rank tells, as one of its type; :class:`RankLostError`; and what :meth:`wait` raises.
        """
        if self._meetings is None:
            return answer([message])
        log = Wait(logger, f"{doing} {where}", first=_SAID_EVERY)

        def for_each(messages: Sequence[bytes]) -> Sequence[bytes]:
            with self.telling(number):
                return [answer(messages)] * len(messages)

        def check() -> None:
            log.look("the other ranks")
            with self.telling(number):
                self.wait(self._pause)
                if log.seconds > self._patience:
                    raise RankLostError(f"a rank has not come within {log.seconds:.0f} s")
                if lost := [] if self._detector is None else self._detector.losses():
                    raise Loss.error_of(lost)

        try:
            return self._meetings.meet(number, message, for_each, check).answer
        except GivenUp as stop:
            told = Decision.decode(stop.why.encode())
            raise told.error(repr(str(where)), self.world) from None

    def wait(self, seconds: float = 0.0) -> None:
        """Wait for so long. Raises :class:`SaveAbandonedError` if the process ends."""
        if self.closing.wait(max(0.0, seconds)):
            raise SaveAbandonedError("the process was ending")
