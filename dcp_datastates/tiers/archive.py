"""Carries committed checkpoints to a slower tier, in the background.

Each rank carries its own files (``carrying.py``). A checkpoint that is to be archived is committed with a pin of its
attempt, which keeps it from deletion until its copy is committed. The pin is all that a job needs after a restart, to
go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Final

from dcp_datastates.checkpoints.copy import committed_at
from dcp_datastates.checkpoints.delete import delete_committed, delete_rest
from dcp_datastates.checkpoints.first_rank import from_first_of
from dcp_datastates.checkpoints.listing import Found, checkpoints, directories, newest_first
from dcp_datastates.checkpoints.pins import pins, unpin
from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.errors import (
    CheckpointReplacedError,
    CommitOutcomeUnknown,
    DataStatesError,
    SaveAbandonedError,
    StorageError,
)
from dcp_datastates.process.ending import Phase, at_end
from dcp_datastates.process.futures import SharedFuture, Worker, when_done
from dcp_datastates.process.waiting import Wait
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.storage import attempts
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.object_path import Location, ObjectPath
from dcp_datastates.text import size
from dcp_datastates.tiers.carrying import Carrier
from dcp_datastates.tiers.node_store import NodeStore

logger = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 10.0
"""How long the end of the process waits for the part that is being written, once it has given up."""

_LOOK_SECONDS: Final = 0.5
"""Between two looks whether a full fast tier has room."""


@dataclass(eq=False)
class _Item:
    """A checkpoint on its way."""

    path: Location
    """On the fast tier."""
    attempt: Attempt
    archived: SharedFuture = field(default_factory=SharedFuture)
    then: Callable[[], object] | None = None
    since: float = field(default_factory=time.monotonic)


class Archive:
    """A slower tier of a run. :func:`archive_of` makes one for each directory and set of ranks.

    Threads: ``dcp_datastates-archive`` carries the checkpoints, one after another. It starts with the first, and ends
    with the process. Any thread may call the methods.
    """

    def __init__(self, slow: Location, group: CommitGroup, number: int) -> None:
        self.slow: Final = slow
        self.beside: Sequence[Location] = ()
        """The run's other archives. A checkpoint is pinned until all have it."""
        self.exit_timeout = 600.0
        """How long the end of the process waits, in seconds."""
        self._rank_set = group.rank_set
        self._key = f"archive{number}"
        self._carrier = Carrier(group, number)
        self._worker = Worker("dcp_datastates-archive")
        self._carried: set[Attempt] = set()
        """A checkpoint that is committed while :meth:`open` looks comes twice, on all ranks."""
        self._lock = threading.RLock()  # guards what follows
        self._items: list[_Item] = []
        self._opened: dict[Location, SharedFuture] = {}

    def open(self, fast: Location) -> None:
        """Go on with the checkpoints below ``fast`` that are still to be archived. Every rank calls this, in the same
        order. Both directories are of one run: see :func:`~dcp_datastates.tiers.run_identity.check_one_run`.
        """
        with self._lock:
            if fast in self._opened:
                return
            opened = self._opened[fast] = SharedFuture()
        if not self._worker.post(lambda: self._open(fast, opened)):
            opened.settle(SaveAbandonedError(self._worker.refusal))

    @property
    def items(self) -> list[_Item]:
        """The checkpoints that this process is still to archive."""
        with self._lock:
            return list(self._items)

    def wait(self, seconds: float | None = None) -> bool:
        """Return True when all that was committed is archived, or has failed to be; False after ``seconds``.

        What a former job has left to archive counts, too.
        """
        began = time.monotonic()
        if wait(list(self._opened.values()), seconds).not_done:
            return False
        left = None if seconds is None else max(0.0, seconds - (time.monotonic() - began))
        return not wait([item.archived for item in self.items], left).not_done

    def close(self) -> None:
        """Give up what is not archived: a pin keeps it for the next start."""
        self._carrier.close()
        self._worker.close(_CLOSE_SECONDS)

    def add(
        self,
        save: SaveOperation,
        archived: SharedFuture,
        rate: int,
        then: Callable[[], object] | None,
    ) -> None:
        """Archive ``save``, whose outcome is known; see :func:`archive_save`. Never waits."""
        self.exit_timeout = save.config.exit_timeout
        self._carrier.pace.rate = rate
        error, path, attempt = save.committed.peek(), save.path, save.attempt
        # A commit whose outcome is not known here may be known to the other ranks: they wait for this one's files.
        if path is None or attempt is None or not isinstance(error, CommitOutcomeUnknown | None):
            archived.settle(error or SaveAbandonedError("the save has no path"))
            return
        self.open(path.parent)
        item = _Item(path, attempt, archived, then)
        with self._lock:
            self._items.append(item)
        if not self._worker.post(lambda: self._carry(item)):
            refusal = self._worker.refusal
            self._end(item, SaveAbandonedError(f"{path} is not archived: {refusal}"))

    # ---- the archive's thread ----------------------------------------------------------------------

    def _open(self, fast: Location, opened: SharedFuture) -> None:
        try:
            found = from_first_of(
                self._rank_set,
                lambda: self._carrier.until_done(lambda: self._unfinished(fast), self.slow),
                self._key,
                f"what of {fast} is still to be archived",
                math.inf,
            )
        except BaseException as error:
            logger.error("nothing of %s is archived: %s", fast, error)
            opened.settle(error)
            return
        items = [_Item(fast / name, Attempt(*numbers)) for name, *numbers in found]
        with self._lock:
            self._items += items  # before the future is done: who waits for both misses none
        opened.settle(None)
        # Here and now: all ranks carry the same checkpoints in the same order.
        for item in items:
            logger.info("%s is not archived yet: going on", item.path)
            self._carry(item)

    def _unfinished(self, fast: Location) -> list[tuple[str, int, int]]:
        """On the first rank: the checkpoints that an earlier process has pinned, the oldest first, by their names and
        the numbers of their attempts. Removes the rests of copies that no fast tier has any more.
        """
        held = {item.path for item in self.items}
        pinned, left = set(), []
        for found in newest_first(checkpoints(fast)):
            for attempt, name in _pins(found.path):
                if attempt == found.attempt:
                    pinned.add(found.path.name)
                    if found.path not in held:
                        left.append((found.path.name, *dataclasses.astuple(attempt)))
                elif attempt < found.attempt:
                    unpin(found.path, name)  # the checkpoint that it kept was replaced
        for path in directories(self.slow):
            if path.name not in pinned and not attempts.is_taken(path) and attempts.present(path):
                with _logged(f"the rest of a copy stays in {path}"):
                    if delete_rest(path):
                        logger.info("removed the rest of a copy from %s", path)
        return left[::-1]

    def _carry(self, item: _Item) -> None:
        began = time.monotonic()
        try:
            if (failure := self._opened[item.path.parent].peek()) is not None:
                raise failure
            if item.attempt not in self._carried:
                self._carrier.carry(item.path, item.attempt, self.slow / item.path.name)
                self._carried.add(item.attempt)
        except BaseException as error:
            level = logging.INFO if isinstance(error, SaveAbandonedError) else logging.ERROR
            logger.log(level, "%s is not archived: %s", item.path, error)
            if isinstance(error, CheckpointReplacedError) and self._rank_set.rank == 0:
                self._unpin(item)
            self._end(item, error)
            return
        if self._rank_set.rank == 0:
            seconds = time.monotonic() - began
            logger.info("archived %s in %s in %.1f s", item.path, self.slow, seconds)
            with _logged(f"{item.path} stays pinned"):
                if all(_has(slow, item.path, item.attempt) for slow in self.beside):
                    self._unpin(item)
            if item.then is not None:
                with _logged(f"after {item.path} was archived"):
                    item.then()
        self._end(item, None)

    def _unpin(self, item: _Item) -> None:
        """Remove the pin, and those of older attempts, which were never committed."""
        with _logged(f"{item.path} stays pinned"):
            for attempt, name in _pins(item.path):
                if attempt <= item.attempt:
                    unpin(item.path, name)

    def _end(self, item: _Item, error: BaseException | None) -> None:
        with self._lock:
            self._items.remove(item)
        item.archived.settle(error)


