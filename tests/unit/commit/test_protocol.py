"""What ends a wait in the commit protocol, of what a rank has heard: the rest is for the simulation."""

from dcp_datastates.commit.protocol import DecisionFound, Lost, interruption
from dcp_datastates.commit.vote import Decision, Outcome, Reason

COMMITTED = DecisionFound(Decision(Outcome.COMMITTED))
GIVEN_UP = DecisionFound(Decision(Outcome.FAILED, given_up=True))
LOST = Lost(Reason("RankLostError", "rank 0"))


def test_a_rank_that_is_about_to_be_told_by_gloo_waits_for_that():
    assert interruption({}, COMMITTED, None) is None


def test_a_rank_whose_way_to_the_coordinator_may_be_broken_believes_the_store():
    assert interruption({}, COMMITTED, None, waits_in_vain=True) is COMMITTED
    assert interruption({}, COMMITTED, LOST) is COMMITTED


def test_what_was_given_up_or_forgotten_is_not_told_by_gloo():
    assert interruption({}, GIVEN_UP, None) is GIVEN_UP
    forgotten = DecisionFound(None)
    assert interruption({}, forgotten, None) is forgotten


def test_ranks_that_have_ended_a_round_are_missed_in_the_vote_and_not_when_told():
    missed = interruption({2: "", 3: "rank 0 is silent"}, None, None)
    assert isinstance(missed, Lost)
    assert missed.reason.message == "rank 2, 3 gave this save up: rank 0 is silent"
    assert interruption({2: ""}, None, None, telling=True) is None
    assert interruption({2: ""}, None, LOST) is LOST
