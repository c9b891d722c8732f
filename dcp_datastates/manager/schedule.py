"""Decides at each step whether a save is due, and whether the loop should end; alike on all ranks."""

from __future__ import annotations

import logging
import operator
import time
from concurrent.futures import Future
from typing import Final, NamedTuple, SupportsIndex

from dcp_datastates.dcp.handle import SaveHandle
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.manager.interval import AutoInterval, Chosen, Cost, CostMeter, choose
from dcp_datastates.manager.step_consensus import StepConsensus
from dcp_datastates.process.futures import when_done
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.text import duration

logger = logging.getLogger(__name__)

_WARM_UP_STEPS: Final = 8
"""Quiet steps before each of the first two saves of an :class:`AutoInterval`."""

_MICRO: Final = 1_000_000


class Decision(NamedTuple):
    """What all ranks do at a step."""

    save: bool
    stop: bool


class _Said(NamedTuple):
    """What a rank tells the others at a step, as integers. Of each number, the ranks learn the greatest."""

    signalled: int
    time_over: int
    in_flight: int
    not_quiet: int
    """Minus the number of quiet steps since the latest save ended."""
    unmeasured: int
    """1 while a rank has no cost of a save."""
    step: int = 0
    stall: int = 0
    flush: int = 0
    """Microseconds."""


class Schedule:
    """The decisions of one loop. The training thread calls the methods.

    Args:
        rule: steps, seconds (a float), or an :class:`AutoInterval`.
        consensus: exchanges numbers with the other ranks; None if ``rule`` is a number of steps and no signal counts.
    """

    def __init__(self, rule: int | float | AutoInterval, consensus: StepConsensus | None) -> None:
        self._rule = rule
        self._consensus = consensus
        self._meter = CostMeter()
        self._chosen: Chosen | None = None
        self._step: int | None = None
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()
        self._left: float | None = None
        """When the call for the step before returned."""
        self._newest: SaveHandle | None = None
        self._in_flight = False
        self._quiet = 0  # steps without a save in flight, since the latest save ended
        self._ended: tuple[float, bool] | None = (
            None  # set by the commit thread, taken by the training thread
        )
        self._stopped = False

    def __str__(self) -> str:
        """When it saves, and why."""
        if isinstance(self._rule, AutoInterval):
            return (
                str(self._chosen) if self._chosen else "as soon as the cost of a save is measured"
            )
        if isinstance(self._rule, float):
            return f"every {duration(self._rule)}"
        return f"every {self._rule} steps"

    def checked(self, given: SupportsIndex) -> int:
        """``given`` as an int. Raises :class:`ConfigurationError` if it is no step, or lies before the latest one."""
        try:
            step = -1 if isinstance(given, bool) else operator.index(given)
        except TypeError:
            step = -1
        if step < 0:
            shown = repr(given) if isinstance(given, (int, float, str)) else type(given).__name__
            raise ConfigurationError(
                f"step={shown} must be a whole number, 0 or more; it is save(step, state)"
            )
        if self._step is not None and step < self._step:
            raise ConfigurationError(
                f"step={step} comes after step {self._step}: a checkpoint of a lower step would count as the newest"
            )
        return step

    def at(self, step: int, signalled: bool, force: bool = False) -> Decision:
        """Decide for ``step``, which is :meth:`checked`.

        ``signalled``: a signal has come to this rank. ``force``: all ranks save in any case.

        Raises as :meth:`StepConsensus.take`.
        """
        self._step = step
        now = time.monotonic()
        if self._left is not None:
            self._meter.step(now - self._left)
            self._quiet += not self._in_flight
        if (ended := self._ended) is not None:
            self._ended, self._in_flight, self._quiet = None, False, 0
            self._meter.end_save(*ended)
        heard = self._heard()
        stop = self._must_stop(heard, signalled)
        self._stopped = self._stopped or stop
        due = self._is_due(step, heard) or stop or force
        if due:  # before this rank tells the others
            self._saved_step, self._saved_at = step, now
            self._newest, self._in_flight, self._ended = None, True, None
        if self._consensus is not None:
            self._consensus.give(self._say(signalled, now))
        self._left = time.monotonic()
        return Decision(due, stop)

    def is_due(self, step: int, signalled: bool) -> bool:
        """Whether :meth:`at` will save at ``step``, the next one. Raises as :meth:`StepConsensus.take`."""
        heard = self._heard()
        return self._is_due(step, heard) or self._must_stop(heard, signalled)

    def poll(self, signalled: bool) -> bool:
        """Whether the next :meth:`at` will stop, or one has: an exchange between two steps. Raises as
        :meth:`StepConsensus.take`.
        """
        heard = self._heard()
        if self._consensus is not None:
            self._consensus.give(self._say(signalled, time.monotonic()))
        return self._stopped or self._must_stop(heard, signalled)

    def saved(self, began: float, call: float, handle: SaveHandle) -> None:
        """The save that was due began at ``began``, and its call took ``call`` seconds."""
        self._meter.begin_save(began, call)
        self._left = time.monotonic()
        self._newest = handle
        when_done(handle.committed, lambda outcome: self._save_ended(handle, outcome))

    def not_saved(self) -> None:
        """The save that was due has not begun."""
        self._ended = time.monotonic(), False

    def _save_ended(self, handle: SaveHandle, outcome: Future[None]) -> None:
        """In the commit thread."""
        if handle is self._newest:  # those before it are not measured any more
            self._ended = time.monotonic(), outcome.exception() is None

    def restored(self, step: int) -> None:
        """The loop goes on behind ``step``, which is saved."""
        self._step = step
        self._saved_step, self._saved_at, self._left = step, time.monotonic(), None

    def close(self) -> None:
        """End the exchanges."""
        if self._consensus is not None:
            self._consensus.close()

    def _heard(self) -> _Said | None:
        """What the ranks said at the step before; None at the first step."""
        agreed = None if self._consensus is None else self._consensus.take()
        return None if agreed is None else _Said(*agreed)

    def _must_stop(self, heard: _Said | None, signalled: bool) -> bool:
        """``signalled``: a signal has come to this rank. A rank alone need not hear of it from others first."""
        if self._consensus is not None and self._consensus.is_alone and signalled:
            return not self._stopped
        return heard is not None and bool(heard.signalled) and not self._stopped

    def _is_due(self, step: int, heard: _Said | None) -> bool:
        if isinstance(self._rule, int):
            return step % self._rule == 0
        if heard is None:
            return False
        if isinstance(self._rule, float):
            return bool(heard.time_over)
        if heard.in_flight:
            return False
        if heard.unmeasured:
            return -heard.not_quiet >= _WARM_UP_STEPS
        cost = Cost(*(max(1, each) / _MICRO for each in (heard.step, heard.stall, heard.flush)))
        before, chosen = self._chosen, choose(self._rule, cost)
        self._chosen = chosen
        if before is None or not 0.8 <= chosen.steps / before.steps <= 1.25:
            logger.log(once_per_job(logging.INFO), "saving %s", self)
        return self._saved_step is None or step - self._saved_step >= chosen.steps

    def _say(self, signalled: bool, now: float) -> _Said:
        time_over = isinstance(self._rule, float) and now - self._saved_at >= self._rule
        cost = self._meter.cost()
        said = _Said(signalled, time_over, self._in_flight, -self._quiet, cost is None)
        if cost is None:
            return said
        step, stall, flush = (round(each * _MICRO) for each in (cost.step, cost.stall, cost.flush))
        return said._replace(step=step, stall=stall, flush=flush)
