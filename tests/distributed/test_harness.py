"""The harness itself: what it must report, and that it survives what tests do to it."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from support.crashes.residue import Residue
from support.jobs.ranks import RankFailure, ranks, run_on_ranks
from support.waiting import await_that
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


@ranks(4)
@pytest.mark.parametrize("repetition", range(2))
def test_meshes_of_an_earlier_test_leave_nothing_behind(repetition):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    sharded = distribute_tensor(torch.arange(8.0), mesh["a"], [Shard(0)])
    assert (sharded * 2).full_tensor().tolist() == [2.0 * n for n in range(8)]


def _rank_one_fails():
    if dist.get_rank() == 1:
        raise ValueError("the words of rank one")


def test_a_failure_names_the_rank_and_shows_its_traceback():
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(2, _rank_one_fails, timeout=60)
    assert "rank 1 of 2" in str(caught.value)
    assert "ValueError: the words of rank one" in str(caught.value)


def _all_skip():
    pytest.skip("not today")


def test_a_skip_on_the_ranks_is_a_skip():
    with pytest.raises(pytest.skip.Exception, match="not today"):
        run_on_ranks(2, _all_skip)


@ranks(2)
def _patched_by_one_rank(monkeypatch):
    if dist.get_rank() == 1:
        monkeypatch.setattr(time, "tzname", "patched")


@ranks(2)
def _as_python_made_it(expected):
    assert time.tzname == expected


def test_what_a_rank_patches_ends_with_the_test(monkeypatch):
    _patched_by_one_rank(monkeypatch=monkeypatch)
    _as_python_made_it(expected=time.tzname)


def _rank_zero_dies(code):
    if dist.get_rank() == 0:
        os._exit(code)


@pytest.mark.parametrize("code", [0, 7])
def test_a_process_that_ends_is_reported_and_the_next_test_gets_fresh_ranks(code):
    with pytest.raises(RankFailure, match=f"exit code {code}"):
        run_on_ranks(2, _rank_zero_dies, timeout=60, code=code)
    run_on_ranks(2, _nothing)


def _rank_one_sleeps():
    if dist.get_rank() == 1:
        time.sleep(600)


def test_a_hang_ends_with_the_stacks_of_who_hangs():
    for seconds in (2, 30):  # a busy machine may need more to come as far
        with pytest.raises(RankFailure, match="rank 1 of 2") as caught:
            run_on_ranks(2, _rank_one_sleeps, timeout=seconds)
        if "_rank_one_sleeps" in str(caught.value):
            break
    assert "_rank_one_sleeps" in str(caught.value)
    run_on_ranks(2, _nothing)


def _nothing():
    pass


def test_a_thread_that_starts_while_threads_are_counted_is_not_left_over(monkeypatch):
    name = next(
        each for each in ("_start_joinable_thread", "_start_new_thread") if hasattr(threading, each)
    )
    end, real = threading.Event(), getattr(threading, name)
    new = threading.Thread(target=end.wait)
    starter = threading.Thread(target=lambda: (new.start(), end.wait()))

    def start(*args, **kwargs):
        if threading.current_thread() is starter:
            time.sleep(0.3)
        return real(*args, **kwargs)

    monkeypatch.setattr(threading, name, start)
    starter.start()
    await_that(lambda: new in threading.enumerate())
    try:
        before = Residue.now()
        await_that(new.is_alive)
        assert Residue.now().beyond(before) == {}
    finally:
        end.set()
