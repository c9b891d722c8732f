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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from dcp_datastates.commit.group import CommitGroup, commit_group
from dcp_datastates.commit.joint_steps import Answer, StepEnd, alone, together
from dcp_datastates.errors import ConfigurationError, DataStatesError, RankLostError
from dcp_datastates.planning.comparison import forget_histories
from dcp_datastates.process.futures import Listeners
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.process.progress_bar import progress_bar
from dcp_datastates.ranks.failure_detector import RankWait, ranks_have
from dcp_datastates.ranks.meetings import Meetings, Met
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.results import LOAD_PHASES, LoadRecord, Timeline
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import Location
from dcp_datastates.text import step_of

logger = logging.getLogger(__name__)

Work = Callable[[], bytes | None]

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

    def close(self) -> None:
        """It has no thread."""


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
        loads = group.attached(_Loads)
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


def refuse(rank_set: RankSet, path: object, verb: str, error: Exception, timeout: float) -> None:
    """Fail the load of all ranks, if there are several, with ``error``: this rank was called in a way that cannot work,
    and the others come to the first step. Returns if they do not come within ``timeout``.
    """

    def work() -> bytes:
        raise error

    if rank_set.world > 1:
        if isinstance(error, DataStatesError):
            error.remark = f"rank {rank_set.ranks[rank_set.rank]} has called {verb} so"
        place = Path(str(path))  # for messages: it may be what is wrong
        with (
            contextlib.suppress(RankLostError),
            load_session(rank_set, [place], verb, timeout) as session,
        ):
            session.end(Step.OPEN, work)


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
        self._next = Step(step + 1) if step < Step.READ else None
        mine, answered = self._parts(step, work, answer)
        try:
            end = together(functools.partial(self._meet, step), mine, answered, whole=True)
        except RankLostError as lost:
            self._say_half_loaded(lost, step, lost.__cause__ is None)
            raise
        if end.late is not None and not isinstance(end.late, Exception):
            raise end.late
        if (error := self._error(step, end)) is not None:
            self._next = None
            try:
                raise error
            finally:
                del error, end  # its traceback retains this frame
        if step is Step.READ:
            self._timeline.begin("apply")
        return end.answer

    def _parts(
        self, step: Step, work: Work, answer: Answer | None
    ) -> tuple[Callable[[], bytes], Answer]:
        """This rank's part of the step, and the first rank's. In the first step, the ranks compare what they load."""
        # Only the last part of the path: other machines may mount the directory elsewhere.
        name = os.fsencode(self._path.name) + b"\0" if step is Step.OPEN else b""

        def mine() -> bytes:
            hit(f"load.{step.name.lower()}.before")
            note = work() or b""
            hit(f"load.{step.name.lower()}.after")
            return name + note

        def answered(notes: Sequence[bytes]) -> Sequence[bytes]:
            for rank, note in enumerate(notes):
                if not note.startswith(name):
                    other = os.fsdecode(note.partition(b"\0")[0])
                    raise ConfigurationError(
                        f"rank {self._rank} loads {self._path.name!r} and rank {self.rank_set.ranks[rank]} loads "
                        f"{other!r}: every rank must make the same loads, in the same order"
                    )
            notes = [note[len(name) :] for note in notes]
            return [b""] * len(notes) if answer is None else answer(notes)

        return mine, answered

    # ---- with other ranks ------------------------------------------------------------------------------

    def join(self, loads: _Loads) -> None:
        """This load is the latest of ``loads``."""
        self._loads, self._first_number = loads, len(Step) * loads.calls

    def leave(self, error: BaseException) -> None:
        """This rank ends the load with ``error``: the others need not wait for it in a later step."""
        if self._loads is not None and self._next is not None:
            self.rank_set.incarnation.await_known(_LEAVE_SECONDS)
            what = f"{self._verb} was given up on rank {self._rank}"
            why = RankLostError(f"{what}: {type(error).__name__}: {error}")
            for step in range(self._next, len(Step)):
                self._loads.meetings.give_up(self._first_number + step, why, self._path.name)

    def _meet(self, step: Step, message: bytes, answers: Answer) -> Met:
        loads = self._loads
        if loads is None:
            return alone(message, answers)
        if step is not Step.OBJECTS:  # the phase goes on
            self._timeline.begin(f"wait_{step.name.lower()}")
        wait = RankWait(loads.detector, f"{self._verb} of {self._path}")
        look = functools.partial(wait.look, functools.partial(self._look, step, loads))
        number = self._first_number + step
        return loads.meetings.meet(number, message, answers, look, self._path.name)

    def _say_half_loaded(self, lost: BaseException | None, step: Step, has_all: bool) -> None:
        """Let ``lost`` say what this rank has of the state. It does not know what the others have."""
        if step is Step.READ and isinstance(lost, DataStatesError):
            mine = f"rank {self._rank} has{'' if has_all else ' not'} loaded all of the state"
            lost.remark = f"{mine}, and other ranks may not have: the state may be half loaded"

    def _error(self, step: Step, end: StepEnd) -> BaseException | None:
        """The error of a step that has failed, which says what the ranks have of the state."""
        if end.failed is None:
            return None
        error: BaseException | None
        failed = [self.rank_set.ranks[rank] for rank in sorted(end.failed.reasons) if rank >= 0]
        if not failed and end.own is None:
            why = end.failed.reasons[-1].message
            error = RankLostError(f"{self._verb} of {self._path}: {why}")
        else:
            where = f"loading {self._path} failed on rank {failed[0] if failed else self._rank}"
            error = end.error(where)
            if isinstance(error, Exception) and not isinstance(error, DataStatesError):
                error = DataStatesError(f"{where}: {type(error).__name__}: {error}")
                error.__cause__ = end.own
        if not failed:
            self._say_half_loaded(error, step, end.own is None)
        elif self._loads is not None and isinstance(error, DataStatesError):
            have = ranks_have(failed, end.failed.more)
            if step is Step.READ:
                error.remark = f"{have} not loaded all of the state, and the other ranks have: the state is half loaded"
            elif step is Step.OBJECTS:
                error.remark = f"{have} not read all objects; no rank's state was changed"
        return error

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
            named = ranks_have([self.rank_set.ranks[rank] for rank in absent])
            what = f"{named} {missing}" if absent else "answering the other ranks"
            slow = [each for each in slow if each.rank in absent]
        else:
            said = loads.detector.said_by_coordinator
            what = f"waiting for rank {self.rank_set.ranks[0]}{f' ({said})' if said else ''}"
        self.doing = what
        if slow or is_late:
            why = f" ({'; '.join(map(str, slow[:3]))})" if slow else ""
            raise RankLostError(f"{self._verb} of {self._path}: {what} within {waited:.0f} s{why}")
        return what

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
