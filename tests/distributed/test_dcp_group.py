"""The group that DCP's collectives run on: it does what gloo's does, and nobody is stuck in it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import CACHE
from support.planners import FailingPlanner
from support.ranks import ranks
from support.residue import Residue, assert_nothing_left

import dcp_datastates
from dcp_datastates.commit import lane
from dcp_datastates.commit.peers import peers_of
from dcp_datastates.dcp_group import DcpGroup


def _group(name, check=lambda: None):
    return DcpGroup(
        peers_of(None),
        name,
        connecting=timedelta(seconds=30),
        operation=timedelta(minutes=5),
        check=check,
    )


@ranks(3)
def test_the_collectives_of_dcp_run_on_it_and_nothing_of_it_is_left(shared_dir):
    before = Residue.now()
    dist.barrier()
    rank, world = dist.get_rank(), dist.get_world_size()
    group = _group("all")
    assert (group.rank(), group.size()) == (rank, world)
    assert torch.device("cpu") in group._device_types

    everyone = [None] * world
    dist.all_gather_object(everyone, f"of {rank}", group=group)
    assert everyone == [f"of {each}" for each in range(world)]
    gathered = [None] * world if rank == 0 else None
    dist.gather_object({"rank": rank}, gathered, dst=0, group=group)
    assert rank != 0 or gathered == [{"rank": each} for each in range(world)]
    got = [None]
    dist.scatter_object_list(got, [10, 11, 12] if rank == 0 else None, src=0, group=group)
    assert got == [10 + rank]
    told = ["the coordinator's"] if rank == 0 else [None]
    dist.broadcast_object_list(told, src=0, group=group)
    assert told == ["the coordinator's"]
    total = torch.tensor([rank])
    dist.all_reduce(total, group=group)
    assert total.item() == 3
    dist.barrier(group=group)

    group.close()
    del group
    dist.barrier()
    assert_nothing_left(before)
    dist.barrier()


@ranks(2)
@pytest.mark.parametrize("way", ["cut", "check"])
def test_who_waits_for_a_rank_that_does_not_come_is_let_go(way, shared_dir):
    before = Residue.now()
    dist.barrier()
    gone = threading.Event()

    def check():
        if gone.is_set():
            raise InterruptedError("no use")

    group = _group(f"waits-{way}", check)
    if dist.get_rank() == 0:
        leave = group.cut if way == "cut" else gone.set
        timer = threading.Timer(0.3, leave)
        timer.start()
        began = time.monotonic()
        with pytest.raises((RuntimeError, InterruptedError)):
            dist.all_gather_object([None, None], "never", group=group)
        assert time.monotonic() - began < 10
        assert group.is_cut
        with pytest.raises(RuntimeError, match="given up"):
            dist.barrier(group=group)
        timer.join()
        del timer, leave  # they hold the group
    dist.barrier()
    group.close()
    del group
    assert_nothing_left(before)
    dist.barrier()


class _Stuck:
    """An operation that gloo has forgotten."""

    def is_completed(self):
        return False

    def wait(self):
        raise AssertionError("nobody waits in it")


@ranks(2)
def test_an_operation_that_gloo_has_forgotten_keeps_nobody(shared_dir):
    group = _group("stuck")
    if dist.get_rank() == 0:
        stuck = group._started(lambda: _Stuck(), (), {})
        threading.Timer(0.2, group.cut).start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lane, "_LETTING_GO_SECONDS", 0.2)
            with pytest.raises(RuntimeError, match="given up"):
                stuck.wait()
    dist.barrier()
    group.close()
    dist.barrier()


@ranks(2)
@pytest.mark.parametrize("where", ["set_up_planner", "create_local_plan", "resolve_data"])
def test_an_error_that_is_kept_keeps_nothing_that_the_save_was_given(where, shared_dir):
    weight, planner = torch.ones(1000), FailingPlanner(where)
    gone = [weakref.ref(weight)]
    if (
        where != "resolve_data"
    ):  # DCP's function that calls it is a closure: its frame keeps the planner
        gone.append(weakref.ref(planner))
    response = dcp_datastates.async_save(
        {"weight": weight},
        shared_dir / "c",
        planner=planner,
        read_window="immediate",
        host_cache_size=CACHE,
    )
    kept = response.upload_completion.exception(60)
    assert "refused in" in str(kept)
    del weight, planner
    deadline = time.monotonic() + 10
    while held := [each() for each in gone if each() is not None]:
        assert time.monotonic() < deadline, held
        del held
        gc.collect()
        time.sleep(0.01)
    dist.barrier()
