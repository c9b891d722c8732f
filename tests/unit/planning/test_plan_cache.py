"""The plan cache of the ranks and of the coordinator: what is named by its digest is what was meant.

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
from dcp_datastates.planning.messages import Answer, Offer, RankPlan
from dcp_datastates.planning.part_files import KEPT, Recent
from dcp_datastates.planning.plan_cache import PlanCache

WORLD = 3
SAME = (0,) * WORLD
PLANS = [
    plan(replica("w", (4, 2)), thing("step"), *(replica(name, (3, 2)) for name in names))
    for names in ("", "a", "b", "c", "ab", "ac", "bc", "abc", "d", "ad")
]
"""More than are kept. Which rank writes a tensor depends on the plans of all."""


@dataclass
class Job:
    """Three ranks that plan saves of one group with caches, as ``ColumnPlanning`` does."""

    ranks: list[PlanCache] = field(default_factory=lambda: [PlanCache() for _ in range(WORLD)])
    coordinator: PlanCache = field(default_factory=PlanCache)
    in_full: int = 0
    """Plans and shares that were sent in full."""

    def save(self, numbers: tuple[int, ...], lost: int = WORLD, group: str = "g") -> None:
        """Plan a save in which the ranks have these plans; the ranks from ``lost`` on get no answer."""
        locals_ = [PLANS[number] for number in numbers]
        agreed = [cache.begin(group) for cache in self.ranks]
        known = [each.get(local.digest) for each, local in zip(agreed, locals_, strict=True)]
        offers = [
            Offer(local.digest, share.digest) if share else Offer(local.digest, b"", local.encoded)
            for local, share in zip(locals_, known, strict=True)
        ]
        self.in_full += sum(map(bool, (offer.data for offer in offers)))
        seen = []

        def assign(plans):
            seen.extend(plans)
            return assign_shares(plans, PlanOptions())

        whole = self.coordinator.plan(group, offers, assign)
        assert not seen or [each.digest for each in seen] == [each.digest for each in locals_]
        expected, _ = assign_shares(locals_, PlanOptions())
        answers = whole.answers([offer.share for offer in offers], whole.reports)
        for rank, answer in enumerate(answers[:lost]):
            self.in_full += bool(answer.data)
            share = known[rank]
            if answer.data:
                share = RankPlan.decode(Answer.decode(answer.encode()).data)
            assert share.digest == answer.digest == expected[rank].digest
            agreed[rank].put(locals_[rank].digest, share)
            self.ranks[rank].end(group, agreed[rank])


NUMBERS = st.tuples(*[st.integers(0, len(PLANS) - 1)] * WORLD)
STEPS = st.lists(
    st.tuples(NUMBERS, st.sampled_from([WORLD, WORLD, 0, 1]), st.sampled_from("ggh")), max_size=30
)


@settings(max_examples=30)
@given(STEPS)
def test_each_rank_gets_the_share_of_the_plan_that_it_has(steps):
    job = Job()
    for step in steps:
        job.save(*step)


@pytest.mark.parametrize("kept", [1, 2, KEPT])
def test_plans_in_turn_are_sent_once(kept):
    job = Job()
    for number in range(kept):
        job.save((number,) * WORLD)
    first, job.in_full = job.in_full, 0
    for number in [*range(kept)] * 3:
        job.save((number,) * WORLD)
    assert first == 2 * kept * WORLD
    assert job.in_full == 0


def test_groups_of_ranks_know_nothing_of_each_others_plans():
    job = Job()
    for group in ("g", "other", "g"):
        job.in_full = 0
        job.save(SAME, group=group)
    assert job.in_full == 0
    job.save(SAME, lost=1)
    job.save(SAME, group="other")
    assert job.in_full == 0, "what broke off was another group's"


def test_after_planning_that_broke_off_plans_are_sent_again():
    job = Job()
    for number in (0, 1):
        job.save((number,) * WORLD)
    job.save(SAME, lost=1)
    job.in_full = 0
    job.save((1,) * WORLD)
    assert job.in_full == 2 * (WORLD - 1)


def test_a_digest_that_the_coordinator_has_not_is_refused_by_name():
    job = Job()
    job.save(SAME)
    job.coordinator = PlanCache()
    with pytest.raises(DataStatesError, match="rank 0 offers a plan that the coordinator has not"):
        job.save(SAME)
    job.save(SAME)  # the failed planning told the ranks to send it again


def test_the_latest_used_are_kept():
    recent = Recent()
    for number in range(KEPT):
        recent.put(number, str(number))
    assert recent.get(0) == "0"
    recent.put("new", "new")
    assert [number for number in range(KEPT) if recent.get(number) is None] == [1]
    recent.put(0, "other")
    assert recent.get(0) == "other"
    assert recent.get("new") == "new"
