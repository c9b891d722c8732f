"""The rules by which :func:`~dcp_datastates.retain` and the manager keep checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dcp_datastates.checkpoints.listing import Found
from dcp_datastates.config import parse_duration
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.text import step_of

Direction = Literal["min", "max"]


@dataclass(frozen=True)
class Keep:
    """Rules for keeping checkpoints. A checkpoint stays if any rule selects it, or if it is pinned.

    Attributes:
        last: The number of the newest to keep, 1 or more.
        every: Keep those whose step is a multiple of this number, for good: storage must hold them all. The step is the
            number at the end of the name.
        best: Keep the one with the least or the greatest metric, ``("loss", "min")``, or several,
            ``("accuracy", "max", 3)``. Checkpoints without that metric, or with NaN, do not count.
        within: Keep those committed within this time before the newest: seconds, or a string such as ``"7d"``. If the
            times of the commits contradict their order, all stay.

    Raises:
        ConfigurationError: a rule cannot work.
    """

    last: int = 1
    every: int | None = None
    best: tuple[str, Direction] | tuple[str, Direction, int] | None = None
    within: float | str | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.last):
            raise ConfigurationError(
                f"Keep(last={self.last!r}) must be a whole number, 1 or more: the last checkpoint is never deleted"
            )
        if self.every is not None and not _is_count(self.every):
            raise ConfigurationError(f"Keep(every={self.every!r}) must be steps, 1 or more")
        if self.within is not None:
            parse_duration(self.within, name="within")
        if self.best is not None:
            _check_best(self.best)

    @staticmethod
    def of(keep: int | Keep) -> Keep:
        """``keep`` itself, or the rule that keeps so many of the newest."""
        if isinstance(keep, Keep):
            return keep
        if not _is_count(keep):
            raise ConfigurationError(
                f"keep={keep!r} must be a whole number, 1 or more (the last checkpoint is never deleted), or a Keep"
            )
        return Keep(last=keep)

    def check(self, metrics: Mapping[str, float] | None) -> None:
        """Raise :class:`ConfigurationError` if ``best`` ranks by a metric that a save does not have."""
        if self.best is not None and self.best[0] not in (metrics or ()):
            raise ConfigurationError(
                f"Keep(best={self.best!r}) wants the metric {self.best[0]!r}, and the first save has "
                f"metrics={metrics!r}"
            )

    def check_known(self, candidates: Iterable[Found]) -> None:
        """Raise :class:`ConfigurationError` if ``best`` ranks by a metric that no checkpoint has."""
        if self.best is None:
            return
        known = {name for found in candidates for name in found.metrics}
        if self.best[0] not in known:
            raise ConfigurationError(
                f"Keep(best={self.best!r}): no checkpoint has the metric {self.best[0]!r}; they have "
                f"{', '.join(sorted(known)) or 'none'}. Nothing was deleted"
            )

    def asks_for_name(self, name: str) -> bool:
        """Whether ``every`` asks for a checkpoint of this ``name``, and no rule has to look into it."""
        return self.best is None and self.within is None and self._asks_for_step(name)

    def asks_for(self, found: Found, newest: float) -> bool:
        """Whether ``every`` or ``within`` asks for this checkpoint.

        ``newest``: the time of the newest commit, or an earlier one; minus infinity if all times are in doubt.
        """
        if self._asks_for_step(found.path.name):
            return True
        if self.within is None or found.committed is None:
            return False
        return newest - found.committed.committed_at <= parse_duration(self.within)

    def _asks_for_step(self, name: str) -> bool:
        step = step_of(name)
        return self.every is not None and step is not None and step % self.every == 0

    def the_best(
        self, candidates: Iterable[Found], is_good: Callable[[Found], bool]
    ) -> list[Found]:
        """Those that ``best`` asks for, of ``candidates``, newest first: the newer of two equals counts as better."""
        if self.best is None:
            return []
        name, direction, *rest = self.best
        count = rest[0] if rest else 1
        sign = 1 if direction == "min" else -1
        measured = [
            (sign * value, place, found)
            for place, found in enumerate(candidates)
            if not math.isnan(value := found.metrics.get(name, math.nan))
        ]
        chosen: list[Found] = []
        for _, _, found in sorted(measured, key=lambda each: each[:2]):
            if len(chosen) == count:
                break
            if is_good(found):
                chosen.append(found)
        return chosen


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _check_best(best: Any) -> None:
    if (
        not isinstance(best, tuple)
        or not 2 <= len(best) <= 3
        or not isinstance(best[0], str)
        or best[1] not in get_args(Direction)
        or not all(map(_is_count, best[2:]))
    ):
        raise ConfigurationError(
            f'Keep(best={best!r}) must be the name of a metric, "min" or "max", and perhaps a count: '
            f'("loss", "min") or ("accuracy", "max", 3)'
        )
