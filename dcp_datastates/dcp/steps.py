"""The planning steps of ``dcp.save`` for a save that this package runs: any planner and this package's writer, in DCP's
order.

DCP's ``save`` would gather the results and broadcast the metadata, warn if ``torch.distributed`` is not used, and not
check that all ranks make the same call. Here the results travel with the votes (``commit/vote.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from dcp_datastates.dcp.writer import DataStatesWriter

__all__ = ["Call", "Planned", "plan_together"]


@dataclass(frozen=True)
class Call:
    """One rank's call, as it sends it in the first gather."""

    name: str
    """The last part of the checkpoint's path: other machines may mount the directory elsewhere."""
    plan: SavePlan


@dataclass(frozen=True)
class Planned:
    """The plan of a save, as this rank has it."""

    plan: SavePlan
    """This rank's part, not finished yet."""
    metadata: Metadata | None
    """The coordinator's; None on other ranks."""


def plan_together(
    state: dict[str, Any],
    name: str,
    writer: DataStatesWriter,
    planner: SavePlanner,
    ranks: _DistWrapper,
    agree: Callable[[Sequence[str]], None],
) -> Planned:
    """Plan a save. When this returns, no other rank waits for this one.

    Args:
        state: the staged state dict.
        ranks: DCP's collectives.
        agree: called on the coordinator with all ranks' names; raises if the ranks' calls are for different saves.

    Raises DCP's ``CheckpointException``, on all ranks, if planning fails on any rank; and the errors of ``ranks``.
    """
    metadata: list[Metadata] = []

    def local_step() -> Call:
        meta = writer.storage_meta()
        if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
            planner.set_up_planner(
                state_dict=state, storage_meta=meta, is_coordinator=ranks.is_coordinator
            )
        else:  # a planner from before torch 2.3
            planner.set_up_planner(state, ranks.is_coordinator)  # type: ignore[arg-type]
        writer.set_up_storage_writer(ranks.is_coordinator, rank=ranks.rank, use_collectives=True)
        return Call(name, writer.prepare_local_plan(planner.create_local_plan()))

    def global_step(calls: list[Call]) -> list[SavePlan]:
        agree([call.name for call in calls])
        plans, made = planner.create_global_plan([call.plan for call in calls])
        metadata.append(made)
        return writer.prepare_global_plan(plans)

    plan = ranks.reduce_scatter("plan", local_step, global_step)
    writer.take_ticket(plan)  # before finish_plan(), which may return an earlier save's plan
    return Planned(plan, metadata[0] if metadata else None)