def _pins(path: Location) -> list[tuple[Attempt, str]]:
    """The archives' pins of the checkpoint: of which attempt, and the pin's name."""
    found = [(Attempt.parse(name.removeprefix("archive.")), name) for name in pins(path)]
    return [(attempt, name) for attempt, name in found if attempt is not None]


def _has(slow: Location, path: Location, attempt: Attempt) -> bool:
    """Whether the archive ``slow`` has the checkpoint, or a newer one in its place."""
    there = committed_at(slow / path.name)
    return there is not None and there >= attempt


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Logs an error of storage in the block, and goes on."""
    try:
        yield
    except (DataStatesError, OSError) as error:
        logger.warning("%s: %s", what, error)


_lock = threading.RLock()  # guards _archives
_archives: dict[tuple[str, Location], Archive] = {}


def archive_of(slow: Location, group: CommitGroup) -> Archive:
    """This process's archive below ``slow`` for the ranks of ``group``. Every rank makes the same calls."""
    with _lock:
        key = group.name, slow
        if key not in _archives:
            number = sum(name == group.name for name, _ in _archives)
            _archives[key] = Archive(slow, group, number)
        return _archives[key]


def archive_lag() -> tuple[int, float]:
    """How many committed checkpoints this process is still to archive, and for how many seconds the first has waited
    (0 if there is none).
    """
    with _lock:
        archives = list(_archives.values())
    since = [item.since for archive in archives for item in archive.items]
    return len(since), time.monotonic() - min(since) if since else 0.0


