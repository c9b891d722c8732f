"""How the ranks agree about one save: what a rank does next, given what it has seen.

Pure: no sockets, clocks, threads or files. :func:`lead` is the coordinator's part (rank 0), :func:`follow` that of each
other rank. Both are generators: they yield an action, are sent the event that came of it, and return the decision.
``commit/voter.py`` drives them with gloo, the store, heartbeats and storage; ``tests/support/simulation.py`` through
thousands of schedules.

The numbers in comments are the steps of docs/commit.md. Two rules carry the proof:

- the coordinator alone decides, and notes what it decided before it goes on to the next save;
- a rank that cannot hear the coordinator's decision makes one true at the path: it withdraws the attempt, and looks.

Two more keep a healthy save from failing because of another: a rank that has met the others anew looks in the store
first, and believes what it is told only if that is of the save that it is in.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from dcp_datastates.commit.decision import Decision, Outcome, Reason
from dcp_datastates.errors import RankLostError, SaveFailedError

__all__ = [
    "MAY_RAISE",
    "Action",
    "AwaitFiles",
    "Broke",
    "Collect",
    "Collected",
    "Counted",
    "Decided",
    "Done",
    "Event",
    "Explain",
    "Hear",
    "Leave",
    "Look",
    "Lost",
    "Meet",
    "Note",
    "Publish",
    "Refused",
    "Said",
    "Settle",
    "Steps",
    "Tell",
    "Told",
    "Vote",
    "Written",
    "follow",
    "interruption",
    "lead",
]

# ---- actions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class AwaitFiles:
    """Wait until this rank's files are durable, or have failed: :class:`Written`."""


@dataclass(frozen=True)
class Explain:
    """Tell the coordinator why this rank fails the save, as far as the store can be reached."""

    reason: Reason


@dataclass(frozen=True)
class Meet:
    """Be connected with all ranks, anew if need be: :class:`Done`, or :class:`Broke`.

    A rank that has met the others anew looks whether the round was decided without it: :class:`Said`.
    """


@dataclass(frozen=True)
class Vote:
    """All ranks' votes together: :class:`Counted`."""

    ok: bool


@dataclass(frozen=True)
class Collect:
    """Coordinator: what the ranks have explained: :class:`Collected`."""


@dataclass(frozen=True)
class Publish:
    """Coordinator: publish the attempt: :class:`Decided`. Once it has begun, nothing interrupts it."""


@dataclass(frozen=True)
class Note:
    """Coordinator: write the decision down in the store, now or before this rank meets the others again."""

    decision: Decision


@dataclass(frozen=True)
class Tell:
    """Coordinator: share the decision with all ranks: :class:`Done`, whether or not all have heard it."""

    decision: Decision


@dataclass(frozen=True)
class Hear:
    """Wait for what :class:`Tell` shares: :class:`Told`."""


@dataclass(frozen=True)
class Look:
    """Read what the coordinator has written down: :class:`Said`."""


@dataclass(frozen=True)
class Leave:
    """Give the connections up, for all ranks."""


@dataclass(frozen=True)
class Settle:
    """Withdraw the attempt and see what is committed at the path: :class:`Decided`."""

    why: Reason


Action = (
    AwaitFiles
    | Explain
    | Meet
    | Vote
    | Collect
    | Publish
    | Note
    | Tell
    | Hear
    | Look
    | Leave
    | Settle
)

MAY_RAISE = (AwaitFiles, Meet, Vote, Publish, Tell, Hear)
"""Carrying these out may raise (a defect), which is thrown into the protocol; the others never raise."""

# ---- events ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """The action was carried out."""


@dataclass(frozen=True)
class Written:
    """This rank's files are durable (None), or why they are not."""

    reason: Reason | None


@dataclass(frozen=True)
class Counted:
    """Whether all ranks' files are durable, and all mean this save. ``why`` not, where that alone tells."""

    unanimous: bool
    why: Reason | None = None


@dataclass(frozen=True)
class Collected:
    """Why ranks fail the save, by rank; ``more`` ranks have their reasons, too."""

    reasons: dict[int, Reason]
    more: int = 0


@dataclass(frozen=True)
class Decided:
    """What came of publishing or settling."""

    decision: Decision


@dataclass(frozen=True)
class Told:
    """What the coordinator shared; None if it is not of this round."""

    decision: Decision | None


@dataclass(frozen=True)
class Broke:
    """A connection broke; says nothing about who is to blame."""


@dataclass(frozen=True)
class Said:
    """The coordinator has ended this round, so decided; None if the store does not say (any more) how."""

    decision: Decision | None


@dataclass(frozen=True)
class Lost:
    """Ranks are lost: any of them, for the coordinator; the coordinator, or the store, for the others."""

    reason: Reason


