"""How the ranks load together: each step is done on all of them, or fails on all of them with one error.

A load has a few steps (:class:`Step`). At the end of each, every rank leaves a message at the job's store
(:mod:`dcp_datastates.ranks.meetings`), and the first rank answers. No process group of the training job is used. The
k-th load on one rank belongs to the k-th load on each other rank of the set.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dcp_datastates.commit.group import CommitGroup, commit_group
from dcp_datastates.commit.told_errors import Told, described, error_of
from dcp_datastates.errors import ConfigurationError, DataStatesError, RankLostError
from dcp_datastates.loading.record import Account
from dcp_datastates.planning.packing import Message
from dcp_datastates.process.waiting import WaitLog
from dcp_datastates.ranks.failure_detector import FailureDetector, LossWatch
from dcp_datastates.ranks.meetings import GivenUp, Meetings
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import Location

logger = logging.getLogger(__name__)

Answer = Callable[[Sequence[bytes]], Sequence[bytes]]

_LEAVE_SECONDS: Final = 5.0
"""How long a rank that leaves a load waits until it has met the first rank, to tell it. It may be their first meeting.
"""


class Step(enum.IntEnum):
    """The steps of a load, in order."""

    OPEN = 0
    """Each rank has opened the checkpoint."""
    FIT = 1
    """Each rank's state fits it."""
    NAMES = 2
    """If the ranks load different values: each has named its own."""
    OBJECTS = 3
    """If there are any: each rank has its objects, and nothing was changed."""
    READ = 4
    """Each rank has what it needs."""


_PHASES: Final = {
    Step.OPEN: "open",
    Step.FIT: "fit",
    Step.NAMES: "wait_fit",
    Step.OBJECTS: "read",
    Step.READ: "read",
}
"""Of the record, by step."""


@dataclass(frozen=True)
class _Report(Message):
    """One rank's message at the end of a step."""

    path: str
    """The last part of what it loads: other machines may mount the directory elsewhere."""
    error: Told | None
    """Why the step has failed on the rank."""
    note: bytes
    """What the step has for the first rank."""


@dataclass(frozen=True)
class _Verdict(Message):
    """The first rank's answer."""

    error: Told | None
    """The one error, if the step has failed on a rank."""
    rank: int
    """The rank whose error it is."""
    remark: str = ""
    """What the first rank adds to the error."""
    note: bytes = b""
    """The first rank's answer to this rank's note."""


class _Loads:
    """The loads of one rank set. The lock is held during a load: one thread at a time loads."""

    def __init__(self, group: CommitGroup) -> None:
        self.meetings: Final = Meetings(group.rank_set, "loads")
        self.lock = threading.RLock()
        self.calls = 0
        self.is_loading = False


_lock = threading.RLock()  # guards _loads
_loads: weakref.WeakKeyDictionary[CommitGroup, _Loads] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def load_session(
    rank_set: RankSet, path: Location, verb: str, timeout: float
) -> Iterator[LoadSession]:
    """A load of all ranks of ``rank_set``, which call this for the same load. It has a record at the end.

    Args:
        verb: the user's call, for messages: ``"load()"``.
        timeout: seconds without progress of another rank after which the load fails.
    """
    account = Account(path, verb, rank_set)
    with account.recorded():
        if rank_set.world == 1:
            yield LoadSession(path, verb, account)
            return
        with _together(rank_set, path, verb, timeout, account) as session:
            yield session


@contextlib.contextmanager
def _together(
    rank_set: RankSet, path: Location, verb: str, timeout: float, account: Account
) -> Iterator[LoadSession]:
    group = commit_group(rank_set)
    with _lock:
        loads = _loads.get(group)
        if loads is None:
            loads = _loads[group] = _Loads(group)
    with loads.lock:
        if loads.is_loading:
            raise DataStatesError(f"{verb} was called within another load, which has not ended")
        loads.calls += 1
        session = _Together(group, loads, path, verb, timeout, account)
        assert group.detector is not None
        group.detector.save_started()
        group.reading(session, True)
        loads.is_loading = True
        try:
            yield session
        except BaseException as error:
            session.leave(error)
            raise
        finally:
            loads.is_loading = False
            group.reading(session, False)
            group.detector.save_ended()