def archive_save(
    save: SaveOperation, slow: Location, rate: int, then: Callable[[], object] | None = None
) -> Future[None]:
    """Archive ``save`` below ``slow`` once it is committed. Call this before the save is planned.

    The future is done when the copy is committed on the slow tier; it has the error if the save has failed, or cannot
    be archived. The archive's thread calls ``then`` on the first rank, after the copy's commit. ``rate``: how many
    bytes per second this rank may carry; 0: no limit.
    """
    archived, others = SharedFuture(), save.archived
    save.archived = archived if others is None else _both(others, archived)
    # Only then is the group known: DCP may have said meanwhile that this process saves alone.
    when_done(
        save.committed, lambda _: archive_of(slow, save.group).add(save, archived, rate, then)
    )
    return archived


def _both(one: Future[None], other: Future[None]) -> SharedFuture:
    both = SharedFuture()

    def end(_: object) -> None:
        both.settle(one.exception() or other.exception())

    when_done(one, lambda _: when_done(other, end))
    return both


# ---- a full fast tier ----------------------------------------------------------------------------


def make_room(fast: Location, archives: Sequence[Archive], nbytes: int, seconds: float) -> None:
    """Return when ``fast`` has room for ``nbytes``: its file system, or the memory of the nodes.

    Deletes checkpoints that are archived, the oldest first, but never the newest of all. If that is not enough, waits
    until more is archived, for at most ``seconds``: the save that follows may then fail, for want of space.
    """
    log, deadline = Wait(logger, f"the save to {fast}", first=0.0), time.monotonic() + seconds
    while _free(fast) < nbytes:
        waiting = [each for each in archives if not each.wait(0.0)]  # before what is archived
        for found in reversed([*newest_first(checkpoints(fast))][1:]):
            if _free(fast) < nbytes:
                _evict(found, archives)
        if (free := _free(fast)) >= nbytes:
            return
        if not waiting or time.monotonic() >= deadline:
            logger.warning(
                "%s has room for %s, and a save needs about %s; what is archived is deleted there already",
                *(fast, size(free), size(nbytes)),
            )
            return
        log.look(f"it needs room, which comes when more is archived in {waiting[0].slow}")
        waiting[0].wait(_LOOK_SECONDS)


def _free(fast: Location) -> float:
    if not isinstance(fast, ObjectPath):
        return shutil.disk_usage(fast).free
    if not isinstance(fast.store, NodeStore):  # no store tells
        return math.inf
    try:
        return fast.store.left(fast.key)
    except StorageError as error:  # the save will say so, too
        logger.warning("whether there is room for a save is not known: %s", error)
        return math.inf


def _evict(found: Found, archives: Sequence[Archive]) -> None:
    try:
        if any(item.path == found.path for each in archives for item in each.items):
            return
        if all(committed_at(each.slow / found.path.name) == found.attempt for each in archives):
            delete_committed(found)
            logger.info("deleted %s, which is archived, to make room", found.path)
    except DataStatesError as error:  # it is pinned, or the archive does not answer
        logger.warning("%s stays, though it is in the way: %s", found.path, error)


# ---- the end of the process ----------------------------------------------------------------------


def _finish_at_end() -> None:
    began = time.monotonic()
    with _lock:
        archives = list(_archives.values())
    for archive in archives:
        if not archive.wait(max(0.0, archive.exit_timeout - (time.monotonic() - began))):
            logger.warning("the process ends before all is archived below %s", archive.slow)
        archive.close()


at_end(_finish_at_end, Phase.GIVE_UP)
