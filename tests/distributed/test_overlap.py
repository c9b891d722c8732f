"""A save is planned while the saves before it are read, and their outcomes do not mix."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.jobs.ranks import ranks
from support.state.checkpoints import CACHE, committed, load_everything, raises
from support.state.planners import FailingPlanner, PlannerRefusal
from support.waiting import await_that
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_datastates
from dcp_datastates import DataStatesSavePlanner, SaveFailedError, track
from dcp_datastates.saving.operation import Phase

ELEMENTS = 100_000


class _Training:
    """A parameter of each rank, all of whose elements are the number of the last step."""

    def __init__(self):
        self.weight = torch.nn.Parameter(torch.zeros(ELEMENTS))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        track(self.optimizer)

    def step(self):
        self.optimizer.zero_grad()
        (-self.weight).sum().backward()
        self.optimizer.step()

    def save(self, path, planner=None, *, read_deadline=3600.0, max_in_flight=4, **more):
        """Its reads wait for a backward pass, or for a thread that waits for them."""
        return dcp_datastates.async_save(
            {f"w{dist.get_rank()}": self.weight, **more},
            path,
            planner=planner,
            host_cache_size=CACHE,
            read_deadline=read_deadline,
            max_in_flight=max_in_flight,
        )


def _await_phase(handle, phase):
    await_that(lambda: handle._save.phase >= phase, otherwise=repr(handle))


def _number(path):
    state = load_everything(path)
    weights = [state[f"w{rank}"] for rank in range(dist.get_world_size())]
    return set(torch.cat(weights).unique().tolist())


@pytest.mark.parametrize("planner", [None, DefaultSavePlanner], ids=["ours", "stock"])
@ranks(2)
def test_a_save_is_planned_while_those_before_it_are_read(planner, shared_dir):
    training = _Training()
    for first in range(3):
        training.step()
        handles = [
            training.save(shared_dir / f"{first}.{number}", planner and planner())
            for number in range(2)  # more would wait for room in the cache, which opens the windows
        ]
        _await_phase(handles[-1], Phase.AGREED)
        dist.barrier()
        assert not any(handle.captured.done() for handle in handles)
        training.step()
        for handle in handles:
            handle.result(60)
            assert _number(handle.path) == {training.weight[0].item() - 1}
        dist.barrier()


@pytest.mark.parametrize("where", ["finish_plan", "resolve_data"])
@ranks(2)
def test_a_save_that_fails_while_one_before_it_is_read_fails_alone(where, shared_dir):
    """On one rank its part fails after the ranks have agreed on it: it votes no, in its turn."""
    training = _Training()
    training.step()
    for attempt in range(3):
        refuses = FailingPlanner(where if dist.get_rank() == 1 else "")
        first = training.save(shared_dir / f"{attempt}.0", DefaultSavePlanner())
        second = training.save(shared_dir / f"{attempt}.1", refuses)
        _await_phase(second, Phase.AGREED if dist.get_rank() == 0 else Phase.COMMITTING)
        assert not first.committed.done()
        dist.barrier()
        training.step()
        first.result(60)
        with raises(SaveFailedError, "rank 1", PlannerRefusal.__name__):
            second.result(60)
        assert not committed(second.path)
        assert _number(first.path) == {training.weight[0].item() - 1}
        dist.barrier()


@ranks(2)
def test_a_report_belongs_to_the_plan_of_its_own_save(shared_dir):
    """Rank 0's structure changes, and rank 1's share does not. The second save is planned before the first is
    committed, and read after that.
    """
    training = _Training()
    planner = DataStatesSavePlanner()
    for number in range(3):
        training.step()
        first = training.save(shared_dir / f"{number}.0", planner, read_deadline=1.0)
        more = {f"more{number}": torch.ones(3)} if dist.get_rank() == 0 else {}
        second = training.save(shared_dir / f"{number}.1", planner, **more)
        _await_phase(second, Phase.AGREED)
        await_that(first.committed.done)  # opens no window
        assert not second.captured.done()
        dist.barrier()
        training.step()
        first.result(60)
        second.result(60)
        assert _number(first.path) == _number(second.path) == {training.weight[0].item() - 1}
        dist.barrier()
