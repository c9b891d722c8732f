"""The commit protocol: what a rank does next in a round, given what it has seen.

Pure: no sockets, clocks, threads or files. The coordinator (rank 0) runs :func:`lead`, each other rank :func:`follow`.
Both are generators: they yield an action, receive the resulting event, and return the decision. ``commit/voter.py``
drives them with gloo, the store, heartbeats and storage; ``tests/support/simulated`` drives them through thousands of
schedules.

The numbers in comments are the steps of docs/design/commit.md. The proof rests on two rules:

- only the coordinator decides, and it notes the decision in the store before it goes on to the next save;
- a rank that cannot receive the decision settles the outcome at the path: it withdraws the attempt, then reads what is
  committed there.

Two more rules keep one save's failure from failing the next: a rank that has reconnected looks for a decision in the
store first, and it accepts a decision only for the round that it is in.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

from dcp_datastates.commit.vote import Decision, Outcome, Reason
from dcp_datastates.errors import RankLostError

# ---- actions ---------------------------------------------------------------------------------


class Action:
    """What a rank does next. The text after the colon is the event that results."""


@dataclass(frozen=True)
class AwaitFiles(Action):
    """Wait until this rank's files are durable, or have failed: :class:`Written`."""


@dataclass(frozen=True)
class GiveUp(Action):
    """Say in this rank's beat why it ends the round without the coordinator, which may be alive: :class:`Done`."""

    why: Reason


@dataclass(frozen=True)
class Meet(Action):
    """Connect with all ranks if this rank is not connected: :class:`Done`, or :class:`Broke`.

    A rank that has reconnected first looks whether the round was decided without it: :class:`DecisionFound`.
    """


@dataclass(frozen=True)
class Vote(Action):
    """Vote, and count all ranks' votes: :class:`Counted`. ``no``: why this rank's files are not durable."""

    no: Reason | None


@dataclass(frozen=True)
class Publish(Action):
    """Coordinator: publish the attempt: :class:`Decided`. Nothing interrupts a publication that has begun."""


@dataclass(frozen=True)
class Note(Action):
    """Coordinator: write the decision to the store, now or before this rank reconnects."""

    decision: Decision


@dataclass(frozen=True)
class Tell(Action):
    """Coordinator: broadcast the decision: :class:`Done`, whether or not all ranks have received it."""

    decision: Decision


@dataclass(frozen=True)
class Hear(Action):
    """Wait for the decision that :class:`Tell` broadcasts: :class:`DecisionReceived`."""


@dataclass(frozen=True)
class Look(Action):
    """Read the coordinator's decision from the store: :class:`DecisionFound`."""


@dataclass(frozen=True)
class Leave(Action):
    """Close the connections, so that all ranks must reconnect: :class:`Done`."""


@dataclass(frozen=True)
class Settle(Action):
    """Withdraw the attempt and read what is committed at the path: :class:`Decided`."""

    why: Reason


MAY_RAISE = (AwaitFiles, Meet, Vote, Publish, Tell, Hear)
"""These actions may raise because of a defect; the driver throws the error into the generator. The others never raise.
"""

# ---- events ----------------------------------------------------------------------------------


class Event:
    """What a rank has seen."""


@dataclass(frozen=True)
class Done(Event):
    """The action was carried out."""


@dataclass(frozen=True)
class Written(Event):
    """This rank's files are durable (``reason`` is None), or have failed."""

    reason: Reason | None


@dataclass(frozen=True)
class Counted(Event):
    """Whether all ranks' files are durable, and all voted for this save. On the coordinator, if not: ``reasons`` by
    rank, and ``more``, how many further ranks voted no.
    """

    unanimous: bool
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    more: int = 0


@dataclass(frozen=True)
class Decided(Event):
    """The result of :class:`Publish` or :class:`Settle`."""

    decision: Decision


@dataclass(frozen=True)
class DecisionReceived(Event):
    """The decision that the coordinator broadcast; None if it is about another round."""

    decision: Decision | None


