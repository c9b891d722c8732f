"""Planning ahead of the first save, on several ranks."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from support.jobs.ranks import ranks
from support.state.checkpoints import assert_same, entries, load, raises, zeros
from support.state.planners import (
    SMALL,
    Skipping,
    save_by,
    saved_alone,
    saver,
    spied,
    spy,
    state_of,
)
from support.state.states import filled
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_datastates
from dcp_datastates import DataStatesSavePlanner


@ranks(4)
@spied
def test_a_primed_planner_finds_its_first_save_planned(shared_dir):
    planner, by = spy(DataStatesSavePlanner()), saver(shared_dir / "c")
    dcp_datastates.prime(state_of(0, count=100), planner=planner)
    assert planner.offered[0] > SMALL
    assert save_by(state_of(1, count=100), by, planner)
    assert planner.offered[1] < SMALL
    assert planner.answered[1] < SMALL
    assert_same(load(zeros(state_of(1, count=100)), shared_dir / "c"), state_of(1, count=100))


@ranks(2, timeout=60)
@pytest.mark.parametrize("what", ["state", "mapping", "planner", "class"])
def test_what_one_rank_cannot_prime_is_told_to_all(what, shared_dir):
    state, planner, by = state_of(0), DataStatesSavePlanner(), saver(shared_dir / "c")
    used = planner
    if dist.get_rank() == 1 and what == "state":
        state["lock"] = threading.Lock()
    elif dist.get_rank() == 1 and what == "mapping":
        state = 7
    elif dist.get_rank() == 1 and what == "planner":
        used = DefaultSavePlanner()
    elif dist.get_rank() == 1:
        used = Skipping()
    told = {
        "state": "can be neither copied nor pickled",
        "planner": "remembers no plans",
        "class": "one class on all ranks",
    }
    with raises(Exception, told.get(what, "")):
        dcp_datastates.prime(state, planner=used)
    dist.barrier()
    dcp_datastates.prime(state_of(0), planner=planner)
    assert save_by(state_of(1), by, planner)
    assert_same(load(zeros(state_of(1)), shared_dir / "c"), state_of(1))


@ranks(2, timeout=60)
def test_saves_in_flight_are_planned_before_another_is_primed(shared_dir):
    planner, by = DataStatesSavePlanner(), saver(shared_dir / "c", reads=3600)
    weights = torch.nn.Parameter(filled((70_000,), torch.float32, 1))
    torch.optim.SGD([weights], lr=1.0)
    for number in range(3):
        state = {**state_of(number), "weights": weights}
        response = dcp_datastates.async_save(state, writer=by, planner=planner)
        dcp_datastates.prime(state_of(0, count=number + 7), planner=planner)
        response.upload_completion.result(60)
    assert save_by(state_of(5, count=9), by, planner)
    assert_same(load(zeros(state_of(5, count=9)), shared_dir / "c"), state_of(5, count=9))


@ranks(1)
def test_a_planner_of_a_class_that_edits_plans_can_be_primed(shared_dir):
    planner, state = Skipping(), {"w": torch.ones(4), "skip": torch.ones(3)}
    for _ in range(2):
        dcp_datastates.prime(state, planner=planner)
        assert [item.index.fqn for item in planner.plan.items] == ["w"]
        saved_alone(state, planner, shared_dir / "c")
        assert set(entries(shared_dir / "c")) == {"w"}
