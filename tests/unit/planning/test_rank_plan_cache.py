"""A rank's own plan cache: what it offers by digest, and what it keeps."""

from __future__ import annotations

import pytest
from support.state.plans import plan, thing

from dcp_datastates.errors import DataStatesError
from dcp_datastates.planning.balance import assign
from dcp_datastates.planning.exchange import Answer
from dcp_datastates.planning.rank_plan_cache import KnownPlan, RankPlanCache

PLANS = [plan(thing(f"o{number}")) for number in range(10)]
"""More than are kept."""


def _answer(local, in_full=True):
    (share,), _ = assign([local])
    return Answer(b"g", share.digest, share.encode() if in_full else None)


def _planned(cache, local, group="g"):
    """Plan a save to its end; whether the plan was offered in full."""
    cache.begin(group)
    known, offer = cache.offer(group, local)
    known = known or KnownPlan(local)
    known.take(_answer(local))
    cache.finish(group, known)
    return offer.data is not None


def test_a_plan_that_all_ranks_have_agreed_on_is_offered_by_digest():
    cache = RankPlanCache()
    assert _planned(cache, PLANS[0])
    cache.begin("g")
    known, offer = cache.offer("g", PLANS[0])
    assert known.plan is PLANS[0]
    assert (offer.digest, offer.data) == (PLANS[0].digest, None)
    assert offer.share == known.latest == _answer(PLANS[0]).digest


def test_groups_of_ranks_know_nothing_of_each_others_plans():
    cache = RankPlanCache()
    _planned(cache, PLANS[0])
    assert _planned(cache, PLANS[0], "other")
    assert not _planned(cache, PLANS[0])


def test_after_planning_that_broke_off_all_plans_of_the_group_are_sent_again():
    cache = RankPlanCache()
    for group in ("g", "other"):
        _planned(cache, PLANS[0], group)
        _planned(cache, PLANS[1], group)
    cache.begin("g")
    cache.offer("g", PLANS[0])
    assert _planned(cache, PLANS[1])
    assert not _planned(cache, PLANS[0], "other")


def test_planning_that_ends_without_a_plan_to_keep_did_not_break_off():
    cache = RankPlanCache()
    _planned(cache, PLANS[0])
    cache.begin("g")
    cache.finish("g", None)
    assert not _planned(cache, PLANS[0])


def test_of_many_plans_the_latest_used_are_kept_and_the_offer_says_which():
    cache = RankPlanCache()
    for local in PLANS[:8]:
        _planned(cache, local)
    assert not _planned(cache, PLANS[0])  # the oldest is now the second
    cache.begin("g")
    _, offer = cache.offer("g", PLANS[8])
    assert offer.keep == tuple(local.digest for local in (*PLANS[2:8], PLANS[0]))


def test_a_share_is_known_by_its_digest_once_it_was_sent():
    known = KnownPlan(PLANS[0])
    share = known.take(_answer(PLANS[0]))
    assert share.items == PLANS[0].write_items()
    assert known.take(_answer(PLANS[0], in_full=False)) is share


def test_a_share_that_the_rank_has_not_is_refused():
    with pytest.raises(DataStatesError, match="a share that this rank has not"):
        KnownPlan(PLANS[0]).take(Answer(b"", b"d" * 16, None))
