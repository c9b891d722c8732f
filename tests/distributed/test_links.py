"""A path with symbolic links, on several ranks: all of a save goes to one directory."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.jobs.groups import own_group
from support.jobs.ranks import ranks
from support.state.checkpoints import CACHE, assert_same, load_everything

import dcp_datastates
from dcp_datastates import DataStatesWriter


class _Repointing(DataStatesWriter):
    """Between the files and the publication, the path comes to mean another directory."""

    def finish(self, metadata, results):
        link = Path(self.link)
        link.unlink()
        link.symlink_to("second")
        super().finish(metadata, results)


def _state(number):
    return {f"r{dist.get_rank()}": torch.full((500,), float(number)), "all": torch.ones(3)}


def _whole(number):
    ranks_ = {f"r{rank}": torch.full((500,), float(number)) for rank in range(2)}
    return {**ranks_, "all": torch.ones(3)}


@ranks(2)
def test_a_link_that_changes_before_the_publication(shared_dir):
    link = shared_dir / "link"
    if dist.get_rank() == 0:
        for name in ("first", "second"):
            (shared_dir / name).mkdir()
        link.symlink_to("first")
    dist.barrier()
    by = _Repointing(link / "c", host_cache_size=CACHE)
    by.link = link
    dcp.save(_state(1), storage_writer=by, process_group=own_group())
    dist.barrier()
    assert_same(load_everything(shared_dir / "first/c"), _whole(1))
    assert not any((shared_dir / "second").iterdir())


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
