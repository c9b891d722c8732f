"""The plan cache of the ranks and of the coordinator: what is named by its digest is what was meant.

Random saves of three ranks: their plans change and come back, planning breaks off at any point, a process starts anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.state.chunks import Box
from support.state.plans import item, plan, replica, thing

from dcp_datastates.errors import DataStatesError
from dcp_datastates.format.metadata import decode
from dcp_datastates.planning.balance import assign
from dcp_datastates.planning.column_planning import PlanOptions, assign_shares
from dcp_datastates.planning.messages import Answer, Offer, RankPlan, RankReport, Report
from dcp_datastates.planning.part_files import KEPT, Recent
from dcp_datastates.planning.plan_cache import GlobalPlan, PlanCache
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.claims import Claim

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

    def save(self, numbers, lost=WORLD, group="g"):
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


# ---- the metadata that all ranks' reports come to ----------------------------------------------

PLANNED = [
    plan(item("a", (4, 2), Box((0, 0), (1, 2))), thing("o"), item("b", (3,))),
    plan(item("a", (4, 2), Box((1, 0), (3, 2)))),
    plan(),
]
ATTEMPT = Attempt(1 << 60, 7)
LENGTHS = [[8, 5, 12], [24], []]
"""Bytes of each rank's items, in their order."""


def _global_plan():
    return GlobalPlan(PLANNED, *assign(PLANNED))


def _report(rank, start=4096):
    """One file with the rank's items one behind the other."""
    sizes = np.array(LENGTHS[rank], np.int64)
    if not len(sizes):
        return Report((), *(np.zeros(0, np.int64) for _ in range(3)))
    end = int(start + sizes.sum())
    table = end + -end % 4
    file = (
        f"r{rank}.safetensors",
        table + 8,
        table,
    )  # two checksums: of one MiB, and of themselves
    return Report((file,), np.zeros_like(sizes), start + np.cumsum(sizes) - sizes, sizes)


def _sent(reports, by_digest=()):
    return [
        RankReport(each.digest, data=b"" if rank in by_digest else each.encode()).encode()
        for rank, each in enumerate(reports)
    ]


def _composed(whole, sent, known=None):
    known = whole.reports if known is None else known
    return whole.compose(known, {}, sent, Claim(ATTEMPT, None), None)


def _places(composed):
    """By name: the file, offset and length of each chunk or object."""
    table = decode(composed, Path("m"))
    placement = table.placement
    columns = (placement.files, placement.begins, placement.lengths)
    files, offsets, lengths = (column.tolist() for column in columns)
    rows = zip(table.catalog.owners().tolist(), files, offsets, lengths, strict=True)
    found = {}
    for name, file, offset, length in rows:
        place = (table.placement.paths[file], offset, length)
        found.setdefault(table.catalog.names[name], []).append(place)
    return found


def test_every_item_is_where_its_rank_reports_it_below_the_attempt():
    composed = _composed(_global_plan(), _sent([_report(rank) for rank in range(3)]))
    zero, one = (f"{ATTEMPT.name}/r{rank}.safetensors" for rank in (0, 1))
    assert _places(composed) == {
        "a": [(zero, 4096, 8), (one, 4096, 24)],
        "o": [(zero, 4104, 5)],
        "b": [(zero, 4109, 12)],
    }


def test_a_report_by_digest_is_the_one_that_the_coordinator_has_named():
    whole = _global_plan()
    first, moved = ([_report(rank, start) for rank in range(3)] for start in (4096, 8192))
    assert {each.report for each in whole.answers([b""] * 3, whole.reports)} == {b""}
    in_full = _places(_composed(whole, _sent(first)))
    named = whole.reports
    assert [each.report for each in whole.answers([b""] * 3, named)] == [r.digest for r in first]
    assert _places(_composed(whole, _sent(moved))) != in_full
    again = _composed(whole, _sent(first, by_digest=(0, 1, 2)), named)
    assert _places(again) == in_full, "though a report of another save has come meanwhile"


def test_a_digest_that_is_not_known_is_refused_and_names_the_rank():
    reports = [_report(rank) for rank in range(3)]
    whole = _global_plan()
    for _ in range(2):
        with pytest.raises(DataStatesError, match="rank 1 sent the digest of a report"):
            _composed(whole, _sent(reports, by_digest=(1,)))
        _composed(_global_plan(), _sent(reports))  # whose reports are its own
    _composed(whole, _sent([_report(rank, 8192) for rank in range(3)]))
    with pytest.raises(DataStatesError, match="rank 1 sent the digest of a report"):
        _composed(whole, _sent(reports, by_digest=(1,)))


def test_a_rank_that_has_its_share_is_named_it():
    whole = _global_plan()
    digests = [share.digest for share in whole.shares]
    answers = whole.answers([digests[0], digests[0], b""], whole.reports)
    assert [each.digest for each in answers] == digests
    assert [bool(each.data) for each in answers] == [False, True, True]
