"""Which part of the replicas is compared in which turn, and what differences are told."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.state.plans import item, plan, replica, thing

from dcp_datastates._native import BLOCK_BYTES
from dcp_datastates.errors import ReplicasDifferError
from dcp_datastates.planning.balance import assign
from dcp_datastates.planning.comparison import (
    Comparison,
    Sums,
    Turn,
    forget_histories,
    in_turn,
)

EQUAL = [Sums.of({}).encode()] * 2
"""What two ranks tell."""


@pytest.fixture(autouse=True)
def anew():
    forget_histories()


SHAPES = st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 64)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 12), st.booleans())
def test_each_row_has_one_turn_which_is_the_same_on_all_ranks(shapes, of, split):
    tensors = [replica(f"t{n}", shape) for n, shape in enumerate(shapes)]
    plans = [plan(*tensors, thing("o")), plan(thing("o"), *reversed(tensors))]
    shares, _ = assign(plans, split=split)
    rows = Counter()
    largest = 0
    for number in range(of):
        parts = [in_turn(*each, Turn(number, of)) for each in zip(plans, shares, strict=True)]
        assert parts[0].keys() == parts[1].keys()
        names = [
            [
                (plans[rank].head.names[at], begin, end)
                for part in parts[rank].values()
                for at, begin, end in zip(part.items, part.begins, part.ends, strict=True)
            ]
            for rank in range(2)
        ]
        assert names[0] == names[1]
        nbytes = 0
        for name, begin, end in names[0]:
            assert begin < end
            rows.update((name, row) for row in range(begin, end))
            nbytes += (end - begin) * 4 * shapes[int(name[1:])][1]
        largest = max(largest, nbytes)
    assert set(rows.values()) == {1}
    assert len(rows) == sum(shape[0] for shape in shapes)
    whole = sum(4 * rows * columns for rows, columns in shapes)
    assert largest <= whole / of + 4 * (64 << 10), "the parts are about equal"


def test_empty_tensors_and_those_of_one_rank_have_no_turn():
    plans = [plan(replica("e", (0, 5)), item("own", (5, 5)), thing("o")), plan(thing("o"))]
    shares, _ = assign(plans)
    assert in_turn(plans[0], shares[0], Turn(0, 1)) == {}


def test_a_part_comes_again_until_it_is_equal_whatever_object_compares():
    plans = [plan(replica("t", (99, 99)))] * 2
    shares, _ = assign(plans)
    parts = []
    for save in range(8):
        comparison = Comparison(plans, shares)
        history = comparison.history(4)
        turn = history.choose()
        if save % 2:  # the others fail
            comparison.check(turn, history, EQUAL, f"/run/{save}")
            parts.append(turn.number)
    assert sorted(parts) == [0, 1, 2, 3]


def test_a_save_in_flight_at_a_load_does_not_count_for_what_follows():
    plans = [plan(replica("t", (99, 99)))] * 2
    comparison = Comparison(plans, assign(plans)[0])
    before = comparison.history(2)
    turn = before.choose()
    forget_histories()
    after = comparison.history(2)
    late = comparison.check(turn, before, EQUAL, "/run/1")
    assert [after.choose() for _ in range(2)] == [(0, 2), (1, 2)]
    assert late.plan != comparison.check(Turn(1, 2), after, EQUAL, "/run/2").plan


def test_of_many_plans_the_newest_are_kept():
    kept = []
    for rows in range(1, 200):
        plans = [plan(replica("t", (rows, 9)))] * 2
        comparison = Comparison(plans, assign(plans)[0])
        kept.append((comparison, comparison.history(2)))
        assert comparison.history(2) is kept[-1][1]
    assert [each.history(2) is history for each, history in kept[-64:]] == [True] * 64


def test_the_turns_of_a_plan_follow_each_other():
    plans = [plan(replica("t", (9, 9)))] * 2
    history = Comparison(plans, assign(plans)[0]).history(3)
    assert [history.choose() for _ in range(4)] == [(0, 3), (1, 3), (2, 3), (0, 3)]
    alone = [plan(item("t", (9, 9)))]
    history = Comparison(alone, assign(alone)[0]).history(3)
    assert [history.choose() for _ in range(2)] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("mib", [1, 3, 700])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_the_rank_and_the_bytes_that_differ_are_named(mib, bad):
    plans = [plan(replica("small", (9, 9)), replica("large", (256 * mib, 1024)))] * 3
    shares, _ = assign(plans)
    comparison = Comparison(plans, shares)
    history = comparison.history(1)
    turn = history.choose()
    parts = in_turn(plans[0], shares[0], turn)
    (large,) = [n for n, part in parts.items() if plans[0].head.names[part.items[0]] == "large"]
    sums = {n: np.arange(mib + 1, dtype="<u4") for n in parts}  # the header takes a part of a block
    told = [Sums.of({n: each.tobytes() for n, each in sums.items()}).encode()] * 3
    assert comparison.check(turn, history, told, "/run/step_1")[:2] == (0, 1)

    block = mib // 2
    sums[large][block] ^= 1
    told[bad] = Sums.of({n: each.tobytes() for n, each in sums.items()}).encode()
    with pytest.raises(ReplicasDifferError) as error:
        comparison.check(turn, history, told, "/run/step_2")
    text = str(error.value)
    first, second = (rank for rank in range(3) if rank != bad)
    assert text.startswith(f"rank {bad} ("), text
    assert f"and rank {first} (" in text, text
    assert f", rank {second} (" in text, text
    assert "equal in the save to /run/step_1." in text
    begin, end = text.split("'large', bytes ")[1].split(",")[0].split(" to ")
    per = -(-(mib + 1) // 256)
    assert int(begin) <= block * BLOCK_BYTES < int(end) <= int(begin) + per * BLOCK_BYTES, text
    assert "small" not in text
