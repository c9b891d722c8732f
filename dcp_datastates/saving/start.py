"""How a save starts: its path is checked, and the training thread stages its state; another thread plans it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcp_datastates._native import Window
from dcp_datastates.commit.group import CommitGroup, commit_group
from dcp_datastates.commit.place import Place
from dcp_datastates.config import Reads, WriterConfig
from dcp_datastates.errors import CheckpointSkipped, ConfigurationError
from dcp_datastates.io.devices import accelerator, open_used
from dcp_datastates.io.engine import engine
from dcp_datastates.planning.column_planning import Paths, StateToPlan
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.ranks.rank_set import RankSet
from dcp_datastates.results import SaveStats
from dcp_datastates.saving.admission import enter, make_room
from dcp_datastates.saving.operation import LEFT_OUT, SaveOperation
from dcp_datastates.saving.outcome import SaveOrigin
from dcp_datastates.staging import step_gate
from dcp_datastates.staging.ownership import Ownership, known_optimizers
from dcp_datastates.staging.stage import stage_state
from dcp_datastates.storage import local
from dcp_datastates.storage.bounded import bounded
from dcp_datastates.storage.failpoints import hit
from dcp_datastates.storage.object_path import (
    AnyPath,
    Location,
    ObjectPath,
    check_opens,
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
        directory, timeout = location, config.commit_timeout
        bounded("looking at", directory, timeout, lambda: local.check_writable(directory))
    return location


def archive_roots(
    archive: AnyPath | Sequence[AnyPath] | None, options: Mapping[str, Any] | None
) -> tuple[Location, ...]:
    """The directories of archives that a user names, whose stores it opens. Raises :class:`ConfigurationError`."""
    if archive is None:
        return ()
    any_url = any(map(is_url, archive if isinstance(archive, list | tuple) else [archive]))
    roots = locate_all(archive, options if any_url else None)
    for root in roots:
        check_opens(root)
    return roots


def check_at_call(location: Location | None, config: WriterConfig) -> None:
    """Raise :class:`CheckpointExistsError` if the save may not replace what is in a directory. Asks no store."""
    if isinstance(location, Path) and not config.overwrite:
        directory, timeout = location, config.commit_timeout
        bounded("looking at", directory, timeout, lambda: Place(directory).check_overwrite(False))


def check_path(save: SaveOperation) -> None:
    """Raise early if this rank cannot write there. The coordinator's claim tells whether the checkpoint may be written,
    and in a store, whether it can be: ranks that asked it, too, would only cost requests.
    """
    hit("plan.before")
    location = save.resolved_path()
    if isinstance(location, Path):
        directory = location
        save.on_storage("looking at the path", lambda: local.check_writable(directory))
    hit("plan.after")


def prepare(rank_set: RankSet, config: WriterConfig) -> CommitGroup:
    """The commit group for saves of these ranks, and the engine that they use."""
    open_used(engine(config.host_cache_bytes))
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
    check_at_call(save.path, config)
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


def state_to_plan(
    save: SaveOperation, built: dict[Any, Any] | None = None, paths: Paths | None = None
) -> StateToPlan:
    """The staged state of ``save``, for planning in columns.

    Args:
        built: the state with all its tensors, if it is built already.
        paths: the path of each of its keys, if it is flattened already.
    """
    build = save.reads.state if built is None else lambda: built
    return StateToPlan(save.reads.staged, build, paths)
