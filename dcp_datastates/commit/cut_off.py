"""What a rank decides, or can know, when others are lost."""

from __future__ import annotations

from dcp_datastates.commit.decision import Decision, Outcome, Reason
from dcp_datastates.commit.heart import Loss
from dcp_datastates.commit.publish import settle
from dcp_datastates.commit.round import Round
from dcp_datastates.errors import CheckpointCorruptError, CommitOutcomeUnknown, RankLostError

__all__ = ["given_up", "look", "said"]


def said(losses: list[Loss]) -> str:
    """Who is lost, and why; the first few of them."""
    more = f"; and {len(losses) - 3} more ranks" if len(losses) > 3 else ""
    return "; ".join(str(loss) for loss in losses[:3]) + more


def given_up(losses: list[Loss]) -> Decision:
    """The round has failed because of them."""
    reason = Reason.of(RankLostError(said(losses)))
    return Decision(Outcome.FAILED, {-1: reason}, given_up=True)


def look(round_: Round, losses: list[Loss], *, voted: bool) -> Decision:
    """Without the coordinator, which may have published, or be about to: withdraw the attempt and see.

    Args:
        round_: the round.
        losses: the ranks that are lost, the coordinator (rank 0) among them unless only the store is.
        voted: whether this rank has; without its vote nothing was published.
    """
    lost = {-1: Reason.of(RankLostError(said(losses)))}
    if round_.directory is None or round_.attempt is None or not voted:
        return Decision(Outcome.FAILED, lost)
    try:
        committed = settle(round_.directory, round_.attempt)
        why = "another job has committed there since"
    except (OSError, CheckpointCorruptError) as failed:  # this rank's files must stay
        committed, why = None, f"storage does not tell ({failed})"
    if committed is not None:
        return Decision(Outcome.COMMITTED) if committed else Decision(Outcome.FAILED, lost)
    error = CommitOutcomeUnknown(
        f"{said(losses)}; and {why}. Attempt {round_.attempt.name} is committed if the path's .metadata names it: "
        f"`python -m dcp_datastates inspect` tells, and dcp_datastates.latest() finds the newest"
    )
    return Decision(Outcome.UNKNOWN, {-1: Reason.of(error)})
