"""Planning before the first save, when nothing else is going on: after a checkpoint was loaded, say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.groups import commit_group
from dcp_datastates.commit.rank_set import rank_set_of
from dcp_datastates.dcp.planner import DataStatesSavePlanner, is_unchanged
from dcp_datastates.dcp.rank_context import context_of
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.planning.exchange import Session, SessionMeta
from dcp_datastates.saving.turns import await_all
from dcp_datastates.staging import step_gate
from dcp_datastates.staging.stage import look

__all__ = ["prime"]

_TIMEOUT_SECONDS: Final = 300.0
"""How long the other ranks may take to call it, too."""


def prime(
    state_dict: Mapping[str, Any],
    *,
    planner: DataStatesSavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Plan the save of a state like ``state_dict``, so that the first save of one finds its plan ready.

    Collective. For after a resume: the state that was just loaded looks like those that will be saved. Reads no tensor,
    changes nothing, writes nothing. Saves under way are read and planned first, as by a synchronous save.

    Args:
        state_dict: what will be passed to ``async_save``.
        planner: the one that will be used; None, if none will be passed to this package's ``async_save``. One of a
            class that overrides what is written makes its plan, and will make it again.
        process_group: the ranks that save, if they are not all.

    Raises what looking at the state or planning raises; on several ranks, DCP's ``CheckpointException`` with
    each rank's error, on all of them.
    """
    step_gate.open_windows()
    context = context_of(commit_group(rank_set_of(process_group)))
    chosen = context.planner if planner is None else planner
    context.run(
        "prime()", _TIMEOUT_SECONDS, lambda ranks: _plan(state_dict, chosen, context.group, ranks)
    )


def _plan(
    state_dict: Mapping[str, Any], chosen: SavePlanner, group: CommitGroup, ranks: _DistWrapper
) -> None:
    await_all()  # saves by DCP's own calls, which may plan with the same planner
    session: Session | None = None

    # What fails on this rank alone must fail in a step: from here on the other ranks wait for it.

    def local_step() -> SavePlan:
        nonlocal session
        if not isinstance(chosen, DataStatesSavePlanner):
            raise ConfigurationError(
                f"a {type(chosen).__name__} remembers no plans: pass the DataStatesSavePlanner that will be used, or "
                f"None for that of dcp_datastates.async_save"
            )
        staged = look(state_dict)
        if is_unchanged(chosen):
            session = Session(
                group.name,
                group.rank_set.rank,
                group.rank_set.world,
                staged,
                staged.materialize,
            )
            session.look()
        given = staged.materialize() if session is None else {}
        chosen.set_up_planner(given, SessionMeta(session=session), ranks.is_coordinator)
        return chosen.create_local_plan()

    def global_step(plans: list[SavePlan]) -> list[SavePlan]:
        return chosen.create_global_plan(plans)[0]

    try:
        chosen.finish_plan(ranks.reduce_scatter("plan", local_step, global_step))
    finally:
        if session is not None and isinstance(chosen, DataStatesSavePlanner):
            chosen.release(session)
