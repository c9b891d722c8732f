"""What a rank decides, or can know, when others are lost."""

from __future__ import annotations

import logging

from dcp_datastates.commit.decision import Decision, Outcome, Reason
from dcp_datastates.commit.heart import Loss
from dcp_datastates.commit.publish import make_durable, published_attempt
from dcp_datastates.commit.round import Round
from dcp_datastates.errors import CheckpointCorruptError, CommitOutcomeUnknown, RankLostError

__all__ = ["given_up", "look", "said"]

logger = logging.getLogger(__name__)


def said(losses: list[Loss]) -> str:
    """Who is lost, and why; the first few of them."""
    more = f"; and {len(losses) - 3} more ranks" if len(losses) > 3 else ""
    return "; ".join(str(loss) for loss in losses[:3]) + more


def given_up(losses: list[Loss]) -> Decision:
    """The round has failed because of them."""
    reason = Reason.of(RankLostError(said(losses)))
    return Decision(Outcome.FAILED, {-1: reason}, given_up=True)


def look(round_: Round, losses: list[Loss], *, voted: bool) -> Decision:
    """Without the coordinator, which may have published before it was lost: see, and never guess.

    Args:
        round_: the round.
        losses: the ranks that are lost, the coordinator (rank 0) among them unless only the store is.
        voted: whether this rank has; without its vote nothing was published.
    """
    lost = {-1: Reason.of(RankLostError(said(losses)))}
    if round_.directory is None or not voted:
        return Decision(Outcome.FAILED, lost)
    try:
        if published_attempt(round_.directory) == round_.attempt:
            make_durable(round_.directory)
            return Decision(Outcome.COMMITTED)
    except (FileNotFoundError, CheckpointCorruptError):
        seen = True  # none, or another's
    except OSError as failed:  # nothing is known: this rank's files must stay
        seen = False
        logger.warning("could not see what is committed at %s: %s", round_.directory, failed)
    else:
        seen = True
    if seen and any(loss.certain for loss in losses if loss.rank == 0):
        return Decision(Outcome.FAILED, lost)
    error = CommitOutcomeUnknown(
        f"{said(losses)}; it may have been about to publish. Attempt "
        f"{round_.attempt and round_.attempt.name} is committed if the path's .metadata names it: "
        f"`python -m dcp_datastates inspect` tells, and dcp_datastates.latest() finds the newest"
    )
    return Decision(Outcome.UNKNOWN, {-1: Reason.of(error)})
