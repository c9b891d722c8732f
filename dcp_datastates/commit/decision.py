"""The decision of a round, as ranks send it to each other, and as the error that a user sees."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from dcp_datastates import errors
from dcp_datastates.errors import CommitOutcomeUnknown, DataStatesError, SaveFailedError

__all__ = ["Decision", "Outcome", "Reason"]

_LONGEST: Final = 768
"""Longest message of a reason, in characters: reasons travel through the store."""

_SHOWN: Final = 3
"""How many ranks' reasons an error message contains."""


class Outcome(Enum):
    """The outcome of a round."""

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
        # The message may contain a file name that is not UTF-8.
        message = str(error).encode(errors="backslashreplace").decode()
        return Reason(type(error).__name__, message[:_LONGEST])


@dataclass(frozen=True)
class Decision:
    """The outcome, with the reasons by rank. Rank -1 stands for no rank in particular.

    ``given_up``: the coordinator decided because a rank was lost, without all votes. ``more``: how many further ranks
    failed.
    """

    outcome: Outcome
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    given_up: bool = False
    more: int = 0

    @staticmethod
    def failed(rank: int, error: BaseException) -> Decision:
        return Decision(Outcome.FAILED, {rank: Reason.of(error)})

    def encode(self) -> str:
        reasons = {str(rank): [why.kind, why.message] for rank, why in self.reasons.items()}
        return json.dumps([self.outcome.value, reasons, self.given_up, self.more])

    @staticmethod
    def decode(value: bytes) -> Decision:
        outcome, reasons, given_up, more = json.loads(value)
        found = {int(rank): Reason(*why) for rank, why in reasons.items()}
        return Decision(Outcome(outcome), found, given_up, more)

    def error(self, where: str, world: int) -> DataStatesError | None:
        """The error that the user sees; None if the save was committed.

        Its type is the failed ranks' error type, if they share one of this package's; else :class:`SaveFailedError`.
        """
        if self.outcome is Outcome.COMMITTED:
            return None
        shown = sorted(self.reasons.items())[:_SHOWN]
        further = len(self.reasons) - len(shown) + self.more
        more = f"; and {further} more ranks" if further else ""
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
