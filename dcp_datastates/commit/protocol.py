"""The commit protocol: what a rank does in a round, given what it has seen.

Pure: no sockets, clocks, threads or files. The coordinator (rank 0) runs :func:`lead`, each other rank :func:`follow`.
Both are coroutines that await a rank's :class:`Actions`. Those of ``commit/voter.py`` use gloo, the store, heartbeats
and storage, and never suspend; those of ``tests/support/simulated`` suspend at each step, in thousands of schedules.

The numbers in comments are the steps of docs/design/commit.md. The proof rests on two rules:

- only the coordinator decides, and it notes the decision in the store before it goes on to the next save;
- a rank that cannot receive the decision settles the outcome at the path: it withdraws the attempt, then reads what is
  committed there.

Two more rules keep one save's failure from failing the next: a rank that has reconnected looks for a decision in the
store first, and it accepts a decision only for the round that it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from dcp_datastates.commit.vote import Decision, Outcome, Reason
from dcp_datastates.errors import RankLostError


class Interruption(Exception):
    """What ends a rank's wait."""


class Broke(Interruption):
    """A connection broke; this does not say which rank is at fault."""


class DecisionFound(Interruption):
    """The coordinator has ended this round; ``decision`` is None if the store does not have it (any more)."""

    def __init__(self, decision: Decision | None) -> None:
        super().__init__(decision)
        self.decision: Final = decision


class Lost(Interruption):
    """Ranks are lost. The coordinator gets this for any rank, and for one that has ended the round without its
    decision; other ranks only for the coordinator or the store.
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Final = reason


class Actions(Protocol):
    """What a rank can do in a round.

    The first six may raise an :class:`Interruption`, and any other error because of a defect; the others never raise.
    """

    async def await_files(self) -> Reason | None:
        """Wait until this rank's files are durable, or have failed: then return why."""

    async def meet(self) -> None:
        """Connect with all ranks if this rank is not connected. A rank that has reconnected first looks whether the
        round was decided without it: :class:`DecisionFound`.
        """

    async def vote(self, no: Reason | None) -> Decision | None:
        """Vote, and count all ranks' votes. None if all ranks' files are durable, and all voted for this save. If not,
        the decision; only the coordinator's has the reasons. ``no``: why this rank's files are not durable.
        """

    async def publish(self) -> Decision:
        """Coordinator: publish the attempt. Nothing interrupts a publication that has begun."""

    async def tell(self, decision: Decision) -> None:
        """Coordinator: broadcast the decision, whether or not all ranks receive it."""

    async def hear(self) -> Decision | None:
        """Wait for the decision that :meth:`tell` broadcasts; None if it is about another round."""

    async def note(self, decision: Decision) -> None:
        """Coordinator: write the decision to the store, now or before this rank reconnects."""

    async def look(self) -> Decision | None:
        """Read the coordinator's decision from the store."""

    async def leave(self) -> None:
        """Close the connections, so that all ranks must reconnect. Idempotent."""

    async def give_up(self, why: Reason) -> None:
        """Say in this rank's beat why it ends the round without the coordinator, which may be alive."""

    async def settle(self, why: Reason) -> Decision:
        """Withdraw the attempt and read what is committed at the path."""

    def failed(self, error: Exception) -> None:
        """Log an error that the protocol survives."""


def interruption(
    ended: Mapping[int, str],
    found: DecisionFound | None,
    lost: Lost | None,
    *,
    waits_in_vain: bool = False,
    telling: bool = False,
) -> Interruption | None:
    """What ends a rank's wait, given the heartbeats it has read; None if the rank keeps waiting.

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


async def lead(rank: Actions) -> Decision:
    """The coordinator's part of a round."""
    try:
        decision = await _decide(rank)
    except Lost as lost:  # 14
        decision = Decision(Outcome.FAILED, {-1: lost.reason}, given_up=True)
    except Exception as error:  # a defect, before anything was published
        rank.failed(error)
        decision = Decision(Outcome.FAILED, {0: Reason.of(error)}, given_up=True)
    if decision.given_up:
        await rank.leave()
    await rank.note(decision)  # 11: before this rank goes on to the next save
    if not decision.given_up:
        try:
            await rank.tell(decision)
        except Exception as error:  # the decision stands
            rank.failed(error)
            await rank.leave()  # the others find the decision in the store
    return decision


async def _decide(rank: Actions) -> Decision:
    no = await rank.await_files()
    while True:
        try:
            await rank.meet()
            refused = await rank.vote(no)  # 6
            break
        except Broke:
            await rank.leave()
    if refused is not None:  # 7
        return refused
    try:
        return await rank.publish()  # 8 to 10
    except Exception as error:
        rank.failed(error)
        return await rank.settle(Reason.of(error))


async def follow(rank: Actions) -> Decision:
    """Every other rank's part of a round."""
    voted = False  # in favour: without this vote the coordinator cannot publish
    decision: Decision | None = None
    why = Reason.of(RankLostError("rank 0 has gone on, and does not say what it decided"))
    try:
        no = await rank.await_files()
        while True:
            try:
                await rank.meet()
                voted = no is None
                await rank.vote(no)  # 6
                if (decision := await rank.hear()) is not None:  # 11
                    return decision
            except Broke:
                pass
            await rank.leave()  # 17
    except DecisionFound as found:
        decision = found.decision
    except Lost as lost:
        why = lost.reason
    except Exception as error:  # a defect
        rank.failed(error)
        why = Reason.of(error)
    await rank.leave()
    # A lost coordinator may have decided before.
    if decision is None:
        decision = await rank.look()
    if decision is not None:
        return decision
    await rank.give_up(why)
    if not voted:  # 15
        return Decision(Outcome.FAILED, {-1: why})
    return await rank.settle(why)  # 16
