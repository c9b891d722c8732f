"""``async_save`` with its handle, and ``save``: they bring the planner and the planning thread.

The training thread stages the state. The planning thread of the rank set does the rest (``rank_context.py``).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from typing_extensions import Unpack

from dcp_datastates.commit.group import commit_group
from dcp_datastates.config import WriterConfig, WriterOptions, check_options
from dcp_datastates.dcp.object_planning import ObjectPlanning
from dcp_datastates.dcp.planner import (
    options_in_columns,
    plan_in_columns,
)
from dcp_datastates.dcp.writer import NO_PATH, DataStatesWriter
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.planning.column_planning import StateToPlan
from dcp_datastates.planning.plan_cache import PlanCache
from dcp_datastates.planning.save_planning import SavePlanning
from dcp_datastates.process.forks import public, refuse_in_child
from dcp_datastates.ranks.rank_set import ALONE, rank_set_of
from dcp_datastates.results import SaveRecord, SaveStats
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.outcome import SaveOrigin, conclude_call
from dcp_datastates.saving.rank_context import context_of
from dcp_datastates.saving.start import end_here, prepare, stage_save, writable
from dcp_datastates.staging.staged_state import check_mapping
from dcp_datastates.storage.object_path import Location, ObjectPath


@public("async_save()")
def async_save(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str] | ObjectPath | None = None,
    *,
    writer: DataStatesWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    metrics: Mapping[str, float] | None = None,
    **options: Unpack[WriterOptions],
) -> SaveHandle:
    """Save ``state_dict`` to ``path`` while training continues; the handle says when it is captured and committed.

    Collective: every rank of ``process_group`` makes the same calls, in the same order. The call never waits for
    another rank or the network. It waits if ``max_in_flight`` saves are in flight (see ``when_behind``), and for room
    in the host cache for the tensors that it copies.

    Args:
        state_dict: Names and values, nested to any depth: tensors, DTensors, picklable objects, and objects with a
            ``state_dict()`` method, which this call calls.
        path: The checkpoint's directory, or a URL such as ``"s3://bucket/run/step-100"``. None if ``writer`` has one.
        writer: A writer to reuse. None: the save has ``path`` and ``options``.
        planner: The planner. None means one :class:`DataStatesSavePlanner` for all saves of these ranks.
        process_group: The ranks that save; None means all. Only its list of ranks is used.
        metrics: Numbers by name, such as ``{"loss": 2.3}``, that are stored with the checkpoint's metadata; the first
            rank's count. ``inspect`` shows them, and :class:`Keep` compares them.
        options: The options of :class:`DataStatesWriter`, such as ``host_cache_size``. Not together with ``writer``.

    Returns:
        A handle: ``result()`` returns when the checkpoint is committed on all ranks. If the save fails, it raises an
            error of this package that names the rank: :class:`RankLostError` within two seconds if a rank died on this
            machine, within a minute or so on another, after ``commit_timeout`` seconds if it has not made the call;
            :class:`CommitOutcomeUnknown` if the coordinator may have published before it was lost. The log has it, too.

    Raises:
        ConfigurationError: an option has a value that cannot work.
        UnsupportedTensorError: a tensor cannot be stored. The other ranks' saves fail, too.
        UnsupportedStateError: the state is no mapping, or an object cannot be stored. The other ranks' saves fail, too.
        SaveStalledError: the call waited for an older save that made no progress for ``commit_timeout`` seconds.
        Exception: an object's ``state_dict()`` raised it. The other ranks' saves fail, too.
    """
    return SaveHandle(_call(state_dict, path, writer, planner, process_group, metrics, options))


@public("save()")
def save(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str] | ObjectPath | None = None,
    *,
    writer: DataStatesWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    metrics: Mapping[str, float] | None = None,
    **options: Unpack[WriterOptions],
) -> SaveStats:
    """Save ``state_dict`` to ``path``; returns when it is committed on all ranks.

    Takes the arguments of :func:`async_save`. Tensors are read in place where possible, because the state does not
    change during the call.

    Returns:
        The save's statistics on this rank.

    Raises:
        DataStatesError: the error that failed the save, of the same type on every rank; else as :func:`async_save`.
    """
    if writer is None:
        options = {"reads": "all", **options}
    made = _call(state_dict, path, writer, planner, process_group, metrics, options)
    made.committed.result()
    return made.stats


def _call(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str] | ObjectPath | None,
    writer: DataStatesWriter | None,
    planner: SavePlanner | None,
    process_group: dist.ProcessGroup | None,
    metrics: Mapping[str, float] | None,
    options: WriterOptions,
) -> SaveOperation:
    if writer is None:
        rank_set = ALONE if options.get("no_dist") else rank_set_of(process_group)
    elif options or process_group is not None:
        raise ConfigurationError(
            f"writer= has options of its own; pass {', '.join([*options, 'process_group'])} to it instead"
        )
    else:
        rank_set = writer.rank_set
    stats = SaveStats()
    end_here()
    context = context_of(commit_group(rank_set))
    try:
        if writer is None:  # one save needs no writer of its own
            check_options("async_save", options, WriterOptions)
            options.pop("no_dist", None)
            storage_options = options.pop("storage_options", None)
            config = WriterConfig.checked(**options)
            prepare(rank_set, config)
        else:
            writer.enter()
            config = writer.config
        numbers = _numbers(metrics)
        state = _without_objects(state_dict)
        if writer is not None:
            path = directory = writer.path_of(path)
        elif path is None:
            raise ConfigurationError(NO_PATH)
        else:
            alone = rank_set is ALONE
            path = directory = writable(path, config, alone, options=storage_options)
        in_columns = options_in_columns(planner) is not None
        origin, group = SaveOrigin.PACKAGE, context.group
        save = stage_save(group, config, origin, directory, state, in_columns, numbers, stats=stats)
        if writer is not None:
            writer.add(save)
    except BaseException as error:
        conclude_call(SaveOrigin.PACKAGE, rank_set, path, stats, error)
        context.refuse(path, error)
        raise
    try:
        context.submit(save, functools.partial(_planning_of, context.planner, planner))
    except BaseException as error:  # an interrupt: the planning thread may not have the save
        save.fail(save.record_error(error))
        save.end()
        raise
    return save


def _planning_of(
    default: PlanCache, planner: SavePlanner | None, save: SaveOperation
) -> SavePlanning:
    """How the state is planned: in columns, unless only the planner can plan it, which may have hooks now."""
    state = StateToPlan(save.reads.staged, save.reads.state)
    if (planned := plan_in_columns(planner, default, state)) is not None:
        return planned
    assert planner is not None
    return ObjectPlanning.of_state(planner, state.staged, state.built, str(save.directory()))


def _without_objects(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Replace top-level objects that have a ``state_dict()`` method by its result, as DCP does."""
    check_mapping(state_dict)
    return {
        key: value
        if isinstance(value, (torch.Tensor, dict)) or not isinstance(value, Stateful)
        else value.state_dict()
        for key, value in state_dict.items()
    }


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ConfigurationError(f"metrics={metrics!r} must be a dict of names to numbers")
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigurationError(
                f"metrics[{name!r}]={value!r} is no number; pass one, such as loss.item()"
            ) from None
        if not isinstance(name, str):
            raise ConfigurationError(f"metrics has the key {name!r}; names must be strings")
    return found


