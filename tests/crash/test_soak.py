"""A long run of saves, short by default: ``SOAK_SAVES=1000``, or ``make soak``, for the long one."""

from __future__ import annotations

import os
import random

import pytest
from crash.soak import soak, typical
from support.tiers import tries

SEED = int(os.environ.get("SOAK_SEED", random.randrange(1 << 30)))


@pytest.mark.timeout(260 + int(os.environ.get("SOAK_SAVES", "240")))
@pytest.mark.parametrize("saves", tries(60, 150, "SOAK_SAVES"))
def test_nothing_is_lost_and_nothing_grows(saves, tmp_path):
    print(f"SOAK_SAVES={saves} SOAK_SEED={SEED}")
    # One save in fifty; in a short run more, so that there is one of each kind.
    fault_every = min(50, max(2, saves // 12))
    # A short run is still warming up: the first fault of each kind touches memory that later ones use again.
    growth_bytes = (6 if saves >= 500 else 12) << 20
    outcome = soak(saves, fault_every, tmp_path, SEED, seconds=200 + saves)
    print(outcome)
    assert sum(figures.faults.total() for figures in outcome.ranks) >= outcome.drawn // 2
    for figures in outcome.ranks:
        assert figures.committed >= saves - outcome.drawn
        first, last = typical(figures.first), typical(figures.last)
        assert last.tasks <= first.tasks, outcome
        assert last.threads <= first.threads, outcome
        assert last.descriptors <= first.descriptors, outcome
        assert last.rss - first.rss < growth_bytes, outcome
