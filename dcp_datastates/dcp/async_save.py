"""``async_save`` and ``save``, with all that they need: a writer, a planner, a thread and a process group.

The training thread captures the state and leaves the rest to the planning thread of its ranks (``rank_context.py``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from dcp_datastates.commit.groups import commit_group
from dcp_datastates.commit.rank_set import ALONE, rank_set_of
from dcp_datastates.dcp.handle import SaveHandle
from dcp_datastates.dcp.rank_context import context_of
from dcp_datastates.dcp.writer import DataStatesWriter
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.staging.traverse import check_mapping
from dcp_datastates.stats import SaveStats

__all__ = ["async_save", "save"]


def async_save(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    writer: DataStatesWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> SaveHandle:
    """Save ``state_dict`` to ``path`` behind the training, and say when it is captured and when committed.

    Collective: every rank of ``process_group`` calls it, in the same order as its other saves. It waits for no other
    rank and no network; it waits where ``max_in_flight`` saves are under way (``when_behind``), and for room in the
    host cache for what it copies.

    Args:
        state_dict: names and values, nested as you like: tensors, DTensors, anything that pickles, and objects with
            ``state_dict()``, which is called here.
        path: the checkpoint's directory. None if ``writer`` has one.
        writer: to use a writer again; else one is made from ``path`` and ``options``.
        planner: if None, a :class:`DataStatesSavePlanner` that is kept for all saves of these ranks.
        process_group: the ranks that save, if they are not all. Only its membership is used.
        options: of :class:`DataStatesWriter`.

    Returns:
        A handle: ``result()`` returns when the checkpoint is committed on all ranks. It raises this package's error
        that failed the save, with the rank's number: :class:`RankLostError` within half a minute if a rank
        died, or ``commit_timeout`` seconds after the call if one has not called; :class:`CommitOutcomeUnknown` if the
        coordinator may have published before it was lost. The outcome is logged, too.

    Raises:
        ConfigurationError: an option has a value that cannot work.
        Exception: what ``state_dict()`` of an object in the state raised. Then the other ranks' saves fail, too.
    """
    made = _call(state_dict, path, writer, planner, process_group, options)
    return SaveHandle(made)


def save(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    writer: DataStatesWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> SaveStats:
    """Save ``state_dict`` to ``path``; returns when it is committed on all ranks.

    As :func:`async_save`, but nothing is copied that can be read in place, as the state does not change meanwhile.
    Raises what failed the save.
    """
    if writer is None:
        options = {"read_window": "immediate", "defer": "all", **options}
    made = _call(state_dict, path, writer, planner, process_group, options)
    made.committed.result()
    return made.stats


def _call(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str] | None,
    writer: DataStatesWriter | None,
    planner: SavePlanner | None,
    process_group: dist.ProcessGroup | None,
    options: dict[str, Any],
) -> SaveOperation:
    if writer is None:
        rank_set = ALONE if options.get("no_dist") else rank_set_of(process_group)
    elif options or process_group is not None:
        raise ConfigurationError(
            f"writer= has options of its own; pass {', '.join([*options, 'process_group'])} to it instead"
        )
    else:
        rank_set = writer.rank_set
    context = context_of(commit_group(rank_set))
    if planner is None:
        planner = context.planner
    try:
        if writer is None:
            writer = DataStatesWriter(path, process_group=process_group, **options)
        made = writer.call(writer.path_of(path), _without_objects(state_dict), planner)
    except BaseException as error:
        context.refuse(path, error)
        raise
    context.submit(made, writer, planner)
    return made


def _without_objects(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """As DCP does it: objects at the top level with ``state_dict()`` stand for what that returns."""
    check_mapping(state_dict)
    return {
        key: value
        if isinstance(value, (torch.Tensor, dict)) or not isinstance(value, Stateful)
        else value.state_dict()
        for key, value in state_dict.items()
    }
