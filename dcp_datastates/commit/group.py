"""Committed or absent: the ranks agree on the outcome of every save, in the order of the saves.

A :class:`CommitGroup` has a gloo group of its own, never the training job's, one thread that runs the
rounds, and a heart (``heart.py``) that tells who is lost. A round, on every rank:

1. wait for this rank's files: durable, or failed with a reason;
2. vote: one small all-reduce; if a rank failed, or they mean different saves, gather who and why;
3. if all are durable, the coordinator (rank 0) publishes ``.metadata`` (``publish.py``);
4. the outcome goes to all ranks by another all-reduce; what is not referenced goes; futures resolve.

Who cannot go on by gloo goes on by the store, where the first to write decides (``record.py``). A broken
connection that nobody is to blame for fails no round: the ranks meet again in the next ``generation`` and
vote again.

A rank that voted yes and then loses the coordinator withdraws the attempt, so that it cannot be published any more, and
looks at the path (``cut_off.py``): a ``.metadata`` of this attempt means committed, any other failed. If storage does
not tell, it raises :class:`CommitOutcomeUnknown`. Alone, the group is trivial and the same code runs.

Why a rank that votes again never votes for another save than the others: the coordinator writes its decision to
the store before it goes on to the next round, and a generation begins only when the coordinator has come to it. So
whoever has met the others in a new generation looks at the store before it votes: in each round, until it comes
to one that is not decided. It may be several behind, as a coordinator that fails goes on without the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from dcp_datastates.commit.ballot import Ballot, Count
from dcp_datastates.commit.behind import Policy
from dcp_datastates.commit.cut_off import given_up, look, said
from dcp_datastates.commit.decision import Decision, Outcome, Reason
from dcp_datastates.commit.gloo_tree import GlooTree, GroupBroken
from dcp_datastates.commit.heart import SILENCE_SECONDS, Beat, Heart, Loss
from dcp_datastates.commit.peers import Peers
from dcp_datastates.commit.progress import Progress
from dcp_datastates.commit.publish import (
    find_older,
    publish,
    tidy_after_commit,
    tidy_after_failure,
)
from dcp_datastates.commit.record import Decided, Record
from dcp_datastates.commit.round import Round
from dcp_datastates.commit.worker import Worker
from dcp_datastates.dcp.frames import release_frames
from dcp_datastates.errors import (
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

_GIVE_UP_SECONDS: Final = 0.5
"""Between two tries to give up a round that the coordinator is publishing."""

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
        self._tried = 0.0
        self._caught_up = False  # this rank is in the round that the others have met for
        self._apart: float | None = None  # since when this rank has not met the others
        self._reading: Progress | None = None
        self.heart: Heart | None = None
        self._record = Record()
        self._lane = GlooTree(peers, "vote")  # another one from the first round on
        if peers.world > 1:
            self._record = Record(peers.connect("commit"))
            self.heart = Heart(peers, peers.connect_alone("commit"), self._status)

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
        return RankLostError(said(losses)) if losses else error

    def _status(self) -> Beat:
        round_, reading = self._current, self._reading
        progress = self._ticks if round_ is None else self._ticks + round_.part.progress
        doing = self._doing if not self._planning or round_ is not None else self._planning
        if reading is not None:
            progress, doing = progress + reading.value, "reading"
        return Beat(self._cast, progress, doing, calls=self.calls)

    # ---- the commit thread -------------------------------------------------------------------

    def _run(self, round_: Round) -> None:
        try:
            if self._expected is None:
                self._expected = round_.first
                # A store may outlive a default group, and with it the keys of a former one's lane.
                self._lane = GlooTree(self.peers, f"vote/{round_.first}")
            while self.peers.world > 1 and self._expected < round_.number:
                self._finish(Round.missing(self._expected, round_.first, round_.timeout))
            self._finish(round_)
        except BaseException as error:  # a defect, or a failpoint: still, nobody may wait for ever
            logger.exception("a commit round ended unexpectedly")
            round_.resolve(self._break_off(round_, error))

    def _break_off(self, round_: Round, error: BaseException) -> BaseException:
        """Tell the others that this rank's commit thread failed in the round; the error for its user."""
        if self.heart is None:
            return error
        reasons = {self.peers.rank: Reason.of(error)}
        try:
            standing = self._record.decide(
                round_.number, Decision(Outcome.FAILED, reasons, given_up=True)
            )
        except Decided as decided:
            standing = decided.decision
        except Exception as failed:
            standing = Decision(Outcome.UNKNOWN)
            logger.warning("could not tell the other ranks: %s", failed)
        self._lane.leave()
        if standing.outcome is Outcome.FAILED:
            return self._error(round_, standing) or error
        return CommitOutcomeUnknown(
            f"this rank failed while the coordinator was publishing {str(round_.directory)!r}: {error!r}"
        )

    def _finish(self, round_: Round) -> None:
        self._current = round_
        self._apart = None
        if self.heart is not None:
            self.heart.follow(round_.number)
        try:
            decision = self._decide(round_)
        finally:
            self._say("idle", round_)
            self._expected = round_.number + 1
            self._cast = max(self._cast, round_.number)
            self._current = None
            if self.heart is not None:
                self.heart.follow(None)
            if self.is_coordinator:
                self._record.forget_before(round_.number)
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

    def _decide(self, round_: Round) -> Decision:
        while True:
            try:
                return self._agree(round_)
            except Decided as decided:
                return decided.decision
            except GroupBroken as broken:
                logger.info("save %d: a connection broke: %s", round_.number - round_.first, broken)
                self._lane.leave()
                try:
                    self._after_break(round_, broken)
                except Decided as decided:
                    return decided.decision

    def _after_break(self, round_: Round, broken: GroupBroken) -> None:
        """Step 18: see whether a lost rank is behind it; and do not try for ever if none is."""
        now = time.monotonic()
        if self._apart is None:
            self._apart = now
        time.sleep(_POLL_SECONDS)
        self._check_others(round_, joining=True)
        if now - self._apart > max(round_.timeout, SILENCE_SECONDS + _PATIENCE_SECONDS):
            why = f"has not met the others for {now - self._apart:.0f} s ({broken})"
            self._give_up(round_, [Loss(self.peers.rank, why)])

    def _agree(self, round_: Round) -> Decision:
        self._await_part(round_)
        # The numbers in comments are the steps of docs/commit.md.
        find_older(round_)  # 5
        ok = round_.part.error is None
        ballot = Ballot(
            ok, round_.number, round_.attempt, round_.path, self.peers.world, round_.missed
        )
        hit("vote.before")
        count = Count.of(self._vote(round_, ballot))  # 6
        hit("vote.after")
        if not count.unanimous:
            return self._reasons(round_, count)  # 7
        return self._share(round_, self._publish(round_) if self.is_coordinator else None)

    def _await_part(self, round_: Round) -> None:
        self._say("flushing", round_)
        while not round_.part.wait(_POLL_SECONDS):
            self._check(round_)

    def _vote(self, round_: Round, ballot: Ballot) -> list[int]:
        if self.peers.world == 1:
            return ballot.encode()
        self._say("voting", round_)
        self._join(round_)
        self._cast = round_.number
        return self._lane.max(ballot.encode(), lambda: self._check_others(round_))

    def _join(self, round_: Round) -> None:
        if self._lane.join(lambda: self._check_others(round_, joining=True)):
            self._apart = None
            self._caught_up = False
        if self._caught_up:
            return
        found = self._record.find(round_.number)
        if found is None:
            self._caught_up = True
            return
        if found.final:
            raise Decided(found)
        # The coordinator was publishing, and does not come here again for this round: the outcome
        # that it should have noted did not reach the store.
        if not self.is_coordinator:
            raise Decided(self._look(round_, [Loss(0, "could not note the outcome")]))

    def _reasons(self, round_: Round, count: Count) -> Decision:
        """Gather who failed and why; the coordinator notes it for ranks that gloo does not reach."""
        mine = round_.part.error
        if mine is None and not count.agreed and not count.failed:
            mine = SaveFailedError(
                f"the ranks mean different saves; here it is attempt "
                f"{round_.attempt and round_.attempt.name} at {str(round_.path)!r}, and "
                f"{round_.missed} calls of dcp.async_save failed before. If that differs from rank to rank, no save "
                f"can be committed until the job restarts; dcp_datastates.async_save goes on after such a failure"
            )
        if self.peers.world == 1:
            assert mine is not None
            return Decision.failed(0, mine)
        data = b"" if mine is None else Reason.of(mine).encode()
        gathered = self._lane.gather(data, lambda: self._check_others(round_))
        decision: Decision | None = None
        if gathered is not None:
            reasons = {rank: why for rank, why in enumerate(map(Reason.decode, gathered)) if why}
            decision = self._settle(round_, Decision(Outcome.FAILED, reasons))
        mine_to_tell = b"" if decision is None else decision.encode().encode()
        try:
            told = self._lane.broadcast(mine_to_tell, lambda: self._check_others(round_))
        except (GroupBroken, Decided):
            if decision is None:
                raise
            self._lane.leave()
            return decision  # the others find it in the store
        return Decision.decode(told)

    def _publish(self, round_: Round) -> Decision:
        """Coordinator: all ranks are durable."""
        self._say("waiting for DCP to gather the results", round_)
        while not round_.await_consolidated(_POLL_SECONDS):
            self._check(round_)
        consolidated = round_.consolidated
        try:
            if consolidated is None:
                assert round_.abandoned is not None
                raise round_.abandoned
            self._record.decide(round_.number, Decision(Outcome.PUBLISHING))  # 8
            self._say("publishing", round_)
            publish(round_, consolidated, self._tick)  # 9 to 11
        except Decided:
            raise
        except CommitOutcomeUnknown as error:
            round_.failure = error
            decision = Decision(Outcome.UNKNOWN, {0: Reason.of(error)})
        except Exception as error:
            round_.failure = error
            decision = Decision.failed(0, error)
        else:
            decision = Decision(Outcome.COMMITTED)
        return self._settle(round_, decision)

    def _settle(self, round_: Round, decision: Decision) -> Decision:
        if self.is_coordinator:
            self._record.settle(round_.number, decision)
        return decision

    def _share(self, round_: Round, decision: Decision | None) -> Decision:
        """Step 12: the coordinator's decision, on every rank."""
        if self.peers.world == 1:
            assert decision is not None
            return decision
        hit("outcome.before")
        committed = -1 if decision is None else int(decision.outcome is Outcome.COMMITTED)
        try:
            self._say("waiting for the outcome", round_)
            (committed,) = self._lane.max([committed], lambda: self._check_others(round_))
        except (GroupBroken, Decided):
            # A coordinator has decided, and perhaps published: without the store it could only guess
            # here, and would remove the files of a committed checkpoint.
            if decision is None:
                raise
            self._lane.leave()
            return decision  # the others find it in the store
        hit("outcome.after")
        if decision is not None:
            return decision
        if committed:
            return Decision(Outcome.COMMITTED)
        found = self._record.find(round_.number)
        assert found is not None, "the coordinator writes its decision down before it shares it"
        return found

    # ---- while waiting ---------------------------------------------------------------------------

    def _check_others(self, round_: Round, *, joining: bool = False) -> None:
        """:meth:`_check` while this rank has done its part: that it stands still is not its own fault."""
        self._tick()
        self._check(round_, joining=joining)

    def _check(self, round_: Round, *, joining: bool = False) -> None:
        """Called while waiting. Raises the way out, if there is one."""
        heart = self.heart
        if heart is None:
            return
        if heart.decision is not None:
            decision = Decision.decode(heart.decision)
            # Others come by gloo as well, which must not be left in the middle of an operation.
            if decision.given_up or (joining and decision.final):
                self._lane.leave()
                raise Decided(decision)
        losses = heart.losses() or heart.stalled(round_.number, round_.timeout)
        if losses and time.monotonic() - self._tried > _GIVE_UP_SECONDS:
            self._tried = time.monotonic()
            self._give_up(round_, losses)

    def _give_up(self, round_: Round, losses: list[Loss]) -> None:
        """Steps 15 to 17: the round has failed because of ranks that are lost; raises :class:`Decided`.

        Returns if the coordinator is publishing: it will tell.
        """
        decision = given_up(losses)
        reached = True
        try:
            standing = self._record.decide(round_.number, decision)
        except Decided:
            self._lane.leave()
            raise
        except Exception:  # the store is gone, and with it rank 0 or torchrun's agent
            reached = False
            standing = decision if self.is_coordinator else Decision(Outcome.PUBLISHING)
        if standing.final:
            self._lane.leave()
            raise Decided(standing)
        if not reached or any(loss.rank == 0 for loss in losses):
            self._lane.leave()
            raise Decided(self._look(round_, losses))

    def _look(self, round_: Round, losses: list[Loss]) -> Decision:
        return look(round_, losses, voted=self._cast >= round_.number)
