"""Planning in DCP's objects, by a planner that columns cannot replace: DCP's steps, with this package's exchange in
place of DCP's collectives.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from dcp_datastates.format.key_paths import typed_paths
from dcp_datastates.format.metadata import encode
from dcp_datastates.format.metadata_objects import Place, table_of
from dcp_datastates.format.metadata_table import Trace
from dcp_datastates.planning.messages import Report
from dcp_datastates.planning.plan_cache import note_of
from dcp_datastates.planning.save_planning import SavePlanning, Told, Written
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.staging.staged_state import StagedState
from dcp_datastates.storage.claims import Claim
from dcp_datastates.wire.secret import signed, verified


class ObjectPlanning(SavePlanning):
    """Planning of a save by ``planner``.

    Args:
        local_plan: returns the planner's local plan; takes whether this rank is the coordinator.
        staged: the staged state; None if the planner resolves its data in place.
    """

    kind = "in objects"

    def __init__(
        self,
        planner: SavePlanner,
        local_plan: Callable[[bool], SavePlan],
        staged: StagedState | None,
    ) -> None:
        self._planner: Any = planner
        self._local_plan: Any = local_plan
        self._staged = staged
        self._metadata: Metadata | None = None

    @staticmethod
    def of_state(
        planner: SavePlanner, staged: StagedState, state: dict[str, Any], directory: str
    ) -> ObjectPlanning:
        """Planning of ``state``: the state at the call, with all its tensors. Planners are told the ``directory``."""
        # No closure: the traceback of an error would keep what it has.
        local_plan = functools.partial(_planned, planner, state, directory)
        return ObjectPlanning(planner, local_plan, staged)

    def propose(self, group: str, rank: int) -> bytes:
        plan = self._local_plan(rank == 0)
        items = plan.items if self._staged is None else self._staged.as_captured(plan.items)
        return _packed(plan if items is plan.items else dataclasses.replace(plan, items=items))

    def assign(self, proposals: Sequence[bytes]) -> Sequence[bytes]:
        plans, self._metadata = self._planner.create_global_plan(list(map(_unpacked, proposals)))
        return list(map(_packed, plans))

    def take(self, answer: bytes) -> None:
        self.items = self._planner.finish_plan(_unpacked(answer)).items

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        found: torch.Tensor | io.BytesIO = self._planner.resolve_data(write_item)
        return found

    def release(self) -> None:
        self._planner = self._local_plan = self._staged = None  # they have the state

    def report(self, places: Report, written: Written) -> Told:
        report = _packed(([item.index for item in self.items], places.encoded))
        metadata = self._metadata
        if metadata is None:
            return lambda: report, None
        # The planner may use its own for the next save meanwhile.
        mine = copy.copy(metadata)

        def compose(reports: Sequence[bytes], claim: Claim, trace: Trace) -> bytes:
            found = [(indices, Report.decode(data)) for indices, data in map(_unpacked, reports)]
            return document(claim, mine, found, written.metrics, trace)

        return lambda: report, compose


def document(
    claim: Claim,
    metadata: Metadata,
    reports: Sequence[tuple[Sequence[MetadataIndex], Report]],
    metrics: Mapping[str, float],
    trace: Trace = None,
) -> bytes:
    """The bytes of ``.metadata`` of a save that DCP's objects describe.

    Args:
        claim: how the attempt was claimed.
        metadata: the planner's metadata.
        reports: of every rank, its items' indices, and where they are.
        metrics: the numbers by which the user compares checkpoints.
        trace: what the save has cost so far.

    Raises :class:`ConfigurationError` if the metadata contain a value that could not be read back.
    """
    note = note_of(claim, [report for _, report in reports], metrics, trace)
    number = {path: number for number, path in enumerate(note.files)}
    found: dict[MetadataIndex, Place] = {}
    for indices, report in reports:
        files = [number[f"{claim.attempt.name}/{name}"] for name, _, _ in report.files]
        columns = (report.numbers.tolist(), report.offsets.tolist(), report.lengths.tolist())
        for index, file, offset, length in zip(indices, *columns, strict=True):
            found[index] = files[file], offset, length
    return encode(table_of(metadata, found, note))


@collection_paused()
def _packed(value: Any) -> bytes:
    return signed(pickle.dumps(value))


@collection_paused()
def _unpacked(data: bytes) -> Any:
    return pickle.loads(verified(data))


def _planned(
    planner: SavePlanner, state: dict[str, Any], directory: str, is_coordinator: bool
) -> SavePlan:
    if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
        planner.set_up_planner(
            state_dict=state,
            storage_meta=StorageMeta(checkpoint_id=directory),
            is_coordinator=is_coordinator,
        )
    else:  # a planner from before torch 2.3
        planner.set_up_planner(state, is_coordinator)  # type: ignore[arg-type]
    plan: SavePlan = planner.create_local_plan()
    paths = getattr(planner, "mappings", None)  # DCP's planners have them
    if paths and plan.planner_data is paths:
        plan = dataclasses.replace(plan, planner_data=typed_paths(state, paths))
    return plan