class SaveHandle(AsyncSaveResponse):
    """A save in progress. Any thread may use the handle at any time. The log has the outcome in any case.

    DCP's names work, too: ``staging_completion`` is :attr:`captured`, ``upload_completion`` is :attr:`committed`.
    Waiting for either starts the save's reads immediately, because the waiting thread will not start a backward pass.
    """

    def __init__(self, save: SaveOperation) -> None:
        super().__init__(save.reads.captured, save.committed)
        self._save = save

    @property
    def captured(self) -> Future[None]:
        """A future, done when all tensors have been read and the state may be changed freely.

        ``optimizer.step()`` needs no such wait: the step gate makes it. ``result()`` raises if the save failed before.
        """
        return self.staging_completion

    @property
    def committed(self) -> Future[None]:
        """A future, done when the outcome is known.

        ``result()`` returns if the checkpoint is committed on all ranks, and raises the save's error otherwise.
        """
        return self.upload_completion

    @property
    def archived(self) -> Future[None]:
        """A future, done when the copy of the checkpoint in the archive is committed on all ranks.

        ``result()`` raises if the save has failed, or if it can never be archived (another checkpoint is there, say).
        What storage refuses is tried again, so it may take long. Raises :class:`ConfigurationError` without an archive.
        """
        if self._save.archived is None:
            raise ConfigurationError(
                f"the save to {str(self._save.path)!r} is not archived: CheckpointManager(archive=…) does that, for "
                f"each save or every few (archive_every)"
            )
        return self._save.archived

    @property
    def path(self) -> Location:
        """The checkpoint's directory: a :class:`~pathlib.Path`; of a URL, an object whose ``str()`` is the URL."""
        return self._save.directory()

    @property
    def stats(self) -> SaveStats:
        """The save's statistics on this rank; complete once it is committed."""
        return self._save.stats

    @property
    def record(self) -> SaveRecord | None:
        """What came of the save on this rank, and what it cost; None until the outcome is known."""
        return self._save.record

    @public("SaveHandle.result()")
    def result(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is committed on all ranks.

        Args:
            timeout: Seconds to wait. None: until the outcome is known.

        Raises:
            DataStatesError: the error that failed the save, of the same type on every rank.
            TimeoutError: the outcome is not known after ``timeout`` seconds. The save continues.
        """
        self._save.committed.result(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the outcome, for at most ``timeout`` seconds; return whether it is known.

        Does not raise the save's error.
        """
        return self._save.committed.wait(timeout)

    def give_up(self, why: str) -> None:
        """Wait no longer for the save: it fails on this rank, as :class:`SaveAbandonedError`, or, where the ranks may
        have decided already, as :class:`CommitOutcomeUnknown`. No effect once the outcome is known.
        """
        refuse_in_child("SaveHandle.give_up()")
        self._save.give_up(why)

    @property
    def doing(self) -> str:
        """What the save is doing or waiting for, or what came of it, in words; for people."""
        return self._save.doing

    def __repr__(self) -> str:
        return f"SaveHandle({str(self._save.path)!r}, {self.doing})"
