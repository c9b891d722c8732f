"""How the ranks agree on a save, in a step that they do together (:mod:`dcp_datastates.commit.joint_steps`).

A rank's *proposal* names the save and has the rank's plan. The coordinator's *assignment* has the attempt and the
rank's share. While a rank waits for the others, a :class:`PeerWatch` looks whether they come and make progress.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Final

from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.joint_steps import Answer, Meet, StepEnd, together
from dcp_datastates.commit.vote import Decision
from dcp_datastates.errors import CheckpointSkipped, RankLostError, SaveFailedError
from dcp_datastates.planning.packing import Message
from dcp_datastates.planning.save_planning import SavePlanning
from dcp_datastates.ranks.failure_detector import RankWait, ranks_have
from dcp_datastates.ranks.meetings import Meetings, Met
from dcp_datastates.saving.operation import LEFT_OUT, SaveOperation, Ticket
from dcp_datastates.storage.attempt import Attempt

_OTHER_PLANNERS: Final = (
    "some ranks plan with a planner that has hooks of its own, and some do not: pass planners of one class on all "
    "ranks, with the same hooks set on them"
)


@dataclass(frozen=True)
class Proposal(Message):
    """One rank's message. By all but the plan, the ranks know that they mean the same save."""

    path: str
    """The last part of the checkpoint's path: other machines may mount the directory elsewhere."""
    kind: str = ""
    """How the save is planned."""
    unused_writers: int = 0
    """For a save that DCP runs: how many writers this rank's program had made and not used. If a call of
    ``dcp.async_save`` failed on one rank before it reached the writer, DCP pairs the rank's next call with the other
    ranks' present one.
    """
    plan: bytes = b""


@dataclass(frozen=True)
class Assignment(Message):
    """The coordinator's message to a rank."""

    numbers: tuple[int, ...] = ()
    """Of the :attr:`ticket`: the attempt's two, and its own."""
    plan: bytes = b""
    different: str = ""
    """How the ranks' saves differ, if they do."""
    paths: tuple[str, ...] = ()
    """The paths of all ranks' proposals, if they differ."""

    @property
    def ticket(self) -> Ticket:
        incarnation, sequence, number = self.numbers
        return Ticket(Attempt(incarnation, sequence), number)


def agree(
    meet: Meet,
    planning: SavePlanning | None,
    propose: Callable[[], bytes],
    draw: Callable[[], Ticket],
) -> tuple[Assignment, StepEnd]:
    """Agree with the other ranks on a save; when this returns, no other rank waits for this one.

    Returns the assignment, whose part the planning has yet to take, and how the step has ended: if it has failed, there
    is no such save on any rank.

    Args:
        meet: meets the other ranks, as :meth:`~dcp_datastates.ranks.meetings.Meetings.meet`.
        planning: the save's; None if ``propose`` raises.
        propose: returns this rank's encoded :class:`Proposal`.
        draw: draws the coordinator's ticket.

    Raises :class:`CheckpointSkipped`, on all ranks, if one leaves the save out; an interrupt of this rank; and the
    errors of ``meet``.
    """
    end = together(meet, propose, functools.partial(_answers, planning, draw))
    try:
        if end.failed is None:
            assignment = Assignment.decode(end.answer)
            if assignment.different:
                different = SaveFailedError(assignment.different)
                end = StepEnd(failed=Decision.failed(-1, different))
            return assignment, end
        if CheckpointSkipped.__name__ in {each.kind for each in end.failed.reasons.values()}:
            if planning is not None:
                planning.left_out()
            raise CheckpointSkipped(LEFT_OUT)
        return Assignment(), end
    finally:
        # The traceback of this rank's own error retains the frame of the step, and with it this one.
        del meet, planning, propose, draw, end


def _answers(
    planning: SavePlanning | None, draw: Callable[[], Ticket], messages: Sequence[bytes]
) -> Sequence[bytes]:
    assert planning is not None
    return [each.encode() for each in _assign(messages, planning, draw)]


def _assign(
    messages: Sequence[bytes], planning: SavePlanning, draw: Callable[[], Ticket]
) -> list[Assignment]:
    proposals = list(map(Proposal.decode, messages))
    if different := _difference([replace(each, plan=b"") for each in proposals]):
        paths = tuple(each.path for each in proposals)
        return [Assignment(different=different, paths=paths)] * len(proposals)
    plans = planning.assign([each.plan for each in proposals])
    ticket = draw()
    numbers = (*astuple(ticket.attempt), ticket.number)
    return [Assignment(numbers, plan) for plan in plans]


