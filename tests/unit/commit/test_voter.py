"""A round's vote, of this rank and one more, without the tree between them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

from dcp_datastates.commit.vote import encode_vote
from dcp_datastates.commit.voter import Ballot
from dcp_datastates.ranks.meetings import Met
from dcp_datastates.results import Timeline
from dcp_datastates.storage.attempt import Attempt

NUMBER, ATTEMPT, PATH = 7, Attempt(1, 2), Path("/a/step-5")


def _voted(other):
    """What the votes of the coordinator and of ``other`` come to, and the ballot."""
    round_ = SimpleNamespace(
        number=NUMBER,
        attempt=ATTEMPT,
        path=PATH,
        report=lambda: b"mine",
        trace=lambda: b"",
        timeline=Timeline(),
    )
    voter = SimpleNamespace(
        tree=None, decisions=None, rank_set=SimpleNamespace(world=2, rank=0), voted=0
    )
    ballot = Ballot(voter, round_)
    ballot._together = lambda run: run(lambda: None)
    ballot._poll = lambda check, message, answers: Met(answers([message, b"+" + other])[0])
    return asyncio.run(ballot.vote(None)), ballot


def test_votes_for_one_save_agree():
    failed, ballot = _voted(encode_vote(NUMBER, ATTEMPT, PATH, 2, b"theirs"))
    assert failed is None
    assert ballot._reports == (b"mine", b"theirs")


def test_votes_for_different_saves_fail_it_and_no_rank_is_to_blame():
    failed, _ = _voted(encode_vote(NUMBER, Attempt(1, 3), PATH, 2))
    said = str(failed.error("there", 2))
    assert "the ranks vote for different saves" in said
    assert str(PATH) in said
    assert "rank 0 of 2" not in said
