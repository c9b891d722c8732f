"""Heartbeats: the status that each rank writes to the store about once a second."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dcp_datastates.errors import RankLostError

_LISTED: Final = 8
"""How many lost ranks the coordinator's beat lists."""


@dataclass(frozen=True)
class Beat:
    """A rank's status: the last round it voted in (``voted``), and its progress towards the next.

    ``progress`` is a number that changes while the rank makes progress; ``doing`` names the present phase; ``calls``
    counts the calls of this package's ``async_save`` on the rank, ``dcp_calls`` the saves that DCP runs; ``ended`` is
    the last round whose outcome the rank knows. Only the coordinator fills in the rest: ``lost``, the first few of the
    lost ranks (16,384 ranks read it), as the fields of :class:`Loss`; ``more``, how many further ranks are lost.
    """

    voted: int = -1
    progress: int = 0
    doing: str = "idle"
    calls: int = 0
    dcp_calls: int = 0
    ended: int = -1
    lost: Sequence[Sequence[Any]] = ()
    more: int = 0

    def encode(self, count: int) -> str:
        return json.dumps([count, *dataclasses.astuple(self)])

    @staticmethod
    def decode(value: bytes) -> Beat:
        return Beat(*json.loads(value)[1:])

    def owes_vote(self, round_number: int) -> bool:
        """Whether the others wait for the rank's vote in the round, or for its publication."""
        return self.voted < round_number or self.doing.startswith("publishing")

    def with_losses(self, losses: Sequence[Loss]) -> Beat:
        """This beat, telling of ``losses``."""
        lost = [dataclasses.astuple(loss) for loss in losses[:_LISTED]]
        return dataclasses.replace(self, lost=lost, more=max(0, len(losses) - _LISTED))

    @property
    def losses(self) -> list[Loss]:
        """The losses that this beat tells of; the last stands for those that it does not list."""
        told = [Loss(*loss) for loss in self.lost]
        return [*told, Loss(-1, "is lost", count=self.more)] if self.more else told


@dataclass(frozen=True)
class Loss:
    """Why a rank counts as lost. ``certain``: its process has ended; the kernel may still finish a system call that it
    made. ``count``: how many ranks it stands for; if several, ``rank`` is -1.
    """

    rank: int
    reason: str
    certain: bool = False
    count: int = 1

    @staticmethod
    def error_of(losses: Sequence[Loss]) -> RankLostError:
        """The error that says which ranks are lost, and why. It names the first three ranks."""
        others = sum(loss.count for loss in losses[3:])
        more = f"; and {others} more ranks" if others else ""
        return RankLostError("; ".join(map(str, losses[:3])) + more)

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"


@dataclass
class Watched:
    """What this rank knows of another."""

    value: bytes = b""  # its latest beat as it was written; empty before the first
    beat: Beat = field(default_factory=Beat)
    silent: float = 0.0  # seconds without a new beat, counted while this rank was looking
    still: float = 0.0  # seconds without progress
    near: str | None = None  # the identity of its process, if this rank can see it
