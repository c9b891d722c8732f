"""At each step the ranks exchange a few numbers, and learn the greatest of each at the next step.

So a decision that needs all ranks (to stop because one of them got a signal; to save because ten minutes are over)
costs training no wait: the exchange runs while the step computes. All ranks decide alike, because all have the same
numbers at the same step.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Final

from dcp_datastates.commit.group import commit_group
from dcp_datastates.commit.vote import Reason
from dcp_datastates.errors import NoAnswerError
from dcp_datastates.process.ending import at_exit
from dcp_datastates.process.futures import Worker
from dcp_datastates.process.waiting import Wait
from dcp_datastates.ranks.failure_detector import RankWait
from dcp_datastates.ranks.meetings import GivenUp, Meetings
from dcp_datastates.ranks.rank_set import RankSet

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 10.0
_SILENCE_SECONDS: Final = 60.0
"""How long a rank may be silent: what has held it up, a stop or a cut network, may pass."""

_PATIENCE_SECONDS: Final = 86400.0
"""How long a rank that is alive may take to come to a step: it may evaluate for hours. If it is stuck, the job's own
collectives end sooner.
"""


class StepConsensus:
    """The exchanges of the ranks in ``rank_set``. The training thread calls the methods.

    A thread, ``dcp_datastates-steps``, makes the exchanges: meetings at the job's store. It starts with the first
    exchange and ends with :meth:`close`.

    Args:
        rank_set: the ranks. They make their agreements in the same order.
    """

    def __init__(self, rank_set: RankSet) -> None:
        self._detector = commit_group(rank_set).detector
        self._meetings: Meetings | None = None
        if rank_set.world > 1:
            self._meetings = Meetings(rank_set, "steps")
        self._worker = Worker("dcp_datastates-steps")
        self._pending: Future[list[float]] | None = None
        self._at_exit = at_exit(self.close)
        self._number = 0  # of the latest exchange

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self._meetings is None

    def take(self) -> list[float] | None:
        """The greatest of the numbers that all ranks gave at the step before; None at the first step.

        Raises :class:`RankLostError` if a rank is lost, :class:`NoAnswerError` if one does not come for a day.
        """
        if self._pending is None:
            return None
        log = Wait(logger, "this step")
        while not wait([self._pending], _POLL_SECONDS).done:
            log.look("another rank has not called save() for the step before")
        return self._pending.result()

    def give(self, numbers: Sequence[float]) -> None:
        """Give this step's numbers, at every step as many, after :meth:`take`. Returns immediately."""
        mine, begun = list(map(float, numbers)), Future[list[float]]()
        self._pending = begun
        self._number += 1
        number = self._number
        if self._meetings is None:
            begun.set_result(mine)
        elif not self._worker.post(lambda: self._run(number, mine, begun)):
            begun.set_exception(NoAnswerError(f"nothing more is exchanged: {self._worker.refusal}"))

    def close(self) -> None:
        """End the exchanges; wait a little for the last one, without which other ranks may still need this one."""
        atexit.unregister(self._at_exit)
        if self._pending is not None:
            wait([self._pending], _CLOSE_SECONDS)
        if (meetings := self._meetings) is not None and self._number:
            ended = NoAnswerError("another rank has ended")
            self._worker.post(functools.partial(meetings.give_up, self._number + 1, ended))
        self._worker.close(_CLOSE_SECONDS)  # a thread in torch's code must not outlive Python

    # ---- the thread ----------------------------------------------------------------------------------

    def _run(self, number: int, mine: list[float], begun: Future[list[float]]) -> None:
        deadline, detector = time.monotonic() + _PATIENCE_SECONDS, self._detector
        losses = None if detector is None else RankWait(detector, "a step", _SILENCE_SECONDS)

        def check() -> None:
            if losses is not None:
                losses.look()
            if time.monotonic() > deadline:
                raise NoAnswerError(
                    f"a rank has not come to step {number} of the manager for {_PATIENCE_SECONDS:.0f} s: every rank "
                    f"must call save() at each step"
                )

        assert self._meetings is not None
        try:
            met = self._meetings.meet(number, json.dumps(mine).encode(), _greatest, check)
            begun.set_result(json.loads(met.answer))
        except GivenUp as stop:
            told = Reason(stop.kind, f"step {number} of the manager: {stop.why}")
            begun.set_exception(told.error("another rank"))
        except BaseException as error:
            begun.set_exception(error)


def _greatest(messages: Sequence[bytes]) -> list[bytes]:
    numbers = map(json.loads, messages)
    return [json.dumps(list(map(max, *numbers))).encode()] * len(messages)