class LoadSession:
    """One load, of this process alone."""

    is_first = True
    """Whether this is the first rank."""
    world = 1

    def __init__(self, path: Location, verb: str, account: Account) -> None:
        self.path: Final = path
        self.verb: Final = verb
        self.account: Final = account
        self.value = 0
        """Grows while this rank makes progress."""
        self.doing = "loading"
        """For this rank's beat."""

    def count(self, nbytes: int) -> None:
        """This rank has read so many bytes more."""
        self.value += nbytes
        self.account.count(nbytes)

    def end(self, step: Step, work: Callable[[], bytes], answer: Answer) -> bytes:
        """Do a step on all ranks; returns the first rank's answer to this rank.

        Args:
            work: does it on this rank, and returns a note for the first rank.
            answer: on the first rank: makes the answers to all ranks from their notes, in the order of ranks.

        If ``work`` fails on a rank, or ``answer`` on the first one, this raises on all ranks: the error of the first
        rank that failed. An interrupt is raised on its own rank only. Raises :class:`RankLostError` if a rank is lost,
        or does not come.
        """
        self.account.timeline.begin(_PHASES[step])
        try:
            note = answer([_done(step, work)])[0]
        except Exception as error:
            raise _of_this_package(error, self.path, 0) from error.__cause__
        self._ended(step)
        return note

    def _ended(self, step: Step) -> None:
        if step is Step.READ:
            self.account.timeline.begin("apply")


