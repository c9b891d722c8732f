"""How the ranks plan together: each call pairs with the same call of the others, and no rank is stuck in one."""

from __future__ import annotations

import gc
import itertools
import pickle
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from support.crashes.residue import Residue, assert_nothing_left
from support.jobs.ranks import ranks
from support.jobs.threads import MemoryStore, rank_set, together
from support.state.checkpoints import CACHE
from support.state.planners import FailingPlanner
from support.waiting import await_that

import dcp_datastates
from dcp_datastates import RankLostError
from dcp_datastates.io.destroy_hook import DestroyHook
from dcp_datastates.ranks import collectives
from dcp_datastates.ranks.beats import Loss
from dcp_datastates.ranks.collectives import Collectives
from dcp_datastates.ranks.gloo_tree import GroupBroken


class _Detector:
    """Knows of no loss, until it is told of one."""

    def __init__(self):
        self.lost = []

    def losses(self):
        return list(self.lost)


def _nothing():
    pass


def _plans(world, store=None, detector=None):
    """The ``detector`` is rank 0's."""
    return [
        Collectives(each, detector if detector and each.rank == 0 else _Detector())
        for each in rank_set(world, store or MemoryStore())
    ]


def _step(plan, entry, say=None, look=_nothing):
    """What this rank is told in an entry in which all say something to the coordinator."""
    with plan.entry(entry, look) as these:
        return pickle.loads(_exchange(these, pickle.dumps((entry, say))))


def _exchange(these, mine):
    """What all have given, on all ranks."""
    gathered = these.gather(mine)
    if gathered is None:
        return these.scatter(None)
    told = pickle.dumps(list(map(pickle.loads, gathered))) if mine else b""
    return these.scatter([told] * len(gathered))


def _close(plans):
    together(plans, lambda plan, _: plan.close())


@pytest.mark.parametrize("world", [2, 18])
def test_each_rank_gets_its_element_and_nothing_is_left(world):
    before = Residue.now()
    plans = _plans(world)

    def plan(plan, rank):
        with plan.entry(1, _nothing) as these:
            gathered = these.gather(b"%d" % rank)
            assert gathered == ([b"%d" % each for each in range(world)] if rank == 0 else None)
            return these.scatter(gathered and [each + b"!" for each in gathered])

    assert together(plans, plan) == [b"%d!" % rank for rank in range(world)]
    _close(plans)
    del plans
    assert_nothing_left(before)


def test_an_error_behind_the_exchange_breaks_no_connection():
    plans = _plans(3)

    def fail(plan, rank):
        with plan.entry(1, _nothing) as these:
            _exchange(these, b"")
            raise KeyError(rank)

    outcomes = together(plans, fail)
    assert [each.args for each in outcomes] == [(0,), (1,), (2,)]
    assert together(plans, lambda plan, _: _step(plan, 2)) == [[(2, None)] * 3] * 3
    assert plans[0]._tree.generation == 0, "connected again without need"
    _close(plans)


def test_an_entry_asks_nothing_of_the_store():
    store = MemoryStore()
    plans = _plans(3, store)
    together(plans, lambda plan, _: _step(plan, 1))
    asked = store.requests
    for entry in range(2, 5):
        together(plans, lambda plan, _, entry=entry: _step(plan, entry))
    assert store.requests == asked
    _close(plans)


def test_ranks_that_come_with_different_entries_fail_the_older_ones_and_get_in_step():
    plans = _plans(3)
    together(plans, lambda plan, _: _step(plan, 1))
    outcomes = [{} for _ in plans]

    def go_on(plan, rank):
        for entry in range((2, 4, 3)[rank], 6):
            try:
                outcomes[rank][entry] = _step(plan, entry)
            except RankLostError as error:
                outcomes[rank][entry] = str(error)

    together(plans, go_on)
    for rank, mine in enumerate(outcomes):
        for entry, outcome in mine.items():
            if entry < 4:
                assert "given this save up" in outcome, (rank, entry, outcome)
            else:
                assert outcome == [(entry, None)] * 3, (rank, entry, outcome)
    assert plans[0]._tree.generation == 0, "connected again without need"
    _close(plans)


