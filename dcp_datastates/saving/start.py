"""How a save starts: its path is checked, and the training thread stages its state; another thread plans it.

And the saves that are in flight: what a call does when they come faster than they commit (wait, or skip itself), and
how a process finishes the last ones before it ends, and before it destroys its process groups. A rank decides alone to
leave a save out. The first message of planning tells the other ranks: if any rank leaves a save out, all do.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dcp_datastates._native import Window
from dcp_datastates.commit.group import CommitGroup, commit_group
from dcp_datastates.config import Reads, WhenBehind, WriterConfig
from dcp_datastates.errors import (
    CheckpointSkipped,
    CheckpointSupersededError,
    ConfigurationError,
)
from dcp_datastates.io.devices import accelerator
from dcp_datastates.io.engine import engine
from dcp_datastates.process.ending import Phase, at_end, at_exit
from dcp_datastates.process.futures import finish_callbacks
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.process.waiting import Wait
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.results import SaveStats
from dcp_datastates.saving.operation import LEFT_OUT, SaveOperation
from dcp_datastates.saving.outcome import SaveOrigin
from dcp_datastates.staging import step_gate
from dcp_datastates.staging.ownership import Ownership, known_optimizers
from dcp_datastates.staging.stage import stage_state
from dcp_datastates.storage import attempts, claims, local, operations
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.bounded import bounded
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import (
    AnyPath,
    Location,
    ObjectPath,
    check_prefix,
    is_url,
    locate,
    locate_all,
)


def writable(
    path: str | os.PathLike[str] | ObjectPath,
    config: WriterConfig,
    alone: bool,
    below: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Location:
    """The place that ``path`` names; a relative path is below ``below`` (None: the present working directory).

    ``options`` are the user's ``storage_options``. Opens a store, and does not ask it.

    Raises :class:`ConfigurationError`. With several ranks, perhaps only some find more faults: :func:`check_path`
    reports these to all. A process ``alone`` finds them now.
    """
    location = locate(path, below, options)
    if isinstance(location, ObjectPath):
        check_prefix(location)
    elif alone:
        check = functools.partial(local.check_writable, location)
        bounded("looking at", location, config.commit_timeout, check)
    return location


def archive_roots(
    archive: AnyPath | Sequence[AnyPath] | None, options: Mapping[str, Any] | None
) -> tuple[Location, ...]:
    """The directories of archives that a user names, whose stores it opens. Raises :class:`ConfigurationError`."""
    if archive is None:
        return ()
    any_url = any(map(is_url, archive if isinstance(archive, list | tuple) else [archive]))
    return locate_all(archive, options if any_url else None)


def check_path(save: SaveOperation) -> None:
    """Raise early if this rank cannot write there. The coordinator's claim tells whether the checkpoint may be written,
    and in a store, whether it can be: ranks that asked it, too, would only cost requests.
    """
    hit("plan.before")
    location = save.resolved_path()
    if isinstance(location, Path):
        check = functools.partial(local.check_writable, location)
        save.on_storage("looking at the path", check)
    hit("plan.after")


def directories_to_sync(folder: Path, rank: int) -> list[str]:
    """The directories to sync for files in the ``folder`` of an attempt.

    Raises :class:`ConfigurationError` if this rank has it not, :class:`CheckpointSupersededError` if another job has
    removed it.
    """
    # Create it again, which must fail because it exists. Creating asks the server of a network file system; a lookup
    # may use a cached "missing" for half a minute.
    made = local.make_directories(folder, "share")
    if not made:
        return [str(parent) for parent in local.sync_directories(folder)]
    for path in made:
        with contextlib.suppress(OSError):
            operations.remove_directory(path, "share")
    mine = Attempt.parse(folder.name)
    beside = attempts.present(folder.parent) if made == [folder] else []
    if mine is not None and beside and beside[-1] > mine:
        raise CheckpointSupersededError(
            f"the folder of attempt {mine.name} at {str(folder.parent)!r} is gone: another job saves to the same path, "
            f"as attempt {beside[-1].name}"
        )
    raise ConfigurationError(
        f"rank {rank} on {socket.gethostname()} does not see {str(folder)!r}, which the coordinator has just created: "
        f"the checkpoint's path must be one directory for all ranks, on a shared file system"
    )


def prepare(rank_set: RankSet, config: WriterConfig) -> CommitGroup:
    """The commit group for saves of these ranks. Makes the engine that they use."""
    engine(config.host_cache_bytes)
    group = commit_group(rank_set)
    if group.detector is not None:
        # From then on the other ranks see immediately if this process dies. Done once, by the detector's thread.
        group.detector.register(seconds=1.0)
    return group


def stage_save(
    group: CommitGroup,
    config: WriterConfig,
    origin: SaveOrigin,
    path: Location | None,
    state_dict: Mapping[str, Any],
    in_columns: bool,
    metrics: Mapping[str, float],
    *,
    stats: SaveStats,
) -> SaveOperation:
    """The part of ``async_save`` in the training thread: stage the state, and arm the step gate for deferred reads.

    Args:
        origin: which API and thread run the save.
        path: the checkpoint's directory; None if DCP passes it later.
        in_columns: whether the save may be planned in columns, and so wants a fingerprint.
        metrics: the numbers by which the user compares checkpoints.
        stats: made when the call began; the save's from now on.

    May wait for earlier saves (``when_behind``). If staging fails, a rank alone raises here; with several ranks, the
    save carries the error, and planning tells the others.
    """
    if accelerator.capturing():
        raise ConfigurationError(
            "async_save was called while a CUDA graph is being captured; call it outside"
        )
    before = stats.timeline.seconds
    left_out = make_room(config.max_in_flight, config.when_behind)
    stats.room_seconds = stats.timeline.seconds - before
    save = SaveOperation(group, config, origin, path, stats, metrics, left_out=left_out)
    failure: BaseException | None = CheckpointSkipped(LEFT_OUT) if left_out else None
    try:
        hit("stage.before")
        if failure is None:
            with collection_paused():
                _stage(save, state_dict, config.reads, config.read_deadline, in_columns)
        hit("stage.after")
    except BaseException as error:
        failure = error
    if failure is not None:
        save.reads.fail(failure)
        alone = group.rank_set.world == 1 and not left_out
        if alone or not isinstance(failure, Exception):
            raise failure
        save.record_error(failure)
    try:
        enter(save)
    except BaseException as error:  # an interrupt: no thread will plan the save
        save.fail(save.record_error(error))
        save.end()
        raise
    stats.call_seconds = stats.timeline.seconds
    stats.timeline.begin("queue")
    return save


def stage_in_place(save: SaveOperation, state_dict: Mapping[str, Any]) -> None:
    """Stage the state of a synchronous save: it does not change during the call, so all tensors are read in place.

    Raises :class:`UnsupportedTensorError` and the like.
    """
    _stage(save, state_dict, "all", 0.0, in_columns=True)
    save.reads.begin()


def _stage(
    save: SaveOperation,
    state_dict: Mapping[str, Any],
    reads: Reads,
    deadline: float,
    in_columns: bool,
) -> None:
    config, stats = save.config, save.stats
    if isinstance(path := save.path, Path) and not config.overwrite:  # a store is not asked now
        look = functools.partial(claims.check_absent, path)
        bounded("looking at", path, config.commit_timeout, look)
    window = Window(deadline)
    ownership = Ownership(known_optimizers())  # with reads="blocking", the planner asks
    native = engine(config.host_cache_bytes)
    staged = stage_state(state_dict, ownership, reads, native, save.order, config.audit)
    if in_columns:
        staged.at_call = staged.fingerprint()
    save.reads.capture(staged, window)
    stats.eager_bytes, stats.cache_seconds = staged.eager_bytes, staged.cache_seconds
    stats.deferred_bytes = sum(staged.deferred.sizes)
    if deadline and staged.deferred.sizes and not step_gate.arm_backward():
        window.open()


# ---- the save of the calling thread --------------------------------------------------------------


class _Here(threading.local):
    save: SaveOperation | None = None


here: Final = _Here()
"""The save that DCP runs in the calling thread, until the thread makes another call."""


def end_here(*, asynchronous: bool = True) -> None:
    """End the part before the commit of the calling thread's save, when the thread makes another call or ends.

    ``asynchronous=False`` spares asynchronous saves: a destructor may make the call while such a save is running.
    """
    save = here.save
    if save is not None and (asynchronous or not save.asynchronous):
        here.save = None
        save.end()


at_exit(end_here)  # else the process would wait for an interrupted synchronous save


# ---- the saves that are in flight ----------------------------------------------------------------


logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.1
_FIRST_LINE_SECONDS: Final = 3.0
_CALLBACK_SECONDS: Final = 10.0

_lock = threading.RLock()  # guards _saves
_saves: list[SaveOperation] = []


def in_flight() -> list[SaveOperation]:
    """This process's asynchronous saves whose outcome is not known, oldest first."""
    global _saves
    with _lock:
        _saves = [save for save in _saves if not save.over]
        return list(_saves)


