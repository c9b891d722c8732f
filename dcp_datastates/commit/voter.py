"""Runs ``protocol.py`` on one rank, with gloo, the store and storage.

Runs in the commit thread. Every wait asks the failure detector several times a second, which may end the wait.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Final, TypeVar

from dcp_datastates.commit import protocol
from dcp_datastates.commit.joint_steps import Answer, together
from dcp_datastates.commit.place import Place, Round
from dcp_datastates.commit.protocol import DecisionFound, Interruption, Lost
from dcp_datastates.commit.vote import (
    Decision,
    DecisionLog,
    Outcome,
    Reason,
    decode_vote,
    encode_vote,
)
from dcp_datastates.errors import (
    CommitOutcomeUnknown,
    SaveFailedError,
    SaveStalledError,
    StorageError,
)
from dcp_datastates.format import save_trace
from dcp_datastates.process.ending import Phase, has_reached
from dcp_datastates.process.waiting import Wait
from dcp_datastates.ranks.failure_detector import SILENCE_SECONDS, FailureDetector, Loss
from dcp_datastates.ranks.gloo_group import GroupBroken
from dcp_datastates.ranks.gloo_tree import GlooTree
from dcp_datastates.ranks.meetings import Met
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

_PATIENCE_SECONDS: Final = 15.0
"""Added to the time that failure detection takes, before a rank that cannot connect gives a round up."""

_AGAIN_SECONDS: Final = 5.0
"""How long storage may take to settle a save after it has failed to publish it in time."""

T = TypeVar("T")


class Voter:
    """Runs this rank's part of each round, one round at a time.

    Args:
        detector: finds the lost ranks; None for a rank alone.
        decisions: the decision log; None for a rank alone.
    """

    def __init__(
        self, rank_set: RankSet, detector: FailureDetector | None, decisions: DecisionLog | None
    ) -> None:
        self.rank_set: Final = rank_set
        self.detector: Final = detector
        self.decisions: Final = decisions
        newest = (lambda: 0) if detector is None else detector.newest_generation
        self.tree: Final = GlooTree(rank_set, "vote", newest)
        self.is_behind = False
        """The coordinator had ended the latest round before this rank."""
        # For this rank's beat, which another thread makes: see Beat.
        self.round: Round | None = None
        """The current round."""
        self.progress = 0
        """Grows, too, while this rank waits for others: the round does not wait for this one."""
        self.doing = "idle"
        self.voted = self.ended = -1
        self.gave_up = ""

    def agree(self, round_: Round) -> Decision:
        """Run the round to its decision."""
        ballot = Ballot(self, round_)
        self.round = round_
        if self.detector is not None:
            self.detector.expect_votes(True)
        try:
            steps = protocol.lead if self.rank_set.rank == 0 else protocol.follow
            return _result(steps(ballot))
        finally:
            self.gave_up, self.doing = ballot.why, "idle"
            self.voted = self.ended = round_.number
            self.round = None
            if self.detector is not None:
                self.detector.expect_votes(False)

    def close(self) -> None:
        self.tree.close()


def _result(steps: Coroutine[object, None, T]) -> T:
    """What ``steps`` return, which never suspend."""
    try:
        steps.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    raise AssertionError("an action of the protocol has suspended")


class Ballot(protocol.Actions):
    """What this rank does in one round."""

    def __init__(self, voter: Voter, round_: Round) -> None:
        self._voter = voter
        self._round = round_
        self._tree = voter.tree
        self._decisions = voter.decisions
        self._world = voter.rank_set.world
        self._is_coordinator = voter.rank_set.rank == 0
        self._apart: float | None = None  # since when this rank could not connect
        self._asked = False  # the store has said whether it has the decision
        self._found: Decision | None = None
        # Coordinator: all ranks'.
        self._reports: Sequence[bytes] = ()
        self._traces: Sequence[bytes] = ()
        self._counted_at = 0.0  # in seconds since the epoch
        self.why = ""
        """Why this rank ends the round without the coordinator; empty if it does not."""

    async def await_files(self) -> Reason | None:
        round_ = self._round
        self._say("flushing")
        wait = Wait(logger, str(round_), round_.timeout)
        try:
            while not round_.part.wait(_POLL_SECONDS):
                self._look()
                # Of several ranks, the failure detector names the one that makes no progress.
                if self._world == 1 or has_reached(Phase.GIVE_UP):
                    wait.look("its files to be written", round_.part.progress, storage=True)
            directory, error = round_.directory, round_.part.error
            if error is None and directory is not None:
                check_not_hung(directory)
                bounded("looking at the files", directory, round_.timeout, round_.part.check)
        except SaveStalledError as stalled:
            error = round_.failure = SaveStalledError(f"{stalled}{what_it_says(round_.directory)}")
        except StorageError as failure:
            error = round_.failure = failure
        return None if error is None else Reason.of(error)

    async def meet(self) -> None:
        if self._decisions is None:
            return
        self._say("voting")
        voter = self._voter
        try:
            if self._is_coordinator:
                self._decisions.flush()  # else a rank that is behind would vote for another save
            joined = self._tree.join(partial(self._await_others, joining=True))
            if self._is_coordinator or not (joined or voter.is_behind):
                return
            found = self._decisions.find(self._round.number)
        except (GroupBroken, RuntimeError) as broken:
            raise self._after_break(broken) from None
        voter.is_behind = found is not None  # perhaps by several rounds
        if found is not None:
            raise DecisionFound(found)

    async def vote(self, no: Reason | None) -> Decision | None:
        round_ = self._round

        def mine() -> bytes | Reason:
            if no is not None:
                return no
            save = round_.number, round_.attempt, round_.path, self._world
            return encode_vote(*save, round_.report(), round_.trace())

        hit("vote.before")
        self._voter.voted = round_.number
        end = self._together(lambda check: together(partial(self._poll, check), mine, self._count))
        self._apart, self._counted_at = None, time.time()
        failed = end.failed
        if end.answer:
            failed = Decision.failed(-1, SaveFailedError(end.answer.decode()))
        if failed is None:
            round_.timeline.begin("publishing")
        hit("vote.after")
        return failed

    def _poll(self, check: Callable[[], None], message: bytes, answers: Answer) -> Met:
        """Send this rank's vote up the tree; what all votes come to comes down it."""
        messages = self._tree.gather(message, check)
        answer = None if messages is None else answers(messages)[0]
        return Met(self._tree.broadcast(answer, check))

    def _count(self, messages: Sequence[bytes]) -> Sequence[bytes]:
        """Coordinator: take the votes. The answer says how they differ, if they do; no rank alone is to blame."""
        digests, self._reports, self._traces = zip(*map(decode_vote, messages), strict=True)
        different = ""
        if len(set(digests)) > 1:
            round_ = self._round
            different = (
                f"the ranks vote for different saves: rank 0 for attempt {round_.attempt and round_.attempt.name} at "
                f"{str(round_.path)!r}"
            )
        return [different.encode(errors="backslashreplace")] * len(messages)

    async def publish(self) -> Decision:
        self._say("publishing")
        round_ = self._round
        directory, claim = round_.directory, round_.claim
        assert directory is not None
        assert claim is not None
        assert round_.compose is not None
        try:
            trace = save_trace.join(self._traces, self._counted_at)
            data = round_.compose(self._reports, claim, trace)
            publish = partial(Place(directory).publish, round_, data)
            bounded("publishing", directory, round_.timeout, publish)  # 8 to 10
        except Exception as error:
            round_.failure = error
            if isinstance(error, HungError):
                raise  # the protocol settles it
            unknown = isinstance(error, CommitOutcomeUnknown)
            outcome = Outcome.UNKNOWN if unknown else Outcome.FAILED
            return Decision(outcome, {0: Reason.of(error)})
        return Decision(Outcome.COMMITTED)

    async def tell(self, decision: Decision) -> None:  # 11
        self._round.timeline.begin("ending")
        hit("outcome.before")
        self._say("telling the outcome")
        told = _TOLD.pack(self._round.number) + decision.encode().encode()
        self._together(partial(self._tree.broadcast, told), telling=True)
        hit("outcome.after")

    async def hear(self) -> Decision | None:
        hit("outcome.before")
        self._say("waiting for the outcome")
        told = self._together(partial(self._tree.broadcast, None))
        hit("outcome.after")
        (number,) = _TOLD.unpack_from(told)
        return Decision.decode(told[_TOLD.size :]) if number == self._round.number else None

    async def note(self, decision: Decision) -> None:  # 11
        try:
            if self._decisions is not None:
                self._decisions.note(self._round.number, decision)
        except RuntimeError as error:  # the decision log keeps it, and writes it later
            logger.warning(
                "%s: the decision is not in the ranks' store yet: %s", self._round, error
            )

    async def look(self) -> Decision | None:
        self._asked, self._found = False, None  # what was not there before may be there now
        self._find()
        return self._found

    async def leave(self) -> None:
        self._tree.leave()

    async def give_up(self, why: Reason) -> None:
        self.why = why.message[:_LONGEST_WHY]

    async def settle(self, why: Reason) -> Decision:  # 16
        round_ = self._round
        directory, attempt = round_.directory, round_.attempt
        assert directory is not None
        assert attempt is not None
        again = isinstance(round_.failure, HungError)
        patience = min(round_.timeout, _AGAIN_SECONDS) if again else round_.timeout
        try:
            settle = partial(Place(directory).settle, attempt)
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

    def failed(self, error: Exception) -> None:
        if not isinstance(error, Interruption):
            trace = None if isinstance(error, HungError) else error
            logger.warning("%s failed: %s", self._round, error, exc_info=trace)

    # ---- while waiting ---------------------------------------------------------------------------

    def _together(
        self, operation: Callable[[Callable[[], None]], T], *, telling: bool = False
    ) -> T:
        """The result of a collective ``operation``, whose check raises what ends the wait."""
        try:
            return operation(partial(self._await_others, telling=telling))
        except GroupBroken as broken:
            raise self._after_break(broken) from None

    def _after_break(self, broken: Exception) -> Interruption:
        """Find out whether a lost rank caused the break. If none did, give up after some time."""
        round_, now = self._round, time.monotonic()
        logger.info("%s: a connection broke: %s", round_, broken)
        if self._apart is None:
            self._apart = now
        time.sleep(_POLL_SECONDS)
        self._voter.progress += 1
        event = self._interruption(joining=True)
        apart = now - self._apart
        if event is None and apart > max(round_.timeout, SILENCE_SECONDS + _PATIENCE_SECONDS):
            why = f"has not met the others for {apart:.0f} s ({broken})"
            event = _lost([Loss(self._voter.rank_set.rank, why)])
        return event or protocol.Broke()

    def _await_others(self, *, joining: bool = False, telling: bool = False) -> None:
        self._voter.progress += 1  # this rank has done its part
        self._look(joining=joining, telling=telling)

    def _look(self, *, joining: bool = False, telling: bool = False) -> None:
        """Raise the :class:`Interruption` by which the failure detector ends this wait, if any."""
        event = self._interruption(joining=joining, telling=telling)
        try:
            if event is not None:
                raise event
        finally:
            del event  # its traceback retains this frame

    def _interruption(self, *, joining: bool, telling: bool = False) -> Interruption | None:
        """As :meth:`_look`.

        Args:
            joining: this rank is not connected.
            telling: the coordinator has decided.
        """
        detector, round_ = self._voter.detector, self._round
        if detector is None:
            return None
        losses = detector.losses() or detector.stalled(round_.timeout, round_.number)
        mine = losses if self._is_coordinator else [loss for loss in losses if loss.rank == 0]
        ended = detector.ended(round_.number)
        return protocol.interruption(
            ended if self._is_coordinator else {},
            self._find() if ended and not self._is_coordinator else None,
            _lost(mine) if mine else None,
            waits_in_vain=joining or bool(losses),
            telling=telling,
        )

    def _find(self) -> DecisionFound | None:
        """The decision about a round that the coordinator has ended; None if the store does not answer. Asks once."""
        assert self._voter.detector is not None
        assert self._decisions is not None
        if not (self._asked or self._voter.detector.misses_store):
            with contextlib.suppress(RuntimeError):
                self._found = self._decisions.find(self._round.number)
                self._asked = True
        return DecisionFound(self._found) if self._asked else None

    def _say(self, doing: str) -> None:
        self._voter.doing = f"{doing} ({self._round})"
        self._voter.progress += 1


def _lost(losses: list[Loss]) -> Lost:
    return Lost(Reason.of(Loss.error_of(losses)))
