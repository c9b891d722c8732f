"""A rank's vote in a round, why a rank has failed, and the decision that all votes come to.

A decision travels as text, by gloo, and in the store for ranks that gloo does not reach.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from enum import Enum
from typing import Any, Final

from dcp_datastates import errors
from dcp_datastates.errors import CommitOutcomeUnknown, DataStatesError, SaveFailedError
from dcp_datastates.format import values
from dcp_datastates.ranks.connection import Connection
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.object_path import Location

_LONGEST: Final = 768
"""Longest message of a reason, in characters: decisions travel through the store."""

_SHOWN: Final = 3
"""How many ranks' reasons an error message contains."""

_VOTE: Final = struct.Struct("<20sB")


def encode_vote(
    number: int,
    attempt: Attempt | None,
    directory: Location | None,
    world: int,
    report: bytes = b"",
    trace: bytes = b"",
) -> bytes:
    """The vote of a rank whose bytes are durable, for the save that the first four name.

    ``report``: what the coordinator needs to know of this rank's files, in any encoding. ``trace``: what this rank's
    part has cost (``format/save_trace.py``); 255 bytes at most.
    """
    # Only the last part of the path: other machines may mount the directory elsewhere.
    name = b"" if directory is None else os.fsencode(directory.name)
    save = number, None if attempt is None else astuple(attempt), name, world
    digest = hashlib.sha1(repr(save).encode()).digest()
    return _VOTE.pack(digest, len(trace)) + trace + report


def decode_vote(vote: bytes) -> tuple[bytes, bytes, bytes]:
    """A digest of the save, the report, and the trace."""
    digest, length = _VOTE.unpack_from(vote)
    end = _VOTE.size + length
    return digest, vote[end:], vote[_VOTE.size : end]


class Outcome(Enum):
    """The outcome of a round."""

    COMMITTED = "committed"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Reason:
    """Why one rank failed: the name of the error's type, and its message.

    ``parts``: the error's arguments and attributes as JSON, if plain values make the error again, and they were asked
    for.
    """

    kind: str
    message: str
    parts: Any = None

    @staticmethod
    def of(error: BaseException, whole: bool = False) -> Reason:
        # The message may contain a file name that is not UTF-8.
        message = str(error).encode(errors="backslashreplace").decode()[:_LONGEST]
        names = [kind.__name__ for kind in type(error).__mro__]
        public = next((name for name in names if hasattr(errors, name)), names[0])
        if whole:
            with contextlib.suppress(Exception):
                parts = values.to_json((*error.__reduce__()[1:], {})[:2])
                told = Reason(public, message, parts)
                if isinstance(error, type(told.error(""))):
                    return told
        return Reason(public, message)

    def error(self, where: str) -> Exception:
        """The error: of its type, if it is one of this package, or of Python and its parts are known; else a
        ``DataStatesError`` that says ``where`` it was raised.
        """
        kind = getattr(errors, self.kind, None) or getattr(builtins, self.kind, None)
        least = DataStatesError if self.parts is None else Exception
        if not (isinstance(kind, type) and issubclass(kind, least)):
            return DataStatesError(f"{where}: {self.kind}: {self.message}")
        arguments, state = values.from_json(self.parts) or ((self.message,), {})
        error: Exception = kind(*arguments)
        vars(error).update(state)
        return error


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
        reasons = [(rank, why.kind, why.message, why.parts) for rank, why in self.reasons.items()]
        return json.dumps([self.outcome.value, reasons, self.given_up, self.more])

    @staticmethod
    def decode(value: bytes) -> Decision:
        outcome, reasons, given_up, more = json.loads(value)
        found = {rank: Reason(*why) for rank, *why in reasons}
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
