"""The commit group runs rounds in the order of their numbers, in whatever order they are submitted."""

import itertools

import pytest

from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.place import EndedPart, Round
from dcp_datastates.errors import SaveFailedError
from dcp_datastates.process.futures import when_done
from dcp_datastates.ranks.rank_set import ALONE


@pytest.fixture
def group():
    made = CommitGroup(ALONE)
    yield made
    made.close()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_rounds_run_in_order(group, order):
    ended = []
    rounds = [Round(n, None, None, EndedPart(OSError("full")), timeout=60) for n in range(3)]
    for number, round_ in enumerate(rounds):
        when_done(round_.committed, lambda _, number=number: ended.append(number))
        group.announce(number)
    submitted = set()
    for number in order:
        group.submit(rounds[number])
        submitted.add(number)
        for held in submitted:
            if not set(range(held)) <= submitted:
                assert not rounds[held].committed.done()
    for round_ in rounds:
        assert isinstance(round_.committed.exception(60), OSError)
    assert ended == [0, 1, 2]


def test_a_round_after_the_end_fails(group):
    group.close()
    late = Round(0, None, None, EndedPart(OSError("full")), timeout=60)
    group.announce(0)
    group.submit(late)
    assert isinstance(late.committed.exception(60), SaveFailedError)
