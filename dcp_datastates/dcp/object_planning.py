"""Planning in DCP's objects, by any of DCP's planners.

:class:`ObjectPlanning` runs the planner for a save that this package runs: DCP's steps, with this package's exchange in
place of DCP's collectives. :class:`GivenPlan` is the planning of a save that DCP has planned.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_datastates.format.key_paths import typed_paths
from dcp_datastates.planning.save_planning import Compose, SavePlanning
from dcp_datastates.planning.write_job import WriteJob
from dcp_datastates.saving.document import document, write_results
from dcp_datastates.staging.stage import StagedState
from dcp_datastates.storage.attempt import Attempt

__all__ = ["GivenPlan", "ObjectPlanning"]


class GivenPlan(SavePlanning):
    """A final plan that DCP has made with ``planner``. DCP gathers the results, too."""

    kind = "by DCP"
    items: Sequence[WriteItem] = ()

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.items = plan.items
        self.planner: SavePlanner | None = planner
        self.results: list[WriteResult] = []

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        assert self.planner is not None, "released"
        found: torch.Tensor | io.BytesIO = self.planner.resolve_data(write_item)
        return found

    def release(self) -> None:
        self.planner = None  # it has the state

    def report(self, attempt: Attempt, job: WriteJob, samples: bytes) -> bytes:
        self.results = write_results(self.items, job.layouts, job.sealed, attempt, job.linked)
        return b""


class ObjectPlanning(GivenPlan):
    """Planning of a staged state by ``planner``.

    Args:
        state: the state at the call, with all its tensors.
        directory: the checkpoint's directory, which planners are told.
    """

    kind = "in objects"

    def __init__(
        self, planner: SavePlanner, staged: StagedState, state: dict[str, Any], directory: str
    ) -> None:
        super().__init__(SavePlan([]), planner)
        self._staged: StagedState | None = staged
        self._state = state
        self._directory = directory
        self._metadata: Metadata | None = None

    def propose(self, group: str, rank: int) -> bytes:
        planner, state, is_coordinator = self._given, self._state, rank == 0
        if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
            planner.set_up_planner(
                state_dict=state,
                storage_meta=StorageMeta(checkpoint_id=self._directory),
                is_coordinator=is_coordinator,
            )
        else:  # a planner from before torch 2.3
            planner.set_up_planner(state, is_coordinator)  # type: ignore[arg-type]
        plan: SavePlan = planner.create_local_plan()
        paths = getattr(planner, "mappings", None)  # DCP's planners have them
        if paths and plan.planner_data is paths:
            plan = dataclasses.replace(plan, planner_data=typed_paths(state, paths))
        assert self._staged is not None, "released"
        items = self._staged.as_captured(plan.items)
        return pickle.dumps(plan if items is plan.items else dataclasses.replace(plan, items=items))

    def assign(self, proposals: Sequence[bytes]) -> Sequence[bytes]:
        # Pickled by ranks of this job.
        plans, self._metadata = self._given.create_global_plan(list(map(pickle.loads, proposals)))
        return list(map(pickle.dumps, plans))

    def take(self, answer: bytes) -> None:
        self.items = self._given.finish_plan(pickle.loads(answer)).items

    def release(self) -> None:
        super().release()
        self._staged, self._state = None, {}

    @property
    def _given(self) -> SavePlanner:
        assert self.planner is not None, "released"
        return self.planner

    def report(self, attempt: Attempt, job: WriteJob, samples: bytes) -> bytes:
        super().report(attempt, job, samples)
        return pickle.dumps(self.results)

    def compose(self, metrics: Mapping[str, float]) -> Compose | None:
        metadata = self._metadata
        if metadata is None:
            return None
        # The planner may use its own for the next save meanwhile.
        mine = copy.copy(metadata)

        def compose(reports: Sequence[bytes]) -> Any:
            results = list(map(pickle.loads, reports))
            return lambda meta, claim, trace: document(meta, claim, mine, results, metrics, trace)

        return compose
