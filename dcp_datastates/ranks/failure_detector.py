"""Heartbeats in a c10d store: which ranks are alive, which make progress, and how far each has come.

gloo alone is slow to notice a lost rank and never names it. So every rank writes a beat to the store once a second. The
coordinator reads all beats, and lists the lost ranks in its own; the other ranks read the coordinator's beat. This
costs two requests per second and rank, less in a large job. A rank is

- *dead* if its process is gone: ranks on the same machine that have met it (``incarnation.py``) see that immediately,
  and for certain;
- *silent* if its beat has not changed for :data:`SILENCE_SECONDS`: it is dead, stopped, or cut off, or a call has held
  its GIL all the while;
- *stalled* if it beats, has not voted in a round, and has made no progress towards its vote for the round's
  ``commit_timeout``.

A beat contains the progress of the rank's own save, so a rank whose flushes take longer than the others' does not time
out. One thread, ``dcp_datastates-heartbeat``, beats and reads. It ends with :meth:`FailureDetector.close`, and touches
only the store and the fields below ``_lock``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from dcp_datastates.errors import RankLostError
from dcp_datastates.process.futures import Worker
from dcp_datastates.process.waiting import Wait
from dcp_datastates.ranks.connection import Connection
from dcp_datastates.ranks.incarnation import is_gone
from dcp_datastates.ranks.rank_set import RankSet

logger = logging.getLogger(__name__)

SILENCE_SECONDS: Final = 60.0
"""A rank that has not beaten for this long counts as lost. A call that holds its GIL for half a minute is no loss."""

RETURN_SECONDS: Final = 12.0
"""How long it may take to notice that a silent rank is back: its beat, the coordinator's read and this rank's read,
each after four seconds at most.
"""

_UNSEEN_SECONDS: Final = 300.0
"""How long a rank may stay silent that has never beaten: it may not have reached its first save yet."""

_CLOSE_SECONDS: Final = 2.0

_NEIGHBOUR_SECONDS: Final = 0.1
"""Time between two checks that the processes on this machine exist."""

_ACTIVE_SECONDS: Final = 1.0
"""Time between two beats while a save is in flight."""

_IDLE_SECONDS: Final = 4.0
"""Time between two beats while no save is in flight."""

_LEAST_SECONDS: Final = 0.1
"""Least time between two beats."""

_SECONDS_PER_RANK: Final = 1.2e-4
"""Least time between two beats, per rank: two requests of 11.3 us each then take a fifth of the store's only thread."""

_LISTED: Final = 8
"""How many lost ranks the coordinator's beat lists."""


@dataclass(frozen=True)
class Beat:
    """A rank's status: the last round it voted in (``voted``), and its progress towards the next.

    ``progress`` is a number that changes while the rank makes progress; ``doing`` names the present phase; ``calls``
    counts the calls of this package's ``async_save`` on the rank, ``dcp_calls`` the saves that DCP runs; ``ended`` is
    the last round whose outcome the rank knows, and ``gave_up`` says why it ended that without the coordinator;
    ``generation`` is that of its connections (``gloo_tree.py``). Only the coordinator fills in ``lost``: the first few
    of the lost ranks (16,384 ranks read it), and one loss that stands for the others.
    """

    voted: int = -1
    progress: int = 0
    doing: str = "idle"
    calls: int = 0
    dcp_calls: int = 0
    ended: int = -1
    gave_up: str = ""
    generation: int = 0
    lost: Sequence[Loss] = ()

    def encode(self, count: int) -> str:
        return json.dumps([count, *dataclasses.astuple(self)])

    @staticmethod
    def decode(value: bytes) -> Beat:
        fields = json.loads(value)[1:]
        fields[-1] = [Loss(*each) for each in fields[-1]]
        return Beat(*fields)

    def owes_vote(self, round_number: int) -> bool:
        """Whether the others wait for the rank's vote in the round, or for its publication."""
        return self.voted < round_number or self.doing.startswith("publishing")

    def with_losses(self, losses: Sequence[Loss]) -> Beat:
        """This beat, telling of ``losses``."""
        more = len(losses) - _LISTED
        others = [Loss(-1, "is lost", count=more)] if more > 0 else []
        return dataclasses.replace(self, lost=[*losses[:_LISTED], *others])


