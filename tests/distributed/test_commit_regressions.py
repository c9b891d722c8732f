"""What went wrong once between ranks, the store, and the order in which things end."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.crashes.failing import silence
from support.jobs.processes import run_ranks
from support.jobs.ranks import ranks
from support.state.checkpoints import CACHE, committed, load_everything, writer
from support.waiting import await_that
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_datastates
from dcp_datastates.commit import group as groups
from dcp_datastates.commit.voter import Ballot
from dcp_datastates.errors import RankLostError
from dcp_datastates.ranks import connection
from dcp_datastates.ranks.rank_set import rank_set_of


def _state(number):
    return {f"w{dist.get_rank()}": torch.full((1000,), float(number))}


def _save(number, path, **options):
    ours = writer(path, **options)
    dcp.save(_state(number), storage_writer=ours)
    ours.wait()


def _group():
    return groups.commit_group(rank_set_of(None))


def _forget_groups():
    """As if the default group had been made anew over the same store."""
    dist.barrier()
    groups._close_all()
    dist.barrier()


class _Broken:
    def __getattr__(self, name):
        def fail(*_):
            raise dist.DistNetworkError("Connection reset by peer")

        return fail


@ranks(2)
def test_a_new_group_over_the_same_store_plans_and_saves_at_once(shared_dir):
    def begin(number, path):
        state = {f"w{dist.get_rank()}": torch.full((8,), float(number))}
        return dcp_datastates.async_save(state, path, host_cache_size=CACHE).upload_completion

    for number in range(3):
        _forget_groups()
        for name in ("a", "b"):  # it must not believe the former group's keys
            begin(number, shared_dir / name).result(60)
    assert committed(shared_dir / "a")


@ranks(2)
def test_what_the_coordinator_published_stands_when_the_store_fails_before_it_has_told(shared_dir):
    _forget_groups()
    group = _group()
    tell, hear = Ballot.tell, Ballot.hear

    async def tell_without_the_store(*arguments):
        group._decisions._store = group.detector._store = _Broken()
        await tell(*arguments)

    async def hear_late(*arguments):
        time.sleep(2)
        return await hear(*arguments)

    with pytest.MonkeyPatch.context() as patch, silence(8):
        patch.setattr(Ballot, "tell", tell_without_the_store)
        patch.setattr(Ballot, "hear", hear_late)
        _save(1, shared_dir / "c")
    dist.barrier()
    assert len(load_everything(shared_dir / "c")) == 2
    _forget_groups()


class _Interrupted(dcp_datastates.DataStatesWriter):
    def finish(self, metadata, results):
        raise KeyboardInterrupt


@ranks(2)
def test_a_synchronous_save_that_ends_before_finish_does_not_block_the_next_writers(shared_dir):
    ours = (_Interrupted if dist.get_rank() == 0 else dcp_datastates.DataStatesWriter)(
        shared_dir / "a", host_cache_size=CACHE
    )
    with pytest.raises(BaseException, match=r"KeyboardInterrupt|Interrupted"):
        dcp.save(_state(1), storage_writer=ours)
    response = dcp_datastates.async_save(_state(2), shared_dir / "b", host_cache_size=CACHE)
    response.upload_completion.result(60)
    assert committed(shared_dir / "b")


def lose_the_stores_host(path):
    dist.barrier()
    rank, world, port = dist.get_rank(), dist.get_world_size(), Path(path, "port")
    dist.destroy_process_group()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        Path(path, "port.tmp").write_text(str(store.port))
        os.rename(Path(path, "port.tmp"), port)
    else:
        await_that(port.exists)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), None, False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    _save(1, Path(path, "a"))
    connection.ANSWER_SECONDS = 2.0  # in a process of its own
    if rank == 0:
        Ballot.vote = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    response = dcp_datastates.async_save(_state(2), Path(path, "b"), host_cache_size=CACHE)
    with silence(5), pytest.raises(RankLostError, match="rank 0"):
        response.upload_completion.result(60)


def test_the_death_of_the_rank_that_hosts_the_store_is_told_to_all(tmp_path):
    ended = run_ranks(f"{__name__}:lose_the_stores_host", 3, tmp_path, path=str(tmp_path))
    assert ended[0].killed
    for rank in (1, 2):
        ended[rank].result()


class _Slow(DefaultSavePlanner):
    def resolve_data(self, write_item):
        time.sleep(0.6 if dist.get_rank() == 1 else 0)
        return super().resolve_data(write_item)


@ranks(2)
def test_a_rank_that_reads_slowly_but_steadily_is_not_given_up(shared_dir):
    rank = dist.get_rank()
    state = {f"w{rank}.{number}": torch.full((10,), float(number)) for number in range(8)}
    dcp_datastates.async_save(
        state, shared_dir / "c", planner=_Slow(), commit_timeout=4, host_cache_size=CACHE, reads=0
    ).upload_completion.result(60)
    assert len(load_everything(shared_dir / "c")) == 16
