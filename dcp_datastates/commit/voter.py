"""Carries out the actions of ``protocol.py`` on one rank, with gloo, the store and storage.

Runs in the commit thread. Every wait asks the failure detector several times a second, which may end the wait.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from dcp_datastates.commit import protocol
from dcp_datastates.commit.place import Place, Round
from dcp_datastates.commit.vote import (
    Count,
    Decision,
    DecisionLog,
    Outcome,
    RankVote,
    Reason,
    Votes,
)
from dcp_datastates.errors import (
    CommitOutcomeUnknown,
    SaveFailedError,
    SaveStalledError,
    StorageError,
)
from dcp_datastates.format import save_trace
from dcp_datastates.process.ending import Phase, has_reached
from dcp_datastates.process.waiting import Stall
from dcp_datastates.ranks.failure_detector import SILENCE_SECONDS, Beat, FailureDetector, Loss
from dcp_datastates.ranks.gloo_group import GroupBroken
from dcp_datastates.ranks.gloo_tree import GlooTree
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.storage.bounded import HungError, bounded, check_not_hung
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.self_test import what_it_says

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.05

_TOLD: Final = struct.Struct("<q")
"""The round's number, which precedes the decision in a broadcast."""

_LONGEST_WHY: Final = 200
"""Of the text in a beat, in characters."""

T = TypeVar("T")

_PATIENCE_SECONDS: Final = 15.0
"""Added to the time that failure detection takes, before a rank that cannot connect gives a round up."""

_AGAIN_SECONDS: Final = 5.0
"""How long storage may take to settle a save after it has failed to publish it in time."""


