"""One call is one save: ranks that call, fail or leave out calls; and what is said of those who wait for them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.crashes.failing import armed
from support.jobs.groups import own_group
from support.jobs.ranks import ranks
from support.state.checkpoints import CACHE, async_save, committed, load_everything, raises, writer
from support.tiers import sampled
from support.waiting import lines
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_datastates
from dcp_datastates import DataStatesSavePlanner
from dcp_datastates.dcp import turn
from dcp_datastates.errors import DataStatesError, RankLostError, SaveFailedError
from dcp_datastates.io.destroy_hook import DestroyHook
from dcp_datastates.process import waiting
from dcp_datastates.ranks import connection
from dcp_datastates.ranks import failure_detector as detector
from dcp_datastates.saving import rank_context
from dcp_datastates.staging import deferred_reads, step_gate


class Loader:
    """A data loader, whose ``state_dict()`` may fail."""

    fails = False

    def state_dict(self):
        if self.fails:
            raise OSError("the loader's cache is gone")
        return {"position": 1}

    def load_state_dict(self, state):
        pass


def _state(number, loader=None):
    state = {f"w{dist.get_rank()}": torch.full((50_000,), float(number))}
    return state if loader is None else {**state, "loader": loader}


def _begin(number, path, loader=None, **options):
    options = {"host_cache_size": CACHE, "reads": "immediate", **options}
    return dcp_datastates.async_save(_state(number, loader), path, **options)


def _numbers(path):
    found = load_everything(path)
    return {found[f"w{rank}"].unique().item() for rank in range(dist.get_world_size())}


@ranks(2)
def test_a_rank_that_does_not_call_is_named_while_it_is_waited_for_and_fails_the_save(shared_dir):
    _begin(0, shared_dir / "0").result(60)
    with pytest.MonkeyPatch.context() as patch, lines(logging.WARNING) as said:
        patch.setattr(waiting, "FIRST_LINE_SECONDS", 0.5)
        if dist.get_rank() == 0:
            handle = _begin(1, shared_dir / "1", commit_timeout=2)
            with pytest.raises(RankLostError, match="rank 1 has not called async_save for"):
                handle.result(60)
            waits, *_, end = [line for line in said if "rank 1 has not called async_save" in line]
            assert "has waited for" in waits
            assert str(shared_dir / "1") in waits
            assert end == said[-1]
            dist.barrier()
        else:
            dist.barrier()  # and only then does this rank call: it is told at once
            with pytest.raises(SaveFailedError, match="rank 1 has not called async_save for"):
                _begin(1, shared_dir / "1", commit_timeout=3600).result(30)
    _begin(2, shared_dir / "2").result(60)
    assert not committed(shared_dir / "1")
    assert _numbers(shared_dir / "2") == {2.0}


@ranks(3)
def test_ranks_that_wait_for_the_first_rank_say_which_rank_it_waits_for(shared_dir):
    _begin(0, shared_dir / "0").result(60)
    with pytest.MonkeyPatch.context() as patch, lines(logging.WARNING) as said:
        patch.setattr(waiting, "FIRST_LINE_SECONDS", 1.0)
        dist.barrier()
        if dist.get_rank() < 2:
            handle = _begin(1, shared_dir / "1", commit_timeout=8)
            with pytest.raises(RankLostError, match="rank 2"):
                handle.result(60)
            waits = [line for line in said if "has waited for" in line]
            assert any("rank 2 has not called async_save" in line for line in waits), said
        dist.barrier()
        if dist.get_rank() == 2:
            with pytest.raises(SaveFailedError, match="rank 2"):
                _begin(1, shared_dir / "1").result(30)
    _begin(2, shared_dir / "2").result(60)


@ranks(2)
@pytest.mark.parametrize("by_writer", [False, True])
def test_a_call_that_fails_on_one_rank_fails_on_all_and_the_next_calls_pair_rightly(
    by_writer, shared_dir
):
    path = shared_dir / "c"  # always the same: paths do not tell the calls apart
    loader = Loader()

    def begin(number):
        if by_writer:
            return dcp_datastates.async_save(_state(number, loader), writer=writer(path))
        return _begin(number, path, loader)

    begin(1).result(60)
    loader.fails = dist.get_rank() == 1
    if loader.fails:
        with pytest.raises(OSError, match="the loader's cache is gone"):
            begin(2)
    else:
        with pytest.raises(SaveFailedError, match="rank 1 of 2: OSError: the loader's cache"):
            begin(2).result(60)
    loader.fails = False
    for number in (3, 4):
        begin(number).result(60)
        assert _numbers(path) == {float(number)}
    gc.collect()  # a writer that was made for the call, and not used
    dist.barrier()
    group = own_group()
    by_dcp = writer(path, process_group=group)
    dcp.save(_state(5), storage_writer=by_dcp, process_group=group)
    assert _numbers(path) == {5.0}


@ranks(2)
def test_an_option_that_fails_on_one_rank_fails_the_save_on_all(shared_dir):
    if dist.get_rank() == 1:
        with pytest.raises(dcp_datastates.errors.ConfigurationError, match="reads"):
            _begin(1, shared_dir / "c", reads="never")
    else:
        with pytest.raises(dcp_datastates.errors.ConfigurationError, match="rank 1 of 2: reads"):
            _begin(1, shared_dir / "c").result(60)
    _begin(2, shared_dir / "c").result(60)


@ranks(2)
def test_a_call_that_one_rank_leaves_out_is_named_and_the_ranks_get_in_step_again(shared_dir):
    _begin(0, shared_dir / "step-0").result(60)
    handles = {
        number: _begin(number, shared_dir / f"step-{number}", max_in_flight=8)
        for number in range(1, 6)
        if dist.get_rank() == 0 or number != 2
    }
    outcomes = {number: handle.committed.exception(60) for number, handle in handles.items()}
    assert outcomes[1] is None
    assert "left out a call" in str(outcomes[3 if dist.get_rank() else 2])
    if dist.get_rank() == 0:
        assert "step-3" in str(outcomes[3])
    assert outcomes[4] is outcomes[5] is None, outcomes
    dist.barrier()
    for number in range(6):
        path = shared_dir / f"step-{number}"
        assert committed(path) == (number not in (2, 3))
        assert not committed(path) or _numbers(path) == {float(number)}


@ranks(3)
@pytest.mark.parametrize(
    ("who", "stray"),
    sampled(itertools.product([(0,), (2,), (0, 1)], [1, 2]), keep=[((2,), 1), ((0, 1), 2)]),
)
def test_after_calls_of_some_ranks_alone_have_failed_the_next_call_of_all_commits(
    who, stray, shared_dir
):
    if dist.get_rank() in who:
        for number in range(stray):
            with raises(RankLostError):
                _begin(0, shared_dir / f"stray-{number}", commit_timeout=1.0).result(60)
    dist.barrier()
    for number in (1, 2, 3):
        _begin(number, shared_dir / f"step-{number}", commit_timeout=60.0).result(60)
        assert _numbers(shared_dir / f"step-{number}") == {float(number)}
    dist.barrier()


@ranks(2)
@pytest.mark.parametrize("planner", [DefaultSavePlanner, DataStatesSavePlanner])
def test_a_call_that_fails_inside_dcp_is_seen_in_the_saves_after_it(planner, shared_dir):
    # DCP calls state_dict() before it comes to the writer: its own collectives pair off by one from then on.
    group, loader, path = own_group(), Loader(), shared_dir / "c"

    def begin(number):
        return async_save(_state(number, loader), path, group=group, planner=planner())

    begin(1).result(60)
    loader.fails = dist.get_rank() == 1
    if loader.fails:
        with pytest.raises(OSError, match="the loader's cache is gone"):
            begin(2)
        loader.fails = False
    for number in (3, 4) if dist.get_rank() else (2, 3):  # each meets the other rank's call before
        with raises(SaveFailedError, "had made and not used"):
            begin(number).result(60)
    assert _numbers(path) == {1.0}
    _begin(5, path).result(60)
    assert _numbers(path) == {5.0}


@ranks(2)
@pytest.mark.parametrize("planner", [DefaultSavePlanner, DataStatesSavePlanner])
def test_a_synchronous_save_that_fails_in_dcps_planning_holds_up_nothing(planner, shared_dir):
    group = own_group()
    dcp_datastates.save(_state(0), shared_dir / "0", process_group=group, host_cache_size=CACHE)

    def fail():
        fault = armed("plan.before=error:EIO") if dist.get_rank() else contextlib.nullcontext()
        with fault, pytest.raises(dcp.api.CheckpointException, match="Input/output error"):
            dcp.save(
                {"w": torch.ones(3)},
                storage_writer=writer(shared_dir / "bad", process_group=group),
                planner=planner(),
                process_group=group,
            )

    fail()
    began = time.monotonic()
    fail()
    dcp_datastates.save(_state(1), shared_dir / "1", process_group=group, host_cache_size=CACHE)
    assert time.monotonic() - began < 60, "commit_timeout is 300 s"
    assert _numbers(shared_dir / "1") == {1.0}
    dist.barrier()


@ranks(2)
def test_the_gate_holds_training_a_while_for_a_rank_whose_call_failed_inside_dcp(shared_dir):
    group, loader, path = own_group(), Loader(), shared_dir / "c"
    weight = torch.nn.Parameter(torch.zeros(300, 400))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    dcp_datastates.track(optimizer)
    state = {f"w{dist.get_rank()}": weight, "loader": loader}
    by = writer(path)
    async_save(state, path, by=by, group=group).result(60)
    by.wait()
    weight.grad = torch.ones_like(weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turn, "GATE_SECONDS", 0.5)
        for number in range(2):  # DCP's thread of the first is still there in the second
            loader.fails = dist.get_rank() == 1
            if loader.fails:
                with pytest.raises(OSError, match="the loader's cache is gone"):
                    async_save(state, path, by=by, group=group)
                continue
            async_save(state, path, by=by, group=group)
            began = time.monotonic()
            optimizer.step()
            assert time.monotonic() - began < 30, "commit_timeout is 300 s"
            error = by.committed.exception(0)
            assert isinstance(error, RankLostError)
            assert "rank 1 has not called dcp.async_save" in str(error) or number
    dist.barrier()
    loader.fails = False
    if dist.get_rank() == 1:  # lets DCP's threads on the other rank go on
        for _ in range(2):
            with raises(DataStatesError):
                async_save(state, path, by=by, group=group).result(60)
    by.wait()
    dist.barrier()
    assert torch.equal(load_everything(path)[f"w{dist.get_rank()}"], torch.zeros(300, 400))


@ranks(2)
def test_the_gate_lets_training_go_if_a_rank_has_not_called(shared_dir):
    weight = torch.nn.Parameter(torch.zeros(300, 400))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    dcp_datastates.track(optimizer)
    weight.grad = torch.ones_like(weight)
    state = {f"w{dist.get_rank()}": weight}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_context, "GATE_SECONDS", 0.5)
        patch.setattr(rank_context, "GATE_SECONDS_AFTER_A_MISS", 0.2)
        for number in range(2 if dist.get_rank() == 0 else 0):
            handle = dcp_datastates.async_save(state, shared_dir / f"alone-{number}")
            began = time.monotonic()
            optimizer.step()
            assert time.monotonic() - began < 30, "commit_timeout is 300 s"
            with raises(RankLostError, "rank 1 has not called", "training waits no longer"):
                handle.result(60)
    dist.barrier()
    dcp_datastates.async_save(state, shared_dir / "all").result(60)
    assert torch.equal(load_everything(shared_dir / "all")[f"w{dist.get_rank()}"], weight)
    dist.barrier()


@ranks(2)
def test_the_training_thread_asks_nothing_of_the_ranks_store(shared_dir):
    me, asked = threading.current_thread(), []
    ask = connection.Client.ask

    def watched(client, request):
        asked.append(threading.current_thread())
        return ask(client, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection.Client, "ask", watched)
        for number in range(3):
            _begin(number, shared_dir / "c").result(60)
    assert asked, "the ranks have met without the store"
    assert me not in asked


@ranks(2)
def test_saving_on_one_rank_alone_does_not_fail_for_the_silence_of_the_other(shared_dir):
    if dist.get_rank() == 1:
        dist.barrier()
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detector, "_UNSEEN_SECONDS", 0.3)
        for number in range(3):
            future = dcp.async_save(
                _state(number), storage_writer=writer(shared_dir / f"{number}"), no_dist=True
            )
            future.result(60)
            time.sleep(0.5)
        dcp_datastates.save(_state(3), shared_dir / "3", no_dist=True, host_cache_size=CACHE)
    assert all(committed(shared_dir / f"{number}") for number in range(4))
    dist.barrier()


@ranks(2)
def test_a_job_that_destroys_its_process_group_finishes_its_saves_first(shared_dir):
    _begin(0, shared_dir / "0").result(60)
    handles = [_begin(number, shared_dir / f"{number}", reads=3600) for number in (1, 2)]
    for handle in handles:
        assert not handle.committed.done() or committed(handle.path)
    shutdowns = [
        each for each in dist.distributed_c10d._world.pg_names if isinstance(each, DestroyHook)
    ]
    assert shutdowns, "torch's books have nothing of this package's"
    for each in shutdowns:
        each.shutdown()  # as destroy_process_group() does with each group in its books
    assert all(handle.committed.done() for handle in handles)
    assert _numbers(shared_dir / "2") == {2.0}


@ranks(2)
def test_an_error_of_torchs_own_before_the_ranks_meet_is_told_to_all_and_leaves_them_in_step(
    shared_dir,
):
    """Of a device that is lost, say. All saves go to one path, so that only the count of calls tells them apart."""
    _begin(0, shared_dir / "c").result(60)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(deferred_reads.accelerator, "follow", _lost)
        with raises(SaveFailedError, "rank 1", "device is lost"):
            _begin(1, shared_dir / "c").result(60)
        dist.barrier()
    for number in (2, 3):
        _begin(number, shared_dir / "c").result(60)
        assert _numbers(shared_dir / "c") == {number}
        dist.barrier()


def _lost(moment):
    raise RuntimeError("the device is lost")


@ranks(2)
def test_an_error_late_in_one_ranks_call_is_told_to_the_others(shared_dir):
    """When all is staged, and the next backward pass is to be watched."""
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    dcp_datastates.track(optimizer)

    def refuse(*_):
        raise RuntimeError("no hook for this one")

    group = own_group()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(step_gate, "arm_backward", refuse)
        future = dcp.async_save(
            model.state_dict(),
            storage_writer=writer(shared_dir / "c", process_group=group),
            process_group=group,
        )
    with raises(RuntimeError, "no hook for this one"):
        future.result(60)
    dist.barrier()
    ours = writer(shared_dir / "c", process_group=group)
    dcp.async_save(model.state_dict(), storage_writer=ours, process_group=group)
    ours.committed.result(60)


@ranks(2)
def test_destroying_the_jobs_groups_tells_of_it(shared_dir):
    told = []
    hook = DestroyHook("dcp_datastates/test", lambda: told.append(dist.is_initialized()))
    books = dist.distributed_c10d._world.pg_names
    assert hook in books
    hook.close()
    assert hook not in books
    hook = DestroyHook("dcp_datastates/test", lambda: told.append(dist.is_initialized()))
    rank = dist.get_rank()
    dist.barrier()  # the other rank may still be connecting
    dist.destroy_process_group()
    assert told == [True]
    hook.close()
    store = dist.FileStore(str(shared_dir / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