@dataclass(frozen=True)
class Loss:
    """Why a rank counts as lost. ``certain``: its process has ended; the kernel may still finish a system call that it
    made. ``count``: how many ranks it stands for; if several, ``rank`` is -1.
    """

    rank: int
    reason: str
    certain: bool = False
    count: int = 1

    @staticmethod
    def error_of(losses: Sequence[Loss]) -> RankLostError:
        """The error that says which ranks are lost, and why. It names the first three ranks."""
        others = sum(loss.count for loss in losses[3:])
        more = f"; and {others} more ranks" if others else ""
        return RankLostError("; ".join(map(str, losses[:3])) + more)

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"


@dataclass
class Watched:
    """What this rank knows of another."""

    value: bytes = b""  # its latest beat as it was written; empty before the first
    beat: Beat = field(default_factory=Beat)
    silent: float = 0.0  # seconds without a new beat, counted while this rank was looking
    still: float = 0.0  # seconds without progress


def seconds_between_beats(ranks: int, *, active: bool = True) -> float:
    """The time between two beats of one rank; ``active`` while a save is in flight."""
    return max(_ACTIVE_SECONDS if active else _IDLE_SECONDS, _SECONDS_PER_RANK * ranks)


Listener = Callable[[list[Loss]], None]


class FailureDetector:
    """This rank's beat, and its watch over the others'.

    Args:
        store: where the beats are.
        status: returns this rank's beat; the failure detector's thread calls it.
    """

    def __init__(self, rank_set: RankSet, store: Connection, status: Callable[[], Beat]) -> None:
        self._rank_set = rank_set
        self._store = store
        self._status = status
        others = range(1, rank_set.world) if rank_set.rank == 0 else (0,)
        self._watched = {rank: Watched() for rank in others}
        self._lock = threading.RLock()  # guards what follows
        self._in_round = False
        self._store_error: str | None = None
        self._looked_at = time.monotonic()
        # The coordinator's beat from before the save: its losses are out of date.
        self._old_news = b""
        self._gone: list[Loss] = []  # those that were gone at _visited
        self._visited = 0.0
        self._count = 0  # how many beats this rank has written
        self._interval = _ACTIVE_SECONDS  # between two beats
        self._active: list[Listener | None] = []  # for each save in flight
        self._wake = threading.Event()  # set to beat now
        self._stopping = False
        self.is_started = False
        self._worker = Worker("dcp_datastates-heartbeat")
        # The thread's:
        self._has_keys = False  # the store has a key for each watched rank's beat

    # ---- any thread --------------------------------------------------------------------------

    def save_started(self, listener: Listener | None = None) -> None:
        """Note that a save has begun: beat every second until :meth:`save_ended` has been called as often as this. The
        detector's thread calls ``listener`` whenever ranks are lost meanwhile.

        The silence of ranks that have never beaten counts from here: they may have had no save before.
        """
        with self._lock:
            if not self._active:
                # A silent rank gets three beats' time: it was stopped, say, and comes back with this save.
                grace = 3 * seconds_between_beats(self._rank_set.world)
                for watched in self._watched.values():
                    watched.silent = min(watched.silent, SILENCE_SECONDS - grace)
            self._active.append(listener)
            self._expect_unheard()
            if self._rank_set.rank != 0:  # a lost rank may have come back
                self._old_news = self._watched[0].value
        self.register(0.0)
        self._wake.set()

    def register(self, seconds: float) -> None:
        """Start the thread, once. Returns when this rank has met rank 0, which can then see whether the process exists,
        or after ``seconds``.
        """
        with self._lock:
            self.is_started = self.is_started or self._worker.post(self._run)
        self._rank_set.incarnation.await_known(seconds)

    def _expect_unheard(self) -> None:
        for watched in self._watched.values():
            if not watched.value:
                watched.silent = 0.0

    def save_ended(self, listener: Listener | None = None) -> None:
        """Note that a save is over."""
        with self._lock:
            self._active.remove(listener)

    def expect_votes(self, expected: bool) -> None:
        """Note that a round begins, or has ended: in a round, each rank must be heard, and make progress."""
        with self._lock:
            self._in_round = expected
            self._expect_unheard()  # a rank may reach its first save late
            # Before the round there was no progress to make. The next look counts from the last one on.
            uncounted = time.monotonic() - self._looked_at
            for watched in self._watched.values():
                watched.still = -uncounted
        self._wake.set()

    @property
    def misses_store(self) -> bool:
        """Whether the store did not answer the latest beat."""
        return self._store_error is not None

    def ended(self, round_number: int) -> dict[int, str]:
        """The watched ranks that know the outcome of the round, and why they gave it up; empty if they did not."""
        beats = self._beats()
        return {rank: beat.gave_up for rank, beat in beats if beat.ended >= round_number}

    def newest_generation(self) -> int:
        """The newest generation of connections that a watched rank is in, or comes to."""
        return max(beat.generation for _, beat in self._beats())

    def losses(self) -> list[Loss]:
        """The ranks that are dead or silent now."""
        with self._lock:
            now = time.monotonic()
            if now - self._visited > _NEIGHBOUR_SECONDS:
                self._visited = now
                near = self._rank_set.incarnation.near
                self._gone = [_death(rank, who) for rank, who in near.items() if is_gone(who)]
            certain = {loss.rank for loss in self._gone}
            others = [loss for loss in self._told() + self._silent() if loss.rank not in certain]
            if self._store_error is not None:
                reason = (
                    f"or torchrun's agent, whichever hosts the store that the ranks meet at, is gone "
                    f"({self._store_error})"
                )
                others.append(Loss(0, reason))
            return self._gone + others

    @property
    def lost_coordinator(self) -> Loss | None:
        """The coordinator's loss, if its process is gone, or beats no more; None if it has never beaten."""
        losses = [each for each in self.losses() if each.rank == 0]
        return losses[0] if losses and (losses[0].certain or self.said_by_coordinator) else None

    def _told(self) -> list[Loss]:
        """The losses of which the coordinator's latest beat tells another rank."""
        coordinator = self._watched.get(0)
        if coordinator is None or coordinator.value == self._old_news:
            return []
        return [loss for loss in coordinator.beat.lost if loss.rank != self._rank_set.rank]

    def _silent(self) -> list[Loss]:
        # Outside a round, a rank may not have reached its first save yet.
        unheard = SILENCE_SECONDS if self._in_round else _UNSEEN_SECONDS
        return [
            Loss(
                rank,
                f"has been silent for {SILENCE_SECONDS:g} s or more: dead, stopped or cut off "
                f"(last seen: {watched.beat.doing})",
            )
            for rank, watched in self._watched.items()
            if watched.silent >= (SILENCE_SECONDS if watched.value else unheard)
        ]

    def stalled(self, seconds: float, round_number: int | None = None) -> list[Loss]:
        """The ranks that have made no progress for ``seconds``; if this is for a round, those that have not voted in
        it, or are publishing.
        """
        with self._lock:
            return [
                Loss(rank, f"has made no progress for {each.still:.0f} s ({each.beat.doing})")
                for rank, each in self._watched.items()
                if each.still >= seconds
                and (round_number is None or each.beat.owes_vote(round_number))
            ]

    def absent(self, calls: int, own: bool) -> list[int]:
        """The ranks whose latest beat counts fewer than ``calls`` calls of this package's ``async_save``, or (not
        ``own``) saves that DCP runs.
        """
        beats = self._beats()
        return [rank for rank, beat in beats if (beat.calls if own else beat.dcp_calls) < calls]

    def _beats(self) -> list[tuple[int, Beat]]:
        return [(rank, each.beat) for rank, each in self._watched.items()]

    @property
    def said_by_coordinator(self) -> str:
        """The phase that the coordinator's latest beat names; empty on the coordinator, and before its first beat."""
        coordinator = self._watched.get(0, Watched())
        return coordinator.beat.doing if coordinator.value else ""

    def close(self) -> None:
        """End the thread and wait for it. Idempotent."""
        self._stopping = True
        self._wake.set()
        self._worker.close(_CLOSE_SECONDS)  # the thread may be waiting for a store that is gone

    # ---- the failure detector's thread -------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            began = time.monotonic()
            try:
                if self._rank_set.rank == 0:  # look first: the beat contains the losses
                    self._look()
                if self._rank_set.incarnation.await_known(0.0):
                    self._beat()
                if self._rank_set.rank != 0:
                    self._look()
                error = self._rank_set.incarnation.store_error
            except Exception as failed:
                error = str(failed).partition("\n")[0][:200] or type(failed).__name__
            with self._lock:
                if error != self._store_error:
                    self._store_error = error
                    if error is not None and self._active:
                        logger.warning("the store that the ranks meet at fails: %s", error)
                active = bool(self._active) or self._in_round
                self._interval = seconds_between_beats(self._rank_set.world, active=active)
                listeners = [each for each in self._active if each is not None]
            if listeners and (losses := self.losses()):
                for listener in listeners:
                    try:
                        listener(losses)
                    except Exception:  # it may fail to start a thread; this thread must go on
                        logger.exception("a loss could not be told")
            del listeners
            if self._wake.wait(began + self._interval - time.monotonic()) and not self._stopping:
                time.sleep(_LEAST_SECONDS)  # a round wants news, and not more often

    def _beat(self) -> None:
        beat = self._status()
        if self._rank_set.rank == 0:
            # Leave out rank 0: the store's failure counts as its loss, and is over once this beat is written.
            beat = beat.with_losses([loss for loss in self.losses() if loss.rank != 0])
        if self._count == 0:
            former = f"commit/1/beat/{self._rank_set.rank}"  # jobs seldom make more groups of the same ranks
            self._rank_set.incarnation.delete_of_former(former)
        self._count += 1
        self._store.set(f"beat/{self._rank_set.rank}", beat.encode(self._count))

    def _look(self) -> None:
        # The system may have kept this thread from running. Count at most two intervals as silence: the other ranks may
        # have beaten all the while.
        now = time.monotonic()
        passed = min(now - self._looked_at, 2 * self._interval)
        self._looked_at = now
        values = self._values() if self._rank_set.incarnation.await_known(0.0) else {}
        with self._lock:
            for rank, watched in self._watched.items():
                watched.silent += passed
                watched.still += passed
                value = values.get(rank, b"")
                if value in (b"", watched.value):
                    continue
                beat = Beat.decode(value)
                watched.value, watched.silent = value, 0.0
                if beat != watched.beat:
                    watched.beat, watched.still = beat, 0.0

    def _values(self) -> dict[int, bytes]:
        """The watched ranks' beats, by one request."""
        keys = [f"beat/{rank}" for rank in self._watched]
        if not self._has_keys:  # a request for a key that is missing would wait for it
            if self._rank_set.rank == 0:
                self._store.multi_set(dict.fromkeys(keys, ""))
            elif not self._store.check(keys):
                return {}
            self._has_keys = True
        return dict(zip(self._watched, self._store.multi_get(keys), strict=True))


