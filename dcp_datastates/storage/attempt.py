"""The name of one attempt to save: ordered, unique at its path, and agreed by all ranks.

Every save writes into a directory of its own, ``<incarnation>-<sequence>``, so that it never touches
a byte of the committed checkpoint beside it. The coordinator chooses; the choice travels to the other
ranks inside the plans that DCP scatters anyway (:class:`TicketCarrier`).
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

__all__ = ["Attempt", "Ticket", "TicketCarrier", "collect_ticket", "next_attempt", "take"]

_NAME = re.compile(r"([0-9a-f]{16})-(\d{8,20})")


@dataclass(frozen=True, order=True)
class Attempt:
    """One attempt. Newer ones compare greater, also across restarts of the job.

    ``incarnation`` is the coordinator's start, in nanoseconds since the epoch, or more, if something as new had been
    seen; ``sequence`` counts its saves.
    """

    incarnation: int
    sequence: int

    @property
    def name(self) -> str:
        """The attempt's directory below the checkpoint's."""
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
    """An attempt newer than ``after``, and than all of this process. No other process comes to the same one."""
    global _incarnation, _sequence
    with _counter_lock:
        _sequence += 1
        if after is not None and after >= Attempt(_incarnation, _sequence):
            _incarnation = max(after.incarnation, time.time_ns()) + 1 + secrets.randbits(30)
        return Attempt(_incarnation, _sequence)


@dataclass(frozen=True)
class Ticket:
    """What the coordinator decides for a save, and every rank must know.

    ``number`` is the commit round's, ``world`` how many ranks DCP saves with, ``first`` the number of the
    commit group's first round. The coordinator counts: ``first`` names the group, and within it a newer save has a
    greater number.
    """

    attempt: Attempt
    number: int
    world: int
    first: int


class TicketCarrier:
    """Carries the ticket to a rank as ``SavePlan.storage_data``, whatever the planner does with it.

    A planner that caches final plans (``DefaultSavePlanner(enable_plan_caching=True)``) hands
    ``write_data`` the plan of an *earlier* save, whose ticket is stale. What it cannot keep back is
    the unpickling of the plan that was scattered just now, in the thread that runs the save: that is
    where a carrier delivers, to the collector which the thread put up with :func:`collect_ticket`.
    Copies of stale ones deliver too: a save takes only what :func:`take` says is new.
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
        # All are equal, so that planners which compare plans do not see a change in each.
        return isinstance(other, TicketCarrier)

    def __hash__(self) -> int:
        return hash(TicketCarrier)


_taken: dict[int, int] = {}
"""By commit group (its ``first``): the newest number that a save of this process has taken.

Without a lock: of one group, one save at a time is in DCP's collectives.
"""


def take(ticket: Ticket) -> bool:
    """Whether no save of this process has had ``ticket``, or a newer one of its group; from now on, one has.

    Attempts would not tell: those of different paths are not ordered by age.
    """
    if ticket.number <= _taken.get(ticket.first, -1):
        return False
    _taken[ticket.first] = ticket.number
    return True


class _Collector(threading.local):
    deliver: Callable[[Ticket], Any] | None = None


_collector = _Collector()


def collect_ticket(deliver: Callable[[Ticket], Any] | None) -> None:
    """Have tickets unpickled in this thread from now on call ``deliver`` (None: no function)."""
    _collector.deliver = deliver


def _deliver(incarnation: int, sequence: int, number: int, world: int, first: int) -> TicketCarrier:
    ticket = Ticket(Attempt(incarnation, sequence), number, world, first)
    if _collector.deliver is not None:
        _collector.deliver(ticket)
    return TicketCarrier(ticket)
