"""Records and traces of several ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from support.jobs.groups import gathered, own_group
from support.jobs.ranks import ranks
from support.state.checkpoints import CACHE, async_save, save
from support.waiting import await_that

import dcp_datastates
from dcp_datastates.monitoring import trace_of
from dcp_datastates.results import LOAD_PHASES, PHASES


def _state():
    rank = dist.get_rank()
    return {f"w{rank}": torch.full((100_000 * (1 + rank),), float(rank))}


def _by_package(path):
    dcp_datastates.async_save(_state(), path, host_cache_size=CACHE).result()


def _by_dcp(path):
    async_save(_state(), path, group=own_group(), process_group=None).result(60)


@ranks(3)
@pytest.mark.parametrize("by", [_by_package, _by_dcp])
def test_every_rank_is_in_the_trace_and_they_end_together(by, shared_dir):
    path = shared_dir / "step-7"
    records = []
    stop = dcp_datastates.on_save(records.append)
    by(path)
    await_that(lambda: records)
    dist.barrier()
    stop()
    (record,) = records
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
    slow = {0: {"wait_fit", "apply"}, 1: {"fit"}}[dist.get_rank()]
    for _ in range(10):  # on a busy machine, other phases may take as long now and then
        records = []
        stop = dcp_datastates.on_load(records.append)
        dcp_datastates.load(shared_dir / "step-3", {"part": Slow(w=torch.zeros(1000))})
        await_that(lambda: records)  # noqa: B023
        stop()
        (found,) = records
        assert (found.rank, found.world, found.step) == (dist.get_rank(), 2, 3)
        assert list(found.phases) == list(LOAD_PHASES)
        assert sum(found.phases.values()) == pytest.approx(found.seconds)
        long = {phase for phase, seconds in found.phases.items() if seconds >= 0.4}
        assert long >= slow
        if all(gathered(long == slow)):
            return
    raise AssertionError(f"{long}, and not {slow}, took long")