def test_a_rank_that_comes_late_is_told_why_its_entry_was_given_up_and_need_not_wait_for_the_next(
    monkeypatch,
):
    monkeypatch.setattr(collectives, "_NOTE_SECONDS", 0.2)
    plans = _plans(2)
    together(plans, lambda plan, _: _step(plan, 1))
    looks = itertools.count()

    def look():
        if next(looks) > 3:
            raise RankLostError("rank 1 has not called")

    with pytest.raises(RankLostError, match="rank 1 has not called"):
        _step(plans[0], 2, look=look)
    for _ in range(2):  # also where it finds out in a meeting
        with pytest.raises(RankLostError, match="rank 1 has not called"):
            _step(plans[1], 2)
    assert together(plans, lambda plan, _: _step(plan, 3)) == [[(3, None)] * 2] * 2
    _close(plans)


def test_a_rank_that_fails_between_two_steps_fails_the_entry_on_all_and_the_next_pairs_rightly():
    plans = _plans(18)
    together(plans, lambda plan, _: _step(plan, 1))

    def plan(plan, rank):
        with plan.entry(2, _nothing) as these:
            these.gather(b"")
            if rank == 17:
                raise OSError("in between")
            these.gather(b"")
            return these.scatter([b""] * 18 if rank == 0 else None)

    outcomes = together(plans, plan)
    assert isinstance(outcomes[17], OSError)
    assert all(isinstance(each, RankLostError | GroupBroken) for each in outcomes[:17]), outcomes
    assert any("in between" in str(each) for each in outcomes[:17])
    assert together(plans, lambda plan, _: _step(plan, 3)) == [[(3, None)] * 18] * 18
    _close(plans)


@pytest.mark.parametrize("comes", [False, True])
def test_a_rank_that_the_failure_detector_counts_out_is_named(comes):
    """Before it comes to the entry, and in the middle of it."""
    detector = _Detector()
    plans = _plans(2, detector=detector)
    together(plans, lambda plan, _: _step(plan, 1))
    told = threading.Event()

    def plan(plan, rank):
        with plan.entry(2, _nothing) as these:
            if rank == 1:
                told.wait(30)
            else:
                detector.lost = [Loss(1, "is dead", True)]
                these.gather(b"")

    if not comes:
        detector.lost = [Loss(1, "is dead", True)]
        outcome = together(plans[:1], lambda plan, _: _step(plan, 2))[0]
    else:
        other = threading.Thread(target=plan, args=(plans[1], 1))
        other.start()
        (outcome,) = together(plans[:1], plan)
        told.set()
        other.join()
    assert isinstance(outcome, RankLostError), outcome
    assert "rank 1 is dead" in str(outcome)
    _close(plans)


def test_notes_in_the_store_do_not_grow(monkeypatch):
    monkeypatch.setattr(collectives, "_KEPT_ENTRIES", 2)
    store = MemoryStore()
    plans = _plans(2, store)

    def fail(plan, rank, entry):
        with plan.entry(entry, _nothing):
            raise OSError(f"{rank}")

    keys = []
    for entry in range(1, 9):
        together(plans, lambda plan, rank, entry=entry: fail(plan, rank, entry))
        keys.append(store.real.num_keys())
    assert keys[-1] <= keys[3], keys
    _close(plans)


def test_a_store_that_has_outlived_a_job_does_not_fail_the_next_ones_saves():
    store = MemoryStore()

    def fail(plan, rank):
        with plan.entry(2, _nothing):
            raise OSError(f"{rank}")

    for _ in range(2):
        plans = _plans(2, store)
        assert together(plans, lambda plan, _: _step(plan, 1)) == [[(1, None)] * 2] * 2
        together(plans, fail)
        assert together(plans, lambda plan, _: _step(plan, 3)) == [[(3, None)] * 2] * 2
        # The next job comes with this entry, too.
        _close(plans)
    plans = _plans(2, store)
    together(plans, lambda plan, _: _step(plan, 1))
    plans[1]._tree.leave()  # so that the ranks look for notes
    assert together(plans, lambda plan, _: _step(plan, 2)) == [[(2, None)] * 2] * 2
    _close(plans)


def test_connections_that_break_before_an_entry_begins_fail_nothing():
    plans = _plans(2)
    together(plans, lambda plan, _: _step(plan, 1))
    plans[1]._tree.leave()
    assert together(plans, lambda plan, _: _step(plan, 2)) == [[(2, None)] * 2] * 2
    _close(plans)


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
    await_that(lambda: gc.collect() >= 0 and all(each() is None for each in gone), 10)
    dist.barrier()