@dataclass(frozen=True)
class Refused:
    """Coordinator: these ranks have ended the round without it."""

    ranks: Sequence[int]


Event = Done | Written | Counted | Collected | Decided | Told | Broke | Said | Lost | Refused

Steps = Generator[Action, Event, Decision]


def interruption(
    ended: Sequence[int],
    said: Said | None,
    lost: Lost | None,
    *,
    waits_in_vain: bool = False,
    telling: bool = False,
) -> Event | None:
    """What ends a wait, of what a rank has heard by heartbeats; None: it waits on.

    Args:
        ended: on the coordinator, the ranks that have ended the round; else nothing.
        said: on the other ranks, what the coordinator has decided.
        lost: that ranks are lost, as far as they matter to this one.
        waits_in_vain: this rank is connected with no other, or a rank that passes the decision on may be lost.
        telling: the coordinator has decided, and shares the outcome.
    """
    # Others are told by gloo as well, which must not be left in the middle of an operation.
    if said is not None and (
        lost or waits_in_vain or said.decision is None or said.decision.given_up
    ):
        return said
    if lost is None and ended and not telling:
        return Refused(ended)
    return lost


# ---- the coordinator -------------------------------------------------------------------------


def lead() -> Steps:
    """The coordinator's part of a round."""
    try:
        decision = yield from _decide()
    except Exception as error:  # a defect, before anything was published
        decision = Decision(Outcome.FAILED, {0: Reason.of(error)}, given_up=True)
    try:
        if decision.given_up:
            yield Leave()
        yield Note(decision)  # 11: before this rank goes on to the next save
        if not decision.given_up and not isinstance((yield Tell(decision)), Done):
            yield Leave()  # the others find it in the store
    except Exception:  # the decision stands
        yield Leave()
    return decision


def _decide() -> Steps:
    event = yield AwaitFiles()
    if isinstance(event, Written):
        if event.reason is not None:
            yield Explain(event.reason)
        event = yield from _count(event.reason is None)  # 6
    if isinstance(event, Counted) and event.unanimous:
        try:
            event = yield Publish()  # 8 to 10
        except Exception as error:
            event = yield Settle(Reason.of(error))
    match event:
        case Decided(decision):
            return decision
        case Refused(ranks):  # 14
            return _failed((yield Collect()), _gave_up(ranks), given_up=True)
        case Counted(why=why):  # 7
            return _failed((yield Collect()), why)
    assert isinstance(event, Lost)  # 14
    return Decision(Outcome.FAILED, {-1: event.reason}, given_up=True)


def _count(ok: bool) -> Generator[Action, Event, Event]:
    while True:
        event = yield Meet()
        if isinstance(event, Done):
            event = yield Vote(ok)
            if isinstance(event, Broke):
                yield Leave()
        if not isinstance(event, Broke):
            return event


def _failed(collected: Event, otherwise: Reason | None, *, given_up: bool = False) -> Decision:
    assert isinstance(collected, Collected)
    unknown = Reason.of(SaveFailedError("a rank failed, and why is not known"))
    reasons = collected.reasons or {-1: otherwise or unknown}
    return Decision(Outcome.FAILED, reasons, given_up=given_up, more=collected.more)


def _gave_up(ranks: Sequence[int]) -> Reason:
    named = ", ".join(map(str, ranks[:3])) + (", …" if len(ranks) > 3 else "")
    return Reason.of(RankLostError(f"rank {named} lost sight of rank 0 and gave this save up"))


# ---- the other ranks -------------------------------------------------------------------------


def follow() -> Steps:
    """Every other rank's part of a round."""
    voted = False  # for the save: without this vote nothing is published
    try:
        event = yield AwaitFiles()
        if isinstance(event, Written):
            ok = event.reason is None
            if event.reason is not None:
                yield Explain(event.reason)
            while not isinstance(event, Said | Lost):
                event = yield Meet()
                if isinstance(event, Done):
                    voted = ok
                    event = yield Vote(ok)  # 6
                    if isinstance(event, Counted):
                        event = yield Hear()  # 11
                    if isinstance(event, Told) and event.decision is not None:
                        return event.decision
                    yield Leave()  # 17
        else:
            yield Leave()
    except Exception as error:  # a defect
        event = Lost(Reason.of(error))
        yield Leave()
    why = Reason.of(RankLostError("rank 0 has gone on, and does not say what it decided"))
    if isinstance(event, Lost):
        why, event = event.reason, (yield Look())  # it may have decided before it was lost
    match event:
        case Said(Decision() as decision):
            return decision
    yield Explain(why)  # the coordinator may be there, and see this rank end the round
    if not voted:  # 15
        return Decision(Outcome.FAILED, {-1: why})
    event = yield Settle(why)  # 16
    assert isinstance(event, Decided)
    return event.decision
