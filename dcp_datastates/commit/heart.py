"""Heartbeats in a c10d store: who is alive, who makes progress, and what the others have decided.

gloo alone is slow to notice a lost rank and never names it. So every rank writes a beat to the store once
a second. The coordinator reads all of them, and says in its own who is lost; the others read the coordinator's: two
requests a second and rank, less often in a large job. A rank is

- *dead* if its process is gone, which is certain, and seen at once, on the same machine;
- *silent* if its beat has stood still for :data:`SILENCE_SECONDS`: dead, stopped, or cut off. A rank
  that has shown that it may be kept from beating for long (a call that holds the GIL: unpickling the metadata of
  thousands of ranks takes many seconds) says so in its beat, and is given three times as long in addition;
- *stalled* if it beats and has not voted in a round, and has made no progress towards it for the round's
  ``commit_timeout``.

A beat says how far the rank's own save has come, so flushes that take longer on one rank than on another
time no rank out. One thread, ``dcp_datastates-heart``: it ends with :meth:`Heart.close`, and touches nothing but
the store and the fields below ``_lock``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dcp_datastates.commit.decision import Reason
from dcp_datastates.commit.decision_log import DecisionLog
from dcp_datastates.commit.peers import Connection, Peers
from dcp_datastates.commit.protocol import Said
from dcp_datastates.errors import RankLostError
from dcp_datastates.forks import ProcessLock

__all__ = ["SILENCE_SECONDS", "Beat", "Heart", "Loss"]

logger = logging.getLogger(__name__)

SILENCE_SECONDS: Final = 15.0
"""A rank whose beat has not changed for this long counts as lost."""

_UNSEEN_SECONDS: Final = 300.0
"""The same for a rank that has never been heard of: it may not have come to its first save yet."""

_FIRST_SAVE_SECONDS_PER_RANK: Final = 0.1
"""In addition, until a rank has voted for the first time: how long it will be kept busy grows with the job."""

_CLOSE_SECONDS: Final = 2.0

_NEIGHBOUR_SECONDS: Final = 0.1
"""Between two looks whether the processes on this machine are there."""

_ACTIVE_SECONDS: Final = 1.0
"""Between two beats while a save is in flight."""

_IDLE_SECONDS: Final = 4.0
"""Between two beats while none is."""

_SECONDS_PER_RANK: Final = 1.2e-4
"""Between two beats, at the least: two requests of 11.3 us each then take a fifth of the store's only thread."""


