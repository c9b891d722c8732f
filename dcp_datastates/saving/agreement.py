"""How the ranks agree on a save: one message of each rank to the coordinator, and one answer to each.

A rank's *proposal* names the save and has the rank's plan, or says why the rank cannot save. The coordinator's
*assignment* has the attempt and the rank's share, or the reasons for which the ranks do not save.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Final

from dcp_datastates.commit.vote import Decision, Outcome, Reason
from dcp_datastates.errors import CheckpointSkipped, SaveFailedError
from dcp_datastates.planning.packing import pack, unpack
from dcp_datastates.planning.save_planning import SavePlanning
from dcp_datastates.ranks.meetings import Met
from dcp_datastates.saving.call import LEFT_OUT
from dcp_datastates.storage.attempt import Ticket

__all__ = ["Answer", "Assignment", "NotAgreed", "Proposal", "SaveName", "agree"]

_OTHER_PLANNERS: Final = (
    "some ranks plan with a planner that has hooks of its own, and some do not: pass planners of one class on all "
    "ranks, with the same hooks set on them"
)

_PROPOSAL: Final = b"dspr\x01"
_ASSIGNMENT: Final = b"dsas\x01"


@dataclass(frozen=True)
class SaveName:
    """By what the ranks know that they mean the same save."""

    path: str
    """The last part of the checkpoint's path: other machines may mount the directory elsewhere."""
    kind: str = ""
    """How the save is planned."""
    unused_writers: int = 0
    """For a save that DCP runs: how many writers this rank's program had made and not used. If a call of
    ``dcp.async_save`` failed on one rank before it reached the writer, DCP pairs the rank's next call with the other
    ranks' present one.
    """


@dataclass(frozen=True)
class Proposal:
    """One rank's message."""

    save: SaveName
    plan: bytes = b""
    reason: Reason | None = None
    """Why the rank cannot save."""

    def encode(self) -> bytes:
        reason = None if self.reason is None else astuple(self.reason)
        return pack(_PROPOSAL, [_json([*astuple(self.save), reason]), self.plan])

    @staticmethod
    def decode(data: bytes) -> Proposal:
        """ValueError: the bytes are not from :meth:`encode`."""
        head, plan = unpack(_PROPOSAL, 2, data)
        *save, reason = json.loads(bytes(head))
        return Proposal(SaveName(*save), bytes(plan), None if reason is None else Reason(*reason))


@dataclass(frozen=True)
class Assignment:
    """The coordinator's message to a rank."""

    ticket: Ticket | None
    plan: bytes = b""
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    """By rank, why there is no such save."""
    paths: Sequence[str] = ()
    """The paths of all ranks' proposals, if they differ."""

    def encode(self) -> bytes:
        ticket = None if self.ticket is None else self.ticket.encode()
        reasons = {str(rank): astuple(reason) for rank, reason in self.reasons.items()}
        return pack(_ASSIGNMENT, [_json([ticket, reasons, list(self.paths)]), self.plan])

    @staticmethod
    def decode(data: bytes) -> Assignment:
        """ValueError: the bytes are not from :meth:`encode`."""
        head, plan = unpack(_ASSIGNMENT, 2, data)
        ticket, reasons, paths = json.loads(bytes(head))
        return Assignment(
            None if ticket is None else Ticket.decode(tuple(ticket)),
            bytes(plan),
            {int(rank): Reason(*reason) for rank, reason in reasons.items()},
            tuple(paths),
        )


class NotAgreed(Exception):
    """The ranks do not save, for these ``reasons`` by rank. ``__cause__`` is this rank's own error, if it had one."""

    def __init__(self, reasons: Mapping[int, Reason], paths: Sequence[str]) -> None:
        super().__init__(reasons)
        self.reasons = reasons
        self.paths = paths

    def told(self, where: str, world: int) -> BaseException:
        """The error for the user, of the save to ``where``: alone, this rank's own."""
        if world == 1 and self.__cause__ is not None:
            return self.__cause__
        told = Decision(Outcome.FAILED, self.reasons).error(where, world)
        assert told is not None
        told.__cause__ = self.__cause__
        return told


