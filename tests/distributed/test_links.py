"""A path with symbolic links, on several ranks: all of a save goes to one directory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.jobs.ranks import ranks
from support.state.checkpoints import CACHE, assert_same, load_everything

import dcp_datastates


def _state(number):
    return {f"r{dist.get_rank()}": torch.full((500,), float(number)), "all": torch.ones(3)}


def _whole(number):
    ranks_ = {f"r{rank}": torch.full((500,), float(number)) for rank in range(2)}
    return {**ranks_, "all": torch.ones(3)}


@ranks(2)
def test_ranks_may_reach_one_directory_by_links_of_their_own(shared_dir):
    mine = shared_dir / f"mount{dist.get_rank()}"
    mine.mkdir()
    if dist.get_rank() == 0:
        (shared_dir / "store").mkdir()
        (mine / "c").symlink_to(shared_dir / "store")
    dist.barrier()
    if dist.get_rank() == 1:  # the directory itself, under a name of its own on the other rank
        (mine / "c").symlink_to(shared_dir / "mount0" / "c")
    for number in range(2):
        path = mine / "c"
        dcp_datastates.async_save(
            _state(number), path, host_cache_size=CACHE
        ).upload_completion.result(60)
        dist.barrier()
        assert_same(load_everything(shared_dir / "store"), _whole(number))
        dist.barrier()
