"""A stock planner with cached plans hands out tickets of earlier saves; each save goes by its own all the same."""

from __future__ import annotations

import copy
import pickle
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.jobs.groups import own_group
from support.jobs.ranks import ranks
from support.state.checkpoints import async_save, load_everything, writer
from support.state.planners import forget_cached_plans
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_datastates.storage.attempt import Attempt


class _Copying(DefaultSavePlanner):
    """Copies what it has cached, and so unpickles old tickets before and after the new one comes."""

    def create_local_plan(self):
        if hasattr(self, "plan"):
            pickle.loads(pickle.dumps(self.plan))
        return super().create_local_plan()

    def finish_plan(self, new_plan):
        return copy.deepcopy(super().finish_plan(new_plan))


def _state(number):
    rank = dist.get_rank()
    return {f"r{rank}": torch.full((300,), 10.0 * number + rank), "all": torch.full((9,), number)}


def _assert_is(path, number):
    found = load_everything(path)
    for rank in range(dist.get_world_size()):
        assert found[f"r{rank}"].eq(10.0 * number + rank).all()
    assert found["all"].eq(number).all()


@ranks(2)
@pytest.mark.parametrize("kind", [DefaultSavePlanner, _Copying])
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_saves_to_changing_paths_go_by_their_own_tickets(how, kind, shared_dir):
    forget_cached_plans()
    # Left by a job whose clock was ahead: attempts there are newer than all that come later elsewhere.
    ahead = Attempt(time.time_ns() + 3600 * 10**9, 7)
    if dist.get_rank() == 0:
        (shared_dir / "0" / ahead.name).mkdir(parents=True)
    group, planner = own_group(), kind(enable_plan_caching=True)
    for number in range(5):
        path = shared_dir / str(number % 3)
        if how == "save":
            dcp.save(
                _state(number), storage_writer=writer(path), planner=planner, process_group=group
            )
        else:
            async_save(_state(number), path, planner=planner, group=group).result(60)
        dist.barrier()
        _assert_is(path, number)
        dist.barrier()


@ranks(2)
def test_saves_of_one_rank_alone_in_between_leave_no_ticket_behind(shared_dir):
    forget_cached_plans()
    group, planner = own_group(), DefaultSavePlanner(enable_plan_caching=True)
    for number in range(6):
        if number % 2:
            alone = shared_dir / f"alone{dist.get_rank()}"
            state = {"w": torch.full((7,), float(number))}
            for _ in range(1 + 3 * dist.get_rank()):
                dcp.save(
                    state,
                    storage_writer=writer(alone),
                    planner=DefaultSavePlanner(enable_plan_caching=True),
                    no_dist=True,
                )
            assert load_everything(alone)["w"].eq(number).all()
            forget_cached_plans()  # stock plans of other groups do not go together
        else:
            dcp.save(
                _state(number),
                storage_writer=writer(shared_dir / "c"),
                planner=planner,
                process_group=group,
            )
            dist.barrier()
            _assert_is(shared_dir / "c", number)
        dist.barrier()
