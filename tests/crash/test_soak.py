"""A long run of saves, short by default: ``SOAK_SAVES=1000``, or ``make soak``, for the long one."""

from __future__ import annotations

import os
import random

import pytest
from crash.soak import soak, typical

SAVES = int(os.environ.get("SOAK_SAVES", "60"))
FAULT_EVERY = min(50, max(2, SAVES // 12))
"""One save in fifty; in a short run more, so that there is one of each kind."""

SEED = int(os.environ.get("SOAK_SEED", random.randrange(1 << 30)))

GROWTH_BYTES = (6 if SAVES >= 500 else 12) << 20
"""A short run is still warming up: the first fault of each kind touches memory that later ones use again."""


@pytest.mark.timeout(60 + SAVES)
def test_nothing_is_lost_and_nothing_grows(tmp_path):
    print(f"SOAK_SAVES={SAVES} SOAK_SEED={SEED}")
    outcome = soak(SAVES, FAULT_EVERY, tmp_path, SEED, seconds=30 + SAVES)
    print(outcome)
    assert sum(figures.faults.total() for figures in outcome.ranks) >= outcome.drawn // 2
    for figures in outcome.ranks:
        assert figures.committed >= SAVES - outcome.drawn
        first, last = typical(figures.first), typical(figures.last)
        assert last.tasks <= first.tasks, outcome
        assert last.threads <= first.threads, outcome
        assert last.descriptors <= first.descriptors, outcome
        assert last.rss - first.rss < GROWTH_BYTES, outcome
