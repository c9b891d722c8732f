"""Committed or absent: the ranks agree on the outcome of every save, in the order of the saves.

A :class:`CommitGroup` has gloo connections of its own, never the training job's, one thread that runs the rounds, and a
heart (``heart.py``) that tells which ranks are lost. What a rank does in a round, ``protocol.py`` says; this module
carries it out. Every wait looks at the heart several times a second. Alone, a rank runs the same code.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final

from dcp_datastates.commit.ballot import Ballot, is_unanimous
from dcp_datastates.commit.behind import Policy
from dcp_datastates.commit.decision import Decision, Outcome, Reason
from dcp_datastates.commit.decision_log import DecisionLog
from dcp_datastates.commit.heart import SILENCE_SECONDS, Beat, Heart, Loss
from dcp_datastates.commit.lane import Lane, LaneBroken
from dcp_datastates.commit.peers import Peers
from dcp_datastates.commit.progress import Progress
from dcp_datastates.commit.protocol import (
    Action,
    AwaitFiles,
    Broke,
    Collect,
    Collected,
    Counted,
    Decided,
    Done,
    Event,
    Explain,
    Hear,
    Leave,
    Look,
    Lost,
    Meet,
    Note,
    Publish,
    Refused,
    Said,
    Settle,
    Tell,
    Told,
    Vote,
    Written,
    follow,
    lead,
)
from dcp_datastates.commit.publish import (
    find_older,
    publish,
    settle,
    tidy_after_commit,
    tidy_after_failure,
)
from dcp_datastates.commit.round import Round
from dcp_datastates.commit.worker import Worker
from dcp_datastates.dcp.frames import release_frames
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CommitOutcomeUnknown,
    RankLostError,
    SaveFailedError,
)
from dcp_datastates.failpoints import hit
from dcp_datastates.forks import ProcessLock
from dcp_datastates.storage.claims import Neighbours

__all__ = ["CommitGroup"]

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.05

_OUTCOMES: Final = list(Outcome)
"""As an outcome travels by gloo: its place."""

_PATIENCE_SECONDS: Final = 15.0
"""A rank that cannot meet the others gives a round up no sooner than hearts find who is lost, and this."""

_CLOSE_SECONDS: Final = 15.0
"""How long the end of a group waits for its rounds."""

_CANCEL_SECONDS: Final = 10.0
"""How long a failed save's own writes may take to end before its outcome is told all the same."""


