"""Deletes old checkpoints, one after another, but never one that may still be needed; in the background, while training
continues (:class:`Deletions`). The next call completes what a crash interrupts.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch.distributed as dist

from dcp_datastates.checkpoints.delete import NotDeleted, delete_committed, delete_rest
from dcp_datastates.checkpoints.find import Replicas, Verification, check_verification, flaw
from dcp_datastates.checkpoints.first_rank import DEFAULT_TIMEOUT, from_first_rank
from dcp_datastates.checkpoints.inventory import has_rest, is_link, may_be_committed
from dcp_datastates.checkpoints.keep import Keep
from dcp_datastates.checkpoints.listing import Found, candidates, directories, newest_first
from dcp_datastates.checkpoints.pins import pins
from dcp_datastates.errors import DataStatesError
from dcp_datastates.process.ending import Phase, at_end
from dcp_datastates.process.forks import enter, public
from dcp_datastates.process.futures import Worker
from dcp_datastates.storage import attempts, decisions
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.object_path import AnyPath, Location, locate
from dcp_datastates.text import date

logger = logging.getLogger(__name__)

_CLOCK_SECONDS: Final = 60.0
"""By how much the clocks of storage may differ, and nothing is in doubt."""


@public("retain()")
def retain(
    root: AnyPath,
    *,
    keep: int | Keep,
    verify: Verification = "structure",
    process_group: dist.ProcessGroup | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Location]:
    """Delete the checkpoints in the directory ``root`` that ``keep`` does not ask for.

    ``keep`` is a number of the newest good ones, or a :class:`Keep` with further rules.

    A checkpoint is good if :func:`~dcp_datastates.latest` accepts it with the same ``verify``. By default, its metadata
    can be read and every data file is there with its exact size. ``"full"`` reads every byte of the newest that are
    kept; only then is a flipped bit detected before an older, intact checkpoint is deleted. Damaged checkpoints do not
    count, and are deleted once they are older than those; the last good checkpoint is never deleted.

    This never deletes: a pinned checkpoint (:func:`~dcp_datastates.pin`); directories that are not checkpoints of this
    package (stock DCP's, too); symbolic links; foreign files in a checkpoint's directory; a checkpoint that a save is
    replacing (it has an undecided attempt that is newer than those kept); and a checkpoint whose place in the
    order is in doubt, because the job that saved the newer ones did not see it.

    Every rank of ``process_group`` (default: all ranks) calls this; the first rank deletes, and all return or raise the
    same. Repeated calls are safe, also while another process calls this.

    Returns:
        The deleted checkpoints, newest first.

    Raises:
        ConfigurationError: ``keep`` cannot work; ``root`` is a file or itself a checkpoint.
        StorageError: ``root``, or a checkpoint that may be newer than those kept, cannot be read, and nothing was
            deleted; or the system refused to delete a file or directory.
        NoAnswerError: the first rank did not answer in ``timeout`` seconds.
    """
    directory = locate(root, options=storage_options)
    keep = Keep.of(keep)
    check_verification(verify)
    deleted = from_first_rank(
        lambda: [path.name for path in retain_here(directory, keep=keep, verify=verify).deleted],
        "retain",
        "which checkpoints were deleted",
        process_group,
        timeout,
    )
    return [directory / name for name in deleted]


@dataclass(frozen=True)
class Retained:
    """The result of :func:`retain_here`, newest first."""

    kept: list[Location] = field(default_factory=list)
    """The newest good checkpoints that count, and the older ones that a rule or a pin keeps; all of them, unopened, if
    there are fewer than ``keep`` asks for.
    """
    deleted: list[Location] = field(default_factory=list)
    newest: int = 0
    """How many of the ``kept``, the first ones, are the newest good checkpoints that count."""


def retain_here(
    root: AnyPath,
    *,
    keep: int | Keep,
    verify: Verification = "structure",
    among: Callable[[Location], bool] = lambda path: True,
    dry_run: bool = False,
    whole: bool = False,
) -> Retained:
    """Do the work of :func:`retain` in this process alone. Any thread.

    Args:
        root, keep, verify: as for :func:`retain`.
        among: the directories in ``root`` that count and may be deleted.
        dry_run: delete nothing; ``deleted`` then lists what would be deleted.
        whole: delete other files in a deleted checkpoint's directory, too: if directories are a framework's.
    """
    keep = Keep.of(keep)
    check_verification(verify)
    root = locate(root)
    paths = [path for path in candidates(root) if among(path) and may_be_committed(path)]
    if len(paths) < keep.last:
        return Retained(paths[::-1])
    paths = [path for path in paths if not is_link(path)]
    everything: list[Found] = []
    last: list[Found] = []
    replicas = Replicas(verify)
    for found in newest_first(paths):
        everything.append(found)
        if unknown := replicas.unknown([found]):
            logger.info("not counting checkpoint %s yet: %s", found.path, unknown)
        elif problem := flaw([found], verify):
            logger.warning("not counting checkpoint %s: %s", found.path, problem)
        else:
            last.append(found)
        if len(last) == keep.last:
            break
    retained = Retained([found.path for found in last], newest=len(last))
    if len(last) < keep.last:
        return retained
    seen = {found.path for found in everything}
    unopened = {path for path in paths if path not in seen and keep.asks_for_name(path.name)}
    older = list(newest_first(path for path in paths if path not in seen | unopened))
    everything += older
    keep.check_known(everything)
    best = keep.the_best(everything, lambda found: found in last or flaw([found], verify) is None)
    newest = -math.inf if keep.within is None else _time_of_newest(everything)
    for found in older:
        if found.error is not None:
            logger.warning("not deleting checkpoint %s: %s", found.path, found.error.strerror)
        elif found in best or keep.asks_for(found, newest) or _may_be_pinned(found.path):
            retained.kept.append(found.path)
        elif _is_older(found.attempt, found.path, last) and _delete(found, last, dry_run, whole):
            retained.deleted.append(found.path)
    retained.kept.extend(path for path in reversed(paths) if path in unopened)
    committed = unopened.union(found.path for found in everything).difference(retained.deleted)
    for path in directories(root):
        mine = path not in retained.deleted and among(path)
        if mine and path not in committed and _finish_deleting(path, last, dry_run, whole):
            retained.deleted.append(path)
    return retained


def _time_of_newest(everything: list[Found]) -> float:
    """The time of the newest commit, in seconds since the epoch, or an earlier time: a clock may be wrong, and may have
    been. The times are the coordinators'. A job may have paused since, so the age is not counted from now.
    """
    times = [found.committed.committed_at for found in everything if found.committed is not None]
    for newer, older in pairwise(times):
        if older > newer + _CLOCK_SECONDS:
            logger.warning(
                "not deleting by Keep(within=...): the times of commits, such as %s and %s, contradict their order; "
                "some clock was wrong, or files were copied",
                *map(date, (older, newer)),
            )
            return -math.inf
    return min(times[0], time.time()) if times else -math.inf


def _may_be_pinned(path: Location) -> bool:
    try:
        return bool(pins(path))
    except OSError as error:
        logger.warning("not deleting checkpoint %s: %s", path, error)
        return True


def _is_older(attempt: Attempt, path: Location, good: list[Found]) -> bool:
    """Whether the attempt at ``path`` is certainly older than all ``good`` ones.

    It is if it was there when they were claimed, or if the same process made it. Numbers alone do not prove it: another
    job, which did not see the attempt, may have had another clock.
    """
    for newer in good:
        if attempt >= newer.attempt:  # it was replaced while the checkpoints were listed
            return False
        after = None if newer.committed is None else newer.committed.note.after
        same = attempt.incarnation == newer.attempt.incarnation
        if not same and (after is None or after < attempt):
            text = (
                "not deleting checkpoint %s: it seems to be older than %s, but that was saved without seeing it, so "
                "the order is in doubt; dcp_datastates.delete deletes it"
            )
            logger.warning(text, path, newer.path)
            return False
    return True


def _delete(victim: Found, good: list[Found], dry_run: bool, whole: bool) -> bool:
    try:
        delete_committed(
            victim,
            dry_run=dry_run,
            whole=whole,
            is_abandoned=lambda attempt: _is_older(attempt, victim.path, good),
        )
    except NotDeleted as error:
        level = logging.WARNING if victim.committed is None else logging.INFO
        logger.log(level, "not deleting checkpoint %s: %s", victim.path, error.strerror)
        return False
    return True


def _finish_deleting(path: Location, good: list[Found], dry_run: bool, whole: bool) -> bool:
    try:
        if is_link(path) or attempts.is_taken(path):
            return False
        claimed = attempts.present(path)
        if not (claimed or has_rest(path)):
            return False
        saves = [attempt for attempt in claimed if decisions.state_of(path, attempt) is None]
    except OSError:  # another user's directory, say
        return False
    if saves and (saves[-1] >= good[-1].attempt or not _is_older(saves[-1], path, good)):
        return False
    try:
        return delete_rest(path, dry_run=dry_run, whole=whole)
    except NotDeleted:
        return False


# ---- in the background ---------------------------------------------------------------------------


_AT_END_SECONDS: Final = 600.0
"""How long the end of the process waits, after the last save: storage may hang."""

_all: weakref.WeakSet[Deletions] = weakref.WeakSet()


class Deletions:
    """Calls functions that delete, in order, in a thread of its own. The process waits ten minutes for it at its end.

    Any thread may call the methods. What a deletion raises is logged, with its traceback if it is not an error of
    storage, and the next one runs. If the thread cannot start, the next call tries again.
    """

    def __init__(self) -> None:
        self._running = threading.RLock()  # held by the thread that carries deletions out
        self._lock = threading.RLock()  # guards _due
        self._due: deque[Callable[[], object]] = deque()
        self._worker = Worker("dcp_datastates-delete")
        weakref.finalize(self, self._worker.finish).atexit = False
        _all.add(self)

    def request(self, delete: Callable[[], object]) -> None:
        """Have ``delete`` called; never waits. An equal function that still waits does the work of both."""
        with self._lock:
            if delete not in self._due:
                self._due.append(delete)
        if not self._worker.post(self._run):
            logger.warning("old checkpoints are deleted later: %s", self._worker.refusal)

    def wait(self, seconds: float | None = None) -> bool:
        """Return True when all that was requested is done (in this thread, if need be), or False after ``seconds``."""
        enter("waiting for deletions")
        if self._worker.post(self._run):
            return self._worker.wait(seconds)
        self._run()
        return True

    def _run(self) -> None:
        with self._running:
            while True:
                with self._lock:
                    if not self._due:
                        return
                    delete = self._due.popleft()
                try:
                    delete()
                except (DataStatesError, OSError) as error:
                    logger.warning("old checkpoints were not deleted: %s", error)
                except BaseException:
                    logger.exception("old checkpoints were not deleted, for an unexpected reason")
                del delete  # what it holds


def _finish_at_end() -> None:
    deadline = time.monotonic() + _AT_END_SECONDS
    for each in list(_all):
        if not each.wait(max(0.0, deadline - time.monotonic())):
            logger.error("the process ends, and a deletion of old checkpoints has not")


at_end(_finish_at_end, Phase.GIVE_UP)