class Voter:
    """Runs this rank's part of each round.

    Args:
        detector: finds the lost ranks; None for a rank alone.
        decisions: the decision log; None for a rank alone.
    """

    def __init__(
        self,
        rank_set: RankSet,
        detector: FailureDetector | None,
        decisions: DecisionLog | None,
    ) -> None:
        self._rank_set = rank_set
        self._is_coordinator = rank_set.rank == 0
        self._detector = detector
        self._decisions = decisions
        self._is_behind = False  # the coordinator had ended the latest round before this rank
        newest = (lambda: 0) if detector is None else detector.newest_generation
        self._tree = GlooTree(rank_set, "vote", newest)
        self._apart: float | None = None  # since when this rank could not connect
        # State of the current round:
        self._why = ""  # this rank ends it without the coordinator
        self._found: protocol.DecisionFound | None = None  # see _find
        self._votes: Votes | None = None  # coordinator: all ranks'
        self._counted_at = 0.0  # in seconds since the epoch
        # The failure detector's thread reads these:
        self.round: Round | None = None
        """The current round."""
        self._beat = Beat()  # replaced, never changed

    @property
    def beat(self) -> Beat:
        """What the vote tells of this rank. Its progress changes, too, while the rank waits for another."""
        round_, beat = self.round, self._beat
        progress = beat.progress + (0 if round_ is None else round_.part.progress)
        return replace(beat, progress=progress, generation=self._tree.generation)

    def agree(self, round_: Round) -> Decision:
        """Run the round to its decision."""
        self.round = round_
        self._apart = self._found = None
        self._why = ""
        if self._detector is not None:
            self._detector.expect_votes(True)
        steps = protocol.lead() if self._is_coordinator else protocol.follow()
        try:
            action = next(steps)
            while True:
                try:
                    event = self._do(action, round_)
                except Exception as error:
                    trace = None if isinstance(error, HungError) else error
                    logger.warning("%s failed in %s: %s", action, round_, error, exc_info=trace)
                    action = steps.throw(error)
                else:
                    action = steps.send(event)
        except StopIteration as ended:
            decision: Decision = ended.value
            return decision
        finally:
            number = round_.number
            self._votes = None
            self._show(doing="idle", voted=number, ended=number, gave_up=self._why)
            self.round = None
            if self._detector is not None:
                self._detector.expect_votes(False)

    def close(self) -> None:
        self._tree.close()

    def _do(self, action: protocol.Action, round_: Round) -> protocol.Event:
        match action:
            case protocol.AwaitFiles():
                return self._await_files(round_)
            case protocol.Meet():
                return self._meet(round_)
            case protocol.Vote(no):
                return self._vote(round_, no)
            case protocol.Publish():
                return self._publish(round_)
            case protocol.Tell(decision):
                return self._tell(round_, decision)
            case protocol.Hear():
                return self._hear(round_)
            case protocol.Settle(why):
                return protocol.Decided(self._settle(round_, why))
            case protocol.Look():
                self._found = None  # what was not there before may be there now
                return self._find(round_) or protocol.DecisionFound(None)
            case protocol.Note(decision):  # 11
                try:
                    if self._decisions is not None:
                        self._decisions.note(round_.number, decision)
                except RuntimeError as error:  # the decision log keeps it, and writes it later
                    logger.warning(
                        "%s: the decision is not in the ranks' store yet: %s", round_, error
                    )
            case protocol.GiveUp(why):
                self._why = why.message[:_LONGEST_WHY]
            case protocol.Leave():
                self._tree.leave()
        return protocol.Done()

    # ---- actions ---------------------------------------------------------------------------------

    def _await_files(self, round_: Round) -> protocol.Event:
        self._say("flushing", round_)
        stall = Stall(logger, str(round_), round_.timeout)
        try:
            while not round_.part.wait(_POLL_SECONDS):
                if (event := self._notice(round_)) is not None:
                    return event
                alone = self._rank_set.world == 1  # else the failure detector names the rank
                if alone or has_reached(Phase.GIVE_UP):
                    stall.look(round_.part.progress, "its files to be written", storage=True)
            directory, error = round_.directory, round_.part.error
            if error is None and directory is not None:
                check_not_hung(directory)
                bounded("looking at the files", directory, round_.timeout, round_.part.check)
        except SaveStalledError as stalled:
            error = round_.failure = SaveStalledError(f"{stalled}{what_it_says(round_.directory)}")
        except StorageError as failure:
            error = round_.failure = failure
        return protocol.Written(None if error is None else Reason.of(error))

    def _meet(self, round_: Round) -> protocol.Event:
        if self._rank_set.world == 1:
            return protocol.Done()
        self._say("voting", round_)
        assert self._decisions is not None
        try:
            if self._is_coordinator:
                self._decisions.flush()  # else a rank that is behind would vote for another save
            joined = self._tree.join(lambda: self._interrupt(round_, joining=True))
            if self._is_coordinator or not (joined or self._is_behind):
                return protocol.Done()
            found = self._decisions.find(round_.number)
            self._is_behind = found is not None  # perhaps by several rounds
            return protocol.Done() if found is None else protocol.DecisionFound(found)
        except _Interrupted as interrupted:
            self._tree.leave()
            return interrupted.event
        except (GroupBroken, RuntimeError) as broken:
            return self._after_break(round_, broken)

    def _after_break(self, round_: Round, broken: Exception) -> protocol.Event:
        """Find out whether a lost rank caused the break. If none did, give up after some time."""
        logger.info("%s: a connection broke: %s", round_, broken)
        now = time.monotonic()
        if self._apart is None:
            self._apart = now
        time.sleep(_POLL_SECONDS)
        self._show()
        event = self._notice(round_, joining=True)
        if event is None and now - self._apart > max(
            round_.timeout, SILENCE_SECONDS + _PATIENCE_SECONDS
        ):
            why = f"has not met the others for {now - self._apart:.0f} s ({broken})"
            event = protocol.Lost(Reason.of(Loss.error_of([Loss(self._rank_set.rank, why)])))
        return event or protocol.Broke()

    def _vote(self, round_: Round, no: Reason | None) -> protocol.Event:
        vote = RankVote(
            no,
            round_.number,
            round_.attempt,
            round_.path,
            self._rank_set.world,
            round_.report() if no is None else b"",
            round_.trace(),
        ).encode()
        hit("vote.before")
        self._show(voted=round_.number)
        found = self._wait(round_, lambda tree, check: self._count(tree, vote, check))
        if not isinstance(found, Count):
            return found
        self._apart, self._counted_at = None, time.time()
        if found is Count.UNANIMOUS:
            round_.timeline.begin("publishing")
        hit("vote.after")
        if found is Count.UNANIMOUS:
            return protocol.Counted(True)
        if found is Count.DIFFERENT:
            different = SaveFailedError(
                f"the ranks vote for different saves: rank 0 for attempt {round_.attempt and round_.attempt.name} at "
                f"{str(round_.path)!r}"
            )
            return protocol.Counted(False, {-1: Reason.of(different)})
        reasons = ({}, 0) if self._votes is None else self._votes.reasons()
        return protocol.Counted(False, *reasons)

    def _count(self, tree: GlooTree, vote: bytes, check: Callable[[], None]) -> Count:
        """Send this rank's vote up the tree; the coordinator's count comes down it."""
        votes = tree.gather(vote, check)
        if votes is None:
            return Count(tree.broadcast(None, check))
        self._votes = Votes(votes)
        tree.broadcast(self._votes.count.value, check)
        return self._votes.count

    def _publish(self, round_: Round) -> protocol.Event:
        """Coordinator: publish. All ranks' files are durable."""
        self._say("publishing", round_)
        directory, claim = round_.directory, round_.claim
        assert directory is not None
        assert claim is not None
        assert round_.compose is not None
        assert self._votes is not None
        try:
            trace = save_trace.join(self._votes.traces, self._counted_at)
            data = round_.compose(self._votes.reports, claim, trace)
            place = Place(directory)
            publish = partial(place.publish, round_, data)
            bounded("publishing", directory, round_.timeout, publish)  # 8 to 10
        except Exception as error:
            round_.failure = error
            if isinstance(error, HungError):
                raise  # the protocol settles it
            unknown = isinstance(error, CommitOutcomeUnknown)
            outcome = Outcome.UNKNOWN if unknown else Outcome.FAILED
            return protocol.Decided(Decision(outcome, {0: Reason.of(error)}))
        return protocol.Decided(Decision(Outcome.COMMITTED))

    def _tell(self, round_: Round, decision: Decision) -> protocol.Event:  # 11
        round_.timeline.begin("ending")
        hit("outcome.before")
        self._say("telling the outcome", round_)
        told = _TOLD.pack(round_.number) + decision.encode().encode()
        event = self._wait(round_, lambda tree, check: tree.broadcast(told, check), telling=True)
        hit("outcome.after")
        return protocol.Done() if isinstance(event, bytes) else event

    def _hear(self, round_: Round) -> protocol.Event:
        hit("outcome.before")
        self._say("waiting for the outcome", round_)
        found = self._wait(round_, lambda tree, check: tree.broadcast(None, check))
        if not isinstance(found, bytes):
            return found
        hit("outcome.after")
        (number,) = _TOLD.unpack_from(found)
        mine = number == round_.number
        return protocol.DecisionReceived(Decision.decode(found[_TOLD.size :]) if mine else None)

    def _settle(self, round_: Round, why: Reason) -> Decision:  # 16
        directory, attempt = round_.directory, round_.attempt
        assert directory is not None
        assert attempt is not None
        again = isinstance(round_.failure, HungError)
        patience = min(round_.timeout, _AGAIN_SECONDS) if again else round_.timeout
        try:
            place = Place(directory)
            settle = partial(place.settle, attempt)
            committed = bounded("settling the save", directory, patience, settle)
            unclear = "another job has committed there since, or the attempt was deleted"
        except Exception as failed:  # then this rank's files must stay
            committed, unclear = None, f"storage does not tell ({failed})"
        if committed is not None:
            return Decision(Outcome.COMMITTED) if committed else Decision(Outcome.FAILED, {-1: why})
        error = CommitOutcomeUnknown(
            f"{why.message}; and {unclear}. Attempt {attempt.name} is committed if it is what the path "
            f"holds: `python -m dcp_datastates inspect` tells, and dcp_datastates.latest() finds the newest"
        )
        return Decision(Outcome.UNKNOWN, {-1: Reason.of(error)})

    # ---- while waiting ---------------------------------------------------------------------------

    def _wait(
        self,
        round_: Round,
        operation: Callable[[GlooTree, Callable[[], None]], T],
        *,
        telling: bool = False,
    ) -> T | protocol.Event:
        """The result of a collective ``operation``, or the event that ended the wait."""
        try:
            return operation(self._tree, lambda: self._interrupt(round_, telling=telling))
        except _Interrupted as interrupted:
            return interrupted.event
        except GroupBroken as broken:
            return self._after_break(round_, broken)

    def _interrupt(self, round_: Round, *, joining: bool = False, telling: bool = False) -> None:
        self._show()  # this rank has done its part: it waits for others
        if (event := self._notice(round_, joining=joining, telling=telling)) is not None:
            raise _Interrupted(event)

    def _notice(
        self, round_: Round, *, joining: bool = False, telling: bool = False
    ) -> protocol.Event | None:
        """The event by which the failure detector ends this wait, if any.

        Args:
            joining: this rank is not connected.
            telling: the coordinator has decided.
        """
        detector = self._detector
        if detector is None:
            return None
        losses = detector.losses() or detector.stalled(round_.timeout, round_.number)
        mine = losses if self._is_coordinator else [loss for loss in losses if loss.rank == 0]
        ended = detector.ended(round_.number)
        return protocol.interruption(
            ended if self._is_coordinator else {},
            self._find(round_) if ended and not self._is_coordinator else None,
            protocol.Lost(Reason.of(Loss.error_of(mine))) if mine else None,
            waits_in_vain=joining or bool(losses),
            telling=telling,
        )

    def _find(self, round_: Round) -> protocol.DecisionFound | None:
        """The decision about a round that the coordinator has ended; None if the store does not answer. Asks once."""
        assert self._detector is not None
        assert self._decisions is not None
        if self._found is None and not self._detector.misses_store:
            with contextlib.suppress(RuntimeError):
                self._found = protocol.DecisionFound(self._decisions.find(round_.number))
        return self._found

    def _say(self, doing: str, round_: Round) -> None:
        self._show(doing=f"{doing} ({round_})")

    def _show(self, **news: Any) -> None:
        """Put the ``news`` into the beat, which shows progress: the round does not wait for this rank."""
        self._beat = replace(self._beat, progress=self._beat.progress + 1, **news)


class _Interrupted(Exception):
    def __init__(self, event: protocol.Event) -> None:
        super().__init__(event)
        self.event = event