def _death(rank: int, who: str) -> Loss:
    host, _, pid, _ = who.split("|")
    return Loss(rank, f"is dead (process {pid} on {host} is gone)", True)


class RankWait:
    """One wait for other ranks: it ends once a rank is lost for good, and the log says what it waits for. For the
    waiting thread.

    Args:
        who: the waiter, which begins the line of the log.
        patience: for how many seconds a rank may count as lost without a break, if its process is not known to be gone:
            a silent rank may be back, and this rank may not have seen it yet.
    """

    def __init__(
        self, detector: FailureDetector, who: str, patience: float = RETURN_SECONDS
    ) -> None:
        self._detector = detector
        self._patience = patience
        self._since: float | None = None
        self._wait = Wait(logger, who)
        self._next = 1.0

    def look(self, what: Callable[[float], str] | None = None) -> None:
        """Call this repeatedly. Raises :class:`RankLostError`, which names the lost ranks. ``what`` says what this
        waits for, given the seconds so far. It is asked once a second, and may raise, too.
        """
        losses, now = self._detector.losses(), time.monotonic()
        self._since = (self._since or now) if losses else None
        late = self._since is not None and now - self._since >= self._patience
        if losses and (late or any(loss.certain for loss in losses)):
            raise Loss.error_of(losses)
        waited = self._wait.seconds
        if what is not None and waited >= self._next:
            self._next = waited + 1.0
            self._wait.look(what(waited))


def ranks_have(ranks: Sequence[int], more: int = 0) -> str:
    """In words, such as "rank 3 has", or "4 ranks (3, 5, 6, …) have". ``more``: further ranks."""
    count = len(ranks) + more
    named = ", ".join(map(str, ranks[:3])) + (", …" if count > 3 else "")
    return f"rank {named} has" if count == 1 else f"{count} ranks ({named}) have"