def _difference(saves: Sequence[Proposal]) -> str:
    first = saves[0]
    rank = next((rank for rank, each in enumerate(saves) if each != first), None)
    if rank is None:
        return ""
    other = saves[rank]
    if other.path != first.path:
        return (
            f"rank 0 saves to {first.path!r} and rank {rank} to {other.path!r}: one of them has left out a call "
            f"of async_save (every rank must make the same calls, in the same order)"
        )
    if other.unused_writers != first.unused_writers:
        return (
            f"the program of rank 0 had made and not used {first.unused_writers} writers, and that of rank {rank} "
            f"{other.unused_writers}: a call of dcp.async_save has failed on one of them before it reached the writer. "
            f"No save that DCP runs can be committed until the job restarts; dcp_datastates.async_save goes on after "
            f"a failed call"
        )
    return _OTHER_PLANNERS


logger = logging.getLogger(__name__)

GATE_SECONDS: Final = 10.0
"""How long the step gate holds training for a save to which a rank has not come."""

GATE_SECONDS_AFTER_A_MISS: Final = 5.0
"""The same, if the save before has been given up so. Beats, which tell of calls, come every four seconds or sooner."""

COME_SECONDS: Final = 30.0
"""How long the ranks wait for one another in a save that DCP runs: a rank whose ``finish_plan`` fails never comes."""

_BEAT_SECONDS: Final = 8.0
"""How long it takes until every rank knows that all have come."""

_ALL_ARE_HERE: Final = "planning for all ranks"


class PeerWatch:
    """Watches, for a thread that waits, whether the other ranks come to a save and make progress.

    Args:
        what: the purpose of the wait, for the log.
        timeout: seconds without progress after which the wait fails.
        number: the number of the call that the ranks must make.
        check_open: raises if this process is ending.
        gate_seconds: how long the step gate may hold training for a rank that has not called.
        save: a save whose ``doing`` is updated.
    """

    def __init__(
        self,
        group: CommitGroup,
        what: str,
        timeout: float,
        number: int,
        check_open: Callable[[], None],
        save: SaveOperation | None = None,
        gate_seconds: float = GATE_SECONDS,
    ) -> None:
        self._gate_seconds = gate_seconds
        self.let_training_go = False
        """Whether it has failed a wait for which the step gate held training."""
        self._all_are_here = False
        self._group = group
        self._timeout = timeout
        self._number = number
        self._own = save is None or save.own
        self._check_open = check_open
        self._save = save
        self._wait = None if group.detector is None else RankWait(group.detector, what)

    def move_on(self) -> None:
        """The save belongs to the ranks' next call."""
        self._number += 1

    def meet(
        self, meetings: Meetings, number: int, name: str, message: bytes, answer: Answer
    ) -> Met:
        """Meet them, as :meth:`Meetings.meet`. Raises :class:`RankLostError` if a rank is lost, and after ``timeout``
        seconds; for a rank that has not called, after the step gate has held training for ``gate_seconds``.
        """
        assert self._wait is not None, "a rank alone waits for none"
        wait = self._wait

        def answering(messages: Sequence[bytes]) -> Sequence[bytes]:
            self._all_are_here = True
            self._group.planning = _ALL_ARE_HERE
            return answer(messages)

        def look() -> None:
            self._check_open()
            wait.look(self._waits_for)

        return meetings.meet(number, message, answering, look, name)

    def _waits_for(self, waited: float) -> str:
        detector = self._group.detector
        assert detector is not None
        absent = detector.absent(self._number, self._own)
        what = "waiting for the other ranks to plan"
        said = detector.said_by_coordinator
        if self._all_are_here:
            what = _ALL_ARE_HERE
        elif absent:
            what = f"{ranks_have(absent)} not called {'' if self._own else 'dcp.'}async_save"
        elif said:
            what = f"waiting for rank 0 ({said})"
        self._group.planning = what
        if self._save is not None:
            self._save.doing = what
        gate_waits = 0.0 if self._save is None else self._save.reads.gate_waits
        if absent and self._own and gate_waits > self._gate_seconds:
            self.let_training_go = True
            raise RankLostError(f"{what} for {waited:.0f} s, and training waits no longer for it")
        leads = self._group.rank_set.rank == 0
        knows = self._all_are_here if leads else said == _ALL_ARE_HERE
        if not (self._own or knows) and waited > COME_SECONDS + (0 if leads else _BEAT_SECONDS):
            raise RankLostError(
                f"some ranks have not come from DCP's planning within {waited:.0f} s: DCP's error tells if the "
                f"finish_plan() of a planner has failed"
            )
        if waited >= self._timeout and absent:
            raise RankLostError(f"{what} for {waited:.0f} s")
        if waited >= self._timeout and (slow := detector.stalled(self._timeout)):
            raise RankLostError("; ".join(map(str, slow[:3])))
        return what
