"""Jobs that save, take over, settle, delete and read below one root of an object store, in seeded schedules.

Every request is one step; before it, a process may stop or die, and the request may be refused, come late, be carried
out twice or lose its reply. ``STORE_INTERLEAVINGS=100000`` tries more schedules than ``make test-thorough``;
``STORE_INTERLEAVING=<seed>`` repeats one that failed.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from support.simulated.store_world import play
from support.tiers import tries

ONE = os.environ.get("STORE_INTERLEAVING")


@pytest.mark.parametrize("schedules", tries(40, 1_500, "STORE_INTERLEAVINGS"))
def test_whatever_comes_late_there_is_one_outcome_and_what_is_committed_is_whole(
    schedules, monkeypatch
):
    counts: Counter[str] = Counter()
    for seed in [int(ONE)] if ONE else range(schedules):
        with monkeypatch.context() as patch:
            counts.update(play(patch, seed).counts)
    print(f"{schedules} schedules: {dict(counts)}")
    if not ONE:
        assert counts["committed"] > schedules
        assert counts["failed"] > schedules / 10
        assert counts["settled"] > schedules / 10
        assert counts["deleted"] > schedules / 4
