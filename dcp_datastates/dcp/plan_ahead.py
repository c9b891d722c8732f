"""Planning before the first save, while the job is not training yet: after a checkpoint was loaded, say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.groups import commit_group
from dcp_datastates.dcp.planner import DataStatesSavePlanner, is_unchanged
from dcp_datastates.dcp.rank_context import context_of
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.planning.exchange import Session, SessionMeta
from dcp_datastates.ranks.rank_set import rank_set_of
from dcp_datastates.saving.turns import await_all
from dcp_datastates.staging import step_gate
from dcp_datastates.staging.stage import look

__all__ = ["prime"]

_TIMEOUT_SECONDS: Final = 300.0
"""How long the other ranks may take to call :func:`prime`."""


def prime(
    state_dict: Mapping[str, Any],
    *,
    planner: DataStatesSavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Plan a save of ``state_dict`` now, so that the first save of such a state finds its plan in the cache.

    Collective. Call it after a resume, for example: the loaded state has the structure of the states to be saved. It
    reads no tensor, changes nothing and writes nothing. Saves in flight are planned first, as before a
    synchronous save. The call waits up to 300 seconds for the other ranks.

    Args:
        state_dict: A state like those that ``async_save`` will receive.
        planner: The planner that will be passed to this package's ``async_save``; None if none will be. A planner whose
            class overrides hooks plans now, and plans again in the save.
        process_group: The ranks that save; None means all.

    Raises:
        ConfigurationError: ``planner`` is no :class:`DataStatesSavePlanner`.
        CheckpointException: with several ranks: DCP's error, with the error of each rank that failed. With one rank,
            the error itself.
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
    await_all()  # saves that DCP runs may use the same planner
    session: Session | None = None

    # From here on the other ranks wait for this rank: an error must be raised inside a step, which reports it to them.

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
