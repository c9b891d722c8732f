"""The save planner: it has the options of planning in columns.

With this package's writer it makes no plan for DCP: this package's own pipeline plans the save in columns
(``planning/column_planning.py``) when DCP calls the writer's ``write_data``. So it does for DCP's default planner
(:func:`options_in_columns`). With any other writer, and if a subclass overrides a hook, it plans as DCP's default
planner does.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from dcp_datastates.planning.column_planning import (
    ColumnPlanning,
    Paths,
    PlanOptions,
    StateToPlan,
)
from dcp_datastates.planning.plan_cache import PlanCache

NO_PLAN: Final = SavePlan([], planner_data={"dcp_datastates plans this save": ()})
"""What a :class:`DataStatesSavePlanner` returns in place of a plan for this package's writer."""


class WriterMeta(StorageMeta):
    """What ``storage_meta()`` of this package's writer returns. A :class:`DataStatesSavePlanner` that gets it makes no
    plan, because the writer does.
    """


class DataStatesSavePlanner(DefaultSavePlanner):
    """A save planner for large jobs. It takes the options of :class:`DefaultSavePlanner`. With any other writer than
    this package's, it plans as that planner.

    Use one planner for all saves of a job, because each planner has its own plan cache. The cache holds several plans,
    so state dicts may alternate (model, optimizer).

    Args:
        flatten_state_dict: As in DCP.
        flatten_sharded_tensors: As in DCP.
        dedup_replicated_tensors: Deprecated in DCP, without effect.
        dedup_save_to_lowest_rank: The lowest rank writes a value that several ranks hold; replicas are not split.
        enable_plan_caching: Cache plans: if no rank's state has changed in structure, no plan is made, gathered or
            broadcast again. Only with this package's writer.
        split_replicas: Split tensors that several ranks hold into slices of rows, so that these ranks write equal
            numbers of bytes within 1 %. Slices are ordinary DCP chunks. Only tensors that are declared equal are split:
            DTensors, and tensors that an optimizer owns. If replicas differ, the save fails
            (:class:`ReplicasDifferError`).

    Threads: only one save at a time may plan with it, as with any DCP planner.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = True,
        *,
        split_replicas: bool = True,
    ) -> None:
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=flatten_sharded_tensors,
            dedup_replicated_tensors=dedup_replicated_tensors,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
        )
        self._caches = enable_plan_caching
        self._split = split_replicas
        self.cache = PlanCache()
        self._is_for_writer = False
        """Whether the writer plans the present save. Then :attr:`state_dict` is as DCP has passed it."""

    @property
    def options(self) -> PlanOptions:
        """The options, as they are now."""
        return PlanOptions(
            self.flatten_state_dict,
            self.flatten_sharded_tensors,
            self.dedup_save_to_lowest_rank,
            self._caches,
            self._split,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(enable_plan_caching={self._caches}, split_replicas={self._split})"

    # ---- in the order of DCP's calls ------------------------------------------------------------

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._is_for_writer = isinstance(storage_meta, WriterMeta) and bool(
            options_in_columns(self)
        )
        if self._is_for_writer:
            self.is_coordinator, self.state_dict, self.mappings = is_coordinator, state_dict, {}
        else:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        self.plan = NO_PLAN if self._is_for_writer else super().create_local_plan()
        return self.plan


def _hooks(kind: type[DefaultSavePlanner]) -> Mapping[str, Any]:
    """The methods by which a planner decides, by name, as they are in ``kind`` now."""
    names = {
        name
        for each in (DefaultSavePlanner, SavePlanner)
        for name, value in vars(each).items()
        if inspect.isfunction(value) and not name.startswith("__")
    }
    return {name: getattr(kind, name) for name in names}


_HOOKS: Final = {kind: _hooks(kind) for kind in (DataStatesSavePlanner, DefaultSavePlanner)}
"""Those of the planners that can be replaced by planning in columns, as they were at the import."""


def options_in_columns(planner: SavePlanner | None) -> PlanOptions | None:
    """The options with which columns plan what ``planner`` would plan; None if only the planner itself can.

    Columns replace this package's planner (as does None) and DCP's default planner, as long as no subclass, class
    attribute or instance attribute overrides a hook. (An overridden hook may read the state, and plan another.)
    """
    if planner is None:
        return PlanOptions()
    own = isinstance(planner, DataStatesSavePlanner)
    if not isinstance(planner, DefaultSavePlanner):
        return None
    hooks = _HOOKS[DataStatesSavePlanner if own else DefaultSavePlanner]
    kind, set_here = type(planner), vars(planner)
    if any(name in set_here or getattr(kind, name) is not hook for name, hook in hooks.items()):
        return None
    if isinstance(planner, DataStatesSavePlanner):
        return planner.options
    return PlanOptions(
        planner.flatten_state_dict,
        planner.flatten_sharded_tensors,
        planner.dedup_save_to_lowest_rank,
    )


def plan_in_columns(
    planner: SavePlanner | None, default: PlanCache, state: StateToPlan
) -> ColumnPlanning | None:
    """Planning of ``state`` in columns, as ``planner`` would plan it; None if only the planner itself can.

    ``default``: the cache to use, unless the planner has its own.
    """
    options = options_in_columns(planner)
    if options is None:
        return None
    cache = planner.cache if isinstance(planner, DataStatesSavePlanner) else default
    return ColumnPlanning(cache, options, state)


def planned_state(planner: DefaultSavePlanner) -> tuple[Mapping[str, Any], Paths | None]:
    """The state that DCP has passed to ``planner`` for the present save; this package's planner drops it. If another
    planner has flattened it: with the path of each of its names.
    """
    state, paths = planner.state_dict, planner.mappings if planner.flatten_state_dict else None
    if isinstance(planner, DataStatesSavePlanner):
        planner.state_dict = {}
    return state, paths or None
