"""What the ranks tell each other to agree on a save, and what they conclude."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_datastates.commit.joint_steps import StepEnd
from dcp_datastates.errors import CheckpointSkipped, ConfigurationError, SaveFailedError
from dcp_datastates.ranks.meetings import Met
from dcp_datastates.saving.agreement import Assignment, Proposal, agree
from dcp_datastates.saving.operation import LEFT_OUT, Ticket
from dcp_datastates.storage.attempt import Attempt

TEXT = st.text(st.characters(codec="utf-8"))
NUMBERS = st.integers(0, (1 << 63) - 1)
MESSAGES = st.one_of(
    st.builds(Proposal, TEXT, TEXT, NUMBERS, st.binary()),
    st.builds(
        Assignment,
        st.none() | st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS),
        st.binary(),
        TEXT,
        st.lists(TEXT, max_size=3).map(tuple),
    ),
)


@given(message=MESSAGES)
def test_a_message_comes_back(message):
    assert type(message).decode(message.encode()) == message


@given(message=MESSAGES, data=st.data())
def test_a_message_that_is_cut_off_is_refused(message, data):
    encoded = message.encode()
    with pytest.raises(ValueError):
        type(message).decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


class _Planning:
    """Each rank proposes its name, and is assigned all of them."""

    was_left_out = False

    def left_out(self):
        self.was_left_out = True

    def assign(self, proposals):
        return [b"+".join(proposals)] * len(proposals)


def _refused(error):
    def propose():
        raise error

    return None, propose


def _meaning(path="c", kind="k", planning=None):
    return planning or _Planning(), Proposal(path, kind, plan=path.encode()).encode


def test_a_long_error_is_told_in_short():
    """All ranks may have it, and the first one reads it of each."""
    sent = []

    def meet(message, answer):
        sent.append(message)
        return Met(answer([message])[0])

    error = SaveFailedError("no" * (1 << 20))
    _, end = agree(meet, *_refused(error), lambda: None)
    assert end.own is error
    assert len(sent[0]) < 1 << 12


def _outcomes(*proposals, draw=lambda: Ticket(Attempt(1, 2), 3)):
    """What :func:`agree` returns on each rank; or that the save is left out there."""
    world = len(proposals)
    sent, answered, both = [b""] * world, [b""] * world, threading.Barrier(world)

    def run(rank):
        def meet(message, answer):
            sent[rank] = message
            both.wait(30)
            if rank == 0:
                answered[:] = answer(sent)
            both.wait(30)
            return Met(answered[rank])

        try:
            return agree(meet, *proposals[rank], draw)
        except CheckpointSkipped as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


def test_ranks_that_mean_the_same_save_get_one_ticket_and_their_shares():
    for found in _outcomes(_meaning(), _meaning(), _meaning()):
        assert found == (Assignment((1, 2, 3), b"c+c+c"), StepEnd(ANY))


@pytest.mark.parametrize(
    ("different", "word"),
    [(_meaning(path="d"), "left out a call"), (_meaning(kind="l"), "one class on all ranks")],
)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_that_mean_different_saves_are_all_told_so(different, word, rank):
    proposals = [_meaning()] * 3
    proposals[rank] = different
    for found, end in _outcomes(*proposals):
        told = end.failed.error("'c'", 3)
        assert isinstance(told, SaveFailedError)
        assert word in str(told)
        assert set(found.paths) == {Proposal.decode(propose()).path for _, propose in proposals}


@pytest.mark.parametrize("rank", [0, 1])
def test_one_ranks_error_is_told_to_all_with_its_type_and_is_the_cause_there(rank):
    error = ConfigurationError("no such option")
    proposals = [_meaning(), _meaning()]
    proposals[rank] = _refused(error)
    for at, (_, end) in enumerate(_outcomes(*proposals)):
        assert isinstance(end.failed.error("'c'", 2), ConfigurationError)
        assert f"rank {rank} of 2: no such option" in str(end.failed.error("'c'", 2))
        assert end.own is (error if at == rank else None)


def test_an_error_of_the_coordinator_is_told_to_all():
    def draw():
        raise OSError("no space")

    for _, end in _outcomes(_meaning(), _meaning(), draw=draw):
        assert "rank 0 of 2: OSError: no space" in str(end.failed.error("'c'", 2))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_one_rank_leaves_out_is_skipped_by_all_and_the_coordinator_has_taken_no_plan(
    rank,
):
    planning = _Planning()
    proposals = [_meaning(planning=planning)] * 2
    proposals[rank] = _refused(CheckpointSkipped(LEFT_OUT))
    outcomes = _outcomes(*proposals)
    assert [type(each) for each in outcomes] == [CheckpointSkipped] * 2
    assert planning.was_left_out


def test_a_rank_alone_gets_its_own_error():
    error = ValueError("mine")
    ((_, end),) = _outcomes(_refused(error))
    assert end.failed.error("'c'", 1, end.own) is error
