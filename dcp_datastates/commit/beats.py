"""What ranks say of themselves and of each other, once a second."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcp_datastates.commit.decision import Reason
from dcp_datastates.errors import RankLostError

__all__ = ["Beat", "Loss"]


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself: the last round it voted in, and how far it has come towards the next.

    ``progress`` is a number that changes as long as there is any; ``doing`` says in words what it counts;
    ``calls`` is how many saves it has been called
    for; ``ended`` is the last round whose outcome it knows. Only the coordinator says what follows: ``lost``, of other
    ranks, as the fields of a :class:`Loss`; ``pulse``, where it listens for theirs.
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
    """Why a rank is counted out. ``certain``: its process has ended, though the system may yet finish a call of it."""

    rank: int
    reason: str
    certain: bool = False

    @staticmethod
    def reason_of(losses: Sequence[Loss]) -> Reason:
        """Which ranks are lost, and why; the first few of them."""
        more = f"; and {len(losses) - 3} more ranks" if len(losses) > 3 else ""
        return Reason.of(RankLostError("; ".join(map(str, losses[:3])) + more))

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"