class _Together(LoadSession):
    """One load, of several ranks."""

    def __init__(
        self,
        group: CommitGroup,
        loads: _Loads,
        path: Location,
        verb: str,
        timeout: float,
        account: Account,
    ) -> None:
        super().__init__(path, verb, account)
        assert group.detector is not None
        self.is_first = group.is_coordinator
        self.world = group.rank_set.world
        self._ranks = group.rank_set.ranks
        self._rank = group.rank_set.rank
        self._incarnation = group.rank_set.incarnation
        self._meetings, self._timeout = loads.meetings, timeout
        self._detector = group.detector
        self._first_number = len(Step) * loads.calls
        self._next: Step | None = Step.OPEN

    def end(self, step: Step, work: Callable[[], bytes], answer: Answer) -> bytes:
        self._next = Step(step + 1) if step < Step.READ else None
        timeline = self.account.timeline
        timeline.begin(_PHASES[step])
        failure: BaseException | None = None
        try:
            report = _Report(self.path.name, None, _done(step, work))
        except BaseException as error:  # the other ranks wait for it
            failure = _of_this_package(error, self.path, self._ranks[self._rank])
            report = _Report(self.path.name, described(failure, self._here), b"")

        if step is not Step.OBJECTS:  # the phase goes on
            timeline.begin(f"wait_{_PHASES[step].removeprefix('wait_')}")

        def answered(messages: Sequence[bytes]) -> Sequence[bytes]:
            nonlocal failure
            try:
                verdicts = self._verdicts(step, list(map(_Report.decode, messages)), answer)
            except BaseException as error:  # the other ranks wait for an answer
                failure = _of_this_package(error, self.path, self._ranks[0])
                verdicts = [_Verdict(described(failure, self._here), 0)] * len(messages)
            return [each.encode() for each in verdicts]

        number, message = self._first_number + step, report.encode()
        try:
            met = self._meetings.meet(
                number, message, answered, self._watch(step).look, self.path.name
            )
        except GivenUp as stop:
            self._next = None
            lost = failure or RankLostError(f"{self.verb} of {self.path}: {stop.why}")
            raise self._half_loaded(lost, step, failure is None) from None
        except RankLostError as lost:
            raise self._half_loaded(lost, step, failure is None) from failure
        for interrupt in (failure, met.error):
            if interrupt is not None and not isinstance(interrupt, Exception):
                raise interrupt
        verdict = _Verdict.decode(met.answer)
        if verdict.error is None:
            self._ended(step)
            return verdict.note
        self._next = None
        if failure is not None and verdict.rank == self._rank:
            if isinstance(failure, DataStatesError):
                failure.remark = verdict.remark
            raise failure
        told = error_of(verdict.error)
        vars(told)["remark"] = verdict.remark
        raise told from failure

    def leave(self, error: BaseException) -> None:
        """This rank ends the load with ``error``: the others need not wait for it in a later step."""
        if self._next is not None:
            self._incarnation.await_known(_LEAVE_SECONDS)
            why = f"{self._here}: {type(error).__name__}: {error}"
            for step in range(self._next, len(Step)):
                self._meetings.give_up(self._first_number + step, why, self.path.name)

    @property
    def _here(self) -> str:
        return f"{self.verb} was given up on rank {self._ranks[self._rank]}"

    def _half_loaded(self, lost: BaseException, step: Step, has_all: bool) -> BaseException:
        """``lost``, which says what this rank has of the state. It does not know what the others have."""
        if step is Step.READ and isinstance(lost, DataStatesError):
            mine = f"rank {self._ranks[self._rank]} has{'' if has_all else ' not'} loaded all of the state"
            lost.remark = f"{mine}, and other ranks may not have: the state may be half loaded"
        return lost

    def _verdicts(
        self, step: Step, reports: Sequence[_Report], answer: Answer
    ) -> Sequence[_Verdict]:
        failed = [rank for rank, each in enumerate(reports) if each.error is not None]
        if failed:
            remark = ""
            if step is Step.READ:
                remark = (
                    f"{self._named(failed)} not loaded all of the state, and the other ranks have: the state is half "
                    f"loaded"
                )
            elif step is Step.OBJECTS:
                remark = f"{self._named(failed)} not read all objects; no rank's state was changed"
            return [_Verdict(reports[failed[0]].error, failed[0], remark)] * len(reports)
        for rank, each in enumerate(reports):
            if each.path != self.path.name:
                raise ConfigurationError(
                    f"rank {self._ranks[0]} loads {self.path.name!r} and rank {self._ranks[rank]} loads "
                    f"{each.path!r}: every rank must make the same loads, in the same order"
                )
        return [_Verdict(None, 0, "", note) for note in answer([each.note for each in reports])]

    # ---- waiting -------------------------------------------------------------------------------------

    def _watch(self, step: Step) -> _Watch:
        return _Watch(f"{self.verb} of {self.path}", self._detector, lambda s: self._look(step, s))

    def _look(self, step: Step, waited: float) -> str:
        """What this rank waits for, in words. Raises :class:`RankLostError` after ``timeout`` without progress. Before
        a rank has called, what it does is no progress: the first rank waits so long for the others, and they for it.
        """
        slow = self._detector.stalled(self._timeout) if waited >= self._timeout else []
        is_late = step is Step.OPEN and waited >= self._timeout * (1 if self.is_first else 2)
        if self.is_first:
            self.value += 1  # for the others: this rank looks after those that are late
            absent: list[int] = []
            with contextlib.suppress(RuntimeError):  # the store fails, which the meeting bears
                absent = self._meetings.absent()
            missing = (
                f"not called {self.verb}" if step is Step.OPEN else "not come to the next step"
            )
            what = f"{self._named(absent)} {missing}" if absent else "answering the other ranks"
            slow = [each for each in slow if each.rank in absent]
        else:
            said = self._detector.said_by_coordinator
            what = f"waiting for rank {self._ranks[0]}{f' ({said})' if said else ''}"
        self.doing = what
        if slow or is_late:
            why = f" ({'; '.join(map(str, slow[:3]))})" if slow else ""
            raise RankLostError(f"{self.verb} of {self.path}: {what} within {waited:.0f} s{why}")
        return what

    def _named(self, ranks: Sequence[int]) -> str:
        named = ", ".join(str(self._ranks[rank]) for rank in ranks[:3])
        if len(ranks) == 1:
            return f"rank {named} has"
        return f"{len(ranks)} ranks ({named}{', …' if len(ranks) > 3 else ''}) have"


class _Watch:
    """Watches, while this rank waits in a step, whether the other ranks come to it.

    Args:
        look: says what this rank waits for; is given the seconds, and may raise.
    """

    def __init__(self, who: str, detector: FailureDetector, look: Callable[[float], str]) -> None:
        self._losses = LossWatch(detector)
        self._log = WaitLog(logger, who)
        self._look = look
        self._next = 1.0

    def look(self) -> None:
        """Called repeatedly. Raises :class:`RankLostError` if a rank is lost, or makes no progress for too long."""
        self._losses.look()
        waited = self._log.seconds
        if waited >= self._next:
            self._next = waited + 1.0
            self._log.look(self._look(waited))


def _done(step: Step, work: Callable[[], bytes]) -> bytes:
    hit(f"load.{step.name.lower()}.before")
    note = work()
    hit(f"load.{step.name.lower()}.after")
    return note


def _of_this_package(error: BaseException, path: Location, rank: int) -> BaseException:
    """``error``, or the one that tells of it. Interrupts stay what they are."""
    if isinstance(error, DataStatesError) or not isinstance(error, Exception):
        return error
    told = DataStatesError(f"loading {path} failed on rank {rank}: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told
