"""Plain tensors that say which shards of a larger one they hold: DCP's ``CheckpointableTensor``."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.jobs.ranks import ranks
from support.state.checkpoints import CACHE, load_by_both
from support.tiers import sampled

import dcp_datastates
from dcp_datastates import DataStatesSavePlanner, DataStatesWriter

pytestmark = pytest.mark.skipif(
    not hasattr(dcp, "CheckpointableTensor"), reason="this torch has no CheckpointableTensor"
)


def _part(whole, rank, kind=lambda tensor: tensor):
    """Two shards of five columns each, the second one behind a column of padding."""
    rows = whole.shape[0]
    local = torch.full((rows, 11), -1.0)
    starts = (5 * rank, 10 + 5 * rank)
    for within, start in zip((0, 6), starts, strict=True):
        local[:, within : within + 5] = whole[:, start : start + 5]
    local = kind(local)
    local.global_shape = tuple(whole.shape)
    local.global_offsets = tuple((0, start) for start in starts)
    local.local_offsets = ((0, 0), (0, 6))
    local.local_sizes = ((rows, 5), (rows, 5))
    return local


@ranks(2)
@pytest.mark.parametrize(
    ("how", "rows"),
    sampled(
        itertools.product(["package", "sync", "default planner", "parameter"], [6, 30_000]),
        keep=[("package", 30_000), ("sync", 6), ("default planner", 6), ("parameter", 30_000)],
    ),
)
def test_they_are_saved_and_loaded_as_shards(how, rows, shared_dir):
    kind = torch.nn.Parameter if how == "parameter" else torch.detach
    planner = None if how == "default planner" else DataStatesSavePlanner()
    for number in range(3):
        whole = torch.arange(rows * 20.0).reshape(rows, 20) + number
        state = {"w": _part(whole, dist.get_rank(), kind), "other": torch.ones(3)}
        by = DataStatesWriter(shared_dir / "c", host_cache_size=CACHE, reads="all")
        if how == "sync":
            dcp.save(state, storage_writer=by, planner=planner)
        elif how == "default planner":
            dcp.async_save(state, storage_writer=by).result(60)
        else:
            saved = dcp_datastates.async_save(state, writer=by, planner=planner)
            saved.upload_completion.result(60)
        dist.barrier()
        found = load_by_both({"w": torch.zeros(rows, 20)}, shared_dir / "c")
        assert torch.equal(found["w"], whole)
        again = _part(torch.zeros(rows, 20), dist.get_rank())
        load_by_both({"w": again}, shared_dir / "c")
        assert torch.equal(again, state["w"])
        dist.barrier()
