"""Save planners that fail, transform or are stock, and the caches that stock ones keep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from dcp_datastates.planning.column_planning import ColumnPlanning

__all__ = ["FailingPlanner", "HalvingPlanner", "PlannerRefusal", "forget_cached_plans", "own_step"]


@contextlib.contextmanager
def own_step(name: str, step: Callable[..., Any]) -> Iterator[None]:
    """Every ``ColumnPlanning`` runs ``step(plain, planning, *args)`` in place of its method ``name``: the steps of
    ``DataStatesSavePlanner`` with this package's writer.
    """
    plain = getattr(ColumnPlanning, name)

    def method(self: ColumnPlanning, *args: Any, **kwargs: Any) -> Any:
        return step(plain, self, *args, **kwargs)

    with mock.patch.object(ColumnPlanning, name, method):
        yield


def forget_cached_plans() -> None:
    """Empty the caches of ``enable_plan_caching=True``: they are attributes of the class SavePlanner."""
    for name, value in vars(SavePlanner).items():
        if name.startswith("_cached") and isinstance(value, dict):
            value.clear()


class PlannerRefusal(RuntimeError):
    """What a failing planner raises."""


class FailingPlanner(DefaultSavePlanner):
    """Raises :class:`PlannerRefusal` in the method named ``where``."""

    def __init__(self, where: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.where = where

    def _maybe(self, where: str) -> None:
        if where == self.where:
            raise PlannerRefusal(f"refused in {where}")

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._maybe("set_up_planner")
        super().set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> SavePlan:
        self._maybe("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self._maybe("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._maybe("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._maybe("resolve_data")
        return super().resolve_data(write_item)


class HalvingPlanner(DefaultSavePlanner):
    """Stores every float32 tensor as float16: the plan's dtypes and the data both change."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            data = item.tensor_data
            if data is not None and data.properties.dtype is torch.float32:
                data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        if isinstance(data, torch.Tensor) and data.dtype is torch.float32:
            return data.half()
        return data
