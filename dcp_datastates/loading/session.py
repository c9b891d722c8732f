"""One load of this rank, together with the other ranks: each step is done on all of them, or fails on all of them with
one error. At its end, a load has a record, which goes to the log and to listeners.

At the end of each step (:class:`Step`), every rank leaves a message at the job's store
(:mod:`dcp_datastates.ranks.meetings`), and the first rank answers. No process group of the training job is used. The
k-th load on one rank belongs to the k-th load on each other rank of the set.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dcp_datastates.commit.group import CommitGroup, commit_group
from dcp_datastates.commit.told_errors import Told, described, error_of
from dcp_datastates.errors import ConfigurationError, DataStatesError, RankLostError
from dcp_datastates.planning.comparison import forget_histories
from dcp_datastates.planning.packing import Message
from dcp_datastates.process.futures import Listeners
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.process.progress_bar import progress_bar
from dcp_datastates.ranks.failure_detector import RankWait, ranks_have
from dcp_datastates.ranks.meetings import GivenUp, Meetings
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.results import LOAD_PHASES, LoadRecord, Timeline
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import Location
from dcp_datastates.text import step_of

logger = logging.getLogger(__name__)

Work = Callable[[], bytes | None]
Answer = Callable[[Sequence[bytes]], Sequence[bytes]]

_LEAVE_SECONDS: Final = 5.0
"""How long a rank that leaves a load waits until it has met the first rank, to tell it. It may be their first meeting.
"""
_BAR_SECONDS: Final = 1.0
"""A load that takes less shows no bar."""
_NO_BAR: Final = "DCP_DATASTATES_NO_PROGRESS"
"""The environment variable that turns bars off."""

listeners: Final[Listeners[LoadRecord]] = Listeners()


def on_load(listener: Callable[[LoadRecord], object]) -> Callable[[], None]:
    """Call ``listener`` with the :class:`LoadRecord` of each load of this process, after its end. As :func:`on_save`.

    Returns:
        A function that ends this.
    """
    return listeners.add_of_user(listener)


class Step(enum.IntEnum):
    """The steps of a load, in order."""

    OPEN = 0
    """Each rank has opened the checkpoint."""
    FIT = 1
    """Each rank's state fits it."""
    OBJECTS = 2
    """If there are any: each rank has its objects, and nothing was changed."""
    READ = 3
    """Each rank has what it needs."""


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
    """The loads of one set of several ranks. The lock is held during a load: one thread at a time loads."""

    def __init__(self, group: CommitGroup) -> None:
        assert group.detector is not None
        self.group: Final = group
        self.detector: Final = group.detector
        self.meetings: Final = Meetings(group.rank_set, "loads")
        self.lock = threading.RLock()
        self.calls = 0
        self.is_loading = False


_lock = threading.RLock()  # guards _loads
_loads: weakref.WeakKeyDictionary[CommitGroup, _Loads] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def load_session(
    rank_set: RankSet, places: Sequence[Location], verb: str, timeout: float
) -> Iterator[LoadSession]:
    """A load of all ranks of ``rank_set``, which call this for the same load. It has a record at the end.

    Args:
        places: where the checkpoint is, the nearest place first.
        verb: the user's call, for messages: ``"load()"``.
        timeout: seconds without progress of another rank after which the load fails.
    """
    forget_histories()
    session = LoadSession(rank_set, places, verb, timeout)
    with session.recorded():
        if rank_set.world == 1:
            yield session
            return
        group = commit_group(rank_set)
        with _lock:
            loads = _loads.get(group)
            if loads is None:
                loads = _loads[group] = _Loads(group)
        with loads.lock:
            if loads.is_loading:
                raise DataStatesError(f"{verb} was called within another load, which has not ended")
            loads.calls += 1
            session.join(loads)
            loads.detector.save_started()
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
                loads.detector.save_ended()


