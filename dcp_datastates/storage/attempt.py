"""The attempt: the name of one save's directory, ordered, unique at its path, and the same on all ranks.

Every save writes into a separate directory, ``<incarnation>-<sequence>``, so it never touches a byte of the committed
checkpoint beside it. The coordinator chooses the name, and sends it to the other ranks with their plans.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Final

_NAME: Final = re.compile(r"([0-9a-f]{16})-([0-9]{8,20})")
_MOST_AHEAD: Final = 50 * 365 * 86_400 * 10**9
"""Nanoseconds, 50 years. A later attempt is none: saves would have to follow it, to the end of all numbers."""
_EARLIEST_CLOCK: Final = 1_767_225_600 * 10**9
"""2026, before the first release: with a clock that was reset, attempts of the other machines are attempts still."""


@dataclass(frozen=True, order=True)
class Attempt:
    """One attempt. Newer ones compare greater, also across restarts of the job.

    ``incarnation`` is the time of the coordinator's first save, in nanoseconds since the epoch, or a greater number if
    it has seen an attempt as new; ``sequence`` counts the coordinator's saves.
    """

    incarnation: int
    sequence: int

    @property
    def name(self) -> str:
        """The name of the attempt's directory, below the checkpoint's."""
        return f"{self.incarnation:016x}-{self.sequence:08d}"

    @property
    def archive_pin(self) -> str:
        """The file in the checkpoint's directory that keeps it from deletion until it is archived."""
        return f"pin.archive.{self.name}"

    @staticmethod
    def parse(name: str) -> Attempt | None:
        """The attempt whose directory has this name; None for another name, and for a time 50 years ahead."""
        match = _NAME.fullmatch(name)
        latest = max(time.time_ns(), _EARLIEST_CLOCK) + _MOST_AHEAD
        if match is None or int(match[1], 16) > latest:
            return None
        return Attempt(int(match[1], 16), int(match[2]))


def is_far_ahead(name: str) -> bool:
    """Whether a directory's name is that of an attempt, but for its time."""
    return _NAME.fullmatch(name) is not None and Attempt.parse(name) is None


_counter_lock = threading.RLock()  # guards what follows
_incarnation = 0  # until the first attempt: children that were forked before it would have the same
_sequence = 0


def next_attempt(after: Attempt | None) -> Attempt:
    """An attempt newer than ``after`` and than all earlier ones of this process. No other process gets an equal one."""
    global _incarnation, _sequence
    with _counter_lock:
        _sequence += 1
        if not _incarnation:
            _incarnation = time.time_ns() + secrets.randbits(30)
        if after is not None and after >= Attempt(_incarnation, _sequence):
            _incarnation = max(after.incarnation, time.time_ns()) + 1 + secrets.randbits(30)
        return Attempt(_incarnation, _sequence)
