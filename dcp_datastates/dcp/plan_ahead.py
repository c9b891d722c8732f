"""Planning before the first save, while the job is not training yet: after a checkpoint was loaded, say."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner

from dcp_datastates.commit.group import commit_group
from dcp_datastates.dcp.object_planning import ObjectPlanning
from dcp_datastates.dcp.planner import DataStatesSavePlanner, plan_in_columns
from dcp_datastates.dcp.turn import end_here
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.planning.column_planning import StateToPlan
from dcp_datastates.planning.save_planning import SavePlanning
from dcp_datastates.process.forks import enter
from dcp_datastates.ranks.rank_set import rank_set_of
from dcp_datastates.saving.agreement import SaveName
from dcp_datastates.saving.rank_context import RankContext, context_of
from dcp_datastates.staging import step_gate
from dcp_datastates.staging.stage import look

_WHAT: Final = "prime()"

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
        DataStatesError: with several ranks: it names each rank that failed, and why. With one rank, the error itself.
    """
    enter("prime()")
    step_gate.open_windows()
    end_here()
    context = context_of(commit_group(rank_set_of(process_group)))
    context.run(_WHAT, _TIMEOUT_SECONDS, functools.partial(_propose, state_dict, planner, context))


def _propose(
    state_dict: Mapping[str, Any], planner: SavePlanner | None, context: RankContext
) -> tuple[SaveName, SavePlanning, bytes]:
    """The planning of a state that is not staged, and this rank's message."""
    if planner is not None and not isinstance(planner, DataStatesSavePlanner):
        raise ConfigurationError(
            f"a {type(planner).__name__} remembers no plans: pass the DataStatesSavePlanner that will be used, or "
            f"None for that of dcp_datastates.async_save"
        )
    staged = look(state_dict)
    state = StateToPlan(staged, staged.materialize)
    planning: SavePlanning | None = plan_in_columns(planner, context.planner, state)
    if planning is None:
        assert planner is not None
        planning = ObjectPlanning.of_state(planner, staged, staged.materialize(), "")
    ranks = context.group.rank_set
    plan = planning.propose(context.group.name, ranks.rank)
    return SaveName(_WHAT, planning.kind), planning, plan
