"""Heartbeats: the status that each rank writes to the store about once a second."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcp_datastates.commit.vote import Reason
from dcp_datastates.errors import RankLostError

__all__ = ["Beat", "Loss"]


@dataclass(frozen=True)
class Beat:
    """A rank's status: the last round it voted in (``voted``), and its progress towards the next.

    ``progress`` is a number that changes while the rank makes progress; ``doing`` names the present phase; ``calls``
    counts the calls of ``async_save`` on the rank; ``ended`` is the last round whose outcome the rank knows. Only the
    coordinator fills in the rest: ``lost``, the lost ranks, as the fields of :class:`Loss`; ``pulse``, the address at
    which it listens for the other ranks' pulses.
    """

    voted: int = -1
    progress: int = 0
    doing: str = "idle"
    calls: int = 0
    ended: int = -1
    lost: Sequence[Sequence[Any]] = ()
    pulse: Sequence[Any] = ()

    def encode(self, count: int) -> str:
        return json.dumps([count, *dataclasses.astuple(self)])

    @staticmethod
    def decode(value: bytes) -> Beat:
        return Beat(*json.loads(value)[1:])


@dataclass(frozen=True)
class Loss:
    """Why a rank counts as lost. ``certain``: its process has ended; the kernel may still finish a system call that it
    made.
    """

    rank: int
    reason: str
    certain: bool = False

    @staticmethod
    def reason_of(losses: Sequence[Loss]) -> Reason:
        """The reason for a decision: which ranks are lost, and why. It names the first three ranks."""
        more = f"; and {len(losses) - 3} more ranks" if len(losses) > 3 else ""
        return Reason.of(RankLostError("; ".join(map(str, losses[:3])) + more))

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"
