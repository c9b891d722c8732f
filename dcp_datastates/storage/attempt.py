"""The attempt: the name of one save's directory, ordered, unique at its path, and the same on all ranks.

Every save writes into a separate directory, ``<incarnation>-<sequence>``, so it never touches a byte of the committed
checkpoint beside it. The coordinator chooses the name, and sends it to the other ranks with their plans
(:class:`Ticket`).
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from dataclasses import dataclass

_NAME = re.compile(r"([0-9a-e][0-9a-f]{15})-([0-9]{8,20})")
"""Of an attempt. No clock says a time that begins with ``f``, the year 2518: such a directory is no attempt, or it
would be the newest for ever.
"""


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
        """The attempt whose directory has this name, or None for any other name."""
        match = _NAME.fullmatch(name)
        return Attempt(int(match[1], 16), int(match[2])) if match else None


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


@dataclass(frozen=True)
class Ticket:
    """The coordinator's choices for a save, which every rank must know."""

    attempt: Attempt
    number: int
    """Of the commit round. Newer saves of a group have greater numbers."""
    first: int
    """The number of the commit group's first round."""

    def encode(self) -> tuple[int, ...]:
        """The ticket as plain data."""
        return (self.attempt.incarnation, self.attempt.sequence, self.number, self.first)

    @staticmethod
    def decode(data: object) -> Ticket | None:
        """The ticket that :meth:`encode` encoded; None for anything else."""
        if not isinstance(data, tuple) or len(data) != 4 or {*map(type, data)} != {int}:
            return None
        return Ticket(Attempt(*data[:2]), *data[2:])
