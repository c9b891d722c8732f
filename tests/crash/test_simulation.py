"""The commit protocol under thousands of simulated schedules; and defects that it had, put back, are found.

``make simulate SEEDS=100000`` tries more than ``make test-thorough``; ``SIMULATION=<seed>`` repeats one that failed.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from support.simulated.simulation import Broken, World, play
from support.tiers import tries

from dcp_datastates.commit.vote import Outcome

ONE = os.environ.get("SIMULATION")


@pytest.mark.parametrize("seeds", tries(150, 1_000, "SIMULATIONS"))
def test_whatever_the_schedule_ranks_are_told_one_outcome_and_what_is_committed_is_whole(seeds):
    counts: Counter[Outcome] = Counter()
    for seed in [int(ONE)] if ONE else range(seeds):
        counts.update(play(seed).counts)
    print(f"{seeds} schedules: " + ", ".join(f"{n} {each.value}" for each, n in counts.items()))
    if not ONE:
        assert counts[Outcome.COMMITTED] > seeds
        assert counts[Outcome.FAILED] > seeds
        assert 0 < counts[Outcome.UNKNOWN] < seeds / 5


# Each defect that the protocol had, or that a rule of it keeps away, put back; and from which seed on to look for a
# schedule that shows it. If the simulation changes, others do: look from 0 on.
DEFECTS = {
    "guesses": 0,  # survivors take a coordinator that they miss for dead
    "settles by reading alone": 0,
    "believes the reply to a commit": 0,
    "takes a publication that hangs for failed": 200,
    "believes what a former job left in the store": 0,
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_defect_is_found_when_it_is_put_back(defect):
    def put_back(world: World) -> None:
        world.defect = defect

    def look() -> None:
        for seed in range(DEFECTS[defect], DEFECTS[defect] + 300):
            play(seed, put_back)

    with pytest.raises(Broken):
        look()


def test_a_schedule_is_repeated_by_its_seed():
    first, second = play(17), play(17)
    assert first.trace == second.trace
    assert first.trace != play(18).trace
