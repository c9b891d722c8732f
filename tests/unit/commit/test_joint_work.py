"""Joint work of ranks, as threads over a store in memory."""

import time
from types import SimpleNamespace

import pytest
from support.jobs.threads import MemoryStore, rank_set, together

from dcp_datastates.commit.joint_work import JointWork
from dcp_datastates.errors import RankLostError, SaveAbandonedError


def _of(world, patience):
    groups = [
        SimpleNamespace(rank_set=each, detector=None) for each in rank_set(world, MemoryStore())
    ]
    return [JointWork(group, "test", patience) for group in groups]


@pytest.mark.parametrize(("apart", "come"), [(0.0, True), (2.0, False)])
def test_patience_is_for_the_slowest_other_rank_not_for_the_own_work(apart, come):
    def run(each, rank):
        def work():
            time.sleep(1.5 + 0.4 * rank + apart * rank)
            return b""

        return each.do(1, work, lambda notes: b"done", "doing", "there")

    ends = together(_of(2, 1.0), run)
    assert ends == [b"done"] * 2 if come else {type(end) for end in ends} == {RankLostError}


def test_a_rank_whose_process_ends_is_named_to_the_others():
    def run(each, rank):
        each.do(1, lambda: b"", lambda notes: b"", "doing", "there")  # they have met
        if rank == 1:
            each.closing.set()
        else:
            time.sleep(0.5)
        return each.do(2, lambda: b"", lambda notes: b"", "doing", "there")

    ranks = _of(3, 100.0)
    ranks[2].do = lambda number, *_, do=ranks[2].do: do(number, *_) if number == 1 else None
    first, ended, _ = together(ranks, run)
    assert type(first) is type(ended) is SaveAbandonedError
    assert "the process of rank 1 was ending" in str(first)
