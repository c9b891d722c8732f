"""The steps of ``dcp.save`` for a save that this package runs: any planner and this package's writer, in DCP's order.

DCP's own function would broadcast the metadata at the end, warn where ``torch.distributed`` is not used, and know
nothing of the calls that the ranks have come from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from dcp_datastates.dcp.writer import DataStatesWriter

__all__ = ["Call", "Written", "save_together"]


@dataclass(frozen=True)
class Call:
    """One rank's call: what it brings to the first gather."""

    name: str
    """The last part of the checkpoint's path: the same directory may be mounted elsewhere on other machines."""
    plan: SavePlan


@dataclass(frozen=True)
class Written:
    """What writing came to on this rank, and on the coordinator on all."""

    failure: BaseException | None
    metadata: Sequence[Metadata]
    results: list[Any] | None

    def finish(self, writer: DataStatesWriter) -> None:
        """The writer's ``finish`` on the coordinator. Raises what this rank's writing raised."""
        if self.failure is not None:
            raise self.failure
        # Of a rank that failed there are no results. Its vote will say so; nothing is published without them.
        if self.results is not None and all(isinstance(each, list) for each in self.results):
            writer.finish(metadata=self.metadata[0], results=self.results)


def save_together(
    state: dict[str, Any],
    name: str,
    writer: DataStatesWriter,
    planner: SavePlanner,
    ranks: _DistWrapper,
    agree: Callable[[Sequence[str]], None],
) -> Written:
    """Plan and write. When this returns, no other rank waits for this one.

    Args:
        state: the staged state dict.
        name: of this rank's call.
        writer: this package's.
        planner: any.
        ranks: DCP's collectives.
        agree: the coordinator's look at all ranks' names; raises if these are different saves.

    Raises DCP's ``CheckpointException``, on all ranks, if planning fails on any; what ``ranks`` raises.
    """
    metadata: list[Metadata] = []

    def local_step() -> Call:
        meta = writer.storage_meta()
        if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
            planner.set_up_planner(
                state_dict=state, storage_meta=meta, is_coordinator=ranks.is_coordinator
            )
        else:  # as planners were before torch 2.3
            planner.set_up_planner(state, ranks.is_coordinator)  # type: ignore[arg-type]
        writer.set_up_storage_writer(ranks.is_coordinator, rank=ranks.rank, use_collectives=True)
        return Call(name, writer.prepare_local_plan(planner.create_local_plan()))

    def global_step(calls: list[Call]) -> list[SavePlan]:
        agree([call.name for call in calls])
        plans, made = planner.create_global_plan([call.plan for call in calls])
        metadata.append(made)
        return writer.prepare_global_plan(plans)

    plan = ranks.reduce_scatter("plan", local_step, global_step)
    writer.take_ticket(plan)  # here: a planner may come back with the plan of an earlier save
    failure: BaseException | None = None
    written: Any
    try:
        written = writer.write_data(planner.finish_plan(plan), planner).value()
    except BaseException as error:
        failure = error
        written = _wrap_exception(error)
    return Written(failure, metadata, ranks.gather_object(written))
