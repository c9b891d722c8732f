"""``async_save`` that brings all it needs: a writer, a planner, a process group for DCP, and futures that tell.

DCP's own future is the end of DCP's collectives: on ranks other than the coordinator no writer code runs
after ``write_data``, and a rank that dies leaves the others waiting in them until the group's timeout. Here the
saves run in background mode and the future is the commit group's; a lost rank is named by its heart, and DCP's
collectives, which run on a group that nobody else uses, are cut short.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp_datastates.collectives import Collectives, collectives_of
from dcp_datastates.commit.decision import Decision, Outcome, Reason
from dcp_datastates.commit.groups import commit_group
from dcp_datastates.commit.peers import ALONE
from dcp_datastates.dcp.frames import release_frames
from dcp_datastates.errors import (
    ConfigurationError,
    DataStatesError,
    SaveAbandonedError,
    SaveFailedError,
)
from dcp_datastates.prime import planner_of
from dcp_datastates.save import OutcomeFuture, Save
from dcp_datastates.writer import DataStatesWriter

__all__ = ["async_save"]


def async_save(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    writer: DataStatesWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> AsyncSaveResponse:
    """Save ``state_dict`` to ``path`` behind the training, and say when it is captured and when committed.

    Collective: every rank of ``process_group`` calls it, in the same order as its other saves.

    Args:
        state_dict: what :func:`torch.distributed.checkpoint.async_save` takes.
        path: the checkpoint's directory. None if ``writer`` has one.
        writer: to use a writer again; else one is made from ``path`` and ``options``.
        planner: if None, a :class:`DataStatesSavePlanner` that is kept for all saves of these ranks.
        process_group: the ranks that save, if they are not all. Only its membership is used.
        options: of :class:`DataStatesWriter`.

    Returns:
        DCP's ``AsyncSaveResponse``: ``staging_completion`` is done when the state may be changed freely
        (``optimizer.step()`` need not wait for it: the gate does); ``upload_completion`` when the checkpoint is
        committed on all ranks. It raises this package's error that failed the save, with the rank's
        number: :class:`RankLostError` within half a minute if a rank died, :class:`CommitOutcomeUnknown` if
        the coordinator may have published before it was lost.

    Raises:
        ConfigurationError: an option has a value that cannot work.
        RankLostError: a rank of the group is lost already.
    """
    if writer is None:
        writer = DataStatesWriter(path, process_group=process_group, **options)
    elif options or process_group is not None:
        raise ConfigurationError(
            f"writer= has options of its own; pass {', '.join([*options, 'process_group'])} to it instead"
        )
    if path is None and not writer.checkpoint_id:
        raise ConfigurationError("no path to save to: pass path, or a writer that has one")
    group = commit_group(writer.peers)
    if planner is None:
        planner = planner_of(group)
    collectives = collectives_of(group)
    with writer.in_background() as saves:
        future = dcp.async_save(  # type: ignore[attr-defined]
            cast("dict[str, Any]", state_dict),
            checkpoint_id=path if path is not None else None,
            storage_writer=writer,
            planner=planner,
            process_group=None if collectives is None else collectives.get(),
            no_dist=group.peers is ALONE,
        )
    assert isinstance(future, Future)
    (save,) = saves
    future.add_done_callback(lambda ended: _dcp_ended(save, collectives, ended))
    assert save.snapshot is not None
    return AsyncSaveResponse(save.snapshot.captured, save.committed)


def _dcp_ended(save: Save, collectives: Collectives | None, future: Future[Any]) -> None:
    """If the commit group has nothing to decide, DCP's failure is the save's."""
    error = future.exception()
    if error is None:
        if not save.has_round:
            save.fail(SaveAbandonedError("DCP ended this save without writing anything"))
        return
    release_frames(error)
    save.committed.add_done_callback(_release_outcome)
    if isinstance(error, CheckpointException):
        for failure in error.failures.values():
            release_frames(failure[0])
        reasons = {rank: Reason.of(failure[0]) for rank, failure in error.failures.items()}
        only = [failure[0] for failure in error.failures.values()]
        if save.group.peers.world == 1 and len(only) == 1:
            save.fail(only[0])
            return
        decision = Decision(Outcome.FAILED, reasons)
        told = decision.error(repr(str(save.path)), save.group.peers.world)
        assert told is not None
        told.__cause__ = error
        save.fail(told)
        return
    if collectives is not None:
        collectives.note_broken()  # a connection broke; the heart knows why within seconds
    if not save.has_round:
        save.group.explain(error, lambda cause: save.fail(_as_ours(cause, save)))


def _release_outcome(committed: Future[None]) -> None:
    """What this rank failed with came through DCP's frames, which may have been running when the ranks were told."""
    assert isinstance(committed, OutcomeFuture)
    if (error := committed.peek()) is not None:
        release_frames(error)


def _as_ours(error: BaseException, save: Save) -> BaseException:
    """No rank is lost: it may have been this one, for a while."""
    if isinstance(error, DataStatesError):
        return error
    ours = SaveFailedError(
        f"the save to {str(save.path)!r} failed on rank {save.group.peers.rank}: {error}"
    )
    ours.__cause__ = error
    return ours
