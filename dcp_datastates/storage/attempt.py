"""The attempt: the name of one save's directory, ordered, unique at its path, and the same on all ranks.

Every save writes into a separate directory, ``<incarnation>-<sequence>``, so it never touches a byte of the committed
checkpoint beside it. The coordinator chooses the name, and sends it to the other ranks inside the plans that DCP
scatters (:class:`TicketCarrier`).
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dcp_datastates.process.forks import ProcessLock

__all__ = [
    "Attempt",
    "Ticket",
    "TicketCarrier",
    "collect_ticket",
    "next_attempt",
    "next_deletion",
    "take",
]

_NAME = re.compile(r"([0-9a-e][0-9a-f]{15})-([0-9]{8,20})")
"""Of an attempt. No clock says a time that begins with ``f``, the year 2518: such a directory is no attempt, or it
would be the newest for ever.
"""


@dataclass(frozen=True, order=True)
class Attempt:
    """One attempt. Newer ones compare greater, also across restarts of the job.

    ``incarnation`` is the time of the coordinator's start, in nanoseconds since the epoch, or a greater number if the
    coordinator has seen an attempt as new; ``sequence`` counts the coordinator's saves.
    """

    incarnation: int
    sequence: int

    @property
    def name(self) -> str:
        """The name of the attempt's directory, below the checkpoint's."""
        return f"{self.incarnation:016x}-{self.sequence:08d}"

    @staticmethod
    def parse(name: str) -> Attempt | None:
        """The attempt whose directory has this name, or None for any other name."""
        match = _NAME.fullmatch(name)
        return Attempt(int(match[1], 16), int(match[2])) if match else None


_counter_lock = ProcessLock()  # guards what follows
_incarnation = time.time_ns()
_sequence = 0


def next_attempt(after: Attempt | None) -> Attempt:
    """An attempt newer than ``after`` and than all earlier ones of this process. No other process gets an equal one."""
    global _incarnation, _sequence
    with _counter_lock:
        _sequence += 1
        if after is not None and after >= Attempt(_incarnation, _sequence):
            _incarnation = max(after.incarnation, time.time_ns()) + 1 + secrets.randbits(30)
        return Attempt(_incarnation, _sequence)


def next_deletion(after: Attempt | None) -> Attempt:
    """An attempt newer than ``after``, for a deletion: this process's saves are not numbered after it."""
    newest = time.time_ns() if after is None else after.incarnation
    return Attempt(newest + 1 + secrets.randbits(30), 0)


@dataclass(frozen=True)
class Ticket:
    """The coordinator's choices for a save, which every rank must know.

    ``number`` is the number of the commit round, ``world`` the number of ranks that DCP saves with, ``first`` the
    number of the commit group's first round. The coordinator draws the numbers: ``first`` identifies the group, and
    within a group newer saves have greater numbers.
    """

    attempt: Attempt
    number: int
    world: int
    first: int


class TicketCarrier:
    """Carries the ticket to a rank as ``SavePlan.storage_data``, whatever the planner does with it.

    A planner that caches final plans (``DefaultSavePlanner(enable_plan_caching=True)``) passes ``write_data`` the plan
    of an *earlier* save, whose ticket is stale. But the thread that runs the save always unpickles the newly scattered
    plan; unpickling a carrier delivers its ticket to the function that the thread has set with :func:`collect_ticket`.
    Copies of stale carriers deliver, too, so a save accepts only tickets for which :func:`take` returns True.
    """

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket

    def __reduce__(self) -> tuple[Callable[..., TicketCarrier], tuple[int, int, int, int, int]]:
        attempt = self.ticket.attempt
        return _deliver, (
            attempt.incarnation,
            attempt.sequence,
            self.ticket.number,
            self.ticket.world,
            self.ticket.first,
        )

    def __eq__(self, other: object) -> bool:
        # All carriers are equal, so that planners which compare plans see no change.
        return isinstance(other, TicketCarrier)

    def __hash__(self) -> int:
        return hash(TicketCarrier)


_taken: dict[int, int] = {}
"""By commit group (its ``first``): the greatest number that a save of this process has taken.

It needs no lock: in each group, only one save at a time runs DCP's collectives.
"""


def take(ticket: Ticket) -> bool:
    """Mark ``ticket`` as taken. Returns whether it is new: no save of this process had it, or a newer ticket of its
    group.

    Attempts cannot decide this: attempts at different paths are not ordered by age.
    """
    if ticket.number <= _taken.get(ticket.first, -1):
        return False
    _taken[ticket.first] = ticket.number
    return True


class _Collector(threading.local):
    deliver: Callable[[Ticket], Any] | None = None


_collector = _Collector()


def collect_ticket(deliver: Callable[[Ticket], Any] | None) -> None:
    """Call ``deliver`` for tickets that this thread unpickles from now on (None: ignore them)."""
    _collector.deliver = deliver


def _deliver(incarnation: int, sequence: int, number: int, world: int, first: int) -> TicketCarrier:
    ticket = Ticket(Attempt(incarnation, sequence), number, world, first)
    if _collector.deliver is not None:
        _collector.deliver(ticket)
    return TicketCarrier(ticket)
