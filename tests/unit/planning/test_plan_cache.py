"""The plan caches of the ranks and of the coordinator, together: what is sent by digest is what was meant.

Random saves of three ranks: their plans change and come back, planning breaks off at any point, a process starts anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.state.plans import plan, replica, thing

from dcp_datastates.errors import DataStatesError
from dcp_datastates.planning.column_planning import PlanOptions, assign_shares
from dcp_datastates.planning.exchange import Answer, Offer
from dcp_datastates.planning.local_plan import LocalPlan
from dcp_datastates.planning.plan_cache import PlanCache
from dcp_datastates.planning.rank_plan_cache import KnownPlan, RankPlanCache

WORLD = 3
SAME = (0,) * WORLD
PLANS = [
    plan(replica("w", (4, 2)), thing("step"), *(replica(name, (3, 2)) for name in names))
    for names in ("", "a", "b", "c", "ab", "ac", "bc", "abc", "d", "ad")
]
"""More than a rank keeps. Which rank writes a tensor depends on the plans of all."""


@dataclass
class Job:
    """Three ranks that plan saves of one group with caches, as ``ColumnPlanning`` does."""

    ranks: list[RankPlanCache] = field(
        default_factory=lambda: [RankPlanCache() for _ in range(WORLD)]
    )
    coordinator: PlanCache = field(default_factory=PlanCache)
    in_full: int = 0
    """Plans and shares that were sent in full."""

    def save(self, numbers: tuple[int, ...], lost: int = WORLD) -> None:
        """Plan a save in which the ranks have these plans; the ranks from ``lost`` on get no answer."""
        offers, known = [], []
        locals_ = [PLANS[number] for number in numbers]
        for cache, local in zip(self.ranks, locals_, strict=True):
            cache.begin("g")
            agreed, offer = cache.offer("g", local)
            known.append(agreed or KnownPlan(local))
            offers.append(Offer.decode(offer.encode()))
            self.in_full += offer.data is not None
        seen: list[LocalPlan] = []

        def assign(plans):
            seen.extend(plans)
            return assign_shares(plans, PlanOptions())

        answers, whole = self.coordinator.plan("g", offers, assign)
        assert not seen or [each.digest for each in seen] == [each.digest for each in locals_]
        expected, _ = assign_shares(locals_, PlanOptions())
        assert [each.digest for each in whole.shares] == [each.digest for each in expected]
        for rank, (cache, answer) in enumerate(zip(self.ranks, answers, strict=True)):
            if rank >= lost:
                continue
            self.in_full += answer.data is not None
            share = known[rank].take(Answer.decode(answer.encode()))
            assert share.final.digest == expected[rank].digest
            assert share.items == expected[rank].write_items(locals_[rank])
            cache.finish("g", known[rank])


NUMBERS = st.tuples(*[st.integers(0, len(PLANS) - 1)] * WORLD)
STEPS = st.lists(st.tuples(NUMBERS, st.sampled_from([WORLD, WORLD, 0, 1])), max_size=20)


@settings(max_examples=30)
@given(STEPS)
def test_each_rank_gets_the_share_of_the_plan_that_it_has(steps):
    job = Job()
    for numbers, lost in steps:
        job.save(numbers, lost)


@pytest.mark.parametrize("kept", [1, 2, 8])
def test_plans_in_turn_are_sent_once(kept):
    job = Job()
    for number in range(kept):
        job.save((number,) * WORLD)
    first, job.in_full = job.in_full, 0
    for number in [*range(kept)] * 3:
        job.save((number,) * WORLD)
    assert first == 2 * kept * WORLD
    assert job.in_full == 0


def test_after_planning_that_broke_off_plans_are_sent_again():
    job = Job()
    job.save(SAME)
    job.save(SAME, lost=1)
    job.in_full = 0
    job.save(SAME)
    assert job.in_full >= WORLD - 1


def test_a_digest_that_the_coordinator_has_not_is_refused_by_name():
    job = Job()
    job.save(SAME)
    job.coordinator = PlanCache()
    with pytest.raises(DataStatesError, match="rank 0 offers a plan that the coordinator has not"):
        job.save(SAME)
    job.save(SAME)  # the failed planning told the ranks to send it again
