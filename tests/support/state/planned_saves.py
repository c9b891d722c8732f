"""Saves by ``DataStatesSavePlanner`` on several ranks, and what travels between these for each."""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.distributed as dist

import dcp_datastates
from dcp_datastates import DataStatesSavePlanner, DataStatesWriter
from support.state.checkpoints import CACHE
from support.state.planners import own_step
from support.state.states import filled

__all__ = [
    "SMALL",
    "Skipping",
    "owned",
    "save_by",
    "saved_alone",
    "saver",
    "spied",
    "spy",
    "state_of",
]

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
    return DataStatesWriter(path, host_cache_size=CACHE, read_window="immediate", **options)


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