def enter(save: SaveOperation) -> None:
    """Count ``save`` as in flight until it is over."""
    with _lock:
        _saves.append(save)


def make_room(limit: int, mode: WhenBehind) -> bool:
    """Apply ``when_behind`` (``mode``) before a call makes another save. Returns whether the caller must leave the new
    save out.

    Only ``"wait"`` blocks, without the GIL, until fewer than ``limit`` saves are in flight, and opens their read
    windows. A save without progress ends within its ``commit_timeout``, so this wait is bounded, too.
    """
    waiting = in_flight()
    if mode != "wait":
        return len([s for s in waiting if not s.left_out and not s.committed.done()]) >= limit
    log = Wait(logger, "async_save")
    while len(waiting) >= limit:
        oldest = waiting[0]
        oldest.wait_briefly(_POLL_SECONDS)
        log.look(
            f"{len(waiting)} saves are in flight (max_in_flight={limit}), the oldest to {str(oldest.path)!r}: "
            f"{oldest.doing}"
        )
        waiting = in_flight()
    return False


def finish_saves() -> None:
    """Wait until no save is in flight, for each save at most its ``exit_timeout``, and until callbacks have run, for a
    bounded time. Callbacks may save.

    A save that is not over by then fails, which is logged. Never raises.
    """
    _finish_in_flight()
    if not finish_callbacks(_CALLBACK_SECONDS):
        logger.warning(
            "callbacks of saves still run after %g s: the process goes on without them",
            _CALLBACK_SECONDS,
        )
    _finish_in_flight()


