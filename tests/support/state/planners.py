"""Save planners that fail, transform or are stock, and the caches that stock ones keep."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

import dcp_datastates
from dcp_datastates import DataStatesSavePlanner, DataStatesWriter
from dcp_datastates.planning.column_planning import ColumnPlanning
from support.state.checkpoints import CACHE
from support.state.states import filled


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


class LatePlanner(DefaultSavePlanner):
    """Plans when it is told to, by :attr:`may_plan`."""

    def __init__(self) -> None:
        super().__init__()
        self.may_plan = threading.Event()

    def create_local_plan(self) -> SavePlan:
        assert self.may_plan.wait(60)
        return super().create_local_plan()


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


SMALL = 600
"""Bytes: what a rank sends, or is sent, that has nothing new to say."""


def spied(body):
    """Planners that were given to :func:`spy` note how many bytes they offer and are answered."""

    def propose(plain, planning, *group):
        offered = plain(planning, *group)
        planning._cache.spied.offered.append(len(offered))
        return offered

    def take(plain, planning, answer):
        planning._cache.spied.answered.append(len(answer))
        return plain(planning, answer)

    @functools.wraps(body)
    def test(**kwargs):
        with own_step("propose", propose), own_step("take", take):
            body(**kwargs)

    return test


def spy(planner):
    planner.offered, planner.answered = [], []
    planner.cache.spied = planner
    return planner


def saver(path, **options):
    return DataStatesWriter(path, **{"host_cache_size": CACHE, "reads": "immediate", **options})


def save_by(state, by, planner, path=None):
    """A save that is over on all ranks; whether it was steady on this one."""
    steady = saved_alone(state, planner, path, by=by)
    dist.barrier()
    return steady


def state_of(number, rank=None, count=6):
    rank = dist.get_rank() if rank is None else rank
    return {
        "model": {
            f"r{rank}.w{i}": filled((64, 32), torch.float32, number + i) for i in range(count)
        },
        "shared": filled((3000, 100), torch.float32, number),
        "step": number,
    }


def owned(state):
    """The same values, as an optimizer's parameters: the same on all ranks, as far as a plain tensor can say so. And
    the optimizer, to be kept.
    """
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in state.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.0)
    dcp_datastates.track(optimizer)
    return {name: weight.detach() for name, weight in weights.items()}, optimizer


def saved_alone(state, planner, path, by=None, **options):
    """A save that is over on this rank; whether it was steady."""
    by = by or saver(path, **options)
    response = dcp_datastates.async_save(state, path, writer=by, planner=planner)
    response.upload_completion.result(60)
    return by.last_save.steady


class Skipping(DataStatesSavePlanner):
    def create_local_plan(self):
        plan = super().create_local_plan()
        kept = [item for item in plan.items if not item.index.fqn.startswith("skip")]
        return dataclasses.replace(plan, items=kept)
