"""One rank's failure is every rank's, for that save only."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.crashes.failing import silence
from support.jobs.groups import own_group
from support.jobs.ranks import ranks
from support.state.checkpoints import (
    assert_same,
    async_save,
    committed,
    load_everything,
    raises,
    save,
    writer,
)
from support.tiers import sampled
from support.waiting import await_free_host_cache
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_datastates.commit.group import commit_group
from dcp_datastates.errors import RankLostError, SnapshotTornError
from dcp_datastates.io import engine as engine_module
from dcp_datastates.ranks.failure_detector import Loss


def _owned():
    parameter = torch.nn.Parameter(torch.full((500_000,), float(dist.get_rank())))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {f"w{dist.get_rank()}": parameter}, optimizer


def _saves_well(ours, group, path):
    state, optimizer = _owned()
    expected = {
        f"w{rank}": torch.full((500_000,), rank - 1.0) for rank in range(dist.get_world_size())
    }
    future = async_save(state, None, by=ours, group=group, checkpoint_id=path)
    optimizer.step()
    future.result(60)
    assert_same(load_everything(path), expected)
    assert engine_module.stats() is not None
    await_free_host_cache(60)


@ranks(4)
def test_a_torn_tensor_on_one_rank_fails_the_save_on_all(shared_dir):
    group = own_group()
    ours = writer(reads=600)
    state, optimizer = _owned()
    future = async_save(state, None, by=ours, group=group, checkpoint_id=shared_dir / "bad")
    if dist.get_rank() == 3:
        state["w3"].data.add_(1)
    optimizer.step()
    with raises(SnapshotTornError, "w3"):
        future.result(60)
    assert not committed(shared_dir / "bad")
    _saves_well(ours, group, shared_dir / "good")


@ranks(2)
@pytest.mark.parametrize("holding", sampled([0, 1], keep=[0]))
def test_a_call_that_holds_the_gil_for_long_loses_no_save(holding, shared_dir):
    """A graph capture, a compilation: no thread of Python's runs, and so no beat leaves the process."""
    group, ours = own_group(), writer()
    state = {f"w{dist.get_rank()}": torch.ones(3)}
    with silence(15):
        async_save(state, None, by=ours, group=group, checkpoint_id=shared_dir / "a").result(60)
        future = async_save(state, None, by=ours, group=group, checkpoint_id=shared_dir / "b")
        if dist.get_rank() == holding:
            ctypes.PyDLL(None).usleep(3_000_000)
        future.result(60)
    assert committed(shared_dir / "b")


@ranks(2)
@pytest.mark.parametrize("alarmed", [0, 1])
def test_a_false_alarm_while_a_rank_reads_is_told_to_all_ranks_alike(alarmed, shared_dir):
    """A rank that is taken for lost, and is not: a rank that believes it must not be told another outcome."""
    ours = writer(shared_dir / "c")
    alarm = threading.Event()

    class Raises(DefaultSavePlanner):
        def resolve_data(self, write_item):
            if dist.get_rank() == alarmed and not alarm.is_set():
                alarm.set()
                detector = commit_group(ours.rank_set).detector
                for listener in filter(None, detector._active):
                    listener([Loss(1 - alarmed, "is only late")])
            return super().resolve_data(write_item)

    with raises(RankLostError, "is only late"):
        dcp.save({f"w{dist.get_rank()}": torch.ones(8)}, storage_writer=ours, planner=Raises())
    assert alarm.is_set() == (dist.get_rank() == alarmed)
    with raises(RankLostError, "is only late"):
        ours.committed.result(60)
    assert not committed(shared_dir / "c")
    save({f"w{dist.get_rank()}": torch.ones(8)}, shared_dir / "c")
    assert committed(shared_dir / "c")
