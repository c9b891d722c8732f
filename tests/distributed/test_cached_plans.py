"""DCP shows planners empty plans. One that caches plans takes none of these for the plan of a later save."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.jobs.groups import own_group
from support.jobs.ranks import ranks
from support.state.checkpoints import assert_same, writer
from support.state.planners import forget_cached_plans
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_datastates.saving import rank_context
from dcp_datastates.saving.write import begin_write


class _Copying(DefaultSavePlanner):
    """Copies what it has cached, and has a hook."""

    def create_local_plan(self):
        if hasattr(self, "plan"):
            pickle.loads(pickle.dumps(self.plan))
        return super().create_local_plan()

    def finish_plan(self, new_plan):
        return copy.deepcopy(super().finish_plan(new_plan))


def _state(number):
    rank = dist.get_rank()
    return {f"r{rank}": torch.full((300,), 10.0 * number + rank), "all": torch.full((9,), number)}


@ranks(2)
@pytest.mark.parametrize("kind", [DefaultSavePlanner, _Copying])
@pytest.mark.parametrize("fails", [False, True])
def test_another_writer_gets_whole_plans_after_a_save(fails, kind, shared_dir):
    """Also if that save has failed after DCP's planning."""
    forget_cached_plans()
    group, planner = own_group(), kind(enable_plan_caching=True)

    def stock(number):
        path = shared_dir / str(number)
        writing = dcp.FileSystemWriter(path)
        dcp.save(_state(number), storage_writer=writing, planner=planner, process_group=group)
        found = {name: torch.zeros_like(value) for name, value in _state(0).items()}
        dcp.load(found, storage_reader=dcp.FileSystemReader(path), process_group=group)
        assert_same(found, _state(number))

    stock(0)
    for number in (1, 3):
        instead = RuntimeError("not written") if fails else begin_write
        with mock.patch.object(rank_context, "begin_write", side_effect=instead):
            try:
                dcp.save(
                    _state(number),
                    storage_writer=writer(shared_dir / "c"),
                    planner=planner,
                    process_group=group,
                )
            except CheckpointException:
                assert fails
        stock(number + 1)
        dist.barrier()