@dataclass(frozen=True)
class Broke(Event):
    """A connection broke; this does not say which rank is at fault."""


@dataclass(frozen=True)
class DecisionFound(Event):
    """The coordinator has ended this round; ``decision`` is None if the store does not have it (any more)."""

    decision: Decision | None


@dataclass(frozen=True)
class Lost(Event):
    """Ranks are lost. The coordinator gets this for any rank, and for one that has ended the round without its
    decision; other ranks only for the coordinator or the store.
    """

    reason: Reason


Steps = Generator[Action, Event, Decision]


def interruption(
    ended: Mapping[int, str],
    found: DecisionFound | None,
    lost: Lost | None,
    *,
    waits_in_vain: bool = False,
    telling: bool = False,
) -> Event | None:
    """The event that ends a rank's wait, given the heartbeats it has read; None if the rank keeps waiting.

    Args:
        ended: on the coordinator, the ranks that have ended the round, and why; empty on the others.
        found: on the other ranks, the coordinator's decision.
        lost: the lost ranks that matter to this rank.
        waits_in_vain: this rank is not connected, or a rank that passes the decision on may be lost.
        telling: the coordinator has decided, and is broadcasting the decision.
    """
    # In all other cases gloo delivers the decision too. Do not interrupt its operation: that breaks the connections.
    if found is not None and (
        lost or waits_in_vain or found.decision is None or found.decision.given_up
    ):
        return found
    if lost is None and ended and not telling:
        named = ", ".join(map(str, list(ended)[:3])) + (", …" if len(ended) > 3 else "")
        whys = [why for why in ended.values() if why]
        text = f"rank {named} gave this save up: {whys[0] if whys else 'it lost sight of rank 0'}"
        return Lost(Reason.of(RankLostError(text)))
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
            yield Leave()  # the others find the decision in the store
    except Exception:  # the decision stands
        yield Leave()
    return decision


def _decide() -> Steps:
    event = yield AwaitFiles()
    if isinstance(event, Written):
        event = yield from _count(event.reason)  # 6
    if isinstance(event, Counted) and event.unanimous:
        try:
            event = yield Publish()  # 8 to 10
        except Exception as error:
            event = yield Settle(Reason.of(error))
    match event:
        case Decided(decision):
            return decision
        case Counted(_, reasons, more):  # 7
            return Decision(Outcome.FAILED, reasons, more=more)
    assert isinstance(event, Lost)  # 14
    return Decision(Outcome.FAILED, {-1: event.reason}, given_up=True)


def _count(no: Reason | None) -> Generator[Action, Event, Event]:
    while True:
        event = yield Meet()
        if isinstance(event, Done):
            event = yield Vote(no)
            if isinstance(event, Broke):
                yield Leave()
        if not isinstance(event, Broke):
            return event


# ---- the other ranks -------------------------------------------------------------------------


def follow() -> Steps:
    """Every other rank's part of a round."""
    voted = False  # in favour: without this vote the coordinator cannot publish
    try:
        event = yield AwaitFiles()
        if isinstance(event, Written):
            no = event.reason
            while not isinstance(event, DecisionFound | Lost):
                event = yield Meet()
                if isinstance(event, Done):
                    voted = no is None
                    event = yield Vote(no)  # 6
                    if isinstance(event, Counted):
                        event = yield Hear()  # 11
                    if isinstance(event, DecisionReceived) and event.decision is not None:
                        return event.decision
                    yield Leave()  # 17
        else:
            yield Leave()
    except Exception as error:  # a defect
        event = Lost(Reason.of(error))
        yield Leave()
    why = Reason.of(RankLostError("rank 0 has gone on, and does not say what it decided"))
    if isinstance(event, Lost):
        # the coordinator may have decided before it was lost
        why, event = event.reason, (yield Look())
    match event:
        case DecisionFound(Decision() as decision):
            return decision
    yield GiveUp(why)
    if not voted:  # 15
        return Decision(Outcome.FAILED, {-1: why})
    event = yield Settle(why)  # 16
    assert isinstance(event, Decided)
    return event.decision