Answer = Callable[[Sequence[bytes]], Sequence[bytes]]


def agree(
    meet: Callable[[bytes, Answer], Met],
    propose: Callable[[], tuple[SaveName, SavePlanning, bytes]],
    draw: Callable[[], Ticket | None],
) -> tuple[SavePlanning, Assignment, BaseException | None]:
    """Agree with the other ranks on a save; when this returns, no other rank waits for this one.

    Returns the planning, which has yet to take its part; the assignment; and an error with which this rank has to fail
    the save, because it came too late to leave the meeting.

    Args:
        meet: meets the other ranks, as :meth:`~dcp_datastates.ranks.meetings.Meetings.meet`.
        propose: names the save, and returns its planning and this rank's message.
        draw: draws the coordinator's ticket.

    Raises :class:`NotAgreed`, on all ranks, if a rank cannot save; :class:`CheckpointSkipped`, on all, if one leaves it
    out; and the errors of ``meet``.
    """
    failure: BaseException | None = None
    planning: SavePlanning | None = None

    def answer(messages: Sequence[bytes]) -> Sequence[bytes]:
        nonlocal failure
        try:
            return [each.encode() for each in _assign(messages, planning, draw)]
        except BaseException as error:  # the other ranks wait for an answer
            failure = error
            return [Assignment(None, reasons={0: Reason.of(error)}).encode()] * len(messages)

    try:
        name, planning, plan = propose()
        mine = Proposal(name, plan)
    except BaseException as error:  # the other ranks wait for it
        failure, mine = error, Proposal(SaveName(""), reason=Reason.of(error))
    met = meet(mine.encode(), answer)
    assignment = Assignment.decode(met.answer)
    if assignment.reasons:
        if any(each.kind == CheckpointSkipped.__name__ for each in assignment.reasons.values()):
            if planning is not None:
                planning.left_out()
            raise CheckpointSkipped(LEFT_OUT)
        raise NotAgreed(assignment.reasons, assignment.paths) from failure
    assert planning is not None
    return planning, assignment, met.error


def _assign(
    gathered: Sequence[bytes], planning: SavePlanning | None, draw: Callable[[], Ticket | None]
) -> list[Assignment]:
    proposals = list(map(Proposal.decode, gathered))
    reasons = {rank: each.reason for rank, each in enumerate(proposals) if each.reason is not None}
    if reasons:
        return [Assignment(None, reasons=reasons)] * len(proposals)
    saves = [each.save for each in proposals]
    if (different := _difference(saves)) is not None:
        paths = [each.path for each in saves]
        return [Assignment(None, reasons={-1: different}, paths=paths)] * len(proposals)
    assert planning is not None
    plans = planning.assign([each.plan for each in proposals])
    ticket = draw()
    return [Assignment(ticket, plan) for plan in plans]


def _difference(saves: Sequence[SaveName]) -> Reason | None:
    """Why the ranks do not mean the same save."""
    first = saves[0]
    rank = next((rank for rank, each in enumerate(saves) if each != first), None)
    if rank is None:
        return None
    other = saves[rank]
    if other.path != first.path:
        text = (
            f"rank 0 saves to {first.path!r} and rank {rank} to {other.path!r}: one of them has left out a call "
            f"of async_save (every rank must make the same calls, in the same order)"
        )
    elif other.unused_writers != first.unused_writers:
        text = (
            f"the program of rank 0 had made and not used {first.unused_writers} writers, and that of rank {rank} "
            f"{other.unused_writers}: a call of dcp.async_save has failed on one of them before it reached the writer. "
            f"No save that DCP runs can be committed until the job restarts; dcp_datastates.async_save goes on after "
            f"a failed call"
        )
    else:
        text = _OTHER_PLANNERS
    return Reason.of(SaveFailedError(text))


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