class CommitGroup:
    """The ranks that commit together. Made once per set of ranks, by
    :func:`~dcp_datastates.commit.groups.commit_group`.

    Its thread, ``dcp_datastates-commit``, starts with the first round and ends with :meth:`close`, which
    runs at interpreter exit after what was submitted is decided.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers: Final = peers
        self.neighbours: Final = Neighbours()  # of the coordinator's planning thread
        self._lock = ProcessLock()  # guards _drawn, _policy, missed, calls
        self.missed = 0
        """Calls of ``dcp.async_save`` that failed here before they came to a writer, as far as was seen."""
        self.calls = 0
        """Saves that this package's ``async_save`` was called for here."""
        self._planning = ""
        # Not from 0: a store may outlive a default group, and with it the outcomes of former rounds.
        self.first: Final = time.time_ns()  # the coordinator's counts
        self._drawn = self.first
        self._policy: Policy | None = None
        self._worker = Worker("dcp_datastates-commit")
        # The rest is the commit thread's own; the heart's reads what _status() needs.
        self._expected: int | None = None  # the next round; None before the first
        self._current: Round | None = None
        self._cast = -1  # the newest round that this rank has voted in
        self._doing = "idle"
        self._ticks = 0
        self._ended = -1  # the newest round whose outcome is known here
        self._apart: float | None = None  # since when this rank has not met the others
        self._reading: Progress | None = None
        self.heart: Heart | None = None
        self._log = DecisionLog()
        self._lane = Lane(peers, "vote")  # another one from the first round on
        if peers.world > 1:
            self._log = DecisionLog(peers.connect("commit"))
            self.heart = Heart(peers, peers.connect("commit"), self._status)

    # ---- any thread --------------------------------------------------------------------------

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank publishes."""
        return self.peers.rank == 0

    @property
    def name(self) -> str:
        """Which ranks these are; no other group of this process has it."""
        return f"{self.first}/{self.peers.digest}"

    def draw(self) -> int:
        """Coordinator: the number of the next round."""
        with self._lock:
            self._drawn += 1
            return self._drawn - 1

    def miss(self) -> None:
        """A call of ``dcp.async_save`` failed before it came to a writer."""
        with self._lock:
            self.missed += 1

    def count_call(self) -> None:
        """This package's ``async_save`` was called: the other ranks hear of it."""
        with self._lock:
            self.calls += 1

    def tell_planning(self, doing: str) -> None:
        """What the planning thread does, for the other ranks to hear; empty for nothing."""
        self._planning = doing

    @property
    def policy(self) -> Policy:
        """Decides about saves that come too fast; made when it is first asked for, on all ranks alike."""
        with self._lock:
            if self._policy is None:
                self._policy = Policy(self.peers, self.heart)
            return self._policy

    def reading(self, progress: Progress | None) -> None:
        """This rank has a ticket and reads: its ``progress`` counts until it has a part to show (None)."""
        self._reading = progress

    def submit(self, round_: Round) -> None:
        """Have the round run after all that were submitted before; ``round_.committed`` tells its outcome."""
        if not self._worker.post(lambda: self._run(round_)):
            round_.part.cancel()
            round_.resolve(
                SaveFailedError("the process was ending when this save was to be committed")
            )

    def explain(self, error: BaseException, resolve: Callable[[BaseException], None]) -> None:
        """Find out, in the commit thread, whether a lost rank is behind ``error``, and ``resolve`` with that."""
        if not self._worker.post(lambda: resolve(self._cause(error))):
            resolve(error)

    def close(self) -> None:
        """Finish what was submitted, end the threads. Idempotent.

        A round that storage holds up for long is left behind: its save was waited for before.
        """
        with self._lock:
            policy = self._policy
        self._worker.close(_CLOSE_SECONDS)
        if policy is not None:
            policy.close()
        if self.heart is not None:
            self.heart.close()
        self._lane.close()

    def _cause(self, error: BaseException) -> BaseException:
        if self.heart is None:
            return error
        losses = self.heart.await_loss()
        return RankLostError(Loss.reason_of(losses).message) if losses else error

    def _status(self) -> Beat:
        round_, reading = self._current, self._reading
        progress = self._ticks if round_ is None else self._ticks + round_.part.progress
        doing = self._doing if not self._planning or round_ is not None else self._planning
        if reading is not None:
            progress, doing = progress + reading.value, "reading"
        return Beat(self._cast, progress, doing, calls=self.calls, ended=self._ended)

    # ---- the commit thread -------------------------------------------------------------------

    def _run(self, round_: Round) -> None:
        try:
            if self._expected is None:
                self._expected = round_.first
                # A store may outlive a default group, and with it the keys of a former one's lane.
                self._lane = Lane(self.peers, f"vote/{round_.first}")
            while self.peers.world > 1 and self._expected < round_.number:
                self._finish(Round.missing(self._expected, round_.first, round_.timeout))
            self._finish(round_)
        except BaseException as error:  # a defect: still, no rank may wait for ever
            logger.exception("a commit round ended unexpectedly")
            self._lane.leave()
            round_.resolve(error)

    def _finish(self, round_: Round) -> None:
        self._current = round_
        self._apart = None
        if self.heart is not None:
            self.heart.follow(round_.number)
        try:
            decision = self._agree(round_)
        finally:
            self._say("idle", round_)
            self._expected = round_.number + 1
            self._cast = self._ended = max(self._cast, round_.number)
            self._current = None
            if self.heart is not None:
                self.heart.follow(None)
        if self.is_coordinator:
            with contextlib.suppress(RuntimeError):
                self._log.forget_before(round_.number)
        try:
            self._tidy(round_, decision)
        except Exception:  # what is left over goes with the next commit; the outcome stands
            logger.exception("could not tidy up after save %d", round_.number - round_.first)
        round_.resolve(self._error(round_, decision))

    def _error(self, round_: Round, decision: Decision) -> BaseException | None:
        where = "an unknown path" if round_.path is None else repr(str(round_.path))
        error = decision.error(where, self.peers.world)
        if error is None:
            return None
        cause = round_.part.error or round_.failure
        if cause is not None:
            release_frames(cause)
        if cause is not None and self.peers.world == 1:
            return cause
        error.__cause__ = cause
        return error

    def _tidy(self, round_: Round, decision: Decision) -> None:  # 13
        hit("cleanup.before")
        if decision.outcome is Outcome.COMMITTED:
            tidy_after_commit(round_, self.peers.rank, self.peers.world)
        elif decision.outcome is Outcome.FAILED:
            round_.part.cancel()
            # Storage may be stuck. Then the files stay, for the next commit to remove.
            if round_.part.wait(_CANCEL_SECONDS):
                tidy_after_failure(round_, self.peers.rank, self.peers.world)
        hit("cleanup.after")

    def _say(self, doing: str, round_: Round) -> None:
        self._doing = doing if doing == "idle" else f"{doing} (save {round_.number - round_.first})"
        self._tick()

    def _tick(self) -> None:
        """It is not this rank that stands still."""
        self._ticks += 1

    def _agree(self, round_: Round) -> Decision:
        """Carry out the protocol's actions, until it ends."""
        steps = lead() if self.is_coordinator else follow()
        action = next(steps)
        try:
            while True:
                try:
                    event = self._do(action, round_)
                except Exception as error:
                    logger.exception("%s failed in save %d", action, round_.number - round_.first)
                    action = steps.throw(error)
                else:
                    action = steps.send(event)
        except StopIteration as ended:
            decision: Decision = ended.value
            return decision

    def _do(self, action: Action, round_: Round) -> Event:
        match action:
            case AwaitFiles():
                return self._await_files(round_)
            case Meet():
                return self._meet(round_)
            case Vote(ok):
                return self._vote(round_, ok)
            case Publish():
                return self._publish(round_)
            case Tell(decision):
                return self._tell(round_, decision)
            case Hear():
                return self._hear(round_)
            case Settle(why):
                return Decided(self._settle(round_, why))
            case Leave():
                self._lane.leave()
                return Done()
        try:
            return self._ask_store(action, round_)
        except RuntimeError as error:
            logger.info("save %d: the store fails: %s", round_.number - round_.first, error)
            return Collected({}) if isinstance(action, Collect) else Said(None)

    def _ask_store(self, action: Action, round_: Round) -> Event:
        match action:
            case Explain(reason):
                self._log.explain(round_.number, self.peers.rank, reason)
            case Note(decision):
                self._log.note(round_.number, decision)
            case Collect():
                return self._log.collect(round_.number)
            case Look():
                return Said(self._log.find(round_.number))
        return Done()

    # ---- actions ---------------------------------------------------------------------------------

    def _await_files(self, round_: Round) -> Event:
        self._say("flushing", round_)
        while not round_.part.wait(_POLL_SECONDS):
            if (event := self._notice(round_)) is not None:
                return event
        find_older(round_)  # 5
        error = round_.part.error
        return Written(None if error is None else Reason.of(error))

    def _meet(self, round_: Round) -> Event:
        if self.peers.world == 1:
            return Done()
        self._say("voting", round_)
        try:
            if self.is_coordinator:
                self._log.flush()  # or a rank that is behind would vote for another save
            if not self._lane.join(lambda: self._interrupt(round_, joining=True)):
                return Done()
            self._apart = None
            found = None if self.is_coordinator else self._log.find(round_.number)
            return Done() if found is None else Said(found)
        except _Interrupted as interrupted:
            self._lane.leave()
            return interrupted.event
        except (LaneBroken, RuntimeError) as broken:
            return self._after_break(round_, broken)

    def _after_break(self, round_: Round, broken: Exception) -> Event:
        """See whether a lost rank is behind it; and do not try for ever if none is."""
        logger.info("save %d: a connection broke: %s", round_.number - round_.first, broken)
        now = time.monotonic()
        if self._apart is None:
            self._apart = now
        time.sleep(_POLL_SECONDS)
        self._tick()
        event = self._notice(round_, joining=True)
        if event is None and now - self._apart > max(
            round_.timeout, SILENCE_SECONDS + _PATIENCE_SECONDS
        ):
            why = f"has not met the others for {now - self._apart:.0f} s ({broken})"
            event = Lost(Loss.reason_of([Loss(self.peers.rank, why)]))
        return event or Broke()

    def _vote(self, round_: Round, ok: bool) -> Event:
        ballot = Ballot(
            ok, round_.number, round_.attempt, round_.path, self.peers.world, round_.missed
        )
        hit("vote.before")
        maxima = ballot.encode()
        if self.peers.world > 1:
            self._cast = round_.number
            found = self._max(round_, maxima)
            if not isinstance(found, list):
                return found
            maxima = found
        hit("vote.after")
        if is_unanimous(maxima):
            return Counted(True)
        return Counted(False, None if maxima[0] else Reason.of(_different(round_)))

    def _publish(self, round_: Round) -> Event:
        """Coordinator: all ranks are durable."""
        self._say("waiting for DCP to gather the results", round_)
        while not round_.await_consolidated(_POLL_SECONDS):
            if (event := self._notice(round_)) is not None:
                return event
        self._say("publishing", round_)
        try:
            if round_.consolidated is None:
                assert round_.abandoned is not None
                raise round_.abandoned
            publish(round_, round_.consolidated, self._tick)  # 8 to 10
        except CommitOutcomeUnknown as error:
            round_.failure = error
            return Decided(Decision(Outcome.UNKNOWN, {0: Reason.of(error)}))
        except Exception as error:
            round_.failure = error
            return Decided(Decision.failed(0, error))
        return Decided(Decision(Outcome.COMMITTED))

    def _tell(self, round_: Round, decision: Decision) -> Event:  # 11
        if self.peers.world == 1:
            return Done()
        hit("outcome.before")
        self._say("telling the outcome", round_)
        told = [round_.number, _OUTCOMES.index(decision.outcome)]
        event = self._max(round_, told, telling=True)
        hit("outcome.after")
        return Done() if isinstance(event, list) else event

    def _hear(self, round_: Round) -> Event:
        hit("outcome.before")
        self._say("waiting for the outcome", round_)
        found = self._max(round_, [-1, -1])
        if not isinstance(found, list):
            return found
        hit("outcome.after")
        number, outcome = found
        return Told(number == round_.number, _OUTCOMES[outcome])

    def _settle(self, round_: Round, why: Reason) -> Decision:  # 15
        assert round_.directory is not None
        assert round_.attempt is not None
        try:
            committed = settle(round_.directory, round_.attempt)
            unclear = "another job has committed there since"
        except (OSError, CheckpointCorruptError) as failed:  # this rank's files must stay
            committed, unclear = None, f"storage does not tell ({failed})"
        if committed is not None:
            return Decision(Outcome.COMMITTED) if committed else Decision(Outcome.FAILED, {-1: why})
        error = CommitOutcomeUnknown(
            f"{why.message}; and {unclear}. Attempt {round_.attempt.name} is committed if the path's .metadata names "
            f"it: `python -m dcp_datastates inspect` tells, and dcp_datastates.latest() finds the newest"
        )
        return Decision(Outcome.UNKNOWN, {-1: Reason.of(error)})

    # ---- while waiting ---------------------------------------------------------------------------

    def _max(self, round_: Round, values: list[int], *, telling: bool = False) -> list[int] | Event:
        try:
            return self._lane.max(values, lambda: self._interrupt(round_, telling=telling))
        except _Interrupted as interrupted:
            return interrupted.event
        except LaneBroken as broken:
            return self._after_break(round_, broken)

    def _interrupt(self, round_: Round, *, joining: bool = False, telling: bool = False) -> None:
        self._tick()  # this rank has done its part: that it stands still is not its own fault
        if (event := self._notice(round_, joining=joining, telling=telling)) is not None:
            raise _Interrupted(event)

    def _notice(
        self, round_: Round, *, joining: bool = False, telling: bool = False
    ) -> Event | None:
        """What the heart knows that ends this wait.

        Args:
            round_: the round.
            joining: this rank is connected with no other.
            telling: the coordinator has decided.
        """
        heart = self.heart
        if heart is None:
            return None
        losses = heart.losses() or heart.stalled(round_.number, round_.timeout)
        if self.is_coordinator:
            if losses:
                return Lost(Loss.reason_of(losses))
            ended = [] if telling else heart.ended(round_.number)
            return Refused(ended) if ended else None
        said = heart.said
        # Others are told by gloo as well, which must not be left in the middle of an operation.
        if said is not None and (said.decision is None or said.decision.given_up or joining):
            return said
        if any(loss.rank == 0 for loss in losses):
            return Lost(Loss.reason_of(losses))
        return None


class _Interrupted(Exception):
    def __init__(self, event: Event) -> None:
        super().__init__(event)
        self.event = event


def _different(round_: Round) -> SaveFailedError:
    return SaveFailedError(
        f"the ranks mean different saves; on rank 0 it is attempt {round_.attempt and round_.attempt.name} at "
        f"{str(round_.path)!r}, and {round_.missed} calls of dcp.async_save failed before. If that differs from rank "
        f"to rank, no save can be committed until the job restarts; dcp_datastates.async_save goes on after such a failure"
    )
