"""At each step the ranks exchange a few numbers, and learn the greatest of each at the next step.

So a decision that needs all ranks (to stop because one of them got a signal; to save because ten minutes are over)
costs training no wait: the exchange runs while the step computes. All ranks decide alike, because all have the same
numbers at the same step.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Final

from dcp_datastates.commit.groups import commit_group
from dcp_datastates.errors import NoAnswerError, RankLostError
from dcp_datastates.process.ending import at_exit
from dcp_datastates.process.waiting import WaitLog
from dcp_datastates.process.worker import Worker
from dcp_datastates.ranks.gloo_tree import GlooTree, GroupBroken
from dcp_datastates.ranks.rank_set import RankSet

__all__ = ["StepConsensus"]

logger = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 0.2
_POLL_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 10.0
_SILENCE_SECONDS: Final = 60.0
"""How long a rank may be silent: what has held it up, a stop or a cut network, may pass."""

_PATIENCE_SECONDS: Final = 86400.0
"""How long a rank that is alive may take to come to a step: it may evaluate for hours. If it is stuck, the job's own
collectives end sooner.
"""

_LEAST: Final = -(2**62)


class StepConsensus:
    """The exchanges of the ranks in ``rank_set``. The training thread calls the methods.

    A thread, ``dcp_datastates-steps``, makes the exchanges over separate gloo connections. It starts with the first
    exchange and ends with :meth:`close`. A connection that breaks is made anew.

    Args:
        rank_set: the ranks. They make their agreements in the same order.
    """

    def __init__(self, rank_set: RankSet) -> None:
        self._rank_set = rank_set
        self._detector = commit_group(rank_set).detector
        name = f"steps/{rank_set.incarnation.count('steps')}" if rank_set.world > 1 else "steps"
        self._tree = GlooTree(rank_set, name)
        self._worker = Worker("dcp_datastates-steps")
        self._pending: Future[list[int]] | None = None
        self._closing = False
        self._at_exit = at_exit(self.close)
        # Of the worker's thread:
        self._number = 0
        self._last: list[int] = []
        """The result of the exchange before: a rank that lost its connection in it may still need it."""

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self._rank_set.world == 1

    def take(self) -> list[int] | None:
        """The greatest of the numbers that all ranks gave at the step before; None at the first step.

        Raises :class:`RankLostError` if a rank is lost, :class:`NoAnswerError` if one does not come for a day.
        """
        if self._pending is None:
            return None
        log = WaitLog(logger, "this step")
        while not wait([self._pending], _POLL_SECONDS).done:
            log.look("another rank has not called save() for the step before")
        return self._pending.result()

    def give(self, numbers: Sequence[int]) -> None:
        """Give this step's numbers, at every step as many, after :meth:`take`. Returns at once."""
        mine, begun = list(map(int, numbers)), Future[list[int]]()
        self._pending = begun
        if self._rank_set.world == 1:
            begun.set_result(mine)
        elif not self._worker.post(lambda: self._run(mine, begun)):
            begun.set_exception(NoAnswerError(f"nothing more is exchanged: {self._worker.refusal}"))

    def close(self) -> None:
        """End the exchanges; wait a little for the last one, without which other ranks may still need this one."""
        self._closing = True
        atexit.unregister(self._at_exit)
        if self._pending is not None:
            wait([self._pending], _CLOSE_SECONDS)
        self._tree.close()
        self._worker.close(_CLOSE_SECONDS)  # a thread in torch's code must not outlive Python

    # ---- the thread ----------------------------------------------------------------------------------

    def _run(self, mine: list[int], begun: Future[list[int]]) -> None:
        self._number += 1
        deadline = time.monotonic() + _PATIENCE_SECONDS

        seen: float | None = None  # since when a rank has been lost without a break

        def check() -> None:
            nonlocal seen
            losses = [] if self._detector is None else self._detector.losses()
            seen = (seen or time.monotonic()) if losses else None
            silent = seen is not None and time.monotonic() - seen > _SILENCE_SECONDS
            if losses and (silent or any(loss.certain for loss in losses)):
                raise RankLostError("; ".join(map(str, losses[:3])))
            if time.monotonic() > deadline:
                raise NoAnswerError(
                    f"a rank has not come to step {self._number} of the manager for "
                    f"{_PATIENCE_SECONDS:.0f} s: every rank must call save() at each step"
                )
            if self._closing and self._tree.generation > generation:
                raise NoAnswerError("another rank has ended")

        generation = self._tree.generation
        try:
            while (result := self._meet(mine, check)) is None:
                check()
                time.sleep(_PAUSE_SECONDS)
            self._last = result
            begun.set_result(result)
        except BaseException as error:
            self._tree.leave()
            begun.set_exception(error)

    def _meet(self, mine: list[int], check: Callable[[], None]) -> list[int] | None:
        """Make the exchange; None if it must be tried again."""
        try:
            newest, oldest, result = self._tree.meet(self._number, mine, check)
            if newest == oldest:
                return result
            # Some ranks have the result of the exchange before, and others lost their connection in it.
            ahead = self._number == newest
            late = self._tree.max(self._last if ahead else [_LEAST] * len(mine), check)
            return None if ahead else late
        except GroupBroken:
            self._tree.leave()
            return None
