"""A save is planned while the saves before it are read, and their outcomes do not mix."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from support.jobs.ranks import ranks
from support.state.checkpoints import CACHE, committed, load_everything, raises
from support.state.planners import FailingPlanner, PlannerRefusal
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_datastates
from dcp_datastates import CheckpointSkipped, DataStatesSavePlanner, SaveFailedError, track
from dcp_datastates.saving.phase import Phase

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

    def save(self, path, planner=None):
        """Its reads wait for a backward pass, or for a thread that waits for them."""
        return dcp_datastates.async_save(
            {f"w{dist.get_rank()}": self.weight},
            path,
            planner=planner,
            host_cache_size=CACHE,
            read_deadline=3600,
        )


def _await_phase(handle, phase):
    deadline = time.monotonic() + 60
    while handle._save.phase < phase:
        assert time.monotonic() < deadline, handle
        time.sleep(0.01)


def _number(path):
    state = load_everything(path)
    return {float(value) for rank in range(dist.get_world_size()) for value in state[f"w{rank}"]}


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
    """Rank 0's structure changes, and rank 1's share does not; the second save is planned while the first is read."""
    training = _Training()
    planner = DataStatesSavePlanner()
    for number in range(4):
        training.step()
        first = training.save(shared_dir / f"{number}.0", planner)
        more = {f"more{number}": torch.ones(3)} if dist.get_rank() == 0 else {}
        second = dcp_datastates.async_save(
            {f"w{dist.get_rank()}": training.weight, **more},
            shared_dir / f"{number}.1",
            planner=planner,
            host_cache_size=CACHE,
            read_deadline=3600,
        )
        _await_phase(second, Phase.AGREED)
        training.step()
        first.result(60)
        second.result(60)
        assert _number(first.path) == _number(second.path) == {training.weight[0].item() - 1}
        dist.barrier()


@ranks(2)
def test_newest_drops_saves_while_one_is_read(shared_dir):
    training = _Training()
    training.step()
    handles = [
        dcp_datastates.async_save(
            {f"w{dist.get_rank()}": training.weight},
            shared_dir / str(number),
            host_cache_size=CACHE,
            read_deadline=3600,
            max_in_flight=2,
            when_behind="newest",
        )
        for number in range(6)
    ]
    training.step()
    outcomes = []
    for handle in handles:
        try:
            handle.result(60)
            outcomes.append("committed")
        except CheckpointSkipped:
            outcomes.append("dropped")
    assert outcomes[-1] == "committed"
    assert outcomes.count("dropped") >= 2