def seconds_between_beats(ranks: int, *, active: bool = True) -> float:
    """Of one of so many ranks; ``active`` while a save is in flight."""
    return max(_ACTIVE_SECONDS if active else _IDLE_SECONDS, _SECONDS_PER_RANK * ranks)


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself: the last round it voted in, and how far it has come towards the next.

    ``progress`` is a number that changes as long as there is any; ``doing`` says in words what it counts;
    ``late`` is by how many seconds its latest beat has come too late; ``calls`` is how many saves it has been called
    for; ``ended`` is the last round whose outcome it knows. ``lost`` is what the coordinator says of other ranks, as
    the fields of a :class:`Loss`.
    """

    voted: int = -1
    progress: int = 0
    doing: str = "idle"
    late: int = 0
    calls: int = 0
    ended: int = -1
    lost: Sequence[Sequence[Any]] = ()

    def encode(self, count: int) -> str:
        return json.dumps([count, *dataclasses.astuple(self)])

    @staticmethod
    def decode(value: bytes) -> Beat:
        return Beat(*json.loads(value)[1:])


@dataclass(frozen=True)
class Loss:
    """Why a rank is counted out. ``certain``: its process has ended, though the system may yet finish a call of it."""

    rank: int
    reason: str
    certain: bool = False

    @staticmethod
    def reason_of(losses: Sequence[Loss]) -> Reason:
        """Which ranks are lost, and why; the first few of them."""
        more = f"; and {len(losses) - 3} more ranks" if len(losses) > 3 else ""
        return Reason.of(RankLostError("; ".join(map(str, losses[:3])) + more))

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"


@dataclass
class _Watched:
    """What is known of one rank."""

    value: bytes = b""
    heard: bool = (
        False  # a second value has come: the first may be of a former group over the same store
    )
    beat: Beat = Beat()
    silent: float = 0.0  # seconds without a new beat, by observations made
    still: float = 0.0  # seconds without progress
    who: str | None = None
    near: bool = False  # on this machine, so that its process can be seen


@functools.cache
def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When the process started, in the kernel's ticks; None if it is gone, or a zombie.

    Raises OSError if that cannot be known (too many open files, say).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def _identity() -> str:
    """Machine, process and start: enough for a neighbour to see that the process is gone."""
    try:
        return f"{socket.gethostname()}|{_boot()}|{os.getpid()}|{_started(os.getpid())}"
    except OSError:  # then no rank sees its process
        return f"{socket.gethostname()}||{os.getpid()}|"


def _is_gone(who: str) -> bool:
    _, boot, pid, started = who.split("|")
    try:
        return boot == _boot() != "" and _started(int(pid)) != started
    except OSError:
        return False


class Heart:
    """This rank's beat, and its watch over the others'.

    Args:
        peers: the ranks.
        store: a connection to the store for this thread alone.
        status: what to say of this rank; called by the heart's thread.
    """

    def __init__(self, peers: Peers, store: Connection, status: Callable[[], Beat]) -> None:
        self._peers = peers
        self._store = store
        self._decisions = DecisionLog(store)
        self._status = status
        self._watched = {
            rank: _Watched()
            for rank in (range(1, peers.world) if peers.rank == 0 else (0,))
            if rank != peers.rank
        }
        self._lock = ProcessLock()  # guards what follows
        self._round: int | None = None
        self._said: Said | None = None  # what the coordinator has decided in it
        self._store_error: str | None = None
        self._looked_at = time.monotonic()
        self._told: list[Loss] = []  # what the coordinator says
        self._old_news = b""  # its beat before the save began: not to be believed any more
        self._silent: list[Loss] = []
        self._gone: list[Loss] = []
        self._visited = 0.0
        self._late = 0
        self._count = 0  # of this rank's beats
        self._interval = _ACTIVE_SECONDS  # between two of them
        self._active = 0
        self._wake = threading.Event()  # set to beat now
        self._stopping = False
        self._listeners: list[Callable[[list[Loss]], None]] = []
        self._identity = _identity()
        self._boot = self._identity.split("|")[1]
        self._thread = threading.Thread(
            target=self._run, name="dcp_datastates-heart", daemon=True
        )  # joined by close()
        self._started = False
        self._introduced = threading.Event()  # set when the others can know of this rank

    # ---- any thread --------------------------------------------------------------------------

    def listen(self, listener: Callable[[list[Loss]], None]) -> None:
        """Have ``listener`` called, by the heart's thread, while a save is on and ranks are lost."""
        with self._lock:
            self._listeners.append(listener)

    def forget(self, listener: Callable[[list[Loss]], None]) -> None:
        """Undo :meth:`listen`."""
        with self._lock:
            self._listeners = [other for other in self._listeners if other != listener]

    def quicken(self) -> None:
        """A save has begun: beat every second until as many :meth:`slow` have come.

        How long a rank has not been heard of at all counts from here: it need not have saved anything before.
        """
        with self._lock:
            self._active += 1
            self._expect_unheard()
            if self._peers.rank != 0:  # a rank that was lost may be back since
                self._told, self._old_news = [], self._watched[0].value
        self.introduce(0.0)
        self._wake.set()

    def introduce(self, seconds: float) -> None:
        """Start the thread, once; returns when the other ranks can see of this one whether it is there, or after
        ``seconds``.
        """
        with self._lock:
            if not self._started:
                self._thread.start()
                self._started = True
        self._introduced.wait(seconds)

    def _expect_unheard(self) -> None:
        for watched in self._watched.values():
            if not watched.heard:
                watched.silent = 0.0

    def slow(self) -> None:
        """A save is over."""
        with self._lock:
            self._active -= 1

    def follow(self, round_number: int | None) -> None:
        """Look for the others' decision about this round with every beat from now on."""
        with self._lock:
            self._round = round_number
            self._said = None
            self._expect_unheard()  # it came to its first save just now, perhaps late
            for watched in self._watched.values():
                watched.still = 0.0  # before the round, there was nothing to make progress with
        self._wake.set()

    @property
    def said(self) -> Said | None:
        """What the coordinator has decided in the round that is followed; None so far, and on the coordinator."""
        with self._lock:
            return self._said

    @property
    def misses_store(self) -> bool:
        """Whether the store did not answer the latest beat."""
        with self._lock:
            return self._store_error is not None

    def ended(self, round_number: int) -> list[int]:
        """The other ranks that know an outcome of the round."""
        with self._lock:
            return [rank for rank, each in self._watched.items() if each.beat.ended >= round_number]

    def losses(self) -> list[Loss]:
        """The ranks that are dead or silent now."""
        with self._lock:
            now = time.monotonic()
            if now - self._visited > _NEIGHBOUR_SECONDS:
                self._visited = now
                near = [rank for rank, watched in self._watched.items() if watched.near]
                self._gone = [loss for rank in near if (loss := self._visit(rank))]
            certain = {loss.rank for loss in self._gone}
            others = [loss for loss in self._told + self._silent if loss.rank not in certain]
            if self._store_error is not None:
                reason = (
                    f"or torchrun's agent, whichever hosts the store that the ranks meet at, is gone "
                    f"({self._store_error})"
                )
                others.append(Loss(0, reason))
            return self._gone + others

    def _visit(self, rank: int) -> Loss | None:
        who = self._watched[rank].who
        if who is None or not _is_gone(who):
            return None
        host, _, pid, _ = who.split("|")
        return Loss(rank, f"is dead (process {pid} on {host} is gone)", True)

    def _is_silent(self, watched: _Watched) -> bool:
        if not watched.heard and self._round is None:
            return watched.silent >= _UNSEEN_SECONDS  # once a round is on, every rank has come
        patience = SILENCE_SECONDS + 3 * watched.beat.late
        if watched.beat.voted < 0:
            patience += _FIRST_SAVE_SECONDS_PER_RANK * self._peers.world
        return watched.silent >= patience

    def stalled(self, round_number: int, seconds: float) -> list[Loss]:
        """The ranks that beat, owe a vote in the round, and came no further for ``seconds``."""
        with self._lock:
            return [
                Loss(
                    rank,
                    f"is alive, but has made no progress for {watched.still:.0f} s "
                    f"({watched.beat.doing})",
                )
                for rank, watched in self._watched.items()
                if watched.still >= seconds
                and (
                    watched.beat.voted < round_number or watched.beat.doing.startswith("publishing")
                )
            ]

    def absent(self, calls: int) -> list[int]:
        """The ranks that have been called for fewer saves than ``calls``, as far as is known here."""
        with self._lock:
            return [rank for rank, each in self._watched.items() if each.beat.calls < calls]

    def standing_still(self, seconds: float) -> list[Loss]:
        """The ranks that have come no further for ``seconds``, whatever they do."""
        with self._lock:
            return [
                Loss(rank, f"has made no progress for {each.still:.0f} s ({each.beat.doing})")
                for rank, each in self._watched.items()
                if each.still >= seconds
            ]

    @property
    def said_by_coordinator(self) -> str:
        """What the coordinator is doing, in its own words; empty on the coordinator, and before it has beaten."""
        with self._lock:
            coordinator = self._watched.get(0)
            return coordinator.beat.doing if coordinator is not None and coordinator.value else ""

    def await_loss(self) -> list[Loss]:
        """The ranks that are lost, as soon as there are any; none if none is found in due time."""
        deadline = time.monotonic() + SILENCE_SECONDS + 3 * _ACTIVE_SECONDS
        self.quicken()
        try:
            while not (losses := self.losses()) and time.monotonic() < deadline:
                time.sleep(0.1)
            return losses
        finally:
            self.slow()

    def close(self) -> None:
        """End the thread and wait for it. Idempotent."""
        self._stopping = True
        self._wake.set()
        with self._lock:
            started, self._started = self._started, True
        if started and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)  # it may be waiting for a store that is gone

    # ---- the heart's thread -------------------------------------------------------------------

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping:
            self._wake.clear()
            began = time.monotonic()
            self._late = max(self._late, int(began - due))
            try:
                if not self._introduced.is_set():
                    self._store.set(f"who/{self._peers.rank}", self._identity)
                    self._introduced.set()
                if self._peers.rank == 0:  # it says what it has seen
                    self._look()
                self._beat()
                if self._peers.rank != 0:
                    self._look()
                error = None
            except Exception as failed:
                error = str(failed).partition("\n")[0][:200] or type(failed).__name__
            with self._lock:
                if error != self._store_error:
                    self._store_error = error
                    if error is not None and self._active:
                        logger.warning("the store that the ranks meet at fails: %s", error)
                active = self._active > 0 or self._round is not None
                self._interval = seconds_between_beats(self._peers.world, active=active)
                listeners = list(self._listeners) if active else []
            if listeners and (losses := self.losses()):
                for listener in listeners:
                    try:
                        listener(losses)
                    except Exception:  # there can be no more threads, say; this one must go on
                        logger.exception("a loss could not be told")
            del listeners
            due = self._pause(began + self._interval)

    def _pause(self, until: float) -> float:
        """Wait until then, or until woken; returns when the next beat was due."""
        while not self._stopping and (left := until - time.monotonic()) > 0:
            if self._wake.wait(left):
                # Woken by a round that wants news; but never beat more than ten times a second.
                self._wake.clear()
                until = min(until, time.monotonic() + 0.1)
        return until

    def _beat(self) -> None:
        beat = dataclasses.replace(self._status(), late=self._late)
        if self._peers.rank == 0:
            # That it has missed the store itself is over when it can say so.
            lost = [dataclasses.astuple(loss) for loss in self.losses() if loss.rank != 0]
            beat = dataclasses.replace(beat, lost=lost)
        self._count += 1
        self._store.set(f"beat/{self._peers.rank}", beat.encode(self._count))

    def _look(self) -> None:
        # This thread may itself have been kept from running: then the others' beats are no older than
        # its last look, however late it is, and it counts no more silence than an interval or two.
        now = time.monotonic()
        passed = min(now - self._looked_at, 2 * self._interval)
        self._looked_at = now
        self._read_beats(passed)
        if self._peers.rank == 0:
            return
        coordinator = self._watched[0]
        told = [Loss(*loss) for loss in coordinator.beat.lost if loss[0] != self._peers.rank]
        with self._lock:
            news = coordinator.heard and coordinator.value != self._old_news
            self._told = told if news else []
            round_number = self._round
        if round_number is None or not coordinator.heard or coordinator.beat.ended < round_number:
            return
        decision = self._decisions.find(round_number)
        with self._lock:
            if self._round == round_number:
                self._said = Said(decision)

    def _read_beats(self, passed: float) -> None:
        for rank, watched in self._watched.items():
            if watched.who is None and self._store.check([f"who/{rank}"]):
                watched.who = self._store.get(f"who/{rank}").decode()
                boot = watched.who.split("|")[1]
                watched.near = bool(boot) and boot == self._boot
        ranks = [rank for rank, watched in self._watched.items() if watched.value]
        new = [rank for rank, watched in self._watched.items() if not watched.value]
        if new and self._store.check([f"beat/{rank}" for rank in new]):
            ranks += new
        else:
            ranks += [rank for rank in new if self._store.check([f"beat/{rank}"])]
        values = self._store.multi_get([f"beat/{rank}" for rank in ranks]) if ranks else []
        with self._lock:
            for watched in self._watched.values():
                watched.silent += passed
                watched.still += passed
            for rank, value in zip(ranks, values, strict=True):
                watched = self._watched[rank]
                if value == watched.value:
                    continue
                beat = Beat.decode(value)
                watched.heard = watched.heard or bool(watched.value)
                watched.value, watched.silent = value, 0.0
                if beat != watched.beat:
                    watched.beat, watched.still = beat, 0.0
            self._silent = [
                Loss(
                    rank,
                    f"has been silent for {SILENCE_SECONDS:g} s or more: dead, stopped or cut off "
                    f"(last seen: {watched.beat.doing})",
                )
                for rank, watched in self._watched.items()
                if self._is_silent(watched)
            ]
