"""The name of one attempt to save: ordered, unique at its path, and agreed by all ranks.

Every save writes into a directory of its own, ``<incarnation>-<sequence>``, so that it never touches
a byte of the committed checkpoint beside it. The coordinator chooses; the choice travels to the other
ranks inside the plans that DCP scatters anyway (:class:`TicketCarrier`).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Attempt", "Ticket", "TicketCarrier", "collect_ticket", "next_attempt"]

_NAME = re.compile(r"([0-9a-f]{16})-(\d{8,})")


@dataclass(frozen=True, order=True)
class Attempt:
    """One attempt. Newer ones compare greater, also across restarts of the job.

    ``incarnation`` is the coordinator's start, in nanoseconds since the epoch; ``sequence`` counts
    its saves.
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


_started = time.time_ns()
_counter_lock = threading.Lock()  # guards _sequence
_sequence = 0


def next_attempt(present: Iterable[Attempt]) -> Attempt:
    """An attempt newer than all that are ``present`` at the path and than all of this process.

    A clock that ran backwards since another job wrote there is overruled.
    """
    global _sequence
    newest = max((attempt.incarnation for attempt in present), default=0)
    with _counter_lock:
        _sequence += 1
        return Attempt(_started if newest <= _started else newest + 1, _sequence)


@dataclass(frozen=True)
class Ticket:
    """What the coordinator decides for a save, and every rank must know.

    ``number`` is the commit round's, ``world`` how many ranks DCP saves with, ``first`` the number of the
    commit group's first round. Newer ones compare greater.
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
    Copies of stale ones deliver too, so a collector keeps the newest.
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


class _Collector(threading.local):
    deliver: Callable[[Ticket], Any] | None = None


_collector = _Collector()


def collect_ticket(deliver: Callable[[Ticket], Any] | None) -> None:
    """Have tickets unpickled in this thread from now on call ``deliver`` (None: nobody)."""
    _collector.deliver = deliver


def _deliver(incarnation: int, sequence: int, number: int, world: int, first: int) -> TicketCarrier:
    ticket = Ticket(Attempt(incarnation, sequence), number, world, first)
    if _collector.deliver is not None:
        _collector.deliver(ticket)
    return TicketCarrier(ticket)
