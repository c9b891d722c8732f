"""A rank's vote in a round, and the decision that all votes come to.

The coordinator gathers the votes as bytes and broadcasts whether they are unanimous; a decision travels as text, by
gloo, and in the store for ranks that gloo does not reach.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from enum import Enum
from typing import Final

from dcp_datastates import errors
from dcp_datastates.errors import CommitOutcomeUnknown, DataStatesError, SaveFailedError
from dcp_datastates.ranks.connection import Connection
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.object_path import Location

_LONGEST: Final = 768
"""Longest message of a reason, in characters: decisions travel through the store."""

_TOLD: Final = 8
"""How many ranks' reasons a decision contains."""

_SHOWN: Final = 3
"""How many ranks' reasons an error message contains."""

_VOTE: Final = struct.Struct("<?20sB")


@dataclass(frozen=True)
class RankVote:
    """One rank's vote: whether its bytes are durable, and which save it votes for.

    ``no``: why they are not. ``report``: what the coordinator needs to know of this rank's files, in any encoding.
    ``trace``: what this rank's part has cost (``format/save_trace.py``); 255 bytes at most.
    """

    no: Reason | None
    number: int
    attempt: Attempt | None
    directory: Location | None
    world: int
    report: bytes = b""
    trace: bytes = b""

    def encode(self) -> bytes:
        """Yes or no, a digest of the save, the trace, and the report, or the reason."""
        # Only the last part of the path: other machines may mount the directory elsewhere.
        name = b"" if self.directory is None else os.fsencode(self.directory.name)
        attempt = None if self.attempt is None else astuple(self.attempt)
        save = repr((self.number, attempt, name, self.world))
        digest = hashlib.sha1(save.encode()).digest()
        told = self.report if self.no is None else json.dumps(astuple(self.no)).encode()
        return _VOTE.pack(self.no is None, digest, len(self.trace)) + self.trace + told


class Count(Enum):
    """What all ranks' votes come to."""

    UNANIMOUS = b"yes"
    """All are durable, and all vote for the same save."""
    FAILED = b"no"
    """Some rank's files are not durable."""
    DIFFERENT = b"different"
    """The ranks vote for different saves."""


class Votes:
    """All ranks' votes, as the coordinator has them.

    Attributes:
        count: what they come to.
        reports, traces: the ranks' own, if none votes no.
        noes: the reasons of those that vote no, by rank.
    """

    def __init__(self, votes: Sequence[bytes]) -> None:
        heads = [_VOTE.unpack_from(vote) for vote in votes]
        ends = [_VOTE.size + length for _, _, length in heads]
        self.reports: Final = [vote[end:] for vote, end in zip(votes, ends, strict=True)]
        self.traces: Final = [vote[_VOTE.size : end] for vote, end in zip(votes, ends, strict=True)]
        self.noes: Final = [rank for rank, (ok, _, _) in enumerate(heads) if not ok]
        same = len({digest for _, digest, _ in heads}) == 1
        agreed = Count.UNANIMOUS if same else Count.DIFFERENT
        self.count: Final = Count.FAILED if self.noes else agreed

    def reasons(self) -> tuple[dict[int, Reason], int]:
        """Why ranks vote no: the first few, by rank, and how many others do."""
        told = self.noes[:_TOLD]
        reasons = {rank: Reason(*json.loads(self.reports[rank])) for rank in told}
        return reasons, len(self.noes) - len(told)


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
        names = [kind.__name__ for kind in type(error).__mro__]
        public = next((name for name in names if hasattr(errors, name)), names[0])
        return Reason(public, message[:_LONGEST])


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

    def error(self, where: str, world: int, cause: BaseException | None = None) -> BaseException:
        """The error that the user sees, of a save that is not committed. ``cause``: this rank's own error.

        That of a rank alone is its own. Else the type is the failed ranks' error type, if they share one of this
        package's, or :class:`SaveFailedError`.
        """
        unknown = self.outcome is Outcome.UNKNOWN
        says_as_much = not unknown or isinstance(cause, CommitOutcomeUnknown)
        if world == 1 and cause is not None and says_as_much:
            return cause
        shown = sorted(self.reasons.items())[:_SHOWN]
        further = len(self.reasons) - len(shown) + self.more
        more = f"; and {further} more ranks" if further else ""
        text = "; ".join(self._say(rank, why, world) for rank, why in shown) + more
        kind = getattr(errors, shown[0][1].kind, None) if shown else None
        known = isinstance(kind, type) and issubclass(kind, DataStatesError)
        if len({why.kind for why in self.reasons.values()}) > 1 or not known:
            kind = SaveFailedError
        error: DataStatesError
        if unknown:
            error = CommitOutcomeUnknown(f"{where}: {text}")
        else:
            assert kind is not None
            error = kind(f"the save to {where} failed: {text}")
        error.__cause__ = cause
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


# ---- decisions in the store ---------------------------------------------------------------------------


_KEPT: Final = 64
"""How many rounds' decisions stay in the store, for ranks that are behind."""


class DecisionLog:
    """The coordinator's decisions, by round, for ranks that gloo does not reach. Only one thread uses it.

    All methods raise RuntimeError if the store cannot be reached.
    """

    def __init__(self, store: Connection) -> None:
        self._store = store
        self._unsaid: dict[int, Decision] = {}

    def find(self, number: int) -> Decision | None:
        """The decision about the round; None if the store does not have it."""
        key = _decision(number)
        return Decision.decode(self._store.get(key)) if self._store.check([key]) else None

    def note(self, number: int, decision: Decision) -> None:
        """Coordinator: write the decision to the store; if that fails, :meth:`flush` tries again."""
        self._unsaid[number] = decision
        self.flush()

    def flush(self) -> None:
        """Coordinator: write the decisions that could not be written before."""
        for number, decision in list(self._unsaid.items()):
            self._store.set(_decision(number), decision.encode())
            del self._unsaid[number]

    def forget_before(self, number: int) -> None:
        """Coordinator, once a round: delete the decision that no rank asks for any more."""
        self._store.delete_key(_decision(number - _KEPT))


def _decision(number: int) -> str:
    return f"decision/{number}"
