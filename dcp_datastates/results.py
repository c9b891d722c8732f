"""What this package's functions return, and what it calls hooks with.

:class:`SaveStats` and :class:`SaveRecord` say what one save cost on this rank, while it runs and at its end;
:class:`LoadRecord` what one load cost. ``inspect`` returns a ``Checkpoint`` or a ``Directory``, ``verify`` a ``Report``
of each ``Damage``, ``convert`` a ``Conversion``, ``diff`` a ``Comparison`` of each ``Difference``, ``async_save`` a
``SaveHandle``; ``follow`` yields a ``WeightsVersion``.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from dcp_datastates.checkpoints.describe import Checkpoint as Checkpoint
    from dcp_datastates.checkpoints.overview import Directory as Directory
    from dcp_datastates.checkpoints.verify import Report as Report
    from dcp_datastates.conversion.compare import Comparison as Comparison
    from dcp_datastates.conversion.compare import Difference as Difference
    from dcp_datastates.conversion.convert import Conversion as Conversion
    from dcp_datastates.dcp.async_save import SaveHandle as SaveHandle
    from dcp_datastates.format.contents import Damage as Damage
    from dcp_datastates.weights.follow import WeightsVersion as WeightsVersion

_PLACES: Final = {
    "Checkpoint": "checkpoints.describe",
    "Comparison": "conversion.compare",
    "Conversion": "conversion.convert",
    "Damage": "format.contents",
    "Difference": "conversion.compare",
    "Directory": "checkpoints.overview",
    "Report": "checkpoints.verify",
    "SaveHandle": "dcp.async_save",
    "WeightsVersion": "weights.follow",
}
__all__ = ["LoadRecord", "SaveRecord", "SaveStats", *_PLACES]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"dcp_datastates.{_PLACES[name]}"), name)


PHASES: Final = {
    "call": "the call, until it returns",
    "queue": "waiting for earlier saves to be planned",
    "planning": "waiting for the last rank's call, and planning with the others",
    "window": "waiting for the read window",
    "reading": "reading the tensors",
    "flushing": "until the files are on stable storage",
    "voting": "waiting for earlier commits, and for the other ranks' files",
    "publishing": "the first rank publishes the metadata; others wait for that",
    "ending": "telling the ranks, and removing what the commit replaced",
}
"""The phases of a save on one rank, in order: each ends when the next begins."""

LOAD_PHASES: Final = {
    "open": "reading the metadata",
    "wait_open": "waiting for the ranks that read them still",
    "fit": "fitting the state to them; calling state_dict()",
    "wait_fit": "waiting for the ranks that fit theirs still",
    "read": "reading tensors and objects",
    "wait_read": "waiting for the ranks that read still",
    "apply": "calling load_state_dict()",
}
"""The phases of a load on one rank, in order, as :data:`PHASES`."""

Outcome = Literal["committed", "skipped", "abandoned", "unknown", "failed"]


class Timeline:
    """When the phases of one save or load began on this rank, by one clock. Any thread may use it.

    Args:
        phases: :data:`PHASES`, or :data:`LOAD_PHASES`; the first begins now.
        clock: in seconds, never goes back.
        wall: seconds since the epoch, for the beginning.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        phases: Mapping[str, str] = PHASES,
    ) -> None:
        self._order: Final = list(phases)
        self._clock = clock
        self.began_at: Final = wall()
        self.began: Final = clock()
        self._marks: list[tuple[str, float]] = [(self._order[0], self.began)]
        self._ended: float | None = None
        self.gated_after: float | None = None
        """Seconds from the call to the first wait of an ``optimizer.step()``."""

    def begin(self, phase: str, ago: float = 0.0, after: float = math.inf) -> None:
        """A phase began, ``ago`` seconds before now, and at the latest ``after`` seconds after the
        latest one that is known. No effect if it or a later one has begun.
        """
        latest, since = self._marks[-1]
        if self._order.index(phase) > self._order.index(latest):
            at = min(self._clock() - ago, since + after)
            self._marks.append((phase, max(since, at)))

    def gated(self, seconds: float) -> None:
        """A step has waited for ``seconds``, until now."""
        if self.gated_after is None:
            self.gated_after = max(0.0, self._clock() - seconds - self.began)

    def end(self) -> bool:
        """The outcome is known. Returns whether this is the first call; it counts."""
        if self._ended is not None:
            return False
        self._ended = self._clock()
        return True

    @property
    def seconds(self) -> float:
        """From the call to the outcome, or until now."""
        return (self._clock() if self._ended is None else self._ended) - self.began

    def phases(self) -> dict[str, float]:
        """The seconds of each phase that has begun, in order. Their sum is :attr:`seconds`."""
        end = self.began + self.seconds
        marks = [*self._marks, ("", end)]  # a phase may begin after the end
        return {
            phase: min(until, end) - min(since, end)
            for (phase, since), (_, until) in pairwise(marks)
        }


class _Measured:
    """A dataclass whose ``repr`` has four decimals of each measurement."""

    def __repr__(self: Any) -> str:
        told = (f"{each.name}={_brief(getattr(self, each.name))}" for each in fields(self))
        return f"{type(self).__name__}({', '.join(told)})"


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return repr({name: round(each, 4) for name, each in value.items()})
    return repr(round(value, 4) if isinstance(value, float) else value)


