"""What ``make test`` asks and what it leaves to ``make test-thorough``: by two helpers, and by nothing else."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from support.tiers import sampled, tries


def _tiers(params):
    """What is in ``make test``, and what in thorough."""
    few, many = [], []
    for param in params:
        (many if "thorough" in [mark.name for mark in param.marks] else few).append(param.values)
    return few, many


def test_what_is_named_is_kept_and_nothing_is_lost():
    assert _tiers(sampled(["a", "b", "c"], keep=["b"])) == ([("b",)], [("a",), ("c",)])
    assert _tiers(sampled(range(5), keep=range(2))) == ([(0,), (1,)], [(2,), (3,), (4,)])
    assert _tiers(sampled(range(3), keep=lambda value: value == 1)) == ([(1,)], [(0,), (2,)])


def test_a_tuple_is_for_several_names_and_a_param_is_what_it_says():
    pairs = itertools.product("ab", [0, 1])
    assert _tiers(sampled(pairs, keep=[("a", 1)])) == ([("a", 1)], [("a", 0), ("b", 0), ("b", 1)])
    shapes = map(pytest.param, [(4, 1), (2, 2)])
    assert _tiers(sampled(shapes, keep=[(2, 2)])) == ([((2, 2),)], [((4, 1),)])


def test_ids_and_marks_stay():
    slow = pytest.mark.timeout(9)
    named = [pytest.param(1, id="one", marks=slow), pytest.param(2, id="two", marks=slow)]
    first, second = sampled(named, keep=["two"])
    assert (first.id, second.id) == ("one", "two")
    assert [mark.name for mark in first.marks] == ["timeout", "thorough"]
    assert [mark.name for mark in second.marks] == ["timeout"]


@pytest.mark.parametrize("keep", [[], ["d"], ["a", "d"], lambda value: False])
def test_a_sample_of_nothing_and_one_of_what_is_not_there_are_refused(keep):
    with pytest.raises(AssertionError):
        sampled(["a", "b", "c"], keep)


def test_tries(monkeypatch):
    assert _tiers(tries(3, 100, "HOW_MANY_TRIES")) == ([(3,)], [(100,)])
    monkeypatch.setenv("HOW_MANY_TRIES", "7")
    assert _tiers(tries(3, 100, "HOW_MANY_TRIES")) == ([(7,)], [])


def test_no_test_is_marked_by_hand_so_that_each_is_asked_in_make_test():
    root = Path(__file__).parents[1]
    marking = {
        path.name
        for folder in ("tests", "integration")
        for path in (root / folder).rglob("*.py")
        if ".thorough" in path.read_text()
    }
    assert marking == {"tiers.py", "test_tiers.py"}