def _finish_in_flight() -> None:
    began = time.monotonic()
    log = Wait(logger, "the end of this process", first=_FIRST_LINE_SECONDS)
    while saves := in_flight():
        oldest = saves[0]
        waited = time.monotonic() - began
        if waited >= oldest.config.exit_timeout:
            oldest.give_up(f"the process ends, and has waited for {waited:.0f} s: {oldest.doing}")
            continue
        oldest.wait_briefly(min(_POLL_SECONDS, oldest.config.exit_timeout - waited))
        log.look("; ".join(f"{_named(save)} ({save.doing})" for save in saves[:3]))


def _named(save: SaveOperation) -> str:
    return f"the save to {str(save.path)!r}"


at_end(finish_saves, Phase.FINISH)


class Saves:
    """The saves of one writer, and those of them whose outcome the caller does not know yet. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards what follows
        self._kept: list[SaveOperation] = []
        self.newest: SaveOperation | None = None

    def add(self, save: SaveOperation) -> None:
        with self._lock:
            self.newest = save
            self._kept = [other for other in self._kept if not _is_told(other)]
            self._kept.append(save)

    def wait(self) -> None:
        """Wait until every save is over. Raises the error of a failed save whose outcome the caller has not asked for.

        Only saves that this package runs raise here: for the others, DCP's future or call raises.
        """
        with self._lock:
            saves = list(self._kept)
        for save in saves:
            save.wait()
        with self._lock:
            self._kept = [save for save in self._kept if save not in saves]
        for save in saves:
            if save.own and not save.committed.asked:
                save.committed.result()


def _is_told(save: SaveOperation) -> bool:
    return save.over and (not save.own or save.committed.asked or save.committed.peek() is None)
