"""The commit protocol under thousands of simulated schedules; and defects that it had, put back, are found.

In every second schedule, storage is an object store, else a directory. ``make simulate SEEDS=100000`` tries more than
``make test-thorough``; ``SIMULATION=<seed>`` repeats one that failed.
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
def test_whatever_the_schedule_ranks_are_told_one_outcome_and_what_is_named_is_whole(seeds):
    counts: Counter[Outcome] = Counter()
    for seed in [int(ONE)] if ONE else range(seeds):
        counts.update(play(seed).counts)
    print(f"{seeds} schedules: " + ", ".join(f"{n} {each.value}" for each, n in counts.items()))
    if not ONE:
        assert counts[Outcome.COMMITTED] > seeds
        assert counts[Outcome.FAILED] > seeds
        assert 0 < counts[Outcome.UNKNOWN] < seeds / 5


# Each defect that the protocol had, or that a rule of it keeps away, put back; and from which seeds on to look for a
# schedule that shows it, in a directory and in a store (None: it is no defect there). If the simulation changes, others
# do: look from 0 on.
DEFECTS = {
    "attempts are ordered by clocks": ({"orders_by_clocks": True}, 0, 0),
    "a claim does not look at the checkpoints beside it": ({"looks_beside": False}, 0, 0),
    "survivors take a coordinator that they miss for dead": ({"guesses": True}, 0, 0),
    "settling only reads": ({"withdraws_when_settling": False}, 0, 0),
    "older attempts can be committed late": ({"withdraws_older": False}, 1183, 923),
    "the reply to a commit is believed": ({"withdraws_on_error": False}, 0, 0),
    "a publication that hangs counts as failed": ({"settles_what_hangs": False}, 526, 0),
    "a job believes what a former one left in the store": ({"believes_former_jobs": True}, 0, 0),
    "two creations succeed": ({"creates_once": False}, 0, 0),
    "a withdrawal that came after a deletion counts": (
        {"looks_for_data": False, "deletes": 0.02, "false_losses": 0.01},
        0,
        0,
    ),
    "the cleanup removes withdrawals": ({"keeps_marks": False}, None, 0),
    "a reader trusts .metadata": ({"trusts_the_pointer": True}, 0, 0),
    "old checkpoints are deleted although their order is in doubt": (
        {"retains_in_doubt": True, "retains": True},
        0,
        0,
    ),
}


@pytest.mark.parametrize(
    ("defect", "place"),
    [
        (defect, place)
        for defect, (_, *firsts) in DEFECTS.items()
        for place, first in zip(("directory", "store"), firsts, strict=True)
        if first is not None
    ],
)
def test_each_defect_is_found_when_it_is_put_back(defect, place):
    changes, *firsts = DEFECTS[defect]
    in_store = place == "store"
    first = firsts[in_store]

    def put_back(world: World) -> None:
        world.in_store = in_store
        for name, value in changes.items():
            assert hasattr(world, name)
            setattr(world, name, value)

    def look() -> None:
        for seed in range(first, first + 300):
            play(seed, put_back)

    with pytest.raises(Broken):
        look()


def test_a_schedule_is_repeated_by_its_seed():
    first, second = play(17), play(17)
    assert first.trace == second.trace
    assert first.trace != play(18).trace