@dataclass(repr=False)
class SaveStats(_Measured):
    """Statistics of one save on this rank. Times are in seconds, sizes in bytes; None means not known yet.

    Attributes:
        call_seconds: Time in the call of ``async_save`` (0 for a synchronous save that DCP runs).
        gate_seconds, room_seconds, cache_seconds, eager_bytes, deferred_bytes, written_bytes: See :class:`SaveRecord`.
        read_seconds: Time from the opening of the read window to the last read.
        total_seconds: Time from the opening of the read window to durable files.
        direct: Whether all files were written past the page cache (O_DIRECT).
        steady: Whether the save used a cached plan and layout (:class:`DataStatesSavePlanner`).
    """

    call_seconds: float = 0.0
    gate_seconds: float = 0.0
    room_seconds: float = 0.0
    cache_seconds: float = 0.0
    eager_bytes: int = 0
    deferred_bytes: int = 0
    written_bytes: int | None = None
    read_seconds: float | None = None
    total_seconds: float | None = None
    direct: bool | None = None
    steady: bool | None = None

    def __post_init__(self) -> None:
        self.timeline = Timeline()
        """When the phases of the save began. No field: ``dataclasses.asdict`` has plain numbers."""


@dataclass(frozen=True, repr=False)
class SaveRecord(_Measured):
    """What came of one save on this rank, and what it cost. Made once, when the outcome is known.

    Attributes:
        path: The checkpoint's path or URL.
        step: The number at the end of the path's name; None without one.
        rank: This rank, among those that save together.
        world: How many they are.
        api: The function that ran the save: ``dcp_datastates.async_save`` (also for ``save`` and the manager),
            ``dcp.async_save`` or ``dcp.save``; empty in a record that was read from a checkpoint.
        attempt: The name of the attempt; None if the save failed before there was one.
        outcome: ``committed``; ``skipped`` (by ``when_behind``); ``abandoned`` (given up: the process ended, say);
            ``unknown`` (it may be committed); or ``failed``.
        error: The type and message of the error; None if it is committed.
        began_at: The time of the call, in seconds since the epoch by this machine's clock.
        seconds: From the call to the outcome.
        phases: The seconds of each phase that was begun, by name, in order. Each phase ends when the next begins; their
            sum is ``seconds``.
        call_seconds: Time in the call; training waited for it. (A ``dcp.save`` is a call from beginning to end.)
        gate_seconds: Time for which ``optimizer.step()`` waited for this save's reads.
        gated_after: The seconds from the call to the first such wait; None if there was none.
        room_seconds: The part of ``call_seconds`` that was spent waiting for earlier saves (``max_in_flight``).
        cache_seconds: Time for which the copies waited for room in the host cache: that of the engine's copy threads,
            added up, and that of the call.
        eager_bytes: Bytes copied at the call.
        deferred_bytes: Bytes read after the call.
        written_bytes: The size of this rank's files; 0 if they are not durable.
        read_rate: Bytes per second from the opening of the read window to the last read; 0 if nothing was read.
        write_rate: Bytes per second from the opening of the read window to durable files; 0 if they are not durable.
    """

    path: str
    step: int | None
    rank: int
    world: int
    api: str
    attempt: str | None
    outcome: Outcome
    error: str | None
    began_at: float
    seconds: float
    phases: Mapping[str, float]
    call_seconds: float = 0.0
    gate_seconds: float = 0.0
    gated_after: float | None = None
    room_seconds: float = 0.0
    cache_seconds: float = 0.0
    eager_bytes: int = 0
    deferred_bytes: int = 0
    written_bytes: int = 0
    read_rate: float = 0.0
    write_rate: float = 0.0

    @property
    def stall_seconds(self) -> float:
        """For how long training waited for this save."""
        return self.call_seconds + self.gate_seconds


@dataclass(frozen=True, repr=False)
class LoadRecord(_Measured):
    """What came of one load on this rank, and what it cost. Made once, when the load ends.

    Attributes:
        path, step, rank, world, began_at, seconds: As in :class:`SaveRecord`.
        api: The user's call: ``load()``, ``restore()`` or ``restore_latest()``.
        attempt: The name of the attempt that was loaded; None if the load failed before it was known.
        error: The type and message of the error; None if all was loaded.
        phases: The seconds of each phase of :data:`LOAD_PHASES` that was begun, by name, in order. Each phase ends when
            the next begins; their sum is ``seconds``.
        read_bytes: Bytes that this rank has read from files, or received from ranks that read for it.
        read_rate: Bytes per second in the phase ``read``; 0 without one.
    """

    path: str
    step: int | None
    rank: int
    world: int
    api: str
    attempt: str | None
    error: str | None
    began_at: float
    seconds: float
    phases: Mapping[str, float]
    read_bytes: int = 0
    read_rate: float = 0.0

    @property
    def outcome(self) -> Literal["loaded", "failed"]:
        """Whether all of it was loaded."""
        return "loaded" if self.error is None else "failed"

    @property
    def wait_seconds(self) -> float:
        """For how long this rank waited for others."""
        return sum(seconds for phase, seconds in self.phases.items() if phase.startswith("wait_"))
