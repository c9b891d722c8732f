"""When a loop saves: every so many steps, every so many minutes, or as often as the cost of a save allows.

Pure: times are arguments, and decisions follow from numbers that all ranks have agreed on.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from dcp_datastates.config import parse_duration
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.text import duration

_REMEMBERED_STEPS: Final = 64
_REMEMBERED_SAVES: Final = 5


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
        self._busy: list[float] = []
        self._call = 0.0
        self._began: float | None = None

    def step(self, seconds: float) -> None:
        """A step took ``seconds``, without the call of a save."""
        if self._began is None:
            self._quiet.append(seconds)
        else:
            self._busy.append(seconds)

    def begin_save(self, now: float, call: float) -> None:
        """A save has begun, whose call took ``call`` seconds. One that is in flight is not measured any more."""
        self._began, self._call, self._busy = now, call, []

    def end_save(self, now: float, committed: bool) -> None:
        """The save in flight has ended, after the latest :meth:`step`."""
        if self._began is None:
            return
        if committed:
            self._saves += 1
            if self._saves > 1 and self._quiet:
                usual = median(self._quiet)
                slower = sum(self._busy) - usual * len(self._busy)
                self._stalls.append(self._call + max(0.0, slower))
                self._flushes.append(now - self._began)
        self._began = None

    def cost(self) -> Cost | None:
        """The medians; None before there are any."""
        if not self._stalls or not self._quiet:
            return None
        return Cost(median(self._quiet), median(self._stalls), median(self._flushes))
