"""Records and traces of several ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from support.crashes.failing import armed_on
from support.jobs.groups import own_group
from support.jobs.ranks import ranks
from support.state.checkpoints import CACHE, async_save, save, writer
from support.tiers import sampled
from support.waiting import await_that

import dcp_datastates
from dcp_datastates import CheckpointManager
from dcp_datastates.errors import CheckpointSkipped, DataStatesError
from dcp_datastates.monitoring import trace_of
from dcp_datastates.results import LOAD_PHASES, PHASES


def _state():
    rank = dist.get_rank()
    return {f"w{rank}": torch.full((100_000 * (1 + rank),), float(rank))}


def _by_package(path):
    dcp_datastates.async_save(_state(), path, host_cache_size=CACHE).result()


def _by_dcp(path):
    save(_state(), path)


def _by_dcp_behind_training(path):
    async_save(_state(), path, group=own_group(), process_group=None).result(60)


def _by_manager(path):
    with CheckpointManager(path.parent, every=1, host_cache_size=CACHE) as manager:
        manager.save(7, _state())


APIS = {
    "async_save": _by_package,
    "dcp.save": _by_dcp,
    "dcp.async_save": _by_dcp_behind_training,
    "manager": _by_manager,
}


def _recorded(call, *arguments):
    """This rank's records of what ``call`` saves, which is one save."""
    records = []
    stop = dcp_datastates.on_save(records.append)
    try:
        call(*arguments)
        await_that(lambda: records)
        dist.barrier()
    finally:
        stop()
    return records


@ranks(3)
@pytest.mark.parametrize("name", sampled(APIS, keep=["async_save", "dcp.async_save"]))
def test_every_rank_is_in_the_trace_and_they_end_together(name, shared_dir):
    path = shared_dir / "step-7"
    (record,) = _recorded(APIS[name], path)
    assert list(record.phases) == list(PHASES)
    found = trace_of(path)
    assert [(each.rank, each.world, each.step) for each in found] == [
        (rank, 3, 7) for rank in range(3)
    ]
    mine = found[dist.get_rank()]
    assert (mine.attempt, mine.began_at) == (record.attempt, record.began_at)
    assert mine.written_bytes == record.written_bytes > 400_000 * (1 + dist.get_rank())
    for phase in list(PHASES)[:6]:
        assert mine.phases.get(phase, 0.0) == pytest.approx(record.phases[phase], rel=1e-6)
    # On one machine, all clocks agree: what ends for all ranks at once ends at one time.
    ends = [each.began_at + each.seconds for each in found]
    assert ends == pytest.approx([ends[0]] * 3, abs=1e-3)
    assert mine.seconds <= record.seconds + 1e-3
    for each in found:
        assert min(each.phases.values()) >= 0
        assert sum(each.phases.values()) == pytest.approx(each.seconds, rel=1e-9)


@ranks(3)
@pytest.mark.parametrize("place", ["stage.after", "vote.before"])
def test_one_ranks_failure_is_in_every_ranks_record(place, shared_dir, tmp_path):
    def fail(path):
        with armed_on(1, f"{place}=error:EIO", shared_dir / "log"), pytest.raises(DataStatesError):
            _by_package(path)

    (record,) = _recorded(fail, shared_dir / "step-7")
    assert (record.rank, record.outcome) == (dist.get_rank(), "failed")
    assert sum(record.phases.values()) == pytest.approx(record.seconds, rel=1e-9)


@ranks(2)
def test_a_save_that_one_rank_leaves_out_has_a_record_on_both(shared_dir):
    parameter = torch.nn.Parameter(torch.ones(1_000_000))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {f"w{dist.get_rank()}": parameter}
    by = writer(reads=3600, when_behind="skip", max_in_flight=1 + dist.get_rank())
    records = []
    stop = dcp_datastates.on_save(records.append)
    first = dcp_datastates.async_save(state, shared_dir / "a", writer=by)
    second = dcp_datastates.async_save(state, shared_dir / "b", writer=by)
    first.result()
    with pytest.raises(CheckpointSkipped):
        second.result()
    await_that(lambda: len(records) == 2)
    stop()
    assert {(each.path[-1], each.outcome) for each in records} == {
        ("a", "committed"),
        ("b", "skipped"),
    }


@ranks(2)
def test_a_load_says_on_each_rank_for_how_long_it_waited_for_others(shared_dir):
    class Slow(dict):
        """Takes half a second on rank 1 to say what is in it, and on rank 0 to take what was loaded."""

        def state_dict(self):
            time.sleep(0.5 * dist.get_rank())
            return dict(self)

        def load_state_dict(self, state):
            time.sleep(0.5 * (1 - dist.get_rank()))

    save({"part": {"w": torch.ones(1000)}}, shared_dir / "step-3")
    records = []
    stop = dcp_datastates.on_load(records.append)
    dcp_datastates.load(shared_dir / "step-3", {"part": Slow(w=torch.zeros(1000))})
    await_that(lambda: records)
    stop()
    (found,) = records
    assert (found.rank, found.world, found.step) == (dist.get_rank(), 2, 3)
    assert list(found.phases) == list(LOAD_PHASES)
    assert sum(found.phases.values()) == pytest.approx(found.seconds)
    slow = {0: ("wait_fit", "apply"), 1: ("fit",)}[dist.get_rank()]
    assert {phase for phase, seconds in found.phases.items() if seconds >= 0.4} == set(slow)