class LoadSession:
    """One load of this rank. The loading thread uses it."""

    def __init__(
        self, rank_set: RankSet, places: Sequence[Location], verb: str, timeout: float
    ) -> None:
        self.rank_set: Final = rank_set
        self.places: Final = places
        self.value = 0
        """Grows while this rank makes progress. With :attr:`doing`, for its beat."""
        self.doing = "loading"
        self.attempt: str | None = None
        """The attempt that is loaded, once it is known."""
        self.asked_bytes = 0
        """What is to be read, once that is known."""
        self._path = places[0]
        self._verb = verb
        self._timeout = timeout
        self._rank = rank_set.ranks[rank_set.rank]
        self._loads: _Loads | None = None  # of several ranks
        self._first_number = 0
        self._next: Step | None = Step.OPEN
        self._timeline: Final = Timeline(phases=LOAD_PHASES)
        self._read_bytes = 0
        self._shown = contextlib.ExitStack()

    def count(self, nbytes: int) -> None:
        """This rank has read so many bytes more."""
        self.value += nbytes
        self._read_bytes += nbytes
        if self._timeline.seconds >= _BAR_SECONDS and self._bar is not None:
            self._bar(self._read_bytes, self.asked_bytes)

    def end(self, step: Step, work: Work, answer: Answer | None = None) -> bytes:
        """Do a step on all ranks; returns the first rank's answer to this rank.

        Args:
            work: does it on this rank, and returns a note for the first rank, if it has one.
            answer: on the first rank: makes the answers to all ranks from their notes, in the order of ranks. None:
                they are empty.

        If ``work`` fails on a rank, or ``answer`` on the first one, this raises on all ranks: the error of the first
        rank that failed. An interrupt is raised on its own rank only. Raises :class:`RankLostError` if a rank is lost,
        or does not come.
        """
        self._timeline.begin("read" if step is Step.OBJECTS else step.name.lower())
        answer = answer or _no_answers
        if self._loads is None:
            try:
                (note,) = answer([_done(step, work)])
            except BaseException as error:
                raise self._of_this_package(error)  # noqa: B904 (it has its cause)
        else:
            note = self._end_together(self._loads, step, work, answer)
        if step is Step.READ:
            self._timeline.begin("apply")
        return note

    # ---- with other ranks ------------------------------------------------------------------------------

    def join(self, loads: _Loads) -> None:
        """This load is the latest of ``loads``."""
        self._loads, self._first_number = loads, len(Step) * loads.calls

    def leave(self, error: BaseException) -> None:
        """This rank ends the load with ``error``: the others need not wait for it in a later step."""
        if self._loads is not None and self._next is not None:
            self.rank_set.incarnation.await_known(_LEAVE_SECONDS)
            why = f"{self._here}: {type(error).__name__}: {error}"
            for step in range(self._next, len(Step)):
                self._loads.meetings.give_up(self._first_number + step, why, self._path.name)

    def _end_together(self, loads: _Loads, step: Step, work: Work, answer: Answer) -> bytes:
        self._next = Step(step + 1) if step < Step.READ else None
        failure: BaseException | None = None
        try:
            report = _Report(self._path.name, None, _done(step, work))
        except BaseException as error:  # the other ranks wait for it
            failure = self._of_this_package(error)
            report = _Report(self._path.name, described(failure, self._here), b"")
        if step is not Step.OBJECTS:  # the phase goes on
            self._timeline.begin(f"wait_{step.name.lower()}")

        def answered(messages: Sequence[bytes]) -> Sequence[bytes]:
            nonlocal failure
            try:
                verdicts = self._verdicts(step, list(map(_Report.decode, messages)), answer)
            except BaseException as error:  # the other ranks wait for an answer
                failure = self._of_this_package(error)
                verdicts = [_Verdict(described(failure, self._here), 0)] * len(messages)
            return [each.encode() for each in verdicts]

        number, look = self._first_number + step, self._watch(step, loads)
        try:
            met = loads.meetings.meet(number, report.encode(), answered, look, self._path.name)
        except GivenUp as stop:
            self._next = None
            lost = failure or RankLostError(f"{self._verb} of {self._path}: {stop.why}")
            raise self._half_loaded(lost, step, failure is None) from None
        except RankLostError as lost:
            raise self._half_loaded(lost, step, failure is None) from failure
        for interrupt in (failure, met.error):
            if interrupt is not None and not isinstance(interrupt, Exception):
                raise interrupt
        verdict = _Verdict.decode(met.answer)
        if verdict.error is None:
            return verdict.note
        self._next = None
        try:
            if failure is not None and verdict.rank == self.rank_set.rank:
                if isinstance(failure, DataStatesError):
                    failure.remark = verdict.remark
                raise failure
            told = error_of(verdict.error)
            vars(told)["remark"] = verdict.remark
            raise told from failure
        finally:
            del failure  # its traceback retains this frame

    @property
    def _here(self) -> str:
        return f"{self._verb} was given up on rank {self._rank}"

    def _of_this_package(self, error: BaseException) -> BaseException:
        """``error``, or the one that tells of it. Interrupts stay what they are."""
        if isinstance(error, DataStatesError) or not isinstance(error, Exception):
            return error
        told = DataStatesError(
            f"loading {self._path} failed on rank {self._rank}: {type(error).__name__}: {error}"
        )
        told.__cause__ = error
        return told

    def _half_loaded(self, lost: BaseException, step: Step, has_all: bool) -> BaseException:
        """``lost``, which says what this rank has of the state. It does not know what the others have."""
        if step is Step.READ and isinstance(lost, DataStatesError):
            mine = f"rank {self._rank} has{'' if has_all else ' not'} loaded all of the state"
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
            if each.path != self._path.name:
                raise ConfigurationError(
                    f"rank {self._rank} loads {self._path.name!r} and rank {self.rank_set.ranks[rank]} loads "
                    f"{each.path!r}: every rank must make the same loads, in the same order"
                )
        return [_Verdict(None, 0, "", note) for note in answer([each.note for each in reports])]

    def _watch(self, step: Step, loads: _Loads) -> Callable[[], None]:
        """What is called repeatedly while this rank waits in a step. It raises :class:`RankLostError` if another rank
        is lost, or makes no progress for too long.
        """
        wait = RankWait(loads.detector, f"{self._verb} of {self._path}")
        return functools.partial(wait.look, functools.partial(self._look, step, loads))

    def _look(self, step: Step, loads: _Loads, waited: float) -> str:
        """What this rank waits for, in words. Raises :class:`RankLostError` after ``timeout`` without progress. Before
        a rank has called, what it does is no progress: the first rank waits so long for the others, and they for it.
        """
        is_first = self.rank_set.rank == 0
        slow = loads.detector.stalled(self._timeout) if waited >= self._timeout else []
        is_late = step is Step.OPEN and waited >= self._timeout * (1 if is_first else 2)
        if is_first:
            self.value += 1  # for the others: this rank looks after those that are late
            absent: list[int] = []
            with contextlib.suppress(RuntimeError):  # the store fails, which the meeting bears
                absent = loads.meetings.absent()
            missing = (
                f"not called {self._verb}" if step is Step.OPEN else "not come to the next step"
            )
            what = f"{self._named(absent)} {missing}" if absent else "answering the other ranks"
            slow = [each for each in slow if each.rank in absent]
        else:
            said = loads.detector.said_by_coordinator
            what = f"waiting for rank {self.rank_set.ranks[0]}{f' ({said})' if said else ''}"
        self.doing = what
        if slow or is_late:
            why = f" ({'; '.join(map(str, slow[:3]))})" if slow else ""
            raise RankLostError(f"{self._verb} of {self._path}: {what} within {waited:.0f} s{why}")
        return what

    def _named(self, ranks: Sequence[int]) -> str:
        return ranks_have([self.rank_set.ranks[rank] for rank in ranks])

    # ---- the record ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Makes the record of the load within, at its end."""
        try:
            with self._shown:
                yield
        except BaseException as error:
            self._tell(f"{type(error).__name__}: {error}")
            raise
        if self.attempt is not None:  # else nothing was there to load
            self._tell(None)

    @functools.cached_property
    def _bar(self) -> Callable[[int, int], None] | None:
        quiet = self.rank_set.rank != 0 or bool(os.environ.get(_NO_BAR))
        return self._shown.enter_context(progress_bar("loading", self._path.name, quiet))

    def _tell(self, error: str | None) -> None:
        path, timeline = str(self._path), self._timeline
        timeline.end()
        phases = timeline.phases()
        record = LoadRecord(
            path=path,
            step=step_of(path),
            rank=self.rank_set.rank,
            world=self.rank_set.world,
            api=self._verb,
            attempt=self.attempt,
            error=error,
            began_at=timeline.began_at,
            seconds=timeline.seconds,
            phases=phases,
            read_bytes=self._read_bytes,
            read_rate=self._read_bytes / phases["read"] if phases.get("read") else 0.0,
        )
        # The caller has the error.
        is_said = error is None and record.rank == 0
        level = once_per_job(logging.INFO) if is_said else logging.DEBUG
        logger.log(level, "%s", _described(record), extra={"load_record": record})
        listeners.tell(record)


def _done(step: Step, work: Work) -> bytes:
    hit(f"load.{step.name.lower()}.before")
    note = work()
    hit(f"load.{step.name.lower()}.after")
    return note or b""


def _no_answers(notes: Sequence[bytes]) -> Sequence[bytes]:
    return [b""] * len(notes)


def _described(record: LoadRecord) -> str:
    if record.error is not None:
        return f"{record.api} of {record.path} failed after {record.seconds:.2f} s: {record.error}"
    done = "loaded" if record.api == "load()" else "restored"
    of = f" on {record.world} ranks" if record.world > 1 else ""
    phases = {phase: s for phase, s in record.phases.items() if not phase.startswith("wait_")}
    if record.world > 1:
        phases["waiting"] = record.wait_seconds
    spent = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items())
    return (
        f"{done} {record.path}{of} in {record.seconds:.2f} s; this rank read {record.read_bytes / 2**20:.1f} MiB "
        f"({record.read_rate / 1e9:.2f} GB/s): {spent}"
    )
