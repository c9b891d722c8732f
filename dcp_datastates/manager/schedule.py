"""When a loop saves: every so many steps, every so many minutes, or as often as the cost of a save allows.

The decision at each step is the same on all ranks: it follows from numbers that they have agreed on.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import time
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, NamedTuple, SupportsIndex

from dcp_datastates.config import parse_duration
from dcp_datastates.dcp.async_save import SaveHandle
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.manager.step_consensus import StepConsensus
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.text import duration

logger = logging.getLogger(__name__)

_REMEMBERED_STEPS: Final = 64
_REMEMBERED_SAVES: Final = 5
_LEAST_SECONDS: Final = 1e-6
_WARM_UP_STEPS: Final = 8
"""Quiet steps before each of the first two saves of an :class:`AutoInterval`."""


@dataclass(frozen=True)
class AutoInterval:
    """An interval that follows from what a save costs.

    The manager measures how long a step takes, by how much a save slows down the steps during it, and how long it takes
    until its commit. It then saves as often as three bounds allow: a save begins only when the one before it is
    committed; saves cost at most ``stall_budget`` of the time (the rule of CheckFreq, FAST '21); and the interval is at
    least ``sqrt(2 * cost * mtbf)``, below which saving costs more time than failures do (Young, 1974).

    Args:
        stall_budget: The part of the training time that saves may cost: 0.01 is one percent.
        mtbf: The mean time between failures of the whole job, in seconds or as a string such as ``"6h"``; None if it is
            unknown.

    Raises:
        ConfigurationError: a value cannot work.
    """

    stall_budget: float = 0.01
    mtbf: float | str | None = None

    def __post_init__(self) -> None:
        budget: Any = self.stall_budget
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget < 1:
            raise ConfigurationError(
                f"stall_budget={budget!r} must be a part of the training time, above 0 and below 1"
            )
        if self.mtbf is not None:
            parse_duration(self.mtbf, name="mtbf")


def parse_every(every: int | str | AutoInterval) -> int | float | AutoInterval:
    """Steps as an int, seconds as a float, or an :class:`AutoInterval`; raises :class:`ConfigurationError`."""
    if isinstance(every, AutoInterval):
        return every
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return every
    if every == "auto":
        return AutoInterval()
    if isinstance(every, str):
        with contextlib.suppress(ConfigurationError):
            return parse_duration(every, name="every")
    raise ConfigurationError(
        f'every={every!r} must be steps, 1 or more, a duration such as "10min", "auto", or an AutoInterval'
    )


@dataclass(frozen=True)
class Cost:
    """What steps and saves take, in seconds; of this rank, or the greatest of all ranks."""

    step: float
    """A step without a save."""
    stall: float
    """By how much one save slows training down."""
    flush: float
    """From the call of a save to its commit."""


@dataclass(frozen=True)
class Chosen:
    """An interval in steps, and why."""

    steps: int
    reason: str

    def __str__(self) -> str:
        return f"every {self.steps} steps: {self.reason}"


def choose(rule: AutoInterval, cost: Cost) -> Chosen:
    """The shortest interval that ``rule`` allows at this cost."""
    bounds = {
        f"a save is committed after {duration(cost.flush)}": math.ceil(cost.flush / cost.step),
        f"a save costs {duration(cost.stall)} of training, and the budget is {rule.stall_budget:.3g} of it": (
            math.ceil(cost.stall / (rule.stall_budget * cost.step))
        ),
    }
    if rule.mtbf is not None:
        mtbf = parse_duration(rule.mtbf)
        optimum = math.sqrt(2 * cost.stall * mtbf)
        bounds[
            f"a save costs {duration(cost.stall)} of training, and a failure comes every {duration(mtbf)}"
        ] = math.ceil(optimum / cost.step)
    reason, steps = max(bounds.items(), key=lambda bound: bound[1])
    return Chosen(max(1, steps), f"{reason}; a step takes {duration(cost.step)}")


class CostMeter:
    """Measures steps and saves of one loop on this rank. The training thread calls it; times are in seconds.

    A *quiet* step is one without a save in flight. What a save costs is the time of the call, and by how much the steps
    until its commit took longer than a quiet one. The first save is not counted: it is planned, and memory is pinned.
    """

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._stalls: deque[float] = deque(maxlen=_REMEMBERED_SAVES)
        self._flushes: deque[float] = deque(maxlen=_REMEMBERED_SAVES)
        self._saves = 0
        self._busy: list[float] | None = None
        """The steps during the save in flight; None without one."""
        self._quiet_steps = 0  # since the latest save ended

    def step(self, seconds: float) -> None:
        """A step took ``seconds``, without the call of a save."""
        if self._busy is None:
            self._quiet.append(seconds)
            self._quiet_steps += 1
        else:
            self._busy.append(seconds)

    def begin_save(self) -> None:
        """A save begins. One that is in flight is not measured any more."""
        self._busy = []

    def end_save(self, call: float, flush: float | None) -> None:
        """The save in flight has ended, after the latest :meth:`step`. Its call took ``call`` seconds, and it was
        committed ``flush`` seconds after it; None: it was not.
        """
        busy, self._busy, self._quiet_steps = self._busy or [], None, 0
        if flush is None:
            return
        self._saves += 1
        if self._saves > 1 and self._quiet:
            slower = sum(busy) - median(self._quiet) * len(busy)
            self._stalls.append(call + max(0.0, slower))
            self._flushes.append(flush)

    def cost(self) -> Cost | None:
        """The medians; None before there are any."""
        if not self._stalls or not self._quiet:
            return None
        return Cost(median(self._quiet), median(self._stalls), median(self._flushes))

    def told(self) -> list[float]:
        """What this rank tells the others, who learn the greatest of each number: 1 while a save is in flight, else
        minus the number of quiet steps; and the :class:`Cost`, which is infinite before it is measured.
        """
        cost = self.cost() or Cost(math.inf, math.inf, math.inf)
        rest = 1.0 if self._busy is not None else -float(self._quiet_steps)
        return [rest, *(max(_LEAST_SECONDS, each) for each in (cost.step, cost.stall, cost.flush))]


class Decision(NamedTuple):
    """What all ranks do at a step."""

    save: bool
    stop: bool


class Schedule:
    """The decisions of one loop. The training thread calls the methods.

    At each step, a rank tells the others whether a signal has come to it, and the numbers that the rule needs; of each
    number, all learn the greatest at the next step.

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
        self._newest: tuple[SaveHandle, float] | None = None
        """The save in flight that is measured, and the seconds of its call."""
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
        if self._left is not None:
            self._meter.step(time.monotonic() - self._left)
        if self._newest is not None and self._newest[0].committed.done():
            (handle, call), self._newest = self._newest, None
            record = handle.record
            committed = record is not None and record.outcome == "committed"
            self._meter.end_save(call, record.seconds if record and committed else None)
        heard = self._heard()
        stop = self._must_stop(heard, signalled)
        self._stopped = self._stopped or stop
        due = self._is_due(step, heard) or stop or force
        if due:  # before this rank tells the others
            self._saved_step, self._saved_at = step, time.monotonic()
            self._newest = None
            self._meter.begin_save()
        self._tell(signalled)
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
        self._tell(signalled)
        return self._stopped or self._must_stop(heard, signalled)

    def saved(self, handle: SaveHandle) -> None:
        """The save that was due has begun."""
        assert self._left is not None
        now = time.monotonic()
        self._newest, self._left = (handle, now - self._left), now

    def not_saved(self) -> None:
        """The save that was due has not begun."""
        self._meter.end_save(0.0, None)

    def restored(self, step: int) -> None:
        """The loop goes on after ``step``, which is saved."""
        self._step = step
        self._saved_step, self._saved_at, self._left = step, time.monotonic(), None

    def close(self) -> None:
        """End the exchanges."""
        if self._consensus is not None:
            self._consensus.close()

    def _tell(self, signalled: bool) -> None:
        if self._consensus is not None:
            auto = isinstance(self._rule, AutoInterval)
            mine = self._meter.told() if auto else [time.monotonic() - self._saved_at]
            self._consensus.give([signalled, *mine])

    def _heard(self) -> list[float] | None:
        """What the ranks told at the step before; None at the first step."""
        return None if self._consensus is None else self._consensus.take()

    def _must_stop(self, heard: list[float] | None, signalled: bool) -> bool:
        """``signalled``: a signal has come to this rank. A rank alone need not hear of it from others first."""
        alone = self._consensus is not None and self._consensus.is_alone
        told = heard is not None and bool(heard[0])
        return not self._stopped and (told or (alone and signalled))

    def _is_due(self, step: int, heard: list[float] | None) -> bool:
        if isinstance(self._rule, int):
            return step % self._rule == 0
        if heard is None:
            return False
        if isinstance(self._rule, float):
            return heard[1] >= self._rule
        rest, *costs = heard[1:]
        if rest > 0:
            return False
        if math.isinf(costs[0]):
            return -rest >= _WARM_UP_STEPS
        before, chosen = self._chosen, choose(self._rule, Cost(*costs))
        self._chosen = chosen
        if before is None or not 0.8 <= chosen.steps / before.steps <= 1.25:
            logger.log(once_per_job(logging.INFO), "saving %s", self)
        return self._saved_step is None or step - self._saved_step >= chosen.steps
