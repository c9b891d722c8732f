"""What ``make test`` asks and what it leaves to ``make test-thorough``: by two helpers, and by nothing else. What each
third of the latter asks.
"""

import re
import subprocess
from pathlib import Path

import pytest
from support.tiers import SHARES, part_of, sampled, tries

ROOT = Path(__file__).parents[1]


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


@pytest.mark.parametrize("keep", [[], ["d"], ["a", "d"], lambda value: False])
def test_a_sample_of_nothing_and_one_of_what_is_not_there_are_refused(keep):
    with pytest.raises(AssertionError):
        sampled(["a", "b", "c"], keep)


def test_tries(monkeypatch):
    assert _tiers(tries(3, 100, "HOW_MANY_TRIES")) == ([(3,)], [(100,)])
    monkeypatch.setenv("HOW_MANY_TRIES", "7")
    assert _tiers(tries(3, 100, "HOW_MANY_TRIES")) == ([(7,)], [])


def test_no_test_is_marked_by_hand_so_that_each_is_asked_in_make_test():
    marking = {
        path.name
        for folder in ("tests", "integration")
        for path in (ROOT / folder).rglob("*.py")
        if ".thorough" in path.read_text()
    }
    assert marking == {"tiers.py", "test_tiers.py"}


def test_every_item_is_in_one_third_and_each_third_has_its_share():
    items = [
        f"tests/test_{file}.py::test_it[{number}]" for file in range(50) for number in range(200)
    ]
    parts = [part_of(item) for item in items]
    assert parts == [part_of(item) for item in items]
    found = [parts.count(part) / len(parts) for part in (1, 2, 3)]
    assert found == pytest.approx(list(SHARES), abs=0.02)
    assert sum(found) == pytest.approx(1)


def _asked(*arguments):
    """What `make test-thorough` would run, but for the set-up: tests and static analysis."""
    command = ["make", "--dry-run", "--always-make", "test-thorough", *arguments]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    lines = said.replace("\\\n", " ").splitlines()
    return {
        " ".join(line.split())
        for line in lines
        if re.search("-m pytest |ctest --|run-clang-tidy", line)
    }


def test_the_thirds_of_what_is_not_pytests_are_disjoint_and_are_all_together():
    thirds = [_asked(f"PART={part}") for part in (1, 2, 3)]
    shared = {
        re.sub(r" --part \d", "", line) for third in thirds for line in third if "--part" in line
    }
    assert len(shared) == 1
    own = [{line for line in third if "--part" not in line} for third in thirds]
    assert all(own)
    assert sum(map(len, own)) == len(set().union(*own))
    in_each_landing = {line for line in _asked() if "native-tsan" in line}
    assert in_each_landing
    assert set().union(*own) | shared == _asked() - in_each_landing


def test_a_part_that_is_none_is_refused():
    with pytest.raises(subprocess.CalledProcessError) as refused:
        _asked("PART=4")
    assert "PART is 1, 2 or 3, not 4" in refused.value.stderr


def test_the_files_of_tests_that_make_names_are_there():
    named = re.findall(r"\b(?:tests|integration)/[\w/]+\.py", (ROOT / "Makefile").read_text())
    assert [each for each in named if not (ROOT / each).exists()] == []
