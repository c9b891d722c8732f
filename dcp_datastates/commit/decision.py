"""What a round came to, in the form that travels between ranks, and as the error that a user sees."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from dcp_datastates import errors
from dcp_datastates.errors import CommitOutcomeUnknown, DataStatesError, SaveFailedError

__all__ = ["REASON_BYTES", "Decision", "Outcome", "Reason"]

REASON_BYTES: Final = 768
"""Room for one rank's reason in the gather that follows a failed vote."""

_SHOWN: Final = 3
"""Ranks whose reasons are spelt out."""


class Outcome(Enum):
    """Of a round. ``PUBLISHING``: the coordinator has begun to publish, and nobody else may decide."""

    PUBLISHING = "publishing"
    COMMITTED = "committed"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Reason:
    """Why one rank failed: the name of the error's type, and its message."""

    kind: str
    message: str

    @staticmethod
    def of(error: BaseException) -> Reason:
        return Reason(type(error).__name__, str(error))

    def encode(self) -> bytes:
        """At most :data:`REASON_BYTES`, never cut within a character."""
        kind = self.kind[:80]
        # It may name a file whose name is not UTF-8.
        message = self.message.encode(errors="backslashreplace")
        message = message[: REASON_BYTES - len(kind.encode()) - 1]
        return f"{kind}\n{message.decode(errors='ignore')}".encode()

    @staticmethod
    def decode(data: bytes) -> Reason | None:
        """None for the padding of a rank that has no reason."""
        text = data.rstrip(b"\0").decode(errors="replace")
        kind, separator, message = text.partition("\n")
        return Reason(kind, message) if separator else None


@dataclass(frozen=True)
class Decision:
    """The outcome, and why, by rank. Rank -1 stands for no rank in particular.

    ``given_up``: decided because a rank was lost, and not by the votes of all.
    """

    outcome: Outcome
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    given_up: bool = False

    @staticmethod
    def failed(rank: int, error: BaseException) -> Decision:
        return Decision(Outcome.FAILED, {rank: Reason.of(error)})

    @property
    def final(self) -> bool:
        return self.outcome is not Outcome.PUBLISHING

    def encode(self) -> str:
        reasons = {str(rank): [why.kind, why.message] for rank, why in self.reasons.items()}
        return json.dumps(
            {"outcome": self.outcome.value, "reasons": reasons, "given_up": self.given_up}
        )

    @staticmethod
    def decode(value: bytes) -> Decision:
        found = json.loads(value)
        reasons = {int(rank): Reason(*why) for rank, why in found["reasons"].items()}
        return Decision(Outcome(found["outcome"]), reasons, found["given_up"])

    def error(self, where: str, world: int) -> DataStatesError | None:
        """What a user is told; None if committed.

        The type is that of the first failed rank's error, if it is one of this package's.
        """
        if self.outcome is Outcome.COMMITTED:
            return None
        shown = sorted(self.reasons.items())[:_SHOWN]
        more = (
            f"; and {len(self.reasons) - _SHOWN} more ranks" if len(self.reasons) > _SHOWN else ""
        )
        text = "; ".join(self._say(rank, why, world) for rank, why in shown) + more
        if self.outcome is Outcome.UNKNOWN:
            return CommitOutcomeUnknown(f"{where}: {text}")
        kind = getattr(errors, shown[0][1].kind, None) if shown else None
        known = isinstance(kind, type) and issubclass(kind, DataStatesError)
        if len({why.kind for why in self.reasons.values()}) > 1 or not known:
            kind = SaveFailedError
        assert kind is not None
        error: DataStatesError = kind(f"the save to {where} failed: {text}")
        return error

    @staticmethod
    def _say(rank: int, why: Reason, world: int) -> str:
        of = f" of {world}" if world > 1 else ""
        named = "" if hasattr(errors, why.kind) else f"{why.kind}: "
        return (
            f"{named}{why.message}"
            if rank < 0 or world == 1
            else f"rank {rank}{of}: {named}{why.message}"
        )
